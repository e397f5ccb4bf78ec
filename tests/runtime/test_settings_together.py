"""Settings of a job by twos: each pair is refused by name before anything loads, or gives what it gives on one rank.

The settings are in `jobs_together`; which pairs are refused is in `kvr_mpi.job.combinations`. Those that are not run
several at once, in jobs of up to twelve settings on two ranks. A job's truth is the same on one rank without the ways;
of what is only kept, the answers are also those of the job that keeps nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs_together import REFUSED, TOGETHER, Bench, check, prepare_places


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Any:
    return prepare_places(tmp_path_factory.mktemp("together"), tiny_model_dir)


@pytest.fixture
def bench(prepared: Any, run_here: Any, monkeypatch: pytest.MonkeyPatch) -> Bench:
    folder, base, places, truths = prepared
    return Bench(folder, run_here, monkeypatch, base, places, truths)


@pytest.mark.slow
@pytest.mark.parametrize("names", [*REFUSED, *TOGETHER], ids="+".join)
def test_settings_together_are_refused_or_change_nothing(bench: Bench, names: tuple[str, ...]) -> None:
    check(bench, names)
