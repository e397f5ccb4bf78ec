"""Results in Python: records, tables, keys and values, and what is refused rather than left out without a word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from made_runs import HEADER, NAMES, corpus_of, record, take, write, write_share

from kvr_mpi import open_results
from kvr_mpi.errors import ConfigError, DataError, MissingError
from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.writer import ResultWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run over ten documents: eight done, one failed, one left."""
    take(tmp_path / "out", mode="new", corpus=corpus_of(NAMES)).lock.release()
    names = [name for name in NAMES if name != "f"]
    write(tmp_path / "out", 0, [record(name, "error" if name == "b" else "done") for name in names], kv=True)
    return tmp_path / "out"


def test_records_are_read_in_order_and_filtered(folder: Path) -> None:
    found = open_results(folder)
    done = sorted(name for name in NAMES if name not in "bf")
    assert [each.id for each in found] == sorted([*done, "b"]) == found.ids() and len(found) == 9
    assert found.ids("done") == done and found.ids("error") == ["b"]
    assert [each.id for each in found.records("done", where=lambda each: each.answer.endswith("c"))] == ["c", "dir/c"]
    assert found["dir/c"].answer == "about dir/c" and "dir/c" in found and "f" not in found
    assert found.left == 1 and str(found) == f"8 done, 1 failed, 1 left in {folder}"
    assert found.header.model["name"] == "tiny"


def test_what_is_asked_for_wrongly_is_refused(folder: Path) -> None:
    found = open_results(folder)
    with pytest.raises(ConfigError, match=r"status 'failed': expected one of 'done', 'error'"):
        found.records("failed")  # which an empty answer would pass for "nothing failed"
    with pytest.raises(ConfigError, match=r"no document 'dirc' .*'dir/c'"):
        found["dirc"]
    with pytest.raises(ConfigError, match="at least one path"):
        open_results()
    with pytest.raises(MissingError, match="no such file or folder"):
        open_results(folder / "nowhere")


def test_keys_and_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    keys = torch.randn(300, 2, 8, generator=torch.Generator().manual_seed(1))
    layers = [(keys, -keys), None, (keys.bfloat16(), -keys.bfloat16())]
    (tmp_path / "out").mkdir()
    writer = ResultWriter(tmp_path / "out", 0, HEADER)
    writer.write(record("a"), layers, CachedTokens(tuple(range(300)), (1, 290)))
    writer.write(record("b"))
    writer.close()
    found = open_results(tmp_path / "out")
    kv = found.kv("a")
    assert (
        sorted(kv.layers) == [0, 2] and kv.token_ids == tuple(range(300)) and kv.text == (1, 290) and kv.tokens == 300
    )
    assert torch.equal(kv.layers[0][0], keys) and kv.layers[2][1].dtype == torch.bfloat16
    arrays = kv.numpy()
    assert arrays[2][0].dtype == np.float32 and np.array_equal(arrays[2][0], keys.bfloat16().float().numpy())
    assert sorted(found.kv("a", [2]).layers) == [2]
    with pytest.raises(ConfigError, match=r"no keys and values of layer 1; it has those of 2, 0 to 2"):
        found.kv("a", [0, 1])
    with pytest.raises(ConfigError, match=r"'b' has no keys and values: its run had output.kv = false"):
        found.kv("b")


def test_a_share_that_has_documents_left_is_refused(tmp_path: Path) -> None:
    for number in (0, 2):
        write_share(tmp_path, number, 3, NAMES)
    take(tmp_path / "share-1-of-3", mode="new", corpus=corpus_of(NAMES), share=slice(1, None, 3)).lock.release()
    write(tmp_path / "share-1-of-3", 0, [record(NAMES[1])])
    with pytest.raises(DataError, match=r"share-1-of-3 has \d of \d documents left"):
        open_results(tmp_path)


def test_shares_that_do_not_belong_together_are_refused_saying_what_differs(tmp_path: Path) -> None:
    """A document that came between two tasks would be in nobody's share, and nobody would notice."""
    write_share(tmp_path, 0, 2, NAMES)
    write_share(tmp_path, 1, 2, [*NAMES, "new", "newer"])
    with pytest.raises(DataError, match=r"shares of different documents: 2 new \(new, newer\)"):
        open_results(tmp_path, partial=True)


def test_a_share_of_nothing_is_not_missing(tmp_path: Path) -> None:
    for number in range(2):
        write_share(tmp_path, number, 3, "xy")
    take(tmp_path / "share-2-of-3", mode="new", corpus=corpus_of("xy"), share=slice(2, None, 3)).lock.release()
    assert open_results(tmp_path).ids() == ["x", "y"]
