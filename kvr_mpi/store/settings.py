"""The section ``[output]`` of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from kvr_mpi.plain import AS_SHARE, AS_TOKENS, Strict


class OutputSettings(Strict):
    """Where results go, and what they include."""

    path: str = Field(min_length=1, description="folder for the results; created if missing")
    kv: bool | Literal["sharded"] = Field(
        False,
        description="store the keys and values of every prompt, each rank those of its slice; sharded: each rank "
        "also holds only those in memory",
    )
    embedding: Literal["last", "mean", "document", "query"] | None = Field(
        None,
        description="store an embedding of every document instead of an answer; last, mean: of the final hidden "
        "states; document, query: with the pooling, normalization and prompt in the model's folder "
        "(sentence-transformers)",
    )
    dimensions: int | None = Field(
        None, ge=1, description="truncate embeddings to their first values, and normalize them (Matryoshka)"
    )
    text_logprobs: bool | Annotated[int, Field(ge=1), AS_TOKENS] = Field(
        False,
        description="store the log-probability of every token of the documents instead of answers; a number: sums over "
        "stretches of this many tokens",
    )
    columns: list[str] = Field([], description="fields of the documents' rows to copy into the results")
    trace: bool = Field(
        False, description="record what every rank does and when, in a file per rank that Perfetto and Chrome can open"
    )
    check_answers: bool = Field(
        True,
        description="compare each answer with its document, without a model: which of its numbers, dates and names the "
        "document lacks (unsupported), and what is copied",
    )
    max_failed: Annotated[int | float, AS_SHARE] = Field(
        0, description="maximum number of error records for exit code 0: a number, or a share such as 0.05 or '5%'"
    )

    @field_validator("max_failed")
    @classmethod
    def _number_or_share(cls, value: int | float) -> int | float:
        if value < 0 or (isinstance(value, float) and value > 1):
            raise ValueError("expected a number of documents such as 3, or a share such as 0.05 or '5%'")
        return value

    @model_validator(mode="after")
    def _dimensions_of_what(self) -> OutputSettings:
        if self.dimensions is not None and self.embedding is None:
            raise ValueError("output.dimensions is for embeddings: set output.embedding, or leave it out")
        return self

    @property
    def reads(self) -> str | None:
        """The setting that stores what is read of prompts, instead of answers; None if there is none."""
        return "output.embedding" if self.embedding else "output.text_logprobs" if self.text_logprobs else None

    def failures_allowed(self, documents: int) -> int:
        """Return the number of error records that are allowed among `documents` for exit code 0."""
        return self.max_failed if isinstance(self.max_failed, int) else int(documents * self.max_failed + 1e-9)
