"""torch's CUDA build, as it is in its wheel: what is asked of it is there, and what it compiles fits a GPU.

``make cuda-wheel`` installs it into an environment of its own (5.6 GB).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from constants import ROOT

PYTHON = os.environ.get("KVR_TEST_CUDA_PYTHON", "")
CHECK = Path(__file__).parent / "check_wheel.py"


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="torch's CUDA wheel is not installed (make cuda-wheel)")
@pytest.mark.parametrize(("capability", "findings"), [("", 1), ("80", 7), ("86", 7), ("90", 7)])
def test_our_calls_suit_the_wheel_and_what_is_compiled_fits(capability: str, findings: int) -> None:
    run = subprocess.run(
        [PYTHON, CHECK, *([capability] if capability else [])],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == findings and all(each["is_well"] for each in found), found
