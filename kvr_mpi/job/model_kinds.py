"""What a loaded model is, as far as the table of combinations asks; apart from it, since this needs torch."""

from __future__ import annotations

from kvr_mpi.job.combinations import GENERIC, LENGTH, STATES
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.rope import depends_on_length


def kinds_of(loaded: LoadedModel) -> set[str]:
    """Say which of `combinations.MODELS` a model is."""
    found = {
        STATES: loaded.shape.has_states,
        GENERIC: not loaded.attends_in_parts,
        LENGTH: bool(depends_on_length(loaded.model)),
    }
    return {kind for kind, is_so in found.items() if is_so}
