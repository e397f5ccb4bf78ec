"""Keys and values of which every rank of a group wrote some heads: one document, or refused."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import h5py
import pytest
import torch
from made_runs import HEADER, record, stored_layers

from kvr_mpi.errors import DataError
from kvr_mpi.store.folder import index_run
from kvr_mpi.store.hdf5 import hold_open
from kvr_mpi.store.kv import open_kv
from kvr_mpi.store.merge import merge_files
from kvr_mpi.store.outputs import open_file
from kvr_mpi.store.parts import PARTS, PartIndexes, incomplete, open_whole_kv, part_record, pieces_of
from kvr_mpi.store.prune import prune_kv
from kvr_mpi.store.shards import ShardWriter
from kvr_mpi.store.stored_kv import CachedTokens, StoredKV
from kvr_mpi.topology import KVHeads

PROMPT, HELD, HEADS = 12, 15, 6
IDS = tuple(range(100, 100 + HELD))  # with those of the answer
KEYS = torch.randn(HELD, HEADS, 8, generator=torch.Generator().manual_seed(0))
WHOLE = replace(record("dir/a"), slices=(0, 5, PROMPT), prompt_sha256="0" * 64, prompt_tokens=PROMPT)


def write_piece(folder: Path, start: int, heads: KVHeads, *, ids: tuple[int, ...] = IDS, name: str = "") -> None:
    """Write what one rank of a group has: of the second slice up to the end of the answer."""
    stop = 5 if start == 0 else HELD
    is_own = start > 0 and heads.first == 0
    place = folder if is_own else folder / PARTS
    place.mkdir(parents=True, exist_ok=True)
    tokens = CachedTokens(ids[:stop], (1, min(9, stop)), start, heads=heads)
    writer = ShardWriter(place, name or f"{start:02d}{heads.first:02d}", HEADER, session=1)
    layer = KEYS[start:stop, heads.first : heads.last], -KEYS[start:stop, heads.first : heads.last]
    writer.write(WHOLE if is_own else part_record(WHOLE, tokens), [layer, None, layer], tokens)
    writer.close()


def write_groups(folder: Path, size: int) -> None:
    for start, heads in itertools.product((0, 5), KVHeads(0, HEADS // size, HEADS).shares):
        write_piece(folder, start, heads)


def open_whole(folder: Path) -> StoredKV:
    place = index_run(folder).places[WHOLE.id]
    return open_whole_kv(hold_open(place.file)["documents"][place.key], PartIndexes(), ExitStack())


@pytest.mark.parametrize("size", [2, 3, 6])
def test_whoever_reads_reads_all_heads_of_all_tokens(tmp_path: Path, size: int) -> None:
    write_groups(tmp_path, size)
    kv = open_whole(tmp_path)
    assert kv.tokens == CachedTokens(IDS, (1, 9)) and kv.bytes == 4 * KEYS.nbytes
    kv.check()
    for layer in kv.layers:
        assert kv.format(layer).keys == tuple(KEYS.shape)
        for first, last in ((0, HELD), (3, 7), (5, 6), (0, 0), (14, 15)):
            keys, values = kv.read(layer, first, last)
            assert torch.equal(keys, KEYS[first:last]) and torch.equal(values, -KEYS[first:last])
        for heads in itertools.combinations(range(HEADS + 1), 2):
            keys, values = kv.read(layer, 2, 13, heads)
            assert torch.equal(keys, KEYS[2:13, slice(*heads)]) and torch.equal(values, -KEYS[2:13, slice(*heads)])
    with open_file(merge_files(tmp_path)) as file:
        group = file["documents"]["dir%2Fa"]
        merged = open_kv(group)
        assert merged.is_whole and merged.tokens == CachedTokens(IDS, (1, 9))
        assert "all_heads" not in group["kv"].attrs, "what is merged does not know how it was cut"
        for keys, values in stored_layers(group).values():
            assert torch.equal(keys, KEYS) and torch.equal(values, -KEYS)
        assert torch.equal(open_whole_kv(group, PartIndexes(), ExitStack()).read(0, 1, 4, (2, 5))[0], KEYS[1:4, 2:5])
    assert not (tmp_path / PARTS).exists()


def test_only_the_pieces_that_have_wanted_heads_are_read(tmp_path: Path) -> None:
    """So a rank of a group is not told of damage in heads that it has not, and reads no more than it holds."""
    write_groups(tmp_path, 3)
    with h5py.File(next((tmp_path / PARTS).glob("shard-*-0004-*.h5")), "r+") as file:
        (group,) = file["documents"].values()
        group["kv/layer_002/keys"][2] += 1
    kv = open_whole(tmp_path)
    assert torch.equal(kv.read(2, 0, 5, (0, 4))[0], KEYS[:5, :4])
    with pytest.raises(DataError, match="0004.*layer_002.*damaged"):
        kv.read(2, 0, 5, (3, 5))


def part_ids(folder: Path) -> list[str]:
    return sorted(index_run(folder / PARTS).places)


def test_a_document_is_done_when_all_heads_of_all_slices_are_there(tmp_path: Path) -> None:
    write_groups(tmp_path, 3)
    names = part_ids(tmp_path)
    assert len(names) == 5 and incomplete(tmp_path, [WHOLE.id], names, {}) == set()
    for name in names:
        assert incomplete(tmp_path, [WHOLE.id], {*names} - {name}, {}) == {WHOLE.id}
    prune_kv(tmp_path, [WHOLE.id])
    assert incomplete(tmp_path, [WHOLE.id], part_ids(tmp_path), {}) == set()
    assert not open_whole(tmp_path).layers


def test_heads_of_another_answer_stand_for_none(tmp_path: Path) -> None:
    """An attempt that was killed: one rank's heads were durable, and the next attempt wrote another answer."""
    first, second = KVHeads(0, 3, 6).shares
    for start, heads in itertools.product((0, 5), (first, second)):
        if (start, heads) != (5, second):
            write_piece(tmp_path, start, heads)
    write_piece(tmp_path, 5, second, ids=(*IDS[:-1], 7))
    assert incomplete(tmp_path, [WHOLE.id], part_ids(tmp_path), {}) == {WHOLE.id}
    with pytest.raises(DataError, match="tokens 5 to 15, KV heads 3 to 6, are missing"):
        merge_files(tmp_path)
    write_piece(tmp_path, 5, second, name="again")
    with open_file(merge_files(tmp_path)) as file:
        assert torch.equal(stored_layers(file["documents"]["dir%2Fa"])[0][0], KEYS)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"all_heads": 1 << 40}, "expected an even share"),
        ({"all_heads": 5}, "expected an even share"),
        ({"first_head": 1, "last_head": 4}, "expected an even share"),
        ({"last_head": 2, "all_heads": 4}, "its layers have others"),
        ({"first_head": 3, "last_head": 6}, "is damaged"),
    ],
)
def test_heads_that_cannot_be_are_refused(tmp_path: Path, attributes: dict[str, int], words: str) -> None:
    write_groups(tmp_path, 2)
    (path,) = tmp_path.glob("shard-*.h5")
    with h5py.File(path, "r+") as file:
        for name, value in attributes.items():
            file["documents"]["dir%2Fa"]["kv"].attrs.modify(name, value)
    with pytest.raises(DataError, match=words):
        open_whole(tmp_path)


def test_whole_documents_are_named_as_ever() -> None:
    """Runs from before, whose ranks had all heads, go on."""
    part = part_record(WHOLE, CachedTokens(IDS[:5], (1, 5)))
    assert part.id == "dir/a/0-5"


def test_pieces_are_in_rows(tmp_path: Path) -> None:
    write_groups(tmp_path, 2)
    (path,) = tmp_path.glob("shard-*.h5")
    with open_file(path) as file:
        rows = pieces_of(WHOLE, open_kv(file["documents"]["dir%2Fa"]).tokens)
    assert [[(one.start, one.stop, one.heads and one.heads.first) for one in row] for row in rows] == [
        [(0, 5, 0), (0, 5, 3)],
        [(5, HELD, 0), (5, HELD, 3)],
    ]
    assert [one.part == "" for row in rows for one in row] == [False, False, True, False]
