"""The section ``[decode]`` of a job applied to a model: where heads are placed, or why they cannot be distributed.

The core meets FairKV here only: `runtime.prepare` opens it, and everything else knows a `decode.group.HeadSharing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from kvr_mpi.errors import ConfigError
from kvr_mpi.fairkv.group import HeadGroup, PlaceHeads, why_not_head_parallel
from kvr_mpi.fairkv.placement import (
    place_best_effort,
    place_in_proportion,
    place_layers,
    place_statically,
    place_with_equal_copies,
    sync_efficiency,
)
from kvr_mpi.fairkv.shared_heads import shared_bytes
from kvr_mpi.job.spec import DecodeSection
from kvr_mpi.kv.pool import Pool
from kvr_mpi.model import LoadedModel, ModelShape
from kvr_mpi.transport import Transport


@dataclass(frozen=True, slots=True, eq=False)
class PlacedHeads:
    """How heads are distributed over ranks.

    layers, kv_heads : of the model.
    """

    settings: DecodeSection
    layers: int
    kv_heads: int

    def placing(self, ranks: int) -> PlaceHeads:
        """Return the function that places one layer's heads on `ranks` ranks."""
        ways: dict[str, PlaceHeads] = {
            "static": place_statically,
            "best-effort": place_best_effort,
            "equal": partial(place_with_equal_copies, copies=ranks - 1),
            "proportional": place_in_proportion,
        }
        return ways[self.settings.placement]

    def group(self, loaded: LoadedModel, ranks: Transport, pool: Pool | None = None) -> HeadGroup:
        return HeadGroup(loaded, ranks, self.placing(ranks.size), pool)

    def extra_bytes(self, loaded: LoadedModel) -> int:
        """Maximum bytes of weights that a rank needs in addition to the model (`shared_bytes`)."""
        return shared_bytes(loaded)

    def efficiency(self, ranks: int) -> float:
        """Forecast the fraction of time in which ranks attend, for heads of equal size."""
        return sync_efficiency(place_layers(np.ones((self.layers, self.kv_heads)), ranks, self.placing(ranks)))

    def describe(self, ranks: int) -> str:
        copied = f", up to {ranks - 1} copies a layer" if self.settings.placement in ("equal", "proportional") else ""
        by = "" if self.settings.placement == "static" else ", by what they keep"
        return f"{self.settings.placement}{copied}{by}"


def open_sharing(settings: DecodeSection, loaded: LoadedModel, why_not: str | None) -> PlacedHeads | str | None:
    """Prepare a placement for a model, or return why that is not possible; None if the job does not ask for it.

    why_not : a reason that is known already: another setting of the job, or why this model does not run packed.

    Raises `ConfigError` if the job requires a placement that is not possible.
    """
    if settings.mode == "data-parallel":
        return None
    why = why_not or why_not_head_parallel(loaded)
    if why is not None:
        if settings.mode == "head-parallel":
            raise ConfigError(
                f"decode.mode = 'head-parallel': the heads of {loaded.shape.architecture} cannot be distributed over "
                f"ranks: {why}; choose mode = 'data-parallel', where each rank decodes its own prompts"
            )
        return why
    return placement_of(settings, loaded.shape)


def placement_of(settings: DecodeSection, shape: ModelShape) -> PlacedHeads:
    """Prepare a placement for models of a shape, whose layers are all alike."""
    return PlacedHeads(settings, len(shape.layers), shape.layers[0].num_kv_heads)
