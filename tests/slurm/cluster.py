"""A SLURM cluster on this machine, for tests: munge, slurmctld and four slurmd that pretend to 4 CPUs and 2 GPUs each.

All daemons are children of this process, in the foreground, with their files in one folder; nothing of it outlives
`Cluster.stop`. SLURM's own accounting is off, as it is on many sites: `Cluster.jobs` reads the completion log instead.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
NODES = ("n1", "n2", "n3", "n4")
CPUS_PER_NODE, GPUS_PER_NODE = 4, 2

# Over-declared CPUs (config_overrides), no cgroups, and short times: a requeued job starts again after cred_expire, a
# silent node is down after SlurmdTimeout. TmpFS differs for each node, since the PMIx plugin makes files there.
CONF = Path(__file__).with_name("slurm.conf").read_text()
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
    f"CPUs={CPUS_PER_NODE} RealMemory=4000 Gres=gpu:fake:{GPUS_PER_NODE} State=UNKNOWN"
)
# slurmd probes /sys/fs/cgroup unless told the version, though nothing of it is used.
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n"
# A GPU must be a device file; any will do, since nobody opens it.
GRES_CONF = "".join(
    f"NodeName={name} Name=gpu Type=fake File=/dev/{file}\n" for name in NODES for file in ("null", "zero")
)

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}


def missing_programs() -> list[str]:
    """Say what of SLURM and munge is not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def wait_for(what: str, look: Callable[[], T], timeout_s: float, pause_s: float = 0.1) -> T:
    """Look again and again until there is something true to see."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if found := look():
            return found
        time.sleep(pause_s)
    raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Cluster:
    """Four nodes, up from `start` to `stop`.

    Parameters
    ----------
    root : Path
        An empty folder for everything the cluster writes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        outside = {key: of for key, of in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "PMI"))}
        self.environ = {**outside, "SLURM_CONF": str(root / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Write the configuration, start all daemons, and wait until all nodes are idle."""
        for name in ("state", "log", *(f"{kind}/{node}" for kind in ("spool", "tmp") for node in NODES)):
            (self.root / name).mkdir(parents=True)
        ports, host = _free_ports(1 + len(NODES)), socket.gethostname()
        nodes = "\n".join(
            NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports[1:], strict=True)
        )
        conf = CONF.format(root=self.root, host=host, user=_user(), ports=ports, nodes=nodes)
        for name, text in {"slurm": conf, "cgroup": CGROUP_CONF, "gres": GRES_CONF}.items():
            (self.root / f"{name}.conf").write_text(text)
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munge = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{option}={self.root}/munge.{suffix}" for option, suffix in munge.items()]
        self._start("munged", ["munged", "--foreground", "--force", *files])
        wait_for("munged's socket", (self.root / "munge.socket").exists, 10)
        self._start("slurmctld", ["slurmctld", "-D"])
        for node in NODES:
            self.start_node(node)
        wait_for("four idle nodes", lambda: self.idle() == len(NODES), 30)

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._start(node, ["slurmd", "-D", "-N", node])

    def kill_node(self, node: str) -> None:
        """End a node as a power cut does: its daemon and all that it runs, without a word to anybody."""
        daemon = self.daemons.pop(node)
        mine = {pid for pid, environ in self.processes() if f"SLURMD_NODENAME={node}" in environ}
        kill_all({daemon.pid, *mine, *filter(None, map(_step_of, mine))})
        daemon.wait()

    def stop(self) -> None:
        """End all jobs and daemons, by their process ids."""
        if "slurmctld" in self.daemons:
            self.call("scancel", "--user", _user(), check=False)
            with contextlib.suppress(TimeoutError):
                wait_for("the end of all jobs", lambda: not self.call("squeue", "-h", check=False).stdout, 20)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.daemons.clear()
        kill_all(pid for pid, _ in self.processes())

    def call(self, *command: str | Path, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
        """Run one of SLURM's commands, or anything else, against this cluster."""
        run = subprocess.run(
            [str(word) for word in command],
            env={**self.environ, **options.pop("env", {})},  # type: ignore[dict-item]
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **options,  # type: ignore[call-overload]
        )
        if check and run.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))} ended with {run.returncode}: {run.stdout}{run.stderr}")
        return run

    def submit(self, *arguments: str | Path, **options: object) -> str:
        """Hand a job to sbatch and return its id."""
        return self.call("sbatch", "--parsable", *arguments, **options).stdout.strip()

    def idle(self) -> int:
        """Count the nodes that wait for work."""
        return self.call("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).stdout.count("\n")

    def show(self, job: str) -> dict[str, str]:
        """Tell what SLURM knows of a job."""
        text = self.call("scontrol", "--oneliner", "show", "job", job).stdout.splitlines()[0]
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def state(self, job: str) -> str:
        """Say how a job is: PENDING, RUNNING, COMPLETED and so on."""
        return self.show(job)["JobState"]

    def wait_ended(self, job: str, timeout_s: float) -> tuple[str, int]:
        """Wait until a job is over; its state and exit code."""
        wait_for(f"end of job {job}", lambda: self.state(job) in ENDED, timeout_s)
        shown = self.show(job)
        code, _, signalled = shown["ExitCode"].partition(":")
        return shown["JobState"], int(code) or int(signalled) and 128 + int(signalled)

    def processes(self) -> Iterator[tuple[int, list[str]]]:
        """Find the processes the jobs of this cluster have started (not its daemons): id, environment."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                is_ours = f"SLURM_CONF={self.environ['SLURM_CONF']}" in environ
                if is_ours and any(entry.startswith("SLURMD_NODENAME=") for entry in environ):
                    yield int(folder.name), environ

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(command, env=self.environ, stdout=log, stderr=log, cwd=self.root)


def make_venv(venv: Path) -> Path:
    """Make an environment that finds this one's packages, with its own programs."""
    here = Path(sys.executable)
    subprocess.run([here, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python3*/site-packages")
    (base,) = (path for path in map(Path, sys.path) if (path / "mpi4py").is_dir())
    (packages / "base.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n")
    for name in ("kvr", "kvr-run"):
        script = venv / "bin" / name
        lines = (here.parent / name).read_text().splitlines(keepends=True)
        script.write_text("".join([f"#!{venv}/bin/python\n", *lines[1:]]))
        script.chmod(0o755)
    return venv


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _free_ports(count: int) -> list[int]:
    """Find ports nobody listens on; all are held until all are found."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


def _step_of(pid: int) -> int | None:
    """The slurmstepd that has started a process."""
    with contextlib.suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return parent if Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"slurmstepd") else None
    return None
