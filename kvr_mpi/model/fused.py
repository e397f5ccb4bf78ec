"""Gates and rotary embeddings in fused kernels on GPUs, where models' own code uses several.

torch compiles the models' own functions when a job starts, for the tensors of a trial prompt, and their results are
compared. Nothing is compiled later, since loading a kernel could wait for a transfer whose peer waits for this rank.
Other shapes and dtypes, and the few rows of decode steps, use the models' own functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kvr_mpi.model.kernels import (
    FORWARD_SLOT,
    PLAIN,
    always,
    forget_kernels,
    give_kernel,
    is_plain_linear,
    use_kernels,
    way_for,
)

TRIAL_TOKENS = 512
# Tolerance in units of the dtype's precision, relative to a row's largest element: the models' code rounds in between.
ERROR = 2
# transformers' functions (q, k, cos, sin), which attention modules call by this name.
ROTARY = "apply_rotary_pos_emb"
UNTRIED = "no layer calls it for many tokens"
MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")


class FusedFunction:
    """A function of tensors (..., tokens, features), compiled for any number of tokens.

    why_not : why not to use it; empty if its results agree.
    """

    def __init__(self, name: str, own: Callable[..., Any], backend: Any) -> None:
        self.name, self.why_not, self.is_trial = name, UNTRIED, True
        self._own, self._compiled = own, torch.compile(own, fullgraph=True, backend=backend)
        self._run: Any = torch._dynamo.run(own)  # what is compiled, or else `own`

    def __call__(self, *tensors: torch.Tensor, **options: Any) -> Any:
        """Return the function's result."""
        if options or way_for(FusedForward.ways, tensors[0].shape[-2]) == PLAIN:
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


class FusedForward:
    """A `Kernel` that runs a module's forward with a fused function in it."""

    slot, nbytes, ways = FORWARD_SLOT, 0, (*always(PLAIN)[1:], "fused")

    def __init__(self, function: FusedFunction, forward: Callable[..., Any]) -> None:
        self.function, self._forward = function, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self._forward(*args, **kwargs)


@torch.inference_mode()
def fuse_functions(model: Any, ids: Sequence[int], backend: Any = "inductor") -> dict[torch.nn.Module, FusedForward]:
    """Compile the gates and rotary embeddings of a model without kernels while it runs a trial prompt.

    Returns the kernels of modules that call them, whether their results agree or not.
    """
    import torch._inductor.config as inductor

    functions: dict[Any, FusedFunction] = {}
    kernels: dict[torch.nn.Module, FusedForward] = {}
    for module in model.modules():
        own: Any = type(module).forward
        if ROTARY in getattr(getattr(own, "__code__", None), "co_names", ()):
            rotate = own.__globals__[ROTARY]
            function = functions.setdefault(rotate, FusedFunction("rotary embeddings", rotate, backend))
            kernels[module] = FusedForward(function, _rotating(module, own, function))
        elif all(hasattr(module, name) for name in MLP) and all(
            map(is_plain_linear, map(module.get_submodule, MLP[:3]))
        ):
            act = module.act_fn
            function = functions.setdefault(type(act), FusedFunction("gates", gate_of(act), backend))
            if _is_plain(module, kernel := FusedForward(function, _gating(module, function))):
                kernels[module] = kernel
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


def _rotating(attention: torch.nn.Module, own: Any, rotate: FusedFunction) -> Callable[..., Any]:
    """Make an attention module's own forward, in which `ROTARY` names another function."""
    names, module = own.__globals__ | {ROTARY: rotate}, weakref.ref(attention)
    forward: Any = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return lambda *args, **kwargs: forward(module(), *args, **kwargs)


def _gating(mlp: Any, gated: FusedFunction) -> Callable[..., Any]:
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return lambda rows: down(gated(gate(rows), up(rows)))


def gate_of(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make the function of a gated MLP between its products."""
    return lambda gate, up: act(gate) * up


def _is_plain(mlp: Any, kernel: FusedForward) -> bool:
    """Whether an MLP computes what `_gating` does, and nothing else."""
    weight = mlp.gate_proj.weight
    rows = torch.linspace(-1, 1, 16 * weight.shape[1], device=weight.device, dtype=weight.dtype).view(1, 16, -1)
    return torch.equal(mlp(rows), kernel(rows))


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Give a batch of one a stride that does not depend on what the tensor was cut from."""
    return tensor[0][None] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor


def _agree(found: Any, truth: Any) -> bool:
    """Compare tensors (..., features) within the rounding of their dtype."""
    allowed = [ERROR * torch.finfo(one.dtype).eps * one.abs().amax(-1, True) for one in tree_leaves(truth)]
    pairs = zip(tree_leaves(found), tree_leaves(truth), allowed, strict=True)
    return all(bool(((one - other).abs() <= most).all()) for one, other, most in pairs)
