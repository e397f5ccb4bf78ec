"""The self-check finds chains that are wrong in every dtype, and none that are right."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from made_logs import logger_to
from models import COMMON, CONFIGS, STATES, random_model, tiny

from kvr_mpi.kv import chain as layer_module
from kvr_mpi.kv.chain import SliceLayer
from kvr_mpi.model.attention_hook import prepare_model, run_model
from kvr_mpi.prefill import packed
from kvr_mpi.prefill.self_check import check_chain, check_spread, why_not_packed

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = [*CONFIGS, *STATES]


def lose_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of what a rank receives."""
    attend = layer_module.attend

    def forgetful(query: Any, keys: Any, values: Any, params: Any, *, causal: bool = False, **how: Any) -> Any:
        before = keys.shape[2] - query.shape[2] if causal else keys.shape[2]
        if before > 2 and keys.shape[2] > 1:
            keys, values = keys[:, :, 1:], values[:, :, 1:]
        return attend(query, keys, values, params, causal=causal, **how)

    monkeypatch.setattr(layer_module, "attend", forgetful)


def shift_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of later slices, by one."""
    length = SliceLayer.get_seq_length
    monkeypatch.setattr(SliceLayer, "get_seq_length", lambda layer: max(0, length(layer) - 1))


def drop_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """In attention to what a rank receives."""
    attend = layer_module.attend

    def headless(query: Any, keys: Any, values: Any, params: Any, *, causal: bool = False, **how: Any) -> Any:
        part = attend(query, keys, values, params, causal=causal, **how)
        if not causal:
            part.out[:, -1] = 0
        return part

    monkeypatch.setattr(layer_module, "attend", headless)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mutate", [lose_a_token, shift_positions, drop_a_head])
@pytest.mark.parametrize("spread", [0.02, pytest.param(0.2, marks=pytest.mark.long)])
def test_mutants_are_found_in_every_dtype(
    mutate: Callable[[pytest.MonkeyPatch], None], dtype: torch.dtype, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small weights, attention changes little: without a token of the prefix, logits change by 7 % of theirs."""
    config = tf.LlamaConfig(**{**COMMON, "initializer_range": spread}, num_key_value_heads=2)
    loaded, said = random_model(config, dtype), list[str]()
    mutate(monkeypatch)
    try:
        assert not check_chain(loaded, logger_to(said)).attends_in_parts
    except Exception as error:
        said.append(str(error))
    assert "differ from those of plain transformers" in said[0]


def test_the_largest_difference_is_logged() -> None:
    said = list[str]()
    check_chain(tiny("llama-gqa"), logger_to(said))
    (line,) = said
    assert line.startswith("exactness check passed")
    (difference,) = map(float, re.findall(r"\d+e-\d+", line))
    assert difference < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_no_false_alarm_in_short_dtypes(name: str, dtype: torch.dtype) -> None:
    loaded = check_chain(random_model(tiny(name).config, dtype))
    assert loaded.attends_in_parts and loaded.cuts_last_layer
    assert (why_not_packed(loaded) is None) == (name not in {*STATES, "llama4-chunks"})


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_no_false_alarm_with_other_weights(name: str) -> None:
    """Of many models, some of which choose experts by scores that differ less than rounding errors."""
    for number in range(40):
        dtype, factor = DTYPES[1:][number % 2], (1.0, 0.1)[number // 2 % 2]
        loaded = random_model(tiny(name).config)
        draw = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for weight in loaded.model.parameters():
                if weight.ndim > 1:
                    weight.copy_(weight.flatten()[torch.randperm(weight.numel(), generator=draw)].view(weight.shape))
                    weight.mul_(factor)
        loaded = check_chain(replace(loaded, model=loaded.model.to(dtype), dtype=dtype))
        assert loaded.attends_in_parts and loaded.cuts_last_layer


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_rows_and_shards_are_checked_in_short_dtypes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("llama-gqa", dtype)
    prepare_model(loaded.model, chain=True)
    assert why_not_packed(loaded) is None
    check_spread(loaded)

    def run_wrongly(model: Any, ids: Any, cache: Any, *, positions: Any, **rest: Any) -> torch.Tensor:
        return run_model(model, ids, cache, positions=torch.arange(ids.shape[1]).unsqueeze(0), **rest)

    monkeypatch.setattr(packed, "run_model", run_wrongly)
    assert "differ from each alone" in str(why_not_packed(loaded))
