"""Gates and rotary embeddings in one fused kernel each, where models' own code uses several operations.

On GPUs, torch compiles the models' own functions when a job starts, for the tensors of a trial prompt, and their
results are compared. Nothing is compiled later, since loading a kernel could wait for a transfer whose peer waits for
this rank. Other shapes and dtypes use the models' own functions, and so do decode steps, whose few rows do not repay
the launch, unless they are recorded.

On CPUs, our functions (`row_functions`) replace those that give the same bits.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kvr_mpi.model.kernels import (
    PLAIN,
    ExactForward,
    always,
    forget_kernels,
    give_kernel,
    is_plain_linear,
    kernels_of,
    use_kernels,
    way_for,
)
from kvr_mpi.model.norms import fuse_norms
from kvr_mpi.model.row_functions import RowFunctions

TRIAL_TOKENS, TRIAL_ROWS, TRIAL_DIM = 512, 4, 32
# Tolerance in units of the dtype's precision, relative to a row's largest element: the models' code rounds in between.
ERROR = 2
# transformers' functions (q, k, cos, sin), which attention modules call by this name.
ROTARY = "apply_rotary_pos_emb"
ROTARIES, GATES = "rotary embeddings", "gates"
UNTRIED = "no layer calls it for many tokens"
MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")


class FusedFunction:
    """A function of tensors (..., tokens, features), compiled for any number of tokens.

    why_not : why not to use it; empty if its results agree.
    is_recorded : whether a graph records the calls, so that few tokens also repay the launch.
    """

    def __init__(self, name: str, own: Callable[..., Any], backend: Any) -> None:
        self.name, self.why_not, self.is_trial, self.is_recorded = name, UNTRIED, True, False
        self._own, self._compiled = own, torch.compile(own, fullgraph=True, backend=backend)
        self._run: Any = torch._dynamo.run(own)  # what is compiled, or else `own`

    def __call__(self, *tensors: torch.Tensor, **options: Any) -> Any:
        """Return the function's result."""
        is_short = way_for(FusedForward.ways, tensors[0].shape[-2]) == PLAIN
        if options or (is_short and not self.is_recorded):
            return self._own(*tensors, **options)
        tensors = tuple(map(_alone, tensors))
        return self._try(tensors) if self.is_trial else self._run(*tensors)

    def compile(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Compile for tensors of this kind, with any number of tokens, unless that is done; return the result."""
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, tensor.dim() - 2)
        return self._compiled(*tensors)

    def _try(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Compile, and compare with the model's own result."""
        truth = self._own(*tensors)
        if self.why_not in ("", UNTRIED):
            try:
                self.why_not = "" if _agree(self.compile(tensors), truth) else "its results differ"
            except Exception as error:  # whatever compilers raise
                self.why_not = f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
        return truth


class FusedForward(ExactForward):
    """A `Kernel` that runs a module's forward with a compiled function in it; results differ by rounding."""

    ways = (*always(PLAIN)[1:], "fused")

    def __init__(self, function: FusedFunction, forward: Callable[..., Any]) -> None:
        super().__init__(forward)
        self.function = function


@contextmanager
def fused_in_graph(model: torch.nn.Module) -> Iterator[None]:
    """Use a model's fused functions for any number of tokens in the block, which records a graph."""
    functions = [one.function for one in kernels_of(model).values() if isinstance(one, FusedForward)]
    for function in functions:
        function.is_recorded = True
    try:
        yield
    finally:
        for function in functions:
            function.is_recorded = False


@torch.inference_mode()
def fuse_functions(model: Any, ids: Sequence[int], backend: Any = "inductor") -> dict[torch.nn.Module, FusedForward]:
    """Compile the gates and rotary embeddings of a model without kernels while it runs a trial prompt.

    Returns the kernels of modules that call them, whether their results agree or not.
    """
    import torch._inductor.config as inductor

    functions: dict[Any, FusedFunction] = {}
    kernels: dict[torch.nn.Module, FusedForward] = {}
    for module, name, key, own in _calls(model):
        function = functions.setdefault(key, FusedFunction(name, own, backend))
        if (forward := _forward_with(module, function)) is not None:
            kernels[module] = FusedForward(function, forward)
    for module, kernel in kernels.items():
        give_kernel(module, kernel)
    use_kernels(model, True)
    try:
        with inductor.patch(compile_threads=1):  # no pool of processes beside each rank
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    except Exception as error:  # the self-check explains what is wrong with the model
        for function in functions.values():
            function.why_not = f"the model fails: {type(error).__name__}"
    forget_kernels(model)
    for function in functions.values():
        function.is_trial = False
    return kernels


@torch.inference_mode()
def fuse_rows(model: torch.nn.Module, functions: RowFunctions) -> dict[str, int]:
    """Register our functions for a model on a CPU, used from the next `use_kernels` on; return how many by name."""
    made: dict[Any, RowGate | RowRotary] = {}
    fused = {"norms": fuse_norms(model, functions), GATES: 0, ROTARIES: 0}
    dtype = next(model.parameters()).dtype
    for module, name, key, own in _calls(model):
        if key not in made:
            made[key] = RowGate(functions, own, module, dtype) if name == GATES else RowRotary(functions, own, dtype)
        if made[key].suits and (forward := _forward_with(module, made[key])) is not None:
            give_kernel(module, ExactForward(forward))
            fused[name] += 1
    return fused


class RowGate:
    """The function of a gated MLP in 16 bits, whose activations are looked up."""

    def __init__(self, functions: RowFunctions, own: Callable[..., Any], mlp: Any, dtype: torch.dtype) -> None:
        self._functions, self._own, self.suits = functions, own, False
        if dtype.itemsize == 2:
            numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
            with suppress(Exception):  # whatever a function of another kind raises
                self._results = mlp.act_fn(numbers)
                self.suits = self._results.shape == numbers.shape and functions.takes(self._results, numbers)

    def __call__(self, gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
        """Return the activations of gates (..., features), multiplied by `ups`."""
        if gates.shape == ups.shape and self._functions.takes(ups, gates, self._results):
            return self._functions.gate(self._results, gates, ups)
        return self._own(gates, ups)  # type: ignore[no-any-return]


class RowRotary:
    """A function that rotates queries and keys, or the first features of each head."""

    def __init__(self, functions: RowFunctions, own: Callable[..., Any], dtype: torch.dtype) -> None:
        self._functions, self._own = functions, own
        # Kinds of arguments with which its results are those of the model's function.
        self._kinds = {
            (dtype, of_angles, rotated < TRIAL_DIM)
            for of_angles in (dtype, torch.float32)
            for rotated in (TRIAL_DIM, TRIAL_DIM // 2)
            if self._is_right(dtype, of_angles, rotated)
        }
        self.suits = bool(self._kinds)

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Rotate queries and keys (1, heads, tokens, head_dim) by cosines and sines (1, tokens, rotated)."""
        if len(given) == 4 and not options and self._takes(*given):
            query, keys, cosines, sines = given
            if (query.dtype, cosines.dtype, cosines.shape[-1] < query.shape[-1]) in self._kinds:
                return tuple(self._functions.rotate(rows, cosines, sines) for rows in (query, keys))
        return self._own(*given, **options)

    def _takes(self, query: Any, keys: Any, cosines: Any, sines: Any) -> bool:
        takes, angles = self._functions.takes, (1, query.shape[-2], cosines.shape[-1])
        return (
            takes(query, keys)
            and takes(cosines, sines)
            and cosines.shape == sines.shape == angles
            and cosines.stride() == sines.stride()
            and angles[-1] % 2 == 0
            and all(each.dim() == 4 and len(each) == 1 and each.shape[2] == angles[1] for each in (query, keys))
            and angles[-1] <= query.shape[-1] == keys.shape[-1]
        )

    def _is_right(self, dtype: torch.dtype, of_angles: torch.dtype, rotated: int) -> bool:
        draw = torch.Generator().manual_seed(rotated)
        query, keys = (torch.randn(1, heads, 5, TRIAL_DIM, generator=draw).to(dtype) for heads in (3, 1))
        angles = [torch.randn(1, 5, rotated, generator=draw).to(of_angles) for _ in range(2)]
        found = [self._functions.rotate(rows, *angles) for rows in (query, keys)]
        with suppress(Exception):  # it has other arguments, or rotates all features
            pairs = zip(self._own(query, keys, *angles), found, strict=True)
            return all(one.dtype == dtype and torch.equal(one, other) for one, other in pairs)
        return False


def _calls(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, Any, Callable[..., Any]]]:
    """Find the modules that call a function that can be fused: what it is, a key of equal functions, the function."""
    for module in model.modules():
        own: Any = type(module).forward
        if ROTARY in getattr(getattr(own, "__code__", None), "co_names", ()):
            yield module, ROTARIES, own.__globals__[ROTARY], own.__globals__[ROTARY]
        elif all(hasattr(module, name) for name in MLP) and all(
            map(is_plain_linear, map(module.get_submodule, MLP[:3]))
        ):
            act: Any = module.act_fn
            yield module, GATES, type(act), gate_of(act)


def _forward_with(module: torch.nn.Module, function: Any) -> Callable[..., Any] | None:
    """Make a module's own forward with another function in it; None if that is not what the module computes."""
    if all(hasattr(module, name) for name in MLP):
        return _gating(module, function) if _is_plain(module, function) else None
    return _rotating(module, type(module).forward, function)


def _rotating(attention: torch.nn.Module, own: Any, rotate: Callable[..., Any]) -> Callable[..., Any]:
    """Make an attention module's own forward, in which `ROTARY` names another function."""
    names, module = own.__globals__ | {ROTARY: rotate}, weakref.ref(attention)
    forward: Any = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return lambda *args, **kwargs: forward(module(), *args, **kwargs)


def _gating(mlp: Any, gated: Callable[..., Any]) -> Callable[..., Any]:
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return lambda rows: down(gated(gate(rows), up(rows)))


def gate_of(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make the function of a gated MLP between its products."""
    return lambda gate, up: act(gate) * up


class _Known(torch.nn.Module):
    """Stands in for a layer of which one result is known."""

    def __init__(self, rows: torch.Tensor, result: torch.Tensor) -> None:
        super().__init__()
        self.rows, self.result = rows, result

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the result for these rows."""
        return self.result if torch.equal(rows, self.rows) else torch.full_like(self.result, float("nan"))


def _is_plain(mlp: Any, gated: Callable[..., Any]) -> bool:
    """Whether an MLP computes what `_gating` does, and nothing else; its products, which may be slow, are not run."""
    weight = mlp.gate_proj.weight
    with suppress(Exception):  # whatever a layer of another kind raises
        draw = torch.Generator(weight.device).manual_seed(0)
        gate, up, rows = (
            4 * torch.randn(1, TRIAL_ROWS, features, generator=draw, device=weight.device, dtype=weight.dtype)
            for features in (len(weight), len(weight), weight.shape[1])
        )
        known = {id(tensor): tensor for tensor in itertools.chain(mlp.parameters(), mlp.buffers())}
        layers = zip(MLP, (_Known(rows, gate), _Known(rows, up), torch.nn.Identity()), strict=False)
        alike = copy.deepcopy(mlp, known | {id(getattr(mlp, name)): layer for name, layer in layers})
        return torch.equal(alike(rows), gated(gate, up))
    return False


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Give a batch of one a stride that does not depend on what the tensor was cut from."""
    return tensor[0][None] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor


def _agree(found: Any, truth: Any) -> bool:
    """Compare tensors (..., features) within the rounding of their dtype."""
    allowed = [ERROR * torch.finfo(one.dtype).eps * one.abs().amax(-1, True) for one in tree_leaves(truth)]
    pairs = zip(tree_leaves(found), tree_leaves(truth), allowed, strict=True)
    return all(bool(((one - other).abs() <= most).all()) for one, other, most in pairs)
