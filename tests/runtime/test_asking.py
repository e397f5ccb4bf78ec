"""Stored documents asked again: the answers of a fresh prefill, with only the question computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
from made_jobs import TEXT, Ran, last_line
from made_runs import kv_in

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.runtime.reuse import StoredBeginnings, hash_blocks
from kvr_mpi.runtime.stored_source import scan_stored
from kvr_mpi.store.kv import BLOCK_TOKENS, CachedTokens
from kvr_mpi.store.kv_reader import KVReader
from kvr_mpi.store.lock import Lock, this_process
from kvr_mpi.store.prefix import StoredPrefix
from kvr_mpi.store.results import open_results
from kvr_mpi.store.writer import ResultWriter
from kvr_mpi.transport.local import LocalTransport

QUESTIONS = {"who": "Who wrote it?", "json": 'As {"json"}: what {is} it?'}
Ask = Callable[..., Ran]


@pytest.fixture
def ask(run_job: Any, ask_about: Any) -> Ask:
    """Ask about the documents of a run."""
    return lambda run, *settings, ranks=1, **how: run_job(ranks, *settings, of=ask_about(run, **QUESTIONS), **how)


KEPT = ("output.kv=true", "generation.max_new_tokens=3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        ("llama-gqa", 3, ("parallel.partition=equal_time",)),
        ("mistral-window", 2, ()),
        pytest.param("qwen2-some-windows", 4, ("parallel.ranks_per_chain=2",), marks=pytest.mark.long),
        pytest.param("gemma2-softcap", 2, ("parallel.partition=even",), marks=pytest.mark.long),
        pytest.param("bloom-own-attention", 2, (), marks=pytest.mark.long),
        pytest.param("deepseek-latents", 3, (), marks=pytest.mark.long),
    ],
)
def test_answers_are_those_of_a_fresh_prefill(
    run_job: Any, ask: Ask, model_of: Any, name: str, ranks: int, more: tuple[str, ...]
) -> None:
    """Every question in a prompt of its own."""
    model, most = f"model.path={model_of(name)}", "prompt.max_tokens=500"
    run, fresh = run_job(ranks, model, most, *KEPT, *more).folder, {}
    for key, text in QUESTIONS.items():
        words = "Summarise: {text}\n\n" + text.replace("{", "{{").replace("}", "}}")
        fresh[key] = run_job(1, model, most, f"prompt.template={words}").records
    for readers in (1, 3):
        asked = ask(run, model, ranks=readers)
        assert "5 documents will be loaded" in asked.log and "questions about documents: 10" in asked.log
        found = asked.records
        assert len(found) == sum(map(len, fresh.values()))
        for key, answers in fresh.items():
            for document, truth in answers.items():
                record = found[f"{document}#{key}"]
                told = record.status, record.document, record.question
                assert told == ("done", document, QUESTIONS[key]), record.error
                assert record.token_ids == truth.token_ids and len(truth.token_ids) == truth.new_tokens > 0
                assert record.prompt_sha256 == truth.prompt_sha256 and record.prompt_tokens == truth.prompt_tokens
                assert record.document_sha256 == truth.document_sha256
                assert 0 < record.computed_tokens < 40 < record.prompt_tokens, "only the question's were computed"


@pytest.fixture
def run(run_job: Any) -> Path:
    """A run with keys and values."""
    folder: Path = run_job(2, *KEPT).folder
    return folder


@pytest.mark.slow
def test_some_documents_a_file_of_questions_and_resuming(run: Path, tmp_path: Path, ask: Ask) -> None:
    file = tmp_path / "more.jsonl"
    file.write_text('{"id": "when", "question": "When was it?"}\n{"question": "Where?"}\n', encoding="utf-8-sig")
    asked = (run, 'questions.documents=["doc-1.txt", "doc-3.txt"]', f"questions.ask={file}")
    found = ask(*asked, ranks=2, to="asked").records
    assert {*found} == {f"doc-{n}.txt#{name}" for n in (1, 3) for name in ("when", "q2")}
    assert "4 questions already done" in ask(*asked, ranks=3, to="asked", words=["--resume"]).log


def test_a_document_is_opened_once_for_all_questions_about_it_and_closed_before_these_are_answered(
    run: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, real, step, open_files = list[str](), KVReader.__init__, DecodeBatch.step, list[str]()

    def count(reader: KVReader, name: str, *args: Any, **how: Any) -> None:
        opened.append(name)
        real(reader, name, *args, **how)

    def look(batch: DecodeBatch) -> Any:
        files = Path("/proc/self/fd").iterdir()
        open_files.extend(str(file.readlink()) for file in files if file.is_symlink())
        return step(batch)

    monkeypatch.setattr(KVReader, "__init__", count)
    monkeypatch.setattr(DecodeBatch, "step", look)
    assert len(ask(run).records) == 10
    assert sorted(opened) == [f"doc-{n}.txt" for n in range(5)]
    assert open_files and not [file for file in open_files if file.startswith(f"{run}/") and file.endswith(".h5")]


def test_answers_stay_when_keys_and_values_are_pruned(run: Path, ask: Ask, run_kvr: Any) -> None:
    before = ask(run, to="asked").records
    assert run_kvr("prune", run, "--doc", "doc-1.txt")[0] == 0
    again = ask(run, "output.max_failed=2", to="asked")
    assert "nothing left to do" in again.log and again.records == before


@pytest.mark.slow
def test_the_answer_may_be_asked_about_again_and_one_too_long_is_an_error_record(run: Path, ask: Ask) -> None:
    """What is asked is stored like any prompt, if that is wanted."""
    found = ask(run, "prompt.max_tokens=150", code=65).records
    assert found["doc-0.txt#who"].status == "done" and "too long" in found["doc-4.txt#who"].error
    first = ask(run, "output.kv=true")
    second = ask(first.folder)
    assert second.tokens["doc-2.txt#who#json"] == first.tokens["doc-2.txt#json"]


def test_a_changed_or_damaged_document_is_named_and_never_answered_and_the_others_are(
    run: Path, tmp_path: Path, run_job: Any, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is made anew after its documents were listed, with another text; then a bit flips, as on a disk."""
    (tmp_path / "corpus" / "doc-2.txt").write_text("Document 8. " + TEXT * 7)  # as long as before
    newer = run_job(2, *KEPT).folder / "results.h5"

    def list_and_replace(spec: Any) -> Any:
        found = scan_stored(spec)
        shutil.copy(newer, run)
        return found

    monkeypatch.setattr("kvr_mpi.runtime.indexing.scan_stored", list_and_replace)
    for words in ("have changed since the job began", "layer_001/values is damaged"):
        found = ask(run, ranks=2, code=65).records
        bad = {name: record for name, record in found.items() if record.status == "error"}
        assert set(bad) == {"doc-2.txt#who", "doc-2.txt#json"} and len(found) == 10
        for record in bad.values():
            assert words in record.error and record.document == "doc-2.txt"
            assert not record.answer and record.question in QUESTIONS.values()
        with h5py.File(newer) as stored:
            at = kv_in(stored, "doc-2.txt")["layer_001/values"].id.get_offset() + 4 * 11
        content = bytearray(newer.read_bytes())
        content[at] ^= 4
        newer.write_bytes(content)
    (run / "results.h5").write_bytes(content[:-5000])
    assert "results.h5" in ask(run, code=65).log


