"""The demo's documents say what they are planted to say, and a chain of ranks finds it with a real model."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from constants import ROOT

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.sampling import make_generation_config
from kvr_mpi.documents import read_corpus
from kvr_mpi.documents.prompts import encode_text, fit_prompt, make_frame
from kvr_mpi.job import load_job
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.store.results import open_results
from kvr_mpi.transport.local import run_local

FACTS: list[dict[str, str]] = json.loads((ROOT / "tests" / "demo_facts.json").read_text())
DOCUMENTS = {document.id: document for document in read_corpus([str(ROOT / "jobs" / "demo")])}


def test_eight_documents_of_different_length(tokenizer: Any) -> None:
    lengths = sorted(len(encode_text(tokenizer, document.text)) for document in DOCUMENTS.values())
    assert len(lengths) == 8
    assert 1200 <= lengths[0] < 1500 and 5000 < lengths[-1] <= 6000


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["answer"])
def test_facts_stand_in_their_document_once(fact: dict[str, str]) -> None:
    assert DOCUMENTS[fact["document"]].text.count(fact["answer"]) == 1


def test_each_document_has_facts_in_both_halves() -> None:
    for name, document in DOCUMENTS.items():
        places = [document.text.index(fact["answer"]) / document.chars for fact in FACTS if fact["document"] == name]
        assert len(places) == 3 and min(places) < 0.5 < max(places)


@pytest.mark.long
def test_a_chain_finds_planted_facts(smollm: LoadedModel) -> None:
    """The model is small, so not all of them; but none could be found if the prefix did not arrive."""
    asked = [fact for fact in FACTS if fact["document"] == "incident-report.md"]
    config = make_generation_config(smollm.model, {"do_sample": False})
    prepare_model(smollm.model, chain=True)
    pool = DecodeBatch(smollm, config, stop=(), max_new_tokens=24)
    for fact in asked:
        template = f"{{text}}\n\nQuestion: {fact['question']}\nAnswer:"
        frame = make_frame(smollm.tokenizer, template, chat_template=False, max_prompt_tokens=2048)
        ids = fit_prompt(frame, encode_text(smollm.tokenizer, DOCUMENTS[fact["document"]].text), kept=None).ids
        # The facts are in the first rank's slice or the second's; the question is always in the last rank's.
        partition = Partition.by_ratio(len(ids), [5, 3, 1])
        last = run_local(3, lambda rank: prefill_kvr(smollm, ids, partition, rank, reserve_tokens=24))[-1]  # noqa: B023
        pool.add(fact["answer"], last, ids, 0)
    found = 0
    while pool.running:
        found += sum(each.answer is not None and each.key in each.answer.text for each in pool.step())
    assert len(asked) == 3 and found >= 2


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_jobs_are_valid(path: Path) -> None:
    spec, _ = load_job(path, (), {})
    assert "{text}" in spec.prompt.template
    assert tomllib.loads(path.read_text())["output"]["path"] == f"runs/{path.stem}"


@pytest.mark.quick
def test_the_demo_runs_with_less_of_it(tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    settings = ["documents.limit=2", "prompt.max_tokens=400", "prompt.too_long=keep-head"]
    settings += [f"output.path={tmp_path}", "generation.max_new_tokens=12"]
    run = mpirun(2, [kvr_run, ROOT / "jobs" / "demo.toml", *(p for s in settings for p in ("--set", s))], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    records = list(open_results(tmp_path))
    assert len(records) == 2
    for record in records:
        assert 300 < record.prompt_tokens <= 400  # cut between words
        assert record.slices[-1] == record.prompt_tokens and len(record.slices) == 3
        assert record.answer.strip() and record.new_tokens == 12


@pytest.mark.long
def test_prefill_only_job_runs(tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    options = ["--set", "documents.limit=1", "--set", f"output.path={tmp_path}", "--set", "prompt.max_tokens=300"]
    run = mpirun(2, [kvr_run, ROOT / "jobs" / "prefill-only.toml", *options], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    (record,) = open_results(tmp_path)
    assert record.prompt_tokens == 300 and record.dropped_tokens > 0 and record.answer == ""


@pytest.mark.long
def test_summarize_job_splits_long_documents(tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    settings = ["documents.limit=1", f"output.path={tmp_path}", "prompt.max_tokens=900", "generation.max_new_tokens=32"]
    run = mpirun(2, [kvr_run, ROOT / "jobs" / "summarize.toml", *(p for s in settings for p in ("--set", s))], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    (record,) = open_results(tmp_path)
    assert record.status == "done" and record.parts >= 3 and record.answer.strip()
