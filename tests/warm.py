"""Ranks that start without importing: forked from a process that has imported torch and transformers already.

Most of a disturbed job's time is importing, several times over, on every rank. Here a rank is started by a real
``mpirun`` as ever, but what it starts (``run_warm.py``) hands its place on: a server forks a rank that has its
arguments, its environment and its open files, those of the process manager too. From then on the rank is a process like
any other, which MPI initialises, and which is killed, stopped and told to end. What `mpirun` started stands for it:
signals that it gets are sent on, it ends as the rank ends, and if it is killed, so is the rank.

Nothing of MPI is imported, and no thread started, before a rank is forked.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

# What every rank imports, but for mpi4py's MPI, which would be initialised.
MODULES = (
    "h5py",
    "scipy.optimize",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation.utils",
    "kvr_mpi.runtime.batch",
)
MOST_FILES = 64


@contextmanager
def server(preload: Path | None = None) -> Iterator[list[str]]:
    """Start a server; yields what to start before a program by `mpirun`: without a server, Python.

    preload : a library that the server, and so every rank, has loaded before any other.
    """
    if not can_watch():
        yield [sys.executable]
        return
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "warm"
        own = {"OMP_NUM_THREADS": "1"} | ({} if preload is None else {"LD_PRELOAD": str(preload)})
        run = subprocess.Popen([sys.executable, __file__, str(address)], env={**os.environ, **own})
        try:
            while not address.exists():
                assert run.poll() is None, "the server has ended"
                time.sleep(0.05)
            yield [sys.executable, str(Path(__file__).with_name("run_warm.py")), str(address)]
        finally:
            run.kill()
            run.wait()


def can_watch() -> bool:
    """Whether the system tells how a process ends that is no child of whoever asks; some containers do not."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def rank_for(pid: int, words: list[str]) -> int | None:
    """Process id of the rank that a process stands for, which was started by these words; None if there is none yet."""
    at = next((number for number, word in enumerate(words) if word.endswith("run_warm.py")), None)
    if at is None:
        return pid
    try:
        return int(Path(f"{words[at + 1]}.{pid}").read_text())
    except (OSError, ValueError):
        return None


def serve(address: str) -> NoReturn:
    """Fork ranks for whoever asks, until the socket's other end is closed for good: by killing this process."""
    for name in MODULES:
        importlib.import_module(name)
    # A table that loading a model makes: a fifth of a second of each rank.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    assert "mpi4py.MPI" not in sys.modules, "ranks would share one MPI"
    assert threading.active_count() == 1, "only this thread would be forked"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    watched = selectors.DefaultSelector()
    watched.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in watched.select():
            if key.fileobj is listening:
                _begin(listening.accept()[0], watched)
            elif isinstance(key.fileobj, socket.socket):  # who asked for the rank is gone, or says what it has to say
                if key.fileobj.fileno() >= 0:  # otherwise the rank has ended in the same moment
                    _relay(key.fileobj, key.data)
                    watched.unregister(key.fileobj)
            else:
                _end(key, watched)


def _begin(asking: socket.socket, watched: selectors.BaseSelector) -> None:
    """Fork a rank; only in the server this returns."""
    try:
        told, files = _receive(asking)
    except (OSError, ValueError):  # killed while it asked
        asking.close()
        return
    pid = os.fork()
    if not pid:
        for key in list(watched.get_map().values()):  # detached: an object that is let go of would close its number
            os.close(key.fileobj.detach() if isinstance(key.fileobj, socket.socket) else key.fd)
        watched.close()
        os.close(asking.detach())
        _become(told, files)
    for file in files:
        os.close(file)
    for_whom = array.array("i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    Path(f"{asking.getsockname()}.{for_whom}").write_text(str(pid))
    _tell(asking, pid)  # if nobody listens any more, that is seen next
    watched.register(asking, selectors.EVENT_READ, pid)
    watched.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, asking))


def _relay(asking: socket.socket, pid: int) -> None:
    """Nobody stands for the rank any more."""
    with suppress(OSError):
        asking.recv(1)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _end(key: selectors.SelectorKey, watched: selectors.BaseSelector) -> None:
    """Say how a rank ended."""
    pid, asking = key.data
    watched.unregister(key.fileobj)
    os.close(key.fd)
    _, status = os.waitpid(pid, 0)
    if asking.fileno() in watched.get_map():
        watched.unregister(asking)
    _tell(asking, os.waitstatus_to_exitcode(status))
    asking.close()


def _tell(asking: socket.socket, number: int) -> None:
    with suppress(OSError):  # it is gone
        asking.sendall(f"{number}\n".encode())


def _receive(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size = array.array("i").itemsize
    data, ancillary, _, _ = asking.recvmsg(1 << 20, socket.CMSG_SPACE(MOST_FILES * size))
    files = array.array("i")
    for _, _, content in ancillary:
        files.frombytes(content[: len(content) - len(content) % size])
    while not data.endswith(b"\n"):
        more = asking.recv(1 << 20)
        if not more:
            raise ValueError("half a question")
        data += more
    return json.loads(data), list(files)


def _become(told: dict[str, Any], files: list[int]) -> NoReturn:
    """Be the rank that was asked for, from now on."""
    high = [os.dup2(file, 1000 + number) for number, file in enumerate(files)]  # out of the way of their own numbers
    for file in files:
        os.close(file)
    for file, number in zip(high, told["files"], strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.argv = told["arguments"]
    if sys.argv[0] == "-m":
        sys.path.insert(0, told["folder"])
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    serve(sys.argv[1])
