"""A compression method applied to prompts: as each layer completes, choose the tokens that its KV heads keep.

The last rank of a prefill has all keys of a layer, and the window's queries. It drops the tokens that are not kept
before it computes the next layer, and decoding continues from the retained tokens. Every head also keeps the tokens
after the window, in addition to the budget: after a document, these are the question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvr_mpi.compress.budget import Budget, TokenCounts
from kvr_mpi.compress.head_profile import HeadProfile, read_profile
from kvr_mpi.compress.planned_drop import PlannedDrop, compressed_layers, planned_drop
from kvr_mpi.compress.scores import recency_scores, top_tokens, window_scores
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.errors import ConfigError, counted
from kvr_mpi.kv.layer import Retain, SliceLayer
from kvr_mpi.kv.route import Range
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.tensor_parallel import Part
from kvr_mpi.model.tp_group import TensorParallelGroup


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
    kv_heads : KV heads of a layer, over all ranks.
    part, tp_group : this rank's heads, and the ranks that have the other heads; None: this rank has all heads.
    """

    settings: CompressSettings
    layers: tuple[int, ...]
    kv_heads: int
    profile: HeadProfile | None = None
    part: Part | None = None
    tp_group: TensorParallelGroup | None = None

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
        """Return a prompt's observation window: heads choose among the tokens before it, and keep all tokens after it.

        Parameters
        ----------
        tokens : int
            Of the prompt.
        text : (int, int)
            Range of the document's text in the prompt.

        Returns
        -------
        (int, int) or None
            The window's range, empty if the method does not observe; None if the whole prompt is kept.
        """
        stop = text[1] if self.settings.observes == "document" else tokens
        if self.settings.kept_of(stop) >= stop:
            return None
        return stop - self.settings.observed_tokens, stop

    def planned_drop(self, loaded: LoadedModel, tokens: int, text: Range) -> PlannedDrop | None:
        """Predict what this rank drops of a prompt, and the memory for choosing; None if all of it is kept."""
        if (window := self.window_of(tokens, text)) is None:
            return None
        heads = loaded.model.config.get_text_config().num_attention_heads
        group_ranks = 1 if self.part is None else self.part.size
        return planned_drop(self.settings, loaded.shape, heads, tokens, window[1], group_ranks)

    def retain(self, tokens: int, text: Range) -> Retain | None:
        """Return what heads keep of a prompt, chosen layer by layer; None if all of it is kept.

        Parameters
        ----------
        tokens : int
            Of the prompt.
        text : (int, int)
            Range of the document's text in the prompt.
        """
        if (window := self.window_of(tokens, text)) is None:
            return None
        each = self.settings.kept_of(window[1]) - self.settings.observed_tokens
        budget = Budget(each, window[0], len(self.layers), self.kv_heads)
        counts = self.settings.rule.share_out(budget, self.settings.window, self.profile)
        observed = window if self.settings.rule.observes else None
        return Retain(observed, partial(self._choose, window, each, counts))

    def _choose(
        self, window: Range, each: int, counts: TokenCounts, layer: SliceLayer
    ) -> Sequence[torch.Tensor] | None:
        """Choose the tokens that each KV head of a layer keeps: candidates, the window and what follows it."""
        if layer.layer_idx not in self.layers:
            return None
        scores = self._scores(layer, window)
        shares = torch.from_numpy(counts[self.layers.index(layer.layer_idx)]).to(scores.device)
        if self.settings.rule.compete is not None:
            shares = self.settings.rule.compete(self._of_all_heads(scores), each)
        always = torch.arange(window[0], layer.length, device=scores.device)
        return [torch.cat([chosen, always]) for chosen in top_tokens(scores, shares[slice(*self._own)])]

    @property
    def _own(self) -> tuple[int, int]:
        """Range of this rank's KV heads."""
        return (0, self.kv_heads) if self.part is None else self.part.own_kv_heads

    def _of_all_heads(self, scores: torch.Tensor) -> torch.Tensor:
        """Gather a group's scores (own heads, tokens) to (kv_heads, tokens), bitwise equal on all ranks."""
        if self.tp_group is None:
            return scores
        whole = scores.new_zeros(self.kv_heads, scores.shape[1])
        whole[slice(*self._own)] = scores
        return self.tp_group.all_reduce(whole)

    def _scores(self, layer: SliceLayer, window: Range) -> torch.Tensor:
        """Score the tokens before the window (this rank's heads, tokens)."""
        start, stop = window
        first, last = self._own
        keys, _ = layer.rows(0, stop)
        if not self.settings.rule.observes:
            return recency_scores(start, last - first, keys.device)
        observed = layer.observed
        if observed is None or observed.query.shape[2] != stop - start:
            raise ValueError(f"layer {layer.layer_idx} has not observed tokens {start} to {stop}")
        return window_scores(observed.query, keys, observed.params, start=start)


