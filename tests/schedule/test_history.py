"""What past jobs say of the next one: its interval, and how long answers are."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_logs import logger_to
from made_tables import a_table

from kvr_mpi.events import Totals
from kvr_mpi.job import JobSpec
from kvr_mpi.runtime import outcome
from kvr_mpi.runtime.job_ranks import JobRanks
from kvr_mpi.runtime.session import Machine
from kvr_mpi.schedule.history import (
    KEPT_JOBS,
    History,
    PastJob,
    expect,
    expected_tokens,
    file_of,
    find_history,
    keep,
    read_history,
)
from kvr_mpi.transport.local import LocalTransport

NAME = ("model", "float32")
RATES = a_table().rates


def a_job(prefill_s: float, decode_s: float, seconds: float, **more: Any) -> PastJob:
    told = {"date": "2026-11-26T08:00:00Z", "start_s": 10.0, "answer_tokens": 50.0, "limit_tokens": 96} | more
    return PastJob(prefill_s=prefill_s, decode_s=decode_s, seconds=seconds, **told)


def a_history(ranks: int = 2, device: str = "a processor", **more: Any) -> History:
    jobs = (a_job(90.0, 10.0, 110.0, **more),)
    return History(fingerprint=NAME[0], dtype=NAME[1], device=device, ranks=ranks, rates=RATES, jobs=jobs)


def test_four_of_five_jobs_end_within_their_interval() -> None:
    """On machines that are slower than the model by any factors, and scatter by 6%; jobs of every kind."""
    draw, inside, widths = random.Random(0), 0, []
    for _ in range(100):
        factors, jobs = (draw.uniform(0.8, 1.5), draw.uniform(0.8, 1.5)), []
        for number in range(10):
            parts = draw.uniform(50, 300), draw.uniform(2, 200)
            took = sum(factor * part for factor, part in zip(factors, parts, strict=True)) * draw.lognormvariate(
                0, 0.06
            )
            if number >= 4:
                found = expect(jobs, *parts, 96)
                inside += found.low_s <= 10.0 + took <= found.high_s
                widths.append(found.high_s / found.seconds - 1)
            jobs.append(a_job(*parts, took))
    assert 0.8 <= inside / 600 <= 0.95
    assert sorted(widths)[570] < 0.2, "of nineteen in twenty"


def test_jobs_of_another_mix_make_a_wider_interval_and_scatter_and_unknown_answers_do() -> None:
    def width(jobs: list[PastJob], *job: Any) -> float:
        found = expect(jobs, *job)
        return found.high_s / found.seconds

    prefills, decodes = [a_job(100.0, 1.0, 120.0)] * 5, [a_job(10.0, 100.0, 120.0)] * 5
    found = expect(prefills, 200.0, 2.0, 96)
    assert found.seconds == pytest.approx(10 + 240, rel=0.02) and found.start_s == 10
    assert width(prefills, 2.0, 200.0, 96) > width(prefills, 200.0, 2.0, 96) + 0.1
    scattered = [a_job(100.0, 1.0, seconds) for seconds in (70.0, 190.0, 100.0, 150.0, 90.0)]
    assert width(scattered, 200.0, 2.0, 96) > 1.3 > width(prefills, 200.0, 2.0, 96)
    assert width(decodes, 10.0, 100.0, 5000) > width(decodes, 10.0, 100.0, 2) + 0.1


@pytest.mark.parametrize(
    ("past", "limit", "expected"),
    [
        ([(50.0, 96)], 16, 14),
        ([(50.0, 96)], 0, 0),
        ([(15.5, 16)], 96, 80),  # would have been longer
        ([(50.0, 10**6), (200.0, 10**6)], 10**6, 100),
        ([], 96, 96),
        ([(0.0, 96)], 96, 1),
        ([(96.0, 96)], 96, 96),
    ],
)
def test_answers_are_as_long_as_those_of_earlier_jobs(past: list[tuple[float, int]], limit: int, expected: int) -> None:
    jobs = [a_job(1.0, 1.0, 2.0, answer_tokens=mean, limit_tokens=most) for mean, most in past]
    assert expected_tokens(jobs, limit) == pytest.approx(expected, abs=1)


def test_histories_are_found_by_model_and_ranks_and_nothing_else_is_read(tmp_path: Path) -> None:
    assert find_history(tmp_path, *NAME, 2) is None
    for ranks, device, date in ((2, "old", "2026-11-24T08:00:00Z"), (2, "new", "2026-11-25T08:00:00Z"), (8, "x", None)):
        history = a_history(ranks, device, **({"date": date} if date else {}))
        keep(file_of(tmp_path, *NAME, device, ranks), history)
    found = [find_history(tmp_path, *NAME, ranks) for ranks in (1, 2, 6)]
    assert [one and (one.ranks, one.device) for one in found] == [(2, "new"), (2, "new"), (8, "x")]
    assert find_history(tmp_path, "another", "float32", 2) is None
    file = file_of(tmp_path, *NAME, "new", 2)
    told = json.loads(file.read_text())
    others = [told | {"fingerprint": "another"}, told | {"jobs": [told["jobs"][0] | {"seconds": -1.0}]}]
    for planted in (b"", b"{", b'{"jobs": ' + b"[" * 100_000, *(json.dumps(other).encode() for other in others)):
        file.write_bytes(planted)
        assert read_history(file, *NAME) is None
    file.unlink()
    file.symlink_to("/dev/zero")
    assert read_history(file, *NAME) is None
    history = a_history()
    for number in range(KEPT_JOBS + 3):
        history = history.after(a_job(1.0, 1.0, 2.0, limit_tokens=number))
    assert [job.limit_tokens for job in history.jobs] == [*range(3, KEPT_JOBS + 3)], "the latest"


def test_a_job_leaves_what_it_took_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once measured, ranks are not measured again; a job that is too short, or of another kind, leaves nothing."""
    measured: list[object] = []
    monkeypatch.setattr(outcome, "measure_costs", lambda loaded, ranks: measured.append(loaded) or RATES)
    monkeypatch.setattr(outcome, "devices_of", lambda loaded, ranks: "a processor")
    job = {"model": {"path": "m"}, "documents": {"path": "d"}, "output": {"path": "o"}}
    loaded = SimpleNamespace(fingerprint=NAME[0], dtype="torch.float32")
    frame = SimpleNamespace(max_tokens=8000, text_budget=7900, overlap=0)
    done, said = Totals(texts=[3000, 5000, 500], prompts=3, new_tokens=150, answers=3), list[str]()

    def keeps(seconds: float, **more: Any) -> Any:
        spec = JobSpec.model_validate(job | more)
        here = {
            "machine": Machine(tmp_path),
            "ranks": JobRanks(LocalTransport(), LocalTransport()),
            "logger": logger_to(said, logging.DEBUG),
        }
        session: Any = SimpleNamespace(once_s=5.0, spec=spec, loaded=loaded, frame=frame, costs=None, **here)
        return outcome.keep_outcome(session, done, seconds, 8.0)

    several = {"template": {"a": "{text} a", "b": "{text} b"}}
    assert keeps(3.0) is None and keeps(300.0, prompt=several) is None
    with monkeypatch.context() as without_room:
        without_room.setattr(outcome, "measure_costs", lambda loaded, ranks: 1 // 0)
        assert keeps(300.0) is None and not list(tmp_path.iterdir()), "a job does not fail for that"
        assert "could not be measured: integer division" in said.pop()
    assert keeps(300.0) is None and len(measured) == 1
    expected = keeps(310.0)
    assert expected.low_s < 308 < expected.high_s and expected.jobs == 1 and len(measured) == 1
    history = find_history(tmp_path, *NAME, 1)
    assert history is not None and [one.seconds for one in history.jobs] == [300.0, 310.0]
    assert history.jobs[0].answer_tokens == 50
    assert sum(one.prefill_s + one.decode_s for one in history.jobs) == pytest.approx(610), "forecast as they took"
    assert history.rates.token_s > 5 * RATES.token_s, "scaled, since these jobs took so much longer"
    assert history.jobs[0].start_s == 3, "later jobs need not convert the model"
    (tmp_path / "jobs").rename(tmp_path / "elsewhere")
    (tmp_path / "jobs").write_text("")
    assert keeps(310.0) is None and "is not recorded" in said[-1]
