"""A job's ``[report]``: what it tells of itself beside its results."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ReportSettings(BaseModel):
    """What a job tells of itself beside its results."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    metrics: bool = Field(
        False,
        description="keep progress.json and metrics.prom (Prometheus' text format) up to date, and write metrics.json",
    )
    trace: bool = Field(
        False, description="record what every rank does when; written as trace.json, which Perfetto and Chrome open"
    )
    trace_mib: int = Field(
        64, ge=1, description="most MiB of what is recorded, of all ranks and resumed jobs together; a full trace ends"
    )
