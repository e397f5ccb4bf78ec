"""The ways in which a chain runs a prompt, each with its memory needs and its prefill.

`ChainRunner.plan` chooses one for each prompt. *needs* is the additional memory of a rank during prefill, and *kept*
the additional memory until the prompt is answered, both in bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvr_mpi.errors import DocumentError, counted
from kvr_mpi.kv.cache import WriteLayer
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.kv.rolling import Rolling
from kvr_mpi.kv.shares import Share
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.memory_budget import GIB, check_fits
from kvr_mpi.prefill.one_prompt import Prefill, prefix_of_cache
from kvr_mpi.prefill.packed import PACK_TOKENS, prefill_packed
from kvr_mpi.prefill.routes import relay
from kvr_mpi.prefill.stored_shares import prefill_stored, share_out_stored
from kvr_mpi.prefill.streaming import prefill_rolling
from kvr_mpi.runtime.plan import Plan, Way, planned_drop
from kvr_mpi.topology import Rotation


@dataclass(slots=True)
class Alone(Way):
    """One rank prefills prompts alone, short ones in packed rows."""

    name = "alone"
    in_rows = True

    def check_fits(self, plan: Plan) -> None:
        """Check the memory for one slice of all tokens."""
        prompt, free = plan.prompt, [min(self.free_bytes)]
        drop = planned_drop(self.setup, prompt, plan.prefix)
        check_fits(self.footprint, Partition((0, prompt.tokens)), free, prompt.new_tokens, drop=drop)

    def needs(self, plan: Plan) -> list[int]:
        """Bytes of the prompt's cache and its packed row; compressed prompts are not packed."""
        prompt, drop = plan.prompt, planned_drop(self.setup, plan.prompt, plan.prefix)
        if drop is not None:
            route = relay(Partition((0, prompt.tokens)), 0)
            own = self.footprint.route_bytes(route, reserve_tokens=prompt.new_tokens, drop=drop)
        else:
            own = self.own_bytes(plan) + self.footprint.activation_bytes(PACK_TOKENS[self.setup.loaded.device.type])
        return self.on(plan.decode_rank, own)

    def kept(self, plan: Plan) -> list[int]:
        """Bytes of the prompt's cache."""
        return self.on(plan.decode_rank, self.cache_bytes(plan))

    def prefill(self, row: Sequence[Plan], write: WriteLayer | None = None) -> list[Prefill]:
        """Prefill a packed row; compressed prompts run one by one."""
        setup = self.setup
        is_packed = setup.why_alone is None and not any(setup.retain_of(plan.prompt) for plan in row)
        rows = [row] if is_packed else [[plan] for plan in row]
        return [prefill for some in rows for prefill in self._prefill_row(some, some[0].prefix)]

    def _prefill_row(self, row: Sequence[Plan], prefix: SharedPrefix | None) -> list[Prefill]:
        setup, first = self.setup, row[0].prompt
        alone = len(row) == 1
        return prefill_packed(
            setup.loaded,
            [plan.prompt.ids for plan in row],
            reserve_tokens=[plan.prompt.new_tokens for plan in row],
            prefix=prefix,
            retain=setup.retain_of(first) if alone else None,
            arena=setup.arena,
        )


@dataclass(slots=True)
class InSteps(Alone):
    """One rank prefills prompts alone, each through a rolling cache."""

    @property
    def rolling(self) -> Rolling:
        """The job's rolling cache."""
        assert self.setup.rolling is not None
        return self.setup.rolling

    def check_fits(self, plan: Plan) -> None:
        """Check the memory for the rolling cache, which does not depend on the prompt's length."""
        needs, free = self.footprint.rolling_bytes(self.rolling), min(self.free_bytes)
        if needs > free:
            raise DocumentError(
                f"a {self.rolling.name} needs {needs / GIB:.2f} GiB in addition to the weights, but a rank has "
                f"{free / GIB:.2f} GiB; lower cache.tokens or parallel.chunk_tokens, or use ranks with more memory"
            )

    def prefill(self, row: Sequence[Plan], write: WriteLayer | None = None) -> list[Prefill]:
        """Prefill the prompts one after the other."""
        return [prefill_rolling(self.setup.loaded, plan.prompt.ids, self.rolling) for plan in row]


