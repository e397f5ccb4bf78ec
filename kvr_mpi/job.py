"""A job: what to run on which documents, as written in ``jobs/NAME.toml``.

Precedence: command line (``--set section.key=value``) > environment (``KVR_SECTION__KEY``) > job file > defaults.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvr_mpi import removed
from kvr_mpi.compress.decode_settings import DecodeSettings
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.documents.generation import GenerationSection
from kvr_mpi.errors import ConfigError
from kvr_mpi.kv.settings import CacheSettings
from kvr_mpi.prefill.registry import JOB_STRATEGIES
from kvr_mpi.report.settings import ReportSettings
from kvr_mpi.store.settings import OutputSettings
from kvr_mpi.transport.choose import Name

ChunkTokens = Annotated[int, Field(ge=1)] | Literal["auto"]

ENVIRONMENT_PREFIX = "KVR_"
REMOTE_CODE = "model.trust_remote_code"


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are never coerced silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which model, and how to load it."""

    path: str = Field(min_length=1, description="folder, .gguf file, package:NAME/FILE, or id on the Hugging Face hub")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: the model's own")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
    kernels: Literal["measured", "plain"] = Field(
        "measured", description="on CPUs: the fastest kernels measured on this machine; plain: the model's own code"
    )
    adapter: str | None = Field(None, min_length=1, description="folder of a LoRA adapter, merged when it is loaded")
    trust_remote_code: bool = Field(
        False, description="run Python code that comes with the model; cannot be set by an environment variable"
    )


class DocumentsSection(Section):
    """Which documents."""

    path: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1, description="folders, globs or files: .txt .md .jsonl .jsonl.gz .parquet"
    )
    format: Literal["text", "messages", "openai-batch"] = Field(
        "text", description="contents of a row: a text, a conversation, or a request in OpenAI's batch format"
    )
    id_field: str = Field("id", description="field of a row with the document's id")
    text_field: str = Field("text", description="field of a row with the document's text")
    messages_field: str = Field("messages", description="field of a row with the conversation")
    other_files: Literal["list", "error"] = Field(
        "list", description="files of other types in a folder of documents: name them in the log, or refuse the job"
    )
    limit: int | None = Field(None, ge=1, description="process only this many documents, the first ones")
    shard: str | None = Field(None, description="'i/n': every n-th document, from the i-th (0 to n - 1)")
    reuse: str | None = Field(
        None,
        min_length=1,
        description="an earlier run with stored keys and values, loaded for prompts that begin as its prompts do",
    )

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("shard")
    @classmethod
    def _shard_of_shards(cls, value: str | None) -> str | None:
        if value is not None:
            number, _, count = value.partition("/")
            if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
                raise ValueError("expected 'i/n' with 0 <= i < n, such as '0/8'")
        return value

    @property
    def share(self) -> slice:
        """Which of the corpus's documents are this job's."""
        number, _, count = (self.shard or "0/1").partition("/")
        return slice(int(number), None, int(count))


class PromptSection(Section):
    """What is asked about each document."""

    template: str = Field(
        "{text}",
        description="user message; {text} is replaced by the document, and {field} by any field of its row",
    )
    system: str | None = Field(None, description="system prompt")
    chat_template: bool | None = Field(None, description="use the model's chat template; default: if it has one")
    too_long: Literal["error", "truncate", "split"] = Field(
        "error", description="what to do if a prompt exceeds the context"
    )
    keep: Literal["head", "tail", "middle"] = Field("head", description="which part of the document truncate keeps")
    reduce_template: str | None = Field(
        None, description="template that combines the answers about the parts; default: template"
    )
    max_tokens: int | None = Field(
        None, ge=2, description="maximum length of prompt and answer together; default: the model's context"
    )


class NamedPrompt(Section):
    """One of several prompts about each document, in place of `prompt.template`."""

    name: str = Field(description="name of the prompt; part of the ids of its answers")
    template: str = Field(
        description="as prompt.template; fastest if the text before {text} is the same in all prompts"
    )


