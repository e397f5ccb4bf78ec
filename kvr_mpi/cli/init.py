"""``kvr init``: writes a commented job file."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvr_mpi.cli.options import command

ASK = "Summarize this document in one paragraph. Keep names, dates and numbers."
# Placeholder for the document in a template.
TEXT = "{text}"
# Number of documents to read, to list those that cannot be processed.
SAMPLED = 200
# Number of readable documents in the suggested trial run.
TRIAL_DOCUMENTS = 2

JOB = """\
# Check the plan, then run the job:
#
#   kvr plan {file} --ranks 8 --hardware h200
#   mpirun -n 8 kvr-run {file}
#
# `kvr-run {file} --show-config` prints every key with its value; --set SECTION.KEY=VALUE overrides one for one run.

[model]
path = {model}
# dtype = "float32"       # default: the dtype of the checkpoint

[documents]
path = [{corpus}]  # folders, globs or files: .txt .md .jsonl .csv .parquet
{id_mark}id_field = {id_field}  # in rows (JSONL, Parquet): the field with the document's id,
{text_mark}text_field = {text_field}  # and the field with its text
# limit = 10              # process only the first 10 documents

[prompt]
template = {template}
# system = "You write accurate summaries."  # needs a model with a chat template
{thinking_mark}template_args = {{enable_thinking = false}}  # reasoning models: answer at once
too_long = "split"        # longer than the context: answer parts, then combine; or keep-head, error

[generation]
max_new_tokens = {max_new_tokens}      # maximum length of an answer; 0: prefill only
# temperature = 0.7       # sample; default: greedy, with the same answers every time
{penalty_mark}repetition_penalty = 1.05  # small models repeat themselves without it

[output]
path = {output}
# kv = true               # store keys and values, so that `kvr ask` needs no new prefill
{failed_mark}max_failed = {max_failed}  # failed documents allowed for exit code 0; default: 0
"""
# Questions whose answers are short or long, and the lengths of answers in tokens.
SHORT_ANSWER = re.compile(r"yes or no|(one|a single|few) words?\b|true or false", re.IGNORECASE)
LONG_ANSWER = re.compile(r"\b(list|every|each|all|table)\b", re.IGNORECASE)
SHORT_TOKENS, ANSWER_TOKENS, LONG_TOKENS = 64, 256, 512
# Models with fewer parameters repeat themselves, and make many mistakes.
SMALL = 1e9
SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([MB])(?![A-Za-z0-9])", re.IGNORECASE)
# Bytes per parameter, as most files have them.
FOLDER_BYTES, GGUF_BYTES = 2.0, 0.6


@command()
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path), default=Path("job.toml"))
@click.option("--corpus", metavar="PATH", help="Documents: a folder, a glob or a file.")
@click.option("--model", metavar="PATH", help="Model folder, .gguf file, or id on the Hugging Face hub.")
@click.option(
    "--ask",
    metavar="TEXT",
    help=r"Question about each document. It follows the document's text, unless {text} marks the place of the text; \n "
    "is a line break.",
)
@click.option(
    "--text-field", default="text", show_default=True, help="In JSONL and Parquet files: the field with the text."
)
@click.option(
    "--id-field", default="id", show_default=True, help="In JSONL and Parquet files: the field with the document's id."
)
@click.option("--output", metavar="FOLDER", help="Folder for the results.  [default: runs/JOB]")
def init(
    job: Path,
    corpus: str | None,
    model: str | None,
    ask: str | None,
    text_field: str,
    id_field: str,
    output: str | None,
) -> None:
    """Create the job file JOB (job.toml), with a comment for each setting that you may want to change.

    \b
    kvr init                                          # interactive
    kvr init minutes.toml --corpus minutes/ --model /models/mine --ask "Which decisions were taken?"

    kvr init first checks the corpus and the model, as kvr-run does. It never overwrites a file.
    """  # noqa: D301
    from kvr_mpi.cli.environment import is_offline
    from kvr_mpi.disk import writing
    from kvr_mpi.documents import describe_others, read_corpus
    from kvr_mpi.errors import OutputError, counted, listed
    from kvr_mpi.job import break_lines
    from kvr_mpi.job.inputs import row_format
    from kvr_mpi.runtime.checks import check_job, find_others

    if job.exists():
        raise OutputError(f"{job} already exists; choose another name")
    corpus, model, ask = _complete(corpus, model, ask)
    wanted = {
        "model": model,
        "corpus": corpus,
        "template": break_lines(ask if TEXT in ask else f"{TEXT}\n\n{ask}"),
        "text_field": text_field,
        "id_field": id_field,
        "output": output or f"runs/{job.stem}",
    }
    parameters, penalty, template = _parameters(model), _own_penalty(model), _chat_template(model)
    is_small = parameters is not None and parameters < SMALL
    marks = {
        "max_new_tokens": str(_answer_tokens(ask)),
        "penalty_mark": "" if is_small and penalty is None else "# ",
        "thinking_mark": "" if "enable_thinking" in template else "# ",
    }
    text, spec = _write(job, wanted, {**marks, **_allow_failures(0, 0, whole=True)})
    check_job(spec, 1, offline=is_offline())
    if others := find_others(spec):
        click.echo(describe_others(others))
    documents = [*read_corpus(spec.documents.path, rows=row_format(spec), limit=SAMPLED)]
    if errors := {document.id: document.error for document in documents if document.error is not None}:
        click.echo(f"{len(errors)} of the first {counted(len(documents), 'document')} cannot be processed:")
        click.echo(listed(errors))
        text, _ = _write(
            job, wanted, {**marks, **_allow_failures(len(errors), len(documents), whole=len(documents) < SAMPLED)}
        )
    with writing(job), job.open("x", encoding="utf-8") as stream:
        stream.write(text)
    if is_small:
        click.echo("warning: small models make many mistakes; docs/planning.md lists larger models by memory")
    readable = [number for number, document in enumerate(documents, 1) if document.error is None][:TRIAL_DOCUMENTS]
    if not readable:
        click.echo(f"wrote {job}, but none of these documents can be read")
        return
    # Use a separate output folder, so that answers of a trial are not taken for those of the job.
    limit, failed = readable[-1], readable[-1] - len(readable)
    settings = [f"documents.limit={limit}", f"output.path={wanted['output']}-try"]
    settings += [f"output.max_failed={failed}"] * (failed > 0)
    words = ["kvr-run", str(job), *(word for setting in settings for word in ("--set", setting))]
    among = f" of the first {limit}" if failed else ""
    click.echo(
        f"wrote {job}; try it with {counted(len(readable), 'document')}{among}:\n  mpirun -n 2 {shlex.join(words)}"
    )


def _complete(corpus: str | None, model: str | None, ask: str | None) -> tuple[str, str, str]:
    """Prompt for missing values if there is a terminal."""
    from kvr_mpi.documents import find_files
    from kvr_mpi.errors import KvrError
    from kvr_mpi.model import find_model

    missing = [name for name, value in (("--corpus", corpus), ("--model", model)) if value is None]
    if missing and not _is_terminal():
        raise click.UsageError(f"{' and '.join(missing)}: required, since there is no terminal to ask")

    def question(text: str, check: Callable[[str], object]) -> str:
        """Ask until the answer is valid."""

        def checked(answer: str) -> str:
            try:
                check(answer)
            except KvrError as error:
                raise click.UsageError(str(error)) from error
            return answer

        return str(click.prompt(text, value_proc=checked))

    if corpus is None:
        corpus = question("Where are the documents (folder, glob or file)?", lambda path: find_files([path]))
    if model is None:
        model = question("Which model (folder, .gguf file, or id on the hub)?", find_model)
    if ask is None:
        ask = ASK if not missing else click.prompt("What do you want to ask about each document?", default=ASK)
    return corpus, model, ask


def _answer_tokens(ask: str) -> int:
    """Return a maximum length for the answers to a question."""
    if SHORT_ANSWER.search(ask):
        return SHORT_TOKENS
    return LONG_TOKENS if LONG_ANSWER.search(ask) else ANSWER_TOKENS


def _parameters(model: str) -> float | None:
    """Return about how many parameters a model has, from its name or its files; None if unknown."""
    from kvr_mpi.errors import KvrError
    from kvr_mpi.model import find_model

    if found := SIZE_IN_NAME.search(model):
        return float(found[1]) * (1e6 if found[2].upper() == "M" else 1e9)
    try:
        source = find_model(model)
        if source.is_hub:
            return None
        if source.gguf_file is not None:
            return source.path.stat().st_size / GGUF_BYTES
        return sum(file.stat().st_size for file in source.path.glob("*.safetensors")) / FOLDER_BYTES or None
    except (KvrError, OSError):  # reported by the checks
        return None


def _chat_template(model: str) -> str:
    """Return the text that contains a model's chat template; empty if there is none, or the model is on the hub."""
    from kvr_mpi.errors import KvrError
    from kvr_mpi.model import find_model
    from kvr_mpi.model.gguf import read_gguf

    try:
        source = find_model(model)
        if source.is_hub:
            return ""
        if source.gguf_file is not None:
            return str(read_gguf(source.path, reads_texts=False).metadata.get("tokenizer.chat_template", ""))
        files = (source.path / name for name in ("chat_template.jinja", "tokenizer_config.json"))
        return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    except (KvrError, OSError, ValueError):  # reported by the checks
        return ""


