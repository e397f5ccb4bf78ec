"""What a job with groups stores is what one process stores: whoever reads or asks it, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from made_runs import kv_in

from kvr_mpi.store.folder import index_run, read_run_header
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.stored_kv import StoredKV

SMALL_VOCABULARY = True

GROUPS = "parallel.tensor_parallel=2"
Asked = Callable[..., dict[str, tuple[int, ...]]]


@pytest.fixture
def stored(run_job: Any) -> Any:
    """Run the job with these settings on some ranks, storing keys and values."""
    return lambda ranks, *settings, **more: run_job(ranks, "output.kv=true", *settings, **more)


@pytest.fixture
def asked(run_job: Any, ask_about: Any) -> Asked:
    """Ask what a run stored; return the answers."""

    def run(ranks: int, of: Any, *settings: str) -> dict[str, tuple[int, ...]]:
        ran = run_job(ranks, *settings, of=ask_about(of.folder))
        assert all(one.computed_tokens < 64 for one in ran.records.values()), "the documents are loaded"
        tokens: dict[str, tuple[int, ...]] = ran.tokens
        return tokens

    return run


def stored_in_pieces(stored: Any, ranks: int, *settings: str) -> Any:
    """Run the job, and leave what its ranks wrote as if it were too large to be merged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvr_mpi.store.rewrite.MERGE_MAX_BYTES", 0)
        return stored(ranks, GROUPS, *settings, to="pieces")


