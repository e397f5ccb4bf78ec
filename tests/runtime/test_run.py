"""The main job as a user runs it: real processes under mpirun, real files, the same answers on any ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import h5py
import pytest
from made_jobs import TEXT, answers, with_settings
from made_runs import kv_in

from kvr_mpi.documents.prompts import PromptText, encode_text
from kvr_mpi.store.results import open_results


@pytest.mark.long
def test_any_number_of_ranks_gives_the_same_answers(job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    runs = {
        "alone": (1, ["parallel.strategy=single"]),
        "chain": (2, []),
        "even": (3, ["parallel.partition=even"]),
        "chains": (4, ["parallel.ranks_per_chain=2", "parallel.partition=equal_time"]),
    }
    found = {}
    for name, (ranks, settings) in runs.items():
        folder = tmp_path / name
        options = [part for setting in [*settings, f"output.path={folder}"] for part in ("--set", setting)]
        run = mpirun(ranks, [kvr_run, job, *options])
        assert run.returncode == 0, run.stderr
        assert "5 done, 0 failed" in run.stdout
        found[name] = answers(folder)
        assert [file.name for file in folder.glob("*.h5*")] == ["results.h5"]
    assert len(found["alone"]) == 5
    assert all(len(tokens) == 8 for tokens in found["alone"].values())
    assert found["chain"] == found["even"] == found["chains"] == found["alone"]


@pytest.mark.slow
def test_existing_results_are_refused_resumed_or_deleted(
    job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path, run_here: Any
) -> None:
    first = mpirun(2, [kvr_run, job, "--set", "documents.shard=0/2"])
    assert first.returncode == 0, first.stderr
    before = {record.id: record for record in open_results(tmp_path / "out")}

    refused = run_here(2, [job])
    assert refused.returncode == 78
    assert "--resume" in refused.stderr and "--overwrite" in refused.stderr
    assert {record.id: record for record in open_results(tmp_path / "out")} == before

    changed = run_here(2, [job, "--resume", "--set", "generation.max_new_tokens=9"])
    assert changed.returncode == 78
    assert "max_new_tokens" in changed.stderr and "cannot resume" in changed.stderr

    fewer = run_here(2, [job, "--resume", "--set", "documents.limit=3"])
    assert fewer.returncode == 78
    assert "documents have changed" in fewer.stderr and "doc-4.txt" in fewer.stderr

    resumed = mpirun(1, [kvr_run, job, "--resume"])  # on another number of ranks
    assert resumed.returncode == 0, resumed.stderr
    assert "3 of them already done" in resumed.stderr
    after = {record.id: record for record in open_results(tmp_path / "out")}
    assert len(after) == 5
    assert all(after[name] == record for name, record in before.items())

    again = run_here(2, [job, "--overwrite", "--set", "documents.limit=1"])
    assert again.returncode == 0, again.stderr
    assert len(answers(tmp_path / "out")) == 1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("prompt.template=Read: {text}", "prompt was"),
        ("generation.max_new_tokens=9", "generation was"),
        ("output.columns=[]", ""),
        ("documents.limit=1", "documents have changed"),
    ],
)
def test_another_job_is_not_resumed_and_says_so_before_the_model_is_loaded(
    job: Path, run_here: Any, setting: str, words: str
) -> None:
    begun = with_settings("documents.limit=2", "generation.max_new_tokens=1")
    assert run_here(1, [job, *begun]).returncode == 0
    resumed = run_here(1, [job, "--resume", *begun, *with_settings(setting)])
    if not words:
        assert resumed.returncode == 0 and "2 of them already done" in resumed.stderr
        return
    assert resumed.returncode == 78 and "cannot resume" in resumed.stderr and words in resumed.stderr
    assert "loading" not in resumed.stderr


def test_braces_in_documents_are_text(job: Path, tmp_path: Path, run_here: Any, tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    corpus = tmp_path / "braces"
    corpus.mkdir()
    (corpus / "a.txt").write_text("Mind {question} and {{text}} and {text}.")
    settings = [f"documents.path={corpus}", "prompt.template=As {{json}}: {text}", "prompt.chat_template=false"]
    run = run_here(2, [job, *(part for setting in settings for part in ("--set", setting))])
    assert run.returncode == 0, run.stderr
    (record,) = open_results(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = encode_text(tokenizer, "Mind {question} and {{text}} and {text}.")
    ids = [*tokenizer("As {json}: ")["input_ids"], *text]
    assert record.prompt_sha256 == PromptText(tuple(ids)).sha256


@pytest.mark.slow
def test_kv_is_kept_when_asked_for(job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path, kvr: Path) -> None:
    settings = ["output.kv=true", "generation.max_new_tokens=0", "model.dtype=bfloat16", "documents.limit=2"]
    run = mpirun(2, [kvr_run, job, *(part for setting in settings for part in ("--set", setting))])
    assert run.returncode == 0, run.stderr
    records = list(open_results(tmp_path / "out"))
    with h5py.File(tmp_path / "out" / "results.h5") as file:
        for record in records:
            kv, tokens = kv_in(file, record.id), record.prompt_tokens
            assert record.new_tokens == 0 and record.answer == ""
            assert list(kv) == ["layer_000", "layer_001", "layer_002", "token_ids"]
            assert kv["token_ids"].shape == (tokens,)
            assert kv["layer_000/keys"].shape == kv["layer_002/values"].shape == (tokens, 2, 8)
            assert abs(kv["layer_001/keys"][()]).max() > 0
    shown = subprocess.run([kvr, "inspect", tmp_path / "out", "doc-0.txt"], capture_output=True, text=True, check=True)
    assert "bfloat16" in shown.stdout


def test_too_long_is_truncated_or_split(job: Path, tmp_path: Path, run_here: Any) -> None:
    (tmp_path / "corpus" / "long.txt").write_text(TEXT * 60)
    for choice, parts in (("keep-head", 1), ("split", 4)):
        folder = tmp_path / choice
        run = run_here(2, [job, "--set", f"prompt.too_long={choice}", "--set", f"output.path={folder}"])
        assert run.returncode == 0, run.stderr
        record = next(record for record in open_results(folder) if record.id == "long.txt")
        assert record.status == "done" and record.new_tokens == 8 * record.parts
        assert (record.parts == 1) if parts == 1 else (record.parts >= parts)
        assert (record.dropped_tokens > 0) == (choice == "keep-head")


@pytest.mark.slow
def test_sampling_depends_on_the_seed_only(job: Path, tmp_path: Path, run_here: Any) -> None:
    found = []
    for number, (ranks, seed) in enumerate(((1, 5), (3, 5), (2, 6))):
        settings = ["generation.temperature=1.0", f"generation.seed={seed}", f"output.path={tmp_path / str(number)}"]
        run = run_here(ranks, [job, *(part for setting in settings for part in ("--set", setting))])
        assert run.returncode == 0, run.stderr
        found.append(answers(tmp_path / str(number)))
    assert found[0] == found[1] != found[2]


def test_prompts_shorter_than_the_chain(job: Path, tmp_path: Path, run_here: Any) -> None:
    """Two tokens over four ranks: the last rank does them alone."""
    settings = ["prompt.template={text}", "prompt.chat_template=false", f"output.path={tmp_path / 'short'}"]
    corpus = tmp_path / "short-corpus"
    corpus.mkdir()
    (corpus / "two.txt").write_text("ab cd")
    settings.append(f"documents.path={corpus}")
    run = run_here(4, [job, *(part for setting in settings for part in ("--set", setting))])
    assert run.returncode == 0, run.stderr
    (record,) = open_results(tmp_path / "short")
    assert record.prompt_tokens < 4 and record.slices == (0, record.prompt_tokens) and record.new_tokens == 8
