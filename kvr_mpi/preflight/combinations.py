"""Settings of a job that cannot be combined, and why: decoding, rolling caches, and tensor-parallel groups."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvr_mpi.documents.document import AS_THE_JOB
from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.job import JobSpec
from kvr_mpi.model import find_model
from kvr_mpi.model.tensor_parallel import why_not_divided


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
            f"decode.profile = {decode.profile!r}: no such file; create one with kvr search JOB --heads, or leave it "
            f"out to place heads by the number of tokens they keep"
        )


def check_tensor_parallel(spec: JobSpec) -> None:
    """Refuse groups beside what they would be ignored by, or would make wrong, and heads that they do not divide.

    Raises
    ------
    ConfigError
        Naming the settings, and what to do.
    """
    size = spec.parallel.tensor_parallel
    if size == 1:
        return
    if why := _why_not_combined(spec):
        raise ConfigError(f"parallel.tensor_parallel = {size}: {why}")
    if why := _why_not_heads(spec.model.path, size):
        raise ConfigError(f"parallel.tensor_parallel = {size}: {why}")


def _why_not_combined(spec: JobSpec) -> str | None:
    """Say what else in a job keeps its groups from being several ranks; None: nothing."""
    parallel, model = spec.parallel, spec.model
    if parallel.strategy != "kvr":
        return f"strategy = {parallel.strategy!r} needs a whole model on every rank; choose strategy = 'kvr'"
    if parallel.ranks_per_chain == "auto":
        return "ranks_per_chain = 'auto' plans for ranks that hold the whole model; give a number of ranks, or 'all'"
    if parallel.table is not None:
        return "parallel.table was measured on ranks that hold the whole model; choose partition = 'equal_time'"
    if spec.decode.mode != "data-parallel":
        return f"decode.mode = {spec.decode.mode!r} distributes heads, which tensor_parallel does already; leave it out"
    if spec.cache.is_rolling:
        return "cache.kind = 'rolling' needs ranks that hold the whole model each; leave one of the two out"
    if model.adapter is not None:
        return (
            "model.adapter is merged into whole matrices, but a rank of a tensor-parallel group loads slices of them; "
            "save a merged "
            "model and use its folder"
        )
    if model.trust_remote_code:
        return "model.trust_remote_code: transformers has no plan to split such a model; leave one of the two out"
    return None


def _why_not_heads(path: str, size: int) -> str | None:
    """Look into a model's folder for its heads; what is wrong with the folder is said of the model."""
    try:
        source = find_model(path)
    except ModelError:
        return None
    if source.is_hub:
        return (
            f"model.path {path!r} is an id on the hub, but the ranks of a tensor-parallel group read slices of files "
            f"in a folder: "
            f"download it (hf download {path} --local-dir FOLDER), and use that folder"
        )
    file = Path(source.location) / "config.json"
    if source.gguf_file is not None or not file.is_file():
        return None
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    heads = found.get("num_attention_heads") if isinstance(found, dict) else None
    kv_heads = found.get("num_key_value_heads") or heads if isinstance(found, dict) else None
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or min(heads, kv_heads) < 1:
        return None
    return why_not_divided(heads, kv_heads, size)


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
