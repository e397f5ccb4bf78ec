"""Plans a job without MPI and without weights: counts its corpus, and schedules its documents."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvr_mpi.compress.compression import open_compression
from kvr_mpi.costs.workload import workload_of
from kvr_mpi.documents import Corpus
from kvr_mpi.documents.index import part_numbers
from kvr_mpi.documents.templates import check_system
from kvr_mpi.documents.token_counts import count_corpus
from kvr_mpi.errors import ConfigError, ModelError, counted
from kvr_mpi.job import JobSpec
from kvr_mpi.job.combinations import PROMPTS, why_no_effect
from kvr_mpi.job.inputs import parse_templates
from kvr_mpi.kv.rolling import check_rolling, rolling_of
from kvr_mpi.model import LoadedModel, load_outline
from kvr_mpi.model.adapter import adapter_tokenizer, with_adapter
from kvr_mpi.model.load import placement
from kvr_mpi.model.shape import logits_width
from kvr_mpi.prefill.memory_budget import footprint_of
from kvr_mpi.runtime.checks import check_tensor_parallel, find_others, lay_out
from kvr_mpi.runtime.indexing import scan_documents
from kvr_mpi.runtime.session import Machine, whole_identity
from kvr_mpi.runtime.stored_size import stored_bytes, stored_text
from kvr_mpi.schedule.assignment import plan_documents, prompt_tokens, two_parts, written_seconds
from kvr_mpi.schedule.forecast import Forecast, forecast_of, frame_of, with_memory
from kvr_mpi.schedule.history import Expected, History, expect, find_history, is_forecast
from kvr_mpi.schedule.placement import Schedule
from kvr_mpi.topology import whole_groups


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job's plan and its inputs; `counted` describes how the tokens of `texts` were counted.

    `others` are files of other types in the document folders; `errors` has the reason, by id, for each document that
    cannot be answered. `history` is used if the machine's speed comes from earlier jobs. A tensor-parallel group counts
    as one rank of the plan.
    """

    spec: JobSpec
    outline: LoadedModel
    forecast: Forecast
    texts: list[tuple[str, int]]
    counted: str
    schedule: Schedule
    others: list[str]
    errors: dict[str, str]
    corpus: Corpus
    history: History | None = None

    @property
    def written_s(self) -> float | None:
        """Predicted time of the job as written; None if it does not fit, or if its chain length is impossible."""
        return written_seconds(self.spec, self.schedule)

    @property
    def expected(self) -> Expected | None:
        """Expected duration of the job as written, including its start; None without earlier jobs of its model."""
        if self.history is None or not is_forecast(self.spec):
            return None
        parts = two_parts(self.spec, self.texts, self.schedule.ranks, self.forecast)
        return None if parts is None else expect(self.history.jobs, *parts, self.spec.generation.max_new_tokens)

    @property
    def tensor_parallel(self) -> int:
        """Ranks per tensor-parallel group; the plan counts groups."""
        return self.spec.parallel.tensor_parallel

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        return self.schedule.ranks * self.tensor_parallel

    @property
    def rank_bytes(self) -> float | None:
        """Bytes on a rank's device (GPU or host) for weights and the longest prompt; None if unknown."""
        forecast, outline, spec = self.forecast, self.outline, self.spec
        longest = max(self.schedule.placements, key=lambda place: place.tokens, default=None)
        if longest is None or not longest.tokens or forecast.is_plain:
            return None
        if forecast.peak_bytes is None:  # GPU profiles have it
            try:
                footprint = footprint_of(outline.config, outline.dtype)
            except ModelError:  # chains cannot run the model
                return None
            held = workload_of(outline.config, outline.dtype.itemsize).weight_bytes
            forecast = with_memory(forecast, spec, outline.config, footprint, math.inf, held)
        size = spec.chain_size(self.ranks)
        ranks = longest.ranks if size is None else whole_groups(size, self.tensor_parallel)
        return forecast.memory(max(forecast.parts(longest.tokens)), ranks)

    @property
    def host_bytes(self) -> float | None:
        """Bytes of weights that each rank of a GPU job first loads into host memory; None if none, or if unknown."""
        if self.tensor_parallel > 1 or placement(torch.device("cuda")):
            return None
        return workload_of(self.outline.config, self.outline.dtype.itemsize).weight_bytes

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of keys and values that the job will store; None if it stores none."""
        spec = self.spec
        if not spec.output.kv or spec.questions is not None:
            return None
        texts = [tokens for name, tokens in self.texts if name not in self.errors]
        return stored_bytes(spec, self.forecast.frame, texts, self.outline.shape.kv_bytes_per_token)

    def describe_stored(self) -> str:
        """Describe the space that the job's keys and values take, and how much is free; empty if there are none."""
        if (size := self.kv_bytes) is None:
            return ""
        folder = Path(self.spec.output.path).absolute()
        try:
            free = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.is_dir())).free
        except OSError:  # such as a folder that only nodes see; the job checks it again
            free = None
        return stored_text(len(self.texts) - len(self.errors), size, free)


