"""A GPU without one: fake tensors on ``cuda:3``, what flash attention checks, and what waits for the GPU.

The tensors have shapes, types and a device, and no values. What is checked here is restated from the sources of torch
2.13 (flash attention's dense and variable-length forms); no GPU has confirmed it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import CONFIGS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvr_mpi.kv import arena, attention
from kvr_mpi.model import LoadedModel, masks, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.masks import Visibility
from kvr_mpi.model.shape import meta_model

GPU = torch.device("cuda", 3)
PAGE_MULTIPLE = 256
DENSE, VARLEN = torch.ops.aten._flash_attention_forward.default, varlen._varlen_attn._opoverload


aten = torch.ops.aten
READS_BACK = {aten.item.default, aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}


class KernelError(Exception):
    """What the kernel would have refused."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise KernelError(what)


def check_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    edges: tuple[torch.Tensor | None, torch.Tensor | None],
    used: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> None:
    """Restate what flash attention requires of its arguments.

    Parameters
    ----------
    query, keys, values
        (batch, tokens, heads, head_dim), or with edges (tokens, heads, head_dim); of pages (pages, tokens of a page,
        heads, head_dim).
    edges
        Where sequences begin, of queries and of keys (sequences + 1,); none for whole batches.
    used
        Keys used of each sequence.
    table
        Pages of each sequence (sequences, pages).
    """
    tensors = (query, keys, values)
    head_dim, heads, kv_heads = query.shape[-1], query.shape[-2], keys.shape[-2]
    _require(all(each.device == GPU for each in tensors), "query, keys and values lie on the same GPU")
    _require(query.dtype in (torch.float16, torch.bfloat16), f"fp16 or bf16, not {query.dtype}")
    _require(query.dtype == keys.dtype == values.dtype, "one type")
    _require(head_dim % 8 == 0 and head_dim <= 256, f"a head dimension of {head_dim}")
    _require(head_dim == keys.shape[-1] == values.shape[-1], "keys and values of one head dimension")
    _require(kv_heads == values.shape[-2] and heads % kv_heads == 0, f"{heads} heads over {kv_heads}")
    _require(all(each.stride(-1) == 1 for each in tensors), "a contiguous last dimension")
    _require((edges[0] is None) == (edges[1] is None), "edges of both, or of none")
    if edges[0] is None:
        _require(query.ndim == keys.ndim == values.ndim == 4, "batches")
        _require(used is None and table is None, "pages come with edges")
        return
    sequences = edges[0].numel() - 1
    for name, vector, count in (
        ("edges", edges[0], sequences + 1),
        ("edges", edges[1], sequences + 1),
        ("used", used, sequences),
    ):
        if vector is not None:
            _require(vector.dtype == torch.int32, f"{name}: int32, not {vector.dtype}")
            _require(vector.device == GPU, f"{name} on the GPU, not on {vector.device}")
            _require(vector.is_contiguous() and tuple(vector.shape) == (count,), f"{name}: {tuple(vector.shape)}")
    _require(query.ndim == 3 and keys.ndim == values.ndim == (3 if table is None else 4), "shapes")
    if table is not None:
        _require(table.dtype == torch.int32 and table.device == GPU, "a table of int32 on the GPU")
        _require(table.stride(-1) == 1 and table.shape[0] == sequences, "a row of the table for each sequence")
        _require(keys.shape[1] == values.shape[1] and keys.shape[1] % PAGE_MULTIPLE == 0, "pages of 256 tokens")
        _require(used is not None, "with pages it has to be said how many keys are used")


class FlashKernel(TorchDispatchMode):
    """Checks every call of flash attention, and counts them by form."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DENSE:
            check_flash(*args[:3], args[3:5], kwargs.get("seqused_k"), kwargs.get("block_table"))
            self.calls["dense"] += 1
        elif func is VARLEN:
            given = dict(zip([each.name for each in func._schema.arguments], args, strict=False)) | kwargs
            check_flash(*args[:3], args[3:5], given.get("seqused_k"), given.get("block_table"))
            self.calls["varlen" if given.get("block_table") is None else "paged"] += 1
        return func(*args, **kwargs)


class FlashReference(TorchDispatchMode):
    """Computes on a CPU what flash attention documents: the last query of a sequence stands at its last key."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = [each.name for each in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if func is DENSE:
            windows = given.get("window_size_left"), given.get("window_size_right")
            left, right = (-1 if each is None else each for each in windows)
            out, lse = _attend(
                *(each[0] for each in args[:3]), given["scale"], left, 0 if given["is_causal"] else right
            )
            return out.unsqueeze(0), lse.unsqueeze(0), None, None, None
        if func is VARLEN:
            return *_attend_sequences(given), None
        return func(*args, **kwargs)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, left: int, right: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from (tokens, heads, head_dim); the log-sum-exp is (heads, tokens)."""
    group, before = query.shape[1] // keys.shape[1], len(keys) - len(query)
    keys, values = (each.float().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    distance = torch.arange(len(query))[:, None] + before - torch.arange(len(keys))
    hidden = (distance > left) & (left >= 0) | (-distance > right) & (right >= 0)
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(query.dtype), scores.logsumexp(-1)


def _attend_sequences(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend within each sequence, whose keys lie one after the other, or in pages."""
    of_queries, of_keys = given["cu_seq_q"].tolist(), given["cu_seq_k"].tolist()
    table, used, outs, lses = given.get("block_table"), given.get("seqused_k"), [], []
    for at, (first, last) in enumerate(itertools.pairwise(of_queries)):
        length = of_keys[at + 1] - of_keys[at] if used is None else int(used[at])
        assert length <= given["max_k"] and last - first <= given["max_q"]
        if table is None:
            rows = [each[of_keys[at] : of_keys[at] + length] for each in (given["key"], given["value"])]
        else:
            rows = [each[table[at].long()].flatten(0, 1)[:length] for each in (given["key"], given["value"])]
        out, lse = _attend(given["query"][first:last], *rows, given["scale"], *given["window_size"])
        outs, lses = [*outs, out], [*lses, lse]
    return torch.cat(outs), torch.cat(lses, dim=1)


