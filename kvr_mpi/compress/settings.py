"""The section ``[compress]`` of a job, with its checks."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvr_mpi.compress.registry import METHODS, SINKS, Method
from kvr_mpi.plain import AS_SHARE, AS_TOKENS, Strict

# Settings that only some methods read (`Method.reads`); other methods would ignore them, so they are refused.
OWN_SETTINGS = ("window", "profile")


class CompressSettings(Strict):
    """How a prompt's keys and values are compressed before its answer is decoded."""

    method: str = Field(description=f"one of {', '.join(METHODS)}")
    budget: Annotated[float, Field(gt=0), AS_SHARE, AS_TOKENS] = Field(
        description="tokens that a KV head keeps on average, including the window; below 1: a share of the tokens"
    )
    observes: Literal["question", "document"] = Field(
        "question",
        description="where the observation window is: at the end of the prompt, or at the end of the document's text",
    )
    window: Annotated[int, Field(ge=1), AS_TOKENS] = Field(
        64, description="size of the observation window; its tokens are always kept"
    )
    profile: str | None = Field(None, min_length=1, description="headkv: a file with scores or counts for this model")

    @model_validator(mode="before")
    @classmethod
    def _without_a_question(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("method") in [name for name, one in METHODS.items() if one.repeats]:
            return {"observes": "document", **values}
        return values

    @field_validator("method")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in METHODS:
            raise ValueError(f"expected one of {', '.join(map(repr, METHODS))}")
        return value

    @field_validator("budget")
    @classmethod
    def _tokens_or_share(cls, value: float) -> float:
        if value < 1:
            return value
        if value != int(value):
            raise ValueError("expected a whole number of tokens, or the share of the tokens to keep, less than 1")
        return int(value)

    @model_validator(mode="after")
    def _settings_fit_the_method(self) -> CompressSettings:
        method = self.rule
        if foreign := [name for name in self.changed(*OWN_SETTINGS) if name not in method.reads]:
            raise ValueError(
                f"compress.{foreign[0]} is not used with method = {method.name!r}, which uses "
                f"{', '.join((*method.reads, 'budget'))} and observes; leave it out"
            )
        if method.repeats and self.observes == "question":
            raise ValueError(f"compress.method = {self.method!r} does not observe the question; leave out observes")
        if method.needs_profile != (self.profile is not None):
            raise ValueError(f"compress.method = {method.name!r} needs compress.profile = 'FILE': scores of its heads")
        if 1 <= self.budget < self.always_kept:
            remedy = "raise it, or lower compress.window" if method.observes else "raise it"
            raise ValueError(
                f"compress.budget = {self.budget} is less than the {self.always_kept} tokens that every head keeps "
                f"anyway; {remedy}"
            )
        return self

    @property
    def rule(self) -> Method:
        """The method."""
        return METHODS[self.method]

    @property
    def observed_tokens(self) -> int:
        """Tokens of the window; 0 if the method does not observe one."""
        return self.window if self.rule.observes else 0

    @property
    def always_kept(self) -> int:
        """Tokens that every head keeps: the window, or sinks and the last token."""
        return self.window if self.rule.observes else SINKS + 1

    def kept_of(self, tokens: int) -> int:
        """Return how many of `tokens` tokens a KV head keeps on average."""
        if self.budget >= 1:
            return min(tokens, int(self.budget))
        return min(tokens, max(self.always_kept, math.ceil(tokens * self.budget - 1e-9)))

    def __str__(self) -> str:
        """Describe the settings in a few words, for records and logs."""
        given = self.model_dump(exclude_none=True, exclude={"method", *(set(OWN_SETTINGS) - set(self.rule.reads))})
        return f"{self.method}: " + ", ".join(f"{name} {value}" for name, value in given.items())
