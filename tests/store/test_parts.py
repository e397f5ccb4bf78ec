"""Keys and values that every rank wrote of its own: put together exactly, if all are there and of one cut."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from made_runs import HEADER, record, resume, stored_layers, take

from kvr_mpi.disk import RUN_FILE
from kvr_mpi.errors import DataError
from kvr_mpi.store.folder import index_run
from kvr_mpi.store.hdf5 import hold_open, open_hdf5
from kvr_mpi.store.kv import open_kv
from kvr_mpi.store.ledger import read_ledger
from kvr_mpi.store.merge import merge_files
from kvr_mpi.store.outputs import Record, open_file
from kvr_mpi.store.parts import (
    PARTS,
    PartIndexes,
    incomplete,
    open_whole_kv,
    part_bytes,
    part_record,
)
from kvr_mpi.store.prune import list_stored, prune_kv
from kvr_mpi.store.shards import ShardWriter
from kvr_mpi.store.shares import find_runs
from kvr_mpi.store.stored_kv import CachedTokens, StoredKV

TOKENS = 12
KEYS = torch.randn(TOKENS, 2, 8, generator=torch.Generator().manual_seed(0))


def whole(slices: Sequence[int]) -> Record:
    return replace(record("a"), slices=tuple(slices), prompt_sha256="0" * 64, prompt_tokens=TOKENS)


def write_part(folder: Path, slices: Sequence[int], start: int, stop: int, name: str = "0000") -> None:
    """Write what one rank has of the document; the last rank's goes with its record."""
    is_last = stop == TOKENS
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder if is_last else folder / PARTS, name, HEADER, session=1)
    tokens = CachedTokens(tuple(range(stop)), (1, min(3, stop)), start)
    of = whole(slices)
    layer = KEYS[start:stop], -KEYS[start:stop]
    writer.write(of if is_last else part_record(of, tokens), [layer, None, layer], tokens)
    writer.close()


def write_all(folder: Path, slices: Sequence[int]) -> None:
    for rank, (start, stop) in enumerate(zip(slices, slices[1:], strict=False)):
        write_part(folder, slices, start, stop, f"{rank:04d}")


@pytest.mark.parametrize("slices", [(0, 12), (0, 5, 12), (0, 1, 11, 12), (0, 3, 6, 9, 12)])
def test_the_parts_are_the_whole(tmp_path: Path, slices: tuple[int, ...]) -> None:
    write_all(tmp_path, slices)
    with open_file(merge_files(tmp_path)) as file:
        group = file["documents/a"]
        assert open_kv(group).tokens == CachedTokens(tuple(range(TOKENS)), (1, 3))
        layers = stored_layers(group)
        assert layers.keys() == {0, 2}
        for keys, values in layers.values():
            assert torch.equal(keys, KEYS) and torch.equal(values, -KEYS)
    assert not (tmp_path / PARTS).exists()


@pytest.mark.parametrize("at", range(5))
def test_a_merge_that_is_killed_while_it_tidies_up_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    write_all(tmp_path, (0, 3, 7, TOKENS))
    left, unlink = [at], Path.unlink

    def unlink_some(path: Path, missing_ok: bool = False) -> None:
        if path.suffix in (".h5", ".jsonl") and path.exists():
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink_some)
        with pytest.raises(KeyboardInterrupt):
            merge_files(tmp_path)
    assert (tmp_path / "results.h5").exists()
    with open_file(merge_files(tmp_path)) as file:
        assert torch.equal(stored_layers(file["documents/a"])[2][0], KEYS)
    assert not (tmp_path / PARTS).exists() and not list(tmp_path.glob("shard-*"))


def test_parts_are_not_taken_for_a_run(tmp_path: Path) -> None:
    """Their records have no answers, and would be shown as documents that got none."""
    write_all(tmp_path, (0, 5, TOKENS))
    (tmp_path / RUN_FILE).touch()
    parts = tmp_path / PARTS
    for path in (parts, next(parts.glob("*.h5"))):
        with pytest.raises(DataError, match=rf"a part of one, .* expected the run itself, {re.escape(str(tmp_path))}"):
            find_runs([path])
    assert find_runs([tmp_path]).paths == (tmp_path,)


