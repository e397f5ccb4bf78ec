"""Builds the tokenizer that a GGUF file describes, with the same token ids as llama.cpp's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvr_mpi.errors import ModelError
from kvr_mpi.model.metadata import Metadata

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies

# Pre-tokenizers: expressions that split a text one after the other, as in the tokenizer.json of models.
SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{SUFFIXES}|{WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN2 = rf"{SUFFIXES}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN = rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{SYMBOLS}|{SPACES}"
GPT4O = rf"{CASED[0]}{SUFFIXES}?|{CASED[1]}{SUFFIXES}?|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
)
# By tokenizer.ggml.pre, which llama.cpp's converter derives from the ids of a probe text.
SPLITS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0"), (LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "hunyuan"), (QWEN2,)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4"), (GPT2,)),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", GPT2)
    ),
    **dict.fromkeys(("gpt-4o", "llama4"), (GPT4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK3),
    "tekken": (TEKKEN,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
}
# Pre-tokenizers of models whose tokenizers take whole words from the vocabulary before they merge, and of models that
# begin with the first token unless the file says otherwise.
WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken"})
# Of models whose own tokenizers compose characters first; llama.cpp does not, and transformers always does for Qwen 2.
COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})
# Tokens that end an answer in llama.cpp whatever the metadata says.
ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> _<EOT> "
    "<|end_of_text|> <end_of_utterance>".split()
)
# Special tokens of Phi-3 that do not remove the spaces after them.
KEEP_SPACES = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def build_tokenizer(metadata: Metadata) -> Any:
    """Build a tokenizer of transformers; raise `ModelError` if the file describes one that is not known."""
    from transformers import PreTrainedTokenizerFast

    kind = metadata.text("tokenizer.ggml.model")
    metadata.expect("tokenizer.ggml.add_sep_token", False)
    metadata.expect("tokenizer.ggml.remove_extra_whitespaces", False)
    tokens = [text or f"[EMPTY_{idx}]" for idx, text in enumerate(metadata.texts("tokenizer.ggml.tokens"))]
    if len(set(tokens)) != len(tokens):
        twice = next(text for text, count in Counter(tokens).items() if count > 1)
        raise ModelError(f"tokenizer.ggml.tokens contains {twice!r} twice")
    types = [int(each) for each in metadata.numbers("tokenizer.ggml.token_type", len(tokens))]
    named = {name: metadata.token(key) for name, key in SPECIAL.items()}
    if kind == "gpt2":
        built, begins = _byte_level(metadata, tokens)
        for name in ("eos_token", "unk_token", "pad_token"):  # otherwise, some classes add tokens of their own
            named[name] = end_tokens(metadata)[0] if named[name] is None else named[name]
    elif kind == "llama":
        built, begins = _sentencepiece(metadata, tokens, types)
        named["bos_token"] = 1 if named["bos_token"] is None else named["bos_token"]
    else:
        raise ModelError(
            f"tokenizer.ggml.model = {kind!r}, expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece)"
        )
    _add_special(built, metadata, tokens, types)
    _add_ends(built, metadata, tokens, named, begins)
    texts = {name: tokens[token] for name, token in named.items() if token is not None}
    template = metadata.text("tokenizer.chat_template", "")
    return PreTrainedTokenizerFast(
        tokenizer_object=built,
        chat_template=template or None,
        clean_up_tokenization_spaces=False,
        **texts,
    )


def end_tokens(metadata: Metadata) -> list[int]:
    """Return the tokens that end an answer: first the file's own, then those that llama.cpp knows by their text."""
    ends = [metadata.token(name) for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")]
    texts = metadata.texts("tokenizer.ggml.tokens")
    ends += [token for token, text in enumerate(texts) if text in ENDS]
    if {"<|return|>", "<|call|>"} <= set(texts):  # in this format, <|end|> only ends a part of an answer
        ends = [token for token in ends if token is None or texts[token] != "<|end|>"]
    found = list(dict.fromkeys(token for token in ends if token is not None))
    if not found:
        raise ModelError("the metadata has no key tokenizer.ggml.eos_token_id: no answer would ever end")
    return found


SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _byte_level(metadata: Metadata, tokens: Sequence[str]) -> tuple[Any, bool]:
    """Build a byte-level BPE tokenizer; return it and whether texts begin with the first token by default."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.text("tokenizer.ggml.pre", "")
    if name not in SPLITS:
        raise ModelError(
            f"tokenizer.ggml.pre = {name!r}; expected one of {', '.join(sorted(SPLITS))}, for which token ids are "
            f"tested against llama.cpp: use the model's folder of safetensors instead"
        )
    metadata.expect("tokenizer.ggml.add_space_prefix", False)
    metadata.ignore("tokenizer.ggml.scores")  # used by SentencePiece only
    pairs = [merge.split(" ") for merge in metadata.texts("tokenizer.ggml.merges")]
    vocab = {text: idx for idx, text in enumerate(tokens)}
    if wrong := next((pair for pair in pairs if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys()), None):
        raise ModelError(f"tokenizer.ggml.merges contains {' '.join(wrong)!r}, which does not merge two tokens to one")
    built = Tokenizer(models.BPE(vocab, [(pair[0], pair[1]) for pair in pairs], ignore_merges=name in WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[name]]
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if name in COMPOSED:
        built.normalizer = normalizers.NFC()
    built.decoder = decoders.ByteLevel()
    return built, name in WHOLE_WORDS


def _sentencepiece(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> tuple[Any, bool]:
    """Build a SentencePiece tokenizer, whose merges follow from the scores of the tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    metadata.ignore("tokenizer.ggml.pre")  # llama.cpp reads it for byte-level tokenizers only
    metadata.ignore("tokenizer.ggml.merges")
    scores = metadata.numbers("tokenizer.ggml.scores", len(tokens))
    vocab = {text: idx for idx, text in enumerate(tokens)}
    bytes_missing = next((text for text in map("<0x{:02X}>".format, range(256)) if text not in vocab), None)
    if bytes_missing is not None:
        raise ModelError(f"tokenizer.ggml.tokens has no token {bytes_missing}: not every text could be read")
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    built = Tokenizer(models.BPE(vocab, _merges(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend(SPACE)] if prefixed else []
    built.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    built.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return built, True


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a third, the best score first."""
    known = set(tokens)
    found = [
        (-score, idx, cut, (text[:cut], text[cut:]))
        for idx, (text, score) in enumerate(zip(tokens, scores, strict=True))
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
    return [pair for *_, pair in sorted(found)]


def _add_special(built: Any, metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Declare the tokens that stand for themselves in a text: control tokens, and those defined by users."""
    from tokenizers import AddedToken

    name = metadata.text("general.name", "").lower()
    strips = "phi-3" in name or "phi3" in name  # llama.cpp knows them by their name only, too
    special, plain = [], []
    for text, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, UNKNOWN) or text in ENDS:
            rstrip = strips and text not in KEEP_SPACES
            special.append(AddedToken(text, normalized=False, special=True, rstrip=rstrip))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(text, normalized=False, special=False, rstrip=strips))
    built.add_special_tokens(special)
    built.add_tokens(plain)
    if built.get_vocab_size() != len(tokens):
        raise ModelError("tokenizer.ggml.tokens: some control tokens are not in the vocabulary")


def _add_ends(
    built: Any, metadata: Metadata, tokens: Sequence[str], named: Mapping[str, int | None], begins: bool
) -> None:
    """Let the tokenizer add the first and last token where the file says so."""
    from tokenizers import processors

    wanted = {
        "bos_token": metadata.flag("tokenizer.ggml.add_bos_token", begins),
        "eos_token": metadata.flag("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: named[name] for name, adds in wanted.items() if adds}
    if absent := [name for name, token in ids.items() if token is None]:
        raise ModelError(f"tokenizer.ggml.add_{absent[0]} is true, but the file names no such token")
    before = [tokens[ids["bos_token"]]] if "bos_token" in ids else []  # type: ignore[index]
    after = [tokens[ids["eos_token"]]] if "eos_token" in ids else []  # type: ignore[index]
    built.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=[(tokens[token], token) for token in ids.values()],  # type: ignore[index]
    )
