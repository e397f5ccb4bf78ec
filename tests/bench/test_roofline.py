"""What a prefill is made of, counted by hand."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from models import tiny

from benchmarks.roofline import (
    ATTENTION,
    PEAK_SOURCE,
    PRODUCTS,
    REST,
    _compiled_loops,
    attention_flop,
    measure_peaks,
    measure_rooflines,
)
from kvr_mpi.errors import KvrError
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.tuning.compiled_attention import find_compiler, run_compiler

TOKENS = 96


def test_every_product_is_counted_once() -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    config = loaded.model.config
    (found,) = measure_rooflines(loaded, LocalTransport(), [TOKENS])
    products, attention, rest = found.parts
    assert [part.name for part in found.parts] == [PRODUCTS, ATTENTION, REST]

    hidden, heads, size = config.hidden_size, config.num_attention_heads, config.head_dim
    before = hidden * (heads + 2 * config.num_key_value_heads) * size
    after = hidden * heads * size + 3 * hidden * config.intermediate_size
    whole = TOKENS * (config.num_hidden_layers - 1) * (before + after)
    last = TOKENS * before + after  # the last query is all that is asked of it
    assert products.flop == 2 * (whole + last + hidden * config.vocab_size)

    pairs = (config.num_hidden_layers - 1) * TOKENS * (TOKENS + 1) // 2 + TOKENS
    assert attention.flop == 4 * heads * size * pairs
    assert products.seconds > 0 and attention.seconds > 0 and rest.flop == 0
    assert found.seconds > found.least_s > 0
    weights = 4 * config.num_hidden_layers * (before + after)
    assert all(part.nbytes > 0 for part in found.parts) and products.nbytes > weights


@pytest.mark.parametrize("threads", [1, 3])
def test_the_loops_do_all_of_their_work(threads: int) -> None:
    loops = _compiled_loops()
    one, ten = (loops.multiply_add(steps, 1.0, threads) for steps in (1, 10))
    assert ten == 10 * one == threads * loops.multiply_add(10, 1.0, 1) > 0
    ones = torch.ones(1 << 20)
    assert loops.read_ones(ones.data_ptr(), ones.numel(), threads) == ones.numel()


def test_every_multiply_add_that_is_counted_is_computed(tmp_path: Path) -> None:
    """Twelve equal sums are one to a compiler: three times as many multiply-adds were counted as a core can do."""
    compiler, disassembler = find_compiler(), shutil.which("objdump")
    if compiler is None or disassembler is None:
        pytest.skip("needs a C++ compiler and objdump")
    made = tmp_path / "peaks.so"
    assert run_compiler(compiler, [PEAK_SOURCE], made) == ""
    chains = int(re.search(r"CHAINS = (\d+);", PEAK_SOURCE.read_text())[1])  # type: ignore[index]
    code = subprocess.run([disassembler, "-d", made], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(r"\tv?fm(?:add\d*ps|la)\b", code)) >= chains


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KvrError, match="no-such-compiler"):
        measure_peaks(LocalTransport())


def test_keys_out_of_the_window_are_not_counted() -> None:
    loaded = tiny("mistral-window")
    window = loaded.model.config.sliding_window
    assert window < TOKENS
    pair = attention_flop(loaded, 1) / loaded.model.config.num_hidden_layers
    layers = loaded.model.config.num_hidden_layers
    seen = window * (window + 1) // 2 + (TOKENS - window) * window
    assert attention_flop(loaded, TOKENS) == pytest.approx(pair * ((layers - 1) * seen + window))
