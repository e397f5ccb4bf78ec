"""A model on a chain of ranks, and one prompt's run on it.

Stands between the batch, which has the documents, and the strategies, which know nothing of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

from kvr_mpi.documents.prompts import Prompt
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.memory_budget import check_fits
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.prefill.registry import KVR, Strategy
from kvr_mpi.prefill.relay import Relay
from kvr_mpi.runtime.requests import PromptConfig
from kvr_mpi.runtime.setup import JobSetup, Say
from kvr_mpi.schedule.partitioner import Partitioner
from kvr_mpi.schedule.strategy_choice import Choice, choose_strategies
from kvr_mpi.transport import Transport
from kvr_mpi.transport.forwarder import Forwarder

# A slice below this is not worth a rank of its own.
LEAST_SLICE_TOKENS = 64
# Tokens of a packed forward.
PACK_TOKENS = 2048


class ChainRunner:
    """A model on a chain of ranks, ready to answer documents.

    Every rank of the chain gives the same prompts in the same order to `prefill`.

    Parameters
    ----------
    prepared : Prepared
    chain : Transport
        The ranks that share prompts.
    first_rank : int
        The chain's first in the job.
    say : callable
        For a line of text.
    """

    def __init__(self, prepared: JobSetup, chain: Transport, first_rank: int, say: Say) -> None:
        self.chain = chain
        self._prepared, self._spec, self._loaded = prepared, prepared.spec, prepared.loaded
        self._free_bytes = prepared.free_bytes[first_rank:][: chain.size]
        rates = prepared.rates[first_rank:][: chain.size]
        self._cuts = Partitioner(self._spec.parallel, chain, rates, prepared.table, say)
        # On one rank there is nothing to choose: whatever hands keys and values on is a chain of one.
        self._strategy = prepared.strategies[0] if chain.size > 1 or prepared.strategies[0].is_plain else KVR
        self._choices = self._choose(first_rank, say) if chain.size > 1 and len(prepared.strategies) > 1 else {}
        self._chosen: dict[tuple[int, int], Strategy] = {}

    @property
    def prompt_config(self) -> PromptConfig:
        """How documents are asked."""
        return self._prepared.prompt_config

    @property
    def new_tokens(self) -> int:
        """Most tokens of an answer."""
        return self._spec.generation.max_new_tokens

    def seed_of(self, document_id: str) -> int:
        """Give each document its own stream of random numbers, whatever rank it comes to."""
        text = f"{self._spec.generation.seed} {document_id}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def open_forwarder(self) -> Forwarder | None:
        """Make what carries keys and values from prompt to prompt; None on a rank alone."""
        on_gpu = self._loaded.device.type == "cuda"
        return Forwarder(self.chain, on_gpu=on_gpu) if self.chain.size > 1 else None

    def prefill(self, prompt: Prompt, decode_rank: int, forwarder: Forwarder | None) -> Prefill:
        """Prefill over the chain, with one of its ranks last.

        Parameters
        ----------
        decode_rank : int
            The rank that ends with logits and cache.
        forwarder : Forwarder or None
            Of `open_forwarder`.
        """
        strategy = self._strategy_of(prompt)
        return strategy.prefill(
            self._loaded,
            prompt.ids,
            self._partition(strategy, prompt, decode_rank),
            self.chain,
            reserve_tokens=self.new_tokens,
            prefix=self._prefix_of(prompt),
            last=decode_rank,
            forwarder=forwarder,
            spares_chain=True,
            keeps_all=self._spec.output.kv,
        )

    def prefill_packed(self, prompts: Sequence[Prompt]) -> list[Prefill]:
        """Prefill short prompts in one forward, on this rank alone."""
        prefixes = [self._prefix_of(prompt) for prompt in prompts]
        prefix = prefixes[0] if all(one is prefixes[0] for one in prefixes) else None
        ids = [prompt.ids for prompt in prompts]
        rows = [ids] if self._prepared.why_alone is None else [[one] for one in ids]
        return [
            prefill
            for row in rows
            for prefill in prefill_packed(self._loaded, row, reserve_tokens=self.new_tokens, prefix=prefix)
        ]

    def goes_alone(self, prompt: Prompt) -> bool:
        """Whether a prompt is too short to be cut: one rank prefills it, packed with others."""
        if self._strategy.is_plain:
            return False
        size, tokens = self.chain.size, prompt.tokens - self._known(prompt)
        return tokens < LEAST_SLICE_TOKENS * size or (size == 1 and 2 * tokens <= PACK_TOKENS)

    def kept_bytes(self, prompt: Prompt) -> int:
        """Bytes of a prompt's cache on the rank that keeps it, with room for the answer."""
        return (prompt.tokens + self.new_tokens) * self._loaded.shape.kv_bytes_per_token

    def check_fits(self, prompt: Prompt) -> None:
        """Refuse a prompt that fits on no empty chain; the same on every rank.

        Raises
        ------
        DocumentError
            Saying how many ranks would do.
        """
        self._loaded.shape.check_ids(prompt.ids)
        if self._prepared.footprint is None:
            return
        rooms = [min(self._free_bytes)] * self.chain.size
        if self.goes_alone(prompt):
            check_fits(self._prepared.footprint, Partition((0, prompt.tokens)), rooms[:1], self.new_tokens)
        else:
            strategy = self._strategy_of(prompt)
            partition = self._partition(strategy, prompt, self.chain.size - 1)
            check_fits(self._prepared.footprint, partition, rooms, self.new_tokens, strategy.ours.make or Relay)

    def has_room(self, prompt: Prompt, decode_rank: int, kept_bytes: Sequence[int]) -> bool:
        """Whether a prompt fits beside what the ranks of the chain keep already; the same on every rank."""
        if self._prepared.footprint is None:  # plain transformers' memory is not predicted: one at a time
            return False
        rooms = self._free_bytes
        if self.goes_alone(prompt):
            need = self.kept_bytes(prompt) + self._prepared.footprint.activation_bytes(PACK_TOKENS)
            return need + kept_bytes[decode_rank] <= rooms[decode_rank]
        needs = self._needs(self._strategy_of(prompt), prompt, decode_rank)
        return all(need + kept <= room for need, kept, room in zip(needs, kept_bytes, rooms, strict=True))

    def _prefix_of(self, prompt: Prompt) -> SharedPrefix | None:
        """Find what the prompt begins with, if that is computed already."""
        return next((one for one in self._prepared.prefixes if prompt.ids[: one.tokens] == one.ids), None)

    def _known(self, prompt: Prompt) -> int:
        prefix = self._prefix_of(prompt)
        return prefix.tokens if prefix else 0

    def _partition(self, strategy: Strategy, prompt: Prompt, decode_rank: int) -> Partition:
        """Cut a prompt for the chain with this rank of it last; nobody computes what is known."""
        known = self._known(prompt)
        if not strategy.has_cuts:
            return strategy.cut_evenly(prompt.tokens, self.chain.size, known)
        return self._cuts.cut(prompt.tokens - known, decode_rank, known).behind(known)

    def _needs(self, strategy: Strategy, prompt: Prompt, decode_rank: int) -> list[int]:
        """Bytes each rank of the chain takes for a prompt while it is prefilled."""
        assert self._prepared.footprint is not None
        size, needs = self.chain.size, [0] * self.chain.size
        for exchange in strategy.exchanges(self._partition(strategy, prompt, decode_rank), self._known(prompt)):
            rank = (decode_rank + exchange.rank - exchange.decode_rank) % size
            needs[rank] = self._prepared.footprint.exchange_bytes(exchange, reserve_tokens=self.new_tokens)
        return needs

    def _strategy_of(self, prompt: Prompt) -> Strategy:
        """Say what runs a prompt: the fastest that fits on an empty chain; the same on every rank."""
        known = self._known(prompt)
        if known not in self._choices:
            return self._strategy
        key = prompt.tokens, known
        if key not in self._chosen:
            order, room = self._choices[known].order(prompt.tokens - known), min(self._free_bytes)
            fitting = (one for one in order if max(self._needs(one, prompt, self.chain.size - 1)) <= room)
            self._chosen[key] = next(fitting, order[0])
        return self._chosen[key]

    def _choose(self, first_rank: int, say: Say) -> dict[int, Choice]:
        """Work out which strategy is fastest for every length, behind each of the prefixes that are known."""
        prepared, size = self._prepared, self.chain.size
        costs = prepared.chain_costs(first_rank, size)
        shortest, longest, choices = LEAST_SLICE_TOKENS * size, prepared.longest_tokens, {}
        if prepared.table is not None and prepared.table.key.ranks == size:  # beyond its lengths, as at their ends
            lengths = [entry.context_tokens for entry in prepared.table.entries]
            shortest, longest = max(shortest, lengths[0]), min(longest, lengths[-1])
        for known in dict.fromkeys([0, *(prefix.tokens for prefix in prepared.prefixes)]):

            def forecast(strategy: Strategy, known: int, tokens: int) -> float:
                if strategy.has_cuts:
                    partition = self._cuts.propose(tokens, size - 1, known).behind(known)
                else:
                    partition = strategy.cut_evenly(tokens + known, size, known)
                return strategy.seconds(costs, partition, known)

            seconds = [partial(forecast, one, known) for one in prepared.strategies]
            choices[known] = choose_strategies(self.chain, prepared.strategies, seconds, shortest, longest - known)
        if first_rank == 0 and self.chain.rank == 0:
            say(next(reversed(choices.values())).describe(size))
        return choices
