"""Sources of documents; they also make the documents' prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from kvr_mpi.documents import Asked, Corpus, Document
from kvr_mpi.documents.conversations import encode_conversation
from kvr_mpi.documents.prompts import PromptText, encode_text, fit_prompt
from kvr_mpi.documents.questions import parse_answer_id
from kvr_mpi.errors import DocumentError
from kvr_mpi.requests.prompt import too_little
from kvr_mpi.requests.split import PromptConfig, Split
from kvr_mpi.stored.prompt import StoredPrefix

FindPrefix = Callable[[Sequence[int]], StoredPrefix | None]


class Source(Protocol):
    """Documents by number; only the leaders of chains read them."""

    corpus: Corpus

    def read(self, number: int) -> Document:
        """Read a document; if that fails, the result contains the error."""

    def request(self, document: Document, work: int) -> Split:
        """Make a document's prompts.

        Raises
        ------
        DocumentError
            If no prompt can be made, for example because the document is empty or too long.
        """


class TextSource:
    """A corpus of texts.

    Parameters
    ----------
    corpus : Corpus
    prompt_config : PromptConfig
        Settings for prompts.
    find_prefix : callable, optional
        Finds the stored prefix of a prompt.
    prompts : mapping
        Templates by name, if there are several prompts about each document.
    """

    def __init__(
        self,
        corpus: Corpus,
        prompt_config: PromptConfig,
        find_prefix: FindPrefix = lambda ids: None,
        prompts: Mapping[str, str] | None = None,
    ) -> None:
        self.corpus, self._config, self._find_prefix, self._prompts = corpus, prompt_config, find_prefix, prompts or {}

    def read(self, number: int) -> Document:
        """Read a document's text, and select its prompt if there are several."""
        document = self.corpus.read(number)
        if not self._prompts:
            return document
        about, name = parse_answer_id(document.id)
        sha256 = hashlib.sha256(document.text.encode()).hexdigest()
        return replace(document, asked=Asked(about, self._prompts[name], sha256))

    def request(self, document: Document, work: int) -> Split:
        """Put the template around a text; cut a text that is too long, or split it into several prompts."""
        if document.error is not None:
            raise DocumentError(document.error)
        config = self._config.of(document)
        request = Split(document, config, work)
        if document.messages:
            request.texts = [_conversation(config, document)]
            request.stored = self._find_prefix(request.texts[0].ids)
            return request
        ids = encode_text(config.tokenizer, document.text)
        if not ids:
            raise DocumentError(
                f"{document.id} has no tokens: the tokenizer of this model drops all of its {document.chars} characters"
            )
        wanted = config.prompt
        if wanted.too_long == "split" and len(ids) > config.frame.text_budget:
            request.split_text(ids, config.frame)
        else:
            prompt = fit_prompt(config.frame, ids, kept=wanted.kept)
            if (coverage := 1 - prompt.dropped_tokens / len(ids)) < wanted.min_coverage:
                raise DocumentError(too_little(coverage, wanted.min_coverage))
            request.texts, request.stored = [prompt], self._find_prefix(prompt.ids)
            request.shared_tokens = config.shared_tokens(document, prompt)
        return request


def _conversation(config: PromptConfig, document: Document) -> PromptText:
    """Make the prompt of a conversation; conversations are never cut."""
    ids, most = encode_conversation(config.tokenizer, document.messages), config.frame.max_tokens
    if len(ids) > most:
        raise DocumentError(
            f"too long: the conversation has {len(ids)} tokens; at most {most} fit with an answer of "
            f"{config.max_new_tokens}"
        )
    return PromptText(tuple(ids), text=(0, len(ids)))
