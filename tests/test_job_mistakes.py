"""Job files that cannot be read and keys there are not: every mistake is named with the way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_files import MINIMAL, SECTIONS, refusal, write_job

# The file


def test_a_missing_job_file_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("no.toml")) == (
        f"job file 'no.toml' not found (looked for {tmp_path / 'no.toml'}); kvr init writes one"
    )


def test_a_folder_is_no_job_file(tmp_path: Path) -> None:
    assert re.search(f"{re.escape(str(tmp_path))}.* cannot be read.*directory", refusal(tmp_path))


@pytest.mark.parametrize(
    ("text", "line"), [("[model\npath = 1", 1), ("[model]\npath = words", 2), ("[model]\npath = 'a'\npath = 'b'\n", 3)]
)
def test_broken_toml_names_the_line(tmp_path: Path, text: str, line: int) -> None:
    message = refusal(write_job(tmp_path, text=text))
    assert str(tmp_path / "job.toml") in message
    assert re.search(f"cannot be read as TOML: .*line {line}", message)


@pytest.mark.parametrize("bracket", ["[", "{a="])
def test_a_value_that_is_nested_without_end_is_refused(tmp_path: Path, bracket: str) -> None:
    path, deep = write_job(tmp_path), bracket * 20_000
    assert "cannot be read as TOML" in refusal(write_job(tmp_path, f"a={deep}"))
    path = write_job(tmp_path)
    assert "--set model.dtype" in refusal(path, f"model.dtype={deep}")
    assert "KVR_MODEL__DTYPE" in refusal(path, KVR_MODEL__DTYPE=deep)


def test_a_job_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(MINIMAL.encode() + b"# caf\xe9\n")
    assert re.search(r"job\.toml.* cannot be read as TOML: .*utf-8.*0xe9", refusal(path))


@settings(max_examples=60)
@given(raw=st.binary(max_size=100) | st.text("[]={}.'\"\n modelpath1", max_size=60).map(str.encode))
def test_no_file_is_more_than_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_bytes(raw)
    assert refusal(path)  # none of these is a whole job


# Keys


def test_an_unknown_section_lists_the_sections(tmp_path: Path) -> None:
    message = refusal(write_job(tmp_path, "[generate]\nseed = 1"))
    assert message.startswith(str(tmp_path / "job.toml"))
    assert "unknown key 'generate'" in message and ", ".join(SECTIONS) in message


@pytest.mark.parametrize(
    ("wrong", "right"), [("paralel", "parallel"), ("outputs", "output"), ("document", "documents")]
)
def test_a_misspelt_section_is_suggested(tmp_path: Path, wrong: str, right: str) -> None:
    assert f"unknown key '{wrong}': did you mean '{right}'?" in refusal(write_job(tmp_path, f"[{wrong}]\nx = 1"))


@pytest.mark.parametrize(
    ("section", "wrong", "right"),
    [
        ("generation", "max_new_token", "max_new_tokens"),
        ("prompt", "templat", "template"),
        ("parallel", "chunk_token", "chunk_tokens"),
    ],
)
def test_a_misspelt_key_is_suggested(tmp_path: Path, section: str, wrong: str, right: str) -> None:
    path = write_job(tmp_path, f"[{section}]\n{wrong} = 1")
    assert re.search(
        f"job.toml: unknown key '{section}.{wrong}': did you mean '{right}'\\? valid keys: .*{right}", refusal(path)
    )


def test_a_key_like_no_other_gets_the_list_alone(tmp_path: Path) -> None:
    message = refusal(write_job(tmp_path, "[output.zzz]\nyyy = 1"))
    assert "unknown key 'output.zzz': valid keys: path, kv" in message


def test_a_key_outside_all_sections_is_unknown(tmp_path: Path) -> None:
    assert "unknown key 'limit'" in refusal(write_job(tmp_path, text="limit = 3\n" + MINIMAL))


def test_unknown_keys_are_blamed_on_where_they_are_from(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    assert refusal(path, "generation.sed=1").startswith("--set generation.sed: unknown key 'generation.sed'")
    assert refusal(path, KVR_GENERATION__SED="1").startswith("KVR_GENERATION__SED: unknown key 'generation.sed'")


def test_unknown_sections_are_blamed_on_where_they_are_from(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    assert "--set generate.seed" in refusal(path, "generate.seed=1")
    assert "KVR_GENERATE__SEED" in refusal(path, KVR_GENERATE__SEED="1")


@pytest.mark.parametrize("section", ["model", "documents", "output"])
def test_a_missing_key_says_what_it_is_for(tmp_path: Path, section: str) -> None:
    path = write_job(tmp_path, text=re.sub(rf"(\[{section}\])\npath.*", r"\1", MINIMAL))
    assert re.fullmatch(rf".*job\.toml: {section}\.path:? is missing \(.+\)", refusal(path))


@pytest.mark.parametrize("section", ["model", "documents", "output"])
def test_a_missing_section_is_named(tmp_path: Path, section: str) -> None:
    path = write_job(tmp_path, text=re.sub(rf"\[{section}\]\npath.*", "", MINIMAL))
    assert re.fullmatch(rf".*job\.toml: {section}:? is missing", refusal(path))


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    more = "[generation]\nseed = -1\ntop_k = 'x'\n[prompt]\nkep = 1\n"
    message = refusal(write_job(tmp_path, more, text=MINIMAL.partition("[output]")[0]))
    for mistake in ("generation.seed = -1", "generation.top_k = 'x'", "'prompt.kep'", "output:? is missing"):
        assert len(re.findall(f"job.toml: .*{mistake}", message)) == 1
    assert len(message.splitlines()) == 4


def test_one_mistake_is_told_once(tmp_path: Path) -> None:
    # A value that is neither of two types is one mistake, not two.
    assert len(refusal(write_job(tmp_path), "parallel.ranks_per_chain=some").splitlines()) == 1
