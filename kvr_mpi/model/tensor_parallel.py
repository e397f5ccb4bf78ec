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
EXPERTS = f"{MLP}experts"
QKV, GATE_UP = f"{ATTENTION}qkv_proj", f"{MLP}gate_up_proj"  # several matrices in one, one below the other
# Additions to the plans of models with experts, and of models whose heads share latents, of which ranks hold all.
WHOLE = "whole"
SHARED_EXPERTS = {
    **{f"{MLP}shared_{of}.{name}_proj": "colwise" for of in ("expert", "experts") for name in ("gate", "up")},
    **{f"{MLP}shared_{of}.down_proj": "rowwise" for of in ("expert", "experts")},
    f"{MLP}shared_expert_gate": WHOLE,
}
LATENTS = {
    **{f"{ATTENTION}{name}": WHOLE for name in ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")},
    **{f"{ATTENTION}{name}_proj": "colwise" for name in ("q", "q_b", "kv_b")},
    f"{ATTENTION}o_proj": "rowwise",
}
# Plans for architectures for which transformers has none, by their type.
OWN_PLANS = {
    "gpt_oss": {
        **{f"{ATTENTION}{name}_proj": "colwise" for name in "qkv"},
        f"{ATTENTION}o_proj": "rowwise",
        f"{ATTENTION}sinks": "colwise",
        **{f"{EXPERTS}.gate_up_proj{of}": "packed_colwise" for of in ("", "_bias")},
        **{f"{EXPERTS}.down_proj{of}": "rowwise" for of in ("", "_bias")},
        EXPERTS: "moe_tp_experts",
    }
}
# Supported entries of transformers' plans: some rows, some columns whose products are summed, and whole norms of single
# heads. Of fused matrices, transformers gathers the products; here, ranks take their rows of each matrix.
KNOWN = {
    **{f"{ATTENTION}{name}_proj": ("colwise",) for name in "qkv"},
    QKV: ("colwise_gather_output",),
    f"{ATTENTION}o_proj": ("rowwise", "rowwise_split_input"),
    **{f"{ATTENTION}{name}_norm": ("replicated_with_grad_allreduce",) for name in "qk"},
    **{f"{MLP}{name}_proj": ("colwise",) for name in ("gate", "up")},
    GATE_UP: ("colwise_gather_output",),
    f"{MLP}down_proj": ("rowwise", "rowwise_split_input"),
    f"{EXPERTS}.gate_up_proj": ("packed_colwise",),
    f"{EXPERTS}.down_proj": ("rowwise",),
    EXPERTS: ("moe_tp_experts",),
}
# What ranks sum.
SUMMED = ("rowwise", "rowwise_split_input", "moe_tp_experts")
# Names of matrices in files, with the dimension that is divided. Experts in one tensor are those of gpt-oss.
DIVIDED_DIMS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("qkv_proj", "gate_up_proj", "q_b_proj", "kv_b_proj", "self_attn.sinks"), 0),
    **dict.fromkeys(("o_proj", "down_proj", "w2", "experts.down_proj", "experts.gate_up_proj_bias"), 1),
    **dict.fromkeys(("experts.gate_up_proj", "experts.down_proj_bias"), 2),
}
_NUMBER = re.compile(r"\.\d+(?=\.)")

Reduce = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a model: some heads, and a share of the other weights.

    heads, kv_heads : of the whole model; latents count as one KV head.
    features : rows or columns of a head in each matrix of attention.
    """

    rank: int
    size: int
    heads: int
    kv_heads: int
    features: Mapping[str, int]

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
        if each := self.features.get(name):
            some = [keys if name in ("k_proj", "v_proj") else queries]
            if name == "qkv_proj":
                some += [(at + keys[0], at + keys[1]) for at in (self.heads, self.heads + self.kv_heads)]
            return [(first * each, last * each) for first, last in some]
        if name == "gate_up_proj":
            first, last = even_share(length // 2, self.rank, self.size)
            return [(first, last), (length // 2 + first, length // 2 + last)]
        if name.startswith("experts.gate_up"):  # a column of one matrix follows one of the other
            first, last = even_share(length // 2, self.rank, self.size)
            return [(2 * first, 2 * last)]
        return [even_share(length, self.rank, self.size)]


def plan_of(config: Any) -> dict[str, str]:
    """Return how a model is divided, by the names of its modules and parameters; empty if transformers has no plan."""
    plan = dict(getattr(config, "base_model_tp_plan", None) or OWN_PLANS.get(config.model_type, {}))
    if plan and has_latents(config):
        plan |= LATENTS
    return plan | SHARED_EXPERTS if EXPERTS in plan else plan


def has_latents(config: Any) -> bool:
    """Whether attention caches latents, which all heads share, as DeepSeek-V3's does."""
    return getattr(config, "kv_lora_rank", None) is not None


