"""The paper's measurements beside the cost model's forecasts, cell by cell.

Stands on the cost model. A file of cells has the columns table, model, gpus, context_tokens, link_gb_per_s, method,
ttft_s, as ``data/paper-cells.csv`` does (KV-Runahead, Tables 1 and 3). The paper's runs are eager, in 16 bit, and
pass the prefix on whole (store-and-forward).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvr_mpi.costs.costmodel import chain_seconds, search_split, single_seconds, tsp_seconds
from kvr_mpi.costs.hardware import Hardware
from kvr_mpi.costs.layer_costs import Costs, costs_of
from kvr_mpi.costs.workload import named_workload
from kvr_mpi.errors import DataError

CELLS = Path(__file__).parent / "data" / "paper-cells.csv"
COLUMNS = ("table", "model", "gpus", "context_tokens", "link_gb_per_s", "method", "ttft_s")
METHODS = ("base", "TSP", "KVR-E", "KVR-S", "KVR-P")
# A grid searched by noisy timings ends above the optimum, the more bounds the further: simulated with 3 % noise, the
# paper's search ends 1-5 % above it on 2 to 8 ranks. We take this much for each rank but one.
SEARCH_EXCESS = 0.005
# Distance of the entries KVR-P interpolates between (section 5).
TABLE_STEP_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured time to first token."""

    table: str
    model: str
    gpus: int
    context_tokens: int
    link_gb_per_s: float  # gigabytes per second, one direction; 0 where there is one GPU
    method: str
    ttft_s: float

    @property
    def setting(self) -> tuple[str, str, int, int, float]:
        """What was run, whatever the method."""
        return self.table, self.model, self.gpus, self.context_tokens, self.link_gb_per_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Relative errors, without sign; None if there are none."""

    median: float | None
    p90: float | None
    max: float | None

    def figures(self) -> list[tuple[str, float]]:
        """Name and value of each, where there are any."""
        return [(name, value) for name, value in asdict(self).items() if value is not None]

    @classmethod
    def of(cls, errors: Iterable[float]) -> Spread:
        """Sum up errors."""
        found = np.abs(list(errors))
        if not len(found):
            return cls(None, None, None)
        return cls(float(np.median(found)), float(np.quantile(found, 0.9)), float(found.max()))


@dataclass(frozen=True, slots=True)
class Score:
    """Cells with what the model says to each, and how far off it is."""

    cells: tuple[Cell, ...]
    predicted_s: tuple[float, ...]

    @property
    def errors(self) -> list[float]:
        """Relative error of each cell's time to first token, with its sign."""
        return [guess / cell.ttft_s - 1 for cell, guess in zip(self.cells, self.predicted_s, strict=True)]

    @property
    def speedups(self) -> dict[tuple[str, str, int, int, float], tuple[float, float]]:
        """TSP over KVR-S, measured and predicted, where both were measured."""
        found = {(cell.setting, cell.method): i for i, cell in enumerate(self.cells)}
        pairs = {}
        for cell in self.cells:
            tsp, kvr = found.get((cell.setting, "TSP")), found.get((cell.setting, "KVR-S"))
            if tsp is not None and kvr is not None:
                measured = self.cells[tsp].ttft_s / self.cells[kvr].ttft_s
                pairs[cell.setting] = measured, self.predicted_s[tsp] / self.predicted_s[kvr]
        return pairs

    @property
    def ttft(self) -> Spread:
        """Errors of the times to first token."""
        return Spread.of(self.errors)

    @property
    def speedup(self) -> Spread:
        """Errors of the speed-ups."""
        return Spread.of(guess / measured - 1 for measured, guess in self.speedups.values())

    def as_json(self) -> dict[str, Any]:
        """``{"ttft": {median, p90, max}, "speedup": {the same}, "cells": [...]}``."""
        cells = [
            asdict(cell) | {"predicted_s": guess, "error": error}
            for cell, guess, error in zip(self.cells, self.predicted_s, self.errors, strict=True)
        ]
        return {"ttft": asdict(self.ttft), "speedup": asdict(self.speedup), "cells": cells}


def paper_cells() -> list[Cell]:
    """Read the cells of the paper."""
    return read_cells(CELLS)


