"""Slices in chunks: each layer processes one chunk after the other, so that only one chunk's activations exist.

Only the last token is needed after the last layer's attention. So that layer processes the last token as a separate
chunk, and ends early for the chunks before it (`UnreadError`).

Sits between the hook, which runs a model, and its layers. All chunks pass one layer before the first chunk enters the
next. A layer's keys and values are then complete when the layer ends, as in a pass without chunks, and the following
ranks are at most one layer behind. If each chunk passed all layers first, the first layer's last keys would be sent
only near the end, and the ranks of a chain would work one after the other.

Only a layer's input and output exist for the whole slice. No model code is changed: a layer's ``forward`` is called
once per chunk, with its per-token arguments cut accordingly. If a layer takes its tokens differently, the cache raises
an error (`kv.layer`), as does ``prefill.self_check`` before the batch.
"""

from __future__ import annotations

from typing import Any

import torch

from kvr_mpi.model.running import RUNNING


class UnreadError(Exception):
    """Raised inside a layer if the rest of its output, or of the model's, is not needed."""


def cut_layers(model: Any) -> bool:
    """Prepare a model's layers to run in chunks; return whether they were found. Idempotent."""
    layers = decoder_layers(model)
    for layer_idx, layer in enumerate(layers):
        if not isinstance(vars(layer).get("forward"), _ChunkedForward):
            layer.forward = _ChunkedForward(layer, layer_idx)
    return bool(layers)


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Find the layers through which hidden states (1, tokens, hidden) pass in sequence.

    The result is empty if the model has no such list.
    """
    count = model.config.get_text_config().num_hidden_layers
    # Outer modules come first, so a list of experts of the same length is not used.
    lists = (one for one in model.modules() if isinstance(one, torch.nn.ModuleList) and len(one) == count)
    return list(next(lists, ()))


class _ChunkedForward:
    """A layer's ``forward``, called once per chunk."""

    def __init__(self, layer: torch.nn.Module, layer_idx: int) -> None:
        self._layer, self._layer_idx = layer, layer_idx

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run (1, tokens, hidden); if only the last token is needed, its output is repeated for all.

        Raises `UnreadError` if the last chunk's output is not needed, either.
        """
        layer, (_, chunk_lengths) = self._layer, RUNNING.get()
        chunks = [] if chunk_lengths is None else chunk_lengths[self._layer_idx]
        hidden_states, tokens = args[0] if args else kwargs.get("hidden_states"), sum(chunks)
        if len(chunks) < 2 or hidden_states is None or hidden_states.shape[1] != tokens:
            return type(layer).forward(layer, *args, **kwargs)
        whole: torch.Tensor | None = None
        out, is_read, first = None, True, 0
        for length in chunks:
            last = first + length
            try:
                out = type(layer).forward(layer, *_cut(args, first, last, tokens), **_cut(kwargs, first, last, tokens))
            except UnreadError:
                if last == tokens:
                    raise
                is_read = False
            else:
                rows = out[0] if isinstance(out, tuple) else out
                if not is_read:  # models may expect one row per token
                    rows = rows[:, -1:].expand(-1, tokens, -1)
                    return (rows, *out[1:]) if isinstance(out, tuple) else rows
                whole = hidden_states.new_empty(1, tokens, rows.shape[2]) if whole is None else whole
                whole[:, first:last] = rows
            first = last
        return (whole, *out[1:]) if isinstance(out, tuple) else whole


def _cut(value: Any, first: int, last: int, tokens: int) -> Any:
    """Cut a chunk out of an argument with a token dimension: (1, tokens, ...), (tokens,) or (..., tokens, n)."""
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
