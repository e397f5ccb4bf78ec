"""Chooses the device of a rank's model, explains why torch cannot use a machine's GPUs, and copies to the host."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvr_mpi.errors import ModelError

if TYPE_CHECKING:
    import torch

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
REMEDY = (
    "request GPUs for the job, or install a torch for the CUDA version in `nvidia-smi`, e.g. `pip install torch "
    "--index-url https://download.pytorch.org/whl/cu126`; model.device = 'cpu' runs on the CPU cores"
)


def choose_device(name: str, index: int) -> torch.device:
    """Choose the device of a rank's model: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.

    `index` is the GPU's index among those that this rank sees. Raises `ModelError` with ``cuda`` if there is
    no GPU, and with ``auto`` if torch cannot use the GPUs: the job would be about 100 times slower on the CPU cores.
    """
    import torch

    if name != "cpu" and (reason := explain_unusable_gpu()):
        raise ModelError(f"model.device = {name!r}: {reason}; {REMEDY}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "model.device = 'cuda', but this rank sees no GPU; use 'auto' or 'cpu', or request GPUs for the job"
        )
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def visible_gpus() -> list[str]:
    """Return globally unique ids of the GPUs that this process sees, in torch's order."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]


def explain_unusable_gpu(environ: Mapping[str, str] = os.environ) -> str:
    """Explain why torch finds no GPU although the machine has a driver and torch is built for CUDA.

    The result contains torch's own reason. It is empty if torch finds a GPU, or if none is expected: without a driver,
    with a torch without CUDA, or if ``CUDA_VISIBLE_DEVICES`` hides all GPUs.
    """
    import torch

    is_hidden = environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if is_hidden or not NVIDIA_DRIVER.exists() or not torch.version.cuda or torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "torch.cuda.is_available() is False"
    except (RuntimeError, AssertionError) as error:  # old driver, GPU in a bad state, or no GPU allocated
        reason = " ".join(str(error).split()).rstrip(".")
    return f"there is an NVIDIA driver and torch is built for CUDA {torch.version.cuda}, but finds no GPU: {reason}"


def copy_to_host(*tensors: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
    """Copy tensors of one device to new contiguous host memory; from a GPU asynchronously, in the order of its stream.

    The returned function waits, in any thread, for the copies from a GPU, and returns them.
    """
    import torch

    device = tensors[0].device
    copies = [each.new_empty(each.shape, device="cpu", pin_memory=each.is_cuda) for each in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach(), non_blocking=True)
    if device.type != "cuda":
        return lambda: copies
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))

    def wait() -> Sequence[torch.Tensor]:
        torch.cuda.set_device(device)  # a new thread's is GPU 0
        event.synchronize()
        return copies

    return wait
