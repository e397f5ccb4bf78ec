"""Layers that keep a state instead of keys and values (Mamba, gated delta rule, short convolutions), in a chain.

A state sums up all tokens before, so a rank can begin such a layer only when the rank before has ended it: rank i runs
one layer behind rank i-1, and a chain of p ranks takes (layers + p - 1) / layers of its ideal time. The state travels
as one message of bytes, whose size does not depend on the prompt. transformers' layers read it with
``get_conv_state`` and ``get_recurrent_state`` and hand back the new one with ``update_*``; with one token they change
it in place, and tell nobody.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers.cache_utils import DummyLayer, LinearAttentionLayer

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.layer import LayersOwner, SliceLayer, WholeLayer
from kvr_mpi.kv.transfers import LayerTransfers
from kvr_mpi.model import LayerShape, StateShape

# Every state begins at a multiple of this in a message: views of another type need that.
ALIGNMENT_BYTES = 64


class StateLayer(LinearAttentionLayer):
    """The states of one layer on one rank."""

    def __init__(self, cache: LayersOwner, layer_idx: int, shape: LayerShape) -> None:
        self._values: dict[str, dict[int, torch.Tensor | None]] = {}
        super().__init__(number_of_states=1 + max(state.index for state in shape.states))
        self.cache = cast("LayersOwner", weakref.proxy(cache))
        self.layer_idx, self.shape = layer_idx, shape
        self.dtype, self.device = cache.dtype, cache.device
        self.is_over: bool = False
        self.segments: LayerTransfers | None = (
            None if cache.transfers is None else LayerTransfers(cache.transfers, layer_idx, shape.visibility)
        )
        self._incoming: torch.Tensor | None = None
        self._updated: set[tuple[str, int]] = set()
        self._is_sent = False
        self._noted: list[torch.Tensor] = []

    # transformers reads and sets these three: here they wait for what the rank before sends.

    @property
    def conv_states(self) -> dict[int, torch.Tensor | None]:
        """By index (1, channels, kernel size)."""
        self._enter()
        return self._values["conv"]

    @conv_states.setter
    def conv_states(self, states: dict[int, torch.Tensor | None]) -> None:
        self._values["conv"] = states

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        """By index, in the model's own shape."""
        self._enter()
        return self._values["recurrent"]

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, torch.Tensor | None]) -> None:
        self._values["recurrent"] = states

    @property
    def buffer(self) -> torch.Tensor | None:
        """Nothing: no keys and values are held."""
        return None

    @property
    def is_complete(self) -> bool:
        """Whether the states after this rank's tokens are made."""
        return self._is_sent

    @property
    def state_bytes(self) -> int:
        """Size of a message with all states."""
        return sum(stop - start for _, start, stop in _places(self.shape.states, self.cache.dtype))

    def post(self) -> None:
        """Post the receive of the states, or take those of what all prompts begin with."""
        cache = self.cache
        if cache.route.position > 0 and self.segments is not None:
            if self._incoming is None:
                self._incoming = torch.empty(self.state_bytes, dtype=torch.uint8, device=cache.device)
            self.segments.receive_states(self._incoming, cache.route.position - 1)
            self._expect()
        elif cache.prefix is not None and cache.prefilling:
            self._incoming = cache.prefix.states[self.layer_idx].clone()
            self._expect()
        if self.segments is not None and cache.route.position < cache.route.decode_position:
            self.segments.announce_states(cache.route.position + 1)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Take the inputs of a convolution, and return them after those before (1, channels, tokens)."""
        self._enter()
        whole: torch.Tensor = super().update_conv_state(conv_states, state_idx, **kwargs)
        self._note_update("conv", state_idx)
        return whole

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Take the state after the tokens of this rank."""
        self._enter()
        state: torch.Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self.has_previous_state[state_idx] = True  # a layer without a convolution sets it nowhere
        self._note_update("recurrent", state_idx)
        return state

    def leave(self) -> None:
        """Send the states if that has not been done: the layer is through when the next is begun."""
        place = self.cache.route.position
        if not self._is_sent and self.segments is not None and place < self.cache.route.decode_position:
            self.segments.send_states(self.packed(), place + 1)
        self._is_sent = True

    def packed(self) -> torch.Tensor:
        """Put all states into one message (bytes,)."""
        message = torch.zeros(self.state_bytes, dtype=torch.uint8, device=self.cache.device)
        for state, start, _ in _places(self.shape.states, self.cache.dtype):
            held = self._values[state.kind].get(state.index)
            into = _view(message, state, start, self.cache.dtype)
            if held is None or held.shape != into.shape or held.dtype != into.dtype:
                found = "none" if held is None else f"{tuple(held.shape)} {held.dtype}"
                raise ModelError(
                    f"layer {self.layer_idx}: a {state.kind} state of {tuple(into.shape)} {into.dtype} was announced, "
                    f"and there is {found}"
                )
            into.copy_(held)
        return message

    def note_states(self) -> None:
        """Remember the states as they are now."""
        self._noted = [held.clone() for held in self._held()]

    def restore_states(self) -> None:
        """Go back to the states as they were when they were noted."""
        for held, noted in zip(self._held(), self._noted, strict=False):
            held.copy_(noted)

    def play_on(self) -> None:
        """Take part in the transfers of a prompt that has failed here: what is sent has no meaning."""
        StateLayer.post(self)
        if (
            self.segments is not None
            and self.cache.route.position < self.cache.route.decode_position
            and not self._is_sent
        ):
            nothing = torch.zeros(self.state_bytes, dtype=torch.uint8, device=self.cache.device)
            self.segments.send_states(nothing, self.cache.route.position + 1)
            self._is_sent = True

    def release(self, *, wait: bool) -> bool:
        """Let go of the states if they are sent, or wait for that; say whether they are gone."""
        if self.segments is not None:
            if not wait and not self.segments.are_through():
                return False
            self.segments.wait_through()
        self.let_go()
        self.is_over = True
        return True

    def let_go(self) -> None:
        """Forget the states; what is still being sent is held by the forwarder."""
        self._values = {"conv": {}, "recurrent": {}}
        self._incoming = self.segments = None

    is_ragged, held_bytes = False, 0  # of keys and values

    def lay_by_heads(self) -> None:
        """Nothing to do: a state has no tokens."""

    def _held(self) -> list[torch.Tensor]:
        return [held for kind in self._values.values() for held in kind.values() if held is not None]

    def _expect(self) -> None:
        """Say that there are states before, even if they have not come yet: models ask for that in advance."""
        for idx in range(self.number_of_states):
            self.has_previous_state[idx] = True

    def _enter(self) -> None:
        """Begin the layer: what the layers before still have to send is sent, and its own states are here."""
        if not self.cache.prefilling:
            return
        self.cache.advance(self.layer_idx)
        if self._incoming is None:
            return
        incoming, self._incoming = self._incoming, None
        if self.segments is not None:
            self.segments.wait_for_states()
        for state, start, _ in _places(self.shape.states, self.cache.dtype):
            self._values[state.kind][state.index] = _view(incoming, state, start, self.cache.dtype)
            if state.kind == "conv":
                self.conv_kernel_size[state.index] = state.shape[-1]
                self.is_conv_states_initialized[state.index] = True
            else:
                self.is_recurrent_states_initialized[state.index] = True

    def _note_update(self, kind: str, index: int) -> None:
        """Send the states when the last of them is new."""
        self._updated.add((kind, index))
        if self.cache.prefilling and self._updated >= {(state.kind, state.index) for state in self.shape.states}:
            self.leave()
            self.cache.leave_if_done(self.layer_idx)


