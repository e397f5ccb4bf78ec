"""The fields that a job reads from its corpus: those of templates, and columns to copy."""

from __future__ import annotations

from typing import Any

from kvr_mpi.documents import RowFormat
from kvr_mpi.documents.json_schema import why_not_followed
from kvr_mpi.documents.openai_batch import PASSED
from kvr_mpi.documents.questions import NAME
from kvr_mpi.documents.templates import Template, parse_template
from kvr_mpi.errors import ConfigError
from kvr_mpi.job import JobSpec


def templates_of(spec: JobSpec) -> dict[str, str]:
    """Return a job's templates by setting."""
    found = {f"prompt.template.{name}": template for name, template in spec.prompts.items()}
    found = found or {"prompt.template": spec.prompt.first_template}
    if spec.prompt.reduce_template is not None:
        found["prompt.reduce_template"] = spec.prompt.reduce_template
    return found


def parse_templates(spec: JobSpec) -> list[Template]:
    """Parse all templates of a job; raise `ConfigError` if one of them is invalid."""
    return [parse_template(template, key) for key, template in templates_of(spec).items()]


def row_format(spec: JobSpec) -> RowFormat:
    """Return the format with which the rows of a job's corpus are read."""
    check_prompts(spec)
    columns = dict.fromkeys(name for template in parse_templates(spec) for name in template.columns)
    of = spec.documents
    fields = of.id_field, of.content_field, tuple(columns), kept_columns(spec)
    return RowFormat(*fields, of.format, of.encoding, embeds=spec.output.embedding is not None)


def kept_columns(spec: JobSpec) -> tuple[str, ...]:
    """Return the fields that are kept unchanged: copied columns, and the continuations to score."""
    scored = spec.generation.score_column
    return tuple(dict.fromkeys([*spec.output.columns, *(() if scored is None else (scored,))]))


def check_schema(spec: JobSpec) -> None:
    """Refuse a JSON schema that answers cannot follow, with `ConfigError`: why, or what to install."""
    schema = spec.generation.json_schema
    why = None if schema is None else why_not_followed(schema)
    if why is not None:
        raise ConfigError(f"generation.json_schema: {why}")


def check_prompts(spec: JobSpec) -> None:
    """Refuse several prompts with invalid names or equal templates, with `ConfigError`."""
    asked: dict[str, str] = {}
    for name, template in spec.prompts.items():
        if not NAME.fullmatch(name):
            raise ConfigError(f"prompt.template.{name[:80]!r}: expected a name of 1 to 64 letters, digits, ., - and _")
        if (first := asked.setdefault(template, name)) != name:
            raise ConfigError(f"prompt.template: {first!r} and {name!r} have the same template; leave one of them out")


def identity_of(spec: JobSpec) -> dict[str, Any]:
    """Return the settings on which answers depend, without the model's."""
    # The date counts only for dated chat templates (`whole_identity`).
    identity: dict[str, Any] = {
        "prompt": spec.prompt.model_dump(exclude={"date"}),
        "generation": spec.generation.model_dump(exclude={"lookup"}),  # which changes no answer
        "kv": spec.output.kv,
    }
    always = PASSED if spec.documents.format == "openai-batch" else ()
    if columns := dict.fromkeys([*always, *kept_columns(spec)]):
        identity["columns"] = list(columns)
    if spec.documents.format != "text":
        identity["format"] = spec.documents.format
    if spec.output.embedding is not None:
        identity["embedding"] = spec.output.model_dump(include={"embedding", "dimensions"})
    if spec.output.text_logprobs:
        identity["text_logprobs"] = int(spec.output.text_logprobs)
    if spec.questions is not None:
        identity["questions"] = spec.questions.model_dump(include={"ask", "template"})
    return identity