class ParallelSection(Section):
    """How the ranks share the work."""

    strategy: str = Field(
        "kvr",
        description="kvr: chains of ranks; ring: zigzag rings; auto: the one with the faster forecast for each prompt; "
        "single: one document per rank",
    )
    ranks_per_chain: int | Literal["all", "auto"] = Field(
        "all", description="ranks that share one prompt; auto: planned for each document"
    )
    tensor_parallel: int = Field(
        1, ge=1, description="ranks over which one copy of the model is split; they share each slice of a prompt"
    )
    min_efficiency: float = Field(
        0.5, ge=0, le=1, description="auto: minimum parallel efficiency of a chain, unless that slows the batch down"
    )
    partition: Literal["equal_time", "even", "table"] = Field("equal_time", description="how a prompt is cut")
    table: str | None = Field(
        None, min_length=1, description="a file written by kvr search, or a folder of them, for partition = 'table'"
    )
    chunk_tokens: ChunkTokens = Field(
        "auto", description="compute slices in chunks of this many tokens; auto: only if memory is short"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads per rank; default: its share of the cores")
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="maximum memory per rank for prompts, in addition to the weights; default: all that is free",
    )
    transport: Name = Field(
        "auto", description="what carries keys and values between ranks; auto: what has been tested to work here"
    )

    @field_validator("strategy")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in JOB_STRATEGIES:
            raise ValueError(f"expected one of {', '.join(map(repr, JOB_STRATEGIES))}")
        return value

    @field_validator("ranks_per_chain")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("expected 'all', 'auto' or a number of at least 1")
        return value

    @model_validator(mode="after")
    def _table_where_it_is_used(self) -> ParallelSection:
        if (self.partition == "table") != (self.table is not None):
            raise ValueError(
                "parallel.partition = 'table' needs parallel.table = 'tables/...', and the other way round"
            )
        if self.strategy in ("ring", "single") and self.chunk_tokens != "auto":
            raise ValueError(
                f"parallel.chunk_tokens is for chains, and strategy = {self.strategy!r} takes no chunks: choose "
                f"strategy = 'kvr' or 'auto', or leave it out"
            )
        if self.strategy == "ring" and self.table is not None:
            raise ValueError(
                "parallel.table is for chains: a ring's slices are even; choose strategy = 'kvr' or 'auto', or another "
                "partition"
            )
        is_planned = self.strategy != "single" and self.ranks_per_chain == "auto"
        if is_planned and self.table is not None:
            raise ValueError(
                "parallel.table is for chains of one length; with ranks_per_chain = 'auto' choose another partition"
            )
        return self


class QuestionsSection(Section):
    """What is asked of documents whose keys and values are stored: `documents.path` is then the run that has them."""

    ask: list[str] | dict[str, str] | str = Field(
        [], description="questions, questions by name, or a file: one per line, or .jsonl with question and id"
    )
    template: str = Field("\n\n{question}", description="text that follows the document")
    documents: list[str] | None = Field(None, description="ids of documents to ask about; default: all in the run")
    reuse: Literal["always", "never"] = Field(
        "always", description="whether to load stored keys and values; never: prefill the documents again"
    )
    sharded: bool = Field(
        False,
        description="spread each document's keys and values over the ranks of a chain, if it is too large for one",
    )


class JobSpec(Section):
    """A whole job."""

    model: ModelSection
    documents: DocumentsSection
    prompt: PromptSection = PromptSection()
    prompts: list[NamedPrompt] = []
    questions: QuestionsSection | None = None
    generation: GenerationSection = GenerationSection()
    cache: CacheSettings = CacheSettings()
    compress: CompressSettings | None = None
    decode: DecodeSettings = DecodeSettings()
    parallel: ParallelSection = ParallelSection()
    output: OutputSettings
    report: ReportSettings = ReportSettings()

    @property
    def is_spread(self) -> bool:
        """Whether keys and values stay spread over the ranks of a chain, which then decode together."""
        return self.output.kv == "sharded" or (self.questions is not None and self.questions.sharded)

    @property
    def takes_chains(self) -> bool:
        """Whether several ranks may share a prompt: not in plain transformers, nor with a rolling cache."""
        return self.parallel.strategy != "single" and not self.cache.is_rolling

    @property
    def ranks_per_chain(self) -> int | Literal["all", "auto"]:
        """Ranks that share a prompt."""
        return self.parallel.ranks_per_chain if self.takes_chains else 1

    @property
    def planned(self) -> bool:
        """Whether each document's chain is planned."""
        return self.ranks_per_chain == "auto"

    @model_validator(mode="after")
    def _sharded_over_chains(self) -> JobSpec:
        if self.questions is not None and self.questions.sharded and self.output.kv:
            raise ValueError("output.kv cannot be combined with questions.sharded: leave one of them out")
        if self.output.kv == "sharded" and (self.parallel.strategy != "kvr" or self.questions is not None):
            raise ValueError(
                "output.kv = 'sharded' needs parallel.strategy = 'kvr' and a job without questions; change these, or "
                "use output.kv = true"
            )
        return self


