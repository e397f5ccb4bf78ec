"""The site is not built of pages with links that lead nowhere, and needs no network when it is read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from constants import ROOT

MAP = "root: README\nsubtrees:\n- entries:\n  - file: docs/one\n"
HOME = (
    "# Home\n\n[One](docs/one.md#a-heading), [its folder](docs), [a file](docs/_toc.yml), [below](#below)\n\n## Below\n"
)


def build(folder: Path, pages: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Build a site of these pages as `make docs` does."""
    source, made = folder / "source", folder / "made"
    for name, text in {"docs/_toc.yml": MAP, "README.md": HOME, **pages}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
    target = re.search(r"^\t.*sphinx-build (.*) --conf-dir docs \. ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target is not None
    command = [sys.executable, "-m", "sphinx", *target[1].split(), "--conf-dir", ROOT / "docs", source, made]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_pages_become_a_site_that_needs_no_network(tmp_path: Path) -> None:
    done = build(tmp_path, {"docs/one.md": "# One\n\n## A heading\n\n[Home](../README.md), `--option` -- {text}\n"})
    assert (done.returncode, done.stderr) == (0, "")
    pages = {page.name: page.read_text() for page in tmp_path.glob("made/**/*.html")}
    assert 'href="docs/one.html#a-heading"' in pages["README.html"] and "README.html" in pages["index.html"]
    assert "its folder" in pages["README.html"] and "--option" in pages["one.html"]
    fetched = [link for page in pages.values() for link in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page)]
    assert len(fetched) > 10 and not [link for link in fetched if "//" in link]
    styles = [style.read_text() for style in tmp_path.glob("made/_static/**/*.css")]
    assert styles and not [style for style in styles if re.search(r"@import|url\(['\"]?(?:https?:)?//", style)]


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    wrong = "# One\n\n[gone](gone.md)\n\n[no heading](../README.md#gone)\n\n[none here](#gone)\n\n![gone](gone.svg)\n"
    done = build(tmp_path, {"docs/one.md": wrong, "docs/two.md": "# Of no kind\n"})
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "WARNING" in line]
    for line, name in ((3, "gone.md"), (5, "gone"), (7, "gone"), (9, "gone.svg")):
        assert any(f"one.md:{line}: " in each and name in each for each in said), (line, said)
    assert any("two.md" in each and "toctree" in each for each in said), said
