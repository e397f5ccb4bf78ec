"""What a job with groups stores is what one process stores: whoever reads or asks it, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from made_jobs import answers, with_settings
from made_runs import kv_in

from kvr_mpi.store.folder import index_run, read_run_header
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.stored_kv import StoredKV

SMALL_VOCABULARY = True

GROUPS = "parallel.tensor_parallel=2"
Run = Callable[..., Path]


@pytest.fixture
def stored(job: Path, tmp_path: Path, run_here: Any) -> Run:
    """Run the job with these settings on some ranks; return the folder of what it stored."""

    def run(ranks: int, *settings: str, name: str) -> Path:
        folder = tmp_path / name
        done = run_here(ranks, [job, *with_settings(f"output.path={folder}", "output.kv=true", *settings)])
        assert done.returncode == 0, done.stderr
        return folder

    return run


@pytest.fixture
def asked(job: Path, tmp_path: Path, run_here: Any) -> Callable[..., dict[str, tuple[int, ...]]]:
    """Ask what a run stored; return the answers."""
    path = tmp_path / "ask.toml"
    model = next(line for line in job.read_text().splitlines() if "path" in line)
    ask = '[questions]\nask = ["Who left?", "Which boat?"]\n'
    path.write_text(f"[model]\n{model.strip()}\n{ask}[generation]\nmax_new_tokens = 8\n")

    def run(ranks: int, of: Path, *settings: str, code: int = 0) -> dict[str, tuple[int, ...]]:
        folder = tmp_path / f"asked-{of.name}-{ranks}-{abs(hash(settings))}"
        done = run_here(ranks, [path, *with_settings(f"documents.path={of}", f"output.path={folder}", *settings)])
        assert done.returncode == code, done.stderr
        if code == 0:
            assert all(one.computed_tokens < 64 for one in open_results(folder)), "the documents are loaded"
        return answers(folder)

    return run


def stored_in_pieces(stored: Run, ranks: int, *settings: str) -> Path:
    """Run the job, and leave what its ranks wrote as if it were too large to be merged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvr_mpi.store.rewrite.MERGE_MAX_BYTES", 0)
        return stored(ranks, GROUPS, *settings, name="pieces")