class StateAndSliceLayer(StateLayer, SliceLayer):
    """A layer with attention that is taken over, and states."""

    buffer, is_ragged, held_bytes = SliceLayer.buffer, SliceLayer.is_ragged, SliceLayer.held_bytes

    def __init__(self, cache: LayersOwner, layer_idx: int, shape: LayerShape) -> None:
        SliceLayer.__init__(self, cache, layer_idx, shape)
        StateLayer.__init__(self, cache, layer_idx, shape)

    def post(self) -> None:
        """Post the receives of keys and values, then that of the states."""
        SliceLayer.post(self)
        StateLayer.post(self)

    def release(self, *, wait: bool) -> bool:
        """Let go of everything if it is sent, or wait for that; say whether it is gone."""
        buffer, cache = self.buffer, self.cache
        if not StateLayer.release(self, wait=wait):
            return False
        if buffer is not None and not cache.keeps_all:
            cache.buffers.give_back(buffer)
        return True

    def let_go(self) -> None:
        """Forget everything."""
        StateLayer.let_go(self)
        SliceLayer.let_go(self)

    def lay_by_heads(self) -> None:
        """Put each head's keys and values together."""
        SliceLayer.lay_by_heads(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make states; buffers are made from the model's shape."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def get_max_length(self) -> int:
        """Most tokens the buffer holds."""
        return SliceLayer.get_max_length(self)

    @property
    def is_complete(self) -> bool:
        """Whether keys, values and states of this rank's tokens are made."""
        return self.fresh > 0 and self._is_sent


class StateAndWholeLayer(StateAndSliceLayer, WholeLayer):
    """A layer with the model's own attention, and states."""


class EmptyLayer(DummyLayer):
    """A layer that keeps nothing: experts or a plain MLP in its place, or keys and values of another layer."""

    def __init__(self, layer_idx: int, shape: LayerShape) -> None:
        super().__init__()
        self.layer_idx, self.shape = layer_idx, shape
        self.buffer = self.segments = None
        self.is_over, self.is_ragged, self.held_bytes = True, False, 0

    def post(self) -> None:
        """Nothing to do."""

    def release(self, *, wait: bool) -> bool:
        """Nothing is held."""
        return True

    def let_go(self) -> None:
        """Nothing is held."""

    def lay_by_heads(self) -> None:
        """Nothing is held."""

    def leave(self) -> None:
        """Nothing is held."""

    def note_states(self) -> None:
        """Nothing is held."""

    def restore_states(self) -> None:
        """Nothing is held."""


def _places(states: tuple[StateShape, ...], dtype: torch.dtype) -> Iterator[tuple[StateShape, int, int]]:
    """Yield each state with where it begins and where the next may begin, in bytes."""
    start = 0
    for state in states:
        size = math.prod(state.shape) * (state.dtype or dtype).itemsize
        stop = start + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        yield state, start, stop
        start = stop


def _view(message: torch.Tensor, state: StateShape, start: int, dtype: torch.dtype) -> torch.Tensor:
    kind = state.dtype or dtype
    size = math.prod(state.shape) * kind.itemsize
    return message[start : start + size].view(kind).view(state.shape)