def layers_of(folder: Path) -> dict[str, tuple[StoredKV, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """All keys and values of a run, with all that it says held against its checksums."""
    found, results = {}, open_results(folder)
    for name in results.ids():
        with results.open(name) as (_, kv):
            found[name] = kv, [kv.read(layer) for layer in kv.layers]
    return found


def assert_alike(found: Any, wanted: Any) -> None:
    """Held by the same tokens, in the same shapes, to rounding, and of the same weights."""
    mine, theirs = layers_of(found.folder), layers_of(wanted.folder)
    assert mine.keys() == theirs.keys() and len(mine) == 5
    for name, (kv, layers) in mine.items():
        other, expected = theirs[name]
        assert len(kv.pieces) == len(kv.pieces[0]) == 1 and kv.tokens == other.tokens
        torch.testing.assert_close(layers, expected, rtol=0, atol=1e-4)
    header, like_header = read_run_header(found.folder), read_run_header(wanted.folder)
    assert header is not None and like_header is not None
    assert header.identity == like_header.identity and header.model == like_header.model
    assert not list(found.folder.glob("kv-*.h5"))
    assert found.tokens == wanted.tokens


@pytest.mark.slow
def test_what_groups_store_is_what_one_process_stores(stored: Any, asked: Asked) -> None:
    """In pieces, asked by groups of another number; and when the pieces are put together."""
    alone, pieces = stored(1), stored_in_pieces(stored, 4)
    # Of two slices of two lanes each; short prompts, of one group each, have two.
    assert sum(len(place.pieces) for place in index_run(pieces.folder).places.values()) > 10
    wanted = asked(1, alone)
    assert len(wanted) == 10 and asked(2, pieces, GROUPS) == wanted
    merge_run(pieces.folder)
    assert_alike(pieces, alone)


@pytest.mark.long
def test_anybody_asks_and_exports_what_groups_stored(stored: Any, asked: Asked, run_kvr: Any, tmp_path: Path) -> None:
    alone, merged = stored(1), stored(4, GROUPS)
    assert_alike(merged, alone)
    pieces = stored_in_pieces(stored, 4)
    assert asked(4, merged, GROUPS) == asked(1, pieces) == asked(3, pieces) == asked(1, alone)
    mine, theirs = (open_results(one.folder).kv("doc-4.txt") for one in (pieces, alone))
    assert mine.token_ids == theirs.token_ids
    torch.testing.assert_close(mine.layers, theirs.layers, rtol=0, atol=1e-4)
    assert run_kvr("export", pieces.folder, "--kv", tmp_path / "tensors")[0] == 0


@pytest.mark.long
def test_kv_heads_that_several_ranks_have_are_stored_once(stored: Any, asked: Asked) -> None:
    alone, many = stored(1), stored(4, "parallel.tensor_parallel=4")
    assert_alike(many, alone)
    assert asked(4, alone, "parallel.tensor_parallel=4") == asked(1, many) == asked(1, alone)


@pytest.mark.long
def test_a_job_that_lacks_some_heads_does_their_documents_again(stored: Any) -> None:
    alone, pieces = stored(1), stored_in_pieces(stored, 4)
    lost = sorted(pieces.folder.glob("kv-*.h5"))[-1]
    lost.unlink()
    again = stored(1, to="pieces", words=["--resume"])
    assert f"{lost.name} is gone" in again.log
    assert_alike(again, alone)


@pytest.mark.slow
def test_a_damaged_piece_is_an_error_record_on_all_ranks(stored: Any, run_job: Any, ask_about: Any) -> None:
    """One rank of the group reads it, the other does not: nobody waits, and nobody answers from it."""
    pieces = stored_in_pieces(stored, 2, "documents.limit=4").folder
    (path,) = pieces.glob("kv-*-0001-*.h5")
    with h5py.File(path, "r+") as file:
        keys = kv_in(file, "doc-2.txt")["layer_001/keys"]
        keys[5] = np.asarray(keys[5]) + 1
    records = run_job(2, GROUPS, of=ask_about(pieces), code=65).records.values()
    bad = [record for record in records if record.document == "doc-2.txt"]
    assert len(bad) == 2 and all("cannot read what is stored" in record.error for record in bad)
    assert len(records) == 8 and len([record for record in records if record.status == "done"]) == 6
    assert not any(record.token_ids for record in bad)


@pytest.mark.long
@pytest.mark.parametrize("groups", [1, 2])
def test_what_stays_spread_over_groups_is_stored_and_asked_alike(stored: Any, asked: Asked, groups: int) -> None:
    alone, spread = stored(1), stored(2 * groups, GROUPS, "output.kv=sharded")
    like = layers_of(alone.folder)
    for name, (kv, layers) in layers_of(spread.folder).items():
        assert kv.tokens == like[name][0].tokens
        torch.testing.assert_close(layers, like[name][1], rtol=0, atol=1e-4)
    assert spread.tokens == alone.tokens
    assert asked(2 * groups, alone, GROUPS, "parallel.ranks_per_chain=all") == asked(1, alone)


@pytest.mark.long
@pytest.mark.parametrize("method", ["ada-snapkv", "snapkv", "pyramidkv", "streaming-llm", "headkv"])
def test_heads_of_a_group_keep_what_those_of_one_process_keep(
    stored: Any, asked: Asked, method: str, job: Path, run_kvr: Any, tmp_path: Path
) -> None:
    """Also heads that compete: of which scores the other ranks of the group have some."""
    budget, window = "compress.budget=64", "compress.window=16"
    settings = [f"compress.method={method}", budget, "generation.max_new_tokens=32", "compress.observes=document"]
    settings += [] if method == "streaming-llm" else [window]
    if method == "headkv":  # by a profile of the whole model, made on one rank
        profile = tmp_path / "heads.json"
        sampled = [word for one in ("compress.method=ada-snapkv", budget, window) for word in ("--set", one)]
        assert run_kvr("search", job, *sampled, "--heads", profile)[0] == 0
        settings.append(f"compress.profile={profile}")
    alone, groups = stored(1, *settings), stored(4, GROUPS, *settings)
    assert groups.tokens == alone.tokens
    mine = layers_of(groups.folder)
    for name, (kv, _) in layers_of(alone.folder).items():
        found = mine[name][0]
        assert found.compression == kv.compression
        for layer in kv.layers:
            rows, like = found.rows(layer), kv.rows(layer)
            assert (rows is None) == (like is None)
            if rows is not None and like is not None:
                assert rows.counts == like.counts and np.array_equal(rows.positions, like.positions)
    for one, other in zip(groups.records.values(), alone.records.values(), strict=True):
        assert (one.retained_tokens, one.retained_bytes) == (other.retained_tokens, other.retained_bytes)
    assert asked(2, groups, GROUPS) == asked(1, groups) == asked(1, alone)


@pytest.mark.long
def test_groups_go_on_from_what_any_other_stored(stored: Any) -> None:
    """A beginning of 256 tokens, on every rank its own heads."""
    alone, groups = stored(1), stored(2, GROUPS)
    for run in (alone, groups):
        again = stored(4, GROUPS, f"documents.reuse={run.folder}")
        assert again.tokens == alone.tokens
        reused = [one.id for one in again.records.values() if one.prompt_tokens - one.computed_tokens >= 256]
        assert reused == [one.id for one in alone.records.values() if one.prompt_tokens > 256] != []
