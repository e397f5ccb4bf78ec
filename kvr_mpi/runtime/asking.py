"""Completes a job with questions: takes its settings from the run whose prompts it continues."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from kvr_mpi.documents.prompts import Frame
from kvr_mpi.documents.questions import checked, number_questions, read_questions, words_after
from kvr_mpi.errors import ConfigError, DataError, OutputError
from kvr_mpi.job import EVEN, JobSpec, PromptSection
from kvr_mpi.model import LoadedModel, tokenizer_fingerprint
from kvr_mpi.schedule.forecast import frame_of
from kvr_mpi.store.lock import is_alive
from kvr_mpi.store.log import Header
from kvr_mpi.store.parts import common_header, find_runs

# Settings that determine a stored prompt up to the end of its document's text.
MADE_BY = ("template", "system", "chat_template", "template_args")


def complete_questions(spec: JobSpec) -> JobSpec:
    """Name a job's questions, and use the prompt settings of the run that they are about.

    Raises `ConfigError` if there is no question, or the run was made without `output.kv`; `DataError` if the run cannot
    be read.
    """
    questions = spec.questions
    if questions is None:
        return spec
    ask = questions.ask
    if isinstance(ask, str):
        ask = read_questions(Path(ask))
    else:
        ask = checked(ask if isinstance(ask, dict) else number_questions(ask), "questions.ask")
    for text in ask.values():
        words_after(questions.template, text)
    header = stored_header("documents.path", spec.documents.path)
    if not header.identity.get("kv"):
        raise ConfigError(
            f"documents.path {spec.documents.path}: no keys and values are stored there, since its job ran without "
            f"output.kv = true; prefill the documents again with it, and ask about that run"
        )
    try:
        stored = header.identity["prompt"]
        made = {key: stored[key] for key in MADE_BY} | {"date": header.identity.get("date")}
        own = {"max_tokens": spec.prompt.max_tokens, "min_coverage": spec.prompt.min_coverage}
        prompt = PromptSection.model_validate(made | own)
    except (ValidationError, KeyError, TypeError) as error:
        raise DataError(
            f"{spec.documents.path[0]}: its header does not record how the prompts were made; expected a run of this "
            f"kvr-mpi"
        ) from error
    dtype = header.model["dtype"] if spec.model.dtype == "auto" else spec.model.dtype
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"dtype": dtype}),
            "prompt": prompt,
            "questions": questions.model_copy(update={"ask": ask}),
            "parallel": spec.parallel.model_copy(update={"strategy": "kvr", "partition": EVEN}),
        }
    )


def stored_header(key: str, paths: Sequence[str]) -> Header:
    """Read the header of the run with the keys and values; `key` is the setting that contains its path.

    Raises `DataError` if it cannot be read, or the paths contain runs of different jobs; `OutputError` if a job is
    still writing the run.
    """
    runs, _ = find_runs([Path(each) for each in paths])
    for path in runs:
        if path.is_dir() and is_alive(path):
            raise OutputError(f"{key} {str(path)!r} is being written by a running job: wait until it has ended")
    try:
        return common_header(runs)
    except DataError as error:
        raise DataError(f"{key} {list(paths)}: {error}") from error


def frame_questions(spec: JobSpec, loaded: LoadedModel, weights: str) -> dict[str, Frame]:
    """Make the frame around a stored document's text for each question, by the question's name.

    Raises `ConfigError` if another model or tokenizer produced the keys and values; `weights` is from `hash_weights`.
    """
    questions = spec.questions
    if questions is None:
        return {}
    assert isinstance(questions.ask, dict), "questions have their names"
    check_made_by("documents.path", spec.documents.path, spec, loaded, weights)
    frame = partial(frame_of, spec, loaded.tokenizer, loaded.shape, spec.prompt.first_template)
    return {name: frame(words_after(questions.template, text)) for name, text in questions.ask.items()}


def check_made_by(key: str, paths: Sequence[str], spec: JobSpec, loaded: LoadedModel, weights: str) -> None:
    """Refuse a model or tokenizer that did not produce the keys and values; the `ConfigError` names the differences.

    key, paths : as in `stored_header`.
    weights : from `hash_weights`.
    """
    header = stored_header(key, paths)
    here = {
        "weights or configuration": (header.model.get("weights"), weights),
        "dtype": (header.model.get("dtype"), str(loaded.dtype).removeprefix("torch.")),
        "tokenizer": (header.model.get("tokenizer"), tokenizer_fingerprint(loaded.tokenizer)),
    }
    differing = [
        f"{name} ({str(then)[:12]}, here {str(now)[:12]})" for name, (then, now) in here.items() if then != now
    ]
    if differing:
        raise ConfigError(
            f"model.path {spec.model.path!r} did not compute the keys and values in {paths[0]}: different "
            f"{', '.join(differing)}. Use {header.model['name']}, or prefill the documents again"
        )
