"""One valid file of every kind that the program reads, and everything of the program that reads it.

A reader may refuse a file with an error of the program's own; what it hands out instead has to be what was written.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutators
from made_runs import record, resume, take, write
from made_tables import a_table

import kvr_mpi.store.lock as lock
import kvr_mpi.store.status as status
from kvr_mpi.cli import group
from kvr_mpi.documents import Corpus, scan_corpus
from kvr_mpi.errors import KvrError
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.volumes import RESULTS
from kvr_mpi.tuning.lookup import choose_slices
from kvr_mpi.tuning.table import load_table, save_table

VOLUME = "kv-0001-0000-00000.h5"
ROWS = [
    {"id": f"row {n}", "text": f"Text {n} of the harbour, \u00e9 and \U0001f6a2. " * n, "more": [n]}
    for n in range(1, 9)
]
JOB = """
[model]
path = "/models/mine"
dtype = "float32"
[documents]
path = ["/corpus/*.jsonl", "/corpus/b"]
shard = "0/2"
limit = 7
[prompt]
template = "Summarise: {text} Summary:"
too_long = "keep-head"
[generation]
max_new_tokens = 24
temperature = 0.5
stop = ["END", "\\n\\n"]
[parallel]
ranks_per_chain = 2
partition = "even"
[output]
path = "out"
kv = true
"""

# No owner of these folders lives, and watching for one takes time.
lock.WATCH_S = status.BEAT_S = 0.1


@dataclass(frozen=True, slots=True)
class Kind:
    """Files of one format.

    file : the one that is changed, in a folder of `samples`.
    readers : each given the file's path.
    """

    sample: str
    file: str
    mutate: Callable[[bytes, random.Random], bytes]
    readers: tuple[Callable[[Path], None], ...]


def make_samples(folder: Path) -> None:
    """Write the valid files: a run in logs and volumes, a run merged, and one file each of everything else."""
    for name in ("run", "merged", "alone", "files"):
        (folder / name).mkdir(parents=True)
    run = take(folder / "run")
    write(folder / "run", 0, [record(name) for name in "abc"], kv=True)
    write(folder / "run", 1, [record("d"), record("e", "error"), record("dir/c", answer="\u00e9" * 50)])
    run.close()
    shutil.copytree(folder / "run", folder / "merged", dirs_exist_ok=True)
    merge_run(folder / "merged")
    shutil.copy(folder / "merged" / RESULTS, folder / "alone" / RESULTS)
    files = folder / "files"
    save_table(a_table(), files / "table.json")
    shipped = Path(sys.modules["kvr_mpi"].__path__[0]) / "costs" / "data" / "h100-80gb.json"
    shutil.copy(shipped, files / "machine.json")
    (files / "job.toml").write_text(JOB)
    rows = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (files / "rows.jsonl").write_bytes(rows)
    (files / "rows.jsonl.gz").write_bytes(gzip.compress(rows))
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), files / "rows.parquet", row_group_size=3)
    (files / "note.txt").write_text("A note about the harbour. " * 20)


def run_kvr(*arguments: str | Path) -> tuple[int, str]:
    """Run ``kvr``, and return its exit code and what it printed."""
    out = io.BytesIO()
    wrapper = sys.stdout = io.TextIOWrapper(out, encoding="utf-8", write_through=True)
    try:
        code = group.main([str(word) for word in arguments], prog_name="kvr", standalone_mode=False)
    except KvrError as error:
        assert all(char.isprintable() or char in "\n\t" for char in str(error)), f"unprintable: {error!r}"
        code = error.exit_code
    finally:
        sys.stdout = sys.__stdout__
        if not out.closed:  # else whoever exports closed it
            wrapper.detach()
    return int(code or 0), out.getvalue().decode()


def exported(path: Path) -> dict[str, Any] | None:
    """Read all records as a user does; None if the program refuses."""
    code, text = run_kvr("export", path)
    return None if code else {row["id"]: row for row in map(json.loads, text.splitlines())}


def expected(path: Path) -> dict[str, Any]:
    """Return what was written."""
    known: dict[str, Any] = json.loads((path / "expected.json").read_text())
    return known


def check_records(found: dict[str, Any] | None, path: Path) -> None:
    """Fail if a record that came out is not as it was written."""
    wanted = expected(path)
    for name, row in (found or {}).items():
        assert row == wanted.get(name), f"a damaged record came out: {row} instead of {wanted.get(name)}"


def read_alone(file: Path) -> None:
    """A file of results without its folder."""
    check_records(exported(file), file.parent)
    run_kvr("inspect", file, "--json")
    run_kvr("inspect", file)
    for name in ("a", "e"):
        code, text = run_kvr("inspect", file, name, "--json")
        if code == 0:
            row = json.loads(text)
            row.pop("kv", None)
            check_records({name: row}, file.parent)


def read_folder(file: Path) -> None:
    """The folder of a run, one file of which is damaged: looked at, exported, merged into another file."""
    folder = file.parent
    run_kvr("status", folder, "--json")
    run_kvr("status", folder)
    run_kvr("inspect", folder)
    check_records(exported(folder), folder)
    target = folder / "other.hdf5"
    if run_kvr("merge", folder, "-o", target)[0] == 0:
        found = exported(target)
        assert found is not None, "a file was merged that cannot be read"
        check_records(found, folder)


def resume_folder(file: Path) -> None:
    """Go on with a run: what counts as done can be read, and is right."""
    folder = file.parent
    done, failed, _ = resume(folder)
    found = {record.id: record.as_json() for record in open_results(folder)} if done or failed else {}
    check_records(found, folder)
    assert found.keys() >= done | failed, "what counts as done is not there"


def read_corpus(file: Path) -> None:
    """List a corpus, through JSON as the ranks are told it, and read each document."""
    corpus = Corpus.from_json(json.loads(json.dumps(scan_corpus([str(file)]).to_json())))
    ids = [entry.id for entry in corpus.entries]
    assert len(set(ids)) == len(ids), "ids that are not unique"
    for number, entry in enumerate(corpus.entries):
        document = corpus.read(number)
        document.text.encode()
        document.id.encode()
        assert document.id == entry.id and (document.error is None) == (entry.error is None), f"{document} {entry}"
        assert document.error is not None or document.text.strip(), "a document without text"


def read_job(file: Path) -> None:
    """Show a job's settings."""
    run_kvr("run", file, "--show-config")


