"""Functions shared by the commands that run on all ranks."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvr_mpi.errors import Say, TransportError
    from kvr_mpi.model import LoadedModel
    from kvr_mpi.report.log import Log
    from kvr_mpi.transport import Transport


# Warnings of transformers about what kvr-mpi checks itself: unused tensors, and the length of prompts.
_CHECKED = re.compile("LOAD REPORT|Token indices sequence length")
MOST_WARNING = 400  # characters


def run_guarded(world: Transport, work: Callable[[], int]) -> int:
    """Run a function on this rank; if only this rank fails, or another rank hangs, end all ranks with an exit code.

    The last log lines describe the error and the meaning of the exit code, even after Ctrl-C.
    """
    from kvr_mpi.cli.environment import read_peer_timeout
    from kvr_mpi.disk import named_error
    from kvr_mpi.errors import EXIT_BUG, EXIT_INTERRUPTED, KvrError, exit_line
    from kvr_mpi.report.log import Log
    from kvr_mpi.transport import FailedTogetherError
    from kvr_mpi.transport.liveness import heartbeat

    _dump_stacks_on_signal()
    log = Log(world.rank)

    def report(error: Exception, code: int) -> None:
        text = f"error: {error}"
        if not isinstance(error, KvrError):
            text = "bug in kvr-mpi, or failure of the machine:\n" + "".join(format_exception(error)).rstrip()
        log.line(f"{text}\n{exit_line(code, meaning=getattr(error, 'meaning', ''))}")

    def end(error: TransportError) -> None:
        report(error, error.exit_code)
        world.abort(error.exit_code)

    try:
        with heartbeat(world, end, limit_s=read_peer_timeout()):
            return work()
    except FailedTogetherError as error:
        if error.cause is not None:
            report(error.cause, error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        log.root(exit_line(EXIT_INTERRUPTED))
        raise
    except Exception as error:
        named = named_error(error)
        code = named.exit_code if isinstance(named, KvrError) else EXIT_BUG
        report(named, code)
        world.abort(code)
        return code


def _dump_stacks_on_signal() -> None:
    """Write all threads' stacks to standard error on ``SIGUSR1``, to diagnose a hanging rank."""
    import faulthandler
    import signal
    import sys

    if sys.__stderr__ is not None and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        with contextlib.suppress(ValueError, OSError):  # stderr may have no file descriptor
            faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while libraries are imported, and exclude their objects from later collections.

    There are about a million such objects; collecting took a sixth of the time to import torch and transformers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def quiet_libraries(say: Say | None = None) -> None:
    """Disable transformers' progress bars and hints, and log its warnings and Python's, each once.

    say : logs a line, on one rank; without it, warnings of transformers are dropped.
    """
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.disable_default_handler()
    transformers.logging.set_verbosity_warning()
    libraries = [logging.getLogger("transformers"), logging.getLogger("py.warnings")]
    if say is None:
        libraries[0].addHandler(logging.NullHandler())
        return
    logging.captureWarnings(True)
    handler = _Once(say)
    for library in libraries:
        for earlier in [each for each in library.handlers if isinstance(each, _Once)]:
            library.removeHandler(earlier)
        library.addHandler(handler)


class _Once(logging.Handler):
    """Logs each warning of a library once; warnings that differ only in numbers count as one."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._say, self._logged = say, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Log a warning, unless it has been logged, or is about what kvr-mpi checks itself."""
        text = " ".join(record.getMessage().split())
        kind = re.sub(r"\d+", "#", text)
        if kind not in self._logged and not _CHECKED.search(text):
            self._logged.add(kind)
            library = record.name.partition(".")[0].replace("py", "Python")
            with contextlib.suppress(ValueError):  # the log of a command that has ended, in the same process, is closed
                self._say(f"warning: {library}: {text[:MOST_WARNING]}")


def load_everywhere(
    world: Transport,
    path: str,
    dtype: str,
    device: str,
    *,
    kernels: str = "measured",
    say: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a model on every rank, for commands that do not run a job."""
    import torch

    from kvr_mpi.cli.environment import read_environment
    from kvr_mpi.report.log import Log
    from kvr_mpi.setup.loading import load_on_all
    from kvr_mpi.topology import cores_per_rank

    quiet_libraries(None if world.rank else Log().line)
    machine = read_environment()
    torch.set_num_threads(machine.threads or cores_per_rank(machine.cores, world.local_size))
    return load_on_all(
        world,
        path,
        dtype=dtype,
        device=device,
        offline=machine.offline,
        cache_dir=machine.cache_dir,
        kernels=kernels,
        say=say if world.rank == 0 else None,
    )


def open_links(world: Transport, loaded: LoadedModel, wanted: str, log: Log, *, every_pair: bool = False) -> Transport:
    """Open the transport for tensors, and log which one was chosen; for `every_pair` see `choose.warm_up`."""
    from typing import cast

    from kvr_mpi.transport.choose import TransportName, open_transport

    transport, reason = open_transport(world, cast(TransportName, wanted), loaded.device, every_pair=every_pair)
    log.root(reason)
    return transport


def open_model_job(
    world: Transport, job: Path | None, settings: Sequence[str], log: Log
) -> tuple[LoadedModel, Transport]:
    """Load a job's model on every rank, and open its transport; one rank reads the job (`options.load_model_job`)."""
    from kvr_mpi.cli.options import load_model_job
    from kvr_mpi.job import JobSpec
    from kvr_mpi.transport import on_root, share_json

    text = share_json(world, on_root(world, lambda: load_model_job(job, settings).model_dump_json()))
    spec = JobSpec.model_validate_json(text)
    model = spec.model
    loaded = load_everywhere(world, model.path, model.dtype, model.device, kernels=model.kernels)
    return loaded, open_links(world, loaded, spec.parallel.transport, log)
