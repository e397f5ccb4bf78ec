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
        value = self._take(key, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        return int(self._typed(key, value, int, "an integer"))

    def real(self, key: str, default: float = REQUIRED) -> float:
        """Return a number."""
        return float(self._typed(key, self._take(key, default), (int, float), "a number"))

    def flag(self, key: str, default: bool = REQUIRED) -> bool:
        """Return a truth value."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.prefix}{key} = {value!r}, expected true or false")
        return value

    def text(self, key: str, default: str = REQUIRED) -> str:
        """Return a text."""
        return str(self._typed(key, self._take(key, default), str, "a text"))

    def texts(self, key: str, default: list[str] = REQUIRED) -> list[str]:
        """Return an array of texts."""
        value = self._take(key, default)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ModelError(f"{self.prefix}{key}: expected an array of texts")
        return value

    def numbers(self, key: str, length: int, default: list[float] = REQUIRED) -> list[float]:
        """Return an array of a number for each token."""
        value = self._take(key, default)
        if (
            not isinstance(value, list)
            or len(value) != length
            or not all(isinstance(each, (int, float)) for each in value)
        ):
            raise ModelError(f"{self.prefix}{key}: expected an array of {length} numbers, one for each token")
        return value

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
        found = self._take(key, value)
        if isinstance(found, list) and found and all(each == found[0] for each in found):
            found = found[0]
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

    def _typed(self, key: str, value: Any, kind: type | tuple[type, ...], name: str) -> Any:
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ModelError(f"{self.prefix}{key} = {str(value)[:60]!r}, expected {name}")
        return value
