"""What a job records of itself: spans that add up, of every rank, whatever becomes of the job; and what it costs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_logs import logger_to

from kvr_mpi.errors import OutputError
from kvr_mpi.events import Events, Span
from kvr_mpi.plain import read_plain
from kvr_mpi.report.page import page_of
from kvr_mpi.runtime import meters
from kvr_mpi.runtime.meters import Meters
from kvr_mpi.store.cost import Cost, total_cost
from kvr_mpi.store.results import open_results
from kvr_mpi.store.traces import RankTrace, TraceHeader, TraceWriter, read_traces, trace_files

HEADER = TraceHeader(rank=0, size=1, session=1, host="here", device="cpu")
TRACED = "output.trace=true"


def of_kind(trace: RankTrace, *kinds: str) -> list[Span]:
    return [span for span in trace.spans if span.kind in kinds]


def test_every_rank_says_what_it_did_and_the_answers_stay_the_same(run_job: Any) -> None:
    plain, run = run_job(2), run_job(2, TRACED)
    assert run.tokens == plain.tokens and not trace_files(plain.folder)
    traces = list(read_traces(run.folder))
    assert [(trace.header.rank, trace.header.size, trace.header.session) for trace in traces] == [(0, 2, 1), (1, 2, 1)]
    records = run.records
    for trace in traces:
        assert trace.has_ended and not trace.is_full and not trace.damaged and trace.clock_error_s < 60
        assert trace.memory and of_kind(trace, "write", "decode")
        for number, prompt in trace.prompts.items():
            mine = [span for span in trace.spans if span.prompt == number]
            (prefill,) = (span for span in mine if span.kind == "prefill")
            layers = [span for span in mine if span.kind == "layer"]
            if prompt.what == "packed":
                continue
            record, place = records[prompt.document], prompt.stop - prompt.start
            assert [span.layer for span in layers] == [0, 1, 2] and prompt.tokens == record.prompt_tokens
            known = record.prompt_tokens - record.computed_tokens
            assert place in [after - max(known, before) for before, after in pairwise(record.slices)]
            for before, after in pairwise([prefill.began_s, *(span.ended_s for span in layers)]):
                assert before <= after
            assert layers[0].began_s == pytest.approx(prefill.began_s, abs=1e-5)
            assert layers[-1].ended_s == pytest.approx(prefill.ended_s, abs=1e-5)
            waits = [span for span in mine if span.kind == "wait"]
            if trace.header.rank == prompt.decode_rank and prompt.ranks == 2:
                waited_s = sum(span.ended_s - span.began_s for span in waits)
                assert waits and waited_s == pytest.approx(record.wait_s, abs=1e-3)
                assert {span.peer for span in waits} == {1 - prompt.decode_rank}
            elif prompt.ranks == 2:
                assert {span.layer for span in mine if span.kind == "send"} >= {0, 1, 2}


@pytest.mark.slow
def test_prefills_have_their_place_in_time(run_job: Any, ask_about: Any) -> None:
    """Also those that go on from stored prompts; and a shared beginning is in no prompt's own span again."""
    ran = run_job(1, "output.kv=true")
    asked = run_job(2, "output.trace=true", "parallel.ranks_per_chain=all", of=ask_about(ran.folder))
    prompts = "prompt.template={who = '{text} who?', when = '{text} when?'}"
    several = run_job(1, "output.trace=true", prompts)
    for trace in (*read_traces(asked.folder), *read_traces(several.folder)):
        spans = sorted(of_kind(trace, "prefill"), key=lambda span: span.began_s)
        ends = [span.ended_s for span in of_kind(trace, "write")]
        assert len(spans) > 2 and all(0.0 <= span.began_s < span.ended_s <= max(ends) for span in spans)
        assert all(before.ended_s <= after.began_s + 2e-6 for before, after in pairwise(spans))


