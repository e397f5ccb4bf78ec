"""Jobs of every mode in which one rank sees something else than the rest: an unreadable file, another text, a clock.

Whatever a rank sees, a document has the right answer or an error record, or the job ends with a reason; it has never a
wrong answer, a hang, or a traceback. Right is what an undisturbed job answers about the text that the record names by
its hash.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from disturb import Case
from harness import TEXT, end, launch

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK, DataError, KvrError
from kvr_mpi.store.folder import read_records
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.shares import find_runs, index_runs

OTHER = "A train came late at night and the station was empty. Somebody at the gate had lost a red bag. "
DOCUMENTS = 7
KINDS = ("read-error", "content", "missing", "mtime", "listing", "slow", "clock")
# Answers by document and by hash of its text.
Answers = dict[tuple[str, str], Record]


@dataclass(frozen=True)
class Mode:
    """One way to run a job.

    settings : of the job.
    ranks : that run it.
    rows : documents are the requests of a batch file.
    source : a run whose stored keys and values are used, and by which key of the job.
    parts : it is run as so many tasks of an array.
    like : the mode with the same answers: how ranks share the work does not change them.
    """

    settings: tuple[str, ...] = ()
    ranks: int = 2
    rows: bool = False
    source: str = ""
    parts: int = 1
    like: str = "chain"


MODES: Mapping[str, Mode] = {
    "chain": Mode(("parallel.partition=even",)),
    "truncated": Mode(("prompt.max_tokens=40", "prompt.too_long=keep-head"), like="truncated"),
    "ring": Mode(("parallel.strategy=ring",)),
    "auto": Mode(("parallel.ranks_per_chain=auto",)),
    "alone": Mode(("parallel.ranks_per_chain=1",)),
    "sharded": Mode(("output.kv=sharded",)),
    "stored": Mode(("output.kv=true",)),
    "split": Mode(("prompt.max_tokens=90", "prompt.too_long=split"), like="split"),
    "array": Mode(parts=2),
    "batch file": Mode(rows=True, like="batch file"),
    "tensor-parallel": Mode(("parallel.tensor_parallel=2",)),
    "reuse": Mode(source="documents.reuse"),
    "ask": Mode(source="documents.path", like="ask"),
    "ask sharded": Mode(("parallel.ranks_per_chain=all",), source="documents.path", like="ask"),
}


@dataclass
class Place:
    """A folder with a corpus, another corpus of the same names, jobs about them, and a run with stored keys."""

    folder: Path
    model: Path
    references: dict[str, Answers] = field(default_factory=dict)

    def make(self) -> None:
        """Write the corpora, and store a run."""
        for name, text in (("corpus", TEXT), ("other", OTHER)):
            (self.folder / name).mkdir(parents=True)
            rows = []
            for number in range(DOCUMENTS):
                words = f"Document {number}. " + text * (1 + number % 4 * 3)
                (self.folder / name / f"doc-{number}.txt").write_text(words)
                said = [{"role": "user", "content": words}]
                body = {"model": "m", "messages": said, "temperature": 0}
                row = {"custom_id": f"doc-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
                rows.append(json.dumps(row) + "\n")
            (self.folder / f"{name}.jsonl").write_text("".join(rows))
            run = self.folder / f"run-{name}"
            job = self.write_job(MODES["stored"], name)
            code, log = self.run(job, MODES["stored"], run)
            assert code == EXIT_OK, log

    def write_job(self, mode: Mode, corpus: str, name: str = "job") -> Path:
        """Write the job of a mode over a corpus."""
        source = self.folder / "run-corpus"
        path = self.folder / f"{corpus}.jsonl" if mode.rows else self.folder / corpus
        lines = [f'[model]\npath = "{self.model}"\ndtype = "float32"', f'[documents]\npath = "{path}"']
        if mode.rows:
            lines += ['format = "openai-batch"']
        elif mode.source == "documents.path":
            lines[-1] = f'[documents]\npath = "{source}"\n[questions]\nask = ["Who saw it?", "When did it leave?"]'
        else:
            lines += [f'reuse = "{source}"'] * (mode.source == "documents.reuse")
            lines += ['[prompt]\nchat_template = false\ntemplate = "Summarise: {text} Summary:"']
        lines += ['[generation]\nmax_new_tokens = 12\n[output]\npath = "given"']
        job = self.folder / f"{name}-{corpus}.toml"
        job.write_text("\n".join(lines) + "\n")
        return job

    def run(
        self,
        job: Path,
        mode: Mode,
        output: Path,
        view: Mapping[str, object] | None = None,
        settings: Sequence[str] = (),
    ) -> tuple[int, str]:
        """Run a job to its end; returns the exit code and the log."""
        words = [word for one in (*mode.settings, *settings) for word in ("--set", one)]
        return end(launch(job, output, mode.ranks, words=words, view=view), Case(0, [f"{mode} {view}"]))

    def reference(self, name: str, corpus: str) -> Answers:
        """Return the answers of an undisturbed job about a corpus."""
        key = f"reference-{name.replace(' ', '-')}-{corpus}"
        if key not in self.references:
            mode, output = MODES[name], self.folder / key
            code, log = self.run(self.write_job(mode, corpus), mode, output)
            assert code == EXIT_OK, log
            self.references[key] = {(record.id, record.document_sha256): record for record in open_results(output)}
        return self.references[key]


def run_case(seed: int, place: Place, scratch: Path) -> str:
    """Let one rank of a job see something else, as a seed says, and check what the job has stored.

    Raises
    ------
    AssertionError
        With what was done, if an answer is wrong, or a document has neither an answer, nor an error record, nor a
        reason why the job ended.
    """
    chance = random.Random(seed)
    name = list(MODES)[seed % len(MODES)]
    mode, kind = MODES[name], chance.choice(KINDS)
    number, suffix = chance.randrange(DOCUMENTS), ".txt"
    other = place.folder / "other" / f"doc-{number}{suffix}"
    seen = f"doc-{number}{suffix}"
    if mode.rows:
        seen, other = "corpus.jsonl", place.folder / "other.jsonl"
    elif mode.source and chance.random() < 0.7:
        seen, other = "run-corpus/results.h5", place.folder / "run-other" / "results.h5"
    if kind == "listing" and chance.random() < 0.4:
        seen = ".lock-"
    times = chance.choice([1, 1, 10**6])
    view = {
        "rank": chance.randrange(mode.ranks),
        "kind": kind,
        "name": seen,
        "first": chance.choice([0, 0, 1, 2, 3]),
        "times": times,
        "other": str(other),
    }
    story = f"case {seed}: {name}, {view}"
    wanted, job = place.reference(mode.like, "corpus"), place.write_job(mode, "corpus", f"job-{seed}")
    if kind == "content" and mode.like != "ask":
        wanted = wanted | place.reference(mode.like, "other")
    records: list[Record] = []
    codes, logs = [], []
    disturbed = chance.choice([None, *range(mode.parts)]) if mode.parts > 1 else None
    for part in range(mode.parts):
        output = scratch / f"out-{part}"
        settings = [f"documents.shard={part}/{mode.parts}"] if mode.parts > 1 else []
        code, log = place.run(job, mode, output, view if disturbed in (None, part) else None, settings)
        codes.append(code)
        logs.append(log)
        story += f"; exit code {code}"
        assert "Traceback" not in log, f"{story}\n{log[-4000:]}"
        assert f"exit code {code}: " in log, f"{story}\nno reason\n{log[-4000:]}"
        assert code in (EXIT_OK, EXIT_BAD_DATA, EXIT_CONFIG), f"{story}\n{log[-4000:]}"
        try:
            records += open_results(output)
        except KvrError:
            assert code in (EXIT_CONFIG, EXIT_BAD_DATA), f"{story}\n{log[-4000:]}"
    if mode.parts > 1 and all(code in (EXIT_OK, EXIT_BAD_DATA) for code in codes):
        try:
            index, _ = index_runs(find_runs([scratch]))
        except DataError as error:  # tasks of an array that have listed different documents are never merged
            return f"{story}; not merged: {error}"
        records = list(read_records(index, index.ids()))
    for record in records:
        if record.status == "done":
            right = wanted.get((record.id, record.document_sha256))
            assert right is not None, f"{story}\n{record.id} has an answer about a text of no corpus"
            assert record.prompt_sha256 == right.prompt_sha256, f"{story}\n{record.id}: another prompt"
            assert record.token_ids == right.token_ids, f"{story}\n{record.id}: a wrong answer"
        else:
            assert record.error, f"{story}\n{record.id} failed without a reason"
    ids = [record.id for record in records]
    assert len(set(ids)) == len(ids), f"{story}\na document has two records: {sorted(ids)}"
    failed = [record for record in records if record.status != "done"]
    # A job that cannot read its source at all ends before the first document, with a reason.
    are_through = all(
        code == EXIT_OK or f"exit code {code}: done" in log for code, log in zip(codes, logs, strict=True)
    )
    if are_through and kind != "listing":
        missing = {one for one, _ in wanted} - set(ids)
        assert not missing, f"{story}\n{missing} are missing\n{logs[-1][-2000:]}"
        per_document = 2 if mode.source == "documents.path" else 1
        affected = len(wanted) if mode.rows or "results.h5" in seen else per_document
        assert len(failed) <= affected, (
            f"{story}\none file cost {len(failed)} documents: {[one.error for one in failed]}"
        )
    return story
