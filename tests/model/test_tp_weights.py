"""A group's ranks load slices of a model, and together are that model; every architecture does so, or is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from chains import ids_of, make_folder, on_groups, truth_of
from models import COMMON, CONFIGS
from rows import batch_of, finish, tokens_of
from safetensors import safe_open

from kvr_mpi.errors import ConfigError, DataError, ModelError
from kvr_mpi.model import LoadedModel
from kvr_mpi.model import tensor_parallel as tp
from kvr_mpi.model.tensor_parallel import WeightSlice, part_of, why_not_divided
from kvr_mpi.model.tp_group import TensorParallelError, TensorParallelGroup, guarded
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.runtime.job_ranks import JobRanks
from kvr_mpi.transport import gather_json, share_json
from kvr_mpi.transport.local import LocalTransport, run_local

NEW_TOKENS, PROMPT = 32, ids_of(50)


def answers(loaded: LoadedModel, prefills: Sequence[Prefill]) -> list[list[int]]:
    """Decode prompts together, greedily."""
    batch = batch_of(loaded, NEW_TOKENS)
    for key, prefill in enumerate(prefills):
        batch.add(key, prefill, PROMPT, seed=0)
    return [list(tokens) for _, tokens in sorted(tokens_of(finish(batch)).items())]


def weights_held(model: Any) -> int:
    """By what its tensors keep alive, not by what they show of it."""
    return sum(memory.nbytes() for memory in {one.untyped_storage() for one in model.parameters()})


@pytest.mark.parametrize(
    ("kind", "groups", "size"),
    [
        ("llama-biases", 1, 2),
        ("llama", 3, 2),
        ("qwen3", 2, 2),
        ("mixtral", 2, 2),
        ("qwen2", 2, 3),
        ("phi3", 2, 2),
        ("glm4-moe", 2, 2),
        ("deepseek-v3", 2, 2),
        ("gpt-oss", 2, 2),
        *(
            pytest.param(kind, 2, size, marks=pytest.mark.long)
            # 2 KV heads on six ranks: three ranks have the same
            for kind, size in [
                ("llama", 6),
                ("phi3", 6),
                ("glm4", 2),
                ("qwen3-moe", 2),
                ("gemma2", 2),
                ("mistral", 2),
                ("deepseek-v2", 2),
                ("qwen2-moe", 2),
                ("glm4-moe-lite", 2),
            ]
        ),
    ],
)
def test_groups_are_one_process(tmp_path: Path, kind: str, groups: int, size: int) -> None:
    """The same logits and answer; a rank holds its share of the weights, and a lane sends its own heads only."""
    folder, model = make_folder(tmp_path / kind, kind)
    logits, tokens = truth_of(model, PROMPT, NEW_TOKENS)
    partition = Partition.even(len(PROMPT), groups)

    def work(ranks: JobRanks, loaded: LoadedModel) -> tuple[Any, list[list[int]], int, int]:
        prefill = prefill_kvr(loaded, PROMPT, partition, ranks.lane, reserve_tokens=NEW_TOKENS)
        answered = [] if prefill.logits is None else answers(loaded, [prefill])
        return prefill.logits, answered, prefill.sent_bytes, weights_held(loaded.model)

    found = on_groups(folder, groups, size, work)
    assert [told for _, told, *_ in found] == [[]] * (groups - 1) * size + [[tokens]] * size
    for mine, *_ in found[-size:]:
        assert torch.equal(mine, found[-1][0]), "ranks that differ by a rounding may choose different tokens"
        assert float((mine - logits).abs().max()) < 1e-4
    if size <= 3 and kind != "llama-biases":
        parts, whole = [held for *_, held in found[:size]], weights_held(model)
        assert sum(parts) >= whole and max(parts) <= 1.15 * whole / size
    if kind == "qwen2":  # 25 tokens of 3 layers: keys and values of one of 3 heads, of 8 numbers of 4 bytes
        assert [sent for *_, sent, _ in found] == [25 * 3 * 2 * 8 * 4] * 3 + [0] * 3


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
        with pytest.raises(ConfigError, match="cannot be divided by it; set it to"):
            part_of(config, 0, size)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (CONFIGS["llama4-chunks"](), "feed_forward.* which kvr-mpi does not support"),
        (CONFIGS["gpt2"](), "no plan for it"),
        # It has norms over the features of all heads: a rank's own would be normed by themselves, without a word.
        (tf.Olmo2Config(**COMMON, num_key_value_heads=6), "does not support"),
    ],
)
def test_what_cannot_be_divided_is_refused(config: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        part_of(config, 0, 2)


def test_a_matrix_that_the_plan_does_not_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would divide it and not sum its products, without a word."""
    folder, _ = make_folder(tmp_path / "llama", "llama")
    plan = {name: way for name, way in tf.LlamaConfig.base_model_tp_plan.items() if "down_proj" not in name}
    monkeypatch.setattr(tf.LlamaConfig, "base_model_tp_plan", plan)
    with pytest.raises(ModelError, match=r"layers.0.mlp.down_proj.weight of shape .* is not divided as .* plan says"):
        on_groups(folder, 1, 2, lambda ranks, loaded: None)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3-moe"])
