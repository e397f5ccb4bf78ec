"""A slice in chunks: each layer takes them in turn, so that only one chunk's activations are alive.

Stands between the hook, which runs a model, and its layers. All chunks go through a layer before the first of them
goes through the next: a layer's keys and values are then complete when the layer is, as in a pass without chunks, and
the ranks after this one run at most a layer behind it. Chunk by chunk through all layers, the last chunk's keys of the
first layer would come when nearly everything is computed, and the ranks of a chain would work one after the other.

What is alive for the whole slice is what goes into a layer and what comes out. No model code is changed: a layer's
``forward`` is called once for each chunk, with what it is given for each token cut accordingly. Where a layer takes
its tokens otherwise, the cache notices (`kv.layer`), and ``prefill.self_check`` before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from kvr_mpi.errors import ModelError

# Tokens of each chunk of the slice that this thread is running.
_CHUNKS: ContextVar[Sequence[int]] = ContextVar("kvr_chunks", default=())


class ChunkDoneError(Exception):
    """Raised out of a layer when nobody reads what it would compute of this chunk."""


@contextmanager
def layers_in_chunks(lengths: Sequence[int]) -> Iterator[None]:
    """Run layers chunk by chunk; of one chunk or none, as ever."""
    token = _CHUNKS.set(lengths if len(lengths) > 1 else ())
    try:
        yield
    finally:
        _CHUNKS.reset(token)


def cut_layers(model: torch.nn.Module) -> None:
    """Let a model's layers be run in chunks; a second time changes nothing.

    Raises
    ------
    ModelError
        If its layers are not found.
    """
    for layer in decoder_layers(model):
        if not isinstance(vars(layer).get("forward"), _ChunkedForward):
            layer.forward = _ChunkedForward(layer)


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Find the layers that hidden states (1, tokens, hidden) go through one after the other.

    Raises
    ------
    ModelError
        If there is no such list.
    """
    count = model.config.get_text_config().num_hidden_layers
    # Outer modules come before inner ones: experts may be as many as layers.
    lists = (one for one in model.modules() if isinstance(one, torch.nn.ModuleList) and len(one) == count)
    found = next(lists, None)
    if found is None:
        raise ModelError(f"{type(model).__name__} has no list of {count} layers, so they cannot be run in chunks")
    return list(found)


class _ChunkedForward:
    """A layer's ``forward``, once for each chunk."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run (1, tokens, hidden); where only the last token is read, that one comes back, once or for all."""
        chunks, layer = _CHUNKS.get(), self._layer
        tokens = sum(chunks)
        if not chunks or hidden_states.shape[1] != tokens:
            return type(layer).forward(layer, hidden_states, *args, **kwargs)
        whole: torch.Tensor | None = None
        out, is_read, first = None, True, 0
        for length in chunks:
            last = first + length
            given = _cut(args, first, last, tokens), _cut(kwargs, first, last, tokens)
            try:
                out = type(layer).forward(layer, hidden_states[:, first:last], *given[0], **given[1])
            except ChunkDoneError:
                is_read = False
            else:
                rows = out[0] if isinstance(out, tuple) else out
                if rows.shape[1] < length:  # cut to the last token (`last_token`), which is all that is read on
                    return out
                if not is_read:  # models may ask for as many rows as there are tokens
                    rows = rows[:, -1:].expand(-1, tokens, -1)
                    return (rows, *out[1:]) if isinstance(out, tuple) else rows
                whole = hidden_states.new_empty(1, tokens, rows.shape[2]) if whole is None else whole
                whole[:, first:last] = rows
            first = last
        return (whole, *out[1:]) if isinstance(out, tuple) else whole


def _cut(value: Any, first: int, last: int, tokens: int) -> Any:
    """Take a chunk's part of what a layer is given for each token: (1, tokens, ...), (tokens,) or (..., tokens, n)."""
    if isinstance(value, torch.Tensor):
        if value.ndim > 1 and value.shape[1] == tokens:
            return value[:, first:last]
        if value.ndim == 1 and value.shape[0] == tokens:
            return value[first:last]
        return value[..., first:last, :] if value.ndim > 2 and value.shape[-2] == tokens else value
    if isinstance(value, tuple | list):
        return type(value)(_cut(one, first, last, tokens) for one in value)
    if isinstance(value, dict):
        return {key: _cut(one, first, last, tokens) for key, one in value.items()}
    return value
