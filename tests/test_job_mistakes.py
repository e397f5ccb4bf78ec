"""Job files that cannot be read and keys there are not: every mistake is named with the way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_jobs import COMPRESS, MINIMAL, SECTIONS, load, refusal, write_job

from kvr_mpi.errors import ConfigError
from kvr_mpi.job import JobSpec, load_job, show_job
from kvr_mpi.plain import parse_size

TRUST = {"KVR_MODEL__TRUST_REMOTE_CODE": "true"}


def test_a_job_file_that_is_missing_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("no.toml")) == (
        f"job file 'no.toml' not found: {tmp_path / 'no.toml'}; create one with kvr init"
    )
    assert re.search(f"{re.escape(str(tmp_path))}.* cannot be read.*directory", refusal(tmp_path))
    assert refusal(Path("no.jsonl")).startswith("file of requests 'no.jsonl' not found")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[model\npath = 1", "line 1"),
        ("[model]\npath = words", "line 2"),
        ("[model]\npath = 'a'\npath = 'b'\n", "line 3"),
        ("a=" + "[" * 20_000, ""),
        ("# caf\udce9\n", "utf-8.*0xe9"),
    ],
)
def test_broken_toml_names_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert re.search(rf"{re.escape(str(path))}.* cannot be read as TOML: .*{said}", refusal(path))


@settings(max_examples=60)
@given(raw=st.binary(max_size=100) | st.text("[]={}.'\"\n modelpath1", max_size=60).map(str.encode))
def test_no_file_is_more_than_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_bytes(raw)
    assert refusal(path)  # none of these is a whole job


@settings(max_examples=60)
@given(setting=st.text(st.characters(codec="utf-8"), max_size=40) | st.text("generation.seed=[]{}'\" 1", max_size=30))
def test_any_setting_is_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, setting: str) -> None:
    path = write_job(tmp_path_factory.mktemp("job"))
    try:
        spec, sources = load_job(path, [setting], {})
    except ConfigError as error:
        assert str(error)
    else:
        assert len(show_job(spec, sources)) > 20


MALFORMED = ("", "=", "seed=5", "generation.seed", ".seed=5", "generation.=5", "  .  =1")
# What stands in the file beside the least of a job, settings, variables, and what is said.
MISTAKES: list[tuple[str, list[str], dict[str, str], str]] = [
    ("[generate]\nseed = 1", [], {}, f"^/.*job.toml: unknown key 'generate'.*{', '.join(SECTIONS)}"),
    ("[paralel]\nx = 1", [], {}, "^/.*job.toml: unknown key 'paralel': did you mean 'parallel'\\?"),
    ("[prompt]\ntemplat = 1", [], {}, "'prompt.templat': did you mean 'template'\\? valid keys: .*template"),
    ("[generation]\ntop_logprobs = 3", [], {}, "did you mean 'logprobs'"),
    ("[output.zzz]\nyyy = 1", [], {}, "unknown key 'output.zzz': valid keys: path, kv"),
    # A key is blamed on where it is from.
    ("", ["generation.sed=1"], {}, "^--set generation.sed: unknown key 'generation.sed'"),
    ("", [], {"KVR_GENERATION__SED": "1"}, "^KVR_GENERATION__SED: unknown key 'generation.sed'"),
    ("", [], {"KVR_GENERATION_SEED": "1"}, "^KVR_GENERATION_SEED: unknown .* did you mean KVR_GENERATION__SEED\\?"),
    ("", [], {"KVR_PEER_TIMOUT": "1"}, "did you mean KVR_PEER_TIMEOUT\\?"),
    ("", ["generate.seed=1"], {}, "--set generate.seed"),
    ("", [], {"KVR_GENERATE__SEED": "1"}, "KVR_GENERATE__SEED"),
    # A value that is nested without end, and settings that are none.
    ("", [f"model.dtype={'[' * 20_000}"], {}, "--set model.dtype"),
    ("", [], {"KVR_MODEL__DTYPE": "{a=" * 20_000}, "KVR_MODEL__DTYPE"),
    *(("", [one], {}, f"^--set {re.escape(repr(one))}: expected section.key=value, for example ") for one in MALFORMED),
    # Values that make no sense together.
    (COMPRESS, ["compress.budget=63"], {}, "compress.budget = 63 is less than the 64 tokens .*compress.window"),
    (COMPRESS, ["compress.profile=p"], {}, "profile is not used with method = 'snapkv', which uses window, budget"),
    (COMPRESS, ["compress.method=streaming-llm", "compress.budget=4"], {}, "less than the 5 tokens .*raise it"),
    (COMPRESS, ["compress.method=headkv"], {}, "needs compress.profile = 'FILE'"),
    ("", ["cache.kind=rolling", "cache.tokens=4"], {}, "cache.tokens = 4"),
    # Foreign code does not run by the environment alone.
    ("", [], TRUST, "^KVR_MODEL__TRUST_REMOTE_CODE: .*--set model.trust_remote_code=true"),
    ("", ["model.trust_remote_codes=true"], TRUST, ""),
]


@pytest.mark.parametrize(("more", "given", "environ", "said"), MISTAKES, ids=[row[-1][:40] for row in MISTAKES])
def test_a_mistake_is_named_with_the_way_out(
    tmp_path: Path, more: str, given: list[str], environ: dict[str, str], said: str
) -> None:
    message = refusal(write_job(tmp_path, more), *given, **environ)
    assert re.search(said, message), message


def test_a_section_is_no_value_and_a_key_is_in_a_section(tmp_path: Path) -> None:
    """Neither can it be mended from outside, for then the file would say something that is not so."""
    assert "unknown key 'limit'" in refusal(write_job(tmp_path, text="limit = 3\n" + MINIMAL))
    path = write_job(tmp_path, text="prompt = 'Sum up'\n" + MINIMAL)
    for words in ((), ("prompt.template={text}",)):
        assert re.search("job.toml: prompt = 'Sum up': .*section", refusal(path, *words))


@pytest.mark.parametrize("section", ["model", "documents", "output"])
def test_what_is_missing_is_named_with_what_it_is_for(tmp_path: Path, section: str) -> None:
    path = write_job(tmp_path, text=re.sub(rf"(\[{section}\])\npath.*", r"\1", MINIMAL))
    assert re.fullmatch(rf".*job\.toml: {section}\.path:? is missing \(.+\)", refusal(path))
    path = write_job(tmp_path, text=re.sub(rf"\[{section}\]\npath.*", "", MINIMAL))
    assert re.fullmatch(rf".*job\.toml: {section}:? is missing", refusal(path))


def test_a_line_break_is_typed_as_backslash_and_n(tmp_path: Path) -> None:
    """In texts for the model that are no TOML of their own, from a shell or the environment; nowhere else."""
    path, typed = write_job(tmp_path), r"{text}\n\nWho?"
    for spec in (
        load(path, f"prompt.template={typed}"),
        load(path, f'prompt.template="{typed}"'),
        load(path, KVR_PROMPT__TEMPLATE=typed),
    ):
        assert spec.prompt.template == "{text}\n\nWho?"
    assert load(path, f"prompt.template='{typed}'").prompt.template == typed
    schema = r'{"type": "string", "pattern": "a\nb"}'
    assert (
        load(path, f"generation.json_schema={schema}").generation.json_schema
        == load(path, f"generation.json_schema='{schema}'").generation.json_schema
    )


def test_the_environment_alone_does_not_make_foreign_code_run(tmp_path: Path) -> None:
    """It does if the command line or the file says so, too."""
    plain = write_job(tmp_path)
    assert not load(plain, KVR_MODEL__TRUST_REMOTE_CODE="false").model.trust_remote_code
    assert load(plain, "model.trust_remote_code=true", **TRUST).model.trust_remote_code
    assert not load(plain, "model.trust_remote_code=false", **TRUST).model.trust_remote_code
    said = tmp_path / "said.toml"
    said.write_text(plain.read_text().replace("[model]", "[model]\ntrust_remote_code = true"))
    assert load(said, **TRUST).model.trust_remote_code
    assert not load(said, KVR_MODEL__TRUST_REMOTE_CODE="false").model.trust_remote_code


# Values: none is made to fit, and a wrong one is named with what is expected


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
    ("parallel.strategy=wrong", "= 'wrong': expected 'kvr' or 'single'"),
    ("documents.encoding=base64", "= 'base64': expected a Python encoding"),
    ("documents.encoding=klingon", "= 'klingon': expected a Python encoding"),
    ('documents.encoding="a\\u0000b"', "= .*expected a Python encoding"),
    ("prompt.template={}", "= {}: .*at least one entry"),
    ("generation.temperature=nan", "= nan: .*a number"),
    ("generation.logprobs=21", "= 21: .*at most 20"),
    ("parallel.ranks_per_chain=0", "= 0: .*at least 1, or .*'all' or 'auto'"),
    ("compress.budget=0", "= 0: .*more than 0"),
    ("compress.budget=64.5", "= 64.5: expected a whole number of tokens, or the share"),
    *((f"documents.shard='{one}'", f"= '{one}': expected 'i/n' with 0 <= i < n") for one in ("4/4", "-1/4", "a/b")),
    *((f"output.max_failed={one}", "") for one in ("-1", "1.5", "nan", "101%", "some", "true", "[1]", "%")),
    ("generation.stop=['END', '']", "= '': .*non-empty"),
    ("generation.n=2", "= 2: .*without sampling, all answers are the same"),
    ("generation.score=['']", ".*an empty continuation has no probability"),
    ("cache.tokens=40", ".*requires a rolling cache"),
    ("decode.placement=static", "has no effect with mode = 'data-parallel'"),
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
    words = ["compress.method=snapkv", "compress.budget=2k", "compress.window=1k"]
    window = load_job(write_job(tmp_path), words, {})[0].compress
    assert window is not None and (window.budget, window.window) == (2048, 1024)
    words = ["generation.max_new_tokens=0", "output.text_logprobs=1k"]
    assert load_job(write_job(tmp_path), words, {})[0].output.text_logprobs == 1024
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
