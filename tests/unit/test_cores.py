"""Usable cores: affinity and cgroup quota, version 1 and 2, at every level of the hierarchy."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedserve.cores import Cores, usable_cores


def _place(tmp_path: Path, membership: str, files: dict[str, str]) -> dict[str, Path]:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(membership)
    for name, text in files.items():
        (tmp_path / "cg" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cg" / name).write_text(text)
    return {"proc": tmp_path / "proc", "cgroups": tmp_path / "cg"}


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, Cores(8, "affinity 8, no cgroup quota")),
        ("0::/\n", {"cpu.max": "max 100000\n"}, Cores(8, "affinity 8, no cgroup quota")),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, Cores(2, "affinity 8, cgroup quota 2.5")),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, Cores(1, "affinity 8, cgroup quota 0.5")),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, Cores(8, "affinity 8, cgroup quota 16")),
        (
            "0::/a/b\n",
            {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n", "cpu.max": "400000 100000\n"},
            Cores(3, "affinity 8, cgroup quota 3"),
        ),
        (
            "4:memory:/x\n3:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "200000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            Cores(2, "affinity 8, cgroup quota 2"),
        ),
        (
            "3:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            Cores(8, "affinity 8, no cgroup quota"),
        ),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, membership: str, files: dict[str, str], expected: Cores) -> None:
    assert usable_cores(affinity=8, **_place(tmp_path, membership, files)) == expected


def test_without_cgroups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(affinity=3, proc=tmp_path, cgroups=tmp_path) == Cores(3, "affinity 3, no cgroup quota")
