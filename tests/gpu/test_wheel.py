"""torch's CUDA build, as it is in its wheel: what is asked of it is there, and what it compiles fits a GPU.

``make test-long PARTS=wheel`` installs it into an environment of its own (5 GB), and names that environment's Python.
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
@pytest.mark.parametrize("capability", [None, "80", "86", "90"])
def test_all_names_are_in_the_wheel_and_flex_attention_is_compiled_and_fits(capability: str | None) -> None:
    if not PYTHON:
        pytest.skip("KVR_TEST_CUDA_PYTHON names no Python with torch's CUDA wheel")
    words, environ = [capability] if capability else [], os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([PYTHON, CHECK, *words], capture_output=True, text=True, check=False, env=environ)
    assert run.returncode == 0, run.stdout + run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    if capability is None:
        assert [(one["cuda"] is not None, one["missing"]) for one in found] == [(True, [])]
    else:
        assert len(found) == 5 and all(one["fits"] for one in found)
