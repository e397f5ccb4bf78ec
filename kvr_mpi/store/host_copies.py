"""Copies of a GPU's tensors in host memory, which the GPU makes when it comes to them and nobody waits for at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Copied:
    """A mark in a GPU's stream, after the copies that it was told of."""

    device: torch.device
    event: torch.cuda.Event

    def wait(self) -> None:
        """Return when they are made; in any thread, which has GPU 0, and a context there, until it says another."""
        import torch

        torch.cuda.set_device(self.device)
        self.event.synchronize()


def copy_to_host(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """Copy a tensor, in one piece; from a GPU by and by, in the order of its stream.

    Parameters
    ----------
    into : Tensor or None
        Host memory of its shape and type that was made here before; None: it is made, page-locked for a GPU.
    """
    if into is None:
        into = tensor.new_empty(tensor.shape, device="cpu", pin_memory=tensor.is_cuda)
    into.copy_(tensor.detach(), non_blocking=True)
    return into


def mark_copies(device: torch.device) -> Copied | None:
    """Mark where a GPU's current stream has come to; None for host memory, of which a copy is made at once."""
    if device.type != "cuda":
        return None
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return Copied(device, event)
