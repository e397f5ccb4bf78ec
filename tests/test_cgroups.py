"""CPU quotas of control groups, as files of version 1 and 2 give them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvr_mpi import cgroups
from kvr_mpi.cli.environment import read_environment


def groups_with(folder: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Make a tree of control groups; return the file with this process's groups, and the root."""
    for name, text in files.items():
        (folder / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "root" / name).write_text(f"{text}\n")
    (folder / "own").write_text(f"{own}\n")
    return folder / "own", folder / "root"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/pod/task", {"pod/cpu.max": "200000 100000", "pod/task/cpu.max": "max 100000"}, 2),
        ("0::/pod/task", {"pod/cpu.max": "300000 100000", "pod/task/cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "5000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/gone", {}, None),
        ("0::/", {"cpu.max": "nonsense"}, None),
        ("4:cpu,cpuacct:/job\n0::/", {"cpu/job/cpu.cfs_quota_us": "250000", "cpu/job/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpu:/docker/7\n0::/", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu:/job", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, None),
        ("4:cpuset:/job", {"cpu/job/cpu.cfs_quota_us": "100000", "cpu/job/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_least_quota_of_all_groups_counts_in_whole_cores(
    tmp_path: Path, own: str, files: dict[str, str], cores: int | None
) -> None:
    assert cgroups.cpu_quota(*groups_with(tmp_path, own, files)) == cores


def test_no_process_uses_more_threads_than_its_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, root = groups_with(tmp_path, "0::/", {"cpu.max": "200000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert cgroups.usable_cores(own, root) == 2
    (root / "cpu.max").write_text("6400000 100000\n")
    assert cgroups.usable_cores(own, root) == 8, "a quota adds no cores"
    monkeypatch.setattr(cgroups, "cpu_quota", lambda *files: 3)
    assert read_environment({}).cores == 3
