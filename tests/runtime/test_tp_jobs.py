"""Jobs whose groups are several ranks answer as jobs whose ranks have the whole model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from made_jobs import spec_of

from kvr_mpi.errors import ConfigError, KvrError, counted
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.preflight.checks import check_job, lay_out
from kvr_mpi.report.page import RunFacts, make_page
from kvr_mpi.report.timeline import read_timelines
from kvr_mpi.setup.job_setup import Machine
from kvr_mpi.setup.planning import plan_job
from kvr_mpi.store.results import open_results
from kvr_mpi.store.traces import read_traces, trace_files

SMALL_VOCABULARY = True

GROUPS = "parallel.tensor_parallel=2"


@pytest.mark.parametrize(
    "groups", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
def test_groups_of_two_ranks_give_the_answers_of_one_process(job: Path, run_job: Any, groups: int) -> None:
    (job.parent / "corpus" / "doc-short.txt").write_text("It is late.")
    wanted, found = (run_job(n, *more, "generation.max_new_tokens=32") for n, more in ((1, ()), (2 * groups, [GROUPS])))
    assert found.tokens == wanted.tokens and [len(tokens) for tokens in found.tokens.values()] == [32] * 6
    assert f"1 chain of {counted(groups, 'tensor-parallel group')} of 2 ranks" in found.log
    records = found.records.values()
    assert sum(record.rank_s for record in records) == pytest.approx(open_results(found.folder).cost.rank_s)
    assert min(record.rank_s for record in records) > 0, "a group counts its documents once"


@pytest.mark.slow
def test_no_memory_on_one_rank_is_an_error_record(run_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest document finds none on the second rank of the first group: the others are answered as ever."""
    alone = run_job(1)
    longest = max(alone.records.values(), key=lambda record: record.prompt_tokens)

    def no_memory(model: Any, ids: torch.Tensor, cache: SliceCache, **options: Any) -> torch.Tensor:
        partition = getattr(cache.route, "partition", None)
        if threading.current_thread().name == "rank 1" and partition and partition.tokens == longest.prompt_tokens:
            raise MemoryError("out of memory (on purpose)")
        return run_model(model, ids, cache, **options)

    monkeypatch.setattr("kvr_mpi.prefill.one_prompt.run_model", no_memory)
    found = run_job(4, GROUPS, to="failing", code=65).records
    assert "ran out of memory" in (found.pop(longest.id).error or "")
    assert {name: one.token_ids for name, one in found.items()} | {longest.id: longest.token_ids} == alone.tokens
    # Whoever goes on with it, in whatever layout, does what is left.
    again = run_job(1, to="failing", words=["--resume", "--retry-failed"])
    assert again.tokens == alone.tokens


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("parallel.strategy=ring", "choose strategy = 'kvr'"),
        ("parallel.ranks_per_chain=auto", "give a number of ranks"),
        ("decode.mode=head-parallel", "which tensor_parallel does already"),
        ("model.adapter=adapters/mine", "save a merged model"),
        ("model.path=org/name", "use that folder"),
        ("parallel.tensor_parallel=3", r"cannot be divided by it; choose one of \[1, 2, 4\]"),
        ("parallel.ranks_per_chain=3", "cannot be divided into chains of 3"),
    ],
)
def test_what_does_not_go_with_groups_is_refused_before_anything_is_loaded(job: Path, setting: str, words: str) -> None:
    with pytest.raises(KvrError, match=words):
        check_job(spec_of(job, GROUPS, *setting.split()), 4, goes_on=False, offline=True)
    for ranks, group, said in ((4, 3, r"choose one of \[1, 2, 4\]"), (6, 4, "groups of 4")):
        with pytest.raises(ConfigError, match=said):
            lay_out(spec_of(job, f"parallel.tensor_parallel={group}"), ranks)


def test_a_job_of_groups_is_planned_as_one_of_groups(job: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    made = plan_job(spec_of(job, GROUPS), machine, 8, "h100-80gb")
    whole = plan_job(spec_of(job), machine, 4, "h100-80gb")
    assert (made.ranks, made.schedule.ranks, whole.schedule.ranks) == (8, 4, 4)
    assert made.written_s is not None and made.forecast.costs.kv_bytes == whole.forecast.costs.kv_bytes / 2
    part, all_of_it = made.forecast.memory(300, 4), whole.forecast.memory(300, 4)
    assert part is not None and all_of_it is not None and part < all_of_it
    with pytest.raises(ConfigError, match="cannot be divided into tensor-parallel groups of 2"):
        plan_job(spec_of(job, GROUPS), machine, 7, "h100-80gb")


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
    page = make_page(RunFacts("a run", "tiny", "kvr_mpi 0"), list(open_results(folder)), run, (0.0, 0.0)).decode()
    assert "rank 3 (group 1.1)" in page
    assert "rank 2 (group 1.0)" in trace_files(folder)[2].read_text()
