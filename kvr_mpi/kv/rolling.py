"""Keys and values of a prompt's last tokens only: a rolling cache, whose size does not depend on the prompt's length.

A prompt goes through the model a few tokens at a time. Each layer's buffer has room for `cache_tokens` old tokens and
a step's new ones, whatever the prompt's length; before a step the oldest are dropped. Where a layer sees no more than
that (a window, chunks) nothing is lost. Where it sees everything this is an approximation, StreamingLLM's (Xiao et al.
2024, section 3.2): a token attends to the first few tokens, the *sinks*, and to the last ones. Unlike there, tokens
keep their positions in the prompt: keys come to a cache with the positions in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.kv.attention import PartialAttention, attend
from kvr_mpi.kv.layer import attend_ranges
from kvr_mpi.kv.layout import UniformLayout
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.masks import Visibility

# The approximation, as it is asked for and recorded.
STREAMING_LLM = "streaming-llm"


@dataclass(frozen=True, slots=True)
class Rolling:
    """What a rolling cache holds of each layer.

    cache_tokens : old ones that a step's first token may see, the sinks included.
    step_tokens : new ones of a step.
    approximation : `STREAMING_LLM`, for layers that see more than that; None: there are to be none.
    sinks : the first tokens, that such layers hold all the time.

    Raises
    ------
    ConfigError
        If a number makes no sense.
    """

    cache_tokens: int = 448
    step_tokens: int = 64
    approximation: str | None = None
    sinks: int = 4

    def __post_init__(self) -> None:
        """Refuse what holds nothing."""
        if self.approximation not in (None, STREAMING_LLM):
            raise ConfigError(f"approximation = {self.approximation!r}: expected {STREAMING_LLM!r}, or none")
        if self.step_tokens < 1 or self.cache_tokens < 1 or not 0 < self.sinks < self.cache_tokens:
            raise ConfigError(
                f"a rolling cache of {self.cache_tokens} tokens and {self.step_tokens} new ones, {self.sinks} of them "
                f"sinks: expected at least one of each, and fewer sinks than tokens"
            )

    def holds(self, visibility: Visibility) -> bool:
        """Whether all that such a layer sees is held."""
        return visibility.size is not None and visibility.size <= self.cache_tokens + 1

    @property
    def name(self) -> str:
        """What to call it in a record."""
        kind = "exact" if self.approximation is None else f"{self.approximation}, {self.sinks} sinks"
        return f"rolling cache of {self.cache_tokens} + {self.step_tokens} tokens ({kind})"


class RollingLayer(RowLayer):
    """One layer's sinks, if it has any, and last tokens."""

    cache: RollingCache

    def __init__(self, cache: RollingCache, layer_idx: int, shape: LayerShape) -> None:
        super().__init__(cache, layer_idx, shape)
        self.length = 0  # of the prompt so far
        self.fresh = 0  # tokens last appended
        rolling = cache.rolling
        self.sinks = 0 if rolling.holds(shape.visibility) else rolling.sinks
        rows = rolling.cache_tokens + rolling.step_tokens
        self._base = self.sinks  # position of the first token after the sinks that is held
        self._layout = UniformLayout(torch.empty(rows, shape.elements, dtype=cache.dtype, device=cache.device), shape)

    @property
    def visibility(self) -> Visibility:
        """What a token sees, other than sinks."""
        if not self.sinks:
            return self.shape.visibility
        return Visibility(window=self.cache.rolling.cache_tokens - self.sinks)

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens that are held, by their positions, as views (1, kv_heads, tokens, head_dim)."""
        assert last <= self.sinks or first >= self._base, "these were dropped"
        less = 0 if last <= self.sinks else self._base - self.sinks
        return self._layout.rows(first - less, last - less)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a step's tokens (1, kv_heads, tokens, head_dim), and drop the oldest if there is no room.

        Raises
        ------
        ModelError
            If there are more than a step has.
        """
        count, buffer = key_states.shape[2], self._layout.buffer
        if count > self.cache.rolling.step_tokens:
            raise ModelError(f"layer {self.layer_idx}: {count} tokens in a step of {self.cache.rolling.step_tokens}")
        self.cache.enter(self)
        at = self.length - self._base + self.sinks if self.length > self.sinks else self.length
        if at + count > len(buffer):
            kept = self.cache.rolling.cache_tokens - self.sinks
            buffer[self.sinks : self.sinks + kept] = buffer[at - kept : at].clone()
            self._base, at = self.length - kept, self.sinks + kept
        self._layout.write(at, key_states, value_states)
        self.length, self.fresh = self.length + count, count
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from a step's tokens to sinks and last tokens; (1, heads, tokens, value_dim) in the query's dtype."""
        self.attended, first = True, self.length - self.fresh
        if query.shape[2] != self.fresh and self.fresh > 1:
            raise ModelError(f"layer {self.layer_idx}: {query.shape[2]} queries for {self.fresh} tokens")
        part: PartialAttention | None = None
        if first < self.sinks:  # the first tokens see all up to them
            last = min(self.sinks, self.length)
            part = attend_ranges(query[:, :, : last - first], [(first, last)], self.rows, Visibility(), params)
        if self.length > self.sinks:
            after = self._attend_last(query[:, :, max(0, self.sinks - first) :], max(first, self.sinks), params)
            part = after if part is None else part.join(after)
        assert part is not None
        return part.finish(params).to(query.dtype)

    def _attend_last(self, query: torch.Tensor, first: int, params: AttentionParams) -> PartialAttention:
        """Attend from the tokens from `first` on, none of which is a sink."""
        if not self.sinks:
            return attend_ranges(query, [(first, self.length)], self.rows, self.visibility, params)
        # Positions are counted after the sinks, which every token sees and no window holds.
        part = attend_ranges(
            query,
            [(first - self.sinks, self.length - self.sinks)],
            lambda low, high: self.rows(low + self.sinks, high + self.sinks),
            self.visibility,
            params,
        )
        return part.merge(attend(query, *self.rows(0, self.sinks), params))

    def get_seq_length(self) -> int:
        """Tokens of the prompt before the ones to come."""
        return self.length

    def get_max_length(self) -> int:
        """There is no most: the oldest are dropped."""
        return -1


class RollingCache(RowCache):
    """The rolling cache of a whole model.

    Parameters
    ----------
    loaded : LoadedModel
    rolling : Rolling
    prompt_tokens : int
        Of the whole prompt.

    Raises
    ------
    ModelError
        If the model sees more than is held, and no approximation was asked for; or cannot be run so at all.
    """

    def __init__(self, loaded: LoadedModel, rolling: Rolling, prompt_tokens: int) -> None:
        check_rolling(loaded, rolling)
        self.rolling, self.prompt_tokens = rolling, prompt_tokens
        self.dtype, self.device = loaded.dtype, loaded.device
        super().__init__([RollingLayer(self, idx, shape) for idx, shape in enumerate(loaded.shape.layers)])

    @property
    def prefilling(self) -> bool:
        """Whether a prompt's tokens are run."""
        return bool(self.layers[0].length <= self.prompt_tokens)

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Of the tokens to be run: how many, and the prompt's length, or the answer's end."""
        return [(tokens, max(self.prompt_tokens, self.layers[0].length + tokens))]

    @property
    def held_bytes(self) -> int:
        """Memory that keys and values take."""
        return sum(layer._layout.buffer.nbytes for layer in self.layers)


def check_rolling(loaded: LoadedModel, rolling: Rolling) -> None:
    """Refuse a model of which a rolling cache does not hold enough.

    Raises
    ------
    ModelError
        Saying of which layer, and what to do.
    """
    shape = loaded.shape
    if shape.has_states or not loaded.attends_in_parts or any(not layer.elements for layer in shape.layers):
        raise ModelError(
            f"{shape.architecture}: a rolling cache takes only models whose every layer attends by our hook"
        )
    if rolling.approximation is not None:
        return
    for number, layer in enumerate(shape.layers):
        if not rolling.holds(layer.visibility):
            raise ModelError(
                f"{shape.architecture}: layer {number} sees {layer.visibility}, and a rolling cache holds the last "
                f"{rolling.cache_tokens}: answers would differ. Hold more, or ask for the approximation by its name, "
                f"{STREAMING_LLM!r}"
            )
