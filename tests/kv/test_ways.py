"""Windows that travel no farther than they are seen, states along the chain, attention over a whole prefix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from chains import all_ranks, chain, single
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, STATES, prompt, random_model, tiny
from rows import Numbers, batch_of, finish, long_rope, tokens_of
from transformers import masking_utils

from benchmarks.tiny import shrink
from kvr_mpi.decode.sampling import make_generation_config
from kvr_mpi.errors import ModelError
from kvr_mpi.kv.chain import layer_kv
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.masks import FULL, MaskRequest, Visibility
from kvr_mpi.model.rope import begins_anew_at, check_rotary
from kvr_mpi.prefill.one_prompt import compute_prefix
from kvr_mpi.prefill.self_check import check_chain


@given(st.integers(2, 40), st.integers(41, 5000), st.sampled_from(["full", "window", "chunk"]), st.integers(1, 300))
def test_masks_are_recognised_and_let_through_what_is_seen(size: int, longest: int, kind: str, position: int) -> None:
    padding = torch.zeros(1, dtype=torch.long)
    function, expected = {
        "full": (masking_utils.causal_mask_function, FULL),
        "window": (masking_utils.sliding_window_causal_mask_function(size), Visibility(window=size)),
        "chunk": (masking_utils.chunked_causal_mask_function(size, padding), Visibility(chunk=size)),
    }[kind]
    assert MaskRequest(function, size, True, longest).visibility() == expected
    keys = torch.arange(position + 1)
    allowed = function(torch.tensor(0), 0, torch.tensor(position), keys)
    assert keys[allowed].tolist() == list(range(expected.first_key(position), position + 1))


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_causal_mask_function(15),  # of another size than is told
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda batch, head, query, key: key != 7),
        lambda batch, head, query, key: 1 / 0,
    ],
)
def test_other_masks_are_not(function: Any) -> None:
    with pytest.raises(ModelError, match="mask"):
        MaskRequest(function, 16, True, 512).visibility()


@pytest.mark.parametrize(
    ("name", "bounds", "carried"),
    [
        # Every layer has a window of 16: each link carries the last 15 tokens before the slice after it.
        ("mistral-window", (0, 100, 180, 240), [15, 15]),
        ("mistral-window", (0, 130, 131, 200, 240), [15, 15, 15]),
        # Chunks of 32: a slice from 100 on sees from 96 on, one from 192 on nothing before it.
        ("llama4-chunks", (0, 100, 192, 240), [4, 0]),
    ],
)
def test_of_windows_and_chunks_only_what_is_seen_travels(name: str, bounds: Any, carried: list[int]) -> None:
    loaded, row = tiny(name), tiny(name).shape.kv_bytes_per_token
    ranks, everything = (all_ranks(loaded, prompt(240), bounds, keeps_all=each) for each in (False, True))
    assert [rank.sent_bytes for rank in ranks] == [tokens * row for tokens in [*carried, 0]]
    assert [rank.sent_bytes for rank in everything[:-1]] == [stop * row for stop in bounds[1:-1]]
    assert torch.equal(everything[-1].logits, ranks[-1].logits)
    # A rank that knows the beginning, and receives or computes what follows, has everything as well.
    prefix = compute_prefix(loaded, prompt(bounds[1] - 1))
    for last in (everything[-1], chain(loaded, prompt(240), (0, bounds[1], 240), prefix=prefix)):
        keys = layer_kv(last.cache, 0)
        assert keys is not None and keys[0].shape[0] == 240


@pytest.mark.parametrize("name", STATES)
def test_states_are_one_small_message_a_layer(name: str) -> None:
    loaded = tiny(name)
    sent = [all_ranks(loaded, prompt(tokens), (0, 30, tokens))[0].sent_bytes for tokens in (60, 120)]
    states = [layer for layer in loaded.shape.layers if layer.states]
    assert sent[0] == sent[1], "it does not grow with what is after"
    assert 0 < sent[0] - 30 * loaded.shape.kv_bytes_per_token < len(states) * 1e4


def test_an_answer_that_outgrows_its_frequencies_is_that_of_generate() -> None:
    """Phi-3 computes its cache anew when the answer passes the length at which its frequencies change."""
    loaded = replace(long_rope(), tokenizer=Numbers())
    assert begins_anew_at(loaded.model) == 33
    ids, new_tokens = prompt(24), 20
    config = make_generation_config(loaded.model, {"do_sample": False})
    config.eos_token_id = None
    prepare_model(loaded.model, chain=False)
    truth = loaded.model.generate(torch.tensor([ids]), config, max_new_tokens=new_tokens)[0, 24:].tolist()
    for bounds in [(0, 24), (0, 15, 24)]:
        batch = batch_of(loaded, new_tokens)
        batch.add("one", chain(loaded, ids, bounds, new_tokens), ids, 0)
        assert list(tokens_of(finish(batch))["one"]) == truth, bounds


def test_slices_are_embedded_as_parts_of_a_longer_prompt() -> None:
    """The first slice ends before the length at which the frequencies change, and the prompt after it."""
    loaded, ids = long_rope(), prompt(60)
    truth = single(loaded, ids).logits
    torch.testing.assert_close(chain(loaded, ids, (0, 20, 45, 60)).logits, truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_a_slice_of_as_many_tokens_as_there_are_experts(tokens: int) -> None:
    """The last layer computes only what is read: keys and values of all tokens, and the rest of the last one."""
    config = shrink("mimo_v2_flash")
    assert config.num_local_experts == 4 and config.n_group == 1
    loaded = random_model(config)
    ids = loaded.shape.sample_ids(8 + tokens)
    truth = single(loaded, ids).logits
    torch.testing.assert_close(chain(loaded, ids, (0, 8, len(ids))).logits, truth, atol=1e-4, rtol=1e-4)


def test_a_rotary_embedding_of_an_unknown_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = random_model(CONFIGS["llama-gqa"]())
    check_rotary(loaded.model, 512)
    rotary = type(loaded.model.model.rotary_emb)
    forward = rotary.forward

    def by_length(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(module, x, position_ids * (2 if int(position_ids.max()) > 300 else 1))

    monkeypatch.setattr(rotary, "forward", by_length)
    with pytest.raises(ModelError, match="rotary embedding of tokens .* depends on the other tokens"):
        check_chain(loaded)
