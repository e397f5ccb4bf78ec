"""Jobs that are killed, starved and damaged at random, resumed, and held against one that was left in peace.

A case is a job on two ranks. It is ended by SIGKILL at a random instant (any rank, the launcher, or all; as often as
not while a shard is being written) or by a full disk; then files may be cut, flipped, removed, or dated to another
century; then it is resumed on one, two or three ranks, which may be killed again, until it ends. Then every document
has to be there once, with the tokens, keys and values of the undisturbed job, in a file that opens.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
from constants import MPI_ENVIRONMENT

LAUNCHER = Path(sys.executable).parent / "mpirun"
TEXT = "The ferry left at seven and the harbour was quiet. Nobody on the pier had seen the second boat. "
DOCUMENTS = 12
LIMIT_S = 120.0
SMALL_DISK = "size=900k"
ENDED_WELL = (0, 65)
DAMAGES = ("none", "none", "cut", "flip", "remove", "junk", "clock")


@dataclass(slots=True)
class Case:
    """One job and what became of it: `story` has a line for everything that was done to it."""

    seed: int
    story: list[str] = field(default_factory=list)


def write_job(folder: Path, model: Path) -> Path:
    """Write a job over short documents, one of them bad; its output folder is given with each run."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(DOCUMENTS - 1):
        (corpus / f"doc-{number:02d}.txt").write_text(f"Document {number}. " + TEXT * (1 + number % 5 * 3))
    (corpus / "empty.txt").write_text(" ")
    job = folder / "job.toml"
    job.write_text(
        f"""
        [model]
        path = "{model}"
        dtype = "float32"
        [documents]
        path = "{corpus}"
        [prompt]
        template = "Summarise: {{text}} Summary:"
        [generation]
        max_new_tokens = 24
        [parallel]
        partition = "even"
        [output]
        path = "given with each run"
        kv = true
        """
    )
    return job


