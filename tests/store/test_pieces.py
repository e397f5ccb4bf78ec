"""Keys and values of which every rank wrote its own tokens, or heads: put together exactly, or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import h5py
import pytest
import torch
from made_runs import HEADER, record, stored_layers, write

from kvr_mpi.errors import DataError
from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.kv_reader import KVReader
from kvr_mpi.store.log import DROPPED, LogWriter, seal
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results, read_results
from kvr_mpi.store.rewrite import finish_run, list_stored, merge_run, prune_kv
from kvr_mpi.store.writer import ResultWriter
from kvr_mpi.topology import KVHeads

PROMPT, HELD, HEADS = 12, 15, 6
IDS = tuple(range(100, 100 + HELD))  # with those of the answer
KEYS = torch.randn(HELD, HEADS, 8, generator=torch.Generator().manual_seed(0))
NAME = "dir/a"
CUTS = [(0, PROMPT), (0, 5, PROMPT), (0, 1, 11, PROMPT), (0, 3, 6, 9, PROMPT)]


def whole(slices: Sequence[int], name: str = NAME) -> Record:
    return replace(record(name), slices=tuple(slices), prompt_sha256="0" * 64, prompt_tokens=PROMPT)


def write_piece(
    folder: Path,
    of: Record,
    rank: int,
    start: int,
    heads: KVHeads | None = None,
    *,
    ids: tuple[int, ...] = IDS,
    session: int = 1,
) -> None:
    """Write what a rank has of a document from a token on; the one whose tokens are last has the record."""
    stops = dict(itertools.pairwise(of.slices))
    is_last = stops[start] == PROMPT
    stop = HELD if is_last else stops[start]
    own = slice(None) if heads is None else slice(heads.first, heads.last)
    layer = KEYS[start:stop, own], -KEYS[start:stop, own]
    tokens = CachedTokens(ids[:stop], (1, min(9, stop)), start, heads=heads)
    writer = ResultWriter(folder, rank, HEADER, session)
    if is_last and (heads is None or heads.first == 0):
        writer.write(of, [layer, None, layer], tokens)
    else:
        writer.write(of, [layer, None, layer], tokens, has_record=False)
    writer.close()


def write_all(folder: Path, of: Record, size: int = 1, session: int = 1) -> None:
    """Write what all ranks have, in groups of so many."""
    heads = [None] if size == 1 else KVHeads(0, HEADS // size, HEADS).shares
    for rank, (start, each) in enumerate(itertools.product(of.slices[:-1], heads)):
        write_piece(folder, of, rank, start, each, session=session)


def check_whole(kv: KVReader) -> None:
    """Compare any range of tokens and heads, across the places where ranks took over from each other."""
    assert kv.tokens == CachedTokens(IDS, (1, 9)) and kv.layers == (0, 2)
    kv.check()
    for layer in kv.layers:
        assert kv.format(layer) == (tuple(KEYS.shape), tuple(KEYS.shape), "float32")
        keys, values = kv.read(layer)
        assert torch.equal(keys, KEYS) and torch.equal(values, -KEYS)
        with pytest.raises(DataError, match="were requested"):
            kv.read(layer, 3, HELD + 1)
    for first, last in itertools.combinations_with_replacement(range(HELD + 1), 2):  # both layers lie alike
        keys, values = kv.read(2, first, last)
        assert torch.equal(keys, KEYS[first:last]) and torch.equal(values, -KEYS[first:last])
    for heads in itertools.combinations(range(HEADS + 1), 2):
        keys, _ = kv.read(2, 2, 13, heads)
        assert torch.equal(keys, KEYS[2:13, slice(*heads)])


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("slices", CUTS)
def test_whoever_reads_reads_them_as_one(tmp_path: Path, slices: tuple[int, ...], size: int) -> None:
    write_all(tmp_path, whole(slices), size)
    with open_results(tmp_path).open(NAME) as (_, kv):
        check_whole(kv)
    assert open_results(tmp_path).kv_bytes == 4 * KEYS.nbytes
    merge_run(tmp_path)
    assert len(open_results(tmp_path).places[NAME].pieces) == 1, "what is merged does not know how it was cut"
    with open_results(tmp_path).open(NAME) as (_, kv):
        check_whole(kv)


def test_a_piece_of_another_attempt_stands_for_none(tmp_path: Path) -> None:
    """One begins where another is missing, and ends elsewhere; or has the heads of another answer."""
    of, two = whole((0, 5, 9, PROMPT)), KVHeads(0, 3, HEADS).shares
    for rank, start in enumerate((5, 9)):
        write_piece(tmp_path, of, rank, start)
    write_piece(tmp_path, whole((0, 7, PROMPT)), 2, 0)
    other = whole((0, PROMPT), "b")
    write_piece(tmp_path, other, 3, 0, two[0])
    write_piece(tmp_path, other, 4, 0, two[1], ids=(*IDS[:-1], 7))
    assert not read_results([tmp_path]).places
    write_piece(tmp_path, replace(of, prompt_sha256="1" * 64), 5, 0)
    assert not read_results([tmp_path]).places
    write_piece(tmp_path, of, 6, 0)
    write_piece(tmp_path, other, 7, 0, two[1])
    assert open_results(tmp_path).places.keys() == {NAME, "b"}
    merge_run(tmp_path)
    for name in (NAME, "b"):
        assert torch.equal(stored_layers(tmp_path, name)[2][0], KEYS)


def test_pieces_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Also if somebody's log says that they belong together."""
    for name in ("three", "two", "other"):
        (tmp_path / name).mkdir()
    write_all(tmp_path / "three", whole(CUTS[3]))
    write_all(tmp_path / "two", whole(CUTS[1]), 2)
    for rank, start in enumerate(CUTS[3][:-1]):
        write_piece(tmp_path / "other", whole(CUTS[3]), rank, start, ids=(7, *IDS[1:]))
    three, two, other = ([*open_results(tmp_path / name).places[NAME].pieces] for name in ("three", "two", "other"))
    for pieces, words in (
        (three[1:], "some are missing"),
        ([three[0], *three[2:]], "some are missing"),
        (two[:3], "KV heads are missing"),
        ([three[0], *two[2:]], "some are missing"),
        ([*three, three[0]], "KV heads are missing"),
        ([other[0], *three[1:]], "to another prompt"),
        ([replace(three[0], bytes=5), *three[1:]], "the log announces 5"),
        ([replace(three[0], sha256="0"), *three[1:]], "is damaged"),
        ([replace(three[0], id="other"), *three[1:]], "is missing"),
    ):
        with pytest.raises(DataError, match=words):
            KVReader(NAME, pieces)


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
    write_all(tmp_path, whole((0, PROMPT)), 2)
    with h5py.File(tmp_path / "kv-0001-0000-00000.h5", "r+") as file:
        (group,) = file["kv"].values()
        for name, value in attributes.items():
            group.attrs.modify(name, value)
    with pytest.raises(DataError, match=words):
        stored_layers(tmp_path, NAME)


