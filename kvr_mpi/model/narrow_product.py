"""Lossless copies of weights in fewer bits, for products with few rows.

Decode steps are bound by the memory bandwidth of weights. In float32, weights of a bfloat16 checkpoint have 16 zero
bits, and weights that were quantised to 8 or 4 bits (GGUF's Q8_0 and Q4_1) have few distinct values per block of 32.
Copies are lossless: each is widened and compared bit by bit with the weights, and other weights are not copied. The
kernels (``narrow_product.cpp``) are compiled with those for attention (`tuning.compiled_attention`), and used for the
numbers of rows at which they were measured to be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

NARROW = "fewer bits"
# Number of weights that share a scale; minimum number of outputs that the kernels support.
BLOCK, LEAST_OUTS = 32, 16
MOST_STEPS, MOST_MULTIPLE = 15, 127
# Number of weights converted at a time, since intermediate tensors are several times as large.
AT_ONCE = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class NarrowWeights:
    """Weights (outs, features) in fewer bits.

    packed : upper halves of floats, int16 (outs, features); multiples of a scale, int8 (outs, features); or two steps
        per byte, uint8 (outs, features / 2): the lower 4 bits belong to the first half of the block, the upper 4 bits
        to the second.
    scales : for multiples (outs, features / BLOCK, 1); for steps (outs, features / BLOCK, 2), each block's step and
        minimum; None for halves.
    """

    packed: torch.Tensor
    scales: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.packed.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def features(self) -> int:
        """Number of input features."""
        return self.packed.shape[1] * (2 if self.packed.dtype == torch.uint8 else 1)

    def widen(self) -> torch.Tensor:
        """Return the weights (outs, features), float32."""
        if self.scales is None:
            return (self.packed.to(torch.int32) << 16).view(torch.float32)
        outs, blocks, _ = self.scales.shape
        if self.packed.dtype == torch.int8:
            return (self.packed.view(outs, blocks, BLOCK).float() * self.scales).view(outs, -1)
        each = self.packed.view(outs, blocks, BLOCK // 2)
        steps = torch.cat([each & MOST_STEPS, each >> 4], dim=-1).float()
        return (steps * self.scales[..., :1] + self.scales[..., 1:]).view(outs, -1)


def narrow(weight: torch.Tensor) -> NarrowWeights | None:
    """Convert weights (outs, features) to fewer bits; None if that is lossy, or the kernels do not support them."""
    outs, features = weight.shape
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or features % BLOCK or outs < LEAST_OUTS:
        return None
    rows = max(1, AT_ONCE // features)
    for kind in (_as_steps, _as_multiples, _as_halves):
        parts = list[NarrowWeights]()
        for part in torch.split(weight.detach(), rows):
            found = _exactly(kind, part)
            if found is None:
                break
            parts.append(found)
        else:
            return _joined(parts)
    return None


def _exactly(kind: Callable[[torch.Tensor], NarrowWeights], weight: torch.Tensor) -> NarrowWeights | None:
    found = kind(weight.contiguous())
    is_same = torch.equal(found.widen().view(torch.int32), weight.contiguous().view(torch.int32))
    return found if is_same else None


def _as_halves(weight: torch.Tensor) -> NarrowWeights:
    return NarrowWeights((weight.view(torch.int32) >> 16).to(torch.int16), None)


def _as_multiples(weight: torch.Tensor) -> NarrowWeights:
    """Quantise as Q8_0 in ``llama.cpp``: a block's largest weight is 127 times a half-precision scale."""
    blocks = weight.view(len(weight), -1, BLOCK)
    scale = (blocks.abs().amax(-1, keepdim=True) / MOST_MULTIPLE).half().float()
    multiples = torch.where(scale > 0, blocks / scale, 0.0).round().clamp(-MOST_MULTIPLE, MOST_MULTIPLE)
    return NarrowWeights(multiples.to(torch.int8).flatten(1), scale)


def _as_steps(weight: torch.Tensor) -> NarrowWeights:
    """Quantise as Q4_1 in ``llama.cpp``: 15 steps from a block's minimum to its maximum, both in half precision."""
    blocks = weight.view(len(weight), -1, BLOCK)
    least = blocks.amin(-1, keepdim=True)
    step = ((blocks.amax(-1, keepdim=True) - least) / MOST_STEPS).half().float()
    steps = torch.where(step > 0, (blocks - least) / step, 0.0).round().clamp(0, MOST_STEPS).to(torch.uint8)
    packed = steps[..., : BLOCK // 2] | (steps[..., BLOCK // 2 :] << 4)
    return NarrowWeights(packed.flatten(1), torch.cat([step, least], dim=-1))


def _joined(parts: Sequence[NarrowWeights]) -> NarrowWeights:
    scales = [part.scales for part in parts if part.scales is not None]
    return NarrowWeights(torch.cat([part.packed for part in parts]), torch.cat(scales) if scales else None)
