"""Chooses the device of a rank's model, explains why torch cannot use a machine's GPUs, and copies to the host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvr_mpi.errors import ModelError

if TYPE_CHECKING:
    import torch

NVIDIA_DRIVER, AMD_DRIVER = Path("/proc/driver/nvidia/version"), Path("/dev/kfd")
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
INTEL_CARDS = Path("/sys/class/drm")
# More SIMD units than the graphics of AMD's processors have, on which nobody expects a job to run.
LEAST_SIMDS = 96
# The PCI class of Intel's data center GPUs; desktop graphics are VGA controllers.
INTEL, DISPLAY_CONTROLLER = "0x8086", "0x0380"
ON_CPU = "model.device = 'cpu' runs on the CPU cores"
NVIDIA_REMEDY = (
    "request GPUs for the job, or install a torch for the CUDA version in `nvidia-smi`, e.g. `pip install torch "
    f"--index-url https://download.pytorch.org/whl/cu126`; {ON_CPU}"
)
AMD_REMEDY = (
    "install a torch for ROCm, e.g. `pip install torch --index-url https://download.pytorch.org/whl/rocm7.2`, or make "
    f"sure that this user may open {AMD_DRIVER} (group `render`); kvr-mpi has never run on an AMD GPU; {ON_CPU}"
)


class UnusableGpu(NamedTuple):
    """A GPU of this machine that jobs cannot use: why, and what to do about it."""

    reason: str
    remedy: str


def choose_device(name: str, index: int) -> torch.device:
    """Choose the device of a rank's model: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.

    `index` is the GPU's index among those that this rank sees. Raises `ModelError` with ``cuda`` if there is
    no GPU, and with ``auto`` if torch cannot use the GPUs: the job would be about 100 times slower on the CPU cores.
    """
    import torch

    if name != "cpu" and (unusable := find_unusable_gpu()) is not None:
        raise ModelError(f"model.device = {name!r}: {unusable.reason}; {unusable.remedy}")
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


def find_unusable_gpu(environ: Mapping[str, str] = os.environ) -> UnusableGpu | None:
    """Find a GPU of this machine that torch cannot use; the reason contains torch's own.

    None if torch finds a GPU, or if none is expected: without a driver, with a torch without CUDA beside an NVIDIA
    driver, or if ``CUDA_VISIBLE_DEVICES`` or AMD's variables hide all GPUs.
    """
    import torch

    def is_hidden(*names: str) -> bool:
        return any(environ.get(name, "all").strip() in ("", "-1") for name in names)

    if torch.cuda.is_available():
        return None
    if NVIDIA_DRIVER.exists():
        if not torch.version.cuda or is_hidden("CUDA_VISIBLE_DEVICES"):
            return None
        built = f"there is an NVIDIA driver and torch is built for CUDA {torch.version.cuda}"
        return UnusableGpu(f"{built}, but finds no GPU: {_reason_of_torch()}", NVIDIA_REMEDY)
    if AMD_DRIVER.exists() and not is_hidden("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") and _has_large_amd_gpu():
        if torch.version.hip:
            built = f"torch is built for ROCm {torch.version.hip}, but finds no GPU: {_reason_of_torch()}"
        else:
            built = f"torch {torch.__version__} is not built for it"
        return UnusableGpu(f"there is an AMD GPU, and {built}", AMD_REMEDY)
    if not is_hidden("ZE_AFFINITY_MASK") and _has_intel_gpu():
        return UnusableGpu("there is an Intel GPU, on which kvr-mpi does not run", ON_CPU)
    return None


def _reason_of_torch() -> str:
    """Return why torch cannot use the GPUs: an old driver, a GPU in a bad state, or no GPU allocated."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split()).rstrip(".")
    return "torch.cuda.is_available() is False"


def _has_large_amd_gpu() -> bool:
    """Whether the driver lists a GPU that is more than a processor's graphics."""
    for node in AMD_NODES.glob("*/properties"):
        with contextlib.suppress(OSError, ValueError):
            found = dict(line.split(maxsplit=1) for line in node.read_text().splitlines() if " " in line)
            if int(found.get("simd_count", "0")) >= LEAST_SIMDS:
                return True
    return False


def _has_intel_gpu() -> bool:
    for vendor in INTEL_CARDS.glob("card*/device/vendor"):
        with contextlib.suppress(OSError):
            is_display = vendor.with_name("class").read_text().startswith(DISPLAY_CONTROLLER)
            if is_display and vendor.read_text().strip() == INTEL:
                return True
    return False


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
