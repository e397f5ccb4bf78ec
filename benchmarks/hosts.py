"""Several hosts on one machine, joined by links as slow as you like: Linux network namespaces.

Each host has its own address and, in what `run_mpi` starts there, its own hostname, ``/dev/shm`` and System V
shared memory, and one core. They meet at a bridge that lies in a namespace of its own; no interface, address or
route of the machine itself is touched, and none of the hosts can reach anything but the others. Needs root.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

RSH = Path(__file__).resolve().parent / "rsh"
DEVICE = "eth0"
QUEUE_MS = 20  # what a shaped link holds before it drops
BURST_MS = 2  # what a shaped link lets through at once ...
MIN_BURST_BYTES = 128 * 1024  # ... but at least two of the kernel's largest packets
GONE_S = 10.0  # time for killed processes to be gone

# The hosts share one kernel, so UCX must be told to use nothing but the network: tcp (and self, to oneself).
MPI_ENVIRONMENT = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": DEVICE,
    "FI_PROVIDER": "tcp",  # for an MPICH that talks OFI
    "FI_TCP_IFACE": DEVICE,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",  # there is no way out of a host
}

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_serial = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Host:
    """One host of a network; hosts count from 1."""

    network: str
    number: int

    @property
    def namespace(self) -> str:
        """The namespace it lives in."""
        return f"{self.network}-host{self.number}"

    @property
    def switch(self) -> str:
        """The namespace of the bridge it is plugged into."""
        return f"{self.network}-switch"

    @property
    def port(self) -> str:
        """The bridge's end of its cable."""
        return f"port{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"


def why_not() -> str | None:
    """Say why hosts cannot be made here, or return None if they can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc", "unshare", "taskset", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian's packages iproute2, util-linux, hostname)"
    try:
        with hosts(1) as (host,):
            shape(host, 1_000_000_000)
    except RuntimeError as error:
        return f"this machine or container does not let root make or shape networks: {error}"
    mpirun = shutil.which(_mpirun())
    version = mpirun and subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if "HYDRA" not in (version or ""):
        return "needs MPICH's mpirun (hydra), as `make install MPI=mpich` takes it from the index"
    return None


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make hosts on one switch, unshaped, and remove them and every process on them in the end.

    Also after an exception, and after SIGINT, SIGTERM or SIGHUP if this is the main thread; only SIGKILL leaves
    them behind (``ip netns list`` shows them: their names begin with ``kvr-`` and the process id of their maker).

    Raises
    ------
    RuntimeError
        If the system refuses; what was made by then is removed.
    """
    if not 1 <= count <= 254:
        raise ValueError(f"{count} hosts: expected 1 to 254")
    network = f"kvr-{os.getpid()}-{next(_serial)}"
    group = [Host(network, number) for number in range(1, count + 1)]
    with _signals_as_exceptions():
        try:
            _make(group)
            yield group
        finally:
            with _signals_held():
                _remove(group)


def shape(host: Host, bits_per_s: int | None) -> None:
    """Limit a host's link, in both directions, or lift the limit; may be called while the link is in use."""
    for namespace, device in ((host.namespace, DEVICE), (host.switch, host.port)):
        where = ("-n", namespace, "qdisc")
        if bits_per_s is None:
            _tool("tc", *where, "del", "dev", device, "root", check=False)  # fails if there is no limit
            continue
        _tool("tc", *where, "replace", "dev", device, "root", *_limit(bits_per_s))


