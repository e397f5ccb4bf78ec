"""Placement of a layer's heads on ranks so that all ranks have equal load (FairKV).

A *piece* is a head on a rank, with its share of the head's work: each copy of a head decodes other rows of the batch.
FairKV splits a copied head evenly; splitting in proportion balances better (McNaughton's wrap-around rule). FairKV's
objective (eq. 4) is the largest load of a rank over all layers together. But every layer ends in an all-reduce, so the
time of a step is the sum of all layers' largest loads. The largest load is therefore minimised layer by layer; then
ranks are renamed within each layer to balance their total memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]
# The rank of each (document, KV head) of a layer.
Owners = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeadPiece:
    """A head on a rank; `load` is this piece's part of the head's load."""

    head: int
    rank: int
    load: float


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """The placement of a layer's heads."""

    ranks: int
    pieces: tuple[HeadPiece, ...]

    @property
    def loads(self) -> Loads:
        found = np.zeros(self.ranks)
        for piece in self.pieces:
            found[piece.rank] += piece.load
        return found

    @property
    def heaviest(self) -> float:
        return float(self.loads.max())

    @property
    def copies(self) -> int:
        """Number of pieces in addition to one per head."""
        return len(self.pieces) - len({piece.head for piece in self.pieces})


def place_statically(loads: Sequence[float], ranks: int) -> LayerPlacement:
    """Give each rank the same number of heads, in order, as tensor parallelism does (SHA).

    If the heads do not divide evenly, the first ranks have one more; with fewer heads than ranks, the last have none.
    """
    parts = np.array_split(np.arange(len(loads)), ranks)
    pieces = (HeadPiece(head, rank, float(loads[head])) for rank, part in enumerate(parts) for head in part.tolist())
    return LayerPlacement(ranks, tuple(pieces))


def place_best_effort(loads: Sequence[float], ranks: int) -> LayerPlacement:
    """Place whole heads, the heaviest first, on the least loaded rank (LPT)."""
    return _lpt(split_evenly(loads, [1] * len(loads)), ranks)


def place_with_equal_copies(loads: Sequence[float], ranks: int, copies: int) -> LayerPlacement:
    """Copy heads, and split each evenly over its copies (fair-copying, sections 4.1 to 4.3).

    Copies are added one by one, each of the head with the heaviest pieces, up to `copies` in addition to one piece per
    head (CH).
    """
    counts = [1] * len(loads)
    best = place_best_effort(loads, ranks)
    for _ in range(copies):
        open_heads = [head for head, count in enumerate(counts) if count < ranks]
        if not open_heads:
            break
        counts[max(open_heads, key=lambda head: loads[head] / counts[head])] += 1
        best = min(best, _lpt(split_evenly(loads, counts), ranks), key=lambda one: one.heaviest)
    return best


def place_in_proportion(loads: Sequence[float], ranks: int) -> LayerPlacement:
    """Copy heads, and split each in any proportion: whole heads where they fit, the rest spills over.

    With at most ``ranks - 1`` copies, all ranks have the same load (McNaughton).
    """
    found = spill_over(loads, ranks, ranks - 1, float(sum(loads)) / ranks * (1 + 1e-9))
    assert found is not None, "each copy fills a rank"
    return min(place_with_equal_copies(loads, ranks, ranks - 1), found, key=lambda one: one.heaviest)


def place_layers(
    loads: Loads, ranks: int, place: Callable[[Sequence[float], int], LayerPlacement]
) -> list[LayerPlacement]:
    """Place every layer of loads (layers, kv_heads) by itself; rename ranks so that their total memory is balanced.

    `place` places one layer, such as `place_best_effort`.
    """
    totals, placed = np.zeros(ranks), []
    for layer in loads:
        found = place([float(load) for load in layer], ranks)
        # The rank with the largest load in this layer becomes the one with the smallest load so far.
        names = [0] * ranks
        for mine, name in zip(np.argsort(-found.loads, kind="stable"), np.argsort(totals, kind="stable"), strict=True):
            names[int(mine)] = int(name)
        found = LayerPlacement(ranks, tuple(replace(piece, rank=names[piece.rank]) for piece in found.pieces))
        totals += found.loads
        placed.append(found)
    return placed


def sync_efficiency(placed: Sequence[LayerPlacement]) -> float:
    """Fraction of time that ranks attend if every layer ends in an all-reduce: sum of means over sum of maxima."""
    loads = np.stack([layer.loads for layer in placed])
    return float(loads.mean(1).sum() / loads.max(1).sum())


def split_evenly(loads: Sequence[float], counts: Sequence[int]) -> list[tuple[float, int]]:
    """Split each head into its count of equal pieces; return (load, head), the heaviest first."""
    pieces = [(load / count, head) for head, (load, count) in enumerate(zip(loads, counts, strict=True))]
    return sorted((piece for piece, count in zip(pieces, counts, strict=True) for _ in range(count)), reverse=True)


def _lpt(items: Sequence[tuple[float, int]], ranks: int) -> LayerPlacement:
    """Place pieces on the least loaded rank, no two of the same head on one rank."""
    loads, heads = [0.0] * ranks, [set[int]() for _ in range(ranks)]
    pieces = []
    for load, head in items:
        rank = min((rank for rank in range(ranks) if head not in heads[rank]), key=loads.__getitem__)
        loads[rank] += load
        heads[rank].add(head)
        pieces.append(HeadPiece(head, rank, load))
    return LayerPlacement(ranks, tuple(pieces))


def spill_over(loads: Sequence[float], ranks: int, copies: int, limit: float) -> LayerPlacement | None:
    """Place heads so that no rank exceeds `limit`; None if that takes too many copies.

    Each head, the largest first, goes to the fullest rank with room for it. If there is none, the head fills up the
    emptiest rank, and its rest is placed in the same way.
    """
    room, pieces, left = [limit] * ranks, [], copies
    tiny = 1e-9 * limit
    for head in sorted(range(len(loads)), key=lambda head: -loads[head]):
        rest, used = float(loads[head]), set[int]()
        while rest > tiny or not used:
            open_ranks = [rank for rank in range(ranks) if rank not in used and (room[rank] > tiny or rest <= tiny)]
            if not open_ranks:
                return None
            fitting = [rank for rank in open_ranks if room[rank] >= rest - tiny]
            rank = min(fitting, key=room.__getitem__) if fitting else max(open_ranks, key=room.__getitem__)
            part = min(rest, room[rank]) if room[rank] < rest - tiny else rest
            room[rank] -= part
            rest -= part
            used.add(rank)
            pieces.append(HeadPiece(head, rank, part))
        left -= len(used) - 1
        if left < 0:
            return None
    return LayerPlacement(ranks, tuple(pieces))


def assign_rows(placed: LayerPlacement, counts: npt.NDArray[np.int64]) -> Owners:
    """Assign the documents of each head to its pieces: the largest first, to the piece that lacks the most load.

    Documents are not split, so pieces get only approximately their loads. Returns the rank of each (documents,
    kv_heads).

    placed : of one layer, by loads in proportion to the sums of `counts` over documents.
    counts : keys that each document's heads keep, (documents, kv_heads).
    """
    owners = np.zeros_like(counts)
    for head in range(counts.shape[1]):
        pieces = [piece for piece in placed.pieces if piece.head == head]
        whole = sum(piece.load for piece in pieces) or 1.0
        missing = [piece.load / whole * counts[:, head].sum() for piece in pieces]
        for document in np.argsort(-counts[:, head], kind="stable"):
            at = int(np.argmax(missing))
            owners[document, head] = pieces[at].rank
            missing[at] -= counts[document, head]
    return owners
