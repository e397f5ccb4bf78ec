"""The section ``[decode]`` of a job: which ranks decode a prompt, and where heads are placed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from kvr_mpi.plain import Strict


class DecodeSettings(Strict):
    """How the ranks of a chain decode the prompts they have prefilled."""

    mode: Literal["data-parallel", "head-parallel", "auto"] = Field(
        "data-parallel",
        description="data-parallel: each rank decodes its own prompts; head-parallel: all ranks decode all "
        "prompts, each with some of the heads; auto: the faster forecast",
    )
    placement: Literal["static", "best-effort", "equal", "proportional"] = Field(
        "proportional",
        description="how heads are assigned to ranks: in order; by the number of tokens they keep; also with copies",
    )
    profile: str | None = Field(
        None, min_length=1, description="file with counts to place heads by; default: the number of tokens they keep"
    )

    @model_validator(mode="after")
    def _settings_fit_the_mode(self) -> DecodeSettings:
        # Compare values: a job is sent to ranks with all its defaults set.
        changed = [
            name for name in ("placement", "profile") if getattr(self, name) != type(self).model_fields[name].default
        ]
        if self.mode == "data-parallel" and changed:
            raise ValueError(
                f"decode.{changed[0]} is not used with mode = 'data-parallel', where every rank holds all heads of its "
                f"prompts; leave it out, or choose mode = 'head-parallel' or 'auto'"
            )
        if self.placement == "static" and self.profile is not None:
            raise ValueError(
                "decode.profile is not used with placement = 'static', which places heads in order; leave it out, or "
                "choose another placement"
            )
        return self
