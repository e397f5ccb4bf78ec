"""Whether a rank keeps the documents it decodes in pages, how many it asks for at once, and if steps are captured."""

from __future__ import annotations

from collections.abc import Callable

from kvr_mpi.decode.graphs import MOST_ROWS, StepGraphs, held_bytes, why_never_captured, why_not_captured
from kvr_mpi.job import JobSpec
from kvr_mpi.kv.paged import PagedArena
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill.memory_budget import GIB, Footprint
from kvr_mpi.prefill.self_check import why_not_packed

# Of the memory for prompts, what documents that share pages are given at once. Documents as long as that are read by
# calls of their own, which take far longer than it takes to make them; shorter ones are read together.
EXTENT_SHARE = 1 / 8
# Of what is free, what captured steps may come to hold; where they might hold more, none is captured.
GRAPHS_SHARE = 1 / 8
# Pages to try two small documents with.
TRIAL_PAGES = 2


def open_arena(
    spec: JobSpec,
    loaded: LoadedModel,
    free_bytes: int,
    say: Callable[[str], None],
    *,
    is_packed: bool,
    captures: bool = True,
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
    captures : bool
        Whether there is memory for captured steps (`graph_bytes`).
    """
    if not _has_pages(spec, loaded) or not is_packed:
        return None

    has_scrap = captures and spec.decode.cuda_graphs == "auto"
    trial = _arena_of(loaded, TRIAL_PAGES, has_scrap=has_scrap)
    if why := why_not_packed(loaded, trial):
        say(f"documents decoded together use separate memory and a separate attention call each: {why}")
        return None
    pages = max(1, int(EXTENT_SHARE * free_bytes) // trial.page_bytes - has_scrap)
    return _arena_of(loaded, pages, has_scrap=has_scrap)


def graph_bytes(
    spec: JobSpec, loaded: LoadedModel, footprint: Footprint | None, free_bytes: int, say: Callable[[str], None]
) -> int:
    """Count what captured steps of decoding may come to hold on this rank; 0 where none will be captured.

    Parameters
    ----------
    footprint : Footprint or None
        None: nothing is decoded together.
    free_bytes : int
        What there is for prompts and captured steps.
    say : callable
        For a line of text.
    """
    if footprint is None or not _has_pages(spec, loaded) or spec.decode.cuda_graphs != "auto":
        return 0
    if why_never_captured(loaded) is not None:
        return 0
    needs = held_bytes(footprint.activation_bytes(MOST_ROWS), loaded.shape.vocab_size)
    if needs <= GRAPHS_SHARE * free_bytes:
        return needs
    say(
        f"decoding launches its kernels one by one, not as CUDA graphs: those may come to hold {needs / GIB:.2f} GiB, "
        f"and {GRAPHS_SHARE:.1%} of the {free_bytes / GIB:.2f} GiB that are free is kept for them"
    )
    return 0


def open_graphs(loaded: LoadedModel, arena: PagedArena | None, say: Callable[[str], None]) -> StepGraphs | None:
    """Have steps over a rank's arena captured; None where that is not wished, or does not give the same logits."""
    if arena is None or not arena.has_scrap:
        return None
    if why := why_not_captured(loaded, _arena_of(loaded, TRIAL_PAGES, has_scrap=True)):
        say(f"decoding launches its kernels one by one, not as CUDA graphs: {why}")
        return None
    return StepGraphs(loaded, say)


def _has_pages(spec: JobSpec, loaded: LoadedModel) -> bool:
    """Whether documents that are decoded together lie in pages."""
    return loaded.device.type == "cuda" and not spec.is_spread and spec.compress is None


def _arena_of(loaded: LoadedModel, pages: int, *, has_scrap: bool) -> PagedArena:
    shape = loaded.shape
    return PagedArena(shape.layers, loaded.dtype, loaded.device, extent_pages=pages, has_scrap=has_scrap)
