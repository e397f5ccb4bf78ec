"""Behind the attention of the last layer only the last token is read: nobody computes the others.

The model's code goes on with all tokens of the slice, since it asks its inputs for their shapes. So its rows are cut
where that cannot be noticed: a product with weights, or a norm, is given the last row alone, and a sum of one row and
many takes the last of the many. From the first such sum on everything has one row, be there experts, gates, scaled
residuals or a second norm; who asks for the shape it once had is given that row as often. Where a model's code notices
all the same, it raises; `strategies.check_chain` tries it beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvr_mpi.model.products import MULTIPLY

# What computes each row of its first argument from that row alone, if the second is a matrix of weights.
PRODUCTS = {torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, MULTIPLY}
NORMS = {torch.nn.functional.layer_norm, torch.nn.functional.rms_norm}
SUMS = {torch.add, torch.Tensor.add, torch.Tensor.add_}
SHAPES = {torch.Tensor.view, torch.Tensor.reshape}


class LastRow(TorchFunctionMode):
    """Keep only the last token of what is computed with hidden states (1, tokens, anything).

    Parameters
    ----------
    tokens : int
        Of the slice, or of its last chunk.
    slice_tokens : int, optional
        Then of the whole slice: so many are there again after the layer.
    """

    def __init__(self, tokens: int, slice_tokens: int | None = None) -> None:
        super().__init__()
        self._counts = {tokens, slice_tokens or tokens} - {1}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Cut what this function computes with, if it may be cut, and call it."""
        if func in PRODUCTS and len(args) > 1 and args[1].ndim == 2 and self._has_many(args[0]):
            args = (args[0][:, -1:], *args[1:])
        elif func in NORMS and self._has_many(args[0]):
            args = (args[0][:, -1:], *args[1:])
        elif func in SUMS and any(self._has(one, 1) for one in args):
            # What is added to in place keeps its rows: the model may go on with the very tensor.
            fixed = func is torch.Tensor.add_
            args = tuple(
                one[:, -1:] if self._has_many(one) and not (fixed and not at) else one for at, one in enumerate(args)
            )
        elif func in SHAPES and self._has(args[0], 1) and (asked := self._asked_for(args[0], args[1:])):
            return args[0].expand(-1, asked, -1).reshape(*args[1:])
        return func(*args, **(kwargs or {}))

    def _asked_for(self, row: torch.Tensor, shape: tuple[Any, ...]) -> int | None:
        """Say how many tokens a shape has that is asked of the row; None if it is the row's own."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if not all(isinstance(size, int) for size in sizes):  # seen as another type
            return None
        known = abs(math.prod(sizes))  # as many elements as are asked for, or without those of a size that is left open
        for count in self._counts:
            if known == count * row.numel() or (tuple(sizes[:2]) == (1, count) and -1 in sizes[2:]):
                return count
        return None

    def _has_many(self, tensor: Any) -> bool:
        return any(self._has(tensor, count) for count in self._counts)

    @staticmethod
    def _has(tensor: Any, tokens: int) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.ndim == 3 and tuple(tensor.shape[:2]) == (1, tokens)
