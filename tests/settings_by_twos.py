"""Settings of jobs by name; for `test_settings_together`. Which are refused is in `kvr_mpi.job.combinations`.

A setting says how answers are computed (`WAYS`), what is kept beside them (`KEPT`), or what is asked (`ASKED`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from made_jobs import plain_job, toml_of

from kvr_mpi.job import JobSpec
from kvr_mpi.job.combinations import refusals

Job = Mapping[str, Any]
NAMED = {name: f"{{text}} {name}?" for name in ("first", "second")}
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}'
)
SMALL = {"compress.method": "ada-snapkv", "compress.budget": 32, "compress.window": 8}
OBSERVED = {**SMALL, "compress.observes": "document"}
QUESTIONS = {"documents.path": "{stored}", "prompt.template": None, "questions.ask": ["Who saw it?"]}
SCORED = {"generation.score": [" yes", " Nobody had seen it"], "generation.max_new_tokens": None}
SAMPLED = {"generation.temperature": 1.5}

WAYS: dict[str, Job] = {
    "chunks": {"parallel.chunk_tokens": 37},
    "ring": {"parallel.strategy": "ring"},
    "auto": {"parallel.strategy": "auto"},
    "single": {"parallel.strategy": "single"},
    "alone": {"parallel.ranks_per_chain": 1},
    "groups": {"parallel.tensor_parallel": 2},
    "planned": {"parallel.ranks_per_chain": "auto"},
    "little": {"parallel.memory_gib": 0.0016},
    "heads": {"decode.mode": "head-parallel"},
    "heads-auto": {"decode.mode": "auto"},
    "pages": {},
    "report": {"output.trace": True},
    "resumed": {},
}
KEPT: dict[str, Job] = {
    "kv": {"output.kv": True},
    "sharded": {"output.kv": "sharded"},
    "reuse": {"documents.reuse": "{stored}"},
    "logprobs": {"generation.logprobs": 2},
}
ASKED: dict[str, Job] = {
    "prompts": {"prompt.template": NAMED},
    "questions": QUESTIONS,
    "questions-sharded": {**QUESTIONS, "parallel.ranks_per_chain": "all"},
    "questions-compressed": {**QUESTIONS, "documents.path": "{compressed}"},
    "split": {"prompt.too_long": "split", "prompt.max_tokens": 250},
    "coverage": {"prompt.min_coverage": 0.01},
    "requests": {"documents.path": "{requests}", "documents.format": "openai-batch", "prompt.template": None},
    "compress": SMALL,
    "observed": OBSERVED,
    "rolling": {"cache.kind": "streaming-llm", "cache.tokens": 40, "parallel.chunk_tokens": 16},
    "score": SCORED,
    "score-column": {**SCORED, "documents.path": "{rows}", "generation.score": "choices"},
    "samples": {**SAMPLED, "generation.n": 2},
    "schema": {"generation.json_schema": SCHEMA, "generation.max_new_tokens": 16},
    "adapter": {"model.adapter": "{adapter}"},
}
SETTINGS = {**WAYS, **KEPT, **ASKED}
RUNS: dict[str, Job] = {
    "stored": {"output.kv": True},
    "compressed": {"output.kv": True, **OBSERVED},
}

# Pairs that are refused for what a run has stored, or on two ranks, which no table of settings knows; and what is said.
REFUSED_LATER = {
    frozenset(("alone", "groups")): "cannot be divided into tensor-parallel groups of 2",
    frozenset(("kv", "questions-compressed")): "questions about doc-.*: it is compressed",
    **{
        frozenset((name, "adapter")): "did not compute the keys and values .* different weights"
        for name in ("reuse", "questions", "questions-sharded", "questions-compressed")
    },
}


def merged(names: Collection[str]) -> dict[str, Any] | None:
    """All settings of some names; None if two of them say different things of one key."""
    found: dict[str, Any] = {}
    for name in names:
        for key, value in SETTINGS[name].items():
            if found.setdefault(key, value) != value:
                return None
    return found


def said_of(names: Collection[str], base: Job | None = None) -> list[str]:
    """What a job of these settings is refused with, as patterns; nothing if it runs.

    `base` has the job's other settings, and the values of those that name a place.
    """
    plain = {"prompt.template": "{text}", "generation.max_new_tokens": 6}
    job = {**plain_job("m", "c", "o"), **plain, **(base or merged(names) or {})}
    if "resumed" in names:
        job["documents.shard"] = "0/2"
    found = refusals(JobSpec.model_validate(tomllib.loads(toml_of(job))))
    otherwise = (said for pair, said in REFUSED_LATER.items() if pair <= set(names))
    return [*map(re.escape, found)] or list(otherwise)


def covering(
    pairs: Sequence[tuple[str, str]], refused: Collection[tuple[str, str]], most: int
) -> list[tuple[str, ...]]:
    """Put settings into as few jobs as come of taking the best one next, so that each pair that runs is in one."""
    runs = {frozenset(pair) for pair in pairs if pair not in refused}
    left, found = [frozenset(pair) for pair in pairs if pair not in refused], list[tuple[str, ...]]()
    while left:
        job = [name for name in SETTINGS if name in left[0]]
        while len(job) < most:
            open_pairs = set(left)
            fits = [
                name
                for name in SETTINGS
                if name not in job and all({name, one} in runs for one in job) and merged([*job, name]) is not None
            ]
            new = {name: sum({name, one} in open_pairs for one in job) for name in fits}
            best = max(fits, key=lambda name: new[name], default=None)
            if best is None or not new[best]:
                break
            job.append(best)
        found.append(tuple(job))
        left = [pair for pair in left if not pair <= set(job)]
    return found
