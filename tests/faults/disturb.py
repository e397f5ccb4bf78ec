"""What is done to a job and to its files: by signals, by people, by disks and by clocks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from warm import can_watch, rank_for

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
ACTIONS = ("kill",) * 5 + tuple(SIGNALS) + ("remove", "read-only", "swap", "swap", "rival")
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
    before = len(list(output.glob("kv-*.h5")))

    def is_time() -> bool:
        if kind == "start":
            return bool(ranks_of(process.pid))
        try:
            files = os.listdir(output)
        except OSError:
            return False
        if kind == "merge":
            return "results.h5.part" in files
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
    """Take a job's folder away under its hands: removed, not to be written, or another in its place."""
    case.story.append(f"{action} {output.name}")
    try:
        if action == "remove":
            shutil.rmtree(output, ignore_errors=True)
        elif action == "read-only":
            if os.geteuid():
                output.chmod(0o555)
            else:  # whom no mode keeps out
                subprocess.run(["mount", "--bind", output, output], check=True)
                subprocess.run(["mount", "-o", "remount,bind,ro", output], check=True)
        else:
            output.rename(output.with_name("away"))
            if chance.random() < 0.5:
                shutil.copytree(decoy, output)
            elif chance.random() < 0.5:
                output.mkdir()
    except (OSError, subprocess.CalledProcessError) as error:
        case.story.append(f"which failed: {error}")


def put_back(action: str, output: Path, decoy: Path) -> None:
    """Undo what `move_folder` did; a folder that was in its place for a while is as it was.

    Raises
    ------
    AssertionError
        If the job wrote over what was in that folder.
    """
    if action == "read-only":
        if os.geteuid():
            output.chmod(0o755)
        else:
            subprocess.run(["umount", "--lazy", output], check=False, capture_output=True)
    elif action == "swap" and output.with_name("away").exists():
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


def edit_corpus(corpus: Path, chance: random.Random, case: Case) -> dict[Path, bytes]:
    """Change, remove or add a document; return the files as they were."""
    files = sorted(corpus.glob("doc-*.txt"))
    before = {file: file.read_bytes() for file in files}
    file, kind = chance.choice(files), chance.choice(["changed", "removed", "added"])
    case.story.append(f"{file.name} {kind}")
    if kind == "changed":
        file.write_text("Another text.")
    elif kind == "removed":
        file.unlink()
    else:
        (corpus / "new.txt").write_text("A new document.")
    return before


def mend_corpus(corpus: Path, before: dict[Path, bytes]) -> None:
    """Put the documents back as they were, at another time."""
    (corpus / "new.txt").unlink(missing_ok=True)
    for file, content in before.items():
        file.write_bytes(content)
