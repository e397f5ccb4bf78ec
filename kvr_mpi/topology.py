"""All rank arithmetic: chains and stages of a job, who shares a device, and who is before and after whom.

Ranks are numbered by MPI. A *stage* is the ranks that hold one copy of the model's weights among them; a
*chain* is stages that share prompts, next to each other; a job's chains lie side by side. Within a prompt a stage has a
*place*, that of its slice: places turn round the chain from prompt to prompt, so that each stage decodes its share.

Nobody else divides a rank by anything (``tests/test_layers.py`` looks).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvr_mpi.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Topology:
    """A job's ranks as chains of one length, side by side.

    Parameters
    ----------
    ranks : int
        Of the job.
    ranks_per_chain : int
        Those that are left over, if it does not divide the ranks, are in no chain.
    ranks_per_stage : int
        Divides `ranks_per_chain`.

    Raises
    ------
    ConfigError
        If it cannot be laid out so.
    """

    ranks: int
    ranks_per_chain: int
    ranks_per_stage: int = 1

    def __post_init__(self) -> None:
        """Refuse chains that cannot be."""
        if not 1 <= self.ranks_per_stage <= self.ranks_per_chain <= self.ranks:
            raise ConfigError(
                f"chains of {self.ranks_per_chain} rank(s) with stages of {self.ranks_per_stage}, on {self.ranks}: "
                f"expected 1 <= ranks of a stage <= ranks of a chain <= all ranks"
            )
        if self.ranks_per_chain % self.ranks_per_stage:
            raise ConfigError(
                f"chains of {self.ranks_per_chain} ranks cannot be divided into stages of {self.ranks_per_stage}"
            )

    @property
    def chains(self) -> int:
        """Number of whole chains."""
        return self.ranks // self.ranks_per_chain

    @property
    def stages(self) -> int:
        """Stages of a chain: a prompt has a slice for each."""
        return self.ranks_per_chain // self.ranks_per_stage

    def group_of(self, rank: int) -> int:
        """Tell which ranks a rank is grouped with: its chain, or those that are left over."""
        return rank // self.ranks_per_chain

    def chain_of(self, rank: int) -> int | None:
        """Tell which chain a rank is in; None if it is left over."""
        chain = self.group_of(rank)
        return chain if chain < self.chains else None

    def ranks_of(self, chain: int) -> slice:
        """Give the ranks of a chain, among all."""
        return slice(chain * self.ranks_per_chain, (chain + 1) * self.ranks_per_chain)

    def stage_number(self, rank: int) -> int:
        """Tell which stage a rank is in, of all chains one after the other."""
        return rank // self.ranks_per_stage

    @property
    def by_stage(self) -> Topology:
        """The stages of this one, as if each were a rank."""
        return Topology(self.ranks // self.ranks_per_stage, self.stages)

    def rank_in_stage(self, rank: int) -> int:
        """Tell which shard of the weights a rank holds."""
        return rank % self.ranks_per_chain % self.ranks_per_stage


@dataclass(frozen=True, slots=True)
class Rotation:
    """The places of a prompt's slices, turned round the ranks of a chain.

    first : the rank that has the first slice; the others follow.
    """

    size: int
    first: int = 0

    @classmethod
    def ending_at(cls, size: int, rank: int) -> Rotation:
        """Turn so that this rank has the last slice."""
        return cls.bringing(size, size - 1, rank)

    @classmethod
    def bringing(cls, size: int, place: int, rank: int) -> Rotation:
        """Turn so that this rank has this place."""
        return cls(size, (rank - place) % size)

    def rank_of(self, place: int) -> int:
        """Tell which rank has the slice at this place."""
        return (place + self.first) % self.size

    def place_of(self, rank: int) -> int:
        """Tell which slice a rank has."""
        return (rank - self.first) % self.size


@dataclass(frozen=True, slots=True)
class KVHeads:
    """The KV heads that a rank of a stage holds of every layer.

    first, last : the last not included.
    of : how many there are; if fewer than ranks, several ranks hold the same.
    """

    first: int
    last: int
    of: int

    @property
    def is_all(self) -> bool:
        """Whether the other ranks hold no others."""
        return self.last - self.first == self.of

    @property
    def is_even_share(self) -> bool:
        """Whether there are other heads, and they can be held by ranks with as many each."""
        each = self.last - self.first
        return each < self.of and not self.of % each and not self.first % each

    @property
    def shares(self) -> list[KVHeads]:
        """What the ranks of the stage hold, each head once, in order."""
        each = self.last - self.first
        return [KVHeads(first, first + each, self.of) for first in range(0, self.of, each)]


def share_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """First and last, not included, of a rank's share of what is divided evenly; the first ranks have one more."""
    each, left = divmod(count, size)
    first = rank * each + min(rank, left)
    return first, first + each + (rank < left)


def whole_stages(ranks: int, ranks_per_stage: int) -> int:
    """Count the stages that so many ranks make up."""
    return ranks // ranks_per_stage


def place_in_stage(rank: int, ranks_per_stage: int) -> tuple[int, int]:
    """Tell which stage a rank is in, of all one after the other, and which of its ranks it is."""
    return divmod(rank, ranks_per_stage)


def in_lane_of(rank: int, stage: int, ranks_per_stage: int) -> int:
    """Give the rank of a stage that has the same place there as another rank in its own: the same heads."""
    return stage * ranks_per_stage + rank % ranks_per_stage


def rank_name(rank: int, ranks_per_stage: int) -> str:
    """Name a rank, where a stage is several with its stage and its place there."""
    stage, place = place_in_stage(rank, ranks_per_stage)
    return f"rank {rank}" if ranks_per_stage == 1 else f"rank {rank} (stage {stage}.{place})"


def first_of_each(items: Sequence[T], stages: int) -> list[T]:
    """Of what there is one for each rank of some stages, keep that of each stage's first rank."""
    return list(items[:: len(items) // stages])


def least_of_each(items: Sequence[int], stages: int) -> list[int]:
    """Of what there is one for each rank of some stages, keep the least of each stage."""
    size = len(items) // stages
    return [min(items[first : first + size]) for first in range(0, len(items), size)]


def divides(ranks_per_chain: int, ranks: int) -> bool:
    """Whether chains of this length leave no rank over."""
    return ranks % ranks_per_chain == 0


def sends_first(rank: int) -> bool:
    """Divide ranks so that no two neighbours are alike."""
    return rank % 2 == 0


def following(rank: int, size: int) -> int:
    """Give the next rank of a ring."""
    return (rank + 1) % size


def preceding(rank: int, size: int) -> int:
    """Give the rank before, in a ring."""
    return (rank - 1) % size


def others_after(rank: int, size: int) -> Iterator[int]:
    """Yield all other ranks of a ring, the next one first."""
    return ((rank + step) % size for step in range(1, size))


def others_before(rank: int, size: int) -> Iterator[int]:
    """Yield all other ranks of a ring, the one before first."""
    return ((rank - step) % size for step in range(1, size))


def device_index(local_rank: int, devices: int) -> int:
    """Choose the device of a host for one of its ranks: in turn."""
    return local_rank % devices


def share_of_cores(cores: Sequence[int], local_rank: int, local_size: int) -> list[int]:
    """Give a rank its part of a host's cores; where there are too few, one that it shares."""
    each = len(cores) // local_size
    first = local_rank * each if each else local_rank % len(cores)
    return list(cores[first : first + max(1, each)])


def cores_per_rank(cores: int, local_size: int) -> int:
    """Share the cores of a host among its ranks; each has one at least."""
    return max(1, cores // local_size)
