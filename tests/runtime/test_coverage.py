"""No answer hides that it has seen only a part of its document."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kvr_mpi
from kvr_mpi import Results
from kvr_mpi.cli import group
from kvr_mpi.transport.local import run_local

Run = Callable[..., Results]
TEXT = "The ferry left at seven and the harbour was quiet. "


@pytest.fixture
def run(tmp_path: Path, small_vocabulary_dir: Path) -> Run:
    """Run a job over a short and a long document with some settings."""
    for name, count in (("short", 1), ("long", 20)):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / f"{name}.txt").write_text(TEXT * count)
    job: dict[str, Any] = {
        "model": {"path": str(small_vocabulary_dir), "dtype": "float32"},
        "documents": {"path": str(tmp_path / "corpus")},
        "generation": {"max_new_tokens": 4},
        "parallel": {"partition": "even"},
        "output": {"path": str(tmp_path / "out"), "max_failed": 1},
    }

    def with_settings(*settings: str, ranks: int = 1) -> Results:
        ended = run_local(ranks, lambda world: kvr_mpi.run(job, settings=settings, comm=world, overwrite=True))
        return ended[0].open()

    return with_settings


@pytest.mark.parametrize("keep", ["head", "tail", "middle"])
def test_of_a_text_that_is_cut_the_fraction_that_is_left(run: Run, keep: str) -> None:
    whole = run()["long.txt"]
    assert whole.coverage == 1 and run()["short.txt"].coverage == 1
    cut = run(f"prompt.too_long=keep-{keep}", "prompt.max_tokens=100")
    assert cut["short.txt"].coverage == 1
    record = cut["long.txt"]
    assert record.text_tokens + record.dropped_tokens == whole.text_tokens and record.dropped_tokens > 100
    assert record.coverage == record.text_tokens / whole.text_tokens < 0.5


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_a_cache_that_drops_tokens_the_fraction_that_is_kept(run: Run, ranks: int) -> None:
    compressed = run("compress.method=streaming-llm", "compress.budget=64", ranks=ranks)
    record = compressed["long.txt"]
    assert record.coverage == record.retained_tokens / record.prompt_tokens < 0.5


def test_of_a_rolling_cache_that_drops_tokens_the_fraction_that_it_holds(run: Run) -> None:
    settings = ("cache.kind=streaming-llm", "cache.tokens=64", "parallel.chunk_tokens=16")
    rolled = run(*settings)
    assert rolled["long.txt"].coverage == 64 / rolled["long.txt"].prompt_tokens
    assert rolled["short.txt"].coverage == 1


def test_a_split_text_is_seen_as_a_whole(run: Run) -> None:
    assert run("prompt.too_long=split", "prompt.max_tokens=100")["long.txt"].coverage == 1


@pytest.mark.parametrize(
    "settings",
    [
        ("prompt.too_long=keep-head", "prompt.max_tokens=100"),
        ("cache.kind=streaming-llm", "cache.tokens=64", "parallel.chunk_tokens=16"),
    ],
)
def test_below_the_least_coverage_a_document_is_an_error_record(run: Run, settings: tuple[str, ...]) -> None:
    found = run("prompt.min_coverage=0.8", *settings)
    assert found.ids("done") == ["short.txt"] and found.ids("error") == ["long.txt"]
    failed = found["long.txt"]
    assert "prompt.min_coverage" in failed.error and not failed.answer and failed.coverage == 0


def test_it_is_in_every_export(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("prompt.too_long=keep-head", "prompt.max_tokens=100")
    said = capsys.readouterr()
    assert "1 of 2 answers have seen only a part" in said.err and " %" in said.out
    expected = kvr_mpi.open_results(tmp_path / "out")["long.txt"].coverage
    assert dict(kvr_mpi.open_results(tmp_path / "out").to_pandas().set_index("id").coverage)["long.txt"] == expected
    for kind in ("jsonl", "csv", "parquet"):
        file = tmp_path / f"all.{kind}"
        made = CliRunner().invoke(group, ["export", str(tmp_path / "out"), "--format", kind, "-o", str(file)])
        assert made.exit_code == 0, made.output
        if kind == "jsonl":
            rows = [json.loads(line) for line in file.read_text().splitlines()]
        elif kind == "csv":
            rows = list(csv.DictReader(file.read_text().splitlines()))
        else:
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(file).to_pylist()
        assert float(next(row for row in rows if row["id"] == "long.txt")["coverage"]) == expected
    shown = CliRunner().invoke(group, ["inspect", str(tmp_path / "out"), "long.txt"])
    assert f"coverage              {expected:.4g}" in shown.output
