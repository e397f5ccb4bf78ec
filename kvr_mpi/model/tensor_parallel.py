"""A model of which one rank computes some heads, a share of the MLP and a share of the vocabulary.

Made from outside: a twin with modules of its own and the same weights, of whose linear layers some are replaced by
views of a part (Megatron-LM, Shoeybi et al. 2019, section 3; but a rank's heads may be any, and as many as it likes).
Which layers these are is read from transformers' own plan for the architecture (``base_model_tp_plan``). What has
another plan, or anything else in its attention, is refused: a norm over features of which a rank has only some would be
wrong without a word.
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

PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
HEAD_PLAN = {"lm_head": "colwise_gather_output"}
# Norms of each head by itself, of which every rank has the whole.
NORMS = ("q_norm", "k_norm")

Reduce = Callable[[torch.Tensor], None]


def why_not_shared(loaded: LoadedModel) -> str | None:
    """Say why a model's heads cannot be shared out over ranks; None if they can."""
    model, shape = loaded.model, loaded.shape
    if why := why_not_by_config(model.config, shape):
        return why
    if dict(getattr(model, "_tp_plan", None) or {}).get("lm_head") != HEAD_PLAN["lm_head"]:
        return "its vocabulary cannot be divided as Llama's"
    if not loaded.attends_in_parts or not model._supports_attention_backend:
        return "its attention cannot be taken over"
    text, layers = model.config.get_text_config(), getattr(getattr(model, "model", None), "layers", None)
    if layers is None:  # of a model for more than text
        return "its layers are not found where Llama has them"
    for idx, layer in enumerate(layers):
        if why := _why_not_layer(layer, text):
            return f"layer {idx}: {why}"
    return None


def why_not_by_config(config: Any, shape: ModelShape) -> str | None:
    """Say so as far as it shows without weights."""
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    more = {name.rpartition(".")[2] for name in plan.keys() - PLAN.keys()}
    if any(plan.get(name) != way for name, way in PLAN.items()) or not more <= set(NORMS):
        return f"transformers' plan for {shape.architecture} is not that of Llama and its kin"
    seen = {str(layer.visibility) for layer in shape.layers if layer.visibility.size is not None}
    if seen or shape.has_states or not all(layer.elements for layer in shape.layers):
        return f"not all its layers see all tokens ({', '.join(sorted(seen)) or 'some keep no keys and values'})"
    return None


def _why_not_layer(layer: Any, text: Any) -> str | None:
    """Look for what the plan does not say: other parameters, other kinds of linear layers."""
    for part, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
        linear = {f"{name}_proj" for name in names}
        for name, parameter in part.named_parameters():
            owner = name.partition(".")[0]
            if owner not in linear and not (owner in NORMS and parameter.shape == (part.head_dim,)):
                return f"{name} of shape {tuple(parameter.shape)} is not known here"
        for name in linear:
            if type(getattr(part, name, None)) is not torch.nn.Linear:
                return f"{name} is no plain linear layer"
    heads, width = text.num_attention_heads, layer.self_attn.q_proj.out_features
    if width != heads * layer.self_attn.head_dim or heads % text.num_key_value_heads:
        return f"{heads} query heads do not make up {width} features"
    return None


