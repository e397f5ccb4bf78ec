"""Loads a tokenizer, and compares it with its ``tokenizer.json``, or with SentencePiece if there is none.

transformers has classes for the tokenizers of many models. They take the vocabulary from the file, and ignore the rest
of it, such as how texts are divided into words, which is only right if model and class agree. From a SentencePiece
model, transformers takes merges in the order of ids, although SentencePiece merges by score: spaces in a row differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Lines whose ids depend on the normalizer and the pre-tokenizer. The first word is one token, with a space or without.
PROBE = """a 1 12 123 1234567 3.14 1,000 2024-01-31 x86 v2.0
don't we'll I'D O'Neil 'quoted' "it's" l'eau
 one  two   three    four\ttab\t\ttabs  trailing \n\n\n\nlines\r\n  indented\n\tcode(x, y_z) += {a: [b]};
HelloWorld camelCase SNAKE_CASE http://a.b/c?d=e&f#g a@b.org $5 50% #1 --- ... !?!
Größe naïve cafe\u0301 Ångström \u212b ﬁne ① Ⅳ ½ ²
北京大学 2024年 東京タワー カタカナ ひらがな 한국어 हिन्दी العربية שלום ไทย Привет
😀👩\u200d👩\u200d👧 \u00a0nbsp\u3000wide\u200bzero"""
# Settings of tokenizer_config.json that say whether a space is put before a text.
ABOUT_SPACES = ("add_prefix_space", "legacy")
ONLY_TEKKEN = (
    "its tokenizer is only tekken.json, which has no chat template; expected tokenizer.json and chat_template.jinja "
    "beside it, as in the model's conversions to transformers' format"
)
# Classes that are what the file says.
OF_FILE = ("TokenizersBackend", "PreTrainedTokenizerFast")


def load_tokenizer(location: str, *, is_converted: bool = False, **options: Any) -> Any:
    """Load a model's tokenizer; `options` are those of transformers' ``from_pretrained``.

    is_converted : the files are made from a GGUF file, and are used as they are.

    Raises `ModelError` if it is not the tokenizer of ``tokenizer.json`` or ``tokenizer.model``, and no setting in
    tokenizer_config.json explains that.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import is_protobuf_available, is_sentencepiece_available

    if is_converted:
        return PreTrainedTokenizerFast.from_pretrained(location, **options)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, **options)
    except (ImportError, ValueError) as error:
        if _file(location, "tekken.json") is not None:
            raise ModelError(ONLY_TEKKEN) from error
        if _sentencepiece_file(location) is not None and not (is_sentencepiece_available() and is_protobuf_available()):
            raise ModelError("tokenizer.model needs SentencePiece: `pip install sentencepiece protobuf`") from error
        raise
    file, config = _file(location, "tokenizer.json"), _file(location, "tokenizer_config.json")
    if type(tokenizer).__name__ == "MistralCommonBackend":  # transformers prefers it where mistral-common is installed
        if file is None:
            raise ModelError(ONLY_TEKKEN)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(location, **options)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    said = {} if config is None else json.loads(config.read_text(encoding="utf-8"))
    may_differ_in_space = any(said.get(name) is not None for name in ABOUT_SPACES)
    if file is None and backend is not None and (pieces := _sentencepiece_file(location)) is not None:
        _check_pieces(tokenizer, pieces)
    if backend is None or file is None or _has_parts_of(backend, file):
        return tokenizer
    truth = Tokenizer.from_file(str(file))
    truth.no_truncation()
    truth.no_padding()
    why = _difference(
        tokenizer,
        lambda text: list(truth.encode(text, add_special_tokens=False).ids),
        truth.decode,
        PROBE,
        may_differ_in_space=may_differ_in_space,
    )
    if why is None or said.get("fix_mistral_regex"):
        return tokenizer
    if said.get("tokenizer_class") in OF_FILE:
        return PreTrainedTokenizerFast.from_pretrained(location, **options)
    raise ModelError(
        f"tokenizer.json is not the tokenizer that transformers makes of it ({type(tokenizer).__name__}): {why}. To "
        f'use the file, set "tokenizer_class": "{OF_FILE[0]}" in tokenizer_config.json; if the class is right, remove '
        f"tokenizer.json"
    )