@pytest.mark.slow
def test_a_resumed_job_adds_its_own_and_overwriting_removes_all(run_job: Any) -> None:
    out = run_job(2, TRACED, "documents.shard=0/2", to="out").folder
    before = [file.read_bytes() for file in trace_files(out)]
    assert len(before) == 2
    run_job(2, TRACED, to="out", words=["--resume"])
    names = [f"000{session}-000{rank}.json" for session in (1, 2) for rank in (0, 1)]
    assert [file.name for file in trace_files(out)] == names
    assert [file.read_bytes() for file in trace_files(out)[:2]] == before
    events = (json.loads(file.read_text().rstrip().rstrip(",") + "]") for file in trace_files(out))
    assert len({one["pid"] for each in events for one in each}) == 4, "as Chrome and Perfetto read them"
    run_job(2, to="out", words=["--overwrite"])
    assert not list(out.glob("trace*")), "what is there of another run would be taken for this one's"


def write_spans(folder: Path, count: int, limit_bytes: int = 1 << 20) -> list[str]:
    said: list[str] = []
    events = Events(keeps_spans=True)
    writer = TraceWriter(folder, HEADER, events, offset_s=1000.0, limit_bytes=limit_bytes, logger=logger_to(said))
    for number in range(count):
        events.add(Span("wait", number, number + 0.5, 0, 1, 0))
    writer.close()
    return said


