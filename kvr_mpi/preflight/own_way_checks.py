"""What rolling caches cannot be combined with, as far as it shows before loading; no torch."""

from __future__ import annotations

from collections.abc import Mapping

from kvr_mpi.errors import ConfigError
from kvr_mpi.job import JobSpec


def check_cache(spec: JobSpec) -> None:
    """Refuse a rolling cache beside what it would be ignored by, or would make wrong.

    Raises
    ------
    ConfigError
        Naming the settings, and what to do.
    """
    if not spec.cache.is_rolling:
        return
    parallel, generation = spec.parallel, spec.generation
    wrong = {
        f"parallel.strategy = {parallel.strategy!r}": (
            parallel.strategy in ("single", "ring"),
            "only strategy = 'kvr' has a rolling cache; choose it",
        ),
        f"parallel.ranks_per_chain = {parallel.ranks_per_chain!r}": (
            isinstance(parallel.ranks_per_chain, int) and parallel.ranks_per_chain > 1,
            "each rank has a rolling cache and documents of its own; leave it out",
        ),
        f"parallel.partition = {parallel.partition!r}": (
            parallel.partition in ("table", "ratio"),
            "prompts are not cut into slices; leave it out",
        ),
        f"parallel.chunk_tokens = {parallel.chunk_tokens}": (
            parallel.chunk_tokens != "auto",
            "its steps are chunks already (cache.step_tokens); leave it out",
        ),
        "[compress]": (
            spec.compress is not None,
            "compression chooses among all tokens of a prompt; leave one of the two out",
        ),
        f"decode.mode = {spec.decode.mode!r}": (
            spec.decode.mode == "head-parallel",
            "all heads of a rolling cache stay on one rank; leave decode.mode out",
        ),
        f"output.kv = {str(spec.output.kv).lower()}": (
            bool(spec.output.kv),
            "a rolling cache holds only part of a prompt, which cannot be continued later; leave output.kv out",
        ),
        "[questions]": (spec.questions is not None, "questions need the whole stored prompt; leave one of the two out"),
        "documents.reuse": (
            spec.documents.reuse is not None,
            "reuse needs the whole stored prompt; leave one of the two out",
        ),
        "documents.format = 'openai-batch'": (
            spec.documents.format == "openai-batch",
            "requests may ask for several answers to one prompt, whose tokens are dropped while the first is written; "
            "turn the requests into documents",
        ),
        f"generation.n = {generation.n}": (
            generation.n > 1,
            "tokens of the prompt are dropped while the first answer is written; leave it out",
        ),
        "generation.score_column" if generation.score_column is not None else "generation.score": (
            generation.scores,
            "tokens of the prompt are dropped while the first continuation is scored; leave it out",
        ),
    }
    _refuse(wrong, "cache.kind = 'rolling'")


def _refuse(wrong: Mapping[str, tuple[bool, str]], beside: str) -> None:
    """Refuse the first setting that is wrong beside another, and say why."""
    for key, (is_wrong, why) in wrong.items():
        if is_wrong:
            raise ConfigError(f"{key} cannot be combined with {beside}: {why}")
