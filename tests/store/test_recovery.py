"""Recovery: whatever is cut, flipped or missing, what counts is what is whole, and the rest is done again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import h5py
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_runs import kv_in, new_writer, record, result_files, resume, stored_layers, write

from kvr_mpi.errors import DataError
from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.log import seal, unseal
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.volumes import Source, open_source

Damage = Callable[[bytes, int], bytes]
LOG = "log-0001-0000.jsonl"
VALUES = st.dictionaries(
    st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)
)


@given(VALUES, st.integers(0))
def test_a_sealed_line_comes_back_or_is_known_to_be_damaged(value: dict[str, object], at: int) -> None:
    value = {"name": "x", **{name: each for name, each in value.items() if name != "seal"}}
    line = seal(value)
    assert line.count(b"\n") == 1 and unseal(line) == value
    assert unseal(flip(line[:-1], at % (len(line) - 1))) is None


@given(st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=6), st.binary(max_size=3))
def test_lines_come_back_from_a_part_of_a_file(lines: list[bytes], torn: bytes) -> None:
    content = b"".join(line + b"\n" for line in lines) + torn.replace(b"\n", b"")
    with TemporaryFile() as stream:
        stream.write(b"before\n" + content + b"\nafter\n")
        source = Source(Path("log"), stream, ((7, len(content)),))
        found = list(source.lines())
        assert [line for _, line in found] == lines
        assert all(source.read(at, len(line)) == line for at, line in found)


def test_a_line_without_an_end_is_no_reason_to_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvr_mpi.store.volumes.LINE_BYTES", 30)
    (tmp_path / LOG).write_bytes(b"x" * 29 + b"\n" + b"x" * 90 + b"\nx\n")
    with open_source(tmp_path / LOG) as source:
        assert list(source.lines()) == [(0, b"x" * 29), (30, b"")]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three documents, each with its keys and values in a volume of its own."""
    folder = tmp_path_factory.mktemp("three")
    writer = new_writer(folder)
    for number, name in enumerate("abc"):
        layer = torch.full((4, 1, 8), float(number))
        writer.write(record(name), [(layer, layer)], CachedTokens((1, 2, 3, number), (0, 3)))
        writer.flush()
    writer.close()
    return folder


def copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


def cut(content: bytes, at: int) -> bytes:
    return content[:at]


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_log_damaged_anywhere_costs_what_was_cut_or_one_document(three: Path, tmp_path: Path, damage: Damage) -> None:
    content = (three / LOG).read_bytes()
    header, before = content.index(b"\n"), {each.id: each for each in open_results(three)}
    for at in range(0, len(content), 45):
        folder = copied(three, tmp_path / "run")
        (folder / LOG).write_bytes(damage(content, at))
        if damage is flip:
            with pytest.raises(DataError, match=LOG):
                list(open_results(folder))
        done, failed, said = resume(folder)
        assert not failed and {*"abc"} >= done
        if damage is flip:
            assert len(done) >= (2 if at > header else 3), "the header costs none"
            assert any("is damaged" in line and "processed again" in line for line in said)
            assert (folder / f"{LOG}.damaged-1").read_bytes() == flip(content, at)
        if done:
            assert {each.id: each for each in open_results(folder, partial=True)} == {one: before[one] for one in done}
        write(folder, 9, [record(each) for each in {*"abc"} - done])
        assert {each.id: each for each in open_results(folder)} == before
        assert resume(folder)[::2] == ({*"abc"}, []), "what was mended is sound"


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_volume_damaged_anywhere_costs_no_other_document(three: Path, tmp_path: Path, damage: Damage) -> None:
    volume = "kv-0001-0000-00001.h5"
    content = (three / volume).read_bytes()
    for at in range(0, len(content), len(content) // 30):
        folder = copied(three, tmp_path / "run")
        (folder / volume).write_bytes(damage(content, at))
        done, _, said = resume(folder)
        if done == {*"abc"}:  # of what nobody reads a bit may flip
            assert damage is flip
            continue
        assert done == {"a", "c"} and any(volume in line and "processed again" in line for line in said)
        if damage is not flip:
            assert (folder / f"{volume}.damaged-1").read_bytes() == content[:at]


@pytest.mark.parametrize("is_merged", [True, False])
def test_a_bit_flipped_in_keys_and_values_costs_their_document(three: Path, tmp_path: Path, is_merged: bool) -> None:
    """Once it is done again, nobody meets the damage any more."""
    before = {each.id: each for each in open_results(three)}
    source = copied(three, tmp_path / "source")
    volume = merge_run(source) if is_merged else source / "kv-0001-0000-00001.h5"
    with h5py.File(volume) as file:
        at = kv_in(file, "b")["layer_000/keys"].id.get_offset()
    content = volume.read_bytes()
    for bit in range(0, 4 * 8 * 32, 41):
        folder = copied(source, tmp_path / "run")
        damaged = bytearray(content)
        damaged[at + bit // 8] ^= 1 << bit % 8
        (folder / volume.name).write_bytes(damaged)
        with pytest.raises(DataError, match=r"damaged.*--resume"):
            open_results(folder)
        if not is_merged:
            with pytest.raises(DataError, match=volume.name):
                merge_run(folder)
        done, _, said = resume(folder)
        assert done == {"a", "c"} and any(volume.name in line and "processed again" in line for line in said)
        assert resume(folder)[::2] == ({"a", "c"}, []), "it is known from then on"
        writer = new_writer(folder)
        writer.write(record("b"), [(torch.ones(4, 1, 8),) * 2], CachedTokens((1, 2, 3, 1), (0, 3)))
        writer.close()
        for _ in range(2):
            assert {each.id: each for each in open_results(folder)} == before
            assert torch.equal(stored_layers(folder, "b")[0][0], torch.ones(4, 1, 8))
            merge_run(folder)


def test_a_volume_that_is_gone_is_said_and_its_document_done_again(three: Path, tmp_path: Path, run_kvr: Any) -> None:
    folder = copied(three, tmp_path / "run")
    (folder / "kv-0001-0000-00000.h5").unlink()
    lost = "lost keys and values of 1 document"
    with pytest.raises(DataError, match=lost):
        open_results(folder)
    for more in (["export", folder], ["merge", folder], ["merge", folder, "-o", tmp_path / "all.h5"]):
        code, _, err = run_kvr(*more)
        assert code == 65 and lost in err
    assert [each.id for each in open_results(tmp_path / "all.h5")] == ["b", "c"]
    lines = (folder / LOG).read_bytes().splitlines(keepends=True)
    (folder / LOG).write_bytes(
        b"".join(lines[:-1])
    )  # the record of c is there, and a crash before its volume is listed
    done, _, said = resume(folder)
    assert done == {"b"} and any("kv-0001-0000-00000.h5 is gone" in line for line in said)
    assert "kv-0001-0000-00002.h5" not in result_files(folder)
