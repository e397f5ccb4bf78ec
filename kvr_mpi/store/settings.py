"""The section ``[output]`` of a job."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from kvr_mpi.plain import Strict


class OutputSettings(Strict):
    """Where results go, and what they include."""

    path: str = Field(min_length=1, description="folder for the results; created if missing")
    kv: bool | Literal["sharded"] = Field(
        False,
        description="store the keys and values of every prompt, each rank its own; sharded: ranks also keep only "
        "their own in memory",
    )
    columns: list[str] = Field([], description="fields of the documents' rows to copy into the results")
    trace: bool = Field(
        False, description="record what every rank does and when, in a file per rank that Perfetto and Chrome can open"
    )
    max_failed: int | float | str = Field(
        0, description="maximum number of error records for exit code 0: a number, or a share such as 0.05 or '5%'"
    )

    @field_validator("max_failed")
    @classmethod
    def _number_or_share(cls, value: int | float | str) -> int | float | str:
        if isinstance(value, str):
            found = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value)
            good = found is not None and float(found[1]) <= 100
        else:
            good = value >= 0 if isinstance(value, int) else 0 <= value <= 1
        if not good:
            raise ValueError("expected a number of documents such as 3, or a share such as 0.05 or '5%'")
        return value

    def failures_allowed(self, documents: int) -> int:
        """Return the number of error records that are allowed among `documents` for exit code 0."""
        if isinstance(self.max_failed, int):
            return self.max_failed
        percent = self.max_failed * 100 if isinstance(self.max_failed, float) else float(self.max_failed.rstrip(" %"))
        return int(documents * percent / 100 + 1e-9)
