"""Converts stored keys and values to a transformers cache, for programs that continue with ``generate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from kvr_mpi.errors import ConfigError

# Number of tokens that are recomputed, and tolerances for their keys and values, relative to the largest. Tolerances
# allow for other kernels; keys and values that another model computed differ by about 1.
COMPARED_TOKENS = 16
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
NARROW_TOLERANCE = 0.1


@torch.inference_mode()
def to_cache(
    layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]], token_ids: Sequence[int] | None, model: PreTrainedModel
) -> DynamicCache:
    """Make a cache of keys and values, each (tokens, kv_heads, head_dim), after checking that this model produced them.

    Otherwise, and if layers or tokens are missing, it raises a `ConfigError`.
    """
    if token_ids is None:
        raise ConfigError("these keys and values do not say which tokens they belong to: prefill the document again")
    some = min(COMPARED_TOKENS, len(token_ids))
    begun = torch.tensor([token_ids[:some]], device=model.device)
    expected = model(begun, use_cache=True, past_key_values=DynamicCache(config=model.config)).past_key_values
    cache = DynamicCache(config=model.config)
    if [*layers] != [*range(len(expected.layers))]:
        raise ConfigError(
            f"{len(layers)} layers have stored keys and values, but the model's cache has {len(expected.layers)} "
            "layers: transformers can continue only if all of them have"
        )
    for number, made in enumerate(expected.layers):
        for kind, there, stored in zip(("keys", "values"), (made.keys, made.values), layers[number], strict=True):
            if len(stored) != len(token_ids):
                raise ConfigError(
                    f"layer {number} has {kind} of {len(stored)} of {len(token_ids)} tokens: a cache needs all"
                )
            found = stored[:some].transpose(0, 1)[None].to(there)
            tolerance = TOLERANCE.get(stored.dtype, NARROW_TOLERANCE)
            if there.shape != found.shape or not (there - found).abs().max() <= tolerance * there.abs().max():
                raise ConfigError(
                    f"layer {number}: the {kind} of the first {some} tokens are not those that this model computes. "
                    f"Load the model, revision and dtype that the run used"
                )
        keys, values = (each.transpose(0, 1)[None].to(made.keys) for each in layers[number])
        cache.update(keys, values, number)
    return cache
