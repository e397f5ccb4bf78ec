"""Every setting of a job on pretended GPUs, whose NCCL refuses host memory: one CPU's answers, or the same refusal.

Two ranks are two GPUs, each on a host of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs_together import TOGETHER, Bench, check, prepare_places
from pretended_cuda import PretendedCuda


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Any:
    return prepare_places(tmp_path_factory.mktemp("together"), tiny_model_dir)


# The jobs that show all pairs take minutes; two of them are run where tests may not take hours.
JOBS = [
    pytest.param(names, marks=pytest.mark.long if number > 1 else pytest.mark.slow)
    for number, names in enumerate([("planned",), *TOGETHER])
]


@pytest.mark.parametrize("names", JOBS, ids="+".join)
def test_settings_together_on_gpus(
    names: tuple[str, ...],
    prepared: Any,
    gpus: PretendedCuda,
    run_on_gpus_here: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs of one rank run on a CPU, all others on GPUs."""
    gpus.watches = False
    folder, base, places, truths = prepared
    check(Bench(folder, run_on_gpus_here, monkeypatch, base, places, truths), names)
