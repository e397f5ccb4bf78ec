"""Keys and values of a job: none is made to fit, and a wrong one is named with what is expected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from made_jobs import COMPRESS, MINIMAL, load, refusal, write_job

from kvr_mpi.errors import ConfigError
from kvr_mpi.job import JobSpec, load_job
from kvr_mpi.plain import parse_size

# A setting, and what is said of it after its name and value: of another type (a value is never made to fit), a wrong
# choice, out of range, or without sense. One of each sort: every key's type, choices and range are in the reference.
REFUSED = [
    ("model.trust_remote_code=1", "= 1: expected true or false"),
    ("documents.path=['a', 3]", "= 3: .*text"),
    ("documents.limit=1.5", "= 1.5: .*whole number"),
    ("documents.limit=true", "= True: .*whole number, such as 64"),
    ("generation.temperature=hot", "= 'hot': .*a number, such as 0.5"),
    ("generation.stop=END", "= 'END': .*a list"),
    ("output.kv=yes", "= 'yes': expected true or false, or 'sharded'"),
    ("output.path=2024-05-01", r"= datetime\.date\(2024, 5, 1\): .*text"),
    ("parallel.ranks_per_chain=some", "= 'some': .*whole number.*'all'"),
    ("parallel.strategy=wrong", "= 'wrong': expected one of 'auto', .*'single'.*'ring'.*'kvr'"),
    ("documents.encoding=base64", "= 'base64': expected an encoding that Python knows"),
    ("documents.encoding=klingon", "= 'klingon': expected an encoding that Python knows"),
    ('documents.encoding="a\\u0000b"', "= .*expected an encoding that Python knows"),
    ("prompt.template={}", "= {}: .*one entry or more"),
    ("generation.temperature=nan", "= nan: .*a number"),
    ("generation.logprobs=21", "= 21: .*at most 20"),
    ("parallel.ranks_per_chain=0", "= 0: .*at least 1, or .*'all' or 'auto'"),
    ("compress.budget=0", "= 0: .*more than 0"),
    ("compress.budget=64.5", "= 64.5: expected a whole number of tokens, or the share"),
    *((f"documents.shard='{one}'", f"= '{one}': expected 'i/n' with 0 <= i < n") for one in ("4/4", "-1/4", "a/b")),
    *((f"output.max_failed={one}", "") for one in ("-1", "1.5", "nan", "101%", "some", "true", "[1]", "%")),
    ("generation.stop=['END', '']", "= '': .*not empty"),
    ("generation.n=2", "= 2: .*without sampling, all answers are the same"),
    ("generation.score=['']", ".*an empty continuation has no probability"),
    ("cache.tokens=40", ".*is for rolling caches"),
    ("decode.placement=static", "is not used with mode = 'data-parallel'"),
]


def test_a_wrong_value_is_named_with_what_is_expected(tmp_path: Path) -> None:
    for setting, expected in REFUSED:
        key = setting.partition("=")[0]
        message = refusal(write_job(tmp_path, COMPRESS if key.startswith("compress") else ""), setting)
        assert re.search(rf"^--set .*{re.escape(key)} *{expected}", message, re.MULTILINE), message
        assert len(message.splitlines()) == 1, "one mistake is told once"


@pytest.mark.parametrize(
    ("setting", "documents", "allowed"),
    [
        ("0", 9, 0),
        ("3", 2, 3),
        ("0.05", 100, 5),
        ("0.05", 19, 0),
        ("0.29", 100, 29),
        ("5%", 20, 1),
        ("12.5 %", 8, 1),
        ("1.0", 7, 7),
    ],
)
def test_failures_allowed(tmp_path: Path, setting: str, documents: int, allowed: int) -> None:
    assert load(write_job(tmp_path), f"output.max_failed={setting}").output.failures_allowed(documents) == allowed


@pytest.mark.parametrize(
    "settings",
    [
        ["compress.method=ada-snapkv"],
        ["decode.mode=head-parallel", "decode.placement=equal"],
        ["output.max_failed=12.5 %", "prompt.template={a = '{text}'}"],
    ],
)
def test_a_job_reaches_all_ranks_as_it_was_read(tmp_path: Path, settings: list[str]) -> None:
    more = COMPRESS if settings[0].startswith("compress") else ""
    spec = load(write_job(tmp_path, more), *settings)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec, "with all its defaults"


def test_all_mistakes_are_told_at_once_each_in_a_line(tmp_path: Path) -> None:
    more = "[generation]\nseed = -1\ntop_k = 'x'\n[prompt]\nkep = 1\n[compress]\nmethod = 'snapkv'\n"
    message = refusal(write_job(tmp_path, more, text=MINIMAL.partition("[output]")[0]))
    for mistake in ("generation.seed = -1", "generation.top_k = 'x'", "'prompt.kep'", "output:? is missing"):
        assert len(re.findall(f"job.toml: .*{mistake}", message)) == 1
    assert "compress.budget: is missing" in message and len(message.splitlines()) == 6


def test_shares_tokens_and_sizes_may_be_written_as_people_write_them(tmp_path: Path) -> None:
    words = ["prompt.max_tokens=4k", "prompt.min_coverage=90%", "parallel.chunk_tokens=2K", "compress.budget=12.5%"]
    words += ["compress.method=snapkv", "parallel.memory_gib=1.5 T", "generation.max_new_tokens=1k"]
    spec, _ = load_job(write_job(tmp_path), words, {})
    assert spec.compress is not None and (spec.prompt.max_tokens, spec.prompt.min_coverage) == (4096, 0.9)
    assert (spec.parallel.chunk_tokens, spec.compress.budget) == (2048, 0.125)
    assert (spec.parallel.memory_gib, spec.generation.max_new_tokens) == (1536, 1024)
    assert [parse_size(text) for text in ("12", "1.5 KiB", "2G", "3TB", "G", "1x")] == [
        12,
        1536,
        2 << 30,
        3 << 40,
        None,
        None,
    ]
    for wrong in (
        "prompt.max_tokens=4x",
        "prompt.max_tokens=0k",
        "parallel.memory_gib=0G",
        "prompt.min_coverage=150%",
        "compress.budget=-3%",
    ):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            load_job(write_job(tmp_path), [wrong], {})
