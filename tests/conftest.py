"""What the tests share: tiny models of every kind, a tokenizer that needs no download, and real MPI runs."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from constants import MPI_ENVIRONMENT, SMOLLM, Kvr
from hypothesis import HealthCheck, settings
from warm import server

# Every job checks at its end that all keys and values were freed.
os.environ.setdefault("KVR_CHECK", "1")

# Modules that assert on behalf of tests, so that a failure shows what was compared there, too.
pytest.register_assert_rewrite("jobs_together", "made_jobs", "made_corpora", "made_facts", "promises")


# Without it the tests run in the order of their files, and property tests take the same examples every time. With it
# the order is drawn from this seed, and examples from `--hypothesis-seed`. No test depends on how fast a machine is.
SEED = os.environ.get("KVR_TEST_SEED")
settings.register_profile(
    "kvr-mpi", derandomize=SEED is None, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvr-mpi")

# Folders and files whose tests take longest: workers that share the tests by file begin with these, and end with short
# files, so that none waits for another.
FIRST = {"faults", "slurm", "test_settings_together.py", "transport", "tuning"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without a quick test if these are all that is asked for: that takes longer than some of them."""
    if config.option.markexpr != "quick" or not collection_path.name.startswith("test_"):
        return None
    return True if "mark.quick" not in collection_path.read_text() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what takes longest, or draw the order of the files, and of the tests in each."""
    tests = Path(__file__).parent
    if SEED is not None:
        chance = random.Random(SEED)
        items.sort(key=lambda item: item.nodeid)
        chance.shuffle(items)
        files = sorted({item.path for item in items})
        chance.shuffle(files)
        items.sort(key=lambda item: files.index(item.path))
        return
    items.sort(key=lambda item: FIRST.isdisjoint((item.path.relative_to(tests).parts[0], item.path.name)))


@pytest.fixture(scope="session", autouse=True)
def volumes_end_when_told() -> Iterator[None]:
    """Have no volume end by its age in this process, so that a slow machine makes as many files as a fast one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvr_mpi.store.writer.LEAST_VOLUME_S", 1e4)
        patch.setattr("kvr_mpi.store.writer.VOLUME_S", 1e4)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Compute in one thread, as a rank of a full host does: for tensors this small, more take twice the time.

    So no test has to undo what it sets.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def library(cache_dir: Path) -> Any:
    """Our own CPU kernels, compiled once on a machine."""
    from kvr_mpi.logs import SILENT
    from kvr_mpi.tuning.compiled_attention import COMPILERS, open_attention

    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("there is no C++ compiler")
    return open_attention(cache_dir, SILENT, compiles=True)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where converted models and compiled kernels are kept: the developer's own cache, so that each is made once."""
    from kvr_mpi.cli.environment import read_environment

    return read_environment().cache_dir


@pytest.fixture(scope="session")
def smollm(cache_dir: Path) -> Any:
    """The real language model, float32."""
    from kvr_mpi.model import load_model

    return load_model(SMOLLM, dtype="float32", device="cpu", offline=True, cache_dir=cache_dir)


@pytest.fixture(scope="session")
def tokenizer(smollm: Any) -> Any:
    """Its tokenizer, with a chat template."""
    return smollm.tokenizer


@pytest.fixture(scope="session")
def small_tokenizer(tokenizer: Any) -> Any:
    """Its first 12288 tokens: reading all is most of a tiny job's start."""
    return first_tokens(tokenizer, 12288)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> Path:
    """A folder with a tiny random Llama and a real tokenizer: starts in no time, answers nonsense."""
    from models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"), small_tokenizer)


def first_tokens(tokenizer: Any, count: int) -> Any:
    """Keep a tokenizer's special tokens, bytes and first merges."""
    tables = json.loads(tokenizer.backend_tokenizer.to_str())
    model = tables["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < count}
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) in model["vocab"]]
    smaller = copy.deepcopy(tokenizer)
    smaller.backend_tokenizer.model = type(tokenizer.backend_tokenizer).from_str(json.dumps(tables)).model
    return smaller


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def program_of(words: Sequence[str]) -> list[str]:
    """Find the Python program of a command, or its module after ``-m``, with arguments; empty: it needs a fresh start.

    The doctor looks at how it was started.
    """
    if words[0] == sys.executable:
        return [] if words[1] == "-c" else [*words[1:]]
    is_ours = Path(words[0]).name in ("kvr-run", "kvr") and words[1:2] != ["doctor"]
    return [*words] if is_ours else []


@pytest.fixture(scope="session")
def warm_start() -> Iterator[list[str]]:
    """What `mpirun` starts before a program: ranks are then forked from a process that has imported everything."""
    with server() as starter:
        yield starter


