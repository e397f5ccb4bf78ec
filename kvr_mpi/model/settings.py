"""Finds settings in a model's config.json that nothing reads, since the model would run without them.

transformers keeps keys that it does not know, and at most logs a warning. A leftover or misspelt key in the rope
settings then drops YaRN or a linear factor, and an unknown quantization method leaves weights without their scales.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from kvr_mpi.errors import choices

ROPE_KEYS = ("rope_parameters", "rope_scaling")
# Rope settings of public models that change nothing: a note on the training, and the old name of `rope_type`.
HARMLESS_ROPE = {"finetuned", "type"}
# Values of rope settings that scale nothing, or that YaRN takes if they are left out.
NEUTRAL = dict.fromkeys(("factor", "attn_factor", "attention_factor", "extrapolation_factor"), 1) | {
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1,
    "mscale_all_dim": 1,
}
# Rope types that transformers renames: by the old name.
RENAMED_TYPES = {"mrope": "default", "su": "longrope"}
# Names of tables of quantization settings, in transformers, in old compressed-tensors, and in MLX.
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
# A misspelt setting is at least this similar to the setting that is meant.
SIMILAR = 0.85
# Settings that only training or generation use, so that leaving them out changes no logits.
_UNUSED = re.compile(r"drop|init|loss|aux|cache|output_|token|label|task|problem|architectures|version|return")


def unread_settings(config: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """Describe the settings that nothing reads; `given` is the content of config.json."""
    yield from _quantization(config, given)
    if not type(config).__module__.startswith("transformers."):  # a model with its own code reads what it likes
        return
    text, inner = config.get_text_config(), given
    yield from _leftovers(config, given)
    if text is not config:
        tables = [value for value in given.values() if isinstance(value, dict)]
        inner = next((value for value in tables if value.get("model_type") == text.model_type), {})
        yield from _leftovers(text, inner)
    yield from _rope(text, inner)


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return a model's quantization settings; None if its weights are used as they are."""
    found = getattr(config, "quantization_config", None)
    found = found or getattr(config.get_text_config(decoder=True), "quantization_config", None)
    return None if not found else dict(found if isinstance(found, dict) else found.to_dict())


def _quantization(config: Any, given: Mapping[str, Any]) -> Iterator[str]:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    settings = quantization_of(config)
    for path, value in _tables(given):
        if path and path[-1] in QUANTIZATION_KEYS and value and "quant_method" not in value:
            if "bits" in value and "group_size" in value:  # of MLX, which writes two such tables
                yield (
                    f"{'.'.join(path)} has no quant_method: these weights are quantised for MLX, and only MLX reads "
                    f"them; use the original model"
                )
                return
        if path and path[-1] in QUANTIZATION_KEYS and value and (settings is None or path[-1] != QUANTIZATION_KEYS[0]):
            yield (
                f"{'.'.join(path)} is not read by transformers, so weights would be used without their scales; "
                f"expected quantization_config at the top of config.json"
            )
            return
    if settings is None or settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return
    method = settings.get("quant_method")
    name = str(getattr(method, "value", method))
    if name == "bitsandbytes" or name in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    hint = " (of NVIDIA ModelOpt)" if "modelopt" in name else ""
    known = sorted({each.removesuffix("_4bit").removesuffix("_8bit") for each in AUTO_QUANTIZATION_CONFIG_MAPPING})
    yield (
        f"quant_method = {name!r}{hint} is unknown to transformers, which would use the weights without their scales; "
        f"use the original model, or one in the format compressed-tensors; known methods: {', '.join(known)}"
    )


