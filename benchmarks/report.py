"""How long a browser takes to open the report of a large run.

Chromium without a window draws the page, and an empty one, in turns; the difference is the page's.
"""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import make_parser
from kvr_mpi.report.page import RunFacts, make_page
from kvr_mpi.report.timeline import TracedRun
from kvr_mpi.store.record import Record

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SYLLABLES = ("ka", "lo", "mi", "tre")
EMPTY = b"<!doctype html><title>empty</title>"


def records(count: int, words: int) -> list[Record]:
    """Make documents with answers of so many words, of 6,000 words in all."""
    draw = random.Random(7)
    known = [f"{draw.choice(SYLLABLES)}{draw.randrange(4000)}" for _ in range(6000)]
    return [
        Record(
            f"doc-{number:05d}",
            "done",
            answer=" ".join(draw.choices(known, k=words)),
            prompt_tokens=500 + number,
            slices=(0, 600, 900),
            ttft_s=1 + number / 999,
            new_tokens=words,
            strategy="kvr",
            finished_at="2026-01-01T00:00:00.000+00:00",
        )
        for number in range(count)
    ]


def seconds_to_draw(browser: str, page: Path) -> float:
    """Start a browser that draws a page into a picture, and ends."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={page.with_suffix('.png')}"]
    began = time.perf_counter()
    subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True, timeout=120)
    return time.perf_counter() - began


def main(arguments: Sequence[str]) -> None:
    """Print the page's size, and how much longer than an empty page it takes."""
    parser = make_parser("report", __doc__)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--words", type=int, default=120, help="of an answer")
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args(arguments)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    page = make_page(RunFacts("a run", "a model", "kvr_mpi"), records(given.documents, given.words), TracedRun())
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "report.html"), Path(folder, "empty.html")
        for file, content in zip(files, (page, EMPTY), strict=True):
            file.write_bytes(content)
            seconds_to_draw(browser, file)
        pairs = [[seconds_to_draw(browser, file) for file in files] for _ in range(given.pairs)]
    report, empty = (statistics.median(times) for times in zip(*pairs, strict=True))
    more = statistics.median(one - other for one, other in pairs)
    print(f"{given.documents} documents: {len(page) / 1e6:.1f} MB, {report:.2f} s, an empty page {empty:.2f} s")
    print(f"the page takes {more:.2f} s more than an empty one, median of {given.pairs} pairs")
