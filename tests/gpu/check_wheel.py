"""What this program asks of torch's CUDA build, checked against the real wheel on a machine without a GPU.

First names: every one that only such a build has. Then FlexAttention, compiled for GPUs of three architectures: how
much shared memory its kernels take, and whether that is more than such a GPU has. For the Python of an environment that
has the wheel (``make test-long PARTS=wheel`` makes it); prints a line of JSON for each finding, and ends with 1 if
something is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# Bytes of shared memory that a block may have (NVIDIA, CUDA programming guide, compute capabilities).
LIMITS = {(8, 0): 166_912, (8, 6): 101_376, (9, 0): 232_448}
# (head_dim, soft cap, whether masked): Gemma 2's, and wide heads.
LAYERS = ((128, 50.0, True), (256, 50.0, True), (256, 50.0, False), (320, None, True), (512, None, True))
# In the names of kernels that are made from a template, as FlexAttention's is.
TEMPLATE = "_tem_"
PROPERTIES = ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id", "shared_memory_per_block_optin")


class Compiled(Exception):  # noqa: N818 - what was to be seen
    """The kernel is there; there is nothing to launch it on."""


def missing_names() -> Iterator[str]:
    """Name what the wheel lacks."""
    if not dist.is_nccl_available():
        yield "NCCL"
        return
    group: Any = dist.ProcessGroupNCCL
    yield from (
        f"ProcessGroupNCCL.{name}"
        for name in ("send", "recv", "allreduce", "shutdown", "abort")
        if not hasattr(group, name)
    )
    options = group.Options(is_high_priority_stream=True)
    options.config.max_ctas = 4
    if options.config.max_ctas != 4:
        yield "ProcessGroupNCCL.Options.config.max_ctas"
    work: Any = dist.Work
    yield from (f"Work.{name}" for name in ("is_completed", "exception", "wait") if not hasattr(work, name))
    from torch.nn import attention

    wanted = ("activate_flash_attention_impl", "restore_flash_attention_impl", "list_flash_attention_impls")
    yield from (f"torch.nn.attention.{name}" for name in wanted if not hasattr(attention, name))
    if "FA3" not in attention.list_flash_attention_impls():
        yield "FA3 among list_flash_attention_impls()"
    about: Any = torch._C._CudaDeviceProperties
    yield from (f"device properties: {name}" for name in PROPERTIES if not hasattr(about, name))


@contextmanager
def pretended(capability: tuple[int, int]) -> Iterator[list[int]]:
    """Let torch's compiler believe in a GPU; yields a list of the shared memory of every kernel that it compiles."""
    import torch._inductor.runtime.triton_heuristics as heuristics
    from torch._dynamo import device_interface
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    limit, number = LIMITS[capability], 10 * capability[0] + capability[1]
    about = SimpleNamespace(
        name="a GPU that is not there",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=108,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=limit,
        shared_memory_per_multiprocessor=limit + 1024,
        L2_cache_size=40 << 20,
        uuid="none",
        gcnArchName="",
        memory_bus_width=5120,
        memory_clock_rate=1_500_000,
        clock_rate=1_400_000,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "_lazy_init": None,
        "get_device_properties": about,
        "get_device_capability": capability,
        "get_compute_capability": number,
        "get_device_name": about.name,
        "synchronize": None,
        "mem_get_info": (80 << 30, 80 << 30),
        "is_bf16_supported": True,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "current_stream": SimpleNamespace(cuda_stream=0),
        "get_raw_stream": 0,
        "is_initialized": True,
    }
    interface: Any = device_interface.CudaInterface
    for place in (torch.cuda, interface, interface.Worker):
        for name, answer in answers.items():
            if name in vars(place):
                setattr(place, name, staticmethod(lambda *given, answer=answer, **how: answer))
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    limits = {"max_shared_mem": limit, "multiprocessor_count": 108, "warpSize": 32, "max_num_regs": 65536}
    rates = {"sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1}
    asked_by_triton: Any = SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda device: limits | rates),
        get_current_target=lambda: GPUTarget("cuda", number, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
    )
    driver.set_active(asked_by_triton)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("torch") and hasattr(module, "has_triton"):
            module.has_triton = lambda *given, **how: True
    found: list[int] = []
    compile_one: Any = heuristics.CachingAutotuner._precompile_config

    def compile_and_note(self: Any, config: Any) -> Any:
        made = compile_one(self, config)
        if TEMPLATE in self.fn.__name__:
            found.append(int(getattr(made.kernel, "metadata", made.kernel).shared))
        return made

    def stop(self: Any, *given: Any, **how: Any) -> None:
        if TEMPLATE in self.fn.__name__:
            raise Compiled
        self.launchers = [lambda *given, **how: None]  # of a small kernel before it, which is not run

    heuristics.CachingAutotuner._precompile_config = compile_and_note
    heuristics.CachingAutotuner._make_launchers = stop
    yield found


def compile_layer(head_dim: int, softcap: float | None, is_masked: bool) -> None:
    """Compile FlexAttention as `kvr_mpi.kv.flex` asks for it, for tensors that are not there."""
    import torch._subclasses.fake_tensor as fake
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kvr_mpi.kv import flex

    fake.init_gpu_context = lambda device=None: None  # type: ignore[assignment]
    torch._dynamo.reset()
    for kept in (flex._function, flex._options, flex._bend, flex.visible_blocks):
        kept.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        device = torch.device("cuda", 0)
        query = torch.empty(1, 8, 300, head_dim, dtype=torch.bfloat16, device=device)
        keys = torch.empty(1, 4, 700, head_dim, dtype=torch.bfloat16, device=device)
        offset = 400 if is_masked else None
        flex.attend_flex(
            query, keys, torch.empty_like(keys), scale=head_dim**-0.5, softcap=softcap, offset=offset, window=None
        )


def main(capability: tuple[int, int] | None) -> int:
    """Check names, or compile for one architecture."""
    if capability is None:
        missing = list(missing_names())
        print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "missing": missing}), flush=True)
        return int(bool(missing) or torch.version.cuda is None)
    code = 0
    with pretended(capability) as shared:
        for head_dim, softcap, is_masked in LAYERS:
            shared.clear()
            said = ""
            try:
                compile_layer(head_dim, softcap, is_masked)
            except BaseException as error:
                said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            fits = bool(shared) and max(shared) <= LIMITS[capability]
            code |= int(not fits)
            found = {"layer": (head_dim, softcap, is_masked), "shared_bytes": shared[:], "fits": fits, "said": said}
            print(json.dumps(found), flush=True)
    return code


def without_driver(folder: Path, words: list[str]) -> int:
    """Run this program once more, with a driver that is none (``no_driver.c``)."""
    driver = folder / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", driver, Path(__file__).with_name("no_driver.c")], check=True, timeout=60
    )
    environ = {
        "LD_PRELOAD": str(driver),
        "LD_LIBRARY_PATH": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    return subprocess.run([sys.executable, __file__, *words], env=os.environ | environ, check=False).returncode


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    if not wanted:
        sys.exit(main(None))
    if "LD_PRELOAD" in os.environ:
        sys.exit(main((int(wanted[0]), int(wanted[1]))))
    with tempfile.TemporaryDirectory() as made:
        sys.exit(without_driver(Path(made), sys.argv[1:]))
