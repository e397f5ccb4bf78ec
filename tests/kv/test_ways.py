"""Windows that travel no farther than they are seen, states along the chain, attention over a whole prefix."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from chains import chain, greedy, single
from constants import TESTS
from hypothesis import given
from hypothesis import strategies as st
from models import COMMON, STATES, WHOLE, prompt, tiny
from transformers import masking_utils

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.sampling import make_generation_config
from kvr_mpi.errors import DocumentError, ModelError
from kvr_mpi.kv.contents import layer_kv
from kvr_mpi.model import LoadedModel, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.masks import FULL, Visibility, recognise
from kvr_mpi.model.rope import begins_anew_at, check_rotary
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import compute_prefix, prefill_kvr
from kvr_mpi.prefill.self_check import check_chain
from kvr_mpi.transport.local import LocalTransport, run_local

PROGRAM = TESTS / "programs" / "mpi_chain.py"


def built(config: Any) -> LoadedModel:
    """A random model of a configuration."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return replace(tiny("llama-gqa"), model=model, shape=probe_shape(config, torch.float32))


@given(st.integers(2, 40), st.integers(41, 5000), st.sampled_from(["full", "window", "chunk"]))
def test_masks_are_recognised(size: int, longest: int, kind: str) -> None:
    padding = torch.zeros(1, dtype=torch.long)
    function, expected = {
        "full": (masking_utils.causal_mask_function, FULL),
        "window": (masking_utils.sliding_window_causal_mask_function(size), Visibility(window=size)),
        "chunk": (masking_utils.chunked_causal_mask_function(size, padding), Visibility(chunk=size)),
    }[kind]
    assert recognise(function, size, longest) == expected


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
        recognise(function, 16, 512)


@given(st.integers(1, 300), st.sampled_from([Visibility(window=16), Visibility(chunk=16), FULL]))
def test_what_is_seen_is_what_the_mask_lets_through(position: int, seen: Visibility) -> None:
    padding = torch.zeros(1, dtype=torch.long)
    function = masking_utils.causal_mask_function
    if seen.window is not None:
        function = masking_utils.sliding_window_causal_mask_function(seen.window)
    elif seen.chunk is not None:
        function = masking_utils.chunked_causal_mask_function(seen.chunk, padding)
    keys = torch.arange(position + 1)
    allowed = function(torch.tensor(0), 0, torch.tensor(position), keys)
    assert keys[allowed].tolist() == list(range(seen.first_key(position), position + 1))


@pytest.mark.parametrize("bounds", [(0, 100, 200), (0, 100, 180, 240), (0, 130, 131, 200, 240)])
def test_of_a_window_only_the_tail_travels(bounds: tuple[int, ...]) -> None:
    """Mistral: every layer has a window of 16; each link carries the last 15 tokens before the slice after it."""
    loaded, tokens = tiny("mistral-window"), bounds[-1]
    prepare_model(loaded.model, chain=True)
    partition = Partition(bounds)
    ranks = run_local(partition.size, lambda rank: prefill_kvr(loaded, prompt(tokens), partition, rank))
    row = loaded.shape.kv_bytes_per_token
    assert [rank.sent_bytes for rank in ranks] == [15 * row] * (partition.size - 1) + [0]
    everything = run_local(
        partition.size, lambda rank: prefill_kvr(loaded, prompt(tokens), partition, rank, keeps_all=True)
    )
    assert [rank.sent_bytes for rank in everything[:-1]] == [stop * row for stop in bounds[1:-1]]
    assert everything[-1].logits is not None and ranks[-1].logits is not None
    assert torch.equal(everything[-1].logits, ranks[-1].logits)
    keys = layer_kv(everything[-1].cache, 0)
    assert keys is not None and keys[0].shape[0] == tokens


def test_of_a_chunk_only_what_has_begun_travels() -> None:
    """Llama 4 with chunks of 32: a slice from 100 on sees from 96 on, one from 192 on nothing before it."""
    loaded, partition = tiny("llama4-chunks"), Partition((0, 100, 192, 240))
    prepare_model(loaded.model, chain=True)
    seen = [layer.visibility.first_key(100) for layer in loaded.shape.layers]
    assert set(seen) == {96}
    ranks = run_local(3, lambda rank: prefill_kvr(loaded, prompt(240), partition, rank))
    assert [rank.sent_bytes for rank in ranks] == [4 * loaded.shape.kv_bytes_per_token, 0, 0]


