"""A rank's part of a model that every rank holds completely: some heads, and a share of the MLP and the vocabulary.

The part has its own modules, whose linear layers are cut as in `tensor_parallel`. But a rank can have any heads,
and they can change between documents. Slices of adjacent weights are views of the model's weights.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvr_mpi.model.cpu_attention import CpuAttention
from kvr_mpi.model.kernels import give_kernel, kernel_bytes, kernels_of, use_kernels, without_kernels
from kvr_mpi.model.load import LoadedModel
from kvr_mpi.model.products import Product
from kvr_mpi.model.shape import ModelShape
from kvr_mpi.model.tensor_parallel import (
    DIVIDED_DIMS,
    EXPERTS,
    GATE_UP,
    MLP,
    QKV,
    plan_of,
    sum_products,
    why_no_plan,
    why_not_by_plan,
)
from kvr_mpi.topology import even_share


def why_not_shared(loaded: LoadedModel) -> str | None:
    """Return why a model's heads cannot be distributed over ranks; None if they can."""
    model, shape = loaded.model, loaded.shape
    if why := why_not_by_config(model.config, shape):
        return why
    if not loaded.attends_in_parts or not model._supports_attention_backend:
        return "its attention cannot be replaced"
    return why_not_by_plan(model)


def why_not_by_config(config: Any, shape: ModelShape) -> str | None:
    """Return why a model's heads cannot be distributed, as far as the configuration shows; else None."""
    if why := why_no_plan(config):
        return why
    plan = plan_of(config)
    if EXPERTS in plan or f"{MLP}down_proj" not in plan:
        return "its MLP has experts"
    if {QKV, GATE_UP} & plan.keys():
        return "its matrices are fused"
    seen = {str(layer.visibility) for layer in shape.layers if layer.visibility.size is not None}
    if shape.has_latents:
        return "its heads share the latents that it caches"
    if seen or shape.has_states or not all(layer.elements for layer in shape.layers):
        return f"not all its layers see all tokens ({', '.join(sorted(seen)) or 'some keep no keys and values'})"
    return None


class SharedHeads:
    """One of `size` parts of a model, with a fixed share of MLP and vocabulary, and heads that can be chosen.

    loaded : a model for which `why_not_shared` is None.
    reduce : sums a contiguous tensor over all ranks, in place.
    """

    def __init__(self, loaded: LoadedModel, rank: int, size: int, reduce: Callable[[torch.Tensor], None]) -> None:
        self._whole, self._rank, self._size, self._first_input = loaded.model, rank, size, 0
        self._kernels = kernels_of(self._whole)
        self._kv_heads = self._whole.config.num_key_value_heads
        self._heads: dict[int, list[int] | None] = {}  # by layer

        def total(tensor: torch.Tensor) -> torch.Tensor:
            found = tensor.contiguous()
            reduce(found)
            return found

        tensors = itertools.chain(self._whole.parameters(), self._whole.buffers())
        with without_kernels(self._whole), torch.inference_mode():
            self._part: Any = copy.deepcopy(self._whole, {id(tensor): tensor for tensor in tensors})
        sum_products(self._part.model, plan_of(self._part.config), total)
        for idx, layer in enumerate(self._part.model.layers):
            layer.self_attn.o_proj.register_forward_pre_hook(self._own_inputs)
            for name in DIVIDED_DIMS.keys() & dict(layer.mlp.named_children()).keys():
                self._cut(f"model.layers.{idx}.mlp.{name}")
        self._cut("lm_head")
        for name, kernel in self._kernels.items():
            if isinstance(kernel, CpuAttention):
                give_kernel(self._part.get_submodule(name), kernel)
        use_kernels(self._part, True)

    def choose(self, heads: Sequence[Sequence[int]] | None) -> torch.nn.Module:
        """Select the heads that this rank computes from now on; return its part of the model, always the same object.

        `heads` has, for each layer, the KV heads of this rank, ascending and at least one; None: all heads, but only a
        share of the output projection. Logits are for this rank's share of the vocabulary; shares are in rank order.
        """
        features = self._whole.model.layers[0].self_attn.o_proj.in_features
        self._first_input = 0 if heads is not None else even_share(features, self._rank, self._size)[0]
        for idx in range(len(self._part.model.layers)):
            mine = None if heads is None else list(heads[idx])
            if idx in self._heads and self._heads[idx] == mine:
                continue
            self._heads[idx] = mine
            for name in "qkvo":
                self._cut(f"model.layers.{idx}.self_attn.{name}_proj", mine)
        part: torch.nn.Module = self._part
        return part

    def _own_inputs(self, module: Any, given: tuple[torch.Tensor]) -> torch.Tensor:
        """Select the features (..., features) that this rank's part of the output projection needs."""
        return given[0].narrow(-1, self._first_input, module.in_features)

    @torch.inference_mode()
    def _cut(self, name: str, heads: Sequence[int] | None = None) -> None:
        """Set the weights of a linear layer of the part, and its kernel if the whole layer has one.

        heads : KV heads to keep; None: all for queries, keys and values, this rank's share for other layers.
        """
        whole, part, leaf = self._whole.get_submodule(name), self._part.get_submodule(name), name.rpartition(".")[2]
        dim = DIVIDED_DIMS[leaf]
        length = whole.weight.shape[dim]
        some: Sequence[int] = range(*even_share(length, self._rank, self._size))
        if heads is not None:
            each = length // self._kv_heads
            some = [feature for head in heads for feature in range(head * each, (head + 1) * each)]
        elif leaf in ("q_proj", "k_proj", "v_proj"):
            some = range(length)
        part.weight = torch.nn.Parameter(_pick(whole.weight, dim, some), requires_grad=False)
        part.out_features, part.in_features = part.weight.shape
        if whole.bias is not None and dim == 0:
            part.bias = torch.nn.Parameter(_pick(whole.bias, 0, some), requires_grad=False)
        elif self._rank:  # only rank 0 adds the bias of summed products
            part.bias = None
        kernel = self._kernels.get(name)
        if isinstance(kernel, Product):
            is_whole = len(some) == length and (dim == 0 or part.bias is whole.bias)
            give_kernel(part, kernel if is_whole else Product(part, kernel.ways, kernel.library))
            use_kernels(part, True)


def _pick(tensor: torch.Tensor, dim: int, some: Sequence[int]) -> torch.Tensor:
    """Select ascending indices along a dimension; a view if they are adjacent."""
    if some[-1] - some[0] == len(some) - 1:
        return tensor.narrow(dim, some[0], len(some))
    return tensor.index_select(dim, torch.tensor(some, device=tensor.device))


def shared_bytes(loaded: LoadedModel) -> int:
    """Maximum bytes of a rank's part in addition to the model: copies of weights that are not adjacent or are packed.

    Two ranks need the most; more ranks need less. A rank may compute all heads of attention.
    """
    layers = loaded.model.model.layers
    attention = sum(_bytes_of(layer.self_attn) for layer in layers)
    if not kernel_bytes(loaded.model):
        return attention
    return attention + (sum(_bytes_of(layer.mlp) for layer in layers) + _bytes_of(loaded.model.lm_head)) // 2


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())
