"""OpenAI's batch files, and fields of rows: answered as each asks, or an error that names why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from constants import Kvr
from made_jobs import TEXT, with_settings

from kvr_mpi.documents.encoding import encode_text
from kvr_mpi.documents.prompts import PromptText
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK
from kvr_mpi.store.results import open_results

GOOD: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "as-the-job": {},
    "short": {"max_tokens": 3},
    "long": {"max_completion_tokens": 20},
    "narrow": {"temperature": 2, "repetition_penalty": 1, "top_k": 1},
    "seed-7": {"temperature": 1.5, "seed": 7, "max_tokens": 12},
    "seed-7-again": {"temperature": 1.5, "seed": 7, "max_tokens": 12},
    "seed-8": {"temperature": 1.5, "seed": 8, "max_tokens": 12},
}
BAD: dict[str, dict[str, Any]] = {
    "two": {"n": 2, "temperature": 0},
    "unknown": {"beams": 4},
    "too-much": {"max_tokens": 10_000},
}
COMPRESSED = ("compress.method=ada-snapkv", "compress.budget=64", "compress.window=16")
BatchOf = Callable[..., Path]


def test_a_batch_file_is_a_job_and_its_responses_lie_beside_the_results(
    batch_of: BatchOf, tmp_path: Path, tiny_model_dir: Path, run_here: Any, run_kvr: Kvr, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    file = batch_of(("b", {}), ("a", {}), ("b", {}), ("c", {"tools": [{}]}), name="asked").with_suffix(".jsonl")
    words = [file, *with_settings(f"model.path={tiny_model_dir}", "generation.max_new_tokens=4")]
    missing = run_here(1, [file])
    assert missing.returncode == EXIT_CONFIG and "model.path: is missing" in missing.stderr
    run = run_here(2, words)
    assert run.returncode == EXIT_BAD_DATA, run.stderr
    responses = tmp_path / "runs" / "asked" / "responses.jsonl"
    found = [json.loads(line) for line in responses.read_text().splitlines()]
    assert [one["custom_id"] for one in found] == ["a", "b", "b", "c"]
    assert [one["error"] is None for one in found] == [True, True, False, False]
    assert "so it was not run" in found[2]["error"]["message"]
    exported = run_kvr("export", responses.parent, "--format", "openai-batch")
    assert exported[1] == responses.read_text()
    again = run_here(1, [*words, "--resume"])
    assert again.returncode == EXIT_BAD_DATA and responses.read_text() == exported[1]


def test_every_request_is_answered_as_it_asks(batch_of: BatchOf, run_job: Any, run_kvr: Kvr) -> None:
    ran = run_job(2, of=batch_of(*{**GOOD, **BAD}.items(), ("elsewhere", {}, "/v1/embeddings")), code=EXIT_BAD_DATA)
    assert "8 done, 4 failed" in ran.out
    found = ran.records
    greedy = found["greedy"].token_ids
    assert len(greedy) == 8 and found["as-the-job"].token_ids == found["narrow"].token_ids == greedy
    assert found["short"].token_ids == greedy[:3] and found["long"].token_ids[:8] == greedy
    assert len(found["long"].token_ids) == 20 and found["long"].finish_reason == "length"
    assert found["seed-7"].token_ids == found["seed-7-again"].token_ids
    assert found["seed-7"].token_ids != found["seed-8"].token_ids and found["seed-7"].token_ids[:8] != greedy
    assert len({record.prompt_sha256 for record in found.values() if record.status == "done"}) == 1

    lines = {}
    for status in ("done", "error"):
        code, out, err = run_kvr("export", ran.folder, "--format", "openai-batch", "--status", status)
        assert code == EXIT_OK, err
        lines[status] = {line["custom_id"]: line for line in map(json.loads, out.splitlines())}
    assert lines["done"].keys() == GOOD.keys() and lines["error"].keys() == {*BAD, "elsewhere"}
    short = lines["done"]["short"]
    body = short["response"]["body"]
    assert short["response"]["status_code"] == 200 and short["error"] is None
    assert body["object"] == "chat.completion" and body["model"] == "m"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": found["short"].answer}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["total_tokens"] == found["short"].prompt_tokens + 3
    failed = {name: line["error"]["message"] for name, line in lines["error"].items()}
    assert "body.n is 2" in failed["two"] and "beams" in failed["unknown"]
    assert "max_tokens is 10000, but the context" in failed["too-much"]
    assert "'/v1/embeddings'" in failed["elsewhere"]


def test_a_request_has_its_own_stop_strings_and_length(batch_of: BatchOf, run_job: Any) -> None:
    """Also where heads drop tokens: there is room for more new tokens than the job's."""
    answer = run_job(1, of=batch_of(("greedy", {"temperature": 0}))).records["greedy"].answer
    stop = answer[len(answer) // 2 :][:3]
    stops = batch_of(("stops", {"stop": [stop, "never this"]}), ("goes-on", {"stop": "never this"}), ("plain", {}))
    found = run_job(1, of=stops).records
    assert found["plain"].answer == found["goes-on"].answer == answer
    assert found["stops"].answer == answer[: answer.index(stop)] and found["stops"].finish_reason == "stop"
    long = batch_of(("a", {"prompt": TEXT * 6, "max_tokens": 20}, "/v1/completions"))
    (record,) = run_job(1, *COMPRESSED, of=long).records.values()
    assert record.compression and len(record.token_ids) == 20


def test_completions_are_prompts_as_they_are(batch_of: BatchOf, job: Path, run_job: Any, run_kvr: Kvr) -> None:
    ran = run_job(1, of=batch_of(("c", {"max_tokens": 4}, "/v1/completions")))
    record = ran.records["c"]
    (job.parent / "text.txt").write_text(TEXT)
    plain = ("prompt.template={text}", "prompt.chat_template=false", f"documents.path={job.parent / 'text.txt'}")
    other = run_job(1, *plain).records["text.txt"]
    assert record.prompt_sha256 == other.prompt_sha256 and record.token_ids == other.token_ids[:4]
    body = json.loads(run_kvr("export", ran.folder, "--format", "openai-batch")[1])["response"]["body"]
    assert body["object"] == "text_completion" and body["choices"][0]["text"] == record.answer and body["model"]


def test_conversations_and_the_same_words_in_a_template(batch_of: BatchOf, tmp_path: Path, run_job: Any) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Sum up:\n{TEXT}"}]
    rows = [{"id": "good", "messages": said}, {"id": "bad", "messages": [{"role": "bot", "content": "x"}]}]
    found = run_job(2, "documents.format=messages", of=batch_of(*rows), code=EXIT_BAD_DATA).records
    assert "messages[0].role is 'bot'" in found["bad"].error
    (tmp_path / "a.txt").write_text(TEXT)
    same = ("prompt.template=Sum up:\n{text}", "prompt.system=Be brief.", f"documents.path={tmp_path / 'a.txt'}")
    (other,) = run_job(2, *same).records.values()
    assert found["good"].token_ids == other.token_ids and found["good"].prompt_sha256 == other.prompt_sha256


def test_requests_that_are_read_as_other_rows_are_refused(batch_of: BatchOf, run_job: Any) -> None:
    for kind, said in (
        ("messages", "no list of messages of that name"),
        ("text", "is it documents.format"),
    ):
        run = run_job(1, f"documents.format={kind}", of=batch_of(("a", {})), code=EXIT_CONFIG)
        assert said in run.log and "loading" not in run.log


# Fields of rows, in prompts and in the results


ROWS = [
    {"id": "a", "text": TEXT, "title": "Ferries {text} {{x}}", "label": {"gold": ["yes", None]}},
    {"id": "b", "text": TEXT, "label": "no title"},
    {"id": "c", "text": TEXT * 2, "title": "Harbours"},
]


@pytest.fixture
def rows_job(job: Path, tmp_path: Path) -> Path:
    """The job over rows with fields, a fifth of which the template names."""
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    job.write_text(
        job.read_text()
        .replace(str(tmp_path / "corpus"), str(folder))
        .replace("Summarise: {text} Summary:", "On {title}: {text} What of {title}?")
        + 'prompt.chat_template = false\noutput.columns = ["label", "title"]\n'
    )
    return job


def test_rows_with_fields_go_through_a_job_and_out_again(
    rows_job: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr, tiny_model_dir: Path
) -> None:
    from transformers import AutoTokenizer

    run = run_here(2, [rows_job])
    assert run.returncode == EXIT_BAD_DATA and "2 done, 1 failed" in run.stdout, run.stderr
    found = {record.id: record for record in open_results(tmp_path / "out")}
    assert "the field 'title', used in the template, is missing" in found["b"].error
    assert found["b"].passed == {"label": "no title"} and found["c"].passed == {"title": "Harbours"}
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    for name, row in (("a", ROWS[0]), ("c", ROWS[2])):
        title = encode_text(tokenizer, row["title"])
        words = [tokenizer(word)["input_ids"] for word in ("On ", ": ", " What of ", "?")]
        ids = [*words[0], *title, *words[1], *encode_text(tokenizer, row["text"]), *words[2], *title, *words[3]]
        assert found[name].prompt_sha256 == PromptText(tuple(ids)).sha256
    run_kvr("export", tmp_path / "out", "--format", "parquet", "-o", tmp_path / "out.parquet")
    frame = pandas.read_parquet(tmp_path / "out.parquet")
    assert "columns" not in frame and frame["columns.title"].isna().tolist() == [False, True, False]
    assert json.loads(frame["columns.label"][0]) == ROWS[0]["label"] and frame["columns.label"][1] == "no title"
