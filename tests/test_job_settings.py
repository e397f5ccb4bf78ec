"""``--set`` and variables: any words are taken for what they mean, or refused with how it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_files import load, refusal, write_job

from kvr_mpi.errors import ConfigError
from kvr_mpi.job import JobSpec, load_job, show_job


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("generation.max_new_tokens=64", 64),
        ("generation.max_new_tokens = 64", 64),
        ("generation.temperature=0.5", 0.5),
        ("generation.temperature=1", 1.0),
        ('generation.stop=["END", "\\n\\n"]', ["END", "\n\n"]),
        ("generation.stop=[]", []),
        ("parallel.ranks_per_chain=4", 4),
        ("parallel.ranks_per_chain=all", "all"),
        ("documents.path=my corpus/part one", ["my corpus/part one"]),
        ("documents.path=~/corpus/*.txt", ["~/corpus/*.txt"]),
        ("documents.path=['a b', 'c']", ["a b", "c"]),
        ("model.path=Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("model.adapter='0123'", "0123"),
        ("prompt.template={text}", "{text}"),
        ("prompt.template=Sum up {text} in a = b form", "Sum up {text} in a = b form"),
        ("prompt.template='Sum up: {text} '", "Sum up: {text} "),
        ('prompt.template="Sum up:\\n{text}"', "Sum up:\n{text}"),
        ("prompt.system=It's 5 o'clock", "It's 5 o'clock"),
        ("prompt.too_long=split", "split"),
    ],
)
def test_a_setting_is_toml_or_else_plain_words(tmp_path: Path, setting: str, value: Any) -> None:
    target, _, text = setting.partition("=")
    section, _, key = target.strip().partition(".")
    spec, sources = load_job(write_job(tmp_path), [setting], {})
    assert getattr(getattr(spec, section), key) == value
    assert type(getattr(getattr(spec, section), key)) is type(value)
    assert sources[f"{section}.{key}"] == f"--set {section}.{key}"
    # The same words in a variable mean the same.
    name = f"KVR_{section}__{key}".upper()
    assert load_job(write_job(tmp_path), (), {name: text.strip()})[0] == spec


@pytest.mark.parametrize(
    ("setting", "documents", "allowed"),
    [
        ("0", 9, 0),
        ("3", 2, 3),
        ("0.05", 100, 5),
        ("0.05", 19, 0),
        ("5%", 20, 1),
        ("12.5 %", 8, 1),
        ("1.0", 7, 7),
        ("0.0", 7, 0),
    ],
)
def test_failures_allowed(tmp_path: Path, setting: str, documents: int, allowed: int) -> None:
    spec = load(write_job(tmp_path), f"output.max_failed={setting}")
    assert spec.output.failures_allowed(documents) == allowed
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize("setting", ["-1", "1.5", "-0.1", "nan", "101%", "some", "true", "[1]", "%"])
def test_failures_allowed_are_a_number_or_a_share(tmp_path: Path, setting: str) -> None:
    assert "output.max_failed" in refusal(write_job(tmp_path), f"output.max_failed={setting}")


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


@pytest.mark.parametrize(
    "setting", ["", "=", "seed=5", "generation.seed", "generation=5", ".seed=5", "generation.=5", "  .  =1", "--kv"]
)
def test_a_malformed_setting_shows_how_it_is_done(tmp_path: Path, setting: str) -> None:
    message = refusal(write_job(tmp_path), setting)
    assert message.startswith(f"--set {setting!r}: expected section.key=value, for example ")


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
