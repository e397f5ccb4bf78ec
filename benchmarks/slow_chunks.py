"""A chain in chunks against the same chain at once, on hosts with a slow link between them.

As root (`hosts`). The pairs are those of `benchmarks.chunks`, one rank and one core a host.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hosts import hosts, run_mpi, shape, why_not
from benchmarks.options import make_parser

PROGRAM = [sys.executable, "-m", "benchmarks", "chunks"]
MBIT = 1_000_000
# What is to be reached: of the time at once.
MOST_TIME = 0.95


def main(arguments: Sequence[str]) -> int:
    """Measure and print.

    Returns
    -------
    int
        Exit status: 0, 1 if it failed, 78 if this machine cannot make hosts.
    """
    parser = make_parser("slow-chunks", __doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunks", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=int, default=100, help="of each host's link, both ways")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=7200, help="seconds for all of it")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        print(f"slow-chunks: {reason}", file=sys.stderr)
        return 78
    command: list[str | Path] = [*PROGRAM, "--tokens", str(given.tokens), "--chunks", str(given.chunks)]
    command += ["--pairs", str(given.pairs), "--most-time", str(MOST_TIME)]
    command += ["--json", given.json.resolve()] if given.json else []
    with hosts(given.hosts) as group:
        for host in group:
            shape(host, given.mbit * MBIT)
        print(f"{given.hosts} hosts, {given.mbit} Mbit/s", flush=True)
        try:
            done = run_mpi(group, command, timeout_s=given.timeout, on_line=print)
        except subprocess.TimeoutExpired:
            print(f"slow-chunks: did not finish within {given.timeout:.0f} s (--timeout)", file=sys.stderr)
            return 1
    return int(done.returncode != 0)
