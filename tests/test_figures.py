"""The docs say what was measured: pages are what stored measurements make of them, and each says how it was made."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from constants import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import figures

MEASURED = figures.load_measurements()


def test_the_pages_say_what_is_stored() -> None:
    assert len(MEASURED) > 10
    assert not figures.differing(MEASURED)


def test_the_readme_says_what_is_stored() -> None:
    assert figures.render_summary(MEASURED) in (ROOT / "README.md").read_text()


def test_another_figure_is_noticed() -> None:
    one = MEASURED["first-token"]
    shown = next(idx for idx, row in enumerate(one.rows) if (row["context_tokens"], row["strategy"]) == (4096, "ring"))
    other = replace(one, rows=[{**row, "ttft_s": 1.91} if idx == shown else row for idx, row in enumerate(one.rows)])
    changed = figures.differing({**MEASURED, "first-token": other})
    assert any("docs/benchmarks.md" in line for line in changed) and any("first-token.svg" in line for line in changed)
    assert "1.91 s" in figures.render_summary({**MEASURED, "first-token": other})
    said = replace(MEASURED["gathering"], said={"docs/benchmarks.md": ["in 8.7 s of one core"]})
    assert any("8.7 s" in line for line in figures.differing({**MEASURED, "gathering": said}))


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


def test_what_is_older_than_its_code_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(name: str) -> str:
        (tmp_path / name).write_text(name)
        git("add", "."), git("commit", "-qm", name)
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    one = replace(MEASURED["slow-links"], commit=commit("code"), measures=["code"])
    commit("other")
    assert not figures.age_of(one)
    (tmp_path / "code").write_text("changed")
    git("commit", "-qam", "changed")
    assert "1 commit since" in figures.age_of(one) and one.command in figures.age_of(one)
    assert "not known" in figures.age_of(replace(one, commit="0000000"))


def test_new_rows_take_the_place_of_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = MEASURED["first-token"]
    monkeypatch.setattr(figures, "DATA", tmp_path)
    monkeypatch.setattr(figures, "_git", lambda *words: "abc1234" if "rev-parse" in words else "")
    one.path.write_text((ROOT / "docs" / "data" / "first-token.json").read_text())
    rows = [{**row, "ttft_s": 2 * row["ttft_s"]} for row in one.rows]
    (tmp_path / "bench.txt").write_text(json.dumps(rows))
    figures.store(one, tmp_path / "bench.txt")
    (new,) = figures.load_measurements().values()
    assert new.rows == rows and (new.commit, new.dated_by) == ("abc1234", "run") and new.measures == one.measures
    (tmp_path / "bench.txt").write_text("[]")
    with pytest.raises(SystemExit, match="first-token --json"):
        figures.store(one, tmp_path / "bench.txt")
