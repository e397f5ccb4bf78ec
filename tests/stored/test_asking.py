"""Stored documents asked again: the answers of a fresh prefill, with only the question computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from made_jobs import TEXT, last_line, with_settings
from made_runs import kv_in

from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.writer import ResultWriter
from kvr_mpi.transport.local import LocalTransport

QUESTIONS = {"who": "Who wrote it?", "json": 'As {"json"}: what {is} it?'}


def ask_job(folder: Path, model: Path | str, run: Path, name: str = "asked", more: str = "", tokens: int = 8) -> Path:
    ask = "\n".join(f"{key} = {json.dumps(text)}" for key, text in QUESTIONS.items())
    path = folder / f"{name}.toml"
    path.write_text(
        f"""
        [model]
        path = "{model}"
        [documents]
        path = "{run}"
        [questions]
        {more}
        [questions.ask]
        {ask}
        [generation]
        max_new_tokens = {tokens}
        [output]
        path = "{folder / name}"
        """
    )
    return path


def records(folder: Path) -> dict[str, Record]:
    return {record.id: record for record in open_results(folder)}


def check_answers(asked: Path, fresh: dict[str, Path]) -> None:
    """Hold answers against those to fresh prompts: the same tokens, of which only the question's were computed."""
    found = records(asked)
    wanted = {name: records(folder) for name, folder in fresh.items()}
    assert len(found) == sum(map(len, wanted.values()))
    for name, answers in wanted.items():
        for document, truth in answers.items():
            record = found[f"{document}#{name}"]
            assert (record.status, record.document, record.question) == ("done", document, QUESTIONS[name]), (
                record.error
            )
            assert record.token_ids == truth.token_ids and len(truth.token_ids) == truth.new_tokens > 0
            assert record.prompt_sha256 == truth.prompt_sha256 and record.prompt_tokens == truth.prompt_tokens
            assert record.document_sha256 == truth.document_sha256
            assert 0 < record.computed_tokens < 40 < record.prompt_tokens


