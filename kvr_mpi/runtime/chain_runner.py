"""Runs planned prompts on a chain of ranks.

The leader of the chain plans each prompt (``planner``); then all ranks that take part call `ChainRunner.prefill`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvr_mpi.errors import AgreementError
from kvr_mpi.events import Events
from kvr_mpi.kv.chain import WriteLayer
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import Failure, attempt
from kvr_mpi.prefill.one_prompt import (
    PLAIN,
    Prefill,
    prefill_alone,
    prefill_kvr,
    run_plain,
    wait_for_compute,
)
from kvr_mpi.prefill.packed import PACK_TOKENS, Gathering, prefill_packed, share_out_stored
from kvr_mpi.prefill.streaming import prefill_rolling
from kvr_mpi.runtime.plan import Plan, Way
from kvr_mpi.runtime.prompt import Prompt
from kvr_mpi.runtime.session import Session
from kvr_mpi.topology import Rotation
from kvr_mpi.transport import Transport
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.liveness import LIMIT_S

# A rank waits for another up to this many times as long as one rank should take for all prompts of the wave, and on a
# GPU no longer than MOST_GPU_WAIT_S. Without measured rates, a speed is assumed (operations per second).
SLACK, MOST_GPU_WAIT_S = 20.0, 3600.0
ASSUMED_SPEED = {"cpu": 5e10, "cuda": 2e13}


@dataclass(slots=True)
class SharedPrefix:
    """The prefix that a chain holds for the prompts that continue it: prefilled before them, or stored.

    sequence : what this rank holds of it.
    decode_rank : the rank that decodes these prompts.
    prefill : on that rank, how it was prefilled, until that is counted for the first of these prompts.
    """

    sequence: SequenceKV
    decode_rank: int
    prefill: Prefill | None = None

    def suits(self, prompt: Prompt) -> bool:
        """Whether a prompt continues it."""
        sequence = self.sequence
        return sequence.source == prompt.stored and sequence.ids == prompt.ids[: prompt.shared_tokens]


class ChainRunner:
    """A model on a chain of ranks, ready to run prompts.

    All ranks of the chain call `hold` and `prefill` for the same prompts in the same order.

    first_rank : the first rank of the chain within the job.
    shared : the prefix that the current prompts continue.
    """

    def __init__(self, session: Session, chain: Transport, first_rank: int, events: Events | None = None) -> None:
        self.session, self.chain, self.first_rank = session, chain, first_rank
        self.is_sharded = session.spec.is_sharded
        device = session.loaded.device
        self.pack_tokens = PACK_TOKENS[device.type]  # of a packed row
        self.forwarder = Forwarder(chain, device=device, events=events) if chain.size > 1 else None
        self.shared: SharedPrefix | None = None
        self._wave_s = 0.0  # forecast for this wave's prompts, on one rank

    def read_plan(self, prompt: Prompt, plan: Mapping[str, Any]) -> Plan:
        """Parse the leader's plan, as returned by `Plan.to_wire`.

        Raises `AgreementError` if it belongs to another prompt, or this rank has not computed its prefix.
        """
        ids = prompt.sha256
        if (plan["key"], plan["ids_sha256"]) != (prompt.key, ids):
            raise AgreementError(
                f"rank {self.first_rank + self.chain.rank} received the plan of prompt {plan['key']} (token ids "
                f"{plan['ids_sha256'][:16]}) with prompt {prompt.key} of {prompt.document_id} (token ids {ids[:16]})"
            )
        return Plan(
            Way(plan["way"]),
            prompt,
            self._known_prefix_of(prompt, plan["prefix_tokens"], plan["decode_rank"]),
            plan["decode_rank"],
            None if plan["bounds"] is None else Partition(tuple(plan["bounds"])),
            plan["chunk_tokens"],
        )

    def prefix_of(self, prompt: Prompt, decode_rank: int) -> SequenceKV | None:
        """Return what this rank has of the prefix that the chain holds for a prompt, or open its stored prefix.

        None if there is neither.
        """
        if self.shared is not None and self.shared.suits(prompt):
            return self.shared.sequence
        if prompt.stored is None:
            return None
        if self.is_sharded and prompt.shared_tokens:
            return shard_of(self.session, prompt, decode_rank, self.chain.rank, self.chain.size)
        return prompt.stored.open(prompt.ids, self.session.loaded, self.session.pool)

    def expect(self, plan: Plan) -> None:
        """Extend the deadline for other ranks by a prompt that they run."""
        if self.forwarder is None:
            return
        loaded, tokens, is_gpu = self.session.loaded, plan.prompt.tokens, self.session.loaded.device.type == "cuda"
        if self.session.rates:
            layer_s = max(rate.seconds(tokens, 0) for rate in self.session.rates)
            self._wave_s += len(loaded.shape.layers) * layer_s
        else:
            weights = sum(each.numel() for each in loaded.model.parameters())
            pairs = len(loaded.shape.layers) * loaded.shape.hidden_size * tokens
            self._wave_s += 2 * tokens * (weights + pairs) / ASSUMED_SPEED["cuda" if is_gpu else "cpu"]
        most_s = max(LIMIT_S, SLACK * self._wave_s)
        self.forwarder.limit_s = min(most_s, MOST_GPU_WAIT_S) if is_gpu else most_s

    def holds(self, plan: Plan) -> bool:
        """Whether the chain holds what the prompt shares with others, and nothing else."""
        held = None if self.shared is None else self.shared.sequence
        return held is self._shared_with_others(plan)

    def hold(self, plan: Plan) -> None:
        """Release the prefix of earlier prompts, and hold what this one shares with those that follow."""
        self.release()
        sequence = self._shared_with_others(plan)
        self.shared = None if sequence is None else SharedPrefix(sequence, plan.decode_rank)

    def hold_computed(self, plan: Plan, prefill: Prefill | None) -> None:
        """Hold a prefix that was prefilled for the prompts that follow; None on ranks that did not take part."""
        sequence, is_home = absent_prefix(self.session, plan.prompt), self.chain.rank == plan.decode_rank
        if prefill is not None and is_home:
            sequence = sequence if prefill.cache is None else prefill.cache
            sequence.ids, sequence.failure = plan.prompt.ids, prefill.error
        self.shared = SharedPrefix(sequence, plan.decode_rank, prefill if is_home else None)

    def count_prefix(self, row: Sequence[Plan], prefills: Sequence[Prefill]) -> None:
        """Count the prefill of the prefix of a row, unless it was counted before, for the row's first prompt."""
        shared = self.shared
        if shared is not None and shared.prefill is not None and row[0].prefix is shared.sequence:
            prefills[0].count_prefix(shared.prefill)
            shared.prefill = None

    def _shared_with_others(self, plan: Plan) -> SequenceKV | None:
        """Return the prefix that a prompt shares with others, but not with all; None without one."""
        prefix = plan.prefix
        if prefix is None or prefix in self.session.prefixes or prefix.length != plan.prompt.shared_tokens:
            return None
        return prefix

    @property
    def writes_own(self) -> bool:
        """Whether every rank stores its own slice, although the decode rank has all keys and values.

        Not with compression, which selects tokens on the last rank.
        """
        spec = self.session.spec
        return spec.output.kv is True and spec.compress is None and self.chain.size > 1

    def prefill(self, row: Sequence[Plan], write: WriteLayer | None = None) -> list[Prefill]:
        """Prefill prompts that continue the same prefix: several if they are `Plan.in_rows`, else one.

        write : stores the keys and values of this rank's slice, layer by layer, if ranks store their own.
        """
        prefix = row[0].prefix
        if prefix is not None and prefix.failure is not None:
            failed: dict[str, Any] = {"last": row[0].decode_rank, "error": prefix.failure}
            failed["began_s"] = time.perf_counter()
            return [Prefill(Partition((0, plan.prompt.tokens)), None, None, 0.0, **failed) for plan in row]
        try:
            match row[0].way:
                case Way.CHAIN:
                    return [self._prefill_slice(row[0], write)]
                case Way.AFTER_STORED:
                    return self._prefill_after_stored(row)
            return self._prefill_alone(row, prefix)
        finally:
            if prefix is not None and prefix.is_stored and self._shared_with_others(row[0]) is None:
                prefix.release()  # the prompt keeps what it shares

    def end_wave(self) -> None:
        """Forget how long the wave's prompts take."""
        self._wave_s = 0.0

    def close(self) -> None:
        """Release the prefix, and finish all sends; every rank of the chain calls this."""
        self.release()
        if self.forwarder is not None:
            self.forwarder.close()

    def release(self) -> None:
        """Release the prefix of earlier prompts; answers in progress keep the rows they need."""
        if self.shared is not None:
            self.shared.sequence.release()
        self.shared = None

    def _prefill_alone(self, row: Sequence[Plan], prefix: SequenceKV | None) -> list[Prefill]:
        """Prefill a packed row; prompts that are compressed or have a rolling cache run one by one."""
        session = self.session
        if session.rolling is not None:
            return [prefill_rolling(session.loaded, plan.prompt.ids, session.rolling, session.pool) for plan in row]
        retains = [session.retain_of(plan.prompt) for plan in row]
        rows = [row] if session.why_alone is None and not any(retains) else [[plan] for plan in row]
        prefills = [
            prefill
            for some, retain in zip(rows, retains, strict=False)
            for prefill in prefill_packed(
                session.loaded,
                [plan.prompt.ids for plan in some],
                reserve_tokens=[plan.prompt.new_tokens for plan in some],
                prefix=prefix,
                retain=retain,
                pool=session.pool,
                readings=session.readings_of([plan.prompt for plan in some]),
            )
        ]
        return [self._repeat(plan.prompt, prefill) for plan, prefill in zip(row, prefills, strict=True)]

    def _prefill_slice(self, plan: Plan, write: WriteLayer | None) -> Prefill:
        """Prefill this rank's slice; the last rank gets all keys and values, unless they are sharded."""
        session, reading = self.session, next(iter(self.session.readings_of([plan.prompt])), None)
        assert plan.partition is not None
        if session.spec.is_plain:
            run = partial(run_plain, session.loaded, plan.prompt.ids, reading)
            return prefill_alone(session.loaded, plan.prompt.tokens, run, strategy=PLAIN, is_read=reading is not None)
        prefill = prefill_kvr(
            session.loaded,
            plan.prompt.ids,
            plan.partition,
            self.chain,
            reserve_tokens=plan.prompt.new_tokens,
            prefix=plan.prefix,
            last=plan.decode_rank,
            forwarder=self.forwarder,
            spares_chain=True,
            keeps_all=plan.prompt.is_prefix
            or (session.spec.output.kv is True and not self.writes_own)
            or session.repeats,
            write_layer=write,
            is_sharded=self.is_sharded,
            keeps=session.spec.keeps_kv,
            retain=session.retain_of(plan.prompt),
            chunk_tokens=plan.chunk_tokens,
            pool=session.pool,
            reading=reading,
        )
        return self._repeat(plan.prompt, prefill)

    def _repeat(self, prompt: Prompt, prefill: Prefill) -> Prefill:
        """On the rank that decodes, drop what compression can only choose after the prefill."""
        compression, loaded = self.session.compression, self.session.loaded
        if not self.session.repeats or compression is None or not isinstance(prefill.cache, SequenceKV):
            return prefill
        began = time.perf_counter()
        found = attempt(partial(compression.repeat, prefill.cache, prompt.ids, prompt.text), loaded.tp_group)
        if isinstance(found, Failure):
            prefill.release()
            why = found.explain(
                f"to repeat the {prompt.tokens} tokens of its prompt, as {compression.settings.method} does"
            )
            return replace(prefill, cache=None, logits=None, error=why)
        wait_for_compute(loaded.device)
        prefill.seconds += time.perf_counter() - began
        return prefill

    def _prefill_after_stored(self, row: Sequence[Plan]) -> list[Prefill]:
        """Prefill questions about one document; every rank of the chain returns the same."""
        return prefill_packed(
            self.session.loaded,
            [plan.prompt.ids for plan in row],
            prefix=row[0].prefix,
            reserve_tokens=[plan.prompt.new_tokens for plan in row],
            gathering=Gathering(self.session.loaded, self.chain),
            last=row[0].decode_rank,
        )

    def _known_prefix_of(self, prompt: Prompt, tokens: int, decode_rank: int) -> SequenceKV | None:
        """Find the prefix of a prompt that the leader's plan uses."""
        if not tokens:
            return None
        ids, known = prompt.ids[:tokens], (self.prefix_of(prompt, decode_rank), *self.session.prefixes)
        found = next((one for one in known if one is not None and one.ids == ids), None)
        if found is None:
            raise AgreementError(
                f"rank {self.first_rank + self.chain.rank} has not computed the first {tokens} tokens of prompt "
                f"{prompt.key} of {prompt.document_id}, which the leader of its chain has"
            )
        return found


def absent_prefix(session: Session, prompt: Prompt) -> SequenceKV:
    """Return a prompt's shared prefix on a rank that holds none of its tokens."""
    tokens = prompt.shared_tokens
    return SequenceKV(session.loaded, session.pool, tokens, length=tokens, is_last=False, ids=prompt.ids[:tokens])


def shard_of(session: Session, prompt: Prompt, decode_rank: int, rank: int, size: int) -> SequenceKV:
    """Open a rank's shard of a stored document, over a chain of `size` ranks, without reading it."""
    stored = prompt.stored
    assert stored is not None, "it is stored"
    known, place = stored.tokens, Rotation.ending_at(size, decode_rank).place_of(rank)
    longest_question = max(len(frame.tail) for frame in session.prompt_config.questions.values())
    longest = known + longest_question + session.longest_answer
    bounds = share_out_stored(known, known, size).slices()[place]
    return stored.open(prompt.ids, session.loaded, session.pool, bounds=bounds, longest=longest)