def read_table(file: Path) -> None:
    """Look a table up."""
    table = load_table(file)
    for tokens in (3, 100, 1024, 1500, 4096, 20_000, 1 << 20):
        try:
            bounds = choose_slices(table, tokens, table.key.ranks).bounds
        except KvrError:
            continue
        assert bounds[0] == 0 and bounds[-1] == tokens and list(bounds) == sorted(set(bounds)), f"{tokens}: {bounds}"


def simulate(file: Path) -> None:
    """Forecast with a machine's profile."""
    options = ["--model", "Llama 3.1 8B", "--tokens", "8k,1m", "--ranks", "64", "--json"]
    code, text = run_kvr("plan", "--hardware", file, *options)
    if code == 0:
        json.loads(text, parse_constant=lambda word: _fail(f"{word} in JSON"))


def _fail(text: str) -> None:
    raise AssertionError(text)


RUN_READERS = (read_folder, resume_folder)
KINDS: dict[str, Kind] = {
    "results": Kind("alone", RESULTS, mutators.mutate_hdf5, (read_alone,)),
    "merged": Kind("merged", RESULTS, mutators.mutate_hdf5, RUN_READERS),
    "volume": Kind("run", VOLUME, mutators.mutate_hdf5, RUN_READERS),
    "log": Kind("run", "log-0001-0000.jsonl", mutators.mutate_sealed, RUN_READERS),
    "run": Kind("run", "run.json", mutators.mutate_sealed, RUN_READERS),
    "lock": Kind("run", ".lock-000001", mutators.mutate_lock, RUN_READERS),
    "table": Kind("files", "table.json", mutators.mutate_json, (read_table,)),
    "machine": Kind("files", "machine.json", mutators.mutate_json, (simulate,)),
    "job": Kind("files", "job.toml", mutators.mutate_toml, (read_job,)),
    "jsonl": Kind("files", "rows.jsonl", mutators.mutate_jsonl, (read_corpus,)),
    "gzip": Kind("files", "rows.jsonl.gz", mutators.mutate_gzip, (read_corpus,)),
    "parquet": Kind("files", "rows.parquet", mutators.mutate_parquet, (read_corpus,)),
    "text": Kind("files", "note.txt", mutators.mutate_bytes, (read_corpus,)),
}


def write_expected(folder: Path) -> None:
    """Note what the valid runs hold, beside them."""
    found = exported(folder / "run")
    assert found is not None and len(found) == 6
    for name in ("run", "merged", "alone"):
        (folder / name / "expected.json").write_text(json.dumps(found))
