"""Slices from a lookup table, interpolated between the two nearest entries (KVR-P, section 4.2).

Stands between a `Table` and the `Partition` of one prompt; beyond the table's entries its rates and the cost model
take over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvr_mpi.costs.costmodel import best_split, chain_seconds
from kvr_mpi.errors import ConfigError, counted
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.tuning.grid import interpolate
from kvr_mpi.tuning.table import Entry, Key, Table, load_tables


@dataclass(frozen=True, slots=True)
class Choice:
    """The slices for one prompt.

    how : ``entry``: searched for this very length; ``interpolated``: between two of them; ``extrapolated``: by the
        table's rates alone, since the prompt is shorter or longer than all that was searched, or the chain has
        another number of ranks.
    """

    partition: Partition
    predicted_s: float
    how: Literal["entry", "interpolated", "extrapolated"]


def choose_slices(table: Table, tokens: int, ranks: int | None = None) -> Choice:
    """Look up the slices of a prompt.

    Parameters
    ----------
    tokens : int
        At least one for each rank.
    ranks : int or None
        Of the chain; None: the table's. For another number only its rates are of use.
    """
    ranks = ranks or table.key.ranks
    costs = table.rates.costs()
    lengths = [entry.context_tokens for entry in table.entries]
    if ranks != table.key.ranks:
        split, seconds = best_split(replace(costs, speeds=None), tokens, ranks, quantum=QUANTUM_TOKENS)
        return Choice(split, seconds, "extrapolated")
    if not lengths[0] <= tokens <= lengths[-1]:
        split, seconds = best_split(costs, tokens, ranks, quantum=QUANTUM_TOKENS)
        return Choice(split, seconds * _correction(table, tokens), "extrapolated")
    for entry in table.entries:
        if entry.context_tokens == tokens:
            return Choice(entry.partition, entry.ttft_s, "entry")
    shares = interpolate({entry.context_tokens: entry.shares for entry in table.entries}, tokens)
    split = Partition.by_ratio(tokens, shares, QUANTUM_TOKENS)
    return Choice(split, chain_seconds(costs, split.lengths) * _correction(table, tokens), "interpolated")


def describe_range(table: Table) -> str:
    """Describe the range of a table."""
    lengths = [entry.context_tokens for entry in table.entries]
    return f"{counted(len(lengths), 'length')} from {lengths[0]} to {lengths[-1]} tokens on {table.key.ranks} ranks"


def _correction(table: Table, tokens: int) -> float:
    """Interpolate the ratio of measured to modelled time between the two nearest entries."""
    costs = table.rates.costs()

    def ratio(entry: Entry) -> tuple[float]:
        return (entry.ttft_s / max(chain_seconds(costs, entry.partition.lengths), 1e-12),)

    return interpolate({entry.context_tokens: ratio(entry) for entry in _nearest(table.entries, tokens)}, tokens)[0]


def _nearest(entries: Sequence[Entry], tokens: int) -> list[Entry]:
    """Return the entries below and above, or the one at the end."""
    below = [entry for entry in entries if entry.context_tokens <= tokens][-1:]
    above = [entry for entry in entries if entry.context_tokens >= tokens][:1]
    return below + above


def find_table(path: Path, here: Key) -> Table:
    """Load the table that fits these ranks.

    Parameters
    ----------
    path : Path
        A table, or a folder of tables, of which one has to fit.
    here : Key
        What it is to be used for. A machine is known by what its ranks compute with, whatever it was called.

    Raises
    ------
    ConfigError
        If none fits, saying in what each differs, or more than one does.
    """
    found = load_tables(path)
    fitting = [(file, table) for file, table in found.items() if not _differences(table.key, here)]
    if len(fitting) == 1:
        return fitting[0][1]
    if fitting:
        names = ", ".join(file.name for file, _ in fitting)
        raise ConfigError(
            f"parallel.partition = {str(path)!r}: several tables fit ({names}); choose one of these files"
        )
    reasons = [f"{file.name}: {'; '.join(_differences(table.key, here))}" for file, table in found.items()]
    raise ConfigError(
        f"parallel.partition = {str(path)!r} does not fit: {' | '.join(reasons[:8])}. Create one here with kvr search"
    )


def _differences(table: Key, here: Key) -> list[str]:
    """Describe how two keys differ; models are compared by their weights."""
    pairs = [(name, getattr(table, name), getattr(here, name)) for name in ("dtype", "device", "ranks")]
    if table.model.fingerprint != here.model.fingerprint:
        pairs.insert(0, ("model", _model(table), _model(here)))
    return [f"{name} is {theirs!r}, here it is {ours!r}" for name, theirs, ours in pairs if theirs != ours]


def _model(key: Key) -> str:
    return f"{key.model.name} ({key.model.architecture}, {key.model.fingerprint[:12]})"
