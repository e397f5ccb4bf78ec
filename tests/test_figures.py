"""The docs say what was measured: pages are what stored measurements make of them, and each says how it was made."""

from __future__ import annotations

import re
import sys
from datetime import UTC, date, datetime

import pytest
from constants import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import figures

MEASURED = figures.load_measurements()


def test_the_pages_say_what_is_stored() -> None:
    assert len(MEASURED) > 10
    assert figures.render_summary(MEASURED) in (ROOT / "README.md").read_text()
    assert not figures.differing(MEASURED)


@pytest.mark.parametrize("name", MEASURED)
def test_no_figure_without_its_command(name: str) -> None:
    one = MEASURED[name]
    assert one.title and one.machine and re.fullmatch(r"[0-9a-f]{7,40}", one.commit)
    assert one.dated_by in ("run", "commit") and date.fromisoformat(one.date) <= datetime.now(UTC).date()
    assert one.measures and all((ROOT / path).exists() for path in one.measures)
    assert one.rows if one.kind != "text" else one.said
    shown = [page for page in figures.pages() if f"<!-- begin: {name} -->" in page.read_text()]
    assert shown or one.said, "it stands on no page"
    program, target = one.command.split()[:2]
    if program == "make":
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    else:
        assert program in ("mpirun", "python")
        assert re.search(r"python -m benchmarks [a-z-]+ |kvr search ", one.command)