def outline_of(spec: JobSpec, machine: Machine) -> LoadedModel:
    """Load a job's model without weights (`load_outline`)."""
    source = spec.model
    outline = load_outline(
        source.path,
        dtype=source.dtype,
        offline=machine.offline,
        trust_remote_code=source.trust_remote_code,
        cache_dir=machine.cache_dir,
    )
    tokenizer = adapter_tokenizer(outline.tokenizer, source.adapter, logits_width(outline.config))
    return replace(outline, tokenizer=tokenizer, fingerprint=with_adapter(outline.fingerprint, source.adapter))


def identity_of_job(spec: JobSpec, machine: Machine) -> dict[str, Any]:
    """Return a job's identity as results store it, without loading weights."""
    outline = outline_of(spec, machine)
    frame = frame_of(spec, outline.tokenizer, outline.shape, spec.prompt.first_template)
    compression = None if spec.compress is None else open_compression(spec.compress, outline)
    rolling = rolling_of(spec.cache.kind, spec.cache.tokens, spec.parallel.chunk_tokens)
    identity: dict[str, Any] = json.loads(json.dumps(whole_identity(spec, outline, frame, compression, rolling)))
    return identity


def plan_job(spec: JobSpec, machine: Machine, ranks: int, hardware: str | None) -> PlannedJob:
    """Read a job's corpus, and plan the job for some ranks; raise `ConfigError` if the speed of a rank is unknown."""
    parse_templates(spec)
    check_tensor_parallel(spec)
    check_system(spec.prompt.system)
    outline = outline_of(spec, machine)
    if (rolling := rolling_of(spec.cache.kind, spec.cache.tokens, spec.parallel.chunk_tokens)) is not None:
        check_rolling(outline.shape, rolling, in_parts=outline.shape.why_whole is None)
    templates = [*spec.prompts.values()] or [spec.prompt.first_template]
    first, *others = (frame_of(spec, outline.tokenizer, outline.shape, template) for template in templates)
    frame = min((first, *others), key=lambda one: one.text_budget)
    groups = ranks if spec.parallel.tensor_parallel == 1 else lay_out(spec, ranks).by_group.ranks
    alike = [
        one
        for one in others
        if (one.head, one.text) == (first.head, first.text) and why_no_effect(PROMPTS, spec) is None
    ]
    more = tuple(len(one.tail) for one in alike)
    history = None
    is_measured = spec.parallel.tensor_parallel == 1 and not spec.is_plain
    if hardware is None and spec.parallel.table is None and is_measured:
        dtype = str(outline.dtype).removeprefix("torch.")
        history = find_history(machine.cache_dir, outline.fingerprint, dtype, groups)
    forecast = forecast_of(spec, outline, frame, groups, hardware, history)
    forecast = replace(forecast, more=more, apart=len(others) - len(alike))
    corpus = scan_documents(spec)
    found = count_corpus(outline.tokenizer, map(corpus.read, range(len(corpus))))
    schedule = plan_documents(spec, found.texts, groups, forecast)
    too_long = {
        name: f"too long: {tokens} tokens, but only {frame.text_budget} fit (prompt.too_long = 'error')"
        for name, tokens in found.texts
        if tokens and not prompt_tokens(spec.prompt, frame, tokens)
    }
    errors = found.errors | too_long
    return PlannedJob(
        spec, outline, forecast, found.texts, found.how, schedule, find_others(spec), errors, corpus, history
    )


def plan_shares(made: PlannedJob, count: int) -> list[PlannedJob]:
    """Plan each share of a job's corpus for the same number of ranks; raise `ConfigError` if a share would be empty."""
    if len(made.texts) < count:
        raise ConfigError(
            f"{count} shares of {counted(len(made.texts), 'document')}: some shares would be empty; choose "
            f"{len(made.texts)} or fewer"
        )
    index, has_limit = made.corpus.index, made.spec.documents.limit is not None
    parts = np.arange(len(index)) % count if has_limit else part_numbers(made.corpus.files, index, count)
    shares: list[list[tuple[str, int]]] = [[] for _ in range(count)]
    for part, text in zip(parts.tolist(), made.texts, strict=True):
        shares[part].append(text)
    ranks = made.schedule.ranks
    return [
        replace(made, texts=texts, schedule=plan_documents(made.spec, texts, ranks, made.forecast))
        for texts in filter(None, shares)
    ]
