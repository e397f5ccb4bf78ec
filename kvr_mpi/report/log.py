"""Whole lines, each with its time, and on ranks other than 0 with rank and host."""

from __future__ import annotations

import socket
import sys
from datetime import datetime
from typing import TextIO


class Log:
    """Lines on standard error.

    Parameters
    ----------
    rank, size : int
        This rank, and how many there are; rank 0 needs no naming.
    """

    def __init__(self, rank: int = 0, size: int = 1, stream: TextIO | None = None) -> None:
        self._rank, self._size, self._stream = rank, size, stream or sys.stderr

    def line(self, text: str) -> None:
        """Write one line, at once and in one piece."""
        who = f" rank {self._rank} {socket.gethostname()}" if self._rank else ""
        for row in text.splitlines() or [""]:
            self._stream.write(f"[{datetime.now():%Y-%m-%d %H:%M:%S}{who}] {row}\n")
        self._stream.flush()

    def root(self, text: str) -> None:
        """Write one line on rank 0 only."""
        if self._rank == 0:
            self.line(text)
