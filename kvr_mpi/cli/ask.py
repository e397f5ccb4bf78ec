"""``kvr ask RUN --question ...``: new questions about documents whose keys and values are stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvr_mpi.cli.options import command
from kvr_mpi.cli.run import run_options, run_with_options

if TYPE_CHECKING:
    from kvr_mpi.job import JobSpec


@command()
@click.argument("runs", type=click.Path(path_type=Path), metavar="RUN...", nargs=-1, required=True)
@click.option("-q", "--question", "questions", multiple=True, help="Question about each document; may be repeated.")
@click.option(
    "--questions",
    "file",
    metavar="FILE",
    help="File with questions: one per line, or .jsonl rows with the fields id and question.",
)
@click.option(
    "--doc",
    "documents",
    multiple=True,
    metavar="ID",
    help="Ask only about this document; may be repeated.  [default: all documents]",
)
@click.option(
    "-o",
    "--output",
    metavar="FOLDER",
    help="Folder for the answers.  [default: RUN-answers beside RUN, and RUN-answers-2 and so on for later questions; "
    "--resume and --overwrite use the latest]",
)
@run_options
def ask(**given: Any) -> int:
    """Ask questions about the documents in RUN, a folder or file of results with keys and values (output.kv = true).

    \b
    mpirun -n 4 kvr ask runs/reports -q "Who is responsible?" -q "What does it cost?"

    The question is appended to the stored prompt of each document, and only the question is prefilled. The answers are
    stored in a separate folder with one record per document and question; kvr inspect, export and status read them.
    The number of ranks may differ from that of the run that stored the keys and values. A job file with a section
    [questions] does the same under kvr-run. Exit codes are those of kvr run.

    \b
    --set generation.max_new_tokens=500   longer answers (default: 128)
    --set parallel.ranks_per_chain=all    shard each document over all ranks, if it is too large for one
    --set model.path=FOLDER               use this folder, if the model was moved
    """  # noqa: D301
    arguments = {name: given.pop(name) for name in ("runs", "questions", "file", "documents", "output")}
    continues = given["resume"] or given["overwrite"]
    return run_with_options("kvr ask", given, lambda settings: _make_job(arguments, settings, continues))


def _make_job(arguments: dict[str, Any], settings: Any, continues: bool = False) -> tuple[JobSpec, dict[str, str]]:
    """Convert the arguments to a job."""
    from kvr_mpi.job import make_job
    from kvr_mpi.runtime.asking import stored_header

    runs: tuple[Path, ...] = arguments["runs"]
    made_by = stored_header("documents.path", list(map(str, runs))).model
    questions: dict[str, Any] = {"ask": _named(arguments["questions"], arguments["file"])}
    if arguments["documents"]:
        questions["documents"] = list(arguments["documents"])
    raw: dict[str, Any] = {
        "model": {"path": made_by["name"]} | ({} if "adapter" not in made_by else {"adapter": made_by["adapter"]}),
        "documents": {"path": list(map(str, runs))},
        "questions": questions,
        "output": {"path": arguments["output"] or _answers_folder(runs[0], continues)},
    }
    return make_job(raw, Path("kvr ask"), settings)


def _answers_folder(run: Path, continues: bool) -> str:
    """Return a new folder for answers, or the last one if this job continues or replaces it."""
    from kvr_mpi.cli.environment import read_owner
    from kvr_mpi.store.run import is_of_job
    from kvr_mpi.store.targets import answers_folders

    *used, new = answers_folders(run)
    owner = read_owner()
    is_requeued = bool(used) and owner.restart > 0 and is_of_job(Path(used[-1]), owner.job)
    return used[-1] if used and (continues or is_requeued) else new


def _named(questions: Sequence[str], file: str | None) -> dict[str, str] | list[str]:
    """Combine the questions of the command line with those of a file."""
    from kvr_mpi.documents.questions import number_questions, read_questions

    if file is None:
        return list(questions)
    given, more = number_questions(questions), read_questions(Path(file))
    if twice := given.keys() & more.keys():
        raise click.UsageError(
            f"{file} and --question both define question {min(twice)!r}: choose another id in the file"
        )
    return {**given, **more}
