"""A rank's part of a job (`Session`): its settings, its ranks and its model, ready to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from kvr_mpi.compress.compression import Compression
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.costs.solve import Rates
from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.group import Group, HeadSharing, why_no_drafts
from kvr_mpi.decode.repetition import Penalties
from kvr_mpi.documents.chat import is_dated
from kvr_mpi.documents.encoding import encode_text
from kvr_mpi.documents.prompts import Frame, PromptText
from kvr_mpi.job import JobSpec
from kvr_mpi.job.inputs import identity_of
from kvr_mpi.job.readout import Readout, readout_of
from kvr_mpi.kv.attention import name_attention
from kvr_mpi.kv.chain import Retain
from kvr_mpi.kv.pool import Pool, pages_for
from kvr_mpi.kv.rolling import Rolling
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.logs import SILENT, RankLogger
from kvr_mpi.model import LoadedModel, tokenizer_fingerprint
from kvr_mpi.model.kernels import name_ways
from kvr_mpi.prefill.memory_budget import Footprint
from kvr_mpi.prefill.reading import Reading
from kvr_mpi.runtime.job_ranks import JobRanks
from kvr_mpi.runtime.requests import PromptConfig
from kvr_mpi.schedule.forecast import Forecast, forecast_measured, with_memory
from kvr_mpi.store.lock import Owner, this_process
from kvr_mpi.store.log import Header
from kvr_mpi.tuning.table import Table


@dataclass(frozen=True, slots=True)
class Machine:
    """Properties of a rank's machine and the batch system, from the command line and the environment.

    cache_dir : for converted models.
    cores, threads : cores that this process may use, and CPU threads set in the environment.
    owner : identifies this process in the lock of an output folder.
    deadline_s : Unix time at which the batch system ends the job; None: never.
    checks_memory : check at the end of a job that all keys and values were freed.
    """

    cache_dir: Path
    cores: int = 1
    threads: int | None = None
    offline: bool = False
    owner: Owner = field(default_factory=this_process)
    deadline_s: float | None = None
    checks_memory: bool = False


@dataclass(frozen=True, slots=True)
class Session:
    """A rank's part of a job, from `prepare.prepare`: what it needs to run prompts.

    header : identifies the job and its model in the results.
    why_alone : why prompts are not packed; None if they are.
    prefixes : computed prefixes that all prompts begin with, longest first.
    footprint : predicts a prompt's memory; None for plain transformers, whose memory is not predicted.
    free_bytes : memory that each rank of the lane may use for prompts.
    pool : of this rank's documents.
    costs : costs of ranks and links, if chains are planned, or the way to decode is chosen by them.
    rates : rates of all ranks, if slices are cut by time.
    table : the lookup table that the job names.
    compression : selects the keys and values to keep for decoding; None: all are kept.
    sharing : how the ranks of a chain share heads to decode, or why they cannot; None if the job does not use that.
    rolling : rolling cache of each prompt; None: whole caches.
    once_s : loading time on rank 0, if a GGUF file was converted, which later jobs need not repeat; else 0.
    """

    spec: JobSpec
    machine: Machine
    ranks: JobRanks
    logger: RankLogger
    loaded: LoadedModel
    prompt_config: PromptConfig
    generation: GenerationConfig
    header: Header
    why_alone: str | None
    prefixes: tuple[SequenceKV, ...]
    footprint: Footprint | None
    free_bytes: list[int]
    pool: Pool
    costs: Costs | None
    rates: list[Rates]
    table: Table | None
    compression: Compression | None = None
    sharing: HeadSharing | str | None = None
    rolling: Rolling | None = None
    once_s: float = 0.0

    @property
    def why_no_lookup(self) -> str | None:
        """Why no drafted tokens are run; None if they are, at least by ranks that decode alone."""
        if self.spec.generation.lookup != "auto" or not self.spec.generation.max_new_tokens:
            return "the job asks for none"
        if self.spec.is_plain or self.rolling is not None:
            return "its caches cannot drop the last tokens"
        if self.spec.is_sharded:
            return "the ranks that share a prompt have to run the same tokens"
        return why_no_drafts(self.loaded)

    @property
    def readout(self) -> Readout | None:
        """What the job reads of its prompts; None if it writes answers."""
        return self.prompt_config.readout

    def readings_of(self, prompts: Sequence[PromptText]) -> list[Reading]:
        """Return what is read of each of some prompts; empty if they are answered."""
        return [] if self.readout is None else [self.readout.reading_of(prompt) for prompt in prompts]

    @property
    def frame(self) -> Frame:
        """The prompt around a document's text."""
        return self.prompt_config.frame

    @property
    def kernels(self) -> str:
        """Hardware, dtype and kernels on which answers may depend; empty for float32 on CPUs."""
        model, dtype = self.loaded.model, str(self.loaded.dtype).removeprefix("torch.")
        device, drafts = model.device, "; prompt lookup" if self.why_no_lookup is None else ""
        if device.type == "cuda":
            return f"{torch.cuda.get_device_name(device)}, {dtype}; attention: {name_attention(device)}{drafts}"
        if self.loaded.dtype == torch.float32:
            return ""
        return f"CPU {torch.backends.cpu.get_cpu_capability()}, {dtype}; {name_ways(model)}{drafts}"

    @property
    def longest_answer(self) -> int:
        """Maximum number of tokens after a prompt: of an answer, or of a continuation to score."""
        generation, tokenizer = self.spec.generation, self.loaded.tokenizer
        return max([generation.max_new_tokens, *(len(encode_text(tokenizer, text)) for text in generation.score)])

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of `tokens` tokens, in whole pages if there is a page pool."""
        if self.rolling is not None:
            return self.rolling.kv_bytes(self.loaded.shape) if tokens else 0
        if self.pool.is_paged:
            return pages_for(tokens) * self.pool.page_bytes
        return tokens * self.loaded.shape.kv_bytes_per_token

    def check_memory(self) -> None:
        """Check that no prompt holds memory any more, if that is wanted; raises `AssertionError`."""
        if self.machine.checks_memory:
            self.pool.check_integrity(
                block for prefix in self.prefixes for block in prefix.blocks if block.pool is self.pool
            )

    @property
    def repeats(self) -> bool:
        """Whether compression has the model repeat a prompt's text after the prefill, for which it needs all keys."""
        return self.compression is not None and self.compression.settings.rule.repeats

    def retain_of(self, prompt: PromptText) -> Retain | None:
        """Return what compression keeps of a prompt; None if all of it."""
        return None if self.compression is None else self.compression.retain(prompt.tokens, prompt.text)

    def open_decode_batch(self, group: Group | None = None, logger: RankLogger = SILENT) -> DecodeBatch:
        """Create the decode batch, for a group of ranks or this rank alone."""
        generation = self.spec.generation
        return DecodeBatch(
            self.loaded,
            self.generation,
            stop=generation.stop,
            max_new_tokens=generation.max_new_tokens,
            group=group or Group(self.loaded, why_alone=self.why_alone),
            logger=logger,
            penalties=Penalties(generation.frequency_penalty or 0.0, generation.presence_penalty or 0.0),
            stop_repetition=generation.stop_repetition,
            uses_lookup=self.why_no_lookup is None,
        )

    def forecast(self) -> Forecast:
        """Return the forecast from measured costs; for planned jobs only."""
        assert self.costs is not None and self.footprint is not None
        forecast = forecast_measured(self.spec, self.costs, self.frame, "measured on these ranks")
        config, room = self.loaded.model.config, min(self.free_bytes)
        return with_memory(forecast, self.spec, config, self.footprint, room)