def _file(location: str, name: str) -> Path | None:
    """Return a file of a model's folder, or of its copy of the hub."""
    from transformers.utils import cached_file

    found = cached_file(location, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _sentencepiece_file(location: str) -> Path | None:
    """Return a model's SentencePiece file; other tokenizers also have files of this name, as text."""
    file = _file(location, "tokenizer.model")
    if file is None:
        return None
    with file.open("rb") as stream:
        return file if stream.read(1) == b"\n" else None


def _check_pieces(tokenizer: Any, file: Path) -> None:
    """Order a tokenizer's merges as SentencePiece does; raise `ModelError` if other ids remain.

    Only texts that begin with spaces may differ: transformers' classes put no further space before them.
    """
    from sentencepiece import SentencePieceProcessor
    from transformers.convert_slow_tokenizer import generate_merges

    truth = SentencePieceProcessor(model_file=str(file))
    backend = tokenizer.backend_tokenizer
    tables = json.loads(backend.to_str())
    if tables["model"]["type"] == "BPE":
        pieces = [truth.id_to_piece(number) for number in range(len(truth))]
        scores = {piece: truth.get_score(number) for number, piece in enumerate(pieces)}
        vocab = {piece: number for number, piece in enumerate(pieces)}
        tables["model"]["merges"] = [list(merge) for merge in generate_merges(vocab, scores)]
        backend.model = type(backend).from_str(json.dumps(tables)).model
    why = _difference(tokenizer, lambda text: list(truth.encode(text)), truth.decode, re.sub(r"\n +", "\n", PROBE))
    if why is not None:
        raise ModelError(
            f"tokenizer.model is not the tokenizer that transformers makes of it ({type(tokenizer).__name__}): {why}. "
            f"Copy the tokenizer.json of the same model into the folder, or make it with an earlier version: "
            f"`pip install 'transformers<5'`, then AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )


def _has_parts_of(backend: Tokenizer, file: Path) -> bool:
    """Whether a tokenizer has the normalizer, pre-tokenizer, decoder and options of a file, which is fast to see."""
    from tokenizers import Tokenizer

    parts = json.loads(file.read_text(encoding="utf-8"))
    shown = {name: parts.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    truth = Tokenizer.from_str(json.dumps({**empty, **shown}))  # as this version of tokenizers writes them
    if any(_plain(getattr(backend, name)) != _plain(getattr(truth, name)) for name in shown):
        return False
    options = {name: value for name, value in parts.get("model", {}).items() if hasattr(backend.model, name)}
    return all((getattr(backend.model, name) or None) == (value or None) for name, value in options.items())


def _plain(part: Any) -> Any:
    """Return a part as plain values, without those that change neither ids nor texts."""

    def relevant(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(relevant, value))
        if not isinstance(value, dict):
            return value
        ignored = {"trim_offsets"}
        if value.get("type") == "ByteLevel" and "decoders" in type(part).__module__:
            ignored |= value.keys() - {"type"}
        return {name: relevant(each) for name, each in value.items() if name not in ignored}

    return None if part is None else relevant(json.loads(part.__getstate__()))


def _difference(
    tokenizer: Any,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    probe: str,
    *,
    may_differ_in_space: bool = False,
) -> str | None:
    """Describe a difference between a tokenizer and the functions of a file; None if there is none."""
    for text in (*probe.splitlines(keepends=True), probe):
        ours = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        theirs = encode(text)
        same = ours == theirs or (may_differ_in_space and _differ_in_space(ours, theirs))
        if not same:
            return f"{text[:20]!r}... is {ours[:12]}..., and {theirs[:12]}... by the file"
        texts = [one(ours).lstrip(" " * may_differ_in_space) for one in (tokenizer.backend_tokenizer.decode, decode)]
        if texts[0] != texts[1]:
            return f"{ours[:12]}... is {texts[0][:20]!r}..., and {texts[1][:20]!r}... by the file"
    return None


def _differ_in_space(one: list[int], other: list[int]) -> bool:
    """Whether only the first word differs, as it does if a space is put before it."""
    rest = min(len(one), len(other)) - 1
    return abs(len(one) - len(other)) <= 1 and one[len(one) - rest :] == other[len(other) - rest :]
