"""Lookup tables: slices measured for one model on one machine, with their origin (section 4.2).

A table is a JSON file, ``tables/MODEL_HARDWARE_pN.json``, written by ``kvr search`` and read by jobs; ``lookup``
applies it to prompts. Keys name their units. Files are not trusted: their size is limited, every value is checked, and
nothing in them is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.disk import read_regular, replacing
from kvr_mpi.errors import ConfigError, DataError, OutputError, PartitionError
from kvr_mpi.partition import Partition
from kvr_mpi.plain import Strict, explain

MAX_FILE_BYTES = 8 << 20
MAX_TOKENS, MAX_RANKS = 1 << 28, 1 << 16

Text = Annotated[str, Field(min_length=1, max_length=1000)]
NAME = r"^[A-Za-z0-9][A-Za-z0-9.-]{0,79}$"
PlainName = Annotated[str, Field(pattern=NAME)]
Seconds = Annotated[float, Field(gt=0, lt=1e7)]
Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class ModelIdentity(Strict):
    """The model; the fingerprint identifies the weights, the other fields are informative."""

    name: Text
    fingerprint: Text
    architecture: Text


class TableKey(Strict):
    """The model, dtype, hardware and number of ranks that a table applies to."""

    model: ModelIdentity
    dtype: Literal["float32", "bfloat16", "float16"]
    hardware: PlainName = Field(description="hardware name given by the user")
    device: Text = Field(description="detected hardware of a rank: processor and threads, or GPU")
    ranks: Annotated[int, Field(ge=2, le=MAX_RANKS)]


class Provenance(Strict):
    """The origin of an entry."""

    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    hosts: Annotated[list[Text], Field(min_length=1, max_length=MAX_RANKS)]
    processor: Text
    command: Text
    versions: dict[Text, Text]


class TableEntry(Strict):
    """The slices for one length.

    A rank's slice lies between two adjacent bounds. `ttft_s` is the median over the runs of the chosen slices,
    `predicted_ttft_s` the forecast before the first of them, `runs` the number of all runs for this length.
    `spread_ratio` is (longest - shortest) / median over the runs of the chosen slices, `noise_ratio` the relative root
    mean square deviation of all runs from the fitted rates. Fields of earlier builds are ignored.
    """

    model_config = ConfigDict(extra="ignore")

    context_tokens: Annotated[int, Field(ge=2, le=MAX_TOKENS)]
    bounds_tokens: Annotated[tuple[Tokens, ...], Field(min_length=3, max_length=MAX_RANKS + 1)]
    ttft_s: Seconds
    predicted_ttft_s: Seconds
    runs: Annotated[int, Field(ge=1, le=1_000_000)]
    repetitions: Annotated[int, Field(ge=1, le=1_000_000, description="runs of the chosen slices")]
    spread_ratio: Annotated[float, Field(ge=0, lt=1e7)] | None
    noise_ratio: Annotated[float, Field(ge=0, lt=1e7)] | None
    provenance: Provenance

    @model_validator(mode="after")
    def _are_slices(self) -> TableEntry:
        bounds = self.bounds_tokens
        if bounds[0] != 0 or bounds[-1] != self.context_tokens or any(b <= a for a, b in pairwise(bounds)):
            raise ValueError(
                f"bounds_tokens {_short(bounds)}: expected to increase from 0 to context_tokens = {self.context_tokens}"
            )
        if self.repetitions > self.runs:
            raise ValueError(f"repetitions = {self.repetitions}: expected at most runs = {self.runs}")
        return self

    @property
    def partition(self) -> Partition:
        return Partition(self.bounds_tokens)

    @property
    def shares(self) -> tuple[float, ...]:
        """The slices as fractions of the prompt."""
        return tuple(length / self.context_tokens for length in self.partition.lengths)


class Table(Strict):
    """All entries for one model, dtype, machine and number of ranks, shortest first."""

    schema_name: Literal["kvr-mpi-table"] = "kvr-mpi-table"
    schema_version: Literal[1] = 1
    key: TableKey
    rates: Costs = Field(description="fitted")
    entries: Annotated[tuple[TableEntry, ...], Field(min_length=1, max_length=10_000)]

    @model_validator(mode="after")
    def _fits_together(self) -> Table:
        lengths = [entry.context_tokens for entry in self.entries]
        if any(b <= a for a, b in pairwise(lengths)):
            raise ValueError(f"entries for {_short(lengths)} tokens: expected each length once, in ascending order")
        for entry in self.entries:
            if len(entry.bounds_tokens) != self.key.ranks + 1:
                raise ValueError(
                    f"entry for {entry.context_tokens} tokens has {len(entry.bounds_tokens) - 1} slices; "
                    f"expected key.ranks = {self.key.ranks}"
                )
        if self.rates.speeds is not None and len(self.rates.speeds) != self.key.ranks:
            raise ValueError(f"rates.speeds has {len(self.rates.speeds)} ranks; expected {self.key.ranks}")
        return self


def table_file(key: TableKey) -> str:
    """Return a table's file name: MODEL_HARDWARE_pN.json, MODEL with its dtype."""
    model = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(key.model.name).name.removesuffix(".gguf")).strip("-.") or "model"
    return f"{model}-{key.dtype}_{key.hardware}_p{key.ranks}.json"


def load_table(path: Path) -> Table:
    """Read a table; raise `ConfigError` if there is none, `DataError` if it is damaged, too large or not a table."""
    hint = "create it again with kvr search"
    if not path.is_file():
        raise ConfigError(f"table {str(path)!r}: file not found: {path.absolute()}; {hint}")
    try:
        return Table.model_validate_json(read_regular(path, MAX_FILE_BYTES))
    except OSError as error:
        raise DataError(f"table {str(path)!r} cannot be read: {error}; {hint}") from error
    except ValidationError as error:
        raise DataError(f"table {str(path)!r} is damaged or not a table: {explain(error)}; {hint}") from error
    except PartitionError as error:
        raise DataError(f"table {str(path)!r} is damaged or not a table: {error}; {hint}") from error


def save_table(table: Table, path: Path) -> None:
    """Write a table atomically; raise `OutputError` if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as stream:
            stream.write(table.model_dump_json(indent=1).encode() + b"\n")
    except OSError as error:
        raise OutputError(f"table {str(path)!r} cannot be written: {error}; choose another --output") from error


def holds_tables(path: Path) -> bool:
    """Whether a path is a folder, or a JSON file that looks like a table."""
    if not path.is_file():
        return path.is_dir()
    with suppress(OSError, ValueError, RecursionError), path.open("rb") as stream:
        found = json.loads(stream.read(MAX_FILE_BYTES))
        return isinstance(found, dict) and "entries" in found
    return False


def load_tables(path: Path) -> dict[Path, Table]:
    """Read one table, or all tables in a folder, by file; raise `ConfigError` if there is none."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        what = "no *.json in this folder" if path.is_dir() else "no such file or folder"
        raise ConfigError(
            f"lookup table {str(path)!r}: {what}; kvr search writes tables. parallel.partition may also be "
            f"'equal_time' or 'even'"
        )
    return {file: load_table(file) for file in files}


def _short(values: Iterable[int]) -> str:
    shown = [str(value) for value in values]
    return "[" + ", ".join(shown if len(shown) <= 12 else [*shown[:6], "...", *shown[-3:]]) + "]"