def header_of(spec: JobSpec, loaded: LoadedModel, identity: dict[str, Any], weights: str) -> Header:
    """Return the header of a job's results; `weights` is their hash if keys and values are stored or loaded, or ""."""
    about = {"name": loaded.name, "architecture": loaded.shape.architecture, "dtype": identity["dtype"]}
    if spec.model.adapter is not None:
        about["adapter"] = spec.model.adapter
    if weights:
        about |= {"tokenizer": tokenizer_fingerprint(loaded.tokenizer), "weights": weights}
    return Header(identity, about)


def whole_identity(
    spec: JobSpec, loaded: LoadedModel, frame: Frame, compression: Compression | None, rolling: Rolling | None
) -> dict[str, Any]:
    """Return everything on which the answers depend; `loaded` may have no weights."""
    identity = {
        "model": loaded.fingerprint,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "frame": frame.sha256,
        **identity_of(spec),
    }
    has_chat = spec.prompt.chat_template is not False or spec.documents.format != "text"
    if has_chat and is_dated(loaded.tokenizer):
        identity["date"] = spec.prompt.date
    if (readout := readout_of(spec, loaded.shape.hidden_size)) is not None and readout.pooling is not None:
        identity["pooling"] = readout.identity
    if compression is not None:
        identity["compress"] = compression.identity
    if rolling is not None:
        identity["cache"] = rolling.name
    return identity