def _limit(bits_per_s: int) -> tuple[str, ...]:
    burst = max(MIN_BURST_BYTES, bits_per_s // 8 * BURST_MS // 1000)
    return "tbf", "rate", f"{bits_per_s}bit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"


class Shaper:
    """Shapes links again and again while prompts run, by one process an end that stays.

    A process for each change would take cores from the ranks, and pass for what the change does.
    """

    def __init__(self, group: Sequence[Host]) -> None:
        namespaces = {host.namespace for host in group} | {host.switch for host in group}
        self._tools = {namespace: _open_tc(namespace) for namespace in namespaces}

    def shape(self, host: Host, bits_per_s: int) -> None:
        """Limit a host's link, in both directions.

        Raises
        ------
        RuntimeError
            If an earlier change was refused.
        """
        for namespace, device in ((host.namespace, DEVICE), (host.switch, host.port)):
            tool = self._tools[namespace]
            if (tool.poll() or 0) < 0:  # being on the host, it was killed with all that ran there
                tool.communicate()
                tool = self._tools[namespace] = _open_tc(namespace)
            assert tool.stdin is not None and tool.stderr is not None
            try:
                tool.stdin.write(f"qdisc replace dev {device} root {' '.join(_limit(bits_per_s))}\n")
                tool.stdin.flush()
            except BrokenPipeError:
                if tool.wait() < 0:  # killed just now
                    continue
                raise RuntimeError(f"tc in {namespace}: {tool.stderr.read().strip()}") from None

    def close(self) -> None:
        for tool in self._tools.values():
            with suppress(BrokenPipeError):
                tool.communicate()


def _open_tc(namespace: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["tc", "-n", namespace, "-batch", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_mpi(
    group: Sequence[Host],
    command: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    *,
    timeout_s: float = 600,
    on_line: Callable[[str], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command under mpirun with one rank on each host; rank i is on core i of those this process may use.

    Parameters
    ----------
    group : sequence of Host
        Where to run.
    command : sequence of str or Path
        What to run.
    env : mapping, optional
        Added to this process's environment and `MPI_ENVIRONMENT`.
    timeout_s : float
        After this everything on the hosts is killed.
    on_line : callable, optional
        Called with each line as it is written.

    Returns
    -------
    subprocess.CompletedProcess
        Its ``stdout`` is both standard output and standard error.

    Raises
    ------
    subprocess.TimeoutExpired
        If it took too long.
    """
    launcher = [_mpirun(), "-launcher", "ssh", "-launcher-exec", str(RSH), "-disable-hostname-propagation"]
    where = ["-iface", DEVICE, "-hosts", ",".join(host.address for host in group), "-ppn", "1", "-n", str(len(group))]
    started = [str(RSH), group[0].address, shlex.join([*launcher, *where, *map(str, command)])]
    ours = {
        "NETWORK_NAME": group[0].network,
        "NETWORK_CORES": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    }
    lines: list[str] = []
    late = threading.Event()
    with subprocess.Popen(
        started,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **MPI_ENVIRONMENT, **ours, **(env or {})},
        start_new_session=True,
    ) as process:

        def expire() -> None:
            late.set()
            _kill(process.pid, group)

        timer = threading.Timer(timeout_s, expire)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if on_line is not None:
                    on_line(line.rstrip("\n"))
            code = process.wait()
        finally:
            timer.cancel()
            timer.join()
            _kill(process.pid if process.poll() is None else None, group)
    if late.is_set():
        raise subprocess.TimeoutExpired(list(map(str, command)), timeout_s, output="".join(lines))
    return subprocess.CompletedProcess(list(map(str, command)), code, "".join(lines))


def _mpirun() -> str:
    beside = Path(sys.executable).parent
    return shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}") or "mpirun"


def _tool(*command: str, check: bool = True) -> str:
    """Run ip or tc; in a session of its own, so that a terminal's Ctrl-C does not reach it halfway."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if check and done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def _make(group: Sequence[Host]) -> None:
    switch = group[0].switch
    _tool("ip", "netns", "add", switch)
    _tool("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _tool("ip", "-n", switch, "link", "set", "bridge", "up")
    for host in group:
        inside = ("ip", "-n", host.namespace)
        _tool("ip", "netns", "add", host.namespace)
        _tool(*inside, "link", "set", "lo", "up")
        # Made inside, both ends: the machine itself never has an interface of ours.
        _tool(*inside, "link", "add", DEVICE, "type", "veth", "peer", "name", host.port, "netns", switch)
        _tool("ip", "-n", switch, "link", "set", host.port, "master", "bridge", "up")
        _tool(*inside, "address", "add", f"{host.address}/24", "dev", DEVICE)
        _tool(*inside, "link", "set", DEVICE, "up")


def _remove(group: Sequence[Host]) -> None:
    try:
        _kill(None, group)
    finally:
        there = set(_existing())
        for name in [*(host.namespace for host in group), group[0].switch]:
            if name in there:
                _tool("ip", "netns", "delete", name)


def _existing() -> list[str]:
    return [line.split()[0] for line in _tool("ip", "netns", "list").splitlines() if line]


def _kill(leader: int | None, group: Sequence[Host]) -> None:
    """Kill a process group, then whatever still lives on the hosts, and wait until it is gone."""
    if leader is not None:
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    pause = threading.Event()
    there = set(_existing())
    names = [host.namespace for host in group if host.namespace in there]
    for _ in range(int(GONE_S / 0.05)):
        pids = [int(pid) for name in names for pid in _tool("ip", "netns", "pids", name, check=False).split()]
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pause.wait(0.05)
    raise RuntimeError(f"still running on the hosts after SIGKILL: {pids}")


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Let a signal unwind the stack like an exception, once: later ones wait until all is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, frame: FrameType | None) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    before = {number: signal.signal(number, unwind) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let signals wait."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
