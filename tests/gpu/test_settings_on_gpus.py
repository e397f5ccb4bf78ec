"""Every setting of a job on pretended GPUs, whose NCCL refuses host memory: one CPU's answers, or the same refusal.

Two ranks are two GPUs, each on a host of its own. On a machine with a GPU, two threads share it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_together import TOGETHER, Bench, check, prepare_places
from pretended_cuda import PretendedCuda


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, small_vocabulary_dir: Path) -> Any:
    return prepare_places(tmp_path_factory.mktemp("together"), small_vocabulary_dir)


@pytest.fixture
def bench(prepared: Any, run_here: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Jobs of one rank run on a CPU, all others on GPUs."""
    folder, base, places, truths = prepared
    if torch.cuda.is_available():

        def launch_on_one(ranks: int, arguments: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
            done: subprocess.CompletedProcess[str] = run_here(
                ranks, [*arguments, "--set", f"model.device={'cpu' if ranks == 1 else 'cuda'}"]
            )
            return done

        return Bench(folder, launch_on_one, monkeypatch, base, places, truths)
    gpus: PretendedCuda = request.getfixturevalue("gpus")
    gpus.watches = False
    launch = request.getfixturevalue("run_on_gpus_here")
    return Bench(folder, launch, monkeypatch, base, places, truths)


# The jobs that show all pairs take minutes; two of them are run where tests may not take hours.
JOBS = [
    pytest.param(names, marks=pytest.mark.long if number > 1 else pytest.mark.slow)
    for number, names in enumerate([("planned",), *TOGETHER])
]


@pytest.mark.parametrize("names", JOBS, ids="+".join)
def test_settings_together_on_gpus(names: tuple[str, ...], bench: Bench) -> None:
    if "samples" in names and torch.cuda.is_available():
        pytest.skip("a GPU draws other random numbers than a CPU")
    check(bench, names)
