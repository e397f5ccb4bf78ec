"""Faster implementations of some of a model's modules, kept separately from the model.

Plain transformers runs the modules' own code; kernels replace it only while we run the model. The fastest
implementation depends on the processor and the number of rows, so a kernel has several, and uses the one that was
measured to be fastest (`tuning.kernels`). Results are compared with plain transformers before every batch
(`prefill.self_check`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeGuard
from weakref import WeakKeyDictionary

import torch

# Numbers of rows that are measured: decoding one document, a few (or a few tokens), and many, and prefill of a slice.
ROWS = (1, 4, 64, 512)
# From each bound on, the next of `ROWS` applies; bounds are geometric means.
BOUNDS = tuple(round((few * many) ** 0.5) for few, many in zip(ROWS, ROWS[1:], strict=False))
PLAIN = "plain"
# Attribute of a module that holds its kernel: its own forward, or the attention kernel of a whole model.
FORWARD_SLOT, ATTENTION_SLOT = "forward", "kvr_attention"
# The name of the implementation at each of `ROWS`.
Ways = tuple[str, ...]


def always(way: str) -> Ways:
    """Use one implementation for any number of rows."""
    return (way,) * len(ROWS)


def way_for(ways: Ways, rows: int) -> str:
    """Return the implementation for this number of rows."""
    return ways[bisect_right(BOUNDS, rows)]


def named(what: str) -> AbstractContextManager[Any]:
    """Name a block for the profiler, if one is active, since naming costs as much as a kernel call."""
    at_work = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return torch.profiler.record_function(what) if at_work else nullcontext()


class Kernel(Protocol):
    """The kernel in a module's slot: a function from (..., features) to (..., features), or `CpuAttention`."""

    slot: str
    nbytes: int  # memory in addition to the module's own
    ways: Ways


class ExactForward:
    """A `Kernel` with another forward, whose results have the same bits, so that it is no implementation to choose."""

    slot, nbytes, ways = FORWARD_SLOT, 0, always(PLAIN)

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self._forward(*args, **kwargs)


# Not stored in the models, so that copies of a model, perhaps in another dtype, have no kernels.
_KERNELS: WeakKeyDictionary[torch.nn.Module, Kernel] = WeakKeyDictionary()


def give_kernel(module: torch.nn.Module, kernel: Kernel) -> None:
    """Register a kernel for a module, used from the next `use_kernels` on; it must not reference the module."""
    _KERNELS[module] = kernel


def is_plain_linear(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Whether a module is a linear layer that computes with its weights as they are, unlike quantised layers."""
    own = vars(module).get(FORWARD_SLOT)
    return type(module) is torch.nn.Linear and (own is None or own is _KERNELS.get(module))


def kernels_of(model: torch.nn.Module) -> dict[str, Kernel]:
    """Return the kernels of a model's modules by module name."""
    return {name: _KERNELS[module] for name, module in model.named_modules() if module in _KERNELS}


def kernel_of(module: torch.nn.Module) -> Any:
    """Return a module's kernel, or None."""
    return _KERNELS.get(module)


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
    """Name the implementations that attention and linear layers use, such as "AMX tiles for attention".

    Those for many rows come first.
    """
    found: dict[str, dict[str, None]] = {"attention": {}, "products": {}}
    for module in model.modules():
        kernel = _KERNELS.get(module)
        if kernel is not None and kernel.slot == ATTENTION_SLOT:
            found["attention"] |= dict.fromkeys("torch" if way == PLAIN else way for way in reversed(kernel.ways))
        elif isinstance(module, torch.nn.Linear):
            plain = "oneDNN" if uses_onednn(module.weight.dtype) else "torch"
            ways = always(PLAIN) if kernel is None else kernel.ways
            found["products"] |= dict.fromkeys(plain if way == PLAIN else way for way in reversed(ways))
    return ", ".join(f"{' and '.join(ways or ('torch',))} for {what}" for what, ways in found.items())


def uses_onednn(dtype: torch.dtype) -> bool:
    """Whether torch computes products of this 16-bit dtype with oneDNN on this processor."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    asks = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)  # some builds of torch lack these operators
    return asks is not None and bool(asks())


@contextmanager
def without_kernels(model: Any) -> Iterator[None]:
    """Use the modules' own code within the block."""
    was = any(_KERNELS[module].slot in vars(module) for module in model.modules() if module in _KERNELS)
    use_kernels(model, False)
    try:
        yield
    finally:
        use_kernels(model, was)
