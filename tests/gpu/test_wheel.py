"""torch's CUDA build, as it is in its wheel: what is asked of it is there.

``make cuda-wheel`` installs it into an environment of its own (5.6 GB).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from constants import ROOT

PYTHON = os.environ.get("KVR_TEST_CUDA_PYTHON", "")
CHECK = Path(__file__).parent / "check_wheel.py"


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="torch's CUDA wheel is not installed (make cuda-wheel)")
def test_our_calls_suit_the_wheel() -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([PYTHON, CHECK], capture_output=True, text=True, check=False, env=environ)
    assert run.returncode == 0, run.stdout + run.stderr