def _own_penalty(model: str) -> object:
    """Return the repetition penalty in a model folder's defaults, which apply unless the job sets one; None: none."""
    try:
        return json.loads((Path(model) / "generation_config.json").read_text()).get("repetition_penalty")
    except (OSError, ValueError, AttributeError):
        return None


def _allow_failures(failed: int, among: int, *, whole: bool) -> dict[str, str]:
    """Return max_failed for documents that cannot be read: their number, or a percentage if not all were read."""
    if not failed:
        return {"max_failed": '"1%"', "failed_mark": "# "}
    return {"max_failed": str(failed) if whole else f'"{math.ceil(100 * failed / among)}%"', "failed_mark": ""}


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _write(job: Path, wanted: dict[str, str], more: dict[str, str]) -> tuple[str, Any]:
    """Format the job as TOML, and parse it again to verify it; `more` are values and marks that are TOML already."""
    import tomllib

    from kvr_mpi.errors import ConfigError
    from kvr_mpi.job import make_job

    for name, value in {**wanted, "file": str(job)}.items():
        if any(not char.isprintable() and not (char in "\n\t" and name == "template") for char in value):
            raise ConfigError(f"{name} {value!r} contains characters that cannot be printed; remove them")
    # A JSON string without such characters is also a TOML string.
    quoted = {name: json.dumps(value, ensure_ascii=False) for name, value in wanted.items()}
    marks = {f"{key}_mark": "# " * (wanted[f"{key}_field"] == key) for key in ("id", "text")}  # a default is a comment
    text = JOB.format(file=job, **quoted, **marks, **more)
    spec, _ = make_job(tomllib.loads(text), job, (), {})
    found = (spec.model.path, spec.documents.path[0], spec.prompt.template, spec.output.path)
    assert found == (wanted["model"], wanted["corpus"], wanted["template"], wanted["output"]), "TOML as it was meant"
    return text, spec
