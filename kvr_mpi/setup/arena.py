"""Whether a rank decodes from a page pool, and the size of its extents."""

from __future__ import annotations

from kvr_mpi.job import JobSpec
from kvr_mpi.kv.arena import Arena
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill.self_check import why_not_packed
from kvr_mpi.setup.rates import Say

# Of the memory for prompts, what documents that share pages are given at once. Layers as long as that are read by calls
# of their own, which take far longer than it takes to make them; shorter ones are read together.
EXTENT_SHARE = 1 / 8


def open_arena(spec: JobSpec, loaded: LoadedModel, free_bytes: int, say: Say, *, is_packed: bool) -> Arena | None:
    """Create a rank's page pool, with `free_bytes` for prompts, if packed documents are decoded from pages; else None.

    On a processor separate memory serves as well. Documents that stay spread are decoded by all ranks.
    """
    if loaded.device.type != "cuda" or spec.is_spread or not is_packed:
        return None
    layers = loaded.shape.layers
    if why := why_not_packed(loaded, Arena(layers, loaded.dtype, loaded.device, extent_bytes=0)):
        say(f"documents decoded together use separate memory and a separate attention call each: {why}")
        return None
    return Arena(layers, loaded.dtype, loaded.device, extent_bytes=int(EXTENT_SHARE * free_bytes))
