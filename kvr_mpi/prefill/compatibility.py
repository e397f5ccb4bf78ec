"""Which models can be prefilled in which way: what rules out chunks, and slices that are not computed in order."""

from __future__ import annotations

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.route import Route
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import takes
from kvr_mpi.model.layer_chunks import cut_layers


def why_no_chunks(loaded: LoadedModel) -> str | None:
    """Say why a model's slices cannot be run in chunks; None if they can, and the model is ready for it."""
    if loaded.shape.has_states:
        why = "its recurrent layers pass on one state per slice"
    elif not loaded.attends_in_parts:
        why = "its attention cannot be taken over in parts, and makes a mask for the whole slice"
    elif not cut_layers(loaded.model):
        why = "it has no list of its layers"
    else:
        return None
    return f"{loaded.shape.architecture}: {why}, so its slices cannot be run in chunks"


def check_order(loaded: LoadedModel, route: Route) -> None:
    """Refuse models whose ranks have to go on where others have ended, where the route does not.

    A rank with two stretches has to be given positions.

    Raises
    ------
    ModelError
        Saying why.
    """
    if route.in_order:
        return
    why = "its recurrent layers need the state of the tokens before" if loaded.shape.has_states else None
    if not loaded.attends_in_parts:
        why = "its attention cannot be taken over in parts"
    elif len(route.owned) > 1 and loaded.shape.counts_cache:
        why = "its attention temperature counts from the length of the cache"
    elif len(route.owned) > 1 and not takes(loaded.model, "position_ids"):
        why = "it counts positions itself and accepts none"
    if why is not None:
        raise ModelError(f"{loaded.shape.architecture}: {why}, so it runs as a chain (strategy = 'kvr') or single only")
