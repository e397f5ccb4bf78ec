"""Loggers for tests."""

from __future__ import annotations

import logging

from kvr_mpi.logs import RankLogger


class _ToList(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def logger_to(lines: list[str], level: int = logging.INFO) -> RankLogger:
    """Rank 0's logger, which appends its messages to a list."""
    made = RankLogger()
    made.logger = logging.Logger("test", level)
    made.logger.addHandler(_ToList(lines))
    return made
