"""Chains and rivals give what one process gives."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from chains import NEW_TOKENS, single
from models import STATES, VOCAB, WHOLE, prompt, tiny

from benchmarks.published import LENT, PUBLISHED
from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.kv import pool
from kvr_mpi.model import LayerShape, StateShape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import Continuation, allowed_error, continued, differences, error_share, first_difference
from kvr_mpi.prefill.one_prompt import compute_prefix, prefill_kvr, prefill_single
from kvr_mpi.transport import Transport, mpi, staging
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.local import LocalTransport, run_local

RING = LENT["ring"]
RIVALS = [name for name, strategy in LENT.items() if strategy.exchange is not None]
KVR_CUT = Partition((0, 20, 40, 50, 64))


@functools.cache
def truth_of(model: str, tokens: int) -> Continuation:
    """What one process gives."""
    loaded = tiny(model)
    return continued(loaded.model, single(loaded, prompt(tokens)), NEW_TOKENS)


# A length that the ranks divide, and two that they do not.
@pytest.mark.parametrize(("size", "tokens"), [(1, 20), (2, 61), (3, 60), pytest.param(4, 67, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_published", [False, True])
@pytest.mark.parametrize("name", RIVALS)
def test_rivals_equal_one_process(name: str, is_published: bool, size: int, tokens: int) -> None:
    """With our cut of the last layer, and as published: a baseline that computes something else would prove nothing."""
    strategy = (PUBLISHED if is_published else LENT)[name]
    cut, decodes = strategy.cut_evenly(tokens, size), 0 if name == "ring" else size - 1
    for model in ("llama-gqa", "mistral-window", "falcon-mqa", "gpt2", "gemma2-softcap", "gpt-oss-sinks"):
        loaded, ids, truth = tiny(model), prompt(tokens), truth_of(model, tokens)
        prepare_model(loaded.model, chain=True)
        ranks = run_local(size, lambda rank: strategy.prefill(loaded, ids, cut, rank, NEW_TOKENS))  # noqa: B023
        assert [at for at, rank in enumerate(ranks) if rank.logits is not None] == [decodes]
        found = continued(loaded.model, ranks[decodes], NEW_TOKENS)
        assert first_difference(differences(found, truth), allowed_error(torch.float32)) is None, model
        assert found.tokens == truth.tokens, model


def test_what_crosses_the_links() -> None:
    """KVR sends a segment once over every link after it; a ring and an all-gather send all to all but one."""
    loaded, tokens, size = tiny("llama-gqa"), 64, 4
    ids, row = prompt(tokens), loaded.shape.kv_bytes_per_token
    prepare_model(loaded.model, chain=True)
    for name in ("kvr", *RIVALS):
        cut = KVR_CUT if name == "kvr" else LENT[name].cut_evenly(tokens, size)
        ranks = run_local(size, lambda rank: LENT[name].prefill(loaded, ids, cut, rank))  # noqa: B023
        sent = [rank.sent_bytes // row for rank in ranks]
        assert sent == [20, 40, 50, 0] if name == "kvr" else sum(sent) == (size - 1) * tokens, name


def test_what_rivals_cannot_run_is_refused_by_name() -> None:
    loaded, ranks, nccl = tiny("llama-gqa"), LocalTransport(), LocalTransport()
    nccl.in_streams = True
    RING.check(loaded, ranks)
    whole = replace(loaded, attends_in_parts=False)
    with pytest.raises(ModelError, match="LlamaForCausalLM: .* cannot be computed in parts, so ring does not run it"):
        RING.check(whole, ranks)
    LENT["kvr"].check(whole, nccl)
    with pytest.raises(ConfigError, match="tsp-dense can deadlock over NCCL: use --transport staged"):
        LENT["tsp-dense"].check(loaded, nccl)
    recurrent = LayerShape(states=(StateShape("recurrent", 0, (1, 6, 8, 8)),))
    state = replace(loaded, shape=replace(loaded.shape, layers=(recurrent, *loaded.shape.layers[1:])))
    with pytest.raises(ModelError, match="its recurrent layers"):
        RING.check(state, ranks)


# Prompts one after the other, some of which fail on purpose

LAYERS = 3
PLAIN = ("llama-gqa", "mistral-window", "falcon-mqa", "gpt2", "gpt-oss-sinks")
# The others hand on states, or take no chunks.
MODELS = (*PLAIN, *STATES, *WHOLE)


@dataclass(frozen=True)
class Prompt:
    """One prompt, how it is cut, and who fails where."""

    model: str
    ids: tuple[int, ...]
    partition: Partition
    last: int
    prefix_tokens: int
    fails: dict[int, int]  # the layer before which a rank's memory ends; -1: it has none for its buffers
    chunk_tokens: int | None = None


def draw_prompts(count: int, size: int, seed: int, *, failing: float) -> list[Prompt]:
    """Random lengths, strategies, slices, orders, prefixes and failures; the same on every rank."""
    draw = random.Random(seed)
    prompts = []
    for _ in range(count):
        tokens = draw.randrange(20, 90)
        ids = tuple(range(1, 11)) + tuple(draw.randrange(VOCAB) for _ in range(tokens - 10))
        prefix_tokens = 10 if draw.random() < 0.5 else 0
        model = draw.choice(MODELS)
        inner = sorted(draw.sample(range(prefix_tokens + 1, tokens), size - 1))
        failed = draw.sample(range(size), draw.choice([1, 1, min(2, size), size]))
        fails = {rank: draw.randrange(-1, LAYERS) for rank in failed} if draw.random() < failing else {}
        partition, last = Partition((0, *inner, tokens)), draw.randrange(size)
        chunk_tokens = draw.choice([None, 5, 16]) if model in PLAIN else None
        prompts.append(Prompt(model, ids, partition, last, prefix_tokens, fails, chunk_tokens))
    return prompts


def truths(prompts: list[Prompt]) -> list[torch.Tensor]:
    """Logits of plain transformers; leaves the models ready for chains."""
    for name in {each.model for each in prompts}:
        prepare_model(tiny(name).model, chain=False)
    found = [prefill_single(tiny(each.model).model, each.ids, torch.device("cpu")).logits for each in prompts]
    for name in {each.model for each in prompts}:
        prepare_model(tiny(name).model, chain=True, in_parts=tiny(name).attends_in_parts)
    return [logits for logits in found if logits is not None]


class Failing(threading.local):
    """Raises what torch raises when memory runs out: on a rank, which is a thread, in the layer of `Prompt.fails`."""

    layer: int | None = None

    @contextmanager
    def installed(self, models: tuple[str, ...] = MODELS) -> Iterator[None]:
        """Watch the layers of models and the making of buffers."""
        make = pool.make_flat

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
        pool.make_flat = making
        try:
            yield
        finally:
            pool.make_flat = make
            for hook in hooks:
                hook.remove()


def run_prompts(
    chain: Transport,
    prompts: list[Prompt],
    logits: list[torch.Tensor],
    failing: Failing,
    device: torch.device | None = None,
) -> float:
    """Run all prompts without a barrier, check what comes out on this rank, and return the worst error of logits."""
    prefixes = {name: compute_prefix(tiny(name), range(1, 11)) for name in {each.model for each in prompts}}
    forwarder = Forwarder(chain, device=device)
    worst = 0.0
    for each, truth in zip(prompts, logits, strict=True):
        failing.layer = each.fails.get(chain.rank)
        prefill = prefill_kvr(
            tiny(each.model),
            each.ids,
            each.partition,
            chain,
            prefix=prefixes[each.model] if each.prefix_tokens else None,
            last=each.last,
            forwarder=forwarder,
            spares_chain=True,
            chunk_tokens=each.chunk_tokens,
        )
        failing.layer = None
        is_last = chain.rank == each.last
        assert prefill.last == each.last
        assert (prefill.error is not None) == bool(each.fails and (is_last or chain.rank in each.fails))
        if prefill.error is not None:
            assert prefill.cache is None and prefill.logits is None
            for rank in each.fails if is_last else [chain.rank]:
                assert f"{rank}" in prefill.error and "ran out of memory" in prefill.error
        elif is_last:
            assert prefill.logits is not None
            worst = max(worst, error_share(prefill.logits, truth))
        else:
            assert prefill.logits is None
    forwarder.close()
    return worst


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_prompts_of_a_pipeline_are_exact_though_some_fail(size: int) -> None:
    """They follow each other through a chain without a barrier, in any order of ranks; one that fails ends alone."""
    prompts, failing = draw_prompts(32, size, seed=size, failing=0.5), Failing()
    logits, allowed = truths(prompts), allowed_error(torch.float32)
    with failing.installed():
        assert max(run_local(size, lambda rank: run_prompts(rank, prompts, logits, failing))) <= allowed


class Rendezvous(LocalTransport):
    """Sends end when they are received, as those of long messages do."""

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Any = None) -> Any:
        super().isend(tensor, dest, tag, received)
        return _Met(self._hub.mail[self.rank, dest, tag])


class _Met:
    def __init__(self, mailbox: Any) -> None:
        self.mailbox, self.message = mailbox, mailbox[-1]

    def test(self) -> bool:
        return all(message is not self.message for message in list(self.mailbox))


def test_a_chain_whose_ranks_all_run_out_of_memory_does_not_stand_still() -> None:
    """None of them has room for more than a few segments, and none can send before the next one receives."""
    loaded, ids = tiny("llama-gqa"), prompt(60)
    prepare_model(loaded.model, chain=True)
    cut, failing = Partition.even(60, 5), Failing()

    def work(rank: LocalTransport) -> str | None:
        failing.layer = -1
        return prefill_kvr(loaded, ids, cut, Rendezvous(rank._hub, rank.rank), last=2, spares_chain=True).error

    with failing.installed(("llama-gqa",)):
        errors = run_local(5, work)
    assert all(error is not None and "ran out of memory with a slice of 12" in error for error in errors)
    assert errors[2] is not None and "rank 3, 4, 0, 1, 2 of the 5 in its chain ran out" in errors[2]


class LateEvent:
    """An event or a stream of a GPU; an event passes only after a while."""

    draw = random.Random(0)

    def __init__(self, *given: Any, **options: Any) -> None:
        pass

    def query(self) -> bool:
        return self.draw.random() < 0.3

    def record_event(self) -> LateEvent:
        return LateEvent()

    def elapsed_time(self, later: Any) -> float:
        return 0.0

    def record(self, *given: Any) -> None:
        return

    wait_event = synchronize = record


class Staged(Rendezvous):
    """Host memory is staged as if it were a GPU's, and pinned memory is counted."""

    def __init__(self, hub: Any, rank: int) -> None:
        super().__init__(hub, rank)
        self.staging = staging.Staging(torch.device("cpu"), direct=False)

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Any = None) -> Any:
        send = super().isend
        pieces = mpi._pieces(tensor)
        return self.staging.send(pieces, dest, lambda piece: send(piece, dest, tag), is_whole=received is not None)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        receive = super().irecv
        return self.staging.receive(mpi._pieces(tensor), source, lambda piece: receive(piece, source, tag))


