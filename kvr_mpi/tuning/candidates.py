"""The parts of a model with several implementations, by kind: products and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch

from kvr_mpi.kv.attention import attend
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.cpu_attention import AMX, OWN, CpuAttention, KernelLibrary
from kvr_mpi.model.kernels import PLAIN, always
from kvr_mpi.model.narrow_product import NARROW, NarrowWeights
from kvr_mpi.model.products import PANELS, PREPACKED, WIDENED, Product, can_lay, can_widen, find_products
from kvr_mpi.model.unit_table import Unit, UnitTable

# With up to TURNS_ROWS rows, calls cycle through tensors of TURNS_BYTES in total, so that they are read from memory.
TURNS_BYTES, TURNS_ROWS = 64 << 20, 8
# Largest number of rows for narrow weights: their kernels read the weights again for every eight rows.
NARROW_ROWS = 8
# Number of keys that queries attend to.
KEYS = 1024

Compute = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Candidates:
    """One kind of product or attention, with its implementations.

    ways : for each implementation, makes one or several functions of inputs (rows, features) that take turns.
    features : of a row.
    least_rows, most_rows : smallest and largest numbers of rows at which an implementation is tried.
    """

    name: str
    ways: Mapping[str, Callable[[], Sequence[Compute]]]
    features: int
    dtype: torch.dtype
    least_rows: Mapping[str, int] = field(default_factory=dict)
    most_rows: Mapping[str, int] = field(default_factory=dict)

    def tries(self, way: str, rows: int) -> bool:
        """Whether an implementation is tried at a number of rows."""
        return self.least_rows.get(way, rows) <= rows <= self.most_rows.get(way, rows)

    def rows(self, count: int) -> torch.Tensor:
        """Make random inputs (count, features)."""
        return torch.randn(count, self.features, generator=torch.Generator().manual_seed(count)).to(self.dtype)


def product_candidates(
    model: torch.nn.Module,
    most_bytes: float,
    library: KernelLibrary | None = None,
    narrowed: Mapping[torch.nn.Linear, NarrowWeights] | None = None,
) -> list[Candidates]:
    """List the products by shape that have several implementations; copies for trying may take `most_bytes`.

    The largest comes first, so that every other kind takes about half of the measuring time.
    """
    kinds, narrowed = [], narrowed or {}
    for shape, layers in sorted(find_products(model).items(), key=lambda item: -item[1][0].weight.numel()):
        one = layers[0].weight
        turns = layers[: max(1, TURNS_BYTES // one.nbytes)]
        names = [PLAIN]
        if can_lay(one) and one.nbytes * len(turns) <= most_bytes:
            names.append(PREPACKED)
        if library is not None and one.dtype == torch.float32 and one.nbytes * len(turns) <= most_bytes:
            names.append(PANELS)
        if library is not None and layers[0] in narrowed:
            names.append(NARROW)
        if can_widen(one, library):
            names.append(WIDENED)
        if len(names) > 1:
            ways = {name: partial(_calls, name, turns, library, narrowed) for name in names}
            kinds.append(Candidates(shape, ways, one.shape[1], one.dtype, most_rows={NARROW: NARROW_ROWS}))
    return kinds


def _calls(
    way: str,
    layers: Sequence[torch.nn.Linear],
    library: KernelLibrary | None,
    narrowed: Mapping[torch.nn.Linear, NarrowWeights],
) -> list[Compute]:
    """Make one implementation of the products of some layers."""
    if way == PLAIN:
        return [partial(torch.nn.functional.linear, weight=layer.weight.detach(), bias=layer.bias) for layer in layers]
    return [Product(layer, always(way), library, narrowed.get(layer)) for layer in layers]


def attention_candidates(loaded: LoadedModel, library: KernelLibrary | None) -> list[Candidates]:
    """Return the kind for attention, whose rows are queries, with enough keys for its two products to dominate."""
    layer = _attending_layer(loaded)
    if library is None or layer is None:
        return []
    heads = getattr(loaded.model.config.get_text_config(), "num_attention_heads", layer.num_kv_heads)

    def make_cache(keys: int, draw: torch.Generator) -> list[torch.Tensor]:
        dims = layer.key_dim, layer.value_dim
        made = [torch.randn(1, keys, layer.num_kv_heads, dim, generator=draw) for dim in dims]
        return [each.to(loaded.dtype).transpose(1, 2) for each in made]

    draw = torch.Generator().manual_seed(KEYS)
    one = torch.empty(1, heads, 1, layer.key_dim, dtype=loaded.dtype), *make_cache(1, draw)
    own = [way for way, takes in ((OWN, library.takes), (AMX, library.takes_amx)) if takes(*one)]
    if not own:
        return []

    @cache
    def caches() -> list[list[torch.Tensor]]:
        per_cache = KEYS * layer.elements * loaded.dtype.itemsize
        return [make_cache(KEYS, draw) for _ in range(max(1, TURNS_BYTES // per_cache))]

    def attending(params: AttentionParams, keys: torch.Tensor, values: torch.Tensor) -> Compute:
        pairs = zip(keys[0].unbind(0), values[0].unbind(0), strict=True)
        table = UnitTable(1, layer.num_kv_heads, [Unit(0, head, *pair) for head, pair in enumerate(pairs)])

        def compute(rows: torch.Tensor) -> torch.Tensor:
            query = rows.view(1, len(rows), heads, layer.key_dim).transpose(1, 2)
            if len(rows) == 1 and params.kernel is not None:  # as decode steps do, which have such a table
                return library.attend_units(query, table, np.array([KEYS]), params.scale)[0].view(1, -1)
            return attend(query, keys, values, params).out.transpose(1, 2).reshape(len(rows), -1)

        return compute

    scale = layer.key_dim**-0.5
    kernels = {PLAIN: None} | {way: CpuAttention(library, always(way)) for way in own}
    ways = {
        way: lambda kernel=kernel: [attending(AttentionParams(scale, kernel=kernel), *each) for each in caches()]
        for way, kernel in kernels.items()
    }
    return [Candidates(attention_name(loaded), ways, heads * layer.key_dim, loaded.dtype, least_rows={AMX: 2})]


def _attending_layer(loaded: LoadedModel) -> LayerShape | None:
    """Return the first layer with full attention; otherwise the first with any attention."""
    attending = [layer for layer in loaded.shape.layers if layer.elements]
    return next((layer for layer in attending if not layer.visibility.size), next(iter(attending), None))


def attention_name(loaded: LoadedModel) -> str:
    """Name a model's attention by its number of KV heads and key dimension."""
    layer = _attending_layer(loaded)
    return "" if layer is None else f"attention of {layer.num_kv_heads}x{layer.key_dim}"
