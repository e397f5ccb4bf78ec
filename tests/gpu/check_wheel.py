"""What this program asks of torch's CUDA build, checked against the real wheel on a machine without a GPU.

First names and signatures: NCCL's groups, made and called by our transport, and what else only such a build has. Then
what torch compiles for GPUs of three architectures: how much shared memory FlexAttention's kernels take, and whether
that is more than such a GPU has; and how many kernels gates and rotary embeddings are. For the Python of an environment
that has the wheel (``make cuda-wheel`` makes it); prints a line of JSON for each finding, and ends with 1 if something
is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.nccl import MAX_BLOCKS, open_nccl

# Bytes of shared memory that a block may have (NVIDIA, CUDA programming guide, compute capabilities).
LIMITS = {(8, 0): 166_912, (8, 6): 101_376, (9, 0): 232_448}
# (head_dim, soft cap, whether masked): Gemma 2's, and wide heads.
LAYERS = ((128, 50.0, True), (256, 50.0, True), (256, 50.0, False), (320, None, True), (512, None, True))
# Kernels that functions are compiled to: queries and keys have different sizes.
KERNELS = {"gates": 1, "rotary embeddings": 2}
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


@contextmanager
def pretended(capability: tuple[int, int]) -> Iterator[dict[str, int]]:
    """Let torch's compiler believe in a GPU; yields the shared memory of every kernel that it compiles, by name."""
    import torch._inductor.runtime.triton_heuristics as heuristics
    import torch._subclasses.fake_tensor as fake
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
            vars(module)["has_triton"] = lambda *given, **how: True
    found: dict[str, int] = {}
    tuner: Any = heuristics.CachingAutotuner
    compile_one: Any = tuner._precompile_config

    def compile_and_note(self: Any, config: Any) -> Any:
        made = compile_one(self, config)
        found[self.fn.__name__] = int(getattr(made.kernel, "metadata", made.kernel).shared)
        return made

    def stop(self: Any, *given: Any, **how: Any) -> None:
        if TEMPLATE in self.fn.__name__:
            raise Compiled
        self.launchers = [lambda *given, **how: None]  # of a small kernel before it, which is not run

    fake.init_gpu_context = lambda device=None: None  # type: ignore[assignment]
    tuner._precompile_config, tuner._make_launchers = compile_and_note, stop
    yield found


def compile_layer(head_dim: int, softcap: float | None, is_masked: bool) -> None:
    """Compile FlexAttention as `kvr_mpi.kv.flex` asks for it, for tensors that are not there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kvr_mpi.kv import flex

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


def compile_function(name: str) -> None:
    """Compile a gate, or a rotary embedding, as `kvr_mpi.model.fused` does."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kvr_mpi.model import fused

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = q.shape[-1] // 2  # as transformers does it
        turned = (torch.cat((-each[..., half:], each[..., :half]), dim=-1) for each in (q, k))
        return tuple(one * cos[:, None] + other * sin[:, None] for one, other in zip((q, k), turned, strict=True))

    functions: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
        "gates": (fused.gate_of(torch.nn.functional.silu), [(1, 300, 14336)] * 2),
        "rotary embeddings": (rotate, [(1, 300, 32, 128), (1, 300, 8, 128), (1, 300, 128), (1, 300, 128)]),
    }
    own, shapes = functions[name]
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        given = [torch.empty(shape, dtype=torch.bfloat16, device=torch.device("cuda", 0)) for shape in shapes]
        given = [each.transpose(1, 2) if each.dim() == 4 else each for each in given]
        fused.FusedFunction(name, own, "inductor").compile(given)


def main(capability: tuple[int, int] | None) -> int:
    """Check names, or compile for one architecture."""
    if capability is None:
        missing = list(missing_names())
        is_well = not missing and torch.version.cuda is not None
        tell({"torch": torch.__version__, "cuda": torch.version.cuda, "missing": missing, "is_well": is_well})
        return int(not is_well)
    code = 0
    with pretended(capability) as shared:
        works: dict[Any, Callable[[], None]] = {layer: partial(compile_layer, *layer) for layer in LAYERS}
        works |= {name: partial(compile_function, name) for name in KERNELS}
        for what, work in works.items():
            shared.clear()
            said = ""
            try:
                work()
            except BaseException as error:
                said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            mine = [many for name, many in shared.items() if what in KERNELS or TEMPLATE in name]
            is_well = 0 < len(mine) == KERNELS.get(what, len(mine)) and max(mine) <= LIMITS[capability]
            code |= int(not is_well)
            tell({"what": what, "shared_bytes": shared, "is_well": is_well, "said": "" if is_well else said})
    return code


def tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


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
    if "LD_PRELOAD" in os.environ:
        sys.setdlopenflags(os.RTLD_LAZY)  # a library that Triton makes names functions of the driver that nobody calls
        sys.exit(main((int(sys.argv[1][0]), int(sys.argv[1][1])) if sys.argv[1:] else None))
    with tempfile.TemporaryDirectory() as made:
        sys.exit(without_driver(Path(made), sys.argv[1:]))
