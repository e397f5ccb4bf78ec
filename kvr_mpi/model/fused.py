"""Norms and gates in one pass over their elements, where a model's own code takes several.

Which modules these are is found by computing: a module is taken over if what it makes of random numbers is what our
formula makes of them, whatever its class is called. Any other stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any
from weakref import ref

import torch

from kvr_mpi.model.kernels import FORWARD_SLOT, PLAIN, Ways, give_kernel, way_for

# Of (elements,) twice: an activation of the first, times the second.
Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Of rows (rows, features), weights (features,) in float32, and epsilon (1,).
Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

IN_PLACE, COMPILED = "in place", "compiled"
TRIED_ROWS = 5
# Scales of the random numbers that are tried: at the smallest, epsilon decides.
SCALES = (1e-3, 1.0, 1e3)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
    """Divide rows (rows, features) by their root mean square, and weigh the features (Zhang and Sennrich 2019)."""
    exact = rows.float()
    return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon) * weight).to(rows.dtype)


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Multiply by SiLU of the gate (Shazeer 2020)."""
    return torch.nn.functional.silu(gate) * up


def gelu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Multiply by GELU of the gate, its approximation by tanh."""
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def _silu_in_place(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate, inplace=True).mul_(up)


GATES: Mapping[str, Gate] = {"silu": silu_gate, "gelu": gelu_gate}
IN_PLACE_GATES: Mapping[str, Gate] = {"silu": _silu_in_place}


@dataclass(frozen=True, slots=True)
class NormFound:
    """A norm that is ours by another name: its weight as `rms_norm` takes it, and epsilon (1,)."""

    module: torch.nn.Module
    weight: torch.Tensor
    epsilon: torch.Tensor


@dataclass(frozen=True, slots=True)
class GateFound:
    """A gated MLP: the names of its linear layers, in the order gate, up, down, and of its activation."""

    module: torch.nn.Module
    linear: tuple[str, str, str]
    activation: str


class FusedNorm:
    """What a norm computes, in one pass for some numbers of rows.

    Parameters
    ----------
    found : NormFound
    norm : callable
        Of contiguous tensors.
    ways : Ways
    """

    slot, nbytes = FORWARD_SLOT, 0

    def __init__(self, found: NormFound, norm: Norm, ways: Ways) -> None:
        self._module, self._weight, self._epsilon = ref(found.module), found.weight, found.epsilon
        self._norm, self._dtype, self.ways = norm, next(found.module.parameters()).dtype, ways

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalise (..., features)."""
        features = self._weight.shape[0]
        if not _is_plain(rows, self._dtype) or way_for(self.ways, rows.numel() // features) == PLAIN:
            return _own(self._module, rows)
        return self._norm(rows.view(-1, features), self._weight, self._epsilon).view(rows.shape)


class FusedGate:
    """What a gated MLP computes, its activation and product in one pass for some numbers of rows.

    Parameters
    ----------
    found : GateFound
    gates : mapping of str to callable
        By the ways' names; of contiguous tensors.
    ways : Ways
    """

    slot, nbytes = FORWARD_SLOT, 0

    def __init__(self, found: GateFound, gates: Mapping[str, Gate], ways: Ways) -> None:
        self._module, self._linear = ref(found.module), found.linear
        self._gates, self.ways = gates, ways
        self._dtype = getattr(found.module, found.linear[0]).weight.dtype

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute (..., features) of (..., features)."""
        way = way_for(self.ways, rows.numel() // rows.shape[-1])
        if way == PLAIN or not _is_plain(rows, self._dtype):
            return _own(self._module, rows)
        gate, up, down = (getattr(self._module(), name) for name in self._linear)
        opened, wide = gate(rows), up(rows)
        hidden: torch.Tensor = down(self._gates[way](opened.view(-1), wide.view(-1)).view(wide.shape))
        return hidden


def _is_plain(rows: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether compiled code, which looks at nothing, may read a tensor."""
    return rows.dtype == dtype and rows.device.type == "cpu" and rows.is_contiguous() and rows.numel() > 0


def _own(module: ref[torch.nn.Module], rows: torch.Tensor) -> torch.Tensor:
    """Compute what a module's own code does."""
    alive: Any = module()
    out: torch.Tensor = type(alive).forward(alive, rows)
    return out


@torch.inference_mode()
def find_norms(model: torch.nn.Module) -> list[NormFound]:
    """List the norms that `rms_norm` computes, too; the model runs its own code meanwhile."""
    found = (_find_norm(module) for module in model.modules() if not list(module.children()))
    return [each for each in found if each is not None]


@torch.inference_mode()
def find_gates(model: torch.nn.Module) -> list[GateFound]:
    """List the MLPs that are an activation of one product, times another, and a third product of that."""
    found = (_find_gate(module) for module in model.modules())
    return [each for each in found if each is not None]


def give_norm(found: NormFound, norm: Norm, ways: Ways) -> None:
    """Have a norm computed so from the next `use_kernels` on."""
    give_kernel(found.module, FusedNorm(found, norm, ways))


def give_gate(found: GateFound, gates: Mapping[str, Gate], ways: Ways) -> None:
    """Have a gated MLP computed so from the next `use_kernels` on."""
    give_kernel(found.module, FusedGate(found, gates, ways))


def _find_norm(module: torch.nn.Module) -> NormFound | None:
    parameters, buffers = list(module.parameters()), list(module.buffers())
    if len(parameters) != 1 or buffers or parameters[0].ndim != 1 or parameters[0].device.type != "cpu":
        return None
    weight = parameters[0].detach()
    tried = torch.cat([_random((TRIED_ROWS, weight.shape[0]), scale, weight.dtype) for scale in SCALES])
    try:
        truths = module(tried)
    except Exception:  # whatever takes no rows of its weight's length is no norm
        return None
    for epsilon in (torch.tensor([value]) for value in vars(module).values() if isinstance(value, float)):
        for weighed in (weight.float(), weight.float() + 1):  # Gemma keeps how much more than 1 it is
            if _same(truths, rms_norm(tried, weighed, epsilon)):
                return NormFound(module, weighed, epsilon)
    return None


def _find_gate(module: torch.nn.Module) -> GateFound | None:
    linear = {name: one for name, one in module.named_children() if type(one) is torch.nn.Linear}
    weights = sum(len(list(one.parameters())) for one in linear.values())
    if len(linear) != 3 or len(list(module.parameters())) != weights:
        return None
    weight = next(iter(linear.values())).weight
    if weight.device.type != "cpu" or next(module.buffers(), None) is not None:
        return None
    orders = [names for names in permutations(linear) if _fits(*(linear[name] for name in names))]
    if not orders:
        return None
    tried = torch.cat(
        [_random((TRIED_ROWS, linear[orders[0][0]].in_features), scale, weight.dtype) for scale in SCALES]
    )
    try:
        truths = module(tried)
    except Exception:  # one that takes something else than rows
        return None
    for gate, up, down in orders:
        opened, wide = linear[gate](tried), linear[up](tried)
        for name, formula in GATES.items():
            if _same(truths, linear[down](formula(opened, wide))):
                return GateFound(module, (gate, up, down), name)
    return None


def _fits(gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear) -> bool:
    return gate.weight.shape == up.weight.shape == down.weight.shape[::-1]


def _random(shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def _same(truths: Any, found: torch.Tensor) -> bool:
    """Whether two results are the same at each of the scales."""
    if not isinstance(truths, torch.Tensor) or truths.shape != found.shape:
        return False
    scales = (slice(at, at + TRIED_ROWS) for at in range(0, len(found), TRIED_ROWS))
    return all(is_same(truths[rows], found[rows]) for rows in scales)


def is_same(truth: Any, found: torch.Tensor) -> bool:
    """Whether two results differ by no more than their type's rounding does; not if anything is not finite."""
    if not isinstance(truth, torch.Tensor) or truth.shape != found.shape or truth.dtype != found.dtype:
        return False
    allowed = 1e-5 if truth.dtype == torch.float32 else 2e-2
    largest = float(truth.float().abs().max())
    return float((truth.float() - found.float()).abs().max()) <= allowed * max(largest, 1e-30)
