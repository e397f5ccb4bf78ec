"""The table of combinations: every row of it is refused when a job is read, and nothing else it names."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any

import pytest
from made_jobs import plain_job

from kvr_mpi.errors import ConfigError
from kvr_mpi.job import JobSpec, make_job
from kvr_mpi.job.combinations import (
    MODELS,
    NO_EFFECT,
    REFUSED,
    check_combinations,
    setting_of,
    why_no_effect,
    why_not_heads,
)

PLAIN = plain_job("model", "corpus", "out")
# One value of each setting that a row names by its key, and what has to be set with it.
VALUES: dict[str, dict[str, Any]] = {
    "[compress]": {"compress.method": "snapkv", "compress.budget": 512},
    "compress.observes = 'document'": {"compress": {"method": "snapkv", "budget": 512, "observes": "document"}},
    "[questions]": {"questions.ask": ["Who?"]},
    "[questions] with parallel.ranks_per_chain": {"questions.ask": ["Who?"], "parallel.ranks_per_chain": 2},
    "[prompt.template]": {"prompt.template": {"a": "{text} a?", "b": "{text} b?"}},
    "cache.kind": {"cache.kind": "rolling"},
    "decode.mode": {"decode.mode": "auto"},
    "documents.format": {"documents.format": "messages"},
    "documents.id_field": {"documents.id_field": "name"},
    "documents.reuse": {"documents.reuse": "runs/before"},
    "documents.shard": {"documents.shard": "0/2"},
    "documents.text_field": {"documents.text_field": "body"},
    "generation.json_schema": {"generation.json_schema": '{"type": "object"}'},
    "generation.logprobs": {"generation.logprobs": 0},
    "generation.min_new_tokens": {"generation.min_new_tokens": 2},
    "generation.n": {"generation.n": 2, "generation.temperature": 1.0},
    "generation.score": {"generation.score": ["yes"]},
    "generation.score = FIELD": {"generation.score": "choices"},
    "generation.stop": {"generation.stop": ["END"]},
    "model.adapter": {"model.adapter": "adapter"},
    "model.trust_remote_code": {"model.trust_remote_code": True},
    "output.columns": {"output.columns": ["title"]},
    "output.embedding": {"output.embedding": "mean"},
    "output.kv": {"output.kv": True},
    "output.text_logprobs": {"output.text_logprobs": 20},
    "parallel.chunk_tokens": {"parallel.chunk_tokens": 64},
    "parallel.ranks_per_chain": {"parallel.ranks_per_chain": 2},
    "parallel.tensor_parallel": {"parallel.tensor_parallel": 2},
    "parallel.partition = PATH": {"parallel.partition": "tables"},
    "prompt.chat_template": {"prompt.chat_template": True},
    "prompt.date": {"prompt.date": "2026-01-31"},
    "prompt.template_args": {"prompt.template_args": {"enable_thinking": False}},
    "prompt.overlap_tokens": {"prompt.overlap_tokens": 20},
    "prompt.reduce_template": {"prompt.reduce_template": "{text} All?"},
    "prompt.system": {"prompt.system": "Be brief."},
    "prompt.template": {"prompt.template": "{text} Why?"},
    "prompt.too_long": {"prompt.too_long": "keep-tail"},
}
PAIRS = [(rule.setting, other) for rule in REFUSED for other in rule.others if other not in MODELS]
OF_MODELS = [(rule.setting, other) for rule in (*REFUSED, *NO_EFFECT) for other in rule.others if other in MODELS]
NAMES = sorted({name for pair in PAIRS for name in pair})


def value_of(name: str) -> dict[str, Any]:
    key, _, value = name.partition(" = ")
    return VALUES[name] if name in VALUES or not value else {key: tomllib.loads(f"v = {value}")["v"]}


def raw_job(*names: str) -> dict[str, Any]:
    job: dict[str, Any] = {}
    for key, value in itertools.chain.from_iterable(values.items() for values in (PLAIN, *map(value_of, names))):
        section, _, field = key.partition(".")
        job.setdefault(section, {}).update({field: value} if field else value)
    return job


def job_of(*names: str) -> JobSpec:
    return make_job(raw_job(*names), Path("job.toml"), (), {})[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_of_the_table_is_no_error_alone(name: str) -> None:
    assert setting_of(name, job_of(name)) is not None
    assert setting_of(name, job_of()) is None


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_a_pair_of_the_table_is_refused_by_name(pair: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        job_of(*pair)
    assert all(name.partition(" = ")[0] in str(caught.value) for name in pair)


@pytest.mark.parametrize("pair", OF_MODELS, ids=" + ".join)
def test_what_a_model_cannot_is_refused_or_has_no_effect_on_that_model_only(pair: tuple[str, str]) -> None:
    setting, kind = pair
    job = job_of(setting)
    check_combinations(job, ())
    if any(rule.setting == setting and kind in rule.others for rule in NO_EFFECT):
        assert why_no_effect(setting, job) is None and kind in (why_no_effect(setting, job, [kind]) or "")
        return
    with pytest.raises(ConfigError, match=kind):
        check_combinations(job, [kind])
    check_combinations(job, [other for other in MODELS if (setting, other) not in OF_MODELS])
    check_combinations(job_of(), MODELS)


def test_all_is_said_at_once_and_what_is_left_open_is_not_refused_but_explained() -> None:
    with pytest.raises(ConfigError, match="3 pairs") as caught:
        job_of("parallel.strategy = 'single'", "[compress]", "decode.mode = 'head-parallel'", "output.kv")
    assert str(caught.value).count("\n- ") == 3
    alone = "decode.mode = 'auto'"
    assert why_not_heads(job_of(alone)) is None
    for other in ("output.kv", "cache.kind", "parallel.strategy = 'single'"):
        assert other.partition(" = ")[0] in (why_not_heads(job_of(alone, other)) or "")
    assert why_not_heads(job_of(alone, "generation.logprobs")) is None
