"""Jobs one of whose files fails once, or from some operation on always, in one rank (``injector.c``); and their end.

Each kind of job is first run in peace, and every operation on a file below its folder is recorded. A case draws one of
them by its seed, an error that a file system may give for it, and whether it comes once or always. The job has to end
with a named exit, and with nothing damaged under a final name; the same job without the fault has to finish what is
left, and nothing else, and to come to exactly what the undisturbed job came to.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from constants import MPI_ENVIRONMENT
from harness import LAUNCHER, ranks_of
from made_corpora import write_gzip, write_lines, write_parquet
from made_jobs import TEXT, toml_of

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_NO_TRANSPORT, EXIT_OK, EXIT_STOPPED
from kvr_mpi.store.folder import survey
from kvr_mpi.store.places import seconds_of
from kvr_mpi.store.results import open_results

NAMED_EXITS = (EXIT_OK, EXIT_BAD_DATA, EXIT_STOPPED, EXIT_CONFIG, EXIT_NO_TRANSPORT)
LIMIT_S = 120.0
ALWAYS = 10**9
SHORT, KILL = -1, -9  # of ``injector.c``
# What each operation may fail with. EINTR comes once: whoever is interrupted tries again.
ERRORS: Mapping[str, Sequence[int]] = {
    "list": (errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOMEM),
    "open": (errno.ESTALE, errno.EIO, errno.EACCES, errno.ENFILE, errno.ENOENT),
    "stat": (errno.ESTALE, errno.EIO, errno.EACCES),
    "read": (errno.ESTALE, errno.EIO, errno.EINTR, SHORT),
    "map": (errno.ENOMEM, errno.ENODEV),
    "write": (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ESTALE, errno.EINTR, SHORT),
    "sync": (errno.EIO, errno.ENOSPC, errno.ESTALE),
    "close": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "rename": (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOSPC),
    "unlink": (errno.EIO, errno.ESTALE, errno.EACCES),
    "make": (errno.EIO, errno.ESTALE, errno.ENOSPC),
}
ONCE_ONLY = (errno.EINTR, errno.ENOENT, SHORT)
# Parts of a file's name that differ between two runs of a job, as a regular expression: random words, numbers of
# volumes, which are as many as there was time for.
VARIES = ((r"[0-9a-f]{12,}", "[0-9a-f]{12,}"), (r"/tmp\w{8}", r"/tmp\w{8}"), (r"-\d{5}\.h5", r"-\d{5}\.h5"))


@dataclass(frozen=True, slots=True)
class Fault:
    """From the `first` operation of a kind on a file that a regular expression matches, `times` of them fail."""

    rank: int
    operation: str
    file: str
    first: int
    times: int
    error: int

    def __str__(self) -> str:
        what = {SHORT: "is short", KILL: "kills"}.get(self.error) or errno.errorcode[self.error]
        when = "always" if self.times == ALWAYS else "once"
        return f"{self.operation} {self.file} {what} {when} from number {self.first} on, in rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    log: str
    operations: tuple[tuple[int, int, str, str], ...]  # rank, error, operation, path

    @property
    def hits(self) -> int:
        """How many operations failed."""
        return sum(error != 0 for _, error, _, _ in self.operations)


@dataclass(frozen=True)
class Kind:
    """A kind of job: its command, that of the next start, what it finds in its folder, and what it comes to.

    words, again : arguments of ``kvr``; the next start's.
    begun : its output folder before; None: there is none.
    right : the folder of the undisturbed job.
    operations : what the undisturbed job did to files.
    kept : documents that the job must not compute again, by id with the time at which they were finished.
    """

    words: tuple[str, ...]
    again: tuple[str, ...]
    begun: Path | None
    right: Path
    operations: tuple[tuple[int, int, str, str], ...] = field(repr=False)
    kept: Mapping[str, float]


class Kinds:
    """All kinds of jobs, below one folder; each is made when it is first asked for.

    folder, model : everything is below the folder, with a tiny model.
    starter : what `mpirun` starts before a program.
    """

    NAMES = ("first", "batch", "resumed", "retried", "extended", "merged", "asked")

    def __init__(self, folder: Path, model: Path, starter: Sequence[str]) -> None:
        self.folder, self._model, self._starter = folder, model, starter
        self.output = folder / "out"

    def run(self, words: Sequence[str], fault: Fault | None = None, ranks: int = 2, records: bool = False) -> Ended:
        """Run a command of ``kvr`` to its end."""
        log, env = self.folder.parent / "operations", {"OMP_NUM_THREADS": "1", "KVR_CACHE": str(self.folder / "cache")}
        for left in log.parent.glob("operations-*"):
            left.unlink()
        if fault is not None or records:
            fault = fault or Fault(0, "", "", 0, 0, 0)
            values = {name: getattr(fault, name) for name in Fault.__slots__}
            env["KVR_TEST_FAULT"] = json.dumps({"folder": str(self.folder), "log": str(log), **values})
        command = [LAUNCHER, "-n", str(ranks), *self._starter, Path(__file__).with_name("injected.py"), *words]
        process = subprocess.Popen(
            [*map(str, command)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **MPI_ENVIRONMENT, **env},
            start_new_session=True,
        )
        try:
            _, told = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            for number in (signal.SIGUSR1, signal.SIGKILL):
                for pid in ranks_of(process.pid, "injected.py"):
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(2)
            process.kill()
            raise AssertionError(f"the job hangs: {fault}\n{process.communicate()[1][-6000:]}") from None
        found = [
            (rank, int(error), operation, path)
            for rank in range(ranks)
            if (file := log.with_name(f"{log.name}-{rank}")).exists()
            for error, operation, path in (line.split("\t") for line in file.read_text().splitlines())
        ]
        return Ended(process.returncode, told, tuple(found))

    def __getitem__(self, name: str) -> Kind:
        return getattr(self, f"_{name}")  # type: ignore[no-any-return]

    def begin(self, kind: Kind) -> None:
        """Put into the output folder what a job of a kind finds there."""
        self._put(kind.begun)

    def _put(self, begun: Path | None) -> None:
        shutil.rmtree(self.output, ignore_errors=True)
        if begun is not None:
            shutil.copytree(begun, self.output)

    def _keep(self, name: str) -> Path:
        """Move the output folder aside."""
        kept = self.folder / "kept" / name
        kept.parent.mkdir(exist_ok=True)
        shutil.rmtree(kept, ignore_errors=True)
        return self.output.rename(kept)

    def _make(
        self, name: str, words: Sequence[str], begun: Path | None, again: Sequence[str] = (), right: Path | None = None
    ) -> Kind:
        """Run a kind of job in peace; its next start is that of the same job, to be resumed, if none is given."""
        self._put(begun)
        before = {} if begun is None else finished(begun)
        done = self.run(words, records=True)
        assert done.code == EXIT_OK, done.log
        after = finished(self.output)
        made = self._keep(f"{name}-right")
        kept = {each: when for each, when in before.items() if after[each] == when}
        again = again or words
        return Kind((*words,), (*again,), begun, right or made, done.operations, kept)

    def _job(self, name: str, corpus: Path, **settings: Any) -> list[str]:
        usual = {"model.path": self._model, "model.dtype": "float32", "model.kernels": "plain"}
        usual |= {"documents.path": corpus, "output.path": self.output, "generation.max_new_tokens": 4}
        usual |= {"parallel.partition": "even"}
        (job := self.folder / f"{name}.toml").write_text(toml_of({**usual, **settings}))
        return ["run", str(job), "--resume"]

    @cached_property
    def _first(self) -> Kind:
        """A new job over files of all kinds."""
        return self._make("first", self._mixed_job, None)

    @cached_property
    def _batch(self) -> Kind:
        """Requests of a batch file, without keys and values."""
        bodies = [{"messages": [{"role": "user", "content": f"Request {number}. {TEXT}"}]} for number in range(5)]
        rows = [
            {"custom_id": f"request {number}", "method": "POST", "body": body} for number, body in enumerate(bodies)
        ]
        file = write_lines(self.folder / "requests.jsonl", *({**row, "url": "/v1/chat/completions"} for row in rows))
        return self._make("batch", self._job("batch", file, **{"documents.format": "openai-batch"}), None)

    @cached_property
    def _resumed(self) -> Kind:
        """A job that died before a rank had stored anything that counts."""
        begun = shutil.copytree(self._unmerged, self.folder / "kept" / "resumed-begun")
        (begun / "log-0001-0001.jsonl").unlink()
        assert 0 < len(finished(begun)) < len(finished(self["first"].right))
        return self._make("resumed", self._mixed_job, begun, right=self["first"].right)

    @cached_property
    def _retried(self) -> Kind:
        """A job that could not read a document."""
        self._put(None)
        failed = self.run(self._mixed_job, Fault(0, "open", r"/corpus/doc-1\.txt$", 1, ALWAYS, errno.EACCES))
        assert failed.code == EXIT_BAD_DATA and failed.hits, failed.log
        begun = self._keep("retried-begun")
        return self._make("retried", [*self._mixed_job, "--retry-failed"], begun, right=self["first"].right)

    @cached_property
    def _extended(self) -> Kind:
        """A finished job whose documents have changed since."""
        corpus = self._write_corpus("grown")
        words = self._job("grown", corpus, **{"output.kv": True})
        self._put(None)
        assert self.run(words).code == EXIT_OK
        begun = self._keep("extended-begun")
        (corpus / "doc-1.txt").write_text("Another text about the harbour. " * 3)
        (corpus / "inner" / "new.txt").write_text("A new document. " * 3)
        (corpus / "inner" / "doc-3.txt").unlink()
        write_lines(
            corpus / "rows.jsonl", {"id": "one", "text": "Quite another row. " * 3}, {"id": "two", "text": TEXT}
        )
        return self._make("extended", words, begun, words)

    @cached_property
    def _merged(self) -> Kind:
        """A job that found no space to merge its logs, by ``kvr merge``."""
        words = ["merge", str(self.output)]
        return self._make("merged", words, self._unmerged, self._mixed_job, self["first"].right)

    @cached_property
    def _unmerged(self) -> Path:
        self._put(None)
        full = self.run(self._mixed_job, Fault(0, "write", r"/out/results\.h5[^/]*$", 1, ALWAYS, errno.ENOSPC))
        assert full.hits and not (self.output / "results.h5").exists(), full.log
        return self._keep("merged-begun")

    @cached_property
    def _asked(self) -> Kind:
        """Questions about stored documents."""
        stored = shutil.copytree(self["first"].right, self.folder / "stored")
        words = ["ask", str(stored), "-q", "Who saw the second boat?", "-o", str(self.output)]
        words += ["--set", "generation.max_new_tokens=4", "--set", "model.kernels=plain"]
        return self._make("asked", [*words, "--resume"], None)

    @cached_property
    def _mixed_job(self) -> list[str]:
        return self._job("mixed", self._write_corpus("corpus"), **{"output.kv": True})

    def _write_corpus(self, name: str) -> Path:
        corpus = self.folder / name
        (corpus / "inner").mkdir(parents=True)
        for number, place in enumerate(("", "", "", "inner")):
            (corpus / place / f"doc-{number}.txt").write_text(f"Document {number}. " + TEXT)
        rows = [{"id": name, "text": f"{name}. {TEXT}"} for name in ("one", "two", "three", "four")]
        write_lines(corpus / "rows.jsonl", *rows[:2])
        write_gzip(corpus / "more.jsonl.gz", *rows[2:])
        write_parquet(corpus / "table.parquet", id=["five"], text=["Five. " + TEXT])
        return corpus


def finished(run: Path) -> dict[str, float]:
    """Documents of a run that are done, by id with the time at which they were."""
    if not run.exists():
        return {}
    places, _, _ = survey(run).locate()
    return {name: place.finished_s for name, place in places.items() if place.is_done}


def draw(kind: Kind, folder: Path, chance: random.Random) -> Fault:
    """Draw one of the operations that a kind of job does: first which file and what, then which of them."""
    counts: dict[tuple[int, str, str], int] = {}
    for rank, _, operation, path in kind.operations:
        file = re.escape(path.removeprefix(str(folder)))
        for varies, pattern in VARIES:
            file = re.sub(varies, lambda _, pattern=pattern: pattern, file.replace(r"\-", "-"))
        counts[rank, operation, file] = counts.get((rank, operation, file), 0) + 1
    operation = chance.choice(sorted({operation for _, operation, _ in counts}))
    rank, _, file = chance.choice(sorted(key for key in counts if key[1] == operation))
    first = min(chance.choice([1, 1, 2, 3, 10**6]), counts[rank, operation, file])
    first = chance.choice([first, chance.randint(1, counts[rank, operation, file])])
    error = chance.choice(ERRORS[operation])
    times = 1 if error in ONCE_ONLY else chance.choice([1, 1, ALWAYS])
    return Fault(rank, operation, f"{file}$", first, times, error)


def run_case(kinds: Kinds, name: str, fault: Fault) -> str:
    """Run a job with a fault, and again without; return what happened.

    Raises
    ------
    AssertionError
        With both logs, if anything is lost, double, stale, damaged, or ends without a name.
    """
    kind = kinds[name]
    kinds.begin(kind)
    ended = kinds.run(kind.words, fault)
    story = f"{name}: {fault}: {ended.hits} hits, exit code {ended.code}"
    again: Ended | None = None
    try:
        _check_end(ended, kind.words)
        if ended.code == EXIT_OK:
            check_right(kinds.output, kind, merged=False)
        before = check_files(kinds.output)
        again = kinds.run(kind.again, ranks=1)
        _check_end(again, kind.again)
        assert again.code == EXIT_OK, f"the next start ended with {again.code}"
        check_right(kinds.output, kind)
        after = finished(kinds.output)
        stale = {each for each, when in before.items() if each in after and after[each] != when}
        if name == "extended":
            stale &= finished(kind.right).keys() & kind.kept.keys()
        assert not stale, f"computed again: {sorted(stale)}"
    except Exception as error:
        logs = f"--- with the fault:\n{ended.log[-5000:]}\n--- the next start:\n{again.log[-5000:] if again else ''}"
        raise AssertionError(f"{story}\n{type(error).__name__}: {error}\n{logs}") from error
    return story


def _check_end(ended: Ended, words: Sequence[str]) -> None:
    assert ended.code in NAMED_EXITS, f"exit code {ended.code}"
    for unwanted in ("Traceback", "Exception ignored", "bug in kvr-mpi"):
        assert unwanted not in ended.log, f"{unwanted!r} in the log"
    if words[0] != "merge":
        assert f"exit code {ended.code}: " in ended.log, "no reason"


def check_files(output: Path) -> dict[str, str]:
    """Make sure that no file is damaged; return the finished documents."""
    if not output.exists():
        return {}
    found = survey(output, reads_all=True)
    found.verify()
    assert not found.damaged and not found.spoilt, f"damaged: {found.damaged} {found.spoilt}"
    assert not found.missing, f"missing: {found.missing}"
    assert not [file.name for file in output.iterdir() if ".damaged" in file.name], "set aside"
    if (run := output / "run.json").exists():
        json.loads(run.read_bytes().splitlines()[0])
    return finished(output)


def check_right(output: Path, kind: Kind, *, merged: bool = True) -> None:
    """Hold every record, and its keys and values, against those of the undisturbed job.

    merged : nothing but ``results.h5`` is left.
    """
    check_files(output)
    names = {file.name for file in output.iterdir() if file.name.startswith(("kv-", "log-")) or ".part" in file.name}
    assert not (merged and names), f"files: {sorted(names)}"
    found, wanted = open_results(output), open_results(kind.right)
    assert found.ids() == wanted.ids(), f"documents: {sorted({*found.ids()} ^ {*wanted.ids()})}"
    for name in wanted.ids():
        one, two = found[name], wanted[name]
        for each in ("status", "error", "document_sha256", "prompt_sha256", "token_ids", "answer"):
            assert getattr(one, each) == getattr(two, each), f"{name}: {each} differs: {one.status} {one.error}"
        if name in kind.kept:
            assert seconds_of(one.finished_at) == kind.kept[name], f"{name} was computed again"
    if wanted.places[name].needs:
        for name in wanted.ids():
            with found.open(name) as (_, kv), wanted.open(name) as (_, other):
                assert (kv.tokens, kv.layers) == (other.tokens, other.layers), f"{name}: other tokens or layers"
                for layer in kv.layers:
                    for one, two in zip(kv.read(layer), other.read(layer), strict=True):
                        assert torch.allclose(one, two, atol=1e-4), f"{name}: layer {layer} differs"
    responses, right = (folder / "responses.jsonl" for folder in (output, kind.right))
    if right.exists():
        assert _responses(responses) == _responses(right), "other responses"


def _responses(file: Path) -> list[Any]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["custom_id"], row["error"], row["response"]["body"]["choices"]) for row in rows]