def _tables(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield all tables of nested settings with their paths."""
    if isinstance(value, Mapping):
        yield path, value
        for key, inner in value.items():
            yield from _tables(inner, (*path, str(key)))


def _leftovers(config: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """Describe rope settings that the configuration ignores, and settings that are probably misspelt."""
    fields = getattr(config, "__dataclass_fields__", None)
    if fields is None:
        return
    name, text = type(config).__name__, config.get_text_config()
    declared = {*fields, *config.attribute_map}
    declared |= {"rope_scaling", "rope_theta"} if "rope_parameters" in declared else set()
    absent = [key for key in declared if key not in given and not _UNUSED.search(key)]
    own = {key for key in given if hasattr(type(config), key)} - set(ROPE_KEYS)
    unknown = [key for key, value in given.items() if value and key not in declared | own]
    sources = _sources(config) if unknown else ""
    for key in unknown:
        if key in ROPE_KEYS and text is not config:
            if not _is_in(given[key], getattr(text, "rope_parameters", None) or {}):
                yield f"{key} = {given[key]} is not read by {name}: move it into the settings of the language model"
        elif _reads(sources, ROPE_KEYS[0] if key in ROPE_KEYS else key):
            continue
        elif key in ROPE_KEYS:
            if not given[key].keys() <= {"rope_type", "type", "rope_theta"}:  # it has a scaling
                yield f"{key} = {given[key]} is not read by {name}, whose positions have no such scaling: remove it"
        elif key in vars(config) and (similar := difflib.get_close_matches(key, absent, 1, SIMILAR)):
            yield f"{key} is not read by {name}: correct it to {similar[0]}, or remove it"


def _is_in(table: Any, rope: Mapping[str, Any]) -> bool:
    """Whether rope settings contain all keys of a table, for one kind of layer if kinds differ."""
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return isinstance(table, dict) and any(table.items() <= part.items() for part in parts)


def _sources(config: Any) -> str:
    """Return the source code of a configuration and its model, in which a setting that is read has its name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = type(config)
    classes = [kind, *([MODEL_FOR_CAUSAL_LM_MAPPING[kind]] if kind in MODEL_FOR_CAUSAL_LM_MAPPING else [])]
    return "\n".join(inspect.getsource(sys.modules[each.__module__]) for each in classes)


def _reads(sources: str, key: str) -> bool:
    """Whether source code has a setting as an attribute or as a key."""
    return re.search(rf"""\.{re.escape(key)}\b|["']{re.escape(key)}["']""", sources) is not None


def _is_off(part: Mapping[str, Any], key: str) -> bool:
    """Whether a rope setting belongs to the scaling of another type than the default, so that no code reads it."""
    from transformers.modeling_rope_utils import RopeParameters

    return part.get("rope_type") == "default" and key in RopeParameters.__annotations__ and "mrope" not in key


def _rope(config: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """Describe the keys of rope settings that are not read, and contradictions of two places for a setting."""
    tables = {key: value for key in ROPE_KEYS if isinstance(value := given.get(key), dict) and value}
    if len(tables) == 2 and tables["rope_parameters"] != tables["rope_scaling"]:
        yield "rope_scaling and rope_parameters differ, and only rope_scaling is read: remove one of them"
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or not hasattr(config, "nested_rope_parameter_keys"):
        return
    labels = config.nested_rope_parameter_keys(rope)
    parts = {label: rope[label] for label in labels if rope[label] is not None} or {"": rope}
    unknown = {label: _unknown_keys(config, part) for label, part in parts.items()}
    if labels:
        from transformers.configuration_utils import ALLOWED_LAYER_TYPES

        beside = {key for key in rope if key not in labels and rope[key] is not None}
        unknown["beside"] = {key: [] for key in beside if key not in ALLOWED_LAYER_TYPES}
    if any(unknown.values()):
        sources = _sources(config)
        for label, keys in unknown.items():
            for key in sorted(keys):
                if _reads(sources, key) and not _is_off(parts.get(label, {}), key):
                    continue
                if label == "beside":
                    yield f"the rope setting {key} is beside those of {choices(labels)}, where nothing reads it"
                    continue
                kind, where = parts[label].get("rope_type"), f" of {label}" if label else ""
                yield (
                    f"the rope setting {key} = {parts[label][key]}{where} is not read for rope_type {kind!r}: correct "
                    f"or remove it; known keys: {', '.join(keys[key])}"
                )
    for label, part in parts.items():
        old, kind = part.get("type"), part.get("rope_type")
        if old is not None and RENAMED_TYPES.get(old, old) != kind and not (old == "yarn" and kind == "longrope"):
            yield f"the rope settings have type = {old!r} and rope_type = {kind!r}: remove one of them"
        yield from _twice(given, part, label, read_first="original_max_position_embeddings")


def _twice(given: Mapping[str, Any], part: Mapping[str, Any], label: str, read_first: str) -> Iterator[str]:
    """Describe settings with other values in config.json itself than in its rope settings."""
    if label:  # each kind of layer has its own
        return
    for key in ("rope_theta", "partial_rotary_factor", read_first):
        inner = next(
            (table[key] for name in ROPE_KEYS if isinstance(table := given.get(name), dict) and key in table), None
        )
        outer = given.get(key)
        if inner is not None and outer is not None and inner != outer:
            yield f"{key} = {outer}, but {inner} in the rope settings: remove one of them"


def _unknown_keys(config: Any, part: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return keys that transformers does not know for a rope type, each with those that it knows."""
    unknown: dict[str, list[str]] = {}

    def record(
        kind: str, received: set[str], required: set[str], optional_keys: Any = None, ignore_keys: Any = None
    ) -> None:
        known = {*required, *(optional_keys or ()), *(ignore_keys or ()), "partial_rotary_factor"}
        for key in set(received) - known - HARMLESS_ROPE:
            if part[key] is not None and not _says_nothing(config, key, part[key]):
                unknown[key] = sorted(known)

    validate = getattr(type(config), f"_validate_{part.get('rope_type', 'default')}_rope_parameters", None)
    if validate is not None:
        asked = copy.copy(config)
        vars(asked)["_check_received_keys"] = record  # transformers' validators call it with the keys that they know
        validate(asked, part, ignore_keys=config.ignore_keys_at_rope_validation)
    return unknown


def _says_nothing(config: Any, key: str, value: Any) -> bool:
    """Whether a rope setting has a value that changes nothing, as in public models."""
    if key == "original_max_position_embeddings":
        return bool(value == getattr(config, "max_position_embeddings", None))
    return key in NEUTRAL and value == NEUTRAL[key]
