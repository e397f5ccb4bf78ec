"""Jobs whose groups are several ranks answer, and store, what jobs whose ranks have the whole model do.

With one group of two ranks, `test_settings_together` shows it beside every other setting.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from weakref import WeakSet

import h5py
import numpy as np
import pytest
import torch
from chains import KINDS
from made_jobs import load
from made_runs import kv_in, stored_layers
from transformers import AutoConfig, AutoModelForCausalLM

from kvr_mpi.errors import ConfigError
from kvr_mpi.kv.chain import SliceRow
from kvr_mpi.kv.sequence import SequenceKV, bytes_of
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.prefill.memory_budget import GIB, footprint_of
from kvr_mpi.prefill.packed import PACK_TOKENS
from kvr_mpi.report.page import RunFacts, make_page
from kvr_mpi.report.timeline import read_timelines
from kvr_mpi.runtime.prediction import plan_job
from kvr_mpi.runtime.session import Machine
from kvr_mpi.store import kv_reader
from kvr_mpi.store.folder import read_run_header
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.traces import read_traces, trace_files
from kvr_mpi.store.writer import ResultWriter

GROUPS = "parallel.tensor_parallel=2"
KV = "output.kv=true"


@pytest.mark.slow
def test_what_fails_on_one_rank_is_one_error_record(job: Path, run_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest document finds no memory on the second rank of the first group, and another has no text."""
    alone = run_job(1)
    longest = max(alone.records.values(), key=lambda record: record.prompt_tokens)

    def no_memory(model: Any, ids: torch.Tensor, cache: SliceRow, **options: Any) -> torch.Tensor:
        partition = getattr(getattr(cache, "relay", None), "partition", None)
        if threading.current_thread().name == "rank 1" and partition and partition.tokens == longest.prompt_tokens:
            raise MemoryError("out of memory (on purpose)")
        return run_model(model, ids, cache, **options)

    (job.parent / "corpus" / "empty.txt").write_text("")
    written, write = list[str](), ResultWriter.write

    def counted(writer: ResultWriter, record: Record, *rest: Any) -> None:
        written.append(record.id)
        write(writer, record, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("kvr_mpi.prefill.one_prompt.run_model", no_memory)
        patch.setattr(ResultWriter, "write", counted)
        found = run_job(4, GROUPS, to="failing", code=65).records
    assert "empty" in found.pop("empty.txt").error and "ran out of memory" in found.pop(longest.id).error
    assert {name: one.token_ids for name, one in found.items()} | {longest.id: longest.token_ids} == alone.tokens
    assert sorted(written) == sorted([*alone.tokens, "empty.txt"]), "not by each rank of a group"
    again = run_job(1, to="failing", words=["--resume", "--retry-failed"], code=65)
    assert again.tokens == {**alone.tokens, "empty.txt": ()}


@pytest.mark.slow
@pytest.mark.usefixtures("unmerged")
def test_what_groups_store_is_what_one_process_stores(run_job: Any, ask_about: Any) -> None:
    """In pieces, asked by other groups; done again where heads are lost; and when the pieces are put together."""
    alone, pieces = run_job(1, KV), run_job(4, GROUPS, KV, to="pieces")
    seconds = [record.rank_s for record in pieces.records.values()]
    assert min(seconds) > 0 and sum(seconds) == pytest.approx(open_results(pieces.folder).cost.rank_s), "counted once"
    # Of two slices of two lanes each; short prompts, of one group each, have two.
    assert sum(len(place.pieces) for place in open_results(pieces.folder).places.values()) > 10
    wanted, found = (run_job(n, *more, of=ask_about(of.folder)) for n, of, *more in ((1, alone), (2, pieces, GROUPS)))
    assert len(wanted.tokens) == 10 and found.tokens == wanted.tokens
    assert all(one.computed_tokens < 64 for one in found.records.values()), "the documents are loaded"
    lost = sorted(pieces.folder.glob("kv-*.h5"))[-1]
    lost.unlink()
    assert f"{lost.name} is gone" in run_job(4, GROUPS, KV, to="pieces", words=["--resume"]).log
    assert pieces.tokens == alone.tokens
    merge_run(pieces.folder)
    assert not list(pieces.folder.glob("kv-*.h5"))
    for name in alone.tokens:
        mine, other = (stored_layers(run.folder, name) for run in (pieces, alone))
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)
    header, other_header = read_run_header(pieces.folder), read_run_header(alone.folder)
    assert header is not None and other_header is not None
    assert header.identity == other_header.identity and header.model == other_header.model


@pytest.mark.slow
def test_latents_that_all_ranks_hold_are_stored_once(run_job: Any, small_tokenizer: Any, tmp_path: Path) -> None:
    config = KINDS["deepseek-v3"]()
    config.vocab_size, config.max_position_embeddings = len(small_tokenizer), 4096
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "latents")
    small_tokenizer.save_pretrained(tmp_path / "latents")
    settings = f"model.path={tmp_path / 'latents'}", KV
    alone, groups = run_job(1, *settings, to="alone"), run_job(4, GROUPS, *settings, to="groups")
    assert groups.tokens == alone.tokens
    for name in alone.tokens:
        mine, other = (stored_layers(run.folder, name) for run in (groups, alone))
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("unmerged")
def test_a_damaged_piece_is_an_error_record_on_all_ranks(run_job: Any, ask_about: Any) -> None:
    """One rank of the group reads it, the other does not: nobody waits, and nobody answers from it."""
    run = run_job(2, GROUPS, KV, "documents.limit=4", "generation.max_new_tokens=1")
    rows, pieces = {record.ttft_s for record in run.records.values()}, run.folder
    both = sum(record.rank_s for record in run.records.values())
    assert both == pytest.approx(2 * sum(rows)), "of both ranks, divided over a row's prompts; no step followed"
    (path,) = pieces.glob("kv-*-0001-*.h5")
    with h5py.File(path, "r+") as file:
        keys = kv_in(file, "doc-2.txt")["layer_001/keys"]
        keys[5] = np.asarray(keys[5]) + 1
    records = run_job(2, GROUPS, of=ask_about(pieces), code=65).records.values()
    bad = [record for record in records if record.document == "doc-2.txt"]
    assert len(bad) == 2 and all("cannot read its stored keys and values" in record.error for record in bad)
    assert len(records) == 8 and len([record for record in records if record.status == "done"]) == 6
    assert not any(record.token_ids for record in bad)


