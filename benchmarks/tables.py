"""What benchmarks print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.options import PRINT
from benchmarks.pairs import STARTS_DIFFER, Ratio
from benchmarks.plots import plot_bench
from benchmarks.roofline import Roofline
from kvr_mpi.disk import writing
from kvr_mpi.errors import counted
from kvr_mpi.report.table import print_table

LEGEND = (
    f"time as a multiple of ours, above 1 where ours is faster: median of back-to-back pairs (95% bootstrap interval, "
    f"{STARTS_DIFFER:.0%} wider on both sides for what another start changes)"
)


def print_strategies(found: list[dict[str, Any]], json_file: Path | None, plot: Path | None) -> None:
    """Show strategies at all lengths; `found` is of `StrategyRow.as_json`."""
    ours = found[0]["ours"]
    names = ("tokens", "strategy", "first token", "best", "wait", "link MB", "CPU", "peak MB", "predicted", f"x {ours}")

    def prediction(row: dict[str, Any]) -> str:
        """How far the prediction of any rank's memory was from what was measured."""
        if not any(row["predicted_bytes_by_rank"]):
            return ""
        pairs = zip(row["predicted_bytes_by_rank"], row["peak_bytes_by_rank"], strict=True)
        return f"{max((100 * (said / found - 1) for said, found in pairs if found), key=abs, default=0):+.0f}%"

    rows = [
        (
            row["context_tokens"],
            row["strategy"],
            f"{row['ttft_s']:.3f} s",
            f"{row['ttft_min_s']:.3f} s",
            f"{100 * row['wait_s'] / row['ttft_s']:.1f}%",
            f"{row['link_bytes'] / 1e6:.0f}",
            f"{row['cpu_s']:.2f} s",
            f"{row['peak_bytes'] / 1e6:.0f}",
            prediction(row),
            "" if row["strategy"] == ours else _ratio(row).describe(),
            row["slices"],
        )
        for row in found
    ]
    print_table((*names, "slices"), rows)
    print(f"x {ours}: {LEGEND}")
    for tokens in dict.fromkeys(row["context_tokens"] for row in found):
        print(_verdict([row for row in found if row["context_tokens"] == tokens]))
    if json_file is not None:
        _write(found, json_file)
    if plot is not None:
        with writing(plot):
            plot_bench(found, plot)


def print_rooflines(rooflines: Sequence[Roofline], found: list[dict[str, Any]], json_file: Path | None) -> None:
    """Show where a prefill's time goes, and how near strategies (of `StrategyRow.as_json`) come to the least."""
    rows = []
    for one in rooflines:
        for part in one.parts:
            cells = [str(one.tokens), part.name, f"{part.seconds:.3f}", f"{100 * part.seconds / one.seconds:.0f}%"]
            for work, peak in ((part.flop, one.peaks.flop_per_s), (part.nbytes, one.peaks.bytes_per_s)):
                rate = work / part.seconds if part.seconds else 0.0
                cells += [f"{rate / 1e9:.1f}", f"{100 * rate / peak:.0f}%"] if rate else ["", ""]
            rows.append(cells)
    peaks = rooflines[0].peaks
    print(
        f"\none rank computing the whole prompt, while all other ranks are busy, too; peak of each rank's processor: "
        f"{peaks.flop_per_s / 1e9:.1f} GFLOP/s of multiply-adds, {peaks.bytes_per_s / 1e9:.1f} GB/s from memory (what "
        "stays in caches can exceed it)"
    )
    print_table(("tokens", "part", "seconds", "share", "GFLOP/s", "of multiply-adds", "GB/s", "of memory"), rows)
    for one in rooflines:
        same = [row for row in found if row["context_tokens"] == one.tokens]
        reached = ", ".join(f"{row['strategy']} {100 * one.least_s / row['ttft_min_s']:.0f}%" for row in same)
        print(
            f"{one.tokens} tokens: nothing that multiplies as often takes less than {one.least_s:.3f} s on "
            f"{counted(one.ranks, 'rank')}; the best runs reach {reached} of that speed"
        )
    least_s = {one.tokens: one.least_s for one in rooflines}
    if json_file is not None:
        _write([row | {"least_s": least_s[row["context_tokens"]]} for row in found], json_file)


