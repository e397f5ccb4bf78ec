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
    kernels: Literal["measured", "compiled", "plain"] = Field(
        "measured",
        description="on CPUs: what is fastest here for each product, norm and gate; compiled: compile some first, once "
        "for a processor; plain: the model's own code",
    )
    adapter: str | None = Field(None, min_length=1, description="folder of a LoRA adapter, merged when it is loaded")
    stream_weights: bool = Field(
        False, description="hold embedding and head; read layers from disk for each pass of many prompts: prefill only"
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    offline: bool | None = Field(None, description="never ask the hub; default: true under SLURM")
    trust_remote_code: bool = Field(
        False, description="run Python code that comes with the model; the environment alone cannot"
    )


class DocumentsSection(Section):
    """Which documents."""

    path: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1, description="folders, globs or files: .txt .md .jsonl .jsonl.gz .parquet"
    )
    format: Literal["text", "messages", "openai-batch"] = Field(
        "text", description="what a row is: a text, a conversation, or a request of OpenAI's batch format"
    )
    id_field: str = Field("id", description="field of a row that names it")
    text_field: str = Field("text", description="field of a row that holds its text")
    messages_field: str = Field("messages", description="field of a row that holds its conversation")
    limit: int | None = Field(None, ge=1, description="only the first documents")
    shard: str | None = Field(None, description="'i/n': every n-th document, from the i-th (0 to n - 1)")
    reuse: str | None = Field(
        None,
        min_length=1,
        description="a run with keys and values: prompts that begin like its prompts go on from them",
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
        description="the user's words, with {text} where the document goes, and {field} for any field of its row",
    )
    system: str | None = Field(None, description="system prompt")
    chat_template: bool | None = Field(None, description="wrap in the model's chat template; default: if it has one")
    too_long: Literal["error", "truncate", "split"] = Field("error", description="when a prompt exceeds the context")
    keep: Literal["head", "tail", "middle"] = Field("head", description="what truncate keeps")
    reduce_template: str | None = Field(None, description="for the answers about the parts; default: template")
    max_tokens: int | None = Field(None, ge=2, description="longest prompt and answer; default: the model's context")


class NamedPrompt(Section):
    """One of several prompts about each document, in place of `prompt.template`."""

    name: str = Field(description="what it is called: part of the ids of its answers")
    template: str = Field(description="as prompt.template; what stands before {text} is best the same in all of them")


