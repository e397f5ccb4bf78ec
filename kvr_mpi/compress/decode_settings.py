"""The section ``[decode]`` of a job: which ranks decode a prompt, and where heads are placed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from kvr_mpi.plain import Strict


class DecodeSettings(Strict):
    """How the ranks of a chain decode the prompts they have prefilled."""

    mode: Literal["data-parallel", "head-parallel", "auto"] = Field(
        "data-parallel",
        description="data-parallel: each rank its own prompts; head-parallel: all ranks all prompts, each some heads; "
        "auto: the faster",
    )
    placement: Literal["static", "best-effort", "equal", "proportional"] = Field(
        "proportional",
        description="how heads are assigned to ranks: in order; by the number of tokens they keep; also with copies",
    )

    @model_validator(mode="after")
    def _settings_fit_the_mode(self) -> DecodeSettings:
        # Compare values: a job is sent to ranks with all its defaults set.
        if self.mode == "data-parallel" and self.placement != type(self).model_fields["placement"].default:
            raise ValueError(
                "decode.placement is not used with mode = 'data-parallel', where every rank holds all heads of its "
                "prompts; leave it out, or choose mode = 'head-parallel' or 'auto'"
            )
        return self
