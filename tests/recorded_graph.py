"""A CUDA graph without CUDA: operations are taken down while something is computed, and done again when replayed.

As a graph it repeats them on the same tensors and with the same numbers, whatever Python would say now, and refuses
what reads a value back while it captures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fake_gpu import READS_BACK
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in READS_BACK:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def record(compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """Take a computation down, as `graphs.Capture` has it."""
    compute()
    with _Recorder() as recorder:
        result = compute()

    def replay() -> None:
        with torch.inference_mode():
            for func, args, kwargs, out in recorder.calls:
                given = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
                again = func(*args, **kwargs)
                for old, new in zip(_tensors(out), _tensors(again), strict=True):
                    if old.untyped_storage().data_ptr() not in given:  # else it is a view, or was written in place
                        old.copy_(new)

    return replay, result