def test_documents_without_a_whole_cache_are_refused_before_the_model_is_loaded_or_error_records_if_allowed(
    tmp_path: Path, run_job: Any, ask: Ask
) -> None:
    (tmp_path / "corpus" / "long.txt").write_text(TEXT * 60)
    (tmp_path / "corpus" / "empty.txt").write_text("")
    run = run_job(2, "output.kv=true", "prompt.too_long=split", code=65).folder
    plain = ask(run_job(1, code=65).folder, code=78)
    assert "output.kv = true" in plain.log and "importing torch" not in plain.log
    assert not plain.folder.exists(), "a refused job leaves no folder"
    asked = ask(run, code=78)
    assert "1 of 6 documents cannot be asked about: long.txt" in asked.log
    assert "kernels" not in asked.log and not list(asked.folder.glob("*.h5"))
    asked = ask(run, "output.max_failed=2")
    assert "skipped: 1 document with error records" in asked.log
    found = asked.records
    assert "parts" in found["long.txt#who"].error and "empty.txt#who" not in found
    assert sum(record.status == "done" for record in found.values()) == 10


@pytest.mark.parametrize("name", ["mistral-window", "gemma2-softcap"])
def test_last_tokens_alone_are_not_stored_as_the_first(run_job: Any, ask: Ask, model_of: Any, name: str) -> None:
    """Plain transformers keeps no others in layers with windows: in all of Mistral's, in some of Gemma's."""
    model = f"model.path={model_of(name)}"
    run = run_job(2, model, "parallel.strategy=single", "output.kv=true", "prompt.max_tokens=500").folder
    assert open_results(run).kv("doc-0.txt").token_ids is None
    assert "no token ids, or not all tokens" in ask(run, model, code=78).log


