"""``kvr-run``, but until it is restarted it takes two seconds to read a document, without computing."""

from __future__ import annotations

import os
import time

from kvr_mpi.cli import kvr_run
from kvr_mpi.documents import Corpus, Document

read = Corpus.read


def slowly(corpus: Corpus, index: int) -> Document:
    if (os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("RESTARTED") or "0") == "0":
        time.sleep(2)
    return read(corpus, index)


Corpus.read = slowly  # type: ignore[method-assign]
kvr_run()
