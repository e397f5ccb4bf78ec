"""Functions shared by the commands that run on all ranks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvr_mpi.cli.log_lines import Level
    from kvr_mpi.errors import TransportError
    from kvr_mpi.logs import RankLogger
    from kvr_mpi.model import LoadedModel
    from kvr_mpi.transport import Transport


def run_guarded(world: Transport, work: Callable[[], int], level: Level = "normal") -> int:
    """Run a function on this rank; if only this rank fails, or another rank hangs, end all ranks with an exit code.

    Shows the log from `level` on, whose last lines are the error and the exit code's meaning, even after Ctrl-C.
    """
    from kvr_mpi.cli.environment import read_peer_timeout
    from kvr_mpi.cli.log_lines import show_log
    from kvr_mpi.disk import named_error
    from kvr_mpi.errors import EXIT_BUG, EXIT_INTERRUPTED, KvrError
    from kvr_mpi.logs import RankLogger
    from kvr_mpi.transport import FailedTogetherError
    from kvr_mpi.transport.liveness import heartbeat

    _dump_stacks_on_signal()
    show_log(level, world.rank)
    logger = RankLogger(world.rank)

    def report(error: Exception, code: int) -> None:
        if isinstance(error, KvrError):
            logger.error(str(error))
        else:
            logger.error("bug in kvr-mpi, or failure of the machine:", exc_info=error)
        logger.end(code, meaning=getattr(error, "meaning", ""))

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
        logger.root.end(EXIT_INTERRUPTED)
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


def load_everywhere(
    world: Transport,
    path: str,
    dtype: str,
    device: str,
    *,
    kernels: str = "measured",
    logger: RankLogger | None = None,
) -> LoadedModel:
    """Load a model on every rank, for commands that do not run a job."""
    import torch

    from kvr_mpi.cli.environment import read_environment
    from kvr_mpi.cli.log_lines import quiet_libraries
    from kvr_mpi.logs import SILENT
    from kvr_mpi.runtime.loading import load_on_all
    from kvr_mpi.topology import cores_per_rank

    quiet_libraries(world.rank)
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
        logger=logger or SILENT,
    )


def open_links(world: Transport, loaded: LoadedModel, wanted: str, logger: RankLogger) -> Transport:
    """Open the transport for tensors, and log which one was chosen."""
    from typing import cast

    from kvr_mpi.transport.choose import TransportName, open_transport

    transport, reason = open_transport(world, cast(TransportName, wanted), loaded.device, logger=logger)
    logger.root.info(reason)
    return transport


def open_model_job(
    world: Transport, job: Path | None, settings: Sequence[str], logger: RankLogger
) -> tuple[LoadedModel, Transport]:
    """Load a job's model on every rank, and open its transport; one rank reads the job (`options.load_model_job`)."""
    from kvr_mpi.cli.options import load_model_job
    from kvr_mpi.job import JobSpec
    from kvr_mpi.transport import on_root, share_json

    text = share_json(world, on_root(world, lambda: load_model_job(job, settings).model_dump_json()))
    spec = JobSpec.model_validate_json(text)
    model = spec.model
    loaded = load_everywhere(world, model.path, model.dtype, model.device, kernels=model.kernels)
    return loaded, open_links(world, loaded, spec.parallel.transport, logger)
