"""Jobs that are killed, starved and damaged at random, resumed, and held against one that was left in peace.

A case is a job on two ranks. At a random instant (as often as not while a volume is being written) a rank, the launcher
or all are killed, stopped, or told to end, once or twice; or the folder is removed, made read-only or swapped for
another job's; or another job wants it; or the disk is full; and the clock may jump. Then files may be cut, flipped,
removed, or dated to another century, and the corpus may be edited, with which no job goes on. Then it is resumed on
one, two or three ranks, which may be disturbed again, until it ends. Then every document has to be there once, with the
tokens, keys and values of the undisturbed job, in a file that opens.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import h5py
import numpy as np
from constants import MPI_ENVIRONMENT
from disturb import (
    ACTIONS,
    CLOCKS,
    SIGNALS,
    Case,
    damage,
    edit_corpus,
    mend_corpus,
    move_folder,
    put_back,
    ranks_of,
    send_signals,
    wait_for_moment,
)

from kvr_mpi.store.folder import survey
from kvr_mpi.store.run import read_run_file

LAUNCHER = Path(sys.executable).parent / "mpirun"
TEXT = "The ferry left at seven and the harbour was quiet. Nobody on the pier had seen the second boat. "
DOCUMENTS = 12
LIMIT_S = 300.0
SMALL_DISK = "size=900k"
ENDED_WELL = (0, 65)


def write_job(folder: Path, model: Path, kv: str = "true") -> Path:
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
        kv = {kv}
        """
    )
    return job


def write_questions(folder: Path, model: Path, run: Path, *, sharded: bool = False) -> Path:
    """Write a job that asks what a run has stored, all ranks together or each about documents of its own."""
    how = 'parallel.ranks_per_chain = "all"' if sharded else ""
    job = folder / "questions.toml"
    job.write_text(
        f"""
        {how}
        [model]
        path = "{model}"
        [documents]
        path = "{run}"
        [questions]
        ask = ["Who saw the second boat?", "When did the ferry leave?"]
        [generation]
        max_new_tokens = 24
        [output]
        path = "given with each run"
        kv = {"false" if sharded else "true"}
        """
    )
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
        left = [(pid, _doing(pid)) for pid in ranks_of(process.pid)]
        for pid, _ in left:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(2)
        for pid in [*(pid for pid, _ in left), process.pid]:
            with suppress(ProcessLookupError):
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


def run_case(seed: int, job: Path, reference: Path, scratch: Path, *, well: int = 65) -> Case:
    """Disturb a job as its seed says, resume it until it ends (as it does in peace, with the code `well`), and compare.

    Raises
    ------
    AssertionError
        With the whole story, if anything is lost, double, different or unreadable.
    """
    chance, case = random.Random(seed), Case(seed)
    with place(scratch, chance.random() < 0.08, case) as (output, make_room):
        for attempt in range(chance.choice([1, 1, 2])):
            ranks = 2 if attempt == 0 else chance.choice([1, 2, 3])
            disturb(job, output, reference, ranks, chance, case, make_room, well)
            make_room = None
            damage(output, chance, case)
        if chance.random() < 0.2 and well != 0:
            refuse_another_corpus(job, output, chance, case)
        for _ in range(3):  # damage found while merging ends a job, too: the next one mends it
            ranks = chance.choice([1, 2, 3])
            code, told = end(launch(job, output, ranks, clock=chance.choice(CLOCKS)), case)
            case.story.append(f"resumed on {ranks}, ended with {code}")
            assert "Traceback" not in told, _tell(case, told)
            if code in ENDED_WELL and (output / "results.h5").exists():
                break
        assert code == well, _tell(case, told)
        try:
            compare(output, reference)
        except Exception as error:
            raise AssertionError(_tell(case, f"{error}\n{told}")) from error
    return case


def run_extended_case(seed: int, job: Path, begun: Path, reference: Path, scratch: Path) -> Case:
    """Extend a run to a corpus that has changed, disturbed as a seed says, until it ends, and compare.

    Parameters
    ----------
    begun : Path
        The run, of the corpus as it was.
    reference : Path
        The undisturbed job over the corpus as it is.
    """
    chance, case = random.Random(seed), Case(seed)
    with place(scratch, False, case) as (output, _):
        shutil.copytree(begun, output)
        for attempt in range(chance.choice([1, 1, 2])):
            ranks = 2 if attempt == 0 else chance.choice([1, 2, 3])
            disturb(job, output, reference, ranks, chance, case, None, 65, word="--extend")
        word = chance.choice(["--extend", "--extend", "--resume"])
        code, told = end(launch(job, output, chance.choice([1, 2, 3]), chance.choice(CLOCKS), [word]), case)
        case.story.append(f"{word} ended with {code}")
        assert "Traceback" not in told, _tell(case, told)
        if code == 78 and word == "--resume" and "the documents have changed" in told:  # it was stopped before that
            code, told = end(launch(job, output, 2, words=["--extend"]), case)
        assert code == 65, _tell(case, told)
        try:
            compare(output, reference, has_more=True)
        except Exception as error:
            raise AssertionError(_tell(case, f"{error}\n{told}")) from error
    return case


