"""Kernels are chosen by what was measured: the rule, what is kept of it, and what is not believed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import chain, single
from made_logs import logger_to
from models import prompt, tiny

from kvr_mpi.model.cpu_attention import KernelLibrary
from kvr_mpi.model.kernels import PLAIN, ROWS, forget_kernels, kernel_bytes, kernels_of, name_ways
from kvr_mpi.model.narrow_product import NARROW
from kvr_mpi.model.products import MULTIPLY, PANELS, PREPACKED, WIDENED, Product, find_products, give_products
from kvr_mpi.prefill.exactness import allowed_error, error_share
from kvr_mpi.prefill.self_check import check_chain
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning import kernels
from kvr_mpi.tuning.candidates import product_candidates
from kvr_mpi.tuning.kernels import choose_kernels, choose_ways

ROOM = 1 << 34


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model on a machine that is taken for quiet, whatever runs on it."""
    if MULTIPLY is None:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(kernels, "QUIET_SHARE", 0.0)
    found = tiny("llama-gqa")
    yield found
    forget_kernels(found.model)


def measured(kinds: Any, gain: float) -> Any:
    return {kind.name: {way: [gain] * len(ROWS) for way in kind.ways if way != PLAIN} for kind in kinds}


@pytest.fixture
def gains(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have every other way measured as twice as fast; count how often that is asked for."""
    asked: list[int] = []

    def measure(kinds: Any) -> Any:
        asked.append(len(kinds))
        return measured(kinds, 2.0)

    monkeypatch.setattr(kernels, "measure_gains", measure)
    return asked


def choose(loaded: Any, cache_dir: Path, free: int = ROOM) -> list[str]:
    said: list[str] = []
    forget_kernels(loaded.model)
    choose_kernels(loaded, LocalTransport(), free, cache_dir, logger_to(said))
    return said


# Copies, and copies in fewer bits, which are for few rows.
COPY, BITS = {"a": {PREPACKED: 10}}, {"a": {PREPACKED: 10, NARROW: 5}}
BOTH = {"a": {PREPACKED: [1.0, 1.3, 1.5, 2.0], NARROW: [2.5, 2.0, 1.0, 1.0]}}
THREE = {name: {PREPACKED: [gain] * 4} for name, gain in (("little", 1.09), ("most", 3.0), ("more", 2.0))}
SIZES = {name: {PREPACKED: size} for name, size in (("little", 1), ("most", 10), ("more", 10))}


@pytest.mark.parametrize(
    ("found", "sizes", "room", "taken"),
    [
        ({"a": {PREPACKED: [0.5, 1.2, 1.02, 1.04]}}, COPY, 10, {"a": "pcpc"}),
        ({"b": {"one": [1.01, 1.5, 2.0, 1.1], "other": [0.9, 1.6, 1.0, 1.0]}}, {}, 0, {"b": "poOO"}),
        ({"slow": {"one": [0.9, 1.0, 1.01, 1.02]}}, {}, 0, {}),
        ({"long": {"one": [1.5, 0.0, 0.0, 0.0]}}, {}, 0, {"long": "OOOO"}),  # as far as it was measured
        (THREE, SIZES, 1000, {"most": "cccc", "more": "cccc"}),  # the third does not pay
        (THREE, SIZES, 19, {"most": "cccc"}),
        (BOTH, BITS, 15, {"a": "nncc"}),
        (BOTH, BITS, 14, {"a": "nnpp"}),  # what gains less goes first
        # Where the other takes the rows that it would pay for, a copy is none.
        ({"a": BOTH["a"] | {PREPACKED: [1.5, 1.5, 1.05, 1.05]}}, BITS, 15, {"a": "nnpp"}),
        # Of two layouts, the one that is faster on average: hardly more with the most rows is not worth decode steps.
        ({"a": {PREPACKED: [1.5, 1.5, 1.2, 1.9], PANELS: [1.6, 1.6, 1.3, 1.2]}}, BITS, 10, {"a": "cccc"}),
        (
            {"a": {PREPACKED: [0.8, 1.2, 1.3, 1.12], PANELS: [1.1, 1.8, 1.4, 1.11]}},
            {"a": {PANELS: 9}},
            9,
            {"a": "llll"},
        ),
        ({"a": {PREPACKED: [1.5, 1.5, 1.2, 0.0], PANELS: [2.0, 2.0, 1.5, 0.0]}}, {"a": {PANELS: 9}}, 9, {"a": "llll"}),
        # Many rows take too long to be measured: not by kernels that are for few.
        ({"a": {NARROW: [2.5, 2.0, 0.0, 0.0]}}, BITS, 15, {"a": "nnpp"}),
    ],
)
def test_the_fastest_way_is_taken_if_it_pays_and_there_is_room(found: Any, sizes: Any, room: int, taken: Any) -> None:
    ways = {"p": PLAIN, "c": PREPACKED, "l": PANELS, "n": NARROW, "O": "one", "o": "other"}
    expected = {name: tuple(ways[letter] for letter in word) for name, word in taken.items()}
    assert choose_ways(found, sizes, room) == expected


@pytest.mark.quick
def test_measured_for_real_a_chain_equals_plain_transformers(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MOST_CALL_S", float("inf"))  # on a busy machine any call may look as if it took long
    truth = single(loaded, prompt(60)).logits
    assert truth is not None
    said = choose(loaded, tmp_path)
    assert any(line.startswith("measuring CPU kernels") for line in said)
    torch.testing.assert_close(chain(loaded, prompt(60), (0, 31, 60)).logits, truth, atol=1e-4, rtol=0)
    kept = kept_in(tmp_path)[1]
    assert kept["rows"] == list(ROWS) and set(kept["gains"]) == {*find_products(loaded.model)}
    assert min(all_gains(kept)) > 0


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The ways of each shape that every rank has taken, in the order of the calls."""
    found: list[dict[str, Any]] = []

    def give(model: Any, ways: Any, *more: Any) -> None:
        found.append(dict(ways))
        give_products(model, ways, *more)

    monkeypatch.setattr(kernels, "give_products", give)
    return found


def test_it_is_measured_once_for_a_machine_and_a_model_and_takes_no_more_memory_than_pays(
    loaded: Any, gains: list[int], chosen: list[dict[str, Any]], tmp_path: Path
) -> None:
    bytes_of = {shape: sum(one.weight.nbytes for one in each) for shape, each in find_products(loaded.model).items()}
    first, second = choose(loaded, tmp_path), choose(loaded, tmp_path)
    assert len(gains) == 1 and chosen[0] == chosen[1]
    assert "measuring" in first[0] and second == []
    assert kernel_bytes(loaded.model) == sum(bytes_of.values())
    torch.set_num_threads(torch.get_num_threads() + 1)
    choose(loaded, tmp_path)
    assert len(gains) == 2
    choose(loaded, tmp_path, free=int(min(bytes_of.values()) / kernels.COPY_SHARE) - 4)
    assert kernel_bytes(loaded.model) == 0


def kept_in(cache_dir: Path) -> tuple[Path, Any]:
    """The file in which a measurement is kept, and what it says."""
    (file,) = (cache_dir / "kernels").iterdir()
    return file, json.loads(file.read_text())


def all_gains(kept: Any) -> set[float]:
    return {gain for ways in kept["gains"].values() for row in ways.values() for gain in row}


def loud(kept: Any, share: float) -> str:
    """The same with other gains, measured with a share of the processor."""
    gains = {name: {way: [0.5] * len(ROWS) for way in ways} for name, ways in kept["gains"].items()}
    return json.dumps({**kept, "gains": gains, "busy_share": share})


def test_what_was_measured_beside_other_programs_is_measured_again_and_gives_way_to_what_was_not(
    loaded: Any, gains: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a way that is wrong when it is measured again is not used."""
    monkeypatch.setattr(kernels, "QUIET_SHARE", float("inf"))  # never had a rank its processor to itself
    for _ in range(kernels.MOST_TRIES + 2):
        choose(loaded, tmp_path)
    assert len(gains) == kernels.MOST_TRIES
    file, kept = kept_in(tmp_path)
    for share, gain in ((0.0, 2.0), (1e9, 0.5)):  # less, and more, than any measurement has
        file.write_text(loud({**kept, "tries": 1}, share))
        choose(loaded, tmp_path)
        assert all_gains(kept_in(tmp_path)[1]) == {gain}
    file.write_text(json.dumps({**kept, "tries": 1, "busy_share": 1e9}))
    monkeypatch.setattr(kernels, "measure_gains", lambda kinds: measured(kinds, 0.0))
    assert "is not used" in choose(loaded, tmp_path)[1] and not kernels_of(loaded.model)


def with_row(way: str, row: list[Any]) -> Any:
    return lambda kept: kept | {"gains": {name: ways | {way: row} for name, ways in kept["gains"].items()}}


@pytest.mark.parametrize(
    "harm",
    [
        lambda kept: kept | {"gains": {}},
        lambda kept: kept | {"gains": kept["gains"] | {"other": {PREPACKED: [2.0] * 4}}},
        *(with_row(PREPACKED, row) for row in ([2.0] * 3, [-1.0] * 4, [1e300] * 4, ["2"] * 4)),
        with_row("elsewhere", [2.0] * 4),
        lambda kept: kept | {"rows": [1, 2, 3, 4]},
        lambda kept: kept | {"holds_for": "another processor"},
        None,  # a pipe
    ],
)
def test_what_is_kept_is_not_believed_unless_it_fits(loaded: Any, gains: list[int], tmp_path: Path, harm: Any) -> None:
    choose(loaded, tmp_path)
    file, kept = kept_in(tmp_path)
    file.unlink()
    if harm is None:
        os.mkfifo(file)
    else:
        file.write_text(json.dumps(harm(kept)))
    choose(loaded, tmp_path)
    assert len(gains) == 2 and kernels_of(loaded.model)
    choose(loaded, tmp_path)  # and was written anew
    assert len(gains) == 2


def test_a_way_that_is_wrong_at_some_number_of_rows_is_not_used(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a whole chain runs a few tokens only, and would not see it. Later jobs read that it was wrong."""
    right = Product.__call__

    def wrong(self: Product, rows: torch.Tensor) -> torch.Tensor:
        found = right(self, rows)
        return found * 1.01 if rows.numel() > 200 * rows.shape[-1] else found

    monkeypatch.setattr(kernels, "LEAST_GAIN", 0.0)  # any measured implementation is used
    monkeypatch.setattr(kernels, "LEAST_COPY_GAIN", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(Product, "__call__", wrong)
        said = choose(loaded, tmp_path)
    assert (
        len(said) == len(find_products(loaded.model)) + 1
        and f"{PREPACKED} is not used, since its results differ" in said[1]
    )
    assert kernel_bytes(loaded.model) == 0 and not kernels_of(loaded.model)
    check_chain(loaded)
    assert choose(loaded, tmp_path) == said[1:] and not kernels_of(loaded.model)
    kept_in(tmp_path)[0].unlink()
    choose(loaded, tmp_path)
    assert kernels_of(loaded.model), "it is the wrong results that they were left out for"


def test_ranks_of_a_host_take_the_same_ways(
    loaded: Any, chosen: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one of them does not see what was kept. Three measure one half of the kinds, two the other."""
    names = [kind.name for kind in product_candidates(loaded.model, ROOM)][:2]
    halves = dict(zip(names, (iter((1.0, 1.2, 3.0, 3.0)), iter((1.2, 1.2, 3.0))), strict=True))
    # Each rank another.
    monkeypatch.setattr(kernels, "measure_gains", lambda kinds: measured(kinds, next(halves[kinds[0].name])))
    said: list[str] = []
    run_local(5, lambda rank: choose_kernels(loaded, rank, ROOM, tmp_path, logger_to(said)), torch.device("cpu"))
    assert len(set(said)) == 1
    assert chosen[0] and chosen == [chosen[0]] * 5 and all(PREPACKED in ways for ways in chosen[0].values())
    file, kept = kept_in(tmp_path)
    assert all_gains(kept) == {1.2}
    monkeypatch.setattr(kernels, "QUIET_SHARE", float("inf"))
    file.write_text(loud(kept, 1e9))
    read, seen = kernels._read, iter((True, False))
    monkeypatch.setattr(kernels, "_read", lambda *where: read(*where) if next(seen) else None)
    run_local(2, lambda rank: choose_kernels(loaded, rank, ROOM, tmp_path, logger_to(said)), torch.device("cpu"))
    assert len(chosen) == 7 and chosen[-1] == chosen[-2]


# Models in 16 bits


def as_bfloat16(name: str) -> Any:
    loaded = tiny.__wrapped__(name)
    return replace(loaded, model=loaded.model.bfloat16(), dtype=torch.bfloat16)


def test_a_model_in_16_bits_widens_its_weights_where_that_is_fastest(
    loaded: Any, library: KernelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, ids = as_bfloat16("llama-gqa"), prompt(60)
    truth = single(found, ids).logits
    monkeypatch.setattr(kernels, "_open_attention", lambda *given, **options: library)
    said: list[str] = []

    def measure(kinds: Any) -> Any:
        return {
            name: {way: [2.0 if way == WIDENED else 0.5] * len(ROWS) for way in ways}
            for name, ways in measured(kinds, 1.0).items()
        }

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "measure_gains", measure)
        choose_kernels(found, LocalTransport(), ROOM, tmp_path, logger_to(said))
    assert kernel_bytes(found.model) == 0 and WIDENED in name_ways(found.model)
    logits = chain(found, ids, (0, 31, 60)).logits
    assert truth is not None and error_share(logits, truth) <= allowed_error(torch.bfloat16)
    shutil.rmtree(tmp_path)
    monkeypatch.setattr(kernels, "MOST_CALL_S", float("inf"))
    choose_kernels(found, LocalTransport(), ROOM, tmp_path, logger_to(said))
    assert not any("not used" in line for line in said), "measured for real, it gives the right results"


FULL, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("dtype", "times_s", "told"),
    [
        (BRAIN, {BRAIN: 4.0, FULL: 1.0}, ("4.0 times", "'float32'")),
        (BRAIN, {BRAIN: 1.2, FULL: 1.0}, ()),
        (BRAIN, {BRAIN: 1.0, FULL: 2.5}, ()),
        (HALF, {HALF: 9.0, FULL: 3.0, BRAIN: 1.0}, ("9.0 times", "'bfloat16'")),  # as with AMX
        (HALF, {HALF: 9.0, FULL: 3.0, BRAIN: 8.0}, ("3.0 times", "'float32'")),
    ],
)
def test_a_job_is_told_of_a_dtype_that_is_slow_here_and_of_a_faster_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, times_s: dict[torch.dtype, float], told: tuple[str, ...]
) -> None:
    found = tiny.__wrapped__("llama-gqa")
    found = replace(found, model=found.model.to(dtype), dtype=dtype)
    monkeypatch.setattr(
        kernels, "_seconds", lambda calls, rows, repeats: [call(rows) for call in calls] and times_s[rows.dtype]
    )
    line = kernels.describe_slow_dtype(found)
    assert (line is not None) == bool(told)
    assert line is None or all(word in line for word in told)
    assert kernels.describe_slow_dtype(tiny("llama-gqa")) is None