@pytest.mark.parametrize("room", [1, pytest.param(2.5, marks=pytest.mark.long)])
def test_full_rings_of_pinned_memory_do_not_make_a_chain_stand_still(
    room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings have room for a piece or two; prompts follow each other without a barrier, some fail, in any order."""
    prompts, failing, piece, pinned = draw_prompts(16, 4, seed=7, failing=0.3), Failing(), 600, list[int]()
    logits, allowed, ring = truths(prompts), allowed_error(torch.float32), int(room * piece)

    def counted(size: int) -> torch.Tensor:
        pinned.append(size)
        return torch.empty(size, dtype=torch.uint8)

    for name in ("Event", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, LateEvent)
    for name in ("set_device", "stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    monkeypatch.setattr(mpi, "CHUNK_BYTES", piece)
    monkeypatch.setattr(staging, "RING_BYTES", ring)
    monkeypatch.setattr(staging, "SMALL_BYTES", 0)
    monkeypatch.setattr(staging, "_pinned", counted)
    monkeypatch.setattr("kvr_mpi.transport.forwarder.LIMIT_S", 30.0)

    def work(rank: LocalTransport) -> float:
        return run_prompts(Staged(rank._hub, rank.rank), prompts, logits, failing, torch.device("cuda", 0))

    with failing.installed():
        assert max(run_local(4, work)) <= allowed
    assert pinned == [ring] * 8, "each of four ranks has a ring for the rank before it, and for the one after it"
