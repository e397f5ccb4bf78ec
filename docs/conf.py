"""The documentation as a site: Sphinx makes it of the Markdown pages as they are (``make docs``)."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

project = "kvr-mpi"
extensions = ["myst_parser", "sphinx_external_toc"]
# Pages hold no directives, since they are read on git hosts as well; which kind each is of stands here.
external_toc_path = "docs/_toc.yml"
# The source folder is the project's, so that links between all pages are links of the site.
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
smartquotes = False  # `--option` is no dash
highlight_language = "none"

myst_heading_anchors = 4

html_theme = "furo"
html_title = project
html_copy_source = False


def keep_names_of_folders(app: Sphinx, page: nodes.document) -> None:
    """Leave of a link to a folder, which a git host lists, its text: here it is no page."""
    for link in list(page.findall(addnodes.pending_xref)):
        if link["reftype"] == "myst" and not link["refdomain"] and link["reftarget"]:
            folder = Path(app.srcdir, link["refdoc"]).parent / link["reftarget"]
            if folder.is_dir():
                link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    """Add what Sphinx is to do beside its own."""
    app.connect("doctree-read", keep_names_of_folders)
