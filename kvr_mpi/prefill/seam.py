"""How a model's attention comes to our cache, without touching the model.

Two ways, both through public doors: architectures that take any attention function are given ours, and it finds
the cache among the keyword arguments they pass on; those that call ``scaled_dot_product_attention`` themselves
(Falcon, StableLM, ...) are run under a torch function mode that answers that one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from kvr_mpi.errors import ModelError
from kvr_mpi.prefill.attention import Scores
from kvr_mpi.prefill.cache import SliceCache, SliceLayer
from kvr_mpi.prefill.lastrow import LastRow
from kvr_mpi.prefill.weights import use_packed

if TYPE_CHECKING:
    from kvr_mpi.prefill.packed import PackedCache, PackedLayer

ATTENTION = "kvr"
CHAIN_LAYERS = {"full_attention", "sliding_attention"}


class _SdpaSeam(TorchFunctionMode):
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
            raise ModelError("the model adds its own mask or bias to attention; use strategy = 'single' for it")
        scores = Scores(query.shape[-1] ** -0.5 if scale is None else scale)
        layer = self.cache.attending
        out = layer.attend(query, call["key"], call["value"], scores, None, None)
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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention functions do, through the cache that came in the model's arguments."""
    if kv_chain is None:
        raise ModelError(
            "the model does not pass keyword arguments on to its attention; use strategy = 'single' for it"
        )
    layer = kv_chain.attending
    if getattr(module, "layer_idx", layer.layer_idx) != layer.layer_idx:
        raise ModelError("the model shares keys between layers; use strategy = 'single' for it")
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap)
    out = layer.attend(query, key, value, scores, sliding_window, s_aux)
    _leave_to_last(layer)
    return out.transpose(1, 2), None


def _leave_to_last(layer: SliceLayer | PackedLayer) -> None:
    """Let what follows the last layer's attention be computed for the last token only."""
    if not isinstance(layer, SliceLayer):  # of a packed row several tokens are read
        return
    cache = layer.cache
    if cache.cuts_last_layer and layer.fresh > 1 and cache.reads_only_last(layer.layer_idx):
        cache.tail.enter_context(LastRow(layer.fresh))


def prepare_model(model: Any, *, chain: bool) -> None:
    """Choose the model's attention and weights: ours for a chain, transformers' own otherwise.

    Raises
    ------
    ModelError
        If the architecture offers no seam for a chain.
    """
    use_packed(model, chain)
    if not chain:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        return
    layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    strange = layer_types - CHAIN_LAYERS
    if strange or not (model._supports_attention_backend or model._supports_sdpa):
        why = f"has {', '.join(sorted(strange))} layers" if strange else "only has attention of its own"
        raise ModelError(f"{type(model).__name__} {why}, which a chain cannot cut; use strategy = 'single' for it")
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
    model.set_attn_implementation(ATTENTION if model._supports_attention_backend else "sdpa")


def run_model(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Run tokens (1, tokens) through the model behind what its cache holds.

    Returns
    -------
    torch.Tensor
        Logits of the last token (vocab_size,), float32.
    """
    options: dict[str, Any] = {"input_ids": ids, "past_key_values": cache, "use_cache": True}
    if isinstance(cache, SliceCache) and cache.prefilling and len(cache.exchange.owned) > 1:
        positions = [torch.arange(first, last, device=ids.device) for first, last in cache.exchange.owned]
        options["position_ids"] = torch.cat(positions).unsqueeze(0)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    if not isinstance(cache, SliceCache):
        logits = model(**options).logits
    elif model.config._attn_implementation == ATTENTION:
        with cache.tail:
            logits = model(**options, kv_chain=cache).logits
    else:  # a mask of one element: the model makes none of its own, and the seam ignores it
        mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=ids.device)
        with cache.tail, _SdpaSeam(cache):
            logits = model(**options, attention_mask=mask).logits
    last: torch.Tensor = logits[0, -1].float()
    return last


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
    if model.config._attn_implementation == ATTENTION:
        logits = model(**options, kv_chain=cache).logits[0]
    else:  # see `run_model`
        mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=ids.device)
        with _SdpaSeam(cache):
            logits = model(**options, attention_mask=mask).logits[0]
    rows: torch.Tensor = (logits if "logits_to_keep" in options else logits[keep]).float()
    return rows
