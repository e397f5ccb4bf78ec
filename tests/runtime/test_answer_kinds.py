"""What an answer may be: with log-probabilities, several samples, scores of continuations, or JSON of a schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from constants import Kvr
from made_jobs import TEXT, load

from kvr_mpi.documents.encoding import encode_text
from kvr_mpi.documents.prompts import fit_prompt, make_frame
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG

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
def test_log_probabilities_are_the_models_own_however_a_token_is_chosen(
    job: Path, tmp_path: Path, run_job: Any
) -> None:
    alone = run_job(1, TOP, "generation.temperature=1.7", "generation.top_k=40").records
    for name, record in alone.items():
        truth = truth_of(Path(load(job).model.path), (tmp_path / "corpus" / name).read_text(), record.token_ids)
        assert len(record.logprobs) == len(record.token_ids) == 8 and record.top == 3
        mine = truth[torch.arange(8), torch.tensor(record.token_ids)]
        torch.testing.assert_close(torch.tensor(record.logprobs), mine, atol=CLOSE, rtol=0)
        best = torch.tensor(record.top_logprobs).view(8, 3)
        torch.testing.assert_close(best, truth.topk(3).values, atol=CLOSE, rtol=0)
        named = truth.gather(1, torch.tensor(record.top_tokens).view(8, 3))
        torch.testing.assert_close(best, named, atol=CLOSE, rtol=0)
        assert set(record.texts) == {str(token) for token in (*record.token_ids, *record.top_tokens)}


# Samples


@pytest.mark.slow
def test_samples_do_not_depend_on_each_other(run_job: Any) -> None:
    """Sampled from one token only, all are greedy: what an earlier answer left in the cache would show."""
    greedy, once = run_job(1), run_job(2, *THREE, "generation.top_k=1")
    for name, record in once.records.items():
        assert [sample["token_ids"] for sample in record.sampled] == [list(greedy.tokens[name])] * 3
        assert record.new_tokens == 3 * len(greedy.tokens[name])
        assert record.computed_tokens == greedy.records[name].computed_tokens, "one prefill"


# Scores


@pytest.fixture
def scoring(job: Path) -> None:
    """The job says nothing of new tokens."""
    job.write_text(job.read_text().replace("generation.max_new_tokens = 8", ""))


@pytest.mark.usefixtures("scoring")
def test_continuations_of_a_list_are_scored(run_job: Any, run_kvr: Kvr) -> None:
    ran = run_job(1, SCORED)
    found = ran.records
    for record in found.values():
        assert record.answer == record.finish_reason == "" and record.new_tokens == 0 and record.status == "done"
        assert [score["text"] for score in record.scored] == [" yes", " Nobody had seen it", " no"]
        for score in record.scored:
            assert score["logprob"] == pytest.approx(sum(score["token_logprobs"]))
            assert score["tokens"] == len(score["token_ids"]) == len(score["token_logprobs"]) > 0
            assert score["logprob_per_token"] == pytest.approx(score["logprob"] / score["tokens"])
    rows = [json.loads(line) for line in run_kvr("export", ran.folder, "--format", "jsonl")[1].splitlines()]
    assert {row["id"]: row["scores"] for row in rows} == {name: one.scored for name, one in found.items()}


@pytest.mark.usefixtures("scoring")
def test_continuations_of_each_row_and_prompt_are_scored(tmp_path: Path, run_job: Any) -> None:
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


# JSON of a schema


def check(answer: str) -> None:
    value = json.loads(answer)
    assert list(value) == ["mood", "boats", "quiet"]
    assert value["mood"] in ("good", "bad") and value["boats"] in range(100) and value["quiet"] in (True, False)


def test_every_answer_follows_the_schema(tmp_path: Path, job: Path, run_job: Any) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA, indent=2))
    before = load(job, f"generation.json_schema={schema}").generation.json_schema
    assert json.loads(before or "") == SCHEMA, "a run is resumed with what the file says, not with its name"
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "schema.json); expected a file with a JSON schema, or the schema itself as text"),
        ("{not json", "is not JSON"),
        ("[1]", "is not a JSON schema: [1]"),
        ('{"type": "object", "type": "string"}', "the key 'type' occurs twice"),
        ('{"typ": "object"}', "expected an object with at least one of"),
        ('{"type": "objekt"}', "generation.json_schema: this JSON schema is not supported: Invalid type: objekt"),
        ('{"not": {"type": "string"}, "type": "object"}', "Unimplemented keys"),
        ('{"type": "string", "pattern": "("}', "regex parse error"),
        (json.dumps(SCHEMA), "pip install llguidance"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(
    tmp_path: Path, run_job: Any, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    schema = tmp_path / "schema.json"
    if "pip install" in said:
        monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    if text is not None:
        schema.write_text(text)
    log = run_job(1, f"generation.json_schema={schema}", code=EXIT_CONFIG).log
    assert said in log and "loading" not in log


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
