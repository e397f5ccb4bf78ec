"""The metadata keys of a GGUF file: each is read with its type, or known to have no effect, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvr_mpi.errors import ModelError

# llama.cpp reads keys of a model only below these, `general.architecture` and the name of the architecture. Others
# describe how a file was made.
NAMESPACES = "tokenizer.", "split."
# Keys that affect nothing that is computed here, or repeat what others say; llama.cpp's list is src/llama-arch.cpp.
IGNORED = frozenset(
    {
        "split.no",
        "split.count",
        "split.tensors.count",
        "tokenizer.ggml.fim_pre_token_id",
        "tokenizer.ggml.fim_suf_token_id",
        "tokenizer.ggml.fim_mid_token_id",
        "tokenizer.ggml.prefix_token_id",
        "tokenizer.ggml.suffix_token_id",
        "tokenizer.ggml.middle_token_id",
        "tokenizer.ggml.seperator_token_id",
        "tokenizer.ggml.mask_token_id",
        "tokenizer.ggml.cls_token_id",
        "tokenizer.huggingface.json",
        "tokenizer.chat_templates",
    }
)
# Named templates beside the default one, for tools or retrieval.
IGNORED_PREFIX = "tokenizer.chat_template."
REQUIRED: Any = object()


class Metadata:
    """Metadata of which it is known which keys have been read.

    prefix : precedes each key that is asked for.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "", used: set[str] | None = None) -> None:
        self.prefix = prefix
        self._values = values
        self._used = set(IGNORED) if used is None else used

    def below(self, name: str) -> Metadata:
        """Return the keys below a name, which all count as keys that need to be read."""
        self._used.add(f"{name}.")
        return Metadata(self._values, f"{name}.", self._used)

    def ignore(self, key: str) -> None:
        """Mark a key as one that has no effect."""
        self._used.add(self.prefix + key)

    def number(self, key: str, default: int = REQUIRED) -> int:
        """Return an integer; also of an array that says the same for every layer."""
        value = _same_of_all(self._take(key, default))
        return int(self._checked(key, value, type(value) is int, "an integer"))

    def real(self, key: str, default: float = REQUIRED) -> float:
        """Return a number."""
        value = self._take(key, default)
        return float(self._checked(key, value, type(value) in (int, float), "a number"))

    def flag(self, key: str, default: bool = REQUIRED) -> bool:
        """Return a truth value."""
        value = self._take(key, default)
        return bool(self._checked(key, value, isinstance(value, bool), "true or false"))

    def text(self, key: str, default: str = REQUIRED) -> str:
        """Return a text."""
        value = self._take(key, default)
        return str(self._checked(key, value, isinstance(value, str), "a text"))

    def texts(self, key: str) -> list[str]:
        """Return an array of texts."""
        value = self._take(key, REQUIRED)
        is_right = isinstance(value, list) and all(isinstance(each, str) for each in value)
        return list(self._checked(key, value, is_right, "an array of texts"))

    def numbers(self, key: str, length: int) -> list[float]:
        """Return an array of a number for each token."""
        value = self._take(key, REQUIRED)
        is_right = isinstance(value, list) and all(isinstance(each, (int, float)) for each in value)
        is_right = is_right and len(value) == length
        return list(self._checked(key, value, is_right, f"an array of {length} numbers, one for each token"))

    def token(self, name: str) -> int | None:
        """Return the id of a special token of the tokenizer, or None if the file names none."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self._values:
            return None
        token, count = self.number(key), len(self.texts("tokenizer.ggml.tokens"))
        if not 0 <= token < count:
            raise ModelError(f"{key} = {token}, expected one of the {count} tokens")
        return token

    def expect(self, key: str, value: object) -> None:
        """Refuse a key with any other value than one, which is also what its absence means."""
        found = _same_of_all(self._take(key, value))
        if found != value:
            raise ModelError(
                f"{self.prefix}{key} = {found!r}, expected {value!r}: other values are not supported in GGUF files; "
                f"use the model's folder of safetensors instead"
            )

    def check_all_used(self) -> None:
        """Refuse keys that affect a model and have not been read."""
        spaces = *NAMESPACES, *(name for name in self._used if name.endswith("."))
        left = sorted(
            key
            for key in self._values
            if key not in self._used and key.startswith(spaces) and not key.startswith(IGNORED_PREFIX)
        )
        if left:
            told = ", ".join(f"{key} = {str(self._values[key])[:60]}" for key in left[:3])
            raise ModelError(
                f"{len(left)} metadata keys are not known, and could change what the model computes ({told}): use the "
                f"model's folder of safetensors instead"
            )

    def _take(self, key: str, default: Any) -> Any:
        self._used.add(self.prefix + key)
        value = self._values.get(self.prefix + key, default)
        if value is REQUIRED:
            raise ModelError(f"the metadata has no key {self.prefix}{key}: the file is incomplete or damaged")
        return value

    def _checked(self, key: str, value: Any, is_right: bool, expected: str) -> Any:
        if not is_right:
            raise ModelError(f"{self.prefix}{key} = {str(value)[:60]!r}, expected {expected}")
        return value


def _same_of_all(value: Any) -> Any:
    """Return the value of an array that says the same for every layer, or a value that is no such array."""
    is_same = isinstance(value, list) and value and all(each == value[0] for each in value)
    return value[0] if is_same else value
