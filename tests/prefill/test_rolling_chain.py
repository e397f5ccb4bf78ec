"""Rolling caches over the ranks of a chain: token by token what one rank gives, and nobody holds or is sent more."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from chains import greedy, single
from models import VOCAB, prompt, tiny

from kvr_mpi.errors import ModelError, PartitionError
from kvr_mpi.kv.rolling import STREAMING_LLM, Rolling, RollingLayer
from kvr_mpi.kv.rolling_relay import Stretches
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, run_next
from kvr_mpi.prefill.rolling_chain import prefill_rolling_chain
from kvr_mpi.prefill.streaming import prefill_rolling, prove_rolling
from kvr_mpi.transport import Transport
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.local import LocalTransport, run_local

NEW_TOKENS = 12
WINDOW = 16  # of mistral-window


def chained(loaded: LoadedModel, ids: Sequence[int], rolling: Rolling, lengths: Sequence[int]) -> list[Prefill]:
    """Run a chain of threads, whose ranks have so many tokens each, or shares in these proportions."""
    prepare_model(loaded.model, chain=True)
    cut = Partition.by_ratio(len(ids), [float(length) for length in lengths])
    return run_local(cut.size, lambda rank: prefill_rolling_chain(loaded, ids, rolling, cut, rank))


def answered(loaded: LoadedModel, prefill: Prefill) -> list[int]:
    prepare_model(loaded.model, chain=True)
    return greedy(loaded.model, prefill, NEW_TOKENS)


def test_stretches_are_the_prompt_in_order_whatever_the_slices() -> None:
    draw = random.Random(3)
    for _ in range(200):
        lengths = [draw.randrange(1, 60) for _ in range(draw.randrange(1, 5))]
        cut = Partition((0, *(sum(lengths[: end + 1]) for end in range(len(lengths)))))
        stretches, seen = Stretches(cut, draw.randrange(1, 20)), 0
        own = [0] * cut.size
        for step in range(stretches.steps):
            for place in range(cut.size):
                first, last = stretches.bounds(step, place)
                assert first == seen and last - first <= stretches.step_tokens
                own[place] += last - first
                seen = last
        assert own == lengths and seen == cut.tokens
        assert stretches.bounds(stretches.steps - 1, cut.size - 1)[0] < seen, "the last rank has the last token"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shares", "cache_tokens", "step_tokens"),
    [
        ([1, 1], 15, 7),  # a tail spans both ranks, more than once
        ([1, 1], 15, 40),  # it is the rank's before
        ([3, 1, 2], 15, 5),
        ([1, 5, 2], 20, 24),
        ([1, 1, 1], 15, 1),
        ([1, 70, 1], 40, 2),  # some ranks have nothing in most steps
        ([1, 1, 1], 448, 64),  # one step
    ],
)
def test_windows_that_fit_give_what_plain_transformers_gives(
    shares: list[int], cache_tokens: int, step_tokens: int
) -> None:
    loaded = tiny("mistral-window")
    for tokens in (len(shares), 23, 131):
        ids = prompt(tokens)
        truth = single(loaded, ids)
        expected = greedy(loaded.model, truth, NEW_TOKENS)
        *others, last = chained(loaded, ids, Rolling(cache_tokens, step_tokens, sinks=1), shares)
        assert all(one.logits is None and one.cache is None and one.error is None for one in others)
        assert last.logits is not None and truth.logits is not None
        assert torch.allclose(last.logits, truth.logits, atol=1e-4), tokens
        assert answered(loaded, last) == expected
        assert last.rolling.endswith(f"(exact) on each of {len(shares)} ranks")


@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa",
        "gemma2-softcap",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt-oss-sinks", "falcon-mqa", "llama4-chunks")),
    ],
)
@pytest.mark.parametrize(
    ("shares", "step_tokens", "sinks"), [([1, 1], 30, 3), pytest.param([2, 3, 1], 4, 7, marks=pytest.mark.long)]
)
def test_an_approximation_is_that_of_one_rank(name: str, shares: list[int], step_tokens: int, sinks: int) -> None:
    """Sinks that several ranks compute included, layers with windows beside others, and answers that go on."""
    loaded, ids = tiny(name), prompt(120)
    rolling = Rolling(33, step_tokens, STREAMING_LLM, sinks)
    prepare_model(loaded.model, chain=True)
    alone = prefill_rolling(loaded, ids, rolling)
    last = chained(loaded, ids, rolling, shares)[-1]
    assert alone.logits is not None and last.logits is not None
    assert torch.allclose(last.logits, alone.logits, atol=1e-4)
    assert answered(loaded, last) == answered(loaded, alone)
    full = single(loaded, ids).logits
    is_exact = all(rolling.holds(layer.visibility) for layer in loaded.shape.layers)
    assert full is not None and torch.allclose(last.logits, full, atol=1e-3) == is_exact, "or else nothing was dropped"


def test_each_rank_holds_and_is_sent_the_last_tokens_only() -> None:
    loaded, rolling = tiny("mistral-window"), Rolling(WINDOW - 1, 32)
    by_length = {tokens: chained(loaded, prompt(tokens), rolling, [1, 1, 1]) for tokens in (3 * 32, 30 * 32)}
    for ranks in by_length.values():
        assert ranks[-1].cache.held_bytes == rolling.kv_bytes(loaded.shape)
    handed = (WINDOW - 1) * loaded.shape.kv_bytes_per_token
    # Of each stretch its end goes to the next rank; the last stretch's nowhere.
    assert [one.sent_bytes for one in by_length[96]] == [handed, handed, 0]
    assert [one.sent_bytes for one in by_length[960]] == [10 * handed, 10 * handed, 9 * handed]


def test_what_would_be_another_answer_is_refused() -> None:
    loaded = tiny("llama-gqa")
    with pytest.raises(ModelError, match=r"layer 0 sees all tokens, .* 'streaming-llm'"):
        chained(loaded, prompt(60), Rolling(), [1, 1])
    with pytest.raises(PartitionError, match="add up to 60 tokens; the prompt has 61"):
        prefill_rolling_chain(tiny("mistral-window"), prompt(61), Rolling(), Partition.even(60, 1), LocalTransport())


def test_a_chain_is_tried_before_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("mistral-window")
    prepare_model(loaded.model, chain=True)
    prove_rolling(loaded, Rolling(15, 8), in_chain=True)
    held_rows = RollingLayer.held_rows
    monkeypatch.setattr(RollingLayer, "held_rows", lambda *args: torch.zeros_like(held_rows(*args)))
    with pytest.raises(ModelError, match="a chain's rolling cache differs from a whole one"):
        prove_rolling(loaded, Rolling(15, 8), in_chain=True)


class AfterAnother:
    """A receive that takes no message before the one that was posted before it has."""

    def __init__(self, receive: Any, before: Any) -> None:
        self._receive, self._before = receive, before

    def test(self) -> bool:
        if self._before is not None and not self._before.test():
            return False
        self._before = None
        return bool(self._receive.test())


class Untagged(LocalTransport):
    """Messages that find their receive by their order only, as NCCL's do."""

    has_tags = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last: dict[int, AfterAnother] = {}

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Any = None) -> Any:
        return super().isend(tensor, dest, 0, received)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        self._last[source] = AfterAnother(super().irecv(tensor, source, 0), self._last.get(source))
        return self._last[source]


