"""A layer's keys and values while a prompt is prefilled: by token.

(tokens, elements of K and V of all heads), so that a stretch of tokens is contiguous. It is received in place, attended
to as a view, and sent on without packing. What decoding reads is a ``head_store``. Of tokens that other prompts begin
with, too, only views are held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvr_mpi.kv.arena import Extent
from kvr_mpi.model import LayerShape

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """Rows of all heads at a range of positions, which several prompts hold.

    first : position of the first token.
    keys, values : views (heads, tokens, dim).
    extent, row, stride : the pages they lie in, the row there of the first head's first token, and how many rows are
        from one head to the next; None: memory of their own.
    owner : the `head_store.HeadStore` they are of.
    """

    first: int
    keys: torch.Tensor
    values: torch.Tensor
    extent: Extent | None = None
    row: int = 0
    stride: int = 0
    owner: Any = None

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.first + self.keys.shape[1]

    def cut(self, first: int, last: int) -> Pair:
        """Keys and values of a range of positions, as views (1, heads, tokens, dim)."""
        rows = slice(first - self.first, last - self.first)
        return self.keys[None, :, rows], self.values[None, :, rows]

    def up_to(self, stop: int) -> SharedRows:
        """Give those before a position."""
        rows = slice(stop - self.first)
        return replace(self, keys=self.keys[:, rows], values=self.values[:, rows])


def cut_pieces(rows: Iterable[SharedRows], first: int, last: int) -> list[Pair]:
    """Keys and values of a range of positions, as views (1, heads, tokens, dim), of all that hold some of it."""
    held = [each for each in rows if first < each.stop and each.first < last]
    return [each.cut(max(first, each.first), min(last, each.stop)) for each in held]


def joined(pieces: Sequence[Pair]) -> Pair:
    """Put pieces of keys and values (1, heads, tokens, dim), at least one, together; a single one as it is."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([keys for keys, _ in pieces], 2), torch.cat([values for _, values in pieces], 2)


class Slab:
    """All heads hold the same tokens.

    Parameters
    ----------
    buffer : torch.Tensor
        (capacity, elements of K and V of all heads).
    shape : LayerShape
    start : int
        Position of the first row; the tokens before it are `shared`.

    Attributes
    ----------
    shared : sequence of SharedRows
        One after the other.
    """

    def __init__(self, buffer: torch.Tensor, shape: LayerShape, start: int = 0) -> None:
        self.buffer, self._shape, self.start = buffer, shape, start
        self.shared: Sequence[SharedRows] = ()

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.buffer.nbytes

    def own_rows(self, first: int, last: int) -> Pair:
        """Keys and values of rows of the buffer, as views (1, kv_heads, tokens, head_dim)."""
        shape, heads = self._shape, self._shape.num_kv_heads
        rows, cut = self.buffer[first:last], shape.key_elements
        keys = rows[:, :cut].view(1, -1, heads, shape.key_dim)
        values = rows[:, cut:].view(1, -1, heads, shape.value_dim)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def pieces(self, first: int, last: int) -> list[Pair]:
        """Keys and values of a range of tokens, as views (1, kv_heads, tokens, head_dim), in order."""
        start = self.start
        before = cut_pieces(self.shared, first, last)
        return [*before, self.own_rows(max(first, start) - start, last - start)] if last > start else before

    def rows(self, first: int, last: int) -> Pair:
        """Keys and values of a range of tokens (1, kv_heads, tokens, head_dim); views if in one piece."""
        return joined(self.pieces(first, last))

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put in keys and values (1, kv_heads, tokens, head_dim) from a token on."""
        own_keys, own_values = self.own_rows(first - self.start, first - self.start + keys.shape[2])
        own_keys.copy_(keys)
        own_values.copy_(values)
