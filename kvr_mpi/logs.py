"""Loggers of one rank, below ``kvr_mpi``. Nothing here decides what is shown: the commands do (``cli.log_lines``)."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from kvr_mpi.errors import EXIT_OK, EXIT_STOPPED, exit_line

NAME = "kvr_mpi"
PROGRESS, EXIT = f"{NAME}.progress", f"{NAME}.exit"  # documents, with `record.document`; the last line


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records have the attribute `rank`.

    is_on : if False, nothing is logged.
    """

    def __init__(self, rank: int = 0, name: str = NAME, *, is_on: bool = True) -> None:
        super().__init__(logging.getLogger(name), {"rank": rank})
        self.rank, self._is_on = rank, is_on

    @property
    def root(self) -> RankLogger:
        """This logger on rank 0, one that logs nothing on the others."""
        return self.only(self.rank == 0)

    def only(self, is_on: bool) -> RankLogger:
        """Return this logger, or one that logs nothing."""
        return self if is_on else SILENT

    def named(self, name: str) -> RankLogger:
        """Return the rank's logger of another name."""
        return RankLogger(self.rank, name, is_on=self._is_on)

    def end(self, code: int, about: str = "", meaning: str = "") -> None:
        """Log what an exit code means, as the last line."""
        level = {EXIT_OK: logging.INFO, EXIT_STOPPED: logging.WARNING}.get(code, logging.ERROR)
        self.named(EXIT).log(level, exit_line(code, about, meaning))

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        """Whether records of this level are logged."""
        return self._is_on and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the rank to a record's own attributes."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


SILENT = RankLogger(is_on=False)
