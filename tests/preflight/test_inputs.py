"""What people bring and what they take away: fields of rows in prompts, and in the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas
import pytest
from constants import Kvr
from made_jobs import TEXT

from kvr_mpi.documents.prompts import PromptText, encode_text
from kvr_mpi.errors import EXIT_BAD_DATA
from kvr_mpi.store.results import open_results

ROWS = [
    {"id": "a", "text": TEXT, "title": "Ferries {text} {{x}}", "label": {"gold": ["yes", None]}},
    {"id": "b", "text": TEXT, "label": "no title"},
    {"id": "c", "text": TEXT * 2, "title": "Harbours"},
]


@pytest.fixture
def rows_job(job: Path, tmp_path: Path) -> Path:
    """The job over rows with fields, a fifth of which the template names."""
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    job.write_text(
        job.read_text()
        .replace(str(tmp_path / "corpus"), str(folder))
        .replace("Summarise: {text} Summary:", "On {title}: {text} What of {title}?")
        + 'prompt.chat_template = false\noutput.columns = ["label", "title"]\n'
    )
    return job


def test_rows_with_fields_go_through_a_job_and_out_again(
    rows_job: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr, tiny_model_dir: Path
) -> None:
    from transformers import AutoTokenizer

    run = run_here(2, [rows_job])
    assert run.returncode == EXIT_BAD_DATA and "2 done, 1 failed" in run.stdout, run.stderr
    found = {record.id: record for record in open_results(tmp_path / "out")}
    assert "the field 'title', used in the template, is missing" in found["b"].error
    assert found["b"].passed == {"label": "no title"} and found["c"].passed == {"title": "Harbours"}
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    for name, row in (("a", ROWS[0]), ("c", ROWS[2])):
        title = encode_text(tokenizer, row["title"])
        words = [tokenizer(word)["input_ids"] for word in ("On ", ": ", " What of ", "?")]
        ids = [*words[0], *title, *words[1], *encode_text(tokenizer, row["text"]), *words[2], *title, *words[3]]
        assert found[name].prompt_sha256 == PromptText(tuple(ids)).sha256
    run_kvr("export", tmp_path / "out", "--format", "parquet", "-o", tmp_path / "out.parquet")
    frame = pandas.read_parquet(tmp_path / "out.parquet")
    assert "columns" not in frame and frame["columns.title"].isna().tolist() == [False, True, False]
    assert json.loads(frame["columns.label"][0]) == ROWS[0]["label"] and frame["columns.label"][1] == "no title"
