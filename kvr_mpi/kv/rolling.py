"""A rolling cache: keys and values of a prompt's last tokens only, in memory that does not grow with the prompt.

The model runs a few tokens of the prompt per step. Each layer's buffer is a ring with room for `cache_tokens` old
tokens and a step's new ones, whatever the prompt's length; new tokens overwrite the oldest. This is exact for layers
that see no more than that (a window, chunks). For layers that see all tokens it is an approximation, StreamingLLM's
(Xiao et al. 2024, section 3.2): a token attends to the last tokens and to the first few, the *sinks*, which stay in
front of the ring. Unlike in StreamingLLM, tokens keep their positions in the prompt, since keys enter a cache already
rotated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.attention import PartialAttention, attend
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.route import Range, join_ranges
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.model import LoadedModel, ModelShape
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.layer_chunks import UnreadError
from kvr_mpi.model.masks import Visibility
from kvr_mpi.partition import cut_range

# The approximate kind of cache, and its number of sinks.
STREAMING_LLM, SINKS = "streaming-llm", 4
# New tokens of a step, by default.
STEP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Rolling:
    """What a rolling cache holds of each layer.

    cache_tokens : old tokens that a step's first token may see, including the sinks.
    step_tokens : new tokens of a step.
    sinks : first tokens that stay in layers that see more than this; 0: there must be no such layers.
    """

    cache_tokens: int = 448
    step_tokens: int = STEP_TOKENS
    sinks: int = 0

    def holds(self, visibility: Visibility) -> bool:
        """Whether the cache holds everything that such a layer sees."""
        return visibility.size is not None and visibility.size <= self.cache_tokens + 1

    @property
    def rows(self) -> int:
        """Rows of a layer's buffer."""
        return self.cache_tokens + self.step_tokens

    def kv_bytes(self, shape: ModelShape) -> int:
        """Bytes of keys and values, independent of the prompt's length."""
        return self.rows * shape.kv_bytes_per_token

    @property
    def name(self) -> str:
        """The name in records."""
        kind = f"{STREAMING_LLM}, {self.sinks} sinks" if self.sinks else "exact"
        return f"rolling cache of {self.cache_tokens} + {self.step_tokens} tokens ({kind})"


