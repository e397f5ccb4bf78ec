"""A document on its way: one prompt or several, what was answered to them, and in the end its record."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_jobs import toml_of

from kvr_mpi.decode.sampling import Answer
from kvr_mpi.documents import Corpus, Document, RowFormat, scan_corpus
from kvr_mpi.documents.corpus import corpus_of
from kvr_mpi.documents.document import OwnGeneration
from kvr_mpi.documents.prompts import Frame
from kvr_mpi.errors import DocumentError
from kvr_mpi.job import PromptSection
from kvr_mpi.kv.chain import SliceRow
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.runtime.prompt import Prompt
from kvr_mpi.runtime.requests import PromptConfig, Split, TextSource
from kvr_mpi.store.kv import Piece
from kvr_mpi.store.prefix import StoredPrefix
from kvr_mpi.store.record import Record

FRAME = Frame(head=(1, 2), tail=(3,), max_tokens=23)  # twenty tokens for the text
SENTENCES = "The old bridge was inspected in March and found to be sound. " * 8


def request(tokenizer: Any, text: str, too_long: str = "error") -> Split:
    config = PromptConfig(tokenizer, PromptSection(template="{text}", too_long=too_long), FRAME, FRAME, 8)
    return TextSource(corpus_of([], [], []), config).request(Document("a.txt", text), work=100)


def requests(document: Split) -> list[Prompt]:
    return document.make_prompts(map(str, itertools.count()))


def prefill(tokens: int, seconds: float = 2.0) -> Prefill:
    return Prefill(Partition((0, tokens)), None, torch.zeros(1), seconds, wait_s=0.5)


def test_a_document_is_one_prompt(tokenizer: Any) -> None:
    document = request(tokenizer, "hello there")
    assert document.document.id == "a.txt" and document.is_final
    for wrong, why in (("", "has no tokens"), (SENTENCES, "20")):
        with pytest.raises(DocumentError, match=why):
            request(tokenizer, wrong)
    (prompt,) = document.texts
    assert tokenizer.decode(prompt.ids[2:-1]) == "hello there"
    (one,) = requests(document)
    assert one.ids == prompt.ids and one.work == one.document_work == 100 and one.is_final
    record = one.record(prefill(8), Answer((7, 8), "hi", "stop", 1.5))
    assert (record.id, record.status, record.answer, record.token_ids) == ("a.txt", "done", "hi", (7, 8))
    assert (record.prompt_tokens, record.new_tokens, record.parts) == (prompt.tokens, 2, 1)
    assert (record.ttft_s, record.wait_s, record.decode_s) == (2.0, 0.5, 1.5)


def test_a_long_document_is_split_and_its_answers_are_read_again(tokenizer: Any) -> None:
    document = request(tokenizer, SENTENCES, too_long="split")
    parts = len(document.texts)
    assert parts >= 3 and not document.is_final
    with pytest.raises(DocumentError, match=f"part 2 of {parts}: no memory"):
        request(tokenizer, SENTENCES, too_long="split").receive(1, Record("a.txt", "error", error="no memory"))
    with pytest.raises(DocumentError, match="are not shorter than the text"):
        longer = request(tokenizer, SENTENCES, too_long="split")
        for part in range(parts):
            longer.receive(part, Record("a.txt", "done", answer=SENTENCES))
    asked = requests(document)
    works = [one.work for one in asked]
    assert [one.part for one in asked] == list(range(parts)) and not any(one.is_final for one in asked)
    assert sum(works) <= 100 < sum(works) + parts
    for part in range(parts):
        record = asked[part].record(prefill(10), Answer((1,), "ab"[part % 2], "stop", 1.0))
        assert document.receive(part, record) == (part == parts - 1)
    assert document.is_final
    (final,) = requests(document)
    assert final.work == 0, "an answer about answers is no work of the document's"
    (last,) = document.texts
    assert tokenizer.decode(last.ids[2:-1]) == "\n\n".join("ab"[part % 2] for part in range(parts))
    record = final.record(prefill(last.tokens), Answer((5,), "end", "length", 1.0))
    assert record.parts == parts + 1 and record.answer == "end" and record.new_tokens == parts + 1
    assert record.ttft_s == pytest.approx(2.0 * (parts + 1))
    assert record.decode_s == pytest.approx(2.0), "parts are decoded side by side"


texts, small = st.text(max_size=20), st.integers(0, 10**6)
own_generations = st.builds(
    OwnGeneration,
    max_new_tokens=st.none() | small,
    temperature=st.none() | st.floats(0, 2),
    stop=st.none() | st.lists(texts, max_size=3).map(tuple),
    seed=st.none() | small,
    score=st.none() | st.lists(texts, max_size=3).map(tuple),
    json_schema=st.none() | texts,
)
pieces = st.builds(Piece, texts, texts, small, texts)
prompts = st.builds(
    Prompt,
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50).map(tuple),
    dropped_tokens=small,
    text=st.tuples(small, small),
    key=texts,
    document_id=texts,
    new_tokens=small,
    generation=own_generations,
    seed=st.integers(0, 2**56),
    about=st.fixed_dictionaries({"columns": texts, "document_sha256": texts}),
    document_work=small,
    work=small,
    part=small,
    is_final=st.booleans(),
    past=st.fixed_dictionaries({"ttft_s": st.floats(0, 1e3), "parts": small, "strategy": texts}),
    shared_tokens=small,
    stored=st.none() | st.builds(StoredPrefix, texts, st.lists(pieces, max_size=3).map(tuple), small, texts),
)


@given(prompts)
def test_a_prompt_is_the_same_on_every_rank(sent: Prompt) -> None:
    plain, ids = sent.to_wire()
    received = Prompt.from_wire(json.loads(json.dumps(plain)), ids)
    for field in fields(Prompt):
        assert getattr(received, field.name) == getattr(sent, field.name), field.name
    assert received.error_record("why").document_sha256 == sent.about["document_sha256"]


# Several prompts about each document: answered as each would be alone, its text prefilled once for all of them


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


def test_a_prefix_that_fails_is_an_error_record_for_each_of_its_prompts(
    run_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the first rank of its chain runs out of memory; the prompts about other texts are answered."""
    asked = f"prompt.template={toml_of({'p': PROMPTS}).partition('=')[2]}"
    truth = run_job(2, asked)
    second = truth.records["doc-4.txt#when"]
    shared = second.prompt_tokens - second.computed_tokens

    def no_memory(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
        if isinstance(cache, SliceRow) and (cache.prompt_tokens, cache.relay.position) == (shared, 0):
            raise MemoryError("out of memory (on purpose)")
        return run_model(model, ids, cache, **options)

    monkeypatch.setattr("kvr_mpi.prefill.one_prompt.run_model", no_memory)
    run = run_job(2, asked, code=65)
    failed = {name for name, record in run.records.items() if record.error}
    assert {name.rpartition("#")[0] for name in failed} == {"doc-4.txt"} and len(failed) == len(PROMPTS)
    assert all("ran out of memory" in run.records[name].error for name in failed)
    assert all(run.records[name].token_ids == ids for name, ids in truth.tokens.items() if name not in failed)


def test_a_corpus_has_an_entry_for_each_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.jsonl").write_text(json.dumps({"id": "x" * 511, "text": "more words"}) + "\n")
    corpus = scan_corpus([str(tmp_path)], rows=RowFormat(), prompts=["p", "q"])
    assert [*corpus.ids()][:2] == ["a.txt#p", "a.txt#q"] and len(corpus) == 4
    assert corpus.read(0).text == corpus.read(1).text == "words" and corpus.read(1).id == "a.txt#q"
    assert "512 are allowed" in (corpus.read(2).error or "") and corpus.id(2) != corpus.id(3)
    assert [*Corpus.from_bytes(corpus.to_bytes()).ids()] == [*corpus.ids()]
    works = corpus.works()
    assert works[0] > works[1] >= 1, "the second prompt reuses the prefill of the first"
