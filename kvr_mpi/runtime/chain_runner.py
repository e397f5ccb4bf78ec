"""Runs prompts on a chain of ranks: chooses how each prompt runs, and runs it.

Sits between the batch, which handles documents, and the ways to run a prompt (``ways``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvr_mpi.errors import AgreementError, DocumentError, Say
from kvr_mpi.job.combinations import PROMPTS, why_no_effect
from kvr_mpi.job.model_kinds import kinds_of
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.kv.route import Range
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.packed import PACK_TOKENS
from kvr_mpi.prefill.registry import STRATEGIES
from kvr_mpi.requests.prompt import Prompt
from kvr_mpi.runtime.plan import Plan, Way, planned_drop
from kvr_mpi.runtime.slice_planner import SlicePlanner
from kvr_mpi.runtime.ways import AfterShared, AfterStored, Alone, InSteps, OverChain
from kvr_mpi.setup.job_setup import JobSetup
from kvr_mpi.trace import Recorder
from kvr_mpi.transport import Transport
from kvr_mpi.transport.forwarder import Forwarder


class ChainRunner:
    """A model on a chain of ranks, ready to run prompts.

    All ranks of the chain call `begin` and `Way.prefill` for the same prompts in the same order.

    Parameters
    ----------
    setup : JobSetup
    chain : Transport
        The ranks that share prompts.
    ranks : slice
        The ranks of this chain within the job.
    say : callable
        Logs a line.
    recorder : Recorder, optional
        Records transfers.
    """

    def __init__(
        self, setup: JobSetup, chain: Transport, ranks: slice, say: Say, recorder: Recorder | None = None
    ) -> None:
        self.chain, self.first_rank, self._setup = chain, ranks.start, setup
        self.new_tokens = setup.spec.generation.max_new_tokens  # per answer, unless the document sets its own limit
        self.is_spread = setup.spec.is_spread
        self._slices = SlicePlanner(setup, chain.size, ranks, say)
        if ranks.start == 0 and chain.rank == 0 and (choice := self._slices.describe_choice()):
            say(choice)
        self._free_bytes, device = setup.free_bytes[ranks], setup.loaded.device
        self.forwarder = Forwarder(chain, device=device, recorder=recorder) if chain.size > 1 else None
        chain_has = (setup, chain, self._free_bytes, self._slices, self.forwarder)
        self._alone = (Alone if setup.rolling is None else InSteps)(*chain_has)
        self._over_chain = OverChain(*chain_has)
        self.after_shared, self.after_stored = AfterShared(*chain_has), AfterStored(*chain_has)
        self._ways: tuple[Way, ...] = self._alone, self._over_chain, self.after_shared, self.after_stored
        self._decode_rank = 0  # for prompts that continue the prefix in memory
        self._shares_nothing = why_no_effect(PROMPTS, setup.spec, kinds_of(setup.loaded)) is not None
        self._opened: SharedPrefix | None = None  # the last stored prefix

    def plan(self, prompt: Prompt, decode_rank: int) -> Plan:
        """Plan a prompt with the last slice on `decode_rank`; only on the chain's leader.

        Other ranks receive the plan (`read_plan`).

        Raises
        ------
        DocumentError
            If keys and values are sharded and the prompt has fewer tokens than the chain has ranks.
        """
        prefix = self._prefix_of(prompt)
        if not self._shares_nothing and prompt.shared_tokens > (prefix.tokens if prefix else 0):
            before = self._plan(_beginning_of(prompt, prompt.shared_tokens), prefix, decode_rank)
            plan = Plan(self.after_shared, prompt, prefix, decode_rank, before=before)
            is_held = self.after_shared.at == self.after_shared.beginning(plan)
            held = self.after_shared.beginning_bytes(plan) if is_held else [0] * self.chain.size
            if self.fits_beside(plan, held):
                return plan
        return self._plan(prompt, prefix, decode_rank)

    def _plan(self, prompt: Prompt, prefix: SharedPrefix | None, decode_rank: int) -> Plan:
        """Plan a prompt without a prefix that is computed for several prompts."""
        known, window = prefix.tokens if prefix else 0, self._window_of(prompt)
        is_compressed = prefix is not None and prefix.heads is not None  # one rank holds the rows that heads kept
        if is_compressed or self._goes_alone(prompt.tokens - known, None if window is None else window[0] - known):
            alone = Plan(self._alone, prompt, prefix, decode_rank)
            if self.chain.size > 1 or is_compressed or self._setup.rolling is not None:
                return alone
            with suppress(DocumentError):  # otherwise it may fit in chunks
                self.check_fits(alone)
                return alone
        is_stored = self._setup.spec.questions is not None and prefix is not None and prefix.read is not None
        if self.is_spread:
            self._check_shareable(known if is_stored else prompt.tokens - known)
            if is_stored:
                return Plan(self.after_stored, prompt, prefix, decode_rank)
        drop = planned_drop(self._setup, prompt, prefix)
        strategy = self._slices.choose_strategy(prompt.tokens, known, prompt.new_tokens, drop)
        partition = self._slices.cut(strategy, prompt.tokens, known, decode_rank)
        if window is not None:
            partition = partition.with_last_from(window[0], known)
        chunks = self._slices.chunk_tokens(strategy, partition, known, prompt.new_tokens, drop)
        return Plan(self._over_chain, prompt, prefix, decode_rank, strategy, partition, chunks)

    def _goes_alone(self, tokens: int, before_window: int | None = None) -> bool:
        """Whether one rank prefills a prompt, packed with others, because it is too short to be cut.

        Parameters
        ----------
        before_window : int or None
            Number of tokens before compression's observation window.
        """
        if self._setup.rolling is not None:
            return True
        if self._slices.is_plain or self.is_spread:
            return False
        size = self.chain.size
        if before_window is not None and before_window < 2 * size:  # every slice before the last needs a token
            return True
        return self._slices.is_too_short(tokens) or (size == 1 and 2 * tokens <= self.pack_tokens)

    @property
    def pack_tokens(self) -> int:
        """Tokens of a packed row."""
        return PACK_TOKENS[self._setup.loaded.device.type]

    def _check_shareable(self, tokens: int) -> None:
        """Refuse a prompt that has too few tokens for a shard on every rank."""
        if tokens < self.chain.size:
            raise DocumentError(
                f"too short: {tokens} tokens cannot be spread over {self.chain.size} ranks, each of which needs at "
                f"least one; use shorter chains (parallel.ranks_per_chain), or output.kv = true"
            )

    def read_plan(self, prompt: Prompt, plan: Mapping[str, Any]) -> Plan:
        """Parse the leader's plan, as returned by `Plan.to_wire`.

        Raises
        ------
        AgreementError
            If the plan belongs to another prompt, or this rank has not computed the plan's prefix.
        """
        ids = prompt.sha256
        if (plan["key"], plan["ids_sha256"]) != (prompt.key, ids):
            raise AgreementError(
                f"rank {self.first_rank + self.chain.rank} received the plan of prompt {plan['key']} (token ids "
                f"{plan['ids_sha256'][:16]}) with prompt {prompt.key} of {prompt.document_id} (token ids {ids[:16]})"
            )
        bounds, before = plan["bounds"], plan["before"]
        return Plan(
            next(way for way in self._ways if way.name == plan["way"]),
            prompt,
            self._prefix_of_tokens(prompt, plan["prefix_tokens"]),
            plan["decode_rank"],
            STRATEGIES[plan["strategy"]],
            None if bounds is None else Partition(tuple(bounds)),
            plan["chunk_tokens"],
            None if before is None else self.read_plan(_beginning_of(prompt, prompt.shared_tokens), before),
        )

    def pinned_rank(self, prompt: Prompt) -> int | None:
        """Return the rank that holds the prefix or stored document that a prompt continues.

        None if any rank can run it.
        """
        held = [way.at for way in self._ways if way.at is not None]
        continues = (prompt.stored, prompt.ids[: prompt.shared_tokens])
        return self._decode_rank if any(at in continues for at in held) else None

    def check_fits(self, plan: Plan) -> None:
        """Refuse a prompt that does not fit on an empty chain.

        Raises
        ------
        DocumentError
            Names the memory needed and the number of ranks that would suffice.
        """
        self._setup.loaded.shape.check_ids(plan.prompt.ids)
        if self._setup.footprint is not None:
            plan.way.check_fits(plan)

    def fits_beside(self, plan: Plan, held_bytes: Sequence[int]) -> bool:
        """Whether a prompt fits into the memory that is left on the ranks of the chain."""
        if self._setup.footprint is None:  # plain transformers: memory is not predicted, so run one by one
            return False
        spare = 0 if (arena := self._setup.arena) is None else arena.spare_bytes
        return all(
            not need or need + held + (spare if held else 0) <= free
            for need, held, free in zip(plan.way.needs(plan), held_bytes, self._free_bytes, strict=True)
        )

    def goes_on(self, plan: Plan) -> bool:
        """Whether a prompt can run without preparing or releasing a prefix."""
        return all(way.at == (way.beginning(plan) if way is plan.way else None) for way in self._ways)

    def begin(self, plan: Plan) -> Prefill | None:
        """Release the prefix of earlier prompts, and compute or open that of this prompt.

        Returns
        -------
        Prefill or None
            What this rank has computed.
        """
        for way in self._ways:  # release memory before anything is allocated
            way.leave()
        if (beginning := plan.way.beginning(plan)) is None:
            return None
        plan.way.at, self._decode_rank = beginning, plan.decode_rank
        return plan.way.begin(plan)

    def end_wave(self) -> None:
        """Close the file of the last stored prefix."""
        self._opened = None

    def close(self) -> None:
        """Finish all sends; every rank of the chain calls this."""
        if self.forwarder is not None:
            self.forwarder.close()

    def _prefix_of(self, prompt: Prompt) -> SharedPrefix | None:
        """Find a prefix of a prompt that has been computed; only on the leader. None if there is none."""
        ids, window = prompt.ids, self._window_of(prompt)
        end = len(ids) if window is None else window[0]  # the window needs queries, which a prefix does not have
        fitting = (one for one in self._setup.prefixes if one.tokens <= end and ids[: one.tokens] == one.ids)
        return self._stored_prefix(prompt) or next(fitting, None)

    def _window_of(self, prompt: Prompt) -> Range | None:
        """Return the tokens whose queries compression needs; None if it needs none."""
        retain = self._setup.retain_of(prompt)
        return None if retain is None else retain.window

    def _stored_prefix(self, prompt: Prompt) -> SharedPrefix | None:
        """Open the stored prefix of a prompt, unless it is open already."""
        if prompt.stored is None:
            return None
        if self._opened is None or self._opened.source != prompt.stored:
            self._opened = prompt.stored.open(prompt.ids, self._setup.loaded)
        return self._opened

    def _prefix_of_tokens(self, prompt: Prompt, tokens: int) -> SharedPrefix | None:
        """Find the prefix of a prompt that the leader's plan uses."""
        if not tokens:
            return None
        ids, stored = prompt.ids[:tokens], self._stored_prefix(prompt)
        found = next((one for one in (stored, *self._setup.prefixes) if one is not None and one.ids == ids), None)
        if found is None:
            raise AgreementError(
                f"rank {self.first_rank + self.chain.rank} has not computed the first {tokens} tokens of prompt "
                f"{prompt.key} of {prompt.document_id}, which the leader of its chain has"
            )
        return found


def _beginning_of(prompt: Prompt, tokens: int) -> Prompt:
    """Make a prompt of another prompt's first tokens; it is not answered."""
    return replace(prompt, ids=prompt.ids[:tokens], text=(0, 0), new_tokens=0)
