"""How a model's attention comes to our cache, without touching the model.

Two fast ways, both through public doors: architectures that take any attention function are given ours, and it finds
the cache among the keyword arguments they pass on; those that call ``scaled_dot_product_attention`` themselves
(Falcon, StableLM, ...) are run under a torch function mode that answers that one call. Where neither will do, the
model's own attention runs over what the cache returns (``whole``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.attention import AttentionParams
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.layer import SliceLayer
from kvr_mpi.kv.packed_row import PackedCache, PackedLayer
from kvr_mpi.model.last_token import LastRow
from kvr_mpi.model.masks import MaskRequest, Visibility, request_mask
from kvr_mpi.model.prepacked import use_prepacked
from kvr_mpi.model.rope import embed_whole_lengths, whole_lengths
from kvr_mpi.model.shape import cache_argument

ATTENTION = "kvr"


class _SdpaHook(TorchFunctionMode):
    """Send scaled_dot_product_attention calls to the cache, for models that call it themselves (Falcon, ...)."""

    def __init__(self, cache: SliceCache | PackedCache) -> None:
        super().__init__()
        self.cache = cache

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        call = _SDPA_ARGUMENTS.bind(*args, **(kwargs or {})).arguments
        mask, query, scale = call.get("attn_mask"), call["query"], call.get("scale")
        if mask is not None and mask.numel() != 1:
            raise ModelError("it adds its own mask or bias to attention")
        params = AttentionParams(query.shape[-1] ** -0.5 if scale is None else scale)
        layer = self.cache.attending
        out = layer.attend(query, call["key"], call["value"], params, None)
        _leave_to_last(layer)
        return out


def _sdpa(  # noqa: D103  (only its signature is used: the builtin has none)
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None: ...


_SDPA_ARGUMENTS = inspect.signature(_sdpa)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kv_chain: SliceCache | PackedCache | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention functions do, through the cache that came in the model's arguments."""
    if kv_chain is None:
        raise ModelError("it does not pass keyword arguments on to its attention")
    layer = kv_chain.attending
    if getattr(module, "layer_idx", layer.layer_idx) != layer.layer_idx:
        raise ModelError("it shares keys between layers")
    if position_bias is not None:
        raise ModelError("it adds a bias to attention")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ModelError("its attention is not causal")
    if kv_chain.prefilling and not query.is_meta:  # there masks have no values
        _check_mask(attention_mask, layer.shape.visibility, sliding_window)
    params = AttentionParams(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap)
    out = layer.attend(query, key, value, params, s_aux)
    _leave_to_last(layer)
    return out.transpose(1, 2), None


def _check_mask(mask: Any, announced: Visibility, told_window: int | None) -> None:
    """Make sure that what the model asks of its mask is what this layer does, and what its attention is told."""
    if not isinstance(mask, MaskRequest):
        raise ModelError("its attention is given no mask of transformers'")
    asked = mask.visibility()
    if asked != announced:
        raise ModelError(f"a layer's mask lets it see {asked}, and {announced} were found before")
    # A window as long as the context lets every token see all.
    if told_window is not None and told_window != asked.window and (asked.size or told_window < mask.longest):
        raise ModelError(f"its attention is told a window of {told_window} tokens, and its mask lets it see {asked}")


def _leave_to_last(layer: SliceLayer | PackedLayer) -> None:
    """Let what follows the last layer's attention be computed for the last token only."""
    if not isinstance(layer, SliceLayer):  # of a packed row several tokens are read
        return
    cache = layer.cache
    if cache.cuts_last_layer and layer.fresh > 1 and cache.reads_only_last(layer.layer_idx):
        cache.tail.enter_context(LastRow(layer.fresh))


def prepare_model(model: Any, *, chain: bool, in_parts: bool = True) -> None:
    """Choose the model's attention and weights: ours for a chain, transformers' own otherwise.

    Parameters
    ----------
    in_parts : bool
        Of a chain: take attention over. Otherwise the model's own runs over the whole prefix.

    Raises
    ------
    ModelError
        If attention cannot be taken over.
    """
    use_prepacked(model, chain)
    embed_whole_lengths(model)
    if not (chain and in_parts):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        return
    if not model._supports_attention_backend:
        _check_own_calls(model)
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, request_mask)
    model.set_attn_implementation(ATTENTION if model._supports_attention_backend else "sdpa")


def _check_own_calls(model: Any) -> None:
    """Refuse to answer a model's own attention calls where masks could hide in them."""
    if not model._supports_sdpa:
        raise ModelError("it only has attention of its own")
    config = model.config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size", "attention_window_size"):
        if getattr(config, name, None) is not None:
            raise ModelError(f"it calls attention itself, with masks of its own ({name})")


def run_model(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Run tokens (1, tokens) through the model behind what its cache holds.

    Returns
    -------
    torch.Tensor
        Logits of the last token (vocab_size,), float32.
    """
    options: dict[str, Any] = {"input_ids": ids, cache_argument(model): cache, "use_cache": True}
    if isinstance(cache, SliceCache) and cache.prefilling and len(cache.exchange.owned) > 1:
        positions = [torch.arange(first, last, device=ids.device) for first, last in cache.exchange.owned]
        options["position_ids"] = torch.cat(positions).unsqueeze(0) + cache.first_position
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    with whole_lengths([(ids.shape[1], _length_behind(ids.shape[1], cache))]):
        logits = _run(model, options, cache)
    last: torch.Tensor = logits[0, -1].float()
    return last


def _run(model: Any, options: dict[str, Any], cache: Any) -> torch.Tensor:
    """Run the model with its attention as `prepare_model` has chosen it; logits (1, tokens, vocab_size)."""
    if not isinstance(cache, (SliceCache, PackedCache)) or not cache.in_parts:
        logits = model(**options).logits
    elif model.config._attn_implementation == ATTENTION:
        with cache.tail:
            logits = model(**options, kv_chain=cache).logits
    else:  # a mask of one element: the model makes none of its own, and the seam ignores it
        mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=options["input_ids"].device)
        with cache.tail, _SdpaHook(cache):
            logits = model(**options, attention_mask=mask).logits
    found: torch.Tensor = logits
    return found


def _length_behind(tokens: int, cache: Any) -> int:
    """Length of a prompt with these tokens, and with those of it that ranks behind this one have."""
    if isinstance(cache, SliceCache) and cache.prefilling:
        return cache.prompt_tokens
    try:
        return tokens + int(cache.get_seq_length())
    except ValueError:  # a cache of states only: nothing in such a model depends on its length
        return tokens


def run_packed(
    model: Any, ids: torch.Tensor, positions: torch.Tensor, cache: PackedCache, keep: torch.Tensor
) -> torch.Tensor:
    """Run tokens (1, tokens) of several documents through the model, each behind what its own cache holds.

    Parameters
    ----------
    positions : torch.Tensor
        Of each token in its document (1, tokens).
    keep : torch.Tensor
        Which tokens' logits are read (rows,).

    Returns
    -------
    torch.Tensor
        Their logits (rows, vocab_size), float32.
    """
    options: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "past_key_values": cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = keep
    with whole_lengths(cache.whole_lengths()):
        logits = _run(model, options, cache)[0]
    rows: torch.Tensor = (logits if "logits_to_keep" in options else logits[keep]).float()
    return rows
