"""Jobs with prompt lookup: the same run with the same answers, in fewer steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvr_mpi.decode.lookup import Decoded
from kvr_mpi.events import Events
from kvr_mpi.runtime.decoder import Decoder
from kvr_mpi.runtime.stopping import Stop

LONG = ("generation.max_new_tokens=60", "generation.stop_repetition=false")


def test_lookup_is_no_other_run(run_job: Any) -> None:
    """A run goes on without it, and so does one that was made without it."""
    first = run_job(1, *LONG, "generation.lookup=auto", "documents.limit=2", to="out")
    both = run_job(1, *LONG, "generation.lookup=false", to="out")
    plain = run_job(2, *LONG, "generation.lookup=false", to="plain")
    assert both.tokens == plain.tokens and first.tokens.items() <= both.tokens.items()
    for record in plain.records.values():
        assert record.decode_steps in (record.new_tokens, record.new_tokens - 1)
        assert both.records[record.id].decode_steps <= record.decode_steps
    assert not any(record.kernels for record in both.records.values())


@pytest.mark.parametrize(
    ("setting", "reason"),
    [("parallel.strategy=single", "cannot drop the last tokens"), ("parallel.tensor_parallel=2", "tensor-parallel")],
)
def test_the_log_says_why_nothing_is_looked_up(setting: str, reason: str, run_job: Any) -> None:
    ran = run_job(2, setting, "generation.lookup=auto", to="out")
    assert [line for line in ran.log.splitlines() if "without prompt lookup" in line and reason in line]


def test_records_in_16_bits_name_it(run_job: Any) -> None:
    names = {
        lookup: run_job(1, "model.dtype=bfloat16", *more, to=lookup).records["doc-0.txt"].kernels
        for lookup, more in (("auto", ("generation.lookup=auto",)), ("false", ()))
    }
    assert names["auto"] == f"{names['false']}; prompt lookup"


def test_the_time_left_counts_all_tokens_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 2 s yields 4 tokens of the only answer."""
    now_s, reported = [100.0], list[tuple[int, int, float]]()

    def step() -> list[Any]:
        now_s[0] += 2.0
        decoded.steps, decoded.tokens = decoded.steps + 1, decoded.tokens + 4
        batch.running = int(decoded.steps < 10)
        return []

    def report(answers: int, tokens: int, token_s: float, why: str) -> None:
        reported.append((answers, tokens, token_s))

    decoded = Decoded()
    group = SimpleNamespace(waits=False, ranks=None)
    batch = SimpleNamespace(decoded=decoded, running=1, step=step, left=[40], group=group)
    spec = SimpleNamespace(parallel=SimpleNamespace(tensor_parallel=1))
    session: Any = SimpleNamespace(open_decode_batch=lambda group, logger: batch, kernels="", spec=spec)
    sink: Any = SimpleNamespace(logger=None, report_decoding=report)
    monkeypatch.setattr("kvr_mpi.runtime.decoder.time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    events = Events()
    Decoder(session, sink, Stop(), events).decode()
    assert reported == [(1, 40, pytest.approx(0.5))]
    assert (events.totals.steps, events.totals.step_tokens) == (10, 40)
