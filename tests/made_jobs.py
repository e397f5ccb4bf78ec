"""Jobs and documents for tests that run whole jobs; job files with as little as there can be, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvr_mpi.errors import EXIT_CONFIG, ConfigError
from kvr_mpi.job import JobSpec, load_job
from kvr_mpi.store.results import open_results

TEXT = "The ferry left at seven and the harbour was quiet. Nobody on the pier had seen the second boat. "


def answers(folder: Path) -> dict[str, tuple[int, ...]]:
    return {record.id: record.token_ids for record in open_results(folder)}


def with_settings(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def spec_of(job: Path, *settings: str) -> JobSpec:
    return load_job(job, settings, {})[0]


def last_line(text: str) -> str:
    """What the last line of a log says, without its time and rank."""
    return text.splitlines()[-1].partition("] ")[2]


# Job files


MINIMAL = """
[model]
path = "the/model"
[documents]
path = "the/documents"
[output]
path = "the/output"
"""
SECTIONS = (
    "model",
    "documents",
    "prompt",
    "questions",
    "generation",
    "cache",
    "compress",
    "decode",
    "parallel",
    "output",
)


def write_job(folder: Path, more: str = "", text: str = MINIMAL) -> Path:
    path = folder / "job.toml"
    path.write_text(text + more, encoding="utf-8")
    return path


def load(path: Path, *settings: str, **environ: str) -> JobSpec:
    return load_job(path, settings, environ)[0]


def refusal(path: Path, *settings: str, **environ: str) -> str:
    """What a user reads who tries this."""
    with pytest.raises(ConfigError) as caught:
        load_job(path, settings, environ)
    assert caught.value.exit_code == EXIT_CONFIG
    return str(caught.value)
