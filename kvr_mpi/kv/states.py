"""Layers with recurrent states instead of keys and values (Mamba, gated delta rule, short convolutions) in a chain.

A state summarises all tokens before it, so a rank can begin such a layer only after the previous rank has finished it.
Rank i runs one layer behind rank i-1, and a chain of p ranks takes (layers + p - 1) / layers of its ideal time. States
are sent as one message of bytes per layer, whose size does not depend on the prompt. transformers' layers read states
with ``get_conv_state`` and ``get_recurrent_state`` and store new ones with ``update_*``; for a single token, they
update the state in place without calling these methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.layer import SliceLayer
from kvr_mpi.kv.route import Hop
from kvr_mpi.kv.transfers import NO_TOKENS, STATES
from kvr_mpi.model import LayerShape, StateShape
from kvr_mpi.transport.forwarder import Transfer

# Alignment of each state in a message, which views of another dtype require.
ALIGNMENT_BYTES = 64


class StateLayer(LinearAttentionLayer, SliceLayer):
    """The states of one layer on one rank, and its keys and values if it has attention, too."""

    def __init__(self, cache: Any, layer_idx: int, shape: LayerShape) -> None:
        self._values: dict[str, dict[int, torch.Tensor | None]] = {}
        LinearAttentionLayer.__init__(self, number_of_states=1 + max(state.index for state in shape.states))
        SliceLayer.__init__(self, cache, layer_idx, shape)
        self.dtype, self.device = cache.dtype, cache.device
        self._incoming: torch.Tensor | None = None
        self._outgoing: Transfer | None = None
        self._updated: set[tuple[str, int]] = set()
        self.is_sent = False
        self._noted: list[torch.Tensor] = []

    # transformers reads and sets these two: here, reading waits for the states of the previous rank.

    @property
    def conv_states(self) -> dict[int, torch.Tensor | None]:
        """Convolution states by index (1, channels, kernel size)."""
        self._enter()
        return self._values["conv"]

    @conv_states.setter
    def conv_states(self, states: dict[int, torch.Tensor | None]) -> None:
        self._values["conv"] = states

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        """Recurrent states by index, in the model's own shape."""
        self._enter()
        return self._values["recurrent"]

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, torch.Tensor | None]) -> None:
        self._values["recurrent"] = states

    @property
    def state_bytes(self) -> int:
        """Size of a message with all states, in bytes."""
        return sum(self._sizes())

    def post(self) -> None:
        """Post the receives of keys and values, and then of the states."""
        SliceLayer.post(self)
        self._post_states()

    def _post_states(self) -> None:
        """Post the receive of the states, or copy those of the shared prefix."""
        cache = self.cache
        if cache.route.position > 0 and self.segments is not None:
            if self._incoming is None:
                self._incoming = torch.empty(self.state_bytes, dtype=torch.uint8, device=cache.device)
            self.segments.add(Hop(STATES, NO_TOKENS, cache.route.position - 1, None), self._incoming)
            self._expect()
        elif cache.prefix is not None and cache.prefilling:
            self._incoming = cache.prefix.states[self.layer_idx].clone()
            self._expect()
        if self._outgoing is None and self.segments is not None and cache.route.position < cache.route.decode_position:
            message = torch.zeros(self.state_bytes, dtype=torch.uint8, device=cache.device)
            self._outgoing = self.segments.add(Hop(STATES, NO_TOKENS, None, cache.route.position + 1), message, 0)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Append the inputs of a convolution; return them after the earlier ones (1, channels, tokens)."""
        self._enter()
        whole: torch.Tensor = super().update_conv_state(conv_states, state_idx, **kwargs)
        self._note_update("conv", state_idx)
        return whole

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Store the state after this rank's tokens."""
        self._enter()
        state: torch.Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self.has_previous_state[state_idx] = True  # a layer without a convolution does not set it
        self._note_update("recurrent", state_idx)
        return state

    def send_states(self) -> None:
        """Send the layer's states, unless that was done before."""
        if not self.is_sent and self.segments is not None and self._outgoing is not None:
            self.packed(self._outgoing.tensor)
            self.segments.prompt.forwarder.send(self._outgoing)
        self.is_sent = True

    def packed(self, message: torch.Tensor | None = None) -> torch.Tensor:
        """Write all states into a message of zeros (bytes,), by default a new one, and return it."""
        if message is None:
            message = torch.zeros(self.state_bytes, dtype=torch.uint8, device=self.cache.device)
        for state, into in self._views(message):
            held = self._values[state.kind].get(state.index)
            if held is None or held.shape != into.shape or held.dtype != into.dtype:
                found = "none" if held is None else f"{tuple(held.shape)} {held.dtype}"
                raise ModelError(
                    f"layer {self.layer_idx}: a {state.kind} state of {tuple(into.shape)} {into.dtype} was "
                    f"expected, but there is {found}"
                )
            into.copy_(held)
        return message

    def note_states(self) -> None:
        """Save the current states."""
        self._noted = [held.clone() for held in self._held()]

    def restore_states(self) -> None:
        """Restore the saved states."""
        for held, noted in zip(self._held(), self._noted, strict=False):
            held.copy_(noted)

    def play_on(self) -> None:
        """Take part in the transfers of a prompt that failed on this rank; what is sent is meaningless."""
        self._post_states()
        if self._outgoing is not None and self.segments is not None and not self._outgoing.is_ready:
            self.segments.prompt.forwarder.send(self._outgoing)

    def let_go(self) -> None:
        """Drop everything; the forwarder keeps what is still being sent."""
        SliceLayer.let_go(self)
        self._values = {"conv": {}, "recurrent": {}}
        self._incoming = self._outgoing = None

    def _sizes(self) -> list[int]:
        """Bytes of each state in a message, aligned."""
        sizes = (math.prod(state.shape) * (state.dtype or self.cache.dtype).itemsize for state in self.shape.states)
        return [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]

    def _views(self, message: torch.Tensor) -> Iterator[tuple[StateShape, torch.Tensor]]:
        """Yield each state with its view of a message."""
        for state, part in zip(self.shape.states, torch.split(message, self._sizes()), strict=True):
            dtype = state.dtype or self.cache.dtype
            yield state, part[: math.prod(state.shape) * dtype.itemsize].view(dtype).view(state.shape)

    def _held(self) -> list[torch.Tensor]:
        return [held for kind in self._values.values() for held in kind.values() if held is not None]

    def _expect(self) -> None:
        """Mark earlier states as present before they arrive, since models ask in advance."""
        for idx in range(self.number_of_states):
            self.has_previous_state[idx] = True

    def _enter(self) -> None:
        """Begin the layer: finish the sends of earlier layers, and wait for the states."""
        if not self.cache.prefilling:
            return
        self.cache.advance(self.layer_idx)
        if self._incoming is None:
            return
        incoming, self._incoming = self._incoming, None
        if self.segments is not None and self.cache.route.position > 0:
            self.segments.wait_for([STATES])
        for state, view in self._views(incoming):
            self._values[state.kind][state.index] = view
            if state.kind == "conv":
                self.conv_kernel_size[state.index] = state.shape[-1]
                self.is_conv_states_initialized[state.index] = True
            else:
                self.is_recurrent_states_initialized[state.index] = True

    def _note_update(self, kind: str, index: int) -> None:
        """Send the states after the last of them is updated."""
        self._updated.add((kind, index))
        if self.cache.prefilling and self._updated >= {(state.kind, state.index) for state in self.shape.states}:
            self.send_states()
            self.leave_if_done()