def test_a_part_of_another_attempt_stands_for_none(tmp_path: Path) -> None:
    """It begins where one is missing, and ends elsewhere."""
    slices = (0, 5, 9, TOKENS)
    write_part(tmp_path, slices, 5, 9, "0001")
    write_part(tmp_path, slices, 9, TOKENS, "0002")
    write_part(tmp_path, (0, 7, TOKENS), 0, 7, "0003")
    assert incomplete(tmp_path, ["a"], ["a/0-7", "a/5-9"], {}) == {"a"}
    with pytest.raises(DataError, match="of tokens 0 to 5 are missing"):
        merge_files(tmp_path)
    assert incomplete(tmp_path, ["a"], ["a/0-5", "a/0-7", "a/5-9"], {}) == set()
    write_part(tmp_path, slices, 0, 5, "0004")
    with open_file(merge_files(tmp_path)) as file:
        assert torch.equal(stored_layers(file["documents/a"])[2][0], KEYS)


def test_a_part_of_another_prompt_is_refused(tmp_path: Path) -> None:
    slices = (0, 5, TOKENS)
    write_part(tmp_path, slices, 5, TOKENS, "0001")
    writer = ShardWriter(tmp_path / PARTS, "0000", HEADER, session=1)
    tokens = CachedTokens(tuple(range(5)), (1, 3))
    other = replace(part_record(whole(slices), tokens), prompt_sha256="1" * 64)
    layer = KEYS[:5], -KEYS[:5]
    writer.write(other, [layer, None, layer], tokens)
    writer.close()
    with pytest.raises(DataError, match="belongs to another prompt"):
        merge_files(tmp_path)
    assert not (tmp_path / "results.h5").exists()


def read_as_one(folder: Path, name: str = "a") -> StoredKV:
    """Read where the document's record is; files close with the process."""
    place = index_run(folder).places[name]
    group = hold_open(place.file)["documents"][place.key]
    return open_whole_kv(group, PartIndexes(), ExitStack())


@pytest.mark.parametrize("slices", [(0, 5, TOKENS), (0, 1, 11, TOKENS), (0, 3, 6, 9, TOKENS)])
def test_whoever_reads_reads_them_as_one(tmp_path: Path, slices: tuple[int, ...]) -> None:
    """Any range of tokens, across the places where ranks took over from each other."""
    write_all(tmp_path, slices)
    kv = read_as_one(tmp_path)
    assert kv.tokens == CachedTokens(tuple(range(TOKENS)), (1, 3))
    assert kv.layers == (0, 2) and kv.bytes == 4 * KEYS.nbytes
    for layer in kv.layers:
        assert kv.format(layer) == (tuple(KEYS.shape), tuple(KEYS.shape), "float32")
        for first, last in itertools.combinations_with_replacement(range(TOKENS + 1), 2):
            keys, values = kv.read(layer, first, last)
            assert torch.equal(keys, KEYS[first:last]) and torch.equal(values, -KEYS[first:last])
        with pytest.raises(DataError, match="were requested"):
            kv.read(layer, 3, TOKENS + 1)


def test_a_flipped_bit_of_any_part_is_named_when_it_is_read(tmp_path: Path) -> None:
    write_all(tmp_path, (0, 5, TOKENS))
    path = next((tmp_path / PARTS).glob("shard-*.h5"))
    with h5py.File(path, "r+") as file:
        file["documents"]["a%2F0-5"]["kv/layer_002/keys"][2] += 1
    kv = read_as_one(tmp_path)
    kv.read(0)
    kv.read(2, 5, TOKENS)
    with pytest.raises(DataError, match=f"{path.name}.*layer_002.*damaged"):
        kv.read(2, 4, 6)


def test_pruned_documents_lose_all_of_their_parts(tmp_path: Path) -> None:
    """And the others none; a job that goes on finds nothing missing."""
    write_all(tmp_path, (0, 5, TOKENS))
    for start, stop, folder in ((0, 7, tmp_path / PARTS), (7, TOKENS, tmp_path)):
        of = replace(whole((0, 7, TOKENS)), id="a/b")
        writer = ShardWriter(folder, f"other-{start}", HEADER, session=1)
        layer = KEYS[start:stop], -KEYS[start:stop]
        tokens = CachedTokens(tuple(range(stop)), (1, 3), start)
        writer.write(of if folder == tmp_path else part_record(of, tokens), [layer], tokens)
        writer.close()
    assert [(one.id, one.bytes) for one in list_stored(index_run(tmp_path))] == [
        ("a", 4 * KEYS.nbytes),
        ("a/b", 2 * KEYS.nbytes),
    ]
    size = part_bytes(tmp_path)
    prune_kv(tmp_path, ["a"])
    assert part_bytes(tmp_path) < size
    assert [one.id for one in list_stored(index_run(tmp_path))] == ["a/b"]
    assert incomplete(tmp_path, ["a", "a/b"], index_run(tmp_path / PARTS, verify=True).places, {}) == set()
    assert torch.equal(read_as_one(tmp_path, "a/b").read(0)[0], KEYS)
    with open_file(merge_files(tmp_path)) as file:
        assert not open_kv(file["documents/a"]).layers and len(open_kv(file["documents/a%2Fb"]).layers) == 1


