"""The pages become a site: no link leads nowhere, and none of it needs a network when it is read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from constants import ROOT


def build(source: Path, made: Path) -> subprocess.CompletedProcess[str]:
    """Build a site of these pages as `make docs` does."""
    target = re.search(r"^\t.*sphinx-build (.*) --conf-dir docs \. ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target is not None
    command = [sys.executable, "-m", "sphinx", *target[1].split(), "--conf-dir", ROOT / "docs", source, made]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_pages_become_a_site_that_needs_no_network(tmp_path: Path) -> None:
    """Also pages, headings, files and folders that links on them name are there."""
    done = build(ROOT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {page.name: page.read_text() for page in tmp_path.glob("**/*.html")}
    assert {page.with_suffix(".html").name for page in (ROOT / "docs").glob("*.md")} <= pages.keys()
    assert "--set" in pages["job-file.html"]
    fetched = [link for page in pages.values() for link in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page)]
    assert len(fetched) > 10 and not [link for link in fetched if "//" in link]
    styles = [style.read_text() for style in tmp_path.glob("_static/**/*.css")]
    assert styles and not [style for style in styles if re.search(r"@import|url\(['\"]?(?:https?:)?//", style)]