@pytest.fixture(scope="session")
def mpirun(warm_start: list[str]) -> Launch:
    """Run a command on some ranks: ``mpirun(2, ["kvr-run", "job.toml"])``.

    Ranks of a Python program are forked from a process that has imported everything (``warm``), unless they are given
    an environment of their own, which decides what is imported how.
    """
    launcher = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if launcher is None:
        pytest.fail("no mpirun: `pip install mpich` into this environment, or load an MPI")

    def launch(
        ranks: int,
        command: Sequence[str | Path],
        *,
        timeout_s: float = 300,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        program = program_of(words)
        if program and {*(env or {})} <= {"OMP_NUM_THREADS"}:
            words = [*warm_start, *program]
        return subprocess.run(
            [str(launcher), "-n", str(ranks), *words],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **MPI_ENVIRONMENT, **(env or {})},
            check=False,
            **options,
        )

    return launch


@pytest.fixture
def known_footprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what prompts of a model take once, not for each job and plan."""
    from models import known_footprint

    for module in ("runtime.prepare", "schedule.forecast"):
        monkeypatch.setattr(f"kvr_mpi.{module}.footprint_of", known_footprint)


@pytest.fixture
def run_here(known_footprints: None, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Run ``kvr-run``, or another command, with ranks as threads of this process: ``run_here(2, ["job.toml"])``.

    The same command from its arguments to its exit code, without the seconds that processes take to start; what
    processes and MPI have to do with is tested with `mpirun`.
    """
    import contextlib
    import importlib
    import io
    import threading

    from kvr_mpi.transport.local import LocalTransport, run_local

    mine = threading.local()
    monkeypatch.setattr("kvr_mpi.transport.mpi.connect", lambda: mine.world)

    def launch(ranks: int, arguments: Sequence[str | Path], command: str = "run") -> subprocess.CompletedProcess[str]:
        work = getattr(importlib.import_module(f"kvr_mpi.cli.{command}"), command)

        def rank(world: LocalTransport) -> int:
            mine.world = world
            return int(work.main([str(word) for word in arguments], standalone_mode=False))

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            codes = run_local(ranks, rank)
        return subprocess.CompletedProcess(list(arguments), max(codes), out.getvalue(), err.getvalue())

    return launch


@pytest.fixture(scope="session")
def kvr_run() -> Path:
    """The installed ``kvr-run``."""
    return Path(sys.executable).parent / "kvr-run"


@pytest.fixture(scope="session")
def kvr() -> Path:
    """The installed ``kvr``."""
    return Path(sys.executable).parent / "kvr"


@pytest.fixture
def run_kvr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvr:
    """Run the entry point of ``kvr`` in this process: code, standard output, standard error."""
    from kvr_mpi.cli import kvr as kvr_main

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvr", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            kvr_main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def job(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A job over five good documents of 20 to 400 tokens, with a tiny model: it runs in seconds."""
    from made_jobs import TEXT, toml_of

    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(5):
        (corpus / f"doc-{number}.txt").write_text(f"Document {number}. " + TEXT * (1 + 3 * number))
    (path := tmp_path / "job.toml").write_text(
        toml_of(
            {
                "model.path": tiny_model_dir,
                "model.dtype": "float32",
                "documents.path": corpus,
                "prompt.template": "Summarise: {text} Summary:",
                "generation.max_new_tokens": 8,
                "parallel.partition": "even",
                "output.path": tmp_path / "out",
            }
        )
    )
    return path


@pytest.fixture
def run_job(job: Path, tmp_path: Path, run_here: Any) -> Callable[..., Any]:
    """Run a job with these settings on some ranks, in a new folder unless one is named, to the exit code expected."""
    from made_jobs import Ran, with_settings

    numbers = itertools.count()

    def run(ranks: int, *settings: str, of: Path = job, code: int = 0, to: str = "", words: Sequence[str] = ()) -> Ran:
        folder = tmp_path / (to or f"run-{next(numbers)}")
        done = run_here(ranks, [of, *with_settings(f"output.path={folder}", *settings), *words])
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        return Ran(folder, done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def ask_about(job: Path) -> Callable[..., Path]:
    """Write a job that asks about the stored documents of a run, with the model of the module's job."""
    from made_jobs import load, toml_of

    def write(run: Path, *questions: str, **named: str) -> Path:
        asked = {
            "model.path": load(job).model.path,
            "model.dtype": "float32",
            "documents.path": run,
            "questions.ask": named or list(questions or ("Who wrote it, and what for?", "When?")),
            "generation.max_new_tokens": 8 if "max_new_tokens" in job.read_text() else None,
            "output.path": f"{run}-asked",
        }
        (path := job.with_name(f"ask-{run.name}.toml")).write_text(toml_of(asked))
        return path

    return write


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> Callable[[str], Path]:
    """A folder with a tiny random model of a kind, and a real tokenizer."""
    import torch
    import transformers as tf
    from models import CONFIGS, WHOLE

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        config = {**CONFIGS, **WHOLE}[name]()
        config.vocab_size = len(small_tokenizer)
        config.eos_token_id, config.bos_token_id = small_tokenizer.eos_token_id, small_tokenizer.bos_token_id
        torch.manual_seed(0)
        tf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        small_tokenizer.save_pretrained(folder)
        return folder

    return make
