"""Layers with recurrent states instead of keys and values (Mamba, gated delta rule, short convolutions).

transformers' layers read states with ``get_conv_state`` and ``get_recurrent_state`` and store new ones with
``update_*``; for a single token, they update the state in place without calling these methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers.cache_utils import LinearAttentionLayer

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.layer import RowLayer
from kvr_mpi.kv.sequence import States
from kvr_mpi.model import LayerShape, StateShape

# Alignment of each state in a message, which views of another dtype require.
ALIGNMENT_BYTES = 64


class StateLayer(LinearAttentionLayer, RowLayer):
    """The states of one layer of a sequence (`held`), and its keys and values if it has attention, too."""

    def __init__(self, cache: Any, layer_idx: int, shape: LayerShape) -> None:
        self.held: Any = {}
        LinearAttentionLayer.__init__(self, number_of_states=1 + max(state.index for state in shape.states))
        RowLayer.__init__(self, cache, layer_idx, shape)
        self.dtype, self.device = cache.dtype, cache.device

    # transformers reads and sets these two.

    @property
    def conv_states(self) -> dict[int, torch.Tensor | None]:
        """Convolution states by index (1, channels, kernel size)."""
        self.enter()
        return cast("dict[int, torch.Tensor | None]", self.held["conv"])

    @conv_states.setter
    def conv_states(self, states: dict[int, torch.Tensor | None]) -> None:
        self.held["conv"] = states

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        """Recurrent states by index, in the model's own shape."""
        self.enter()
        return cast("dict[int, torch.Tensor | None]", self.held["recurrent"])

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, torch.Tensor | None]) -> None:
        self.held["recurrent"] = states

    def enter(self) -> None:
        """Begin the layer."""

    def expect(self) -> None:
        """Mark earlier states as present, which models ask in advance."""
        for idx in range(self.number_of_states):
            self.has_previous_state[idx] = True

    def set_states(self, states: States) -> None:
        """Go on from these states, in place."""
        self.expect()
        self.held = states
        for state in self.shape.states:
            if state.kind == "conv":
                self.conv_kernel_size[state.index] = state.shape[-1]
                self.is_conv_states_initialized[state.index] = True
            else:
                self.is_recurrent_states_initialized[state.index] = True

    @property
    def state_bytes(self) -> int:
        """Size of a message with all states, in bytes."""
        return sum(self._sizes())

    def pack(self, message: torch.Tensor) -> None:
        """Write all states into a message of zeros (bytes,)."""
        for state, into in self._views(message):
            held = self.held[state.kind].get(state.index)
            if held is None or held.shape != into.shape or held.dtype != into.dtype:
                found = "none" if held is None else f"{tuple(held.shape)} {held.dtype}"
                raise ModelError(
                    f"layer {self.layer_idx}: a {state.kind} state of {tuple(into.shape)} {into.dtype} was "
                    f"expected, but there is {found}"
                )
            into.copy_(held)

    def unpack(self, message: torch.Tensor) -> States:
        """View a message as states."""
        found: States = {kind: dict.fromkeys(range(self.number_of_states)) for kind in ("conv", "recurrent")}
        for state, view in self._views(message):
            found[state.kind][state.index] = view
        return found

    def _sizes(self) -> list[int]:
        """Bytes of each state in a message, aligned."""
        sizes = (math.prod(state.shape) * (state.dtype or self.cache.dtype).itemsize for state in self.shape.states)
        return [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]

    def _views(self, message: torch.Tensor) -> Iterator[tuple[StateShape, torch.Tensor]]:
        """Yield each state with its view of a message."""
        for state, part in zip(self.shape.states, torch.split(message, self._sizes()), strict=True):
            dtype = state.dtype or self.cache.dtype
            yield state, part[: math.prod(state.shape) * dtype.itemsize].view(dtype).view(state.shape)
