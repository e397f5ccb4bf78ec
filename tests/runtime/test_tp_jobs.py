"""Jobs whose groups are several ranks answer as jobs whose ranks have the whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_jobs import answers, spec_of, with_settings

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

TOKENS = "generation.max_new_tokens=32"


@pytest.fixture
def answered(job: Path, tmp_path: Path, run_here: Any) -> Callable[..., tuple[dict[str, tuple[int, ...]], str]]:
    """Run the job with these settings on some ranks; return its answers and its log."""
    (tmp_path / "corpus" / "doc-short.txt").write_text("It is late.")

    def run(ranks: int, *settings: str) -> tuple[dict[str, tuple[int, ...]], str]:
        folder = tmp_path / f"out-{ranks}-{abs(hash(settings))}"
        done = run_here(ranks, [job, *with_settings(f"output.path={folder}", TOKENS, *settings)])
        assert done.returncode == 0, done.stderr
        records = list(open_results(folder))
        assert len({record.id for record in records}) == len(records) == 6
        return answers(folder), done.stderr

    return run


@pytest.mark.parametrize(
    "groups", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
def test_groups_of_two_ranks_give_the_answers_of_one_process(answered: Any, groups: int) -> None:
    wanted, _ = answered(1)
    found, log = answered(2 * groups, "parallel.tensor_parallel=2")
    assert found == wanted and all(len(tokens) == 32 for tokens in found.values())
    assert f"1 chain of {counted(groups, 'tensor-parallel group')} of 2 ranks" in log


@pytest.mark.slow
def test_no_memory_on_one_rank_is_an_error_record(
    job: Path, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest document finds none on the second rank of the first group: the others are answered as ever."""
    alone, folder = tmp_path / "out-alone", tmp_path / "out-failing"
    assert run_here(1, [job, *with_settings(f"output.path={alone}")]).returncode == 0
    wanted = {record.id: record for record in open_results(alone)}
    longest = max(wanted.values(), key=lambda record: record.prompt_tokens)

    def no_memory(model: Any, ids: torch.Tensor, cache: SliceCache, **options: Any) -> torch.Tensor:
        partition = getattr(cache.route, "partition", None)
        if threading.current_thread().name == "rank 1" and partition and partition.tokens == longest.prompt_tokens:
            raise MemoryError("out of memory (on purpose)")
        return run_model(model, ids, cache, **options)

    monkeypatch.setattr("kvr_mpi.prefill.one_prompt.run_model", no_memory)
    done = run_here(4, [job, *with_settings(f"output.path={folder}", "parallel.tensor_parallel=2")])
    assert done.returncode == 65, done.stderr
    found = {record.id: record for record in open_results(folder)}
    assert found.keys() == wanted.keys()
    assert "ran out of memory" in (found.pop(longest.id).error or "")
    assert all(record.token_ids == wanted[name].token_ids for name, record in found.items())
    # Whoever goes on with it, in whatever layout, does what is left.
    again = run_here(1, [job, *with_settings(f"output.path={folder}"), "--resume", "--retry-failed"])
    assert again.returncode == 0 and answers(folder) == answers(alone), again.stderr


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
        check_job(spec_of(job, "parallel.tensor_parallel=2", *setting.split()), 4, goes_on=False, offline=True)


@pytest.mark.parametrize(("ranks", "group", "words"), [(4, 3, r"choose one of \[1, 2, 4\]"), (6, 4, "groups of 4")])
def test_ranks_that_groups_do_not_divide_are_refused(job: Path, ranks: int, group: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lay_out(spec_of(job, f"parallel.tensor_parallel={group}"), ranks)


def test_a_job_of_groups_is_planned_as_one_of_groups(job: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    made = plan_job(spec_of(job, "parallel.tensor_parallel=2"), machine, 8, "h100-80gb")
    whole = plan_job(spec_of(job), machine, 4, "h100-80gb")
    assert (made.ranks, made.schedule.ranks, whole.schedule.ranks) == (8, 4, 4)
    assert made.written_s is not None and made.forecast.costs.kv_bytes == whole.forecast.costs.kv_bytes / 2
    part, all_of_it = made.forecast.memory(300, 4), whole.forecast.memory(300, 4)
    assert part is not None and all_of_it is not None and part < all_of_it
    with pytest.raises(ConfigError, match="cannot be divided into tensor-parallel groups of 2"):
        plan_job(spec_of(job, "parallel.tensor_parallel=2"), machine, 7, "h100-80gb")


def test_every_rank_is_in_the_trace_with_its_group(job: Path, tmp_path: Path, run_here: Any) -> None:
    folder = tmp_path / "out"
    done = run_here(4, [job, *with_settings("output.trace=true", "parallel.tensor_parallel=2")])
    assert done.returncode == 0, done.stderr
    run = read_timelines(read_traces(folder))
    assert run.names == {
        0: "rank 0 (group 0.0)",
        1: "rank 1 (group 0.1)",
        2: "rank 2 (group 1.0)",
        3: "rank 3 (group 1.1)",
    }
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
