"""Durations of earlier jobs on this machine, which calibrate forecasts and their intervals.

A complete job writes to ``KVR_CACHE`` the cost model's inputs on this machine (`Costs`), its duration, and the model's
forecast. The next plan with this language model corrects the forecast's two parts, prefill and decoding, by the
durations of earlier jobs (Bayesian linear regression with two coefficients); their scatter determines the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import numpy as np
import xxhash
from pydantic import Field, ValidationError

from kvr_mpi.costs.layer_costs import Costs, RateS
from kvr_mpi.disk import read_regular, replacing
from kvr_mpi.duration import duration_text, expected_text
from kvr_mpi.errors import PartitionError, counted
from kvr_mpi.job import JobSpec
from kvr_mpi.plain import Strict
from kvr_mpi.tuning.table import MAX_RANKS, Seconds, Text

FOLDER, MAX_FILE_BYTES = "jobs", 1 << 20
KEPT_JOBS, LEAST_S = 20, 10.0  # number of latest jobs that are kept, and minimum duration of a job
MOST_RANKS = 128  # plans for more ranks take seconds, during which all ranks would wait
# Prior standard deviations: of each part's relative error once the total is right, and of one job's scatter; the latter
# counts as much as JOBS_BEFORE jobs.
MODEL_SIGMA, JOB_SIGMA, JOBS_BEFORE = 0.3, 0.08, 3
LENGTH_SIGMA = 0.4  # prior standard deviation, between jobs, of the logarithm of the answer length without a limit
# 80% of a normal distribution lie within this many standard deviations.
WITHIN = 1.2816
DATE = "%Y-%m-%dT%H:%M:%SZ"

Date = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]


class PastJob(Strict):
    """The duration of one job, and its forecast.

    prefill_s, decode_s : the cost model's forecast for the answers that the job gave, by the history's rates.
    seconds : from its first document to its last.
    start_s : from its first log line to its first document.
    answer_tokens, limit_tokens : average and maximum tokens of an answer.
    """

    date: Date
    prefill_s: Seconds
    decode_s: RateS
    seconds: Seconds
    start_s: RateS
    answer_tokens: Annotated[float, Field(ge=0, le=1e7)]
    limit_tokens: Annotated[int, Field(ge=0, le=10**7)]


class History(Strict):
    """Jobs of one model on a number of ranks with the same processor or GPU, the latest last."""

    fingerprint: Text
    dtype: Text
    device: Text
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    rates: Costs
    jobs: Annotated[tuple[PastJob, ...], Field(max_length=KEPT_JOBS)] = ()

    @property
    def source(self) -> str:
        """Description of where the costs come from."""
        ranks = counted(self.ranks, "rank")
        return f"rates of earlier jobs with this model on {ranks} ({self.device}); memory unknown"

    def after(self, job: PastJob) -> History:
        """Append a job, and scale the rates, and with them all forecasts, to how long jobs have taken.

        Rates are measured once, in a few seconds during which other programs may have run.
        """
        jobs = (*self.jobs, job)[-KEPT_JOBS:]
        pace = median(each.seconds / (each.prefill_s + each.decode_s) for each in jobs)
        scaled = [{"prefill_s": pace * each.prefill_s, "decode_s": pace * each.decode_s} for each in jobs]
        return self.model_copy(
            update={
                "rates": self.rates.scaled(pace),
                "jobs": tuple(each.model_copy(update=own) for each, own in zip(jobs, scaled, strict=True)),
            }
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected duration of a job, including its start; 80% of jobs lie between `low_s` and `high_s`."""

    low_s: float
    seconds: float
    high_s: float
    start_s: float
    jobs: int

    @property
    def range_s(self) -> tuple[float, float, float]:
        return self.low_s, self.seconds, self.high_s

    def __str__(self) -> str:
        """Describe the interval in one line."""
        start = f"including {duration_text(self.start_s)} of startup"
        return f"{expected_text(self.range_s)}, {start}; based on {counted(self.jobs, 'earlier job')} with this model"


def is_forecast(spec: JobSpec) -> bool:
    """Whether jobs of this kind are forecast and added to the history."""
    is_plain = spec.is_plain or spec.parallel.tensor_parallel > 1
    continues = spec.questions is not None or bool(spec.prompts) or spec.documents.reuse is not None
    asks_more = spec.generation.n > 1 or spec.generation.scores or spec.generation.max_new_tokens == 0
    return not (is_plain or continues or asks_more or spec.parallel.table is not None)


