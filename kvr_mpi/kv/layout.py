"""Where a layer's keys and values lie in its buffer.

While a prompt is prefilled they lie by token: (tokens, elements of K and V of all heads), so that a stretch of tokens
is contiguous. It is received in place, attended to as a view, and sent on without packing. To decode from, on a CPU,
they lie by head: each head's keys together, then its values.
"""

from __future__ import annotations

import torch

from kvr_mpi.model import LayerShape


class UniformLayout:
    """All heads hold the same tokens.

    Parameters
    ----------
    buffer : torch.Tensor
        (capacity, elements of K and V of all heads).
    shape : LayerShape
    """

    def __init__(self, buffer: torch.Tensor, shape: LayerShape) -> None:
        self.buffer, self._shape = buffer, shape
        self._by_heads = False

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a range of tokens, as views (1, kv_heads, tokens, head_dim)."""
        shape, heads = self._shape, self._shape.num_kv_heads
        if self._by_heads:
            flat, cut = self.buffer.view(-1), self.buffer.shape[0] * shape.key_elements
            keys = flat[:cut].view(1, heads, -1, shape.key_dim)
            values = flat[cut:].view(1, heads, -1, shape.value_dim)
            return keys[:, :, first:last], values[:, :, first:last]
        rows, cut = self.buffer[first:last], shape.key_elements
        keys = rows[:, :cut].view(1, -1, heads, shape.key_dim)
        values = rows[:, cut:].view(1, -1, heads, shape.value_dim)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put in keys and values (1, kv_heads, tokens, head_dim) from a token on."""
        own_keys, own_values = self.rows(first, first + keys.shape[2])
        own_keys.copy_(keys)
        own_values.copy_(values)

    def lay_by_heads(self, tokens: int) -> None:
        """Put each head's first tokens together, in place: a CPU attends to them from one token twice as fast."""
        if self._by_heads:
            return
        old = [rows.clone(memory_format=torch.contiguous_format) for rows in self.rows(0, tokens)]
        self._by_heads = True
        self.write(0, *old)
