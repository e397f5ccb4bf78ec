"""``kvr report RUN``: writes an HTML page about a run."""

from __future__ import annotations

from pathlib import Path

import click

from kvr_mpi.cli.options import command, output_file_option


@command()
@click.argument("path", type=click.Path(path_type=Path), metavar="RUN")
@output_file_option("HTML file to write.  [default: report.html in RUN]")
@click.option(
    "--overwrite", is_flag=True, help="Replace an existing file; the report.html of a run is always replaced."
)
def report(path: Path, output: Path | None, overwrite: bool) -> None:
    """Write a page about RUN, the output folder of a run or a result file, even while the job is running.

    The page is one HTML file that needs no network. It shows failures, all answers, times and slices, and with
    output.trace = true also a timeline of the ranks.
    """
    from kvr_mpi.disk import replacing, writing
    from kvr_mpi.report.page import page_of
    from kvr_mpi.report.style import bytes_text
    from kvr_mpi.store.parts import is_run
    from kvr_mpi.store.targets import check_file

    target = output or (path if path.is_dir() else path.parent) / "report.html"
    is_own = output is None and target.parent.is_dir() and is_run(target.parent)
    check_file(target, overwrite=overwrite or is_own, reads=[path])
    with writing(target):
        page, skipped = page_of(path)
        for line in skipped:
            click.echo(f"warning: omitted: {line}", err=True)
        with replacing(target) as stream:
            stream.write(page)
        click.echo(f"{target}: {bytes_text(len(page))}; open it in a browser")
