"""Checks a model's files for errors that transformers accepts although they give wrong results."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import ModelError

if TYPE_CHECKING:
    import torch

# A number in a parameter's name is the index of its layer or expert.
_NUMBER = re.compile(r"\.\d+\.")


def check_config(config: Any) -> None:
    """Refuse a contradictory configuration with a `ModelError` that names all contradictions."""
    found = list(_contradictions(config.get_text_config()))
    if found:
        raise ModelError(f"config.json: {'; '.join(found)}")


def _contradictions(text: Any) -> Iterator[str]:
    for name in ("num_hidden_layers", "max_position_embeddings"):
        if isinstance(number := getattr(text, name, None), int) and number < 1:
            yield f"{name} = {number}, expected at least 1"
    heads, kv_heads = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        yield f"num_attention_heads = {heads} and num_key_value_heads = {kv_heads}, expected a multiple of the latter"
    for name in ("sliding_window", "attention_chunk_size"):
        size = getattr(text, name, None)
        if isinstance(size, int) and size < 2 and getattr(text, "use_sliding_window", True):
            yield f"{name} = {size}, expected at least 2 or none"
    vocab = getattr(text, "vocab_size", None)
    ends = getattr(text, "eos_token_id", None)
    for token in ends if isinstance(ends, (list, tuple)) else [ends]:
        if isinstance(token, int) and isinstance(vocab, int) and token >= vocab:
            yield f"eos_token_id = {token}, expected one of the {vocab} tokens: no answer would ever end"
    parameters = getattr(text, "rope_parameters", None) or {}
    for each in [parameters, *(one for one in parameters.values() if isinstance(one, dict))]:
        yield from _rope_contradictions(each, getattr(text, "max_position_embeddings", None))


def _rope_contradictions(rope: Mapping[str, Any], longest: int | None) -> Iterator[str]:
    def number(name: str) -> float | None:
        value = rope.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    kind, theta, factor = str(rope.get("rope_type")), number("rope_theta"), number("factor")
    if theta is not None and not (theta > 0 and math.isfinite(theta)):
        yield f"rope_theta = {theta}, expected a positive number"
    if factor is not None and not 1 <= factor < math.inf:
        yield f"rope factor = {factor} of type {kind}, expected at least 1"
    original = number("original_max_position_embeddings")
    if original is not None and (original < 1 or (longest is not None and original > longest)):
        yield (
            f"rope original_max_position_embeddings = {original:.0f}, expected between 1 and max_position_embeddings "
            f"({longest})"
        )
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if low is not None and high is not None and low >= high:
        yield f"rope low_freq_factor = {low} and high_freq_factor = {high}, expected low_freq_factor to be lower"
    fast, slow = number("beta_fast"), number("beta_slow")
    if fast is not None and slow is not None and fast < slow:
        yield f"rope beta_fast = {fast} and beta_slow = {slow}, expected beta_fast not to be lower"


def check_loaded(model: Any, info: Mapping[str, Iterable[Any]]) -> None:
    """Refuse a model with missing, unused or newly initialised weights, or invalid rotary frequencies (`ModelError`).

    `info` is what ``from_pretrained(output_loading_info=True)`` returns.
    """
    missing = sorted(map(str, info.get("missing_keys", ())))
    if missing:
        raise ModelError(
            f"{len(missing)} weights that config.json asks for are not in the files ({_some(missing)}), and would be "
            f"random: the configuration is for another model, or a file is missing"
        )
    ours = {_NUMBER.sub(".#.", name) for name, _ in model.named_parameters()}
    left = sorted(key for key in map(str, info.get("unexpected_keys", ())) if _NUMBER.sub(".#.", key) in ours)
    if left:
        raise ModelError(
            f"{len(left)} weights of layers that config.json does not ask for are in the files ({_some(left)}): the "
            f"configuration names too few layers"
        )
    for name, values in model.named_buffers():
        if name.endswith("inv_freq") and not bool(values.isfinite().all()):
            raise ModelError(f"the rotary frequencies {name} are not finite: rope parameters in config.json are wrong")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse bfloat16 on GPUs that emulate it slowly; the `ModelError` names the dtypes to choose from."""
    import torch

    if device.type != "cuda" or dtype != torch.bfloat16:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ModelError(
            f"model.dtype = 'bfloat16' (the model's own, if it says 'auto'): {torch.cuda.get_device_name(device)} has "
            f"compute capability {major}.{minor}, and bfloat16 needs 8.0; use 'float16' or 'float32'"
        )
