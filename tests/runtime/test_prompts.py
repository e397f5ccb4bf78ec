"""Several prompts about each document: answered as each would be alone, its text prefilled once for all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_jobs import toml_of

from kvr_mpi.documents import Corpus, RowFormat, scan_corpus

PROMPTS = {
    "who": "Read this: {text} Who saw the second boat?",
    "when": "Read this: {text} When did the ferry leave?",
    "long": "Read this: {text}" + " Name everything that was on the pier." * 6,
}


WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "chain": (2, ()),
    "three": (3, ("parallel.partition=equal_time",)),
    "single": (1, ("parallel.strategy=single",)),
    "tight": (1, ("parallel.memory_gib=0.003",)),  # no room for a text beside a prompt
}


@pytest.mark.slow
def test_answers_are_those_of_each_prompt_alone(run_job: Any) -> None:
    truth = {
        f"{document}#{name}": record
        for name, template in PROMPTS.items()
        for document, record in run_job(1, f"prompt.template={template}").records.items()
    }
    asked = f"prompt.template={toml_of({'p': PROMPTS}).partition('=')[2]}"
    for way, (ranks, settings) in WAYS.items():
        run = run_job(ranks, *settings, asked)
        assert "documents: 5, prompts about them: 15" in run.log
        assert "15 prompts answered in" in run.log and run.log.rstrip().endswith("done; 15 prompts answered")
        assert "15 done, 0 failed" in run.out and ("prefilled 3 times" in run.log) == (way == "single"), way
        found = run.records
        assert run.tokens == {name: record.token_ids for name, record in truth.items()}, way
        for name, record in found.items():
            document, _, prompt = name.rpartition("#")
            assert (record.document, record.question) == (document, PROMPTS[prompt]), way
            assert record.prompt_sha256 == truth[name].prompt_sha256, way
            assert record.document_sha256 == truth[name].document_sha256
            assert record.prompt_tokens == truth[name].prompt_tokens == record.slices[-1], (way, record)
        if way in ("tight", "single"):
            assert all(record.computed_tokens == record.prompt_tokens for record in found.values()), way
        else:
            longest = [record for name, record in found.items() if name.startswith("doc-4.txt")]
            computed = sorted(record.computed_tokens for record in longest)
            assert computed[0] < computed[1] < 80 < 200 < computed[2], way


def test_a_corpus_has_an_entry_for_each_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.jsonl").write_text(json.dumps({"id": "x" * 511, "text": "more words"}) + "\n")
    corpus = scan_corpus([str(tmp_path)], rows=RowFormat(), prompts=["p", "q"])
    assert [entry.id for entry in corpus.entries][:2] == ["a.txt#p", "a.txt#q"]
    assert corpus.read(0).text == corpus.read(1).text == "words" and corpus.read(1).id == "a.txt#q"
    assert "512 are allowed" in (corpus.read(2).error or "") and corpus.entries[2].id != corpus.entries[3].id
    assert [corpus.share(slice(n, None, 2)) for n in range(2)] == [[0, 1], [2, 3]]
    again = Corpus.from_json(json.loads(json.dumps(corpus.to_json())))
    assert again == corpus
    assert scan_corpus([str(tmp_path)], prompts=["p", "q"], known=again).entries is again.entries
    assert len(scan_corpus([str(tmp_path)], prompts=["p"], known=again)) == 2
