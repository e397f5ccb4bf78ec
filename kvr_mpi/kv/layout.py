"""A layer's keys and values while a prompt is prefilled: by token.

(tokens, elements of K and V of all heads), so that a stretch of tokens is contiguous. It is received in place, attended
to as a view, and sent on without packing. What decoding reads is a ``head_store``.
"""

from __future__ import annotations

import torch

from kvr_mpi.model import LayerShape


class Slab:
    """All heads hold the same tokens.

    Parameters
    ----------
    buffer : torch.Tensor
        (capacity, elements of K and V of all heads).
    shape : LayerShape
    """

    def __init__(self, buffer: torch.Tensor, shape: LayerShape) -> None:
        self.buffer, self._shape = buffer, shape

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.buffer.nbytes

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a range of tokens, as views (1, kv_heads, tokens, head_dim)."""
        shape, heads = self._shape, self._shape.num_kv_heads
        rows, cut = self.buffer[first:last], shape.key_elements
        keys = rows[:, :cut].view(1, -1, heads, shape.key_dim)
        values = rows[:, cut:].view(1, -1, heads, shape.value_dim)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put in keys and values (1, kv_heads, tokens, head_dim) from a token on."""
        own_keys, own_values = self.rows(first, first + keys.shape[2])
        own_keys.copy_(keys)
        own_values.copy_(values)
