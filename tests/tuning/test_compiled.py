"""Fused kernels that are compiled: with a real compiler, one that is broken, one that hangs, and none."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from kvr_mpi.model.fused import GATES, is_same, rms_norm
from kvr_mpi.tuning import compiled
from kvr_mpi.tuning.compile_program import NORM
from kvr_mpi.tuning.compiled import FAILED, open_compiled

NAMES = [NORM, "silu", "gelu"]

pytestmark = pytest.mark.skipif(compiled._LOADER is None, reason="this torch loads no compiled packages")


def with_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str | None) -> None:
    """Have nothing on PATH but a g++ that is a script."""
    folder.mkdir()
    if script is not None:
        (folder / "g++").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}")
    monkeypatch.delenv("CXX", raising=False)


def ends(pid: int) -> bool:
    """Whether a process that was killed is gone, once the system has got round to it."""
    for _ in range(300):
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.1)
    return False


def try_to_open(cache: Path, limit_s: float = 300.0) -> tuple[dict[str, compiled.Compiled], list[str]]:
    said: list[str] = []
    return open_compiled(cache, torch.float32, [NORM], said.append, compiles=True, limit_s=limit_s), said


@pytest.mark.slow
def test_without_a_compiler_eager_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_compiler(monkeypatch, tmp_path / "bin", None)
    found, said = try_to_open(tmp_path / "cache")
    assert found == {} and "the compiler failed" in said[1] and "compiler" in said[1].lower()
    (folder,) = (tmp_path / "cache" / "kernels").iterdir()
    assert [each.name for each in folder.iterdir()] == [FAILED]
    found, said = try_to_open(tmp_path / "cache")  # and is not asked for again
    assert found == {} and len(said) == 1 and str(folder / FAILED) in said[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "limit_s", "words"),
    [("echo no licence >&2; exit 1", 300.0, "the compiler failed"), ("/bin/sleep 1000", 60.0, "stopped after 60 s")],
)
def test_a_compiler_that_fails_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit_s: float, words: str
) -> None:
    with_compiler(monkeypatch, tmp_path / "bin", f"echo $$ >> {tmp_path}/pids; {script}")
    found, said = try_to_open(tmp_path / "cache", limit_s)
    assert found == {} and words in said[1]
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert pids and all(map(ends, pids))


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("")
    found, said = try_to_open(tmp_path)
    assert found == {} and len(said) == 1 and "cannot be written" in said[0]


def test_nothing_is_compiled_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert open_compiled(tmp_path, torch.float32, NAMES, pytest.fail, compiles=False) == {}
    assert open_compiled(tmp_path, torch.float16, NAMES, pytest.fail, compiles=True) == {}
    assert list(tmp_path.iterdir()) == []


def plant(cache: Path, *, digest: bool = True, mode: int = 0o600) -> Path:
    """Put something into the place of a kernel."""
    folder = compiled.folder_of(cache, f"{torch.float32}")
    folder.mkdir(parents=True, mode=0o700)
    file = folder / f"{NORM}.pt2"
    file.write_bytes(b"no package")
    file.chmod(mode)
    file.with_suffix(".xxh3").write_text(compiled._digest(file) if digest else "0" * 32)
    return file


@pytest.mark.parametrize(("digest", "mode", "why"), [(False, 0o600, "is damaged"), (True, 0o666, "others can write")])
def test_code_that_may_be_somebody_else_s_is_not_run(tmp_path: Path, digest: bool, mode: int, why: str) -> None:
    plant(tmp_path, digest=digest, mode=mode)
    found, said = try_to_open(tmp_path)
    assert found == {} and len(said) == 1 and why in said[0] and "remove it" in said[0]


def test_code_behind_a_link_is_not_run(tmp_path: Path) -> None:
    file = plant(tmp_path)
    os.rename(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    found, said = try_to_open(tmp_path)
    assert found == {} and "is a link" in said[0]


def test_a_file_that_is_no_package_is_said(tmp_path: Path) -> None:
    plant(tmp_path)
    found, said = try_to_open(tmp_path)
    assert found == {} and len(said) == 1 and "is not used" in said[0]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_for_real_they_are_exact_at_any_size(tmp_path: Path, dtype: torch.dtype) -> None:
    said: list[str] = []
    found = open_compiled(tmp_path, dtype, NAMES, said.append, compiles=True)
    assert set(found) == set(NAMES), said
    again = open_compiled(tmp_path, dtype, NAMES, pytest.fail, compiles=False)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows, features in ((1, 1), (1, 576), (7, 33), (512, 576), (3000, 64)):
                one, other = torch.randn(2, rows, features).to(dtype)
                weight, epsilon = torch.rand(features), torch.tensor([1e-6])
                with torch.inference_mode():
                    assert is_same(rms_norm(one, weight, epsilon), again[NORM](one, weight, epsilon))
                    for name, gate in GATES.items():
                        assert is_same(gate(one.view(-1), other.view(-1)), again[name](one.view(-1), other.view(-1)))
    finally:
        torch.set_num_threads(threads)
