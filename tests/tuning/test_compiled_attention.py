"""The attention kernel is compiled once: with a real compiler, one that is broken, one that hangs, and none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_logs import logger_to

from kvr_mpi.model.cpu_attention import KernelLibrary
from kvr_mpi.tuning import compiled_attention
from kvr_mpi.tuning.compiled_attention import COMPILERS, FAILED, find_compiler, keep_made, open_attention
from kvr_mpi.tuning.identity import processor_key

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler")


def try_to_open(
    cache: Path, limit_s: float = compiled_attention.LIMIT_S, *, compiles: bool = True
) -> tuple[KernelLibrary | None, list[str]]:
    said: list[str] = []
    return open_attention(cache, logger_to(said), compiles=compiles, limit_s=limit_s), said


def library_in(cache: Path) -> Path:
    (file,) = cache.glob("kernels/*/attention.so")
    return file


@pytest.fixture(scope="module", autouse=True)
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Find a compiler first that does not optimise, and copies objects that it has made before: they take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX", raising=False)
        if real := find_compiler():
            folder = tmp_path_factory.mktemp("compiler")
            (folder / "c++").write_text(f"""#!/bin/sh
for made; do :; done
for source; do case $source in *.cpp) break; esac; done
kept={folder}/$(cksum < "$source" | tr " " -).o
case $source in *.cpp) cp "$kept" "$made" 2>/dev/null && exit; esac
{real} "$@" -O0 && cp "$made" "$kept"
""")
            (folder / "c++").chmod(0o755)
            patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        yield


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache with the kernel in it, which no test may change."""
    cache = tmp_path_factory.mktemp("cache")
    assert try_to_open(cache)[0] is not None
    return cache


@needs_compiler
def test_it_is_compiled_once_for_a_processor(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    found, said = try_to_open(compiled)
    assert found is not None and said == []
    assert sorted(each.name for each in library_in(compiled).parent.iterdir()) == ["attention.so", "attention.xxh3"]
    assert "/nowhere/c++ cannot be run" in try_to_open(tmp_path)[1][0]
    monkeypatch.setenv("CXX", " ")
    assert find_compiler() == find_compiler({}), "no program is named"
    monkeypatch.setenv("CXX", f"env {find_compiler({})} -funroll-loops")  # called through another program
    assert try_to_open(compiled, compiles=False) == (None, [])
    found, said = try_to_open(tmp_path)
    assert found is not None and said == [] and library_in(tmp_path).parent.name != library_in(compiled).parent.name
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compiled_attention, "processor_key", lambda: "another processor")
    assert try_to_open(compiled, compiles=False) == (None, []), "and by a rank that is not to compile it, nothing is"
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
    assert found is None and len(said) == 1 and words in said[0] and "using torch's attention" in said[0]
    (folder,) = (tmp_path / "cache" / "kernels").iterdir()
    is_remembered = "stopped" not in words  # a busy machine may compile later
    assert [each.name for each in folder.iterdir()] == [FAILED] * is_remembered
    found, said = try_to_open(tmp_path / "cache", limit_s)
    assert found is None and len(said) == 1 and (str(folder / FAILED) in said[0]) == is_remembered and words in said[0]


@needs_compiler
def test_a_compiler_that_is_not_there_is_found_when_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    with monkeypatch.context() as none:
        none.setenv("PATH", f"{tmp_path / 'bin'}")
        found, said = try_to_open(tmp_path / "cache")
    assert found is None and len(said) == 1 and "no compiler found (c++, g++, clang++)" in said[0]
    assert try_to_open(tmp_path / "cache")[0] is not None


@needs_compiler
@pytest.mark.parametrize(
    ("which", "right", "wrong"),
    [
        ("tiled_attention", "std::min(r + 1, rows)", "std::min(r + 2, rows)"),
        ("decode_attention", "total += weight *", "total += 1.001f *"),
        pytest.param("narrow_product", "Wide) << 16", "Wide) << 15", marks=pytest.mark.long),
        ("narrow_product", "both >> 4", "both >> 3"),
        pytest.param("narrow_product", "int(number[i]);", "int(number[i]) & ~1;", marks=pytest.mark.long),
        pytest.param("narrow_product", "0x1.8p13f", "0x1.8p15f", marks=pytest.mark.long),
        ("narrow_product", "lost |= bits[i] & 0xffff", "lost |= bits[i] & 0xfffe"),
        pytest.param("half_product", "rows += COUNT * 2 * LANES", "rows += COUNT * LANES", marks=pytest.mark.long),
        ("half_product", "begin + r) * features", "begin) * features"),
        ("amx_attention", "own >= *", "own > *"),
    ],
)
def test_a_kernel_that_computes_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, right: str, wrong: str
) -> None:
    if which == "amx_attention":
        monkeypatch.setenv("CXX", f"{find_compiler()} -DKVR_TILE_LOOPS")  # as if this processor had AMX
    sources = [Path(shutil.copy(each, tmp_path)) for each in compiled_attention.SOURCES]
    (changed,) = (each for each in sources if each.stem == which)
    for each in compiled_attention.HEADERS:
        shutil.copy(each, tmp_path)
    assert right in changed.read_text()
    changed.write_text(changed.read_text().replace(right, wrong))
    monkeypatch.setattr(compiled_attention, "SOURCES", sources)
    found, said = try_to_open(tmp_path / "cache")
    assert found is None and "wrong results" in said[0]


@needs_compiler
def test_code_that_is_damaged_or_not_ours_is_not_run(compiled: Path, tmp_path: Path) -> None:
    shutil.copytree(compiled, tmp_path, dirs_exist_ok=True)
    file = library_in(tmp_path)

    def opened(content: bytes | None = None, mode: int = 0o600) -> str:
        """What is said of the file, after putting another in its place, since it may be mapped."""
        if content is not None:
            file.unlink()
            file.write_bytes(content)
            file.chmod(mode)
        found, said = try_to_open(tmp_path)
        assert (found is None) == bool(said) and len(said) < 2
        return "".join(said)

    whole, made = file.read_bytes(), tmp_path / "made"
    made.write_bytes(b"no library")
    keep_made(made, file)
    assert "is not used" in opened()
    made.write_bytes(whole)
    keep_made(made, file)
    assert opened() == ""
    assert "is damaged" in opened(whole[:-1]) and "remove it" in opened()
    assert "others can write" in opened(whole, 0o666) and "others can write" in opened(whole, 0o620)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "is a link" in opened()
    assert opened(whole) == ""
    shutil.rmtree(tmp_path / "kernels")
    (tmp_path / "kernels").write_text("")
    assert "cannot be written" in opened()
