"""Reads a job from file, environment and command line, and checks it.

Precedence: command line (``--set section.key=value``) > environment (``KVR_SECTION__KEY``) > job file > defaults.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from kvr_mpi.errors import ConfigError, problems
from kvr_mpi.job.combinations import check_combinations
from kvr_mpi.job.spec import TASK, JobSpec
from kvr_mpi.scheduler import batch_job

ENVIRONMENT_PREFIX = "KVR_"
# Variables that set no key of a job: those of `cli.environment` and of the job scripts.
OTHER_VARIABLES = (
    "KVR_CACHE KVR_CHECK KVR_CONTAINER KVR_CTAS KVR_END_TIME KVR_ENVIRONMENT_FILE KVR_LAUNCHER KVR_LOCAL "
    "KVR_MAX_REQUEUES KVR_MPI_TYPE KVR_PEER_TIMEOUT KVR_SHARES KVR_SITE KVR_SLURM_DIR KVR_VENV"
).split()
TEST_PREFIX = "KVR_TEST_"  # of variables of the tests
# What is expected, by the type of pydantic's error and with the values of its context.
EXPECTED = {
    "int_type": "a whole number, such as 64",
    "int_from_float": "a whole number, such as 64",
    "float_type": "a number, such as 0.5",
    "finite_number": "a number, such as 0.5",
    "bool_type": "true or false",
    "string_type": 'text, such as "text"',
    "string_too_short": "non-empty text",
    "list_type": 'a list, such as ["one", "two"]',
    "too_short": "at least one entry",
    "dict_type": 'a table, such as {{name = "text"}}',
    "model_type": "a section of settings",
    "literal_error": "{expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
}
BATCH_SUFFIXES = (".jsonl", ".jsonl.gz")
REMOTE_CODE = "model.trust_remote_code"
# Sections with templates and questions, in which users type line breaks as ``\n``; elsewhere, JSON may contain them.
TEXT_SECTIONS = ("prompt", "questions")


def load_job(
    path: Path, settings: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> tuple[JobSpec, dict[str, str]]:
    r"""Read and check a job.

    path : the TOML file, or a file of requests in OpenAI's batch format, whose job has no settings but its paths.
    settings : ``section.key=value``; a value that is not valid TOML is a plain string, with line breaks written as
        ``\n``.
    environ : environment with ``KVR_SECTION__KEY`` variables.

    Returns the job, and the origin of each ``section.key`` that was given. Raises `ConfigError` with file, key, value
    and the valid choices.
    """
    if path.name.endswith(BATCH_SUFFIXES):
        if not path.exists():
            raise ConfigError(f"file of requests {str(path)!r} not found: {path.absolute()}")
        documents = {"path": str(path), "format": "openai-batch"}
        raw = {"model": {}, "documents": documents, "output": {"path": f"runs/{path.name.partition('.jsonl')[0]}"}}
        return make_job(raw, path, settings, environ)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"job file {str(path)!r} not found: {path.absolute()}; create one with kvr init") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"job file {str(path)!r} cannot be read as TOML: {error}") from error
    return make_job(raw, path, settings, environ)


def make_job(
    raw: dict[str, Any], path: Path, settings: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> tuple[JobSpec, dict[str, str]]:
    """Check a job that was read from `path`; for the rest see `load_job`."""
    sources = {f"{name}.{key}": str(path) for name, table in raw.items() if isinstance(table, dict) for key in table}
    sources |= {name: str(path) for name, table in raw.items() if isinstance(table, list)}
    runs_code = _runs_code(raw)
    for name, value in sorted(environ.items()):
        section, found, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if name.startswith(ENVIRONMENT_PREFIX) and found:
            _put(raw, sources, section, key, value, name)
        elif name.startswith(ENVIRONMENT_PREFIX):
            _check_variable(name)
    if _runs_code(raw) and not runs_code and REMOTE_CODE not in (one.partition("=")[0].strip() for one in settings):
        raise ConfigError(
            f"{sources[REMOTE_CODE]}: an environment variable cannot enable remote code; set "
            f"model.trust_remote_code = true in {str(path)!r}, or add --set {REMOTE_CODE}=true"
        )
    for setting in settings:
        target, equals, value = setting.partition("=")
        section, dot, key = target.strip().partition(".")
        if not (equals and dot and section and key):
            raise ConfigError(
                f"--set {setting!r}: expected section.key=value, for example generation.max_new_tokens=64"
            )
        _put(raw, sources, section, key, value.strip(), f"--set {target.strip()}")
    try:
        spec = JobSpec.model_validate(raw)
    except ValidationError as error:
        findings: dict[tuple[object, str], list[str]] = {}  # messages by subject: alternatives for a value share a line
        for item in error.errors():
            subject, message = _explain(path, sources, dict(item))
            findings.setdefault((item["loc"][:1], subject), []).append(message)
        lines = [f"{what}: {', or '.join(found)}" for (_, what), found in findings.items()]
        raise ConfigError(problems([line.replace(", or expected ", ", or ") for line in lines])) from error
    check_combinations(spec)
    return _of_task(spec, environ), sources


def _check_variable(name: str) -> None:
    """Refuse a variable that has our prefix and no meaning, which would be ignored in silence."""
    if name in OTHER_VARIABLES or name.startswith(TEST_PREFIX):
        return
    keys = [
        f"{ENVIRONMENT_PREFIX}{section}__{key}".upper()
        for section in JobSpec.model_fields
        for key in _fields_of(section)
    ]
    close = difflib.get_close_matches(name, [*keys, *OTHER_VARIABLES], n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"{name}: unknown environment variable: {hint}rename or unset it; valid variables: KVR_SECTION__KEY, with two "
        f"underscores, for each key of a job, {', '.join(OTHER_VARIABLES)}"
    )


def _of_task(spec: JobSpec, environ: Mapping[str, str]) -> JobSpec:
    """Replace 'task/n' in documents.shard by the share of this task of an array; outside an array, leave it."""
    number, _, count = (spec.documents.shard or "").partition("/")
    task = found.task if number == TASK and (found := batch_job(environ)) is not None else None
    if task is None:
        return spec
    if task >= int(count):
        raise ConfigError(
            f"documents.shard = 'task/{count}': this is task {task} of the array (counted from 0), but there are only "
            f"{count} shares: submit an array of {count} tasks, or increase the number of shares"
        )
    documents = spec.documents.model_copy(update={"shard": f"{task}/{count}"})
    output = spec.output.model_copy(update={"path": f"{spec.output.path}/share-{task}-of-{count}"})
    return spec.model_copy(update={"documents": documents, "output": output})


def show_job(spec: JobSpec, sources: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """List every ``section.key``, its value, and its origin."""
    return [
        (key, repr(value), sources.get(key, "default"))
        for section, table in spec.model_dump().items()
        if table is not None
        for key, value in (
            [(section, table)]
            if isinstance(table, list)
            else [(f"{section}.{key}", value) for key, value in table.items()]
        )
    ]


def _runs_code(raw: Mapping[str, Any]) -> bool:
    model = raw.get("model")
    return isinstance(model, dict) and model.get("trust_remote_code") is True


def _put(raw: dict[str, Any], sources: dict[str, str], section: str, key: str, text: str, source: str) -> None:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = break_lines(text) if section in TEXT_SECTIONS else text
    except RecursionError as error:
        raise ConfigError(f"{source}: {section}.{key} = {text[:40]}... cannot be read as TOML: {error}") from error
    table = raw.setdefault(section, {})
    if isinstance(table, dict):
        table[key] = value
        sources[f"{section}.{key}"] = source


def break_lines(text: str) -> str:
    r"""Replace ``\n`` by a line break, as a user who types it in a shell expects."""
    return text.replace(r"\n", "\n")


def _explain(path: Path, sources: Mapping[str, str], item: dict[str, Any]) -> tuple[str, str]:
    """Return the location of one of pydantic's errors, and what to do about it."""
    place = [str(part) for part in item["loc"] if not isinstance(part, int)]
    key = ".".join(place[:2])
    where = sources.get(key) or next((of for name, of in sources.items() if name.startswith(f"{key}.")), str(path))
    if item["type"] == "extra_forbidden":
        fields = JobSpec.model_fields if len(place) == 1 else _fields_of(place[0])
        close = difflib.get_close_matches(place[-1], fields, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"{where}: unknown key {key!r}", f"{hint}valid keys: {', '.join(fields)}"
    if item["type"] == "missing":
        about = "" if len(place) == 1 else f" ({_fields_of(place[0])[place[1]].description})"
        return f"{where}: {key}", f"is missing{about}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error" and len(place) < 2:  # an error of a whole section; most name its keys
        return where if message.startswith(f"{key}.") else f"{where}: {key}", message
    expected = EXPECTED.get(item["type"])
    subject = f"{where} = {item['input']!r}" if where == f"--set {key}" else f"{where}: {key} = {item['input']!r}"
    return subject, message if expected is None else f"expected {expected.format(**item.get('ctx', {}))}"


def _fields_of(section: str) -> Mapping[str, Any]:
    kind = JobSpec.model_fields[section].annotation
    annotation = next(iter(get_args(kind)), kind)  # for Optional sections, the section's type
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation.model_fields
