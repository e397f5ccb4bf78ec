"""The promise of the project: a chain gives what one process gives, for every partition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from chains import NEW_TOKENS, chain, single
from hypothesis import given, settings
from hypothesis import strategies as st
from made_logs import logger_to
from models import CONFIGS, SINGLE_ONLY, STATES, WHOLE, prompt, random_model, tiny

from benchmarks.tiny import shrink
from kvr_mpi.errors import ConfigError, ModelError, PartitionError
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import allowed_error, continued, differences, first_difference
from kvr_mpi.prefill.one_prompt import compute_prefix, prefill_kvr
from kvr_mpi.prefill.self_check import check_chain, check_spread
from kvr_mpi.transport.local import LocalTransport, run_local

NOISE = allowed_error(torch.float32)
TOKENS = 60
CHUNKS: list[tuple[tuple[int, ...], int]] = [
    ((0, 60), 16), ((0, 37, 60), 7), ((0, 37, 60), 1000), ((0, 1, 40, 59, 60), 16), ((0, 37, 60), 1),
]  # fmt: skip


@pytest.mark.parametrize(
    "name", [*CONFIGS, *(pytest.param(name, marks=pytest.mark.slow) for name in [*WHOLE, *STATES])]
)
def test_logits_tokens_and_kv_equal_one_process(name: str) -> None:
    """Logits, keys, values and greedy tokens of plain transformers, however the prompt is cut.

    Also after a prefix, and in chunks where the model takes them.
    """
    loaded, ids = tiny(name), prompt(TOKENS)
    truth = continued(loaded.model, single(loaded, ids), NEW_TOKENS)
    prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
    prefix, chunks = compute_prefix(loaded, ids[:25]), CHUNKS if name in CONFIGS else ()
    for bounds, new_tokens, options in (
        *((bounds, NEW_TOKENS, {}) for bounds in [(0, 60), (0, 44, 60), (0, 1, 59, 60), (0, 23, 38, 50, 60)]),
        *((bounds, 8, {"prefix": prefix}) for bounds in [(0, 60), (0, 26, 60), (0, 40, 59, 60)]),
        *((bounds, 8, {"chunk_tokens": size}) for bounds, size in chunks),
    ):
        found = continued(loaded.model, chain(loaded, ids, bounds, new_tokens, **options), new_tokens)
        assert first_difference(differences(found, truth), NOISE) is None, (bounds, options)
        assert found.tokens == truth.tokens[:new_tokens], (bounds, options)


@pytest.mark.quick
@settings(max_examples=25)
@given(st.data())
def test_every_partition_is_exact(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["llama-gqa", "mistral-window", "falcon-mqa"]))
    size = data.draw(st.integers(1, 8))
    inner = data.draw(st.lists(st.integers(1, TOKENS - 1), min_size=size - 1, max_size=size - 1, unique=True))
    loaded, ids = tiny(name), prompt(TOKENS)
    truth = single(loaded, ids).logits
    found = chain(loaded, ids, [0, *sorted(inner), TOKENS]).logits
    assert truth is not None and found is not None
    torch.testing.assert_close(found, truth, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gpt2", "falcon-mqa", "gemma2-softcap"])
def test_bfloat16_is_no_farther_from_the_truth_than_transformers(name: str) -> None:
    truths, ours, theirs = [], [], []
    for shift in range(8):  # one prompt alone is a matter of luck
        ids = prompt(TOKENS + shift)
        truth, plain = single(tiny(name), ids).logits, single(tiny(name, torch.bfloat16), ids).logits
        cut = chain(tiny(name, torch.bfloat16), ids, (0, 29, 44, TOKENS + shift)).logits
        assert truth is not None and plain is not None and cut is not None
        truths.append(truth), ours.append(cut), theirs.append(plain)
    error_ours = (torch.stack(ours) - torch.stack(truths)).square().mean().sqrt()
    error_theirs = (torch.stack(theirs) - torch.stack(truths)).square().mean().sqrt()
    assert error_ours <= 1.5 * error_theirs


@pytest.mark.parametrize("tokens", [9, 11])
def test_slices_of_another_prompt_are_refused(tokens: int) -> None:
    with pytest.raises(PartitionError, match=f"add up to 10 tokens; the prompt has {tokens}$"):
        prefill_kvr(tiny("llama-gqa"), prompt(tokens), Partition((0, 3, 10)), LocalTransport())


@pytest.mark.parametrize("name", [*CONFIGS, *STATES, *WHOLE])
def test_self_check_finds_which_models_attend_in_parts(name: str) -> None:
    said: list[str] = []
    in_parts = check_chain(replace(tiny(name), attends_in_parts=True), logger=logger_to(said)).attends_in_parts
    assert in_parts == (name not in WHOLE) == (not any("cannot be computed in parts" in line for line in said))


@pytest.mark.parametrize("name", SINGLE_ONLY)
def test_self_check_sends_the_others_to_single(name: str) -> None:
    loaded = tiny(name)
    with pytest.raises(ModelError, match="cannot continue from its cache.*strategy = 'single'"):
        check_chain(loaded)
    assert single(loaded, prompt(20)).logits is not None


@pytest.mark.parametrize("name", sorted({*CONFIGS} - {"llama4-chunks", "phi3"}))
def test_models_that_are_given_their_positions_may_be_spread(name: str) -> None:
    prepare_model(tiny(name).model, chain=True)
    check_spread(tiny(name))


@pytest.mark.parametrize("name", ["bart", "blenderbot", "plbart"])
def test_models_that_count_positions_by_their_cache_are_refused(name: str) -> None:
    loaded = random_model(shrink(name))
    for parameter in loaded.model.parameters():  # positions count as much as words
        torch.nn.init.normal_(parameter, std=0.2)
    prepare_model(loaded.model, chain=True)
    with pytest.raises(ConfigError, match=r"cannot be spread over ranks: logits of a decoded token differ"):
        check_spread(loaded)


def test_self_check_finds_a_model_that_would_answer_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvr_mpi.kv.chain import SliceLayer

    # A cache that tells every slice it begins the prompt: positions are wrong, and nothing crashes.
    monkeypatch.setattr(SliceLayer, "get_seq_length", lambda layer: 0)
    with pytest.raises(ModelError, match="differ from those of plain transformers"):
        check_chain(tiny("llama-gqa"))


@pytest.mark.parametrize("name", CONFIGS)
def test_behind_the_last_attention_one_token_is_computed(name: str) -> None:
    """And no layer before it is cut."""
    loaded, rows = tiny(name), dict[str, set[int]]()
    prepare_model(loaded.model, chain=True)

    def record(module: Any, args: Any, out: torch.Tensor) -> None:
        rows.setdefault(layers[module], set()).add(out[..., 0].numel())

    layers = {
        module: next(part for part in path.split(".") if part.isdigit())
        for path, module in loaded.model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D", "FalconLinear")
        and any(part in path for part in ("mlp", "fc1", "fc2"))
    }
    hooks = [module.register_forward_hook(record) for module in layers]
    prefill_kvr(loaded, prompt(TOKENS), Partition((0, TOKENS)), LocalTransport())
    for hook in hooks:
        hook.remove()
    if hooks:  # experts are no modules of one product each
        assert rows == {"0": {TOKENS}, "1": {TOKENS}, "2": {1}}


def test_the_cut_is_left_out_where_a_model_notices_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("llama-gqa")
    forward = loaded.model.model.layers[2].mlp.forward

    def noticing(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[1])
        return forward(hidden) if len(seen) != 5 else 2 * forward(hidden)

    seen = list[int]()  # plain, a chain of three, a last slice that is cut, and one that is not; a token after each
    monkeypatch.setattr(loaded.model.model.layers[2].mlp, "forward", noticing)
    assert not check_chain(loaded).cuts_last_layer
    assert seen == [12, 1, 1, 1, 1, 1, 6, 1]


def test_no_mask_of_slice_by_prefix_is_made() -> None:
    """Peak memory of a slice after a prefix stays far below slice x prefix; a rank that passes it on keeps nothing."""
    loaded, tokens = tiny("llama-gqa"), 512
    prepare_model(loaded.model, chain=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    def work(rank: LocalTransport) -> int:
        with Watch():
            cache = prefill_kvr(loaded, prompt(tokens), Partition((0, 256, tokens)), rank).cache
        return 0 if cache is None else int(cache.nbytes)

    assert run_local(2, work) == [0, tokens * loaded.shape.kv_bytes_per_token]
    assert largest < 256 * 512


def test_what_comes_first_changes_nothing() -> None:
    """Bit for bit, on four ranks, however the threads are scheduled."""
    loaded = tiny("llama-gqa")
    runs = [chain(loaded, prompt(TOKENS), (0, 9, 30, 48, TOKENS)).logits for _ in range(6)]
    assert runs[0] is not None
    assert all(run is not None and torch.equal(run, runs[0]) for run in runs)