@pytest.mark.slow
def test_keys_of_another_model_are_refused(run: Path, tmp_path: Path, ask: Ask, tiny_model_dir: Path) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    config, tokenizer = (json.loads((model / name).read_text()) for name in ("config.json", "tokenizer.json"))
    config["rope_parameters"]["rope_theta"] *= 2
    tokenizer["added_tokens"][-1]["content"] = "<|other|>"
    for name, changed, word in (("tokenizer", tokenizer, "tokenizer"), ("config", config, "configuration")):
        (model / f"{name}.json").write_text(json.dumps(changed))
        asked = ask(run, f"model.path={model}", ranks=2, code=78)
        assert "did not compute the keys and values" in asked.log and word in asked.log
        assert not list(asked.folder.glob("*.h5"))


REFUSED = {
    "documents.path=nowhere": "nowhere",
    "model.dtype=bfloat16": "dtype",
    "parallel.partition=tables/": "only a question's own tokens are computed",
    "questions.template=Why?": "{question} 0 times",
    'questions.documents=["doc-9.txt"]': "'doc-9.txt' is not among the 5 documents",
    'questions.ask={"a#b"="Why?"}': "named 'a#b'",
    'questions.ask=[" "]': "expected non-empty text",
    "questions.ask=[]": "no question",
    'questions.ask=["Why?", "Who?", "Why? "]': "'q1' and 'q3' are the same question",
    "questions.ask=/nowhere.txt": "cannot be read",
}


@pytest.mark.slow
def test_what_does_not_go_with_questions_is_refused_before_anything_is_loaded(run: Path, ask: Ask) -> None:
    for setting, words in REFUSED.items():
        asked = ask(run, setting, code=65 if words == "nowhere" else 78)
        assert words in asked.log and not list(asked.folder.glob("*.h5")), setting
        assert last_line(asked.log).startswith("exit code"), setting


def test_keys_of_another_shape_are_refused_even_with_checksums_that_fit(run: Path, tmp_path: Path, ask: Ask) -> None:
    """Somebody who writes files of his own can seal them, too."""
    forged, results = tmp_path / "forged", open_results(run)
    forged.mkdir()
    kv, record = results.kv("doc-1.txt"), results["doc-1.txt"]
    whole, writer = [*kv.layers.values()], ResultWriter(forged, 0, results.header)
    narrow = [(keys[:, :, :4], values) for keys, values in whole]
    turned = [(keys.mT.contiguous(), values.mT.contiguous()) for keys, values in whole]  # as many bytes of each token
    for name, layers in (("few", whole[:2]), ("narrow", narrow), ("turned", turned)):
        writer.write(replace(record, id=name), layers, CachedTokens(kv.token_ids or (), kv.text))
    writer.close()
    found = ask(forged, code=65).records.values()
    assert len(found) == 6 and all(one.status == "error" and " layer " in one.error for one in found)


