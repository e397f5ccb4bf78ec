"""Predicts how much a job with `output.kv` will write, so that it cannot fill the disk after hours."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvr_mpi.documents import Corpus
from kvr_mpi.documents.encoding import encode_text
from kvr_mpi.documents.prompts import Frame
from kvr_mpi.errors import OutputError, counted
from kvr_mpi.job import JobSpec
from kvr_mpi.report.style import bytes_text
from kvr_mpi.runtime.session import Session

# Number of documents to tokenise, and characters of each, to estimate the characters per token.
SAMPLED, SAMPLED_CHARS = 32, 20_000
DOUBT = 1.1  # a job is refused only if its estimate exceeds the free space by this factor


def stored_bytes(spec: JobSpec, frame: Frame, texts: Iterable[float], bytes_per_token: float) -> int:
    """Estimate the bytes of stored keys and values; `texts` has the tokens of each document's text."""
    around = len(frame.head) + len(frame.tail) + spec.generation.max_new_tokens
    each = [int(min(tokens, frame.text_budget)) + around for tokens in texts]
    if spec.compress is not None:  # layers with windows are not compressed
        each = [min(count, spec.compress.kept_of(count) + around) for count in each]
    return int(sum(each) * bytes_per_token)


def check_stored_size(session: Session, corpus: Corpus, todo: npt.NDArray[np.int64], folder: Path) -> str:
    """Return a log line about how much will be written for documents, by number; a sample of their texts is tokenized.

    Raises `OutputError` if there is not enough free space, or the folder no longer exists.
    """
    good = todo[~corpus.bad_among(todo)].tolist()
    texts = [corpus.read(number).text[:SAMPLED_CHARS] for number in good[:: max(1, len(good) // SAMPLED)]]
    tokens = sum(len(encode_text(session.loaded.tokenizer, text)) for text in texts)
    chars = sum(map(len, texts))
    counts = [corpus.chars(number) * tokens / chars for number in good] if chars else []
    part = session.loaded.part  # the group writes all of its heads once
    shares = 1 if part is None else len(part.held.shares)
    size = stored_bytes(session.spec, session.frame, counts, shares * session.loaded.shape.kv_bytes_per_token)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise OutputError(
            f"output.path {str(folder)!r}: {error.strerror}; it existed when this job began. Restore it, and continue "
            f"with --resume"
        ) from None
    text = stored_text(len(good), size, free)
    if size > DOUBT * free:
        raise OutputError(
            f"output.path {str(folder)!r}: not enough space for this job: {text} (quotas are not checked). Choose "
            f"another folder, fewer documents, or output.kv = false"
        )
    return text


def stored_text(documents: int, size: int, free: int | None) -> str:
    """Describe the space that the keys and values of a job take; `free` is None if unknown."""
    room = "the free space is unknown" if free is None else f"{bytes_text(free)} are free"
    return f"keys and values of {counted(documents, 'document')}: about {bytes_text(size)}; {room}"
