"""Jobs and documents for tests that run whole jobs; job files with as little as there can be, and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvr_mpi.errors import EXIT_CONFIG, ConfigError
from kvr_mpi.job import JobSpec, load_job
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

TEXT = "The ferry left at seven and the harbour was quiet. Nobody on the pier had seen the second boat. "


def answers(folder: Path) -> dict[str, tuple[int, ...]]:
    return {record.id: record.token_ids for record in open_results(folder)}


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
        return answers(self.folder)


def with_settings(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def last_line(text: str) -> str:
    """What the last line of a log says, without its time and rank."""
    return text.splitlines()[-1].partition("] ")[2]


# Job files


def toml_of(settings: Mapping[str, Any]) -> str:
    """Write settings by their keys, such as ``model.path``, as a job file; those that are None are left out."""

    def value(one: Any) -> str:
        if isinstance(one, dict):
            return "{" + ", ".join(f"{key} = {value(each)}" for key, each in one.items()) + "}"
        return json.dumps(str(one) if isinstance(one, Path) else one)

    return "".join(f"{key} = {value(one)}\n" for key, one in settings.items() if one is not None)


def plain_job(model: str | Path, documents: str | Path, output: str | Path) -> dict[str, Any]:
    """What every job has to say."""
    return {"model.path": model, "documents.path": documents, "output.path": output}


MINIMAL = """
[model]
path = "the/model"
[documents]
path = "the/documents"
[output]
path = "the/output"
"""
COMPRESS = "[compress]\nmethod = 'snapkv'\nbudget = 512\n"
SECTIONS = tuple(JobSpec.model_fields)


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
