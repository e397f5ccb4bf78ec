"""Rotary embeddings that depend on the length of the whole prompt, made correct on every rank.

Dynamic NTK and LongRoPE choose their frequencies by the last position in a call. But a slice ends before the prompt
does, a packed row holds prompts of several lengths, and dynamic NTK also remembers the longest prompt so far. So these
modules are reset and called once for each prompt of a row, with the prompt's last position appended. They are called
through torch's forward hooks; no model code is changed.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.model.running import RUNNING, running

# transformers' rope_type of embeddings that depend on the last position.
BY_LENGTH = ("dynamic", "longrope")
# Contexts are compared up to this length, since an embedding of ten million positions would take gigabytes.
MOST_COMPARED = 1 << 17


def rotary_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Find the modules that compute rotary embeddings from positions."""
    return [
        module
        for module in model.modules()
        if "rope_type" in vars(module) and "position_ids" in inspect.signature(type(module).forward).parameters
    ]


def rope_kinds(module: torch.nn.Module) -> dict[str | None, str]:
    """Return a module's kinds of rotary embedding by layer type; the key is None if it has only one."""
    kinds: Any = module.rope_type
    return dict(kinds) if isinstance(kinds, dict) else {None: str(kinds)}


def depends_on_length(model: torch.nn.Module) -> str:
    """Return the kinds of a model's rotary embeddings that depend on the length, comma-separated; empty if none."""
    kinds = {kind for module in rotary_modules(model) for kind in rope_kinds(module).values()}
    return ", ".join(sorted(kind for kind in kinds if any(name in kind for name in BY_LENGTH)))


def embed_whole_lengths(model: torch.nn.Module) -> None:
    """Attach hooks to rotary embeddings that depend on the length. Idempotent."""
    for module in rotary_modules(model):
        if depends_on_length(module) and not any(isinstance(hook, _Hook) for hook in module._forward_hooks.values()):
            module.register_forward_hook(_Hook(), with_kwargs=True)


class _Hook:
    """Recomputes a rotary embedding for each prompt of the row with that prompt's full length."""

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        lengths, _ = RUNNING.get()
        if lengths is None:
            return output
        mine = copy.copy(module)  # it stores its frequencies, and ranks as threads share it
        mine._buffers = dict(module._buffers)
        call = inspect.signature(type(module).forward).bind(mine, *args, **kwargs)
        positions, outputs, at = call.arguments["position_ids"], [], 0
        for tokens, length in lengths:
            some = positions[..., at : at + tokens]
            last = torch.full_like(some[..., :1], length - 1)
            call.arguments["position_ids"] = torch.cat([some, last], dim=-1)
            _forget_lengths(mine)
            outputs.append(_as_tuple(type(module).forward(*call.args, **call.kwargs)))
            at += tokens
        if at != positions.shape[-1]:
            raise ModelError(
                f"{at} tokens were announced to the rotary embedding, but it received {positions.shape[-1]}"
            )
        whole = [torch.cat([each[..., :-1, :] for each in parts], dim=-2) for parts in zip(*outputs, strict=True)]
        return tuple(whole) if isinstance(output, tuple) else whole[0]


def _forget_lengths(module: torch.nn.Module) -> None:
    """Reset the longest length that a dynamic embedding has stored."""
    for layer_type, kind in rope_kinds(module).items():
        if "dynamic" not in kind:
            continue
        prefix = "" if layer_type is None else f"{layer_type}_"
        original = getattr(module, f"{prefix}original_inv_freq")
        module.register_buffer(f"{prefix}inv_freq", original.to(getattr(module, f"{prefix}inv_freq").device), False)
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def begins_anew_at(model: Any) -> int | None:
    """Return the length at which transformers' ``generate`` recomputes a shorter cache; None if it never does.

    Models like Phi-3 do, when an answer passes the length at which their frequencies change, since the keys in the
    cache have the old frequencies.
    """
    prepare = inspect.unwrap(type(model).prepare_inputs_for_generation)
    threshold = getattr(model.config, "original_max_position_embeddings", None)
    if "original_max_position_embeddings" not in prepare.__code__.co_names or threshold is None:
        return None
    return int(threshold) + 1


def check_rotary(model: Any, longest: int | None) -> None:
    """Raise a `ModelError` if the rotary embeddings of slices differ from those of the whole prompt.

    Some embeddings change at certain prompt lengths, which the self-check's prompts do not reach. So embeddings are
    compared at positions below and above these lengths. `longest` is the longest context.
    """
    embed_whole_lengths(model)
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    known = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    thresholds = {getattr(config, "max_position_embeddings", None), longest}
    thresholds |= {each.get("original_max_position_embeddings") for each in known}
    edges = {min(int(each), MOST_COMPARED) for each in thresholds if each}
    lengths = sorted({length for edge in edges for length in (edge - 1, edge, edge + 1) if 2 <= length})
    for module in rotary_modules(model):
        for layer_type in rope_kinds(module):
            for length in lengths:
                _check_slices(module, layer_type, length)


def _check_slices(module: torch.nn.Module, layer_type: str | None, length: int) -> None:
    device = next(iter(module.buffers()), torch.zeros(())).device
    values = torch.zeros(1, 1, 8, device=device)
    named = {} if layer_type is None else {"layer_type": layer_type}
    positions = torch.arange(length, device=device).unsqueeze(0)
    if device.type == "meta":
        return
    with torch.inference_mode():
        _forget_lengths(module)
        try:
            whole = _as_tuple(module(values, positions, **named))
        except (TypeError, RuntimeError, IndexError):  # it takes other positions, such as those of images
            return
        for start, stop in ((0, 1), (length // 3, length // 3 + 1), (length // 2, length)):
            with running([(stop - start, length)]):
                part = _as_tuple(module(values, positions[:, start:stop], **named))
            for mine, theirs in zip(part, whole, strict=True):
                if not torch.allclose(mine, theirs[..., start:stop, :], atol=1e-6):
                    raise ModelError(
                        f"its rotary embedding of tokens {start} to {stop} of {length} depends on the other tokens "
                        "in an unknown way"
                    )


def _as_tuple(output: Any) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)
