"""Findings: what a check examined, what it found, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvr_mpi.errors import EXIT_CONFIG, EXIT_NO_TRANSPORT, EXIT_OK, counted, printable

CheckStatus = Literal["ok", "warn", "fail"]

# A failure in one of these means that the ranks cannot communicate.
TRANSPORT_CHECKS = frozenset({"launcher", "links"})
WIDTH = len("shared folder")  # the longest name of a check


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `measured` has the measured figures, with units in the names."""

    check: str
    status: CheckStatus
    found: str
    remedy: str = ""
    measured: Sequence[Mapping[str, Any]] = field(default=())


def ok(check: str, found: str) -> Finding:
    """Make a finding without a problem."""
    return Finding(check, "ok", found)


def warn(check: str, found: str, remedy: str) -> Finding:
    """Make a finding about a slow or unsafe setting with which a job still runs."""
    return Finding(check, "warn", found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    """Make a finding about a problem that prevents a job from running correctly."""
    return Finding(check, "fail", found, remedy)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 if nothing fails, 69 if the ranks cannot communicate, 78 for other failures."""
    failed = {finding.check for finding in findings if finding.status == "fail"}
    if not failed:
        return EXIT_OK
    return EXIT_NO_TRANSPORT if failed & TRANSPORT_CHECKS else EXIT_CONFIG


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the report as plain values; `measured` is omitted if there are no figures."""
    return {
        "ok": exit_code(findings) == EXIT_OK,
        "findings": [
            {"check": one.check, "status": one.status, "found": one.found, "remedy": one.remedy}
            | ({"measured": [dict(row) for row in one.measured]} if one.measured else {})
            for one in findings
        ],
    }


def to_text(one: Finding) -> str:
    """Return a finding as a line, followed by its remedy."""
    lines = [f"{one.status:4}  {one.check:{WIDTH}}  {_one_line(one.found)}"]
    if one.remedy:
        lines.append(f"{'':{6 + WIDTH}}  remedy: {_one_line(one.remedy)}")
    return "\n".join(lines)


def count_line(findings: Sequence[Finding]) -> str:
    """Count the findings by status."""
    counts = {status: sum(one.status == status for one in findings) for status in ("ok", "warn", "fail")}
    return f"{counts['ok']} ok, {counted(counts['warn'], 'warning')}, {counts['fail']} failed"


def _one_line(text: str) -> str:
    """Convert text from the environment or libraries to one line."""
    return printable(" ".join(text.split()))


def ranks_text(numbers: Sequence[int]) -> str:
    """Name ranks: ``rank 1``, ``ranks 0-3, 8``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"rank{'s' * (len(set(numbers)) != 1)} {text}"


def some(names: Sequence[str], most: int = 4) -> str:
    """List the first few: ``a, b and 7 more``."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
