"""The section ``[generation]`` of a job: how answers are generated, and what is recorded with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvr_mpi.documents.document import OwnGeneration
from kvr_mpi.documents.json_schema import read_schema
from kvr_mpi.plain import AS_TOKENS, Strict

MAX_TOP_LOGPROBS, MAX_SAMPLES = 20, 128  # the maxima of OpenAI's format
# Any of these turns sampling on.
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
NonEmpty = Annotated[str, Field(min_length=1)]
# Settings that are not part of transformers' GenerationConfig.
OURS = frozenset(
    {"max_new_tokens", "stop", "seed", "logprobs", "score", "n", "json_schema"}
    | {"frequency_penalty", "presence_penalty", "stop_repetition", "lookup"}
)
MAX_PENALTY = 2  # of OpenAI's format


class GenerationSection(Strict):
    """How the answer is decoded; fields up to `min_new_tokens` are transformers' GenerationConfig."""

    temperature: float | None = Field(
        None,
        ge=0,
        description="below 1: likely tokens become more likely; 0: greedy, the default unless top_k, top_p or min_p is "
        "set",
    )
    top_k: int | None = Field(None, ge=0, description="sample only from this many of the most likely tokens")
    top_p: float | None = Field(
        None, gt=0, le=1, description="sample only from the most likely tokens that together have this probability"
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="drop tokens below this fraction of the highest probability"
    )
    repetition_penalty: float | None = Field(
        None, gt=0, description="above 1: tokens that have already occurred become less likely"
    )
    min_new_tokens: int | None = Field(None, ge=0, description="minimum length of an answer")
    frequency_penalty: float | None = Field(
        None,
        ge=-MAX_PENALTY,
        le=MAX_PENALTY,
        description="subtracted from the logits of a token for each time that the answer already contains it",
    )
    presence_penalty: float | None = Field(
        None,
        ge=-MAX_PENALTY,
        le=MAX_PENALTY,
        description="subtracted once from the logits of a token that the answer already contains",
    )
    stop_repetition: bool = Field(
        True,
        description="end an answer that only repeats itself (finish_reason = repetition): 8 copies of up to 64 tokens, "
        "and at least 64 tokens",
    )
    max_new_tokens: Annotated[int, Field(ge=0), AS_TOKENS] = Field(
        128, description="maximum length of an answer; 0: prefill only"
    )
    stop: list[NonEmpty] = Field([], description="end the answer before the first of these strings")
    seed: int = Field(0, ge=0, description="seed for sampling; each document has its own random numbers")
    n: int = Field(1, ge=1, le=MAX_SAMPLES, description="number of answers to each prompt, sampled from one prefill")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="store the log-probability of every answer token, and of this many most likely tokens at each "
        "position",
    )
    json_schema: str | None = Field(
        None, min_length=1, description="a JSON schema, or a file with one, that answers follow"
    )
    lookup: Literal["auto", False] = Field(
        False,
        description="auto: also run tokens that an answer may copy from its prompt; answers are the same, in fewer "
        "steps, which take longer",
    )
    score: list[str] | NonEmpty = Field(
        [],
        description="continuations to score instead of writing an answer: a list, or the field of a row that has them",
    )

    @model_validator(mode="before")
    @classmethod
    def _writes_nothing(cls, given: Any) -> Any:
        """Default to max_new_tokens = 0 if continuations are scored."""
        return {"max_new_tokens": 0, **given} if isinstance(given, dict) and given.get("score") else given

    @field_validator("json_schema")
    @classmethod
    def _schema(cls, value: str | None) -> str | None:
        return None if value is None else read_schema(value)

    @field_validator("score")
    @classmethod
    def _has_words(cls, value: list[str] | str) -> list[str] | str:
        if not all(value):
            raise ValueError("an empty continuation has no probability")
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> GenerationSection:
        if self.n > 1 and not self.transformers_settings()["do_sample"]:
            raise ValueError(
                f"generation.n = {self.n}: without sampling, all answers are the same; set generation.temperature, or "
                f"leave n out"
            )
        if self.scores and self.max_new_tokens:
            raise ValueError(
                f"generation.score replaces the answer, but max_new_tokens = {self.max_new_tokens} asks for one: "
                f"leave one of them out, or set generation.max_new_tokens = 0"
            )
        return self

    @property
    def scores(self) -> bool:
        """Whether continuations are scored instead of generating an answer."""
        return bool(self.score)

    @property
    def score_column(self) -> str | None:
        """Field of a row with the continuations, unless they are the same for all."""
        return self.score if isinstance(self.score, str) else None

    @property
    def of_answers(self) -> OwnGeneration:
        """Settings that apply only to final answers, as `OwnGeneration`."""
        return OwnGeneration(
            top_logprobs=self.logprobs,
            score=tuple(self.score) or None if isinstance(self.score, list) else None,
            n=self.n if self.n > 1 else None,
            json_schema=self.json_schema,
        )

    def transformers_settings(self) -> dict[str, Any]:
        """Return the GenerationConfig fields that are set, and do_sample."""
        given = {key: value for key, value in self.model_dump(exclude=set(OURS)).items() if value is not None}
        made = {"do_sample": False, **given, **sampling_settings(given)}
        return {key: value for key, value in made.items() if value is not None}


def sampling_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return GenerationConfig fields for the `SAMPLING` settings; any enables sampling, temperature 0 disables it."""
    used = {key: given[key] for key in SAMPLING if given.get(key) is not None}
    if used.get("temperature") == 0:
        return {"do_sample": False, **dict.fromkeys(SAMPLING)}
    return {"do_sample": True, **used} if used else {}
