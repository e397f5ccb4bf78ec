"""A group's ranks load slices of a model, and together are that model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from made_groups import ids_of, make_folder, on_groups, truth_of
from models import COMMON, CONFIGS

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.sampling import Answer
from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.tensor_parallel import WeightSlice, check_part, part_config, part_of, why_not_divided
from kvr_mpi.model.tp_group import TensorParallelError
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.prefill.self_check import check_chain
from kvr_mpi.setup.job_ranks import JobRanks
from kvr_mpi.transport.local import run_local

NEW_TOKENS, PROMPT = 32, ids_of(50)


def answer(loaded: LoadedModel, prefills: Sequence[Prefill], new_tokens: int = NEW_TOKENS) -> list[Answer | None]:
    """Decode prompts together, greedily."""
    config = tf.GenerationConfig(do_sample=False)
    batch = DecodeBatch[int](loaded, config, stop=(), max_new_tokens=new_tokens)
    for key, prefill in enumerate(prefills):
        batch.add(key, prefill, PROMPT, seed=0)
    found: dict[int, Answer | None] = {}
    while batch.running:
        found |= {finished.key: finished.answer for finished in batch.step()}
    return [found[key] for key in sorted(found)]


def prefill_and_answer(ranks: JobRanks, loaded: LoadedModel) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    groups = ranks.lane.size
    partition = Partition.even(len(PROMPT), groups)
    prefill = prefill_kvr(loaded, PROMPT, partition, ranks.lane, reserve_tokens=NEW_TOKENS)
    if prefill.logits is None:
        return None
    (told,) = answer(loaded, [prefill])
    assert told is not None
    return prefill.logits, told.token_ids


@pytest.mark.parametrize(
    ("kind", "groups", "size"),
    [
        ("llama-biases", 1, 2),
        *(("llama", groups, 2) for groups in (2, 3)),
        ("qwen3", 2, 2),
        ("mixtral", 2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                *((kind, groups, 2) for kind in ("qwen3", "mixtral") for groups in (1, 3)),
                ("llama", 2, 6),  # 2 KV heads: three ranks have the same
                ("qwen2", 2, 3),
                ("qwen3-moe", 2, 2),
                ("gemma2", 2, 2),
                ("mistral", 2, 2),
            ]
        ),
    ],
)
def test_groups_are_one_process(tmp_path: Path, kind: str, groups: int, size: int) -> None:
    folder, model = make_folder(tmp_path / kind, kind)
    logits, tokens = truth_of(model, PROMPT, NEW_TOKENS)
    found = on_groups(folder, groups, size, prefill_and_answer)
    assert all(one is None for one in found[:-size])
    for mine, told in found[-size:]:
        assert torch.equal(mine, found[-1][0]), "ranks that differ by a rounding may choose different tokens"
        assert float((mine - logits).abs().max()) < 1e-4
        assert list(told) == tokens


@pytest.mark.parametrize(("kind", "size"), [("llama", 2), ("mixtral", 2), ("qwen3", 2), ("qwen2", 3)])
def test_a_rank_reads_and_holds_its_share_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: int
) -> None:
    """By what its tensors keep alive, not by what they show of it; no shared matrix is read whole."""
    folder, model = make_folder(tmp_path / kind, kind)
    read, getitem = list[int](), WeightSlice.__getitem__

    def watched(self: WeightSlice, index: Any) -> torch.Tensor:
        found = getitem(self, index)
        read.append(found.untyped_storage().nbytes())
        return found

    def held(model: Any) -> int:
        return sum(memory.nbytes() for memory in {one.untyped_storage() for one in model.parameters()})

    monkeypatch.setattr(WeightSlice, "__getitem__", watched)
    whole, parts = held(model), on_groups(folder, 1, size, lambda ranks, loaded: held(loaded.model))
    assert sum(parts) >= whole and max(parts) <= 1.15 * whole / size
    assert read and max(read) <= 1.15 * max(weights.nbytes for weights in model.parameters()) / size


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fits"), [(6, 2, 2, True), (6, 2, 6, True), (6, 2, 3, False), (6, 3, 2, False)]
)
def test_heads_are_divided_or_repeated_whole(heads: int, kv_heads: int, size: int, fits: bool) -> None:
    config = tf.LlamaConfig(**{**COMMON, "num_attention_heads": heads}, num_key_value_heads=kv_heads)
    assert (why_not_divided(heads, kv_heads, size) is None) == fits
    if fits:
        parts = [part_of(config, rank, size) for rank in range(size)]
        assert [head for part in parts for head in range(*part.own_heads)] == list(range(heads))
        stored = [part.held for part in parts if part.stores]
        assert [head for one in stored for head in range(one.first, one.last)] == list(range(kv_heads))
        assert all(one.shares == stored for one in stored)
        for part in parts:  # a query head attends to the KV head it has in the whole model
            first, last = part.own_kv_heads
            queries = range(*part.own_heads)
            assert [head * kv_heads // heads for head in queries] == [
                first + at * (last - first) // len(queries) for at in range(len(queries))
            ]
    else:
        with pytest.raises(ConfigError, match="cannot be divided by it; choose one of"):
            part_of(config, 0, size)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (CONFIGS["phi3"](), "qkv_proj colwise_gather_output, which is not known here"),
        (CONFIGS["gpt2"](), "no plan for it"),
        # It has norms over the features of all heads: a rank's own would be normed by themselves, without a word.
        (tf.Olmo2Config(**COMMON, num_key_value_heads=6), "not known here|is not divided as"),
    ],
)
def test_what_cannot_be_divided_is_refused(config: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        part = part_of(config, 0, 2)
        check_part(config, part_config(config, part), part)


class _NoMemory:
    """Raises what torch raises when memory runs out, on one rank, at a layer's update, when armed."""

    def __init__(self, layer: int) -> None:
        self._layer, self.armed = layer, False

    def __call__(self, module: Any, given: Any) -> None:
        if self.armed:
            self.armed = False
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")


