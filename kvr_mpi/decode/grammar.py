"""Answers that follow a JSON schema: each step allows only tokens that continue a valid answer.

llguidance (https://github.com/guidance-ai/llguidance) compiles the schema to a grammar, and computes a mask over the
vocabulary in each step. The mask is the first logits processor, so that temperature, top-k and others act on the
allowed tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from kvr_mpi.documents.json_schema import MISSING, grammar_of
from kvr_mpi.errors import ConfigError, DocumentError


class Grammars:
    """Compiles grammars for one model's tokenizer.

    tokenizer : of transformers.
    ends : tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int]) -> None:
        self._tokenizer, self._ends = tokenizer, sorted(ends)
        self._tokens: dict[int | None, Any] = {}  # by the number of logits

    def matcher(self, schema: str, vocab_size: int | None = None) -> Any:
        """Make the matcher of one answer; the number of logits defaults to the size of the tokenizer's vocabulary.

        Raises `ConfigError` if llguidance is missing, or does not support this schema or tokenizer.
        """
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConfigError(MISSING) from error
        if not self._ends:
            raise ConfigError(
                "the model has no end-of-text token, so answers that follow a JSON schema would never end"
            )
        try:
            if vocab_size not in self._tokens:  # converting the tokenizer takes about a second
                self._tokens[vocab_size] = from_tokenizer(self._tokenizer, n_vocab=vocab_size, eos_token=self._ends)
            found = LLMatcher(self._tokens[vocab_size], grammar_of(schema))
        except ValueError as error:
            raise ConfigError(f"answers that follow a JSON schema are not possible here: {error}") from error
        if found.is_error():
            raise ConfigError(f"the JSON schema cannot be followed with this tokenizer: {found.get_error()}")
        return found


class SchemaProcessor:
    """Logits processor for one answer that masks tokens the schema does not allow.

    prompt_tokens : length of the prompt, to which the schema does not apply.
    """

    def __init__(self, grammars: Grammars, schema: str, prompt_tokens: int) -> None:
        self._grammars, self._schema, self._seen = grammars, schema, prompt_tokens
        self._matcher: Any = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Mask scores (1, vocab_size) of tokens that cannot follow the tokens (1, tokens) so far.

        Raises `DocumentError` if llguidance cannot compute the mask, so that the answer cannot continue.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        if self._matcher is None:
            self._matcher = self._grammars.matcher(self._schema, scores.shape[1])
        for token in input_ids[0, self._seen :].tolist():
            self._matcher.consume_token(token)
        self._seen = input_ids.shape[1]
        mask = allocate_token_bitmask(1, scores.shape[1])
        fill_next_token_bitmask(self._matcher, mask, 0)
        if self._matcher.is_error():
            raise DocumentError(f"its answer could not follow the JSON schema to the end: {self._matcher.get_error()}")
        allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: scores.shape[1]]
        return scores.masked_fill(torch.from_numpy(allowed == 0).to(scores.device), -torch.inf)
