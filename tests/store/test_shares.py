"""The shares of an array, a folder for each: exported, merged and looked at as one, the missing ones named."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from made_runs import HEADER, corpus_of, record, take, write

from kvr_mpi.cli import group
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_OK, EXIT_USAGE, DataError
from kvr_mpi.store.lock import Lock, this_process
from kvr_mpi.store.log import Header
from kvr_mpi.store.results import open_results

COUNT = 12
NAMES = [f"doc-{n:02d}" for n in range(30)]
Kvr = Callable[..., Result]


@pytest.fixture
def array(tmp_path: Path) -> Path:
    """What an array of twelve tasks leaves: every fifth document failed."""
    for number in range(COUNT):
        share = slice(number, None, COUNT)
        folder = tmp_path / "out" / f"share-{number}-of-{COUNT}"
        take(folder, mode="new", corpus=corpus_of(NAMES), share=share).close()
        write(folder, 0, [record(name, "error" if int(name[-2:]) % 5 == 0 else "done") for name in NAMES[share]])
    return tmp_path / "out"


@pytest.fixture
def run_kvr() -> Kvr:
    def run(*arguments: str | Path) -> Result:
        return CliRunner().invoke(
            group, [str(word) for word in arguments], standalone_mode=False, catch_exceptions=False
        )

    return run


def test_shares_make_one_table(array: Path, kvr: Path) -> None:
    for paths in ([array], sorted(array.iterdir())):
        done = subprocess.run([kvr, "export", *paths], capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stderr) == (EXIT_OK, "")
        assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == NAMES
    done = subprocess.run(
        [kvr, "export", array, "--format", "csv"], capture_output=True, text=True, timeout=300, check=True
    )
    rows = list(csv.reader(io.StringIO(done.stdout)))
    assert len(rows) == 1 + len(NAMES) and sum(row[0] == "id" for row in rows) == 1


def test_gathering_loads_no_models_libraries(array: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from kvr_mpi.cli import group; group(sys.argv[1:], standalone_mode=False); "
        "print([name for name in ('torch', 'transformers', 'mpi4py') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, "merge", array, "-o", tmp_path / "all.h5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    software = open_results(tmp_path / "all.h5").header.software
    assert software["transformers"] == transformers.__version__
    assert torch.__version__.startswith(software["torch"])  # not loaded: without its build, such as +cu130


def test_missing_shares_are_named(array: Path, tmp_path: Path, run_kvr: Kvr) -> None:
    for number in (3, 11):
        shutil.rmtree(array / f"share-{number}-of-{COUNT}")
    (array / f"share-5-of-{COUNT}" / "log-0001-0000.jsonl").unlink()
    left = {name for n, name in enumerate(NAMES) if n % COUNT not in (3, 5, 11)}
    found = run_kvr("export", array)
    assert found.return_value == EXIT_BAD_DATA
    assert {json.loads(line)["id"] for line in found.stdout.splitlines()} == left
    for told in (found, run_kvr("merge", array, "-o", tmp_path / "all.h5")):
        assert told.return_value == EXIT_BAD_DATA
        for word in ("share 3 of 12", "share 11 of 12", f"share-5-of-{COUNT} has no results yet"):
            assert word in told.stderr
        assert "share 4 of" not in told.stderr and len(told.stderr.splitlines()) == 1
    assert {each.id for each in open_results(tmp_path / "all.h5")} == left
    assert run_kvr("export", array / f"share-4-of-{COUNT}").return_value == EXIT_OK  # one was asked for


def test_inspect_shows_shares_as_one_run(array: Path, run_kvr: Kvr) -> None:
    assert json.loads(run_kvr("inspect", array, "--json").stdout)["documents"] == sorted(NAMES)
    document = json.loads(run_kvr("inspect", array, NAMES[3], "--json").stdout)
    assert document["id"] == NAMES[3]
    shutil.rmtree(array / f"share-3-of-{COUNT}")
    told = json.loads(run_kvr("inspect", array, "--json").stdout)
    assert len(told["missing"]) == 1 and "share 3 of 12" in told["missing"][0]
    assert set(told["documents"]) == {*NAMES} - {*NAMES[3::COUNT]}
    assert "share 3 of 12" in run_kvr("inspect", array).stdout


def test_shares_are_known_by_what_they_did_or_else_by_name(array: Path, run_kvr: Kvr) -> None:
    (array / f"share-7-of-{COUNT}").rename(array / "renamed")
    assert run_kvr("export", array).stderr == ""
    shutil.rmtree(array / f"share-8-of-{COUNT}")
    for folder in array.iterdir():
        (folder / "run.json").unlink()
    told = run_kvr("export", array).stderr
    assert "share 7 of 12" in told and "share 8 of 12" in told and "share 9 of 12" not in told


def test_merging_shares(array: Path, tmp_path: Path, run_kvr: Kvr) -> None:
    assert not list(tmp_path.glob("*.h5"))
    with pytest.raises(Exception, match=r"12 runs to merge: name a file with -o FILE") as caught:
        run_kvr("merge", array)
    assert getattr(caught.value, "exit_code", None) == EXIT_USAGE
    before = {path: path.read_bytes() for path in array.rglob("*.jsonl")}
    found = run_kvr("merge", array, "-o", tmp_path / "all.h5")
    assert found.return_value == EXIT_OK and found.stderr == ""
    assert [each.id for each in open_results(tmp_path / "all.h5")] == NAMES
    assert {path: path.read_bytes() for path in array.rglob("*.jsonl")} == before


def test_a_gathered_file_does_not_hide_the_shares(array: Path, run_kvr: Kvr) -> None:
    gathered, share = array / "results.h5", array / f"share-3-of-{COUNT}"
    assert run_kvr("merge", array, "-o", gathered).return_value == EXIT_OK
    shutil.rmtree(share)
    for command in (["export", array], ["merge", array, "-o", gathered, "--overwrite"]):
        told = run_kvr(*command)
        assert told.return_value == EXIT_BAD_DATA and "share 3 of 12" in told.stderr
    assert {each.id for each in open_results(gathered)} == {name for n, name in enumerate(NAMES) if n % COUNT != 3}
    take(share, mode="new", corpus=corpus_of(NAMES), share=slice(3, None, COUNT)).close()
    write(share, 0, [record(name, answer="anew") for name in NAMES[3::COUNT]])
    found = {row["id"]: row["answer"] for row in map(json.loads, run_kvr("export", array).stdout.splitlines())}
    assert sorted(found) == NAMES and found["doc-03"] == "anew"


def test_shares_of_several_prompts_about_each_document_are_complete(tmp_path: Path) -> None:
    corpus = replace(
        corpus_of([f"{name}#{prompt}" for name in "abc" for prompt in ("who", "why")]), prompts=("who", "why")
    )
    for number, names in enumerate(("ac", "b")):
        folder, share = tmp_path / f"share-{number}-of-2", slice(number, None, 2)
        take(folder, mode="new", corpus=corpus, share=share).close()
        write(folder, 0, [record(f"{name}#{prompt}") for name in names for prompt in corpus.prompts])
    assert open_results(tmp_path).missing == ()


def test_a_lock_makes_no_run(array: Path, run_kvr: Kvr) -> None:
    Lock(array, this_process()).release()
    assert len(run_kvr("export", array).stdout.splitlines()) == len(NAMES)


def test_runs_of_different_jobs_are_not_merged(array: Path, tmp_path: Path, run_kvr: Kvr) -> None:
    other = Header({**HEADER.identity, "model": "another"}, HEADER.model)
    take(tmp_path / "other", mode="new", header=other, corpus=corpus_of("x")).close()
    write(tmp_path / "other", 0, [record("x")], header=other)
    with pytest.raises(DataError, match=r"different jobs \(model: .0123abcd. and .another.\)"):
        run_kvr("merge", array, tmp_path / "other", "-o", tmp_path / "all.h5")
    assert not (tmp_path / "all.h5").exists()


def test_a_document_in_two_folders_is_no_share(array: Path, tmp_path: Path, run_kvr: Kvr) -> None:
    take(tmp_path / "other", mode="new").close()
    write(tmp_path / "other", 0, [record("doc-03")])
    for command in (["export"], ["merge", "-o", tmp_path / "all.h5"]):
        with pytest.raises(DataError, match=r"'doc-03' is in .*share-3-of-12 and in .*other"):
            run_kvr(command[0], array, tmp_path / "other", *command[1:])


def test_status_of_an_array(array: Path, run_kvr: Kvr) -> None:
    shutil.rmtree(array / f"share-10-of-{COUNT}")
    done = [name for n, name in enumerate(NAMES) if n % COUNT != 10]
    failed = [name for name in done if int(name[-2:]) % 5 == 0]
    lines = run_kvr("status", array).output.splitlines()
    assert [line.partition(":")[0] for line in lines[:11]] == [
        str(array / f"share-{number}-of-{COUNT}") for number in range(COUNT) if number != 10
    ]  # 2 before 10
    whole = "\n".join(lines[11:])
    assert f"{len(done)}: {len(done) - len(failed)} done, {len(failed)} failed, 0 left" in whole
    assert "share 10 of 12" in whole and f"{len(failed)} x such as: it went wrong" in whole
    told = json.loads(run_kvr("status", array, "--json").output)
    assert (told["done"], told["failed"], told["left"]) == (len(done) - len(failed), len(failed), 0)
    assert len(told["folders"]) == 11 and "share 10 of 12" in told["missing"][0]
    assert told["reasons"] == {"it went wrong": len(failed)}


# Documents that failed


def test_failed_documents_are_shown_alone(array: Path, kvr: Path, run_kvr: Kvr) -> None:
    failed = [name for name in NAMES if int(name[-2:]) % 5 == 0]
    rows = [json.loads(line) for line in run_kvr("export", array, "--status", "error").stdout.splitlines()]
    assert [row["id"] for row in rows] == failed and all(row["error"] == "it went wrong" for row in rows)
    rows = [json.loads(line) for line in run_kvr("export", array, "--status", "done").stdout.splitlines()]
    assert [row["id"] for row in rows] == [name for name in NAMES if name not in failed]
    folder = array / f"share-5-of-{COUNT}"
    done = subprocess.run([kvr, "inspect", folder, "--errors"], capture_output=True, text=True, timeout=300, check=True)
    assert "doc-05: it went wrong" in done.stdout and "doc-17" not in done.stdout
    assert "1 failed\n  1 x it went wrong" in done.stdout
    told = json.loads(run_kvr("inspect", folder, "--errors", "--json").output)
    assert told == {"reasons": {"it went wrong": 1}, "errors": [{"id": "doc-05", "error": "it went wrong"}]}
    assert "1 x it went wrong" in run_kvr("status", folder).output
