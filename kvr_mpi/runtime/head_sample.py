"""Counts the tokens that each head keeps in a sample of a job's documents: the profile for placement and HeadKV.

One rank prefills each document's prompt as the job would and applies the compression method; nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from kvr_mpi.compress.compression import Compression
from kvr_mpi.compress.head_profile import Counts, similarities
from kvr_mpi.documents.prompts import PromptText
from kvr_mpi.errors import ConfigError, CorpusError, DocumentError, counted
from kvr_mpi.job import JobSpec
from kvr_mpi.logs import RankLogger
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill.one_prompt import prefill_whole
from kvr_mpi.runtime.indexing import open_documents, scan_documents
from kvr_mpi.runtime.job_ranks import JobRanks
from kvr_mpi.runtime.prepare import prepare
from kvr_mpi.runtime.session import Machine
from kvr_mpi.store.log import software
from kvr_mpi.transport.local import LocalTransport


def sample_heads(
    spec: JobSpec, machine: Machine, documents: int, logger: RankLogger
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Apply the job's compression method to documents sampled from its corpus.

    Returns the profile in the format of `head_profile.read_profile`, and the documents that are kept whole or cannot be
    read, each with the reason. Raises `ConfigError` if the job has no compression method, or one whose budget per head
    does not depend on the text, and `CorpusError` if no document of the sample could be used.
    """
    if spec.compress is None or spec.compress.rule.compete is None:
        found = "no [compress]" if spec.compress is None else f"compress.method = {spec.compress.method!r}"
        raise ConfigError(
            f"{found}: a profile needs a method whose budget per head depends on the text; use --set "
            f"compress.method=ada-snapkv --set compress.budget=512"
        )
    corpus, alone = scan_documents(spec, [*spec.prompts]), LocalTransport()
    session = prepare(spec, machine, JobRanks(alone, alone), alone, logger)
    compression, loaded = session.compression, session.loaded
    assert compression is not None, "the job has [compress]"
    source, counts = open_documents(session, corpus), dict[str, Counts]()
    left_out: list[tuple[str, str]] = []
    for number in range(len(corpus))[:: max(1, len(corpus) // documents)][:documents]:
        document = source.read(number)
        try:
            prompts = source.request(document, 0).texts
        except DocumentError as error:
            left_out.append((document.id, str(error)))
            continue
        of_prompts = list(retained_counts(loaded, prompts, compression))
        if not of_prompts:
            left_out.append((document.id, "shorter than the budget"))
            continue
        counts[document.id] = np.mean(of_prompts, axis=0)
        logger.info(f"{document.id}: {sum(prompt.tokens for prompt in prompts)} tokens")
    if not counts:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out[:5])
        raise CorpusError(f"none of {counted(len(left_out), 'document')} is long enough to show what heads keep: {why}")
    of_each = np.stack(list(counts.values()))  # (documents, layers, kv_heads)
    raw, centred = similarities(of_each) if len(counts) > 1 else ([], [])
    profile = {
        "counts": of_each.mean(0).tolist(),
        "source": f"{loaded.name}, {compression.settings}, mean of {counted(len(counts), 'document')}",
        "model": loaded.fingerprint,
        "name": loaded.name,
        "compress": compression.identity,
        "corpus": list(spec.documents.path),
        "documents": list(counts),
        "of_each_document": of_each.astype(int).tolist(),
        "similarity": {"cosine": raw, "mean_centred": centred},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "software": software(),
    }
    return profile, left_out


def retained_counts(loaded: LoadedModel, prompts: Sequence[PromptText], compression: Compression) -> Iterator[Counts]:
    """Count the tokens that each head keeps of each prompt (layers, kv_heads); skip prompts that are kept whole."""
    for prompt in prompts:
        retain = compression.retain(prompt.tokens, prompt.text)
        if retain is None:
            continue
        found = prefill_whole(loaded, prompt.ids, retain=retain)
        sequence = found.cache
        compression.repeat(sequence, prompt.ids, prompt.text)
        yield np.array([sequence.counts(layer_idx) for layer_idx in sorted(sequence.ragged)], dtype=np.float64)
        found.release()
