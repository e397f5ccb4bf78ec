"""Decides whether a rank decodes from a page pool, and sets the size of the pool's extents."""

from __future__ import annotations

from kvr_mpi.errors import Say
from kvr_mpi.job import JobSpec
from kvr_mpi.kv.arena import Arena
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill.self_check import why_not_packed

# Share of the prompt memory that is allocated at once as an extent of pages. A layer as long as an extent has its own
# attention call, whose launch takes little of its time; shorter layers share a call.
EXTENT_SHARE = 1 / 8


def open_arena(spec: JobSpec, loaded: LoadedModel, free_bytes: int, say: Say, *, is_packed: bool) -> Arena | None:
    """Create a rank's page pool, with `free_bytes` for prompts; None if documents are not decoded from pages.

    On CPUs, separate memory is as fast. Sharded documents are decoded by all ranks, without a pool.
    """
    if loaded.device.type != "cuda" or spec.is_spread or not is_packed:
        return None
    layers = loaded.shape.layers
    if why := why_not_packed(loaded, Arena(layers, loaded.dtype, loaded.device, extent_bytes=0)):
        say(f"documents decoded together use separate memory and a separate attention call each: {why}")
        return None
    return Arena(layers, loaded.dtype, loaded.device, extent_bytes=int(EXTENT_SHARE * free_bytes))
