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
        "whole", description="whole: all tokens; rolling: only the last ones, in constant memory"
    )
    tokens: int = Field(
        448, ge=2, description="rolling: number of earlier tokens that the first token of a step can attend to"
    )
    step_tokens: int = Field(64, ge=1, description="rolling: number of new tokens per step")
    approximation: Literal["streaming-llm"] | None = Field(
        None, description="rolling: for models that attend to more tokens than are kept; default: refuse them"
    )
    sinks: int = Field(4, ge=1, description="streaming-llm: number of first tokens that are always kept")

    @model_validator(mode="after")
    def _settings_fit_the_kind(self) -> CacheSettings:
        fields = type(self).model_fields
        # By value: ranks are sent a job with all its defaults.
        changed = [name for name in OF_ROLLING if getattr(self, name) != fields[name].default]
        if self.kind == "whole" and changed:
            raise ValueError(f"cache.{changed[0]} is for rolling caches: set cache.kind = 'rolling', or leave it out")
        if self.approximation is None and "sinks" in changed:
            raise ValueError(
                "cache.sinks is for an approximation: set cache.approximation = 'streaming-llm', or leave it out"
            )
        if self.sinks >= self.tokens:
            raise ValueError(
                f"cache.sinks = {self.sinks} leaves no room for the last tokens among the {self.tokens} that are kept "
                f"(cache.tokens); lower it, or raise cache.tokens"
            )
        return self

    @property
    def is_rolling(self) -> bool:
        """Whether only the last tokens are held."""
        return self.kind == "rolling"
