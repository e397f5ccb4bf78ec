"""What prompts that go a way of their own (``own_ways``) do not go with, as far as shows before loading; no torch."""

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
            "it has another cache; choose 'kvr'",
        ),
        "parallel.partition = 'table'": (
            parallel.partition == "table",
            "tables are of chains that hold whole prompts, each rank one slice of them; choose 'even', 'ratio' or "
            "'equal_time'",
        ),
        f"parallel.chunk_tokens = {parallel.chunk_tokens}": (
            parallel.chunk_tokens != "auto",
            "its steps are chunks already (cache.step_tokens); leave it out",
        ),
        "[compress]": (spec.compress is not None, "methods choose among all tokens; leave one of the two out"),
        f"decode.mode = {spec.decode.mode!r}": (
            spec.decode.mode == "head-parallel",
            "its heads stay on one rank; leave decode.mode out",
        ),
        f"output.kv = {str(spec.output.kv).lower()}": (
            bool(spec.output.kv),
            "what is left of a prompt is no whole cache, and nothing goes on from it; leave output.kv out",
        ),
        "[questions]": (spec.questions is not None, "stored prompts are whole; leave one of the two out"),
        "documents.reuse": (
            spec.documents.reuse is not None,
            "prompts would go on from whole ones; leave one of the two out",
        ),
        "documents.format = 'openai-batch'": (
            spec.documents.format == "openai-batch",
            "requests may ask for several answers from one prompt, which is gone when the first is written; make "
            "documents of it",
        ),
        f"generation.n = {generation.n}": (
            generation.n > 1,
            "the prompt's last tokens are gone when the first answer is written; leave it out",
        ),
        "generation.score_column" if generation.score_column is not None else "generation.score": (
            generation.scores,
            "the prompt's last tokens are gone when the first continuation is read; leave it out",
        ),
    }
    _refuse(wrong, "cache.kind = 'rolling'")


def check_streaming(spec: JobSpec, ranks: int) -> None:
    """Refuse streamed weights where each answer would read all of them many times, or that run otherwise.

    Parameters
    ----------
    ranks : int
        Of the whole job.

    Raises
    ------
    ConfigError
        Naming the settings, and what to do.
    """
    if not spec.model.stream_weights:
        return
    model, parallel, generation = spec.model, spec.parallel, spec.generation
    wrong = {
        f"generation.max_new_tokens = {generation.max_new_tokens}": (
            generation.max_new_tokens > 1,
            "every token of an answer would read all weights; set 0 (prefill only) or 1",
        ),
        f"parallel.strategy = {parallel.strategy!r}": (
            parallel.strategy in ("single", "ring"),
            "choose 'kvr', and parallel.ranks_per_chain = 1",
        ),
        f"parallel.ranks_per_chain = {parallel.ranks_per_chain!r} with {ranks} rank(s)": (
            parallel.planned or (ranks > 1 and parallel.ranks_per_chain != 1),
            "a chain runs one prompt at a time, and weights are read once for many; set parallel.ranks_per_chain = 1",
        ),
        f"parallel.chunk_tokens = {parallel.chunk_tokens}": (parallel.chunk_tokens != "auto", "leave it out"),
        "cache.kind = 'rolling'": (spec.cache.is_rolling, "each of its steps would read all weights; leave it out"),
        "model.device = 'cuda'": (model.device == "cuda", "layers are read into the host's memory; set 'cpu'"),
        "model.kernels = 'compiled'": (
            model.kernels == "compiled",
            "layers that come and go compute with the model's own code; leave it out",
        ),
        "model.adapter": (model.adapter is not None, "merge the adapter into the files first"),
        "model.trust_remote_code = true": (model.trust_remote_code, "only transformers' own models are streamed"),
        "output.kv = 'sharded'": (spec.output.kv == "sharded", "it is for chains; set output.kv = true"),
        f"decode.mode = {spec.decode.mode!r}": (
            spec.decode.mode != "data-parallel",
            "nothing is decoded; leave it out",
        ),
        "[compress]": (spec.compress is not None, "leave one of the two out"),
        "[questions]": (spec.questions is not None, "answers would read all weights for every token"),
        "documents.reuse": (spec.documents.reuse is not None, "leave one of the two out"),
        "documents.format = 'openai-batch'": (
            spec.documents.format == "openai-batch",
            "its requests want answers, each token of which would read all weights",
        ),
    }
    _refuse(wrong, "model.stream_weights = true")


def _refuse(wrong: Mapping[str, tuple[bool, str]], beside: str) -> None:
    """Refuse the first setting that is wrong beside another, and say why."""
    for key, (is_wrong, why) in wrong.items():
        if is_wrong:
            raise ConfigError(f"{key} does not go with {beside}: {why}")
