"""Waits with time limits, so that the doctor never hangs.

Ranks sleep while they wait for others (`wait_for_all`), which leaves the cores to ranks that measure. Calls without a
timeout of their own run in a thread (`within`). The parent process limits the time of each step (``launch``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from kvr_mpi.doctor.findings import ranks_text
from kvr_mpi.errors import TransportError
from kvr_mpi.transport import Request, Transport, gather_json
from kvr_mpi.transport.base import FixedTag

T = TypeVar("T")

# After this time, waiting sleeps between polls: microseconds no longer matter.
SPIN_S, NAP_S = 0.02, 0.001


class SilentError(TransportError):
    """A rank did not respond in time; communication with it is no longer reliable."""


def wait_for(request: Request, timeout_s: float, who: str = "a message") -> None:
    """Wait for a transfer, to the microsecond if it is short; raise `SilentError` if it takes too long."""
    began = time.monotonic()
    while not request.test():
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise SilentError(f"{who} did not arrive within {timeout_s:.0f} s")
        if waited_s > SPIN_S:
            time.sleep(NAP_S)
        else:
            os.sched_yield()  # with more ranks than cores, the peer may need this core


def wait_for_all(transport: Transport, timeout_s: float) -> None:
    """Wait for all ranks with a barrier that sleeps; after the timeout, `SilentError` names the missing ranks."""
    token = torch.zeros(1, dtype=torch.uint8)
    if transport.rank:
        transport.isend(token, 0, FixedTag.MEETING)
        wait_for(transport.irecv(torch.empty_like(token), 0, FixedTag.MEETING), timeout_s, "rank 0")
        return
    others = range(1, transport.size)
    arrivals = {rank: transport.irecv(torch.empty_like(token), rank, FixedTag.MEETING) for rank in others}
    ends, missing = time.monotonic() + timeout_s, []
    for rank, arrival in arrivals.items():
        try:
            wait_for(arrival, max(0.0, ends - time.monotonic()))
        except SilentError:
            missing.append(rank)
    if missing:
        raise SilentError(f"{ranks_text(missing)} did not answer within {timeout_s:.0f} s")
    for request in [transport.isend(token, rank, FixedTag.MEETING) for rank in others]:
        wait_for(request, timeout_s)


def gather_tried(transport: Transport, work: Callable[[], Any], timeout_s: float) -> list[dict[str, Any]]:
    """Call a function on every rank, and gather ``{"value": ...}`` or ``{"error": ...}`` on rank 0."""
    try:
        tried = {"value": work()}
    except Exception as error:  # a check that fails on one rank must not leave the others waiting
        tried = {"error": f"{type(error).__name__}: {error}"}
    wait_for_all(transport, timeout_s)
    return gather_json(transport, tried)


def within(timeout_s: float, work: Callable[[], T], what: str) -> T:
    """Call a function that may never return, such as on a dead file system; raise `TimeoutError` after a while."""
    outcome: Future[T] = Future()

    def body() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=body, daemon=True, name=what).start()
    try:
        return outcome.result(timeout_s)
    except TimeoutError as error:
        if outcome.done():
            raise
        raise TimeoutError(f"{what} did not return within {timeout_s:.0f} s") from error
