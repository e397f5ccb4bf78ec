"""The counters that all ranks of a job share; the work queue's counters follow them."""

from __future__ import annotations

from enum import IntEnum


class Slot(IntEnum):
    """Index of each counter."""

    DONE = 0  # documents
    WORK = 1  # of documents that are done
    STOP = 2  # ranks that were told to stop
    PREFILLED = 3  # work whose tokens are prefilled
    TOKENS = 4  # of prompts and answers that are done


FIRST_LIST = len(Slot)