def test_what_is_dropped_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    """A prompt that fails on this rank, or ends in an exception; the next one is written as ever."""
    (tmp_path / PARTS).mkdir()
    writer = ShardWriter(tmp_path / PARTS, "0000", HEADER, session=1)
    tokens = CachedTokens(tuple(range(5)), (1, 3))
    part = part_record(whole((0, 5, TOKENS)), tokens)
    with writer.writing(part, tokens) as layers:
        layers.add_layer((KEYS[:5], KEYS[:5]))
        layers.drop()
    with pytest.raises(ValueError, match="in the model"), writer.writing(part, tokens) as layers:
        layers.add_layer((KEYS[:5], KEYS[:5]))
        raise ValueError("in the model")
    with writer.writing(part, tokens) as layers:
        layers.add_layer((KEYS[:5], -KEYS[:5]))
    writer.close()
    index = index_run(tmp_path / PARTS, verify=True)
    assert list(index.places) == ["a/0-5"]
    with open_file(index.places["a/0-5"].file) as file:
        assert list(file["documents"]) == ["a%2F0-5"]
        assert torch.equal(stored_layers(file["documents/a%2F0-5"])[0][1], -KEYS[:5])


def test_parts_that_are_gone_altogether_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if their folder is: nothing in it could say what is missing."""
    header = replace(HEADER, identity={**HEADER.identity, "kv": True})
    monkeypatch.setattr(f"{__name__}.HEADER", header)
    take(tmp_path, mode="new", header=header).close()
    write_all(tmp_path, (0, 5, TOKENS))
    assert resume(tmp_path, header=header)[0] == {"a"}
    shutil.rmtree(tmp_path / PARTS)
    done, _, said = resume(tmp_path, header=header)
    assert done == set() and "without keys and values from some rank" in " ".join(said)


def test_resuming_reads_no_record_that_its_ledger_tells_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only two headers are looked at, the newest file's and the newest part's."""
    header = replace(HEADER, identity={**HEADER.identity, "kv": True})
    monkeypatch.setattr(f"{__name__}.HEADER", header)
    take(tmp_path, mode="new", header=header).close()
    write_all(tmp_path, (0, 5, TOKENS))
    for number, name in enumerate("bcd"):
        for start, stop, folder in ((0, 7, tmp_path / PARTS), (7, TOKENS, tmp_path)):
            of = replace(whole((0, 7, TOKENS)), id=name)
            writer = ShardWriter(folder, f"1{number:03d}", header, session=1)
            tokens, layer = CachedTokens(tuple(range(stop)), (1, 3), start), (KEYS[start:stop], -KEYS[start:stop])
            writer.write(of if folder == tmp_path else part_record(of, tokens), [layer, None, layer], tokens)
            writer.close()
    opened: list[Path] = []

    def watched(path: Path) -> Any:
        opened.append(path)
        return open_hdf5(path)

    monkeypatch.setattr("kvr_mpi.store.outputs.open_hdf5", watched)
    assert resume(tmp_path, header=header)[0] == set("abcd")
    assert len(opened) == 2
    lost = index_run(tmp_path / PARTS).places["c/0-7"].file
    lost.unlink()
    opened.clear()
    assert resume(tmp_path, header=header)[0] == set("abd")
    assert len(opened) == 2


def test_a_record_that_no_ledger_told_of_misses_its_parts(tmp_path: Path) -> None:
    write_all(tmp_path, (0, 5, TOKENS))
    for path in tmp_path.glob("ledger-*.jsonl"):
        path.unlink()
    done, _, said = resume(tmp_path)
    assert done == {"a"} and "was not in the ledger; it was read" in " ".join(said)
    ((line,),) = read_ledger(tmp_path).shards.values()
    assert line.parts == {"a": ["a/0-5"]}
    next((tmp_path / PARTS).glob("shard-*.h5")).unlink()
    assert resume(tmp_path)[0] == set()
