"""What is not usual of a model's attention on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvr_mpi.kv.attention import why_no_flex
from kvr_mpi.kv.flex import compiles
from kvr_mpi.model import LoadedModel


def describe_portable(loaded: LoadedModel) -> Iterator[str]:
    """Say why soft-capped attention goes the portable way, in float32, where FlexAttention was to be expected."""
    config, device = loaded.model.config.get_text_config(), loaded.device
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is None or device.type != "cuda" or loaded.dtype == torch.float32:
        return
    layer = next(layer for layer in loaded.shape.layers if layer.elements)
    dims = layer.key_dim, layer.value_dim
    if not compiles(device):
        why: str | None = "torch has no compiler for this GPU (triton), or it is older than Ampere"
    else:  # asked by the self-check before, and so known
        why = why_no_flex(device, loaded.dtype, config.num_attention_heads, layer.num_kv_heads, dims, softcap)
    if why is not None:
        yield f"soft-capped attention is computed in blocks, in float32, which is slower than FlexAttention: {why}"
