"""The main job as a user runs it: real processes under mpirun, real files, and everything a user gets wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import pytest
from click.testing import CliRunner
from constants import ROOT, TESTS

from kvr_mpi.cli import group
from kvr_mpi.documents.prompts import Prompt, encode_text
from kvr_mpi.store.folder import read_run

TEXT = "The ferry left at seven and the harbour was quiet. Nobody on the pier had seen the second boat. "


@pytest.fixture
def job(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A job over five good documents of 20 to 300 tokens, with a tiny model."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(5):
        (corpus / f"doc-{number}.txt").write_text(f"Document {number}. " + TEXT * (1 + 3 * number))
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
        [model]
        path = "{tiny_model_dir}"
        dtype = "float32"
        [documents]
        path = "{corpus}"
        [prompt]
        template = "Summarise: {{text}} Summary:"
        [generation]
        max_new_tokens = 8
        [parallel]
        partition = "even"
        [output]
        path = "{tmp_path / "out"}"
        """
    )
    return path


def answers(folder: Path) -> dict[str, tuple[int, ...]]:
    return {record.id: record.token_ids for record in read_run(folder)}


@pytest.mark.slow
def test_any_number_of_ranks_gives_the_same_answers(job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    runs = {
        "alone": (1, ["parallel.strategy=single"]),
        "chain": (2, []),
        "uneven": (3, ["parallel.partition=ratio", "parallel.ratios=[5, 3, 1]"]),
        "chains": (4, ["parallel.ranks_per_chain=2", "parallel.partition=equal_time"]),
    }
    found = {}
    for name, (ranks, settings) in runs.items():
        folder = tmp_path / name
        options = [part for setting in [*settings, f"output.path={folder}"] for part in ("--set", setting)]
        run = mpirun(ranks, [kvr_run, job, *options])
        assert run.returncode == 0, run.stderr
        assert "5 done, 0 error(s)" in run.stdout
        found[name] = answers(folder)
        assert [file.name for file in folder.glob("*.h5*")] == ["results.h5"]
    assert len(found["alone"]) == 5
    assert all(len(tokens) == 8 for tokens in found["alone"].values())
    assert found["chain"] == found["uneven"] == found["chains"] == found["alone"]


def test_bad_documents_are_records_and_the_rest_is_done(job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "empty.txt").write_text(" \n")
    (corpus / "latin1.txt").write_bytes("Käse".encode("latin-1"))
    (corpus / "long.txt").write_text(TEXT * 60)
    (corpus / "rows.jsonl").write_text(
        '{"id": "a/b c", "text": "A short one."}\n{"id": "x", "te\n{"id": "a/b c", "text": "y"}\n'
    )
    run = mpirun(2, [kvr_run, job])
    assert run.returncode == 65, run.stderr
    records = {record.id: record for record in read_run(tmp_path / "out")}
    errors = {name: record.error for name, record in records.items() if record.status == "error"}
    assert {name for name, record in records.items() if record.status == "done"} == {
        *(f"doc-{number}.txt" for number in range(5)),
        "a/b c",
    }
    assert set(errors) == {"empty.txt", "latin1.txt", "long.txt", "rows.jsonl:2", "a/b c#2"}
    assert "empty" in errors["empty.txt"]
    assert "not UTF-8" in errors["latin1.txt"]
    assert "too_long" in errors["long.txt"]
    assert "line 2" in errors["rows.jsonl:2"]
    assert "duplicate id 'a/b c'" in errors["a/b c#2"]
    for error in errors.values():
        assert error.split()[0] in run.stderr
    assert "6 done, 5 error(s)" in run.stdout
    assert last_line(run.stderr) == (
        "exit code 65: done, but some documents have error records; 5 of 11 document(s) failed, output.max_failed = 0 "
        "allows 0"
    )


def last_line(text: str) -> str:
    return text.splitlines()[-1].partition("] ")[2]


def test_failures_may_be_allowed(job: Path, tmp_path: Path, run_here: Any) -> None:
    corpus = tmp_path / "corpus"
    for name in ("empty-1.txt", "empty-2.txt"):
        (corpus / name).write_text(" ")
    for allowed, code in (
        ("0", 65),
        ("1", 65),
        ("2", 0),
        ("0.28", 65),
        ("0.29", 0),
        ("28%", 65),
        ("28.6%", 0),
        ("1.0", 0),
    ):
        run = run_here(1, [job, "--resume", "--set", f"output.max_failed={allowed}"])
        assert run.returncode == code, (allowed, run.stderr)
        assert last_line(run.stderr).startswith(f"exit code {code}: done")
        assert "2 of 7 document(s) failed" in last_line(run.stderr)
    for name in ("empty-1.txt", "empty-2.txt"):
        (corpus / name).unlink()
    run = run_here(1, [job, "--overwrite"])
    assert run.returncode == 0 and last_line(run.stderr) == "exit code 0: done; all 5 document(s)"


def test_folders_that_are_missing_are_wrong_arguments_not_damaged_data(tmp_path: Path, kvr: Path) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("inspect", "export", "status", "merge"):
        for name, code in (("missing", 78), ("empty", 65)):
            run = subprocess.run([kvr, command, tmp_path / name], capture_output=True, text=True, check=False)
            assert run.returncode == code, (command, name, run.stderr)
            assert name in run.stderr and len(run.stderr.splitlines()) == 1


def test_pipes_and_devices_in_a_corpus_are_records(job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    os.mkfifo(tmp_path / "corpus" / "pipe.txt")
    (tmp_path / "corpus" / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "corpus" / "ids.jsonl").write_text('{"id": {"a": 1}, "text": "x"}\n{"id": "a\u202eb", "text": "x"}\n')
    run = mpirun(2, [kvr_run, job, "--set", "documents.path=" + str(tmp_path / "corpus" / "**")], timeout_s=60)
    assert run.returncode == 65, run.stderr
    errors = {record.id: record.error for record in read_run(tmp_path / "out") if record.status == "error"}
    assert set(errors) == {"pipe.txt", "zero.jsonl", "ids.jsonl:1", "a\\u202eb"}
    assert "a named pipe" in errors["pipe.txt"] and "a device" in errors["zero.jsonl"]
    assert "\u202e" not in run.stderr + run.stdout


def test_log_lines_are_whole_and_say_who_and_how_long(job: Path, mpirun: Any, kvr_run: Path) -> None:
    end = str(int(time.time()) + 3600)
    run = mpirun(2, [kvr_run, job], env={"SLURM_JOB_END_TIME": end})
    assert run.returncode == 0, run.stderr
    assert "\r" not in run.stderr
    lines = [line for line in run.stderr.splitlines() if "first token" in line]
    assert sorted(re.findall(r"doc-\d", line)[0] for line in lines) == [f"doc-{number}" for number in range(5)], (
        "one for each document"
    )
    for line in lines:
        assert line.startswith("[20") and ("rank 1" not in line or f"rank 1 {os.uname().nodename}]" in line)
        assert "/5 doc-" in line and "elapsed 0:0" in line and "wall time left 0:5" in line
    (last,) = (line for line in lines if " 5/5 doc-" in line)
    assert last.split("|")[1].count("done") == 1


def test_each_phase_has_its_line_before_it_begins(job: Path, run_here: Any) -> None:
    template = "Here is what somebody wrote down. Read it to its end, and then write a summary of it. " * 3
    settings = ["parallel.partition=equal_time", "model.device=cpu", f"prompt.template={template} {{text}}"]
    run = run_here(2, [job, *(part for setting in settings for part in ("--set", setting))])
    assert run.returncode == 0, run.stderr
    phases = [
        "found in order; starting 2 rank(s)",
        "reading the documents",
        "loading ",
        "loaded; laying weights out",
        "checking on a few tokens",
        "computing the instructions",
        "probing how fast",
        "documents: 5",
        "exit code 0",
    ]
    places = [run.stderr.index(phase) for phase in phases]
    assert places == sorted(places)


def test_the_status_of_a_run_is_in_plain_words(job: Path, tmp_path: Path, run_here: Any) -> None:
    def state() -> str:
        return CliRunner().invoke(group, ["status", str(tmp_path / "out")]).output.splitlines()[0]

    (tmp_path / "corpus" / "empty.txt").write_text(" ")
    stopped = run_here(1, [job, "--time-limit", "1"])
    assert stopped.returncode == 75, stopped.stderr
    assert last_line(stopped.stderr).startswith("exit code 75: stopped before the end")
    assert state().startswith("state     not running, and not finished; the same kvr-run with --resume goes on")
    assert run_here(1, [job, "--resume"]).returncode == 65
    assert state() == (
        "state     finished: nothing is left to do, 1 with an error record (--retry-failed does them again)"
    )


@pytest.mark.slow
def test_existing_results_are_refused_resumed_or_deleted(
    job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path, run_here: Any
) -> None:
    first = mpirun(2, [kvr_run, job, "--set", "documents.shard=0/2"])
    assert first.returncode == 0, first.stderr
    before = {record.id: record for record in read_run(tmp_path / "out")}

    refused = run_here(2, [job])
    assert refused.returncode == 78
    assert "--resume" in refused.stderr and "--overwrite" in refused.stderr
    assert {record.id: record for record in read_run(tmp_path / "out")} == before

    changed = run_here(2, [job, "--resume", "--set", "generation.max_new_tokens=9"])
    assert changed.returncode == 78
    assert "max_new_tokens" in changed.stderr and "cannot resume" in changed.stderr

    fewer = run_here(2, [job, "--resume", "--set", "documents.limit=3"])
    assert fewer.returncode == 78
    assert "documents are not those" in fewer.stderr and "doc-4.txt" in fewer.stderr

    resumed = mpirun(1, [kvr_run, job, "--resume"])  # on another number of ranks
    assert resumed.returncode == 0, resumed.stderr
    assert "3 of them done already" in resumed.stderr
    after = {record.id: record for record in read_run(tmp_path / "out")}
    assert len(after) == 5
    assert all(after[name] == record for name, record in before.items())

    again = run_here(2, [job, "--overwrite", "--set", "documents.limit=1"])
    assert again.returncode == 0, again.stderr
    assert len(answers(tmp_path / "out")) == 1


def test_braces_in_documents_are_text(job: Path, tmp_path: Path, run_here: Any, tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    corpus = tmp_path / "braces"
    corpus.mkdir()
    (corpus / "a.txt").write_text("Mind {question} and {{text}} and {text}.")
    settings = [f"documents.path={corpus}", "prompt.template=As {{json}}: {text}", "prompt.chat_template=false"]
    run = run_here(2, [job, *(part for setting in settings for part in ("--set", setting))])
    assert run.returncode == 0, run.stderr
    (record,) = read_run(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = encode_text(tokenizer, "Mind {question} and {{text}} and {text}.")
    ids = [*tokenizer("As {json}: ")["input_ids"], *text]
    assert record.prompt_sha256 == Prompt(tuple(ids)).sha256


def test_kv_is_kept_when_asked_for(job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path, kvr: Path) -> None:
    settings = ["output.kv=true", "generation.max_new_tokens=0", "model.dtype=bfloat16", "documents.limit=2"]
    run = mpirun(2, [kvr_run, job, *(part for setting in settings for part in ("--set", setting))])
    assert run.returncode == 0, run.stderr
    with h5py.File(tmp_path / "out" / "results.h5") as file:
        for group in file["documents"].values():
            tokens = int(group.attrs["prompt_tokens"])
            assert group.attrs["new_tokens"] == 0 and group["answer"].asstr()[()] == ""
            assert list(group["kv"]) == ["layer_000", "layer_001", "layer_002"]
            assert group["kv/layer_000/keys"].shape == group["kv/layer_002/values"].shape == (tokens, 2, 8)
            assert abs(group["kv/layer_001/keys"][()]).max() > 0
    shown = subprocess.run([kvr, "inspect", tmp_path / "out", "doc-0.txt"], capture_output=True, text=True, check=True)
    assert "bfloat16" in shown.stdout


def test_too_long_is_truncated_or_split(job: Path, tmp_path: Path, run_here: Any) -> None:
    (tmp_path / "corpus" / "long.txt").write_text(TEXT * 60)
    for choice, parts in (("truncate", 1), ("split", 4)):
        folder = tmp_path / choice
        run = run_here(2, [job, "--set", f"prompt.too_long={choice}", "--set", f"output.path={folder}"])
        assert run.returncode == 0, run.stderr
        record = next(record for record in read_run(folder) if record.id == "long.txt")
        assert record.status == "done" and record.new_tokens == 8 * record.parts
        assert (record.parts == 1) if parts == 1 else (record.parts >= parts)
        assert (record.dropped_tokens > 0) == (choice == "truncate")


def test_sampling_depends_on_the_seed_only(job: Path, tmp_path: Path, run_here: Any) -> None:
    found = []
    for number, (ranks, seed) in enumerate(((1, 5), (3, 5), (2, 6))):
        settings = ["generation.do_sample=true", f"generation.seed={seed}", f"output.path={tmp_path / str(number)}"]
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
    (record,) = read_run(tmp_path / "short")
    assert record.prompt_tokens < 4 and record.slices == (0, record.prompt_tokens) and record.new_tokens == 8


WRONG = [
    (["--set", "documents.path=nowhere"], 78, ["documents.path 'nowhere'", "no such file or folder"]),
    (["--set", "documents.path={tmp}/void"], 78, ["holds no .txt"]),
    (["--set", "documents.path={tmp}/void.jsonl"], 78, ["hold no document"]),
    (["--set", "prompt.template=Summarise it."], 78, ["prompt.template", "{{text}} 0 times"]),
    (["--set", "prompt.template={{question}} {{text}}"], 78, ["prompt.template", "{{question}}", "exists is {{text}}"]),
    (["--set", "prompt.reduce_template={{text}} {{x}}"], 78, ["prompt.reduce_template", "has {{x}}"]),
    (["--set", "prompt.system=Mind {{text}}."], 78, ["prompt.system", "place is in prompt.template"]),
    (["--set", "prompt.max_tokens=100000"], 78, ["prompt.max_tokens = 100000", "512"]),
    (["--set", "generation.max_new_tokens=512"], 78, ["max_new_tokens = 512", "no room"]),
    (["--set", "model.path=./no-model"], 78, ["model.path './no-model'", "no such file or folder"]),
    (
        ["--set", "model.path=no-org/no-model", "--set", "model.offline=true"],
        78,
        ["no-org/no-model", "cannot be loaded"],
    ),
    (["--set", "model.path={tmp}/no-weights"], 78, ["no *.safetensors"]),
    (["--set", "model.path={tmp}/unknown-architecture"], 78, ["cannot be loaded", "no-such-type"]),
    (["--set", "model.path={tmp}/damaged-weights"], 78, ["cannot be loaded"]),
    (["--set", "model.path=package:no_such_package/x.gguf"], 78, ["no package 'no_such_package'"]),
    (["--set", "model.dtype=float31"], 78, ["model.dtype = 'float31'", "'bfloat16'"]),
    (["--set", "model.device=cuda"], 78, ["model.device = 'cuda'", "no GPU"]),
    (["--set", "generation.max_tokens=3"], 78, ["unknown key", "did you mean 'max_new_tokens'"]),
    (["--set", "parallel.ranks_per_chain=3"], 78, ["ranks_per_chain = 3", "[1, 2]"]),
    (["--set", "parallel.partition=ratio", "--set", "parallel.ratios=[1.0]"], 78, ["1 weights for a chain of 2"]),
    (["--set", "output.path={tmp}/job.toml/out"], 78, ["output.path", "cannot be written"]),
    (["--set", "nonsense"], 78, ["expected section.key=value"]),
]


@pytest.mark.parametrize(
    ("options", "code", "words"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_users_get_wrong(
    options: list[str], code: int, words: list[str], job: Path, tmp_path: Path, tiny_model_dir: Path, run_here: Any
) -> None:
    make_broken_things(tmp_path, tiny_model_dir)
    run = run_here(2, [job, *(option.format(tmp=tmp_path) for option in options)])
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    for word in words:
        assert word.format() in run.stderr
    assert run.stderr.count("error: ") == 1, "one rank speaks for all"
    assert last_line(run.stderr) == f"exit code {code}: the job cannot be run as written"
    assert not list(tmp_path.glob("out/*.h5*"))


@pytest.mark.parametrize(
    ("options", "code", "words"), [WRONG[0], WRONG[6], (["--overwrite", "--resume"], 2, ["choose one"])]
)
def test_what_users_get_wrong_under_mpirun(
    options: list[str],
    code: int,
    words: list[str],
    job: Path,
    mpirun: Any,
    kvr_run: Path,
    tmp_path: Path,
) -> None:
    run = mpirun(2, [kvr_run, job, *options])
    assert run.returncode == code, run.stderr
    assert all(word in run.stderr for word in words) and "Traceback" not in run.stderr
    if code == 78:
        assert run.stderr.count("error: ") == 1, "one rank speaks for all"
    assert not list(tmp_path.glob("out/*.h5*"))


def make_broken_things(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Corpora without documents and models that cannot be loaded."""
    (tmp_path / "void").mkdir()
    (tmp_path / "void.jsonl").write_text("\n")
    for name in ("no-weights", "unknown-architecture", "damaged-weights"):
        (tmp_path / name).mkdir()
        config = json.loads((tiny_model_dir / "config.json").read_text())
        if name == "unknown-architecture":
            config["model_type"] = "no-such-type"
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        if name != "no-weights":
            (tmp_path / name / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}")


def test_missing_and_broken_job_files(tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    missing = mpirun(2, [kvr_run, tmp_path / "none.toml"])
    assert missing.returncode == 78 and "no such file" in missing.stderr
    (tmp_path / "broken.toml").write_text("[model\n")
    broken = mpirun(2, [kvr_run, tmp_path / "broken.toml"])
    assert broken.returncode == 78 and "cannot be read as TOML" in broken.stderr


def test_show_config_names_the_sources(job: Path, mpirun: Any, kvr_run: Path, tmp_path: Path) -> None:
    run = mpirun(
        2, [kvr_run, job, "--show-config", "--set", "generation.seed=4"], env={"KVR_GENERATION__MAX_NEW_TOKENS": "7"}
    )
    assert run.returncode == 0, run.stderr
    rows = {line.split("=")[0].strip(): line for line in run.stdout.splitlines()}
    assert rows["generation.seed"].endswith("= 4  # --set generation.seed")
    assert rows["generation.max_new_tokens"].endswith("= 7  # KVR_GENERATION__MAX_NEW_TOKENS")
    assert rows["parallel.partition"].endswith(f"# {job}")
    assert rows["output.kv"].endswith("# default")
    assert not (tmp_path / "out").exists()


def test_alone_under_slurm_with_several_tasks(job: Path, kvr_run: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [kvr_run, job], capture_output=True, text=True, env={**os.environ, "SLURM_NTASKS": "4"}, check=False, timeout=60
    )
    assert run.returncode == 69
    assert last_line(run.stderr) == "exit code 69: the ranks cannot talk"
    assert "4 ranks were meant" in run.stderr and "srun --mpi=pmi2" in run.stderr
    assert not (tmp_path / "out").exists()


def test_an_exception_on_one_rank_ends_all(job: Path, mpirun: Any) -> None:
    began = time.monotonic()
    run = mpirun(3, [sys.executable, TESTS / "programs" / "failing_rank.py", job], timeout_s=60)
    assert run.returncode == 1
    assert "broken on purpose" in run.stderr
    failed_at = float(run.stdout.split("failing at ")[1].split()[0])
    assert time.time() - failed_at < 10
    assert time.monotonic() - began < 60


def test_a_killed_rank_ends_all(job: Path, kvr_run: Path, mpirun: Any, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    began = time.time()
    run = mpirun(3, [sys.executable, TESTS / "programs" / "failing_rank.py", job, str(marker)], timeout_s=60)
    assert run.returncode != 0
    assert time.time() - float(marker.read_text()) < 10, "the others ended within 10 s of the kill"
    assert began < float(marker.read_text())
    assert signal.SIGKILL == 9


def test_the_closing_hints_work_as_printed(job: Path, tmp_path: Path, kvr_run: Path) -> None:
    """Called by its path, in a shell that finds nothing of ours by name, and with words a shell would take apart."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "bin").symlink_to(kvr_run.parent)
    (tmp_path / "corpus" / "a b's.txt").write_text("An odd name.")
    settings = ["parallel.strategy=single", "documents.limit=1", "output.path=the results"]
    command = ["env/bin/kvr-run", str(job), *(word for setting in settings for word in ("--set", setting))]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    hints = [line.partition("env/bin/")[1:] for line in run.stdout.splitlines() if "env/bin/kvr " in line]
    assert len(hints) == 3
    shell = {**os.environ, "PATH": "/usr/bin:/bin"}
    for hint in map("".join, hints):
        done = subprocess.run(hint, shell=True, cwd=tmp_path, env=shell, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "a b's.txt" in done.stdout, (hint, done.stderr)


def test_the_demo_is_called_by_its_path() -> None:
    made = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ".venv/bin/kvr-run jobs/demo.toml" in made
