"""Values of a job: none is made to fit, and a wrong one is named with what is expected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from job_files import MINIMAL, load, refusal, write_job

from kvr_mpi.job import JobSpec, load_job, show_job


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("model.path=7", "= 7: .*valid string"),
        ("model.trust_remote_code='yes'", "= 'yes': .*valid boolean"),
        ("model.trust_remote_code=1", "= 1: .*valid boolean"),
        ("documents.path=3", "= 3: .*valid list"),
        ("documents.path=['a', 3]", "= 3: .*valid string"),
        ("documents.limit='all'", "= 'all': .*valid integer"),
        ("documents.limit=1.5", "= 1.5: .*valid integer"),
        ("documents.limit=true", "= True: .*valid integer"),
        ("generation.temperature=hot", "= 'hot': .*valid number"),
        ("generation.max_new_tokens=many", "= 'many': .*valid integer"),
        ("generation.max_new_tokens=''", "= '': .*valid integer"),
        ("generation.stop=END", "= 'END': .*valid list"),
        ("generation.stop=[1]", "= 1: .*valid string"),
        ("output.kv=yes", "= 'yes': .*valid boolean"),
        ("output.path=2024-05-01", r"= datetime\.date\(2024, 5, 1\): .*valid string"),
        ("parallel.ranks_per_chain=some", "= 'some': .*valid integer"),
        ("parallel.ranks_per_chain=some", "= 'some': .*'all'"),
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
        ("prompt.too_long", ("error", "keep-head", "keep-middle", "keep-tail", "split")),
        ("parallel.strategy", ("kvr", "ring", "auto", "single")),
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
        ("prompt.template={}", "at least 1 item"),
        ("documents.limit=-5", "greater than or equal to 1"),
        ("prompt.max_tokens=1", "greater than or equal to 2"),
        ("generation.max_new_tokens=-1", "greater than or equal to 0"),
        ("generation.min_new_tokens=-1", "greater than or equal to 0"),
        ("generation.seed=-1", "greater than or equal to 0"),
        ("generation.top_k=-1", "greater than or equal to 0"),
        ("generation.temperature=-0.5", "greater than or equal to 0"),
        ("generation.temperature=nan", "finite number"),
        ("generation.repetition_penalty=0", "greater than 0"),
        ("generation.top_p=0", "greater than 0"),
        ("generation.top_p=1.01", "less than or equal to 1"),
        ("generation.min_p=-0.1", "greater than or equal to 0"),
        ("generation.min_p=2", "less than or equal to 1"),
        ("parallel.ranks_per_chain=0", "expected 'all', 'auto' or a number of at least 1"),
        ("parallel.ranks_per_chain=-2", "expected 'all', 'auto' or a number of at least 1"),
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


@pytest.mark.parametrize("name", ["base64", "zip", "undefined", "klingon", "a\\u0000b"])
def test_an_encoding_is_of_text_and_known(tmp_path: Path, name: str) -> None:
    told = refusal(write_job(tmp_path), f'documents.encoding="{name}"')
    assert "documents.encoding" in told and "expected an encoding that Python knows" in told


def test_an_empty_stop_string_is_refused(tmp_path: Path) -> None:
    assert re.search(
        r"generation\.stop = \['END', ''\]: an empty stop", refusal(write_job(tmp_path), "generation.stop=['END', '']")
    )


def test_what_is_wrong_with_sections_is_named_once_each_and_in_lines_of_their_own(tmp_path: Path) -> None:
    path = write_job(tmp_path, "[generation]\nn = 2\n[compress]\nmethod = 'snapkv'")
    assert re.search(
        r"^job\.toml: generation\.n = 2: .*\njob\.toml: compress\.budget: is missing.*\Z",
        refusal(path).replace(str(path), "job.toml"),
    )


COMPRESS = """
[compress]
method = "snapkv"
budget = 512
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["compress.method=h2o"], "compress.method = 'h2o': expected one of 'streaming-llm', 'snapkv', 'pyramidkv'"),
        (["compress.budget=63"], "compress.budget = 63 is less than the 64 tokens .*compress.window"),
        (["compress.method=streaming-llm", "compress.budget=4"], "less than the 5 tokens .*raise it"),
        (["compress.budget=0"], "compress.budget = 0: .*greater than 0"),
        (["compress.budget=64.5"], "compress.budget = 64.5: expected a whole number of tokens, or the share"),
        (["compress.profile=p"], "compress.profile is not used with method = 'snapkv', which uses window, budget"),
        (
            ["compress.method=streaming-llm", "compress.window=8"],
            "compress.window is not used .* uses budget",
        ),
        (["compress.observes=answer"], "compress.observes = 'answer': .*'question' or 'document'"),
        (["compress.method=headkv"], "needs compress.profile = 'FILE'"),
        (["compress.bugdet=3"], "unknown key 'compress.bugdet': did you mean 'budget'"),
    ],
)
def test_a_compression_that_makes_no_sense_is_refused(tmp_path: Path, settings: list[str], expected: str) -> None:
    assert re.search(expected, refusal(write_job(tmp_path, COMPRESS), *settings))


@pytest.mark.parametrize("settings", [[], ["compress.method=ada-snapkv"]])
def test_a_compression_reaches_all_ranks_as_it_was_read(tmp_path: Path, settings: list[str]) -> None:
    spec = load_job(write_job(tmp_path, COMPRESS), settings, {})[0]
    assert spec.compress is not None and spec.compress.budget == 512
    assert type(spec).model_validate_json(spec.model_dump_json()) == spec, "with all its defaults"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["decode.mode=tensor-parallel"],
            "decode.mode = 'tensor-parallel': .*'data-parallel', 'head-parallel' or 'auto'",
        ),
        (["decode.placement=static"], "decode.placement is not used with mode = 'data-parallel'"),
        (
            ["decode.mode=auto", "decode.placement=static", "decode.profile=a"],
            "which places heads in order; leave it out",
        ),
        (["decode.mode=auto", "decode.placement=random"], "'static', 'best-effort', 'equal' or 'proportional'"),
        (["decode.mod=auto"], "unknown key 'decode.mod': did you mean 'mode'"),
    ],
)
def test_a_way_to_decode_that_makes_no_sense_is_refused(tmp_path: Path, settings: list[str], expected: str) -> None:
    assert re.search(expected, refusal(write_job(tmp_path), *settings))


def test_a_way_to_decode_reaches_all_ranks_as_it_was_read(tmp_path: Path) -> None:
    spec = load(write_job(tmp_path), "decode.mode=head-parallel", "decode.profile=heads.json")
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert (spec.decode.placement, spec.decode.profile) == ("proportional", "heads.json")
    assert load(write_job(tmp_path)).decode.mode == "data-parallel"
