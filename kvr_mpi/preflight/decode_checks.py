"""What ``[decode]`` cannot be combined with, as far as it shows before anything is loaded; no torch."""

from __future__ import annotations

from pathlib import Path

from kvr_mpi.documents.document import AS_THE_JOB
from kvr_mpi.errors import ConfigError
from kvr_mpi.job import JobSpec


def why_not_combined(spec: JobSpec) -> str | None:
    """Say what else in a job keeps the ranks of a chain from sharing heads when they decode; None: nothing."""
    if spec.parallel.strategy == "single":
        return "parallel.strategy = 'single' decodes from transformers' own cache, which cannot be split by heads"
    if spec.output.kv == "sharded" or (spec.questions is not None and spec.questions.sharded):
        key = "questions.sharded" if spec.questions is not None else "output.kv = 'sharded'"
        return f"with {key}, ranks already decode together, each holding some of the tokens"
    if spec.cache.is_rolling:
        return "cache.kind = 'rolling' keeps the last tokens of each document on one rank"
    if spec.generation.of_answers != AS_THE_JOB or spec.generation.scores:
        return "log-probabilities, scores, several samples and schemas are not supported yet by ranks that share heads"
    if spec.decode.mode == "auto" and spec.documents.format == "openai-batch":
        return (
            "requests may ask for log-probabilities, several answers or a schema, which ranks that share heads cannot"
        )
    if spec.output.kv:
        return "output.kv = true stores the cache of one rank, but ranks that share heads each hold part of a document"
    return None


def check_decode(spec: JobSpec, chain_size: int) -> None:
    """Refuse [decode] beside what it would be ignored by, or would make wrong.

    Parameters
    ----------
    chain_size : int
        Most ranks of a chain.

    Raises
    ------
    ConfigError
        Naming the settings, and what to do.
    """
    decode = spec.decode
    why = why_not_combined(spec)
    if decode.mode == "head-parallel" and why is not None:
        raise ConfigError(f"decode.mode = 'head-parallel': {why}; leave one of the two out, or choose mode = 'auto'")
    if decode.copies is not None and decode.copies > chain_size:
        raise ConfigError(
            f"decode.copies = {decode.copies} is more than the {chain_size} rank(s) of a chain; leave it out: the "
            f"default of one copy fewer than ranks already balances them if heads are split in proportion"
        )
    if decode.profile is not None and not Path(decode.profile).is_file():
        raise ConfigError(
            f"decode.profile = {decode.profile!r}: no such file; create one with kvr profile-heads, or leave it out "
            f"to place heads by the number of tokens they keep"
        )