def load_job(
    path: Path, settings: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> tuple[JobSpec, dict[str, str]]:
    """Read and check a job.

    Parameters
    ----------
    path : Path
        The TOML file.
    settings : sequence of str
        ``section.key=value`` from the command line; the value is TOML, or else a plain string.
    environ : mapping
        For ``KVR_SECTION__KEY`` variables.

    Returns
    -------
    (JobSpec, dict of str to str)
        The job, and for each ``section.key`` that was given, where from.

    Raises
    ------
    ConfigError
        Naming file, key, value and the valid choices.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"job file {str(path)!r} not found (looked for {path.absolute()}); kvr init writes one"
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"job file {str(path)!r} cannot be read as TOML: {error}") from error
    return make_job(raw, path, settings, environ)


def make_job(
    raw: dict[str, Any], path: Path, settings: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> tuple[JobSpec, dict[str, str]]:
    """Check a job that has been read; `path` is where from, the rest as in `load_job`."""
    sources = {f"{name}.{key}": str(path) for name, table in raw.items() if isinstance(table, dict) for key in table}
    sources |= {name: str(path) for name, table in raw.items() if isinstance(table, list)}
    runs_code = _runs_code(raw)
    for name, value in sorted(environ.items()):
        section, found, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if name.startswith(ENVIRONMENT_PREFIX) and found:
            _put(raw, sources, section, key, value, name)
    if _runs_code(raw) and not runs_code and not any(_target(one) == REMOTE_CODE for one in settings):
        raise ConfigError(
            f"{sources[REMOTE_CODE]}: an environment variable alone cannot allow a model's own code to run; write "
            f"model.trust_remote_code = true into {str(path)!r}, or add --set {REMOTE_CODE}=true"
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
        return JobSpec.model_validate(raw), sources
    except ValidationError as error:
        findings: dict[tuple[object, str], list[str]] = {}  # what a value might be instead, in one line
        for item in error.errors():
            subject, message = _explain(path, sources, dict(item))
            findings.setdefault((item["loc"][:1], subject), []).append(message)
        lines = (f"{subject}: {', or '.join(found)}" for (_, subject), found in findings.items())
        raise ConfigError("\n".join(lines)) from error


def show_job(spec: JobSpec, sources: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """List every ``section.key``, its value, and where the value comes from."""
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


def _target(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _runs_code(raw: Mapping[str, Any]) -> bool:
    model = raw.get("model")
    return isinstance(model, dict) and model.get("trust_remote_code") is True


def _put(raw: dict[str, Any], sources: dict[str, str], section: str, key: str, text: str, source: str) -> None:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except RecursionError as error:
        raise ConfigError(f"{source}: {section}.{key} = {text[:40]}... cannot be read as TOML: {error}") from error
    table = raw.setdefault(section, {})
    if isinstance(table, dict):
        table[key] = value
        sources[f"{section}.{key}"] = source


def _explain(path: Path, sources: Mapping[str, str], item: dict[str, Any]) -> tuple[str, str]:
    """One of pydantic's findings as where it is, and what a user can do about it."""
    place = [str(part) for part in item["loc"] if not isinstance(part, int)]
    key = ".".join(place[:2])
    where = sources.get(key) or next((of for name, of in sources.items() if name.startswith(f"{key}.")), str(path))
    if (text := removed.KEYS.get(key) or removed.KEYS.get(f"{key}={item['input']}")) is not None:
        return f"{where}: {key} was removed", text
    if item["type"] == "extra_forbidden":
        fields = JobSpec.model_fields if len(place) == 1 else _fields_of(place[0])
        close = difflib.get_close_matches(place[-1], fields, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"{where}: unknown key {key!r}", f"{hint}valid keys: {', '.join(fields)}"
    if item["type"] == "missing":
        about = "" if len(place) == 1 else f" ({_fields_of(place[0])[place[1]].description})"
        return f"{where}: {key}", f"is missing{about}"
    said = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error" and len(place) < 2:  # of a whole section; most such findings name its keys
        return where if said.startswith(f"{key}.") else f"{where}: {key}", said
    return f"{where}: {key} = {item['input']!r}", said


def _fields_of(section: str) -> Mapping[str, Any]:
    kind = JobSpec.model_fields[section].annotation
    annotation = next(iter(get_args(kind)), kind)  # of a section that may be missing, what it is else
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation.model_fields
