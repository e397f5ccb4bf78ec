"""No stored answer that was changed gets out as if it were sound, with a ledger or without."""

from __future__ import annotations

import json
import resource
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from made_runs import HEADER, corpus_of, record, resume, take, write
from measured import run_and_measure

from kvr_mpi.cli import kvr as kvr_main
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_OK, DataError
from kvr_mpi.store.merge import merge_run
from kvr_mpi.store.shards import ShardWriter

Kvr = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_kvr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvr:
    """Run the entry point of ``kvr`` in this process: code, standard output, standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvr", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            kvr_main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


def changed(file: Path, before: bytes, after: bytes) -> Path:
    """Change bytes of a file where they lie, so that nobody who can forge checksums is needed."""
    content = file.read_bytes()
    assert before in content and len(before) == len(after)
    file.write_bytes(content.replace(before, after))
    return file


def shard_of(folder: Path) -> Path:
    (shard,) = folder.glob("shard-*.h5")
    return shard


COMMANDS = (["export"], ["export", "--format", "csv"], ["inspect"], ["inspect", "--json"], ["inspect", "a"])


def arguments(command: list[str], path: Path) -> list[str | Path]:
    return [command[0], path, *command[1:]]


@pytest.fixture
def new(tmp_path: Path) -> Path:
    folder = tmp_path / "new"
    take(folder, mode="new").close()
    write(folder, "0000", [record("a", answer="the answer"), record("b", "error")], kv=True)
    return folder


def test_an_answer_that_was_changed_is_refused_with_its_ledger_and_without(new: Path, run_kvr: Kvr) -> None:
    shard = changed(shard_of(new), b"the answer", b"the lie ..")
    alone = Path(shutil.copy(shard, new.parent / "alone.h5"))
    for path in (new, shard, alone):
        for command in COMMANDS:
            code, out, err = run_kvr(*arguments(command, path))
            assert code == EXIT_BAD_DATA and "the lie" not in out and path.name in err, command
            if command != ["inspect", "--json"]:  # which shows no record
                code, out, _ = run_kvr(*arguments(command, path), "--no-verify")
                assert code == EXIT_BAD_DATA and "the lie" not in out, command


def rewritten(shard: Path, change: Callable[[h5py.Group], None]) -> None:
    """Change a record through HDF5, which makes its own checksums anew."""
    with h5py.File(shard, "a") as file:
        change(file["documents/a"])


def set_answer(group: h5py.Group) -> None:
    group["answer"][0] = b"the lie ..".ljust(group["answer"].dtype.itemsize)[: group["answer"].dtype.itemsize]


def set_error(group: h5py.Group) -> None:
    group.attrs.modify("dropped_tokens", np.int64(7))


def set_tokens(group: h5py.Group) -> None:
    group["token_ids"][0] = 9


def drop_field(group: h5py.Group) -> None:
    del group.attrs["finish_reason"]


def drop_seal(group: h5py.Group) -> None:
    del group.attrs["record_sha256"]


def drop_kv(group: h5py.Group) -> None:
    del group["kv/layer_002"]


@pytest.mark.parametrize("change", [set_answer, set_error, set_tokens, drop_field, drop_seal, drop_kv])
def test_a_changed_record_in_a_shard_without_ledger_is_set_aside(
    new: Path, change: Callable[[h5py.Group], None], run_kvr: Kvr
) -> None:
    (new / "ledger-0000.jsonl").unlink()
    shard = shard_of(new)
    rewritten(shard, change)
    if change is not drop_kv:
        assert run_kvr("export", new)[0] == run_kvr("inspect", new)[0] == EXIT_BAD_DATA
    assert run_kvr("inspect", new, "a")[0] == EXIT_BAD_DATA
    assert run_kvr("merge", new)[0] == EXIT_BAD_DATA
    done, failed, said = resume(new)
    assert (done, failed) == (set(), set()) and any("is damaged" in line for line in said)
    assert shard.with_name(f"{shard.name}.damaged-1").exists()


def test_changed_keys_and_values_in_a_shard_without_ledger_are_noticed(tmp_path: Path, run_kvr: Kvr) -> None:
    layer = torch.full((40, 2, 8), 1.5)
    writer = ShardWriter(tmp_path, "0000", HEADER)
    writer.write(record("a"), [(layer, layer)])
    writer.close()
    (tmp_path / "ledger-0000.jsonl").unlink()
    shard = shard_of(tmp_path)
    value = np.float32(1.5).tobytes()
    content = shard.read_bytes()
    at = content.index(value * 64) + 40
    shard.write_bytes(content[:at] + np.float32(2.5).tobytes() + content[at + 4 :])
    assert run_kvr("inspect", tmp_path, "a")[0] == EXIT_BAD_DATA
    assert run_kvr("inspect", tmp_path, "a", "--no-verify")[0] == EXIT_OK  # shows no values
    with pytest.raises(DataError, match="cannot be read"):
        merge_run(tmp_path)
    assert resume(tmp_path)[0] == set()


def test_a_long_header_is_guarded_too(tmp_path: Path, run_kvr: Kvr) -> None:
    header = type(HEADER)(
        {**HEADER.identity, "prompt": "word " * 20_000}, HEADER.model
    )  # too long for an object header
    write(tmp_path, "0000", [record("a")], header=header)
    (tmp_path / "ledger-0000.jsonl").unlink()
    changed(shard_of(tmp_path), b"word word word " * 5, b"word lies word " * 5)
    code, out, err = run_kvr("inspect", tmp_path, "--json")
    assert code == EXIT_BAD_DATA and out == "" and shard_of(tmp_path).name in err


def test_what_a_ledger_knows_and_no_file_has_is_named(new: Path, run_kvr: Kvr) -> None:
    write(new, "0001", [record("c"), record("d")])
    (new / "shard-0001-0001-00000.h5").unlink()
    code, out, err = run_kvr("export", new)
    assert code == EXIT_BAD_DATA and "lost 2 documents" in err and len(out.splitlines()) == 2


# Merging what cannot be read


def link_inside(group: h5py.Group) -> None:
    group["extra"] = h5py.SoftLink("/documents/b/answer")


def link_outside(group: h5py.Group) -> None:
    group["kv/layer_000/extra"] = h5py.ExternalLink("/etc/passwd", "/x")


def link_for_answer(group: h5py.Group) -> None:
    del group["answer"]
    group["answer"] = h5py.SoftLink("/documents/b/answer")


def foreign_attribute(group: h5py.Group) -> None:
    group.attrs["note"] = "a string of variable length"


def no_array(group: h5py.Group) -> None:
    del group["token_ids"]


@pytest.mark.parametrize(
    "change", [link_inside, link_outside, link_for_answer, foreign_attribute, no_array, set_answer, drop_field]
)
def test_no_merge_takes_in_what_cannot_be_read(
    new: Path, tmp_path: Path, change: Callable[[h5py.Group], None], run_kvr: Kvr
) -> None:
    (new / "ledger-0000.jsonl").unlink()  # nobody knows its checksum
    rewritten(shard_of(new), change)
    write(new, "0001", [record("c")])
    before = {file.name: file.read_bytes() for file in new.glob("*.h5")}
    for more in ([], ["-o", str(tmp_path / "all.h5")]):
        code, out, err = run_kvr("merge", new, *more)
        assert code == EXIT_BAD_DATA and out == "" and "shard-0001-0000-00000.h5" in err and len(err.splitlines()) == 1
    assert {file.name: file.read_bytes() for file in new.glob("*.h5")} == before
    assert not list(tmp_path.rglob("*.part")) and not (tmp_path / "all.h5").exists()


# Bombs


def bomb(group: h5py.Group, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """Put a dataset in a place that takes little room in the file, and as much as it likes in memory."""
    if name in group:
        del group[name]
    rows = min(shape[0], max(1, (8 << 20) // (int(np.prod(shape[1:])) * np.dtype(dtype).itemsize)))
    dataset = group.create_dataset(name, shape, dtype, chunks=(rows, *shape[1:]), compression="gzip")
    chunk = zlib.compress(bytes(int(np.prod((rows, *shape[1:]))) * np.dtype(dtype).itemsize), 9)
    for start in range(0, shape[0], rows):
        dataset.id.write_direct_chunk((start, *(0 for _ in shape[1:])), chunk)


def announce(group: h5py.Group, **values: int) -> None:
    for name, value in values.items():
        group.attrs.modify(name, np.int64(value))


def many_tokens(group: h5py.Group) -> None:
    bomb(group, "token_ids", (100_000_000,), "i8")


def many_announced_tokens(group: h5py.Group) -> None:
    many_tokens(group)
    announce(group, new_tokens=100_000_000, answer_tokens=100_000_000)


def many_slices(group: h5py.Group) -> None:
    bomb(group, "slices", (100_000_000,), "i8")


def long_answer(group: h5py.Group) -> None:
    bomb(group, "answer", (1,), "S200000000")


def much_kv(group: h5py.Group) -> None:
    bomb(group, "kv/layer_000/keys", (20_000_000, 1, 16), "f4")


def much_announced_kv(group: h5py.Group) -> None:
    much_kv(group)
    layers = [group[f"kv/{name}"] for name in list(group["kv"]) if name.startswith("layer")]
    total = sum(layer[kind].size * 4 for layer in layers for kind in ("keys", "values"))
    announce(group, prompt_tokens=20_000_000, kv_bytes=total)


@pytest.mark.parametrize(
    "change", [many_tokens, many_announced_tokens, many_slices, long_answer, much_kv, much_announced_kv]
)
def test_nothing_is_inflated_that_no_record_announces(
    new: Path, kvr: Path, change: Callable[[h5py.Group], None]
) -> None:
    (new / "ledger-0000.jsonl").unlink()
    shard = shard_of(new)
    rewritten(shard, change)
    assert shard.stat().st_size < 4 << 20
    command = [kvr, "inspect", new, "a"] if "kv" in change.__name__ else [kvr, "export", new]
    code, rss_bytes = run_and_measure(command)
    assert code == EXIT_BAD_DATA and rss_bytes < 600 << 20, f"{code}, {rss_bytes >> 20} MiB"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="cannot be read"):
        merge_run(new)
    done, _, said = resume(new, corpus=corpus_of(["a", "b"]))
    assert done == set() and any("is damaged" in line for line in said)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10


def test_the_schema_says_what_is_to_be_read(new: Path) -> None:
    with h5py.File(shard_of(new)) as file:
        group = file["documents/a"]
        assert group.attrs["answer_bytes"] == len(group["answer"][0])
        assert group.attrs["answer_tokens"] == len(group["token_ids"])
        assert json.loads(file.attrs["identity"]) == HEADER.identity
