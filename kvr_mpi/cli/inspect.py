"""``kvr inspect FILE [DOCUMENT]``: shows results."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvr_mpi.cli.options import command

if TYPE_CHECKING:
    from kvr_mpi.store.record import Record


@command()
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
@click.argument("document", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--errors", is_flag=True, help="List all failed documents with their errors.")
def inspect(path: Path, document: str | None, as_json: bool, errors: bool) -> None:
    """Show the results in FILE, or one DOCUMENT.

    FILE is a result file, the output folder of a run, or a folder of such folders (the shares of an array).
    The command first verifies the checksums of everything that it shows, including keys and values.
    """
    if document is not None and errors:
        raise click.UsageError("--errors lists all failed documents: omit DOCUMENT")
    if document is not None:
        _show_document(path, document, as_json)
    elif errors:
        _show_errors(path, as_json)
    else:
        _show_run(path, as_json)


def _show_run(path: Path, as_json: bool) -> None:
    from kvr_mpi.report.table import ending_lines, print_summary, rows_of
    from kvr_mpi.store.results import open_results

    results = open_results(path, partial=True)
    header, versions = results.header, results.software
    summary = results.summary()
    if as_json:
        about = {"model": header.model, "identity": header.identity, "software": versions}
        counts = {
            "done": summary.done,
            "errors": summary.failed,
            "lost": len(results.gone),
            "missing": results.missing,
            "reasons": summary.reasons,
            "cost": asdict(results.cost) if results.costs else None,
        }
        click.echo(json.dumps({**about, **counts, "documents": results.ids()}))
        return
    rows = list(rows_of(results))
    ends = Counter(record.ended_early for record in results.records("done"))
    click.echo(f"model     {header.model['name']} ({header.model['architecture']}, {header.model['dtype']})")
    click.echo(f"software  {', '.join(f'{name} {version}' for name, version in versions.items())}")
    compress = header.identity.get("compress")
    if isinstance(compress, dict):
        shown = sorted(compress.items(), key=lambda item: item[0] != "method")
        click.echo(f"compress  {', '.join(f'{name} {value}' for name, value in shown if value is not None)}")
    if cache := header.identity.get("cache"):
        click.echo(f"cache     {cache}")
    if results.costs:
        click.echo(f"cost      {results.cost.describe(summary.done)}")
    for heading, line in ending_lines(ends, summary.done):
        click.echo(f"{heading:9} {line}")
    for line in results.missing:
        click.echo(f"missing   {line}")
    click.echo()
    print_summary(summary, rows, path, by_inspect=True)


def _show_errors(path: Path, as_json: bool) -> None:
    from kvr_mpi.errors import printable
    from kvr_mpi.report.table import reason_lines
    from kvr_mpi.store.results import open_results

    results = open_results(path, partial=True)
    found, reasons = [(record.id, record.error) for record in results.records("error")], results.summary().reasons
    if as_json:
        click.echo(json.dumps({"reasons": reasons, "errors": [{"id": name, "error": error} for name, error in found]}))
        return
    for name, error in found:
        click.echo(f"{printable(name, '')}: {printable(' '.join(error.split()), '')}")
    click.echo("\n".join([f"\n{len(found):,} failed", *(f"  {line}" for line in reason_lines(reasons))]).lstrip("\n"))


def _show_document(path: Path, document: str, as_json: bool) -> None:
    from kvr_mpi.errors import printable
    from kvr_mpi.store.record import ASKED_FOR, LONG
    from kvr_mpi.store.results import open_results

    results = open_results(path, verify=False, partial=True)
    place = results.place(document)
    with results.open(document) as (record, found):
        found.check()
        layers: list[dict[str, Any]] = []
        for number in found.layers:
            (keys, values, dtype), kept = found.format(number), found.kept(number)
            layer = {"layer": number, "keys": list(keys), "values": list(values), "dtype": dtype}
            layers.append(layer | ({} if kept is None else {"head_rows": [*map(len, kept)]}))
    if as_json:
        click.echo(json.dumps({**record.as_json(), "kv": layers}))
        return
    for name, value in {**record.as_dict(), **record.computed}.items():
        if name in ASKED_FOR and name in LONG:
            there = record.as_json()[name]
            click.echo(f"{name:21} {len(there)}, see --json" if there else "", nl=bool(there))
        elif name not in ("answer", "token_ids") and value:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            click.echo(f"{name:21} {printable(shown)}")
    if found.compression:
        counts = [count for layer in layers for count in layer.get("head_rows", ())]
        mean = sum(counts) / len(counts)
        click.echo(f"{'kv':21} {len(layers)} layers, compressed: {mean:.0f} tokens per KV head on average")
    elif layers:
        first = layers[0]
        click.echo(f"{'kv':21} {len(layers)} layers, keys {first['keys']}, values {first['values']}, {first['dtype']}")
    click.echo(f"{'stored in':21} {place.source}")
    for volume in dict.fromkeys(piece.path for piece in place.pieces):
        click.echo(f"{'kv stored in':21} {volume}")
    if record.status == "done":
        click.echo("\n" + _wrapped(printable(_all_answers(record).replace("\r\n", "\n"))))


def _wrapped(text: str) -> str:
    """Break lines between words at the width of the terminal; other outputs get the text as it is."""
    if not sys.stdout.isatty():
        return text
    from rich.console import Console
    from rich.text import Text

    width = shutil.get_terminal_size().columns
    return "\n".join(line.plain.rstrip() for line in Text(text).wrap(Console(width=width), width))


def _all_answers(record: Record) -> str:
    """Return all answers of a document, or the scores of its continuations."""
    answers = [one["answer"] for one in record.sampled]
    if not answers:
        return record.marked or record.shown
    return "\n\n".join(f"{number} of {len(answers)}: {answer}" for number, answer in enumerate(answers, 1))
