"""Jobs whose keys and values stay spread over the ranks: the answers of any other job, and nothing lost or mixed up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import pytest
import torch
from made_jobs import last_line
from made_runs import new_writer, record
from models import tiny

from kvr_mpi import open_results
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.logs import SILENT
from kvr_mpi.prefill.one_prompt import own_pool
from kvr_mpi.runtime.result_sink import ResultSink
from kvr_mpi.store.folder import survey
from kvr_mpi.store.kv_reader import KVReader
from kvr_mpi.store.volumes import key_of

LONGER = "prompt.max_tokens=400"
SHARDED = ("output.kv=sharded", LONGER)


@pytest.fixture
def truth(run_job: Any) -> Path:
    """The same job on one rank, which keeps everything."""
    folder: Path = run_job(1, "output.kv=true", LONGER, to="truth").folder
    return folder


def test_a_rank_that_stores_its_shard_leaves_the_record_to_another(tmp_path: Path) -> None:
    """A record of its own would be an error record, which a resumed job would keep if the answer is lost."""
    loaded = tiny("llama-gqa")
    shard = SequenceKV(loaded, own_pool(loaded), 4, length=4, start=1, stop=4, longest=4)
    for layer, shape in enumerate(loaded.shape.layers):
        shard.admit(layer, 1, *torch.ones(2, 1, shape.num_kv_heads, 3, shape.key_dim))
    prompt: Any = SimpleNamespace(ids=(7, 8, 9, 5), text=(0, 4))
    writer = new_writer(tmp_path)
    nothing: Any = None
    progress: Any = SimpleNamespace(logger=SILENT)
    session: Any = SimpleNamespace(
        spec=SimpleNamespace(output=SimpleNamespace(kv="sharded")),
        loaded=SimpleNamespace(part=None),
        ranks=SimpleNamespace(tells=True),
    )
    ResultSink(session, writer, nothing, progress).write_shard(record("a"), shard, prompt)
    writer.close()
    found = survey(tmp_path)
    assert not found.records and [list(pieces) for _, pieces in found.volumes.values()] != []


def check_only_own(folder: Path) -> None:
    """Every rank has written its slice of a document's last prompt, once, into a volume of its own."""
    results, written = open_results(folder), Counter[str]()
    for volume in folder.glob("kv-*.h5"):
        with h5py.File(volume) as file:
            written.update(list(file["kv"]))
    for name in results.ids("done"):
        record, pieces = results[name], results.places[name].pieces
        assert len(pieces) == len({piece.path for piece in pieces}) == max(1, len(record.slices) - 1)
        for piece, start in zip(pieces, record.slices, strict=False):
            with KVReader(name, [piece], is_part=True) as kv:
                assert kv.tokens is not None and kv.tokens.first == start
    assert written == Counter(key_of(piece) for place in results.places.values() for piece in place.needs)


def check_same(folder: Path, truth: Path) -> None:
    found, wanted = open_results(folder), open_results(truth)
    assert [(one.id, one.token_ids) for one in found] == [(one.id, one.token_ids) for one in wanted]
    for name in wanted.ids():
        here, there = found.kv(name), wanted.kv(name)
        assert here.token_ids == there.token_ids and here.text == there.text
        torch.testing.assert_close(here.layers, there.layers, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("unmerged")
@pytest.mark.parametrize("kv", ["true", pytest.param("sharded", marks=pytest.mark.long)])
@pytest.mark.slow
def test_what_every_rank_wrote_of_its_own_is_read_as_one(
    truth: Path, run_job: Any, run_kvr: Any, ask_about: Any, kv: str
) -> None:
    """Asked, exported, read from Python, gone on from and put together: as if one rank had written it all."""
    out = run_job(3, f"output.kv={kv}", LONGER, to="out").folder
    cut = {record.id for record in open_results(out) if len(record.slices) > 2}  # others are too short for a chain
    assert len(list(out.glob("kv-*.h5"))) >= 2 and len(cut) >= 2
    check_only_own(out)
    asked = run_job(2, of=ask_about(out))
    assert max(record.computed_tokens for record in asked.records.values()) < 40
    assert asked.tokens == run_job(1, of=ask_about(truth)).tokens
    check_same(out, truth)
    again = run_job(2, f"output.kv={kv}", LONGER, to="out", words=["--resume"])
    assert "5 documents already done" in again.log
    code, _, said = run_kvr("merge", out)
    assert code == 0 and not list(out.glob("kv-*.h5")), said
    check_same(out, truth)


@pytest.mark.usefixtures("unmerged")
def test_bad_documents_stop_nothing(job: Path, run_job: Any) -> None:
    """Of those that are split, only the prompt about the parts' answers is stored."""
    (job.parent / "corpus" / "empty.txt").write_text("")
    (job.parent / "corpus" / "short.txt").write_text("a")
    split = "prompt.too_long=split", "prompt.max_tokens=150"
    done = run_job(3, SHARDED[0], *split, "prompt.template={text}", "prompt.chat_template=false", code=65)
    assert last_line(done.log).count("2 of 7 documents failed")
    found = done.records
    assert [record.status for record in found.values()] == ["done"] * 5 + ["error"] * 2
    assert "tokens cannot be spread over 3 ranks" in found["short.txt"].error
    assert max(record.parts for record in found.values()) > 1
    check_only_own(done.folder)
