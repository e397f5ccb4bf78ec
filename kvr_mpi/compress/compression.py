"""A compression method applied to prompts: as each layer completes, choose the tokens that its KV heads keep.

The last rank of a prefill has all keys of a layer, and the window's queries. It drops the tokens that are not kept
before it computes the next layer, and decoding continues from the retained tokens. Every head also keeps the tokens
after the window, in addition to the budget: after a document, these are the question. Methods that repeat the text need
all layers first: they drop tokens after the prefill (`Compression.repeat`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvr_mpi.compress.head_profile import HeadProfile, read_profile
from kvr_mpi.compress.planned_drop import PlannedDrop, compressed_layers, planned_drop
from kvr_mpi.compress.registry import SINKS, share_budget
from kvr_mpi.compress.repeating import chunk_tokens, repeat_scores
from kvr_mpi.compress.scores import recency_scores, top_tokens, window_scores
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.errors import ConfigError, counted
from kvr_mpi.kv.chain import Retain, SliceLayer
from kvr_mpi.kv.relay import Range
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel


@dataclass(frozen=True, slots=True)
class RetainedSize:
    """What compression keeps of a prompt, and the method.

    tokens : mean number per KV head, over the compressed layers.
    kv_bytes : of all layers.
    """

    method: str
    tokens: float
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Compression:
    """A compression method with its settings, for one model.

    layers : indices of the compressed layers, whose queries see all tokens; the others keep everything they have.
    kv_heads : KV heads of a layer, over all ranks of a tensor-parallel group.
    instruction : tokens that ask the model to repeat the text, if the method needs that.
    """

    settings: CompressSettings
    loaded: LoadedModel
    layers: tuple[int, ...]
    kv_heads: int
    profile: HeadProfile | None = None
    instruction: tuple[int, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """What answers depend on: the settings, with the contents of the profile instead of its name."""
        said = self.settings.model_dump()
        if self.profile is not None:
            said["profile"] = hashlib.sha256(self.profile.counts.tobytes()).hexdigest()
        return said

    def describe(self) -> str:
        """Describe the method in a few words."""
        return f"{self.settings}; {counted(len(self.layers), 'layer')} of {counted(self.kv_heads, 'KV head')}"

    def window_of(self, tokens: int, text: Range) -> Range | None:
        """Return the range of a prompt's observation window; None if the whole prompt is kept.

        Heads choose among the tokens before the window, and keep all tokens after it. It is empty if the method does
        not observe. `text` is the range of the document's text in the prompt.
        """
        stop = text[1] if self.settings.observes == "document" else tokens
        if self.settings.kept_of(stop) >= stop:
            return None
        return stop - self.settings.observed_tokens, stop

    def repeated_of(self, text: Range) -> Range | None:
        """Return the range of a prompt's text whose tokens are scored by repeating them; None if all are kept."""
        first, stop = max(text[0], SINKS), text[1]
        return (first, stop) if self.settings.kept_of(stop - first) < stop - first else None

    def planned_drop(self, tokens: int, text: Range) -> PlannedDrop | None:
        """Predict what this rank drops of a prompt, and the memory for choosing; None if all of it is kept."""
        if self.settings.rule.repeats:
            repeated = self.repeated_of(text)
            stop = None if repeated is None else repeated[1] - repeated[0]
        else:
            window = self.window_of(tokens, text)
            stop = None if window is None else window[1]
        if stop is None:
            return None
        loaded = self.loaded
        heads = loaded.model.config.get_text_config().num_attention_heads
        group_ranks = 1 if loaded.part is None else loaded.part.size
        return planned_drop(self.settings, loaded.shape, heads, tokens, stop, group_ranks)

    def retain(self, tokens: int, text: Range) -> Retain | None:
        """Return what heads keep of a prompt, chosen layer by layer; None if all of it is kept.

        Raises `DocumentError` if the text has to be repeated, and the model's context leaves no room for that.
        """
        if self.settings.rule.repeats:  # all of it is needed first
            if self.repeated_of(text) is None:
                return None
            chunk_tokens(self.loaded.shape.max_tokens, text[1], len(self.instruction))
            return Retain(None)
        if (window := self.window_of(tokens, text)) is None:
            return None
        each, rule = self.settings.kept_of(window[1]) - self.settings.observed_tokens, self.settings.rule
        weights = np.ones((len(self.layers), self.kv_heads))
        if rule.weigh is not None:
            beyond = None if self.profile is None else (self.profile.counts - self.settings.window).clip(0)
            weights *= rule.weigh(each, window[0], len(self.layers), beyond)
        shares = torch.from_numpy(share_budget(weights, each, window[0]))
        late_layers = rule.late_layers if self.loaded.device.type == "cuda" else 0
        return Retain(window if rule.observes else None, partial(self._choose, window, each, shares), late_layers)

    def _choose(
        self, window: Range, each: int, shares: torch.Tensor, layer: SliceLayer
    ) -> Iterator[torch.Tensor] | None:
        """Choose the tokens that each KV head of a layer keeps: candidates, the window and what follows it."""
        if layer.layer_idx not in self.layers:
            return None
        scores = self._scores(layer, window)
        shares = shares[self.layers.index(layer.layer_idx)]
        if self.settings.rule.compete is not None:
            shares = self.settings.rule.compete(self._of_all_heads(scores), each)
        always = torch.arange(window[0], layer.length, device=scores.device)
        return (torch.cat([chosen, always]) for chosen in top_tokens(scores, shares[slice(*self._own)]))

    def repeat(self, sequence: SequenceKV, ids: Sequence[int], text: Range) -> None:
        """Score a prefilled prompt's text by repeating it, and drop what its heads do not keep.

        The budget is divided over the heads of all layers. In addition, every head keeps the tokens before and after
        the text, and the first `SINKS`. All ranks of a tensor-parallel group call this. It does nothing if the method
        has chosen during the prefill, or all tokens are kept.

        sequence : with all tokens of the prompt.
        """
        if self.settings.rule.repeats and (scored := self.repeated_of(text)) is not None:
            self.drop(sequence, scored, repeat_scores(sequence, ids, scored, self.instruction, self.layers))

    def drop(self, sequence: SequenceKV, scored: Range, scores: torch.Tensor) -> None:
        """Drop the tokens in a range with the lowest scores (layers, this rank's heads, tokens)."""
        rule, (first, stop) = self.settings.rule, scored
        assert rule.compete is not None, "heads compete"
        whole = torch.stack([self._of_all_heads(of_layer) for of_layer in scores]).flatten(0, 1)
        counts = rule.compete(whole, self.settings.kept_of(stop - first)).view(len(self.layers), self.kv_heads)
        before, after = (torch.arange(*each, device=scores.device) for each in ((first,), (stop, sequence.length)))
        for layer_idx, of_layer, shares in zip(self.layers, scores, counts, strict=True):
            chosen = top_tokens(of_layer, shares[slice(*self._own)])
            kept = [torch.cat([before, tokens + first, after]) for tokens in chosen]
            keys, values = (rows.clone() for rows in sequence.rows(layer_idx, 0, sequence.length))
            sequence.close(layer_idx)
            sequence.admit(layer_idx, 0, keys, values, kept)

    @property
    def _own(self) -> tuple[int, int]:
        """Range of this rank's KV heads."""
        part = self.loaded.part
        return (0, self.kv_heads) if part is None else part.own_kv_heads

    def _of_all_heads(self, scores: torch.Tensor) -> torch.Tensor:
        """Gather a group's scores (own heads, tokens) to (kv_heads, tokens), bitwise equal on all ranks."""
        if (tp_group := self.loaded.tp_group) is None:
            return scores
        whole = scores.new_zeros(self.kv_heads, scores.shape[1])
        whole[slice(*self._own)] = scores
        return tp_group.all_reduce(whole)

    def _scores(self, layer: SliceLayer, window: Range) -> torch.Tensor:
        """Score the tokens before the window (this rank's heads, tokens)."""
        start, stop = window
        first, last = self._own
        keys, _ = layer.rows(0, stop)
        if not self.settings.rule.observes:
            return recency_scores(start, last - first, keys.device)
        observed = layer.observed
        if observed is None or layer.params is None or observed.shape[2] != stop - start:
            raise ValueError(f"layer {layer.layer_idx} has not observed tokens {start} to {stop}")
        return window_scores(observed, keys, layer.params, start=start)


