"""The errors that a user can cause, with their exit codes.

    KvrError                 1   a bug, or an error of no other class
    ├── DocumentError       65   one document cannot be processed; the batch continues
    ├── DataError           65   a file to read is damaged or foreign
    │   ├── ForeignError         ... intact, but written by another program or a newer version
    │   └── MissingError    78   ... does not exist: the command, as written, cannot be run
    ├── UnavailableError    75   a file or folder cannot be read now: it may be intact; also an `OSError`
    ├── AgreementError       1   ranks of a chain were about to compute different things
    ├── TransportError      69   no usable way for the ranks to communicate
    └── ConfigError         78   the job, as written, cannot be run
        ├── CorpusError          ... because of its documents
        ├── ModelError           ... because of its model
        ├── OutputError          ... because of its output folder or file
        │   └── WriteError               ... which can no longer be written; stored results are safe
        └── PartitionError       ... because of its slices

A message says what happened, the value, the valid choices, and the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_BAD_DATA = 65
EXIT_NO_TRANSPORT = 69
EXIT_STOPPED = 75  # not an error: the job was told to stop, or ran out of time; it can be resumed
EXIT_CONFIG = 78
EXIT_INTERRUPTED = 130  # by Ctrl-C

NOT_NOW = "cannot be read now: "  # begins the error of a document that the next start of the job tries again

# Meanings in the last line of a job; the lines above it have the details.
MEANINGS = {
    EXIT_OK: "done",
    EXIT_BUG: "a bug in kvr-mpi, or a machine failure",
    EXIT_USAGE: "wrong arguments",
    EXIT_BAD_DATA: "done, but some documents have error records",
    EXIT_NO_TRANSPORT: "the ranks cannot communicate",
    EXIT_STOPPED: "stopped before the end; the same command with --resume continues",
    EXIT_CONFIG: "the job cannot be run as written",
    EXIT_INTERRUPTED: "interrupted at once (Ctrl-C); a job keeps what it has stored, and --resume continues it",
}


def exit_line(code: int, about: str = "", meaning: str = "") -> str:
    """Describe an exit code in one line; `meaning` overrides the default meaning."""
    meaning = meaning or MEANINGS.get(code, "ended by something else")
    return f"exit code {code}: {meaning}" + (f"; {about}" if about else "")


def printable(text: str, keep: str = "\n\t") -> str:
    """Escape characters that control a terminal, except those in `keep`."""
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 document``, ``2,000 documents``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def choices(values: Sequence[object]) -> str:
    """List values to choose from: ``1, 2 or 'auto'``."""
    *most, last = map(repr, values)
    return f"{', '.join(most)} or {last}" if most else last


def problems(found: Sequence[object]) -> str:
    """List all problems of a job in one message."""
    return (
        str(found[0])
        if len(found) == 1
        else f"{len(found)} problems with this job:" + "".join(f"\n- {one}" for one in found)
    )


def listed(errors: Mapping[str, str], most: int = 5) -> str:
    """List the first `most` documents with errors, one per line, with the reason."""
    lines = [f"  {printable(name)}: {printable(why)}" for name, why in islice(errors.items(), most)]
    return "\n".join(lines + [f"  ... and {len(errors) - most:,} more"] * (len(errors) > most))


class KvrError(Exception):
    """Base of all errors whose message is meant for the user."""

    exit_code = EXIT_BUG
    meaning = ""  # for the last line of a job; default: that of the exit code

    def __str__(self) -> str:
        """Return the message, made `printable` since it may quote any file."""
        return printable(super().__str__())


class DocumentError(KvrError):
    """One document cannot be processed; it becomes an error record."""

    exit_code = EXIT_BAD_DATA


class DataError(KvrError):
    """A file is damaged, foreign, or invalid."""

    exit_code = EXIT_BAD_DATA
    meaning = "a file is damaged, missing, or was written by another program"


class ForeignError(DataError):
    """A file was written by another program, or by a newer version of this one."""


class MissingError(DataError):
    """A file or folder does not exist."""

    exit_code = EXIT_CONFIG
    meaning = ""


class UnavailableError(KvrError, OSError):
    """A file or folder cannot be read now, because of a network file system, for example; it may well be intact.

    Since it is an `OSError`, whoever can do without a file treats it as missing.
    """

    exit_code = EXIT_STOPPED
    meaning = "a file cannot be read now; the same command with --resume continues"


def record_error(error: Exception) -> str:
    """Return the error of a document's record; marked if it may go away (`NOT_NOW`)."""
    return f"{NOT_NOW}{error}" if isinstance(error, UnavailableError) else str(error)


class AgreementError(KvrError):
    """Ranks disagree about a prompt: the job ends before an answer is stored under another document's name."""


class TransportError(KvrError):
    """The ranks cannot communicate: no MPI, or a launcher that does not match it.

    found : what happened.
    remedy : what to do about it, if known.
    """

    exit_code = EXIT_NO_TRANSPORT

    def __init__(self, found: str, remedy: str = "") -> None:
        super().__init__(f"{found}; {remedy}" if remedy else found)
        self.found, self.remedy = found, remedy


class ConfigError(KvrError):
    """The job cannot be run as written."""

    exit_code = EXIT_CONFIG


class CorpusError(ConfigError):
    """The documents are missing, or there are none."""


class ModelError(ConfigError):
    """The model cannot be found, loaded, or run in the chosen way."""


class OutputError(ConfigError):
    """A file or folder cannot be written, or must not be, since results would be lost, hidden or mixed."""

    meaning = "the output folder or file cannot be used"


class WriteError(OutputError):
    """The output folder can no longer be written: the disk is full or gone. Stored results are safe."""

    meaning = "results cannot be written (--resume continues)"


class PartitionError(ConfigError):
    """The slices do not cover the prompt, or one of them is empty."""
