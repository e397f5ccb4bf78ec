"""Plots of what was measured or forecast; matplotlib is an extra."""

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
    figure, axes = _canvas()
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        lengths, middle = ([row[key] for row in mine] for key in ("context_tokens", "ttft_s"))
        low = [row["ttft_s"] - row["ttft_min_s"] for row in mine]
        high = [row["ttft_max_s"] - row["ttft_s"] for row in mine]
        axes.errorbar(lengths, middle, yerr=[low, high], marker="o", capsize=3, label=strategy)
    axes.set(xlabel="prompt tokens", ylabel="time to first token (s)", xscale="log", yscale="log")
    axes.set_title(f"{rows[0]['size']} ranks" if rows else "")
    axes.legend()
    _save(figure, path)


def plot_forecast(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw time to first token over ranks for the rows' longest prompt, with both lower bounds (Fig. 8 d).

    Parameters
    ----------
    rows : sequence of dict
        Of ``kvr simulate``.
    """
    tokens = max(row["context_tokens"] for row in rows)
    rows = sorted((row for row in rows if row["context_tokens"] == tokens), key=lambda row: row["ranks"])
    figure, axes = _canvas()
    for strategy in dict.fromkeys(name for row in rows for name in row["ttft_s"]):
        mine = [(row["ranks"], row["ttft_s"][strategy]) for row in rows if strategy in row["ttft_s"]]
        axes.plot(*zip(*mine, strict=True), marker="o", label=strategy)
    for key, line, name in (("bound_s", "--", "TTFT(p), no communication"), ("star_s", ":", "TTFT*(p), eq. 3")):
        axes.plot([row["ranks"] for row in rows], [row[key] for row in rows], line, color="gray", label=name)
    axes.set(xlabel="ranks", ylabel="time to first token (s)", xscale="log", yscale="log")
    axes.set_title(f"{title}: {tokens} tokens")
    axes.legend()
    _save(figure, path)


def plot_slices(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw each row's slices as shares of its prompt, a bar a row, rank 0 at the bottom (Fig. 10 a)."""
    figure, axes = _canvas()
    labels = [f"{row['context_tokens']}\n{row['ranks']} ranks" for row in rows]
    for rank in range(max(row["ranks"] for row in rows)):
        spans = [
            (place, bounds[rank] / bounds[-1], bounds[rank + 1] / bounds[-1])
            for place, bounds in enumerate(row["slices"] for row in rows)
            if rank < len(bounds) - 1
        ]
        places, starts, stops = zip(*spans, strict=True)
        heights = [stop - start for start, stop in zip(starts, stops, strict=True)]
        axes.bar(places, heights, bottom=starts, edgecolor="white", linewidth=0.5)
    axes.set_xticks(range(len(labels)), labels)
    axes.set(ylabel="share of the prompt")
    axes.set_title(f"{title}: slices of kvr-s")
    _save(figure, path)


def plot_heads(counts: Sequence[Sequence[float]], title: str, path: Path) -> None:
    """Draw how many tokens each head keeps, (layers, kv_heads), a layer a row.

    Raises
    ------
    ConfigError
        If matplotlib is missing or knows no such file type.
    """
    figure, axes = _canvas()
    image = axes.imshow(counts, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="tokens kept")
    axes.set(xlabel="KV head", ylabel="layer")
    axes.set_xticks(range(len(counts[0])))
    axes.set_title(title, fontsize="small")
    _save(figure, path)


def _canvas() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; `pip install kvr-mpi[plots]`") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error