def test_a_flipped_bit_is_named_when_it_is_read_and_only_then(tmp_path: Path) -> None:
    """So a rank of a group is not told of damage in heads that it has not, and reads no more than it holds."""
    write_all(tmp_path, whole((0, 5, PROMPT)), 3)
    with h5py.File(tmp_path / "kv-0001-0002-00000.h5", "r+") as file:
        (group,) = file["kv"].values()
        group["layer_002/keys"][2] += 1
    with open_results(tmp_path, verify=False).open(NAME) as (_, kv):
        kv.read(0)
        kv.read(2, 5, HELD)
        assert torch.equal(kv.read(2, 0, 5, (0, 4))[0], KEYS[:5, :4])
        with pytest.raises(DataError, match=r"kv-0001-0002.*layer_002.*damaged"):
            kv.read(2, 0, 5, (3, 5))
    with pytest.raises(DataError, match="kv-0001-0002"):
        open_results(tmp_path)


@pytest.mark.parametrize("at", range(9))
def test_a_merge_that_is_killed_while_it_tidies_up_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """And what was dropped stays dropped, whichever logs are left."""
    write_all(tmp_path, whole((0, 3, 7, PROMPT)))
    write(tmp_path, 3, [record("dropped")])
    with LogWriter(tmp_path, 2, None, HEADER) as log:
        log.write(seal({"line": DROPPED, "ids": ["dropped"]}))
    removed, unlink = list[Path](), Path.unlink

    def unlink_some(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            removed.append(path)
        if len(removed) > at:
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(Path, "unlink", unlink_some)
        merge_run(tmp_path)
    assert len(removed) == min(at + 1, 8)
    for _ in range(2):
        assert (tmp_path / "results.h5").exists() and open_results(tmp_path).ids() == [NAME]
        assert torch.equal(stored_layers(tmp_path, NAME)[2][0], KEYS)
        merge_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.h5"]


def test_a_volume_with_parts_of_two_documents_keeps_those_of_one(tmp_path: Path) -> None:
    for rank, (start, stop) in enumerate(((0, 5), (5, HELD))):
        writer, layer = ResultWriter(tmp_path, rank, HEADER, 1), (KEYS[start:stop], -KEYS[start:stop])
        for name in (NAME, "b"):
            tokens = CachedTokens(IDS[:stop], (1, min(9, stop)), start)
            writer.write(whole((0, 5, PROMPT), name), [layer, None, layer], tokens, has_record=rank == 1)
        writer.close()
    prune_kv(tmp_path, 2, [NAME])
    assert list_stored(open_results(tmp_path)) == ["b"] and len(list(tmp_path.glob("kv-0002-*"))) == 2
    with open_results(tmp_path).open("b") as (_, kv):
        check_whole(kv)


def test_a_run_that_outgrows_its_file_of_results_loses_nothing_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path, whole((0, 5, PROMPT)))
    finish_run(tmp_path)
    monkeypatch.setattr("kvr_mpi.store.rewrite.MERGE_MAX_BYTES", 100)
    write_all(tmp_path, whole((0, 7, PROMPT), "b"), session=2)
    finish_run(tmp_path)
    assert len(list(tmp_path.glob("kv-*"))) == 2
    for name in (NAME, "b"):
        assert torch.equal(stored_layers(tmp_path, name)[2][0], KEYS)


