"""What a prefill is made of, counted by hand."""

from __future__ import annotations

from models import tiny

from benchmarks.roofline import (
    ATTENTION,
    PRODUCTS,
    REST,
    measure_rooflines,
)
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.cpu_attention import KernelLibrary
from kvr_mpi.model.kernels import always
from kvr_mpi.model.products import PANELS, find_products, give_products
from kvr_mpi.transport.local import LocalTransport

TOKENS = 96


def test_every_product_is_counted_once(library: KernelLibrary) -> None:
    loaded = tiny.__wrapped__("llama-gqa")
    give_products(loaded.model, dict.fromkeys(find_products(loaded.model), always(PANELS)), library)
    prepare_model(loaded.model, chain=True)
    config = loaded.model.config
    (found,) = measure_rooflines(loaded, LocalTransport(), [TOKENS])
    products, attention, rest = found.parts
    assert [part.name for part in found.parts] == [PRODUCTS, ATTENTION, REST]

    hidden, heads, size = config.hidden_size, config.num_attention_heads, config.head_dim
    before = hidden * (heads + 2 * config.num_key_value_heads) * size
    after = hidden * heads * size + 3 * hidden * config.intermediate_size
    whole = TOKENS * (config.num_hidden_layers - 1) * (before + after)
    last = TOKENS * before + after  # the last query is all that is asked of it
    assert products.flop == 2 * (whole + last + hidden * config.vocab_size)

    pairs = (config.num_hidden_layers - 1) * TOKENS * (TOKENS + 1) // 2 + TOKENS
    assert attention.flop == 4 * heads * size * pairs
    assert products.seconds > 0 and attention.seconds > 0 and rest.flop == 0
    assert found.seconds > found.least_s > 0
    weights = 4 * config.num_hidden_layers * (before + after)
    assert all(part.nbytes > 0 for part in found.parts) and products.nbytes > weights
