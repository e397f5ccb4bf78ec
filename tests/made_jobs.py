"""Jobs and documents for tests that run whole jobs."""

from __future__ import annotations

from pathlib import Path

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
