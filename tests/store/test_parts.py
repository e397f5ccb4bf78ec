"""Keys and values that every rank wrote of its own: put together exactly, if all are there and of one cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_runs import HEADER, record, stored_layers

from kvr_mpi.errors import DataError
from kvr_mpi.store.kv import CachedTokens, open_kv
from kvr_mpi.store.merge import merge_files
from kvr_mpi.store.outputs import Record, open_file
from kvr_mpi.store.parts import PARTS, incomplete, part_record
from kvr_mpi.store.run import RUN_FILE
from kvr_mpi.store.shards import ShardWriter
from kvr_mpi.store.shares import find_runs

TOKENS = 12
KEYS = torch.randn(TOKENS, 2, 8, generator=torch.Generator().manual_seed(0))


def whole(slices: Sequence[int]) -> Record:
    return replace(record("a"), slices=tuple(slices), prompt_sha256="0" * 64, prompt_tokens=TOKENS)


def write_part(folder: Path, slices: Sequence[int], start: int, stop: int, name: str = "0000") -> None:
    """Write what one rank has of the document; the last rank's goes with its record."""
    is_last = stop == TOKENS
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder if is_last else folder / PARTS, name, HEADER, session=1)
    tokens = CachedTokens(tuple(range(stop)), (1, min(3, stop)), start)
    of = whole(slices)
    layer = KEYS[start:stop], -KEYS[start:stop]
    writer.write(of if is_last else part_record(of, start, stop), [layer, None, layer], tokens)
    writer.close()


def write_all(folder: Path, slices: Sequence[int]) -> None:
    for rank, (start, stop) in enumerate(zip(slices, slices[1:], strict=False)):
        write_part(folder, slices, start, stop, f"{rank:04d}")


@pytest.mark.parametrize("slices", [(0, 12), (0, 5, 12), (0, 1, 11, 12), (0, 3, 6, 9, 12)])
def test_the_parts_are_the_whole(tmp_path: Path, slices: tuple[int, ...]) -> None:
    write_all(tmp_path, slices)
    with open_file(merge_files(tmp_path)) as file:
        group = file["documents/a"]
        assert open_kv(group).tokens == CachedTokens(tuple(range(TOKENS)), (1, 3))
        layers = stored_layers(group)
        assert layers.keys() == {0, 2}
        for keys, values in layers.values():
            assert torch.equal(keys, KEYS) and torch.equal(values, -KEYS)
    assert not (tmp_path / PARTS).exists()


def test_parts_are_not_taken_for_a_run(tmp_path: Path) -> None:
    """Their records have no answers, and would be shown as documents that got none."""
    write_all(tmp_path, (0, 5, TOKENS))
    (tmp_path / RUN_FILE).touch()
    parts = tmp_path / PARTS
    for path in (parts, next(parts.glob("*.h5"))):
        with pytest.raises(DataError, match=rf"parts of one: .* expected the run, {re.escape(str(tmp_path))}"):
            find_runs([path])
    assert find_runs([tmp_path]).paths == (tmp_path,)


def test_a_part_of_another_attempt_stands_for_none(tmp_path: Path) -> None:
    """It begins where one is missing, and ends elsewhere."""
    slices = (0, 5, 9, TOKENS)
    write_part(tmp_path, slices, 5, 9, "0001")
    write_part(tmp_path, slices, 9, TOKENS, "0002")
    write_part(tmp_path, (0, 7, TOKENS), 0, 7, "0003")
    assert incomplete(tmp_path, ["a"], ["a/0-7", "a/5-9"]) == {"a"}
    with pytest.raises(DataError, match="of tokens 0 to 5 are missing"):
        merge_files(tmp_path)
    assert incomplete(tmp_path, ["a"], ["a/0-5", "a/0-7", "a/5-9"]) == set()
    write_part(tmp_path, slices, 0, 5, "0004")
    with open_file(merge_files(tmp_path)) as file:
        assert torch.equal(stored_layers(file["documents/a"])[2][0], KEYS)


def test_a_part_of_another_prompt_is_refused(tmp_path: Path) -> None:
    slices = (0, 5, TOKENS)
    write_part(tmp_path, slices, 5, TOKENS, "0001")
    writer = ShardWriter(tmp_path / PARTS, "0000", HEADER, session=1)
    other = replace(part_record(whole(slices), 0, 5), prompt_sha256="1" * 64)
    layer = KEYS[:5], -KEYS[:5]
    writer.write(other, [layer, None, layer], CachedTokens(tuple(range(5)), (1, 3)))
    writer.close()
    with pytest.raises(DataError, match="is of another prompt"):
        merge_files(tmp_path)
    assert not (tmp_path / "results.h5").exists()
