"""Damaged and hostile files of every kind end in an error of the program's own, or are read as they were written.

`make test-long PARTS=fuzz FILES=10000` reads more of them; see ``driver``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_no_file_ends_in_anything_but_an_error_or_the_truth() -> None:
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, HERE / "driver.py", "25"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
