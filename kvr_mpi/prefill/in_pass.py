"""Prefill many prompts in one pass over weights that come from disk: each layer is read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvr_mpi.model import LoadedModel, ModelShape
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.transport.local import LocalTransport

# Hidden states of every prompt of a pass that wait between layers: what went into the last one, and what came out.
HIDDEN_HELD = 2


def pass_bytes_per_token(shape: ModelShape) -> int:
    """Bytes that a token of a prompt takes while the pass goes on: keys, values, and hidden states."""
    return shape.kv_bytes_per_token + HIDDEN_HELD * shape.hidden_size * shape.dtype_bytes


def prefill_in_pass(loaded: LoadedModel, prompts: Sequence[tuple[Sequence[int], int]]) -> list[Prefill]:
    """Prefill prompts on one rank, each as if alone (`prefill_kvr`); one without memory has its `Prefill.error`.

    Parameters
    ----------
    loaded : LoadedModel
        Whose weights are streamed (`model.streamed`).
    prompts : sequence of (sequence of int, int)
        Tokens, none of them empty, and room for so many after them.
    """
    assert loaded.streamed is not None
    return loaded.streamed.run_all(
        [
            partial(
                prefill_kvr,
                loaded,
                ids,
                Partition((0, len(ids))),
                LocalTransport(),
                reserve_tokens=reserve,
                spares_chain=True,
            )
            for ids, reserve in prompts
        ]
    )
