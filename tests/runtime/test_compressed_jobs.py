"""Jobs with [compress]: the same answers on any number of ranks, and records that say what was dropped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from constants import Kvr
from made_tables import a_table, an_entry, fitting
from rows import batch_of, finish, tokens_of

from benchmarks.kept import choose_kept, keep_only
from kvr_mpi.compress.compression import open_compression
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.documents.prompts import make_frame
from kvr_mpi.errors import ConfigError
from kvr_mpi.kv.chain import Retain
from kvr_mpi.kv.row import Row
from kvr_mpi.model import load_model
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.packed import run_row
from kvr_mpi.store.kv_reader import KVReader
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.tuning.table import save_table

SMALL = ("compress.method=ada-snapkv", "compress.budget=64", "compress.window=16")


@pytest.mark.slow
def test_answers_do_not_depend_on_the_number_of_ranks(
    run_job: Any, tiny_model_dir: Path, tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job.parent / "corpus" / "below-the-budget.txt").write_text("It is late.")
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


# Compressed keys and values stored and asked again


SETTINGS = {"method": "ada-snapkv", "budget": 64, "window": 16, "observes": "document"}
KEPT = (*(f"compress.{name}={value}" for name, value in SETTINGS.items()), "output.kv=true")
NEW_TOKENS = 8
TEMPLATE = "Summarise: {text} Summary:"
QUESTION = "Who wrote it, and what for?"


@pytest.fixture
def stored(run_job: Any) -> Path:
    """A run with compressed keys and values; its first document is below the budget."""
    folder: Path = run_job(2, *KEPT).folder
    return folder


@pytest.fixture
def ask(run_job: Any, ask_about: Callable[..., Path]) -> Callable[..., Any]:
    return lambda out, *more, ranks=1: run_job(ranks, "output.max_failed=5", *more, of=ask_about(out, QUESTION))


def open_document(run: Path, name: str) -> tuple[Record, KVReader]:
    with open_results(run, verify=False).open(name) as (record, kv):
        kv.check()
        return record, kv


def fresh_answer(model: Path, kv: KVReader, prompt_tokens: int) -> tuple[int, tuple[int, ...]]:
    """What the document's text, compressed and never stored, answers; and how many tokens follow it."""
    loaded = load_model(str(model), dtype="float32", device="cpu", cache_dir=model)
    prepare_model(loaded.model, chain=True)
    assert kv.tokens is not None
    frame = make_frame(loaded.tokenizer, TEMPLATE, after=f"\n\n{QUESTION}", max_prompt_tokens=500)
    asked = frame.after(kv.tokens.ids, kv.tokens.text).ids[kv.tokens.text[1] :]
    text, ids = kv.tokens.text, list(kv.tokens.ids[:prompt_tokens])
    compression = open_compression(CompressSettings.model_validate(SETTINGS), loaded)
    window = compression.window_of(len(ids), text)
    assert window is not None
    prompt = prefill_kvr(loaded, ids, Partition((0, len(ids))), LocalTransport(), retain=Retain(window))
    retained = choose_kept(compression, prompt.cache, text)
    assert retained is not None
    chosen = [[head[head < text[1]] for head in heads or ()] for heads in retained]
    known = prefill_kvr(loaded, ids[: text[1]], Partition((0, text[1])), LocalTransport())
    keep_only(known.cache, chosen, len(asked) + NEW_TOKENS)
    row = Row([known.cache], [len(asked)])
    with torch.inference_mode():
        known.logits = run_row(loaded, row, asked)[-1]
    row.advance()
    batch = batch_of(loaded, NEW_TOKENS, eos_token_id=loaded.model.generation_config.eos_token_id)
    batch.add(0, known, [*ids[: text[1]], *asked], 0)
    return len(asked), tokens_of(finish(batch))[0]


@pytest.mark.slow
def test_a_stored_cache_answers_as_the_one_in_memory_did(stored: Path, ask: Any, tiny_model_dir: Path) -> None:
    """And alike on more ranks."""
    done = ask(stored)
    assert re.search(r"compressed: 4 documents \(ada-snapkv: budget 64, ", done.log)
    found = {record.document: record for record in done.records.values()}
    for name in ("doc-2.txt", "doc-4.txt"):
        record, kv = open_document(stored, name)
        assert kv.tokens is not None and kv.compression == record.compression != ""
        asked = found[name]
        assert asked.compression == record.compression and asked.status == "done"
        assert asked.computed_tokens == asked.prompt_tokens - kv.tokens.text[1] < 64
        assert asked.retained_tokens == pytest.approx(64 + asked.computed_tokens)
        assert (asked.computed_tokens, asked.token_ids) == fresh_answer(tiny_model_dir, kv, record.prompt_tokens)
    assert found["doc-0.txt"].compression == "" and open_document(stored, "doc-0.txt")[1].compression == ""
    assert ask(stored, ranks=3).tokens == done.tokens


@pytest.mark.slow
def test_what_takes_whole_keys_refuses_them_by_name(
    stored: Path, ask: Any, tmp_path: Path, run_kvr: Kvr, run_job: Any
) -> None:
    code, _, said = run_kvr("export", stored, "--kv", tmp_path / "tensors")
    assert code == 78 and "'doc-1.txt' has compressed keys and values (ada-snapkv" in said, said
    with pytest.raises(ConfigError, match=r"'doc-4.txt' has compressed .*Results.kv\(\) needs whole ones"):
        open_results(str(stored)).kv("doc-4.txt")
    assert open_results(str(stored)).kv("doc-0.txt").layers
    shown = run_kvr("inspect", stored, "doc-4.txt")[1]
    assert re.search(r"kv +3 layers, compressed: \d+ tokens per KV head on average", shown), shown
    refused = ask(stored, "parallel.ranks_per_chain=all", ranks=2)
    found = {record.document: record for record in refused.records.values()}
    assert found["doc-0.txt"].status == "done" and "leave parallel.ranks_per_chain out" in found["doc-4.txt"].error
    assert "with one of 1 stored prompts" in run_job(1, f"documents.reuse={stored}").log


@pytest.mark.slow
def test_a_text_compressed_without_a_question_is_asked_again(run_job: Any, ask: Any) -> None:
    """KVzip, with its second pass on the rank that decodes."""
    settings = ("compress.method=kvzip", "compress.budget=0.3", "output.kv=true")
    one, two = run_job(1, *settings), run_job(2, *settings)
    assert one.tokens == two.tokens
    for name in one.records:
        record, kv = open_document(two.folder, name)
        assert kv.tokens is not None and record.compression == "kvzip: budget 0.3, observes document"
        start, stop = kv.tokens.text
        around = record.prompt_tokens - (stop - start)
        assert record.retained_tokens == pytest.approx(around + 0.3 * (stop - start), abs=4)
        kept = [len(head) for layer in kv.layers for head in kv.kept(layer) or ()]
        assert len(set(kept)) > 1, "heads compete"
    asked = ask(two.folder)
    assert {record.compression for record in asked.records.values()} == {"kvzip: budget 0.3, observes document"}
    assert all(record.status == "done" for record in asked.records.values())
    assert ask(one.folder, ranks=2).tokens == asked.tokens
