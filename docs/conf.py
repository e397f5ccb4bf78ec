"""Sphinx configuration: the Markdown pages become a site (``make docs``)."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

project = "kvr-mpi"
extensions = ["myst_parser", "sphinx_external_toc"]
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


def keep_names_of_folders(app: Sphinx, page: nodes.document) -> None:
    """Replace links to folders by their text: a git host lists folders, the site has no page for them."""
    for link in list(page.findall(addnodes.pending_xref)):
        if link["reftype"] == "myst" and not link["refdomain"] and link["reftarget"]:
            folder = Path(app.srcdir, link["refdoc"]).parent / link["reftarget"]
            if folder.is_dir():
                link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    """Register the hook."""
    app.connect("doctree-read", keep_names_of_folders)
