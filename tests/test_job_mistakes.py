"""Job files that cannot be read and keys there are not: every mistake is named with the way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_jobs import COMPRESS, MINIMAL, SECTIONS, load, refusal, write_job

from kvr_mpi.errors import ConfigError
from kvr_mpi.job import load_job, show_job

TRUST = {"KVR_MODEL__TRUST_REMOTE_CODE": "true"}


def test_a_job_file_that_is_missing_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("no.toml")) == (
        f"job file 'no.toml' not found (looked for {tmp_path / 'no.toml'}); kvr init writes one"
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
