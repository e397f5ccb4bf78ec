"""Sphinx configuration: the Markdown pages become a site (``make docs``)."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

project = "kvr-mpi"
extensions = ["myst_parser", "sphinx_external_toc", "sphinx_copybutton"]
# Pages have no directives, so that they read well on git hosts; this file has their order.
external_toc_path = "docs/_toc.yml"
# The source folder is the project's root, so that links between all pages work on the site.
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "slurm/README.md",
    "benchmarks/README.md",
]
exclude_patterns = [".*", "build", "dist", "kvr_mpi", "runs", "tests"]
source_suffix = {".md": "markdown"}
nitpicky = True
smartquotes = False  # keep `--option` as it is
highlight_language = "none"

myst_heading_anchors = 4

html_theme = "furo"
html_title = project
html_copy_source = False
html_favicon = "favicon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
copybutton_exclude = ".linenos, .gp"


def keep_names_of_folders(app: Sphinx, page: nodes.document) -> None:
    """Replace links to folders by their text: a git host lists folders, the site has no page for them."""
    for link in list(page.findall(addnodes.pending_xref)):
        if link["reftype"] == "myst" and not link["refdomain"] and link["reftarget"]:
            folder = Path(app.srcdir, link["refdoc"]).parent / link["reftarget"]
            if folder.is_dir():
                link.replace_self(link.children)


def keep_numbers_whole(app: Sphinx, page: nodes.document) -> None:
    """Break no lines inside of numbers, intervals and numbers with a unit in tables."""
    for cell in page.findall(nodes.entry):
        for text in list(cell.findall(nodes.Text)):
            whole = re.sub(r"(?<=\d)-(?=[\d.])", "\u2011", text.astext())
            whole = re.sub(r"(?<=\d) (?=(pairs?|tokens|m?s|[KMG]i?B|Mbit/s|Gbit/s)\b)", "\u00a0", whole)
            if whole != text and not isinstance(text.parent, nodes.literal):
                text.parent.replace(text, nodes.Text(whole))


def setup(app: Sphinx) -> None:
    """Register the hooks."""
    app.connect("doctree-read", keep_names_of_folders)
    app.connect("doctree-read", keep_numbers_whole)
