"""Fit the rates of the paper's machine to a few of its cells; the other cells test them.

Run ``python -m benchmarks calibrate`` to print the profile ``benchmarks/data/paper-a100.json``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.options import make_parser
from benchmarks.paper_cells import Cell, cell_costs, cell_split, paper_cells, predict_seconds
from benchmarks.paper_model import PaperHardware

# The cells that calibrate, chosen to have each regime once or twice: bound by launches, GEMM or attention; one GPU,
# four, eight; Llama, and the Falcons, whose code was another. (model, GPUs, context, method)
CALIBRATION_CELLS = (
    ("Llama 7B", 1, 1024, "base"),
    ("Llama 7B", 1, 12288, "base"),
    ("Llama 7B", 8, 1024, "TSP"),
    ("Llama 7B", 8, 2048, "TSP"),
    ("Llama 7B", 4, 1024, "KVR-S"),
    ("Llama 7B", 4, 4096, "KVR-S"),
    ("Llama 7B", 4, 8192, "TSP"),
    ("Llama 7B", 8, 8192, "KVR-S"),
    ("Llama 7B", 8, 12288, "KVR-S"),
    ("Llama 7B", 4, 16384, "KVR-S"),
    ("Llama 7B", 8, 16384, "TSP"),
    ("Falcon 1B", 4, 1024, "KVR-S"),
    ("Falcon 1B", 4, 4096, "TSP"),
    ("Falcon 7B", 4, 4096, "TSP"),
    ("Falcon 7B", 4, 8192, "TSP"),
)

# What is known without the paper: the data sheet's memory and NVLink, peak tensor throughput less a third, the share of
# a link's bandwidth NCCL's all-gather reaches on one node of A100s.
GIVEN = {
    "attention_flop_per_s": 200e12,
    "link_bytes_per_s": 300e9,
    "link_latency_s": 20e-6,
    "gather_link_share": 0.77,
    "memory_bytes_per_s": 1.6e12,
    "memory_bytes": 80e9,
}
# Where the fit starts. Of a first guess of kv_copies it may stray as far as a factor e only at the price of an error.
START = {
    "gemm_flop_per_s": 179e12,
    "score_s": 17e-12,
    "kv_copies": 4.0,
    "launch_floor_s": 3e-3,
    "gather_floor_per_rank_s": 70e-6,
    "layer_overhead_s": 0.9e-3,
    "Falcon.score_s": 14e-12,
    "Falcon 1B.launch_floor_s": 2.5e-3,
}
TYPICAL_ERROR = 0.03
PASSES = 3


def calibration_cells() -> list[Cell]:
    """Read the cells the profile is fitted to."""
    return [
        cell for cell in paper_cells() if (cell.model, cell.gpus, cell.context_tokens, cell.method) in CALIBRATION_CELLS
    ]


def profile(rates: dict[str, float]) -> PaperHardware:
    """Make a profile of fitted rates."""
    for_models: dict[str, dict[str, float]] = {}
    for name in rates:
        model, dot, rate = name.rpartition(".")
        if dot:
            for_models.setdefault(model, {})[rate] = rates[name]
    return PaperHardware.model_validate(
        {
            "name": "paper-a100",
            "source": f"fitted to {len(CALIBRATION_CELLS)} of the times measured in the KV-Runahead paper "
            "(arXiv 2405.05329): 8 x A100 80 GB, NVLink, PyTorch 2.0, eager attention, float16; "
            "by benchmarks.calibrate",
            **GIVEN,
            **{name: rate for name, rate in rates.items() if "." not in name},
            # KV-Runahead appends what it was sent and stacks keys and values to send them; an all-gather only joins.
            "gather_kv_copies": rates["kv_copies"] / 2,
            "for_models": for_models,
        }
    )


def fit(cells: list[Cell]) -> PaperHardware:
    """Fit the rates by least squares on the logarithms, large errors damped.

    The best split depends on the rates and hardly moves the time, so it is held while the rates are fitted, and
    both take turns.
    """
    from scipy.optimize import least_squares

    names, rates = list(START), dict(START)
    measured = np.log([cell.ttft_s for cell in cells])
    for _ in range(PASSES):
        current = profile(rates)
        splits = [
            cell_split(cell, cell_costs(cell, current)) if cell.method.startswith("KVR") else None for cell in cells
        ]

        def errors(logs: np.ndarray, splits: list[list[float] | None] = splits) -> np.ndarray:
            tried = profile(dict(zip(names, np.exp(logs), strict=True)))
            found = [predict_seconds(cell, tried, split) for cell, split in zip(cells, splits, strict=True)]
            drift = logs[names.index("kv_copies")] - np.log(START["kv_copies"])
            return np.append(np.log(found) - measured, TYPICAL_ERROR * drift)

        start = np.log([rates[name] for name in names])
        solved = least_squares(errors, start, loss="soft_l1", f_scale=TYPICAL_ERROR, diff_step=1e-3, xtol=1e-8)
        rates = dict(zip(names, map(float, np.exp(solved.x)), strict=True))
    return profile({name: float(f"{rate:.4g}") for name, rate in rates.items()})


def main(arguments: Sequence[str]) -> None:
    """Fit and print."""
    make_parser("calibrate", __doc__).parse_args(arguments)
    print(fit(calibration_cells()).model_dump_json(indent=2, exclude_none=True))
