"""Plans the prompts of a chain: how each runs, its slices and chunks, and its memory on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from kvr_mpi.compress.planned_drop import PlannedDrop
from kvr_mpi.costs.solve import Rates, equal_time
from kvr_mpi.errors import DocumentError, counted
from kvr_mpi.kv.chain import LAYERS_AHEAD, LAYERS_HELD
from kvr_mpi.kv.pool import PAGE_ROWS
from kvr_mpi.kv.relay import Relay, relays
from kvr_mpi.kv.sequence import SequenceKV, bytes_to_read
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.prefill.memory_budget import GIB, Footprint, check_fits, choose_chunks
from kvr_mpi.runtime.chain_runner import ChainRunner, absent_prefix, shard_of
from kvr_mpi.runtime.plan import Plan, Way
from kvr_mpi.runtime.prompt import Prompt
from kvr_mpi.topology import Rotation
from kvr_mpi.tuning.lookup import choose_slices, describe_range, is_outside
from kvr_mpi.tuning.table import Table

LEAST_SLICE_TOKENS = 64  # shorter slices are not worth a rank


class Planner:
    """Plans the prompts of one chain; only its leader has one, the other ranks receive plans.

    shares_heads : the ranks of the chain decode all their prompts together.
    """

    def __init__(self, runner: ChainRunner, *, shares_heads: bool = False) -> None:
        session, size = runner.session, runner.chain.size
        self.first_rank, self.size = runner.first_rank, size
        self._runner, self._session, self._spec, self._has_warned = runner, session, session.spec, False
        self._ranks = slice(self.first_rank, self.first_rank + size)
        self._free_bytes, self._rates = session.free_bytes[self._ranks], session.rates[self._ranks]
        self._efficiency: float | None = None  # of sharing heads
        if shares_heads and session.sharing is not None and not isinstance(session.sharing, str):
            self._efficiency = session.sharing.efficiency(size)

    def plan(self, prompt: Prompt, decode_rank: int) -> Plan:
        """Plan a prompt with the last slice on `decode_rank`, or on the rank that has the prefix it continues.

        If other prompts share its first tokens, and the chain does not hold them, this plans their prefill instead.

        Raises `DocumentError` if the prompt does not fit on an empty chain (with the number of ranks needed); if
        keys and values are sharded and it has fewer tokens than the chain has ranks; or if the model lacks an id.
        """
        self._session.loaded.shape.check_ids(prompt.ids)
        held = self._runner.shared
        held = held if held is not None and held.suits(prompt) else None
        decode_rank = decode_rank if held is None else held.decode_rank
        retain = self._session.retain_of(prompt)
        window = None if retain is None or retain.window is None else retain.window[0]  # whose queries are needed
        if prompt.stored is not None:
            return self._plan(prompt, self._runner.prefix_of(prompt, decode_rank), decode_rank, window)
        # The window needs queries, which a prefix does not have.
        ids = prompt.ids[:window]
        prefix = next((one for one in self._session.prefixes if ids[: one.length] == one.ids), None)
        if prompt.shared_tokens > (prefix.length if prefix else 0):
            with suppress(DocumentError):  # otherwise its whole prompt is planned
                shared = held.sequence if held is not None else absent_prefix(self._session, prompt)
                plan = Plan(Way.ALONE, prompt, shared, decode_rank)
                if self.fits_beside(self._with_memory(plan, is_held=False), [0] * self.size):
                    if held is None:
                        return self._plan(prompt.shared_prefix, prefix, decode_rank, None)
                    return self._with_memory(plan, is_held=True)
        return self._plan(prompt, prefix, decode_rank, window)

    def fits_beside(self, plan: Plan, held_bytes: Sequence[int]) -> bool:
        """Whether a prompt fits into the memory that is left on the ranks of the chain."""
        if plan.needs is None:  # plain transformers: memory is not predicted, so run one by one
            return False
        return all(
            not need or self._has_room(free, need, rows, held)
            for free, need, rows, held in zip(self._free_bytes, plan.needs, plan.rows, held_bytes, strict=True)
        )

    def _has_room(self, free: int, need: int, rows: int, held: int) -> bool:
        """Whether a prompt fits on a rank that holds others; nothing else can use the memory of a paged pool.

        free : bytes for prompts on the rank.
        need : bytes at the prompt's peak, including those of its `rows` in the pool.
        """
        pool = self._session.pool
        if not pool.is_paged:
            return need + held <= free
        # As large a share on all ranks.
        own = int(pool.nbytes / max(1, self._session.free_bytes[self.first_rank]) * free)
        return rows + held <= own and need - rows <= free - own

    def fits_shared(self, held_bytes: Sequence[int], largest: int) -> bool:
        """Whether the rows of all prompts can be distributed if ranks share heads to decode them; else True.

        Ranks then hold their part of all prompts, and while prompts are distributed one by one, up to another prompt.

        held_bytes : of all prompts on each rank, before that.
        largest : bytes of the largest prompt.
        """
        if self._efficiency is None:
            return True
        share = sum(held_bytes) / self.size / self._efficiency
        pairs = zip(held_bytes, self._free_bytes, strict=True)
        return all(max(held, share) + largest <= free for held, free in pairs)

    def cut(self, tokens: int, known: int, decode_rank: int) -> Partition:
        """Cut a prompt by the job's table, into slices of equal time by the ranks' rates, or evenly.

        known : number of first tokens that are not computed again; the first slice includes them.
        decode_rank : the rank of the chain that has the last slice; the next rank, cyclically, has the first.
        """
        table, new = self._session.table, tokens - known
        if table is not None and self.size > 1:
            self._warn_outside(table, new)
            return choose_slices(table, new, self.size).after(known)
        if not self._rates:
            return Partition.even(new, self.size).after(known)
        first = Rotation.ending_at(self.size, decode_rank).first
        # Every token also attends to the known ones, which adds the same cost to each.
        rates = [Rates(rate.token_s + rate.pair_s * known, rate.pair_s) for rate in self._rates]
        lengths = equal_time(new, [*rates[first:], *rates[:first]])
        return Partition.by_ratio(new, lengths, QUANTUM_TOKENS).after(known)

    def _plan(self, prompt: Prompt, prefix: SequenceKV | None, decode_rank: int, window: int | None) -> Plan:
        """Plan a prompt after a prefix, and check that it fits on an empty chain."""
        spec, known = self._spec, prefix.length if prefix else 0
        is_compressed = prefix is not None and bool(prefix.compression)  # one rank holds the rows that heads kept
        drop = self._drop_of(prompt, prefix)
        if is_compressed or self._goes_alone(prompt.tokens - known, None if window is None else window - known):
            try:
                return self._fitting(Plan(Way.ALONE, prompt, prefix, decode_rank), drop)
            except DocumentError:
                if self.size > 1 or is_compressed or self._session.rolling is not None:
                    raise  # otherwise it may fit in chunks
        is_stored = spec.questions is not None and prefix is not None and prefix.is_stored
        if spec.is_sharded and (tokens := known if is_stored else prompt.tokens - known) < self.size:
            raise DocumentError(
                f"too short: {tokens} tokens cannot be spread over {self.size} ranks, each of which needs at "
                f"least one; use shorter chains (parallel.ranks_per_chain), or output.kv = true"
            )
        if spec.is_sharded and is_stored:
            return self._fitting(Plan(Way.AFTER_STORED, prompt, prefix, decode_rank))
        partition = self.cut(prompt.tokens, known, decode_rank)
        if window is not None:
            partition = partition.with_last_from(window, known)

        def fits(chunk_tokens: int | None) -> bool:
            needs = self._slice_bytes(relays(partition, known, chunk_tokens), self.size - 1, prompt.new_tokens, drop)
            is_kept = self._spec.keeps_kv and not self._spec.is_sharded
            rows = self._session.kv_bytes(prompt.tokens + prompt.new_tokens) if is_kept else 0
            free = min(self._free_bytes)
            return self._has_room(free, needs[-1], rows, 0) and all(
                self._has_room(free, each, 0, 0) for each in needs[:-1]
            )

        chunks = choose_chunks(spec.chunk_tokens, self._session.footprint, fits)
        return self._fitting(Plan(Way.CHAIN, prompt, prefix, decode_rank, partition, chunks), drop)

    def _goes_alone(self, tokens: int, before_window: int | None) -> bool:
        """Whether one rank prefills a prompt of this length, part of which precedes compression's window."""
        if self._session.rolling is not None:
            return True
        if self._spec.is_plain or self._spec.is_sharded:
            return False
        if before_window is not None and before_window < 2 * self.size:  # every slice before the last needs a token
            return True
        return tokens < LEAST_SLICE_TOKENS * self.size or (self.size == 1 and 2 * tokens <= self._runner.pack_tokens)

    def _drop_of(self, prompt: Prompt, prefix: SequenceKV | None) -> PlannedDrop | None:
        """Predict what compression drops from a prompt; None if nothing, or if its prefix is compressed already."""
        compression, pool = self._session.compression, self._session.pool
        if compression is None or (prefix is not None and prefix.compression):
            return None
        drop = compression.planned_drop(prompt.tokens, prompt.text)
        if drop is None or not pool.is_paged:
            return drop
        return replace(drop, kv_bytes=max(0, drop.kv_bytes - pool.page_bytes))  # last pages are partly empty

    def _fitting(self, plan: Plan, drop: PlannedDrop | None = None) -> Plan:
        """Add what a prompt needs and keeps on each rank, and refuse it if it does not fit on an empty chain."""
        if self._session.footprint is not None:
            self._check_fits(self._with_memory(plan, drop, is_held=False), self._session.footprint, drop)
        return self._with_memory(plan, drop, is_held=self._holds(plan))

    def _with_memory(self, plan: Plan, drop: PlannedDrop | None = None, *, is_held: bool) -> Plan:
        """Add what a prompt needs and keeps on each rank; its prefix is not counted if the chain holds it."""
        prompt, rank, session = plan.prompt, plan.decode_rank, self._session
        footprint, pack_tokens, own = session.footprint, self._runner.pack_tokens, self._own_bytes(plan, is_held)
        kept, needs = self._on(rank, own if drop is None else own - drop.kv_bytes), None
        if plan.way is Way.AFTER_STORED:
            kept = self._stored_bytes(plan, is_held)
            if footprint is not None:
                row_bytes = footprint.activation_bytes(max(plan.row_tokens, pack_tokens))
                needs = [each + row_bytes for each in kept]
        elif plan.partition is not None:
            if self._spec.is_sharded:
                kept = [-(-kept[rank] // self.size)] * self.size
            elif not self._spec.keeps_kv:
                kept = [0] * self.size
            if footprint is not None:
                slices = relays(plan.partition, plan.known_tokens, plan.chunk_tokens)
                needs = self._slice_bytes(slices, rank, prompt.new_tokens, drop)
        elif footprint is not None and drop is not None:  # compressed prompts are not packed
            alone = Relay(Partition((0, prompt.tokens)), 0)
            needs = self._on(rank, footprint.slice_bytes(alone, reserve_tokens=prompt.new_tokens, drop=drop))
        elif footprint is not None:
            needs = self._on(rank, own + footprint.activation_bytes(pack_tokens))
            if self._has_own_prefix(plan) and not session.loaded.attends_in_parts:  # which copies while it runs
                needs[rank] += session.kv_bytes(prompt.tokens)
        keep = range(self.size) if self._spec.is_sharded and plan.takes_all else [rank]
        if not self._spec.generation.max_new_tokens and not prompt.is_prefix:  # prefill ends the prompt
            keep = []
        rows = self._on(rank, own) if drop is not None and drop.is_late else kept
        if plan.partition is not None and plan.prefix is not None and plan.prefix.is_stored:
            # Other ranks hold a few layers of it at a time.
            layers = min(1.0, (LAYERS_HELD + 1 + LAYERS_AHEAD) / len(session.loaded.shape.layers))
            rows = [max(each, int(layers * session.kv_bytes(plan.known_tokens))) for each in kept]
        return replace(plan, needs=needs, rows=rows, kept={each: kept[each] for each in keep})

    def _holds(self, plan: Plan) -> bool:
        """Whether the chain holds the prefix that a prompt continues."""
        held = self._runner.shared
        return held is not None and plan.prefix is held.sequence

    def _has_own_prefix(self, plan: Plan) -> bool:
        """Whether a prompt continues a prefix that not all prompts begin with."""
        return plan.prefix is not None and plan.prefix not in self._session.prefixes

    def _on(self, rank: int, size: int) -> list[int]:
        """Return a list with the bytes on one rank of the chain, and 0 on the others."""
        return [size * (each == rank) for each in range(self.size)]

    def _own_bytes(self, plan: Plan, is_held: bool) -> int:
        """Bytes of a prompt's cache before compression with room for the answer, and of a prefix that is not held."""
        tokens, session, prefix = plan.prompt.tokens + plan.prompt.new_tokens, self._session, plan.prefix
        if prefix is None or not self._has_own_prefix(plan):
            return session.kv_bytes(tokens)
        stored, page_bytes = plan.prompt.stored, session.pool.page_bytes if session.pool.is_paged else 0
        before, shared = session.kv_bytes(prefix.length), prefix.length
        if stored is not None and prefix.compression:
            before = sum(piece.bytes for piece in stored.pieces) + page_bytes  # heads' last pages are partly empty
            own = session.kv_bytes(tokens - shared) + page_bytes
        elif not prefix.lends_rows(tokens):
            own = session.kv_bytes(tokens)
        else:  # of what is in pages, only whole ones are shared
            own = session.kv_bytes(tokens - (shared // PAGE_ROWS * PAGE_ROWS if session.pool.is_paged else shared))
        return own if is_held else before + own

    def _stored_bytes(self, plan: Plan, is_held: bool) -> list[int]:
        """Bytes of a question's own tokens, and of each rank's shard of its document if it is not in memory."""
        ranks = range(self.size)
        shards = (shard_of(self._session, plan.prompt, plan.decode_rank, rank, self.size) for rank in ranks)
        found = [0 if is_held else bytes_to_read(shard) for shard in shards]
        tokens = plan.row_tokens + plan.prompt.new_tokens
        found[plan.decode_rank] += tokens * self._session.loaded.shape.kv_bytes_per_token
        return found

    def _slice_bytes(
        self, slices: Sequence[Relay], decode_rank: int, new_tokens: int, drop: PlannedDrop | None
    ) -> list[int]:
        """Bytes that each rank of the chain needs for its slice."""
        assert self._session.footprint is not None
        needs, rotation = [0] * self.size, Rotation.ending_at(self.size, decode_rank)
        for relay in slices:
            needs[rotation.rank_of(relay.position)] = self._session.footprint.slice_bytes(
                relay, reserve_tokens=new_tokens, is_sharded=self._spec.is_sharded, drop=drop
            )
        return needs

    def _check_fits(self, plan: Plan, footprint: Footprint, drop: PlannedDrop | None) -> None:
        """Refuse a prompt that does not fit on an empty chain."""
        free, prompt, pool = min(self._free_bytes), plan.prompt, self._session.pool
        assert plan.needs is not None
        rest = max(plan.needs) - max(plan.rows)
        if plan.partition is None and drop is None:  # alone in its row
            rest = footprint.activation_bytes(plan.row_tokens)
        if pool.is_paged and not all(self._has_room(free, rows + rest, rows, 0) for rows in plan.rows):
            raise DocumentError(
                f"a prompt of {prompt.tokens} tokens does not fit: a rank has {pool.nbytes / GIB:.2f} GiB for keys and "
                f"values and {(free - pool.nbytes) / GIB:.2f} GiB for the rest of a prefill, and one needs "
                f"{max(plan.rows) / GIB:.2f} and {rest / GIB:.2f} GiB; use longer chains"
            )
        if plan.way is Way.AFTER_STORED:
            needs = max(plan.rows) + footprint.activation_bytes(plan.row_tokens)
            if needs > free:
                raise DocumentError(
                    f"a stored prompt of {plan.known_tokens} tokens over {counted(self.size, 'rank')}: each "
                    f"needs {needs / GIB:.2f} GiB in addition to the weights, but has {free / GIB:.2f} GiB; use more "
                    f"ranks"
                )
        elif plan.partition is None and self._session.rolling is not None:
            rolling = self._session.rolling
            if (needs := footprint.rolling_bytes(rolling)) > free:
                raise DocumentError(
                    f"a {rolling.name} needs {needs / GIB:.2f} GiB in addition to the weights, but a rank has "
                    f"{free / GIB:.2f} GiB; lower cache.tokens or parallel.chunk_tokens, or use ranks with more memory"
                )
        elif plan.partition is None:
            check_fits(footprint, Partition((0, prompt.tokens)), [free], prompt.new_tokens, drop=drop)
        elif max(plan.needs) > free:  # unlike check_fits, this accounts for known tokens
            check_fits(
                footprint,
                plan.partition,
                [free] * self.size,
                prompt.new_tokens,
                chunk_tokens=plan.chunk_tokens,
                is_sharded=self._spec.is_sharded,
                drop=drop,
            )

    def _warn_outside(self, table: Table, tokens: int) -> None:
        """Log once that prompts are outside the range of the table."""
        if not self._has_warned and is_outside(table, tokens, self.size):
            self._has_warned = True
            self._session.logger.warning(
                f"the table was searched for {describe_range(table)}; a prompt of {tokens} tokens on "
                f"{self.size} ranks is outside this range: slices of such prompts come from the fitted rates of "
                "the table"
            )
