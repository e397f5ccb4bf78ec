"""Heads on several ranks: the answers of one, whatever the placement."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import rows
import torch
import transformers as tf
from models import COMMON, CONFIGS, STATES, WHOLE, random_model, tiny
from rows import alone, batch_of, finish, other_prompt

from benchmarks.kept import keep_only
from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.fairkv.group import HeadGroup
from kvr_mpi.fairkv.placement import (
    HeadPiece,
    LayerPlacement,
    assign_rows,
    place_best_effort,
    place_in_proportion,
    place_statically,
    place_with_equal_copies,
)
from kvr_mpi.fairkv.shared_heads import why_not_shared
from kvr_mpi.fairkv.sharing import PlacedHeads, open_sharing
from kvr_mpi.job.spec import DecodeSection
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import run_local

NEW_TOKENS = 9
LENGTHS = [30, 61, 18, 47, 25]


# Biases, norms of heads, multipliers, soft caps, parallel blocks, layers without positions, heads of their own size.
KIN: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**COMMON, num_key_value_heads=3, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: tf.Qwen2Config(**COMMON, num_key_value_heads=3, tie_word_embeddings=True),
    "qwen3": lambda: tf.Qwen3Config(**COMMON, num_key_value_heads=3, head_dim=16),
    "mistral": lambda: tf.MistralConfig(**COMMON, num_key_value_heads=3, sliding_window=None),
    "gemma": lambda: tf.GemmaConfig(**COMMON, num_key_value_heads=3, head_dim=16),
    "granite": lambda: tf.GraniteConfig(
        **COMMON, num_key_value_heads=3, logits_scaling=2.0, residual_multiplier=0.3, attention_multiplier=0.2
    ),
    "cohere": lambda: tf.CohereConfig(**COMMON, num_key_value_heads=3),
    "smollm3": lambda: tf.SmolLM3Config(**COMMON, num_key_value_heads=3, pad_token_id=0),
    "arcee": lambda: tf.ArceeConfig(**COMMON, num_key_value_heads=3),  # its MLP has no gate
}


def ready(name: str) -> LoadedModel:
    if name in CONFIGS or name in {**STATES, **WHOLE}:
        loaded = tiny(name)
    else:
        loaded = random_model(KIN[name]())
        with torch.no_grad():  # biases are made as zeros, and norms as ones: nothing would tell them apart
            for parameter in loaded.model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return rows.ready(loaded)


def compressed(loaded: LoadedModel, tokens: int) -> Prefill:
    """A document whose heads keep very different numbers of tokens."""
    prefill, draw = alone(loaded, other_prompt(tokens), NEW_TOKENS), random.Random(tokens)
    counts = [[max(1, int(tokens * draw.random() ** 3)) for _ in range(s.num_kv_heads)] for s in loaded.shape.layers]
    kept = [[torch.tensor(sorted(draw.sample(range(tokens), count))) for count in heads] for heads in counts]
    keep_only(prefill.cache, kept, NEW_TOKENS)
    return prefill


def answered(batch: DecodeBatch, documents: Sequence[tuple[int, Prefill]]) -> dict[int, Any]:
    """Answer this rank's documents of so many tokens with all other ranks."""
    for tokens, prefill in documents:
        batch.add(tokens, prefill, other_prompt(tokens), tokens)
    return {key: one.answer for key, one in finish(batch).items()}


def truths(loaded: LoadedModel) -> dict[int, Any]:
    """Each document alone on one rank."""
    return {each: answered(batch_of(loaded, NEW_TOKENS), [(each, compressed(loaded, each))])[each] for each in LENGTHS}


def opened(loaded: LoadedModel, ranks: Transport, place: Any) -> DecodeBatch:
    torch.set_num_threads(1)
    return batch_of(loaded, NEW_TOKENS, HeadGroup(loaded, ranks, place))


def together(loaded: LoadedModel, size: int, place: Any) -> tuple[dict[int, Any], list[Any]]:
    """All documents on several ranks, each prefilled by one of them."""

    def work(ranks: Transport) -> tuple[dict[int, Any], Any]:
        mine = LENGTHS[ranks.rank :: ranks.size] if size < 4 else LENGTHS if ranks.rank == 2 else []
        batch = opened(loaded, ranks, place)
        return answered(batch, [(each, compressed(loaded, each)) for each in mine]), batch.group

    ranks = run_local(size, work)
    return {key: answer for found, _ in ranks for key, answer in found.items()}, [group for _, group in ranks]


def place_on_last(loads: Sequence[float], ranks: int) -> LayerPlacement:
    """All heads on one rank: the others hold nothing of the layer."""
    return LayerPlacement(ranks, tuple(HeadPiece(head, ranks - 1, float(load)) for head, load in enumerate(loads)))


def texts(answers: dict[int, Any]) -> dict[int, tuple[Any, str]]:
    return {key: (answer.token_ids, answer.finish_reason) for key, answer in answers.items()}


