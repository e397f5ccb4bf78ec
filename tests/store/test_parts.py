"""The shares of an array, a folder for each: exported, merged and looked at as one, the missing ones named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from constants import Kvr
from made_runs import HEADER, corpus_of, part_of, record, take, write, write_share

from kvr_mpi.documents import CorpusPart
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_OK, EXIT_USAGE, DataError
from kvr_mpi.store.lock import Lock, this_process
from kvr_mpi.store.log import Header
from kvr_mpi.store.results import open_results

COUNT = 12
NAMES = [f"doc-{n:02d}" for n in range(30)]
FAILED = NAMES[::5]


@pytest.fixture
def array(tmp_path: Path) -> Path:
    """What an array of twelve tasks leaves: every fifth document failed."""
    for number in range(COUNT):
        write_share(tmp_path / "out", number, COUNT, NAMES, FAILED)
    return tmp_path / "out"


def rows(out: str) -> dict[str, Any]:
    """Documents of an export, by id."""
    found = [json.loads(line) for line in out.splitlines()]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


def test_shares_make_one_table_of_which_failed_documents_are_shown_alone(array: Path, run_kvr: Kvr) -> None:
    for paths in ([array], sorted(array.iterdir())):
        code, out, err = run_kvr("export", *paths)
        assert (code, err) == (EXIT_OK, "") and list(rows(out)) == NAMES
    assert run_kvr("export", array, "--format", "csv")[1].count('"status"') == 1, "one line of names"
    for status, wanted in (("error", FAILED), ("done", [name for name in NAMES if name not in FAILED])):
        found = rows(run_kvr("export", array, "--status", status)[1])
        assert list(found) == wanted
        assert {row["error"] for row in found.values()} == {"it went wrong" if status == "error" else ""}
    folder = array / f"share-5-of-{COUNT}"
    shown = run_kvr("inspect", folder, "--errors")[1]
    assert "doc-05: it went wrong" in shown and "doc-17" not in shown and "1 x it went wrong" in shown
    told = json.loads(run_kvr("inspect", folder, "--errors", "--json")[1])
    assert told == {"reasons": {"it went wrong": 1}, "errors": [{"id": "doc-05", "error": "it went wrong"}]}


def test_shares_are_merged_as_they_are_without_models_libraries(array: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in array.rglob("*.jsonl")}
    code = (
        "import sys; from kvr_mpi.cli import group; group(sys.argv[1:], standalone_mode=False); "
        "print([name for name in ('torch', 'transformers', 'mpi4py') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, "merge", array, "-o", tmp_path / "all.h5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert {path: path.read_bytes() for path in array.rglob("*.jsonl")} == before
    assert [each.id for each in open_results(tmp_path / "all.h5")] == NAMES
    software = open_results(tmp_path / "all.h5").header.software
    assert software["transformers"] == transformers.__version__
    assert torch.__version__.startswith(software["torch"])  # not loaded: without its build, such as +cu130


def test_missing_shares_are_named(array: Path, tmp_path: Path, run_kvr: Kvr) -> None:
    for number in (3, 11):
        shutil.rmtree(array / f"share-{number}-of-{COUNT}")
    (array / f"share-5-of-{COUNT}" / "log-0001-0000.jsonl").unlink()
    left = {name for n, name in enumerate(NAMES) if n % COUNT not in (3, 5, 11)}
    for command in (["export", array], ["merge", array, "-o", tmp_path / "all.h5"]):
        code, out, err = run_kvr(*command)
        assert code == EXIT_BAD_DATA and "share 4 of" not in err and len(err.splitlines()) == 1
        assert command[0] == "merge" or {*rows(out)} == left
        for word in ("share 3 of 12", "share 11 of 12", f"share-5-of-{COUNT} has no results yet"):
            assert word in err
    assert {each.id for each in open_results(tmp_path / "all.h5")} == left
    assert run_kvr("export", array / f"share-4-of-{COUNT}")[0] == EXIT_OK  # one was asked for
    with pytest.raises(DataError, match=r"missing: share 3 of 12.*partial=True"):
        open_results(array)
    found = open_results(array, partial=True)
    assert {each.id for each in found} == left and "share 3 of 12" in found.missing[0] and "share 3 of 12" in str(found)


def test_shares_are_known_by_what_they_did_or_else_by_name(array: Path, run_kvr: Kvr) -> None:
    (array / f"share-7-of-{COUNT}").rename(array / "renamed")
    assert run_kvr("export", array)[2] == ""
    shutil.rmtree(array / f"share-8-of-{COUNT}")
    for folder in array.iterdir():
        (folder / "run.json").unlink()
    err = run_kvr("export", array)[2]
    assert "share 7 of 12" in err and "share 8 of 12" in err and "share 9 of 12" not in err


def test_a_gathered_file_does_not_hide_the_shares(array: Path, run_kvr: Kvr) -> None:
    gathered, share = array / "results.h5", array / f"share-3-of-{COUNT}"
    assert run_kvr("merge", array, "-o", gathered)[0] == EXIT_OK
    shutil.rmtree(share)
    for command in (["export", array], ["merge", array, "-o", gathered, "--overwrite"]):
        code, _, err = run_kvr(*command)
        assert code == EXIT_BAD_DATA and "share 3 of 12" in err
    assert {each.id for each in open_results(gathered)} == {name for n, name in enumerate(NAMES) if n % COUNT != 3}
    take(share, corpus=part_of(NAMES, 3, COUNT)).lock.release()
    write(share, 0, [record(name, answer="anew") for name in NAMES[3::COUNT]])
    found = rows(run_kvr("export", array)[1])
    assert sorted(found) == NAMES and found["doc-03"]["answer"] == "anew"


def test_shares_of_several_prompts_about_each_document_are_complete(tmp_path: Path) -> None:
    for number, names in enumerate(("ac", "b")):
        folder, corpus = tmp_path / f"share-{number}-of-2", replace(part_of("abc", number, 2), prompts=("who", "why"))
        take(folder, corpus=corpus).lock.release()
        write(folder, 0, [record(f"{name}#{prompt}") for name in names for prompt in corpus.prompts])
    assert open_results(tmp_path).missing == ()


def test_runs_that_are_no_shares_of_one_job_are_refused(array: Path, tmp_path: Path, run_kvr: Kvr) -> None:
    target = ["-o", tmp_path / "all.h5"]
    other = Header({**HEADER.identity, "model": "another"}, HEADER.model)
    for folder, name, header in (("other", "x", other), ("again", "doc-03", HEADER)):
        take(tmp_path / folder, header=header, corpus=corpus_of([name])).lock.release()
        write(tmp_path / folder, 0, [record(name)], header=header)
    for command, wanted, words in (
        (
            ["merge", array, tmp_path / "other", *target],
            EXIT_BAD_DATA,
            'different jobs (model: "0123abcd" and "another")',
        ),
        (["merge", array, tmp_path / "again", *target], EXIT_BAD_DATA, "'doc-03' is in "),
        (["export", array, tmp_path / "again"], EXIT_BAD_DATA, "'doc-03' is in "),
        (["merge", array], EXIT_USAGE, "12 runs to merge: specify the output file with -o FILE"),
    ):
        code, _, err = run_kvr(*command)
        assert code == wanted and words in err, err
        assert words != "'doc-03' is in " or ("share-3-of-12" in err and "again" in err)
    assert not (tmp_path / "all.h5").exists()


def test_two_documents_with_one_id_in_two_shares_are_named_and_stop_nothing(tmp_path: Path, run_kvr: Kvr) -> None:
    for number, names in enumerate((["a", "b"], ["c", "a"])):
        folder = tmp_path / f"share-{number}-of-2"
        take(folder, corpus=replace(corpus_of(names), part=CorpusPart(number, 2), cut="same")).lock.release()
        write(folder, 0, [record(name, answer=f"{name} of share {number}") for name in names])
    code, _, err = run_kvr("merge", tmp_path, "-o", tmp_path / "all.h5")
    assert code == EXIT_BAD_DATA and "'a'" in err and "share-0-of-2" in err and "share-1-of-2" in err
    assert [(one.id, one.answer[-1]) for one in open_results(tmp_path / "all.h5")] == [
        ("a", "0"),
        ("b", "0"),
        ("c", "1"),
    ]


def test_status_and_inspect_show_an_array_as_one_run(array: Path, run_kvr: Kvr) -> None:
    Lock(array, this_process()).release()  # makes no run of the folder
    assert json.loads(run_kvr("inspect", array, "--json")[1])["documents"] == NAMES
    assert json.loads(run_kvr("inspect", array, NAMES[3], "--json")[1])["id"] == NAMES[3]
    shutil.rmtree(array / f"share-10-of-{COUNT}")
    done = [name for n, name in enumerate(NAMES) if n % COUNT != 10]
    failed = sum(name in FAILED for name in done)
    told = json.loads(run_kvr("inspect", array, "--json")[1])
    assert "share 10 of 12" in told["missing"][0] and told["documents"] == done
    lines = run_kvr("status", array)[1].splitlines()
    assert [line.partition(":")[0] for line in lines[:11]] == [
        str(array / f"share-{number}-of-{COUNT}") for number in range(COUNT) if number != 10
    ]  # 2 before 10
    told = json.loads(run_kvr("status", array, "--json")[1])
    assert (told["done"], told["failed"], told["left"]) == (len(done) - failed, failed, 0)
    assert len(told["folders"]) == 11 and "share 10 of 12" in told["missing"][0]
    assert told["reasons"] == {"it went wrong": failed}
