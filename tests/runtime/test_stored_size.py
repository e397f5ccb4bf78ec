"""What a job with keys and values says it will write, and that it does not begin what the disk has no room for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import kvr_mpi.runtime.stored_size as stored_size
from kvr_mpi.cli.plan import plan

KV = "output.kv=true"


def test_the_forecast_is_what_is_written(job: Path, run_job: Any) -> None:
    run = run_job(2, KV)
    told = re.search(r"of 5 documents: about ([\d.]+) KiB; [\d.]+ [GT]iB are free", run.log)
    assert told is not None, run.log
    # 3 layers, 2 heads of 8 elements, keys and values, float32; of the last token there are none.
    tokens = sum(record.prompt_tokens + record.new_tokens for record in run.records.values())
    assert float(told[1]) == pytest.approx(tokens * 3 * 2 * 8 * 2 * 4 / 1024, rel=0.05)
    # A plan says the same, without a model.
    words = [str(job), "--ranks", "2", "--hardware", "h200", "--json"]
    planned, without = (CliRunner().invoke(plan, [*words, *more]).stdout for more in (["--set", KV], []))
    assert json.loads(planned)["kv_bytes"] / 1024 == pytest.approx(float(told[1]), rel=0.05)
    assert json.loads(without)["kv_bytes"] is None


@pytest.mark.parametrize(("free", "words"), [(100_000, "98 KiB are free"), (None, "it existed when")])
def test_what_the_disk_has_no_room_for_is_refused_before_it_begins(
    run_job: Any, monkeypatch: pytest.MonkeyPatch, free: int | None, words: str
) -> None:
    def usage(path: Path) -> Any:
        if free is None:
            raise FileNotFoundError(2, "No such file or directory")
        return SimpleNamespace(free=free)

    monkeypatch.setattr(stored_size.shutil, "disk_usage", usage)
    run = run_job(2, KV, code=78)
    assert words in run.log and not list(run.folder.glob("*.h5"))
