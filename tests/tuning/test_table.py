"""Lookup tables: files nobody vouches for, merging in any order, and what a table says of lengths it does not hold."""

from __future__ import annotations

import copy
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_tables import COSTS, a_key, a_table

from kvr_mpi.costs.costmodel import best_split, chain_seconds
from kvr_mpi.errors import ConfigError, DataError, OutputError
from kvr_mpi.tuning.lookup import QUANTUM_TOKENS, choose_slices, find_table, is_outside
from kvr_mpi.tuning.table import MAX_FILE_BYTES, ModelIdentity, load_table, save_table

RAW = json.loads(a_table().model_dump_json())
BAD = [
    ("schema_name", "cake", "schema_name: .*cake"),
    ("surprise", 1, "surprise: .*not permitted"),
    ("rates.pair_s", math.nan, "rates.pair_s: .*finite"),
    ("rates.speeds", [1.0, 1.0, 1.0], "rates.speeds has 3 ranks; expected 2"),
    ("rates", {**asdict(COSTS), "qkv_token_s": 0, "rest_token_s": 0, "pair_s": 0}, "tokens that cost"),
    ("key.ranks", 3, "has 2 slices; expected key.ranks = 3"),
    ("key.hardware", "../../etc", "key.hardware"),
    ("entries", [], "entries"),
    ("entries", [RAW["entries"][0]] * 2, "expected each length once, in ascending order"),
    ("entries", RAW["entries"][::-1], "expected each length once, in ascending order"),
    ("entries.1.context_tokens", 1024, "expected to increase from 0 to context_tokens = 1024"),
    ("entries.0.bounds_tokens", [0, 2000, 1024], "expected to increase from 0"),
    ("entries.0.repetitions", 9, "repetitions = 9: expected at most runs = 3"),
]


@pytest.mark.parametrize(("key", "value", "words"), BAD)
def test_a_damaged_table_is_refused_by_name(key: str, value: Any, words: str, tmp_path: Path) -> None:
    raw = copy.deepcopy(RAW)
    *way, last = [int(step) if step.isdigit() else step for step in key.split(".")]
    at: Any = raw
    for step in way:
        at = at[step]
    at[last] = value
    (tmp_path / "table.json").write_text(json.dumps(raw))
    with pytest.raises(DataError, match=f"table.json.*{words}.*kvr search") as error:
        load_table(tmp_path / "table.json")
    assert len(str(error.value)) < 2500


def test_files_that_cannot_be_read_or_written_are_said_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("nothing.json", "pipe.json"):
        with pytest.raises(ConfigError, match=r"file not found.*kvr search"):
            load_table(tmp_path / name)
    with (tmp_path / "huge.json").open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(DataError, match="cannot be read.*larger than 8388608 bytes"):
        load_table(tmp_path / "huge.json")
    for data in (b"\x89HDF\r\n", b"[" * 100_000, b"\xff\xfe{}", b"[]", json.dumps(RAW).encode()[:500]):
        (tmp_path / "huge.json").write_bytes(data)
        with pytest.raises(DataError, match="damaged or not a table"):
            load_table(tmp_path / "huge.json")
    (tmp_path / "taken").mkdir()
    for place in (tmp_path / "huge.json" / "table.json", tmp_path / "taken"):
        with pytest.raises(OutputError, match=r"cannot be written.*another --output"):
            save_table(a_table(), place)
    assert sorted(os.listdir(tmp_path)) == ["huge.json", "pipe.json", "taken"]


@given(st.integers(1024, 4096), st.integers(2, 5))
@settings(max_examples=60)
@example(1024, 2)
@example(2048, 3)
def test_between_entries_shares_lie_between(tokens: int, ranks: int) -> None:
    table = a_table(ranks=ranks)
    split = choose_slices(table, tokens, ranks)
    exact = {entry.context_tokens: entry.partition for entry in table.entries}
    assert not is_outside(table, tokens, ranks) and split.tokens == tokens and split == exact.get(tokens, split)
    assert all(bound % QUANTUM_TOKENS == 0 for bound in split.bounds[1:-1]) and QUANTUM_TOKENS <= 64
    below = exact[max(length for length in exact if length <= tokens)]
    above = exact[min(length for length in exact if length >= tokens)]
    for bound, low, high in zip(split.bounds, below.bounds, above.bounds, strict=True):
        shares = sorted([low / below.tokens, high / above.tokens])
        assert shares[0] * tokens - QUANTUM_TOKENS <= bound <= shares[1] * tokens + QUANTUM_TOKENS
    # KVR-P is nearly KVR-S: within 1.3% in the paper. Slices are rounded by part of the shortest slice.
    rounding = 2 * QUANTUM_TOKENS / min(split.lengths)
    best_s = best_split(COSTS, tokens, ranks, quantum=1)[1]
    assert chain_seconds(COSTS, split.lengths) < (1.013 + rounding) * best_s


@pytest.mark.parametrize(("tokens", "ranks"), [(2, 2), (1023, 2), (4097, 2), (5, 5), (2048, 5)])
def test_beyond_the_entries_the_rates_decide(tokens: int, ranks: int) -> None:
    """With the ranks' own speeds, if it is as many ranks."""
    uneven = replace(COSTS, speeds=(1.0, 0.5))
    table = a_table().model_copy(update={"rates": uneven})
    known = uneven if ranks == 2 else COSTS
    assert is_outside(table, tokens, ranks)
    assert choose_slices(table, tokens, ranks) == best_split(known, tokens, ranks, quantum=QUANTUM_TOKENS)[0]


def test_the_fitting_table_of_a_folder_is_found_and_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no .*json in this folder; kvr search writes tables"):
        find_table(tmp_path, a_key())
    for ranks in (2, 3, 4):
        save_table(a_table(ranks=ranks), tmp_path / f"p{ranks}.json")
        assert load_table(tmp_path / f"p{ranks}.json") == a_table(ranks=ranks)
    assert find_table(tmp_path, a_key(ranks=3, hardware="unnamed")).key.ranks == 3
    with pytest.raises(ConfigError, match="ranks is 2, here it is 5.*ranks is 4, here it is 5"):
        find_table(tmp_path, a_key(ranks=5))
    save_table(a_table(ranks=3), tmp_path / "copy.json")
    with pytest.raises(ConfigError, match=r"several tables fit \(copy.json, p3.json\)"):
        find_table(tmp_path, a_key(ranks=3))
    save_table(a_table(), tmp_path / "table.json")
    other = ModelIdentity(name="other", fingerprint="e" * 64, architecture="Gemma")
    for changes, words in (
        ({"dtype": "bfloat16"}, "dtype is 'float32'"),
        ({"device": "an H200"}, "device is 'a core', here it is 'an H200'"),
        ({"ranks": 4}, "ranks is 2"),
        ({"model": other}, "model is 'models/Tiny .*here it is 'other"),
    ):
        with pytest.raises(ConfigError, match=words):
            find_table(tmp_path / "table.json", a_key(**changes))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="bad.json"):
        find_table(tmp_path, a_key())
