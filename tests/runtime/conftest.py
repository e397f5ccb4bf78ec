"""Whole jobs of a module's small model: run into folders of their own, and asked again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from made_jobs import TEXT, spec_of, with_settings

from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTIONS = ("Who wrote it, and what for?", "When?")


@dataclass(frozen=True)
class Ran:
    """A job that has ended, its output folder, and what it printed and logged."""

    folder: Path
    code: int
    out: str
    log: str

    @property
    def records(self) -> dict[str, Record]:
        return {record.id: record for record in open_results(self.folder)}

    @property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        return {record.id: record.token_ids for record in open_results(self.folder)}


@pytest.fixture
def run_job(job: Path, tmp_path: Path, run_here: Any) -> Callable[..., Ran]:
    """Run a job with these settings on some ranks, in a new folder unless one is named, to the exit code expected."""
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

    def write(run: Path, *questions: str, more: str = "") -> Path:
        path, text = job.with_name(f"ask-{run.name}.toml"), job.read_text()
        path.write_text(
            f"""
            model = {{ path = "{spec_of(job).model.path}", dtype = "float32" }}
            documents.path = "{run}"
            questions.ask = {list(questions or QUESTIONS)}
            {"generation.max_new_tokens = 8" if "max_new_tokens" in text else ""}
            output.path = "{run}-asked"
            {more}
            """
        )
        return path

    return write


@pytest.fixture
def batch_of(job: Path) -> Callable[..., Path]:
    """Write a job of requests in OpenAI's batch format: of (id, body), or (id, body, url); others are rows as given."""

    def write(*requests: Any, name: str = "batch") -> Path:
        rows = []
        for one in requests:
            if isinstance(one, tuple):
                custom_id, body, url = (*one, CHAT)[:3]
                said = {"messages": [{"role": "user", "content": TEXT}]} if url == CHAT else {"prompt": TEXT}
                one = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **said, **body}}
            rows.append(json.dumps(one) + "\n")
        file, path = job.with_name(f"{name}.jsonl"), job.with_name(f"{name}.toml")
        file.write_text("".join(rows))
        text = job.read_text().replace(spec_of(job).documents.path[0], str(file)).replace("[prompt]", "")
        path.write_text(text.replace('template = "Summarise: {text} Summary:"', 'format = "openai-batch"'))
        return path

    return write


@pytest.fixture
def documents(tmp_path: Path) -> Callable[[dict[str, str]], str]:
    """Write other documents than the job's, by id; returns the setting that names them."""

    def write(texts: dict[str, str]) -> str:
        file = tmp_path / f"{len(texts)}-documents.jsonl"
        file.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()))
        return f"documents.path={file}"

    return write