class RollingCache(RowCache):
    """The rolling cache of a whole model: of each layer the sink tokens, if any, and a ring of the last tokens.

    length : tokens processed before the current step.
    is_read : whether a step's output is needed; otherwise the model is left after the last layer's keys are written.

    Raises `ModelError` if a layer sees more than the cache holds and there are no sinks, or if the model does not
    support this cache.
    """

    is_ragged = False
    length = 0

    def __init__(self, loaded: LoadedModel, rolling: Rolling, prompt_tokens: int) -> None:
        check_rolling(loaded.shape, rolling, in_parts=loaded.attends_in_parts)
        self.rolling, self.prompt_tokens, self.is_read = rolling, prompt_tokens, True
        self._written = 0  # position after the last token that was ever written
        layers = loaded.shape.layers
        self._sinks = [0 if rolling.holds(shape.visibility) else rolling.sinks for shape in layers]
        # What a token sees besides the sinks, with positions counted from the end of the sinks.
        self._seen = [
            Visibility(window=rolling.cache_tokens - sinks) if sinks else shape.visibility
            for sinks, shape in zip(self._sinks, layers, strict=True)
        ]
        self.stores = [
            HeadStore.by_tokens(
                torch.empty(rolling.rows, shape.elements, dtype=loaded.dtype, device=loaded.device), shape
            )
            for shape in layers
        ]
        super().__init__([RowLayer(self, idx, shape) for idx, shape in enumerate(layers)])

    def append(self, layer: RowLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a step's tokens (1, kv_heads, tokens, head_dim), at most `step_tokens`, over the oldest ones."""
        count, at = keys.shape[2], 0
        if count > self.rolling.step_tokens:
            raise ModelError(f"layer {layer.layer_idx}: {count} tokens in a step of {self.rolling.step_tokens}")
        store = self.stores[layer.layer_idx]
        for first, last in self._rows(layer.layer_idx, self.length, self.length + count):
            store.write(first, *(each[:, :, at : at + last - first] for each in (keys, values)))
            at += last - first
        self._written = max(self._written, self.length + count)

    def attend(
        self, layer: RowLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from a step's tokens to sinks and last tokens.

        Leaves the model (`UnreadError`) if the rest of its output is not used.
        """
        begin, count, at, parts = self.length, keys.shape[2], layer.layer_idx, list[PartialAttention]()
        if query.shape[2] != count and count > 1:
            raise ModelError(f"layer {at}: {query.shape[2]} queries for {count} tokens")
        if at == len(self.layers) - 1:
            self.length += count
            if not self.is_read:
                raise UnreadError
        for first, last in (pieces := self._cut(at, begin, begin + count, self._seen[at].size)):
            own = slice(first - begin, last - begin)
            some = query if len(pieces) == 1 else query[:, :, own]  # a single token's heads may come folded
            parts.append(self._attend_piece(at, some, keys[:, :, own], values[:, :, own], (first, last), params))
        return PartialAttention.join(parts).finish(params).to(query.dtype)

    def _attend_piece(
        self,
        at: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bounds: Range,
        params: AttentionParams,
    ) -> PartialAttention:
        """Attend from consecutive tokens of a step to sinks, older tokens and, causally, themselves."""
        (first, last), count, store = bounds, bounds[1] - bounds[0], self.stores[at]
        oldest, seen_by_all = self._first_seen(at, first), self._first_seen(at, last - 1)
        before = last if count == 1 else first
        rows = join_ranges([*self._rows(at, 0, min(self._sinks[at], before)), *self._rows(at, seen_by_all, before)])
        parts = [attend(query, *store.rows(*stretch), params) for stretch in rows]
        if count > 1:
            parts.append(attend(query, keys, values, params, causal=True))
        part = reduce(PartialAttention.merge, parts)
        if oldest == seen_by_all:
            return part
        # Each token sees one fewer of these than the one before it, the last one none: causal, in reverse order.
        some = [store.rows(*stretch) for stretch in self._rows(at, oldest, seen_by_all)]
        old_keys, old_values = (torch.cat(each, 2).flip(2) for each in zip(*some, strict=True))
        old = attend(query[:, :, :-1].flip(2), old_keys, old_values, params, causal=count > 2)
        seeing = part.cut(0, count - 1).merge(PartialAttention(old.out.flip(2), old.lse.flip(2)))
        return PartialAttention.join([seeing, part.cut(count - 1, count)])

    def note_states(self) -> None:
        """Do nothing: its layers have no states."""

    def step_back(self, length: int) -> None:
        """Truncate to the first `length` tokens, at most one step back, even if a step failed between layers.

        Raises `ModelError` if dropped tokens have overwritten some that the next token would see.
        """
        self.current = None
        for at, sinks in enumerate(self._sinks):
            needed, held = self._first_seen(at, length), self._written - (self.rolling.rows - sinks)
            if held > needed:
                raise ModelError(
                    f"layer {at}: tokens from {needed} on are needed, but only those from {held} on are held"
                )
        self.length = min(self.length, length)

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are processed."""
        return self.length < self.prompt_tokens

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Return the number of tokens to run, and the length of the prompt including the answer so far."""
        return [(tokens, max(self.prompt_tokens, self.length + tokens))]

    def _first_seen(self, at: int, position: int) -> int:
        """Position of the first token after the sinks that a token at this position sees in a layer."""
        return self._sinks[at] + self._seen[at].first_key(max(0, position - self._sinks[at]))

    def _cut(self, at: int, first: int, last: int, every: int | None) -> list[Range]:
        """Split a range of positions at the end of a layer's sinks, and at each multiple of `every` from there."""
        sinks = self._sinks[at]
        return [(start + sinks, stop + sinks) for start, stop in cut_range(first - sinks, last - sinks, every)]

    def _rows(self, at: int, first: int, last: int) -> list[Range]:
        """Rows of a layer's buffer that hold a range of positions, in order."""
        sinks, ring = self._sinks[at], self.rolling.rows - self._sinks[at]
        pieces = self._cut(at, first, last, ring)
        places = [start if start < sinks else sinks + (start - sinks) % ring for start, _ in pieces]
        return [(row, row + stop - start) for row, (start, stop) in zip(places, pieces, strict=True)]


def rolling_of(kind: str, cache_tokens: int, chunk_tokens: int | Literal["auto"]) -> Rolling | None:
    """Return the rolling cache that a job asks for, with steps of `chunk_tokens`; None for a whole cache."""
    if kind == "whole":
        return None
    steps = STEP_TOKENS if chunk_tokens == "auto" else chunk_tokens
    return Rolling(cache_tokens, steps, SINKS if kind == STREAMING_LLM else 0)


def check_rolling(shape: ModelShape, rolling: Rolling, *, in_parts: bool) -> None:
    """Check that a model can run with a rolling cache.

    Raises `ModelError` if it cannot, with the layer that sees too much and the setting to change.
    """
    if shape.has_states or not in_parts or any(not layer.elements for layer in shape.layers):
        raise ModelError(
            f"{shape.architecture}: a rolling cache needs a model whose attention can be replaced in every layer; "
            "set cache.kind = 'whole'"
        )
    if rolling.sinks:
        return
    for number, layer in enumerate(shape.layers):
        if not rolling.holds(layer.visibility):
            raise ModelError(
                f"{shape.architecture}: layer {number} sees {layer.visibility}, but a rolling cache keeps only the "
                f"last {rolling.cache_tokens}, so answers would differ. Raise cache.tokens, or set cache.kind = "
                f"{STREAMING_LLM!r}"
            )
