"""GPUs that are not there: tensors that say they are on one, streams, events, and a current GPU for each thread.

What is computed is computed at once, on the CPU; attention kernels refuse what a GPU's would (`fake_flash`). What
torch's CUDA sanitizer would have been told on a GPU it is told here: every access to a tensor's memory, on which
stream, and what waits for what. A tensor's memory is told in pieces of `GRAIN` bytes, so that rows of one buffer can be
in use by several streams.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_flash import DENSE, VARLEN, arguments_of, attend_as, check_flash
from torch.cuda import _sanitizer
from torch.overrides import TorchFunctionMode

import kvr_mpi.transport.staging  # noqa: F401 - names a type of torch.cuda's, before that is another
from kvr_mpi.model import LoadedModel

GRAIN = 64
# Of more only the first and last piece is told: what is timed or tried, not what a tiny model computes with.
MANY_BYTES = 1 << 16
CPU = torch.device("cpu")
# A GPU may be given the place of a value, or of indices, in host memory.
TAKES_HOST = ("aten::copy_", "aten::index", "aten::_to_copy")
# The host has to know the size of what they give.
SIZED_BY_VALUES = ("aten::nonzero", "aten::masked_select", "aten::unique", "aten::bincount")
TO, PIN = torch.Tensor.to, torch.Tensor.pin_memory
HISTOGRAM, COPY = torch.ops.aten.histc.default, torch.ops.aten.copy_.default
KERNELS = {DENSE: "dense", VARLEN: "varlen"}


def grains(real: torch.Tensor) -> set[int]:
    """The pieces of memory between a tensor's first and last element."""
    if not real.numel():
        return set()
    last = sum((size - 1) * stride for size, stride in zip(real.shape, real.stride(), strict=True))
    start = real.data_ptr()
    stop = (start + (last + 1) * real.itemsize - 1) // GRAIN + 1
    return {start // GRAIN, stop - 1} if real.nbytes > MANY_BYTES else set(range(start // GRAIN, stop))


class GpuTensor(torch.Tensor):
    """A tensor on a pretended GPU: `on_cpu` has its elements, `place` says which GPU."""

    on_cpu: torch.Tensor
    place: torch.device
    gpus: PretendedCuda
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, real: torch.Tensor, device: torch.device, gpus: PretendedCuda) -> GpuTensor:
        # A view of what was made outside of it must not be of it, and all may be viewed.
        with torch._C._InferenceMode(False):
            made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                real.size(),
                strides=real.stride(),
                storage_offset=real.storage_offset(),
                dtype=real.dtype,
                device=CPU,  # to torch's own code, which asks a GPU's driver otherwise
            )
        made.on_cpu, made.place, made.gpus = real, device, gpus
        gpus.made += 1
        if gpus.watches:
            gpus.kept.append(real)  # memory that is never given back is never taken for another tensor's
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(leaf for leaf in _leaves((*args, *kwargs.values())) if isinstance(leaf, GpuTensor))
        return first.gpus.launch(func, first.place, args, kwargs)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        copied = self.gpus.put(self.on_cpu.clone(), self.place)
        return torch.nn.Parameter(copied, requires_grad=False) if isinstance(self, torch.nn.Parameter) else copied

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {self.place} device type tensor to numpy")

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._wait()
        return self.on_cpu.clone()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_cpu.untyped_storage()

    def tolist(self) -> Any:
        self._wait()
        return self.on_cpu.tolist()

    def _wait(self) -> None:
        self.gpus.read(self.gpus.current_stream(self.device))
        self.gpus.waits.add("read back")

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.on_cpu.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if self.gpus.current_device() != self.device.index:
            raise BufferError("Can't export tensors on a different CUDA device index.")
        return self.on_cpu.__dlpack__(**options)


class Stream:
    """A stream of one GPU."""

    def __init__(self, gpus: PretendedCuda, device: torch.device) -> None:
        self.gpus, self.device, self.id = gpus, device, next(gpus.ids)
        self.cuda_stream = self.id
        gpus.streams.add(device.index)
        self.after: list[Any] = []  # NCCL's transfers that whatever is launched here next waits for
        self.behind = 0  # kernels of its GPU that whatever is launched here next waits for
        self.copies: list[list[torch.Tensor]] = []  # to host memory, and what will be there; empty once it is

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event(self.gpus)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpus.read(self)
        self.gpus.waits.add("stream")


def land(copies: list[list[torch.Tensor]]) -> None:
    """Let copies to host memory, which nobody may read before, be there."""
    for one in copies:
        if one:
            one[0].copy_(one[1])
            one.clear()