def expect(jobs: Sequence[PastJob], prefill_s: float, decode_s: float, limit_tokens: int) -> Expected:
    """Calibrate the cost model's forecast with at least one earlier job.

    prefill_s, decode_s : the cost model's forecast, for answers of `expected_tokens`.
    limit_tokens : maximum tokens of an answer.
    """
    scale = median(job.seconds / (job.prefill_s + job.decode_s) for job in jobs)
    seconds = np.array([[job.seconds] for job in jobs])
    parts = scale * np.array([[job.prefill_s, job.decode_s] for job in jobs]) / seconds
    prior = np.eye(2) / MODEL_SIGMA**2
    sigma = JOB_SIGMA
    for _ in range(3):  # scatter and coefficients depend on each other
        spread = np.linalg.inv(parts.T @ parts / sigma**2 + prior)
        coefficients = spread @ (parts.sum(axis=0) / sigma**2 + prior.sum(axis=0))
        missed = ((1 - parts @ coefficients) ** 2).sum()
        sigma = math.sqrt((JOBS_BEFORE * JOB_SIGMA**2 + missed) / (JOBS_BEFORE + len(jobs)))
    coefficients = np.maximum(coefficients, 0.05)
    own = scale * np.array([prefill_s, decode_s])
    work_s = float(coefficients @ own)
    along, decoding = own / work_s, coefficients[1] * own[1] / work_s
    variance = sigma**2 + along @ spread @ along + (decoding * _length_error(jobs, limit_tokens)) ** 2
    factor = math.exp(WITHIN * math.sqrt(variance))
    start_s = median(job.start_s for job in jobs)
    return Expected(start_s + work_s / factor, start_s + work_s, start_s + work_s * factor, start_s, len(jobs))


def expected_tokens(jobs: Sequence[PastJob], limit_tokens: int) -> int:
    """Return the expected mean length of answers of at most `limit_tokens` tokens, from earlier jobs.

    Lengths are assumed to have an exponential distribution, cut at the limit.
    """
    if not jobs or not limit_tokens:
        return limit_tokens
    free = math.exp(fmean(_log_lengths(jobs)))
    return max(1, round(free * -math.expm1(-limit_tokens / free)))


def _log_lengths(jobs: Sequence[PastJob]) -> list[float]:
    """Logarithms of the mean answer lengths without a limit, by job."""
    found = []
    for job in jobs:
        share, low, high = job.answer_tokens / max(1, job.limit_tokens), 1e-2, 1e7
        for _ in range(60):  # bisect limit / unlimited length; the share falls with it
            middle = math.sqrt(low * high)
            low, high = (middle, high) if -math.expm1(-middle) / middle > share else (low, middle)
        found.append(math.log(max(1, job.limit_tokens) / low))
    return found


def _length_error(jobs: Sequence[PastJob], limit_tokens: int) -> float:
    """Return the relative standard error of the mean length of answers."""
    lengths = _log_lengths(jobs)
    cut = limit_tokens / math.exp(fmean(lengths))
    missed = sum((one - fmean(lengths)) ** 2 for one in lengths)
    sigma = math.sqrt((JOBS_BEFORE * LENGTH_SIGMA**2 + missed) / (JOBS_BEFORE + len(jobs)))
    return sigma * (1 - cut / math.expm1(cut) if 0 < cut < 500 else float(cut > 0))


def file_of(cache_dir: Path, fingerprint: str, dtype: str, device: str, ranks: int) -> Path:
    """Return the file of a history."""
    name = xxhash.xxh3_64_hexdigest("\n".join((fingerprint, dtype)).encode())
    where = xxhash.xxh3_64_hexdigest(device.encode())
    return cache_dir / FOLDER / f"{name}-{where}-{ranks}.json"


def read_history(file: Path, fingerprint: str, dtype: str) -> History | None:
    """Read a history; None if it is unreadable or belongs to another model."""
    try:
        found = History.model_validate_json(read_regular(file, MAX_FILE_BYTES))
    except (OSError, ValidationError, PartitionError):
        return None
    return found if (found.fingerprint, found.dtype) == (fingerprint, dtype) else None


def find_history(cache_dir: Path, fingerprint: str, dtype: str, ranks: int) -> History | None:
    """Find the history of a model for the closest number of ranks; if there are several, the latest."""
    pattern = file_of(cache_dir, fingerprint, dtype, "", 0).name.split("-")[0] + "-*.json"
    read = [read_history(file, fingerprint, dtype) for file in sorted((cache_dir / FOLDER).glob(pattern))]
    found = [one for one in read if one is not None and one.jobs]
    found.sort(key=lambda one: one.jobs[-1].date, reverse=True)
    return min(found, key=lambda one: abs(math.log(one.ranks / ranks)), default=None)


def keep(file: Path, history: History) -> None:
    """Write a history; raise `OSError` if that fails."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream:
        stream.write(history.model_dump_json().encode())