PLACES: dict[str, Any] = {
    "static": place_statically,  # of three heads on two and four ranks, too
    "best-effort": place_best_effort,
    "equal-copies": lambda loads, ranks: place_with_equal_copies(loads, ranks, ranks),
    "in-proportion": place_in_proportion,
    "all-on-one": place_on_last,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_answers_are_those_of_one_rank(size: int, place: str) -> None:
    loaded = ready("qwen2")
    found, groups = together(loaded, size, PLACES[place])
    assert texts(found) == texts(truths(loaded))
    owned = [[int((own == rank).sum()) for own in groups[0].owners] for rank in range(size)]
    assert all(sum(column) == len(LENGTHS) * 3 for column in zip(*owned, strict=True))
    if place == "all-on-one" and size > 1:
        assert any(0 in layers for layers in owned), "a rank without a head of some layer"


@pytest.mark.parametrize("name", {**KIN, **CONFIGS, **STATES, **WHOLE})
def test_what_is_not_refused_is_right(name: str) -> None:
    loaded = ready(name)
    if why_not_shared(loaded) is None:
        assert name in {*KIN, "llama-gqa", "llama-mha"}
        assert texts(together(loaded, 2, PLACES["in-proportion"])[0]) == texts(truths(loaded))
        return
    assert name not in KIN
    with pytest.raises(ModelError, match=r"cannot be distributed over ranks; use decode.mode = 'data-parallel'"):
        together(loaded, 2, PLACES["best-effort"])
    assert isinstance(open_sharing(DecodeSection(mode="auto"), loaded, None), str), "so each rank decodes its own"
    with pytest.raises(ConfigError, match=r"cannot be distributed over .*; choose mode = 'data-parallel'"):
        open_sharing(DecodeSection(mode="head-parallel"), loaded, None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda layer: setattr(layer.self_attn, "gate", torch.nn.Linear(48, 6)), "self_attn.gate.weight"),
        (
            lambda layer: layer.self_attn.register_parameter("sinks", torch.nn.Parameter(torch.zeros(6))),
            "self_attn.sinks",
        ),
        (lambda layer: setattr(layer.mlp, "shared", torch.nn.Linear(48, 6)), "mlp.shared.weight"),
        (lambda layer: setattr(layer.mlp, "up_proj", torch.nn.Sequential(layer.mlp.up_proj)), "mlp.up_proj.0.weight"),
        (lambda layer: setattr(layer.self_attn, "q_norm", torch.nn.RMSNorm(48)), "self_attn.q_norm.weight"),
    ],
)
def test_what_the_plan_does_not_tell_is_looked_for(change: Callable[[Any], None], why: str) -> None:
    loaded = ready("llama")  # made anew
    change(loaded.model.model.layers[1])
    found = why_not_shared(loaded)
    assert found is not None and re.match(rf"layers.1.{why} of shape .* is not divided as .* plan says", found)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["qwen2", "granite"])
@pytest.mark.parametrize("tokens", [2, 47])
def test_a_single_document_is_divided_by_tokens(tokens: int, name: str, size: int) -> None:
    """With two tokens and four ranks some have nothing of the prompt, and of some heads nobody but the last."""
    loaded = ready(name)

    def work(ranks: Transport) -> dict[int, Any]:
        batch = opened(loaded, ranks, PLACES["best-effort"])
        return answered(batch, [(tokens, compressed(loaded, tokens))] if ranks.rank == 0 else [])

    found, *others = run_local(size, work)
    truth = answered(batch_of(loaded, NEW_TOKENS), [(tokens, compressed(loaded, tokens))])
    assert texts(found) == texts(truth) and not any(others)


def test_ranks_hold_their_share_and_no_more() -> None:
    loaded = ready("qwen2")

    def work(ranks: Transport) -> tuple[int, int, list[int]]:
        batch = opened(loaded, ranks, PLACES["in-proportion"])
        for each in LENGTHS[ranks.rank :: 2]:
            batch.add(each, compressed(loaded, each), other_prompt(each), 0)
        batch.begin()
        group = batch.group
        assert isinstance(group, HeadGroup)
        rows = [int(counts[own == ranks.rank].sum()) for own, counts in zip(group.owners, group.counts, strict=True)]
        units = sum(int((own == ranks.rank).sum()) for own in group.owners)
        held = sum(prefill.cache.nbytes for prefill in batch.prefills)
        return held, 4 * 2 * 8 * (sum(rows) + units * (NEW_TOKENS - 1)), rows

    (first, needs, rows), (second, other_needs, other_rows) = run_local(2, work)
    assert (first, second) == (needs, other_needs)
    loads = np.array([rows, other_rows])
    assert loads.max(0).sum() < 1.25 * loads.mean(0).sum(), "in proportion, and as evenly as documents allow"


def test_rows_of_a_copied_head_come_near_its_pieces() -> None:
    counts = np.random.default_rng(3).integers(1, 400, (12, 4))
    placed = place_in_proportion([float(load) for load in counts.sum(0)], 3)
    assert placed.copies
    owners = assign_rows(placed, counts)
    for head in range(4):
        assert set(owners[:, head]) <= {piece.rank for piece in placed.pieces if piece.head == head}
    found = np.bincount(owners.ravel(), counts.ravel(), 3)
    assert found.sum() == counts.sum() and abs(found - placed.loads).max() <= 2 * counts.max()


@pytest.mark.parametrize(
    ("placement", "ranks", "efficiency"),
    [
        ("static", 2, 0.75),
        ("static", 4, 0.75),
        ("best-effort", 2, 0.75),
        ("equal", 2, 1.0),
        ("proportional", 4, 1.0),
    ],
)
def test_three_equal_heads_on_ranks_that_do_not_divide_them(placement: Any, ranks: int, efficiency: float) -> None:
    settings = DecodeSection(mode="head-parallel", placement=placement)
    found = PlacedHeads(settings, layers=2, kv_heads=3)
    assert found.efficiency(ranks) == pytest.approx(efficiency, abs=1e-3)
    assert found.placing(ranks)([1.0, 1.0, 1.0], ranks).copies <= ranks - 1
    assert placement in found.describe(ranks)