class Event:
    """A mark in a stream; passed at once, since what is computed is computed at once."""

    def __init__(self, gpus: PretendedCuda, enable_timing: bool = False) -> None:
        self.gpus, self.id, self.has_time = gpus, next(gpus.ids), enable_timing
        self.device: torch.device | None = None
        self.at_s, self.behind = 0.0, 0
        self.copies: list[list[torch.Tensor]] = []

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpus.current_stream()
        if self.device not in (None, stream.device):
            raise RuntimeError(f"an event of {self.device} is recorded on a stream of {stream.device}")
        self.device, self.at_s, self.behind = stream.device, time.perf_counter(), stream.behind
        self.stream, self.copies = stream, [each for each in stream.copies if each]
        self.gpus.handle(stream.device, "event_record", self.id, stream.id)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpus.current_stream()
        assert self.device is not None, "waits for an event that nobody has recorded"
        self.gpus.handle(self.device, "event_wait", self.id, stream.id)
        stream.behind = max(stream.behind, self.behind)
        stream.copies += self.copies

    def query(self) -> bool:
        if self.device is not None:
            self.gpus.handle(self.device, "event_synchronization", self.id)
            land(self.copies)
        return True

    def synchronize(self) -> None:
        """Counted as a wait if nothing has been launched since: then the GPU stands still, too."""
        self.query()
        self.gpus.waits.add("event", self.device is None or self.stream.behind == self.behind)

    def elapsed_time(self, later: Event) -> float:
        assert self.has_time and later.has_time, "an event without time is asked for it"
        return 1e3 * (later.at_s - self.at_s)


class Graph:
    """Records sums only (`fake_nccl`): float32 has no paged calls, which is found out on the way."""

    def __init__(self, gpus: PretendedCuda) -> None:
        self.gpus = gpus
        self.sums: list[tuple[Any, torch.Tensor]] = []

    def capture_begin(self, **how: Any) -> None:
        self.gpus._state.graph = self

    def capture_end(self) -> None:
        self.gpus._state.graph = None

    def replay(self) -> None:
        assert self.sums, "what is pretended here is not recorded"
        for group, tensor in self.sums:
            group.allreduce([tensor]).wait()

    def reset(self) -> None:
        for group, _ in self.sums:
            group.forget_sum()
        self.sums.clear()


class _NoStack(list[Any]):
    """In the place of where an access came from, which takes the sanitizer longer than all else."""

    def format(self) -> list[str]:
        return []


@dataclass
class _ThreadState:
    device: int = 0
    streams: dict[int, Stream] | None = None
    makes_tensors: bool = False
    graph: Graph | None = None  # that is recorded


class Counts(Counter[Any]):
    """A counter for several threads, of which two may meet a new key at once."""

    lock = threading.Lock()

    def add(self, what: Any, number: int = 1) -> None:
        with self.lock:
            self[what] += number


