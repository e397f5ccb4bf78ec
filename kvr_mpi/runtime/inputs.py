"""What a job reads of its corpus: the fields of rows that its templates name, and those it passes on."""

from __future__ import annotations

from kvr_mpi.documents import RowFormat
from kvr_mpi.documents.templates import Template, parse_template
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
    columns = dict.fromkeys(name for template in parse_templates(spec) for name in template.columns)
    wanted = spec.documents
    return RowFormat(wanted.id_field, wanted.text_field, tuple(columns), tuple(dict.fromkeys(spec.output.columns)))
