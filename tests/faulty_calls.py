"""System calls that fail for some paths, as those of a network file system do."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvr_mpi import disk


class Faults:
    """Calls that fail: those about a path with this ending, from the `first` on, `times` times; `count` counts them."""

    def __init__(
        self, name: str, ending: str, first: int = 1, times: int = 1 << 30, number: int = errno.ESTALE
    ) -> None:
        self.name, self.ending, self.first, self.times, self.number = name, ending, first, times, number
        self.count = 0

    def strike(self, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and os.fspath(path).rstrip("/").endswith(self.ending):
            self.count += 1
            if self.first <= self.count < self.first + self.times:
                raise OSError(self.number, os.strerror(self.number), os.fspath(path))


@contextmanager
def faults(*planned: Faults) -> Iterator[list[float]]:
    """Make calls of `os` fail as planned, and wait for nothing; yields the waits there would have been."""
    waits = list[float]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk.time, "sleep", waits.append)
        for plan in planned:
            patch.setattr(os, plan.name, _faulty(plan))
        yield waits


def _faulty(plan: Faults) -> Callable[..., Any]:
    real = getattr(os, plan.name)

    def call(*given: Any, **options: Any) -> Any:
        plan.strike(given[0] if given else ".")
        return real(*given, **options)

    return call
