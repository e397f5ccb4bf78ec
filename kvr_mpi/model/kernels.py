"""Faster implementations of some of a model's modules, kept separately from the model.

Plain transformers goes on with the modules' own code: ours is in their place only while ours runs. Which way is faster
depends on the processor and on the number of rows, so a kernel knows both ways and takes that which was measured to be
faster (`tuning.kernels`). What comes of it is held against plain transformers before every batch
(`prefill.self_check`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

# Rows that are measured: a document's next token, those of some and of many documents, a slice.
ROWS = (1, 8, 64, 512)
# From so many rows on the next of them stands for what is computed: half way between, as ratios are counted.
BOUNDS = tuple(round((few * many) ** 0.5) for few, many in zip(ROWS, ROWS[1:], strict=False))
PLAIN = "plain"
# Where a kernel stands: in place of a module's own code, or, beside a whole model, for what its layers attend with.
FORWARD_SLOT, ATTENTION_SLOT = "forward", "kvr_attention"
# The name of a way at each of `ROWS`.
Ways = tuple[str, ...]


def always(way: str) -> Ways:
    """Use one implementation for any number of rows."""
    return (way,) * len(ROWS)


def way_for(ways: Ways, rows: int) -> str:
    """Return the implementation for so many rows."""
    return ways[bisect_right(BOUNDS, rows)]


class Kernel(Protocol):
    """What stands in a slot of a module: a function from (..., features) to (..., features), or `CpuAttention`."""

    slot: str
    nbytes: int  # memory it takes beside the module's own
    ways: Ways


# Beside the models and not in them: a copy of a model, in another dtype maybe, is a plain one.
_KERNELS: WeakKeyDictionary[torch.nn.Module, Kernel] = WeakKeyDictionary()


def give_kernel(module: torch.nn.Module, kernel: Kernel) -> None:
    """Register a kernel for a module, used from the next `use_kernels` on; it must not reference the module."""
    _KERNELS[module] = kernel


def kernels_of(model: torch.nn.Module) -> dict[str, Kernel]:
    """Return the kernels of a model's modules by module name."""
    return {name: _KERNELS[module] for name, module in model.named_modules() if module in _KERNELS}


def kernel_bytes(model: torch.nn.Module) -> int:
    """Bytes that a model's kernels need in addition to the model."""
    return sum(kernel.nbytes for kernel in kernels_of(model).values())


def use_kernels(model: torch.nn.Module, yes: bool) -> bool:
    """Use a model's kernels, or its modules' own code; return whether it has kernels."""
    found = False
    for module in model.modules():
        kernel = _KERNELS.get(module)
        if kernel is not None:
            found = True
            if yes:
                setattr(module, kernel.slot, kernel)
            else:
                vars(module).pop(kernel.slot, None)
    return found


def forget_kernels(model: torch.nn.Module) -> bool:
    """Remove a model's kernels; return whether there were any."""
    found = use_kernels(model, False)
    for module in model.modules():
        _KERNELS.pop(module, None)
    return found


def name_ways(model: torch.nn.Module) -> str:
    """Name the implementations that a model's attention and linear layers may use, other than plain torch."""
    found = {"attention": {PLAIN}, "products": {PLAIN}}
    for kernel in kernels_of(model).values():
        found["attention" if kernel.slot == ATTENTION_SLOT else "products"].update(kernel.ways)
    return "; ".join(f"{what}: {', '.join(sorted(ways))}" for what, ways in found.items())


@contextmanager
def without_kernels(model: Any) -> Iterator[None]:
    """Use the modules' own code within the block."""
    was = any(_KERNELS[module].slot in vars(module) for module in model.modules() if module in _KERNELS)
    use_kernels(model, False)
    try:
        yield
    finally:
        use_kernels(model, was)