class Scarce(threading.local):
    """Where memory runs out on the rank that this thread is: a layer of a step; layer -1: there is none for a cache."""

    at: tuple[int, int] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        update, make = RollingLayer.update, RollingLayer.__init__

        def updating(layer: RollingLayer, *args: Any, **kwargs: Any) -> Any:
            if layer.cache.relay is not None and self.at == (layer.layer_idx, layer.cache.relay.step):
                raise torch.OutOfMemoryError("no memory")
            return update(layer, *args, **kwargs)

        def making(layer: RollingLayer, cache: Any, idx: int, shape: Any, memory: Any) -> None:
            if memory is None and self.at is not None and self.at[0] == -1:
                raise torch.OutOfMemoryError("no memory")
            make(layer, cache, idx, shape, memory)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RollingLayer, "update", updating)
            patch.setattr(RollingLayer, "__init__", making)
            yield


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LocalTransport, Untagged])
@pytest.mark.parametrize("size", [2, 3])
def test_prompts_follow_each_other_and_a_rank_without_memory_spares_the_rest(size: int, kind: Any) -> None:
    """Each rank has the last turn in turn; a prompt that failed on one or more of them is an error, and no other is."""
    loaded, draw, rolling, scarce = tiny("mistral-window"), random.Random(size), Rolling(20, 6), Scarce()
    prompts: list[tuple[list[int], Partition, dict[int, tuple[int, int]]]] = []
    for number in range(10):
        ids = [(token + number) % VOCAB for token in prompt(draw.randrange(40, 90))]
        cut = Partition.by_ratio(len(ids), [1 + draw.random() for _ in range(size)])
        fails = {rank: (draw.randrange(-1, 3), draw.randrange(3)) for rank in range(size) if draw.random() < 0.6}
        prompts.append((ids, cut, fails if number % 2 else {}))
    assert sum(bool(fails) for *_, fails in prompts) >= 3
    truths = [single(loaded, ids).logits for ids, *_ in prompts]
    prepare_model(loaded.model, chain=True)

    def run(world: LocalTransport) -> list[Prefill]:
        chain: Transport = kind(world._hub, world.rank)
        forwarder, found = Forwarder(chain), []
        for number, (ids, cut, fails) in enumerate(prompts):
            scarce.at, last = fails.get(chain.rank), number % size
            found.append(prefill_rolling_chain(loaded, ids, rolling, cut, chain, last=last, forwarder=forwarder))
        forwarder.close()
        return found

    with scarce.installed():
        by_rank = run_local(size, run)
    for number, (truth, (_, _, fails)) in enumerate(zip(truths, prompts, strict=True)):
        for rank in range(size):
            found, is_last = by_rank[rank][number], rank == number % size
            assert found.last == number % size
            assert (found.error is not None) == (rank in fails or (is_last and bool(fails)))
            assert (found.logits is not None) == (found.cache is not None) == (is_last and not fails)
        last = by_rank[number % size][number]
        if fails:
            assert last.error is not None and all(
                str(rank) in last.error.partition(" of its chain")[0] for rank in fails
            )
        else:
            assert last.logits is not None and truth is not None and torch.allclose(last.logits, truth, atol=1e-4)


def test_answers_go_on_far_beyond_the_cache() -> None:
    loaded, ids = tiny("mistral-window"), prompt(40)
    truth = single(loaded, ids)
    expected = greedy(loaded.model, truth, 61)
    last = chained(loaded, ids, Rolling(15, 8), [1, 1])[-1]
    prepare_model(loaded.model, chain=True)
    assert greedy(loaded.model, last, 60) == expected[:60]
    last.cache.step_back(99)
    with torch.inference_mode():
        again = run_next(loaded.model, last, torch.tensor([[expected[59]]]))
    assert int(again.argmax()) == expected[60] and last.cache.length == 100
