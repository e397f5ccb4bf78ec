"""Wrong arguments, nothing to read and readers that have gone: a line at most, and the right exit code."""

from __future__ import annotations

import gc
import io
import logging
import os
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from constants import SMOLLM, Kvr
from made_runs import write_run

from kvr_mpi.cli.environment import configure_libraries, is_offline
from kvr_mpi.cli.files import find_shipped
from kvr_mpi.cli.launch import importing, run_guarded
from kvr_mpi.cli.log_lines import quiet_libraries
from kvr_mpi.errors import EXIT_BUG, EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, ConfigError
from kvr_mpi.store.record import Record
from kvr_mpi.transport.local import LocalTransport

# Arguments and paths


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("export", "Usage: kvr"),
        ("export x --format xml", "Usage: kvr"),
        ("inspect a b c", "Usage: kvr"),
        ("search --heads heads.json", "Usage: kvr"),
        ("stauts", "No such command 'stauts'. Did you mean 'status'?"),
        ("exprot", "No such command 'exprot'. Did you mean 'export'"),
        ("xyz", "No such command 'xyz'.\n"),
    ],
)
def test_wrong_arguments_are_a_usage_error(arguments: str, words: str, run_kvr: Kvr) -> None:
    code, out, err = run_kvr(*arguments.split())
    assert code == EXIT_USAGE and out == "" and words in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("value", "alone", "in_a_job"),
    [("1", True, True), ("yes", True, True), ("0", False, False), ("off", False, False), ("", False, True)],
)
def test_offline_as_the_hub_library_reads_it_and_by_default_in_a_job(value: str, alone: bool, in_a_job: bool) -> None:
    assert is_offline({"HF_HUB_OFFLINE": value}) is alone
    assert is_offline({"HF_HUB_OFFLINE": value, "SLURM_JOB_ID": "1"}) is in_a_job


def test_libraries_get_settings_that_the_user_has_not_made() -> None:
    environ = {"TORCH_CPP_LOG_LEVEL": "INFO"}
    configure_libraries(environ)
    assert environ["CUDA_MODULE_LOADING"] == "EAGER" and environ["TORCH_CPP_LOG_LEVEL"] == "INFO"
    assert "TRITON_CACHE_DIR" not in environ, "only jobs compile on the node"


def test_what_ranks_compile_is_kept_where_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def caches(**environ: str) -> dict[str, Path]:
        configure_libraries(environ)
        return {name: Path(environ[name]) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "KVR_CACHE")}

    node = tmp_path / "node"
    first = caches(SLURM_JOB_ID="1", KVR_LOCAL=str(node))
    (folder,) = {cache.parent for cache in first.values()}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert caches(SLURM_TMPDIR=str(node), TRITON_CACHE_DIR="/mine") == {**first, "TRITON_CACHE_DIR": Path("/mine")}
    assert caches(SLURM_JOB_ID="1", TMPDIR=str(node), KVR_CACHE="/models") == {**first, "KVR_CACHE": Path("/models")}
    folder.chmod(0o777)
    assert folder not in {cache.parent for cache in caches(KVR_LOCAL=str(node)).values()}
    folder.rename(node / "elsewhere")
    folder.symlink_to(node / "elsewhere")
    assert folder not in {cache.parent for cache in caches(KVR_LOCAL=str(node)).values()}
    other = os.getuid() + 1
    (foreign := node / f"kvr-{other}").mkdir(0o700)
    monkeypatch.setattr(os, "getuid", lambda: other)  # to whom the folder does not belong
    assert foreign not in {cache.parent for cache in caches(KVR_LOCAL=str(node)).values()}


# Pipes