def _verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Say, of one length, what ours is faster than, what it is not told apart from, and what is faster."""
    ours, said = rows[0]["ours"], []
    others = {row["strategy"]: _ratio(row) for row in rows if row["strategy"] != ours}
    for words, belongs in (
        ("faster than", lambda one: one.is_told and one.median > 1),
        ("slower than", lambda one: one.is_told and one.median < 1),
        ("not told apart from", lambda one: not one.is_told),
    ):
        names = [name for name, one in others.items() if belongs(one)]
        if names:
            said.append(f"{words} {', '.join(names)}")
    return f"{rows[0]['context_tokens']} tokens: {ours} is {'; '.join(said) if said else 'alone'}"


def print_corpus(found: list[dict[str, Any]], json_file: Path | None) -> None:
    """Show ways through a corpus; `found` is of `CorpusRow.as_json`."""
    ours = found[0]["ours"]
    names = ("way", "seconds", "best", "documents/h", "prefill tokens/s", "decode tokens/s", "busy", "in prefill")
    rows = [
        (
            row["way"],
            f"{row['seconds']:.1f}",
            f"{row['seconds_min']:.1f}",
            f"{row['documents_per_hour']:.1f}",
            *(f"{row[key]:.1f}" if row[key] else "" for key in ("prefill_tokens_per_s", "decode_tokens_per_s")),
            " ".join(f"{100 * share:.0f}%" for share in row["busy_by_rank"][:4]),
            f"{100 * row['busy_in_prefill']:.0f}%",
            "" if row["way"] == ours else _ratio(row).describe(),
        )
        for row in found
    ]
    print_table((*names, f"x {ours}"), rows)
    print(f"x {ours}: {LEGEND}")
    if json_file is not None:
        _write(found, json_file)


def print_heads(found: list[dict[str, Any]], json_file: Path | None) -> None:
    """Show ways to decode the same documents; `found` is of `HeadsRow.as_json`."""
    rows = []
    for row in found:
        predicted = row["predicted"] or {}
        rows.append(
            (
                f"{row['kept_tokens']:.0f}",
                row["way"],
                *(f"{1e3 * row[key]:.1f}" for key in ("step_s", "best_s", "forecast_s")),
                f"{row['tokens_per_s']:.1f}",
                *(
                    "" if row["way"] == one else Ratio(**row[key]).describe()
                    for key, one in (("whole_over_this", "whole, SHA"), ("sha_over_this", "SHA"))
                ),
                *(f"{1e3 * row[key]:.1f}" for key in ("compute_s", "attention_s")),
                *(
                    " / ".join(f"{said[key]:.2f}" for said in (predicted, row["measured"]) if said)
                    for key in ("sync", "total")
                ),
                " ".join(f"{held / 1e6:.0f}" for held in row["kv_bytes"][:4]),
                " ".join(f"{heads:.2g}" for heads in row["heads"][:4]),
                f"{row['same_answers']} of {row['documents']}",
            )
        )
    names = ("kept", "way", "ms per step", "best", "forecast", "tokens/s", "whole / this", "SHA / this", "compute")
    print_table((*names, "attention", "E_sync", "E", "KV MB a rank", "heads", "same"), rows)
    print(
        "whole / this, SHA / this: how many times as fast a step is as with the whole cache and heads in order, and as "
        "with the compressed one and heads in order: median of rounds back to back (95% bootstrap interval)\n"
        "compute: processor time of a step without sums over ranks; attention: of all layers, without them; E_sync, E: "
        "predicted from counts / measured; forecast: by what decides decode.mode = 'auto'; same: answers that are "
        "those of ranks that decode their own documents"
    )
    if json_file is not None:
        _write(found, json_file)


def _write(found: list[dict[str, Any]], file: Path) -> None:
    with writing(file):
        file.write_text(json.dumps(found, indent=1) + "\n")


def _ratio(row: dict[str, Any]) -> Ratio:
    return Ratio(row["times_ours"], row["times_ours_low"], row["times_ours_high"], row["pairs"])


def write(name: str, found: Any) -> None:
    """Print as JSON what was found, or write it to a file."""
    text = json.dumps(found, indent=1) + "\n"
    if name == PRINT:
        click.echo(text, nl=False)
        return
    with writing(name):
        Path(name).write_text(text)
