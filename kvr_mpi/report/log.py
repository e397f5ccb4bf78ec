"""Log lines with time stamps, and on ranks other than 0 with rank and host.

Lines that begin with a prefix in `LOUD` are always shown, a `Detail` only with ``--verbose``.
"""

from __future__ import annotations

import socket
import sys
import time
from datetime import datetime
from typing import Literal, TextIO

Level = Literal["quiet", "normal", "verbose"]
# Prefixes of lines that ``--quiet`` still shows: warnings, errors, and the exit code.
LOUD = ("warning: ", "error: ", "exit code ")
DOCUMENT_FAILED = ": error: "


class Detail(str):
    """A line that only ``--verbose`` shows, for developers and bug reports."""

    __slots__ = ()


class Log:
    """A log on standard error.

    Parameters
    ----------
    rank : int
        This rank; lines of rank 0 do not name it.
    level : {'quiet', 'normal', 'verbose'}
        Which lines to show.
    """

    def __init__(self, rank: int = 0, level: Level = "normal", stream: TextIO | None = None) -> None:
        self._rank, self.level, self._stream = rank, level, stream or sys.stderr
        self._began_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the log began."""
        return time.monotonic() - self._began_s

    def line(self, text: str) -> None:
        """Write a line atomically, if the log level includes it."""
        if not self._shows(text):
            return
        who = f" rank {self._rank} {socket.gethostname()}" if self._rank else ""
        for row in text.splitlines() or [""]:
            self._stream.write(f"[{datetime.now():%Y-%m-%d %H:%M:%S}{who}] {row}\n")
        self._stream.flush()

    def root(self, text: str) -> None:
        """Write one line on rank 0 only."""
        if self._rank == 0:
            self.line(text)

    def _shows(self, text: str) -> bool:
        if isinstance(text, Detail):
            return self.level == "verbose"
        return self.level != "quiet" or text.startswith(LOUD) or DOCUMENT_FAILED in text