@pytest.mark.parametrize("failing", [(0, 1), (1, 0)])
def test_no_memory_on_one_rank_costs_one_prompt(tmp_path: Path, failing: tuple[int, int]) -> None:
    """In the middle of the model: its group plays on, all lanes know, and the next prompt is as if nothing had been."""
    folder, model = make_folder(tmp_path / "llama", "llama")
    logits, _ = truth_of(model, PROMPT, 1)

    def work(ranks: JobRanks, loaded: LoadedModel) -> list[tuple[str | None, torch.Tensor | None]]:
        assert ranks.tp_group is not None
        fails = _NoMemory(1)
        loaded.model.model.layers[1].mlp.register_forward_pre_hook(fails)
        fails.armed = (ranks.lane.rank, ranks.tp_group.rank) == failing
        found = []
        for _ in range(2):
            prefill = prefill_kvr(loaded, PROMPT, Partition((0, 20, 50)), ranks.lane, spares_chain=True)
            found.append((prefill.error, prefill.logits))
        return found

    found = on_groups(folder, 2, 2, work)
    for rank, ((error, none), (no_error, mine)) in enumerate(found):
        tp_group, is_last = rank // 2, rank >= 2
        assert none is None and no_error is None
        assert (error is not None) == (is_last or tp_group == failing[0])
        if is_last:
            assert error is not None and f"rank {failing[0]} of the 2 in its chain ran out of memory" in error
            assert mine is not None and float((mine - logits).abs().max()) < 1e-4


def test_no_memory_for_a_token_on_one_rank_halves_the_row_on_all(tmp_path: Path) -> None:
    folder, model = make_folder(tmp_path / "llama", "llama")
    _, tokens = truth_of(model, PROMPT, NEW_TOKENS)

    def work(ranks: JobRanks, loaded: LoadedModel) -> list[tuple[int, ...]]:
        assert ranks.tp_group is not None
        prefills = [
            prefill_kvr(loaded, PROMPT, Partition((0, 50)), ranks.lane, reserve_tokens=NEW_TOKENS) for _ in range(3)
        ]
        fails = _NoMemory(1)
        loaded.model.lm_head.register_forward_pre_hook(fails)  # after the last sum of a layer
        fails.armed = ranks.tp_group.rank == 1
        found = answer(loaded, prefills)
        return [one.token_ids for one in found if one is not None]

    for found in on_groups(folder, 1, 2, work):
        assert [list(each) for each in found] == [tokens] * 3


def test_chains_of_threads_run_on_a_part_alone(tmp_path: Path) -> None:
    """A group's sums would be taken for those of another thread; a part alone is a model of its own."""
    folder, _ = make_folder(tmp_path / "llama", "llama")

    def work(ranks: JobRanks, loaded: LoadedModel) -> str:
        assert ranks.tp_group is not None
        with ranks.tp_group.alone():
            check_chain(loaded)
        with pytest.raises(TensorParallelError, match="in one thread each"):
            run_local(1, lambda rank: prefill_kvr(loaded, PROMPT, Partition((0, 50)), rank))
        return "refused"

    assert on_groups(folder, 1, 2, work) == ["refused"] * 2


def test_a_lane_sends_its_own_heads_only(tmp_path: Path) -> None:
    """What travels between groups, over all lanes, is each head once."""
    folder, _ = make_folder(tmp_path / "qwen2", "qwen2")

    def work(ranks: JobRanks, loaded: LoadedModel) -> int:
        return prefill_kvr(loaded, PROMPT, Partition((0, 20, 50)), ranks.lane).sent_bytes

    found = on_groups(folder, 2, 3, work)
    whole = 20 * 3 * 2 * 8 * 3 * 4  # tokens, layers, keys and values, head_dim, KV heads, bytes
    assert found == [whole // 3] * 3 + [0] * 3
