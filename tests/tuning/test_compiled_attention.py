"""The attention kernel is compiled once: with a real compiler, one that is broken, one that hangs, and none."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import pytest

from kvr_mpi.model.cpu_attention import KernelLibrary
from kvr_mpi.tuning import compiled_attention
from kvr_mpi.tuning.compiled_attention import COMPILERS, FAILED, find_compiler, keep_made, open_attention
from kvr_mpi.tuning.identity import processor_key

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler")


def try_to_open(cache: Path, limit_s: float = 60.0, *, compiles: bool = True) -> tuple[KernelLibrary | None, list[str]]:
    said: list[str] = []
    return open_attention(cache, said.append, compiles=compiles, limit_s=limit_s), said


def library_in(cache: Path) -> Path:
    (file,) = cache.glob("kernels/*/attention.so")
    return file


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a cache with the kernel in it."""
    assert try_to_open(tmp_path)[0] is not None
    return tmp_path


@needs_compiler
def test_it_is_compiled_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere")
    found, said = try_to_open(kept)
    assert found is not None and said == []
    assert sorted(each.name for each in library_in(kept).parent.iterdir()) == ["attention.so", "attention.xxh3"]


@needs_compiler
def test_another_source_or_processor_is_compiled_anew(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_attention, "processor_key", lambda: "another processor")
    assert try_to_open(kept, compiles=False) == (None, [])


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instructions of x86-64")
def test_a_compiler_with_options_makes_another_library(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{find_compiler()} -march=x86-64-v3")
    assert try_to_open(kept, compiles=False) == (None, [])
    found, said = try_to_open(kept)
    assert found is not None and said == [] and len([*kept.glob("kernels/*/attention.so")]) == 2
    assert found.multiple == 16  # heads of two vectors of eight numbers


@needs_compiler
def test_a_compiler_may_be_called_through_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"env {find_compiler()}")
    assert try_to_open(tmp_path)[0] is not None
    monkeypatch.setenv("CXX", " ")
    assert find_compiler() == find_compiler({}), "no program is named"


def test_timings_hold_for_the_instructions_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = processor_key()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert processor_key() != usual


@pytest.mark.parametrize(
    ("script", "limit_s", "words"),
    [
        ("echo 'attention.cpp:1: error: no licence' >&2; exit 1", 60.0, "no licence"),
        ("exec /bin/sleep 1000", 1.0, "stopped after 1 s"),
        ("exit 0", 60.0, "did not create a file"),
    ],
)
def test_without_a_compiler_that_works_torch_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit_s: float, words: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "g++").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin" / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
    monkeypatch.delenv("CXX", raising=False)
    found, said = try_to_open(tmp_path / "cache", limit_s)
    assert found is None and len(said) == 1 and words in said[0] and "so torch's is used" in said[0]
    (folder,) = (tmp_path / "cache" / "kernels").iterdir()
    assert [each.name for each in folder.iterdir()] == [FAILED]
    found, said = try_to_open(tmp_path / "cache")  # and is not asked for again
    assert found is None and len(said) == 1 and str(folder / FAILED) in said[0] and words in said[0]


@needs_compiler
def test_a_compiler_that_is_not_there_is_found_when_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.delenv("CXX", raising=False)
    with monkeypatch.context() as none:
        none.setenv("PATH", f"{tmp_path / 'bin'}")
        found, said = try_to_open(tmp_path / "cache")
    assert found is None and len(said) == 1 and "no compiler found (c++, g++, clang++)" in said[0]
    assert try_to_open(tmp_path / "cache")[0] is not None


def test_a_compiler_that_is_named_and_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    found, said = try_to_open(tmp_path)
    assert found is None and "/nowhere/c++ cannot be run" in said[0]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("")
    found, said = try_to_open(tmp_path)
    assert found is None and len(said) == 1 and "cannot be written" in said[0]


def test_a_rank_that_is_not_to_compile_does_not(tmp_path: Path) -> None:
    assert try_to_open(tmp_path, compiles=False) == (None, [])
    assert list(tmp_path.iterdir()) == []


def put(file: Path, content: bytes) -> None:
    """Put a file in place of another, which may be mapped."""
    file.unlink()
    file.write_bytes(content)
    file.chmod(0o600)


@needs_compiler
def test_code_that_is_damaged_or_not_ours_is_not_run(kept: Path) -> None:
    file = library_in(kept)
    whole = file.read_bytes()
    put(file, whole[:-1])
    found, said = try_to_open(kept)
    assert found is None and "is damaged" in said[0] and "remove it" in said[0]
    put(file, whole)
    file.chmod(0o666)
    assert "others can write" in try_to_open(kept)[1][0]
    file.rename(kept / "elsewhere")
    file.symlink_to(kept / "elsewhere")
    assert "is a link" in try_to_open(kept)[1][0]
    os.unlink(file)
    assert try_to_open(kept)[0] is not None


@needs_compiler
@pytest.mark.parametrize(
    ("which", "right", "wrong"),
    [
        (0, "std::min(r + 1, rows)", "std::min(r + 2, rows)"),
        (1, "total += weight *", "total += 1.001f *"),
        (2, "Wide) << 16", "Wide) << 15"),
        (2, "both >> 4", "both >> 3"),
        pytest.param(*(2, "Lanes) - 128.0f", "Lanes) - 127.0f"), marks=pytest.mark.long),
        pytest.param(*(2, "0; r < count", "1; r < count"), marks=pytest.mark.long),
    ],
)
def test_a_kernel_that_computes_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int, right: str, wrong: str
) -> None:
    sources = [shutil.copy(each, tmp_path) for each in (*compiled_attention.SOURCES, *compiled_attention.HEADERS)]
    changed = tmp_path / compiled_attention.SOURCES[which].name
    changed.write_text(changed.read_text().replace(right, wrong))
    assert wrong in changed.read_text()
    monkeypatch.setattr(
        compiled_attention, "SOURCES", [Path(each) for each in sources[: -len(compiled_attention.HEADERS)]]
    )
    found, said = try_to_open(tmp_path / "cache")
    assert found is None and "wrong results" in said[0]


@needs_compiler
def test_a_library_of_something_else_is_said(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    there = library_in(kept)
    folder = tmp_path_factory.mktemp("cache") / "kernels" / there.parent.name
    folder.mkdir(parents=True)
    made = folder / "made"
    made.write_bytes(b"no library")
    keep_made(made, folder / there.name)
    found, said = try_to_open(folder.parent.parent)
    assert found is None and len(said) == 1 and "is not used" in said[0]
