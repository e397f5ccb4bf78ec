"""Which models may stay spread over ranks is tried on them: some count positions by what a rank's own cache holds."""

from __future__ import annotations

import pytest
import torch
from models import CONFIGS, random_model, tiny

from benchmarks.tiny import shrink
from kvr_mpi.errors import ConfigError
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.self_check import check_spread


@pytest.mark.parametrize("name", sorted({*CONFIGS} - {"llama4-chunks", "phi3"}))
def test_models_that_are_given_their_positions_may_be_spread(name: str) -> None:
    loaded = tiny(name)
    prepare_model(loaded.model, chain=True)
    check_spread(loaded)


@pytest.mark.parametrize("name", ["bart", "blenderbot", "plbart"])
def test_models_that_count_positions_by_their_cache_are_refused(name: str) -> None:
    loaded = random_model(shrink(name))
    for parameter in loaded.model.parameters():  # positions count as much as words
        torch.nn.init.normal_(parameter, std=0.2)
    prepare_model(loaded.model, chain=True)
    with pytest.raises(ConfigError, match=r"cannot be spread over ranks: logits of a decoded token differ"):
        check_spread(loaded)
