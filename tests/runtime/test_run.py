"""The main job: the same answers on any ranks and in any company, and no run goes on as another."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from constants import ROOT
from made_jobs import with_settings
from transformers import LlamaForCausalLM

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG
from kvr_mpi.events import Events
from kvr_mpi.job import load_job
from kvr_mpi.report.page import page_of
from kvr_mpi.store.lock import Lock, this_process
from kvr_mpi.store.results import open_results
from kvr_mpi.store.status import read_status


def test_another_job_is_not_resumed_and_says_so_before_the_model_is_loaded(run_job: Any) -> None:
    begun, again = ("documents.limit=2", "generation.max_new_tokens=1"), {"to": "out", "words": ["--resume"]}
    run_job(1, *begun, to="out")
    for setting, words in (
        ("prompt.template=Read: {text}", 'is "Read: {text}"); restore'),
        ("generation.max_new_tokens=9", "(generation.max_new_tokens was 1, is 9);"),
    ):
        log = run_job(1, *begun, setting, **again, code=78).log
        assert "cannot resume" in log and words in log and "importing torch" not in log
    log = run_job(1, *begun, "output.columns=[]", **again).log
    assert "2 documents already done" in log and "loading" not in log


def test_a_model_replaced_after_the_folder_was_opened_is_refused(run_job: Any, monkeypatch: Any) -> None:
    opened = open_results(run_job(1, "documents.limit=2", "documents.shard=0/2", to="out").folder).header.identity
    monkeypatch.setattr("kvr_mpi.runtime.batch.identity_of_job", lambda *given: opened)
    log = run_job(1, "documents.limit=2", "model.dtype=bfloat16", to="out", words=["--resume"], code=78).log
    assert 'model.dtype was "float32", is "bfloat16"' in log and "already done" not in log


@pytest.mark.parametrize("words", [[], ["--resume"], ["--overwrite"]])
def test_a_folder_in_use_is_refused_before_torch_is_imported(words: list[str], tmp_path: Path, run_job: Any) -> None:
    (tmp_path / "out").mkdir()
    other = Lock(tmp_path / "out", this_process())
    log = run_job(1, to="out", words=words, code=78).log
    other.release()
    assert f"is in use by process {os.getpid()}" in log and "importing torch" not in log
    assert log.splitlines()[-1].endswith("exit code 78: the output folder or file cannot be used")


def test_of_two_jobs_that_start_together_one_ends_before_it_loads_the_model(
    tmp_path: Path, run_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvr_mpi.store.lock.check_unused", lambda folder: None)  # neither saw the other
    (tmp_path / "out").mkdir()
    other = Lock(tmp_path / "out", this_process())
    log = run_job(2, to="out", code=78).log
    assert f"is in use by process {os.getpid()}" in log and "loading" not in log
    other.check(anew=True)
    other.release()
    assert len(run_job(2, to="out").records) == 5, "the one that ended has left nothing behind"


def test_log_report_and_status_say_the_same_rate(run_job: Any) -> None:
    run = run_job(2)
    rates = [
        float(re.search(pattern, text.replace(",", ""))[1])  # type: ignore[index]
        for pattern, text in (
            (r": (\d+) answers/hour", run.log),
            (r" (\d+) per hour", page_of(run.folder)[0].decode()),
            (r"^(\d+)", f"{read_status(run.folder).rate_per_h:.0f}"),
        )
    ]
    assert rates[0] == pytest.approx(rates[1], rel=0.01) and rates[0] == rates[2]


def test_prompts_shorter_than_the_chain(tmp_path: Path, run_job: Any) -> None:
    """Two tokens over four ranks: the last rank does them alone."""
    (tmp_path / "two.txt").write_text("ab cd")
    settings = ["prompt.template={text}", "prompt.chat_template=false", f"documents.path={tmp_path / 'two.txt'}"]
    (record,) = run_job(4, *settings).records.values()
    assert record.prompt_tokens < 4 and record.slices == (0, record.prompt_tokens) and record.new_tokens == 8


def test_an_answer_depends_on_its_document_alone(run_job: Any) -> None:
    """Not on the others or the ranks: so in float32 on CPUs. Elsewhere records name what it was computed with."""
    warm = "generation.temperature=1.3"
    together = run_job(2, warm)
    for ranks, more in ((1, "parallel.strategy=kvr"), (3, "parallel.partition=even")):
        (name, tokens), *others = run_job(ranks, warm, more, f"documents.shard={ranks}/5").tokens.items()
        assert not others and tokens == together.tokens[name]
    prompts = "prompt.template={p = '{text} p?', q = '{text} q?'}"  # which share what they begin with
    assert run_job(1, prompts, "documents.shard=4/5").tokens.items() <= run_job(1, prompts).tokens.items()
    assert {record.kernels for record in together.records.values()} == {""}
    (record,) = run_job(1, "model.dtype=bfloat16", "documents.limit=1").records.values()
    assert record.kernels.startswith(f"CPU {torch.backends.cpu.get_cpu_capability()}, bfloat16; ")
    assert record.kernels.endswith(" for products")


def test_a_model_that_transformers_cannot_run_on_is_refused_before_documents(
    job: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as one rank runs it. The first tokens may also leave a model in another state, as BigBird's do."""

    def fail(*given: Any, **how: Any) -> Any:
        raise RuntimeError("sizes differ")

    monkeypatch.setattr("kvr_mpi.prefill.self_check.continued", fail)
    for strategy in ("single", "kvr"):
        run = run_here(1, [job, *with_settings(f"parallel.strategy={strategy}")])
        assert run.returncode == EXIT_CONFIG and "Traceback" not in run.stderr
        assert "RuntimeError: sizes differ); neither chains nor strategy = 'single' can run it" in run.stderr