def size_of(loaded: LoadedModel, cache: Any, method: str) -> RetainedSize:
    """Return how much a compressed cache keeps of its prompt, over all ranks of the tensor-parallel group."""
    compressed = [layer.head_counts for layer in cache.layers if layer.is_ragged]
    kv_bytes = sum(
        sum(layer.head_counts) * (layer.shape.key_dim + layer.shape.value_dim) * cache.dtype.itemsize
        for layer in cache.layers
        if layer.shape.elements
    )
    totals = [sum(map(sum, compressed)), sum(map(len, compressed)), kv_bytes]
    if loaded.tp_group is not None and loaded.part is not None:
        totals = loaded.tp_group.total([each * loaded.part.stores for each in totals], cache.device)
    tokens, heads, kv_bytes = totals
    return RetainedSize(method, tokens / max(1, heads), kv_bytes)


def open_compression(settings: CompressSettings, loaded: LoadedModel) -> Compression:
    """Prepare a method for a model.

    Raises
    ------
    ConfigError
        If the model does not keep keys and values per head, or the profile is of another model.
    """
    shape, name = loaded.shape, f"compress.method = {settings.method!r}: {loaded.shape.architecture}"
    if shape.has_states:
        raise ConfigError(
            f"{name} has recurrent layers, whose states cannot be compressed by tokens; leave [compress] out for this "
            f"model"
        )
    if not loaded.attends_in_parts:
        why = shape.why_whole or (
            "its own attention runs over the whole cache, such as latent attention or attention with ALiBi"
        )
        raise ConfigError(f"{name} cannot be compressed per head: {why}; leave [compress] out for this model")
    layers = compressed_layers(shape)
    if not layers:
        raise ConfigError(
            f"{name} has no layer that sees all tokens: windows and chunks already limit what is kept; leave "
            f"[compress] out"
        )
    heads = {shape.layers[idx].num_kv_heads for idx in layers}
    sizes = {shape.layers[idx].key_dim + shape.layers[idx].value_dim for idx in layers}
    if len(heads) > 1 or (settings.rule.over_layers and len(sizes) > 1):
        raise ConfigError(
            f"{name} has layers of {' and '.join(map(str, sorted(heads)))} KV heads of {sorted(sizes)} elements, but "
            f"the budget is distributed over heads of one size; choose method = 'snapkv' or leave [compress] out"
        )
    part = loaded.part
    if part is not None and not part.is_alone_with_heads:
        raise ConfigError(
            f"{name} has {part.kv_heads} KV heads, so the {part.size} ranks of a tensor-parallel group share heads, "
            f"each with only "
            f"some of the queries needed; choose parallel.tensor_parallel <= {part.kv_heads}, or leave [compress] out"
        )
    kv_heads = heads.pop() if part is None else part.kv_heads
    profile = _profile_for(settings, loaded, len(layers), kv_heads)
    return Compression(settings, layers, kv_heads, profile, part, loaded.tp_group)


def _profile_for(settings: CompressSettings, loaded: LoadedModel, layers: int, kv_heads: int) -> HeadProfile | None:
    """Read the method's profile, and check that it is of this model."""
    if settings.profile is None:
        return None
    window = settings.window
    # Only the proportions of counts beyond the window matter: any budget above the window gives the same shares.
    profile = read_profile(Path(settings.profile), budget=2 * window, kv_heads=kv_heads, window=window)
    check_profile(f"compress.profile = {settings.profile!r}", profile, loaded, layers, kv_heads)
    return profile


def check_profile(name: str, profile: HeadProfile, loaded: LoadedModel, layers: int, kv_heads: int) -> None:
    """Check that a profile is of this model.

    Parameters
    ----------
    name : str
        The setting and its value.

    Raises
    ------
    ConfigError
        If layers, heads or the model it was measured on differ.
    """
    if (profile.layers, profile.kv_heads) != (layers, kv_heads):
        raise ConfigError(
            f"{name} is for {profile.layers} layers of {profile.kv_heads} KV heads, but {loaded.shape.architecture} "
            f"here has {layers} of {kv_heads}; create one with kvr search JOB --heads"
        )
    if profile.model and profile.model != loaded.fingerprint:
        raise ConfigError(
            f"{name} is for another model ({profile.source}) than {loaded.name}; create one with kvr search JOB --heads"
        )