@dataclass(slots=True)
class AfterShared(Alone):
    """The prompts about one document share its prefill (`Plan.before`), which one rank keeps.

    The document is prefilled like any prompt. Each prompt then computes and stores only its own tokens.

    Attributes
    ----------
    held : Prefill or None
        The shared prefix, on the rank that keeps it.
    """

    name = "after shared"
    held: Prefill | None = None
    _prefix: SharedPrefix | None = None
    _is_charged: bool = False

    def beginning(self, plan: Plan) -> Hashable:
        """Return the tokens of the prefix."""
        assert plan.before is not None
        return plan.before.prompt.ids

    def check_fits(self, plan: Plan) -> None:
        """Do nothing: `ChainRunner.plan` uses this way only if the prompt fits."""

    def needs(self, plan: Plan) -> list[int]:
        """Bytes of the prompt, plus the prefix if it is not computed yet."""
        before, needs = plan.before, Alone.needs(self, plan)
        assert before is not None
        if self.at == self.beginning(plan):
            return needs
        beginning = before.way.needs(before) if before.way.takes_all else self.beginning_bytes(plan)
        return [own + each for own, each in zip(needs, beginning, strict=True)]

    def kept(self, plan: Plan) -> list[int]:
        """Bytes of the prompt's cache, plus the prefix for the first prompt that continues it."""
        kept = Alone.kept(self, plan)
        if self.at == self.beginning(plan):
            return kept
        return [own + each for own, each in zip(kept, self.beginning_bytes(plan), strict=True)]

    def beginning_bytes(self, plan: Plan) -> list[int]:
        """Bytes of the prefix on the rank that keeps it."""
        assert plan.before is not None
        return self.on(plan.decode_rank, self.setup.kv_bytes(plan.before.prompt.tokens))

    def begin(self, plan: Plan) -> Prefill | None:
        """Prefill the prefix."""
        before = plan.before
        assert before is not None
        is_home = self.chain.rank == before.decode_rank
        if not is_home and not before.way.takes_all:
            return None
        (found,) = before.way.prefill([before])
        if is_home:
            self.held = found
        return found

    def leave(self) -> None:
        """Free the prefix."""
        self.at = self.held = self._prefix = None
        self._is_charged = False

    def prefill(self, row: Sequence[Plan], write: WriteLayer | None = None) -> list[Prefill]:
        """Continue the prefix; its time, slices and tokens count for the first prompt."""
        shared, before = self.held, row[0].before
        assert shared is not None and before is not None, "it continues the prompt that was prefilled last"
        if shared.error is not None:
            return [replace(shared, partition=Partition((0, plan.prompt.tokens)), logits=None) for plan in row]
        if self._prefix is None:
            self._prefix = prefix_of_cache(before.prompt.ids, shared.cache)
        rows = [row] if self.setup.why_alone is None else [[plan] for plan in row]
        prefills = [prefill for some in rows for prefill in self._prefill_row(some, self._prefix)]
        if not self._is_charged:
            first, self._is_charged = prefills[0], True
            first.seconds += shared.seconds
            first.wait_s += shared.wait_s
            first.send_wait_s += shared.send_wait_s
            first.known_tokens, first.strategy = shared.known_tokens, shared.strategy
            first.partition = Partition((*shared.partition.bounds[:-1], first.partition.tokens))
        return prefills


