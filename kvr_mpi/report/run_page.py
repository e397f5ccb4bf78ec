"""The page of a run, from its folder: results, ledgers and traces."""

from __future__ import annotations

import contextlib
from pathlib import Path

from kvr_mpi.errors import DataError
from kvr_mpi.report.page import RunFacts, make_page
from kvr_mpi.report.timeline import read_timelines
from kvr_mpi.store.folder import index_run, read_records, run_files
from kvr_mpi.store.outputs import Record, open_file, read_header, read_software
from kvr_mpi.store.status import read_status
from kvr_mpi.store.traces import read_traces


def page_of(path: Path) -> tuple[bytes, list[str]]:
    """Make the page of a run's folder, or of a result file.

    Returns
    -------
    (bytes, list of str)
        The page, and which traces are left out of it, and why; the page says so, too.

    Raises
    ------
    DataError
        If there is nothing to read, or results are damaged.
    """
    folder = path if path.is_dir() else path.parent
    skipped: list[str] = []
    traces = list(read_traces(folder, skipped.append)) if path.is_dir() else []
    records: list[Record] = []
    model, software = "nothing is stored yet", f"{len(traces)} traces"
    if run_files(path) or not traces:  # of a job that was killed early there may be traces only
        index = index_run(path)
        records = list(read_records(index, index.ids()))
        with open_file(run_files(path)[-1]) as stored:
            about, versions = read_header(stored).model, read_software(stored)
        model = f"{about['name']} ({about['architecture']}, {about['dtype']})"
        software = ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("kvr_mpi", "torch"))
    rates = [(trace.header.token_s, trace.header.pair_s) for trace in traces if trace.header.token_s]
    left = None
    if path.is_dir():
        with contextlib.suppress(DataError):  # results without a run's files
            left = read_status(folder).left
    facts = RunFacts(
        name=str(path.resolve().name if path.is_dir() else path.name),
        model=model,
        software=software,
        left=left,
        skipped=tuple(skipped),
    )
    fastest = min(rates, default=(0.0, 0.0))
    return make_page(facts, records, read_timelines(traces) if traces else None, fastest), skipped
