"""How much memory a command takes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def run_and_measure(command: list[Any]) -> tuple[int, int]:
    """Return a command's exit code, and the most memory it had.

    Linux counts what a process was forked from as memory it had, so a small process starts it, not this one.
    """
    start = """if True:
        import os, subprocess, sys
        process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        print(os.waitstatus_to_exitcode(status), usage.ru_maxrss << 10)
    """
    words = [sys.executable, "-c", start, *map(str, command)]
    code, rss_bytes = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return int(code), int(rss_bytes)