def test_large_keys_and_values_stay_in_their_volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the records are in one file all the same; documents that come later are added."""
    monkeypatch.setattr("kvr_mpi.store.rewrite.MERGE_MAX_BYTES", 100)
    write_all(tmp_path, whole((0, 5, PROMPT)))
    volumes = {path.name: path.read_bytes() for path in tmp_path.glob("kv-*")}
    assert finish_run(tmp_path) == tmp_path / "results.h5"
    assert sorted(path.name for path in tmp_path.iterdir()) == [*sorted(volumes), "results.h5"]
    write_all(tmp_path, whole((0, 7, PROMPT), "b"), session=2)
    finish_run(tmp_path)
    assert {path.name for path in tmp_path.glob("kv-*")} > volumes.keys() and not list(tmp_path.glob("log-*"))
    for name in (NAME, "b"):
        assert torch.equal(stored_layers(tmp_path, name)[2][0], KEYS)
    prune_kv(tmp_path, 3, [NAME])
    assert list_stored(open_results(tmp_path)) == ["b"] and len(list(tmp_path.glob("kv-*"))) == 2
    assert torch.equal(stored_layers(tmp_path, "b")[2][0], KEYS)
    merge_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.h5"]
    assert torch.equal(stored_layers(tmp_path, "b")[2][0], KEYS)
