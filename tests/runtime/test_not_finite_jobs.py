"""Jobs in which one document's logits are not finite, or its own settings make sampling fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_jobs import TEXT, with_settings

from kvr_mpi.errors import EXIT_BAD_DATA
from kvr_mpi.store.results import open_results

BAD = "doc-5.txt"
WAYS = {
    "single": (1, ("parallel.strategy=single",)),
    "chain": (2, ()),
    "sharded": (2, ("output.kv=sharded",)),
    "stored": (2, ("output.kv=true",)),
    "heads": (2, ("decode.mode=head-parallel",)),
}
KINDS = {
    "greedy": (),
    "samples": ("generation.temperature=1.2", "generation.n=2"),
    "scores": ('generation.score=[" yes", " no"]', "generation.max_new_tokens=0"),
}


@pytest.fixture
def overflows(tmp_path: Path, job: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixth document has tokens whose embeddings are infinite, as what overflows would be."""
    text = f"Document ~ 5. {TEXT * 8}"
    (tmp_path / "corpus" / BAD).write_text(text)
    bad = {*tokenizer.encode(text)} - {*tokenizer.encode(text.replace("~", ""))}
    assert len(bad) == 1, "the tilde alone"
    (token,) = bad
    forward = torch.nn.Embedding.forward

    def overflow(module: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        return forward(module, ids).masked_fill((ids == token).unsqueeze(-1), float("inf"))

    monkeypatch.setattr(torch.nn.Embedding, "forward", overflow)


@pytest.mark.slow
@pytest.mark.usefixtures("overflows")
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("single", "greedy"),
        ("chain", "samples"),
        ("sharded", "scores"),
        ("stored", "greedy"),
        ("heads", "greedy"),
        *(pytest.param(way, kind, marks=pytest.mark.long) for way in WAYS for kind in KINDS),
    ],
)
def test_such_a_document_has_an_error_record_and_resuming_works(way: str, kind: str, run_job: Any) -> None:
    (ranks, how), settings = WAYS[way], KINDS[kind]
    ran = run_job(ranks, *how, *settings, code=EXIT_BAD_DATA, to="run")
    bad = ran.records[BAD]
    assert len(ran.records) == 6 and [name for name, one in ran.records.items() if one.status == "error"] == [BAD]
    assert "not finite" in bad.error and "float32" in bad.error and not bad.answer
    assert not open_results(ran.folder).places[BAD].pieces, "nothing of it is stored"
    again = run_job(ranks, *how, *settings, code=EXIT_BAD_DATA, to="run", words=["--resume"])
    assert again.tokens == ran.tokens and again.records[BAD].error == bad.error
    retried = run_job(ranks, *how, *settings, code=EXIT_BAD_DATA, to="run", words=["--resume", "--retry-failed"])
    assert retried.tokens == ran.tokens and retried.records[BAD].error == bad.error


@pytest.mark.slow
def test_a_request_that_cannot_be_sampled_ends_no_batch(tmp_path: Path, tiny_model_dir: Path, run_here: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hello there."}], "max_tokens": 4}
    rows = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body | more}
        for number, more in enumerate(({}, {"temperature": 1e-300}, {"temperature": 1.0}))
    ]
    (file := tmp_path / "batch.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = with_settings(f"model.path={tiny_model_dir}", f"output.path={tmp_path / 'out'}")
    for words in ([], ["--resume"], ["--resume", "--retry-failed"]):
        done = run_here(1, [file, *settings, *words])
        assert done.returncode == EXIT_BAD_DATA, done.stderr
        records = {one.id: one for one in open_results(tmp_path / "out")}
        assert {name: one.status for name, one in records.items()} == {"0": "done", "1": "error", "2": "done"}
        assert "temperature = 1e-300" in records["1"].error
