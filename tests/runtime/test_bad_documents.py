"""Documents that cannot be read are records, and the rest is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_what_cannot_be_read_is_recorded_before_any_prompt_runs_and_other_types_are_named(
    tmp_path: Path, run_job: Any
) -> None:
    """They would be lost without a word: the user believes that they are answered."""
    corpus, others = tmp_path / "corpus", ("skip.docx", "more.docx", "scan.pdf")
    (corpus / "zero.txt").write_bytes("Käse".encode("latin-1"))  # short ones come last
    for name in others:
        (corpus / name).write_text("text")
    run = run_job(1, "generation.max_new_tokens=1", code=65)
    assert "1/6 zero.txt: error: " in run.log and "2 .docx, 1 .pdf" in run.log
    assert all(f"{corpus}/{name}" in run.log for name in others)
    assert "5 documents answered, 1 failed in" in run.log
    assert run.records["zero.txt"].document_sha256 == "", "not an empty text's"
    assert "5 of 5 answers cut off at generation.max_new_tokens" in run.log
