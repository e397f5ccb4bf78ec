"""Jobs with [decode]: ranks that share heads answer as ranks that decode each their own, and say what they do.

`test_settings_together` has two such ranks beside every other setting.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from constants import TESTS

SMALL_VOCABULARY = True

SMALL = ("compress.method=ada-snapkv", "compress.budget=64", "compress.window=16")
SHARED = "decode.mode=head-parallel"


def test_shared_heads_give_the_answers_of_ranks_apart(job: Path, run_job: Any) -> None:
    (job.parent / "corpus" / "doc-short.txt").write_text("It is late.")
    wanted, found = run_job(1, *SMALL, SHARED), run_job(3, *SMALL, SHARED)
    assert found.tokens == wanted.tokens and "there is only one rank" in wanted.log
    assert "decoded by 3 ranks that share heads (proportional, up to 2 copies a layer" in found.log
    for name, record in found.records.items():
        assert record.compression == wanted.records[name].compression
        assert record.retained_bytes == wanted.records[name].retained_bytes and record.finish_reason == "length"


@pytest.mark.slow
def test_a_model_whose_heads_are_not_shared_out(run_job: Any, model_of: Any) -> None:
    told = (f"model.path={model_of('mistral-window')}", "documents.limit=1")
    refused = run_job(2, *told, SHARED, code=78).log
    assert "not all its layers see all tokens" in refused and "choose mode = 'data-parallel'" in refused
    left = run_job(2, *told, "decode.mode=auto").log
    assert "decode.mode = 'auto': data-parallel, since not all its layers" in left


@pytest.mark.long
def test_a_rank_that_fails_while_heads_are_shared_ends_all(job: Path, mpirun: Any) -> None:
    """The others wait for its part of a sum."""
    run = mpirun(3, [sys.executable, TESTS / "programs" / "failing_step.py", job])
    assert run.returncode == 1 and "broken on purpose" in run.stderr
    failed_at = float(run.stdout.split("failing at ")[1].split()[0])
    assert time.time() - failed_at < 60
