"""Plots of what was measured; matplotlib is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvr_mpi.errors import ConfigError


def plot_bench(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw time to first token over prompt length, a line a strategy, with the spread of the repetitions.

    Raises
    ------
    ConfigError
        If matplotlib is missing or knows no such file type.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; `pip install kvr-mpi[plots]`") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        lengths, middle = ([row[key] for row in mine] for key in ("context_tokens", "ttft_s"))
        low = [row["ttft_s"] - row["ttft_min_s"] for row in mine]
        high = [row["ttft_max_s"] - row["ttft_s"] for row in mine]
        axes.errorbar(lengths, middle, yerr=[low, high], marker="o", capsize=3, label=strategy)
    axes.set(xlabel="prompt tokens", ylabel="time to first token (s)", xscale="log", yscale="log")
    axes.set_title(f"{rows[0]['size']} ranks" if rows else "")
    axes.legend()
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(f"--plot {path}: {error}") from error
