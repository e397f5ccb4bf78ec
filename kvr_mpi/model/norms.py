"""RMS norms in one fused kernel, where models' own code uses several operations.

On GPUs, torch's ``rms_norm`` replaces a module if both agree for random rows, large and small; on CPUs, our own
function does, if its results have the same bits.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import rms_norm

from kvr_mpi.model.kernels import FORWARD_SLOT, ExactForward, Kernel, always, give_kernel
from kvr_mpi.model.row_functions import WIDTHS, RowFunctions

# Tolerance: the error of rounding to bfloat16 twice.
ERROR = 2**-6
TRIAL_ROWS = 16


class FusedNorm:
    """A `Kernel` that runs torch's fused norm with a module's weight."""

    slot, nbytes, ways = FORWARD_SLOT, 0, always("fused")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self._eps = weight, eps

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalise rows (..., features)."""
        return rms_norm(rows, self.weight.shape, self.weight, self._eps)


@torch.inference_mode()
def fuse_norms(model: torch.nn.Module, functions: RowFunctions | None = None) -> int:
    """Register fused kernels for a model's norms, used from the next `use_kernels` on; return how many.

    functions : for norms on CPUs.
    """
    fused, dtype = 0, next(model.parameters()).dtype
    for module in model.modules():
        kernel = _fused(module, functions) if type(module).__name__.endswith("RMSNorm") else None
        if kernel is not None and module.weight.dtype == dtype:  # otherwise rows and weights differ in dtype
            give_kernel(module, kernel)
            fused += 1
    return fused


def _fused(module: torch.nn.Module, functions: RowFunctions | None) -> Kernel | None:
    """Make the kernel of a norm; None for other kinds of norms."""
    weight = dict(module.named_parameters()).get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    draw = torch.Generator(weight.device).manual_seed(0)
    rows = torch.randn(TRIAL_ROWS, len(weight), generator=draw, device=weight.device, dtype=weight.dtype)
    rows *= torch.logspace(-4, 2, TRIAL_ROWS, device=weight.device, dtype=weight.dtype)[:, None]  # small: `eps` counts
    try:
        truth = module(rows)
    except TypeError:  # the module has more arguments
        return None
    if functions is not None:
        return _exact(module, functions, weight.detach(), eps, rows, truth)
    for scale in (weight, 1 + weight):  # Gemma stores weight - 1
        kernel = FusedNorm(scale, eps)
        if torch.allclose(truth.float(), kernel(rows).float(), rtol=ERROR, atol=ERROR * float(eps)):
            return kernel
    return None


def _exact(
    module: torch.nn.Module,
    functions: RowFunctions,
    weight: torch.Tensor,
    eps: float,
    rows: torch.Tensor,
    truth: torch.Tensor,
) -> ExactForward | None:
    """Make the kernel of a norm on a CPU, with the order of rounding and of adding that gives its results."""
    own, reference = type(module).forward, weakref.ref(module)

    def forward(norm: Callable[..., torch.Tensor], rows: torch.Tensor) -> Any:
        """Normalise rows (..., features)."""
        suits = functions.takes(rows, weight) and rows.shape[-1] == len(weight)
        return norm(rows) if suits else own(reference(), rows)

    for scale, rounds, width in itertools.product((weight.float(), 1 + weight.float()), (True, False), WIDTHS):
        norm = partial(functions.norm, scale=scale, eps=eps, width=width, rounds=rounds)
        if functions.takes(truth, rows, weight) and torch.equal(norm(rows), truth):
            return ExactForward(partial(forward, norm))
    return None
