"""The work of a model per prompt token: floating-point operations and bytes.

The cost model divides this work by a machine's rates. The work is counted from any transformers configuration, or
computed from the named shapes of a few models.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvr_mpi.errors import ConfigError
from kvr_mpi.model import ModelShape, meta_model, on_meta, shape_of
from kvr_mpi.model.tensor_parallel import why_not_divided

# Number of tokens used for counting: close to 64, the chunk size of recurrent layers, and a prime, so that no other
# dimension of a model has the same size.
COUNTED_TOKENS = 61
# Functions that multiply matrices, with the index of the left factor among their tensors.
MULTIPLICATIONS = {"linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "grouped_mm": 0, "addmm": 1, "baddbmm": 1}


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one model's prefill. A multiplication and an addition count as two operations.

    name : of the model or shape.
    layers : decoder layers.
    qkv_flop : of a token in a layer, before attention.
    rest_flop : of a token in a layer, after attention (output projection and MLP, or its active experts).
    pair_flop : of one query attending to one key in a layer, over all heads.
    heads : query heads.
    kv_bytes : keys and values of a token in a layer.
    head_flop : of the LM head for one token.
    weight_bytes : all weights.
    max_tokens : longest context; None: no limit.
    has_states : some layers are recurrent: a rank begins a layer only after the previous rank has ended it.
    hidden_size, kv_heads, dtype_bytes : sizes that determine the communication of a tensor-parallel group.
    """

    name: str
    layers: int
    qkv_flop: float
    rest_flop: float
    pair_flop: float
    heads: int
    kv_bytes: float
    head_flop: float
    weight_bytes: float
    max_tokens: int | None = None
    has_states: bool = False
    hidden_size: int = 0
    kv_heads: int = 1
    dtype_bytes: int = 2

    def of_group(self, ranks: int) -> Workload:
        """Return the work of one rank of a tensor-parallel group; with few KV heads, several ranks share one.

        Norms and expert routers, which every rank computes, are negligible.
        """
        if ranks == 1:
            return self
        kv_share = 1 / min(ranks, self.kv_heads)
        kv_flop = 2 * self.hidden_size * self.kv_bytes / self.dtype_bytes
        kv_weights = self.layers * kv_flop / 2 * self.dtype_bytes
        return replace(
            self,
            qkv_flop=(self.qkv_flop - kv_flop) / ranks + kv_flop * kv_share,
            rest_flop=self.rest_flop / ranks,
            pair_flop=self.pair_flop / ranks,
            heads=max(1, self.heads // ranks),
            kv_bytes=self.kv_bytes * kv_share,
            head_flop=self.head_flop / ranks,
            weight_bytes=(self.weight_bytes - kv_weights) / ranks + kv_weights * kv_share,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a dense decoder with 16-bit weights, keys and values."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    mlp_matrices: int = 3  # 3: gated
    max_tokens: int | None = None
    tied: bool = False  # the LM head is the embedding

    def workload(self, name: str) -> Workload:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        qkv = self.hidden * (queries + 2 * keys)
        rest = queries * self.hidden + self.mlp_matrices * self.hidden * self.mlp
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return Workload(
            name=name,
            layers=self.layers,
            qkv_flop=2 * qkv,
            rest_flop=2 * rest,
            pair_flop=4 * queries,
            heads=self.heads,
            kv_bytes=4 * keys,
            head_flop=2 * self.vocab * self.hidden,
            weight_bytes=2 * (self.layers * (qkv + rest) + embeddings),
            max_tokens=self.max_tokens,
            hidden_size=self.hidden,
            kv_heads=self.kv_heads,
        )


SHAPES = {
    "SmolLM2 135M": Shape(30, 576, 9, 3, 64, 1536, 49152, max_tokens=8192, tied=True),
    "Mistral 7B": Shape(32, 4096, 32, 8, 128, 14336, 32768, max_tokens=32768),
    "Llama 3.1 8B": Shape(32, 4096, 32, 8, 128, 14336, 128256, max_tokens=131072),
    "Llama 3.1 8B 1M": Shape(32, 4096, 32, 8, 128, 14336, 128256, max_tokens=1048576),
    "Llama 3.1 70B": Shape(80, 8192, 64, 8, 128, 28672, 128256, max_tokens=131072),
    "Llama 3.1 405B": Shape(126, 16384, 128, 8, 128, 53248, 128256, max_tokens=131072),
}


def check_heads(work: Workload, tensor_parallel: int) -> None:
    """Refuse group sizes that do not divide a model's heads, by a `ConfigError` that lists valid sizes."""
    if why := why_not_divided(work.heads, work.kv_heads, tensor_parallel):
        raise ConfigError(f"tensor_parallel = {tensor_parallel}: {work.name}: {why}")


def _words(name: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:\.\d+)?[bm]?|[a-z]+", name.lower()))


def named_workload(name: str) -> Workload:
    """Find a named shape; case, punctuation and word order do not matter; a `ConfigError` lists the names."""
    for known, shape in SHAPES.items():
        if _words(known) == _words(name):
            return shape.workload(known)
    raise ConfigError(f"model {name!r}: no shape of this name; valid names: {', '.join(SHAPES)}")


def workload_of(config: Any, dtype_bytes: int, name: str = "") -> Workload:
    """Count the work of any causal LM by running a few tokens on the ``meta`` device.

    Every multiplication is counted when it is called, so only the active experts of a mixture count. No weights are
    read or allocated. `dtype_bytes` is the size of weights, keys and values. Raises `ConfigError` if the model calls no
    known attention.
    """
    import torch

    model = meta_model(config, torch.bfloat16)
    shape = shape_of(model, torch.bfloat16)
    with on_meta():
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        qkv_flop, products_flop, attention_flop, heads = _count(model, shape)
    layers = len(shape.layers)
    if not heads and not shape.has_states:
        raise ConfigError(f"{shape.architecture}: its kind of attention is unknown, so its work cannot be counted")
    head_flop = 2.0 * model.get_output_embeddings().weight.numel()
    layer_flop = (products_flop - head_flop) / layers  # of the mean layer: some have experts, or no attention
    return Workload(
        name=name or shape.architecture,
        layers=layers,
        qkv_flop=min(qkv_flop, layer_flop),
        rest_flop=max(0.0, layer_flop - qkv_flop),
        pair_flop=attention_flop / layers,
        heads=max(heads, 1),
        kv_bytes=shape.kv_bytes_per_token / shape.dtype_bytes * dtype_bytes / layers,
        head_flop=head_flop,
        weight_bytes=float(sum(weight.numel() for weight in model.parameters()) * dtype_bytes),
        max_tokens=shape.max_tokens,
        has_states=shape.has_states,
        hidden_size=shape.hidden_size,
        kv_heads=max(1, *(layer.num_kv_heads for layer in shape.layers)),
        dtype_bytes=dtype_bytes,
    )


def _count(model: Any, shape: ModelShape) -> tuple[float, float, float, int]:
    """Count a token's operations in products before attention, in the first layer with attention, and in all products.

    The other two results are the operations of one query attending to one key, in all layers, and the query heads.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    from kvr_mpi.model.layer_chunks import decoder_layers

    before = products = attention = 0.0
    heads, attends, tokens = 0, True, min(COUNTED_TOKENS, shape.max_tokens or COUNTED_TOKENS)

    def begin(layer_idx: int) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            nonlocal before, attends
            attends = layer_idx >= len(shape.layers) or shape.layers[layer_idx].elements > 0
            before = before if heads else 0.0

        return hook

    class Counter(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal before, products, attention, heads
            result = func(*args, **(kwargs or {}))
            called = getattr(func, "__name__", "").strip("_")
            given = (*args, *(kwargs or {}).values())
            shapes = [value.shape for value in given if isinstance(value, torch.Tensor)]
            if called == "scaled_dot_product_attention" and shapes[1][-2] >= tokens:
                heads = shapes[0][1]
                attention += 2.0 * heads * (shapes[0][3] + shapes[2][3])
            elif called in MULTIPLICATIONS and len(shapes) > 1:
                left = shapes[MULTIPLICATIONS[called]]
                flop = 2.0 * result.numel() * left[-1] / tokens
                scores = next((one for one in (left, result.shape) if [*one].count(tokens) > 1), None)
                if attends and len(left) > 2 and scores is not None:  # queries by keys, or scores by values
                    heads, attention = scores.numel() // tokens**2, attention + flop / tokens
                else:
                    products, before = products + flop, before if heads else before + flop
            return result

    hooks = [layer.register_forward_pre_hook(begin(number)) for number, layer in enumerate(decoder_layers(model))]
    try:
        with Counter():
            model(torch.zeros(1, tokens, dtype=torch.long), use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    return before if heads else 0.0, products, attention, heads
