"""The demo's documents say what they are planted to say, and a chain of ranks finds it with a real model."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from constants import ROOT
from made_jobs import with_settings

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.sampling import make_generation_config
from kvr_mpi.documents import read_corpus
from kvr_mpi.documents.prompts import encode_text, fit_prompt, make_frame
from kvr_mpi.job import load_job
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.transport.local import run_local

FACTS: list[dict[str, str]] = json.loads((ROOT / "tests" / "demo_facts.json").read_text())
DOCUMENTS = {document.id: document for document in read_corpus([str(ROOT / "jobs" / "demo")])}


def test_eight_documents_of_different_length(tokenizer: Any) -> None:
    lengths = sorted(len(encode_text(tokenizer, document.text)) for document in DOCUMENTS.values())
    assert len(lengths) == 8
    assert 1200 <= lengths[0] < 1500 and 5000 < lengths[-1] <= 6000


def test_each_document_has_its_facts_once_and_in_both_halves() -> None:
    for name, document in DOCUMENTS.items():
        facts = [fact["answer"] for fact in FACTS if fact["document"] == name]
        places = [document.text.index(fact) / document.chars for fact in facts]
        assert len(places) == 3 and min(places) < 0.5 < max(places)
        assert all(document.text.count(fact) == 1 for fact in facts)


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


def run_shipped(name: str, folder: Path, mpirun: Any, kvr_run: Path, *settings: str) -> list[Record]:
    words = with_settings(f"output.path={folder}", *settings)
    run = mpirun(2, [kvr_run, ROOT / "jobs" / name, *words], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return list(open_results(folder))


@pytest.mark.quick
def test_the_demo_runs_with_less_of_it(tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    less = ("documents.limit=2", "prompt.max_tokens=400", "prompt.too_long=keep-head", "generation.max_new_tokens=12")
    records = run_shipped("demo.toml", tmp_path, mpirun, kvr_run, *less)
    assert len(records) == 2
    for record in records:
        assert 300 < record.prompt_tokens <= 400  # cut between words
        assert record.slices[-1] == record.prompt_tokens and len(record.slices) == 3
        assert record.answer.strip() and record.new_tokens == 12