class Traffic(TorchDispatchMode):
    """Counts what makes the processor wait for the GPU: tensors that come from host memory, and values read back.

    An operation that is given tensors of both memories copies, too, unless that of the host is a plain number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if func in READS_BACK:
            self.waits[str(func)] += 1
        out = func(*args, **kwargs)
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        kinds = {each.device.type for each in given if each.ndim} | {each.device.type for each in made}
        if {"cpu", "cuda"} <= kinds:
            self.waits[str(func)] += 1
        return out


class _Indexing(TorchFunctionMode):
    """Indexes and copies as Python operations: those of a torch without GPUs ask for a guard that it has not."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            view, by_tensor = _place(*args[:2])
            if func is torch.Tensor.__getitem__:
                return torch.ops.aten.index.Tensor(view, by_tensor) if by_tensor else view
            if by_tensor:
                return torch.ops.aten.index_put_.default(view, by_tensor, args[2])
            args, func = (view, args[2]), torch.Tensor.copy_
        if func is torch.Tensor.__invert__:
            return args[0].logical_not()
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **(kwargs or {}))
        if func is torch.Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _place(tensor: torch.Tensor, key: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Split an index of numbers, slices, None, an ellipsis, and lists or tensors: a view, and what indexes it."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if (at := next((at for at, each in enumerate(keys) if each is ...), None)) is not None:
        taken = sum(each is not None for each in keys) - 1
        keys[at : at + 1] = [slice(None)] * (tensor.ndim - taken)
    dim, by_tensor = 0, dict[int, torch.Tensor]()
    for each in keys:
        if each is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(each, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, each.start, each.stop, each.step or 1)
        elif isinstance(each, int):
            tensor, dim = tensor.select(dim, each), dim - 1
        else:
            by_tensor[dim] = each if isinstance(each, torch.Tensor) else torch.tensor(each, device=tensor.device)
        dim += 1
    return tensor, [by_tensor.get(at) for at in range(max(by_tensor, default=-1) + 1)]


def _recognise(
    recognise: Callable[..., Visibility], mask: Any, local_size: int | None, longest: int, _: str
) -> Visibility:
    """Look at a mask's values, which fake tensors have not: once a forward."""
    with unset_fake_temporarily():
        return recognise(mask, local_size, longest, "cpu")


class _Event:
    """A moment of a GPU that computes nothing: none takes any time."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing, "only times are asked of events here"

    def record(self) -> None:
        pass

    def elapsed_time(self, last: _Event) -> float:
        return 0.0


class FakeGpu:
    """A GPU at `GPU` while `on_fake_gpu` lasts.

    Attributes
    ----------
    kernel : FlashKernel
        What was asked of flash attention.
    """

    def __init__(self, mode: FakeTensorMode, kernel: FlashKernel) -> None:
        self._mode, self.kernel = mode, kernel

    def model(self, name: str, layers: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> LoadedModel:
        """Put a tiny model of so many layers on it, prepared for chains."""
        config = CONFIGS[name]()
        for key, value in ({"num_hidden_layers": layers} | settings).items():
            setattr(config, key, value)
        if getattr(config, "layer_types", None):
            config.layer_types = (config.layer_types * layers)[:layers]
        with unset_fake_temporarily():
            shape, model = probe_shape(config, dtype), meta_model(config, dtype)
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                held.update({key: self._put(each) for key, each in held.items() if each is not None})
        prepare_model(model, chain=True)
        return LoadedModel(model, None, shape, name, name, dtype, GPU)

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        with unset_fake_temporarily():
            fake = FakeTensor(self._mode, tensor.detach(), GPU)
        return torch.nn.Parameter(fake, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else fake

    def waits_per_layer(self, run: Callable[[Any], object], name: str, prepare: Callable[[LoadedModel], Any]) -> float:
        """How many more times the processor waits for the GPU in `run`, of what was prepared, with every layer more."""
        counts = []
        for layers in (few := 2, many := 4):
            prepared = prepare(self.model(name, layers))
            with Traffic() as traffic:
                run(prepared)
            counts.append(traffic.waits.total())
        return (counts[1] - counts[0]) / (many - few)


@contextmanager
def on_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Let tensors be fake ones, a Hopper GPU be there, and flash attention check what it is given."""
    attention._has_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    about = SimpleNamespace(shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(masks, "recognise", partial(_recognise, masks.recognise))
    monkeypatch.setattr(arena, "share_memory", torch.empty_like)  # there is no memory to be shared
    with FakeTensorMode() as mode, torch.inference_mode(), FlashKernel() as kernel, _Indexing():
        yield FakeGpu(mode, kernel)
    attention._has_flash.cache_clear()
