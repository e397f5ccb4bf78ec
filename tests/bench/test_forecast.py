"""``forecast`` and ``paper``: forecasts, and the paper's cells, by 15 of which the A100 profile is fitted."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from benchmarks.calibrate import calibration_cells, fit
from benchmarks.forecast import main as forecast
from benchmarks.paper_cells import paper_cells, score
from kvr_mpi.costs.hardware import load_hardware

STRATEGIES = {"single", "tsp-dense", "tsp-causal", "ring", "kvr-e", "kvr-s"}


def run(*args: str | Path, command: click.Command = forecast) -> str:
    result: Result = CliRunner().invoke(command, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_table_and_rows_say_who_wins(tmp_path: Path) -> None:
    lines = run("--ranks", "1,2", "--contexts", "8k").splitlines()
    assert "h100-80gb" in lines[0] and "not measured" in lines[0]
    assert [line.split()[:2] for line in lines[-2:]] == [["8192", "1"], ["8192", "2"]]
    assert lines[-1].split()[-1] == "kvr-s"
    args = ("--model", "llama 7b", "--hardware", "a100-80gb", "--ranks", "1,4", "--contexts", "4k,16k")
    found = json.loads(run(*args, "--json"))
    assert [(row["context_tokens"], row["ranks"]) for row in found["rows"]] == list(
        itertools.product((4096, 16384), (1, 4))
    )
    for row in found["rows"]:
        assert set(row["ttft_s"]) == (STRATEGIES if row["ranks"] > 1 else {"single"})
        assert row["winner"] == min(row["ttft_s"], key=row["ttft_s"].get)
        assert row["bound_s"] <= min(row["ttft_s"].values())
        if row["ranks"] > 1:
            assert row["efficiency"] == pytest.approx(row["ttft_s"]["single"] / row["ranks"] / row["ttft_s"]["kvr-s"])
    file = tmp_path / "rows.json"
    assert run(*args, "--json", file) == "" and json.loads(file.read_text()) == found


SHIPPED = load_hardware("a100-80gb")


def test_the_shipped_profile_is_what_the_fit_gives() -> None:
    fitted, shipped = fit(calibration_cells()).model_dump(), SHIPPED.model_dump()
    for found in (fitted, shipped):  # one level, so that approx can compare it
        found |= {
            f"{model} {key}": rate for model, rates in found.pop("for_models").items() for key, rate in rates.items()
        }
    numbers = {key for key, value in shipped.items() if isinstance(value, float)}
    assert {key: fitted[key] for key in numbers} == pytest.approx({key: shipped[key] for key in numbers}, rel=2e-3)
    assert {key: fitted[key] for key in fitted.keys() - numbers} == {
        key: shipped[key] for key in shipped.keys() - numbers
    }


def test_the_other_cells_are_forecast() -> None:
    calibrating = set(calibration_cells())
    others = score([cell for cell in paper_cells() if cell not in calibrating], SHIPPED)
    assert len(others.cells) == 30
    assert others.ttft.median is not None and others.ttft.median <= 0.03
    assert others.ttft.p90 is not None and others.ttft.p90 <= 0.08
