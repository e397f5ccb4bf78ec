"""Saves how long a job took, and its forecast, for later plans (`schedule.history`)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from kvr_mpi.events import Totals
from kvr_mpi.runtime.session import Session
from kvr_mpi.schedule.assignment import two_parts
from kvr_mpi.schedule.forecast import forecast_measured
from kvr_mpi.schedule.history import (
    DATE,
    LEAST_S,
    MOST_RANKS,
    Expected,
    History,
    PastJob,
    expect,
    expected_tokens,
    file_of,
    is_forecast,
    keep,
    read_history,
)
from kvr_mpi.transport import share_json
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.tuning.identity import devices_of
from kvr_mpi.tuning.measure import measure_costs


def keep_outcome(session: Session, done: Totals, seconds: float, start_s: float) -> Expected | None:
    """Save how long a complete job took; every rank calls this.

    The first job of a model on a machine also measures its ranks, which takes a few seconds. Errors here do not fail
    the job, whose answers are stored already.

    done : sum over all ranks.
    seconds, start_s : time from the first document to the last, and time before that, as measured by rank 0.

    Returns, on rank 0, the duration that earlier jobs predict; None without comparable earlier jobs.
    """
    spec, loaded, ranks, logger = session.spec, session.loaded, session.ranks.world, session.logger
    if not share_json(ranks, seconds >= LEAST_S and ranks.size <= MOST_RANKS and is_forecast(spec)):
        return None
    device, dtype = devices_of(loaded, ranks), str(loaded.dtype).removeprefix("torch.")
    file = file_of(session.machine.cache_dir, loaded.fingerprint, dtype, device, ranks.size)
    history = read_history(file, loaded.fingerprint, dtype) if ranks.rank == 0 else None
    costs = session.costs
    if costs is None and not share_json(ranks, history is not None):
        ranks.barrier()  # measure all ranks at once, since they also work at the same time
        try:
            costs = measure_costs(loaded, LocalTransport())
        except Exception as error:  # such as too little memory
            logger.debug(f"this job is not recorded for later plans, since this rank could not be measured: {error}")
    try:
        if ranks.rank == 0 and history is None and costs is not None:
            history = History(fingerprint=loaded.fingerprint, dtype=dtype, device=device, ranks=ranks.size, rates=costs)
        return None if history is None else _kept(session, file, history, done, seconds, start_s)
    except (OSError, ValueError) as error:
        logger.warning(f"this job is not recorded for later plans: {error}")
    return None


def _kept(
    session: Session, file: Path, history: History, done: Totals, seconds: float, start_s: float
) -> Expected | None:
    """Add a job to the history, and return what earlier jobs predicted."""
    spec, limit, mean = session.spec, session.spec.generation.max_new_tokens, done.new_tokens / max(1, done.prompts)
    forecast = forecast_measured(spec, history.rates, session.frame, history.source)
    texts = [(str(number), tokens) for number, tokens in enumerate(done.texts)]

    def parts(tokens: float) -> tuple[float, float] | None:
        """Predict prefill and decode times for answers of this length in tokens."""
        return two_parts(spec, texts, history.ranks, replace(forecast, new_tokens=max(1, round(tokens))))

    before = parts(expected_tokens(history.jobs, limit)) if history.jobs else None
    if (now := parts(mean)) is not None:
        job = PastJob(
            date=time.strftime(DATE, time.gmtime()),
            prefill_s=now[0],
            decode_s=max(0.0, now[1]),
            seconds=seconds,
            start_s=max(0.0, start_s - session.once_s),
            answer_tokens=mean,
            limit_tokens=limit,
        )
        keep(file, history.after(job))
    return None if before is None else expect(history.jobs, *before, limit)