@pytest.mark.parametrize("words", ["export RUN", "export RUN --format csv", "inspect RUN 000", "inspect RUN 001"])
def test_a_reader_that_has_gone_is_no_traceback(tmp_path: Path, kvr: Path, words: str) -> None:
    # A run is more than fits into a pipe; a short answer stays in a buffer until the end, where writing fails.
    records = [Record(f"{n:03d}", "done", answer="x" * (5000 if n else 5)) for n in range(60)]
    path = write_run(tmp_path / "run", records)
    source, sink = os.pipe()
    os.close(source)
    command = [kvr, *words.replace("RUN", str(path)).split()]
    with os.fdopen(sink, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.stderr == ""


def test_what_is_wrong_with_a_demo_is_said_before_it_starts_its_ranks_itself(
    tmp_path: Path, run_kvr: Kvr, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="jobs/nothing.toml was not installed with kvr-mpi"):
        find_shipped("jobs", "nothing.toml")
    (tmp_path / "nothing.toml").touch()
    installed = SimpleNamespace(parts=("share", "jobs", "nothing.toml"), locate=lambda: tmp_path / "nothing.toml")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.files", lambda name: [installed])
        assert find_shipped("jobs", "nothing.toml").samefile(tmp_path / "nothing.toml"), "of a wheel"
    (tmp_path / "nothing.toml").unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVR_MODEL__PATH", SMOLLM.replace("smollm2", "smollm3"))
    code, out, err = run_kvr("demo")
    assert code == EXIT_CONFIG and out == "" and err.count("no installed Python package is named 'llm_smollm3'") == 1
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("PMI_SIZE", "2")
    code, _, err = run_kvr("demo")
    assert code == EXIT_USAGE and "here: 2 ranks" in err


# Under a launcher


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plan", "nowhere.toml"], EXIT_CONFIG, "Error: "),
        (["verify", "--vanished"], EXIT_USAGE, "No such option"),
        (["run", "--help"], EXIT_OK, "Usage: kvr run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_several_ranks_print_once(arguments: list[str], code: int, words: str, kvr: Path, mpirun: Any) -> None:
    run = mpirun(2, [kvr, *arguments])
    assert (run.stdout + run.stderr).count(words) == 1, run.stdout + run.stderr
    assert run.returncode == code


# Errors and Ctrl-C


def test_a_rank_that_fails_alone_ends_all_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []

    class World(LocalTransport):
        def abort(self, code: int) -> None:  # type: ignore[override]
            ended.append(code)

    def fail(error: BaseException) -> int:
        raise error

    for error, code in ((ConfigError("no \x1b[2J ranks"), EXIT_CONFIG), (ZeroDivisionError(), EXIT_BUG)):
        assert run_guarded(World(), lambda error=error: fail(error)) == code  # type: ignore[misc]
    told = capsys.readouterr().err
    assert ended == [EXIT_CONFIG, EXIT_BUG] and "error: no \\x1b[2J ranks" in told
    assert "ZeroDivisionError" in told and told.count("exit code") == 2
    with pytest.raises(KeyboardInterrupt):
        run_guarded(World(), lambda: fail(KeyboardInterrupt()))
    out, err = capsys.readouterr()
    assert "exit code 130: interrupted" in out + err and "--resume" in out + err and "Traceback" not in out + err


def test_garbage_is_collected_again_after_imports_also_if_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))  # the tests' own objects stay as they are
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and frozen == [False]


def test_warnings_of_libraries_reach_the_log_once_and_never_a_closed_one() -> None:
    stream, library = io.StringIO(), logging.getLogger("transformers")
    quiet_libraries()
    with redirect_stderr(stream):
        for number in range(3):
            library.warning("setting %d\nis ignored", number)
        assert stream.getvalue().count("warning: transformers: setting") == 1 == stream.getvalue().count("\n")
        stream.close()
        library.warning("another setting is ignored")


INTERRUPTED = """
import click, numpy, sys
import kvr_mpi.cli, kvr_mpi.cli.run
from mpi4py import MPI

def receive():
    MPI.COMM_WORLD.Irecv(numpy.zeros(9), source=0, tag=7)
    raise KeyboardInterrupt

kvr_mpi.cli.run.run = click.Command("run", callback=receive)
sys.argv = ["kvr-run"]
kvr_mpi.cli.kvr_run()
"""


def test_mpi_says_nothing_of_transfers_in_progress_after_ctrl_c() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (EXIT_INTERRUPTED, "", "")
