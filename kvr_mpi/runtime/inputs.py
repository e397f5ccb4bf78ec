"""What a job reads of its corpus: the fields of rows that its templates name, and those it passes on."""

from __future__ import annotations

from kvr_mpi.documents import RowFormat
from kvr_mpi.documents.openai_batch import PASSED
from kvr_mpi.documents.templates import TEXT, Template, parse_template
from kvr_mpi.errors import ConfigError
from kvr_mpi.job import JobSpec


def templates_of(spec: JobSpec) -> dict[str, str]:
    """List a job's templates by their keys."""
    found = {"prompt.template": spec.prompt.template}
    if spec.prompt.reduce_template is not None:
        found["prompt.reduce_template"] = spec.prompt.reduce_template
    return found


def parse_templates(spec: JobSpec) -> list[Template]:
    """Cut all templates of a job, whatever fields its rows have.

    Raises
    ------
    ConfigError
        If one of them is none.
    """
    return [parse_template(template, key) for key, template in templates_of(spec).items()]


def row_format(spec: JobSpec) -> RowFormat:
    """Say how the rows of a job's corpus are read."""
    check_format(spec)
    columns = dict.fromkeys(name for template in parse_templates(spec) for name in template.columns)
    wanted = spec.documents
    return RowFormat(
        wanted.id_field,
        wanted.text_field,
        tuple(columns),
        tuple(dict.fromkeys(spec.output.columns)),
        wanted.format,
        wanted.messages_field,
    )


def passed_columns(spec: JobSpec) -> list[str]:
    """Name what goes from the documents' rows into their records."""
    always = PASSED if spec.documents.format == "openai-batch" else ()
    return list(dict.fromkeys([*always, *spec.output.columns]))


def check_format(spec: JobSpec) -> None:
    """Refuse settings that do not go with what the rows are.

    Raises
    ------
    ConfigError
        Naming the first of them.
    """
    documents, prompt = spec.documents, spec.prompt
    kind = documents.format
    if kind == "text":
        return
    where = f"documents.format = {kind!r}"
    wrong = {
        "prompt.template": prompt.template != TEXT,
        "prompt.system": prompt.system is not None,
        "prompt.chat_template": prompt.chat_template is False,
        "prompt.too_long": prompt.too_long != "error",
        "documents.text_field": documents.text_field != "text",
    }
    if kind == "openai-batch":
        wrong |= {
            "documents.id_field": documents.id_field != "id",
            "documents.messages_field": documents.messages_field != "messages",
        }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"{key} does not go with {where}: a row says all of its prompt; leave {key} out")
    if spec.output.kv:
        raise ConfigError(f"output.kv = true does not go with {where} yet: leave it out, or make prompts of texts")
    if kind == "openai-batch" and spec.generation.max_new_tokens == 0:
        raise ConfigError(f"generation.max_new_tokens = 0 does not go with {where}: its requests want answers")
