"""Plots of what was measured or forecast, in the colors of ``style``; matplotlib is an extra, and met only here.

An SVG file turns dark with the page that it is in, or the reader's system; other kinds of files are for white paper.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvr_mpi.errors import ConfigError, counted
from kvr_mpi.report.style import (
    COLORS,
    nice_ticks,
    percent_text,
    plain_number,
    tokens_text,
)

# Strategies that are ours, the one to look at last: they are drawn in front.
OURS = {"auto": "sent", "kvr-e": "soft", "kvr": "ours", "kvr-s": "ours"}
MARKERS = "ovs^DPX"
# Lines of rivals, which share a color.
DASHES = ((), (6, 3), (2, 2), (8, 2, 2, 2), (1, 3))


def plot_bench(rows: Sequence[dict[str, Any]], path: Path, about: str = "") -> None:
    """Draw time to first token over prompt length, a line a strategy, in a band from the fastest to the slowest time.

    Where strategies ran in pairs with ours, their times as multiples of its are drawn below, in bands that are the 95%
    intervals of the ratios.

    Parameters
    ----------
    rows : sequence of dict
        Of ``first-token --json``; without the fastest and slowest times, or the intervals, there are no bands.
    about : str
        Kept in the file, for whoever asks what it was drawn from.

    Raises
    ------
    ConfigError
        If matplotlib is missing or knows no such file type.
    """
    paired = [row for row in rows if "times_ours" in row and row["strategy"] != row["ours"]]
    figure, axes = _canvas(panels=1 + bool(paired))
    first, *second = axes
    names = _in_order(row["strategy"] for row in rows)
    for name in names:
        mine = [row for row in rows if row["strategy"] == name]
        lengths = [row["context_tokens"] for row in mine]
        _draw_line(first, lengths, [row["ttft_s"] for row in mine], name, names)
        if all("ttft_min_s" in row for row in mine):
            low, high = ([row[key] for row in mine] for key in ("ttft_min_s", "ttft_max_s"))
            _draw_band(first, lengths, low, high, name)
    for ratios in second:
        _draw_ratios(ratios, paired, names)
    keys = ("ttft_s", "ttft_min_s", "ttft_max_s")
    _label_seconds(first, [row[key] for row in rows for key in keys if key in row])
    for each in axes:
        _label_tokens(each, [row["context_tokens"] for row in rows])
    first.set_title(_finding(rows) if rows else "nothing to plot: nothing was measured", loc="left", fontsize="medium")
    first.legend(frameon=False)
    _save(figure, path, about=about)


def plot_forecast(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw time to first token over ranks for the rows' longest prompt, with both lower bounds (Fig. 8 d).

    Parameters
    ----------
    rows : sequence of dict
        Of ``forecast``.
    """
    tokens = max(row["context_tokens"] for row in rows)
    rows = sorted((row for row in rows if row["context_tokens"] == tokens), key=lambda row: row["ranks"])
    figure, (axes,) = _canvas()
    names = _in_order(name for row in rows for name in row["ttft_s"])
    for name in names:
        mine = [(row["ranks"], row["ttft_s"][name]) for row in rows if name in row["ttft_s"]]
        _draw_line(axes, [size for size, _ in mine], [seconds for _, seconds in mine], name, names)
    ranks = [row["ranks"] for row in rows]
    for key, line, name in (("bound_s", "--", "TTFT(p), no communication"), ("star_s", ":", "TTFT*(p), eq. 3")):
        axes.plot(ranks, [row[key] for row in rows], line, color=COLORS["bound"][0], linewidth=1.2, label=name)
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


def _in_order(names: Any) -> list[str]:
    """Each once: rivals first, ours last, so that they are in front, and stand last in the legend."""
    return sorted(dict.fromkeys(names), key=lambda name: list(OURS).index(name) if name in OURS else -1)


def _color(name: str) -> str:
    return COLORS[OURS.get(name, "rival")][0]


def _draw_line(axes: Any, places: Sequence[float], seconds: Sequence[float], name: str, names: Sequence[str]) -> None:
    """Draw a strategy: ours strong and in color; rivals gray, told apart by dashes and marks."""
    number = names.index(name)
    is_ours = name in OURS
    (line,) = axes.plot(
        places,
        seconds,
        color=_color(name),
        marker=MARKERS[number % len(MARKERS)],
        markersize=6 if is_ours else 4.5,
        linewidth=2.4 if is_ours else 1.3,
        zorder=4 if is_ours else 3,
        label=name,
    )
    dashes = DASHES[number % len(DASHES)]
    if dashes and not is_ours:
        line.set_dashes(dashes)


def _draw_band(
    axes: Any, places: Sequence[float], low: Sequence[float], high: Sequence[float], name: str, alpha: float = 0.15
) -> None:
    axes.fill_between(places, low, high, color=_color(name), alpha=alpha, linewidth=0, zorder=2 + (name in OURS))