def launch(job: Path, output: Path, ranks: int) -> subprocess.Popen[str]:
    """Start ``kvr-run`` under a real mpirun."""
    command = [LAUNCHER, "-n", str(ranks), sys.executable, Path(__file__).parent / "run_job.py", job]
    return subprocess.Popen(
        [*map(str, command), "--resume", "--set", f"output.path={output}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **MPI_ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], case: Case) -> tuple[int, str]:
    """Wait for a job, and make sure that nothing of it is left."""
    try:
        _, told = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        left = [(pid, _doing(pid)) for pid in ranks_of(process.pid)]
        for pid, _ in left:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(2)
        for pid in [*(pid for pid, _ in left), process.pid]:
            os.kill(pid, signal.SIGKILL)
        _, told = process.communicate()
        raise AssertionError(_tell(case, f"the job hangs; ranks that were left: {left}\n{told}")) from None
    return process.returncode, told


def _doing(pid: int) -> str:
    """State of a process, and what it waits for in the kernel."""
    try:
        state = Path(f"/proc/{pid}/status").read_text().split("State:")[1].split()[0]
        return f"{state} {Path(f'/proc/{pid}/wchan').read_text()}"
    except OSError:
        return "gone"


def ranks_of(pid: int) -> list[int]:
    """Process ids of the Python ranks below a launcher."""
    found, todo = [], [pid]
    while todo:
        for child in children(todo.pop()):
            todo.append(child)
            try:
                if b"run_job.py" in Path(f"/proc/{child}/cmdline").read_bytes() and not children(child):
                    found.append(child)
            except OSError:
                pass
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


def kill_sometime(process: subprocess.Popen[str], output: Path, chance: random.Random, case: Case) -> None:
    """Kill one rank, all of them, or the launcher, as a seed says."""
    kind = chance.choice(["start", "work", "write", "write", "merge"])
    whom = chance.choice(["rank", "rank", "all", "launcher"])
    shards = chance.randrange(0, 4) if kind in ("work", "write") else 0
    wait_s = chance.uniform(0, 4) if kind == "start" else chance.uniform(0, 0.01)
    before = len(list(output.glob("shard-*.h5")))

    def is_time() -> bool:
        if kind == "start":
            return bool(ranks_of(process.pid))
        files = [file.name for file in output.iterdir()] if output.is_dir() else []
        if kind == "merge":
            return "results.h5.part" in files
        finished = sum(name.startswith("shard-") and name.endswith(".h5") for name in files)
        return finished >= before + shards and (kind == "work" or any(name.endswith(".part") for name in files))

    while process.poll() is None and not is_time():
        time.sleep(0.001)
    time.sleep(wait_s)
    ranks = ranks_of(process.pid)
    pids = {"rank": ranks and [chance.choice(ranks)], "all": ranks, "launcher": [process.pid]}[whom]
    case.story.append(f"SIGKILL {whom} at {kind} + {1e3 * wait_s:.0f} ms, after {shards} shards: {len(pids or [])} hit")
    for pid in pids or []:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def damage(output: Path, chance: random.Random, case: Case) -> None:
    """Do to the files what disks, people and clocks do."""
    kind = chance.choice(DAMAGES)
    files = sorted(file for file in output.iterdir() if file.is_file()) if output.is_dir() else []
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


def run_case(seed: int, job: Path, reference: Path, scratch: Path) -> Case:
    """Disturb a job as its seed says, resume it until it ends, and compare.

    Raises
    ------
    AssertionError
        With the whole story, if anything is lost, double, different or unreadable.
    """
    chance, case = random.Random(seed), Case(seed)
    with place(scratch, chance.random() < 0.12, case) as (output, make_room):
        for attempt in range(chance.choice([1, 1, 2])):
            ranks = 2 if attempt == 0 else chance.choice([1, 2, 3])
            case.story.append(f"run on {ranks}")
            process = launch(job, output, ranks)
            if make_room is None:
                kill_sometime(process, output, chance, case)
            code, told = end(process, case)
            case.story.append(f"ended with {code}")
            if make_room is not None:
                assert code == 78 and "No space left" in told and "--resume" in told, _tell(case, told)
                make_room()
                make_room = None
            damage(output, chance, case)
        for _ in range(3):  # damage found while merging ends a job, too: the next one mends it
            ranks = chance.choice([1, 2, 3])
            code, told = end(launch(job, output, ranks), case)
            case.story.append(f"resumed on {ranks}, ended with {code}")
            if code in ENDED_WELL and (output / "results.h5").exists():
                break
        assert code == 65, _tell(case, told)  # one document is bad
        try:
            compare(output, reference)
        except Exception as error:
            raise AssertionError(_tell(case, f"{error}\n{told}")) from error
    return case


@contextmanager
def place(scratch: Path, is_small: bool, case: Case) -> Iterator[tuple[Path, Callable[[], None] | None]]:
    """An output folder, on a disk that is too small if wanted, and what makes it larger."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    made = (
        is_small
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", SMALL_DISK, "tmpfs", folder], capture_output=True, check=False
        ).returncode
    )
    if is_small:
        case.story.append("a small disk" if made else "no small disk: only root can mount one")

    def make_room() -> None:
        subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)

    try:
        yield folder / "out", make_room if made else None
    finally:
        if made:
            subprocess.run(["umount", "--lazy", folder], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def compare(output: Path, reference: Path) -> None:
    """Hold every document against the undisturbed job, reading with h5py alone."""
    assert [file.name for file in output.glob("*.h5*") if "damaged" not in file.name] == ["results.h5"]
    with h5py.File(output / "results.h5") as file, h5py.File(reference / "results.h5") as wanted:
        assert sorted(file["documents"]) == sorted(wanted["documents"]), "lost, or not of this corpus"
        for key, group in wanted["documents"].items():
            found = file["documents"][key]
            for name in ("status", "error", "document_sha256", "prompt_sha256", "new_tokens"):
                assert found.attrs[name] == group.attrs[name], f"{key}: {name} differs"
            assert found["token_ids"][()].tolist() == group["token_ids"][()].tolist(), f"{key}: other tokens"
            assert found["answer"][()] == group["answer"][()], f"{key}: another answer"
            layers = list(group["kv"]) if "kv" in group else []
            assert layers == (list(found["kv"]) if "kv" in found else []), f"{key}: other layers"
            for layer in layers:
                for what in ("keys", "values"):
                    one, other = found[f"kv/{layer}/{what}"][()], group[f"kv/{layer}/{what}"][()]
                    assert np.allclose(one, other, atol=1e-4), f"{key}: {layer} {what} differ"


def make_reference(job: Path, folder: Path) -> None:
    """Run the job in peace."""
    code, told = end(launch(job, folder, 2), Case(0))
    assert code == 65 and (folder / "results.h5").exists(), told


def _tell(case: Case, more: str) -> str:
    return f"case {case.seed}:\n  " + "\n  ".join(case.story) + f"\n{more[-3000:]}"
