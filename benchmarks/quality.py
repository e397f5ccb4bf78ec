"""What compression costs in quality, beside the full cache's own answers: on one model, with its texts.

Every cell goes the way of a job: the prompt's end is prefilled after a prefix that is computed once, heads keep what
the method chooses, and the rest is run after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvr_mpi.compress.compression import Compression, size_of
from kvr_mpi.compress.repeating import repeat_scores
from kvr_mpi.documents.prompts import PromptText
from kvr_mpi.kv.row import Row
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, compute_prefix, prefill_kvr
from kvr_mpi.prefill.packed import decode_packed, run_row
from kvr_mpi.transport.local import LocalTransport


@dataclass(frozen=True, slots=True)
class Continued:
    """What a cache makes of the tokens that follow its prompt.

    nll : mean negative log-likelihood of those after the first, nats.
    answer : greedy tokens.
    kept : tokens of a KV head, on average.
    """

    nll: float
    answer: tuple[int, ...]
    kept: float


class QualityBench:
    """One prompt, whose beginning is computed once, and what follows it.

    Parameters
    ----------
    loaded : LoadedModel
        Prepared for chains.
    prompt : PromptText
    following : sequence of int
        Tokens that follow, at least two.
    window : int
        The longest that is to observe, at the end of the text or of the prompt.
    answers : int
        Greedy tokens to write.
    """

    def __init__(
        self, loaded: LoadedModel, prompt: PromptText, following: Sequence[int], *, window: int, answers: int = 0
    ) -> None:
        self._loaded, self._prompt, self._following, self._answers = loaded, prompt, following, answers
        self._prefix: SequenceKV = compute_prefix(loaded, prompt.ids[: prompt.text[1] - window])
        self._repeated: torch.Tensor | None = None

    def measure(self, compression: Compression | None) -> Continued:
        """Measure with a method, or (None) with the full cache."""
        prefill, kept = self._prefill(compression)
        device = self._loaded.device
        ids = torch.tensor([self._following], device=device)
        with torch.inference_mode():
            rows = torch.arange(len(self._following) - 1, device=device)
            logits = run_row(self._loaded, Row([prefill.cache], [len(self._following)]), self._following, rows)
            nll = float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
            last, tokens = prefill.logits, list[int]()
            for _ in range(self._answers):
                assert last is not None
                tokens.append(int(last.argmax()))
                last = decode_packed(self._loaded, Row([prefill.cache]), tokens[-1:])[0]
        return Continued(nll, tuple(tokens), kept)

    def _prefill(self, compression: Compression | None) -> tuple[Prefill, float]:
        """Prefill what is left of the prompt, and let heads keep what they keep; also how many tokens that is."""
        prompt, room = self._prompt, max(len(self._following), self._answers)
        options: Any = {"reserve_tokens": room, "prefix": self._prefix}
        if compression is not None:
            options["retain"] = compression.retain(prompt.tokens, prompt.text)
        found = prefill_kvr(self._loaded, prompt.ids, Partition((0, prompt.tokens)), LocalTransport(), **options)
        if compression is not None and compression.settings.rule.repeats:
            scored = compression.repeated_of(prompt.text)
            assert scored is not None, "the budget is below the text"
            if self._repeated is None:  # the same for every budget
                how = compression.instruction, compression.layers
                self._repeated = repeat_scores(found.cache, prompt.ids, scored, *how)
            compression.drop(found.cache, scored, self._repeated)
        if compression is None or not found.cache.ragged:
            return found, float(prompt.tokens)
        return found, size_of(self._loaded, found.cache, str(compression.settings)).tokens
