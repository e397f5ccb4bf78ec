"""Plans of a corpus: what `kvr plan` shows without MPI, and jobs that follow it, under mpirun, with real documents."""

from __future__ import annotations

import io
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from made_tables import a_table

from kvr_mpi.cli.plan import plan as plan_command
from kvr_mpi.costs.costmodel import single_seconds
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.documents import Document
from kvr_mpi.documents.prompts import Frame, encode_text, split_text
from kvr_mpi.errors import EXIT_USAGE, ConfigError, KvrError
from kvr_mpi.job import JobSpec, load_job
from kvr_mpi.model import load_outline
from kvr_mpi.report.log import Log
from kvr_mpi.runtime.batch import RunOptions, run_job
from kvr_mpi.runtime.setup import Machine
from kvr_mpi.schedule.forecast import Forecast
from kvr_mpi.schedule.placement import schedule
from kvr_mpi.schedule.plan import agree, count_tokens, describe, duration, plan_documents, prompt_tokens
from kvr_mpi.store.folder import read_run
from kvr_mpi.store.lock import this_process
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning.lookup import choose_slices
from kvr_mpi.tuning.table import ModelIdentity, save_table

TEXT = "The ferry left at seven and the harbour was quiet. Nobody on the pier had seen the second boat. "
# Sentences of each document: one is worth a chain, the others are not.
SENTENCES = [1, 2, 3, 1, 5, 8, 2, 1, 330, 3, 1, 20]
COSTS = Costs(
    layers=4,
    qkv_token_s=1e-5,
    rest_token_s=3e-5,
    pair_s=1e-8,
    eager=False,
    layer_s=0.0,
    launch_floor_s=1e-4,
    kv_bytes=1024,
    link_bytes_per_s=1e9,
    link_latency_s=1e-5,
)
FORECAST = Forecast(
    source="invented",
    costs=COSTS,
    even=False,
    frame=Frame((1, 2), (3,), 1000),
    new_tokens=11,
    step_s=0.01,
    step_token_s=1e-6,
)


@pytest.fixture(scope="module")
def long_model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A tiny random Llama of 8192 tokens: a long prompt takes visibly longer than a short one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("long-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def job(tmp_path: Path, long_model_dir: Path) -> Path:
    """A planned job over documents of very different length, one that is empty and one that is too long."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, count in enumerate(SENTENCES):
        (corpus / f"doc-{number:02d}.txt").write_text(f"Document {number}. " + TEXT * count)
    (corpus / "empty.txt").write_text(" \n")
    (corpus / "too-long.txt").write_text(TEXT * 500)
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
        [model]
        path = "{long_model_dir}"
        dtype = "float32"
        [documents]
        path = "{corpus}"
        [prompt]
        template = "Summarise: {{text}} Summary:"
        [generation]
        max_new_tokens = 8
        [parallel]
        ranks_per_chain = "auto"
        [output]
        path = "{tmp_path / "out"}"
        """
    )
    return path


