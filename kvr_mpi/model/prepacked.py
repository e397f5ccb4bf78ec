"""Weights laid out anew for the processor's matrix kernels.

On x86 processors oneDNN multiplies with weights that lie in its own order at 1.1 to 1.2 times the speed of torch's own
product in float32, and with a few rows, as in decoding, at 1.4 to 2 times (one core of an AMD EPYC 9004). The copy is
made once, beside the weights themselves: plain transformers goes on with those, and so do single rows in float32.

torch offers this to the output of its compiler, under names with an underscore. What comes of it is held against plain
transformers before every batch (`strategies.check_chain`), and without it everything runs as before.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

# The copy may take this share of the memory that is left.
COPY_SHARE = 0.25
# Not every build of torch has them.
_LAY = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_HAS_BF16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
MULTIPLY: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


class PrepackedProduct:
    """What a `torch.nn.Linear` computes, with its weights laid out anew."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        self._weight, self._bias = linear.weight.detach(), linear.bias
        self.nbytes = self._weight.nbytes
        assert _LAY is not None
        self._packed = _LAY(self._weight)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply (..., in_features) to (..., out_features)."""
        if rows.dtype == torch.float32 and rows.numel() == rows.shape[-1]:
            return torch.nn.functional.linear(rows, self._weight, self._bias)
        product: torch.Tensor = MULTIPLY(rows, self._packed, self._bias, "none", [], "")
        return product


# Kept beside the models and not in them: a copy of a model, in another dtype maybe, is a plain one.
_PRODUCTS: WeakKeyDictionary[torch.nn.Module, PrepackedProduct] = WeakKeyDictionary()


def prepack_weights(model: torch.nn.Module, free_bytes: int) -> None:
    """Lay a model's weights out for the processor, if it is of a kind that gains by it and memory allows.

    They are used from the next `use_prepacked` on.

    Parameters
    ----------
    model : torch.nn.Module
    free_bytes : int
        Memory that is left.
    """
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    need = sum(layer.weight.nbytes for layer in layers)
    if need > COPY_SHARE * free_bytes or not all(_gains(layer.weight) for layer in layers):
        return
    with torch.inference_mode():
        for layer in layers:
            _PRODUCTS[layer] = PrepackedProduct(layer)


def prepacked_bytes(model: torch.nn.Module) -> int:
    """Memory that the weights take once more for being laid out."""
    return sum(_PRODUCTS[module].nbytes for module in model.modules() if module in _PRODUCTS)


def _gains(weight: torch.Tensor) -> bool:
    is_x86 = weight.device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")
    if not is_x86 or _LAY is None or MULTIPLY is None:
        return False
    if weight.dtype == torch.bfloat16:
        return _HAS_BF16 is not None and bool(_HAS_BF16())
    return weight.dtype == torch.float32


def use_prepacked(model: torch.nn.Module, yes: bool) -> bool:
    """Multiply with the weights as `prepack_weights` laid them out, or as they were; say whether they were laid out."""
    found = False
    for module in model.modules():
        product = _PRODUCTS.get(module)
        if product is not None:
            found = True
            if yes:
                module.forward = product
            else:
                vars(module).pop("forward", None)
    return found


def forget_packed(model: torch.nn.Module) -> bool:
    """Go on without the weights that were laid out, for good; say whether there were any."""
    found = use_prepacked(model, False)
    for module in model.modules():
        _PRODUCTS.pop(module, None)
    return found


@contextmanager
def unpacked(model: Any) -> Iterator[None]:
    """Run a model with its weights as they were, and as they are now again afterwards."""
    was = any(isinstance(vars(module).get("forward"), PrepackedProduct) for module in model.modules())
    use_prepacked(model, False)
    try:
        yield
    finally:
        use_prepacked(model, was)
