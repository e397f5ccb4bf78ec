"""What a job reads of its prompts instead of writing answers: embeddings, or the log-probabilities of documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvr_mpi.documents.prompts import PromptText
from kvr_mpi.errors import ConfigError
from kvr_mpi.job import JobSpec
from kvr_mpi.model.pooling_files import read_pooling
from kvr_mpi.prefill.reading import Pooling, Reading

LEAST_NORM = 1e-12  # of an embedding that is scaled to length 1


@dataclass(frozen=True, slots=True)
class Readout:
    """What a job reads of every prompt, and what it stores of that.

    pooling : of an embedding, over all tokens of the prompt; None: log-probabilities of the document's tokens.
    dimensions : the embedding is truncated to so many values (Matryoshka).
    normalizes : the embedding is scaled to length 1; also if it is truncated.
    instruction : text before every document, tokenized together with it.
    stretch_tokens : log-probabilities are summed over stretches of this many tokens of the document; 1: not summed.
    logits_bytes : of `Reading`.
    """

    pooling: Pooling | None
    dimensions: int = 0
    normalizes: bool = False
    instruction: str | None = None
    stretch_tokens: int = 1
    logits_bytes: int | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What embeddings depend on, as the settings and the model's folder say."""
        return {
            "pooling": self.pooling,
            "dimensions": self.dimensions,
            "normalizes": self.normalizes,
            "instruction": self.instruction,
        }

    def reading_of(self, prompt: PromptText) -> Reading:
        """Return what is read of a prompt."""
        return Reading(self.pooling) if self.pooling is not None else Reading(None, prompt.text, self.logits_bytes)

    def fields(self, prompt: PromptText, values: torch.Tensor) -> dict[str, Any] | None:
        """Return the fields of a prompt's record, given what was read (`Reading.join`); None if it is not finite."""
        found = values.numpy()
        if not (np.isfinite(found) if self.pooling is not None else ~np.isnan(found) & (found < np.inf)).all():
            return None
        if self.pooling is not None:
            kept = found[: self.dimensions]
            if self.normalizes or len(kept) < len(found):
                kept = kept / max(float(np.linalg.norm(kept)), LEAST_NORM)
            return {"embedding": _short(kept)}
        start, stop = prompt.text
        first = stop - len(found) - start  # the first token of a prompt has no log-probability
        edges = range(0, stop - start, self.stretch_tokens)
        sums = np.add.reduceat(np.concatenate([np.zeros(first), found]), edges)
        if self.stretch_tokens == 1:
            sums = found
        return {"text_logprob": float(found.sum()), "scored_tokens": len(found), "text_logprobs": _short(sums)}


def _short(values: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """Round to float32, and to the shortest decimal numbers that stand for these."""
    return tuple(float(str(value)) for value in values.astype(np.float32))


def readout_of(spec: JobSpec, hidden_size: int) -> Readout | None:
    """Return what a job reads of its prompts, as its settings and its model's folder say; None if it writes answers.

    hidden_size : of the model's final hidden states.

    Raises `ConfigError` if embeddings are shorter than `output.dimensions`, and `ModelError` if the model's folder does
    not say how it makes embeddings.
    """
    wanted, dimensions = spec.output.embedding, spec.output.dimensions or hidden_size
    if wanted is None:
        return Readout(None, stretch_tokens=int(spec.output.text_logprobs)) if spec.output.text_logprobs else None
    if dimensions > hidden_size:
        raise ConfigError(f"output.dimensions = {dimensions}: embeddings of this model have {hidden_size} dimensions")
    normalizes = spec.output.dimensions == hidden_size  # shorter ones are normalized anyway
    if wanted in ("last", "mean"):
        return Readout(wanted, dimensions, normalizes)
    own = read_pooling(spec.model.path)
    return Readout(own.pooling, dimensions, own.normalizes or normalizes, own.prompts[wanted])
