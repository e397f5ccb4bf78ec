"""Classifies a loaded model for the table of combinations; separate because it needs torch."""

from __future__ import annotations

from kvr_mpi.job.combinations import GENERIC, LENGTH, STATES
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.rope import depends_on_length


def kinds_of(loaded: LoadedModel) -> set[str]:
    """Return which of `combinations.MODELS` apply to a model."""
    found = {
        STATES: loaded.shape.has_states,
        GENERIC: not loaded.attends_in_parts,
        LENGTH: bool(depends_on_length(loaded.model)),
    }
    return {kind for kind, is_so in found.items() if is_so}
