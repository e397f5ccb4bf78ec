"""torch's CUDA build, as it is in its wheel: what is asked of it is there, and what it compiles fits a GPU.

``make test-long PARTS=wheel`` installs it into an environment of its own (5 GB), and names that environment's Python.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from constants import ROOT

PYTHON = os.environ.get("KVR_TEST_CUDA_PYTHON", "")
CHECK = Path(__file__).parent / "check_wheel.py"


def check(*words: str) -> list[dict[str, Any]]:
    if not PYTHON:
        pytest.skip("KVR_TEST_CUDA_PYTHON names no Python with torch's CUDA wheel")
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([PYTHON, CHECK, *words], capture_output=True, text=True, check=False, env=environ)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.long
def test_all_names_are_in_the_wheel() -> None:
    (found,) = check()
    assert found["cuda"] and not found["missing"]


@pytest.mark.long
@pytest.mark.parametrize("capability", ["80", "86", "90"])
def test_flex_attention_is_compiled_and_fits(capability: str) -> None:
    found = check(capability)
    assert len(found) == 5 and all(one["fits"] for one in found)
