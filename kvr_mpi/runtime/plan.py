"""A prompt and the plan for it: the chain's leader makes the plan and sends both to the other ranks.

Messages are complete: the ranks that receive them read no documents and make no plans.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from kvr_mpi.compress.planned_drop import PlannedDrop
from kvr_mpi.documents.prompts import PromptText
from kvr_mpi.kv.arena import PAGE_ROWS
from kvr_mpi.kv.cache import WriteLayer
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.memory_budget import Footprint
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.registry import KVR, Strategy
from kvr_mpi.requests.prompt import Prompt
from kvr_mpi.runtime.slice_planner import SlicePlanner
from kvr_mpi.setup.job_setup import JobSetup
from kvr_mpi.topology import Rotation
from kvr_mpi.transport import Transport
from kvr_mpi.transport.forwarder import Forwarder

LENGTH_BYTES = 8


@dataclass(slots=True)
class Way(ABC):
    """A way in which a chain runs prompts, and the objects it needs.

    name : unique among a chain's ways.
    in_rows : prompts that continue the same prefix are collected, and run in one forward pass.
    takes_all : every rank of the chain runs the prompt; otherwise only its decode rank.
    free_bytes : memory that each rank can use for prompts.
    forwarder : sends segments for all prompts; None on a single rank.
    at : key of the prefix in memory that prompts continue; None: no prefix.
    """

    name: ClassVar[str]
    in_rows: ClassVar[bool] = False
    takes_all: ClassVar[bool] = False
    setup: JobSetup
    chain: Transport
    free_bytes: Sequence[int]
    slices: SlicePlanner
    forwarder: Forwarder | None
    at: Hashable = field(default=None, init=False)

    def beginning(self, plan: Plan) -> Hashable:
        """Return the key of the prefix that `begin` prepares and that several prompts may share; None without one."""
        return None

    def begin(self, plan: Plan) -> Prefill | None:
        """Compute or open the prefix of a prompt and of those that follow; all ranks of the chain call this.

        Returns
        -------
        Prefill or None
            What this rank has computed.
        """
        return None

    def leave(self) -> None:
        """Release the prefix; answers in progress keep the rows they need."""
        self.at = None

    @abstractmethod
    def check_fits(self, plan: Plan) -> None:
        """Refuse prompts that do not fit on an empty chain.

        Raises
        ------
        DocumentError
            Names the memory needed.
        """

    @abstractmethod
    def needs(self, plan: Plan) -> list[int]:
        """Bytes that each rank of the chain needs during prefill."""

    @abstractmethod
    def kept(self, plan: Plan) -> list[int]:
        """Bytes that each rank of the chain keeps until the answer is complete."""

    def writes_own(self, plan: Plan) -> bool:
        """Whether every rank stores its own slice, although the decode rank has all keys and values."""
        return False

    @abstractmethod
    def prefill(self, row: Sequence[Plan], write: WriteLayer | None = None) -> list[Prefill]:
        """Prefill prompts that continue the same prefix: several if the way is `in_rows`, else one.

        Parameters
        ----------
        write : callable, optional
            Stores the keys and values of this rank's slice, layer by layer, if ranks store their own.
        """

    @property
    def footprint(self) -> Footprint:
        """Predicts the memory of a prompt."""
        assert self.setup.footprint is not None, "memory is predicted"
        return self.setup.footprint

    def cache_bytes(self, plan: Plan) -> int:
        """Bytes of a prompt's cache on the decode rank, with room for the answer and without shared rows."""
        drop, own = planned_drop(self.setup, plan.prompt), self.own_bytes(plan)
        return own if drop is None else own - drop.kv_bytes

    def own_bytes(self, plan: Plan) -> int:
        """Bytes of a prompt's cache before compression, with room for the answer and without shared rows."""
        tokens, setup = plan.prompt.tokens + plan.prompt.new_tokens, self.setup
        if plan.before is None or setup.compression is not None or not setup.loaded.attends_in_parts:
            return setup.kv_bytes(tokens)
        shared = plan.before.prompt.tokens
        return setup.kv_bytes(tokens - (shared if setup.arena is None else shared // PAGE_ROWS * PAGE_ROWS))

    def on(self, rank: int, size: int) -> list[int]:
        """Return a list with the bytes on one rank of the chain, and 0 on the others."""
        return [size * (each == rank) for each in range(self.chain.size)]


def planned_drop(setup: JobSetup, prompt: PromptText, prefix: SharedPrefix | None = None) -> PlannedDrop | None:
    """Predict what compression drops from a prompt; None if nothing, or if the stored prompt is compressed already."""
    if setup.compression is None or (prefix is not None and prefix.heads is not None):
        return None
    drop, arena = setup.compression.planned_drop(setup.loaded, prompt.tokens, prompt.text), setup.arena
    if drop is None or arena is None:
        return drop
    return replace(drop, kv_bytes=max(0, drop.kv_bytes - arena.page_bytes))  # last pages are partly empty


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A prompt and how a chain runs it; the same on every rank.

    way : one of this chain's ways.
    prefix : prefix of the prompt that has been computed already.
    decode_rank : the rank of the chain that has the last slice, and so gets the logits and the cache.
    strategy, partition : how the prompt is cut; no partition if one rank prefills it.
    chunk_tokens : tokens per chunk of a slice; None: whole slices.
    before : plan of its first tokens, if they are prefilled separately to be shared with other prompts.
    """

    way: Way
    prompt: Prompt
    prefix: SharedPrefix | None
    decode_rank: int
    strategy: Strategy = KVR
    partition: Partition | None = None
    chunk_tokens: int | None = None
    before: Plan | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return plain values from which every rank reconstructs the plan."""
        return {
            "key": self.prompt.key,
            "ids_sha256": self.prompt.sha256,
            "way": self.way.name,
            "strategy": self.strategy.name,
            "bounds": None if self.partition is None else self.partition.bounds,
            "decode_rank": self.decode_rank,
            "chunk_tokens": self.chunk_tokens,
            "prefix_tokens": self.known_tokens,
            "before": None if self.before is None else self.before.to_wire(),
        }

    @property
    def known_tokens(self) -> int:
        """Number of first tokens whose keys and values exist already."""
        return self.prefix.tokens if self.prefix else 0

    @property
    def row_tokens(self) -> int:
        """Number of tokens that the prompt adds to a packed row."""
        return self.prompt.tokens - (self.known_tokens if self.before is None else self.before.prompt.tokens)

    @property
    def kept_bytes(self) -> list[int]:
        """Bytes that each rank of the chain keeps until the answer is complete."""
        return self.way.kept(self)

    @property
    def is_beginning(self) -> bool:
        """Whether this is the plan of a prefix that other prompts continue."""
        return self.prompt.shared_tokens == len(self.prompt.ids)

    def bounds_on(self, rank: int) -> tuple[int, int]:
        """Bounds of the slice on a rank of the chain; the first slice includes known tokens."""
        assert self.partition is not None
        place = Rotation.ending_at(self.partition.size, self.decode_rank).place_of(rank)
        return self.partition.slices()[place]

    def goes_with(self, other: Plan) -> bool:
        """Whether two prompts can share a packed row, since they continue the same prefix."""
        return self.prefix is other.prefix if self.prefix is None else self.prefix.is_same(other.prefix)


@dataclass(frozen=True, slots=True)
class EndPrefill:
    """Message that ends a wave's prefill; decoding follows.

    has_more : prompts or documents wait for the next wave.
    goes_on : there is a next wave, because of `has_more` or because answers to document parts are in progress.
    """

    has_more: bool
    goes_on: bool


Message = Plan | EndPrefill
# Reconstructs a prompt's plan from the result of `Plan.to_wire`, with this rank's objects.
ReadPlan = Callable[[Prompt, dict[str, Any]], Plan]


def share_message(members: Transport, message: Message | None, read_plan: ReadPlan) -> Message:
    """Broadcast the message of the leader, rank 0 of the chain.

    Raises
    ------
    AgreementError
        If a plan does not match its prompt.
    """
    data = b""
    if isinstance(message, Plan):
        prompt, ids = message.prompt.to_wire()
        data = _pack({"prompt": prompt, "plan": message.to_wire()}, ids)
    elif message is not None:
        data = _pack({"end": asdict(message)}, b"")
    data = members.broadcast(data)
    if message is not None:  # the leader has the objects themselves
        return message
    header_end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    header = json.loads(data[LENGTH_BYTES:header_end])
    if "end" in header:
        return EndPrefill(**header["end"])
    return read_plan(Prompt.from_wire(header["prompt"], data[header_end:]), header["plan"])


def _pack(header: dict[str, object], ids: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + ids
