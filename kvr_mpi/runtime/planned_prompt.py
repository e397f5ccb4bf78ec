"""A prompt and how a chain runs it: decided by the chain's leader, and sent to its other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvr_mpi.documents.prompts import Prompt
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.registry import Strategy
from kvr_mpi.topology import Rotation


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt and how a chain runs it: the same on every rank.

    prefix : what it begins with, if that has been computed already.
    decode_rank : the rank of the chain that has the last slice, and ends with logits and cache.
    partition : its slices; None if one rank prefills it, packed with others.
    new_tokens : most of its answer.
    shared_tokens : its first ones that are prefilled by themselves, for other prompts too; what is planned is that.
    chunk_tokens : slices are computed in chunks of so many; None: at once.
    """

    prompt: Prompt
    prefix: SharedPrefix | None
    decode_rank: int
    strategy: Strategy
    partition: Partition | None
    new_tokens: int
    shared_tokens: int = 0
    chunk_tokens: int | None = None

    def to_wire(self, key: str) -> dict[str, Any]:
        """Return plain values, from which every rank makes the same plan of the prompt with this key."""
        return {
            "key": key,
            "ids_sha256": self.prompt.sha256,
            "strategy": self.strategy.name,
            "bounds": None if self.partition is None else self.partition.bounds,
            "decode_rank": self.decode_rank,
            "shared_tokens": self.shared_tokens,
            "chunk_tokens": self.chunk_tokens,
            "prefix_tokens": self.known_tokens,
        }

    @property
    def known_tokens(self) -> int:
        """Its first tokens, which nobody computes."""
        return self.prefix.tokens if self.prefix else 0

    @property
    def row_tokens(self) -> int:
        """What it takes of a packed row."""
        return self.prompt.tokens - max(self.known_tokens, self.shared_tokens)

    def has_slices(self, size: int) -> bool:
        """Whether each rank of a chain of so many computes one slice of it; a zigzag ring's compute two."""
        return self.partition is not None and not self.shared_tokens and 1 < size == self.partition.size

    def bounds_on(self, rank: int) -> tuple[int, int]:
        """Tokens of the slice that a rank of the chain has, where each has one; what is known is in the first."""
        assert self.partition is not None
        place = Rotation.bringing(self.partition.size, self.partition.size - 1, self.decode_rank).place_of(rank)
        return self.partition.start(place), self.partition.stop(place)

    def goes_with(self, other: PlannedPrompt) -> bool:
        """Whether they go on from the same, in one packed row."""
        is_same = self.prefix is other.prefix if self.prefix is None else self.prefix.is_same(other.prefix)
        return is_same and self.shared_ids == other.shared_ids

    @property
    def shared_ids(self) -> tuple[int, ...]:
        """What is prefilled by itself."""
        return self.prompt.ids[: self.shared_tokens]