@pytest.mark.slow
def test_kvr_ask_answers_about_chosen_documents(
    run: Path, tmp_path: Path, run_kvr: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvr_mpi.transport.mpi.connect", LocalTransport)
    command = ("ask", run, "-q", "Who?", "-q", "Why?", "--doc", "doc-3.txt")
    code, out, err = run_kvr(*command, "--set", "generation.max_new_tokens=5")
    assert code == 0, err
    found = {record.id: record for record in open_results(f"{run}-answers")}
    assert set(found) == {"doc-3.txt#q1", "doc-3.txt#q2"} and found["doc-3.txt#q2"].new_tokens == 5
    (tmp_path / "empty").mkdir()
    code, out, err = run_kvr("ask", tmp_path / "empty", "-q", "Who?")
    assert code == 65 and "no result" in err
    with Lock(tmp_path / "empty", this_process()):
        code, out, err = run_kvr("ask", tmp_path / "empty", "-q", "Who?")
    assert code == 78 and "being written" in err


# Prompts that begin like stored ones

MORE = "And then the harbour master wrote a second letter, which nobody answered. "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"), [(3, ("parallel.partition=equal_time",)), (2, ("parallel.partition=even",))]
)
def test_answers_are_the_same_and_only_the_rest_is_computed(
    tmp_path: Path, run_job: Any, ranks: int, more: tuple[str, ...]
) -> None:
    """Of documents that have grown since they were stored, and of a new one that begins like another."""
    corpus = tmp_path / "corpus"
    (corpus / "doc-3.txt").write_text("The third. " + TEXT * 14)
    (corpus / "doc-4.txt").write_text("The fourth. " + TEXT * 17)
    old = run_job(2, "output.kv=true", "generation.max_new_tokens=2").folder
    for name in ("doc-1.txt", "doc-3.txt"):
        (corpus / name).write_text((corpus / name).read_text() + MORE * 3)
    fourth = (corpus / "doc-4.txt").read_text()
    (corpus / "new.txt").write_text(fourth[: len(fourth) * 9 // 10] + MORE * 4)
    truth, reused = run_job(1).records, run_job(ranks, f"documents.reuse={old}", *more)
    assert "with one of 5 stored prompts" in reused.log
    found = reused.records
    assert len(found) == 6 and found.keys() == truth.keys()
    for name, record in found.items():
        assert record.token_ids == truth[name].token_ids, name
        assert record.prompt_tokens == truth[name].prompt_tokens
    known = {name: record.prompt_tokens - record.computed_tokens for name, record in found.items()}
    assert {name for name, tokens in known.items() if tokens == 256} == {"doc-3.txt", "doc-4.txt", "new.txt"}
    assert all(tokens < 64 for tokens in known.values() if tokens != 256), "at most what all prompts begin with"


def test_the_longest_stored_beginning_that_leaves_a_token_is_found() -> None:
    ids = list(range(2 * BLOCK_TOKENS + 1))
    hashes = hash_blocks(ids)
    assert len(set(hashes)) == 2 and hash_blocks([7, *ids[1:]])[1] != hashes[1] and hash_blocks(ids[:255]) == []
    stored = StoredBeginnings([StoredPrefix("a", (), len(ids))], dict.fromkeys(hashes, 0))
    for tokens, known in ((len(ids), 2), (2 * BLOCK_TOKENS, 1), (BLOCK_TOKENS + 1, 1), (BLOCK_TOKENS, 0)):
        found = stored.find(ids[:tokens])
        assert (0 if found is None else found.tokens) == known * BLOCK_TOKENS
    assert stored.find([7, *ids[1:]]) is None
