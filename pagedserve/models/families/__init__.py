"""The model families, one file each. Adding a file that declares FAMILY adds a family; nothing else names them."""

from __future__ import annotations

import importlib
import pkgutil

from pagedserve.models.family import Family

FAMILIES: tuple[Family, ...] = tuple(
    importlib.import_module(f"{__name__}.{module.name}").FAMILY for module in pkgutil.iter_modules(__path__)
)
