"""HDF5 files that are not what they should be: reading one ends in DataError, and no command goes on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from constants import Kvr
from damage import Damage, damaged, external, replace_in, setting, stored_outside, virtual
from damage_cases import HEADER_DAMAGE, KEYS, KV_DAMAGE, KV_READ_DAMAGE, RECORD_DAMAGE, cases
from made_runs import resume
from untrusted import HEADER, SECRET, assert_bad_data, read_everything

from kvr_mpi.errors import EXIT_OK, DataError, ForeignError

# The undamaged file, so that all the refusals below mean something


def test_the_undamaged_file_is_read(good: Path, run_kvr: Kvr) -> None:
    assert [record.id for record in read_everything(good)] == ["a", "b"]
    for command in (["inspect", good], ["inspect", good, "a"], ["export", good], ["export", good, "--format", "csv"]):
        code, out, err = run_kvr(*command)
        assert code == EXIT_OK and out and not err


# HDF5 files that are not what they should be


@pytest.mark.parametrize("damage", cases(RECORD_DAMAGE, HEADER_DAMAGE, KV_DAMAGE, KV_READ_DAMAGE))
def test_reading_a_damaged_file_is_bad_data(good: Path, outside: Path, damage: Damage) -> None:
    path = damaged(good, outside, damage)
    with pytest.raises(DataError) as caught:
        read_everything(path)
    assert path.name in str(caught.value) and SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param({**RECORD_DAMAGE, **HEADER_DAMAGE, **KV_DAMAGE}[name], id=name)
        for name in (
            "records-external-link",
            "line-cut",
            "id-missing",
            "version-newer",
            "identity-list",
            "keys-virtual",
        )
    ],
)
def test_no_command_goes_on_with_a_damaged_document(good: Path, outside: Path, damage: Damage, run_kvr: Kvr) -> None:
    path = damaged(good, outside, damage)
    for command in (["inspect", path, "a"], ["inspect", path, "a", "--json"]):
        assert_bad_data(run_kvr(*command), path)
    if damage is not KV_DAMAGE["keys-virtual"]:
        for command in (["inspect", path], ["inspect", path, "--json"], ["export", path], ["merge", path.parent]):
            assert_bad_data(run_kvr(*command), path)


@pytest.mark.parametrize(
    "name",
    [
        "id-missing", "id-0", "status-missing", "status-unknown", "records-soft-link", "records-scalar", "log-missing",
        "schema-list", "version-newer", "identity-list", "header-deep", "answer-surrogate", "volume-path",
    ],
)  # fmt: skip
def test_no_damaged_file_is_resumed(good: Path, outside: Path, name: str) -> None:
    damaged(good, outside, {**RECORD_DAMAGE, **HEADER_DAMAGE}[name])
    content = good.read_bytes()
    if name == "version-newer":
        with pytest.raises(ForeignError):
            resume(good.parent, header=HEADER)
        assert good.read_bytes() == content
    else:  # set aside, whole, and nothing in it counts
        done, failed, said = resume(good.parent, header=HEADER)
        assert not done and not failed and any("is damaged" in line for line in said)
        assert good.with_name(f"{good.name}.damaged-1").read_bytes() == content and not good.exists()


@pytest.mark.parametrize("kind", ["external-link", "virtual", "stored-outside"])
def test_no_other_file_is_even_opened(good: Path, outside: Path, kvr: Path, kind: str) -> None:
    # Opening a pipe that nobody writes to waits for ever, so a reader that follows the link runs out of time.
    damage = {
        "external-link": replace_in("records", external("/secret")),
        "virtual": virtual(KEYS, "floats"),
        "stored-outside": stored_outside("log", (16,), "u1"),
    }[kind]
    damaged(good, outside, damage)
    for name in ("other.h5", "secret.txt"):
        (outside / name).unlink()
        os.mkfifo(outside / name)
    done = subprocess.run([kvr, "inspect", good], capture_output=True, text=True, timeout=300, check=False)
    assert_bad_data((done.returncode, done.stdout, done.stderr), good)


def test_a_failed_export_leaves_no_file_and_keeps_the_old_one(good: Path, outside: Path, run_kvr: Kvr) -> None:
    damaged(good, outside, setting("token_ids", "5"))
    fresh, old = good.parent / "fresh.jsonl", good.parent / "old.jsonl"
    old.write_text("precious")
    assert_bad_data(run_kvr("export", good, "-o", fresh), good)
    assert_bad_data(run_kvr("export", good, "-o", old, "--overwrite"), good)
    assert not fresh.exists() and old.read_text() == "precious"
    assert list(good.parent.glob("*.part")) == []


def test_a_truncated_input_is_bad_data_not_a_bad_output_file(good: Path, run_kvr: Kvr) -> None:
    good.write_bytes(good.read_bytes()[:5000])
    for kind in ("jsonl", "csv", "parquet"):
        assert_bad_data(run_kvr("export", good, "--format", kind, "-o", good.with_name("out")), good)
    assert not good.with_name("out").exists()