class PretendedCuda:
    """All GPUs of the process, and what is wrong with how they are used (`faults`).

    Attributes
    ----------
    watches : bool
        Tell the sanitizer every access, which takes longer than all else.
    calls : Counts
        Of attention kernels, by form; of flash attention's variable-length form also those of pages.
    streams : Counts
        How many each GPU has.
    waits : Counts
        What made the host wait for a GPU, or copied between their memories.
    flash_fault : callable
        Applied to what flash attention gives.
    """

    def __init__(self) -> None:
        self.ids = itertools.count(1)
        self.made = 0  # tensors
        self.kept: list[torch.Tensor] = []
        self.emptied: list[torch.UntypedStorage] = []  # memory for keys and values, of which nobody else lets go
        self.untold: set[int] = set()  # grains of weights: they do not change
        self.faults: list[str] = []
        self.watches = True
        self.handlers: dict[torch.device, Any] = defaultdict(_sanitizer.EventHandler)
        self.syncs_of_devices: list[torch.device] = []
        self.calls, self.waits, self.streams = Counts(), Counts(), Counts()
        self.flash_fault: Callable[[Any], Any] = lambda found: found
        self._lock, self._local = threading.RLock(), threading.local()
        self._defaults: dict[int, Stream] = {}

    # -- what torch.cuda offers, by thread

    @property
    def _state(self) -> _ThreadState:
        if not hasattr(self._local, "state"):
            self._local.state = _ThreadState(streams={})
        return self._local.state  # type: ignore[no-any-return]

    def current_device(self) -> int:
        return self._state.device

    def set_device(self, device: Any) -> None:
        self._state.device = self._index(device)
        if threading.current_thread() is not threading.main_thread() and not self._state.makes_tensors:
            self._state.makes_tensors = True
            OnDevices(self).__enter__()  # for the rest of the thread

    def current_stream(self, device: Any = None) -> Stream:
        index = self.current_device() if device is None else self._index(device)
        assert self._state.streams is not None
        with self._lock:
            if index not in self._defaults:
                self._defaults[index] = Stream(self, torch.device("cuda", index))
        return self._state.streams.get(index, self._defaults[index])

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """As torch's: the end restores the stream, and the GPU, that this thread had before."""
        if stream is None:
            yield
            return
        state, index = self._state, stream.device.index
        assert state.streams is not None
        device, before = state.device, self.current_stream(stream.device)
        state.device, state.streams[index] = index, stream
        try:
            yield
        finally:
            state.device, state.streams[index] = device, before

    def synchronize(self, device: Any = None) -> None:
        index = self.current_device() if device is None else self._index(device)
        self.syncs_of_devices.append(torch.device("cuda", index))
        self.waits.add("device")

    def read(self, stream: Stream) -> None:
        """Let the host wait for a stream."""
        self.handle(stream.device, "stream_synchronization", stream.id)
        land(stream.copies)

    # -- tensors

    def put(self, real: torch.Tensor, device: torch.device) -> GpuTensor:
        return GpuTensor(real, device, self)

    @torch.inference_mode()
    def move(self, loaded: LoadedModel, device: torch.device) -> LoadedModel:
        """Give a model a copy of its weights on a GPU."""
        model = copy.deepcopy(loaded.model)
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    self.untold |= grains(weight.data)
                    module._parameters[name] = torch.nn.Parameter(self.put(weight.data, device), requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.put(buffer, device)
        return replace(loaded, model=model, device=device)

    def launch(self, func: Any, device: torch.device, args: Any, kwargs: Any) -> Any:
        """Run an operation on the GPU of its tensors, on the stream that is current there."""
        how, leaves = _operation(func), _leaves((*args, *kwargs.values()))
        target = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), device)
        self._check_devices(how, device, args, leaves)
        known = {id(leaf.on_cpu): leaf for leaf in leaves if isinstance(leaf, GpuTensor)}
        on_cpu = tuple(_on_cpu(each) for each in args)
        options = {name: _on_cpu(each) for name, each in kwargs.items() if name != "pin_memory"}
        if func is HISTOGRAM:  # CPUs count no integers
            on_cpu = (on_cpu[0].float(), *on_cpu[1:])
        found = self._attend(func, args, kwargs, (on_cpu, options)) if func in KERNELS else func(*on_cpu, **options)
        if self.watches:
            self._tell(func, device, args, kwargs, found)
        stream = self.current_stream(device)
        stream.behind += not how.is_view
        if func is COPY and not isinstance(args[0], GpuTensor) and args[2:] == (True,):
            stream.copies.append([args[0], args[0].clone()])
            args[0].view(torch.uint8).fill_(0xFF)
        is_copy = target.type == "cpu" and not how.name.endswith("copy_")
        is_read = is_copy and not how.name.endswith("empty")
        if is_read or not isinstance(found, (torch.Tensor, tuple, list, type(None))) or how.is_sized(args):
            self.read(stream)  # the host has it
            self.waits.add(how.name)
        return found if is_copy else self._returned(found, known, target)

    def _returned(self, found: Any, known: dict[int, GpuTensor], device: torch.device) -> Any:
        if isinstance(found, torch.Tensor):
            return known[id(found)] if id(found) in known else self.put(found, device)
        if isinstance(found, (list, tuple)):
            return type(found)([self._returned(each, known, device) for each in found])
        return found

    def _attend(self, func: Any, args: Any, kwargs: Any, on_cpu: Any) -> Any:
        """Run an attention kernel, which refuses what a GPU's would."""
        told = arguments_of(func, args, kwargs)
        self.calls.add("paged" if told.get("block_table") is not None else KERNELS[func])
        check_flash(func, told)
        return self.flash_fault(attend_as(func, arguments_of(func, *on_cpu)))

    def access(self, stream: Stream, reads: set[int], writes: set[int], what: str) -> None:
        """Tell the sanitizer that a kernel on a stream reads and writes these grains."""
        if not self.watches or self._state.graph:
            return
        with self._lock:
            errors = self.handlers[stream.device]._handle_kernel_launch(
                stream.id, reads - writes - self.untold, writes - self.untold, set(), what, defaultdict(list)
            )
        self.faults += [f"{what} on stream {stream.id}: {error}" for error in errors[:1]]

    def handle(self, device: torch.device, what: str, *ids: int) -> None:
        """Tell the sanitizer of an event or a stream."""
        with self._lock:
            getattr(self.handlers[device], f"_handle_{what}")(*ids)

    def _tell(self, func: Any, device: torch.device, args: Any, kwargs: Any, found: Any) -> None:
        reads: set[int] = set()
        writes: set[int] = set()
        for argument, value in _sanitizer.zip_arguments(func._schema, args, kwargs):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            is_view = argument.alias_info is not None and not is_write
            for leaf in _leaves([value]):
                if isinstance(leaf, GpuTensor) and not is_view:
                    (writes if is_write else reads).update(grains(leaf.on_cpu))
        if all(each.alias_info is None for each in func._schema.returns):
            for leaf in _leaves([found]):
                if isinstance(leaf, torch.Tensor):
                    writes |= grains(leaf)
        if reads or writes:
            self.access(self.current_stream(device), reads, writes, func._schema.name)

    def _check_devices(self, how: _Operation, device: torch.device, args: Any, leaves: list[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device != device and leaf.dim():
                if how.name == "aten::copy_" or (leaf.device.type == "cpu" and how.name.startswith(TAKES_HOST)):
                    self.waits.add(how.name, args[2:] != (True,))  # non_blocking
                    continue
                raise RuntimeError(f"{how.name}: expected all tensors on one device, found {device}, {leaf.device}")

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.current_device() if index is None else index


@dataclass(frozen=True)
class _Operation:
    """What its schema says of an operation, which takes long to ask."""

    name: str
    is_view: bool

    def is_sized(self, args: Any) -> bool:
        """Whether it waits to know how many elements there are; so does an index of truth values."""
        masks = args[1] if self.name == "aten::index" else ()
        return self.name.startswith(SIZED_BY_VALUES) or any(
            each is not None and each.dtype == torch.bool for each in masks
        )


@functools.cache
def _operation(func: Any) -> _Operation:
    made = [each.alias_info for each in func._schema.returns]
    return _Operation(func._schema.name, not any(each is None or each.is_write for each in made))


def _leaves(values: Any) -> list[Any]:
    """The arguments of an operation, and the members of lists of them; torch's trees take ten times as long."""
    found = []
    for each in values:
        if isinstance(each, (list, tuple)):
            found.extend(each)
        else:
            found.append(each)
    return found


def _on_cpu(value: Any) -> Any:
    if isinstance(value, GpuTensor):
        return value.on_cpu
    if isinstance(value, (list, tuple)):
        return type(value)([_on_cpu(each) for each in value])
    return CPU if isinstance(value, torch.device) else value


class OnDevices(TorchFunctionMode):
    """Makes tensors on pretended GPUs where the program says ``device=``, in threads that said which is theirs."""

    def __init__(self, gpus: PretendedCuda) -> None:
        super().__init__()
        self.gpus = gpus

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func is not TO:
            return args[0] if func is PIN else func(*args)
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)  # needs a driver
        if func is TO:
            named = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, (torch.device, str))]
            if named and torch.device(named[0]).type == "cuda":
                kinds = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype)]
                return self._to(args[0], torch.device(named[0]), kinds)
        elif kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            device = self._full(torch.device(kwargs.pop("device")))
            made = func(*args, **kwargs, device="cpu")
            if func in (torch.tensor, torch.as_tensor):
                self.gpus.waits.add(func.__name__)
            if func is torch.empty:
                self.gpus.emptied.append(made.untyped_storage())
            else:
                self.gpus.access(self.gpus.current_stream(device), set(), grains(made), func.__name__)
            return self.gpus.put(made, device)
        return func(*args, **kwargs)

    def _to(self, tensor: torch.Tensor, device: torch.device, kinds: list[torch.dtype]) -> torch.Tensor:
        typed = tensor.to(*kinds) if kinds else tensor
        if isinstance(typed, GpuTensor) and typed.device == self._full(device):
            return typed
        real = typed.on_cpu if isinstance(typed, GpuTensor) else typed
        self.gpus.waits.add("to")
        return self.gpus.put(real.clone(), self._full(device))

    def _full(self, device: torch.device) -> torch.device:
        return torch.device("cuda", self.gpus._index(device))


def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    """Eight pretended GPUs, in the place of torch.cuda."""
    gpus = PretendedCuda()
    quick = SimpleNamespace(extract=lambda *given, **options: _NoStack())
    monkeypatch.setattr(_sanitizer, "traceback", SimpleNamespace(StackSummary=quick, walk_stack=lambda frame: None))
    for name in ("current_device", "set_device", "current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpus, name))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(gpus, torch.device(device)))
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: Event(gpus, **options))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    # Of a tensor of ours, `.data = other` would change its type, and not what it has.
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=CPU: generator())
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 31, 1 << 34))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a pretended GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _properties(gpus._index(device)))
    return gpus


def _properties(index: int) -> SimpleNamespace:
    place = {"pci_domain_id": 0, "pci_bus_id": index, "pci_device_id": 0}
    return SimpleNamespace(uuid=f"GPU-{index}", shared_memory_per_block_optin=232_448, **place)