def read_cells(path: Path) -> list[Cell]:
    """Read a file of cells.

    Raises
    ------
    DataError
        If a column is missing or a value makes no sense, naming the line and the valid choices.
    ConfigError
        If a model has no shape.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"{path}: no column {', '.join(missing)}; expected {','.join(COLUMNS)}")
            cells = [_cell(f"{path}, line {reader.line_num}", row) for row in reader]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from error
    if not cells:
        raise DataError(f"{path}: no cells in it")
    return cells


def _cell(where: str, row: dict[str, str]) -> Cell:
    def number(name: str) -> float:
        try:
            value = float(row[name])
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: {name} is {row[name]!r}, expected a number") from error
        if not math.isfinite(value) or value < 0:
            raise DataError(f"{where}: {name} is {row[name]!r}, expected a finite number, not negative")
        return value

    methods = {name.lower(): name for name in METHODS}
    method = methods.get((row["method"] or "").strip().lower())
    if method is None:
        raise DataError(f"{where}: method {row['method']!r}; valid methods: {', '.join(METHODS)}")
    gpus, tokens, link, ttft_s = (number(name) for name in ("gpus", "context_tokens", "link_gb_per_s", "ttft_s"))
    if method == "base":
        gpus = 1.0
    if gpus < 1 or gpus % 1 or tokens % 1 or tokens < gpus or ttft_s == 0:
        raise DataError(f"{where}: {gpus:g} GPUs, {tokens:g} tokens, {ttft_s:g} s; expected whole GPUs and tokens, at "
                        f"least a token for each GPU, and a time above 0")  # fmt: skip
    if gpus > 1 and link == 0:
        raise DataError(f"{where}: link_gb_per_s is 0 between {gpus:g} GPUs; expected gigabytes per second")
    work = named_workload(row["model"] or "")
    return Cell(row["table"] or "", work.name, int(gpus), int(tokens), link, method, ttft_s)


def predict_seconds(cell: Cell, hardware: Hardware, split: Sequence[float] | None = None) -> float:
    """Forecast a cell.

    Parameters
    ----------
    split : sequence of float, optional
        Slice lengths; by default those the cell's method chooses.
    """
    costs = cell_costs(cell, hardware)
    if cell.gpus == 1:
        return single_seconds(costs, cell.context_tokens)
    if cell.method == "TSP":
        return tsp_seconds(costs, cell.context_tokens, cell.gpus)
    seconds = chain_seconds(costs, split or cell_split(cell, costs), "store-and-forward")
    if cell.method == "KVR-E":
        return seconds
    # What is bound by launching kernels is the same for any split, so no search can miss it.
    above_floor_s = seconds - costs.layers * costs.launch_floor_s
    return seconds + SEARCH_EXCESS * (cell.gpus - 1) * above_floor_s


def cell_costs(cell: Cell, hardware: Hardware) -> Costs:
    """Costs in a cell's setting."""
    link = cell.link_gb_per_s * 1e9 if cell.gpus > 1 else None
    return costs_of(named_workload(cell.model), hardware, link_bytes_per_s=link)


def cell_split(cell: Cell, costs: Costs) -> list[float]:
    """Slice lengths of a KVR cell: even (E), the best (S), or interpolated between table entries (P, section 5)."""
    tokens, ranks = cell.context_tokens, cell.gpus
    if cell.method == "KVR-E":
        return [tokens / ranks] * ranks
    if cell.method == "KVR-S":
        return search_split(costs, tokens, ranks, "store-and-forward")
    below = max(TABLE_STEP_TOKENS, (tokens - 1) // TABLE_STEP_TOKENS * TABLE_STEP_TOKENS)
    above = (tokens // TABLE_STEP_TOKENS + 1) * TABLE_STEP_TOKENS
    ratios = [np.array(search_split(costs, entry, ranks, "store-and-forward")) / entry for entry in (below, above)]
    weight = min(1.0, max(0.0, (tokens - below) / max(above - below, 1)))
    return list(map(float, tokens * ((1 - weight) * ratios[0] + weight * ratios[1])))


def score(cells: Sequence[Cell], hardware: Hardware) -> Score:
    """Hold the model to cells."""
    return Score(tuple(cells), tuple(predict_seconds(cell, hardware) for cell in cells))
