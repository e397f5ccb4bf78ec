"""All checks of a job before it waits in a queue and loads its model, in about a second and without torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvr_mpi.disk import OTHER_FOLDER, writing
from kvr_mpi.documents import check_lines, find_files, first_rows, is_table, other_files
from kvr_mpi.documents.formats import is_remote
from kvr_mpi.documents.templates import check_system, parse_template
from kvr_mpi.errors import (
    ConfigError,
    CorpusError,
    KvrError,
    ModelError,
    OutputError,
    UnavailableError,
    choices,
    counted,
    problems,
)
from kvr_mpi.job import JobSpec, ModelSection
from kvr_mpi.job.inputs import check_prompts, check_schema, templates_of
from kvr_mpi.model import find_model
from kvr_mpi.model.adapter import check_adapter
from kvr_mpi.model.gguf import read_gguf
from kvr_mpi.model.gguf_convert import check_architecture
from kvr_mpi.model.metadata import Metadata
from kvr_mpi.model.source import must_be_cached
from kvr_mpi.model.tensor_parallel import why_not_divided
from kvr_mpi.store.folder import check_is_folder, try_writing
from kvr_mpi.store.targets import check_output_folder
from kvr_mpi.topology import Topology, divides
from kvr_mpi.tuning.lookup import find_tables

SAMPLED_FILES = 8  # number of files in which to look for the text field before it is reported as missing
NAMED_FILES = 50  # maximum number of files of other types to list
# By documents.format: the setting to change if rows do not match, the expected type of the content field, and its name.
CONTENT: dict[str, tuple[str, type, str]] = {
    "text": ("text_field", str, "text of that name"),
    "messages": ("text_field", list, "list of messages of that name"),
    "openai-batch": ("format", dict, "request with a body"),
}
TELLTALE = {"messages": "messages", "body": "openai-batch"}
INDEX = "model.safetensors.index.json"


def check_job(spec: JobSpec, ranks: int, *, offline: bool) -> None:
    """Check a job against the files it names and the ranks it has, without writing anything.

    ranks : number of ranks of the whole job.
    offline : expect models of the hub in the local cache.

    Raises `KvrError`, which lists all problems.
    """
    findings = list(_findings(spec, ranks, offline))
    if len(findings) == 1:
        raise findings[0]
    if findings:
        raise ConfigError(problems(findings))


def choose_chain_size(spec: JobSpec, ranks: int) -> int:
    """Return the number of ranks per chain; 1 for planned jobs.

    Raises `ConfigError` if the ranks cannot be divided into such chains; the message lists the valid sizes.
    """
    size = spec.chain_size(ranks) or 1
    if not divides(size, ranks):
        divisors = [length for length in range(1, ranks + 1) if divides(length, ranks)]
        raise ConfigError(
            f"parallel.ranks_per_chain = {size}: {counted(ranks, 'rank')} cannot be divided into chains of {size}; "
            f"set it to {choices([*divisors, 'auto'])} (auto: planned for each document), or start a multiple of "
            f"{size} ranks"
        )
    group = spec.parallel.tensor_parallel if spec.takes_chains and not spec.planned else 1
    if not divides(group, size):
        fitting = [each for each in range(1, size + 1) if divides(each, size)]
        raise ConfigError(
            f"parallel.tensor_parallel = {group}: chains of {counted(size, 'rank')} cannot be divided into "
            f"tensor-parallel groups of {group}; set it to {choices(fitting)}, or start a multiple of {group} ranks "
            f"for each chain"
        )
    return size


def lay_out(spec: JobSpec, ranks: int) -> Topology:
    """Return the layout of a job's chains and tensor-parallel groups; errors as for `choose_chain_size`."""
    return Topology(ranks, choose_chain_size(spec, ranks), spec.parallel.tensor_parallel)


def _findings(spec: JobSpec, ranks: int, offline: bool) -> Iterator[KvrError]:
    """Yield the errors of all checks."""
    fields = _fields(spec)
    checks: list[Callable[[], object]] = [
        partial(choose_chain_size, spec, ranks),
        partial(check_table, spec, ranks),
        partial(_check_profile, spec),
        partial(check_tensor_parallel, spec),
        *(partial(parse_template, template, key, columns=fields) for key, template in templates_of(spec).items()),
        partial(check_prompts, spec),
        partial(check_schema, spec),
        partial(_check_columns, spec, fields),
        partial(_check_model, spec.model, offline),
        *([] if spec.model.adapter is None else [partial(check_adapter, spec.model.adapter)]),
        *(partial(_check_documents, spec, path) for path in spec.documents.path if spec.questions is None),
        partial(_check_output, spec),
    ]
    for check in checks:
        try:
            check()
        except UnavailableError:
            raise
        except KvrError as error:
            yield error


