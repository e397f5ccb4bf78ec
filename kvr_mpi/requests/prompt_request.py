"""One prompt of a document, complete: any rank of a chain can prefill it, answer it and store the result.

The leader of a chain makes prompts and sends them to the other ranks, which hold no corpus. What became of a prompt
that is only a part of its document goes back to the leader as a `PromptOutcome`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from kvr_mpi.decode.logprobs import TokenLogprobs
from kvr_mpi.decode.sampling import Answer
from kvr_mpi.decode.scoring import Score
from kvr_mpi.documents.document import AS_THE_JOB, OwnGeneration
from kvr_mpi.documents.prompts import Prompt
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.store.outputs import Record
from kvr_mpi.stored.prompt import StoredPrefix


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """What became of one prompt."""

    error: str = ""
    text: str = ""
    tokens: int = 0
    computed: int = 0  # of them
    new_tokens: int = 0
    prefill_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0
    strategy: str = ""
    compression: str = ""  # by which keys and values were dropped before decoding
    retained_tokens: float = 0.0  # of a KV head, on average
    retained_bytes: int = 0
    cache: str = ""  # what a rolling one held


@dataclass(frozen=True, slots=True, eq=False)
class PromptRequest:
    """One prompt and all that its answer and its record depend on.

    key : unique among the prompts of a chain.
    document_id : the document's, unique among those of a job.
    prompt : token ids, and where the document's text is among them.
    new_tokens : most tokens of the answer.
    generation : the document's own settings, over those of the job.
    seed : of the random numbers that choose the answer.
    about : fields of the document's record that are known before the prompt runs.
    document_work, work : the document's work in the job's unit, and this prompt's part of it.
    part : number of this prompt among those of the document.
    is_final : its answer is the document's.
    past : outcomes of the document's earlier prompts, without their texts.
    shared_tokens : first tokens that other prompts about the same document begin with, too.
    stored : where the keys and values of its first tokens are stored, if they are.
    """

    key: str
    document_id: str
    prompt: Prompt
    new_tokens: int
    generation: OwnGeneration = AS_THE_JOB
    seed: int = 0
    about: Mapping[str, str] | None = None
    document_work: int = 0
    work: int = 0
    part: int = 0
    is_final: bool = True
    past: tuple[PromptOutcome, ...] = ()
    shared_tokens: int = 0
    stored: StoredPrefix | None = None

    def to_wire(self) -> tuple[dict[str, Any], bytes]:
        """Return plain values for JSON, and the token ids as little-endian 32-bit integers."""
        plain = {
            name: getattr(self, name)
            for name in ("key", "document_id", "new_tokens", "seed", "document_work", "work", "part", "is_final")
        }
        plain |= {
            "dropped_tokens": self.prompt.dropped_tokens,
            "text": self.prompt.text,
            "shared_tokens": self.shared_tokens,
            "generation": asdict(self.generation),
            "about": dict(self.about or {}),
            "past": [asdict(one) for one in self.past],
            "stored": None if self.stored is None else asdict(self.stored),
        }
        return plain, np.asarray(self.prompt.ids, "<i4").tobytes()

    @classmethod
    def from_wire(cls, plain: Mapping[str, Any], ids: bytes) -> PromptRequest:
        """Make the request of what `to_wire` returned."""
        fields = dict(plain)
        start, stop = fields.pop("text")
        prompt = Prompt(tuple(np.frombuffer(ids, "<i4").tolist()), fields.pop("dropped_tokens"), (start, stop))
        given: dict[str, Any] = fields["generation"]
        tuples: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in given.items()}
        fields["generation"] = OwnGeneration(**tuples)
        fields["past"] = tuple(PromptOutcome(**one) for one in fields["past"])
        fields["stored"] = None if fields["stored"] is None else StoredPrefix(**fields["stored"])
        return cls(prompt=prompt, **fields)

    def outcome(self, prefill: Prefill, answer: Answer) -> PromptOutcome:
        """Sum up this prompt's answer."""
        tokens, retained = self.prompt.tokens, prefill.retained
        return PromptOutcome(
            text=answer.text,
            tokens=tokens,
            computed=tokens - prefill.known_tokens,
            new_tokens=answer.new_tokens,
            prefill_s=prefill.seconds,
            wait_s=prefill.wait_s,
            decode_s=answer.seconds,
            strategy=prefill.strategy,
            compression="" if retained is None else retained.method,
            retained_tokens=0.0 if retained is None else retained.tokens,
            retained_bytes=0 if retained is None else retained.kv_bytes,
            cache=prefill.rolling,
        )

    def error_record(self, reason: str) -> Record:
        """Make the record of a document that failed."""
        about: dict[str, Any] = dict(self.about or {})
        return Record(self.document_id, "error", error=reason, **about)

    def begun_record(self, partition: Partition) -> Record:
        """Make the record of a document whose final prompt is being prefilled."""
        return replace(
            self.error_record(""),
            slices=partition.bounds,
            prompt_sha256=self.prompt.sha256,
            prompt_tokens=self.prompt.tokens,
        )

    def record(self, prefill: Prefill, answer: Answer) -> Record:
        """Make the record of an answered document, after its final prompt."""
        outcomes = [*self.past, self.outcome(prefill, answer)]
        computed = sum(outcome.computed for outcome in outcomes)
        seconds = sum(outcome.prefill_s for outcome in outcomes)
        return replace(
            self.error_record(""),
            status="done",
            answer=answer.text,
            token_ids=answer.token_ids,
            **_asked_for(answer),
            slices=prefill.partition.bounds,
            prompt_sha256=self.prompt.sha256,
            prompt_tokens=sum(outcome.tokens for outcome in outcomes),
            computed_tokens=computed,
            dropped_tokens=self.prompt.dropped_tokens,
            new_tokens=sum(outcome.new_tokens for outcome in outcomes),
            finish_reason=answer.finish_reason,
            strategy="+".join(dict.fromkeys(outcome.strategy for outcome in outcomes)),
            ttft_s=seconds,
            prefill_tokens_per_s=computed / seconds,
            wait_s=sum(outcome.wait_s for outcome in outcomes),
            decode_s=sum(outcome.decode_s for outcome in outcomes),
            parts=len(outcomes),
            compression=outcomes[-1].compression,
            retained_tokens=sum(outcome.retained_tokens for outcome in outcomes),
            retained_bytes=sum(outcome.retained_bytes for outcome in outcomes),
            cache=outcomes[-1].cache,
        )


def _asked_for(answer: Answer) -> dict[str, Any]:
    """Return the record's fields with scores, samples and log-probabilities, where a job asked for them."""
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
    return plain if answer.logprobs is None else plain | _numbers(answer.logprobs)


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