def disturb(
    job: Path,
    output: Path,
    decoy: Path,
    ranks: int,
    chance: random.Random,
    case: Case,
    make_room: Callable[[], None] | None,
    well: int,
    word: str = "--resume",
) -> None:
    """Run a job, and do to it what a seed says, or let its disk be full."""
    clock, action = chance.choice(CLOCKS), chance.choice(ACTIONS)
    case.story.append(f"run on {ranks}" + (f", clock {clock}" if clock else ""))
    process = launch(job, output, ranks, clock, [word])
    if make_room is not None:
        code, told = end(process, case)
        case.story.append(f"ended with {code}")
        # Answers alone may fit.
        assert code == well or (code == 78 and "No space left" in told and "--resume" in told), _tell(case, told)
        make_room()
        return
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
        put_back(action, output, decoy)
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


def is_begun(output: Path) -> bool:
    """Whether a folder has sound results, and says of which documents."""
    if not output.is_dir() or read_run_file(output) is None:
        return False
    found = survey(output)
    found.verify()
    return bool(found.index().places)


def refuse_another_corpus(job: Path, output: Path, chance: random.Random, case: Case) -> None:
    """Resume with a corpus that was edited: refused if there are results, and then the corpus is as it was again."""
    corpus = job.parent / "corpus"
    has_results = is_begun(output)
    before = edit_corpus(corpus, chance, case)
    try:
        code, told = end(launch(job, output, 1), case)
    finally:
        mend_corpus(corpus, before)
    case.story.append(f"resumed so: {code}")
    assert "Traceback" not in told, _tell(case, told)
    assert not has_results or code == 78, _tell(case, told)
    if code != 78:  # nothing was done yet, or what there was turned out to be damaged
        shutil.rmtree(output, ignore_errors=True)


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


def compare(output: Path, reference: Path, *, has_more: bool = False) -> None:
    """Hold every document against the undisturbed job, reading with h5py alone; others only if there may be more."""
    assert [file.name for file in output.glob("*.h5*") if "damaged" not in file.name] == ["results.h5"]
    with h5py.File(output / "results.h5") as file, h5py.File(reference / "results.h5") as wanted:
        records, others = (
            {one["id"]: one for one in map(json.loads, each["records"][()].tobytes().splitlines())}
            for each in (file, wanted)
        )
        assert others.keys() <= records.keys(), "lost"
        assert has_more or others.keys() == records.keys(), "not of this corpus"
        for key, other in others.items():
            found = records[key]
            for name in ("status", "error", "document_sha256", "prompt_sha256", "new_tokens", "token_ids", "answer"):
                assert found[name] == other[name], f"{key}: {name} differs"
            stored, wanted_kv = (
                [each["kv"][quote(piece, safe=" ,+=@()")] for piece in one["pieces"]]
                for each, one in ((file, found), (wanted, other))
            )
            assert len(stored) == len(wanted_kv) <= 1, f"{key}: not in one piece"
            for mine, theirs in zip(stored, wanted_kv, strict=True):
                assert list(mine) == list(theirs), f"{key}: other layers"
                for name in ("text_start", "text_stop", "block_tokens"):
                    assert mine.attrs[name] == theirs.attrs[name], f"{key}: kv {name} differs"
                assert mine["token_ids"][()].tolist() == theirs["token_ids"][()].tolist(), f"{key}: other ids"
                for layer in (name for name in theirs if name.startswith("layer")):
                    for what in ("keys", "values"):
                        one, two = mine[f"{layer}/{what}"][()], theirs[f"{layer}/{what}"][()]
                        assert np.allclose(one, two, atol=1e-4), f"{key}: {layer} {what} differ"


def make_reference(job: Path, folder: Path, *, well: int = 65) -> Path:
    """Run the job in peace; one of the documents is bad, which is no matter of questions. Return the folder."""
    code, told = end(launch(job, folder, 2), Case(0))
    assert code == well and (folder / "results.h5").exists(), told
    (folder / "whose").write_text("the undisturbed job's")
    return folder


def _tell(case: Case, more: str) -> str:
    return f"case {case.seed}:\n  " + "\n  ".join(case.story) + f"\n{more[-3000:]}"
