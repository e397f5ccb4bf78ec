"""A complete prompt: any rank of a chain can prefill it, answer it and store the result.

The leader of a chain makes prompts and sends them to the other ranks, which read no documents. If a prompt covers only
a part of its document, its outcome returns to the leader as a record of that part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from kvr_mpi.decode.logprobs import TokenLogprobs
from kvr_mpi.decode.sampling import Answer
from kvr_mpi.decode.scoring import Score
from kvr_mpi.documents.document import AS_THE_JOB, OwnGeneration
from kvr_mpi.documents.prompts import PromptText
from kvr_mpi.documents.support import SupportingText
from kvr_mpi.partition import Partition
from kvr_mpi.plain import from_plain
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.store.prefix import StoredPrefix
from kvr_mpi.store.record import Record

# Fields of a record that are summed over the prompts of its document.
SUMS = (
    "prompt_tokens",
    "computed_tokens",
    "text_tokens",
    "new_tokens",
    "ttft_s",
    "wait_s",
    "decode_steps",
    "rank_s",
    "parts",
    "retained_tokens",
    "retained_bytes",
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prompt(PromptText):
    """A prompt with everything on which its answer and record depend.

    key : unique among the prompts of a chain.
    document_id : unique among the documents of a job.
    new_tokens : maximum tokens of the answer.
    generation : the document's own settings, which override the job's.
    seed : seed for sampling the answer.
    about : fields of the document's record that are known before the prompt runs.
    document_work, work : the document's work in the job's unit, and this prompt's part of it.
    part, parts : index of this prompt among the document's current ones, and their number.
    is_final : whether its answer is the document's answer.
    past : sums over the document's earlier prompts (`SUMS`).
    min_coverage : minimum fraction of the document that the prompts must contain.
    shared_tokens : number of first tokens that other prompts about the same document share.
    stored : location of the stored keys and values of its first tokens, if there are any.
    compared_text : the document's whole text, with which the answer is compared; empty: it is not compared.
    frame_text : the other words of the prompt, which count as known.
    """

    key: str
    document_id: str
    new_tokens: int
    generation: OwnGeneration = AS_THE_JOB
    seed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    document_work: int = 0
    work: int = 0
    part: int = 0
    parts: int = 1
    is_final: bool = True
    past: Mapping[str, Any] = field(default_factory=dict)
    min_coverage: float = 0.0
    shared_tokens: int = 0
    stored: StoredPrefix | None = None
    compared_text: str = ""
    frame_text: str = ""

    @property
    def name(self) -> str:
        """The document's id, and which part of it this is, as shown to users."""
        return self.document_id + (f", part {self.part + 1} of {self.parts}" if self.parts > 1 else "")

    @property
    def is_prefix(self) -> bool:
        """Whether this is the prefix that several prompts share; it is not answered."""
        return self.shared_tokens == len(self.ids)

    @property
    def shared_prefix(self) -> Prompt:
        """The prompt of the first tokens that others share."""
        return replace(self, ids=self.ids[: self.shared_tokens], text=(0, 0), new_tokens=0)

    def to_wire(self) -> tuple[dict[str, Any], bytes]:
        """Return plain values for JSON, and the token ids as little-endian 32-bit integers."""
        plain = asdict(replace(self, ids=()))
        return plain, np.asarray(self.ids, "<i4").tobytes()

    @classmethod
    def from_wire(cls, plain: Mapping[str, Any], ids: bytes) -> Prompt:
        """Reconstruct the prompt from the result of `to_wire`."""
        return from_plain(cls, {**plain, "ids": np.frombuffer(ids, "<i4").tolist()})

    def error_record(self, reason: str) -> Record:
        """Make the record of a document that failed."""
        return Record(self.document_id, "error", error=reason, **self.about)

    def begun_record(self, partition: Partition) -> Record:
        """Make the record of a document whose final prompt is being prefilled."""
        return replace(
            self.error_record(""), slices=partition.bounds, prompt_sha256=self.sha256, prompt_tokens=self.tokens
        )

    def record(self, prefill: Prefill, answer: Answer, rank_s: float = 0.0) -> Record:
        """Make the record of an answered prompt; the final one includes the document's earlier prompts."""
        retained = prefill.retained
        own = replace(
            self.begun_record(prefill.partition),
            status="done",
            answer=answer.text,
            reasoning=answer.reasoning,
            token_ids=answer.token_ids,
            **(_asked_for(answer) | self._checked(answer)),
            computed_tokens=self.tokens - prefill.known_tokens,
            text_tokens=self.text[1] - self.text[0],
            dropped_tokens=self.dropped_tokens,
            new_tokens=answer.new_tokens,
            finish_reason=answer.finish_reason,
            strategy=prefill.strategy,
            ttft_s=prefill.seconds,
            wait_s=prefill.wait_s,
            decode_s=answer.seconds,
            decode_steps=answer.all_steps,
            rank_s=rank_s,
            compression="" if retained is None else retained.method,
            retained_tokens=prefill.held_tokens,
            retained_bytes=0 if retained is None else retained.kv_bytes,
            cache="" if prefill.rolling is None else prefill.rolling.name,
        )
        whole = replace(own, **sum_records([own], self.past))
        if self.is_final and whole.coverage < self.min_coverage:
            return self.error_record(too_little(whole.coverage, self.min_coverage))
        return replace(whole, prefill_tokens_per_s=whole.computed_tokens / whole.ttft_s)

    def _checked(self, answer: Answer) -> dict[str, Any]:
        """Compare an answer, and its samples, with the document; return fields of the record."""
        if not self.compared_text or not answer.text:
            return {}
        text = SupportingText(self.compared_text, self.frame_text)
        found = _checked_as_json(text, answer)
        fields = {name: json.dumps(value) for name, value in found.items()}
        if answer.samples:
            samples = [_sample_as_json(one) | _checked_as_json(text, one) for one in answer.samples]
            fields["samples"] = json.dumps(samples)
        return fields


