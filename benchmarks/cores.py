"""Which cores and which attention plain transformers has beside ours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model


@contextmanager
def all_cores() -> Iterator[None]:
    """Lend this rank all cores of its host; the others sleep meanwhile."""
    pinned_to, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, pinned_to)


@contextmanager
def plain(loaded: LoadedModel) -> Iterator[None]:
    """Run a model with transformers' own attention, and with ours again afterwards."""
    prepare_model(loaded.model, chain=False)
    try:
        yield
    finally:
        prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
