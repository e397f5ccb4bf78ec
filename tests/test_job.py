"""Job files: what is given wins by its place, and every mistake is named with the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvr_mpi.errors import EXIT_CONFIG, ConfigError
from kvr_mpi.job import JobSpec, load_job, show_job

MINIMAL = """
[model]
path = "the/model"
[documents]
path = "the/documents"
[output]
path = "the/output"
"""
SECTIONS = ("model", "documents", "prompt", "generation", "parallel", "output")


def write_job(folder: Path, more: str = "", text: str = MINIMAL) -> Path:
    path = folder / "job.toml"
    path.write_text(text + more, encoding="utf-8")
    return path


def load(path: Path, *settings: str, **environ: str) -> JobSpec:
    return load_job(path, settings, environ)[0]


def refusal(path: Path, *settings: str, **environ: str) -> str:
    """What a user reads who tries this."""
    with pytest.raises(ConfigError) as caught:
        load_job(path, settings, environ)
    assert caught.value.exit_code == EXIT_CONFIG
    return str(caught.value)


# Sound jobs


def test_a_job_needs_a_model_documents_and_an_output(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    spec, sources = load_job(path, (), {})
    assert (spec.model.path, spec.documents.path, spec.output.path) == ("the/model", ["the/documents"], "the/output")
    assert sources == dict.fromkeys(("model.path", "documents.path", "output.path"), str(path))
    assert (spec.parallel.strategy, spec.parallel.ranks_per_chain) == ("kvr", "all")
    assert not spec.output.kv and not spec.model.trust_remote_code


def test_every_key_can_be_set(tmp_path: Path) -> None:
    text = """
    [model]
    path = "m"
    dtype = "bfloat16"
    device = "cpu"
    revision = "main"
    offline = true
    trust_remote_code = true
    [documents]
    path = ["a", "b/*.txt"]
    id_field = "key"
    text_field = "body"
    limit = 3
    shard = "1/4"
    [prompt]
    template = "Sum up: {text}"
    system = "Be brief."
    chat_template = true
    too_long = "split"
    keep = "tail"
    reduce_template = "Sum up these: {text}"
    max_tokens = 2048
    [generation]
    do_sample = true
    temperature = 0.7
    top_k = 40
    top_p = 0.9
    min_p = 0.05
    repetition_penalty = 1.1
    no_repeat_ngram_size = 3
    min_new_tokens = 1
    max_new_tokens = 64
    stop = ["END"]
    seed = 7
    [parallel]
    strategy = "kvr"
    ranks_per_chain = 2
    min_efficiency = 0.25
    partition = "ratio"
    ratios = [2, 1.5]
    memory_gib = 1.5
    table_force = true
    threads = 4
    transport = "gloo"
    [output]
    path = "o"
    kv = true
    max_failed = "5%"
    """
    spec, sources = load_job(write_job(tmp_path, text=text), (), {})
    given = {key for key, _, source in show_job(spec, sources) if source != "default"}
    given.add("parallel.table")  # goes with another partition, and not with ratios
    assert given == {key for key, _, _ in show_job(spec, sources)}  # a key added to the job is added here
    assert spec.documents.path == ["a", "b/*.txt"]
    assert spec.parallel.ratios == [2.0, 1.5]


def test_only_what_was_set_goes_to_the_generation_config(tmp_path: Path) -> None:
    assert load(write_job(tmp_path)).generation.transformers_settings() == {"do_sample": False}
    spec = load(write_job(tmp_path, "[generation]\ntop_k = 5\nstop = ['x']\nseed = 3\nmax_new_tokens = 9"))
    assert spec.generation.transformers_settings() == {"do_sample": False, "top_k": 5}


def test_a_job_cannot_change_once_it_is_read(tmp_path: Path) -> None:
    spec = load(write_job(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        spec.output.path = "elsewhere"  # type: ignore[misc]


# Precedence


@pytest.mark.parametrize(
    ("in_file", "in_environment", "on_command_line", "value", "source"),
    [
        (False, False, False, 128, "default"),
        (True, False, False, 1, "job.toml"),
        (True, True, False, 2, "KVR_GENERATION__MAX_NEW_TOKENS"),
        (False, True, False, 2, "KVR_GENERATION__MAX_NEW_TOKENS"),
        (True, False, True, 3, "--set generation.max_new_tokens"),
        (True, True, True, 3, "--set generation.max_new_tokens"),
        (False, False, True, 3, "--set generation.max_new_tokens"),
    ],
)
def test_the_nearer_the_user_the_stronger(
    tmp_path: Path, in_file: bool, in_environment: bool, on_command_line: bool, value: int, source: str
) -> None:
    path = write_job(tmp_path, "[generation]\nmax_new_tokens = 1" if in_file else "")
    environ = {"KVR_GENERATION__MAX_NEW_TOKENS": "2"} if in_environment else {}
    spec, sources = load_job(path, ["generation.max_new_tokens=3"] if on_command_line else [], environ)
    assert spec.generation.max_new_tokens == value
    (shown,) = (row for row in show_job(spec, sources) if row[0] == "generation.max_new_tokens")
    assert shown[1] == str(value)
    assert shown[2].endswith(source)


def test_the_last_of_two_settings_wins(tmp_path: Path) -> None:
    assert load(write_job(tmp_path), "generation.seed=1", "generation.seed=2").generation.seed == 2


def test_what_a_stronger_source_replaces_may_be_wrong(tmp_path: Path) -> None:
    path = write_job(tmp_path, "[generation]\nseed = 'none'")
    assert load(path, "generation.seed=1").generation.seed == 1
    assert load(path, KVR_GENERATION__SEED="1").generation.seed == 1


def test_a_job_can_be_completed_from_outside(tmp_path: Path) -> None:
    path = write_job(tmp_path, text="")
    spec = load(path, "model.path=m", "output.path=o", KVR_DOCUMENTS__PATH="d")
    assert (spec.model.path, spec.documents.path, spec.output.path) == ("m", ["d"], "o")


def test_the_real_environment_is_read_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVR_GENERATION__SEED", "42")
    assert load_job(write_job(tmp_path))[0].generation.seed == 42
    assert load_job(write_job(tmp_path), (), {})[0].generation.seed == 0


def test_other_variables_are_left_alone(tmp_path: Path) -> None:
    others = {"KVR_CACHE_DIR": "x", "GENERATION__SEED": "5", "kvr_generation__seed": "5", "PATH": "/bin", "KVR": "1"}
    assert load_job(write_job(tmp_path), (), others) == load_job(write_job(tmp_path), (), {})


# --set


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("generation.max_new_tokens=64", 64),
        ("generation.max_new_tokens = 64", 64),
        ("generation.temperature=0.5", 0.5),
        ("generation.temperature=1", 1.0),
        ("generation.do_sample=true", True),
        ('generation.stop=["END", "\\n\\n"]', ["END", "\n\n"]),
        ("generation.stop=[]", []),
        ("parallel.ranks_per_chain=4", 4),
        ("parallel.ranks_per_chain=all", "all"),
        ("documents.path=my corpus/part one", ["my corpus/part one"]),
        ("documents.path=~/corpus/*.txt", ["~/corpus/*.txt"]),
        ("documents.path=['a b', 'c']", ["a b", "c"]),
        ("model.path=Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("model.revision='0123'", "0123"),
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


@settings(deadline=None, max_examples=60)
@given(setting=st.text(st.characters(codec="utf-8"), max_size=40) | st.text("generation.seed=[]{}'\" 1", max_size=30))
def test_any_setting_is_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, setting: str) -> None:
    path = write_job(tmp_path_factory.mktemp("job"))
    try:
        spec, sources = load_job(path, [setting], {})
    except ConfigError as error:
        assert str(error)
    else:
        assert len(show_job(spec, sources)) > 20


# Mistakes: the file


def test_a_missing_job_file_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("no.toml")) == f"job file 'no.toml': no such file (looked for {tmp_path / 'no.toml'})"


def test_a_folder_is_no_job_file(tmp_path: Path) -> None:
    assert re.search(f"{re.escape(str(tmp_path))}.* cannot be read.*directory", refusal(tmp_path))


@pytest.mark.parametrize(
    ("text", "line"), [("[model\npath = 1", 1), ("[model]\npath = words", 2), ("[model]\npath = 'a'\npath = 'b'\n", 3)]
)
def test_broken_toml_names_the_line(tmp_path: Path, text: str, line: int) -> None:
    message = refusal(write_job(tmp_path, text=text))
    assert str(tmp_path / "job.toml") in message
    assert re.search(f"cannot be read as TOML: .*line {line}", message)


def test_a_job_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(MINIMAL.encode() + b"# caf\xe9\n")
    assert re.search(r"job\.toml.* cannot be read as TOML: .*utf-8.*0xe9", refusal(path))


@settings(deadline=None, max_examples=60)
@given(raw=st.binary(max_size=100) | st.text("[]={}.'\"\n modelpath1", max_size=60).map(str.encode))
def test_no_file_is_more_than_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_bytes(raw)
    assert refusal(path)  # none of these is a whole job


# Mistakes: keys


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
        ("parallel", "ratio", "ratios"),
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


# Mistakes: values


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("model.path=7", "= 7: .*valid string"),
        ("model.offline='yes'", "= 'yes': .*valid boolean"),
        ("model.trust_remote_code=1", "= 1: .*valid boolean"),
        ("documents.path=3", "= 3: .*valid list"),
        ("documents.path=['a', 3]", "= 3: .*valid string"),
        ("documents.limit='all'", "= 'all': .*valid integer"),
        ("documents.limit=1.5", "= 1.5: .*valid integer"),
        ("documents.limit=true", "= True: .*valid integer"),
        ("generation.do_sample=0", "= 0: .*valid boolean"),
        ("generation.temperature=hot", "= 'hot': .*valid number"),
        ("generation.max_new_tokens=many", "= 'many': .*valid integer"),
        ("generation.max_new_tokens=''", "= '': .*valid integer"),
        ("generation.stop=END", "= 'END': .*valid list"),
        ("generation.stop=[1]", "= 1: .*valid string"),
        ("output.kv=yes", "= 'yes': .*valid boolean"),
        ("output.path=2024-05-01", r"= datetime\.date\(2024, 5, 1\): .*valid string"),
        ("parallel.ranks_per_chain=some", "= 'some': .*valid integer"),
        ("parallel.ranks_per_chain=some", "= 'some': .*'all'"),
        ("parallel.ratios=3", "= 3: .*valid list"),
    ],
)
def test_a_value_of_another_type_is_never_made_to_fit(tmp_path: Path, setting: str, expected: str) -> None:
    key = setting.partition("=")[0]
    message = refusal(write_job(tmp_path), setting)
    assert re.search(rf"^--set {re.escape(key)}: {re.escape(key)} {expected}", message, re.MULTILINE)


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("model.dtype", ("auto", "float32", "bfloat16", "float16")),
        ("model.device", ("auto", "cpu", "cuda")),
        ("prompt.too_long", ("error", "truncate", "split")),
        ("prompt.keep", ("head", "tail", "middle")),
        ("parallel.strategy", ("kvr", "ring", "auto", "single")),
        ("parallel.partition", ("equal_time", "even", "ratio")),
    ],
)
def test_a_wrong_choice_lists_the_choices(tmp_path: Path, key: str, choices: tuple[str, ...]) -> None:
    message = refusal(write_job(tmp_path), f"{key}=wrong")
    assert f"{key} = 'wrong'" in message
    assert all(f"'{choice}'" in message for choice in choices)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("documents.limit=0", "greater than or equal to 1"),
        ("documents.limit=-5", "greater than or equal to 1"),
        ("prompt.max_tokens=1", "greater than or equal to 2"),
        ("generation.max_new_tokens=-1", "greater than or equal to 0"),
        ("generation.min_new_tokens=-1", "greater than or equal to 0"),
        ("generation.seed=-1", "greater than or equal to 0"),
        ("generation.top_k=-1", "greater than or equal to 0"),
        ("generation.no_repeat_ngram_size=-1", "greater than or equal to 0"),
        ("generation.temperature=0", "greater than 0"),
        ("generation.temperature=-0.5", "greater than 0"),
        ("generation.temperature=nan", "finite number"),
        ("generation.repetition_penalty=0", "greater than 0"),
        ("generation.top_p=0", "greater than 0"),
        ("generation.top_p=1.01", "less than or equal to 1"),
        ("generation.min_p=-0.1", "greater than or equal to 0"),
        ("generation.min_p=2", "less than or equal to 1"),
        ("parallel.threads=0", "greater than or equal to 1"),
        ("parallel.ranks_per_chain=0", "expected 'all', 'auto' or at least 1"),
        ("parallel.ranks_per_chain=-2", "expected 'all', 'auto' or at least 1"),
    ],
)
def test_a_number_out_of_range_names_the_range(tmp_path: Path, setting: str, expected: str) -> None:
    key, _, value = setting.partition("=")
    assert re.search(
        rf"^--set {re.escape(key)}: {re.escape(key)} = {value}.*{expected}", refusal(write_job(tmp_path), setting)
    )


@pytest.mark.parametrize(
    "setting", ["generation.max_new_tokens=0", "generation.top_p=1", "generation.seed=0", "documents.limit=1"]
)
def test_the_ends_of_a_range_are_in_it(tmp_path: Path, setting: str) -> None:
    (row,) = (row for row in show_job(*load_job(write_job(tmp_path), [setting], {})) if row[2].startswith("--set"))
    assert float(row[1]) == float(setting.partition("=")[2])


@pytest.mark.parametrize("value", ["4/4", "-1/4", "1", "1/", "a/b", "1/4/2", "1.0/2"])
def test_a_shard_is_a_number_of_how_many(tmp_path: Path, value: str) -> None:
    message = refusal(write_job(tmp_path), f"documents.shard='{value}'")
    assert f"documents.shard = '{value}'" in message
    assert "'i/n' with 0 <= i < n" in message


def test_a_section_that_is_a_value_is_refused(tmp_path: Path) -> None:
    path = write_job(tmp_path, text="prompt = 'Sum up'\n" + MINIMAL)
    assert re.search("job.toml: prompt = 'Sum up': .*dictionary", refusal(path))
    # Neither can it be mended from outside, for then the file would say something that is not so.
    assert re.search("prompt = 'Sum up': .*dictionary", refusal(path, "prompt.template={text}"))


def test_an_empty_stop_string_is_refused(tmp_path: Path) -> None:
    assert re.search(
        r"generation\.stop = \['END', ''\]: an empty stop", refusal(write_job(tmp_path), "generation.stop=['END', '']")
    )


@pytest.mark.parametrize(
    "more",
    [
        "partition = 'ratio'",
        "ratios = [1, 2]",
        "partition = 'even'\nratios = [1, 2]",
        "partition = 'equal_time'\nratios = [1]",
    ],
)
def test_ratios_and_their_partition_go_together(tmp_path: Path, more: str) -> None:
    message = refusal(write_job(tmp_path, f"[parallel]\n{more}"))
    assert re.search(r"job\.toml: .*parallel\.partition = 'ratio' and parallel\.ratios = .* go together", message)


# Showing


def test_a_shown_job_has_every_key_and_where_it_is_from(tmp_path: Path) -> None:
    path = write_job(tmp_path, "[prompt]\nkeep = 'tail'")
    spec, sources = load_job(path, ["generation.seed=5"], {"KVR_OUTPUT__KV": "true"})
    rows = {key: (value, source) for key, value, source in show_job(spec, sources)}
    assert set(rows) == {f"{section}.{key}" for section, table in spec.model_dump().items() for key in table}
    assert {key.partition(".")[0] for key in rows} == set(SECTIONS)
    assert rows["prompt.keep"] == ("'tail'", str(path))
    assert rows["generation.seed"] == ("5", "--set generation.seed")
    assert rows["output.kv"] == ("True", "KVR_OUTPUT__KV")
    assert rows["model.dtype"] == ("'auto'", "default")
    assert sum(source != "default" for _, source in rows.values()) == 6
