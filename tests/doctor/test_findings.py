"""Findings become an exit code, lines that a terminal can show, and JSON."""

from __future__ import annotations

from kvr_mpi.doctor.findings import exit_code, fail, number_ranges, ok, to_json, to_lines, warn


def test_exit_codes() -> None:
    assert exit_code([ok("links", ""), warn("links", "", "x")]) == 0
    assert exit_code([fail("folder", "", "x")]) == 78
    assert exit_code([fail("folder", "", "x"), fail("launcher", "", "x")]) == 69


def test_reports() -> None:
    findings = [ok("clocks", "one"), fail("space", "none\x1b[2J left", "make room")]
    assert to_json(findings) == {
        "ok": False,
        "findings": [
            {"check": "clocks", "status": "ok", "found": "one", "remedy": ""},
            {"check": "space", "status": "fail", "found": "none\x1b[2J left", "remedy": "make room"},
        ],
    }
    lines = to_lines(findings)
    assert lines[0].split() == ["ok", "clocks", "one"]
    assert "remedy: make room" in lines[2]
    assert lines[-1] == "1 ok, 0 warnings, 1 failed"
    assert all(line.isprintable() for line in lines)


def test_number_ranges() -> None:
    assert number_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert number_ranges([]) == ""
