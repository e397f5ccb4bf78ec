"""The sections and settings of a job, as written in ``jobs/NAME.toml``."""

from __future__ import annotations

import codecs
from datetime import date, datetime, time
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.documents import CorpusPart
from kvr_mpi.documents.chat import ChatOptions, why_not_arguments
from kvr_mpi.documents.generation import GenerationSection
from kvr_mpi.plain import AS_GIB, AS_SHARE, AS_TOKENS, Strict
from kvr_mpi.store.settings import OutputSettings
from kvr_mpi.transport.choose import TransportName

EQUAL_TIME, EVEN = "equal_time", "even"
# In documents.shard: the number of this task in the batch system's array.
TASK = "task"
ChunkTokens = Annotated[int, Field(ge=1), AS_TOKENS] | Literal["auto"]


class ModelSection(Strict):
    """The model and how to load it."""

    path: str = Field(min_length=1, description="folder, .gguf file, package:NAME/FILE, or id on the Hugging Face hub")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: the dtype of the checkpoint"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
    kernels: Literal["measured", "plain"] = Field(
        "measured", description="on CPUs: the fastest kernels on this machine; plain: the code of the model"
    )
    adapter: str | None = Field(
        None, min_length=1, description="folder of a LoRA adapter, merged when the model is loaded"
    )
    trust_remote_code: bool = Field(
        False, description="run Python code that comes with the model; cannot be set by an environment variable"
    )


class DocumentsSection(Strict):
    """The documents that the job reads."""

    path: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1,
        description="folders, globs, files (.txt .md .jsonl .csv .tsv .parquet, also .gz .bz2 .xz .zst), zip archives, "
        "URLs that fsspec reads, or hf://datasets/OWNER/NAME",
    )
    format: Literal["text", "messages", "openai-batch"] = Field(
        "text", description="content of a row: text, a conversation, or a request in OpenAI's batch format"
    )
    id_field: str = Field("id", description="field of a row that contains the document's id")
    text_field: str | None = Field(
        None,
        min_length=1,
        description="field of a row that contains the text or the conversation; default: text or messages",
    )
    encoding: str = Field(
        "utf-8", description="encoding of text files, such as latin-1 (any Python encoding); rows are always UTF-8"
    )
    limit: int | None = Field(None, ge=1, description="process only this many documents, from the start of the corpus")
    order: Literal["longest", "shortest", "given"] = Field(
        "longest",
        description="which documents come first; longest: the job finishes earliest; shortest: answers come early; "
        "given: the order of the corpus",
    )
    shard: str | None = Field(
        None,
        description="'i/n': the i-th (0 to n - 1) of n parts of the corpus; 'task/n': i is the number of "
        "this task in the batch system's array, and its results go to share-i-of-n in output.path",
    )
    reuse: str | None = Field(
        None,
        min_length=1,
        description="an earlier run, whose stored keys and values are loaded for prompts with the same prefix",
    )

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        try:
            found = codecs.lookup(value)
            "a".encode(value)  # refuses codecs that are not text encodings: base64, zip
        except (LookupError, ValueError):
            known = "utf-8, latin-1, cp1252 or utf-16"
            raise ValueError(f"expected a Python encoding, such as {known}") from None
        return found.name

    @field_validator("shard")
    @classmethod
    def _shard_of_shards(cls, value: str | None) -> str | None:
        if value is not None:
            number, _, count = value.partition("/")
            is_number = number.isdecimal() and count.isdecimal() and int(number) < int(count)
            if not is_number and not (number == TASK and count.isdecimal() and int(count)):
                raise ValueError("expected 'i/n' with 0 <= i < n, such as '0/8', or 'task/8' for tasks of an array")
        return value

    @property
    def content_field(self) -> str:
        """Field of a row with its text, conversation or request."""
        return self.text_field or {"text": "text", "messages": "messages", "openai-batch": "body"}[self.format]

    @property
    def part(self) -> CorpusPart:
        """The part of the corpus that this job processes."""
        number, _, count = (self.shard or "0/1").partition("/")
        return CorpusPart(0 if number == TASK else int(number), int(count))


