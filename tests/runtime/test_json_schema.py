"""Answers that follow a JSON schema: always, whatever the model would rather write; what is none is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from constants import Kvr
from made_jobs import TEXT, spec_of, with_settings

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

SMALL_VOCABULARY = True

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
ROOM = "generation.max_new_tokens=40"
WARM = ("generation.temperature=1.5", "generation.top_k=20")


def found_in(folder: Path) -> dict[str, Record]:
    return {record.id: record for record in open_results(folder)}


def check(answer: str) -> None:
    value = json.loads(answer)
    assert list(value) == ["mood", "boats", "quiet"]
    assert value["mood"] in ("good", "bad") and value["boats"] in range(100) and value["quiet"] in (True, False)


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA, indent=2))
    return path


def test_every_answer_follows_it(job: Path, schema: Path, tmp_path: Path, run_here: Any) -> None:
    settings = (f"generation.json_schema={schema}", ROOM, *WARM, "generation.n=2", "generation.logprobs=0")
    run = run_here(2, [job, *with_settings(*settings, "documents.limit=3")])
    assert run.returncode == EXIT_OK, run.stderr
    found = found_in(tmp_path / "out")
    for record in found.values():
        assert record.finish_reason == "stop"
        for sample in record.sampled:
            check(sample["answer"])
            # The model's own probabilities, from before anything was taken away: it would have written something else.
            assert len(sample["logprobs"]) == len(sample["token_ids"]) and min(sample["logprobs"]) < -5
    assert len({sample["answer"] for record in found.values() for sample in record.sampled}) > 2


@pytest.mark.long
def test_greedy_answers_are_the_same_on_any_ranks(job: Path, schema: Path, tmp_path: Path, run_here: Any) -> None:
    found = []
    for ranks in (1, 2, 3):
        out = tmp_path / str(ranks)
        settings = with_settings(f"generation.json_schema={schema}", ROOM, "documents.limit=4", f"output.path={out}")
        assert run_here(ranks, [job, *settings]).returncode == EXIT_OK
        found.append({name: record.answer for name, record in found_in(out).items()})
    assert found[0] == found[1] == found[2]
    for answer in found[0].values():
        check(answer)


def test_an_answer_without_room_is_marked(job: Path, schema: Path, tmp_path: Path, run_here: Any) -> None:
    settings = with_settings(f"generation.json_schema={schema}", "generation.max_new_tokens=4", "documents.limit=1")
    assert run_here(1, [job, *settings]).returncode == EXIT_OK
    for record in found_in(tmp_path / "out").values():
        assert record.finish_reason == "length" and record.new_tokens == 4
        with pytest.raises(json.JSONDecodeError):
            json.loads(record.answer)


def test_a_batch_file_asks_for_it(job: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr) -> None:
    said, chat = [{"role": "user", "content": TEXT}], "/v1/chat/completions"
    wanted = {"type": "json_schema", "json_schema": {"name": "boats", "strict": True, "schema": SCHEMA}}
    broken = {"type": "json_schema", "json_schema": {"name": "boats", "schema": {"type": "objekt"}}}
    rows = [
        ("schema", {"messages": said, "response_format": wanted, "max_tokens": 40}),
        ("warm", {"messages": said, "response_format": wanted, "max_tokens": 40, "temperature": 1.5, "n": 2}),
        ("plain", {"messages": said}),
        ("broken", {"messages": said, "response_format": broken}),
    ]
    batch = tmp_path / "batch.jsonl"
    batch.write_text("".join(json.dumps({"custom_id": n, "url": chat, "body": body}) + "\n" for n, body in rows))
    text = job.read_text().replace(str(tmp_path / "corpus"), str(batch)).replace("[prompt]", "")
    job.write_text(text.replace('template = "Summarise: {text} Summary:"', 'format = "openai-batch"'))
    assert run_here(2, [job]).returncode == EXIT_BAD_DATA
    _, out, _ = run_kvr("export", tmp_path / "out", "--format", "openai-batch")
    lines = {line["custom_id"]: line for line in map(json.loads, out.splitlines())}
    assert "Invalid type: objekt" in lines["broken"]["error"]["message"]
    for name, count in (("schema", 1), ("warm", 2)):
        choices = lines[name]["response"]["body"]["choices"]
        assert len(choices) == count
        for choice in choices:
            check(choice["message"]["content"])
    with pytest.raises(json.JSONDecodeError):
        json.loads(lines["plain"]["response"]["body"]["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "is no JSON"),
        ("[1]", "is no JSON schema: [1]"),
        ('{"typ": "object"}', "expected an object with at least one of"),
        ('{"type": "objekt"}', "generation.json_schema: this JSON schema cannot be followed: Invalid type: objekt"),
        ('{"not": {"type": "string"}, "type": "object"}', "Unimplemented keys"),
        ('{"type": "string", "pattern": "("}', "regex parse error"),
    ],
)
def test_a_schema_that_is_none_is_refused(job: Path, schema: Path, run_here: Any, text: str, said: str) -> None:
    schema.write_text(text)
    run = run_here(1, [job, *with_settings(f"generation.json_schema={schema}")])
    assert run.returncode == EXIT_CONFIG and said in run.stderr and "loading" not in run.stderr


def test_what_does_not_go_with_it_is_refused(job: Path, schema: Path, run_here: Any) -> None:
    for setting in ('generation.stop=["x"]', "generation.min_new_tokens=3", "generation.max_new_tokens=0"):
        run = run_here(1, [job, *with_settings(f"generation.json_schema={schema}", setting)])
        assert run.returncode == EXIT_CONFIG and "generation.json_schema" in run.stderr
    run = run_here(1, [job, *with_settings("generation.json_schema=nowhere.json")])
    assert run.returncode == EXIT_CONFIG and "'nowhere.json' cannot be read" in run.stderr


def test_without_the_library_it_is_named(
    job: Path, schema: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    run = run_here(1, [job, *with_settings(f"generation.json_schema={schema}")])
    assert run.returncode == EXIT_CONFIG and "pip install kvr-mpi[json]" in run.stderr


def test_a_job_with_another_schema_in_the_file_is_another_job(job: Path, schema: Path) -> None:
    """What the answers depend on is what the file says, not its name: a run is not resumed with another."""
    before = spec_of(job, f"generation.json_schema={schema}").generation
    assert json.loads(before.json_schema or "") == SCHEMA
    schema.write_text(json.dumps({**SCHEMA, "required": []}))
    assert spec_of(job, f"generation.json_schema={schema}").generation.model_dump() != before.model_dump()
    assert spec_of(job, f"generation.json_schema={before.json_schema}").generation == before