def too_little(coverage: float, least: float) -> str:
    """Explain that the answer would cover too little of the document."""
    return (
        f"the answer would have seen {100 * coverage:.1f} % of the document, but prompt.min_coverage = {least:g} "
        f"requires {100 * least:g} %: set prompt.too_long = 'split', keep more tokens, or lower prompt.min_coverage"
    )


def sum_records(parts: Sequence[Record], past: Mapping[str, Any]) -> dict[str, Any]:
    """Add the `SUMS` and decoding time of a document's prompts to earlier sums."""
    found: dict[str, Any] = {name: past.get(name, 0) + sum(getattr(one, name) for one in parts) for name in SUMS}
    # Parts are decoded in parallel, and the prompt about their answers after them.
    found["decode_s"] = past.get("decode_s", 0.0) + max(one.decode_s for one in parts)
    return found | {"strategy": parts[0].strategy}


def _asked_for(answer: Answer) -> dict[str, Any]:
    """Return the fields for scores, samples and log-probabilities, if the job requests them."""
    found: dict[str, Any] = {}
    if answer.scores:
        found["scores"] = json.dumps([_score_as_json(score) for score in answer.scores])
    if answer.samples:
        found["samples"] = json.dumps([_sample_as_json(sample) for sample in answer.samples])
    if answer.logprobs is not None:
        found |= _numbers(answer.logprobs)
        texts = [one.logprobs.texts for one in answer.samples or (answer,) if one.logprobs is not None]
        found["token_texts"] = json.dumps({str(token): text for some in texts for token, text in some.items()})
    return found


def _numbers(found: TokenLogprobs) -> dict[str, Any]:
    return {"logprobs": found.logprobs, "top_tokens": found.top_tokens, "top_logprobs": found.top_logprobs}


def _sample_as_json(answer: Answer) -> dict[str, Any]:
    plain = {"answer": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
    if answer.reasoning:
        plain["reasoning"] = answer.reasoning
    return plain if answer.logprobs is None else plain | _numbers(answer.logprobs)


def _checked_as_json(text: SupportingText, answer: Answer) -> dict[str, Any]:
    copied, unsupported = text.check(answer.text)
    return {"copied": list(map(asdict, copied)), "unsupported": list(map(asdict, unsupported))}


def _score_as_json(score: Score) -> dict[str, Any]:
    return {
        "text": score.text,
        "logprob": score.logprob,
        "tokens": len(score.token_ids),
        "logprob_per_token": score.logprob / len(score.token_ids),
        "is_greedy": score.is_greedy,
        "token_ids": score.token_ids,
        "token_logprobs": score.logprobs,
    }
