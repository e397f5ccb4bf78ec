"""``kvr inspect FILE [DOCUMENT]``: look into results."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
@click.argument("document", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: Path, document: str | None, as_json: bool) -> None:
    """Show what is in FILE (a result file or the output folder of a run), or one DOCUMENT of it."""
    if document is None:
        _show_run(path, as_json)
    else:
        _show_document(path, document, as_json)


def _show_run(path: Path, as_json: bool) -> None:
    from kvr_mpi.report.table import print_summary
    from kvr_mpi.store.folder import read_run, run_files
    from kvr_mpi.store.outputs import open_file, read_header, read_software

    records = list(read_run(path))
    file = run_files(path)[-1]
    with open_file(file) as stored:
        header, versions = read_header(stored), read_software(stored)
    if as_json:
        done = sum(record.status == "done" for record in records)
        about = {"model": header.model, "identity": header.identity, "software": versions}
        click.echo(
            json.dumps(
                {
                    **about,
                    "done": done,
                    "errors": len(records) - done,
                    "documents": [record.id for record in records],
                }
            )
        )
        return
    click.echo(f"model     {header.model['name']} ({header.model['architecture']}, {header.model['dtype']})")
    click.echo(f"software  {', '.join(f'{name} {version}' for name, version in versions.items())}\n")
    print_summary(records, path)


def _show_document(path: Path, document: str, as_json: bool) -> None:
    from kvr_mpi.report.table import printable
    from kvr_mpi.store.folder import find_record
    from kvr_mpi.store.kv import type_name
    from kvr_mpi.store.outputs import kv_layers, open_file, read_record

    file, key = find_record(path, document)
    with open_file(file) as stored:
        group = stored["documents"][key]
        record = read_record(group)
        layers = [
            {
                "layer": number,
                "keys": list(keys.shape),
                "values": list(values.shape),
                "dtype": type_name(keys),
            }
            for number, keys, values in kv_layers(group)
        ]
    if as_json:
        click.echo(json.dumps({**record.as_json(), "kv": layers}))
        return
    for name, value in record.as_dict().items():
        if name not in ("answer", "token_ids"):
            click.echo(f"{name:21} {printable(str(value))}")
    if layers:
        first = layers[0]
        click.echo(f"{'kv':21} {len(layers)} layers, keys {first['keys']}, values {first['values']}, {first['dtype']}")
    click.echo(f"{'group':21} {file}:/documents/{key}")
    if record.status == "done":
        click.echo("\n" + printable(record.answer))
