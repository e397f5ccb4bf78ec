"""Slices from a lookup table, interpolated between the two nearest entries (KVR-P, section 4.2).

Outside the range of the table's entries, the cost model computes the slices from the table's rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvr_mpi.costs.costmodel import best_split
from kvr_mpi.errors import ConfigError, counted
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.tuning.table import ModelIdentity, Table, TableKey, load_tables

REMEDY = "Start the number of ranks of a table, or set parallel.partition to a table from kvr search on this machine"


def choose_slices(table: Table, tokens: int, ranks: int) -> Partition:
    """Look up the slices of a prompt of at least one token per rank; outside the table, compute them from its rates."""
    if is_outside(table, tokens, ranks):
        costs = table.rates if ranks == table.key.ranks else replace(table.rates, speeds=None)
        return best_split(costs, tokens, ranks, quantum=QUANTUM_TOKENS)[0]
    for entry in table.entries:
        if entry.context_tokens == tokens:
            return entry.partition
    shares = interpolate({entry.context_tokens: entry.shares for entry in table.entries}, tokens)
    return Partition.by_ratio(tokens, shares, QUANTUM_TOKENS)


def is_outside(table: Table, tokens: int, ranks: int) -> bool:
    """Whether a prompt is shorter or longer than all entries, or the chain has another number of ranks."""
    return ranks != table.key.ranks or not (
        table.entries[0].context_tokens <= tokens <= table.entries[-1].context_tokens
    )


def interpolate(shares: Mapping[int, tuple[float, ...]], tokens: int) -> tuple[float, ...]:
    """Interpolate the ranks' shares of a prompt between the two nearest lengths; outside, use the nearest."""
    below = max((length for length in shares if length <= tokens), default=min(shares))
    above = min((length for length in shares if length >= tokens), default=max(shares))
    if below >= above:
        return shares[below]
    weight = (tokens - below) / (above - below)
    return tuple(a + (b - a) * weight for a, b in zip(shares[below], shares[above], strict=True))


def describe_range(table: Table) -> str:
    """Describe the range of a table."""
    lengths = [entry.context_tokens for entry in table.entries]
    return f"{counted(len(lengths), 'length')} from {lengths[0]} to {lengths[-1]} tokens on {table.key.ranks} ranks"


def find_tables(path: Path, here: Mapping[str, object], remedy: str = REMEDY) -> dict[Path, Table]:
    """Load the tables that match the known properties of these ranks, from a table or a folder of tables.

    Raises `ConfigError`, which lists the differences, if no table fits.

    here : some fields of a `TableKey`, by name. Models are compared by fingerprint, machines by `device`, not by
        `hardware`.
    remedy : what to do if no table fits.
    """
    found = {file: (table, _differences(table.key, here)) for file, table in load_tables(path).items()}
    fitting = {file: table for file, (table, differences) in found.items() if not differences}
    if not fitting:
        reasons = [f"{file.name}: {'; '.join(differences)}" for file, (_, differences) in found.items()]
        raise ConfigError(f"lookup table {str(path)!r} does not fit: {' | '.join(reasons[:8])}. {remedy}")
    return fitting


def find_table(path: Path, here: TableKey) -> Table:
    """Load the only table that fits these ranks; raise `ConfigError` if none fits, or several do."""
    fitting = find_tables(path, {name: getattr(here, name) for name in ("model", "dtype", "device", "ranks")})
    if len(fitting) > 1:
        names = ", ".join(file.name for file in fitting)
        raise ConfigError(
            f"parallel.partition = {str(path)!r}: several tables fit ({names}); choose one of these files"
        )
    return next(iter(fitting.values()))


def _differences(table: TableKey, here: Mapping[str, object]) -> list[str]:
    """Describe how a table's key differs from the known properties."""
    return [
        f"{name} is {_shown(getattr(table, name))}, here it is {_shown(ours)}"
        for name, ours in here.items()
        if _compared(getattr(table, name)) != _compared(ours)
    ]


def _compared(value: object) -> object:
    return value.fingerprint if isinstance(value, ModelIdentity) else value


def _shown(value: object) -> str:
    if isinstance(value, ModelIdentity):
        value = f"{value.name} ({value.architecture}, {value.fingerprint[:12]})"
    return repr(value)
