"""What a result was measured on: the machine, the commit, the versions. Reads files and runs git; changes nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pagedserve.cores import usable_cores

_FOLDER = Path(__file__).parent


def circumstances() -> dict[str, Any]:
    """date, commit and machine of a result."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "cpu": _first_line("/proc/cpuinfo", "model name"),
            "cores": usable_cores().number,
            "memory": _first_line("/proc/meminfo", "MemTotal"),
            "caches": _caches(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "numba": version("numba"),
            "load_average": os.getloadavg()[0],  # before the run: what else the machine was doing
        },
    }


def commit() -> str:
    """The commit of the sources, with "-dirty" when tracked files differ from it; "unknown" outside a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=_FOLDER,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _first_line(path: str, key: str) -> str:
    """The value of the first "key : value" line of a file, or "unknown"."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "unknown")


def _caches() -> dict[str, str]:
    """Size of each cache of the first core, by level and kind."""
    sizes = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = (folder / "level").read_text().strip(), (folder / "type").read_text().strip()
        sizes[f"L{level} {kind.lower()}"] = (folder / "size").read_text().strip()
    return sizes
