"""Forecasts for one document on a chain of any length: slices, time and memory.

Sits between the job and the plan. Prefill times come from the cost model. Decoding takes a step per new token, in which
the chain's last rank decodes all of its documents together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvr_mpi.compress.planned_drop import PlannedDrop, planned_drop
from kvr_mpi.costs.costmodel import chain_seconds, equal_time_lengths
from kvr_mpi.costs.hardware import load_hardware, profiles
from kvr_mpi.costs.layer_costs import Costs, costs_of
from kvr_mpi.costs.workload import check_heads, workload_of
from kvr_mpi.decode.batch import MAX_SEQUENCES
from kvr_mpi.documents.prompts import Frame, count_parts, make_frame
from kvr_mpi.errors import ConfigError
from kvr_mpi.job import EVEN, JobSpec
from kvr_mpi.kv.relay import Relay
from kvr_mpi.kv.rolling import Rolling, rolling_of
from kvr_mpi.model import LoadedModel, ModelShape
from kvr_mpi.model.tensor_parallel import part_config, part_of
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.prefill.memory_budget import Footprint, choose_chunks, footprint_of
from kvr_mpi.prefill.packed import PACK_TOKENS
from kvr_mpi.schedule.history import LEAST_S, History, expected_tokens
from kvr_mpi.schedule.placement import SecondsOf
from kvr_mpi.tuning.identity import model_identity
from kvr_mpi.tuning.lookup import choose_slices, find_tables
from kvr_mpi.tuning.table import Table, holds_tables

# Usable share of free memory by device type; the rest is lost to libraries and fragmentation. GPU libraries allocate
# memory at their first call, and the GPU allocator cannot move allocations between two prompts.
MEMORY_SHARE = {"cpu": 0.95, "cuda": 0.89}


def frame_of(spec: JobSpec, tokenizer: Any, shape: ModelShape, template: str, after: str | None = None) -> Frame:
    """Make the frame around a document's text, with room for the answer; `after` as in `make_frame`.

    Raises `ConfigError` if prompt and answer do not fit into the model's context.
    """
    prompt = spec.prompt
    context = prompt.max_tokens or shape.max_tokens or 1 << 62
    if shape.max_tokens is not None and context > shape.max_tokens:
        raise ConfigError(f"prompt.max_tokens = {context}: the context of this model has {shape.max_tokens:,} tokens")
    room = context - spec.generation.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"generation.max_new_tokens = {spec.generation.max_new_tokens} leaves no room for a prompt in a context of "
            f"{context:,} tokens; lower it"
        )
    frame = make_frame(
        tokenizer,
        template,
        system=prompt.system,
        chat_template=prompt.chat_template,
        after=after,
        options=prompt.chat,
        max_prompt_tokens=room,
        ends=spec.output.embedding is not None,
    )
    if 2 * prompt.overlap_tokens > frame.text_budget:
        raise ConfigError(
            f"prompt.overlap_tokens = {prompt.overlap_tokens}: expected at most half of the "
            f"{frame.text_budget:,} tokens of text that fit into a prompt"
        )
    return replace(frame, overlap=prompt.overlap_tokens)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecasts of time and memory of one document on a chain of any length.

    source : description of where the costs come from.
    costs : costs of a rank; all ranks are assumed to be equal.
    frame : the prompt around the text; longer documents are answered in parts.
    new_tokens : maximum tokens of an answer.
    load : documents per rank; if there are many, all ranks of a chain decode, each several documents together.
    peak_bytes : maps (tokens, ranks) to the maximum memory of any rank; None if unknown.
    memory_bytes : memory of each rank; None if unknown.
    cut : maps (tokens, ranks) to slices, if the job cuts evenly or by a lookup table; None: slices of equal time.
    is_plain : whether one rank runs plain transformers (``strategy = "single"``).
    chunk_tokens : chunk size of slices; auto: by `chunks`.
    chunks : maps (tokens, ranks) to the chunk size that fits, None for whole slices; None if memory is unknown.
    rolling : the rolling cache of prompts, each on one rank; None: whole caches.
    more : tokens after the text in further prompts that continue the document's keys and values.
    apart : number of further prompts that begin differently, so the document is prefilled again for each.
    """

    source: str
    costs: Costs
    frame: Frame
    new_tokens: int
    load: float = 0.0
    peak_bytes: Callable[[int, int], float] | None = None
    memory_bytes: float | None = None
    cut: Callable[[int, int], Partition] | None = None
    is_plain: bool = False
    chunk_tokens: int | Literal["auto"] = "auto"
    chunks: Callable[[int, int], int | None] | None = None
    rolling: Rolling | None = None
    more: tuple[int, ...] = ()
    apart: int = 0

    @property
    def answer_s(self) -> float:
        """Time of one answer decoded by itself, without attention to its prompt: no number of ranks is faster."""
        return max(0, self.new_tokens - 1) * self.costs.step_s

    def chunks_for(self, tokens: int, ranks: int) -> int | None:
        """Chunk size in tokens of a prompt's slices on `ranks` ranks; None for whole slices."""
        if self.rolling is not None or self.is_plain:
            return None
        if ranks == 1 and 2 * tokens <= PACK_TOKENS["cpu"]:  # packed with others
            return None
        if self.chunk_tokens != "auto":
            return self.chunk_tokens if self.chunk_tokens < max(self.slices(tokens, ranks).lengths) else None
        return None if self.chunks is None else self.chunks(min(tokens, self.frame.max_tokens), ranks)

    def costs_for(self, tokens: int, ranks: int) -> Costs:
        """Costs of a prompt, including those of its chunks."""
        chunk_tokens = self.chunks_for(tokens, ranks)
        if chunk_tokens is None:
            return self.costs
        return self.costs.in_chunks(math.ceil(max(self.slices(tokens, ranks).lengths) / chunk_tokens))

    def slices(self, tokens: int, ranks: int) -> Partition:
        """Slices of a prompt on `ranks` ranks."""
        if self.cut is not None and ranks > 1:
            return self.cut(tokens, ranks)
        return Partition.by_ratio(tokens, equal_time_lengths(self.costs, tokens, ranks), QUANTUM_TOKENS)

    def ttft_s(self, tokens: int, ranks: int) -> float:
        """Time to the first token of one prompt; prompts shorter than the chain run on one rank."""
        if self.rolling is not None:
            return self._rolling_s(tokens, self.rolling)
        if 1 < ranks <= tokens:
            return chain_seconds(self.costs_for(tokens, ranks), self.slices(tokens, ranks).lengths)
        costs = self.costs_for(tokens, 1)
        whole_s = chain_seconds(costs, [tokens])
        # After the last layer's attention, our engine computes only the last token, even on one rank.
        saved_s = 0.0 if self.is_plain else costs.pair_s * tokens**2 / 2
        return max(whole_s - saved_s, costs.layers * costs.launch_floor_s)

    def _rolling_s(self, tokens: int, rolling: Rolling) -> float:
        """Time of a prompt through a rolling cache; each step reads all weights and attends to the cache."""
        costs, held = self.costs, min(tokens, rolling.cache_tokens)
        steps, pairs = math.ceil(tokens / rolling.step_tokens), held * (tokens - held / 2)
        computed_s = costs.layers * (tokens * costs.token_s + pairs * costs.pair_s) + steps * costs.head_s
        return max(computed_s, steps * costs.step_s)

    def parts(self, tokens: int) -> list[int]:
        """Tokens of a document's prompts: one prompt, or its parts followed by the combining prompt."""
        most = self.frame.max_tokens
        if tokens <= most:
            return [tokens]
        count = count_parts(self.frame, tokens)
        around = most - self.frame.text_budget
        each = min(most, -(-tokens // count) + self.frame.overlap)
        return [each] * count + [min(most, around + count * self.new_tokens)]

    def continued_s(self, tokens: int, known: int) -> float:
        """Time to the first token of a prompt that continues `known` tokens, on one rank."""
        costs = self.costs
        token_s = costs.token_s + costs.pair_s * (known + tokens / 2)
        return max(costs.layers * tokens * token_s + costs.head_s, costs.step_s)

    def saved_s(self, tokens: int, ranks: int) -> float:
        """Prefill time saved by the prompts that continue the same document."""
        if not self.more or not tokens or len(self.parts(tokens)) > 1:
            return 0.0
        return sum(max(0.0, self.ttft_s(tokens, ranks) - self.continued_s(each, tokens)) for each in self.more)

    def document_s(self, tokens: int, ranks: int, ttft_s: SecondsOf | None = None) -> float:
        """Time of a document: prefill and answers of all its prompts; `ttft_s` may be interpolated (`sampled`)."""
        prompts, ttft_s = self.parts(tokens), ttft_s or self.ttft_s
        prefill_s = ttft_s(prompts[0], ranks) * max(1, len(prompts) - 1)
        prefill_s += ttft_s(prompts[-1], ranks) if len(prompts) > 1 else 0.0
        costs, steps = self.costs, max(0, self.new_tokens - 1)
        together = 1.0 if self.is_plain else min(max(1.0, self.load), MAX_SEQUENCES)
        if self.rolling is not None:  # documents are decoded one by one, with a short cache
            together, prompts = 1.0, [min(prompt, self.rolling.cache_tokens) for prompt in prompts]
        step_s = (costs.step_s + (together - 1) * costs.row_s) / together
        decode_s = steps * sum(step_s + costs.decode_key_s * prompt for prompt in prompts)
        whole_s = prefill_s + decode_s / max(1.0, ranks * min(1.0, self.load))
        if len(prompts) > 1:  # each of the job's prompts has its own parts
            return whole_s * (1 + len(self.more) + self.apart)
        more_s = sum(self.continued_s(each, tokens) for each in self.more)
        return whole_s * (1 + self.apart) + more_s + (whole_s - prefill_s) * len(self.more)

    def memory(self, tokens: int, ranks: int) -> float | None:
        """Peak bytes on any rank of the chain, limited to the longest possible prompt; None if unknown."""
        return None if self.peak_bytes is None else self.peak_bytes(min(tokens, self.frame.max_tokens), ranks)

    def fits(self, tokens: int, ranks: int) -> bool:
        """Whether a document fits on a chain of `ranks` ranks; True if the memory is unknown."""
        needed = self.memory(tokens, ranks) if tokens and self.memory_bytes is not None else None
        return needed is None or self.memory_bytes is None or needed <= self.memory_bytes


def forecast_measured(spec: JobSpec, costs: Costs, frame: Frame, source: str) -> Forecast:
    """Forecast from measured rates."""
    return Forecast(
        source=source,
        costs=replace(costs, speeds=None),
        is_plain=spec.is_plain,
        chunk_tokens=spec.chunk_tokens,
        rolling=rolling_of(spec.cache.kind, spec.cache.tokens, spec.parallel.chunk_tokens),
        frame=frame,
        new_tokens=spec.generation.max_new_tokens,
        cut=Partition.even if spec.parallel.partition == EVEN else None,
    )


def forecast_of(
    spec: JobSpec, outline: LoadedModel, frame: Frame, ranks: int, hardware: str | None, history: History | None = None
) -> Forecast:
    """Forecast without running anything, from a hardware profile, a lookup table, or earlier jobs.

    hardware : a shipped profile, a JSON file with the same keys, a lookup table or a folder of them; None: the tables
        that the job names (``parallel.partition``).
    history : earlier jobs of this model on this machine, used if there is neither profile nor table.

    Raises `ConfigError`, which lists the choices, if there is none of these.
    """
    size = spec.parallel.tensor_parallel
    given = hardware or spec.parallel.table
    if given is None and history is not None:
        forecast = forecast_measured(spec, history.rates, frame, history.source)
        return replace(forecast, new_tokens=expected_tokens(history.jobs, forecast.new_tokens))
    if given is None:
        raise ConfigError(
            f"the speed of a rank is unknown: use --hardware with a profile ({', '.join(profiles())}), a JSON file "
            "with the same keys, or a lookup table from kvr search; or first run a job of at least "
            f"{LEAST_S:.0f} s with this model, whose speed later plans use"
        )
    if holds_tables(Path(given)):
        tables = _tables(Path(given), outline, size)
        best = min(tables, key=lambda table: (abs(table.key.ranks - ranks), table.key.ranks))
        measured = f"measured on {best.entries[-1].provenance.date[:10]}"
        source = f"lookup table for {best.key.ranks} ranks of {best.key.hardware} ({best.key.device}), {measured}"
        source += "; memory unknown"
        forecast = forecast_measured(spec, best.rates, frame, source)
        if spec.parallel.table is None:
            return forecast
        return replace(forecast, cut=functools.partial(choose_slices, best))
    profile = load_hardware(given)
    whole = workload_of(outline.config, outline.dtype.itemsize)
    check_heads(whole, size)
    costs = costs_of(whole, profile, tensor_parallel=size)
    forecast = forecast_measured(spec, costs, frame, f"profile {profile.name}: {profile.source}")
    if forecast.is_plain:  # plain transformers' memory is not predicted
        return forecast
    config = outline.config
    if size > 1:
        config = part_config(config, part_of(config, 0, size))
        config.vocab_size = outline.config.vocab_size  # every rank has all logits
    footprint = footprint_of(config, outline.dtype, on_gpu=True)  # profiles describe GPUs
    memory_bytes = MEMORY_SHARE["cuda"] * profile.memory_bytes
    return with_memory(forecast, spec, config, footprint, memory_bytes, whole.of_group(size).weight_bytes)


def with_memory(
    forecast: Forecast, spec: JobSpec, config: Any, footprint: Footprint, memory_bytes: float, held_bytes: float = 0.0
) -> Forecast:
    """Add the maximum memory that any rank needs, and the memory that ranks have, to a forecast.

    config : configuration of the model, or of a rank's part of it.
    memory_bytes, held_bytes : memory of a rank, and how much of it is in use before the first prompt.
    """
    settings, footprint = spec.compress, replace(footprint, keeps_kv=spec.keeps_kv)

    def drop_of(tokens: int) -> PlannedDrop | None:
        if settings is None:
            return None
        # If the end of the text selects tokens, the number of tokens after it is unknown: assume that none is dropped.
        observed = tokens if settings.observes == "question" else None
        heads, group_ranks = config.get_text_config().num_attention_heads, spec.parallel.tensor_parallel
        return planned_drop(settings, footprint.shape, heads, tokens, observed, group_ranks)

    def needed(tokens: int, ranks: int, chunk_tokens: int | None) -> float:
        if forecast.rolling is not None:
            return held_bytes + footprint.rolling_bytes(forecast.rolling)
        size = min(ranks, tokens)
        partition = forecast.slices(tokens, size)
        # The first slice is the longest, and one end rank keeps all layers; of the others, the last but one needs most.
        ends = {0, max(0, size - 2), size - 1}
        made = (Relay(partition, rank, chunk_tokens=chunk_tokens) for rank in ends)
        drop = drop_of(tokens)
        return held_bytes + max(
            footprint.slice_bytes(one, reserve_tokens=forecast.new_tokens, drop=drop) for one in made
        )

    @functools.cache
    def chunks(tokens: int, ranks: int) -> int | None:
        if forecast.is_plain:
            return None
        return choose_chunks(forecast.chunk_tokens, footprint, lambda each: needed(tokens, ranks, each) <= memory_bytes)

    return replace(
        forecast,
        peak_bytes=lambda tokens, ranks: needed(tokens, ranks, chunks(tokens, ranks)),
        memory_bytes=memory_bytes,
        chunks=chunks,
    )


def _tables(place: Path, outline: LoadedModel, tensor_parallel: int) -> list[Table]:
    """Read the lookup tables of one machine for this model and dtype; refuse tables of several machines."""
    if tensor_parallel > 1:
        raise ConfigError(
            f"lookup table {str(place)!r}: it was measured with the whole model on each rank, but the job has "
            f"parallel.tensor_parallel = {tensor_parallel}; use a profile: {', '.join(profiles())}"
        )
    dtype = str(outline.dtype).removeprefix("torch.")
    remedy = f"Measure one with kvr search, or give a profile: {', '.join(profiles())}"
    fitting = find_tables(place, {"model": model_identity(outline), "dtype": dtype}, remedy)
    if len({table.key.hardware for table in fitting.values()}) > 1:
        found = ", ".join(f"{file} ({table.key.hardware})" for file, table in fitting.items())
        raise ConfigError(f"lookup tables {str(place)!r} are from several machines: choose one file of {found}")
    return list(fitting.values())