def test_a_width_that_does_not_follow_the_configuration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The files' slices are by the plan, the part's modules by its configuration: both must agree."""
    folder, _ = make_folder(tmp_path / kind, kind)

    def with_whole_mlp(config: Any, part: Any, own: Any = tp.part_config) -> Any:
        mine = own(config, part)
        for name in ("intermediate_size", "moe_intermediate_size"):
            if hasattr(config, name):
                setattr(mine, name, getattr(config, name))
        return mine

    monkeypatch.setattr("kvr_mpi.model.load.part_config", with_whole_mlp)
    with pytest.raises(ModelError, match="gate_proj|up_proj|down_proj|mismatch"):
        on_groups(folder, 1, 2, lambda ranks, loaded: None)


@pytest.mark.parametrize("failing", [(0, 1), (1, 0)])
def test_no_memory_on_one_rank_costs_one_prompt_or_halves_a_row(tmp_path: Path, failing: tuple[int, int]) -> None:
    """In the middle of the model: its group plays on, all lanes know, and the next prompt is as if nothing had been.

    For a token of a row of prompts: all ranks of the group halve the row.
    """
    folder, model = make_folder(tmp_path / "llama", "llama")
    logits, tokens = truth_of(model, PROMPT, NEW_TOKENS)

    def work(ranks: JobRanks, loaded: LoadedModel) -> tuple[list[Prefill], list[list[int]]]:
        assert ranks.tp_group is not None
        due = [(ranks.lane.rank, ranks.tp_group.rank) == failing]

        def run_out(module: Any, given: Any) -> None:
            if due and due.pop():
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")

        in_layer = loaded.model.model.layers[1].mlp.register_forward_pre_hook(run_out)
        partition, options = Partition((0, 20, 50)), {"spares_chain": True, "reserve_tokens": NEW_TOKENS}
        prefills = [prefill_kvr(loaded, PROMPT, partition, ranks.lane, **options) for _ in range(4)]
        if prefills[1].logits is None:
            return prefills, []
        in_layer.remove()
        due.append(ranks.tp_group.rank == 1)
        loaded.model.lm_head.register_forward_pre_hook(run_out)  # after the last sum of a layer
        return prefills, answers(loaded, prefills[1:])

    for rank, (prefills, answered) in enumerate(on_groups(folder, 2, 2, work)):
        tp_group, is_last = rank // 2, rank >= 2
        assert prefills[0].logits is None and not any(prefill.error for prefill in prefills[1:])
        assert (prefills[0].error is not None) == (is_last or tp_group == failing[0])
        if is_last:
            assert f"rank {failing[0]} of the 2 in its chain ran out of memory" in str(prefills[0].error)
            assert all(float((prefill.logits - logits).abs().max()) < 1e-4 for prefill in prefills[1:])
            assert answered == [tokens] * 3


@pytest.mark.parametrize(
    ("errors", "kinds"),
    [
        ((None, None), (None, None)),
        ((MemoryError, None), (MemoryError, MemoryError)),
        ((MemoryError, MemoryError), (MemoryError, MemoryError)),
        ((None, DataError), (DataError, DataError)),
        ((ValueError, None), (ValueError, TensorParallelError)),
        ((MemoryError, DataError), (TensorParallelError, TensorParallelError)),
        ((ValueError, MemoryError), (TensorParallelError, TensorParallelError)),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_failure_of_one_rank_is_that_of_all(errors: Any, kinds: Any, nested: bool) -> None:
    """Ranks that fail in one way go on in one way; each is told once, and the next block is as if nothing had been."""

    def work(rank: LocalTransport) -> Any:
        def tell(word: int) -> list[int]:
            return [int(each) for each in share_json(rank, gather_json(rank, word))]

        group = TensorParallelGroup(rank.rank, 2, rank.all_reduce, tell, lambda error: isinstance(error, MemoryError))
        found = None
        try:
            with guarded(group), guarded(group if nested else None):
                if (kind := errors[rank.rank]) is not None:
                    raise kind("on purpose")
        except Exception as error:
            found = type(error)
        with guarded(group):
            return found, float(group.all_reduce(torch.ones(1)))

    assert run_local(2, work) == [(kind, 2.0) for kind in kinds]


def test_no_shared_matrix_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading asks the files for slices of everything but norms and routers."""
    folder, _ = make_folder(tmp_path / "mixtral", "mixtral")
    opened = safe_open(str(folder / "model.safetensors"), framework="pt")
    sizes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    read: list[tuple[str, int]] = []

    getitem = WeightSlice.__getitem__

    def watched(self: WeightSlice, index: Any) -> torch.Tensor:
        found = getitem(self, index)
        read.append((str(self.tensor.get_shape()), found.numel()))
        assert found.untyped_storage().nbytes() == found.nbytes
        return found

    monkeypatch.setattr(WeightSlice, "__getitem__", watched)
    on_groups(folder, 1, 2, lambda ranks, loaded: None)
    assert len(read) == 2 * len(sizes)
    whole = max(torch.Size(shape).numel() for shape in sizes.values())
    assert max(count for _, count in read) <= 1.15 * whole / 2
