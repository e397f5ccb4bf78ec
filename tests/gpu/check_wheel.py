"""What this program asks of torch's CUDA build, checked against the real wheel on a machine without a GPU.

Names and signatures: NCCL's groups, made and called by our transport, and what else only such a build has. For the
Python of an environment that has the wheel (``make cuda-wheel`` makes it); ends with 1 if something is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.nccl import MAX_BLOCKS, open_nccl

PROPERTIES = ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id", "shared_memory_per_block_optin")


def missing_names() -> Iterator[str]:
    """Name what the wheel lacks."""
    if not dist.is_nccl_available():
        yield "NCCL"
        return
    yield from run_local(2, what_nccl_takes)[0]
    work: Any = dist.Work
    yield from (f"Work.{name}" for name in ("is_completed", "exception", "wait") if not hasattr(work, name))
    from torch.nn import attention

    wanted = ("activate_flash_attention_impl", "restore_flash_attention_impl", "list_flash_attention_impls")
    yield from (f"torch.nn.attention.{name}" for name in wanted if not hasattr(attention, name))
    if "FA3" not in attention.list_flash_attention_impls():
        yield "FA3 among list_flash_attention_impls()"
    names = ((torch._C, "_accelerator_setAllocatorSettings"), (torch._C._distributed_c10d, "_dump_nccl_trace"))
    yield from (f"torch's {name}" for module, name in names if not hasattr(module, name))
    about: Any = torch._C._CudaDeviceProperties
    yield from (f"device properties: {name}" for name in PROPERTIES if not hasattr(about, name))


def what_nccl_takes(rank: LocalTransport) -> list[str]:
    """Say what is wrong with NCCL's own groups of two ranks: they refuse host memory, and nothing else of our calls."""
    ranks, host, found = open_nccl(rank, torch.device("cpu")), torch.zeros(4), list[str]()
    for call in (lambda: ranks.isend(host, 1, 0), lambda: ranks.irecv(host, 1, 0), lambda: ranks.all_reduce(host)):
        try:
            call()
            found.append("host memory is not refused")
        except (TypeError, ValueError, RuntimeError) as error:
            found += [] if "must be CUDA and dense" in str(error) else [str(error)]
    if ranks._groups.up.options.config.max_ctas != MAX_BLOCKS:
        found.append("ProcessGroupNCCL.Options.config.max_ctas")
    ranks.abort_sums()
    ranks.close()
    return found


def main() -> int:
    """Print what is missing as a line of JSON."""
    missing = list(missing_names())
    is_well = not missing and torch.version.cuda is not None
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "missing": missing, "is_well": is_well}))
    return int(not is_well)


def without_driver(folder: Path) -> int:
    """Run this program once more, with a driver that is none (``no_driver.c``)."""
    driver = folder / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", driver, Path(__file__).with_name("no_driver.c")], check=True, timeout=60
    )
    environ = os.environ | {"LD_PRELOAD": str(driver), "LD_LIBRARY_PATH": str(folder)}
    return subprocess.run([sys.executable, __file__], env=environ, check=False).returncode


if __name__ == "__main__":
    if "LD_PRELOAD" in os.environ:
        sys.exit(main())
    with tempfile.TemporaryDirectory() as made:
        sys.exit(without_driver(Path(made)))
