"""What an answer may be: with log-probabilities, several samples, scores of continuations, or JSON of a schema."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
import transformers as tf
from constants import Kvr
from made_jobs import TEXT, spec_of, with_settings

from kvr_mpi.documents.prompts import encode_text, fit_prompt, make_frame
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

SMALL_VOCABULARY = True

CLOSE = 2e-4  # float32, of slices that are cut elsewhere
TOP = "generation.logprobs=3"
THREE = ("generation.temperature=1.6", "generation.n=3")
SCORED = 'generation.score=[" yes", " Nobody had seen it", " no"]'
# A random model writes anything: so that its answers end, each is one of a few.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["good", "bad"]},
        "boats": {"type": "integer", "minimum": 0, "maximum": 99},
        "quiet": {"type": "boolean"},
    },
    "required": ["mood", "boats", "quiet"],
    "additionalProperties": False,
}


# Log-probabilities


def truth_of(model_dir: Path, text: str, token_ids: tuple[int, ...]) -> torch.Tensor:
    """What plain transformers says of every token of the vocabulary in the places of an answer."""
    model = tf.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = tf.AutoTokenizer.from_pretrained(model_dir)
    frame = make_frame(tokenizer, "Summarise: {text} Summary:", max_prompt_tokens=500)
    ids = fit_prompt(frame, encode_text(tokenizer, text), kept=None).ids
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *token_ids]])).logits[0]
    return torch.log_softmax(logits[len(ids) - 1 : -1], -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [(), pytest.param(("generation.temperature=1.7", "generation.top_k=40"), marks=pytest.mark.long)]
)
def test_log_probabilities_are_the_models_own_on_any_number_of_ranks(
    job: Path, tmp_path: Path, run_job: Any, how: tuple[str, ...]
) -> None:
    alone = run_job(1, TOP, *how).records
    for name, record in alone.items():
        truth = truth_of(Path(spec_of(job).model.path), (tmp_path / "corpus" / name).read_text(), record.token_ids)
        assert len(record.logprobs) == len(record.token_ids) == 8 and record.top == 3
        mine = truth[torch.arange(8), torch.tensor(record.token_ids)]
        torch.testing.assert_close(torch.tensor(record.logprobs), mine, atol=CLOSE, rtol=0)
        best = torch.tensor(record.top_logprobs).view(8, 3)
        torch.testing.assert_close(best, truth.topk(3).values, atol=CLOSE, rtol=0)
        named = truth.gather(1, torch.tensor(record.top_tokens).view(8, 3))
        torch.testing.assert_close(best, named, atol=CLOSE, rtol=0)
        assert set(record.texts) == {str(token) for token in (*record.token_ids, *record.top_tokens)}
    for name, record in run_job(3, TOP, *how).records.items():
        assert record.token_ids == alone[name].token_ids
        assert record.logprobs == pytest.approx(alone[name].logprobs, abs=CLOSE)


def test_what_is_stored_of_them_is_guarded_and_exported(tmp_path: Path, run_job: Any, run_kvr: Kvr) -> None:
    plain, ran = (run_job(1, "documents.limit=1", *more) for more in ((), (TOP,)))
    ((name, record),) = ran.records.items()
    assert plain.tokens == ran.tokens and plain.records[name].logprobs == ()
    with h5py.File(plain.folder / "results.h5") as file:
        assert "logprobs" not in json.loads(file["records"][()].tobytes())
    row = json.loads(run_kvr("export", ran.folder, "--format", "jsonl")[1])
    assert row["logprobs"] == list(record.logprobs) and row["token_texts"] == record.texts
    (cells,) = csv.DictReader(io.StringIO(run_kvr("export", ran.folder, "--format", "csv")[1]))
    assert [float(cell) for cell in cells["logprobs"].split()] == list(record.logprobs)
    whole = tmp_path / "whole.h5"
    assert run_kvr("merge", ran.folder, "-o", whole)[0] == EXIT_OK
    assert next(iter(open_results(whole))) == record


def test_of_a_text_in_parts_only_the_answer_that_is_kept_has_them(run_job: Any) -> None:
    found = run_job(1, TOP, "prompt.too_long=split", "prompt.max_tokens=120").records.values()
    assert max(record.parts for record in found) > 1
    assert all(len(record.logprobs) == len(record.token_ids) > 0 for record in found)


# Samples


def tokens_of(record: Record) -> list[list[int]]:
    return [sample["token_ids"] for sample in record.sampled]


@pytest.mark.slow
def test_samples_do_not_depend_on_ranks_or_company(run_job: Any) -> None:
    once = run_job(1, THREE[0]).records
    found = run_job(1, *THREE, "generation.logprobs=0").records
    for name, record in found.items():
        samples = tokens_of(record)
        assert len(samples) == 3 and len({tuple(one) for one in samples}) == 3
        assert tuple(samples[0]) == record.token_ids == once[name].token_ids
        assert record.computed_tokens == once[name].computed_tokens  # one prefill
        assert record.new_tokens == sum(map(len, samples)) and record.sampled[0]["answer"] == record.answer
        for sample in record.sampled:
            assert len(sample["logprobs"]) == len(sample["token_ids"])
            assert set(map(str, sample["token_ids"])) <= record.texts.keys()
    for ranks, more in ((2, ()), (1, ("documents.shard=3/5",))):
        for name, record in run_job(ranks, *THREE, *more).records.items():
            assert tokens_of(record) == tokens_of(found[name]), (ranks, name)


COMPRESSED = ("compress.method=snapkv", "compress.budget=48", "compress.window=8")


@pytest.mark.parametrize("more", [(), pytest.param(COMPRESSED, marks=pytest.mark.long)], ids=["whole", "compressed"])
def test_a_sample_goes_on_from_the_prompt_alone(run_job: Any, more: tuple[str, ...]) -> None:
    """Sampled from one token only, all are greedy: what an earlier answer left in the cache would show."""
    truth = run_job(1, *more).records
    for name, record in run_job(2, *THREE, "generation.top_k=1", *more).records.items():
        assert tokens_of(record) == [list(truth[name].token_ids)] * 3


# Scores


@pytest.fixture
def scoring(job: Path) -> Path:
    """A job that says nothing of new tokens."""
    job.write_text(job.read_text().replace("max_new_tokens = 8", ""))
    return job


@pytest.mark.slow
def test_continuations_of_a_list_are_scored(scoring: Path, run_job: Any, run_kvr: Kvr) -> None:
    ran, three = run_job(1, SCORED), run_job(3, SCORED)
    found, others = ran.records, three.records
    for name, record in found.items():
        assert record.answer == "" and record.new_tokens == 0 and record.status == "done"
        assert [score["text"] for score in record.scored] == [" yes", " Nobody had seen it", " no"]
        for score, other in zip(record.scored, others[name].scored, strict=True):
            assert score["logprob"] == pytest.approx(sum(score["token_logprobs"]))
            assert score["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
            assert score["tokens"] == len(score["token_ids"]) == len(score["token_logprobs"]) > 0
            assert score["logprob_per_token"] == pytest.approx(score["logprob"] / score["tokens"])
    rows = {
        row["id"]: row for row in map(json.loads, run_kvr("export", ran.folder, "--format", "jsonl")[1].splitlines())
    }
    assert {name: row["scores"] for name, row in rows.items()} == {name: one.scored for name, one in found.items()}


def test_continuations_of_each_row_and_prompt_are_scored(scoring: Path, tmp_path: Path, run_job: Any) -> None:
    rows = [
        {"id": "two", "text": TEXT, "choices": [" yes", " no"]},
        {"id": "one", "text": TEXT, "choices": " perhaps"},
        {"id": "none", "text": TEXT},
        {"id": "empty", "text": TEXT, "choices": ["a", ""]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = "prompt.template={p = '{text} p?', q = '{text} q?'}"
    found = run_job(2, "generation.score=choices", prompts, f"documents.path={file}", code=EXIT_BAD_DATA).records
    assert len(found) == 8
    for prompt in ("p", "q"):
        assert [score["text"] for score in found[f"two#{prompt}"].scored] == [" yes", " no"]
        assert [score["text"] for score in found[f"one#{prompt}"].scored] == [" perhaps"]
        assert "'choices' (generation.score) is 'None'" in found[f"none#{prompt}"].error
        assert "expected a non-empty text" in found[f"empty#{prompt}"].error
    assert found["two#p"].scored[0]["logprob"] != found["two#q"].scored[0]["logprob"]
    refused = run_job(1, "generation.score=x", code=EXIT_CONFIG).log
    assert "generation.score: no row has a field 'x'; text files have no fields" in refused


@pytest.mark.long
@pytest.mark.parametrize("kind", [(TOP, "generation.max_new_tokens=8"), (SCORED,)])
def test_questions_about_stored_documents_have_them(
    scoring: Path, run_job: Any, ask_about: Any, kind: tuple[str, ...]
) -> None:
    stored = run_job(1, "output.kv=true", "documents.limit=2", "generation.max_new_tokens=2").folder
    truth = run_job(1, *kind, "documents.limit=2", "prompt.template=Summarise: {text}\n\nWho?").records
    asked = [(1, ()), (2, ("parallel.ranks_per_chain=all",))]
    for ranks, more in asked if kind[0] == TOP else asked[:1]:
        found = run_job(ranks, *kind, *more, of=ask_about(stored, "Who?")).records
        for name, record in truth.items():
            other = found[f"{name}#q1"]
            assert other.token_ids == record.token_ids
            assert other.logprobs == pytest.approx(record.logprobs, abs=CLOSE)
            for one, two in zip(other.scored, record.scored, strict=True):
                assert one["token_logprobs"] == pytest.approx(two["token_logprobs"], abs=CLOSE)


# JSON of a schema


def check(answer: str) -> None:
    value = json.loads(answer)
    assert list(value) == ["mood", "boats", "quiet"]
    assert value["mood"] in ("good", "bad") and value["boats"] in range(100) and value["quiet"] in (True, False)


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA, indent=2))
    return path


def test_every_answer_follows_the_schema(schema: Path, run_job: Any) -> None:
    followed = (f"generation.json_schema={schema}", "generation.max_new_tokens=40", "documents.limit=3")
    warm = ("generation.temperature=1.5", "generation.top_k=20", "generation.n=2", "generation.logprobs=0")
    samples = []
    for record in run_job(2, *followed, *warm).records.values():
        assert record.finish_reason == "stop"
        for sample in record.sampled:
            check(sample["answer"])
            samples.append(sample["answer"])
            # The model's own probabilities, from before anything was taken away: it would have written something else.
            assert len(sample["logprobs"]) == len(sample["token_ids"]) and min(sample["logprobs"]) < -5
    assert len(set(samples)) > 2
    for record in run_job(1, *followed, "generation.max_new_tokens=4").records.values():
        assert record.finish_reason == "length" and record.new_tokens == 4
        with pytest.raises(json.JSONDecodeError):
            json.loads(record.answer)


def test_a_job_with_another_schema_in_the_file_is_another_job(job: Path, schema: Path) -> None:
    """What the answers depend on is what the file says, not its name: a run is not resumed with another."""
    before = spec_of(job, f"generation.json_schema={schema}").generation
    assert json.loads(before.json_schema or "") == SCHEMA
    schema.write_text(json.dumps({**SCHEMA, "required": []}))
    assert spec_of(job, f"generation.json_schema={schema}").generation != before
    assert spec_of(job, f"generation.json_schema={before.json_schema}").generation == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("{not json", "is no JSON"),
        ("[1]", "is no JSON schema: [1]"),
        ('{"typ": "object"}', "expected an object with at least one of"),
        ('{"type": "objekt"}', "generation.json_schema: this JSON schema cannot be followed: Invalid type: objekt"),
        ('{"not": {"type": "string"}, "type": "object"}', "Unimplemented keys"),
        ('{"type": "string", "pattern": "("}', "regex parse error"),
        (json.dumps(SCHEMA), "pip install kvr-mpi[json]"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(
    job: Path, schema: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    if "pip install" in said:
        monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    schema.unlink() if text is None else schema.write_text(text)
    run = run_here(1, [job, *with_settings(f"generation.json_schema={schema}")])
    assert run.returncode == EXIT_CONFIG and said in run.stderr and "loading" not in run.stderr


# Requests ask for them


def test_a_batch_file_asks_for_each(batch_of: Callable[..., Path], run_job: Any, run_kvr: Kvr) -> None:
    follows = {"type": "json_schema", "json_schema": {"name": "boats", "strict": True, "schema": SCHEMA}}
    broken = {"type": "json_schema", "json_schema": {"name": "boats", "schema": {"type": "objekt"}}}
    rows = [
        ("none", {}),
        ("chosen", {"logprobs": True}),
        ("top", {"logprobs": True, "top_logprobs": 2, "temperature": 1.4, "seed": 3}),
        ("completion", {"logprobs": 2}, "/v1/completions"),
        ("no-logprobs", {"top_logprobs": 2}),
        ("four", {"n": 4, "temperature": 1.6, "seed": 5, "logprobs": True}),
        ("one", {"temperature": 1.6, "seed": 5}),
        ("greedy", {"n": 2}),
        ("schema", {"response_format": follows, "max_tokens": 40, "temperature": 1.5, "n": 2}),
        ("broken", {"response_format": broken}),
    ]
    ran = run_job(2, of=batch_of(*rows), code=EXIT_BAD_DATA)
    found, out = ran.records, run_kvr("export", ran.folder, "--format", "openai-batch")[1]
    lines = {line["custom_id"]: line for line in map(json.loads, out.splitlines())}
    errors = {name: line["error"]["message"] for name, line in lines.items() if line["error"]}
    assert "body.logprobs is None" in errors.pop("no-logprobs")
    assert "2 answers without sampling would all be the same" in errors.pop("greedy")
    assert "Invalid type: objekt" in errors.pop("broken") and not errors
    bodies = {name: line["response"]["body"] for name, line in lines.items() if line["response"]}
    choices = {name: body["choices"] for name, body in bodies.items()}

    assert choices["none"][0]["logprobs"] is None and found["none"].token_ids == found["chosen"].token_ids
    for name, top in (("chosen", 0), ("top", 2)):
        content = choices[name][0]["logprobs"]["content"]
        assert [one["logprob"] for one in content] == list(found[name].logprobs)
        assert [len(one["top_logprobs"]) for one in content] == [top] * 8
        assert all(one["bytes"] is None or bytes(one["bytes"]).decode() == one["token"] for one in content)
    whole = "".join(one["token"] for one in choices["chosen"][0]["logprobs"]["content"])
    assert "\ufffd" in whole or whole == found["chosen"].answer
    told = choices["completion"][0]["logprobs"]
    assert told["token_logprobs"] == list(found["completion"].logprobs) and len(told["top_logprobs"]) == 8
    assert told["text_offset"][1] == len(told["tokens"][0])
    for best, token, logprob in zip(told["top_logprobs"], told["tokens"], told["token_logprobs"], strict=True):
        assert best[token] == logprob == max(best.values())  # it is greedy

    assert [choice["index"] for choice in choices["four"]] == [0, 1, 2, 3]
    words = [choice["message"]["content"] for choice in choices["four"]]
    assert len(set(words)) == 4 and words[0] == choices["one"][0]["message"]["content"]
    written = sum(len(choice["logprobs"]["content"]) for choice in choices["four"])
    assert bodies["four"]["usage"]["completion_tokens"] == written == 32

    assert len(choices["schema"]) == 2
    for choice in choices["schema"]:
        check(choice["message"]["content"])