def options(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def answers(folder: Path) -> dict[str, tuple[int, ...]]:
    return {record.id: record.token_ids for record in read_run(folder) if record.status == "done"}


@pytest.mark.slow
def test_a_planned_job_gives_the_same_answers(
    job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path, run_here: Any
) -> None:
    planned = mpirun(4, [kvr_run, job])
    assert planned.returncode == 65, planned.stderr
    records = {record.id: record for record in read_run(tmp_path / "out")}
    errors = {name for name, record in records.items() if record.status == "error"}
    assert errors == {"empty.txt", "too-long.txt"}
    ranks = {name: len(record.slices) - 1 for name, record in records.items() if name not in errors}
    assert ranks["doc-08.txt"] > 1 and ranks["doc-00.txt"] == 1, ranks
    assert "predicted" in planned.stderr and "lower bound" in planned.stderr
    assert "14 document(s) in" in planned.stderr and "(planned: " in planned.stderr
    assert f"12 done, {len(errors)} error(s)" in planned.stdout

    for name, count, settings in (
        ("single", 2, ["parallel.strategy=single"]),
        ("fixed", 2, ["parallel.ranks_per_chain=all", "parallel.partition=even"]),
    ):
        run = run_here(count, [job, *options(*settings, f"output.path={tmp_path / name}")])
        assert run.returncode == 65, run.stderr
        assert answers(tmp_path / name) == answers(tmp_path / "out")
    assert len(answers(tmp_path / "out")) == 12


@pytest.mark.slow
def test_a_planned_job_goes_on_with_another_number_of_ranks(
    job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path, run_here: Any
) -> None:
    first = run_here(3, [job, *options("documents.shard=0/3", "output.kv=true", "parallel.partition=even")])
    assert first.returncode == 65, first.stderr  # one of the five is empty
    before = answers(tmp_path / "out")
    assert len(before) == 4
    second = mpirun(2, [kvr_run, job, "--resume", *options("output.kv=true", "prompt.too_long=error")])
    assert second.returncode == 65, second.stderr
    assert "5 of them done already" in second.stderr
    after = answers(tmp_path / "out")
    assert len(after) == 12 and all(after[name] == tokens for name, tokens in before.items())
    again = run_here(1, [job, "--resume", *options("output.kv=true")])
    assert again.returncode == 65, again.stderr
    assert answers(tmp_path / "out") == after


def test_documents_without_room_are_refused_and_the_rest_is_done(
    job: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(job, "documents.limit=10")
    options = RunOptions(Machine(cache_dir, cores=2, offline=True), this_process())
    monkeypatch.setattr("kvr_mpi.runtime.setup.free_bytes", lambda device, sharers: 1_000_000)
    codes = run_local(2, lambda rank: run_job(spec, options, rank, Log(rank.rank, rank.size, io.StringIO())))
    assert codes == [65, 65]
    records = {record.id: record for record in read_run(tmp_path / "out")}
    assert {name for name, record in records.items() if record.status == "error"} == {"doc-08.txt"}
    error = records["doc-08.txt"].error
    assert "tokens do not fit into the memory of a chain of up to 2 rank(s)" in error
    assert "9 done, 1 error(s)" in capsys.readouterr().out


def test_plan_shows_documents_and_what_else_could_be_done(job: Path, kvr: Path) -> None:
    command = [str(job), "--ranks", "4", "--hardware", "h200"]
    # Once as a user starts it, without MPI.
    shown = subprocess.run([kvr, "plan", *command, "--limit-rows", "3"], capture_output=True, text=True, check=True)
    for words in (
        "profile h200: data sheet",
        "lower bound",
        "... and 11 more",
        "2: ",
        "8: ",
        "all on one rank each",
    ):
        assert words in shown.stdout, shown.stdout
    assert sum("doc-" in line for line in shown.stdout.splitlines()) <= 3
    assert "2 document(s) cannot be read or are too long" in shown.stdout

    found = json.loads(CliRunner().invoke(plan_command, [*command, "--json"], catch_exceptions=False).stdout)
    documents = {document["id"]: document for document in found["documents"]}
    assert len(documents) == 14 and found["ranks"] == 4 and not found["misfits"]
    assert found["lower_bound_s"] <= found["makespan_s"] <= found["data_parallel_s"]
    long, bad = documents["doc-08.txt"], documents["empty.txt"]
    assert long["tokens"] > 6000 and long["slices"][-1] == long["tokens"] and long["memory_bytes"] > 0
    assert 0 < long["ttft_s"] < long["end_s"] and bad["tokens"] == 0 and bad["slices"] == []
    assert "error" in bad["reason"]
    share = CliRunner().invoke(plan_command, [*command, "--json", "--set", "documents.shard=1/4"])
    assert {document["id"] for document in json.loads(share.stdout)["documents"]} == set(sorted(documents)[1::4])


def test_a_slow_machine_makes_a_chain(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = {
        "name": "slow",
        "source": "invented",
        "gemm_flop_per_s": 1e9,
        "attention_flop_per_s": 1e9,
        "attention": "flash",
        "link_bytes_per_s": 1e9,
        "link_latency_s": 1e-5,
        "memory_bytes_per_s": 1e10,
        "memory_bytes": 1e9,
    }
    slow = tmp_path / "slow.json"
    monkeypatch.setenv("SLURM_NTASKS", "4")  # without --ranks, those of the allocation

    def planned(*more: str) -> str:
        slow.write_text(json.dumps(profile))
        return (
            CliRunner().invoke(plan_command, [str(job), "--hardware", str(slow), *more], catch_exceptions=False).stdout
        )

    found = json.loads(planned("--json"))
    chains = {document["id"]: document["ranks"] for document in found["documents"]}
    assert chains["doc-08.txt"] == 4 and chains["doc-00.txt"] == 1 and len(found["documents"][0]["slices"]) == 5
    assert found["makespan_s"] < 0.5 * found["data_parallel_s"]
    single = json.loads(planned("--json", "--set", "parallel.strategy=single"))
    assert {(document["ranks"], document["memory_bytes"]) for document in single["documents"]} == {(1, None)}
    assert single["makespan_s"] == single["data_parallel_s"] > found["makespan_s"]
    profile["memory_bytes"] = 1000.0
    found = json.loads(planned("--json"))
    assert len(found["misfits"]) == 12 and "no number of ranks would do" in found["misfits"][0]["reason"]
    assert planned().count("FITS NOWHERE") == 12


def test_a_lookup_table_of_this_model_says_what_things_cost(
    job: Path, long_model_dir: Path, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outline = load_outline(str(long_model_dir), dtype="float32", offline=True, cache_dir=cache_dir)
    model = ModelIdentity(name="tiny", fingerprint=outline.fingerprint, architecture="LlamaForCausalLM")
    for name, ranks in (("mine", 2), ("mine", 4), ("other", 2)):
        table = a_table(ranks=ranks)
        key = table.key.model_copy(update={"model": model, "hardware": name})
        foreign = key.model_copy(update={"model": a_table().key.model, "hardware": "foreign"})
        save_table(table.model_copy(update={"key": key}), tmp_path / "tables" / f"{name}-{ranks}.json")
        save_table(table.model_copy(update={"key": foreign}), tmp_path / "tables" / f"foreign-{name}-{ranks}.json")

    def planned(*more: str) -> Result:
        return CliRunner().invoke(plan_command, [str(job), "--ranks", "4", "--json", *more])

    found = json.loads(planned("--hardware", "mine").stdout)
    assert found["costs"].startswith("lookup table for 4 ranks of mine")
    documents = {document["id"]: document for document in found["documents"]}
    assert documents["doc-08.txt"]["ranks"] == 4 and documents["doc-08.txt"]["memory_bytes"] is None
    expected = single_seconds(a_table().rates.costs(), documents["doc-00.txt"]["tokens"])
    assert documents["doc-00.txt"]["ttft_s"] == pytest.approx(expected, rel=0.05)
    settings = ("ranks_per_chain=4", "partition=table", "table=tables/mine-4.json")
    as_set = [word for setting in settings for word in ("--set", f"parallel.{setting}")]
    by_table = json.loads(planned("--hardware", "mine", *as_set).stdout)["documents"]
    cut = next(document for document in by_table if document["id"] == "doc-08.txt")
    assert tuple(cut["slices"]) == choose_slices(a_table(ranks=4), cut["tokens"], 4).partition.bounds
    ambiguous = planned()
    assert isinstance(ambiguous.exception, ConfigError) and "mine or other (measured" in str(ambiguous.exception)
    (tmp_path / "tables" / "other-2.json").unlink()
    assert json.loads(planned().stdout)["costs"] == found["costs"], "the only machine there are tables for"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--hardware", "h200"], 78, ["--ranks 8"]),
        (["--ranks", "4"], 78, ["how fast a rank is", "h100-80gb", "kvr search"]),
        (["--ranks", "4", "--hardware", "abacus"], 78, ["'abacus'", "h200"]),
        (["--ranks", "0"], 2, ["--ranks"]),
        (["--ranks", "2", "--set", "documents.path=nowhere", "--hardware", "h200"], 78, ["nowhere"]),
        (
            ["--ranks", "2", "--set", "documents.shard=20/30", "--hardware", "h200"],
            78,
            ["no document of the share 20/30"],
        ),
        (["--ranks", "2", "--set", "prompt.template=x"], 78, ["prompt.template", "{text}"]),
        (["--ranks", "2", "--set", "parallel.ranks_per_chain=some"], 78, ["'auto'", "'some'"]),
        (["--ranks", "2", "--set", "parallel.ranks_per_chain=0"], 78, ["'all', 'auto' or at least 1"]),
        (
            ["--ranks", "2", "--set", "parallel.partition=ratio", "--set", "parallel.ratios=[1, 2]"],
            78,
            ["parallel.ratios", "'auto'"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_planned(
    arguments: list[str], code: int, words: list[str], job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no tables are
    for name in [name for name in os.environ if name.startswith(("SLURM", "PMI", "OMPI"))]:
        monkeypatch.delenv(name)
    found = CliRunner().invoke(plan_command, [str(job), *arguments])
    if code == EXIT_USAGE:
        assert found.exit_code == code
        message = found.output
    else:
        assert isinstance(found.exception, KvrError) and found.exception.exit_code == code
        message = str(found.exception)
    for word in words:
        assert word in message


def spec_of(job: Path, *settings: str) -> JobSpec:
    return load_job(job, settings, {})[0]


def test_prompts_are_counted_as_they_will_be_made(job: Path, tokenizer: Any) -> None:
    frame = Frame((1, 2), (3,), 200)
    ids = encode_text(tokenizer, TEXT * 60)
    assert len(ids) > 1000
    counted = {
        choice: prompt_tokens(spec_of(job, f"prompt.too_long={choice}").prompt, frame, len(ids))
        for choice in ("error", "truncate", "split")
    }
    made = split_text(tokenizer, frame, ids)
    assert counted == {"error": 0, "truncate": 200, "split": sum(prompt.tokens for prompt in made)}
    prompt = spec_of(job).prompt
    assert [prompt_tokens(prompt, frame, tokens) for tokens in (0, 1, 197, 198)] == [0, 4, 200, 0]


def test_ranks_share_the_counting(tokenizer: Any) -> None:
    documents = [Document(f"{number}", TEXT * number, error=None if number else "bad") for number in range(7)]
    counts = run_local(3, lambda rank: count_tokens(tokenizer, documents[rank.rank :: 3], rank))
    truth = {document.id: len(encode_text(tokenizer, document.text)) for document in documents}
    assert counts == [truth] * 3 and truth["0"] == 0


def test_a_document_in_parts_takes_as_long_as_its_prompts() -> None:
    assert FORECAST.parts(1000) == [1000]
    prompts = FORECAST.parts(5000)
    assert len(prompts) > 6 and max(prompts) <= 1000 and sum(prompts[:-1]) >= 5000
    whole = FORECAST.document_s(5000, 2)
    assert whole == pytest.approx(sum(FORECAST.document_s(prompt, 2) for prompt in prompts))
    assert FORECAST.document_s(800, 1) == pytest.approx(FORECAST.ttft_s(800, 1) + 10 * (0.01 + 800e-6))
    many = FORECAST.for_corpus(32, 4)  # eight for each rank: a step serves eight, on both ranks of a chain
    assert many.document_s(800, 2) == pytest.approx(FORECAST.ttft_s(800, 2) + 10 * (0.01 / 8 + 800e-6) / 2)
    assert FORECAST.for_corpus(1, 4).document_s(800, 2) == FORECAST.document_s(800, 2), "nobody to share a step with"
    assert FORECAST.ttft_s(3, 4) == FORECAST.ttft_s(3, 1), "fewer tokens than ranks"
    assert replace(FORECAST, plain=True).ttft_s(800, 1) == single_seconds(COSTS, 800)
    assert FORECAST.ttft_s(800, 1) == pytest.approx(single_seconds(COSTS, 800) - 1e-8 * 800**2 / 2), "the last layer"
    assert replace(FORECAST, even=True).slices(960, 3).lengths == (320, 320, 320)
    assert FORECAST.slices(900, 3).lengths[0] > 300


def test_documents_near_the_longest_prompt_are_not_taken_for_cut_ones(job: Path) -> None:
    """Up to 1000 tokens a document is one prompt and one answer; one token more, and it is several of each."""
    around = FORECAST.frame.max_tokens - FORECAST.frame.text_budget
    texts = [(f"{tokens}", tokens - around) for tokens in (*range(600, 1001), *range(1001, 5000, 7))]
    plan = plan_documents(spec_of(job, "prompt.too_long=split"), texts, 1, FORECAST)
    forecast = FORECAST.for_corpus(len(texts), 1)
    for place in plan.placements:
        took = place.end_s - place.start_s
        assert took == pytest.approx(forecast.document_s(place.tokens, 1), rel=2e-3)


def test_memory_decides_what_fits() -> None:
    tight = replace(FORECAST, peak_bytes=lambda tokens, ranks: tokens * 10.0 / ranks, memory_bytes=2000.0)
    assert tight.fits(200, 1) and not tight.fits(201, 1) and tight.fits(201, 2) and tight.memory(200, 1) == 2000
    assert tight.fits(100_000, 5), "answered in parts, none of them longer than a prompt may be"
    assert FORECAST.fits(10**9, 1) and replace(FORECAST, memory_bytes=1.0).fits(5, 1), "unknown: not refused"


def test_single_is_planned_without_chains(job: Path) -> None:
    texts = [("long", 900), ("short", 5)]
    assert plan_documents(spec_of(job), texts, 4, FORECAST).chain_lengths != (1,)
    assert plan_documents(spec_of(job, "parallel.strategy=single"), texts, 4, FORECAST).chain_lengths == (1,)


def test_ranks_that_disagree_follow_the_first() -> None:
    documents = [(f"{number}", 50 * number) for number in range(1, 9)]

    def plan_on(rank: Transport, odd: int) -> Any:
        slower = 2.0 if rank.rank == odd else 0.1  # as if this host rounded very differently
        return schedule(documents, 4, lambda tokens, ranks: tokens / ranks + slower * ranks, lambda tokens, ranks: True)

    def agreed(rank: LocalTransport) -> Any:
        return agree(rank, plan_on(rank, 2))

    first, second, odd, last = run_local(4, agreed)
    assert first == second == last == plan_on(LocalTransport(), 2)
    assert odd.placements == first.placements and odd.does_not_fit == first.does_not_fit
    assert run_local(2, lambda rank: agree(rank, plan_on(rank, 9)))[0] == plan_on(LocalTransport(), 9)


def test_description_names_times_and_alternatives() -> None:
    plan = schedule([("a", 900), ("b", 5)], 2, FORECAST.document_s, lambda tokens, ranks: tokens < 50 * ranks)
    assert describe(plan)[0].endswith("; 1 do not fit into memory")
    plan = schedule([("a", 900), ("b", 50)], 2, FORECAST.document_s, lambda tokens, ranks: tokens < 500 * ranks)
    lines = describe(plan)
    assert "some do not fit" in lines[2] and "all on chains of 2: " in lines[2]
    assert describe(schedule([], 2, FORECAST.document_s, FORECAST.fits)) == ["documents: none"]
    assert (duration(3.14159), duration(3700)) == ("3.14 s", "1:01:40")