def head_features(config: Any) -> dict[str, int]:
    """Return how many rows or columns of each matrix of attention belong to a head."""
    if has_latents(config):
        query = config.qk_nope_head_dim + config.qk_rope_head_dim
        expanded = config.qk_nope_head_dim + config.v_head_dim
        return {"q_proj": query, "q_b_proj": query, "kv_b_proj": expanded, "o_proj": config.v_head_dim}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {**dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"), head_dim), "self_attn.sinks": 1}


def why_no_plan(config: Any) -> str | None:
    """Return why transformers' tensor-parallel plan for a model cannot be used; None if it can."""
    text = config.get_text_config()
    if text is not config:
        return "it is not only a language model"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    plan = plan_of(config)
    if not plan:
        return "transformers has no plan for it"
    ours = LATENTS | SHARED_EXPERTS | OWN_PLANS.get(config.model_type, {})
    unknown = {name: way for name, way in plan.items() if way not in KNOWN.get(name, ()) and way != ours.get(name)}
    if unknown:
        name, way = next(iter(unknown.items()))
        return f"transformers' plan has {name} {way}, which kvr-mpi does not support"
    fused = {QKV, f"{ATTENTION}kv_b_proj"} & plan.keys()
    if missing := {f"{ATTENTION}o_proj", *(fused or [f"{ATTENTION}{name}_proj" for name in "qkv"])} - plan.keys():
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
    config, plan = model.config, plan_of(model.config)
    # The features of all query heads are the rows of one matrix and the columns of another.
    heads, each = config.num_attention_heads, head_features(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    counts = {"q_proj": heads, "q_b_proj": heads, "kv_b_proj": heads, "o_proj": heads, "qkv_proj": heads + 2 * kv_heads}
    by_heads = {f"{ATTENTION}{leaf}.weight": counts[leaf] * each[leaf] for leaf in counts.keys() & each.keys()}
    for name, values in model.base_model.state_dict().items():
        path, module = in_plan(name), in_plan(name).rpartition(".")[0]
        if not path.startswith((ATTENTION, MLP)):
            is_known = module == "embed_tokens" or values.shape == (config.hidden_size,)
        elif plan.get(module) in ("colwise", "colwise_gather_output", *SUMMED[:2]):
            is_known = type(model.base_model.get_submodule(name.rpartition(".")[0])) is torch.nn.Linear
            if path in by_heads:
                is_known &= values.shape[DIVIDED_DIMS[module.rpartition(".")[2]]] == by_heads[path]
        elif module in (f"{ATTENTION}q_norm", f"{ATTENTION}k_norm"):
            is_known = values.shape == (each["q_proj"],)
        else:
            is_router = f"{module}.".startswith((f"{MLP}gate.", f"{MLP}router."))
            is_known = is_router or path in plan or plan.get(module) == WHOLE
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
    kv_heads = 1 if has_latents(config) else getattr(config, "num_key_value_heads", None) or heads
    if why := why_not_divided(heads, kv_heads, size):
        raise ConfigError(f"parallel.tensor_parallel = {size}: {name}: {why}")
    return Part(rank, size, heads, kv_heads, head_features(config))


def part_config(config: Any, part: Part) -> Any:
    """Return the configuration of a rank's part of a model, without a padding token."""
    mine = copy.deepcopy(config)
    heads, kv_heads = (last - first for first, last in (part.own_heads, part.own_kv_heads))
    mine.num_attention_heads, mine.num_key_value_heads = heads, heads if has_latents(config) else kv_heads
    if not has_latents(config):
        mine.head_dim = part.features["q_proj"]
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
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
    module, _, leaf = name.rpartition(".")
    leaf = module.rpartition(".")[2] + ("" if leaf in ("weight", "bias") else f".{leaf}")
    shape = tensor.get_shape()
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

    plan, modules = plan_of(config), dict(model.base_model.named_modules())
    sum_products(model.base_model, plan, tp_group.all_reduce)
    for name in modules:
        if plan.get(in_plan(name)) == "moe_tp_experts":
            beside = name.rpartition(".")[0]
            router = modules.get(f"{beside}.gate", modules.get(f"{beside}.router"))
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
