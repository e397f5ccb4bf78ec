"""A prompt and the plan for it: the chain's leader makes the plan and sends both to the other ranks.

Messages are complete: the ranks that receive them read no documents and make no plans.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.partition import Partition
from kvr_mpi.runtime.prompt import Prompt
from kvr_mpi.topology import Rotation
from kvr_mpi.transport import Transport

LENGTH_BYTES = 8


class Way(Enum):
    """How a chain runs a prompt."""

    ALONE = "alone"  # the decode rank prefills it, packed with others if they are short
    CHAIN = "chain"  # every rank computes a slice
    AFTER_STORED = "after stored"  # every rank holds a shard of a stored document, and runs the tokens after it


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A prompt and how a chain runs it; the same on every rank, except for the memory.

    prefix : what this rank has of the prompt's first tokens, if they have been computed already.
    decode_rank : the rank of the chain that has the last slice, and so gets the logits and the cache.
    partition : how the prompt is cut; None if one rank prefills it.
    chunk_tokens : tokens per chunk of a slice; None: whole slices.
    needs : on the leader, bytes that each rank needs during prefill; None if memory is not predicted.
    rows : on the leader, bytes of `needs` that are keys and values in each rank's pool.
    kept : on the leader, bytes on each rank that keeps a part of the prompt until the answer is complete.
    """

    way: Way
    prompt: Prompt
    prefix: SequenceKV | None
    decode_rank: int
    partition: Partition | None = None
    chunk_tokens: int | None = None
    needs: Sequence[int] | None = None
    rows: Sequence[int] = ()
    kept: Mapping[int, int] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        """Return plain values from which every rank reconstructs the plan."""
        return {
            "key": self.prompt.key,
            "ids_sha256": self.prompt.sha256,
            "way": self.way.value,
            "bounds": None if self.partition is None else self.partition.bounds,
            "decode_rank": self.decode_rank,
            "chunk_tokens": self.chunk_tokens,
            "prefix_tokens": self.known_tokens,
        }

    @property
    def in_rows(self) -> bool:
        """Whether prompts that continue the same prefix are collected, and run in one forward pass."""
        return self.way is not Way.CHAIN and not self.prompt.is_prefix

    @property
    def takes_all(self) -> bool:
        """Whether every rank of the chain runs the prompt; otherwise only its decode rank."""
        return self.way in (Way.CHAIN, Way.AFTER_STORED)

    @property
    def known_tokens(self) -> int:
        """Number of first tokens whose keys and values exist already."""
        return self.prefix.length if self.prefix else 0

    @property
    def row_tokens(self) -> int:
        """Number of tokens that the prompt adds to a packed row."""
        return self.prompt.tokens - self.known_tokens

    def bounds_on(self, rank: int) -> tuple[int, int]:
        """Bounds of the slice on a rank of the chain; the first slice includes known tokens."""
        assert self.partition is not None
        place = Rotation.ending_at(self.partition.size, self.decode_rank).place_of(rank)
        return self.partition.slices()[place]


@dataclass(frozen=True, slots=True)
class EndPrefill:
    """Message that ends a wave's prefill; decoding follows.

    has_more : prompts or documents wait for the next wave.
    goes_on : there is a next wave, because of `has_more` or because answers to document parts are in progress.
    """

    has_more: bool
    goes_on: bool


ChainMessage = Plan | EndPrefill
# Reconstructs a prompt's plan from the result of `Plan.to_wire`, with this rank's objects.
ReadPlan = Callable[[Prompt, dict[str, Any]], Plan]


def share_message(members: Transport, message: ChainMessage | None, read_plan: ReadPlan) -> ChainMessage:
    """Broadcast the message of the leader, rank 0; raise `AgreementError` if a plan does not match its prompt."""
    header: dict[str, Any] = {}
    ids = b""
    if isinstance(message, Plan):
        prompt, ids = message.prompt.to_wire()
        header = {"prompt": prompt, "plan": message.to_wire()}
    elif message is not None:
        header = {"end": asdict(message)}
    text = json.dumps(header).encode()
    data = members.broadcast(b"" if message is None else len(text).to_bytes(LENGTH_BYTES, "little") + text + ids)
    if message is not None:  # the leader has the objects themselves
        return message
    header_end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    header = json.loads(data[LENGTH_BYTES:header_end])
    if "end" in header:
        return EndPrefill(**header["end"])
    return read_plan(Prompt.from_wire(header["prompt"], data[header_end:]), header["plan"])
