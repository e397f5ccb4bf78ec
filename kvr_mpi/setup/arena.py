"""Whether a rank keeps the documents it decodes in pages, and how many it asks for at once."""

from __future__ import annotations

from collections.abc import Callable

from kvr_mpi.job import JobSpec
from kvr_mpi.kv.paged import PagedArena
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill.self_check import why_not_packed

# Of the memory for prompts, what documents that share pages are given at once. Documents as long as that are read by
# calls of their own, which take far longer than it takes to make them; shorter ones are read together.
EXTENT_SHARE = 1 / 8
# Pages to try two small documents with.
TRIAL_PAGES = 2


def open_arena(
    spec: JobSpec,
    loaded: LoadedModel,
    free_bytes: int,
    say: Callable[[str], None],
    *,
    is_packed: bool,
) -> PagedArena | None:
    """Make a rank's arena where its documents are decoded from pages; None where each has memory of its own.

    On a processor each head's keys lie together instead, which is faster there. Compressed documents keep other tokens
    in each head, and those that stay spread are decoded by all ranks.

    Parameters
    ----------
    free_bytes : int
        What this rank may take for prompts.
    say : callable
        For a line of text.
    is_packed : bool
        Whether documents are decoded together at all.
    """
    if loaded.device.type != "cuda" or spec.is_spread or spec.compress is not None or not is_packed:
        return None
    trial = _arena_of(loaded, TRIAL_PAGES)
    if why := why_not_packed(loaded, trial):
        say(f"documents decoded together use separate memory and a separate attention call each: {why}")
        return None
    pages = max(1, int(EXTENT_SHARE * free_bytes) // trial.page_bytes)
    return _arena_of(loaded, pages)


def _arena_of(loaded: LoadedModel, pages: int) -> PagedArena:
    shape = loaded.shape
    return PagedArena(shape.layers, loaded.dtype, loaded.device, extent_pages=pages)
