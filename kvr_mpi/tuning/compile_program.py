"""Compile fused kernels, as a program of its own: ``python -m kvr_mpi.tuning.compile_program FOLDER DTYPE NAME...``.

A compiler may fail, or never return, and torch's is large: none of that happens to a rank. What is compiled takes any
number of rows and features, and as many threads as the rank that runs it has.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from kvr_mpi.model.fused import GATES, rms_norm

NORM = "norm"
# torch leaves the parallel loops out if it may use one thread itself.
THREADS = 2


class _Formula(torch.nn.Module):
    """A function, as what torch exports."""

    def __init__(self, formula: Any) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Compute it."""
        out: torch.Tensor = self.formula(*tensors)
        return out


def compile_kernel(name: str, dtype: torch.dtype, file: Path) -> None:
    """Compile `rms_norm`, or one of the `GATES`, into a file that torch loads without its compiler."""
    any_length = torch.export.Dim("length", min=1, max=1 << 40)
    if name == NORM:
        features = torch.export.Dim("features", min=1, max=1 << 20)
        rows = torch.randn(8, 96, dtype=dtype)
        example: tuple[torch.Tensor, ...] = (rows, torch.ones(96), torch.tensor([1e-5]))
        shapes: list[Any] = [{0: any_length, 1: features}, {0: features}, None]
        formula: Any = rms_norm
    else:
        example = (torch.randn(96, dtype=dtype), torch.randn(96, dtype=dtype))
        shapes, formula = [{0: any_length}, {0: any_length}], GATES[name]
    with torch.no_grad():
        exported = torch.export.export(_Formula(formula), example, dynamic_shapes=(tuple(shapes),))
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(file), inductor_configs={"cpp.dynamic_threads": True}
        )


def main(folder: str, dtype: str, *names: str) -> None:
    """Compile each into ``FOLDER/NAME.pt2``."""
    from torch._inductor import cpp_builder

    cpp_builder.get_cpp_compiler()  # raises before anything is exported, if there is none
    torch.set_num_threads(THREADS)
    for name in names:
        compile_kernel(name, getattr(torch, dtype), Path(folder, f"{name}.pt2"))


if __name__ == "__main__":
    main(*sys.argv[1:])
