"""The ranks of a Python program: those of a communicator, all that a launcher started, or this process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvr_mpi.cli.environment import configure_libraries
from kvr_mpi.errors import EXIT_BUG, KvrError
from kvr_mpi.logs import RankLogger
from kvr_mpi.transport import FailedTogetherError, Transport
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.transport.mpi import adopt, connect


def join_ranks(comm: Any = None) -> Transport:
    """Connect the ranks that work together; all of them call this.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm or Transport, optional
        Default: all ranks that a launcher started; without a launcher this process alone.

    Raises
    ------
    TransportError
        If launcher and MPI do not match, or the communicator cannot be used.
    """
    configure_libraries()
    if comm is None:
        return connect()
    return comm if isinstance(comm, LocalTransport) else adopt(comm)


def leave_bars_to_rank_0(world: Transport, environ: Mapping[str, str] = os.environ) -> None:
    """Disable transformers' progress bars on the other ranks' processes, unless the user has set them."""
    if world.rank and not isinstance(world, LocalTransport) and "HF_HUB_DISABLE_PROGRESS_BARS" not in environ:
        import transformers

        transformers.logging.disable_progress_bar()


@contextmanager
def ending_all(world: Transport) -> Iterator[None]:
    """Raise an error on every rank if all ranks know of it; end all ranks if only one does.

    Raises
    ------
    KvrError
        On the rank where the error occurred.
    FailedTogetherError
        On the other ranks.
    """
    try:
        yield
    except FailedTogetherError as error:
        shown = error.cause or FailedTogetherError(error.exit_code, None)
        # For a user's mistake the message is sufficient; a traceback would not help.
        raise shown.with_traceback(None if isinstance(shown, KvrError) else shown.__traceback__) from None
    except Exception as error:
        if world.size > 1:
            code = error.exit_code if isinstance(error, KvrError) else EXIT_BUG
            RankLogger(world.rank).error(f"{error}; ending all ranks, which would otherwise wait for this one")
            world.abort(code)
        raise