def test_a_killed_job_leaves_what_was_written(tmp_path: Path) -> None:
    write_spans(tmp_path, 20)
    (path,) = trace_files(tmp_path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        traces = list(read_traces(tmp_path))
        assert len(traces) == (whole[:size].count(b"\n") > 1)
        for trace in traces:
            whole_lines = whole[: whole.rindex(b"\n", 0, size) + 1]
            assert not trace.damaged and trace.has_ended == (b'"ended"' in whole_lines)
            assert len(trace.spans) == whole_lines.count(b'"cat":"wait"')
    path.write_bytes(
        whole.replace(b'"cat":"wait"', b'"cat":"what"', 1).replace(b'"ts":1004000000,', b'"ts":"4",', 1)
        + b'"prompt",\n5\n'
    )
    (trace,) = read_traces(tmp_path)
    assert trace.damaged == 4 and len(trace.spans) == 18


def test_traces_are_written_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "trace").symlink_to("elsewhere")
    with pytest.raises(OutputError, match="symbolic link"):
        write_spans(tmp_path, 1)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_trace_ends_at_its_size_and_clocks_that_differ_are_aligned(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (said,) = write_spans(tmp_path / "full", 1000, limit_bytes=8192)
    (path,) = trace_files(tmp_path / "full")
    (trace,) = read_traces(tmp_path / "full")
    assert "has reached its limit" in said and path.stat().st_size <= 8192 + 128
    assert trace.is_full and 40 < len(trace.spans) < 1000 and not trace.damaged
    write_spans(tmp_path, 3)
    (path,) = trace_files(tmp_path)
    for at_s, ahead_s in ((1000, 5.0), (1002, 5.2)):
        event = {"ph": "M", "name": "clock", "ts": 1_000_000 * at_s, "args": {"ahead_s": ahead_s, "error_s": 0.001}}
        path.write_text(f"{path.read_text()}{json.dumps(event)},\n")
    (trace,) = read_traces(tmp_path)
    assert [span.began_s for span in trace.spans] == pytest.approx([995.0, 995.9, 996.8])
    assert trace.clock_error_s == 0.001


# What a run costs: energy from a tree like powercap's, shared among documents, kept when it is merged or resumed


CPU = torch.device("cpu")
RANGE_UJ = 10_000_000


def add_zone(powercap: Path, zone: str, name: str, microjoules: int = 0) -> Path:
    folder = powercap / f"intel-rapl:{zone}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def spent(meter: Meters) -> float | None:
    return meter.cost().joules


def test_packages_and_memory_count_once_and_ranks_of_a_host_share_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    powercap, now_s = tmp_path / "powercap", [100.0]
    monkeypatch.setattr(meters, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    files = [add_zone(powercap, zone, name) for zone, name in (("0", "package-0"), ("1", "package-1"), ("0:1", "dram"))]
    others = [add_zone(powercap, zone, name) for zone, name in (("2", "psys"), ("0:0", "core"))]
    first, second = (Meters(CPU, 2, rank, powercap) for rank in range(2))
    now_s[0] += 10
    for file in (*files, *others):
        file.write_text("4000000")
    assert spent(first) == spent(second) == pytest.approx(6.0)
    found = total_cost(meter.cost(3.0, 4) for meter in (first, second))
    assert found.joules == pytest.approx(12.0) and found.meters == "RAPL: dram, package"
    assert found.joules_per_rank_s == pytest.approx(2.0)
    assert (found.node_s, found.core_s) == (10, 80), "the first rank of a host counts the node"


def test_a_counter_that_begins_anew_goes_on(tmp_path: Path) -> None:
    file = add_zone(tmp_path, "0", "package-0", RANGE_UJ - 1_000_000)
    meter = Meters(CPU, powercap=tmp_path)
    for now, seen in ((2_000_000, 3.0), (9_000_000, 10.0), (1_000_000, 12.0)):
        file.write_text(str(now))
        assert spent(meter) == pytest.approx(seen)


def test_what_cannot_be_read_has_no_figure_but_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    powercap = tmp_path / "powercap"
    assert "has no RAPL zones" in Meters(CPU, powercap=powercap).cost().meters
    file = add_zone(powercap, "0", "package-0")
    meter = Meters(CPU, powercap=powercap)
    file.unlink()
    assert spent(meter) is None and "a counter failed" in meter.cost().meters
    file.write_text("much")
    assert "much" in Meters(CPU, powercap=powercap).cost().meters

    def refuse(self: Path, *given: Any, **options: Any) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(self, *given, **options)

    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", refuse)
    closed = Meters(CPU, powercap=powercap).cost()
    assert closed.joules is None and closed.meters.endswith("energy_uj is for root only")
    known = Cost("a", joules=5.0, rank_s=1.0, meters="RAPL: package")
    assert total_cost([known, closed]).joules is None, "half of the energy is no figure"
    assert total_cost([known, closed]).meters.endswith("for root only")
    assert total_cost([known, closed]).describe(1).endswith("core hours"), "a line without energy"


def test_a_line_that_is_no_cost_is_damaged() -> None:
    for change in (
        *({"joules": -1.0}, {"rank_s": float("inf")}, {"core_s": "1"}, {"node_s": True}, {"key": 3}, {"meters": 1}),
        *({"expected_s": [1.0]}, {"expected_s": [1.0, 2.0, "3"]}, {"expected_s": 3}, {"took_s": None}),
    ):
        with pytest.raises(ValueError, match=next(iter(change))):
            read_plain(Cost, {**Cost("k", joules=2.0).as_line(), **change})


def test_documents_share_what_a_run_has_spent(tmp_path: Path, run_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add_zone(tmp_path / "powercap", "0", "package-0")
    readings = iter(range(1, 1000))
    monkeypatch.setattr(meters, "POWERCAP", tmp_path / "powercap")
    monkeypatch.setattr(meters.Zone, "joules", lambda zone: 100.0 * next(readings))
    first = run_job(2, "documents.limit=3", to="out")
    assert "(RAPL: package)" in first.log and "core hours" in first.log
    before = open_results(first.folder)
    run_job(1, to="out")
    results = open_results(first.folder)
    assert len(results) == 5 and results.cost.joules and before.cost.joules
    assert results.cost.joules > before.cost.joules and results.cost.core_s > before.cost.core_s
    assert len(results.costs) == 3, "two ranks, and then one"
    assert f"Cost: {results.cost.describe(5)}" in page_of(tmp_path / "out")[0].decode()
    records = list(results)
    assert sum(record.joules for record in records) == pytest.approx(results.cost.joules)
    assert sum(record.rank_s for record in records) == pytest.approx(results.cost.rank_s)
    assert min(record.rank_s for record in records) > 0