class _Summed(torch.nn.Module):
    """A linear layer of which each rank has some inputs: the products are summed over all ranks.

    Parameters
    ----------
    first : int
        Of the inputs it is given, the first that is its own.
    """

    def __init__(self, part: torch.nn.Linear, bias: torch.Tensor | None, reduce: Reduce, first: int = 0) -> None:
        super().__init__()
        self.part, self._bias, self._reduce, self._first = part, bias, reduce, first

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply the own features of (..., in_features) to (..., out_features)."""
        product: torch.Tensor = self.part(rows.narrow(-1, self._first, self.part.in_features)).contiguous()
        self._reduce(product)
        return product if self._bias is None else product + self._bias


def share_model(
    loaded: LoadedModel, heads: Sequence[Sequence[int]] | None, rank: int, size: int, reduce: Reduce
) -> torch.nn.Module:
    """Make a rank's twin of a model, whose weights are views of the model's own wherever they lie together.

    Parameters
    ----------
    heads : sequence of sequence of int or None
        Of each layer the KV heads, ascending and at least one, that this rank computes queries, keys and values of;
        None: all of every layer, and a share of the output projection.
    rank, size : int
        Which share of the MLP and the vocabulary.
    reduce : callable
        Sums a tensor over all ranks, in place.

    Returns
    -------
    Module
        Its logits are those of this rank's share of the vocabulary, the shares in rank order.
    """
    model = loaded.model
    tensors = itertools.chain(model.parameters(), model.buffers())
    with without_kernels(model), torch.inference_mode():
        twin: Any = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        for idx, layer in enumerate(twin.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            if heads is None:
                share, first = _share_of_inputs(attention.o_proj, rank, size)
                attention.o_proj = _Summed(share, attention.o_proj.bias, reduce, first)
            else:
                _keep_heads(attention, heads[idx], reduce)
            for name in ("gate_proj", "up_proj"):
                setattr(mlp, name, _share_of_outputs(getattr(mlp, name), rank, size))
            share, _ = _share_of_inputs(mlp.down_proj, rank, size)
            mlp.down_proj = _Summed(share, mlp.down_proj.bias, reduce)
        twin.lm_head = _share_of_outputs(twin.lm_head, rank, size)
        _compute_like(twin, model)
    return twin  # type: ignore[no-any-return]


def twin_bytes(loaded: LoadedModel) -> int:
    """Memory that a rank's twin takes at most beside the model: weights that do not lie together, or are packed anew.

    A twin of two ranks; more ranks take less. Of attention a rank may compute all heads.
    """
    layers = loaded.model.model.layers
    attention = sum(_bytes_of(layer.self_attn) for layer in layers)
    if not kernel_bytes(loaded.model):
        return attention
    return attention + (sum(_bytes_of(layer.mlp) for layer in layers) + _bytes_of(loaded.model.lm_head)) // 2


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def _keep_heads(attention: Any, heads: Sequence[int], reduce: Reduce) -> None:
    """Let a layer's attention compute some of its KV heads."""
    kv_heads = attention.k_proj.out_features // attention.head_dim
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, _some_outputs(getattr(attention, name), kv_heads, heads))
    attention.o_proj = _Summed(_some_inputs(attention.o_proj, kv_heads, heads), attention.o_proj.bias, reduce)


def _compute_like(twin: Any, model: Any) -> None:
    """Lay the twin's weights out where the model's own are, and attend as it does."""
    parts = {name.removesuffix(".part"): module for name, module in twin.named_modules()}
    for name, kernel in kernels_of(model).items():
        if isinstance(kernel, Product) and type(parts[name]) is torch.nn.Linear:
            give_kernel(parts[name], Product(parts[name], kernel.ways, kernel.library))
        elif isinstance(kernel, CpuAttention):
            give_kernel(twin, kernel)
    use_kernels(twin, True)


def _some_outputs(linear: torch.nn.Linear, groups: int, some: Sequence[int]) -> torch.nn.Linear:
    """Keep some of the equal groups of a layer's outputs."""
    weight = _pick(linear.weight.view(groups, -1, linear.in_features), 0, some).flatten(0, 1)
    bias = None if linear.bias is None else _pick(linear.bias.view(groups, -1), 0, some).flatten()
    return _linear(weight, bias)


def _some_inputs(linear: torch.nn.Linear, groups: int, some: Sequence[int]) -> torch.nn.Linear:
    """Keep some of the equal groups of a layer's inputs, without the bias."""
    return _linear(_pick(linear.weight.view(linear.out_features, groups, -1), 1, some).flatten(1, 2), None)


def _share_of_outputs(linear: torch.nn.Linear, rank: int, size: int) -> torch.nn.Linear:
    """Keep one of `size` even shares of a layer's outputs."""
    bias = None if linear.bias is None else linear.bias.tensor_split(size)[rank]
    return _linear(linear.weight.tensor_split(size)[rank], bias)


def _share_of_inputs(linear: torch.nn.Linear, rank: int, size: int) -> tuple[torch.nn.Linear, int]:
    """Keep one of `size` even shares of a layer's inputs, without the bias; and tell which is the first of them."""
    shares = linear.weight.tensor_split(size, dim=1)
    return _linear(shares[rank], None), sum(share.shape[1] for share in shares[:rank])


def _pick(tensor: torch.Tensor, dim: int, some: Sequence[int]) -> torch.Tensor:
    """Take some indices of a dimension: a view if they are next to each other."""
    if list(some) == list(range(some[0], some[0] + len(some))):
        return tensor.narrow(dim, some[0], len(some))
    return tensor.index_select(dim, torch.tensor(some, device=tensor.device))


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear
