"""Documents at work in one way to decode them, for `benchmarks.fairkv`: copies of them, and turns that are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.kept import Retained, choose_kept, keep_only
from kvr_mpi.compress.compression import Compression
from kvr_mpi.documents.prompts import PromptText
from kvr_mpi.kv.chain import Retain
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, own_pool, prefill_kvr, wait_for_compute
from kvr_mpi.runtime.session import Session
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import LocalTransport

# Steps of each way in a turn: long enough to be timed, short enough that all ways meet the same machine.
STEPS = 4


class TimedSums:
    """A transport that keeps the processor time of its sums, in which a rank that waits does not sleep."""

    def __init__(self, ranks: Transport) -> None:
        self._ranks, self.seconds = ranks, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up over the ranks, in place."""
        began = time.thread_time()
        self._ranks.all_reduce(tensor)
        self.seconds += time.thread_time() - began


class Way:
    """One way to decode all documents, begun anew by `begin` whenever these have as many tokens as are allowed."""

    def __init__(self, name: str, begin: Callable[[], Any], ranks: Transport, device: torch.device) -> None:
        self.name, self._begin, self._ranks, self._device = name, begin, ranks, device
        self.batch: Any = None
        self.turns, self.computed = list[float](), list[float]()

    def begin(self) -> None:
        """Decode from the documents' ends again, with a turn that is not counted: memory is touched."""
        self.batch = None  # its memory first
        self.batch = self._begin()
        self.turn()
        self.turns.pop()
        self.computed.pop()

    def turn(self) -> None:
        """Go on by some steps, and take note of the mean time of one."""
        sums = self.batch.group.ranks
        self._ranks.barrier()
        summed = getattr(sums, "seconds", 0.0)
        began, computed = time.perf_counter(), time.thread_time()
        for _ in range(STEPS):
            self.batch.step()
        wait_for_compute(self._device)
        self.turns.append((time.perf_counter() - began) / STEPS)
        summed = getattr(sums, "seconds", 0.0) - summed
        self.computed.append((time.thread_time() - computed - summed) / STEPS)


class PrefilledDocuments:
    """This rank's documents, prefilled; copies of them, compressed or whole."""

    def __init__(
        self, session: Session, prompts: Sequence[PromptText], ranks: Transport, observing: Compression
    ) -> None:
        self._loaded, self.prompts = session.loaded, list(prompts[ranks.rank :: ranks.size])
        self.number, self.tokens = len(prompts), [prompt.tokens for prompt in prompts]
        self.new_tokens = session.spec.generation.max_new_tokens
        self._prefills = [self._prefill(prompt, observing) for prompt in self.prompts]

    def _prefill(self, prompt: PromptText, observing: Compression) -> Prefill:
        retain = observing.retain(prompt.tokens, prompt.text)
        observed = None if retain is None else Retain(retain.window)
        return prefill_kvr(self._loaded, prompt.ids, Partition((0, prompt.tokens)), LocalTransport(), retain=observed)

    def copies(self, compression: Compression | None) -> list[Prefill]:
        """Make fresh ones, that keep what the method chooses, or everything."""
        found = []
        for prompt, prefill in zip(self.prompts, self._prefills, strict=True):
            chosen = None if compression is None else choose_kept(compression, prefill.cache, prompt.text)
            retained: Retained = chosen or [None] * len(prefill.cache.layers)
            copy = Prefill(prefill.partition, self._copy(prefill.cache), prefill.logits, 0.0)
            keep_only(copy.cache, retained, self.new_tokens)
            found.append(copy)
        return found

    def _copy(self, cache: SequenceKV) -> SequenceKV:
        made = SequenceKV(self._loaded, own_pool(self._loaded), cache.length + self.new_tokens, length=cache.length)
        for layer_idx in range(len(cache.layers)):
            made.admit(layer_idx, 0, *cache.rows(layer_idx, 0, cache.length))
        return made
