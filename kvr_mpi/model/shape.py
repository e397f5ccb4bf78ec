"""Finds what a model caches per layer and token, on the ``meta`` device, before weights are read."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import DocumentError, ModelError
from kvr_mpi.model.masks import FULL, MaskRequest, Visibility, request_mask

if TYPE_CHECKING:
    import torch

# Name of the probe's attention; chains use `attention_hook.ATTENTION`.
PROBE_ATTENTION = "kvr_probe"
# Types of models of texts and images that are no causal LMs, and whose language model is one: it alone is loaded.
TEXTS_AND_IMAGES = ("exaone4_5", "internvl", "lfm2_vl", "llava", "mistral3")
# While it builds a model, transformers patches itself and sets torch's default dtype for the whole process. Two threads
# would restore each other's changes, and some would stay (such as untied weights).
BUILDING = threading.Lock()
# Names of a model's cache argument.
CACHE_ARGUMENTS = ("past_key_values", "cache_params")
# The method of transformers' attention modules that expands cached latents to keys and values (DeepSeek V2 and V3).
EXPAND = "expand_kv"
# Names of the sizes of embedding tables, in which every token needs a row: the usual table, Gemma 3n's per-layer table
# (without rows for some image and audio tokens), and Marian's decoder table.
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size")
# Names of the longest context in configurations: most models, MPT, Whisper.
LONGEST = ("max_position_embeddings", "max_seq_len", "max_target_positions")
# Shapes found before, by class and configuration: a plan asks for the same one several times.
_SHAPES: dict[tuple[type, str], ModelShape] = {}


@dataclass(frozen=True, slots=True)
class StateShape:
    """A state of a recurrent or convolution layer, independent of the number of tokens.

    kind : ``conv`` or ``recurrent``.
    index : index among the layer's states of this kind.
    shape : includes the batch dimension of 1.
    dtype : ``None``: the model's dtype.
    """

    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches: keys and values per token, states, or nothing (all sizes 0).

    Keys and values may have different head sizes.

    expanded_dim : of a layer that caches latents (as one KV head), the head size of the values that attention expands
        them to; 0: the layer caches keys and values.
    """

    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    visibility: Visibility = FULL
    states: tuple[StateShape, ...] = ()
    expanded_dim: int = 0

    @functools.cached_property
    def out_dim(self) -> int:
        """Elements of the output of each query head."""
        return self.expanded_dim or self.value_dim

    @functools.cached_property
    def elements(self) -> int:
        """Elements of one token's keys and values."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model that planning and buffers need, without weights.

    layers : the layers of the model's cache.
    vocab_size : number of tokens in its vocabulary.
    max_tokens : longest context; None if the configuration has none.
    why_single : why chains of ranks cannot run it; None if they can, as far as is known without weights.
    why_whole : why its attention cannot be replaced; None if it can, as far as is known without weights.
    padding_id : token that the model skips when it counts positions; None if it skips none.
    counts_cache : it counts positions from the length of its cache, whatever `position_ids` are (Llama 4's attention
        temperature), so a row cannot hold several prompts or two slices.
    """

    architecture: str
    layers: tuple[LayerShape, ...]
    hidden_size: int
    vocab_size: int
    max_tokens: int | None
    dtype_bytes: int
    why_single: str | None = None
    why_whole: str | None = None
    padding_id: int | None = None
    counts_cache: bool = False

    @property
    def has_latents(self) -> bool:
        """Whether some layer caches latents, which its attention expands to the keys and values of heads."""
        return any(layer.expanded_dim for layer in self.layers)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return sum(layer.elements for layer in self.layers) * self.dtype_bytes

    @property
    def first_position(self) -> int:
        """Position of a prompt's first token; RoBERTa-like models start after the padding id."""
        return 0 if self.padding_id is None else self.padding_id + 1

    def sample_ids(self, tokens: int, step: int = 37, first: int = 11) -> list[int]:
        """Generate a pseudo-random prompt, the same on every rank."""
        ids = ((step * position + first) % self.vocab_size for position in range(tokens))
        return [(each + 1) % self.vocab_size if each == self.padding_id else each for each in ids]

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse token ids that the model does not have, or that would break its positions, by a `DocumentError`."""
        largest = max(ids, default=0)
        if largest >= self.vocab_size:
            raise DocumentError(
                f"the prompt contains token {largest}, and {self.architecture} has {self.vocab_size} tokens: the "
                f"tokenizer has more tokens than the model; remove that text, or use the model's own tokenizer"
            )
        if self.padding_id is not None and self.padding_id in ids:
            raise DocumentError(
                f"the prompt contains token {self.padding_id}, which {self.architecture} ignores as padding, so "
                f"positions after it are wrong where the prompt is cut; remove it from the text"
            )

    @property
    def has_states(self) -> bool:
        """Whether some layer has a state, which each rank receives from the rank before it."""
        return any(layer.states for layer in self.layers)


def language_config(config: Any) -> Any:
    """Return the configuration of the language model in a model of `TEXTS_AND_IMAGES`; others as they are."""
    if config.model_type not in TEXTS_AND_IMAGES:
        return config
    text = config.get_text_config(decoder=True)
    # What a folder says about the whole model.
    text.dtype = config.dtype if text.dtype is None else text.dtype
    for name in ("quantization_config", "tie_word_embeddings"):
        if (value := getattr(config, name, None)) is not None:
            setattr(text, name, value)
    return text


def meta_model(config: Any, dtype: torch.dtype) -> Any:
    """Build a model on the ``meta`` device, without weights or memory."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with BUILDING, torch.device("meta"), torch.inference_mode():
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    except Exception as error:  # models' code can raise any error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if config.get_text_config(decoder=True) is not config:
            reason += (
                f" (of models of texts and images that are no causal LMs, {', '.join(TEXTS_AND_IMAGES)} can be used)"
            )
        raise ModelError(f"transformers cannot build a causal LM of {type(config).__name__}: {reason}") from error


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Run a model on the ``meta`` device; code that reads values gets zeros."""
    import torch
    import torch.fx.experimental._config
    from torch.distributions import Distribution
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    asked = (aten.item.default, aten.is_nonzero.default, aten._local_scalar_dense.default)

    class Zeros(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in asked and args[0].is_meta:
                return False if args[0].dtype == torch.bool or func is aten.is_nonzero.default else 0
            if func is aten.where.default and args[0].is_meta:
                return list(aten.nonzero.default(args[0]).unbind(1))
            return func(*args, **(kwargs or {}))

    validates = Distribution._validate_args
    # Some models look up the tokens of each expert with nonzero; for shapes, assume all tokens.
    assume = torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    Distribution.set_default_validate_args(False)
    try:
        with torch.device("meta"), torch.inference_mode(), assume, Zeros():
            yield
    finally:
        Distribution.set_default_validate_args(validates)


def cache_argument(model: Any) -> str:
    """Return the name of a model's cache argument; raise `ModelError` if it does not support transformers' caches."""
    parameters = inspect.signature(model.forward).parameters
    for name in CACHE_ARGUMENTS:
        if name in parameters:
            return name
    raise ModelError(f"{type(model).__name__} takes no cache of transformers, so kvr-mpi cannot run it")


def logits_width(config: Any) -> int:
    """Return the number of logits of a model, which may be less than the number of tokens of its tokenizer."""
    text = config.get_text_config()
    return int(getattr(text, "decoder_vocab_size", None) or text.vocab_size)


def probe_shape(config: Any, dtype: torch.dtype) -> ModelShape:
    """Find what every layer of a model caches, from its configuration; `dtype` is the type of keys and values."""
    import torch

    return shape_of(meta_model(config, torch.bfloat16), dtype)


def shape_of(model: Any, dtype: torch.dtype) -> ModelShape:
    """Find what every layer caches by running one token on the ``meta`` device.

    This needs neither weights nor memory, so receives can be posted before any data exists. Raises `ModelError` if the
    model is not a causal decoder with a transformers cache.

    model : on ``meta`` in bfloat16, the only dtype in which all operations (also grouped experts) have a meta kernel.
    dtype : of keys and values.
    """
    key = type(model), model.config.to_json_string(use_diff=False)
    if key not in _SHAPES:
        _SHAPES[key] = _find_shape(model)
    return replace(_SHAPES[key], dtype_bytes=dtype.itemsize)


def _find_shape(model: Any) -> ModelShape:
    """Find a model's shape with one byte for each key and value."""
    architecture, text = type(model).__name__, model.config.get_text_config()
    cache, seen, expanded, why_whole = _probe(model)
    layers = [_layer_shape(layer, architecture) for layer in cache.layers]
    for idx, dim in expanded.items():
        if layers[idx].num_kv_heads == 1:
            layers[idx] = replace(layers[idx], expanded_dim=dim)
    if not any(layer.elements or layer.states for layer in layers):
        raise ModelError(
            f"{architecture} fills no cache of keys and values or states: it is an encoder, or keeps its state "
            "elsewhere; kvr-mpi runs only causal decoders"
        )
    if any(visibility.size == 1 for visibility in seen.values()):
        raise ModelError(
            f"{architecture}: it has a window of 1 token, with which transformers itself decodes other tokens than "
            "it computes for a whole prompt; expected a window of at least 2"
        )
    padding_id = _padding_id(model)
    longest = next((value for name in LONGEST if isinstance(value := getattr(text, name, None), int)), None)
    return ModelShape(
        architecture=architecture,
        layers=tuple(replace(layer, visibility=seen.get(idx, FULL)) for idx, layer in enumerate(layers)),
        hidden_size=text.hidden_size,
        vocab_size=min(size for name in VOCABULARIES if (size := getattr(text, name, None))),
        max_tokens=longest if longest is None or padding_id is None else longest - padding_id - 1,
        dtype_bytes=1,
        why_single=_why_single(model, cache.layers, seen),
        why_whole=why_whole,
        padding_id=padding_id,
        counts_cache=bool(getattr(text, "attn_temperature_tuning", False)),
    )