def check_table(spec: JobSpec, ranks: int) -> None:
    """Refuse a lookup table that is missing, damaged, or for other ranks; the `ConfigError` lists those found."""
    parallel = spec.parallel
    if parallel.table is None:
        return
    find_tables(Path(parallel.table), {} if parallel.strategy == "single" else {"ranks": spec.chain_size(ranks)})


def _check_profile(spec: JobSpec) -> None:
    """Refuse a missing head profile."""
    profile = None if spec.compress is None else spec.compress.profile
    if profile is not None and not Path(profile).is_file():
        raise ConfigError(
            f"compress.profile = {profile!r}: no such file; create one with kvr search JOB --heads, or use published "
            f"scores of this model's heads"
        )


def check_tensor_parallel(spec: JobSpec) -> None:
    """Refuse groups that do not divide the heads of the model, as far as its config.json says, with `ConfigError`."""
    size, path = spec.parallel.tensor_parallel, spec.model.path
    if size == 1:
        return
    with contextlib.suppress(ModelError):  # `_check_model` reports it
        source = find_model(path)
        if source.is_hub:
            raise ConfigError(
                f"parallel.tensor_parallel = {size}: model.path {path!r} is an id on the hub, but the ranks of a "
                f"tensor-parallel group read slices of files in a folder: download it (hf download {path} --local-dir "
                f"FOLDER), and use that folder"
            )
        config = {} if source.gguf_file is not None else _read_json(spec.model, Path(source.location) / "config.json")
        heads = config.get("num_attention_heads")
        kv_heads = config.get("num_key_value_heads") or heads
        if isinstance(heads, int) and isinstance(kv_heads, int) and min(heads, kv_heads) > 0:
            if why := why_not_divided(heads, kv_heads, size):
                raise ConfigError(f"parallel.tensor_parallel = {size}: {why}")


def _check_model(model: ModelSection, offline: bool) -> None:
    """Check that a model's configuration and weights exist."""
    source = find_model(model.path)
    folder = Path(source.location)
    if source.gguf_file is not None:
        try:
            check_architecture(Metadata(read_gguf(source.path, reads_texts=False).metadata))
        except OSError as error:
            raise ModelError(f"model.path {model.path!r} cannot be read: {error.strerror}") from error
        except ModelError as error:
            raise ModelError(f"model.path {model.path!r}: {error}") from error
        return
    if source.is_hub:
        must_be_cached(model.path, offline)
        return
    _read_json(model, folder / "config.json")
    if not any(file.is_file() for file in folder.glob("*.safetensors")):
        raise ModelError(
            f"model.path {model.path!r}: the folder {folder} has a config.json but no *.safetensors weights; "
            f"pickled weights (*.bin, *.pt) are never loaded, since they can run code: convert them to safetensors"
        )
    if (folder / INDEX).is_file():
        names = _read_json(model, folder / INDEX).get("weight_map")
        wanted = {name for name in names.values() if isinstance(name, str)} if isinstance(names, dict) else set()
        missing = sorted(name for name in wanted if not (folder / name).is_file())
        if missing:
            raise ModelError(
                f"model.path {model.path!r}: {len(missing)} of its {len(wanted)} weight files are missing, such as "
                f"{missing[0]}; copy the folder again"
            )


def _read_json(model: ModelSection, file: Path) -> dict[str, Any]:
    try:
        if not file.is_file():
            raise ModelError(
                f"model.path {model.path!r}: the folder {file.parent} has no {file.name}; expected a causal language "
                f"model that transformers knows: config.json, *.safetensors and tokenizer files"
            )
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model.path {model.path!r}: {file} cannot be read: {error}; copy it again") from error
    if not isinstance(found, dict):
        raise ModelError(f"model.path {model.path!r}: {file} does not contain a JSON object; copy it again")
    return found


