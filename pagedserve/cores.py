"""How many cores this process may use: CPU affinity and the cgroup's CPU quota, whichever is less. Reads files only."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple


class Cores(NamedTuple):
    """A number of cores and, in words, where it comes from."""

    number: int
    reason: str


def usable_cores(
    *, affinity: int | None = None, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> Cores:
    """The cores that a team may keep busy; a fraction of a core in the quota is not used, but one core always is."""
    if affinity is None:
        affinity = len(os.sched_getaffinity(0))
    quota = _cgroup_quota(proc / "self" / "cgroup", cgroups)
    if quota is None:
        return Cores(affinity, f"affinity {affinity}, no cgroup quota")
    reason = f"affinity {affinity}, cgroup quota {quota:g}"
    return Cores(max(1, min(affinity, math.floor(quota))), reason)


def _cgroup_quota(membership: Path, root: Path) -> float | None:
    """The tightest CPU quota, in cores, of this process's cgroup and those above it; None when there is none."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "cpu", _quota_v1
        else:
            continue
        # Inside a container the path may be the host's and not exist here: then only the root says something.
        folder = base / path.lstrip("/")
        quotas += [read(place) for place in (folder, *folder.parents) if place.is_relative_to(base)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if limit <= 0 else limit / period
