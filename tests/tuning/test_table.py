"""Lookup tables: files nobody vouches for, merging in any order, and what a table says of lengths it does not hold."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_tables import COSTS, a_key, a_table

from kvr_mpi.costs.costmodel import best_split, chain_seconds
from kvr_mpi.errors import ConfigError, DataError, OutputError
from kvr_mpi.partition import Partition
from kvr_mpi.tuning.lookup import QUANTUM_TOKENS, choose_slices, find_table
from kvr_mpi.tuning.table import (
    MAX_FILE_BYTES,
    check_place,
    file_name,
    load_table,
    save_table,
)


def test_a_table_survives_the_disk(tmp_path: Path) -> None:
    table = a_table()
    path = tmp_path / "new" / file_name(table.key)
    assert path.name == "Tiny-float32_here_p2.json"
    save_table(table, path)
    assert load_table(path) == table
    assert os.listdir(path.parent) == [path.name], "nothing half-written is left"
    assert load_table(path).rates.costs() == COSTS


def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot be written.*another --output"):
        save_table(a_table(), tmp_path / "file" / "table.json")
    (tmp_path / "taken").mkdir()
    for act in (check_place, lambda path: save_table(a_table(), path)):
        with pytest.raises(OutputError, match="cannot be written"):
            act(tmp_path / "taken")
    check_place(tmp_path / "new.json")
    assert sorted(os.listdir(tmp_path)) == ["file", "taken"]


def changed(path: tuple[str | int, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        at: Any = raw
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(("schema_name",), "cake"), ["schema_name", "cake"]),
        (changed(("schema_version",), 2), ["schema_version", "2"]),
        (changed(("surprise",), 1), ["surprise", "not permitted"]),
        (changed(("rates", "link_gbit_per_s"), 10), ["rates.link_gbit_per_s"]),
        (changed(("rates", "link_bytes_per_s"), 0), ["rates.link_bytes_per_s", "greater than 0"]),
        (changed(("rates", "pair_s"), -1e-9), ["rates.pair_s", "-1e-09"]),
        (changed(("rates", "pair_s"), math.nan), ["rates.pair_s", "finite"]),
        (changed(("rates", "layers"), 10**30), ["rates.layers"]),
        (changed(("rates", "speeds"), [1.0, 1.0, 1.0]), ["rates.speeds has 3 ranks; expected 2"]),
        (changed(("key", "ranks"), 3), ["has 2 slices; expected key.ranks = 3"]),
        (changed(("key", "hardware"), "../../etc"), ["key.hardware"]),
        (changed(("entries",), []), ["entries"]),
        (changed(("entries", 0, "bounds_tokens"), [0, 2000, 1024]), ["expected to rise from 0"]),
        (changed(("entries", 0, "bounds_tokens"), [1, 500, 1024]), ["expected to rise from 0"]),
        (changed(("entries", 0, "context_tokens"), "1024"), ["context_tokens", "'1024'"]),
        (changed(("entries", 0, "context_tokens"), 10**40), ["context_tokens"]),
        (changed(("entries", 0, "ttft_s"), math.inf), ["ttft_s"]),
        (changed(("entries", 0, "ttft_s"), None), ["ttft_s"]),
        (changed(("entries", 0, "provenance", "date"), "yesterday"), ["provenance.date"]),
        (changed(("entries", 0, "provenance", "command"), "x" * 5000), ["provenance.command"]),
    ],
)
def test_a_damaged_table_is_refused_by_name(
    change: Callable[[dict[str, Any]], None], words: list[str], tmp_path: Path
) -> None:
    raw = json.loads(a_table().model_dump_json())
    change(raw)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(DataError) as error:
        load_table(path)
    assert all(word in str(error.value) for word in [*words, "table.json", "kvr search"]), str(error.value)
    assert len(str(error.value)) < 2500


@pytest.mark.parametrize("cut", [0, 1, 100, 0.5, -2])
def test_a_truncated_table_is_refused(cut: float, tmp_path: Path) -> None:
    text = a_table().model_dump_json()
    path = tmp_path / "table.json"
    path.write_text(text[: int(cut if cut != 0.5 else len(text) / 2)])
    with pytest.raises(DataError, match="damaged or not a table"):
        load_table(path)


@pytest.mark.parametrize(
    "data",
    [b"\x89HDF\r\n", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe{}", b'"' + b"x" * 1000, b"[]", b"null", b"1e999"],
)
def test_foreign_bytes_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged or not a table"):
        load_table(path)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file.*kvr search"):
        load_table(tmp_path / "nothing.json")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ConfigError, match="no such file"):
        load_table(tmp_path / "pipe.json")
    with (tmp_path / "huge.json").open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(DataError, match="larger than 8 MiB"):
        load_table(tmp_path / "huge.json")


def test_an_entry_is_taken_as_it_is() -> None:
    table = a_table()
    for entry in table.entries:
        choice = choose_slices(table, entry.context_tokens)
        assert (choice.partition, choice.predicted_s, choice.how) == (entry.partition, entry.ttft_s, "entry")


@given(st.integers(1025, 4095), st.integers(2, 5))
@settings(max_examples=60)
@example(2033, 3)  # its slices, once rounded, end no sooner than those of the entry above
def test_between_entries_shares_and_times_lie_between(tokens: int, ranks: int) -> None:
    table = a_table(ranks=ranks)
    choice = choose_slices(table, tokens)
    if tokens == 2048:
        return
    assert choice.how == "interpolated" and choice.partition.tokens == tokens
    assert all(bound % QUANTUM_TOKENS == 0 for bound in choice.partition.bounds[1:-1]) and QUANTUM_TOKENS <= 64
    below = max((entry for entry in table.entries if entry.context_tokens < tokens), key=lambda e: e.context_tokens)
    above = min((entry for entry in table.entries if entry.context_tokens > tokens), key=lambda e: e.context_tokens)
    # Slices are rounded, those of the entries as well, by part of the shortest slice.
    rounding = 2 * QUANTUM_TOKENS / min(choice.partition.lengths)
    assert below.ttft_s * (1 - rounding) < choice.predicted_s < above.ttft_s * (1 + rounding)
    for bound, low, high in zip(choice.partition.bounds, below.partition.bounds, above.partition.bounds, strict=True):
        shares = sorted([low / below.context_tokens, high / above.context_tokens])
        assert shares[0] * tokens - QUANTUM_TOKENS <= bound <= shares[1] * tokens + QUANTUM_TOKENS
    # KVR-P is nearly KVR-S: within 1.3 % in the paper.
    best_s = best_split(COSTS, tokens, ranks, quantum=1)[1]
    assert chain_seconds(COSTS, choice.partition.lengths) < (1.013 + rounding) * best_s
    assert choice.predicted_s == pytest.approx(1.1 * chain_seconds(COSTS, choice.partition.lengths))


@pytest.mark.parametrize("tokens", [2, 500, 1023, 4097, 100_000])
def test_beyond_the_entries_the_rates_decide(tokens: int) -> None:
    table = a_table()
    choice = choose_slices(table, tokens)
    split, seconds = best_split(COSTS, tokens, 2, quantum=QUANTUM_TOKENS)
    assert choice.how == "extrapolated" and choice.partition == split
    assert choice.predicted_s == pytest.approx(1.1 * seconds), "corrected by what the nearest entry took"


def test_another_number_of_ranks_is_cut_by_the_rates() -> None:
    choice = choose_slices(a_table(), 2048, ranks=5)
    assert choice.how == "extrapolated" and choice.partition == best_split(COSTS, 2048, 5, quantum=QUANTUM_TOKENS)[0]


@given(st.integers(2, 400), st.integers(2, 8))
@settings(max_examples=60)
def test_short_prompts_leave_every_rank_a_token(tokens: int, ranks: int) -> None:
    if tokens < ranks:
        return
    split = choose_slices(a_table(contexts=(16, 64, 256), ranks=ranks), tokens).partition
    assert isinstance(split, Partition) and split.tokens == tokens and split.size == ranks


def test_the_fitting_table_of_a_folder_is_found(tmp_path: Path) -> None:
    for ranks in (2, 3, 4):
        table = a_table(ranks=ranks)
        save_table(table, tmp_path / file_name(table.key))
    assert find_table(tmp_path, a_key(ranks=3, hardware="unnamed")).key.ranks == 3
    with pytest.raises(ConfigError, match="ranks is 2, here it is 5.*ranks is 4, here it is 5"):
        find_table(tmp_path, a_key(ranks=5))
    save_table(a_table(ranks=3), tmp_path / "copy.json")
    with pytest.raises(ConfigError, match=r"several tables fit \(Tiny-float32_here_p3.json, copy.json\)"):
        find_table(tmp_path, a_key(ranks=3))


def test_a_foreign_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_table(a_table(), path)
    here = a_key(dtype="bfloat16", device="an H200", ranks=4)
    with pytest.raises(ConfigError) as error:
        find_table(path, here)
    for word in ("dtype is 'float32'", "device is 'a core', here it is 'an H200'", "ranks is 2"):
        assert word in str(error.value)


def test_an_empty_folder_and_a_damaged_one_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no .*json in this folder; kvr search writes tables"):
        find_table(tmp_path, a_key())
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="bad.json"):
        find_table(tmp_path, a_key())
