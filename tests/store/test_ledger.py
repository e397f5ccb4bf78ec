"""Recovery: whatever is cut, flipped or missing, what counts is what is whole, and the rest is done again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import HEADER, corpus_of, record, result_files, resume, write

from kvr_mpi.disk import PART
from kvr_mpi.store.ledger import LedgerWriter, ShardLine, read_ledger, seal, unseal
from kvr_mpi.store.results import open_results
from kvr_mpi.store.shards import ShardWriter

Damage = Callable[[bytes, int], bytes]
VALUES = st.dictionaries(
    st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)
)


@given(VALUES)
def test_a_sealed_line_comes_back(value: dict[str, object]) -> None:
    value = {"shard": "x", **{name: each for name, each in value.items() if name != "seal"}}
    assert seal(value).count(b"\n") == 1
    assert unseal(seal(value)) == value


@given(st.integers(0), st.integers(0, 7))
def test_no_flipped_bit_goes_unseen(at: int, bit: int) -> None:
    line = seal({"shard": "shard-0001-0000-00000.h5", "size_bytes": 12345, "done": ["a", "b"]})[:-1]
    changed = bytearray(line)
    changed[at % len(line)] ^= 1 << bit
    assert unseal(bytes(changed)) is None


@pytest.fixture(scope="module")
def three_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    writer = ShardWriter(folder, "0000", HEADER)
    for name in ("a", "b", "c"):
        writer.write(record(name))
        writer.flush()
    writer.close()
    return folder


def copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def damaged_everywhere(source: Path, tmp_path: Path, name: str, damage: Damage, step: int) -> None:
    """Damage a file at every `step`-th byte; afterwards what is done can be read, and the rest is known to be left."""
    content = (source / name).read_bytes()
    before = {each.id: each for each in open_results(source)}
    for at in range(0, len(content), step):
        folder = copied(source, tmp_path / "run")
        (folder / name).write_bytes(damage(content, at))
        done, failed, said = resume(folder)
        assert not failed and {*"abc"} >= done >= {*"abc"} - {"b"}
        assert done == {*"abc"} or said, "what was lost must be said"
        assert {each.id: each for each in open_results(folder, partial=True)} == {name: before[name] for name in done}
        # Done again, it is there once.
        write(folder, "0009", [record(each) for each in {*"abc"} - done])
        assert {each.id: each for each in open_results(folder)} == before
        assert resume(folder)[0] == {*"abc"}


def test_a_ledger_cut_at_every_byte_loses_no_document(three_shards: Path, tmp_path: Path) -> None:
    damaged_everywhere(three_shards, tmp_path, "ledger-0000.jsonl", lambda content, at: content[:at], 17)


def test_a_bit_flipped_anywhere_in_a_ledger_loses_no_document(three_shards: Path, tmp_path: Path) -> None:
    def flip(content: bytes, at: int) -> bytes:
        return content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]

    damaged_everywhere(three_shards, tmp_path, "ledger-0000.jsonl", flip, 19)


def test_a_shard_cut_anywhere_is_set_aside(three_shards: Path, tmp_path: Path) -> None:
    shard = "shard-0000-0000-00001.h5"
    step = len((three_shards / shard).read_bytes()) // 30
    damaged_everywhere(three_shards, tmp_path, shard, lambda content, at: content[:at], step)
    folder = copied(three_shards, tmp_path / "run")
    content = (folder / shard).read_bytes()[:-1]
    (folder / shard).write_bytes(content)
    done, _, said = resume(folder)
    assert done == {"a", "c"}
    assert any("expected" in line and "processed again" in line and shard in line for line in said)
    assert (folder / f"{shard}.damaged-1").read_bytes() == content


def test_a_bit_flipped_anywhere_in_a_shard_is_noticed(three_shards: Path, tmp_path: Path) -> None:
    shard = "shard-0000-0000-00001.h5"
    content = (three_shards / shard).read_bytes()
    for at in range(0, len(content), len(content) // 30):
        folder = copied(three_shards, tmp_path / "run")
        (folder / shard).write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        assert resume(folder)[0] == {"a", "c"}


def test_a_crash_before_a_shard_is_recorded_leaves_nothing_that_counts(three_shards: Path, tmp_path: Path) -> None:
    folder, shard = copied(three_shards, tmp_path / "run"), "shard-0000-0000-00002.h5"
    (folder / shard).rename(folder / (shard + PART))
    ledger = folder / "ledger-0000.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:2]))
    assert resume(folder)[0] == {"a", "b"}
    assert result_files(folder) == ["shard-0000-0000-00000.h5", "shard-0000-0000-00001.h5"]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_crash_before_a_recorded_shard_has_its_name(three_shards: Path, tmp_path: Path, is_whole: bool) -> None:
    folder, shard = copied(three_shards, tmp_path / "run"), "shard-0000-0000-00002.h5"
    (folder / shard).rename(folder / (shard + PART))
    if not is_whole:
        content = bytearray((folder / (shard + PART)).read_bytes())
        content[2000] ^= 1
        (folder / (shard + PART)).write_bytes(content)
    done, _, said = resume(folder)
    assert done == ({*"abc"} if is_whole else {"a", "b"})
    assert ([*folder.glob(shard)] != []) == is_whole and not [*folder.glob(f"*{PART}")]
    assert is_whole or any("is gone: 1 document" in line for line in said)


def test_a_shard_that_is_gone_is_done_again(three_shards: Path, tmp_path: Path) -> None:
    folder = copied(three_shards, tmp_path / "run")
    (folder / "shard-0000-0000-00000.h5").unlink()
    done, _, said = resume(folder)
    assert done == {"b", "c"} and any("shard-0000-0000-00000.h5 is gone" in line for line in said)


def test_a_folder_without_ledgers_is_read(three_shards: Path, tmp_path: Path) -> None:
    folder = copied(three_shards, tmp_path / "run")
    (folder / "ledger-0000.jsonl").unlink()
    done, _, said = resume(folder)
    assert done == {*"abc"} and sum("was not in the ledger" in line for line in said) == 3
    assert resume(folder)[2] == []  # from now on it is


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    with (tmp_path / "ledger-0000.jsonl").open("ab") as stream:
        stream.write(b'{"shard": "shard-0000-0000-000')
    write(tmp_path, "0000", [record("b")])
    found = read_ledger(tmp_path)
    assert len(found.shards) == 2 and found.damaged == [("ledger-0000.jsonl", 2)]
    assert resume(tmp_path)[0] == {"a", "b"}


def test_names_in_a_ledger_lead_nowhere_else(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside.h5"
    folder.mkdir()
    write(folder, "0000", [record("a")])
    outside.write_bytes((folder / "shard-0000-0000-00000.h5").read_bytes())
    (line,) = read_ledger(folder).shards["shard-0000-0000-00000.h5"]
    for name in ("../outside.h5", str(outside)):
        fake = {"size_bytes": line.size_bytes, "crc32": line.crc32, "done": ["z"], "failed": [], "at_s": 0.0}
        fake |= {"reasons": [], "parts": {}}
        with (folder / "ledger-0000.jsonl").open("ab") as stream:
            stream.write(seal({"shard": name, **fake}))
    assert resume(folder)[0] == {"a"} and outside.exists()


@settings(max_examples=30)
@given(st.binary(max_size=200))
def test_any_bytes_may_follow(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    folder = tmp_path_factory.mktemp("junk")
    line = ShardLine("shard-a.h5", 1, "00000000", ["a"], [], 0.0, [], {})
    LedgerWriter(folder, "x").record(line)
    with (folder / "ledger-x.jsonl").open("ab") as stream:
        stream.write(junk)
    LedgerWriter(folder, "x").record(replace(line, done=["b"]))
    found = [name for each in read_ledger(folder).shards["shard-a.h5"] for name in each.done]
    assert found[0] == "a" and found[-1] == "b"
    assert all(json.dumps(each) for each in read_ledger(folder).damaged)


def test_a_sealed_line_with_text_for_names_counts_no_letter_as_a_document(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a"), record("b")])
    ledger = tmp_path / "ledger-0000.jsonl"
    line = unseal(ledger.read_bytes())
    assert line is not None
    ledger.write_bytes(seal({**line, "failed": "xyz"}))
    done, failed, _ = resume(tmp_path, corpus=corpus_of(["a", "b", "x", "y", "z"]))
    assert (done, failed) == ({"a", "b"}, set())