def layers_of(folder: Path) -> dict[str, tuple[StoredKV, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """All keys and values of a run, with all that it says held against its checksums."""
    found, results = {}, open_results(folder)
    for name in results.ids():
        with results.open(name) as (_, kv):
            found[name] = kv, [kv.read(layer) for layer in kv.layers]
    return found


def assert_alike(found: Path, wanted: Path) -> None:
    """Held by the same tokens, in the same shapes, to rounding, and of the same weights."""
    mine, theirs = layers_of(found), layers_of(wanted)
    assert mine.keys() == theirs.keys() and len(mine) == 5
    for name, (kv, layers) in mine.items():
        other, expected = theirs[name]
        assert len(kv.pieces) == len(kv.pieces[0]) == 1 and kv.tokens == other.tokens
        for pair, of in zip(layers, expected, strict=True):
            for tensor, like in zip(pair, of, strict=True):
                assert tensor.shape == like.shape and float((tensor - like).abs().max()) < 1e-4
    header, like_header = read_run_header(found), read_run_header(wanted)
    assert header is not None and like_header is not None
    assert header.identity == like_header.identity and header.model == like_header.model
    assert not list(found.glob("kv-*.h5"))
    assert answers(found) == answers(wanted)


@pytest.mark.slow
def test_what_groups_store_is_what_one_process_stores(stored: Run, asked: Any) -> None:
    """In pieces, asked by groups of another number; and when the pieces are put together."""
    alone = stored(1, name="alone")
    pieces = stored_in_pieces(stored, 4)
    # Of two slices of two lanes each; short prompts, of one group each, have two.
    assert sum(len(place.pieces) for place in index_run(pieces).places.values()) > 10
    wanted = asked(1, alone)
    assert len(wanted) == 10 and asked(2, pieces, GROUPS) == wanted
    merge_run(pieces)
    assert_alike(pieces, alone)


@pytest.mark.long
def test_anybody_asks_and_exports_what_groups_stored(stored: Run, asked: Any, run_kvr: Any, tmp_path: Path) -> None:
    alone, merged = stored(1, name="alone"), stored(4, GROUPS, name="merged")
    assert_alike(merged, alone)
    pieces = stored_in_pieces(stored, 4)
    assert asked(4, merged, GROUPS) == asked(1, pieces) == asked(3, pieces) == asked(1, alone)
    mine, theirs = (open_results(one).kv("doc-4.txt") for one in (pieces, alone))
    assert mine.token_ids == theirs.token_ids and mine.layers.keys() == theirs.layers.keys()
    for number, (keys, values) in mine.layers.items():
        assert torch.allclose(keys, theirs.layers[number][0], atol=1e-4)
        assert torch.allclose(values, theirs.layers[number][1], atol=1e-4)
    for folder in (pieces, alone):
        code, out, _ = run_kvr("inspect", folder, "doc-4.txt", "--json")
        assert code == 0 and "doc-4.txt" in out
    assert run_kvr("export", pieces, "--kv", tmp_path / "tensors")[0] == 0


@pytest.mark.long
def test_kv_heads_that_several_ranks_have_are_stored_once(stored: Run, asked: Any) -> None:
    alone, many = stored(1, name="alone"), stored(4, "parallel.tensor_parallel=4", name="many")
    assert_alike(many, alone)
    assert asked(4, alone, "parallel.tensor_parallel=4") == asked(1, many) == asked(1, alone)


@pytest.mark.long
def test_a_job_that_lacks_some_heads_does_their_documents_again(stored: Run, job: Path, run_here: Any) -> None:
    alone = stored(1, name="alone")
    pieces = stored_in_pieces(stored, 4)
    lost = sorted(pieces.glob("kv-*.h5"))[-1]
    lost.unlink()
    settings = with_settings(f"output.path={pieces}", "output.kv=true")
    done = run_here(1, [job, *settings, "--resume"])
    assert done.returncode == 0 and f"{lost.name} is gone" in done.stderr, done.stderr
    assert_alike(pieces, alone)


@pytest.mark.slow
def test_a_damaged_piece_is_an_error_record_on_all_ranks(stored: Run, asked: Any, tmp_path: Path) -> None:
    """One rank of the group reads it, the other does not: nobody waits, and nobody answers from it."""
    pieces = stored_in_pieces(stored, 2, "documents.limit=4")
    (path,) = pieces.glob("kv-*-0001-*.h5")
    with h5py.File(path, "r+") as file:
        keys = kv_in(file, "doc-2.txt")["layer_001/keys"]
        keys[5] = np.asarray(keys[5]) + 1
    found = asked(2, pieces, GROUPS, code=65)
    (folder,) = tmp_path.glob("asked-pieces-*")
    records = {record.id: record for record in open_results(folder)}
    bad = [record for record in records.values() if record.document == "doc-2.txt"]
    assert len(bad) == 2 and all("cannot read what is stored" in record.error for record in bad)
    assert len(records) == 8 and len([record for record in records.values() if record.status == "done"]) == 6
    assert all(not found[record.id] for record in bad)


@pytest.mark.long
@pytest.mark.parametrize("groups", [1, 2])
def test_what_stays_spread_over_groups_is_stored_and_asked_alike(stored: Run, asked: Any, groups: int) -> None:
    alone = stored(1, name="alone")
    spread = stored(2 * groups, GROUPS, "output.kv=sharded", name="spread")
    found, like = layers_of(spread), layers_of(alone)
    for name, (kv, layers) in found.items():
        assert kv.tokens == like[name][0].tokens
        for pair, of in zip(layers, like[name][1], strict=True):
            assert all(float((one - other).abs().max()) < 1e-4 for one, other in zip(pair, of, strict=True))
    assert answers(spread) == answers(alone)
    assert asked(2 * groups, alone, GROUPS, "parallel.ranks_per_chain=all") == asked(1, alone)


@pytest.mark.long
@pytest.mark.parametrize("method", ["ada-snapkv", "snapkv", "pyramidkv", "streaming-llm", "headkv"])
def test_heads_of_a_group_keep_what_those_of_one_process_keep(
    stored: Run, asked: Any, method: str, job: Path, run_kvr: Any, tmp_path: Path
) -> None:
    """Also heads that compete: of which scores the other ranks of the group have some."""
    settings = [f"compress.method={method}", "compress.budget=64", "generation.max_new_tokens=32"]
    settings += [] if method == "streaming-llm" else ["compress.window=16"]
    settings.append("compress.observes=document")
    if method == "headkv":  # by a profile of the whole model, made on one rank
        profile = tmp_path / "heads.json"
        sampled = with_settings("compress.method=ada-snapkv", *settings[1:2], "compress.window=16")
        assert run_kvr("search", job, *sampled, "--heads", profile)[0] == 0
        settings.append(f"compress.profile={profile}")
    alone, groups = stored(1, *settings, name="alone"), stored(4, GROUPS, *settings, name="groups")
    assert answers(groups) == answers(alone)
    mine, theirs = layers_of(groups), layers_of(alone)
    for name, (kv, _) in theirs.items():
        found = mine[name][0]
        assert found.compression == kv.compression
        for layer in kv.layers:
            rows, like = found.rows(layer), kv.rows(layer)
            assert (rows is None) == (like is None)
            if rows is not None and like is not None:
                assert rows.counts == like.counts and np.array_equal(rows.positions, like.positions)
    for one, other in zip(open_results(groups), open_results(alone), strict=True):
        assert (one.retained_tokens, one.retained_bytes) == (other.retained_tokens, other.retained_bytes)
    assert asked(2, groups, GROUPS) == asked(1, groups) == asked(1, alone)


@pytest.mark.long
def test_groups_go_on_from_what_any_other_stored(stored: Run, job: Path, tmp_path: Path) -> None:
    """A beginning of 256 tokens, on every rank its own heads."""
    alone, groups = stored(1, name="alone"), stored(2, GROUPS, name="groups")
    for number, run in enumerate((alone, groups)):
        again = stored(4, GROUPS, f"documents.reuse={run}", name=f"again-{number}")
        assert answers(again) == answers(alone)
        reused = [record.id for record in open_results(again) if record.prompt_tokens - record.computed_tokens >= 256]
        assert reused == [record.id for record in open_results(alone) if record.prompt_tokens > 256] != []
