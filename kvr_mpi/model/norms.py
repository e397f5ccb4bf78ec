"""RMS norms in one fused kernel on GPUs, where models' own code uses several.

torch's ``rms_norm`` replaces a module if both agree for random rows, large and small.
"""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm

from kvr_mpi.model.kernels import FORWARD_SLOT, always, give_kernel

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
def fuse_norms(model: torch.nn.Module) -> int:
    """Register fused kernels for a model's norms, used from the next `use_kernels` on; return how many."""
    fused, dtype = 0, next(model.parameters()).dtype
    for module in model.modules():
        kernel = _fused(module) if type(module).__name__.endswith("RMSNorm") else None
        if kernel is not None and kernel.weight.dtype == dtype:  # otherwise rows and weights differ in dtype
            give_kernel(module, kernel)
            fused += 1
    return fused


def _fused(module: torch.nn.Module) -> FusedNorm | None:
    """Make the kernel of a norm; None for other kinds of norms."""
    weight = dict(module.named_parameters()).get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    draw = torch.Generator(weight.device).manual_seed(0)
    rows = torch.randn(TRIAL_ROWS, len(weight), generator=draw, device=weight.device, dtype=weight.dtype)
    rows *= torch.logspace(-4, 2, TRIAL_ROWS, device=weight.device, dtype=weight.dtype)[:, None]  # small: `eps` counts
    for scale in (weight, 1 + weight):  # Gemma stores weight - 1
        kernel = FusedNorm(scale, eps)
        try:
            if torch.allclose(module(rows).float(), kernel(rows).float(), rtol=ERROR, atol=ERROR * float(eps)):
                return kernel
        except TypeError:  # the module has more arguments
            return None
    return None
