"""Which keys a layer's queries see, derived from the mask function that the model requests.

Sits between transformers' mask interface and our attention. transformers builds a mask from a function of query and key
positions. With our attention registered, the function is passed here and no mask is built: evaluating it at chosen
positions identifies full, sliding-window or chunked attention. Models with other masks use their own attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import ModelError

if TYPE_CHECKING:
    import torch

# Number of first positions that are all evaluated; after them, only positions near edges are.
DENSE_TOKENS = 256

MaskFunction = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Visibility:
    """The keys up to its own position that a query sees: all, the last `window`, or those in its chunk.

    At most one of `window` and `chunk` is set.
    """

    window: int | None = None
    chunk: int | None = None

    def first_key(self, position: int) -> int:
        """Position of the first key that a query at this position sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk

    def sees_all(self, tokens: int) -> bool:
        """Whether every query sees all keys up to its own position in a prompt of this length."""
        return self.first_key(tokens - 1) == 0

    @property
    def size(self) -> int | None:
        """Tokens of the window or chunk."""
        return self.window if self.chunk is None else self.chunk

    def __str__(self) -> str:
        if self.window is not None:
            return f"a window of {self.window} tokens"
        return "all tokens" if self.chunk is None else f"chunks of {self.chunk} tokens"


FULL = Visibility()


@dataclass(slots=True, eq=False)
class MaskRequest:
    """A model's request for a mask, passed through the model in place of the mask.

    mask_function : maps (batch, head, query position, key position) to True if the query sees the key.
    local_size : tokens of the window or chunk, as transformers names it.
    is_plain : whether the mask has no padding and no overlay.
    longest : the longest context, up to which the function is evaluated.
    device : where the function is evaluated, since it may contain tensors.
    found : the result of `visibility`.
    """

    mask_function: MaskFunction
    local_size: int | None
    is_plain: bool
    longest: int
    device: str = "cpu"
    found: Visibility | None = None

    def __getitem__(self, index: Any) -> MaskRequest:
        """Return the request itself, since some models cut masks to the length of the keys."""
        return self

    def visibility(self) -> Visibility:
        """Recognise the mask by evaluating it at the edges of windows and chunks, and at the far end, once.

        Raises a `ModelError` unless it is full, a window of `local_size`, or chunks of `local_size`.
        """
        if self.found is not None:
            return self.found
        import torch

        if not self.is_plain:
            raise ModelError("its mask is not simply causal, a window or chunks")
        size, longest = self.local_size or 1, self.longest
        near = {at for edge in (0, size, 2 * size, 3 * size) for at in range(edge - 2, edge + 3)}
        begin = range(min(longest, DENSE_TOKENS))
        edges = sorted(at for at in {*near, longest - 1, longest // 2} if 0 <= at < max(longest, 4))
        keys = sorted(
            {
                max(0, at + shift)
                for at in edges
                for shift in (-2 * size, -size - 1, -size, -size + 1, -(at % size) - 1, -(at % size), -1, 0, 1, 2)
            }
            | set(begin)
        )
        queries = torch.tensor(sorted({*edges, *begin}), device=self.device).unsqueeze(1)
        key, zero = torch.tensor(keys, device=self.device).unsqueeze(0), torch.zeros_like(queries[0, 0])
        try:
            seen = self.mask_function(zero, zero, queries, key)
            if seen.device.type == "meta":
                raise ModelError("it reads tensors that have no values")
            seen = seen.expand(len(queries), len(keys))
        except Exception as error:  # mask functions of models can raise any error
            raise ModelError(f"its mask function cannot be evaluated ({type(error).__name__}: {error})") from error
        causal = key <= queries
        candidates = {FULL: causal}
        if self.local_size is not None:
            candidates[Visibility(window=size)] = causal & (key > queries - size)
            candidates[Visibility(chunk=size)] = causal & (key // size == queries // size)
        self.found = next((seeing for seeing, expected in candidates.items() if torch.equal(seen, expected)), None)
        if self.found is None:
            raise ModelError("its mask is neither causal, nor a window, nor chunks")
        return self.found


def request_mask(
    *,
    mask_function: MaskFunction,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> MaskRequest:
    """Return a mask request in place of a mask; registered with transformers' ``AttentionMaskInterface``."""
    longest = getattr(config, "max_position_embeddings", None) or 1 << 20
    where = "cpu" if str(device) == "meta" else str(device)  # tensors on ``meta`` have no values
    is_plain = attention_mask is None and not use_vmap
    return MaskRequest(mask_function, local_size, is_plain, longest, where)


def check_mask(mask: Any, announced: Visibility, told_window: int | None = None) -> None:
    """Raise a `ModelError` unless a model's mask request matches the layer's visibility and attention arguments."""
    if not isinstance(mask, MaskRequest):
        raise ModelError("its attention receives no mask from transformers")
    asked = mask.visibility()
    if asked != announced:
        raise ModelError(f"a layer's mask shows {asked}, but showed {announced} when the model was examined")
    # A window as long as the context is the same as no window.
    if told_window is not None and told_window != asked.window and (asked.size or told_window < mask.longest):
        raise ModelError(f"its attention receives a window of {told_window} tokens, but its mask shows {asked}")
