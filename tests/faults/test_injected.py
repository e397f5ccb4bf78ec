"""A file that fails, once or always: see ``injection``. `make test-all` runs four cases, and
``make test-long PARTS=faults SEEDS=1-300`` those of these seeds, or ``SEEDS=17`` one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from injection import Kinds, draw, run_case
from test_faults import seeds
from warm import can_watch, server

SEEDS = os.environ.get("KVR_TEST_SEEDS") or "1-4"
ENDS = [2, *range(3, 12288, 3)]
COMPILER = shutil.which("gcc") or shutil.which("cc")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None or not can_watch(), reason="needs a C compiler, and ranks that are forked"),
]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> Iterator[Kinds]:
    from models import save_tiny_model

    folder = tmp_path_factory.mktemp("injected")
    library = folder / "injector.so"
    source = Path(__file__).with_name("injector.c")
    subprocess.run(
        [str(COMPILER), "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True
    )
    model = save_tiny_model(folder / "jobs" / "model", small_tokenizer, layers=1)
    # Answers end at many tokens, so that one shows whether the file with the ends was read.
    (ends := model / "generation_config.json").write_text(
        json.dumps(json.loads(ends.read_text()) | {"eos_token_id": ENDS})
    )
    with server(library) as starter:
        yield Kinds(folder / "jobs", model, starter)


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_a_file_that_fails_costs_nothing_but_time(seed: int, kinds: Kinds) -> None:
    name = Kinds.NAMES[seed % len(Kinds.NAMES)]
    print(run_case(kinds, name, draw(kinds[name], kinds.folder, random.Random(seed))))
