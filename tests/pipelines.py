"""Prompts one after the other through a chain, some of which fail on purpose: the same on threads and on real ranks."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from models import VOCAB, tiny

from kvr_mpi.kv import buffers
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import compute_prefix, prefill_kvr, prefill_single
from kvr_mpi.prefill.registry import STRATEGIES
from kvr_mpi.transport import Transport
from kvr_mpi.transport.forwarder import Forwarder

LAYERS = 3
MODELS = ("llama-gqa", "mistral-window", "falcon-mqa", "gpt2", "gpt-oss-sinks")


@dataclass(frozen=True)
class Prompt:
    """One prompt, which strategy runs it, how it is cut, and who fails where."""

    model: str
    strategy: str
    ids: tuple[int, ...]
    partition: Partition
    last: int
    prefix_tokens: int
    fails: dict[int, int]  # the layer before which a rank's memory ends; -1: it has none for its buffers
    chunk_tokens: int | None = None


def draw_prompts(count: int, size: int, seed: int, *, failing: float, models: tuple[str, ...] = MODELS) -> list[Prompt]:
    """Random lengths, strategies, slices, orders, prefixes and failures; the same on every rank."""
    draw = random.Random(seed)
    prompts = []
    for _ in range(count):
        tokens = draw.randrange(20, 90)
        ids = tuple(range(1, 11)) + tuple(draw.randrange(VOCAB) for _ in range(tokens - 10))
        prefix_tokens = 10 if draw.random() < 0.5 else 0
        strategy = draw.choice(["kvr", "ring"])
        slices = 2 * size if strategy == "ring" else size
        inner = sorted(draw.sample(range(prefix_tokens + 1, tokens), slices - 1))
        failed = draw.sample(range(size), draw.choice([1, 1, min(2, size), size]))
        fails = {rank: draw.randrange(-1, LAYERS) for rank in failed} if draw.random() < failing else {}
        partition, chunk_tokens = Partition((0, *inner, tokens)), draw.choice([None, 5, 16])
        model, last = draw.choice(models), draw.randrange(size)
        prompts.append(Prompt(model, strategy, ids, partition, last, prefix_tokens, fails, chunk_tokens))
    return prompts


def truths(prompts: list[Prompt]) -> list[torch.Tensor]:
    """Logits of plain transformers; leaves the models ready for chains."""
    for name in {prompt.model for prompt in prompts}:
        prepare_model(tiny(name).model, chain=False)
    found = [prefill_single(tiny(prompt.model).model, prompt.ids, torch.device("cpu")).logits for prompt in prompts]
    for name in {prompt.model for prompt in prompts}:
        prepare_model(tiny(name).model, chain=True)
    return [logits for logits in found if logits is not None]


class Failing(threading.local):
    """Raises what torch raises when memory runs out: on a rank, which is a thread, in the layer of `Prompt.fails`."""

    layer: int | None = None

    @contextmanager
    def installed(self, models: tuple[str, ...] = MODELS) -> Iterator[None]:
        """Watch the layers of models and the making of buffers."""
        make = buffers.make_flat

        def making(count: int, dtype: torch.dtype, device: torch.device) -> Any:
            if self.layer == -1:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
            return make(count, dtype, device)

        def enter(idx: int) -> None:
            if self.layer == idx:
                raise torch.OutOfMemoryError("CUDA out of memory (on purpose)")

        hooks = []
        for name in models:
            blocks = next(part for part in tiny(name).model.modules() if isinstance(part, torch.nn.ModuleList))
            for idx, block in enumerate(blocks):
                hooks.append(block.register_forward_pre_hook(lambda block, args, idx=idx: enter(idx)))
        buffers.make_flat = making
        try:
            yield
        finally:
            buffers.make_flat = make
            for hook in hooks:
                hook.remove()


def run_prompts(chain: Transport, prompts: list[Prompt], logits: list[torch.Tensor], failing: Failing) -> float:
    """Run all prompts without a barrier, check what comes out on this rank, and return the largest error of logits."""
    prefixes = {name: compute_prefix(tiny(name), range(1, 11)) for name in {prompt.model for prompt in prompts}}
    forwarder = Forwarder(chain)
    worst = 0.0
    for prompt, truth in zip(prompts, logits, strict=True):
        failing.layer = prompt.fails.get(chain.rank)
        prefill = prefill_kvr(
            tiny(prompt.model),
            prompt.ids,
            prompt.partition,
            chain,
            STRATEGIES[prompt.strategy],
            prefix=prefixes[prompt.model] if prompt.prefix_tokens else None,
            last=prompt.last,
            forwarder=forwarder,
            spares_chain=True,
            chunk_tokens=prompt.chunk_tokens if prompt.strategy == "kvr" else None,
        )
        failing.layer = None
        is_last = chain.rank == prompt.last
        assert (prefill.last, prefill.strategy) == (prompt.last, prompt.strategy)
        assert (prefill.error is not None) == bool(prompt.fails and (is_last or chain.rank in prompt.fails))
        if prefill.error is not None:
            assert prefill.cache is None and prefill.logits is None
            for rank in prompt.fails if is_last else [chain.rank]:
                assert f"{rank}" in prefill.error and "ran out of memory" in prefill.error
        elif is_last:
            assert prefill.logits is not None
            worst = max(worst, float((prefill.logits - truth).abs().max()))
        else:
            assert prefill.logits is None
    forwarder.close()
    return worst