def _probe(model: Any) -> tuple[Any, dict[int, Visibility], dict[int, int], str | None]:
    """Run one token on ``meta``; return the filled cache, the keys that each layer sees, and why these are unknown.

    Before the reason: of layers that may cache latents, the head size of their expanded values.

    They come from the masks that layers request of our attention. Models without a pluggable attention function are
    checked when they run (``attention_hook``).
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

    seen: dict[int, Visibility] = {}
    expanded: dict[int, int] = {}
    chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(attention_mask, MaskRequest):
            raise ModelError("its attention receives no mask from transformers")
        if isinstance(layer_idx, int):  # chunked masks have no values on ``meta``, and are recognised by their size
            is_chunked = chunk is not None and attention_mask.is_plain and attention_mask.local_size == chunk
            seen[layer_idx] = Visibility(chunk=chunk) if is_chunked else attention_mask.visibility()
            if hasattr(module, EXPAND) and key.shape[1] > 1:
                expanded[layer_idx] = value.shape[3]
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    ways = [PROBE_ATTENTION] * model._supports_attention_backend + ["sdpa"] * model._supports_sdpa + ["eager"]
    name, ids = cache_argument(model), torch.zeros(1, 1, dtype=torch.long, device="meta")
    failures: dict[str, str] = {}
    with BUILDING:  # another thread would register its probe under the same name
        AttentionInterface.register(PROBE_ATTENTION, attention)
        AttentionMaskInterface.register(PROBE_ATTENTION, request_mask)
        # Some models read a mask's values, whether given or built by them; each model works with some combination.
        for way, given in itertools.product(ways, ({}, {"attention_mask": torch.ones_like(ids)})):
            with on_meta():
                model.set_attn_implementation(way)
                try:
                    cache = DynamicCache(config=model.config)
                    model(ids, **{name: cache}, **given, use_cache=True)
                except Exception as error:  # models' code can raise any error
                    kind = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
                    failures.setdefault(way, f"{kind}{error}")
                else:
                    is_known = way == PROBE_ATTENTION
                    return cache, *((seen, expanded) if is_known else ({}, {})), failures.get(PROBE_ATTENTION)
    reason = failures.get("sdpa", failures["eager"])
    raise ModelError(f"{type(model).__name__} cannot be run on one token with a cache of transformers' ({reason})")


def _why_single(model: Any, layers: Sequence[Any], seen: Mapping[int, Visibility]) -> str | None:
    """Return why a chain would differ from plain transformers, whose cache may drop or select tokens; else None."""
    text = model.config.get_text_config()
    longest, kept = getattr(text, "max_position_embeddings", None), getattr(text, "keep_window_size", None)
    if kept is not None and not (longest and kept >= longest):
        return f"it chooses which {kept} tokens of a call are attended to"
    for idx, layer in enumerate(layers):
        if getattr(layer, "indexer_keys", None) is not None:
            return (
                "an indexer chooses which tokens are attended to, and transformers' own code does not continue "
                "exactly from its cache with several tokens"
            )
        if not getattr(layer, "is_sliding", False) or (longest and layer.sliding_window >= longest):  # keeps all
            continue
        if not model._supports_attention_backend or (idx in seen and seen[idx].size != layer.sliding_window):
            told = seen.get(idx, "other tokens")
            return (
                f"transformers' cache forgets all but a window of {layer.sliding_window} tokens, but its mask lets "
                f"a layer see {told}: decoding differs from computing the whole prompt"
            )
    return None


def _padding_id(model: Any) -> int | None:
    """Return the token that RoBERTa-like models skip when they count positions; None for other models."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(module.padding_idx, int):
            return int(module.padding_idx)
    return None


def _layer_shape(layer: Any, architecture: str) -> LayerShape:
    """Read what a layer of transformers' cache holds after the probe."""
    import torch

    known = {"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "LinearAttentionLayer", "DummyLayer"}
    known |= {"LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}
    if type(layer).__name__ not in known:
        raise ModelError(
            f"{architecture} keeps a cache of its own in some layers ({type(layer).__name__}), which kvr-mpi does "
            "not know"
        )
    states = tuple(
        StateShape(kind, index, tuple(state.shape), state.dtype if state.dtype == torch.float32 else None)
        for kind, held in (
            ("conv", getattr(layer, "conv_states", None)),
            ("recurrent", getattr(layer, "recurrent_states", None)),
        )
        for index, state in (held or {}).items()
        if isinstance(state, torch.Tensor)
    )
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.ndim == values.ndim == 4:
        if keys.shape[1] != values.shape[1]:
            raise ModelError(
                f"{architecture}: {keys.shape[1]} heads of keys and {values.shape[1]} of values in one layer"
            )
        return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], states=states)
    return LayerShape(states=states)
