"""All rank arithmetic: chains, tensor-parallel groups, shared devices and neighbors.

Ranks are MPI ranks. A *tensor-parallel group* consists of adjacent ranks that together hold one copy of the model's
weights. A *chain* consists of adjacent groups that share prompts; a job has one or several adjacent chains. For each
prompt a group has a *place*, the index of its slice. Places rotate over the chain from prompt to prompt, so that each
group decodes its share.

No other module does rank arithmetic (checked by ``tests/test_layers.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvr_mpi.errors import ConfigError, counted

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Topology:
    """A job's ranks as chains of equal length; raises `ConfigError` if such a layout is impossible.

    ranks : of the job.
    ranks_per_chain : if it does not divide the ranks, the last ranks are in no chain.
    tensor_parallel : ranks of a group; divides `ranks_per_chain`.
    """

    ranks: int
    ranks_per_chain: int
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        """Refuse impossible chains."""
        if not 1 <= self.tensor_parallel <= self.ranks_per_chain <= self.ranks:
            raise ConfigError(
                f"chains of {counted(self.ranks_per_chain, 'rank')} with tensor-parallel groups of "
                f"{self.tensor_parallel}, on {self.ranks}: expected 1 <= tensor_parallel <= ranks of a chain <= all "
                f"ranks"
            )
        if self.ranks_per_chain % self.tensor_parallel:
            raise ConfigError(
                f"chains of {self.ranks_per_chain} ranks cannot be divided into tensor-parallel groups of "
                f"{self.tensor_parallel}"
            )

    @property
    def chains(self) -> int:
        return self.ranks // self.ranks_per_chain

    @property
    def groups(self) -> int:
        """Tensor-parallel groups per chain; a prompt has one slice for each."""
        return self.ranks_per_chain // self.tensor_parallel

    def chain_color(self, rank: int) -> int:
        """Return the index of a rank's chain; for leftover ranks, the number of chains."""
        return rank // self.ranks_per_chain

    def chain_of(self, rank: int) -> int | None:
        """Return the index of a rank's chain; None for leftover ranks."""
        chain = self.chain_color(rank)
        return chain if chain < self.chains else None

    def ranks_of(self, chain: int) -> slice:
        return slice(chain * self.ranks_per_chain, (chain + 1) * self.ranks_per_chain)

    @property
    def by_group(self) -> Topology:
        """The topology in which each group counts as one rank."""
        return Topology(self.ranks // self.tensor_parallel, self.groups)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Assigns the slices of a prompt to the ranks of a chain, in rotated order.

    first : the rank that has the first slice; the next slices go to the next ranks.
    """

    size: int
    first: int = 0

    @classmethod
    def ending_at(cls, size: int, rank: int) -> Rotation:
        """Rotate so that `rank` has the last slice."""
        return cls(size, (rank + 1) % size)

    def rank_of(self, place: int) -> int:
        """Return the rank that has slice `place`."""
        return (place + self.first) % self.size

    def place_of(self, rank: int) -> int:
        """Return the index of a rank's slice."""
        return (rank - self.first) % self.size


@dataclass(frozen=True, slots=True)
class KVHeads:
    """The KV heads that a rank of a tensor-parallel group holds in every layer.

    first, last : range of heads; the last is exclusive.
    of : number of all KV heads; if there are fewer than ranks, several ranks hold the same head.
    """

    first: int
    last: int
    of: int

    @property
    def is_all(self) -> bool:
        return self.last - self.first == self.of

    @property
    def is_even_share(self) -> bool:
        """Whether these are one of several equal shares of all KV heads."""
        each = self.last - self.first
        return each < self.of and not self.of % each and not self.first % each

    @property
    def shares(self) -> list[KVHeads]:
        """Return the distinct shares of the group's ranks, in order; together they have each head once."""
        each = self.last - self.first
        return [KVHeads(first, first + each, self.of) for first in range(0, self.of, each)]


def even_share(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range of a rank's share in an even division; the first ranks get one more."""
    each, left = divmod(count, size)
    first = rank * each + min(rank, left)
    return first, first + each + (rank < left)


def whole_groups(ranks: int, tensor_parallel: int) -> int:
    """Return the number of complete groups among `ranks`."""
    return ranks // tensor_parallel


def place_in_group(rank: int, tensor_parallel: int) -> tuple[int, int]:
    """Return the index of a rank's group, and the rank's index in it, which selects its part of the weights."""
    return divmod(rank, tensor_parallel)


def in_lane_of(rank: int, group: int, tensor_parallel: int) -> int:
    """Return the rank that has the same index in another group."""
    return group * tensor_parallel + rank % tensor_parallel


def rank_name(rank: int, tensor_parallel: int) -> str:
    """Name a rank; in a tensor-parallel group by its group and its index there."""
    group, place = place_in_group(rank, tensor_parallel)
    return f"rank {rank}" if tensor_parallel == 1 else f"rank {rank} (group {group}.{place})"


def first_of_each(items: Sequence[T], groups: int) -> list[T]:
    """Given one item per rank, return those of each group's first rank."""
    return list(items[:: len(items) // groups])


def least_of_each(items: Sequence[int], groups: int) -> list[int]:
    """Given one value per rank, return the minimum of each group."""
    size = len(items) // groups
    return [min(items[first : first + size]) for first in range(0, len(items), size)]


def divides(ranks_per_chain: int, ranks: int) -> bool:
    """Whether chains of this length use all ranks."""
    return ranks % ranks_per_chain == 0


def sends_first(rank: int) -> bool:
    """Whether a rank sends before it receives; alternates between neighbors."""
    return rank % 2 == 0


def following(rank: int, size: int) -> int:
    """Return the next rank of a ring."""
    return (rank + 1) % size


def preceding(rank: int, size: int) -> int:
    """Return the previous rank of a ring."""
    return (rank - 1) % size


def others_after(rank: int, size: int) -> Iterator[int]:
    """Yield all other ranks of a ring, the next one first."""
    return ((rank + step) % size for step in range(1, size))


def others_before(rank: int, size: int) -> Iterator[int]:
    """Yield all other ranks of a ring, the previous one first."""
    return ((rank - step) % size for step in range(1, size))


def gpus_in_turn(visible: Sequence[Sequence[str]]) -> list[int]:
    """Choose a GPU for each rank among those it sees; ranks share a GPU only if there are too few.

    Ranks may see different GPUs of a host, each numbered from 0 (``--gpu-bind``), so GPUs are compared by id.
    `visible` has the ids that each rank sees; the result is each rank's index among them, 0 if it sees none.
    """
    users: dict[str, int] = {}
    found = []
    for seen in visible:
        number = min(range(len(seen)), key=lambda each: users.get(seen[each], 0), default=0)  # noqa: B023 - at once
        if seen:
            users[seen[number]] = users.get(seen[number], 0) + 1
        found.append(number)
    return found


def share_of_cores(cores: Sequence[int], local_rank: int, local_size: int) -> list[int]:
    """Return a rank's share of a host's cores; if there are fewer cores than ranks, ranks share cores."""
    each = len(cores) // local_size
    first = local_rank * each if each else local_rank % len(cores)
    return list(cores[first : first + max(1, each)])


def cores_per_rank(cores: int, local_size: int) -> int:
    """Return the number of cores per rank on a host, at least one."""
    return max(1, cores // local_size)
