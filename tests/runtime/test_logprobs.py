"""Log-probabilities of an answer's tokens: the model's own, on any number of ranks, however the answer was chosen."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
import transformers as tf
from constants import Kvr
from made_jobs import TEXT, with_settings

from kvr_mpi.documents.prompts import encode_text, fit_prompt, make_frame
from kvr_mpi.errors import EXIT_CONFIG, EXIT_OK
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

CLOSE = 2e-4  # float32, of slices that are cut elsewhere
WANTED = ("generation.logprobs=3",)


def found_in(folder: Path) -> dict[str, Record]:
    return {record.id: record for record in open_results(folder)}


def run_job(run_here: Any, ranks: int, job: Path, out: Path, *settings: str) -> dict[str, Record]:
    run = run_here(ranks, [job, *with_settings(*settings, f"output.path={out}")])
    assert run.returncode == EXIT_OK, run.stderr
    return found_in(out)


def truth_of(model_dir: Path, text: str, token_ids: tuple[int, ...]) -> torch.Tensor:
    """What plain transformers says of every token of the vocabulary in the places of an answer."""
    model = tf.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = tf.AutoTokenizer.from_pretrained(model_dir)
    frame = make_frame(tokenizer, "Summarise: {text} Summary:", max_prompt_tokens=500)
    ids = fit_prompt(frame, encode_text(tokenizer, text), kept=None).ids
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *token_ids]])).logits[0]
    return torch.log_softmax(logits[len(ids) - 1 : -1], -1)


GREEDY: tuple[str, ...] = ()
WARM = ("generation.temperature=1.7", "generation.top_k=40")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "others"), [(GREEDY, (3,)), pytest.param(WARM, (2, 3), marks=pytest.mark.long)], ids=["greedy", "sampled"]
)
def test_they_are_the_models_own_on_any_number_of_ranks(
    job: Path, tmp_path: Path, tiny_model_dir: Path, run_here: Any, how: tuple[str, ...], others: tuple[int, ...]
) -> None:
    alone = run_job(run_here, 1, job, tmp_path / "1", *WANTED, *how)
    for name, record in alone.items():
        text = (tmp_path / "corpus" / name).read_text()
        truth = truth_of(tiny_model_dir, text, record.token_ids)
        assert len(record.logprobs) == len(record.token_ids) == 8 and record.top == 3
        mine = truth[torch.arange(8), torch.tensor(record.token_ids)]
        torch.testing.assert_close(torch.tensor(record.logprobs), mine, atol=CLOSE, rtol=0)
        best = torch.tensor(record.top_logprobs).view(8, 3)
        torch.testing.assert_close(best, truth.topk(3).values, atol=CLOSE, rtol=0)
        named = truth.gather(1, torch.tensor(record.top_tokens).view(8, 3))
        torch.testing.assert_close(best, named, atol=CLOSE, rtol=0)
        if not how:
            assert record.top_tokens[::3] == record.token_ids and record.top_logprobs[::3] == record.logprobs
        assert set(record.texts) == {str(token) for token in (*record.token_ids, *record.top_tokens)}
    for ranks in others:
        for name, record in run_job(run_here, ranks, job, tmp_path / str(ranks), *WANTED, *how).items():
            assert record.token_ids == alone[name].token_ids
            assert record.logprobs == pytest.approx(alone[name].logprobs, abs=CLOSE)


def test_what_is_stored_is_guarded_and_exported(job: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr) -> None:
    plain = run_job(run_here, 1, job, tmp_path / "plain", "documents.limit=1")
    found = run_job(run_here, 1, job, tmp_path / "out", "documents.limit=1", *WANTED)
    ((name, record),) = found.items()
    assert plain[name].token_ids == record.token_ids and plain[name].logprobs == () and plain[name].token_texts == ""
    with h5py.File(tmp_path / "out" / "results.h5") as file:
        stored = json.loads(file["records"][()].tobytes())
        assert stored["logprobs"] == list(record.logprobs) and len(stored["top_logprobs"]) == 24
    with h5py.File(tmp_path / "plain" / "results.h5") as file:
        assert "logprobs" not in json.loads(file["records"][()].tobytes())
    code, out, _ = run_kvr("export", tmp_path / "out", "--format", "jsonl")
    row = json.loads(out)
    assert code == EXIT_OK and row["logprobs"] == list(record.logprobs) and row["token_texts"] == record.texts
    _, out, _ = run_kvr("export", tmp_path / "out", "--format", "csv")
    (cells,) = csv.DictReader(io.StringIO(out))
    assert [float(cell) for cell in cells["logprobs"].split()] == list(record.logprobs)
    whole = tmp_path / "whole.h5"
    assert run_kvr("merge", tmp_path / "out", "-o", whole)[0] == EXIT_OK
    assert next(iter(open_results(whole))) == record


def test_a_batch_file_asks_for_them(job: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr) -> None:
    said = [{"role": "user", "content": TEXT}]
    chat, completions = "/v1/chat/completions", "/v1/completions"
    rows = [
        ("none", chat, {"messages": said}),
        ("chosen", chat, {"messages": said, "logprobs": True}),
        ("top", chat, {"messages": said, "logprobs": True, "top_logprobs": 2, "temperature": 1.4, "seed": 3}),
        ("completion", completions, {"prompt": TEXT, "logprobs": 2}),
        ("wrong", chat, {"messages": said, "top_logprobs": 2}),
    ]
    batch = tmp_path / "batch.jsonl"
    batch.write_text("".join(json.dumps({"custom_id": n, "url": url, "body": body}) + "\n" for n, url, body in rows))
    text = job.read_text().replace(str(tmp_path / "corpus"), str(batch)).replace("[prompt]", "")
    job.write_text(text.replace('template = "Summarise: {text} Summary:"', 'format = "openai-batch"'))
    run_here(2, [job])
    found = found_in(tmp_path / "out")
    assert found["wrong"].status == "error" and "body.logprobs is None" in found["wrong"].error
    _, out, _ = run_kvr("export", tmp_path / "out", "--format", "openai-batch")
    lines = {line["custom_id"]: line for line in map(json.loads, out.splitlines())}
    choices = {name: lines[name]["response"]["body"]["choices"][0] for name, *_ in rows if name != "wrong"}
    assert choices["none"]["logprobs"] is None
    assert found["none"].token_ids == found["chosen"].token_ids
    for name, top in (("chosen", 0), ("top", 2)):
        content = choices[name]["logprobs"]["content"]
        assert [one["logprob"] for one in content] == list(found[name].logprobs)
        assert [len(one["top_logprobs"]) for one in content] == [top] * 8
        for one in content:
            assert one["bytes"] is None or bytes(one["bytes"]).decode() == one["token"]
    whole = "".join(one["token"] for one in choices["chosen"]["logprobs"]["content"])
    assert "\ufffd" in whole or whole == found["chosen"].answer
    told = choices["completion"]["logprobs"]
    assert told["token_logprobs"] == list(found["completion"].logprobs) and len(told["top_logprobs"]) == 8
    assert told["text_offset"][1] == len(told["tokens"][0])
    for best, token, logprob in zip(told["top_logprobs"], told["tokens"], told["token_logprobs"], strict=True):
        assert best[token] == logprob == max(best.values())  # it is greedy


@pytest.mark.long
def test_questions_about_stored_documents_have_them(job: Path, tmp_path: Path, run_here: Any) -> None:
    run_job(run_here, 1, job, tmp_path / "kv", "output.kv=true", "documents.limit=2")
    ask = job.with_name("ask.toml")
    text = job.read_text().replace('template = "Summarise: {text} Summary:"', "").replace('partition = "even"', "")
    ask.write_text(text.replace(str(tmp_path / "corpus"), str(tmp_path / "kv")) + '\n[questions]\nask = ["Who?"]\n')
    asked = ("prompt.template=Summarise: {text}\n\nWho?", "documents.limit=2")
    again = run_job(run_here, 1, job, tmp_path / "again", *WANTED, *asked)
    loaded = run_job(run_here, 1, ask, tmp_path / "loaded", *WANTED)
    spread = run_job(run_here, 2, ask, tmp_path / "spread", *WANTED, "parallel.ranks_per_chain=all")
    for record_id, record in again.items():
        assert len(record.logprobs) == 8 and max(record.logprobs) < 0
        for found in (loaded, spread):
            other = found[f"{record_id}#q1"]
            assert other.token_ids == record.token_ids and other.logprobs == pytest.approx(record.logprobs, abs=CLOSE)


def test_only_the_answer_that_is_kept_has_them(job: Path, tmp_path: Path, run_here: Any) -> None:
    """A text in parts is answered several times; what is told of tokens is told of those in the record."""
    split = ("prompt.too_long=split", "prompt.max_tokens=120")
    found = run_job(run_here, 1, job, tmp_path / "split", *WANTED, *split)
    assert max(record.parts for record in found.values()) > 1
    assert all(len(record.logprobs) == len(record.token_ids) > 0 for record in found.values())


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("generation.top_logprobs=3", "did you mean 'logprobs'"),
        ("generation.logprobs=21", "less than or equal to 20"),
        ("generation.logprobs=true", "valid integer"),
    ],
)
def test_what_cannot_be_meant_is_refused(job: Path, run_here: Any, setting: str, said: str) -> None:
    run = run_here(1, [job, *with_settings(setting)])
    assert run.returncode == EXIT_CONFIG and said in run.stderr
