"""Division of a model over ranks: heads, the MLP and the vocabulary (Megatron-LM, Shoeybi et al. 2019, section 3).

transformers' own plan for the architecture (``base_model_tp_plan``) defines what is divided and where ranks sum. Models
with unknown or missing entries are refused, since errors would be silent: a norm over only some of its features, for
example.

Ranks of a tensor-parallel group load slices, so no rank holds a whole divided matrix. A rank's part is a model of the
same architecture with fewer heads, a narrower MLP and a smaller vocabulary. Ranks that share heads hold the whole model
and cut it (``fairkv.shared_heads``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import ConfigError, ModelError, choices
from kvr_mpi.model.tp_group import TensorParallelGroup
from kvr_mpi.model.weights import weight_files
from kvr_mpi.topology import KVHeads, even_share

if TYPE_CHECKING:
    import torch

ATTENTION = "layers.*.self_attn."
MLP = "layers.*.mlp."
QKV, GATE_UP = f"{ATTENTION}qkv_proj", f"{MLP}gate_up_proj"  # several matrices in one, one below the other
# Supported entries of transformers' plans: some rows, some columns whose products are summed, and whole norms of single
# heads. Of fused matrices, transformers gathers the products; here, ranks take their rows of each matrix.
KNOWN = {
    **{f"{ATTENTION}{name}_proj": ("colwise",) for name in "qkv"},
    QKV: ("colwise_gather_output",),
    f"{ATTENTION}o_proj": ("rowwise", "rowwise_split_input"),
    **{f"{ATTENTION}{name}_norm": ("replicated_with_grad_allreduce",) for name in "qk"},
    **{f"{MLP}{of}{name}_proj": ("colwise",) for of in ("", "shared_experts.") for name in ("gate", "up")},
    GATE_UP: ("colwise_gather_output",),
    f"{MLP}down_proj": ("rowwise", "rowwise_split_input"),
    f"{MLP}shared_experts.down_proj": ("rowwise",),
    f"{MLP}experts.gate_up_proj": ("packed_colwise",),
    f"{MLP}experts.down_proj": ("rowwise",),
    f"{MLP}experts": ("moe_tp_experts",),
}
# What ranks sum.
SUMMED = ("rowwise", "rowwise_split_input", "moe_tp_experts")
EXPERTS = f"{MLP}experts"
# Names of matrices in files, with the dimension that is divided.
DIVIDED_DIMS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("qkv_proj", "gate_up_proj"), 0),
    **dict.fromkeys(("o_proj", "down_proj", "w2"), 1),
}
_NUMBER = re.compile(r"\.\d+(?=\.)")

Reduce = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a model: some heads, and a share of the other weights.

    heads, kv_heads, head_dim : of the whole model.
    """

    rank: int
    size: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def own_heads(self) -> tuple[int, int]:
        """Range of query heads."""
        return even_share(self.heads, self.rank, self.size)

    @property
    def own_kv_heads(self) -> tuple[int, int]:
        """Range of the KV heads that the query heads use; with more ranks than KV heads, ranks share them."""
        first, last = self.own_heads
        each = self.heads // self.kv_heads
        return first // each, -(-last // each)

    @property
    def held(self) -> KVHeads:
        """KV heads whose keys and values this rank holds."""
        return KVHeads(*self.own_kv_heads, self.kv_heads)

    @property
    def stores(self) -> bool:
        """Whether this rank stores its KV heads: it does if it is the first rank that holds them."""
        return self.rank == 0 or replace(self, rank=self.rank - 1).own_kv_heads != self.own_kv_heads

    def ranges(self, name: str, length: int) -> list[tuple[int, int]]:
        """Ranges of rows or columns of a matrix, given its name within its layer: one, or one of each fused matrix."""
        queries, keys = self.own_heads, self.own_kv_heads
        heads: dict[str, list[tuple[int, int]]] = {
            **dict.fromkeys(("q_proj", "o_proj"), [queries]),
            **dict.fromkeys(("k_proj", "v_proj"), [keys]),
            "qkv_proj": [
                queries,
                *((at + keys[0], at + keys[1]) for at in (self.heads, self.heads + self.kv_heads)),
            ],
        }
        if name in heads:
            return [(first * self.head_dim, last * self.head_dim) for first, last in heads[name]]
        if name == "gate_up_proj":
            first, last = even_share(length // 2, self.rank, self.size)
            return [(first, last), (length // 2 + first, length // 2 + last)]
        return [even_share(length, self.rank, self.size)]


def why_no_plan(config: Any) -> str | None:
    """Return why transformers' tensor-parallel plan for a model cannot be used; None if it can."""
    text = config.get_text_config()
    if text is not config:
        return "it is not only a language model"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    plan = dict(getattr(text, "base_model_tp_plan", None) or {})
    if not plan:
        return "transformers has no plan for it"
    unknown = {name: way for name, way in plan.items() if way not in KNOWN.get(name, ())}
    if unknown:
        name, way = next(iter(unknown.items()))
        return f"transformers' plan has {name} {way}, which kvr-mpi does not support"
    needed = {f"{ATTENTION}o_proj", *([QKV] if QKV in plan else [f"{ATTENTION}{name}_proj" for name in "qkv"])}
    if missing := needed - plan.keys():
        return f"transformers' plan does not say how {min(missing)} is divided"
    return None


def why_not_by_plan(model: Any) -> str | None:
    """Return why a model is not divided by transformers' plan alone; None if it is.

    In attention and MLP, everything must be in a linear layer or in experts of the plan, or in a norm of single heads
    or a router, which ranks have whole. Anything else would be silently wrong.

    model : a whole model or a rank's part, for whose configuration `why_no_plan` is None; may be on ``meta``.
    """
    import torch

    if dict(getattr(model, "_tp_plan", None) or {}).get("lm_head") != "colwise_gather_output":
        return "transformers' plan does not divide its vocabulary"
    config, plan = model.config, model.config.base_model_tp_plan
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # The features of all query heads are the rows of one matrix and the columns of another.
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    by_heads = {
        f"{ATTENTION}q_proj.weight": (0, heads),
        f"{QKV}.weight": (0, heads + 2 * kv_heads),
        f"{ATTENTION}o_proj.weight": (1, heads),
    }
    for name, values in model.base_model.state_dict().items():
        path, module = in_plan(name), in_plan(name).rpartition(".")[0]
        if not module.startswith((ATTENTION, MLP)):
            is_known = module == "embed_tokens" or values.shape == (config.hidden_size,)
        elif plan.get(module) in ("colwise", "colwise_gather_output", *SUMMED[:2]):
            is_known = type(model.base_model.get_submodule(name.rpartition(".")[0])) is torch.nn.Linear
            if path in by_heads:
                dim, count = by_heads[path]
                is_known &= values.shape[dim] == count * head_dim
        elif module in (f"{ATTENTION}q_norm", f"{ATTENTION}k_norm"):
            is_known = values.shape == (head_dim,)
        else:
            is_known = path in plan or f"{module}.".startswith(f"{MLP}gate.")
        if not is_known and values.numel() > 1:  # one number is the same on all ranks
            return f"{name} of shape {tuple(values.shape)} is not divided as transformers' plan says"
    return None


def why_not_divided(heads: int, kv_heads: int, size: int) -> str | None:
    """Return why heads cannot be divided over so many ranks; None if they can, even if ranks share KV heads."""
    if heads % size or (kv_heads % size and size % kv_heads):
        fitting = [n for n in range(1, heads + 1) if not heads % n and not (kv_heads % n and n % kv_heads)]
        return f"{heads} query heads and {kv_heads} KV heads cannot be divided by it; set it to {choices(fitting)}"
    return None


def part_of(config: Any, rank: int, size: int) -> Part:
    """Return a rank's part of a model.

    Raises `ConfigError` if the heads cannot be divided over so many ranks, `ModelError` if the architecture cannot be.
    """
    name = type(config).__name__.removesuffix("Config")
    if why := why_no_plan(config):
        raise ModelError(
            f"{name}: {why}, so it cannot be divided among the ranks of a tensor-parallel group; use tensor_parallel "
            f"= 1"
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if why := why_not_divided(heads, kv_heads, size):
        raise ConfigError(f"parallel.tensor_parallel = {size}: {name}: {why}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Part(rank, size, heads, kv_heads, head_dim)


def part_config(config: Any, part: Part) -> Any:
    """Return the configuration of a rank's part of a model, without a padding token."""
    mine = copy.deepcopy(config)
    mine.head_dim = part.head_dim
    mine.num_key_value_heads = part.own_kv_heads[1] - part.own_kv_heads[0]
    mine.num_attention_heads = part.own_heads[1] - part.own_heads[0]
    for name in ("intermediate_size", "moe_intermediate_size"):
        if isinstance(width := getattr(config, name, None), int):
            first, last = even_share(width, part.rank, part.size)
            setattr(mine, name, last - first)
    first, last = even_share(config.vocab_size, part.rank, part.size)
    mine.vocab_size, mine.pad_token_id = last - first, None
    return mine


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A rank's slice of a tensor in a file, with the interface that transformers expects.

    tensor : safetensors slice, not read yet.
    dim, ranges : the rows to read, in a dimension; without ranges the whole tensor.
    is_zero : read zeros; for the bias of summed products, which only one rank adds.
    """

    tensor: Any
    dim: int = 0
    ranges: tuple[slice, ...] = ()
    is_zero: bool = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read the slice into newly allocated memory."""
        import torch

        before = (slice(None),) * self.dim
        parts = [self.tensor[(*before, rows)] for rows in self.ranges] or [self.tensor[...]]
        found: torch.Tensor = parts[0].clone() if len(parts) == 1 else torch.cat(parts, self.dim)
        return found.zero_() if self.is_zero else found

    def get_dtype(self) -> str:
        """Return the dtype as the file names it."""
        return str(self.tensor.get_dtype())

    def get_shape(self) -> list[int]:
        """Return the shape of the slice."""
        shape = list(self.tensor.get_shape())
        if self.ranges:
            shape[self.dim] = sum(len(range(*rows.indices(shape[self.dim]))) for rows in self.ranges)
        return shape


def sliced_weights(folder: Path, part: Part, opened: ExitStack) -> dict[str, WeightSlice]:
    """Open a model's files, and return this rank's slice of every tensor, unread."""
    from safetensors import safe_open

    found = {}
    for file in weight_files(folder):
        stream = opened.enter_context(safe_open(str(file), framework="pt"))
        for name in stream.keys():  # noqa: SIM118  (it is no mapping)
            found[name] = _slice_of(name, stream.get_slice(name), part)
    return found


def _slice_of(name: str, tensor: Any, part: Part) -> WeightSlice:
    """Return this rank's slice; transformers refuses wrong shapes."""
    leaf, shape = "".join(name.split(".")[-2:-1]), tensor.get_shape()
    if leaf not in DIVIDED_DIMS:
        return WeightSlice(tensor)
    dim = DIVIDED_DIMS[leaf]
    if dim >= len(shape):
        return WeightSlice(tensor, is_zero=part.rank > 0)
    return WeightSlice(tensor, dim, tuple(slice(*rows) for rows in part.ranges(leaf, shape[dim])))


def in_plan(name: str) -> str:
    """Convert a module name to the form of transformers' plans, with a star for the layer number."""
    return _NUMBER.sub(".*", f"{name}.")[:-1]


def sum_products(model: torch.nn.Module, plan: Mapping[str, str], reduce: Reduce) -> None:
    """Sum the outputs of modules that have only some of their inputs; `plan` uses the model's module names."""
    for name, module in model.named_modules():
        if plan.get(in_plan(name)) in SUMMED:
            module.register_forward_hook(lambda part, given, made: reduce(made))


def join_group(model: Any, config: Any, tp_group: TensorParallelGroup) -> None:
    """Connect a rank's part of a model, in place, with the other parts, so that it acts as the whole model.

    model : built from `part_config`.
    config : configuration of the whole model; the part gets its vocabulary size.
    """
    first, last = even_share(config.vocab_size, tp_group.rank, tp_group.size)

    def gather_logits(head: Any, given: Any, share: torch.Tensor) -> torch.Tensor:
        logits = share.new_zeros(*share.shape[:-1], config.vocab_size)
        logits[..., first:last] = share
        return tp_group.all_reduce(logits)

    sum_products(model.base_model, config.base_model_tp_plan, tp_group.all_reduce)
    modules = dict(model.base_model.named_modules())
    for name in modules:
        if config.base_model_tp_plan.get(in_plan(name)) == "moe_tp_experts":
            router = modules.get(f"{name.rpartition('.')[0]}.gate")
            if router is None:
                raise ModelError(f"{type(model).__name__}: the router of the experts {name} is unknown")
            # If rounding sent a token to different experts on two ranks, the sum would mix halves of both.
            router.register_forward_hook(lambda part, given, made: tuple(map(tp_group.agree_on, made)))
    model.set_input_embeddings(_shared_embedding(model.get_input_embeddings(), tp_group, first, last))
    model.get_output_embeddings().register_forward_hook(gather_logits)
    model.config.vocab_size, model.config.pad_token_id = config.vocab_size, config.pad_token_id
    for owner in (model, model.base_model):
        if hasattr(owner, "vocab_size"):
            owner.vocab_size = config.vocab_size


def _shared_embedding(embedding: Any, tp_group: TensorParallelGroup, first: int, last: int) -> torch.nn.Module:
    """Make an embedding that combines the embeddings of all ranks, each of which embeds some of the tokens.

    It is a module with the weights in it, so that a copy of the model embeds with the copied weights.
    """
    import torch

    class SharedEmbedding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = embedding

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            """Embed tokens (1, tokens) to (1, tokens, hidden_size)."""
            if tp_group.is_alone:  # a model with a smaller vocabulary
                rows: torch.Tensor = self.part(ids % (last - first))
                return rows
            is_own = (ids >= first) & (ids < last)
            rows = self.part((ids - first).masked_fill(~is_own, 0)).masked_fill(~is_own.unsqueeze(-1), 0)
            return tp_group.all_reduce(rows)

    return SharedEmbedding()
