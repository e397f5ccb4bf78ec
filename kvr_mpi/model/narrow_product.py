"""Lossless copies of weights in fewer bits, for products with few rows.

Decode steps are bound by the memory bandwidth of weights. In float32, weights of a bfloat16 checkpoint have 16 zero
bits, and weights that were quantised to 8 or 4 bits (GGUF's Q8_0 and Q4_1) have few distinct values per block of 32.
Copies are lossless: each is widened and compared bit by bit with the weights, and other weights are not copied. The
kernels (``narrow_product.cpp``) are compiled with those for attention (`tuning.compiled_attention`), and used for the
numbers of rows at which they were measured to be faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NARROW = "fewer bits"
# Number of weights that share a scale; minimum number of outputs that the kernels support.
BLOCK, LEAST_OUTS = 32, 16
# The layouts, smallest first, by the dtype of their packed weights: name in the kernels, weights per packed element,
# scales per block.
LAYOUTS = {torch.uint8: ("steps", 2, 2), torch.int8: ("bytes", 1, 1), torch.int16: ("halves", 1, 0)}


@dataclass(frozen=True, slots=True, eq=False)
class NarrowWeights:
    """Weights (outs, features) in fewer bits.

    packed : upper halves of floats, int16 (outs, features); multiples of a scale, int8 (outs, features); or two steps
        per byte, uint8 (outs, features / 2): the lower 4 bits belong to the first half of the block, the upper 4 bits
        to the second.
    scales : (outs, features / BLOCK, 1) for multiples, (outs, features / BLOCK, 2) for steps: each block's step and
        minimum; for halves (outs, features / BLOCK, 0).
    """

    packed: torch.Tensor
    scales: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.packed.nbytes + self.scales.nbytes

    @property
    def features(self) -> int:
        """Number of input features."""
        return self.scales.shape[1] * BLOCK

    def widen(self) -> torch.Tensor:
        """Return the weights (outs, features), float32."""
        if self.packed.dtype == torch.int16:
            return (self.packed.to(torch.int32) << 16).view(torch.float32)
        outs, blocks, _ = self.scales.shape
        if self.packed.dtype == torch.int8:
            return (self.packed.view(outs, blocks, BLOCK).float() * self.scales).view(outs, -1)
        each = self.packed.view(outs, blocks, BLOCK // 2)
        steps = torch.cat([each & 15, each >> 4], dim=-1).float()
        return (steps * self.scales[..., :1] + self.scales[..., 1:]).view(outs, -1)