@pytest.mark.parametrize("name", STATES)
def test_states_are_one_small_message_a_layer(name: str) -> None:
    loaded = tiny(name)
    prepare_model(loaded.model, chain=True)
    sent = []
    for tokens in (60, 120):
        ranks = run_local(2, lambda rank: prefill_kvr(loaded, prompt(tokens), Partition((0, 30, tokens)), rank))  # noqa: B023
        sent.append(ranks[0].sent_bytes)
    states = [layer for layer in loaded.shape.layers if layer.states]
    assert sent[0] == sent[1], "it does not grow with what is after"
    assert 0 < sent[0] - 30 * loaded.shape.kv_bytes_per_token < len(states) * 1e4


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STATES, *WHOLE])
def test_a_prefix_that_all_share_changes_nothing(name: str) -> None:
    loaded, ids = tiny(name), prompt(60)
    truth = single(loaded, ids)
    assert truth.logits is not None
    logits, answer = truth.logits, greedy(loaded.model, truth, 8)
    prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
    prefix = compute_prefix(loaded, ids[:25])
    for bounds in [(0, 60), (0, 26, 60), (0, 40, 59, 60)]:
        partition = Partition(bounds)
        ranks = run_local(
            partition.size,
            lambda rank: prefill_kvr(loaded, ids, partition, rank, prefix=prefix, reserve_tokens=8),  # noqa: B023
        )
        assert ranks[-1].logits is not None
        torch.testing.assert_close(ranks[-1].logits, logits, atol=1e-4, rtol=0)
        assert greedy(loaded.model, ranks[-1], 8) == answer


@pytest.mark.parametrize("name", [*STATES, *WHOLE])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_without_memory_spares_its_chain(name: str, failing: int) -> None:
    """It hands on states without meaning; the next prompt over the same ranks is exact."""
    loaded, ids, cut = tiny(name), prompt(60), Partition((0, 20, 40, 60))
    truth = single(loaded, ids).logits
    prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
    calls = []

    def run_out(*args: Any) -> None:
        if threading.current_thread().name == f"rank {failing}":
            calls.append(1)
            raise torch.OutOfMemoryError("on purpose")

    layers = next(module for module in loaded.model.modules() if isinstance(module, torch.nn.ModuleList))

    def work(rank: LocalTransport) -> list[Any]:
        hook = layers[1].register_forward_pre_hook(run_out) if rank.rank == failing else None
        first = prefill_kvr(loaded, ids, cut, rank, spares_chain=True)
        if hook is not None:
            hook.remove()
        return [first, prefill_kvr(loaded, ids, cut, rank, spares_chain=True)]

    ranks = run_local(3, work)
    assert calls
    assert "ran out of memory" in str(ranks[2][0].error) and ranks[2][0].cache is None
    assert truth is not None and ranks[2][1].logits is not None
    torch.testing.assert_close(ranks[2][1].logits, truth, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mpi", pytest.param("gloo", marks=pytest.mark.long)])
def test_states_and_whole_prefixes_over_real_ranks(mpirun: Any, transport: str) -> None:
    names = ",".join([*STATES, *WHOLE, "mistral-window", "llama4-chunks"])
    run = mpirun(3, [sys.executable, PROGRAM, 16, transport, names], env={"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    assert '"size": 3' in run.stdout and float(run.stdout.split('"worst": ')[1].split(",")[0]) < 1e-4


def test_an_answer_that_outgrows_its_frequencies_is_that_of_generate() -> None:
    """Phi-3 computes its cache anew when the answer passes the length at which its frequencies change."""
    factors = [1.0 + at / 2 for at in range(4)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors[::-1]}
    loaded = built(
        tf.Phi3Config(
            **COMMON,
            num_key_value_heads=2,
            pad_token_id=0,
            eos_token_id=None,
            rope_parameters=rope | {"original_max_position_embeddings": 48},
            original_max_position_embeddings=48,
        )
    )
    assert begins_anew_at(loaded.model) == 49
    ids, new_tokens = prompt(40), 20
    prepare_model(loaded.model, chain=False)
    truth = loaded.model.generate(torch.tensor([ids]), max_new_tokens=new_tokens, do_sample=False)[0, 40:].tolist()
    config = make_generation_config(loaded.model, {"do_sample": False})
    tokenizer = type("Tokenizer", (), {"decode": lambda self, ids, **kwargs: "", "eos_token_id": None})()
    loaded = replace(loaded, tokenizer=tokenizer)
    prepare_model(loaded.model, chain=True)
    for bounds in [(0, 40), (0, 25, 40)]:
        pool = DecodeBatch(loaded, config, stop=(), max_new_tokens=new_tokens)
        pool.add("one", chain(loaded, ids, bounds, new_tokens), ids, 0)
        finished: list[Any] = []
        while not finished:
            finished = pool.step()
        assert list(finished[0].answer.token_ids) == truth, bounds


def test_a_rotary_embedding_of_an_unknown_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = built(tf.LlamaConfig(**COMMON, num_key_value_heads=2))
    check_rotary(loaded.model, 512)
    rotary = type(loaded.model.model.rotary_emb)
    forward = rotary.forward

    def by_length(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(module, x, position_ids * (2 if int(position_ids.max()) > 300 else 1))

    monkeypatch.setattr(rotary, "forward", by_length)
    with pytest.raises(ModelError, match="rotary embedding of tokens .* depends on the others"):
        check_chain(loaded)


def test_tokens_that_the_model_has_not_are_refused() -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    with pytest.raises(DocumentError, match="token 199, and LlamaForCausalLM has 199 tokens"):
        prefill_kvr(loaded, [3, 199], Partition((0, 2)), LocalTransport())
