"""A job's ``[cache]``: whether a prompt's keys and values are all held, or those of its last tokens only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Settings that only a rolling cache reads.
OF_ROLLING = ("tokens", "step_tokens", "approximation", "sinks")


class CacheSettings(BaseModel):
    """What a rank holds of a prompt while it is prefilled and answered (`kv.rolling`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    kind: Literal["whole", "rolling"] = Field(
        "whole", description="whole: all tokens; rolling: the last ones only, in memory of one size for any prompt"
    )
    tokens: int = Field(448, ge=2, description="rolling: old tokens that a step's first one may see")
    step_tokens: int = Field(64, ge=1, description="rolling: new tokens of a step")
    approximation: Literal["streaming-llm"] | None = Field(
        None, description="rolling: for models that see more than is held; default: these are refused"
    )
    sinks: int = Field(4, ge=1, description="streaming-llm: first tokens that are held all the time")

    @model_validator(mode="after")
    def _settings_fit_the_kind(self) -> CacheSettings:
        fields = type(self).model_fields
        # By value: ranks are sent a job with all its defaults.
        changed = [name for name in OF_ROLLING if getattr(self, name) != fields[name].default]
        if self.kind == "whole" and changed:
            raise ValueError(f"cache.{changed[0]} is of rolling caches: set cache.kind = 'rolling', or leave it out")
        if self.approximation is None and "sinks" in changed:
            raise ValueError(
                "cache.sinks is of an approximation: set cache.approximation = 'streaming-llm', or leave it out"
            )
        if self.sinks >= self.tokens:
            raise ValueError(
                f"cache.sinks = {self.sinks} leaves nothing of the {self.tokens} tokens that are held (cache.tokens) "
                f"for the last ones; lower it, or raise cache.tokens"
            )
        return self

    @property
    def is_rolling(self) -> bool:
        """Whether only the last tokens are held."""
        return self.kind == "rolling"
