"""A model on a chain of ranks: plans one prompt at a time, and prefills it.

Stands between the batch, which handles documents, and the strategies, which only see token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvr_mpi.compress.planned_drop import PlannedDrop
from kvr_mpi.documents.prompts import Prompt
from kvr_mpi.errors import AgreementError, DocumentError
from kvr_mpi.job.combinations import PROMPTS, why_no_effect
from kvr_mpi.job.model_kinds import kinds_of
from kvr_mpi.kv.cache import WriteLayer
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.memory_budget import check_fits, check_rolling_fits
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.packed import PACK_TOKENS, prefill_packed
from kvr_mpi.prefill.registry import KVR, STRATEGIES
from kvr_mpi.prefill.routes import relay
from kvr_mpi.prefill.streaming import prefill_rolling
from kvr_mpi.requests.prompt_request import PromptRequest
from kvr_mpi.requests.shared_document import SharedDocument
from kvr_mpi.runtime.planned_prompt import PlannedPrompt
from kvr_mpi.runtime.slice_planner import SlicePlanner
from kvr_mpi.runtime.spread_documents import SpreadDocuments
from kvr_mpi.setup.job_setup import JobSetup
from kvr_mpi.setup.rates import Say
from kvr_mpi.store.parts import PartIndexes
from kvr_mpi.trace import Recorder
from kvr_mpi.transport import Transport
from kvr_mpi.transport.forwarder import Forwarder


class ChainRunner:
    """A model on a chain of ranks, ready to answer documents.

    Every rank of the chain calls `prefill` with the same prompts in the same order.

    Parameters
    ----------
    setup : JobSetup
    chain : Transport
        The ranks that share prompts.
    ranks : slice
        The chain's, among those of the job.
    say : callable
        For a line of text.
    """

    def __init__(self, setup: JobSetup, chain: Transport, ranks: slice, say: Say) -> None:
        self.chain, self.first_rank = chain, ranks.start
        self._setup, self._spec, self._loaded = setup, setup.spec, setup.loaded
        self._free_bytes = setup.free_bytes[ranks]
        self.new_tokens = self._spec.generation.max_new_tokens  # of an answer, unless a row says otherwise
        self._slices = SlicePlanner(setup, chain, ranks, say)
        self._shares_nothing = why_no_effect(PROMPTS, self._spec, kinds_of(self._loaded)) is not None
        self._shared: SharedDocument | None = None
        self._parts = PartIndexes()
        self._opened: SharedPrefix | None = None  # the last one that is stored
        self.documents = SpreadDocuments(setup, chain)

    @property
    def is_spread(self) -> bool:
        """Whether keys and values stay spread over the chain, whose ranks then decode together."""
        return self._spec.is_spread

    def writes_own(self, planned: PlannedPrompt) -> bool:
        """Whether every rank stores its own slice's keys and values, although the last rank decodes from all of them.

        Not with compression, which selects tokens on the last rank.
        """
        is_kept = self._spec.output.kv is True and self._spec.compress is None and not self.is_spread
        return is_kept and planned.has_slices(self.chain.size)

    def open_forwarder(self, recorder: Recorder | None = None) -> Forwarder | None:
        """Make what carries keys and values from prompt to prompt; None on a rank alone."""
        return Forwarder(self.chain, device=self._loaded.device, recorder=recorder) if self.chain.size > 1 else None

    def plan(self, request: PromptRequest, decode_rank: int) -> PlannedPrompt:
        """Decide how a prompt is run, with the last slice on `decode_rank`; only on the chain's leader.

        Other ranks receive the plan (`planned`) and derive nothing.
        """
        prompt, prefix, new_tokens = request.prompt, self._prefix_of(request), request.new_tokens
        known, window = prefix.tokens if prefix else 0, self._setup.window_of(prompt)
        if (shared := self._plan_shared(request, decode_rank)) is not None:
            return shared
        is_compressed = prefix is not None and prefix.heads is not None  # one rank has what each head kept
        if is_compressed or self._goes_alone(prompt.tokens - known, None if window is None else window[0] - known):
            return PlannedPrompt(prompt, prefix, decode_rank, KVR, None, new_tokens)
        if prefix is not None and self.documents.is_about(prefix):
            return self.documents.plan(prompt, prefix, decode_rank, new_tokens)
        drop = self._planned_drop(prompt, prefix)
        strategy = self._slices.choose_strategy(prompt.tokens, known, new_tokens, drop)
        partition = self._slices.cut(strategy, prompt.tokens, known, decode_rank)
        if window is not None:
            partition = partition.with_last_from(window[0], known)
        chunks = self._slices.chunk_tokens(strategy, partition, known, new_tokens, drop)
        return PlannedPrompt(prompt, prefix, decode_rank, strategy, partition, new_tokens, chunk_tokens=chunks)

    def _plan_shared(self, request: PromptRequest, decode_rank: int) -> PlannedPrompt | None:
        """Plan a prompt whose beginning is shared with other prompts; None if there is none, or no memory for it."""
        prefix = self._prefix_of(request)
        tokens, known = request.shared_tokens, prefix.tokens if prefix else 0
        if self._shares_nothing or tokens <= known:
            return None
        plan = PlannedPrompt(request.prompt, prefix, decode_rank, KVR, None, request.new_tokens, tokens)
        if not self._goes_alone(tokens - known):
            strategy = self._slices.choose_strategy(tokens, known, 0)
            partition = self._slices.cut(strategy, tokens, known, decode_rank)
            chunks = self._slices.chunk_tokens(strategy, partition, known, 0)
            plan = replace(plan, strategy=strategy, partition=partition, chunk_tokens=chunks)
        return plan if self.fits_beside(plan, [0] * self.chain.size) else None

    def pinned_rank(self, request: PromptRequest) -> int | None:
        """Say which rank holds the shared beginning or stored document that a prompt continues; None: any."""
        shared, tokens = self._shared, request.shared_tokens
        if shared and shared.ids == request.prompt.ids[:tokens]:
            return shared.decode_rank
        return self.documents.pinned_rank(self._stored_prefix(request))

    def check_shareable(self, request: PromptRequest) -> None:
        """Refuse a prompt too short to give every rank a token (`SpreadDocuments.check_shareable`)."""
        if self.is_spread:
            self.documents.check_shareable(request.prompt, self._prefix_of(request))

    def planned(self, request: PromptRequest, plan: Mapping[str, Any]) -> PlannedPrompt:
        """Read the leader's plan of a prompt, as `PlannedPrompt.to_wire` gave it.

        Raises
        ------
        AgreementError
            If it is the plan of another prompt, or this rank lacks what the plan builds on.
        """
        ids = request.prompt.sha256
        if (plan["key"], plan["ids_sha256"]) != (request.key, ids):
            raise AgreementError(
                f"rank {self.first_rank + self.chain.rank} received the plan of prompt {plan['key']} (token ids "
                f"{plan['ids_sha256'][:16]}) with prompt {request.key} of {request.document_id} (token ids {ids[:16]})"
            )
        bounds = plan["bounds"]
        return PlannedPrompt(
            request.prompt,
            self._prefix_of_tokens(request, plan["prefix_tokens"]),
            plan["decode_rank"],
            STRATEGIES[plan["strategy"]],
            None if bounds is None else Partition(tuple(bounds)),
            request.new_tokens,
            plan["shared_tokens"],
            plan["chunk_tokens"],
        )

    def why_too_large(self, plan: PlannedPrompt) -> str | None:
        """Say why a prompt does not fit even on an empty chain, and how many ranks would be enough; None if it fits."""
        footprint = self._setup.footprint
        try:
            self._loaded.shape.check_ids(plan.prompt.ids)
            if footprint is None or plan.shared_tokens:  # which is only planned where it fits
                return None
            free, drop = [min(self._free_bytes)], self._planned_drop(plan.prompt, plan.prefix)
            if self.documents.is_about(plan.prefix):
                self.documents.check_fits(plan, free[0])
            elif self._setup.rolling is not None:
                check_rolling_fits(footprint, self._setup.rolling, free[0])
            elif plan.partition is None:
                check_fits(footprint, Partition((0, plan.prompt.tokens)), free, plan.new_tokens, drop=drop)
            else:
                make = partial(plan.strategy.ours.make or relay, chunk_tokens=plan.chunk_tokens)
                check_fits(
                    footprint,
                    plan.partition,
                    free * self.chain.size,
                    plan.new_tokens,
                    make,
                    is_spread=self.is_spread,
                    drop=drop,
                )
        except DocumentError as error:
            return str(error)
        return None

    def fits_beside(self, plan: PlannedPrompt, held_bytes: Sequence[int]) -> bool:
        """Whether a prompt fits beside what the ranks of the chain hold already."""
        footprint = self._setup.footprint
        if footprint is None:  # plain transformers' memory is not predicted: one at a time
            return False
        own = self._setup.kv_bytes(plan.prompt.tokens + plan.new_tokens) + footprint.activation_bytes(PACK_TOKENS)
        drop = self._planned_drop(plan.prompt, plan.prefix)
        if self.documents.is_about(plan.prefix):
            needs = self.documents.needs(plan)
        elif plan.partition is None or self.goes_on(plan):
            needs = [0] * self.chain.size
            if drop is not None:  # it runs by itself
                route = relay(Partition((0, plan.prompt.tokens)), 0)
                own = footprint.route_bytes(route, reserve_tokens=plan.new_tokens, drop=drop)
            needs[plan.decode_rank] = own + self._setup.kv_bytes(plan.shared_tokens)
        else:
            new_tokens = 0 if plan.shared_tokens else plan.new_tokens
            routes = plan.strategy.routes(plan.partition, plan.known_tokens, plan.chunk_tokens)
            needs = self._slices.needs(routes, plan.decode_rank, new_tokens, drop)
            needs[plan.decode_rank] += own if plan.shared_tokens else 0
        spare = 0 if (arena := self._setup.arena) is None else arena.spare_bytes
        return all(
            not need or need + held + (spare if held else 0) <= free
            for need, held, free in zip(needs, held_bytes, self._free_bytes, strict=True)
        )

    def kept_bytes(self, request: PromptRequest, decode_rank: int) -> list[int]:
        """Bytes each rank of the chain keeps of a prompt until it is answered."""
        size, prefix = self.chain.size, self._stored_prefix(request)
        if prefix is not None and self.documents.is_about(prefix):
            tokens = request.prompt.tokens + request.new_tokens
            return self.documents.kept_bytes(prefix, tokens, decode_rank)
        whole = self.held_bytes(request)
        return [-(-whole // size) if self.is_spread else whole * (rank == decode_rank) for rank in range(size)]

    def held_bytes(self, request: PromptRequest) -> int:
        """Bytes of a prompt's cache, with room for the answer: on the rank that decodes it, or on all together."""
        drop = self._planned_drop(request.prompt, None)
        whole = self._setup.kv_bytes(request.prompt.tokens + request.new_tokens)
        return whole if drop is None else whole - drop.kv_bytes

    def _planned_drop(self, prompt: Prompt, prefix: SharedPrefix | None) -> PlannedDrop | None:
        """Say what compression will drop of a prompt; None if nothing, or if it is what a stored one has dropped."""
        compression = self._setup.compression
        if compression is None or (prefix is not None and prefix.heads is not None):
            return None
        drop, arena = compression.planned_drop(self._loaded, prompt.tokens, prompt.text), self._setup.arena
        if drop is None or arena is None:
            return drop
        return replace(drop, kv_bytes=max(0, drop.kv_bytes - arena.page_bytes))  # each head's last page has room

    def prefill(
        self, planned: PlannedPrompt, forwarder: Forwarder | None, write_layer: WriteLayer | None = None
    ) -> Prefill:
        """Prefill over the chain; every rank of it gives the same prompts in the same order.

        Parameters
        ----------
        forwarder : Forwarder or None
            Of `open_forwarder`.
        write_layer : callable or None
            Takes each layer's of this rank's slice, if ranks store their own.
        """
        assert planned.partition is not None, "it goes alone"
        return planned.strategy.prefill(
            self._loaded,
            planned.prompt.ids,
            planned.partition,
            self.chain,
            reserve_tokens=planned.new_tokens,
            prefix=planned.prefix,
            last=planned.decode_rank,
            forwarder=forwarder,
            spares_chain=True,
            keeps_all=bool(planned.shared_tokens) or (self._spec.output.kv is True and not self.writes_own(planned)),
            write_layer=write_layer,
            is_spread=self.is_spread,
            window=self._setup.window_of(planned.prompt),
            retain=self._setup.retain_of(planned.prompt),
            chunk_tokens=planned.chunk_tokens,
            arena=None if planned.shared_tokens else self._setup.arena,
        )

    def prefill_shared(self, planned: PlannedPrompt, forwarder: Forwarder | None) -> Prefill | None:
        """Free the previous shared beginning, and prefill that of this prompt and others; collective, as `prefill`.

        Returns
        -------
        Prefill or None
            This rank's part of it; None if it has none.
        """
        ids, rank = planned.shared_ids, planned.decode_rank
        self._shared, prefill = None, None  # its memory first
        if not ids:
            return None
        if planned.partition is not None:
            alone = replace(planned, prompt=Prompt(ids), new_tokens=0)
            prefill = self.prefill(alone, forwarder)
        elif self.chain.rank == rank:
            (prefill,) = prefill_packed(self._loaded, [ids], prefix=planned.prefix)
        self._shared = SharedDocument(ids, rank, prefill if self.chain.rank == rank else None)
        return prefill

    @property
    def has_shared(self) -> bool:
        """Whether a shared beginning is held."""
        return self._shared is not None

    def goes_on(self, planned: PlannedPrompt) -> bool:
        """Whether a prompt begins with the shared beginning that is held."""
        return self._shared is not None and bool(planned.shared_ids) and self._shared.ids == planned.shared_ids

    def prefill_packed(self, row: Sequence[PlannedPrompt]) -> list[Prefill]:
        """Prefill prompts that begin with the same prefix in one forward, short ones on this rank alone."""
        if self.documents.holds(row[0].prefix):
            return self.documents.prefill(row)
        if (rolling := self._setup.rolling) is not None:
            return [prefill_rolling(self._loaded, planned.prompt.ids, rolling) for planned in row]
        # Prompts that are compressed run one by one.
        is_packed = self._setup.why_alone is None and not any(self._setup.retain_of(each.prompt) for each in row)
        rows = [row] if is_packed else [[planned] for planned in row]
        return [prefill for some in rows for prefill in self._prefill_row(some)]

    def _prefill_row(self, row: Sequence[PlannedPrompt]) -> list[Prefill]:
        ids, reserves = [planned.prompt.ids for planned in row], [planned.new_tokens for planned in row]
        if not row[0].shared_tokens:
            setup, first = self._setup, row[0]
            window, retain = (
                (None, None) if len(row) > 1 else (setup.window_of(first.prompt), setup.retain_of(first.prompt))
            )
            return prefill_packed(
                self._loaded,
                ids,
                reserve_tokens=reserves,
                prefix=first.prefix,
                window=window,
                retain=retain,
                arena=setup.arena,
            )
        shared = self._shared
        assert shared is not None and shared.ids == row[0].shared_ids, "it goes on from what was prefilled last"
        if shared.error is not None:
            return shared.failed(ids)
        arena = self._setup.arena
        prefills = prefill_packed(self._loaded, ids, reserve_tokens=reserves, prefix=shared.prefix, arena=arena)
        shared.charge(prefills)
        return prefills

    def _goes_alone(self, tokens: int, before_window: int | None = None) -> bool:
        """Whether so many tokens are too few to be cut, so that one rank prefills them, packed with others.

        Parameters
        ----------
        before_window : int or None
            How many of them come before compression's observation window.
        """
        if self._setup.rolling is not None:
            return True
        if self._slices.is_plain or self.is_spread:
            return False
        size = self.chain.size
        if before_window is not None and before_window < 2 * size:  # every slice before the last needs a token
            return True
        return self._slices.is_too_short(tokens) or (size == 1 and 2 * tokens <= PACK_TOKENS)

    def forget_stored(self) -> None:
        """Close the file that the last prompt's beginning was read from."""
        self._opened = None

    def _prefix_of(self, request: PromptRequest) -> SharedPrefix | None:
        """Find the beginning of a prompt that has been computed already, if any; on the leader."""
        ids, window = request.prompt.ids, self._setup.window_of(request.prompt)
        end = len(ids) if window is None else window[0]  # of what is known there are no queries
        fitting = (one for one in self._setup.prefixes if one.tokens <= end and ids[: one.tokens] == one.ids)
        return self._stored_prefix(request) or next(fitting, None)

    def _stored_prefix(self, request: PromptRequest) -> SharedPrefix | None:
        """Open the stored beginning of a prompt, unless it is that of the last one."""
        if request.stored is None:
            return None
        if self._opened is None or self._opened.source != request.stored:
            self._opened = request.stored.open(request.prompt.ids, self._loaded, self._parts)
        return self._opened

    def _prefix_of_tokens(self, request: PromptRequest, tokens: int) -> SharedPrefix | None:
        """Find the beginning of a prompt that the leader's plan builds on."""
        if not tokens:
            return None
        ids, stored = request.prompt.ids[:tokens], self._stored_prefix(request)
        found = next((one for one in (stored, *self._setup.prefixes) if one is not None and one.ids == ids), None)
        if found is None:
            raise AgreementError(
                f"rank {self.first_rank + self.chain.rank} has not computed the first {tokens} tokens of prompt "
                f"{request.key} of {request.document_id}, which the leader of its chain has"
            )
        return found
