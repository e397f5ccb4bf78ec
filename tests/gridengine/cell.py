"""A Grid Engine cell on this machine, for tests: one qmaster and one execd, with all their files in one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = Path("/usr/lib/gridengine")
SHARED = Path("/usr/share/gridengine")

BOOTSTRAP = """\
admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {spool}
binary_path {programs}
qmaster_spool_dir {root}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
# Of the packages' defaults; root may submit jobs.
CONFIGURATION = {"execd_spool_dir": "{root}/execd", "min_uid": "0", "min_gid": "0", "mailer": "/bin/true"}
SCHEDULER = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
QUEUE = {
    "qname": "all.q",
    "hostlist": "localhost",
    "load_thresholds": "NONE",
    "pe_list": "mpi",
    "slots": "8",
    "shell": "/bin/bash",
    "notify": "00:00:10",
}
PARALLEL_ENVIRONMENT = """\
pe_name mpi
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule $fill_up
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""


class Cell:
    """One host with eight slots, running from `start` to `stop`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            qmaster, execd = (str(one.getsockname()[1]) for one in sockets)
        self.environ = os.environ | {
            "SGE_ROOT": str(root),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": qmaster,
            "SGE_EXECD_PORT": execd,
            "SGE_ND": "1",  # stay in the foreground
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
        }
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Write the configuration, start both daemons, and add a queue."""
        common, spool = self.root / "default" / "common", f"{self.root}/default/common;{self.root}/qmaster"
        for folder in (common, self.root / "qmaster", self.root / "execd"):
            folder.mkdir(parents=True)
        shutil.copytree(SHARED / "util", self.root / "util")
        (common / "act_qmaster").write_text("localhost\n")
        (common / "host_aliases").write_text(f"localhost {socket.gethostname()}\n")
        (common / "bootstrap").write_text(BOOTSTRAP.format(root=self.root, spool=spool, programs=PROGRAMS))
        resources = SHARED / "util" / "resources"
        configuration = self._edited("configuration", (SHARED / "default-configuration").read_text(), CONFIGURATION)
        self.call("spoolinit", "classic", "libspoolc", spool, "init", env={"LD_LIBRARY_PATH": str(PROGRAMS)})
        self.call("spooldefaults", "configuration", configuration)
        self.call("spooldefaults", "complexes", resources / "centry")
        self.call("spooldefaults", "usersets", resources / "usersets")
        self.call("spooldefaults", "managers", "root")
        self.call("spooldefaults", "adminhosts", "localhost")
        self._start("sge_qmaster")
        self._retry("qconf", "-as", "localhost")
        self._start("sge_execd")
        self.call("qconf", "-Msconf", self._edited("scheduler", self.call("qconf", "-ssconf"), SCHEDULER))
        (environment := self.root / "pe").write_text(PARALLEL_ENVIRONMENT)
        self.call("qconf", "-Ap", environment)
        self._retry("qconf", "-Aq", self._edited("queue", self.call("qconf", "-sq"), QUEUE))

    def stop(self) -> None:
        """End all jobs and both daemons."""
        with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            self.call("qdel", "-f", "-u", "*")
        for daemon in reversed(self.daemons):  # they would write their state first, which nobody reads
            daemon.kill()
            daemon.wait()

    def call(self, *command: str | Path, env: dict[str, str] | None = None) -> str:
        """Run one of Grid Engine's commands; return its output."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.environ | (env or {}),
            cwd=self.root,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
        return done.stdout

    def submit_and_wait(self, *arguments: str | Path, timeout_s: float, env: dict[str, str] | None = None) -> None:
        """Submit a job, and wait until it or all tasks of its array have left the queue."""
        job = self.call("qsub", "-terse", *arguments, env=env).partition(".")[0].strip()
        end_s = time.monotonic() + timeout_s
        while f"{job} " in self.call("qstat"):
            if time.monotonic() > end_s:
                raise TimeoutError(f"job {job} has not ended within {timeout_s:.0f} s:\n{self.call('qstat', '-f')}")
            time.sleep(1)

    def _start(self, name: str) -> None:
        with (self.root / f"{name}.out").open("ab") as log:
            daemon = subprocess.Popen([PROGRAMS / name], env=self.environ, stdout=log, stderr=log, cwd=self.root)
        self.daemons.append(daemon)

    def _retry(self, *command: str | Path) -> None:
        """Run a command until it succeeds, since a daemon needs a moment to start."""
        for _ in range(100):
            with contextlib.suppress(subprocess.CalledProcessError):
                self.call(*command)
                return
            time.sleep(0.2)
        self.call(*command)

    def _edited(self, name: str, text: str, changes: dict[str, str]) -> Path:
        """Write a configuration with other values, and return its file."""
        lines = []
        for line in text.splitlines():
            key = line.partition(" ")[0]
            lines.append(f"{key} {changes[key].format(root=self.root)}" if key in changes else line)
        (path := self.root / name).write_text("\n".join(lines) + "\n")
        return path
