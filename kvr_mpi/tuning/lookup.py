"""Slices from a lookup table, interpolated between the two nearest entries (KVR-P, section 4.2).

Outside the range of the table's entries, the cost model computes the slices from the table's
rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvr_mpi.costs.costmodel import best_split
from kvr_mpi.errors import ConfigError, counted
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.tuning.table import Key, Table, load_tables


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


def find_table(path: Path, here: Key) -> Table:
    """Load the table that fits these ranks.

    Parameters
    ----------
    path : Path
        A table, or a folder of tables; exactly one must fit.
    here : Key
        Key of these ranks. Machines are compared by `device`; the `hardware` name is ignored.

    Raises
    ------
    ConfigError
        If no table fits (the message lists the differences), or several fit.
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