class PromptSection(Strict):
    """The prompt for each document."""

    template: str | Annotated[dict[str, str], Field(min_length=1)] = Field(
        "{text}",
        description="user message; {text} is the document, {field} any field of its row; or a table of several by name",
    )
    system: str | None = Field(None, description="system prompt")
    chat_template: bool | None = Field(None, description="use the model's chat template; default: true if there is one")
    template_args: dict[str, JsonValue] = Field(
        {}, description="variables of the chat template, such as enable_thinking = false (chat_template_kwargs)"
    )
    date: str | None = Field(
        None, description="date for chat templates that contain one; default: the start date of the run"
    )
    too_long: Literal["error", "keep-head", "keep-middle", "keep-tail", "split"] = Field(
        "error",
        description="if a prompt exceeds the context: record an error, keep a part, or answer all parts in turn",
    )
    min_coverage: Annotated[float, Field(ge=0, le=1), AS_SHARE] = Field(
        0.0, description="minimum fraction of a document that an answer must cover; other answers become error records"
    )
    overlap_tokens: Annotated[int, Field(ge=0), AS_TOKENS] = Field(
        0, description="split: number of tokens that each part repeats from the previous one"
    )
    reduce_template: str | None = Field(
        None, description="split: template for combining the answers about the parts; default: template"
    )
    max_tokens: Annotated[int, Field(ge=2), AS_TOKENS] | None = Field(
        None, description="maximum total length of prompt and answer; default: the model's context"
    )

    @field_validator("template_args")
    @classmethod
    def _known_to_no_one_else(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if why := why_not_arguments(value):
            raise ValueError(why)
        return value

    @field_validator("date", mode="before")
    @classmethod
    def _iso_date(cls, value: Any) -> Any:
        if value is None:
            return None
        try:  # TOML has dates
            found = datetime.fromisoformat(value.isoformat() if isinstance(value, date) else value)
            return found.isoformat() if found.time() != time() else found.date().isoformat()
        except (ValueError, TypeError):
            raise ValueError("expected a date such as 2026-01-31, or with a time 2026-01-31T12:00:00") from None

    @property
    def chat(self) -> ChatOptions:
        """What the chat template may depend on, except for messages."""
        return ChatOptions(self.template_args, self.date)

    @property
    def first_template(self) -> str:
        """The user message, or the first of several."""
        return next(iter(self.template.values())) if isinstance(self.template, dict) else self.template

    @property
    def kept(self) -> Literal["head", "middle", "tail"] | None:
        """The part of a document that is kept if its prompt is too long."""
        kept: tuple[Literal["head", "middle", "tail"], ...] = ("head", "middle", "tail")
        return next((part for part in kept if self.too_long == f"keep-{part}"), None)


class ParallelSection(Strict):
    """How the ranks share the work."""

    strategy: Literal["kvr", "single"] = Field(
        "kvr", description="kvr: chains of ranks; single: plain transformers, one document per rank"
    )
    ranks_per_chain: Annotated[int, Field(ge=1)] | Literal["all", "auto"] | None = Field(
        None,
        description="ranks that share one prompt; auto: planned per document; default: all, or 1 with [questions]",
    )
    tensor_parallel: int = Field(1, ge=1, description="number of ranks that hold one copy of the model together")
    partition: str = Field(
        EQUAL_TIME,
        min_length=1,
        description="equal_time: slices of equal time; even: slices of equal length; PATH: a table from kvr search, or "
        "a folder of tables",
    )
    chunk_tokens: ChunkTokens = Field(
        "auto",
        description="chunk size in tokens within a slice; auto: only if memory is short, or 64 with rolling caches",
    )
    memory_gib: Annotated[float, Field(gt=0), AS_GIB] | None = Field(
        None, description="maximum memory per rank for prompts, in addition to the weights; default: all free memory"
    )
    transport: TransportName = Field(
        "auto", description="transport of keys and values between ranks; auto: mpi on CPUs, nccl on GPUs"
    )

    @property
    def table(self) -> str | None:
        """File or folder of lookup tables; None if slices are even or of equal time."""
        return None if self.partition in (EQUAL_TIME, EVEN) else self.partition


class QuestionsSection(Strict):
    """Questions about the documents of an earlier run with stored keys and values; `documents.path` is that run."""

    ask: list[str] | dict[str, str] | str = Field(
        [],
        description="list of questions, table of questions by name, or a file (lines, or .jsonl with question and id)",
    )
    template: str = Field("\n\n{question}", description="text after the document")
    documents: list[str] | None = Field(None, description="ids of the documents to ask about; default: all")


class CacheSection(Strict):
    """Which keys and values of a prompt a rank stores during prefill and decoding (`kv.rolling`)."""

    kind: Literal["whole", "rolling", "streaming-llm"] = Field(
        "whole",
        description="whole: all tokens; rolling: the most recent ones, exact for models with windows; streaming-llm: "
        "the first four and the most recent ones, not exact",
    )
    tokens: Annotated[int, Field(ge=5), AS_TOKENS] = Field(
        448, description="rolling: number of earlier tokens to which the first token of a step attends"
    )

    @model_validator(mode="after")
    def _settings_fit_the_kind(self) -> CacheSection:
        if self.kind == "whole" and self.changed("tokens"):
            raise ValueError("cache.tokens requires a rolling cache: set cache.kind = 'rolling', or omit cache.tokens")
        return self

    @property
    def is_rolling(self) -> bool:
        return self.kind != "whole"


class DecodeSection(Strict):
    """How the ranks of a chain decode, and how heads are assigned to them."""

    mode: Literal["data-parallel", "head-parallel", "auto"] = Field(
        "data-parallel",
        description="data-parallel: each rank decodes its own prompts; head-parallel: ranks divide the heads of all "
        "prompts; auto: the faster",
    )
    placement: Literal["static", "best-effort", "equal", "proportional"] = Field(
        "proportional",
        description="assignment of heads to ranks; static: in order; best-effort: by the tokens they keep; equal, "
        "proportional: also with copies",
    )

    @model_validator(mode="after")
    def _settings_fit_the_mode(self) -> DecodeSection:
        if self.mode == "data-parallel" and self.changed("placement"):
            raise ValueError(
                "decode.placement has no effect with mode = 'data-parallel', where every rank has all heads of its "
                "prompts; omit it, or choose mode = 'head-parallel' or 'auto'"
            )
        return self


class JobSpec(Strict):
    """A whole job."""

    model: ModelSection
    documents: DocumentsSection
    prompt: PromptSection = PromptSection()
    questions: QuestionsSection | None = None
    generation: GenerationSection = GenerationSection()
    cache: CacheSection = CacheSection()
    compress: CompressSettings | None = None
    decode: DecodeSection = DecodeSection()
    parallel: ParallelSection = ParallelSection()
    output: OutputSettings

    @model_validator(mode="before")
    @classmethod
    def _reads_texts(cls, given: Any) -> Any:
        """Default to no answer and no chat template if documents are only read."""
        output = given.get("output") if isinstance(given, dict) else None
        if not isinstance(output, dict) or not (output.get("embedding") or output.get("text_logprobs")):
            return given
        defaults: dict[str, dict[str, Any]] = {"generation": {"max_new_tokens": 0}, "prompt": {"chat_template": False}}
        prompt, documents = given.get("prompt"), given.get("documents")
        is_chat = isinstance(prompt, dict) and (prompt.get("system") or prompt.get("template_args"))
        if is_chat or (isinstance(documents, dict) and documents.get("format", "text") != "text"):
            del defaults["prompt"]
        for section, values in defaults.items():
            if isinstance(own := given.get(section, {}), dict):
                given = {**given, section: {**values, **own}}
        return given

    @model_validator(mode="after")
    def _reads_or_writes(self) -> JobSpec:
        if self.output.reads is not None and self.generation.max_new_tokens:
            raise ValueError(
                f"{self.output.reads} replaces the answer, but generation.max_new_tokens = "
                f"{self.generation.max_new_tokens} asks for one: leave one of them out"
            )
        return self

    @property
    def prompts(self) -> dict[str, str]:
        """Templates of several prompts about each document, by name; none if there is one prompt."""
        return self.prompt.template if isinstance(self.prompt.template, dict) else {}

    @property
    def keeps_kv(self) -> bool:
        """Whether the keys and values of a prompt are needed after its prefill: not if documents are only read."""
        return self.output.reads is None or bool(self.output.kv or self.prompts)

    @property
    def is_sharded(self) -> bool:
        """Whether keys and values are sharded over the ranks of a chain, which decode together."""
        return self.output.kv == "sharded" or (
            self.questions is not None and self.ranks_per_chain != self.parallel.tensor_parallel
        )

    @property
    def decodes_together(self) -> bool:
        """Whether the ranks of a chain communicate in every layer of a decode step."""
        return self.is_sharded or self.decode.mode == "head-parallel"

    @property
    def is_plain(self) -> bool:
        """Whether plain transformers runs the prompts, each on one rank."""
        return self.parallel.strategy == "single"

    @property
    def takes_chains(self) -> bool:
        """Whether several ranks may share a prompt; not with plain transformers or a rolling cache."""
        return not self.is_plain and not self.cache.is_rolling

    @property
    def ranks_per_chain(self) -> int | Literal["all", "auto"]:
        """Ranks that share a prompt."""
        wanted = self.parallel.ranks_per_chain or ("all" if self.questions is None else self.parallel.tensor_parallel)
        return wanted if self.takes_chains else 1

    def chain_size(self, ranks: int) -> int | None:
        """Ranks of each chain of a job on so many ranks; None if chain lengths are planned."""
        wanted = self.ranks_per_chain
        return None if wanted == "auto" else ranks if wanted == "all" else wanted

    @property
    def chunk_tokens(self) -> int | Literal["auto"]:
        """Tokens of the chunks in which a chain computes slices; rolling caches use steps instead."""
        return "auto" if self.cache.is_rolling else self.parallel.chunk_tokens

    @property
    def planned(self) -> bool:
        """Whether each document's chain length is planned."""
        return self.ranks_per_chain == "auto"