def _draw_ratios(axes: Any, paired: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Draw the others' times as multiples of ours, which is the line at 1."""
    lengths = [row["context_tokens"] for row in paired]
    ours = paired[0]["ours"]
    axes.plot([min(lengths), max(lengths)], [1, 1], color=_color(ours), linewidth=2.4, zorder=4)
    values = [1.0]
    for name in names:
        mine = [row for row in paired if row["strategy"] == name]
        if not mine:
            continue
        places = [row["context_tokens"] for row in mine]
        _draw_line(axes, places, [row["times_ours"] for row in mine], name, names)
        values += [row["times_ours"] for row in mine]
        if all("times_ours_low" in row for row in mine):
            low, high = ([row[key] for row in mine] for key in ("times_ours_low", "times_ours_high"))
            _draw_band(axes, places, low, high, name, alpha=0.3)
            values += [*low, *high]
    axes.set(ylabel=f"time as a multiple of {ours}")
    ticks = [tick for tick in nice_ticks(0, 1.05 * max(values), 5) if tick >= 0.9 * min(values)]
    _set_ticks(axes.yaxis, sorted({1.0, *ticks}), list(map(plain_number, sorted({1.0, *ticks}))))
    axes.set_ylim(0.95 * min(values), 1.05 * max(values))


def _finding(rows: Sequence[dict[str, Any]]) -> str:
    """Say who is fastest at the longest prompt, and by how much; where that was not told apart, this instead."""
    tokens = max(row["context_tokens"] for row in rows)
    found = sorted((row for row in rows if row["context_tokens"] == tokens), key=lambda row: row["ttft_s"])
    where = f"at {tokens_text(tokens)} tokens on {counted(rows[0]['size'], 'rank')}"
    if len(found) < 2:
        return f"{found[0]['strategy']} {where}"
    first, second = found[:2]
    names, gain = f"{first['strategy']} and {second['strategy']}", second["ttft_s"] / first["ttft_s"]
    ours = first.get("ours")
    paired = second if first["strategy"] == ours else first if second["strategy"] == ours else {}
    if paired.get("is_told_apart") is False:
        return f"{names} do not differ significantly {where}"
    if "is_told_apart" in paired:
        gain = paired["times_ours"] if paired is second else 1 / paired["times_ours"]
    elif "ttft_max_s" in first and first["ttft_max_s"] >= second["ttft_min_s"]:
        return f"{names} are within their spread {where}"
    return f"{first['strategy']} is fastest {where}: {percent_text(gain - 1)} ahead of {second['strategy']}"


def _label_tokens(axes: Any, lengths: Sequence[float], name: str = "prompt tokens") -> None:
    axes.set(xlabel=name, xscale="log")
    if lengths:
        exact = sorted(set(lengths))
        ticks = exact if len(exact) <= 9 else token_ticks(exact[0], exact[-1])
        _set_ticks(axes.xaxis, ticks, list(map(plain_number, ticks)))


def _label_seconds(axes: Any, seconds: Sequence[float]) -> None:
    axes.set(ylabel="seconds to the first token", yscale="log")
    if seconds and min(seconds) > 0:
        low, high = 0.93 * min(seconds), 1.07 * max(seconds)
        ticks = log_ticks(low, high)
        if len(ticks) < 3:
            ticks = nice_ticks(low, high, 5)
        _set_ticks(axes.yaxis, ticks, list(map(plain_number, ticks)))
        axes.set_ylim(low, high)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers on a logarithmic axis: 1, 2, 5, 10, 20; fewer where that is too many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        found = [value for value in found if low * 0.999 <= value <= high * 1.001]
        if len(found) <= 9:
            break
    return found


def token_ticks(low: float, high: float) -> list[float]:
    """Powers of two on a logarithmic axis of lengths: 1k, 2k, 4k."""
    powers = range(math.floor(math.log2(max(1, low))), math.ceil(math.log2(max(1, high))) + 1)
    found = [2.0**power for power in powers if low * 0.999 <= 2.0**power <= high * 1.001]
    while len(found) > 9:
        found = found[::2]
    return found


def _set_ticks(axis: Any, ticks: Sequence[float], labels: Sequence[str]) -> None:
    """Have these ticks and no others, between them none either."""
    axis.set_ticks(ticks, labels=labels)
    axis.set_ticks([], minor=True)


def _canvas(panels: int = 1) -> tuple[Any, list[Any]]:
    """Make an empty figure, and its axes side by side."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: `pip install matplotlib`") from error
    figure = Figure(figsize=(7 + 4 * (panels - 1), 4.5), dpi=140, layout="constrained", facecolor=COLORS["page"][0])
    found = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in found:
        axes.set_facecolor(COLORS["page"][0])
        axes.grid(color=COLORS["grid"][0], linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(COLORS["rival"][0])
        axes.tick_params(colors=COLORS["quiet"][0])
    return figure, found


def _save(figure: Any, path: Path, about: str = "") -> None:
    """Write a figure; its words in our colors, in an SVG as words, not as shapes."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if text.get_color() == "black":
            text.set_color(COLORS["text"][0])
    try:
        if path.suffix.lower() != ".svg":
            figure.savefig(path)
            return
        drawn = io.StringIO()
        # The same names for the same things: a figure that is drawn again is the same file.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
            figure.savefig(drawn, format="svg", metadata={"Date": None, "Description": about})
        path.write_text(_turning_dark(drawn.getvalue()), encoding="utf-8")
    except (ValueError, OSError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error


def _turning_dark(drawn: str) -> str:
    """Give an SVG of our colors the colors of black pages, where the reader's system asks for them."""
    rules = "".join(
        f'[style*="{what}: {light.lower()}"]{{{what}:{dark} !important}}'
        for light, dark in COLORS.values()
        for what in ("fill", "stroke")
    )
    head, start, rest = drawn.partition("<defs>")
    return f"{head}<style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n {start}{rest}"