def test_a_job_of_groups_is_planned_as_one_of_groups(job: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    made = plan_job(load(job, GROUPS), machine, 8, "h100-80gb")
    whole = plan_job(load(job), machine, 4, "h100-80gb")
    assert (made.ranks, made.schedule.ranks, whole.schedule.ranks) == (8, 4, 4)
    assert made.written_s is not None and made.forecast.costs.kv_bytes == whole.forecast.costs.kv_bytes / 2
    part, all_of_it = made.forecast.memory(300, 4), whole.forecast.memory(300, 4)
    assert part is not None and all_of_it is not None and part < all_of_it
    with pytest.raises(ConfigError, match="cannot be divided into tensor-parallel groups of 2"):
        plan_job(load(job, GROUPS), machine, 7, "h100-80gb")


def test_every_rank_is_in_the_trace_with_its_group(run_job: Any) -> None:
    folder = run_job(4, "output.trace=true", GROUPS).folder
    run = read_timelines(read_traces(folder))
    assert run.names == {rank: f"rank {rank} (group {rank // 2}.{rank % 2})" for rank in range(4)}
    assert not run.incomplete and not run.backwards and run.timelines
    for timeline in run.timelines:
        slices = {(lane.group, lane.prompt.start, lane.prompt.stop) for lane in timeline.lanes}
        assert sorted(lane.rank for lane in timeline.lanes) == [0, 1, 2, 3] and len(slices) == 2
        for lane in timeline.lanes:  # keys and values of other heads are no rank's concern
            peers = {span.peer for span in lane.spans if span.kind in ("send", "receive", "wait")}
            assert peers <= {(lane.rank + 2) % 4}
    page = make_page(RunFacts("a run", "tiny", "kvr_mpi 0"), list(open_results(folder)), run).decode()
    assert "rank 3 (group 1.1)" in page and "rank 2 (group 1.0)" in trace_files(folder)[2].read_text()


# Ranks that hold stored documents together: each is read once for all of its questions, and given back


QUESTIONS = ("Who wrote it, and what for?", "When?", "What is it about, in one word?")
DOCUMENTS = ("doc-2.txt", "doc-3.txt", "doc-4.txt")


@pytest.mark.slow
def test_a_document_is_read_once_and_given_back_where_the_next_does_not_fit_beside_it(
    run_job: Any, ask_about: Any, tiny_model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all of them, and for one and a question or two: the answers of one rank that holds everything."""
    run = run_job(1, "output.kv=true", "generation.max_new_tokens=1", "prompt.max_tokens=400").folder
    chosen = f"questions.documents={list(DOCUMENTS)}"
    whole = run_job(1, chosen, of=ask_about(run, *QUESTIONS))
    found = whole.records.values()
    longest, fresh = max(one.prompt_tokens for one in found), [one.computed_tokens for one in found]
    config = AutoConfig.from_pretrained(tiny_model_dir)
    each = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 4
    room = each * (-(-longest // 2) + 40) + footprint_of(config, torch.float32).activation_bytes(max(fresh))

    reads, held, most = Counter[str](), defaultdict[int, WeakSet[SequenceKV]](WeakSet), [0]
    read, load, lock = kv_reader.read_checked, SequenceKV.open, threading.Lock()

    def watched_read(layer: Any, column: int, first: int, last: int) -> Any:
        with lock:
            reads[layer.keys.name] += (last - first) * (column == 0)
        return read(layer, column, first, last)

    def watched_load(sequence: SequenceKV, layer_idx: int, *given: Any) -> Any:
        spans, mine = load(sequence, layer_idx, *given), held[threading.get_ident()]
        mine.add(sequence)
        most[-1] = max(most[-1], bytes_of(list(mine)))
        return spans

    monkeypatch.setattr(kv_reader, "read_checked", watched_read)
    monkeypatch.setattr(SequenceKV, "open", watched_load)
    for memory in ((), (f"parallel.memory_gib={room / GIB:.9f}",)):
        reads.clear(), held.clear(), most.append(0)
        ran = run_job(2, "parallel.ranks_per_chain=all", chosen, *memory, of=ask_about(run, *QUESTIONS))
        assert ran.tokens == whole.tokens and all(0 < record.computed_tokens < 40 for record in ran.records.values())
        once = Counter(tokens for tokens in reads.values() if tokens)  # of each document in all layers the same
        assert sorted(once.values()) == [3] * len(DOCUMENTS) and max(once) <= longest
    assert most[2] <= room < most[1]
    # On one rank, also if each question is in a row of its own.
    monkeypatch.setitem(PACK_TOKENS, "cpu", 1)
    reads.clear()
    assert run_job(1, chosen, of=ask_about(run, *QUESTIONS)).tokens == whole.tokens
    assert sorted(Counter(tokens for tokens in reads.values() if tokens).values()) == [3] * len(DOCUMENTS)
