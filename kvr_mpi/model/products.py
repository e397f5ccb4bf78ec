"""Copies of weights in a layout, or with fewer bits, that a CPU multiplies faster.

Weights are copied to the panels of our own kernel (``panel_product.cpp``), or to oneDNN's layout: the first is faster
with AVX2, the second with AVX-512 and many rows. With few rows, the smallest copy is fastest (`narrow_product`).
Copies are made once, in addition to the weights. Weights in 16 bits need none: our kernel reads those of the model
and widens them in registers (``half_product.cpp``), which is several times as fast as torch on processors without
16-bit instructions. `tuning.kernels` measures which to use.

torch has oneDNN's layout for its compiler, in private operators; without them, the original weights are used.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from kvr_mpi.model.cpu_attention import DTYPES, HALVES, KernelLibrary
from kvr_mpi.model.kernels import FORWARD_SLOT, Ways, give_kernel, is_plain_linear, uses_onednn, way_for
from kvr_mpi.model.narrow_product import NARROW, NarrowWeights

PREPACKED, PANELS, WIDENED = "oneDNN", "panels", "widened weights"
# The layouts of weights; a layer has at most one copy of this kind.
LAYOUTS = (PREPACKED, PANELS)
# Some builds of torch lack these operators.
_LAY = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
MULTIPLY: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


class Product:
    """The product of a `torch.nn.Linear`, with copies of its weights.

    ways : the copy to use for each number of rows, or the weights themselves.
    library : needed for panels, for weights in fewer bits, and for weights that are widened. A layer without such a
        copy uses another one.
    narrowed : its weights in fewer bits, if they exist already.
    """

    slot = FORWARD_SLOT

    def __init__(
        self,
        linear: torch.nn.Linear,
        ways: Ways,
        library: KernelLibrary | None = None,
        narrowed: NarrowWeights | None = None,
    ) -> None:
        self._weight, self._bias = linear.weight.detach(), linear.bias
        self.ways, self.library, self.nbytes = ways, library, 0
        self._packed: torch.Tensor | None = None
        self._panels: torch.Tensor | None = None
        self._narrowed: NarrowWeights | None = None
        if NARROW in ways and library is not None:
            self._narrowed = narrowed or library.narrow(self._weight)
            self.nbytes += 0 if self._narrowed is None else self._narrowed.nbytes
        if PANELS in ways and library is not None:
            self._panels = library.lay_panels(self._weight)
            self.nbytes += self._panels.nbytes
        elif PREPACKED in ways and can_lay(self._weight):
            assert _LAY is not None
            self._packed = _LAY(self._weight)
            self.nbytes += self._weight.nbytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply (..., in_features) to (..., out_features)."""
        way = way_for(self.ways, rows.numel() // rows.shape[-1])
        if way == WIDENED and can_widen(self._weight, self.library) and type(rows) is torch.Tensor:
            assert self.library is not None
            return self.library.multiply_halves(rows, self._weight, self._bias)
        if way == NARROW and self._narrowed is not None and type(rows) is torch.Tensor:
            assert self.library is not None
            narrow_product = self.library.multiply(rows, self._narrowed)
            return narrow_product if self._bias is None else narrow_product + self._bias
        if way in (PANELS, NARROW) and self._panels is not None and type(rows) is torch.Tensor:
            assert self.library is not None
            return self.library.multiply_panels(rows, self._panels, self._weight.shape[0], self._bias)
        if way in (PREPACKED, NARROW) and self._packed is not None:
            product: torch.Tensor = MULTIPLY(rows, self._packed, self._bias, "none", [], "")
            return product
        return torch.nn.functional.linear(rows, self._weight, self._bias)


def find_products(model: torch.nn.Module) -> dict[str, list[torch.nn.Linear]]:
    """List the linear layers with several implementations, by shape; layers of one shape use the same one."""
    found: dict[str, list[torch.nn.Linear]] = {}
    for module in model.modules():
        if is_plain_linear(module):
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype in DTYPES:
                found.setdefault(f"{module.out_features}x{module.in_features}", []).append(module)
    return found


def narrow_weights(
    model: torch.nn.Module, library: KernelLibrary, most_bytes: float
) -> dict[torch.nn.Linear, NarrowWeights]:
    """Copy weights in fewer bits, up to `most_bytes`, for the shapes where this is lossless in all layers."""
    found: dict[torch.nn.Linear, NarrowWeights] = {}
    for layers in find_products(model).values():
        if sum(layer.weight.nbytes for layer in layers) / 2 > most_bytes:
            continue
        of_shape: dict[torch.nn.Linear, NarrowWeights] = {}
        for layer in layers:
            if (one := library.narrow(layer.weight)) is None:
                break
            of_shape[layer] = one
        else:
            found |= of_shape
            most_bytes -= sum(each.nbytes for each in of_shape.values())
    return found


def give_products(
    model: torch.nn.Module,
    ways: Mapping[str, Ways],
    library: KernelLibrary | None = None,
    narrowed: Mapping[torch.nn.Linear, NarrowWeights] | None = None,
) -> None:
    """Register a `Product` for each layer of the shapes in `ways`, used from the next `use_kernels` on."""
    narrowed = narrowed or {}
    with torch.inference_mode():
        for shape, layers in find_products(model).items():
            for layer in layers if shape in ways else ():
                give_kernel(layer, Product(layer, ways[shape], library, narrowed.get(layer)))


def can_widen(weight: torch.Tensor, library: KernelLibrary | None) -> bool:
    """Whether our kernel reads these weights in place."""
    return library is not None and weight.dtype in HALVES and weight.device.type == "cpu" and weight.stride(1) == 1


def can_lay(weight: torch.Tensor) -> bool:
    """Whether oneDNN can reorder weights on this machine."""
    is_x86 = weight.device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")
    if not is_x86 or _LAY is None or MULTIPLY is None:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and uses_onednn(weight.dtype))
