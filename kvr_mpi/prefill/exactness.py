"""Comparison of any prefill, and of decoding after it, with plain transformers.

The self-check before every batch, ``kvr verify``, the sweep of architectures and the tests all compare `Continuation`s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.cache import layer_kv
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.prefill.failure import FAILURES
from kvr_mpi.prefill.one_prompt import Prefill

KEYS, VALUES = "keys", "values"


@dataclass(frozen=True, slots=True)
class Continuation:
    """The results of a prefill and of decoding after it, copied to the host.

    logits : (vocab_size,), after the prompt.
    layers : what each layer holds, by name: keys and values (tokens, kv_heads, head_dim), states of recurrent layers.
    tokens : decoded after the prompt.
    steps : logits after each of these.
    """

    logits: torch.Tensor
    layers: list[dict[str, torch.Tensor]]
    tokens: list[int]
    steps: list[torch.Tensor]


@torch.inference_mode()
def continued(model: Any, prefill: Prefill, count: int, given: Sequence[int] = ()) -> Continuation:
    """Copy the results of a prefill, and decode some tokens.

    count : number of tokens to decode, greedily.
    given : first tokens to feed, instead of the likeliest ones.
    """
    assert prefill.logits is not None, "the rank that ends with the cache"
    logits, tokens, steps = prefill.logits, list[int](), list[torch.Tensor]()
    layers = copy_layers(prefill.cache)
    for at in range(count):
        tokens.append(given[at] if at < len(given) else int(logits.argmax()))
        logits = run_model(model, torch.tensor([[tokens[-1]]], device=logits.device), prefill.cache)[0]
        steps.append(_copy(logits))
    return Continuation(_copy(prefill.logits), layers, tokens, steps)


def copy_layers(cache: Any) -> list[dict[str, torch.Tensor]]:
    """Copy the contents of every layer of a cache (`Answer.layers`)."""
    found = []
    for layer_idx, layer in enumerate(getattr(cache, "layers", ())):
        pair = layer_kv(cache, layer_idx)
        held = {} if pair is None else {KEYS: pair[0], VALUES: pair[1]}
        for kind in ("conv", "recurrent"):
            states = getattr(layer, f"{kind}_states", {})
            held |= {f"{kind} states {index}": state for index, state in states.items() if state is not None}
        found.append({name: _copy(tensor) for name, tensor in held.items()})
    return found


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def allowed_error(dtype: torch.dtype) -> float:
    """Return the allowed rounding error for a dtype, as an `error_share`; wrong positions or masks exceed it by far.

    In float32, another order of summation changes results by up to 2.4e-5 (SmolLM2 at 1024 tokens); without a
    prefix token, a tiny model's results change by 3e-2 and more.
    """
    return {torch.float32: 1e-4, torch.float16: 2e-2}.get(dtype, 1e-1)


def error_share(found: torch.Tensor | None, truth: torch.Tensor | None) -> float:
    """Return the largest absolute difference, divided by the truth's spread (maximum minus minimum).

    It is infinite for missing values, NaN or other shapes.
    """
    if found is None or truth is None or found.shape != truth.shape:
        return math.inf
    if not truth.numel():
        return 0.0
    found, truth = found.float(), truth.float()
    share = float((found - truth).abs().max()) / max(float(truth.max() - truth.min()), 1e-6)
    return math.inf if math.isnan(share) else share


def differences(found: Continuation, truth: Continuation) -> Iterator[tuple[str, float]]:
    """Yield the name and `error_share` of everything compared, in the order of computation.

    Keys and values are compared for the last tokens that both hold, since a layer with a window may hold no others.
    Tensors and steps that only one of them has are left out.
    """
    yield "the logits", error_share(found.logits, truth.logits)
    for layer_idx, (mine, theirs) in enumerate(zip(found.layers, truth.layers, strict=True)):
        for name in (name for name in mine if name in theirs):
            one, other = mine[name], theirs[name]
            if name in (KEYS, VALUES):
                kept = min(one.shape[0], other.shape[0])
                one, other = one[one.shape[0] - kept :], other[other.shape[0] - kept :]
            yield f"{name} of layer {layer_idx}", error_share(one, other)
    for at, (one, other) in enumerate(zip(found.steps, truth.steps, strict=False)):
        yield f"the logits after token {at} of the answer", error_share(one, other)


def first_difference(compared: Iterable[tuple[str, float]], allowed: float) -> tuple[str, float] | None:
    """Return the first of some `differences` above the allowed error; None if there is none."""
    return next(((what, share) for what, share in compared if not share <= allowed), None)


def why_not_the_same(
    loaded: LoadedModel, run: Callable[[], Iterable[tuple[str, float]]], others: str = "those of plain transformers"
) -> str | None:
    """Run a trial on a few tokens; return its error or the first difference, or None if all agree.

    run : returns the name and `error_share` of everything compared.
    others : what it is compared with, for the message.
    """
    allowed = allowed_error(loaded.dtype)
    try:
        wrong = first_difference(run(), allowed)
    except ModelError as error:
        return str(error)
    except (MemoryError, *FAILURES) as error:
        return f"{type(error).__name__}: {error}"
    if wrong is None:
        return None
    what, share = wrong
    return f"{what} differ from {others} by {share:.1e} of their spread (allowed {allowed:.0e})"
