"""Sound job files: what is given wins by its place, and is shown with where it is from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_jobs import SECTIONS, load, write_job

from kvr_mpi.errors import ConfigError
from kvr_mpi.job import load_job, show_job


def test_a_job_needs_a_model_documents_and_an_output(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    spec, sources = load_job(path, (), {})
    assert (spec.model.path, spec.documents.path, spec.output.path) == ("the/model", ["the/documents"], "the/output")
    assert sources == dict.fromkeys(("model.path", "documents.path", "output.path"), str(path))
    assert (spec.parallel.strategy, spec.ranks_per_chain) == ("kvr", "all")
    assert not spec.output.kv and not spec.model.trust_remote_code


def test_only_what_was_set_goes_to_the_generation_config(tmp_path: Path) -> None:
    assert load(write_job(tmp_path)).generation.transformers_settings() == {"do_sample": False}
    spec = load(write_job(tmp_path, "[generation]\ntop_k = 5\nstop = ['x']\nseed = 3\nmax_new_tokens = 9"))
    assert spec.generation.transformers_settings() == {"do_sample": True, "top_k": 5}
    greedy = load(write_job(tmp_path, "[generation]\ntop_k = 5\ntemperature = 0"))
    assert greedy.generation.transformers_settings() == {"do_sample": False}


def test_the_nearer_the_user_the_stronger(tmp_path: Path) -> None:
    """Defaults, the file, the environment, and the command line, whose last word counts."""
    key, sources = "generation.seed", ["default", "job.toml", "KVR_GENERATION__SEED", "--set generation.seed"]
    for given in range(16):
        in_file, in_environment, once, twice = (bool(given >> bit & 1) for bit in range(4))
        path = write_job(tmp_path, "[generation]\nseed = 1" if in_file else "")
        words = [f"{key}={value}" for value, said in ((3, once), (4, twice)) if said]
        spec, found = load_job(path, words, {"KVR_GENERATION__SEED": "2"} if in_environment else {})
        assert spec.generation.seed == (4 if twice else 3 if once else 2 if in_environment else int(in_file))
        (shown,) = (row for row in show_job(spec, found) if row[0] == key)
        strongest = 3 if words else 2 if in_environment else int(in_file)
        assert shown[1] == str(spec.generation.seed) and shown[2].endswith(sources[strongest])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("generation.max_new_tokens = 64", 64),
        ("generation.temperature=1", 1.0),
        ('generation.stop=["END", "\\n\\n"]', ["END", "\n\n"]),
        ("parallel.ranks_per_chain=4", 4),
        ("parallel.ranks_per_chain=all", "all"),
        ("documents.path=my corpus/part one", ["my corpus/part one"]),
        ("documents.path=~/corpus/*.txt", ["~/corpus/*.txt"]),
        ("model.adapter='0123'", "0123"),
        ("prompt.template=Sum up {text} in a = b form", "Sum up {text} in a = b form"),
        ('prompt.template="Sum up:\\n{text}"', "Sum up:\n{text}"),
        ("prompt.system=It's 5 o'clock", "It's 5 o'clock"),
    ],
)
def test_a_setting_is_toml_or_else_plain_words(tmp_path: Path, setting: str, value: Any) -> None:
    target, _, text = setting.partition("=")
    section, _, key = target.strip().partition(".")
    spec, sources = load_job(write_job(tmp_path), [setting], {})
    found = getattr(getattr(spec, section), key)
    assert found == value and type(found) is type(value)
    assert sources[f"{section}.{key}"] == f"--set {section}.{key}"
    # The same words in a variable mean the same.
    name = f"KVR_{section}__{key}".upper()
    assert load_job(write_job(tmp_path), (), {name: text.strip()})[0] == spec


def test_other_variables_are_left_alone(tmp_path: Path) -> None:
    others = {"GENERATION__SEED": "5", "kvr_generation__seed": "5", "PATH": "/bin", "KVR": "1"}
    assert load_job(write_job(tmp_path), (), others) == load_job(write_job(tmp_path), (), {})


def test_a_shown_job_has_every_key_and_where_it_is_from(tmp_path: Path) -> None:
    path = write_job(tmp_path, "[prompt]\ntoo_long = 'keep-tail'")
    spec, sources = load_job(path, ["generation.seed=5"], {"KVR_OUTPUT__KV": "true"})
    rows = {key: (value, source) for key, value, source in show_job(spec, sources)}
    assert set(rows) == {f"{section}.{key}" for section, table in spec.model_dump().items() for key in table or ()}
    assert {key.partition(".")[0] for key in rows} == set(SECTIONS) - {"questions", "compress"}, "which few jobs have"
    assert rows["prompt.too_long"] == ("'keep-tail'", str(path))
    assert rows["generation.seed"] == ("5", "--set generation.seed")
    assert rows["output.kv"] == ("True", "KVR_OUTPUT__KV")
    assert rows["model.dtype"] == ("'auto'", "default")
    assert sum(source != "default" for _, source in rows.values()) == 6


def test_a_batch_file_is_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every command that takes a job; it is not read for that."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"requests 'in/requests.v2.jsonl.gz' not found"):
        load_job(Path("in/requests.v2.jsonl.gz"))
    Path("in").mkdir()
    Path("in/requests.v2.jsonl.gz").touch()
    spec, _ = load_job(Path("in/requests.v2.jsonl.gz"), ["model.path=m"], {})
    assert (spec.documents.path, spec.documents.format) == (["in/requests.v2.jsonl.gz"], "openai-batch")
    assert (spec.model.path, spec.output.path) == ("m", "runs/requests.v2")