@dataclass(slots=True)
class OverChain(Way):
    """Every rank of the chain computes a slice; the last one gets all keys and values, unless they are sharded."""

    name = "chain"
    takes_all = True

    def check_fits(self, plan: Plan) -> None:
        """Check the memory for every rank's slice."""
        assert plan.partition is not None
        if max(self.needs(plan)) <= min(self.free_bytes):  # unlike check_fits, this accounts for known tokens
            return
        check_fits(
            self.footprint,
            plan.partition,
            [min(self.free_bytes)] * self.chain.size,
            plan.prompt.new_tokens,
            partial(plan.strategy.make or relay, chunk_tokens=plan.chunk_tokens),
            is_spread=self.setup.spec.is_spread,
            drop=planned_drop(self.setup, plan.prompt, plan.prefix),
        )

    def needs(self, plan: Plan) -> list[int]:
        """Bytes of every rank's slice."""
        assert plan.partition is not None
        routes = plan.strategy.routes(plan.partition, plan.known_tokens, plan.chunk_tokens)
        drop = planned_drop(self.setup, plan.prompt, plan.prefix)
        return self.slices.needs(routes, plan.decode_rank, plan.prompt.new_tokens, drop)

    def kept(self, plan: Plan) -> list[int]:
        """Bytes of the prompt's cache, or of each rank's shard."""
        size, whole = self.chain.size, self.cache_bytes(plan)
        return [-(-whole // size)] * size if self.setup.spec.is_spread else self.on(plan.decode_rank, whole)

    def writes_own(self, plan: Plan) -> bool:
        """Whether every rank stores its own slice; not with compression, which selects tokens on the last rank."""
        assert plan.partition is not None
        spec, size = self.setup.spec, self.chain.size  # in a zigzag ring, a rank has two slices
        return spec.output.kv is True and spec.compress is None and 1 < size == plan.partition.size

    def prefill(self, row: Sequence[Plan], write: WriteLayer | None = None) -> list[Prefill]:
        """Prefill this rank's slice of one prompt."""
        (plan,), setup = row, self.setup
        assert plan.partition is not None
        prefill = plan.strategy.prefill(
            setup.loaded,
            plan.prompt.ids,
            plan.partition,
            self.chain,
            reserve_tokens=plan.prompt.new_tokens,
            prefix=plan.prefix,
            last=plan.decode_rank,
            forwarder=self.forwarder,
            spares_chain=True,
            keeps_all=plan.is_beginning or (setup.spec.output.kv is True and not self.writes_own(plan)),
            write_layer=write,
            is_spread=setup.spec.is_spread,
            retain=setup.retain_of(plan.prompt),
            chunk_tokens=plan.chunk_tokens,
            arena=setup.arena,
        )
        return [prefill]


@dataclass(slots=True)
class AfterStored(Way):
    """The ranks of a chain hold a stored document: each loads its shard once, and all ranks run the questions.

    One rank answers all questions about a document, since it has the document's last rows. The chain keeps the rows of
    its current document, and answers in progress those of theirs.

    Attributes
    ----------
    held : Share or None
        This rank's rows of the chain's current document.
    """

    name = "after stored"
    in_rows = True
    takes_all = True
    held: Share | None = None

    def beginning(self, plan: Plan) -> Hashable:
        """Return the location of the stored document."""
        assert plan.prefix is not None
        return plan.prefix.source

    def check_fits(self, plan: Plan) -> None:
        """Check the memory for every rank's shard and one question."""
        rows, free = self._rows_bytes(plan), min(self.free_bytes)
        rows[plan.decode_rank] += self._own_bytes(plan)
        needs = max(rows) + self.footprint.activation_bytes(plan.row_tokens)
        if needs > free:
            raise DocumentError(
                f"a stored prompt of {plan.known_tokens} tokens over {counted(self.chain.size, 'rank')}: each "
                f"needs {needs / GIB:.2f} GiB in addition to the weights, but has {free / GIB:.2f} GiB; use more ranks"
            )

    def needs(self, plan: Plan) -> list[int]:
        """Bytes of shards that are not loaded yet, of new tokens, and of a row of questions."""
        pack_tokens = PACK_TOKENS[self.setup.loaded.device.type]
        row_bytes = self.footprint.activation_bytes(max(plan.row_tokens, pack_tokens))
        return [each + row_bytes for each in self.kept(plan)]

    def kept(self, plan: Plan) -> list[int]:
        """Bytes of shards that are not loaded yet, and of new tokens."""
        kept = [0] * self.chain.size if self.at == self.beginning(plan) else self._rows_bytes(plan)
        kept[plan.decode_rank] += self._own_bytes(plan)
        return kept

    def begin(self, plan: Plan) -> Prefill | None:
        """Switch to a document; its first question loads it."""
        self.held = self._share(plan, self.chain.rank)
        return None

    def leave(self) -> None:
        """Leave the document; its rows are freed with its last answer."""
        self.at = self.held = None

    def prefill(self, row: Sequence[Plan], write: WriteLayer | None = None) -> list[Prefill]:
        """Prefill questions about one document; every rank of the chain returns the same."""
        assert self.held is not None, "they are run before another document comes"
        return prefill_stored(
            self.setup.loaded,
            [plan.prompt.ids for plan in row],
            self.held,
            self.chain,
            reserve_tokens=[plan.prompt.new_tokens for plan in row],
            last=row[0].decode_rank,
        )

    def _own_bytes(self, plan: Plan) -> int:
        """Bytes of the tokens after the document."""
        return (plan.row_tokens + plan.prompt.new_tokens) * self.setup.loaded.shape.kv_bytes_per_token

    def _rows_bytes(self, plan: Plan) -> list[int]:
        """Bytes of each rank's shard of a document."""
        return [self._share(plan, rank).bytes_of_rows for rank in range(self.chain.size)]

    def _share(self, plan: Plan, rank: int) -> Share:
        """Make a rank's shard of a document, without loading it."""
        setup, size, known = self.setup, self.chain.size, plan.known_tokens
        place = Rotation.ending_at(size, plan.decode_rank).place_of(rank)
        start, stop = share_out_stored(known, known, size).slices()[place]
        longest_question = max(len(frame.tail) for frame in setup.question_frames.values())
        longest = known + longest_question + setup.longest_answer
        return Share(setup.loaded, start, stop, known, longest, prefix=plan.prefix)
