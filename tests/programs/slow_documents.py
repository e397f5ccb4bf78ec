"""``kvr-run``, but it takes two seconds to read a document: a job that lasts, and leaves the processor to others."""

from __future__ import annotations

import time

from kvr_mpi.cli import kvr_run
from kvr_mpi.documents import Corpus, Document

read = Corpus.read


def slowly(corpus: Corpus, index: int) -> Document:
    time.sleep(2)
    return read(corpus, index)


Corpus.read = slowly  # type: ignore[method-assign]
kvr_run()
