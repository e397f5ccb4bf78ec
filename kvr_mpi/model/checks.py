"""Checks a model's files for errors that transformers accepts although they give wrong results."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import ModelError
from kvr_mpi.model.settings import SIMILAR, unread_settings
from kvr_mpi.model.weights import few

if TYPE_CHECKING:
    import torch

GENERATION = "generation_config.json"
# Settings with the number of additional layers that predict tokens after the next one.
PREDICTION_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers", "mtp_num_hidden_layers")
# Tensors of public models on which no logits of a language model depend.
_HARMLESS = re.compile(
    "|".join(
        (
            r"(^|\.)(original_)?inv_freq$|(cos|sin)_cached$|position_ids$|num_batches_tracked$",  # buffers
            r"(attn|attention)\.(masked_)?bias$",  # causal masks of GPT-2 and GPT-NeoX
            r"\.(q|k|v|prob)_scale$",  # of keys and values in FP8; here they have the model's dtype
            r"(^|\.)(mtp|nextn|eagle)\w*\.",  # heads that predict tokens after the next one
            r"(^|\.)(score|classifier|qa_outputs|v_head|value_head|reward_head|pooler|seq_relationship)\.",
            r"(^|\.)(vision|visual|image|video|audio|speech|multi_modal|mm_|talker|token2wav|code2wav|encoder)\w*\.",
        )
    )
)
_SCALE = re.compile(r"scale|zero|qweight|g_idx|absmax|quant")
# A number in a parameter's name is the index of its layer or expert.
_NUMBER = re.compile(r"\.\d+\.")


def check_config(config: Any, given: Mapping[str, Any]) -> None:
    """Refuse contradictions in a configuration, and settings that nothing reads, with a `ModelError` that names all.

    given : the content of config.json.
    """
    found = [*_contradictions(config.get_text_config()), *unread_settings(config, given)]
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
        yield from _rope_contradictions(each)


def _rope_contradictions(rope: Mapping[str, Any]) -> Iterator[str]:
    def number(name: str) -> float | None:
        value = rope.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    kind, theta, factor = str(rope.get("rope_type")), number("rope_theta"), number("factor")
    if theta is not None and not (theta > 0 and math.isfinite(theta)):
        yield f"rope_theta = {theta}, expected a positive number"
    if factor is not None and not 1 <= factor < math.inf:
        yield f"rope factor = {factor} of type {kind}, expected at least 1"
    original = number("original_max_position_embeddings")
    if original is not None and original < 1:  # it may exceed a max_position_embeddings that was made shorter
        yield f"rope original_max_position_embeddings = {original:.0f}, expected at least 1"
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if low is not None and high is not None and low >= high:
        yield f"rope low_freq_factor = {low} and high_freq_factor = {high}, expected low_freq_factor to be lower"
    fast, slow = number("beta_fast"), number("beta_slow")
    if fast is not None and slow is not None and fast < slow:
        yield f"rope beta_fast = {fast} and beta_slow = {slow}, expected beta_fast not to be lower"


def check_loaded(
    model: Any, info: Mapping[str, Iterable[Any]], stored: Collection[str] = (), *, needs_head: bool = True
) -> None:
    """Refuse a model unless each tensor of its files is used or harmless, and each parameter is filled (`ModelError`).

    info : what ``from_pretrained(output_loading_info=True)`` returns.
    stored : names of all tensors in the files.
    needs_head : the weights of the head, which follows the final hidden states, must not be missing either.
    """
    head = None if needs_head else model.get_output_embeddings()
    unused = {f"{name}.weight" for name, module in model.named_modules() if module is head}
    missing = sorted(set(map(str, info.get("missing_keys", ()))) - unused)
    if missing:
        raise ModelError(
            f"{len(missing)} weights that config.json asks for are not in the files ({few(missing)}), and would be "
            f"random: the configuration is for another model, or a file is missing"
        )
    shapes = sorted(
        f"{key}: {tuple(found)}, not {tuple(wanted)}" for key, found, wanted in info.get("mismatched_keys", ())
    )
    if shapes:
        raise ModelError(
            f"{len(shapes)} weights have other shapes than config.json says ({few(shapes)}): the configuration is for "
            f"another model, or a file is damaged"
        )
    prefix = f"{model.base_model_prefix}."
    inner = {key.removeprefix(prefix).partition(".")[0] for key in stored if key.startswith(prefix)}
    # transformers accepts both, but then takes one of two tensors, and merges experts in the order of the names.
    if mixed := sorted(key for key in stored if not key.startswith(prefix) and key.partition(".")[0] in inner):
        raise ModelError(
            f"{len(mixed)} tensors in the files lack the prefix {prefix!r} that similar ones have ({few(mixed)}): "
            f"rename them, or remove them if they are there twice"
        )
    left = sorted(key for key in map(str, info.get("unexpected_keys", ())) if not _is_harmless(model, key))
    if left:
        raise ModelError(_why_unused(model, left))
    for name, values in model.named_buffers():
        if name.endswith("inv_freq") and not bool(values.isfinite().all()):
            raise ModelError(f"the rotary frequencies {name} are not finite: rope parameters in config.json are wrong")


def _why_unused(model: Any, left: Sequence[str]) -> str:
    """Explain tensors of the files that a model does not use."""
    known = {_NUMBER.sub(".#.", name) for name, _ in model.named_parameters()}
    if ours := [key for key in left if _NUMBER.sub(".#.", key) in known]:
        return (
            f"{len(ours)} weights of layers that config.json does not ask for are in the files ({few(ours)}): the "
            f"configuration names too few layers"
        )
    if scales := [key for key in left if _SCALE.search(key)]:
        return (
            f"{len(scales)} tensors of quantised weights are not used ({few(scales)}): the quantization_config in "
            f"config.json is missing, or is not that of these files; use the original model, or one in the format "
            f"compressed-tensors"
        )
    return (
        f"{len(left)} tensors in the files are not used by {type(model).__name__} ({few(left)}), so answers would "
        f"differ from the model's own: the configuration is for another model, or lacks a setting"
    )


def _is_harmless(model: Any, key: str) -> bool:
    """Whether no logits of a language model depend on a tensor that it does not use."""
    if _HARMLESS.search(key):
        return True
    config = model.config.get_text_config()
    count, layer = getattr(config, "num_hidden_layers", None), re.search(r"(?:^|\.)layers\.(\d+)\.", key)
    if layer is None or not isinstance(count, int):
        return False
    more = [getattr(config, name, None) for name in PREDICTION_LAYERS]
    return count <= int(layer[1]) < count + max((number for number in more if isinstance(number, int)), default=0)


def check_generation(folder: Path) -> None:
    """Raise a `ModelError` if a folder's generation_config.json cannot be read, or has misspelt settings.

    transformers would ignore either.
    """
    from transformers import GenerationConfig

    try:
        settings = json.loads((folder / GENERATION).read_bytes())
    except FileNotFoundError:
        return
    except ValueError as error:
        raise ModelError(f"{GENERATION} is not valid JSON ({error}): correct it, or remove it") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{GENERATION} contains {type(settings).__name__}, expected a table of settings")
    known = GenerationConfig().to_dict().keys()
    for key in settings.keys() - known:
        if similar := difflib.get_close_matches(key, known - settings.keys(), 1, SIMILAR):
            raise ModelError(f"{GENERATION}: {key} is not a setting: correct it to {similar[0]}, or remove it")


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