def size_of(loaded: LoadedModel, sequence: SequenceKV, method: str) -> RetainedSize:
    """Return how much a compressed sequence keeps of its prompt, over all ranks of the tensor-parallel group."""
    compressed = [sequence.counts(layer_idx) for layer_idx in sequence.ragged]
    kv_bytes = sum(
        sum(sequence.counts(layer_idx)) * (shape.key_dim + shape.value_dim) * loaded.dtype.itemsize
        for layer_idx, shape in enumerate(sequence.shapes)
        if shape.elements
    )
    totals = [sum(map(sum, compressed)), sum(map(len, compressed)), kv_bytes]
    if loaded.tp_group is not None and loaded.part is not None:
        totals = loaded.tp_group.total([each * loaded.part.stores for each in totals], loaded.device)
    tokens, heads, kv_bytes = totals
    return RetainedSize(method, tokens / max(1, heads), kv_bytes)


def open_compression(settings: CompressSettings, loaded: LoadedModel, instruction: Sequence[int] = ()) -> Compression:
    """Prepare a method for a model; `instruction` are tokens that ask it to repeat a text before them.

    Raises `ConfigError` if the model does not keep keys and values per head, or the profile is for another model.
    """
    shape, name = loaded.shape, f"compress.method = {settings.method!r}: {loaded.shape.architecture}"
    if shape.has_states:
        raise ConfigError(
            f"{name} has recurrent layers, whose states cannot be compressed by tokens; leave [compress] out for this "
            f"model"
        )
    if not loaded.attends_in_parts or shape.has_latents:
        why = shape.why_whole or "its own attention runs over the whole cache, such as attention with ALiBi"
        why = "its heads share the latents that it caches" if shape.has_latents else why
        raise ConfigError(f"{name} cannot be compressed per head: {why}; leave [compress] out for this model")
    layers = compressed_layers(shape)
    if not layers:
        raise ConfigError(
            f"{name} has no layer that sees all tokens: windows and chunks already limit what is kept; leave "
            f"[compress] out"
        )
    heads = {shape.layers[idx].num_kv_heads for idx in layers}
    sizes = {shape.layers[idx].key_dim + shape.layers[idx].value_dim for idx in layers}
    shares_over_layers = settings.rule.weigh is not None or settings.rule.repeats
    if len(heads) > 1 or (shares_over_layers and len(sizes) > 1):
        raise ConfigError(
            f"{name} has layers of {' and '.join(map(str, sorted(heads)))} KV heads of {sorted(sizes)} elements, but "
            f"the budget is distributed over heads of one size; choose method = 'snapkv' or leave [compress] out"
        )
    part = loaded.part
    if part is not None and part.kv_heads % part.size:
        raise ConfigError(
            f"{name} has {part.kv_heads} KV heads, so the {part.size} ranks of a tensor-parallel group share heads, "
            f"each with only some of the queries needed; choose parallel.tensor_parallel <= {part.kv_heads}, or leave "
            f"[compress] out"
        )
    kv_heads = heads.pop() if part is None else part.kv_heads
    profile = None
    if settings.profile is not None:
        window = settings.window
        # Only the proportions of counts beyond the window matter: any budget above the window gives the same shares.
        profile = read_profile(Path(settings.profile), budget=2 * window, kv_heads=kv_heads, window=window)
        check_profile(f"compress.profile = {settings.profile!r}", profile, loaded, len(layers), kv_heads)
    return Compression(settings, loaded, layers, kv_heads, profile, tuple(instruction))


def check_profile(name: str, profile: HeadProfile, loaded: LoadedModel, layers: int, kv_heads: int) -> None:
    """Raise a `ConfigError` if a profile was made for another model; `name` is the setting and its value."""
    own_layers, own_heads = profile.counts.shape
    if (own_layers, own_heads) != (layers, kv_heads):
        raise ConfigError(
            f"{name} is for {own_layers} layers of {own_heads} KV heads, but {loaded.shape.architecture} here has "
            f"{layers} of {kv_heads}; create one with kvr search JOB --heads"
        )
    if profile.model and profile.model != loaded.fingerprint:
        raise ConfigError(
            f"{name} is for another model ({profile.source}) than {loaded.name}; create one with kvr search JOB --heads"
        )
