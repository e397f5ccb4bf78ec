"""A job's ``[report]``: what it tells of itself beside its results."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ReportSettings(BaseModel):
    """What a job records about itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    trace: bool = Field(
        False, description="record what every rank does and when, in a file per rank that Perfetto and Chrome can open"
    )
