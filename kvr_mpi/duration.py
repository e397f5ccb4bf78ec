"""Durations: parsed as people and SLURM write them, and formatted for people."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvr_mpi.errors import ConfigError

UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
CLOCK = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")
IN_UNITS = re.compile("".join(f"(?:([0-9]+){unit})?" for unit in UNITS_S))
FORMATS = "a time such as 90m, 2h30m or 7d, or as for sbatch: m:s, h:m:s, d-h, d-h:m or d-h:m:s"


def parse_duration(text: str, plain: str = "m") -> float:
    """Parse a duration: ``2h30m``, ``45s``, ``7d``, or as for ``sbatch --time``, such as ``1-12:00``.

    Parameters
    ----------
    text : str
    plain : str
        Unit of a number that has none; minutes as for sbatch, unless an option says otherwise.

    Returns
    -------
    float
        Seconds.

    Raises
    ------
    ConfigError
        If it has another format.
    """
    word = text.strip(" ").lower()
    if word.isascii() and word.isdecimal():
        word += plain
    if word and (found := IN_UNITS.fullmatch(word)) is not None:
        return float(
            sum(int(count or 0) * unit_s for count, unit_s in zip(found.groups(), UNITS_S.values(), strict=True))
        )
    if (found := CLOCK.fullmatch(word)) is None:
        raise ConfigError(f"time {text!r}: expected {FORMATS}")
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is None and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return 86400.0 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


def duration_text(seconds: float) -> str:
    """Format a duration: 4.2 ms, 1.25 s, 55.0 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds <= 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{1e3 * seconds:.2g} ms" if seconds < 0.01 else f"{1e3 * seconds:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    for unit_s, unit, smaller_s, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            left = whole % unit_s // smaller_s
            return f"{whole // unit_s} {unit}" + (f" {left} {smaller}" if left else "")
    return f"{whole} s"


def expected_text(expected_s: Sequence[float]) -> str:
    """Format a forecast (low, middle, high) with its interval."""
    low, middle, high = map(duration_text, expected_s)
    return f"{middle} ({low} to {high} in 80% of cases)"