@pytest.mark.parametrize("error", [IndexError("out of range"), RuntimeError("can't allocate memory")], ids=str)
@pytest.mark.parametrize("at", [0, 2, -1], ids=["prompt", "answer", "score"])
def test_plain_transformers_fails_on_one_document_only(
    at: int, error: Exception, run_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ProphetNet does at the end of its context, and any model without memory: in a prompt, an answer or a score."""
    scored = ["generation.score=[' yes it is']", "generation.max_new_tokens=0"]
    settings = ["parallel.strategy=single", *(scored if at < 0 else [])]
    truth = run_job(1, *settings)
    longest = max(truth.records.values(), key=lambda record: record.prompt_tokens)
    fatal, own = longest.prompt_tokens + abs(at), LlamaForCausalLM.forward

    def forward(self: Any, input_ids: Any, past_key_values: Any, **how: Any) -> Any:
        if past_key_values.get_seq_length() + input_ids.shape[1] == fatal:
            raise error
        return own(self, input_ids, past_key_values=past_key_values, **how)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    run = run_job(2, *settings, code=EXIT_BAD_DATA)
    said = f"transformers' own code fails (IndexError: {error})" if isinstance(error, IndexError) else str(error)
    assert said in run.records[longest.id].error
    others = truth.records.keys() - {longest.id}
    shown = [[(one.status, one.shown) for one in map(each.records.get, sorted(others))] for each in (run, truth)]
    assert shown[0] == shown[1]


def test_every_rank_says_what_it_is_at(tmp_path: Path, run_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told, seen, begin = list[tuple[Events, str]](), list[tuple[int, ...]](), Events.begin

    def spied(self: Events, doing: str, what: str = "") -> None:
        begin(self, doing, what)
        told.append((self, doing))
        if doing == "decoding":
            assert "answer" in what
            seen.append(tuple(state.rank for state in read_status(tmp_path / "out").ranks))

    monkeypatch.setattr(Events, "begin", spied)
    run_job(2, to="out")
    words = {"prefilling", "decoding", "waiting", "ended"}
    ranks = [{word for other, word in told if other is events} for events in {id(one): one for one, _ in told}.values()]
    assert sorted(ranks, key=len) == [words, words | {"reading"}], "only the leader reads"
    assert (0, 1) in seen, "both can be seen from outside while it runs"
    assert not (tmp_path / "out" / "states").exists(), "nothing is left of it"


# The jobs that are shipped are valid, and the demo runs with its real model


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_jobs_are_valid(path: Path) -> None:
    spec, _ = load_job(path, (), {})
    assert "{text}" in spec.prompt.template
    assert tomllib.loads(path.read_text())["output"]["path"] == f"runs/{path.stem}"


@pytest.mark.quick
def test_the_demo_runs_with_less_of_it(tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    less = ("documents.limit=2", "prompt.max_tokens=400", "prompt.too_long=keep-head", "generation.max_new_tokens=12")
    words = with_settings(f"output.path={tmp_path}", *less)
    run = mpirun(2, [kvr_run, ROOT / "jobs" / "demo.toml", *words], cwd=ROOT)
    assert run.returncode == 0 and len(open_results(tmp_path)) == 2, run.stderr
    for record in open_results(tmp_path):
        assert 300 < record.prompt_tokens <= 400  # cut between words
        assert record.slices[-1] == record.prompt_tokens and len(record.slices) == 3
        assert record.answer.strip() and record.new_tokens == 12