def ask_fresh(job: Path, folder: Path, run_here: Any, *settings: str) -> dict[str, Path]:
    """Answer every question in prompts of their own."""
    fresh = {}
    for name, text in QUESTIONS.items():
        fresh[name] = folder / f"fresh-{name}"
        words = "Summarise: {text}\n\n" + text.replace("{", "{{").replace("}", "}}")
        told = (f"prompt.template={words}", f"output.path={fresh[name]}", *settings)
        run = run_here(1, [job, *with_settings(*told)])
        assert run.returncode == 0, run.stderr
    return fresh


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "ranks", "more"),
    [
        ("llama-gqa", "float32", 3, ("parallel.partition=equal_time",)),
        pytest.param("mistral-window", "float32", 2, (), marks=pytest.mark.slow),
        pytest.param("qwen2-some-windows", "float32", 4, ("parallel.ranks_per_chain=2",), marks=pytest.mark.long),
        pytest.param("gemma2-softcap", "float32", 2, ("parallel.strategy=ring",), marks=pytest.mark.long),
        pytest.param("bloom-own-attention", "float32", 2, (), marks=pytest.mark.long),
        pytest.param("deepseek-latents", "float32", 3, (), marks=pytest.mark.long),
        pytest.param("llama-gqa", "float32", 1, (), marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_a_fresh_prefill(
    job: Path, tmp_path: Path, run_here: Any, model_of: Any, name: str, dtype: str, ranks: int, more: tuple[str, ...]
) -> None:
    model = model_of(name)
    own = (f"model.path={model}", f"model.dtype={dtype}", "prompt.max_tokens=500")
    wrote = run_here(ranks, [job, *with_settings(*own, "output.kv=true", "generation.max_new_tokens=3", *more)])
    assert wrote.returncode == 0, wrote.stderr
    fresh = ask_fresh(job, tmp_path, run_here, *own)
    for readers in (1, 3):
        asked = run_here(readers, [ask_job(tmp_path, model, tmp_path / "out"), "--overwrite"])
        assert asked.returncode == 0, asked.stderr
        assert "5 documents will be loaded" in asked.stderr and "questions about documents: 10" in asked.stderr
        check_answers(tmp_path / "asked", fresh)


@pytest.fixture
def run(job: Path, tmp_path: Path, run_here: Any) -> Path:
    """A run with keys and values."""
    done = run_here(2, [job, *with_settings("output.kv=true", "generation.max_new_tokens=3")])
    assert done.returncode == 0, done.stderr
    return tmp_path / "out"


@pytest.mark.slow
def test_some_documents_a_file_of_questions_and_resuming(
    run: Path, tmp_path: Path, run_here: Any, tiny_model_dir: Path
) -> None:
    file = tmp_path / "more.jsonl"
    file.write_text('{"id": "when", "question": "When was it?"}\n{"question": "Where?"}\n', encoding="utf-8-sig")
    job = ask_job(tmp_path, tiny_model_dir, run, more='documents = ["doc-1.txt", "doc-3.txt"]')
    asked = [job, *with_settings(f"questions.ask={file}")]
    assert run_here(2, asked).returncode == 0
    assert {*records(tmp_path / "asked")} == {f"doc-{n}.txt#{name}" for n in (1, 3) for name in ("when", "q2")}
    again = run_here(3, [*asked, "--resume"])
    assert again.returncode == 0 and "4 of them already done" in again.stderr


@pytest.mark.slow
def test_the_answer_may_be_asked_about_again_and_one_too_long_is_an_error_record(
    run: Path, tmp_path: Path, run_here: Any, tiny_model_dir: Path
) -> None:
    """What is asked is stored like any prompt, if that is wanted."""
    job = ask_job(tmp_path, tiny_model_dir, run)
    assert run_here(1, [job, *with_settings("prompt.max_tokens=150")]).returncode == 65
    found = records(tmp_path / "asked")
    assert found["doc-0.txt#who"].status == "done" and "too long" in found["doc-4.txt#who"].error
    assert run_here(1, [job, *with_settings("output.kv=true"), "--overwrite"]).returncode == 0
    deeper = ask_job(tmp_path, tiny_model_dir, tmp_path / "asked", name="deeper")
    done = run_here(1, [deeper])
    assert done.returncode == 0, done.stderr
    first, second = records(tmp_path / "asked"), records(tmp_path / "deeper")
    assert second["doc-2.txt#who#json"].token_ids == first["doc-2.txt#json"].token_ids


def damage(path: Path, name: str = "doc-2.txt", layer: str = "layer_001") -> None:
    """Flip a bit of stored values, as a disk does."""
    with h5py.File(path) as file:
        dataset = kv_in(file, name)[f"{layer}/values"]
        at = dataset.id.get_offset() + 4 * 11
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def test_a_damaged_document_is_named_and_never_answered_and_the_others_are(
    run: Path, tmp_path: Path, run_here: Any, tiny_model_dir: Path
) -> None:
    damage(run / "results.h5")
    asked = run_here(2, [ask_job(tmp_path, tiny_model_dir, run)])
    assert asked.returncode == 65, asked.stderr
    found = records(tmp_path / "asked")
    bad = {name: record for name, record in found.items() if record.status == "error"}
    assert set(bad) == {"doc-2.txt#who", "doc-2.txt#json"} and len(found) == 10
    for record in bad.values():
        assert "layer_001/values is damaged" in record.error and record.document == "doc-2.txt"
        assert not record.answer and record.question in QUESTIONS.values()
    (run / "results.h5").write_bytes((run / "results.h5").read_bytes()[:-5000])
    cut = run_here(1, [ask_job(tmp_path, tiny_model_dir, run, name="cut")])
    assert cut.returncode == 65 and "results.h5" in cut.stderr and "Traceback" not in cut.stderr


def test_documents_without_a_whole_cache_are_refused_before_the_model_is_loaded_or_error_records_if_allowed(
    job: Path, tmp_path: Path, run_here: Any, tiny_model_dir: Path
) -> None:
    (tmp_path / "corpus" / "long.txt").write_text(TEXT * 60)
    (tmp_path / "corpus" / "empty.txt").write_text("")
    assert run_here(2, [job, *with_settings("output.kv=true", "prompt.too_long=split")]).returncode == 65
    plain = run_here(1, [job, *with_settings(f"output.path={tmp_path / 'plain'}")])
    asked = run_here(1, [ask_job(tmp_path, tiny_model_dir, tmp_path / "plain")])
    assert plain.returncode == 65 and asked.returncode == 78 and "output.kv = true" in asked.stderr
    assert not (tmp_path / "asked").exists(), "a refused job leaves no folder"
    job = ask_job(tmp_path, tiny_model_dir, tmp_path / "out")
    asked = run_here(1, [job])
    assert asked.returncode == 78 and "1 of 6 documents cannot be asked about: long.txt" in asked.stderr
    assert "kernels" not in asked.stderr and not list((tmp_path / "asked").glob("*.h5"))
    asked = run_here(1, [job, *with_settings("output.max_failed=2")])
    assert asked.returncode == 0 and "skipped: 1 document with error records" in asked.stderr
    found = records(tmp_path / "asked")
    assert "parts" in found["long.txt#who"].error and "empty.txt#who" not in found
    assert sum(record.status == "done" for record in found.values()) == 10


@pytest.mark.slow
def test_keys_of_another_model_are_refused(run: Path, tmp_path: Path, run_here: Any, tiny_model_dir: Path) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    config, tokenizer = (json.loads((model / name).read_text()) for name in ("config.json", "tokenizer.json"))
    config["rope_parameters"]["rope_theta"] *= 2
    tokenizer["added_tokens"][-1]["content"] = "<|other|>"
    for name, changed, word in (("tokenizer", tokenizer, "tokenizer"), ("config", config, "configuration")):
        (model / f"{name}.json").write_text(json.dumps(changed))
        asked = run_here(2, [ask_job(tmp_path, model, run)])
        assert asked.returncode == 78, asked.stderr
        assert "did not compute the keys and values" in asked.stderr and word in asked.stderr
        assert not list((tmp_path / "asked").glob("*.h5"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["documents.path=nowhere"], "nowhere"),
        (["model.dtype=bfloat16"], "dtype"),
        (["parallel.partition=tables/"], "only a question's own tokens are computed"),
        (["questions.template=Why?"], "{question} 0 times"),
        (['questions.documents=["doc-9.txt"]'], "'doc-9.txt' is not among the 5 documents"),
        (['questions.ask={"a#b"="Why?"}'], "named 'a#b'"),
        (['questions.ask=[" "]'], "expected non-empty text"),
        (["questions.ask=[]"], "no question"),
        (['questions.ask=["Why?", "Who?", "Why? "]'], "'q1' and 'q3' are the same question"),
        (["questions.ask=/nowhere.txt"], "cannot be read"),
    ],
)
def test_what_does_not_go_with_questions_is_refused_before_anything_is_loaded(
    run: Path, tmp_path: Path, run_here: Any, tiny_model_dir: Path, settings: list[str], words: str
) -> None:
    asked = run_here(1, [ask_job(tmp_path, tiny_model_dir, run), *with_settings(*settings)])
    assert asked.returncode in (65, 78) and words in asked.stderr, asked.stderr
    assert "Traceback" not in asked.stderr and not list((tmp_path / "asked").glob("*.h5"))
    assert last_line(asked.stderr).startswith("exit code")


def test_keys_of_another_shape_are_refused_even_with_checksums_that_fit(
    run: Path, tmp_path: Path, run_here: Any, tiny_model_dir: Path
) -> None:
    """Somebody who writes files of his own can seal them, too."""
    forged = tmp_path / "forged"
    forged.mkdir()
    layer, writer = torch.zeros(20, 2, 8), ResultWriter(forged, 0, open_results(run).header)
    for name, layers in (("few", [(layer, layer)] * 2), ("narrow", [(layer[:, :, :4], layer)] * 3)):
        writer.write(Record(name, "done"), layers, CachedTokens(range(20), (0, 10)))
    writer.close()
    asked = run_here(1, [ask_job(tmp_path, tiny_model_dir, forged)])
    assert asked.returncode == 65, asked.stderr
    for record in records(tmp_path / "asked").values():
        assert record.status == "error" and (
            "layer" in record.error or "at the beginning of its stored prompt" in record.error
        )


@pytest.mark.slow
def test_kvr_ask_answers_about_chosen_documents(
    run: Path, tmp_path: Path, run_kvr: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvr_mpi.transport.mpi.connect", LocalTransport)
    command = ("ask", run, "-q", "Who?", "-q", "Why?", "--doc", "doc-3.txt")
    code, out, err = run_kvr(*command, "--set", "generation.max_new_tokens=5")
    assert code == 0, err
    found = records(tmp_path / "out-answers")
    assert set(found) == {"doc-3.txt#q1", "doc-3.txt#q2"} and found["doc-3.txt#q2"].new_tokens == 5
    (tmp_path / "empty").mkdir()
    code, out, err = run_kvr("ask", tmp_path / "empty", "-q", "Who?")
    assert code == 65 and "no result" in err
