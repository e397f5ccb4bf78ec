"""Job files for tests: one with as little as there can be, and what a user reads of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvr_mpi.errors import EXIT_CONFIG, ConfigError
from kvr_mpi.job import JobSpec, load_job

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
