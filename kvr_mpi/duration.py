"""Durations: parsed in SLURM's format, and formatted for people."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvr_mpi.errors import ConfigError

FORMATS = "minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s"


def parse_duration(text: str) -> float:
    """Parse a duration like ``sbatch --time`` to seconds: ``90`` is 90 minutes, ``1-12`` one day and twelve hours.

    Raises a `ConfigError` if it is in none of SLURM's formats.
    """
    found = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", text.strip(" "))
    if found is None:
        raise ConfigError(f"time {text!r}: expected {FORMATS}, as in sbatch")
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
    return f"{middle} ({low} to {high} in 80 % of cases)"
