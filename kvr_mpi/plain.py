"""Objects as plain JSON values: read strictly from files, which may be damaged, or received from other ranks.

The types of the fields decide which values are accepted. ``dataclasses.asdict`` makes plain values of a dataclass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

T = TypeVar("T")

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Unix times that `datetime` can represent.
UnixTime = Annotated[float, Field(gt=-6e10, lt=2.5e11)]


SCALES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgt]?)(?:i?b)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int | None:
    """Parse ``64G``, ``1.5 TiB``, ``4k`` or a plain number, with powers of 1024; None if it is something else."""
    found = SIZE.fullmatch(text.replace(" ", ""))
    return None if found is None else int(float(found[1]) * SCALES[found[2].lower()])


def _read_share(value: Any) -> Any:
    if isinstance(value, str) and value.endswith("%") and value[:-1].strip().replace(".", "", 1).isdecimal():
        return float(value[:-1]) / 100
    return value


def _read_tokens(value: Any) -> Any:
    if isinstance(value, str) and value[-1:].lower() in ("k", "m") and (tokens := parse_size(value)) is not None:
        return tokens
    return value


def _read_gib(value: Any) -> Any:
    if isinstance(value, str) and (size := parse_size(value)) is not None:
        return size / (1 << 30)
    return value


# Values may be written as people write them: 0.25 or "25%"; 4096 or "4k"; 64 (GiB) or "64G".
AS_SHARE, AS_TOKENS, AS_GIB = map(BeforeValidator, (_read_share, _read_tokens, _read_gib))


class Strict(BaseModel):
    """Base of objects that people or other programs write: unknown keys are errors, and no value is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def changed(self, *names: str) -> list[str]:
        """Return the fields whose value is not the default, whether given or not: jobs are sent with all defaults."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


def read_plain(kind: type[T], given: bytes | Mapping[str, Any]) -> T:
    """Read an object from JSON text or a mapping; values are not converted, and unknown keys are ignored.

    Raises `ValueError`, which names the value that is not JSON, is missing, has the wrong type, or is out of range.
    """
    text = given if isinstance(given, bytes) else json.dumps(given).encode()
    try:
        found: T = _adapter(kind).validate_json(text, strict=True)  # type: ignore[arg-type]  # classes are hashable
    except ValidationError as error:
        raise ValueError(explain(error)) from error
    return found


def parse_json(text: str | bytes) -> Any:
    """Parse JSON in which no object has a key twice, since readers differ in which value they take.

    Raises `ValueError`, or `RecursionError`.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    return DECODER.decode(text)


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in names if names.count(name) > 1)[:80]!r} occurs twice in one object"
        )
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_as_object)


def from_plain(kind: type[T], values: Mapping[str, Any]) -> T:
    """Rebuild an object that another rank converted with ``asdict`` and sent as JSON."""
    found: T = _adapter(kind).validate_python(values)  # type: ignore[arg-type]
    return found


def explain(error: ValidationError) -> str:
    """Describe pydantic's first errors: place, expected value, and value found."""
    return "; ".join(map(_describe, map(dict, error.errors()[:5])))


def _describe(item: dict[str, Any]) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    is_plain = item["type"] in ("missing", "value_error", "json_invalid")
    found = "" if is_plain else f" (found {repr(item['input'])[:100]})"
    return f"{'.'.join(map(str, item['loc'])) or 'file'}: {message[:300]}{found}"


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
