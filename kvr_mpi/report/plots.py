"""Plots of what was measured or forecast, in the colours of ``style``; matplotlib is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvr_mpi.errors import ConfigError
from kvr_mpi.report.style import (
    COLOURS,
    DASHES,
    log_ticks,
    nice_ticks,
    percent_text,
    plain_number,
    ramp,
    token_ticks,
    tokens_text,
)

# Strategies that are ours, the one to look at last: they are drawn in front.
OURS = {"auto": "sent", "kvr-e": "soft", "kvr": "ours", "kvr-s": "ours"}
MARKERS = "ovs^DPX"


def plot_bench(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw time to first token over prompt length, a line a strategy, in a band from the fastest to the slowest time.

    Raises
    ------
    ConfigError
        If matplotlib is missing or knows no such file type.
    """
    figure, axes = _canvas()
    names = _in_order(row["strategy"] for row in rows)
    for name in names:
        mine = [row for row in rows if row["strategy"] == name]
        lengths = [row["context_tokens"] for row in mine]
        _draw_line(axes, lengths, [row["ttft_s"] for row in mine], name, names)
        low, high = ([row[key] for row in mine] for key in ("ttft_min_s", "ttft_max_s"))
        axes.fill_between(lengths, low, high, color=_colour(name), alpha=0.15, linewidth=0, zorder=2 + (name in OURS))
    _label_tokens(axes, [row["context_tokens"] for row in rows])
    _label_seconds(axes, [row[key] for row in rows for key in ("ttft_min_s", "ttft_max_s")])
    axes.set_title(_finding(rows) if rows else "nothing was measured", loc="left", fontsize="medium")
    axes.legend(frameon=False)
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
    names = _in_order(name for row in rows for name in row["ttft_s"])
    for name in names:
        mine = [(row["ranks"], row["ttft_s"][name]) for row in rows if name in row["ttft_s"]]
        _draw_line(axes, [size for size, _ in mine], [seconds for _, seconds in mine], name, names)
    ranks = [row["ranks"] for row in rows]
    for key, line, name in (("bound_s", "--", "TTFT(p), no communication"), ("star_s", ":", "TTFT*(p), eq. 3")):
        axes.plot(ranks, [row[key] for row in rows], line, color=COLOURS["bound"][0], linewidth=1.2, label=name)
    axes.set(xlabel="ranks", xscale="log")
    _set_ticks(axes.xaxis, sorted(set(ranks)), [str(number) for number in sorted(set(ranks))])
    seconds = [value for row in rows for value in (*row["ttft_s"].values(), row["bound_s"], row["star_s"])]
    _label_seconds(axes, seconds)
    told, last = "", rows[-1]
    if "kvr-s" in last["ttft_s"] and "single" in last["ttft_s"]:
        gain = last["ttft_s"]["single"] / last["ttft_s"]["kvr-s"]
        told = f": with kvr-s {last['ranks']} ranks are {gain:.1f} times as fast as one"
    axes.set_title(f"{title}\n{tokens_text(tokens)} tokens{told}", loc="left", fontsize="medium")
    axes.legend(frameon=False)
    _save(figure, path)


def plot_slices(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw each row's slices as shares of its prompt, a bar a row, rank 0 at the bottom (Fig. 10 a)."""
    figure, axes = _canvas()
    labels = [f"{tokens_text(row['context_tokens'])}\n{row['ranks']} rank{'s' * (row['ranks'] > 1)}" for row in rows]
    for place, row in enumerate(rows):
        bounds = row["slices"]
        shades = ramp(len(bounds) - 1)
        for start, stop, shade in zip(bounds, bounds[1:], shades, strict=False):
            low, high = start / bounds[-1], stop / bounds[-1]
            axes.bar(place, high - low, bottom=low, color=shade, edgecolor="white", linewidth=0.5)
    axes.set_xticks(range(len(labels)), labels)
    _set_ticks(axes.yaxis, [0, 0.25, 0.5, 0.75, 1], list(map(percent_text, [0, 0.25, 0.5, 0.75, 1])))
    axes.set(ylabel="share of the prompt", ylim=(0, 1))
    longest = max(rows, key=lambda row: (len(row["slices"]), row["context_tokens"]))
    first, last = longest["slices"][1], longest["slices"][-1] - longest["slices"][-2]
    told = f"of {longest['ranks']} ranks the first takes {first / max(1, last):.1f} times as many tokens as the last"
    axes.set_title(f"{title}\nslices of kvr-s: {told}", loc="left", fontsize="medium")
    _save(figure, path)


def plot_heads(counts: Sequence[Sequence[float]], title: str, path: Path) -> None:
    """Draw how many tokens each head keeps, (layers, kv_heads), a layer a row.

    Raises
    ------
    ConfigError
        If matplotlib is missing or knows no such file type.
    """
    figure, axes = _canvas()
    axes.grid(visible=False)
    image = axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="cividis")
    bar = figure.colorbar(image, ax=axes, label="tokens kept")
    ticks = nice_ticks(min(map(min, counts)), max(map(max, counts)))
    bar.set_ticks(ticks, labels=[plain_number(tick) for tick in ticks])
    axes.set(xlabel="KV head", ylabel="layer")
    axes.set_xticks(range(len(counts[0])))
    axes.set_title(title, fontsize="small", loc="left")
    _save(figure, path)


