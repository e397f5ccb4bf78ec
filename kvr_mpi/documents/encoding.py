"""Pieces of a prompt to token ids: the words of templates, and the texts of documents, which have no control tokens.

Each piece is tokenized separately. SentencePiece tokenizers add a space before every text, so a piece is tokenized by
its place in the prompt (`PiecePlace`): no piece gets a space that the whole text would not get there. Where a token of
the whole text would span two pieces (such as a space and the next word), the ids are others, for the same text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from tokenizers import Tokenizer

# Where a piece begins: at the start of the prompt; after an added token, since tokenizers process the text between two
# added tokens by itself; or in the middle of such a text. Tokenizers add a space at the start, or also after a token.
PiecePlace = Literal["start", "after", "middle"]
HTML = "b blockquote caption code em h1 h2 h3 h4 h5 h6 i s strong sub sup table tbody td tfoot th thead tr u"
# Added tokens that are not special and part of ordinary text: whitespace, single characters, words, and HTML tags.
ORDINARY = re.compile(rf"[\s▁]+|.|\w+|</?(?:{HTML.replace(' ', '|')})>", re.DOTALL)
# A slow tokenizer gets one of these before a piece from the middle of a text: the first that does not merge with it.
BEFORE = ("\n", "|", "a", "0")


def encode_text(tokenizer: Any, text: str, place: PiecePlace = "start") -> list[int]:
    """Return the token ids of a document's text; control tokens in it are plain text."""
    return encoder_of(tokenizer).text(text, place)


def encode_words(tokenizer: Any, text: str, place: PiecePlace = "start") -> list[int]:
    """Return the token ids of words of a template, in which control tokens are recognised."""
    return encoder_of(tokenizer).words(text, place)


@functools.lru_cache(maxsize=4)
def encoder_of(tokenizer: Any) -> Encoder:
    """Return the encoder of a tokenizer."""
    return Encoder(tokenizer)


class Encoder:
    """Encodes pieces of prompts with one tokenizer.

    control : the names of control tokens, which are never recognised in a document's text: special tokens, and all
        other added tokens that are not `ORDINARY`.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = dict(tokenizer.added_tokens_decoder)
        special = {*map(str, tokenizer.all_special_tokens)}
        names = {id: str(token.content) for id, token in added.items()}
        ordinary = {
            id: token
            for id, token in added.items()
            if not token.special and names[id] not in special and ORDINARY.fullmatch(names[id])
        }
        self._tokenizer, unknown = tokenizer, {tokenizer.unk_token_id}
        self._added = added.keys() - unknown
        self._control_ids = ({*added, *tokenizer.all_special_ids} - ordinary.keys()) - unknown
        self.control = tuple(
            sorted(special | {names[id] for id in added.keys() - ordinary.keys()}, key=len, reverse=True)
        )
        backend = getattr(tokenizer, "backend_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
        self._plain = {} if backend is None else _plain_tokenizers(backend, ordinary.values())
        known = next(iter(self._plain.values()), None)
        ids = {} if known is None else {known.token_to_id(names[id]): id for id in ordinary}
        self._ordinary_ids = {here: id for here, id in ids.items() if here != id}

    def text(self, text: str, place: PiecePlace = "start") -> list[int]:
        """Return the ids of a text without control tokens."""
        return self.texts([text], place)[0]

    def texts(self, texts: Sequence[str], place: PiecePlace = "start") -> list[list[int]]:
        """Return the ids of several texts, each at this place; fast tokenizers process them in parallel."""
        return [
            ids if self._control_ids.isdisjoint(ids) else self._without_control(text, place)
            for text, ids in zip(texts, self._encode_plain(texts, place), strict=True)
        ]

    def words(self, text: str, place: PiecePlace = "start") -> list[int]:
        """Return the ids of words that may have control tokens."""
        if not text:
            return []
        if not self._plain:
            return self._alone(text, place)
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = list(found["input_ids"]), found["offset_mapping"]
        if place == "start":
            return ids
        # From its first added token on, it is tokenized as in the whole prompt.
        before = sum(1 for _ in takewhile(lambda id: id not in self._added, ids))
        end = offsets[before][0] if before < len(ids) else len(text)
        return [*self._encode_plain([text[:end]], place)[0], *ids[before:]]

    def place_after(self, ids: Sequence[int], place: PiecePlace) -> PiecePlace:
        """Return the place of what follows a piece with these ids, which is itself at `place`."""
        return place if not ids else "after" if ids[-1] in self._added else "middle"

    def _without_control(self, text: str, place: PiecePlace) -> list[int]:
        """Split the names of control tokens, which some vocabularies also contain as ordinary pieces."""
        pieces = re.split("(" + "|".join(map(re.escape, self.control)) + ")", text)
        halves = [half for piece in pieces for half in ((piece[:1], piece[1:]) if piece in self.control else (piece,))]
        ids: list[int] = []
        for half in filter(None, halves):
            ids += self._encode_plain([half], place)[0]
            place = "middle"
        return ids

    def _encode_plain(self, texts: Sequence[str], place: PiecePlace) -> list[list[int]]:
        if not self._plain:
            return [self._alone(text, place, split_special_tokens=True) for text in texts]
        known = [list(one.ids) for one in self._plain[place].encode_batch_fast(list(texts), add_special_tokens=False)]
        return [[self._ordinary_ids.get(id, id) for id in ids] for ids in known] if self._ordinary_ids else known

    def _alone(self, text: str, place: PiecePlace, **options: Any) -> list[int]:
        """Encode with a slow tokenizer, in the middle of a text after another text, whose ids are left out."""

        def encode(text: str) -> list[int]:
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False, **options)["input_ids"])

        for before in () if place == "start" or not text else BEFORE:
            known, both = encode(before), encode(before + text)
            if known and both[: len(known)] == known:
                return both[len(known) :]
        return encode(text) if text else []


def _plain_tokenizers(backend: Tokenizer, ordinary: Iterable[Any]) -> dict[PiecePlace, Tokenizer]:
    """Return tokenizers for each place, with the same model, and without added tokens that are not ordinary text."""
    found: dict[PiecePlace, Tokenizer] = {}
    places: tuple[PiecePlace, ...] = ("start", "after", "middle")
    for place in places:
        normalizer, pre_tokenizer = (
            None if one is None else _at(json.loads(one.__getstate__()), place)
            for one in (backend.normalizer, backend.pre_tokenizer)
        )
        model = {"type": "BPE", "vocab": {}, "merges": []}
        parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model}
        made = Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **parts}))
        plain = Tokenizer(backend.model)
        if normalizer is not None:
            plain.normalizer = made.normalizer
        if pre_tokenizer is not None:
            plain.pre_tokenizer = made.pre_tokenizer
        plain.add_tokens(list(ordinary))
        found[place] = plain
    return found


def _at(part: Mapping[str, Any], place: PiecePlace) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer, as its JSON, for a piece at a place: without spaces added elsewhere."""
    for several in ("normalizers", "pretokenizers"):
        if several in part:
            return {**part, several: [made for one in part[several] if (made := _at(one, place)) is not None]}
    if place == "middle" and part.get("type") == "Prepend":
        return None
    if place == "middle" and "add_prefix_space" in part:
        return {**part, "add_prefix_space": False}
    if "prepend_scheme" in part and (place == "middle" or (place == "after" and part["prepend_scheme"] == "first")):
        return {**part, "prepend_scheme": "never"}
    return dict(part)
