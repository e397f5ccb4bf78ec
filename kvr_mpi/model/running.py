"""What a thread runs through a model, for hooks inside the model, which do not receive our arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

# For each prompt in the row: its tokens in the row, and its full length (``rope``).
Lengths = Sequence[tuple[int, int]]
# For each layer the tokens of each chunk of the row, or None for all at once (``layer_chunks``).
ChunkLengths = Sequence[Sequence[int]]
RUNNING: ContextVar[tuple[Lengths | None, ChunkLengths | None]] = ContextVar("kvr_running", default=(None, None))


@contextmanager
def running(lengths: Lengths, chunk_lengths: ChunkLengths | None = None) -> Iterator[None]:
    """Announce the row that this thread runs within the block."""
    token = RUNNING.set((lengths, chunk_lengths))
    try:
        yield
    finally:
        RUNNING.reset(token)
