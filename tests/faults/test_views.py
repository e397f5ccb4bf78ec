"""One rank sees other files or another clock than the rest: see ``views``.

``KVR_TEST_SEEDS=1-300`` runs other cases than the twenty of every run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest
from test_faults import seeds
from views import Place, run_case
from warm import server

SEEDS = os.environ.get("KVR_TEST_SEEDS") or "1-20"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, small_vocabulary_dir: Path) -> Iterator[Place]:
    with server() as starter:
        harness.starter[:] = starter
        made = Place(tmp_path_factory.mktemp("views"), small_vocabulary_dir)
        made.make()
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_no_answer_is_wrong_whatever_one_rank_sees(seed: int, place: Place, tmp_path: Path) -> None:
    print(run_case(seed, place, tmp_path))
