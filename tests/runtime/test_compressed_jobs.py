"""Jobs with [compress]: the same answers on any number of ranks, and records that say what was dropped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from constants import Kvr
from made_tables import a_table, an_entry, fitting

from kvr_mpi.tuning.table import save_table

SMALL = ("compress.method=ada-snapkv", "compress.budget=64", "compress.window=16")


@pytest.fixture(autouse=True)
def short(job: Path) -> None:
    """One document is below the budget."""
    (job.parent / "corpus" / "doc-short.txt").write_text("It is late.")


@pytest.mark.slow
def test_answers_do_not_depend_on_the_number_of_ranks(
    run_job: Any, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, whole = run_job(1, *SMALL), run_job(1)
    assert run_job(3, *SMALL).tokens == truth.tokens
    assert run_job(2, *SMALL[:1], "compress.budget=511").tokens == whole.tokens, "it is above all prompts"
    bounds = [(0, tokens * 30 // 31, tokens) for tokens in (64, 4096)]
    table = a_table().model_copy(update={"entries": tuple(map(an_entry, bounds))})
    save_table(fitting(table, tiny_model_dir), tmp_path / "table.json")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the table says
    uneven = run_job(2, *SMALL, f"parallel.partition={tmp_path / 'table.json'}")
    assert uneven.tokens == truth.tokens != whole.tokens, "or else nothing was compressed"
    longest = max(uneven.records.values(), key=lambda record: record.prompt_tokens)
    assert longest.slices[2] - longest.slices[1] >= 16 > longest.prompt_tokens // 31, "it was shorter than the window"
    for name, record in truth.records.items():
        if record.prompt_tokens <= 64:
            assert record.compression == "" and record.token_ids == whole.tokens[name]
            continue
        assert record.compression.startswith("ada-snapkv: budget 64") and "observes question" in record.compression
        assert record.retained_tokens == 64 and record.retained_bytes == 64 * 3 * 2 * (8 + 8) * 4
    assert {record.compression == "" for record in truth.records.values()} == {True, False}
    assert all(record.compression == "" and not record.retained_bytes for record in whole.records.values())


def test_another_way_to_compress_is_another_run(tmp_path: Path, run_job: Any, run_kvr: Kvr) -> None:
    """Also where only what a profile says has changed."""
    limit, profile = "documents.limit=1", tmp_path / "heads.json"
    shown = run_kvr("inspect", run_job(1, *SMALL, limit, to="out").folder)[1]
    assert "compress  method ada-snapkv, budget 64," in shown
    for change in ((*SMALL, "compress.budget=65"), (*SMALL, "compress.observes=document"), ()):
        assert re.search(r"compress(\.\w+)? was", run_job(1, *change, limit, to="out", words=["--resume"], code=78).log)
    settings = (
        "compress.method=headkv",
        f"compress.profile={profile}",
        "compress.budget=40",
        "compress.window=16",
        limit,
    )
    profile.write_text(json.dumps({"counts": [[20, 60], [30, 40], [90, 16]]}))
    run_job(1, *settings, to="profile")
    profile.write_text(json.dumps({"counts": [[60, 20], [30, 40], [90, 16]]}))
    assert "(compress." in run_job(1, *settings, to="profile", words=["--resume"], code=78).log
