"""The last layer computes only what is read: the keys and values of all tokens, and the rest of the last one."""

from __future__ import annotations

import pytest
import torch
from chains import chain, single
from models import random_model

from benchmarks.tiny import shrink


@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_a_slice_of_as_many_tokens_as_there_are_experts(tokens: int) -> None:
    config = shrink("mimo_v2_flash")
    assert config.num_local_experts == 4 and config.n_group == 1
    loaded = random_model(config)
    ids = loaded.shape.sample_ids(8 + tokens)
    truth = single(loaded, ids).logits
    torch.testing.assert_close(chain(loaded, ids, (0, 8, len(ids))).logits, truth, atol=1e-4, rtol=1e-4)