class ParallelSection(Section):
    """How the ranks share the work."""

    strategy: str = Field(
        "kvr",
        description="kvr: chains of ranks; ring: zigzag rings; auto: what is forecast to be faster for each prompt; "
        "single: a document per rank",
    )
    ranks_per_chain: int | Literal["all", "auto"] = Field(
        "all", description="ranks that share one prompt; auto: planned for each document"
    )
    ranks_per_stage: int = Field(
        1, ge=1, description="ranks that hold one copy of the model among them, and share each slice of a prompt"
    )
    min_efficiency: float = Field(
        0.5, ge=0, le=1, description="auto: of the ideal speed-up a chain is to reach, unless the batch suffers"
    )
    partition: Literal["equal_time", "even", "ratio", "table"] = Field("equal_time", description="how a prompt is cut")
    ratios: list[Annotated[float, Field(gt=0)]] | None = Field(
        None, description="weights of the slices, for partition = 'ratio'"
    )
    table: str | None = Field(
        None, min_length=1, description="a file of kvr search, or a folder of them, for partition = 'table'"
    )
    table_force: bool = Field(False, description="take a table of another model, dtype, device or number of ranks")
    chunk_tokens: ChunkTokens = Field(
        "auto", description="a rank computes its slice in chunks of so many tokens; auto: only where memory asks for it"
    )
    compile: bool = Field(
        False,
        description="compute full chunks by code compiled for their size, on CPUs; needs a number of chunk_tokens",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads per rank; default: its share of the cores")
    memory_gib: float | None = Field(
        None, gt=0, description="most memory of a rank for prompts, beside the weights; default: what it has left"
    )
    transport: Name = Field(
        "auto", description="what carries keys and values between ranks; auto: what is proven to work here"
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
            raise ValueError("expected 'all', 'auto' or at least 1")
        return value

    @model_validator(mode="after")
    def _ratios_or_table(self) -> ParallelSection:
        if (self.partition == "ratio") != (self.ratios is not None):
            raise ValueError("parallel.partition = 'ratio' and parallel.ratios = [...] go together")
        if (self.partition == "table") != (self.table is not None):
            raise ValueError("parallel.partition = 'table' and parallel.table = 'tables/...' go together")
        if self.strategy in ("ring", "single") and self.chunk_tokens != "auto":
            raise ValueError(
                f"parallel.chunk_tokens is for chains, and strategy = {self.strategy!r} takes no chunks: choose "
                f"strategy = 'kvr' or 'auto', or leave it out"
            )
        if self.compile and self.chunk_tokens == "auto":
            raise ValueError("parallel.compile is for chunks of one size: name it, as parallel.chunk_tokens = 512")
        if self.strategy == "ring" and (self.ratios is not None or self.table is not None):
            raise ValueError(
                "parallel.ratios and parallel.table are for chains: a ring's slices are even; choose strategy = 'kvr' "
                "or 'auto', or another partition"
            )
        if self.planned and (self.ratios is not None or self.table is not None):
            raise ValueError(
                "parallel.ratios and parallel.table are for chains of one length; with ranks_per_chain = 'auto' choose "
                "another partition"
            )
        return self

    @property
    def planned(self) -> bool:
        """Whether each document's chain is planned."""
        return self.strategy != "single" and self.ranks_per_chain == "auto"


class QuestionsSection(Section):
    """What is asked of documents whose keys and values are stored: `documents.path` is then the run that has them."""

    ask: list[str] | dict[str, str] = Field([], description="questions, or questions by name")
    file: str | None = Field(None, min_length=1, description="a question a line, or .jsonl with id and question")
    template: str = Field("\n\n{question}", description="what follows the document")
    documents: list[str] | None = Field(None, description="ids of documents; default: all of the run")
    reuse: Literal["auto", "always", "never"] = Field(
        "auto", description="load what is stored: auto where that is faster than to prefill again"
    )
    sharded: bool = Field(
        False, description="every rank of a chain loads its share of a document, once: for what no rank has room for"
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

    @model_validator(mode="after")
    def _sharded_over_chains(self) -> JobSpec:
        if self.questions is not None and self.questions.sharded and self.output.kv:
            raise ValueError("output.kv does not go with questions.sharded: leave one of them out")
        if self.output.kv == "sharded" and (self.parallel.strategy != "kvr" or self.questions is not None):
            raise ValueError(
                "output.kv = 'sharded' is for the chains of parallel.strategy = 'kvr', and jobs without questions: "
                "choose that, or output.kv = true"
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
        raise ConfigError(f"job file {str(path)!r}: no such file (looked for {path.absolute()})") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
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
            f"{sources[REMOTE_CODE]}: the environment alone does not make a model's own code run; write "
            f"model.trust_remote_code = true into {str(path)!r}, or say --set {REMOTE_CODE}=true"
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
    table = raw.setdefault(section, {})
    if isinstance(table, dict):
        table[key] = value
        sources[f"{section}.{key}"] = source


def _explain(path: Path, sources: Mapping[str, str], item: dict[str, Any]) -> tuple[str, str]:
    """One of pydantic's findings as where it is, and what a user can do about it."""
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
    said = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error" and len(place) < 2:  # of a whole section; most such findings name its keys
        return where if said.startswith(f"{key}.") else f"{where}: {key}", said
    return f"{where}: {key} = {item['input']!r}", said


def _fields_of(section: str) -> Mapping[str, Any]:
    kind = JobSpec.model_fields[section].annotation
    annotation = next(iter(get_args(kind)), kind)  # of a section that may be missing, what it is else
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation.model_fields
