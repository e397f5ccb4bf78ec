"""Jobs that are killed, stopped and damaged at random, resumed, and held against one that was left in peace.

A case is a job on two ranks. At a random instant (as often as not while a volume is being written) a rank, the launcher
or all are killed, stopped, or told to end, once or twice; or the folder is removed or swapped for another job's; or
another job wants it; and the clock may jump. Then files may be cut, flipped, removed, or dated to another century. Then
it is resumed on one, two or three ranks, which may be disturbed again, until it ends. Then every document has to be
there once, with the tokens, keys and values of the undisturbed job, in a file that opens.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from constants import MPI_ENVIRONMENT
from made_jobs import TEXT, toml_of
from warm import can_watch, rank_for

from kvr_mpi.store.results import open_results

LAUNCHER = Path(sys.executable).parent / "mpirun"
DOCUMENTS = 12
LIMIT_S = 300.0
ENDED_WELL = (0, 65)
DAMAGES = ("none", "none", "cut", "flip", "remove", "junk", "clock")
# Name: signals, one after another, and what a job told so may end with (None: anything).
SIGNALS: dict[str, tuple[signal.Signals, ...]] = {
    "kill": (signal.SIGKILL,),
    "stop and go on": (signal.SIGSTOP, signal.SIGCONT),
    "stop and kill": (signal.SIGSTOP, signal.SIGKILL),
    "term": (signal.SIGTERM,),
    "usr2": (signal.SIGUSR2,),
    "term twice": (signal.SIGTERM, signal.SIGTERM),
    "usr2, then term": (signal.SIGUSR2, signal.SIGTERM),
}
ACTIONS = ("kill",) * 5 + tuple(SIGNALS) + ("remove", "swap", "swap", "rival")
# In which ranks start: forked from a process that has imported everything (``warm``), if that can be.
START_S = 1.0 if can_watch() else 4.0
CLOCKS = ("", "", "", "0 -7200", "1 -3600", "1 86400", "0.5 -1000000000")  # seconds after which it jumps, and how far


@dataclass(slots=True)
class Case:
    """One job and what became of it: `story` has a line for everything that was done to it."""

    seed: int
    story: list[str] = field(default_factory=list)


def ranks_of(pid: int, program: str = "run_job.py") -> list[int]:
    """Process ids of the ranks of a program below a launcher."""
    found, todo = [], [pid]
    while todo:
        for child in children(todo.pop()):
            todo.append(child)
            try:
                words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            except (OSError, ValueError):
                continue
            rank = rank_for(child, words) if any(program in word for word in words) else None
            if rank is not None and not children(child):
                found.append(rank)
    return sorted(found)


def children(pid: int) -> list[int]:
    """Process ids of a process's children, of all its threads."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:
        pass
    return found


def wait_for_moment(process: subprocess.Popen[str], output: Path, chance: random.Random, case: Case) -> None:
    """Wait until a job starts, works, writes a volume or merges, as a seed says; or until it ends."""
    kind = chance.choice(["start", "work", "write", "write", "merge"])
    volumes = chance.randrange(0, 4) if kind in ("work", "write") else 0
    wait_s = chance.uniform(0, START_S) if kind == "start" else chance.uniform(0, 0.01)
    before = len(list(output.glob("kv-*")))

    def is_time() -> bool:
        if kind == "start":
            return bool(ranks_of(process.pid))
        try:
            files = os.listdir(output)
        except OSError:
            return False
        if kind == "merge":
            return any(name.startswith("results.h5.part") for name in files)
        begun = sum(name.startswith("kv-") for name in files)
        return begun >= before + volumes and (kind == "work" or any(name.startswith("log-") for name in files))

    while process.poll() is None and not is_time():
        time.sleep(0.001)
    time.sleep(wait_s)
    case.story.append(f"at {kind} + {1e3 * wait_s:.0f} ms, after {volumes} volumes")


def send_signals(action: str, process: subprocess.Popen[str], chance: random.Random, case: Case) -> None:
    """Send one rank, all of them, or the launcher what an action names."""
    whom = chance.choice(["rank", "rank", "all", "launcher"])
    ranks = ranks_of(process.pid)
    pids = {"rank": ranks and [chance.choice(ranks)], "all": ranks, "launcher": [process.pid]}[whom] or []
    case.story.append(f"{action}: {whom}, {len(pids)} hit")
    for number, one in enumerate(SIGNALS[action]):
        if number:
            time.sleep(chance.choice([0.0, 0.01, 0.3, 1.5]))
        for pid in pids:
            if pid != process.pid or process.poll() is None:
                try:
                    os.kill(pid, one)
                except ProcessLookupError:
                    pass


