"""A run's folder, read and merged: each document counts once, whatever was interrupted."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from constants import TESTS
from hypothesis import given, settings
from hypothesis import strategies as st
from made_logs import logger_to
from made_runs import HEADER, new_writer, record, result_files, write

from kvr_mpi.store.folder import survey
from kvr_mpi.store.log import DROPPED, PRUNED, LogWriter, seal, unseal
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import finish_run, merge_run, merge_runs
from kvr_mpi.store.volumes import RESULTS, open_source
from kvr_mpi.store.writer import ResultWriter


def bits(path: Path) -> dict[tuple[str, int], list[bytes]]:
    """Read all keys and values, by document and layer."""
    found: dict[tuple[str, int], list[bytes]] = {}
    results = open_results(path)
    for name in results.ids():
        with results.open(name) as (_, kv):
            for layer in kv.layers:
                found[name, layer] = [each.numpy().tobytes() for each in kv.read(layer)]
    return found


@settings(max_examples=20)
@given(
    shards=st.lists(
        st.dictionaries(
            st.sampled_from(["A", "a", "..", "a/b", "a b", "é"]), st.sampled_from(["done", "error"]), min_size=1
        ),
        min_size=1,
        max_size=4,
    )
)
def test_each_id_once_done_before_error_and_late_before_early_and_a_merge_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, shards: list[dict[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    wanted: dict[str, Record] = {}
    for number, shard in enumerate(shards):
        records = [record(name, status, f"shard {number}") for name, status in shard.items()]
        write(folder, number, records)
        for each in records:
            if each.status == "done" or wanted.get(each.id, each).status == "error":
                wanted[each.id] = each
    assert list(open_results(folder)) == [wanted[name] for name in sorted(wanted)]
    merge_run(folder)
    assert list(open_results(folder)) == [wanted[name] for name in sorted(wanted)]


def test_two_readers_of_one_file_in_a_process_do_not_move_each_other(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(f"doc-{number:03}", answer="word " * 400) for number in range(40)])
    result = finish_run(tmp_path)
    with open_source(result) as one, open_source(result) as other:
        pairs = list(zip(one.lines(), other.lines(), strict=True))
    assert len(pairs) == 42 and all(first == second for first, second in pairs)
    results = [*open_results(result)]
    with ThreadPoolExecutor(4) as pool:
        assert all(found == results for found in pool.map(lambda _: [*open_results(result)], range(40)))


def test_a_merge_keeps_records_and_bits_and_removes_the_logs(tmp_path: Path) -> None:
    folder, target = tmp_path / "run", tmp_path / "all.h5"
    folder.mkdir()
    write(folder, 0, [record("a"), record("x/y.txt")], kv=True)
    write(folder, 1, [record("b", "error"), record("..")], kv=True)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    records, arrays = list(open_results(folder)), bits(folder)
    assert len(arrays) == 3 * 2
    assert merge_runs([folder], target) == ()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before, "into another file"
    result = merge_run(folder)
    assert result_files(folder) == [RESULTS]
    for merged in (folder, result, target):
        assert list(open_results(merged)) == records and bits(merged) == arrays
    assert open_results(result).header.identity == HEADER.identity
    content, changed = result.read_bytes(), result.stat().st_mtime_ns
    assert merge_run(folder) == result, "once more"
    assert result.read_bytes() == content and result.stat().st_mtime_ns == changed


MERGE_MANY = """
import sys, pathlib, torch
from made_runs import new_writer, record
from kvr_mpi.store.rewrite import merge_run

def rss_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

folder, layer = pathlib.Path(sys.argv[1]), torch.ones(4, 1, 4)
writer = new_writer(folder)
for number in range(2000):
    writer.write(record(f"doc-{number:05d}"), [(layer, layer)] if number % 2 else ())
writer.close()
before = rss_kib()
merge_run(folder)
print(rss_kib() - before)
"""


@pytest.mark.long
def test_merging_many_documents_takes_little_memory(tmp_path: Path) -> None:
    command, environ = [sys.executable, "-c", MERGE_MANY, tmp_path], {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30 << 10, "HDF5 kept 20 KB of each: 300 MB after 20,000 documents"


def test_a_merge_at_the_end_of_a_run_that_has_no_room_or_no_time_leaves_its_logs_as_the_results(
    tmp_path: Path,
) -> None:
    for number in range(3):
        write(tmp_path, number, [record(f"{number}-{name}", answer=name * 30_000) for name in "abc"])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    said, asked = list[str](), itertools.count()
    with largest_file(40_000):
        assert finish_run(tmp_path, logger=logger_to(said)) == tmp_path
    assert finish_run(tmp_path, lambda: next(asked) > 3, logger_to(said)) == tmp_path
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert len(said) == 1 and os.strerror(errno.EFBIG) in said[0] and len(said[0].splitlines()) == 1
    assert f"kvr merge {tmp_path}" in said[0]
    assert finish_run(tmp_path) == tmp_path / RESULTS and len(list(open_results(tmp_path))) == 3 * 3


def test_a_merge_without_room_for_keys_and_values_is_no_damage(tmp_path: Path) -> None:
    writer, layer, said = new_writer(tmp_path), torch.ones(4096, 2, 8), list[str]()
    writer.write(record("a"), [(layer, layer)])
    writer.close()
    with largest_file(40_000):
        assert finish_run(tmp_path, logger=logger_to(said)) == tmp_path
    assert len(said) == 1 and os.strerror(errno.EFBIG) in said[0]
    assert finish_run(tmp_path) == tmp_path / RESULTS and bits(tmp_path)["a", 0][0] == layer.numpy().tobytes()


def test_a_line_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, 1, None, HEADER)
    log.write(seal({"line": DROPPED, "ids": ["a"]}))
    size = log.path.stat().st_size
    with largest_file(size + 10), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        log.write(seal({"line": DROPPED, "ids": ["b"]}))
    assert log.path.stat().st_size == size
    log.write(seal({"line": DROPPED, "ids": ["c"]}))
    log.close()
    lines = [unseal(line) for line in log.path.read_bytes().splitlines()]
    assert [line and line.get("ids") for line in lines] == [None, ["a"], ["c"]] and all(lines)


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Let no file grow any further, as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_is_dropped_or_pruned_counts_for_earlier_sessions_only(tmp_path: Path) -> None:
    write(tmp_path, 0, [record("a", answer="old"), record("b"), record("c")], kv=True)
    with LogWriter(tmp_path, 2, None, HEADER) as log:
        log.write(seal({"line": DROPPED, "ids": ["a", "b", "unknown"]}))
        log.write(seal({"line": PRUNED, "ids": ["c", "unknown"]}))
    writer = ResultWriter(tmp_path, 0, HEADER, 2)
    writer.write(record("a", answer="new"))
    writer.close()
    for _ in range(2):
        found = open_results(tmp_path)
        assert found.ids() == ["a", "c"] and found["a"].answer == "new" and not bits(tmp_path)
        merge_run(tmp_path)


def test_a_folder_is_looked_at_while_a_job_merges_it(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(name) for name in "abc"], kv=True)
    (tmp_path / "log-0001-0001.jsonl").symlink_to(tmp_path / "gone")  # listed, and not there any more
    assert open_results(tmp_path).ids() == ["a", "b", "c"]
    assert survey(tmp_path).damaged == {}
