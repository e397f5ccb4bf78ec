"""A layer's code in two pieces of one fixed size, up to its attention and from there on, that can be compiled.

Attention waits for other ranks' keys and values, and stays outside, as between the compiled pieces of serving engines
(vLLM's piecewise graphs). Before it are a norm, the products that make queries, keys and values, and their rotary
embedding; after it the output's product, a norm, the MLP and the sums. A piece ends with its layer, since all chunks go
through a layer before the next one begins (`layer_chunks`).

No model is known here: a piece is the layer's own code, followed until it asks for attention, or with attention's
result given to it; what nobody reads of it a compiler leaves out. Weights are among what a piece is given, so that one
compiled code serves all layers that are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from kvr_mpi.errors import ModelError
from kvr_mpi.model.masks import MaskRequest, check_mask

# Contiguous tensors to tensors; neither their shapes nor their types are looked at.
Compute = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
# What a compiled piece is made for depends on these by value; other arguments of a layer are known by their kind.
CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a model gives one of its layers.

    hidden : hidden states (1, tokens, hidden).
    leaves, spec : all other arguments, flat, and how they go together.
    cache : which of them is the cache.
    kernel : what attention is computed with, which no piece is; not among them.
    """

    hidden: torch.Tensor
    leaves: tuple[Any, ...]
    spec: TreeSpec
    cache: Any
    kernel: Any = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those among the other arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def mask(self) -> Any:
        """What stands in the place of a mask; None if there is none of transformers'."""
        return next((leaf for leaf in self.leaves if isinstance(leaf, MaskRequest)), None)

    @property
    def signature(self) -> list[str]:
        """What a piece is made for: types and shapes of tensors, values of constants, kinds of all else."""
        return [_kind(leaf) for leaf in (self.hidden, *self.leaves)]

    def calling(self, cache: Any, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put the arguments together again, with another cache and other tensors."""
        rest = iter(tensors)
        leaves = [
            next(rest) if isinstance(leaf, torch.Tensor) else cache if leaf is self.cache else leaf
            for leaf in self.leaves
        ]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


def inputs_of(hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerInputs:
    """Take down what a layer is called with.

    Raises
    ------
    ModelError
        If the cache is not among it.
    """
    if kwargs.get("kv_chain") is None:
        raise ModelError("its layers are not given what its attention is told")
    rest = {name: value for name, value in kwargs.items() if name != "kv_kernel"}
    leaves, spec = tree_flatten((args, rest))
    return LayerInputs(hidden, tuple(leaves), spec, kwargs["kv_chain"], kwargs.get("kv_kernel"))


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, CONSTANTS) else type(leaf).__name__


class _AtAttentionError(Exception):
    """Raised out of a layer that is followed up to its attention."""


class _Followed:
    """Stands for a cache and its layer while a layer's code is followed.

    Parameters
    ----------
    attended : Tensor or None
        What attention gives (1, tokens, heads, value_dim); None: the layer is left there.
    """

    prefilling = False  # masks are looked at when the pieces run

    def __init__(self, attended: torch.Tensor | None) -> None:
        self._attended = attended
        self.layer_idx = -1
        self.made: tuple[torch.Tensor, ...] = ()  # queries, keys and values
        self.params: Any = None  # `attention_hook.AttentionParams`

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self.made:
            raise ModelError("a layer keeps keys and values twice")
        self.made, self.layer_idx = (keys, values), layer_idx
        return keys, values

    @property
    def attending(self) -> _Followed:
        return self

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: Any) -> torch.Tensor:
        if len(self.made) != 2 or keys is not self.made[0] or values is not self.made[1]:
            raise ModelError("a layer attends to something else than it keeps")
        self.made, self.params = (query, keys, values), params
        if self._attended is None:
            raise _AtAttentionError
        return self._attended.transpose(1, 2)

    def after_attention(self, layer: Any) -> None:
        """Nothing is cut."""


def weights_of(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors that a layer holds, by name."""
    return dict(chain(layer.named_parameters(), layer.named_buffers()))


def _follow(
    layer: torch.nn.Module,
    inputs: LayerInputs,
    tensors: Sequence[torch.Tensor],
    attended: torch.Tensor | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> tuple[_Followed, Any]:
    """Run a layer's code over hidden states and the other tensors it is given; up to its attention, or all of it."""
    followed = _Followed(attended)
    args, kwargs = inputs.calling(followed, tensors[1:])
    out = None
    try:
        out = functional_call(layer, dict(weights or {}), (tensors[0], *args), kwargs)
    except _AtAttentionError:
        pass
    if followed.params is None:
        raise ModelError("a layer does not come to its attention")
    return followed, out


class Piece(torch.nn.Module):
    """One piece of a layer, as what torch exports: a function of its weights, hidden states and what else it is given.

    Parameters
    ----------
    layer : Module
        Whose code is followed; its weights are not read.
    inputs : LayerInputs
        What it is given; of tensors only how many there are counts.
    is_after : bool
        The piece after attention, whose result (1, tokens, heads, value_dim) then comes after the hidden states.
    """

    def __init__(self, layer: torch.nn.Module, inputs: LayerInputs, *, is_after: bool) -> None:
        super().__init__()
        self._layer = (layer,)  # no module of this one: its weights are given
        self._inputs, self._is_after, self._names = inputs, is_after, list(weights_of(layer))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute queries, keys and values, each (1, heads, tokens, dim); or hidden states (1, tokens, hidden)."""
        count = len(self._names)
        weights, rest = dict(zip(self._names, tensors, strict=False)), list(tensors[count:])
        attended = rest.pop(1) if self._is_after else None
        followed, out = _follow(self._layer[0], self._inputs, rest, attended, weights)
        if not self._is_after:
            return followed.made
        if not isinstance(out, torch.Tensor):
            raise ModelError("a layer gives more than hidden states")
        return (out,)


class LayerPieces:
    """A layer's compiled pieces, with the layer's own attention between them.

    Parameters
    ----------
    layer : Module
    small, full : LayerInputs
        What its model gives it for a few tokens, and for as many as the pieces are made for.
    before, after : callable
        The pieces, as `Piece` computes them.

    Raises
    ------
    ModelError
        If the layer's code cannot be cut at its attention.
    """

    def __init__(
        self, layer: torch.nn.Module, small: LayerInputs, full: LayerInputs, before: Compute, after: Compute
    ) -> None:
        followed, _ = _follow(layer, small, (small.hidden, *small.tensors))
        if any(not weight.is_contiguous() for weight in weights_of(layer).values()):
            raise ModelError("a layer's weights do not lie together")
        self._params, self._layer_idx = followed.params, followed.layer_idx
        self._signature, self._spec, self.tokens = full.signature, full.spec, full.hidden.shape[1]
        self._before, self._after = before, after
        self.runs = 0

    def run(
        self, layer: torch.nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Run a chunk (1, tokens, hidden) through the layer; None if it is not what the pieces are made for.

        Raises
        ------
        ModelError
            If the layer's mask lets it see something else than was found before.
        """
        if hidden.shape[1] != self.tokens:
            return None
        inputs = inputs_of(hidden, args, kwargs)
        if inputs.signature != self._signature or inputs.spec != self._spec:
            return None
        weights, given = list(weights_of(layer).values()), [each.contiguous() for each in inputs.tensors]
        hidden, cache = hidden.contiguous(), inputs.cache
        query, keys, values = self._before([*weights, hidden, *given])
        cache.update(keys, values, self._layer_idx)
        attending = cache.attending
        check_mask(inputs.mask, attending.shape.visibility)
        attended = attending.attend(query, keys, values, replace(self._params, kernel=inputs.kernel))
        cache.after_attention(attending)
        self.runs += 1
        return self._after([*weights, hidden, attended.transpose(1, 2).contiguous(), *given])[0]


# Beside the layers, as kernels are: a copy of a model has none.
_PIECES: WeakKeyDictionary[torch.nn.Module, LayerPieces] = WeakKeyDictionary()


def give_pieces(layer: torch.nn.Module, pieces: LayerPieces) -> None:
    """Have a layer's chunks of the pieces' size run by them."""
    _PIECES[layer] = pieces


def pieces_of(layer: torch.nn.Module) -> LayerPieces | None:
    """Return a layer's compiled pieces, if it has any."""
    return _PIECES.get(layer)


def forget_pieces(model: torch.nn.Module) -> None:
    """Go on without pieces, for good."""
    for module in model.modules():
        _PIECES.pop(module, None)


@contextmanager
def without_pieces(model: torch.nn.Module) -> Iterator[None]:
    """Run a model's own code, and its pieces again afterwards."""
    held = {module: _PIECES[module] for module in model.modules() if module in _PIECES}
    forget_pieces(model)
    try:
        yield
    finally:
        _PIECES.update(held)
