"""A rolling cache: keys and values of a prompt's last tokens only, in memory that does not grow with the prompt.

The model runs a few tokens of the prompt per step. Each layer has room for `cache_tokens` old tokens and a step's new
ones, whatever the prompt's length; when it is full, the oldest are dropped (`SequenceKV.make_room`). This is exact for
layers that see no more than that (a window, chunks). For layers that see all tokens it is an approximation,
StreamingLLM's (Xiao et al. 2024, section 3.2): a token attends to the last tokens and to the first few, the *sinks*,
which stay in front. Unlike in StreamingLLM, tokens keep their positions in the prompt, since keys enter a cache already
rotated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvr_mpi.errors import ModelError
from kvr_mpi.model import ModelShape
from kvr_mpi.model.masks import Visibility

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

    def sinks_of(self, visibility: Visibility) -> int:
        """First tokens that stay in such a layer."""
        return 0 if self.holds(visibility) else self.sinks

    def seen(self, visibility: Visibility) -> Visibility:
        """Return what a token of such a layer sees besides the sinks; positions count from the end of the sinks."""
        return visibility if self.holds(visibility) else Visibility(window=self.cache_tokens - self.sinks)

    @property
    def rows(self) -> int:
        """Rows of a layer's buffer."""
        return self.cache_tokens + self.step_tokens

    def kv_bytes(self, shape: ModelShape) -> int:
        return self.rows * shape.kv_bytes_per_token

    @property
    def name(self) -> str:
        kind = f"{STREAMING_LLM}, {self.sinks} sinks" if self.sinks else "exact"
        return f"rolling cache of {self.cache_tokens} + {self.step_tokens} tokens ({kind})"


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
    if shape.has_states or shape.has_latents or not in_parts or any(not layer.elements for layer in shape.layers):
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
