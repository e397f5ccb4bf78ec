"""Jobs with prompt lookup: the same run with the same answers, in fewer steps."""

from __future__ import annotations

from typing import Any

import pytest

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
