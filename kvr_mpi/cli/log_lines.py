"""How the commands show log records: as lines on standard error, such as ``[2026-05-04 10:00:00 rank 3 node7] ...``."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import sys
from datetime import datetime
from traceback import format_exception
from typing import Literal

from kvr_mpi.logs import EXIT, NAME, PROGRESS

Level = Literal["quiet", "normal", "verbose"]
LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "verbose": logging.DEBUG}
# Warnings of transformers about what kvr-mpi checks itself: unused tensors, and the length of prompts.
_CHECKED = re.compile("LOAD REPORT|Token indices sequence length")
MOST_WARNING = 400  # characters


class LineHandler(logging.Handler):
    """Writes records to what is standard error at the time.

    rank : of records of libraries; rank 0 is not named in lines.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record at once."""
        with contextlib.suppress(OSError, ValueError):  # a job continues if standard error is closed
            sys.stderr.write(self.format(record))
            sys.stderr.flush()

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + "".join(format_exception(record.exc_info[1])).rstrip()
        if not record.name.startswith(NAME):
            library = record.name.partition(".")[0].replace("py", "Python")
            text = f"{library}: {' '.join(text.split())[:MOST_WARNING]}"
        if record.levelno >= logging.WARNING and record.name not in (PROGRESS, EXIT):
            text = f"{record.levelname.lower()}: {text}"
        rank = getattr(record, "rank", self._rank)
        who = f" rank {rank} {socket.gethostname()}" if rank else ""
        stamp = f"[{datetime.fromtimestamp(record.created):%Y-%m-%d %H:%M:%S}{who}]"
        return "".join(f"{stamp} {row}\n" for row in text.splitlines() or [""])


def show_log(level: Level = "normal", rank: int = 0) -> None:
    """Show the records of this process, from a level on; `EXIT` always."""
    _attach(NAME, LineHandler(rank))
    logging.getLogger(NAME).setLevel(LEVELS[level])
    logging.getLogger(EXIT).setLevel(logging.INFO)


def quiet_libraries(rank: int = 0) -> None:
    """Disable transformers' progress bars and hints; show Python's warnings, and on rank 0 transformers', each once."""
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.disable_default_handler()
    transformers.logging.set_verbosity_warning()
    logging.captureWarnings(True)
    handler, seen = LineHandler(rank), set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        kind = re.sub(r"\d+", "#", record.getMessage())  # whatever numbers it has
        is_known = kind in seen or _CHECKED.search(kind) is not None
        seen.add(kind)
        return not is_known

    handler.addFilter(is_new)
    _attach("py.warnings", handler)
    if rank:
        logging.getLogger("transformers").addHandler(logging.NullHandler())
    else:
        _attach("transformers", handler)


def _attach(name: str, handler: LineHandler) -> None:
    """Give a logger this handler instead of that of an earlier command in the same process."""
    logger = logging.getLogger(name)
    for earlier in [each for each in logger.handlers if isinstance(each, LineHandler)]:
        logger.removeHandler(earlier)
    logger.addHandler(handler)