def _in_order(names: Any) -> list[str]:
    """Each once: rivals first, ours last, so that they are in front, and stand last in the legend."""
    return sorted(dict.fromkeys(names), key=lambda name: list(OURS).index(name) if name in OURS else -1)


def _colour(name: str) -> str:
    return COLOURS[OURS.get(name, "rival")][0]


def _draw_line(axes: Any, places: Sequence[float], seconds: Sequence[float], name: str, names: Sequence[str]) -> None:
    """Draw a strategy: ours strong and in colour; rivals grey, told apart by dashes and marks."""
    number = names.index(name)
    is_ours = name in OURS
    (line,) = axes.plot(
        places,
        seconds,
        color=_colour(name),
        marker=MARKERS[number % len(MARKERS)],
        markersize=6 if is_ours else 4.5,
        linewidth=2.4 if is_ours else 1.3,
        zorder=4 if is_ours else 3,
        label=name,
    )
    dashes = DASHES[number % len(DASHES)]
    if dashes and not is_ours:
        line.set_dashes(dashes)


def _finding(rows: Sequence[dict[str, Any]]) -> str:
    """Say who is fastest at the longest prompt, and by how much."""
    tokens = max(row["context_tokens"] for row in rows)
    found = sorted((row for row in rows if row["context_tokens"] == tokens), key=lambda row: row["ttft_s"])
    where = f"at {tokens_text(tokens)} tokens on {rows[0]['size']} rank{'s' * (rows[0]['size'] > 1)}"
    if len(found) < 2:
        return f"{found[0]['strategy']} {where}"
    gain = found[1]["ttft_s"] / found[0]["ttft_s"]
    if found[0]["ttft_max_s"] >= found[1]["ttft_min_s"]:
        return f"{found[0]['strategy']} and {found[1]['strategy']} are within their spread {where}"
    return f"{found[0]['strategy']} is fastest {where}: {percent_text(gain - 1)} ahead of {found[1]['strategy']}"


def _label_tokens(axes: Any, lengths: Sequence[float]) -> None:
    axes.set(xlabel="prompt tokens", xscale="log")
    if lengths:
        exact = sorted(set(lengths))
        ticks = exact if len(exact) <= 9 else token_ticks(exact[0], exact[-1])
        _set_ticks(axes.xaxis, ticks, list(map(tokens_text, ticks)))


def _label_seconds(axes: Any, seconds: Sequence[float]) -> None:
    axes.set(ylabel="seconds to the first token", yscale="log")
    if seconds and min(seconds) > 0:
        low, high = 0.93 * min(seconds), 1.07 * max(seconds)
        ticks = log_ticks(low, high)
        if len(ticks) < 3:
            ticks = nice_ticks(low, high, 5)
        _set_ticks(axes.yaxis, ticks, list(map(plain_number, ticks)))
        axes.set_ylim(low, high)


def _set_ticks(axis: Any, ticks: Sequence[float], labels: Sequence[str]) -> None:
    """Have these ticks and no others, between them none either."""
    axis.set_ticks(ticks, labels=labels)
    axis.set_ticks([], minor=True)


def _canvas() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; `pip install kvr-mpi[plots]`") from error
    figure = Figure(figsize=(7, 4.5), dpi=140, layout="constrained")
    axes = figure.subplots()
    axes.grid(color=COLOURS["grid"][0], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(COLOURS["rival"][0])
    axes.tick_params(colors=COLOURS["quiet"][0])
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error
