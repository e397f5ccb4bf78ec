"""The last layer computes only what is read: the keys and values of all tokens, and the rest of the last one."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.tiny import shrink
from kvr_mpi.model import LoadedModel, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr, prefill_single
from kvr_mpi.transport.local import run_local


@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_a_slice_of_as_many_tokens_as_there_are_experts(tokens: int) -> None:
    config = shrink("mimo_v2_flash")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    shape = probe_shape(config, torch.float32)
    assert config.num_local_experts == 4 and config.n_group == 1
    loaded = LoadedModel(model, None, shape, "tiny", "tiny", torch.float32, torch.device("cpu"))
    ids = shape.sample_ids(8 + tokens)
    prepare_model(model, chain=False)
    truth = prefill_single(model, ids, loaded.device).logits
    prepare_model(model, chain=True)
    split = Partition((0, 8, len(ids)))
    found = run_local(2, lambda rank: prefill_kvr(loaded, ids, split, rank))[-1].logits
    assert truth is not None and found is not None
    torch.testing.assert_close(found, truth, atol=1e-4, rtol=1e-4)
