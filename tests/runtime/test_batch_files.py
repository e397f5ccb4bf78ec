"""OpenAI's batch files, in and out: every request answered as it asks, or an error that names why not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from constants import MPI_ENVIRONMENT, Kvr
from made_jobs import TEXT, with_settings

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

SMALL_VOCABULARY = True

CHAT = "/v1/chat/completions"
GOOD: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "as-the-job": {},
    "short": {"max_tokens": 3},
    "long": {"max_completion_tokens": 20},
    "narrow": {"temperature": 1.5, "top_k": 1},
    "seed-7": {"temperature": 1.5, "seed": 7, "max_tokens": 12},
    "seed-7-again": {"temperature": 1.5, "seed": 7, "max_tokens": 12},
    "seed-8": {"temperature": 1.5, "seed": 8, "max_tokens": 12},
}
BAD: dict[str, dict[str, Any]] = {
    "two": {"n": 2, "temperature": 0},
    "unknown": {"beams": 4},
    "too-much": {"max_tokens": 10_000},
}


def request(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": TEXT}]
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", "messages": said, **body}}


def write_batch(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))
    return path


@pytest.fixture
def batch_job(job: Path, tmp_path: Path) -> Path:
    """A job without a word about prompts: the requests say all of them."""
    requests = [request(name, **body) for name, body in {**GOOD, **BAD}.items()]
    requests.append(request("elsewhere", "/v1/embeddings"))
    file = write_batch(tmp_path / "batch.jsonl", requests)
    text = job.read_text().replace(str(tmp_path / "corpus"), str(file)).replace("[prompt]", "")
    text = text.replace('template = "Summarise: {text} Summary:"', 'format = "openai-batch"')
    job.write_text(text)
    return job


def found_in(folder: Path) -> dict[str, Record]:
    return {record.id: record for record in open_results(folder)}


def test_a_batch_file_is_a_job_and_its_responses_lie_beside_the_results(
    tmp_path: Path, tiny_model_dir: Path, run_here: Any, run_kvr: Kvr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_batch(tmp_path / "asked.jsonl", [request("b"), request("a"), request("b"), request("c", tools=[{}])])
    words = [file, *with_settings(f"model.path={tiny_model_dir}", "generation.max_new_tokens=4")]
    missing = run_here(1, [file])
    assert missing.returncode == EXIT_CONFIG and "model.path: is missing" in missing.stderr
    run = run_here(2, words)
    assert run.returncode == EXIT_BAD_DATA, run.stderr
    responses = tmp_path / "runs" / "asked" / "responses.jsonl"
    found = [json.loads(line) for line in responses.read_text().splitlines()]
    assert [one["custom_id"] for one in found] == ["a", "b", "b", "c"]
    assert [one["error"] is None for one in found] == [True, True, False, False]
    assert "the same custom_id, so this one was not run" in found[2]["error"]["message"]
    exported = run_kvr("export", responses.parent, "--format", "openai-batch")
    assert exported[1] == responses.read_text()
    again = run_here(1, [*words, "--resume"])
    assert again.returncode == EXIT_BAD_DATA and responses.read_text() == exported[1]


def test_every_request_is_answered_as_it_asks(batch_job: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr) -> None:
    run = run_here(2, [batch_job])
    assert run.returncode == EXIT_BAD_DATA and "8 done, 4 failed" in run.stdout, run.stderr
    found = found_in(tmp_path / "out")
    greedy = found["greedy"].token_ids
    assert len(greedy) == 8 and found["as-the-job"].token_ids == found["narrow"].token_ids == greedy
    assert found["short"].token_ids == greedy[:3] and found["long"].token_ids[:8] == greedy
    assert len(found["long"].token_ids) == 20 and found["long"].finish_reason == "length"
    assert found["seed-7"].token_ids == found["seed-7-again"].token_ids
    assert found["seed-7"].token_ids != found["seed-8"].token_ids and found["seed-7"].token_ids[:8] != greedy
    assert len({record.prompt_sha256 for record in found.values() if record.status == "done"}) == 1

    answers, errors = tmp_path / "answers.jsonl", tmp_path / "errors.jsonl"
    for status, file in (("done", answers), ("error", errors)):
        told = ("--format", "openai-batch", "--status", status, "-o", file)
        code, _, err = run_kvr("export", tmp_path / "out", *told)
        assert code == EXIT_OK, err
    responses = {line["custom_id"]: line for line in map(json.loads, answers.read_text().splitlines())}
    assert set(responses) == set(GOOD)
    body = responses["short"]["response"]["body"]
    assert responses["short"]["response"]["status_code"] == 200 and responses["short"]["error"] is None
    assert body["object"] == "chat.completion" and body["model"] == "m"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": found["short"].answer}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["total_tokens"] == found["short"].prompt_tokens + 3
    failed = {line["custom_id"]: line["error"]["message"] for line in map(json.loads, errors.read_text().splitlines())}
    assert set(failed) == {*BAD, "elsewhere"}
    assert "body.n is 2" in failed["two"] and "beams" in failed["unknown"] and "too long" in failed["too-much"]
    assert "'/v1/embeddings'" in failed["elsewhere"]
    code, out, _ = run_kvr("export", tmp_path / "out", "--format", "openai-batch")
    assert code == EXIT_OK and {json.loads(line)["custom_id"] for line in out.splitlines()} == {*responses, *failed}


def test_stop_strings_are_the_rows_own(batch_job: Path, tmp_path: Path, run_here: Any) -> None:
    run_here(1, [batch_job, *with_settings("documents.limit=1")])
    answer = found_in(tmp_path / "out")["greedy"].answer
    stop = answer[len(answer) // 2 :][:3]
    requests = [request("stops", stop=[stop, "never this"]), request("goes-on", stop="never this"), request("plain")]
    file = write_batch(tmp_path / "stops.jsonl", requests)
    settings = with_settings(f"documents.path={file}", f"output.path={tmp_path / 'stops'}")
    assert run_here(1, [batch_job, *settings]).returncode == EXIT_OK
    found = found_in(tmp_path / "stops")
    assert found["plain"].answer == found["goes-on"].answer == answer
    assert found["stops"].answer == answer[: answer.index(stop)] and found["stops"].finish_reason == "stop"


def test_completions_are_prompts_as_they_are(batch_job: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr) -> None:
    file = write_batch(
        tmp_path / "completions.jsonl",
        [{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": TEXT, "max_tokens": 4}}],
    )
    run = run_here(1, [batch_job, *with_settings(f"documents.path={file}")])
    assert run.returncode == EXIT_OK, run.stderr
    record = found_in(tmp_path / "out")["c"]
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    plain = batch_job.read_text().replace('format = "openai-batch"', "")
    (tmp_path / "plain.toml").write_text(plain + "[prompt]\nchat_template = false")
    settings = (f"documents.path={text}", f"output.path={tmp_path / 'plain'}")
    assert run_here(1, [tmp_path / "plain.toml", *with_settings(*settings)]).returncode == EXIT_OK
    other = found_in(tmp_path / "plain")["text.txt"]
    assert record.prompt_sha256 == other.prompt_sha256 and record.token_ids == other.token_ids[:4]
    _, out, _ = run_kvr("export", tmp_path / "out", "--format", "openai-batch")
    body = json.loads(out)["response"]["body"]
    assert body["object"] == "text_completion" and body["choices"][0]["text"] == record.answer and body["model"]


def test_conversations_and_the_same_words_in_a_template(job: Path, tmp_path: Path, run_here: Any) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Sum up:\n{TEXT}"}]
    rows = [{"id": "good", "messages": said}, {"id": "bad", "messages": [{"role": "bot", "content": "x"}]}]
    file = write_batch(tmp_path / "talks.jsonl", rows)
    (tmp_path / "talks.toml").write_text(
        job.read_text().replace('template = "Summarise: {text} Summary:"', "").replace("[prompt]", "")
    )
    settings = (f"documents.path={file}", "documents.format=messages", f"output.path={tmp_path / 'talks'}")
    run = run_here(2, [tmp_path / "talks.toml", *with_settings(*settings)])
    assert run.returncode == EXIT_BAD_DATA, run.stderr
    found = found_in(tmp_path / "talks")
    assert "messages[0].role is 'bot'" in found["bad"].error
    (tmp_path / "a.txt").write_text(TEXT)
    same = ("prompt.template=Sum up:\n{text}", "prompt.system=Be brief.", f"documents.path={tmp_path / 'a.txt'}")
    assert run_here(2, [job, *with_settings(*same)]).returncode == EXIT_OK
    (other,) = open_results(tmp_path / "out")
    assert found["good"].token_ids == other.token_ids and found["good"].prompt_sha256 == other.prompt_sha256


@pytest.mark.parametrize(
    ("kind", "said"),
    [("messages", "no list of messages of that name"), ("text", "is it documents.format = 'openai-batch'?")],
)
def test_requests_that_are_read_as_other_rows_are_refused(batch_job: Path, run_here: Any, kind: str, said: str) -> None:
    run = run_here(1, [batch_job, *with_settings(f"documents.format={kind}")])
    assert run.returncode == EXIT_CONFIG and said in run.stderr and "loading" not in run.stderr


def test_other_results_are_no_responses(job: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr) -> None:
    run_here(1, [job, *with_settings("documents.limit=1", "generation.max_new_tokens=1")])
    code, _, err = run_kvr("export", tmp_path / "out", "--format", "openai-batch", "-o", tmp_path / "a.jsonl")
    assert code == EXIT_BAD_DATA and "is not a request of a batch" in err and not (tmp_path / "a.jsonl").exists()


@pytest.mark.long
def test_a_thousand_requests_twenty_of_them_bad_and_a_kill(
    batch_job: Path, tmp_path: Path, kvr_run: Path, mpirun: Any, run_kvr: Kvr
) -> None:
    requests = []
    for number in range(1000):
        bad = {"n": 2} if number % 100 == 7 else {"beams": 4} if number % 100 == 57 else {}
        said = [{"role": "user", "content": f"Of number {number}: {TEXT}"}]
        requests.append(request(f"r{number:04d}", messages=said, max_tokens=4 + number % 9, **bad))
    file, out = write_batch(tmp_path / "thousand.jsonl", requests), tmp_path / "out"
    command = [str(kvr_run), str(batch_job), *with_settings(f"documents.path={file}")]
    launcher = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert launcher is not None
    killed = subprocess.Popen(
        [launcher, "-n", "2", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **MPI_ENVIRONMENT},
        start_new_session=True,
    )
    while killed.poll() is None and not list(out.glob("log-*.jsonl")):
        time.sleep(0.05)
    for process in (*psutil.Process(killed.pid).children(recursive=True), psutil.Process(killed.pid)):
        process.kill()
    killed.wait()
    before = found_in(out)
    assert 0 < len(before) < 1000

    resumed = mpirun(2, [*command, "--resume"])
    assert resumed.returncode == EXIT_BAD_DATA and "980 done, 20 failed" in resumed.stdout, resumed.stderr
    after = found_in(out)
    assert len(after) == 1000 and all(after[name] == record for name, record in before.items())
    answers, errors = tmp_path / "answers.jsonl", tmp_path / "errors.jsonl"
    for status, target in (("done", answers), ("error", errors)):
        run_kvr("export", out, "--format", "openai-batch", "--status", status, "-o", target)
    done = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, answers.read_text().splitlines())}
    failed = {json.loads(line)["custom_id"] for line in errors.read_text().splitlines()}
    assert failed == {f"r{number:04d}" for number in range(1000) if number % 100 in (7, 57)}
    assert len(done) == 980 and not failed & done.keys()
    for number in range(1000):
        if f"r{number:04d}" in done:
            body = done[f"r{number:04d}"]
            assert body["usage"]["completion_tokens"] == 4 + number % 9 or body["choices"][0]["finish_reason"] == "stop"