def move_folder(action: str, output: Path, decoy: Path, chance: random.Random, case: Case) -> None:
    """Take a job's folder away under its hands: removed, or another in its place."""
    case.story.append(f"{action} {output.name}")
    try:
        if action == "remove":
            shutil.rmtree(output, ignore_errors=True)
        else:
            output.rename(output.with_name("away"))
            if chance.random() < 0.5:
                shutil.copytree(decoy, output)
            elif chance.random() < 0.5:
                output.mkdir()
    except OSError as error:
        case.story.append(f"which failed: {error}")


def put_back(output: Path, decoy: Path) -> None:
    """Put a folder back in whose place another was, into which the job may not have written."""
    if output.with_name("away").exists():
        if (output / "results.h5").exists() and (output / "whose").exists():
            same = (output / "results.h5").read_bytes() == (decoy / "results.h5").read_bytes()
            assert same, "the job wrote into the results of another"
        shutil.rmtree(output, ignore_errors=True)
        output.with_name("away").rename(output)


def damage(output: Path, chance: random.Random, case: Case) -> None:
    """Do to the files what disks, people and clocks do."""
    kind = chance.choice(DAMAGES)
    files = sorted(file for file in output.rglob("*") if file.is_file()) if output.is_dir() else []
    if kind == "none" or not files:
        return
    file = chance.choice(files)
    case.story.append(f"{kind}: {file.name}")
    content = file.read_bytes()
    if kind == "cut":
        file.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif kind == "flip" and content:
        at = chance.randrange(len(content))
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :])
    elif kind == "remove":
        file.unlink()
    elif kind == "junk":
        with file.open("ab") as stream:
            stream.write(chance.randbytes(chance.randrange(1, 300)))
    elif kind == "clock":
        for each in files:
            when = chance.choice([0, 10**9, 4 * 10**9]) + chance.random()
            os.utime(each, (when, when))


