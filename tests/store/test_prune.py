"""Keys and values removed: records stay, files shrink, and what is left can be read."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from made_runs import kv_in, new_writer, record, resume, take

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK, EXIT_USAGE, DataError, counted
from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import choose_pruned, finish_run, list_stored

NOW = datetime(2026, 11, 22, tzinfo=UTC)


def kept(folder: Path) -> set[str]:
    return set(list_stored(open_results(folder)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five documents, a day between each; one of them failed."""
    folder = tmp_path / "run"
    take(folder).lock.release()
    for rank, names in enumerate(("cde", "ab")):
        writer = new_writer(folder, rank)
        for name in names:
            day = (NOW - timedelta(days=5 - "abcde".index(name))).isoformat(timespec="milliseconds")
            layer = torch.randn(400, 4, 16)
            one = replace(record(name, "error" if name == "e" else "done"), finished_at=day)
            writer.write(one, [(layer, -layer)] if name != "e" else (), CachedTokens(range(400), (2, 390)))
        writer.close()
    assert kept(folder) == set("abcd")
    return folder


@pytest.mark.parametrize("is_merged", [True, False])
@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--doc", "b", "--doc", "d"], "ac"),
        (["--keep", "450000"], "cd"),
        (["--keep", "0"], ""),
        (["--doc", "d", "--keep", "220K"], "c"),
        (["--keep", "1T"], "abcd"),
    ],
)
def test_what_is_named_goes_and_records_stay(
    run: Path, run_kvr: Any, arguments: list[str], left: str, is_merged: bool
) -> None:
    if is_merged:
        finish_run(run)
    before, size = list(open_results(run)), sum(file.stat().st_size for file in run.glob("*.h5"))
    code, out, err = run_kvr("prune", run, *arguments, "--dry-run")
    assert code == EXIT_OK and err == "" and "would be removed" in out and kept(run) == set("abcd")
    code, out, err = run_kvr("prune", run, *arguments)
    assert code == EXIT_OK and err == "", err
    assert f"of {counted(4 - len(left), 'document')} removed" in out
    assert kept(run) == set(left) and list(open_results(run)) == before
    smaller = sum(file.stat().st_size for file in run.glob("*.h5"))
    assert size - smaller >= (4 - len(left)) * 400 * 4 * 16 * 4 * 2
    assert run_kvr("inspect", run)[0] == run_kvr("export", run)[0] == EXIT_OK
    done, failed, said = resume(run)
    assert (done, failed, said) == (set("abcd"), {"e"}, [])


def test_age_counts_from_when_a_document_was_finished(run: Path) -> None:
    index, now_s = open_results(run), NOW.timestamp()
    assert list_stored(index) == ["a", "b", "c", "d"]
    for days, gone in ((10, ""), (3.5, "ab"), (2.5, "abc"), (0, "abcd")):
        assert choose_pruned(index, older_than_s=86_400 * days, now_s=now_s) == [*gone]
    keep_bytes = 2 * index.places["a"].kv_bytes
    assert choose_pruned(index, older_than_s=86_400 * 4.5, keep_bytes=keep_bytes, now_s=now_s) == ["a", "b"]


def test_damage_in_any_block_of_a_layer_is_found_and_left_as_it_is(run: Path, run_kvr: Any) -> None:
    file = max(run.glob("kv-*.h5"))
    content = file.read_bytes()
    with h5py.File(file) as opened:
        keys = kv_in(opened, "a")["layer_000/keys"]
        start, row = keys.id.get_offset(), keys[0].nbytes
    for token in (0, 255, 256, 399):
        at = start + token * row
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with open_results(run, verify=False).open("a") as (_, kv), pytest.raises(DataError, match="layer_000/keys"):
            kv.read(0)
    damaged = file.read_bytes()
    code, _, err = run_kvr("prune", run, "--doc", "b")
    assert code == EXIT_BAD_DATA and file.name in err and file.read_bytes() == damaged


def test_prune_refuses_what_is_not_there(run: Path, tmp_path: Path, run_kvr: Any) -> None:
    assert run_kvr("prune", run)[0] == EXIT_USAGE
    assert run_kvr("prune", run, "--keep", "much")[0] == EXIT_USAGE
    code, _, err = run_kvr("prune", run, "--older-than", "30x")
    assert code == EXIT_CONFIG and "'30x'" in err and "7d" in err
    code, _, err = run_kvr("prune", run, "--doc", "e")
    assert code == EXIT_CONFIG and "'e'" in err
    assert run_kvr("prune", tmp_path / "no", "--keep", "0")[0] == EXIT_CONFIG
    holder = take(run)
    try:
        code, _, err = run_kvr("prune", run, "--keep", "0")
        assert code == EXIT_CONFIG and "is in use" in err
    finally:
        holder.lock.release()
