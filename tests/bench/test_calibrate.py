"""The A100 profile is the fit of 15 of the paper's cells, and forecasts the others."""

from __future__ import annotations

import pytest

from benchmarks.calibrate import calibration_cells, fit
from benchmarks.paper_cells import paper_cells, score
from kvr_mpi.costs.hardware import load_hardware

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
