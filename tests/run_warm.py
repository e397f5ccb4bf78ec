"""What `mpirun` starts instead of a rank that is forked by a server: it hands its place on (``warm``)."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress


def main() -> None:
    """Ask for a rank, send signals on to it, and end as it does."""
    asked = socket.socket(socket.AF_UNIX)
    asked.connect(sys.argv[1])
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [file for file in files if _is_open(file) and file != asked.fileno()]
    told = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
    socket.send_fds(asked, [f"{json.dumps(told)}\n".encode()], files)
    answers = asked.makefile()
    rank = int(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGHUP):
        signal.signal(number, lambda told, _: _send(rank, told))
    code = answers.readline()
    if not code:
        os._exit(1)
    if int(code) < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-int(code), signal.SIG_DFL) if -int(code) not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -int(code))
    os._exit(int(code))


def _send(rank: int, told: int) -> None:
    with suppress(ProcessLookupError):  # it has ended in this moment
        os.kill(rank, told)


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:  # what the folder was listed by
        return False
    return True


main()
