"""Weights laid out anew for the processor's matrix kernels.

On some processors oneDNN multiplies faster with weights that lie in its own order than torch does with them as they
are, on others slower, and it depends on the shape and on the rows: where it pays is measured (`tuning.kernels`). The
copy is made once, beside the weights themselves.

torch offers this to the output of its compiler, under names with an underscore; without it everything runs as before.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from kvr_mpi.model.kernels import FORWARD_SLOT, PLAIN, Ways, give_kernel, way_for

PREPACKED = "prepacked"
# Not every build of torch has them.
_LAY = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_HAS_BF16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
MULTIPLY: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


class PrepackedProduct:
    """What a `torch.nn.Linear` computes, with its weights laid out anew.

    Parameters
    ----------
    linear : torch.nn.Linear
    ways : Ways
        For which rows the copy is read; for the others the weights themselves are.
    """

    slot = FORWARD_SLOT

    def __init__(self, linear: torch.nn.Linear, ways: Ways) -> None:
        self._weight, self._bias = linear.weight.detach(), linear.bias
        self.ways, self.nbytes = ways, self._weight.nbytes
        assert _LAY is not None
        self._packed = _LAY(self._weight)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply (..., in_features) to (..., out_features)."""
        if way_for(self.ways, rows.numel() // rows.shape[-1]) == PLAIN:
            return torch.nn.functional.linear(rows, self._weight, self._bias)
        product: torch.Tensor = MULTIPLY(rows, self._packed, self._bias, "none", [], "")
        return product


def product_shape(linear: torch.nn.Linear) -> str:
    """Name a linear layer's kind: layers of one shape are computed in the same way."""
    return f"{linear.out_features}x{linear.in_features}"


def prepackable(model: torch.nn.Module) -> dict[str, list[torch.nn.Linear]]:
    """List the linear layers whose weights could be laid out anew here, by their shape."""
    found: dict[str, list[torch.nn.Linear]] = {}
    for module in model.modules():
        if type(module) is torch.nn.Linear and _can_lay(module.weight):
            found.setdefault(product_shape(module), []).append(module)
    return found


def prepack_weights(model: torch.nn.Module, ways: Mapping[str, Ways]) -> None:
    """Lay the weights of some shapes out for the processor, to be read from the next `use_kernels` on.

    Parameters
    ----------
    ways : mapping of str to Ways
        Of each shape (`product_shape`) that is laid out anew.
    """
    with torch.inference_mode():
        for shape, layers in prepackable(model).items():
            for layer in layers if shape in ways else ():
                give_kernel(layer, PrepackedProduct(layer, ways[shape]))


def _can_lay(weight: torch.Tensor) -> bool:
    is_x86 = weight.device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")
    if not is_x86 or _LAY is None or MULTIPLY is None:
        return False
    if weight.dtype == torch.bfloat16:
        return _HAS_BF16 is not None and bool(_HAS_BF16())
    return weight.dtype == torch.float32
