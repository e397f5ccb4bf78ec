"""The cost of a run: node, GPU and core seconds, and energy where ranks can read it.

Each rank writes its total cost so far to its log, once a minute and at its end: the last line of a log counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kvr_mpi.duration import duration_text, expected_text
from kvr_mpi.plain import Amount

NOT_READABLE = "energy is not readable here"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one or more ranks.

    key : names the rank's session, so that nothing is counted twice.
    node_s, gpu_s, core_s : seconds, of all nodes, GPUs and cores.
    rank_s : rank seconds spent on documents (`Record.rank_s`).
    answering_s : seconds in which the job answered documents; recorded by the first rank.
    joules : energy; None: not known for all ranks.
    meters : source of the energy reading, or why there is none.
    expected_s, took_s : forecast of the job's duration, start included (low, middle, high: 80 % of cases lie between),
        and its actual duration; recorded by the first rank if earlier jobs allowed a forecast.
    """

    key: str
    node_s: Amount = 0.0
    gpu_s: Amount = 0.0
    core_s: Amount = 0.0
    rank_s: Amount = 0.0
    answering_s: Amount = 0.0
    joules: Amount | None = None
    meters: str = NOT_READABLE
    expected_s: tuple[()] | tuple[Amount, Amount, Amount] = ()
    took_s: Amount = 0.0

    def as_line(self) -> dict[str, Any]:
        """Return the line of a log."""
        return {"line": COST, **asdict(self)}

    @property
    def joules_per_rank_s(self) -> float:
        """Energy per second of a rank's work on documents; 0 if unknown."""
        return self.joules / self.rank_s if self.joules and self.rank_s else 0.0

    def describe(self, documents: int) -> str:
        """Describe the cost in one line, for this number of answered documents; with energy only if it is known."""
        hours = [("node", self.node_s), ("GPU", self.gpu_s), ("core", self.core_s)]
        spent = ", ".join(f"{seconds / 3600:.3g} {name} hours" for name, seconds in hours if seconds or name != "GPU")
        if self.joules is None:
            return spent
        each = f", {joules_text(self.joules / documents)} per answered document" if documents else ""
        return f"{spent}; {joules_text(self.joules)} ({self.meters}){each}"

    def describe_outcome(self) -> str:
        """Compare the job's forecast with the time it took; empty if there was no forecast."""
        if not self.expected_s:
            return ""
        low, _, high = self.expected_s
        how = "faster than" if self.took_s < low else "slower than" if self.took_s > high else "as"
        took, forecast = duration_text(self.took_s), expected_text(self.expected_s)
        return f"the whole job took {took}, its start included: {how} forecast, {forecast}"


COST = "cost"
NUMBERS = ("node_s", "gpu_s", "core_s", "rank_s", "answering_s")


def total_cost(costs: Iterable[Cost]) -> Cost:
    """Sum up costs; the energy is known if all ranks know theirs, the forecast if exactly one job had one."""
    found = list(costs)
    joules = [one.joules for one in found if one.joules is not None]
    sums = {name: sum(getattr(one, name) for one in found) for name in NUMBERS}
    unknown = sorted({one.meters for one in found if one.joules is None})
    meters = unknown or sorted({one.meters for one in found})
    forecasts = [one for one in found if one.expected_s]
    told = forecasts[0] if len(forecasts) == 1 else Cost("")  # with several jobs, no forecast covers all of them
    joules_of_all = sum(joules) if joules and not unknown else None
    return Cost(
        "", **sums, joules=joules_of_all, meters="; ".join(meters), expected_s=told.expected_s, took_s=told.took_s
    )


def joules_text(joules: float) -> str:
    """Format an energy: ``940 J``, ``12.3 kJ``, ``4.5 MJ``."""
    for unit, size in (("MJ", 1e6), ("kJ", 1e3)):
        if joules >= size:
            return f"{joules / size:.3g} {unit}"
    return f"{joules:.3g} J"
