"""Which settings cannot be combined, and why: one table for errors, docs and tests.

Settings are named as in job files: ``section.key`` stands for any value except the default, ``section.key = value``
for that value, ``[section]`` for a section that is present. Kinds of models (`MODELS`) are described in words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from kvr_mpi.errors import ConfigError
from kvr_mpi.job.spec import JobSpec

# Longer values are left out of messages.
SHOWN_CHARACTERS = 32
LEAVE_OUT = "omit one of the two"

SINGLE = "parallel.strategy = 'single'"
CHAIN_SIZE, PLANNED = "parallel.ranks_per_chain", "parallel.ranks_per_chain = 'auto'"
CHUNKS, TABLE, TENSOR_PARALLEL = "parallel.chunk_tokens", "parallel.partition = PATH", "parallel.tensor_parallel"
HEADS, NCCL = "decode.mode = 'head-parallel'", "parallel.transport = 'nccl'"
ROLLING, COMPRESS = "cache.kind", "[compress]"
KV, SHARDED_KV, COLUMNS = "output.kv", "output.kv = 'sharded'", "output.columns"
QUESTIONS, SHARED_QUESTIONS = "[questions]", "[questions] with parallel.ranks_per_chain"
PROMPTS, REUSE, SPLIT = "[prompt.template]", "documents.reuse", "prompt.too_long = 'split'"
ROWS, MESSAGES, REQUESTS = (f"documents.format{kind}" for kind in ("", " = 'messages'", " = 'openai-batch'"))
PROMPT_KEYS = tuple(f"prompt.{key}" for key in ("template", "system", "too_long"))
CHAT = "prompt.chat_template = true"
CHAT_KEYS = ("prompt.chat_template", "prompt.template_args", "prompt.date")
LOGPROBS, SAMPLES, SCHEMA = "generation.logprobs", "generation.n", "generation.json_schema"
EMBEDDING, OWN_PROMPTS = "output.embedding", tuple(f"output.embedding = '{kind}'" for kind in ("document", "query"))
TEXT_LOGPROBS = "output.text_logprobs"
READ = (EMBEDDING, TEXT_LOGPROBS)
SCORE, SCORE_COLUMN, NO_ANSWER = "generation.score", "generation.score = FIELD", "generation.max_new_tokens = 0"

# Kinds of models that do not support all settings.
STATES, GENERIC, LENGTH = (
    "a model with recurrent layers",
    "a model whose attention runs over the whole cache",
    "a model whose rotary embedding depends on the prompt's length",
)
MODELS = (STATES, GENERIC, LENGTH)


@dataclass(frozen=True, slots=True)
class Rule:
    """A setting that cannot be combined with any of some others.

    why : reason, which continues a sentence that names both.
    remedy : what the user can do.
    """

    setting: str
    others: tuple[str, ...]
    why: str
    remedy: str = LEAVE_OUT


REFUSED = (
    # How prompts run.
    Rule(CHUNKS, (SINGLE,), "only chains compute slices in chunks", "choose strategy = 'kvr'"),
    Rule(CHUNKS, (STATES,), "its layers pass one state per slice to the next rank"),
    Rule(CHUNKS, (GENERIC,), "its attention needs a mask for the whole slice"),
    Rule(TABLE, (PLANNED,), "a table applies to chains of one length", "choose another partition"),
    Rule(TENSOR_PARALLEL, (SINGLE,), "it needs a whole model on every rank", "choose strategy = 'kvr'"),
    Rule(TENSOR_PARALLEL, (PLANNED,), "plans assume the whole model on each rank", "give a number of ranks, or 'all'"),
    Rule(
        TENSOR_PARALLEL, (TABLE,), "tables are measured with the whole model on each rank", "choose another partition"
    ),
    Rule(
        TENSOR_PARALLEL,
        ("decode.mode",),
        "it distributes heads, which tensor_parallel does already",
        "omit decode.mode",
    ),
    Rule(
        TENSOR_PARALLEL,
        ("model.adapter",),
        "an adapter is merged into whole matrices, but a rank of a group loads slices of them",
        "save a merged model and use its folder",
    ),
    Rule(TENSOR_PARALLEL, ("model.trust_remote_code",), "transformers has no plan to split such a model"),
    # Rolling caches.
    Rule(ROLLING, (TENSOR_PARALLEL,), "each rank of a group has only a part of the model"),
    Rule(ROLLING, (SINGLE,), "only chains of one rank have a rolling cache", "choose strategy = 'kvr'"),
    Rule(ROLLING, (CHAIN_SIZE,), "each rank processes its own documents with its own rolling cache", "omit it"),
    Rule(ROLLING, (TABLE,), "prompts are not cut into slices", "omit it"),
    Rule(ROLLING, (COMPRESS,), "compression chooses among all tokens of a prompt"),
    Rule(ROLLING, (KV,), "a rolling cache contains only part of a prompt, which cannot be continued later"),
    Rule(ROLLING, (QUESTIONS, REUSE), "they need the whole stored prompt"),
    Rule(
        ROLLING,
        (REQUESTS, SAMPLES),
        "several answers need the tokens of the prompt, which are dropped during the first answer",
    ),
    Rule(ROLLING, (SCORE,), "tokens of the prompt are dropped while the first continuation is scored"),
    # Compression.
    Rule(
        COMPRESS,
        (SINGLE,),
        "it decodes from transformers' own cache, which is not compressed",
        "choose strategy = 'kvr', which also runs on one rank",
    ),
    Rule(
        COMPRESS,
        (SHARDED_KV,),
        "each rank of a chain stores its part, but compression chooses among all tokens on one rank",
        "choose output.kv = true, or omit one of the two",
    ),
    Rule(
        COMPRESS,
        (QUESTIONS, REUSE),
        "compression needs queries, which are not stored",
    ),
    Rule(COMPRESS, (SCORE,), "continuations are scored with all keys and values"),
    Rule(COMPRESS, (STATES,), "states cannot be compressed by tokens"),
    Rule(COMPRESS, (GENERIC,), "its keys and values cannot be dropped by head"),
    Rule(
        "compress.observes = 'document'",
        (MESSAGES, REQUESTS),
        "the position of the document's text in the prompt is unknown",
        "choose observes = 'question'",
    ),
    # Head-parallel decoding.
    Rule(HEADS, (SINGLE,), "it decodes from transformers' own cache, which cannot be split by heads"),
    Rule(HEADS, (SHARDED_KV, SHARED_QUESTIONS), "ranks already decode together, each with some of the tokens"),
    *(
        Rule(
            setting,
            (NCCL,),
            "ranks that decode together exchange small messages in every layer, which NCCL is not used for",
            "choose transport = 'auto' or 'staged', or a CUDA-aware 'mpi'",
        )
        for setting in (HEADS, SHARDED_KV, SHARED_QUESTIONS)
    ),
    Rule(HEADS, (ROLLING,), "a rolling cache stays on one rank"),
    Rule(HEADS, (KV,), "it stores the cache of one rank, but with shared heads each rank has only part of a document"),
    # Stored keys and values, and questions about them.
    Rule(
        SHARDED_KV,
        (SINGLE,),
        "the ranks of a chain store their slices",
        "choose strategy = 'kvr', or output.kv = true",
    ),
    Rule(SHARDED_KV, (QUESTIONS,), "with [questions], each prompt is stored whole", "choose output.kv = true"),
    Rule(SHARED_QUESTIONS, (KV,), "prompts that are sharded over several ranks are not stored again"),
    Rule(KV, (STATES,), "states cannot be stored yet", "set output.kv = false"),
    Rule(
        QUESTIONS,
        (*PROMPT_KEYS, *CHAT_KEYS, "prompt.overlap_tokens", "prompt.reduce_template"),
        "the stored prompts are reused up to the end of the document",
        "omit it, and set questions.template for the text after the document",
    ),
    Rule(
        QUESTIONS,
        (ROWS, "documents.id_field", "documents.text_field", REUSE),
        "they refer to the documents of a run, whose prompts are stored",
        "omit it",
    ),
    Rule(QUESTIONS, (COLUMNS, SCORE_COLUMN), "the documents of a run have no row fields", "omit it"),
    Rule(
        QUESTIONS,
        ("documents.shard",),
        "questions.documents selects documents of the run",
        "name the documents in questions.documents",
    ),
    Rule(QUESTIONS, (SINGLE,), "only chains continue stored prompts", "omit strategy"),
    Rule(QUESTIONS, (TABLE,), "only a question's own tokens are computed", "omit it"),
    Rule(
        QUESTIONS,
        (PLANNED,),
        "the documents are sharded over a fixed number of ranks",
        "set the number of ranks of a chain",
    ),
    # Several prompts about a document; rows that are prompts.
    Rule(PROMPTS, (REUSE, KV, PLANNED), "it supports only one prompt per document"),
    Rule(ROWS, (*PROMPT_KEYS, "prompt.chat_template = false"), "each row contains its whole prompt", "omit it"),
    Rule(REQUESTS, ("documents.id_field", "documents.text_field"), "its rows have fixed fields", "omit it"),
    Rule(ROWS, (KV,), "conversations and requests are not stored yet", "use documents.format = 'text', or omit it"),
    Rule(REQUESTS, (NO_ANSWER,), "requests need answers", "set at least 1"),
    # Answers.
    Rule(SAMPLES, (KV,), "it stores the keys of only one answer"),
    Rule(SAMPLES, (SPLIT,), "several answers to one prompt are not supported with split documents"),
    Rule(SCORE, (SPLIT, REQUESTS), "scores are not supported with these yet"),
    Rule(LOGPROBS, (NO_ANSWER, SCORE, *READ), "it applies to answers, and no answer is written"),
    Rule(SCHEMA, (NO_ANSWER, SCORE, *READ), "it applies to answers, and no answer is written"),
    Rule(SAMPLES, (NO_ANSWER, SCORE, *READ), "it applies to answers, and no answer is written"),
    Rule(
        SCHEMA,
        ("generation.stop", "generation.min_new_tokens"),
        "it would end or change answers against the schema",
    ),
    # What is read of prompts, instead of answers.
    Rule(EMBEDDING, (TEXT_LOGPROBS,), "they are of different prompts", "use two jobs"),
    *(
        Rule(setting, others, why, *remedy)
        for setting in READ
        for others, why, *remedy in (
            ((SCORE,), "continuations follow a prompt, and documents are only read"),
            ((COMPRESS, "decode.mode", SHARDED_KV), "it is for answers, and no answer is written"),
            ((ROLLING,), "only the last step of a rolling cache has final hidden states"),
            ((QUESTIONS, REUSE), "tokens whose keys and values are stored have no final hidden states"),
            ((SPLIT,), "each document is read in one prompt", "choose 'keep-head', or leave one of the two out"),
            ((MESSAGES,), "conversations end with the beginning of an answer", "use documents.format = 'text'"),
        )
    ),
    Rule(TEXT_LOGPROBS, (REQUESTS,), "no request asks for that", "use documents.format = 'text'"),
    *(
        Rule(setting, ("prompt.template", "prompt.system", CHAT), "the model's folder has the prompt", "leave it out")
        for setting in OWN_PROMPTS
    ),
)
# Pairs that are not refused, although the first setting then has no effect; the docs list them.
NO_EFFECT = (
    Rule(PROMPTS, (SINGLE,), "plain transformers prefills every prompt separately"),
    Rule(PROMPTS, (LENGTH,), "keys depend on the length of the whole prompt"),
    Rule(PROMPTS, (ROLLING,), "a rolling cache cannot be continued by other prompts"),
    Rule(PROMPTS, READ, "what is read of a prompt depends on all of its tokens"),
    Rule(PROMPTS, (COMPRESS,), "keys and values are compressed differently for each prompt"),
    Rule(REUSE, (SINGLE,), "plain transformers prefills every prompt separately"),
    Rule(REUSE, (LENGTH,), "keys depend on the length of the whole prompt"),
    Rule(QUESTIONS, (LENGTH,), "keys depend on the length of the whole prompt, so documents are prefilled again"),
)

# Settings that need a function to tell whether a job uses them.
SPECIAL: Mapping[str, Callable[[JobSpec], bool]] = {
    CHAIN_SIZE: lambda job: (
        isinstance(job.parallel.ranks_per_chain, int) and job.parallel.ranks_per_chain > job.parallel.tensor_parallel
    ),
    PLANNED: lambda job: job.planned,
    CHUNKS: lambda job: job.chunk_tokens != "auto",
    TABLE: lambda job: job.parallel.table is not None,
    PROMPTS: lambda job: bool(job.prompts),
    SHARED_QUESTIONS: lambda job: job.questions is not None and job.is_sharded,
    SCORE_COLUMN: lambda job: job.generation.score_column is not None,
    NO_ANSWER: lambda job: (
        job.generation.max_new_tokens == 0 and not job.generation.scores and job.output.reads is None
    ),
}


def check_combinations(job: JobSpec, model: Collection[str] | None = None) -> None:
    """Refuse settings that cannot be combined; given a model (some of `MODELS`), only those that do not suit it.

    Raises `ConfigError`, which lists all such pairs, and what to do.
    """
    if len(found := refusals(job, model)) > 1:
        found = [f"{len(found)} pairs of settings cannot be combined:", *(f"- {refusal}" for refusal in found)]
    if found:
        raise ConfigError("\n".join(found))


def refusals(job: JobSpec, model: Collection[str] | None = None) -> list[str]:
    """Describe each pair of settings that cannot be combined, with the reason and the remedy."""
    found: dict[frozenset[str], str] = {}
    # The settings of a job with questions are completed from the run that it asks about, and are not checked again.
    rules = REFUSED if model is None else [rule for rule in REFUSED if not {*rule.others}.isdisjoint(MODELS)]
    for rule in rules:
        if (own := setting_of(rule.setting, job)) is None:
            continue
        for other in _used(rule.others, job, model or ()):
            refusal = f"{other} cannot be combined with {own}: {rule.why}; {rule.remedy}"
            found.setdefault(frozenset((own, other)), refusal)
    return list(found.values())


def why_not_heads(job: JobSpec) -> str | None:
    """Return the setting that prevents head-parallel decoding, with the reason; None if there is none."""
    return _first(REFUSED, (HEADS,), job)


def why_no_effect(setting: str, job: JobSpec, model: Collection[str] = ()) -> str | None:
    """Return why a setting has no effect with the job's other settings or its model; None if it has one."""
    return _first(NO_EFFECT, (setting,), job, model)


def setting_of(name: str, job: JobSpec, model: Collection[str] = ()) -> str | None:
    """Return a setting as text, with its value if that is short; None if the job does not have it."""
    if name in MODELS:
        return name if name in model else None
    if name.startswith("[") and name in SPECIAL:
        return name if SPECIAL[name](job) else None
    key, _, wanted = name.partition(" = ")
    section, _, field = key.strip("[]").partition(".")
    table = getattr(job, section)
    if not field or table is None:
        return key if table else None
    value, default = getattr(table, field), type(table).model_fields[field].default
    written = f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
    if name in SPECIAL:
        is_used = SPECIAL[name](job)
    else:
        is_used = written == name if wanted else value != default
    return None if not is_used else written if len(written) - len(key) <= SHOWN_CHARACTERS else key


def _used(names: Iterable[str], job: JobSpec, model: Collection[str] = ()) -> list[str]:
    return [written for name in names if (written := setting_of(name, job, model)) is not None]


def _first(rules: Iterable[Rule], settings: Collection[str], job: JobSpec, model: Collection[str] = ()) -> str | None:
    reasons = (
        f"{other}: {rule.why}" for rule in rules if rule.setting in settings for other in _used(rule.others, job, model)
    )
    return next(reasons, None)
