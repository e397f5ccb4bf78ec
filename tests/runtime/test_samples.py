"""Several answers to one prompt: from one prefill, and the same whatever else runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from constants import Kvr
from made_jobs import TEXT, with_settings

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

SMALL_VOCABULARY = True

WARM = ("generation.temperature=1.6",)
THREE = (*WARM, "generation.n=3")


def found_in(folder: Path) -> dict[str, Record]:
    return {record.id: record for record in open_results(folder)}


def run_job(run_here: Any, ranks: int, job: Path, out: Path, *settings: str) -> dict[str, Record]:
    run = run_here(ranks, [job, *with_settings(*settings, f"output.path={out}")])
    assert run.returncode == EXIT_OK, run.stderr
    return found_in(out)


def tokens_of(record: Record) -> list[list[int]]:
    return [sample["token_ids"] for sample in record.sampled]


WAYS: dict[str, tuple[int, tuple[str, ...]]] = {"2": (2, ()), "alone": (1, ("documents.shard=3/5",))}
MORE_WAYS: dict[str, tuple[int, tuple[str, ...]]] = {"3": (3, ()), "plain": (1, ("parallel.strategy=single",))}


@pytest.mark.slow
@pytest.mark.parametrize("ways", [WAYS, pytest.param(MORE_WAYS, marks=pytest.mark.long)], ids=["some", "more"])
def test_samples_do_not_depend_on_ranks_or_company(
    job: Path, tmp_path: Path, run_here: Any, ways: dict[str, tuple[int, tuple[str, ...]]]
) -> None:
    once = run_job(run_here, 1, job, tmp_path / "once", *WARM)
    found = run_job(run_here, 1, job, tmp_path / "1", *THREE, "generation.logprobs=0")
    for name, record in found.items():
        samples = tokens_of(record)
        assert len(samples) == 3 and len({tuple(one) for one in samples}) == 3
        assert tuple(samples[0]) == record.token_ids == once[name].token_ids
        assert record.computed_tokens == once[name].computed_tokens  # one prefill
        assert record.new_tokens == sum(map(len, samples))
        for sample in record.sampled:
            assert len(sample["logprobs"]) == len(sample["token_ids"])
            assert set(map(str, sample["token_ids"])) <= record.texts.keys()
        assert record.sampled[0]["answer"] == record.answer and "samples" not in record.columns
    for way, (ranks, settings) in ways.items():
        for name, record in run_job(run_here, ranks, job, tmp_path / way, *THREE, *settings).items():
            assert tokens_of(record) == tokens_of(found[name]), (way, name)


COMPRESSED = ("compress.method=snapkv", "compress.budget=48", "compress.window=8")


@pytest.mark.parametrize("more", [(), pytest.param(COMPRESSED, marks=pytest.mark.long)], ids=["whole", "compressed"])
def test_a_sample_goes_on_from_the_prompt_alone(
    job: Path, tmp_path: Path, run_here: Any, more: tuple[str, ...]
) -> None:
    """Sampled from one token only, all are greedy: what an earlier answer left in the cache would show."""
    truth = run_job(run_here, 1, job, tmp_path / "greedy", *more)
    found = run_job(run_here, 2, job, tmp_path / "samples", *THREE, "generation.top_k=1", *more)
    for name, record in found.items():
        assert tokens_of(record) == [list(truth[name].token_ids)] * 3


def test_a_batch_file_asks_for_several(job: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr) -> None:
    said, chat = [{"role": "user", "content": TEXT}], "/v1/chat/completions"
    rows = [
        ("four", chat, {"messages": said, "n": 4, "temperature": 1.6, "seed": 5, "logprobs": True}),
        ("one", chat, {"messages": said, "temperature": 1.6, "seed": 5}),
        ("text", "/v1/completions", {"prompt": TEXT, "n": 2, "temperature": 1.6}),
        ("greedy", chat, {"messages": said, "n": 2}),
    ]
    batch = tmp_path / "batch.jsonl"
    batch.write_text("".join(json.dumps({"custom_id": n, "url": url, "body": body}) + "\n" for n, url, body in rows))
    text = job.read_text().replace(str(tmp_path / "corpus"), str(batch)).replace("[prompt]", "")
    job.write_text(text.replace('template = "Summarise: {text} Summary:"', 'format = "openai-batch"'))
    assert run_here(2, [job]).returncode == EXIT_BAD_DATA
    _, out, _ = run_kvr("export", tmp_path / "out", "--format", "openai-batch")
    lines = {line["custom_id"]: line for line in map(json.loads, out.splitlines())}
    assert "2 answers without sampling would all be the same" in lines["greedy"]["error"]["message"]
    body = lines["four"]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    words = [choice["message"]["content"] for choice in body["choices"]]
    assert len(set(words)) == 4 and words[0] == lines["one"]["response"]["body"]["choices"][0]["message"]["content"]
    assert body["usage"]["completion_tokens"] == sum(len(c["logprobs"]["content"]) for c in body["choices"]) == 32
    assert len({choice["text"] for choice in lines["text"]["response"]["body"]["choices"]}) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["generation.n=2"], "without sampling, all answers are the same"),
        (["generation.n=129"], "less than or equal to 128"),
    ],
)
def test_what_cannot_be_meant_is_refused(job: Path, run_here: Any, settings: list[str], said: str) -> None:
    run = run_here(1, [job, *with_settings(*settings)])
    assert run.returncode == EXIT_CONFIG and said in run.stderr
