"""A layer's pieces (`layer_pieces`) as CUDA graphs of one size: a chunk is two launches a layer, and its attention.

A graph reads and writes the same memory whenever it is launched, so what a piece is given is copied there first. All
layers that are alike use the same: one of them computes at a time, and what comes of a piece is read before the next is
launched. Weights are read where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvr_mpi.model.graph_capture import Capture, Compute, Replay
from kvr_mpi.model.layer_pieces import LayerInputs, Piece, weights_of


class PieceMemory:
    """What the pieces of layers that are alike are given, and what comes of them.

    Parameters
    ----------
    layer : Module
        One of them.
    full : LayerInputs
        What its model gives it for as many tokens as the pieces are made for.
    """

    def __init__(self, layer: torch.nn.Module, full: LayerInputs) -> None:
        self.given = [each.clone(memory_format=torch.contiguous_format) for each in (full.hidden, *full.tensors)]
        made = Piece(layer, full, is_after=False)(*weights_of(layer).values(), *self.given)
        self.made = [torch.zeros_like(each, memory_format=torch.contiguous_format) for each in made]
        query, _, values = self.made
        _, heads, tokens, _ = query.shape
        self.attended = query.new_zeros(1, tokens, heads, values.shape[3])
        self.out = torch.zeros_like(self.given[0])

    def put(self, given: Sequence[torch.Tensor]) -> None:
        """Copy in what a piece is given.

        Raises
        ------
        ValueError
            If it is another number of tensors, or one of another shape, which a copy might spread.
        """
        for place, each in zip(self.given, given, strict=True):
            if place.shape != each.shape:
                raise ValueError(f"a piece captured for {list(place.shape)} is given {list(each.shape)}")
            place.copy_(each)


class CapturedPiece:
    """One piece of a layer, captured: called as a compiled one is.

    Parameters
    ----------
    layer : Module
    full : LayerInputs
    memory : PieceMemory
        Of all layers that are alike.
    capture : Capture
    is_after : bool
        As of `Piece`.

    Raises
    ------
    RuntimeError
        If the layer's code cannot be captured: it waits for the GPU, or there is no memory for it.
    """

    def __init__(
        self, layer: torch.nn.Module, full: LayerInputs, memory: PieceMemory, capture: Capture, *, is_after: bool
    ) -> None:
        piece, self._memory, self._is_after = Piece(layer, full, is_after=is_after), memory, is_after
        self._weights = list(weights_of(layer).values())
        compute = self._after(piece) if is_after else self._before(piece)
        self._replay: Replay
        self._replay, _ = capture(compute)

    def __call__(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compute what a piece does, from its weights and what else it is given; read it before the next piece runs.

        Raises
        ------
        ValueError
            If it is not what the piece was captured with.
        """
        weights, given = tensors[: len(self._weights)], tensors[len(self._weights) :]
        if any(one is not other for one, other in zip(weights, self._weights, strict=True)):
            raise ValueError("the weights of a captured layer were replaced by others")
        if self._is_after:
            self._memory.attended.copy_(given.pop(1))
        self._memory.put(given)
        self._replay()
        return [self._memory.out] if self._is_after else self._memory.made

    def _before(self, piece: Piece) -> Compute:
        def compute() -> torch.Tensor:
            made = piece(*self._weights, *self._memory.given)
            for place, each in zip(self._memory.made, made, strict=True):
                place.copy_(each)
            return self._memory.made[0]

        return compute

    def _after(self, piece: Piece) -> Compute:
        def compute() -> torch.Tensor:
            hidden, *rest = self._memory.given
            (made,) = piece(*self._weights, hidden, self._memory.attended, *rest)
            return self._memory.out.copy_(made)

        return compute
