"""The section ``[cache]`` of a job: a whole cache, or a rolling one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvr_mpi.plain import AS_TOKENS, Strict


class CacheSettings(Strict):
    """Which keys and values of a prompt a rank holds during prefill and decoding (`kv.rolling`)."""

    kind: Literal["whole", "rolling", "streaming-llm"] = Field(
        "whole",
        description="whole: all tokens; rolling: the last ones, exact with windows; streaming-llm: and the first four, "
        "inexact",
    )
    tokens: Annotated[int, Field(ge=5), AS_TOKENS] = Field(
        448, description="rolling: number of earlier tokens that the first token of a step can attend to"
    )

    @model_validator(mode="after")
    def _settings_fit_the_kind(self) -> CacheSettings:
        if self.kind == "whole" and self.changed("tokens"):
            raise ValueError("cache.tokens is for rolling caches: set cache.kind = 'rolling', or leave it out")
        return self

    @property
    def is_rolling(self) -> bool:
        """Whether the cache is a rolling one."""
        return self.kind != "whole"