def write_job(folder: Path, model: Path, kv: str | bool = True, text: str = TEXT) -> Path:
    """Write a job over short documents, one of them bad; its output folder is given with each run."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(DOCUMENTS - 1):
        (corpus / f"doc-{number:02d}.txt").write_text(f"Document {number}. " + text * (1 + number % 5 * 3))
    (corpus / "empty.txt").write_text(" ")
    more = {"prompt.template": "Summarise: {text} Summary:", "parallel.partition": "even"}
    return _write(folder / "job.toml", model, corpus, kv, more)


def write_questions(folder: Path, model: Path, run: Path, *, sharded: bool = False) -> Path:
    """Write a job that asks what a run has stored, all ranks together or each about documents of its own."""
    more: dict[str, object] = {"questions.ask": ["Who saw the second boat?", "When did the ferry leave?"]}
    more |= {"parallel.ranks_per_chain": "all"} if sharded else {}
    return _write(folder / "questions.toml", model, run, not sharded, more)


def _write(job: Path, model: Path, documents: Path, kv: str | bool, more: Mapping[str, object]) -> Path:
    usual = {"model.path": model, "model.dtype": "float32", "documents.path": documents}
    usual |= {"generation.max_new_tokens": 24, "output.path": "given with each run", "output.kv": kv}
    job.write_text(toml_of({**usual, **more}))
    return job


# What `mpirun` starts, before the program's name.
starter = [sys.executable]


def launch(
    job: Path,
    output: Path,
    ranks: int,
    clock: str = "",
    words: Sequence[str] = ("--resume",),
    view: Mapping[str, object] | None = None,
) -> subprocess.Popen[str]:
    """Start ``kvr-run`` under a real mpirun, by a clock that jumps, or with a rank's own view, if that is wanted."""
    command = [LAUNCHER, "-n", str(ranks), *starter, Path(__file__).parent / "run_job.py", job]
    own = {"OMP_NUM_THREADS": "1", "KVR_TEST_CLOCK": clock, "KVR_TEST_VIEW": json.dumps(view or {})}
    return subprocess.Popen(
        [*map(str, command), *words, "--set", f"output.path={output}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **MPI_ENVIRONMENT, **own},
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], case: Case) -> tuple[int, str]:
    """Wait for a job, and make sure that nothing of it is left."""
    try:
        _, told = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        left = ranks_of(process.pid)
        for pid in left:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(2)
        for pid in [*left, process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, told = process.communicate()
        raise AssertionError(_tell(case, f"the job hangs; ranks that were left: {left}\n{told}")) from None
    return process.returncode, told


def run_case(
    seed: int, job: Path, reference: Path, scratch: Path, *, well: int = 65, begun: Path | None = None
) -> Case:
    """Disturb a job as its seed says, resume it until it ends (as it does in peace, with the code `well`), and compare.

    The corpus may have changed since a run was `begun`.

    Raises
    ------
    AssertionError
        With the whole story, if anything is lost, double, different or unreadable.
    """
    chance, case, word = random.Random(seed), Case(seed), "--resume"
    output = scratch / "out"
    if begun is not None:
        shutil.copytree(begun, output)
    for attempt in range(chance.choice([1, 1, 2])):
        ranks = 2 if attempt == 0 else chance.choice([1, 2, 3])
        disturb(job, output, reference, ranks, chance, case, well, word)
        if begun is None:
            damage(output, chance, case)
    for _ in range(3):  # damage found while merging ends a job, too: the next one mends it
        ranks = chance.choice([1, 2, 3])
        code, told = end(launch(job, output, ranks, chance.choice(CLOCKS), [word]), case)
        case.story.append(f"resumed on {ranks}, ended with {code}")
        assert "Traceback" not in told, _tell(case, told)
        if code in ENDED_WELL and (output / "results.h5").exists():
            break
    assert code == well, _tell(case, told)
    try:
        compare(output, reference, has_more=begun is not None)
    except Exception as error:
        raise AssertionError(_tell(case, f"{error}\n{told}")) from error
    return case


def disturb(
    job: Path, output: Path, decoy: Path, ranks: int, chance: random.Random, case: Case, well: int, word: str
) -> None:
    """Run a job, and do to it what a seed says."""
    clock, action = chance.choice(CLOCKS), chance.choice(ACTIONS)
    case.story.append(f"run on {ranks}" + (f", clock {clock}" if clock else ""))
    process = launch(job, output, ranks, clock, [word])
    wait_for_moment(process, output, chance, case)
    if action in SIGNALS:
        send_signals(action, process, chance, case)
    elif action == "rival":
        compete(job, output, process, case)
    else:
        move_folder(action, output, decoy, chance, case)
    code, told = end(process, case)
    case.story.append(f"ended with {code}")
    try:
        put_back(output, decoy)
        if "kill" not in action:
            assert "Traceback" not in told
        if action == "stop and go on":
            assert code == well, "it was only stopped for a while"
    except AssertionError as error:
        raise AssertionError(_tell(case, f"{error}\n{told}")) from error


def compete(job: Path, output: Path, first: subprocess.Popen[str], case: Case) -> None:
    """Start another job on a folder that a job has: it is refused, unless the first has ended meanwhile."""
    code, told = end(launch(job, output, 1), case)
    case.story.append(f"another job wanted the folder: {code}")
    assert code == 78 or first.poll() is not None or code in ENDED_WELL, _tell(case, told)


def compare(output: Path, reference: Path, *, has_more: bool = False) -> None:
    """Hold every document against the undisturbed job's; others only if there may be more."""
    assert [file.name for file in output.glob("*.h5*") if "damaged" not in file.name] == ["results.h5"]
    found, wanted = open_results(output / "results.h5"), open_results(reference / "results.h5")
    assert {*wanted.ids()} <= {*found.ids()}, "lost"
    assert has_more or wanted.ids() == found.ids(), "not of this corpus"
    for name in wanted.ids():
        with found.open(name) as (record, kv), wanted.open(name) as (other, other_kv):
            for field in ("status", "error", "document_sha256", "prompt_sha256", "new_tokens", "token_ids", "answer"):
                assert getattr(record, field) == getattr(other, field), f"{name}: {field} differs"
            assert (kv.tokens, kv.layers) == (other_kv.tokens, other_kv.layers), f"{name}: other tokens or layers"
            for layer in kv.layers:
                for one, two in zip(kv.read(layer), other_kv.read(layer), strict=True):
                    assert torch.allclose(one, two, atol=1e-4), f"{name}: layer {layer} differs"


def make_reference(job: Path, folder: Path, *, well: int = 65) -> Path:
    """Run the job in peace; one of the documents is bad, which is no matter of questions. Return the folder."""
    code, told = end(launch(job, folder, 2), Case(0))
    assert code == well and (folder / "results.h5").exists(), told
    (folder / "whose").write_text("the undisturbed job's")
    return folder


def _tell(case: Case, more: str) -> str:
    return f"case {case.seed}:\n  " + "\n  ".join(case.story) + f"\n{more[-3000:]}"