def _check_columns(spec: JobSpec, fields: set[str] | None) -> None:
    """Refuse fields in the system prompt, and unknown columns; `fields` are the names in rows, None if unknown."""
    check_system(spec.prompt.system, fields or ())
    wanted = [("output.columns", name) for name in spec.output.columns]
    wanted += [("generation.score", name) for name in (spec.generation.score_column,) if name is not None]
    for key, name in wanted:
        if fields is not None and name not in fields:
            there = f"the fields are {', '.join(sorted(fields)[:20])}" if fields else "text files have no fields"
            raise ConfigError(f"{key}: no row has a field {name!r}; {there}")


def _fields(spec: JobSpec) -> set[str] | None:
    """List the fields in the first rows of tables; None if unknown."""
    tables, rows = list[str](), list[dict[str, Any]]()
    for path in spec.documents.path if spec.questions is None else ():
        with contextlib.suppress(CorpusError):  # `_check_documents` reports it
            tables += (file for file, _ in find_files([path]) if is_table(file))
    for file in tables[:SAMPLED_FILES]:
        with contextlib.suppress(CorpusError):
            rows += first_rows(file, (spec.documents.content_field,))
    return {str(name) for row in rows for name in row} if rows or not (tables or spec.questions) else None


def _check_documents(spec: JobSpec, path: str) -> None:
    """Check that the files of a path exist, and that the first rows of some of them have the text field."""
    documents = spec.documents
    files = [file for file, _ in find_files([path])]
    _check_apart(spec, path, [Path(file.rpartition("::")[2]) for file in files if not is_remote(file)])
    texts = [file for file in files if not is_table(file)]
    if texts and documents.format != "text":
        raise CorpusError(
            f"documents.format = {documents.format!r} needs files of rows (.jsonl, .csv, .parquet), but {texts[0]!r} "
            f"is a text file"
        )
    for file in files[:SAMPLED_FILES]:
        check_lines(file)
    if texts:
        return
    (key, kind, noun), field = CONTENT[documents.format], documents.content_field
    names: set[str] = set()
    for file in files[:SAMPLED_FILES]:
        for row in first_rows(file, (field,)):
            if isinstance(row.get(field), kind):
                return
            names.update(map(str, row))
    if names:
        written = field if key == "text_field" else documents.format
        others = [kind for name, kind in TELLTALE.items() if name in names and kind != documents.format]
        hint = f"; is it documents.format = {others[0]!r}?" if others else ""
        if len(names) == 1 and ";" in min(names):
            hint = "; expected commas between the fields of a .csv file, or tabs in a .tsv file"
        raise CorpusError(
            f"documents.{key} = {written!r}: no {noun} in the first rows of "
            f"{files[0]!r}{f' and {len(files[:SAMPLED_FILES]) - 1} more' if len(files) > 1 else ''}; "
            f"the fields are {', '.join(sorted(names)[:20])}{hint}"
        )


def find_others(spec: JobSpec) -> list[str]:
    """List the files in the folders of a job's documents that are skipped for their type."""
    return other_files(spec.documents.path) if spec.questions is None else []


def name_files(files: Sequence[str]) -> str:
    """List the first few files by name."""
    more = f", and {len(files) - NAMED_FILES} more" if len(files) > NAMED_FILES else ""
    return ", ".join(map(repr, files[:NAMED_FILES])) + more


def _check_apart(spec: JobSpec, path: str, files: Sequence[Path]) -> None:
    """Refuse documents inside the output folder."""
    output, base = Path(spec.output.path).resolve(), Path(path).expanduser().resolve()
    for folder in map(Path.resolve, {file.parent for file in files}):
        if folder == output or (output in folder.parents and output not in base.parents):
            raise OutputError(
                f"output.path {spec.output.path!r} contains documents of documents.path {path!r} ({folder}); "
                f"{OTHER_FOLDER}"
            )


def _check_output(spec: JobSpec) -> None:
    """Refuse a folder that cannot be created or written."""
    folder, reads = Path(spec.output.path), spec.documents.path if spec.questions is not None else []
    with writing(f"output.path {str(folder)!r}", OTHER_FOLDER):
        check_output_folder(folder, map(Path, [*reads, *filter(None, [spec.documents.reuse])]))
        check_is_folder(folder)
        try_writing(folder)
