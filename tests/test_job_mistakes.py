"""Job files that cannot be read and keys there are not: every mistake is named with the way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_jobs import MINIMAL, SECTIONS, load, refusal, write_job

from kvr_mpi.errors import ConfigError
from kvr_mpi.job import load_job, show_job


def test_a_job_file_that_is_missing_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("no.toml")) == (
        f"job file 'no.toml' not found (looked for {tmp_path / 'no.toml'}); kvr init writes one"
    )
    assert re.search(f"{re.escape(str(tmp_path))}.* cannot be read.*directory", refusal(tmp_path))


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


def test_a_value_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    assert "--set model.dtype" in refusal(path, f"model.dtype={'[' * 20_000}")
    assert "KVR_MODEL__DTYPE" in refusal(path, KVR_MODEL__DTYPE="{a=" * 20_000)


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


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[generate]\nseed = 1", f"unknown key 'generate'.*{', '.join(SECTIONS)}"),
        ("[paralel]\nx = 1", "unknown key 'paralel': did you mean 'parallel'\\?"),
        ("[prompt]\ntemplat = 1", "unknown key 'prompt.templat': did you mean 'template'\\? valid keys: .*template"),
        ("[generation]\ntop_logprobs = 3", "did you mean 'logprobs'"),
        ("[output.zzz]\nyyy = 1", "unknown key 'output.zzz': valid keys: path, kv"),
    ],
)
def test_an_unknown_key_is_told_those_that_are(tmp_path: Path, more: str, said: str) -> None:
    message = refusal(write_job(tmp_path, more))
    assert message.startswith(str(tmp_path / "job.toml")) and re.search(said, message), message


def test_a_key_is_blamed_on_where_it_is_from(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    assert refusal(path, "generation.sed=1").startswith("--set generation.sed: unknown key 'generation.sed'")
    assert refusal(path, KVR_GENERATION__SED="1").startswith("KVR_GENERATION__SED: unknown key 'generation.sed'")
    assert "--set generate.seed" in refusal(path, "generate.seed=1")
    assert "KVR_GENERATE__SEED" in refusal(path, KVR_GENERATE__SEED="1")
    assert "unknown key 'limit'" in refusal(write_job(tmp_path, text="limit = 3\n" + MINIMAL))


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


def test_a_malformed_setting_shows_how_it_is_done(tmp_path: Path) -> None:
    for setting in ("", "=", "seed=5", "generation.seed", ".seed=5", "generation.=5", "  .  =1"):
        message = refusal(write_job(tmp_path), setting)
        assert message.startswith(f"--set {setting!r}: expected section.key=value, for example ")


def test_the_environment_alone_does_not_make_foreign_code_run(tmp_path: Path) -> None:
    plain = write_job(tmp_path)
    message = refusal(plain, KVR_MODEL__TRUST_REMOTE_CODE="true")
    assert message.startswith("KVR_MODEL__TRUST_REMOTE_CODE: ") and "--set model.trust_remote_code=true" in message
    refusal(plain, "model.trust_remote_codes=true", KVR_MODEL__TRUST_REMOTE_CODE="true")
    assert not load(plain, KVR_MODEL__TRUST_REMOTE_CODE="false").model.trust_remote_code
    environ = {"KVR_MODEL__TRUST_REMOTE_CODE": "true"}
    assert load(plain, "model.trust_remote_code=true", **environ).model.trust_remote_code
    assert not load(plain, "model.trust_remote_code=false", **environ).model.trust_remote_code
    said = tmp_path / "said.toml"
    said.write_text(plain.read_text().replace("[model]", "[model]\ntrust_remote_code = true"))
    assert load(said, **environ).model.trust_remote_code
    assert not load(said, KVR_MODEL__TRUST_REMOTE_CODE="false").model.trust_remote_code
