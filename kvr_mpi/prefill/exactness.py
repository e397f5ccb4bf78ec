"""Comparison of any prefill, and of decoding after it, with plain transformers.

The self-check before every batch, ``kvr verify``, the sweep of architectures and the tests all compare `Tensors`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.chain import layer_kv
from kvr_mpi.kv.row import Row
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.prefill.failure import FAILURES
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.packed import decode_packed

KEYS, VALUES = "keys", "values"
# In a dtype shorter than float32: the largest difference, as a multiple of that made by rounding errors (`Reference`).
# In the models of the tests, chains mostly differ by up to 1.8 times as much; without a token, by 3 to 40 times.
NOISE_FACTOR = 2.5
# A larger difference has to exceed the largest of so many samples of rounding errors (the logits of one token vary
# much), and to do so with each of so many prompts (a rounding error may choose another expert).
NUDGES, PROMPTS = 4, 3
# One of so many elements of the embeddings changes by one unit in the last place: on average, a rounding error.
ELEMENTS_PER_NUDGE = 16

# What is compared, by name. Keys and values are (tokens, kv_heads, head_dim).
Tensors = Mapping[str, torch.Tensor]
Compared = tuple[str, torch.Tensor, torch.Tensor]


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

    @property
    def results(self) -> dict[str, torch.Tensor]:
        """Everything that is compared, in the order of computation."""
        found = {"the logits": self.logits}
        for layer_idx, held in enumerate(self.layers):
            found |= {f"{name} of layer {layer_idx}": tensor for name, tensor in held.items()}
        return found | {f"the logits after token {at} of the answer": each for at, each in enumerate(self.steps)}


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
        if isinstance(prefill.cache, SequenceKV):
            logits = decode_packed(prefill.cache.loaded, Row([prefill.cache]), tokens[-1:])[0]
        else:
            logits = run_model(model, torch.tensor([tokens[-1:]], device=logits.device), prefill.cache)[0]
        steps.append(_copy(logits))
    return Continuation(_copy(prefill.logits), layers, tokens, steps)


def copy_layers(cache: Any) -> list[dict[str, torch.Tensor]]:
    """Copy the contents of every layer of a cache (`Answer.layers`)."""
    found = []
    for layer_idx, layer in enumerate(getattr(cache, "layers", ())):
        pair = layer_kv(cache, layer_idx)
        held = {} if pair is None else {KEYS: pair[0], VALUES: pair[1]}
        for kind in ("conv", "recurrent"):
            if isinstance(cache, SequenceKV):
                states = cache.states.get(layer_idx, {}).get(kind, {})
            else:
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
    """Yield the name and `error_share` of everything compared, in the order of computation."""
    return ((what, error_share(one, other)) for what, one, other in _pairs(found.results, truth.results))


def _pairs(found: Tensors, truth: Tensors) -> Iterator[Compared]:
    """Yield what is compared.

    Keys and values are compared for the last tokens that both hold, since a layer with a window may hold no others.
    Tensors that only one of them has are left out.
    """
    for what in (what for what in found if what in truth):
        one, other = found[what], truth[what]
        if what.startswith((KEYS, VALUES)):
            kept = min(one.shape[0], other.shape[0])
            one, other = one[one.shape[0] - kept :], other[other.shape[0] - kept :]
        yield what, one, other


def first_difference(compared: Iterable[tuple[str, float]], allowed: float) -> tuple[str, float] | None:
    """Return the first of some `differences` above the allowed error; None if there is none."""
    return next(((what, share) for what, share in compared if not share <= allowed), None)


class Reference:
    """Tensors for a few tokens that a trial has to reproduce, within the rounding errors of the dtype.

    In float32, the limit is `allowed_error`. In a shorter dtype it is measured: `run` computes the results again after
    some elements of the embeddings have changed by a rounding error, so that all later rounding errors differ. The root
    mean square difference of a trial, for each tensor, may be at most `NOISE_FACTOR` times as large.

    tokens : of the prompt.
    run : computes the results for token ids, in a way that is trusted.
    """

    def __init__(self, loaded: LoadedModel, tokens: int, run: Callable[[Sequence[int]], Tensors]) -> None:
        self._loaded, self._tokens, self._run = loaded, tokens, run
        self._is_short = loaded.dtype.itemsize < torch.float32.itemsize
        self._prompts: list[_Prompt] = []
        self.difference = 0.0  # of the logits of all trials that agreed, as the largest `error_share`

    def is_finite(self) -> bool:
        """Compute the results; return whether their logits are numbers."""
        truth = self._prompt(0).truth
        return all(bool(each.max().isfinite()) for what, each in truth.items() if "logits" in what)

    def why_not(
        self, trial: Callable[[Sequence[int]], Tensors], others: str = "those of plain transformers"
    ) -> str | None:
        """Run a trial with the same token ids; return its error or the first difference, or None if all agree.

        Afterwards the model is prepared as `trial` or `run` prepare it.

        others : what it is compared with, for the message.
        """
        first: str | None = None
        for number in range(PROMPTS if self._is_short else 1):
            try:
                prompt = self._prompt(number)
                pairs = list(_pairs(trial(prompt.ids), prompt.truth))
                why = self._why_above_noise(pairs, prompt) if self._is_short else self._why_above_limit(pairs)
            except ModelError as error:
                return str(error)
            except (MemoryError, *FAILURES) as error:
                return f"{type(error).__name__}: {error}"
            if why is None:
                shares = (error_share(*pair) for what, *pair in pairs if "logits" in what)
                self.difference = max(self.difference, *shares)
                return None
            first = first or f"{why[0]} differ from {others} by {why[1]}"
        return first

    def _prompt(self, number: int) -> _Prompt:
        if number == len(self._prompts):
            ids = self._loaded.shape.sample_ids(self._tokens, first=11 + 101 * number)
            self._prompts.append(_Prompt(ids, self._run(ids), []))
        return self._prompts[number]

    def _why_above_limit(self, pairs: Sequence[Compared]) -> tuple[str, str] | None:
        """Return what differs first, and by how much."""
        compared, allowed = ((what, error_share(*pair)) for what, *pair in pairs), allowed_error(self._loaded.dtype)
        if (found := first_difference(compared, allowed)) is None:
            return None
        return found[0], f"{found[1]:.1e} of their spread (allowed {allowed:.0e})"

    def _why_above_noise(self, pairs: Sequence[Compared], prompt: _Prompt) -> tuple[str, str] | None:
        """Return what differs first, and by how much, from all samples of rounding errors."""
        dtype, why = self._loaded.dtype, None
        for number in range(NUDGES):
            if number == len(prompt.noise):
                with _nudged(self._loaded.model, dtype, number):
                    nudged = self._run(prompt.ids)
                prompt.noise.append({what: _rms(one, other) for what, one, other in _pairs(nudged, prompt.truth)})
            why = None
            for what, one, other in pairs:
                usual = max(_rounding(other, dtype), *(noise[what] for noise in prompt.noise[: number + 1]))
                if not (size := _rms(one, other)) <= NOISE_FACTOR * usual:
                    name = str(dtype).removeprefix("torch.")
                    why = what, f"{size / usual:.1f} times the rounding errors of {name} (allowed {NOISE_FACTOR})"
                    break
            if why is None:
                return None
        return why


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Token ids, their results, and how much these change by each sample of rounding errors."""

    ids: list[int]
    truth: Tensors
    noise: list[dict[str, float]]


@contextlib.contextmanager
def _nudged(model: Any, dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Within the block, change some elements of the embeddings by a rounding error, the same ones for the same seed."""
    draw, step = torch.Generator().manual_seed(seed), torch.finfo(dtype).eps

    def nudge(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        chance = torch.rand(out.shape, generator=draw) * ELEMENTS_PER_NUDGE
        factor = 1 + step * ((chance < 0.5).float() - ((chance >= 0.5) & (chance < 1)).float())
        return (out.float() * factor.to(out.device)).to(out.dtype)

    hook = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()


def _rms(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the root mean square difference; infinite for NaN or other shapes."""
    if one.shape != other.shape:
        return math.inf
    found = float((one.double() - other.double()).square().mean().sqrt()) if one.numel() else 0.0
    return math.inf if math.isnan(found) else found


def _rounding(values: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the least rounding error of some values in a dtype, as a root mean square, also of subnormal values."""
    spacing = torch.finfo(dtype)
    size = float(values.double().square().mean().sqrt()) if values.numel() else 0.0
    return spacing.eps * size / 4 + spacing.tiny * spacing.eps / 2
