"""One document on one chain of ranks: prompt, slices, prefill, answer.

Stands between the batch, which chooses the documents, and the strategies, which know nothing of documents.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvr_mpi.costs.costmodel import Costs
from kvr_mpi.costs.memory import GIB, Footprint, check_fits, footprint_of
from kvr_mpi.costs.solve import Rates, equal_time
from kvr_mpi.decode.generate import Answer, generate, make_generation_config
from kvr_mpi.documents import Document
from kvr_mpi.errors import DocumentError
from kvr_mpi.forecast import MEMORY_SHARE, Forecast, forecast_measured, frame_of, with_memory
from kvr_mpi.job import JobSpec
from kvr_mpi.model import LoadedModel, load_model
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.planner.identity import key_of
from kvr_mpi.planner.lookup import choose_slices, describe_range, find_table
from kvr_mpi.planner.measure import measure_costs
from kvr_mpi.planner.probe import measure_rates
from kvr_mpi.planner.table import Table
from kvr_mpi.prefill.seam import prepare_model
from kvr_mpi.prefill.strategies import Prefill, check_chain, prefill_kvr, prefill_single
from kvr_mpi.prompts import Prompt, encode_text, fit_prompt, split_text
from kvr_mpi.report.memory import room_bytes
from kvr_mpi.store.outputs import Header, Record
from kvr_mpi.transport import Transport, gather_json, share_json, together
from kvr_mpi.transport.local import LocalTransport

# Rounds of answers about answers before a document is given up.
MAX_REDUCTIONS = 8
# Slices are shown for this length if the model names no context.
EXAMPLE_TOKENS = 8192

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rank has to work with: from the command line and the environment."""

    cache_dir: Path  # for converted models
    cores: int = 1  # cores this process may use
    threads: int | None = None  # CPU threads asked for in the environment
    offline: bool = False


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One prompt's result on the last rank of the chain."""

    prompt: Prompt
    prefill: Prefill
    answer: Answer


class Engine:
    """A model on a chain of ranks, ready to answer documents.

    Every rank of the chain gives the same documents in the same order to `answer`.

    Parameters
    ----------
    spec : JobSpec
    machine : Machine
    world, chain : Transport
        All ranks of the job, and those that share this chain's prompts; `on` says which other ranks share others.
    say : callable
        For a line of text; called on rank 0 of the job only.

    Raises
    ------
    ConfigError
        If model, prompt or generation settings do not work together.
    """

    def __init__(self, spec: JobSpec, machine: Machine, world: Transport, chain: Transport, say: Say) -> None:
        self.spec, self.chain = spec, chain
        self.first_rank = world.rank - chain.rank
        self._say_here, self._say = say, say if world.rank == 0 else (lambda text: None)
        self.loaded = self._load(machine, world)
        together(world, self._check)
        self.footprint = self._footprint()
        self.rooms_bytes: list[int] = share_json(world, gather_json(world, self._room(world)))  # of all ranks
        self.costs = self._costs(world)
        self.rates = self._rates(world)
        self.table = self._table(world)
        self._has_extrapolated = False

    @property
    def is_last(self) -> bool:
        """Whether this rank decodes and writes."""
        return self.chain.rank == self.chain.size - 1

    def on(self, chain: Transport, first_rank: int) -> Engine:
        """Return the same engine on other ranks; `first_rank` is the chain's first in the job."""
        other = copy.copy(self)
        other.chain, other.first_rank = chain, first_rank
        return other

    def forecast(self) -> Forecast:
        """Say what a document takes on chains of any length, from what was measured here; for a planned job only."""
        assert self.costs is not None and self.footprint is not None
        forecast = forecast_measured(self.spec, self.costs, self.frame, "measured on these ranks")
        return with_memory(forecast, self.footprint, min(self.rooms_bytes))

    def header(self) -> Header:
        """Say what the answers depend on, for the output files."""
        spec, loaded = self.spec, self.loaded
        identity = {
            "model": loaded.fingerprint,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "prompt": spec.prompt.model_dump(),
            "generation": spec.generation.model_dump(),
            "kv": spec.output.kv,
            "frame": hashlib.sha256(json.dumps([self.frame.head, self.frame.tail]).encode()).hexdigest(),
        }
        return Header(
            identity,
            {"name": loaded.name, "architecture": loaded.shape.architecture, "dtype": identity["dtype"]},
        )

    def answer(self, document: Document) -> tuple[Record, Prefill | None]:
        """Answer one document.

        Returns
        -------
        (Record, Prefill or None)
            On the last rank the document's record, an error record if something is wrong with the document,
            and the prefill of its (last) prompt. On the other ranks a record without content.
        """
        blank = Record(document.id, "error", document_sha256=hashlib.sha256(document.text.encode()).hexdigest())
        try:
            if document.error is not None:
                raise DocumentError(document.error)
            outcomes = self._ask(document)
        except DocumentError as error:
            return replace(blank, error=str(error)), None
        if not outcomes:  # not the last rank: nothing to record
            return blank, None
        final = outcomes[-1]
        tokens = sum(outcome.prompt.tokens for outcome in outcomes)
        seconds = sum(outcome.prefill.seconds for outcome in outcomes)
        record = replace(
            blank,
            status="done",
            answer=final.answer.text,
            token_ids=final.answer.token_ids,
            slices=final.prefill.partition.bounds,
            prompt_sha256=final.prompt.sha256,
            prompt_tokens=tokens,
            dropped_tokens=final.prompt.dropped_tokens,
            new_tokens=sum(len(outcome.answer.token_ids) for outcome in outcomes),
            finish_reason=final.answer.finish_reason,
            strategy=self.spec.parallel.strategy,
            ttft_s=seconds,
            prefill_tokens_per_s=tokens / seconds,
            wait_s=sum(outcome.prefill.wait_s for outcome in outcomes),
            decode_s=sum(outcome.answer.seconds for outcome in outcomes),
            parts=len(outcomes),
        )
        return record, final.prefill

    def _ask(self, document: Document) -> list[_Outcome]:
        """Run a document's prompt; if it is split, its parts' prompts and then one about their answers."""
        prompt_spec, tokenizer = self.spec.prompt, self.loaded.tokenizer
        text_ids = encode_text(tokenizer, document.text)
        if not text_ids:
            raise DocumentError(
                f"{document.id} has no tokens: this model's tokenizer drops all {document.chars} characters"
            )
        if prompt_spec.too_long != "split" or len(text_ids) <= self.frame.text_budget:
            truncate = prompt_spec.keep if prompt_spec.too_long == "truncate" else None
            return _present([self._run_prompt(fit_prompt(self.frame, text_ids, truncate=truncate), document.id)])
        outcomes: list[_Outcome | None] = []
        frame = self.frame
        for _ in range(MAX_REDUCTIONS):
            parts = split_text(tokenizer, frame, text_ids)
            answered = []
            for part in parts:
                outcome = self._run_prompt(part, document.id)
                if outcome is not None and len(parts) > 1:
                    outcome.prefill.cache = None  # only the last prompt's keys and values are of use to anybody
                answered.append(outcome)
            outcomes += answered
            if len(parts) == 1:
                return _present(outcomes)
            # Only the last rank has the answers; the next round's prompts are made of them on all.
            text = "\n\n".join(outcome.answer.text for outcome in answered if outcome is not None)
            text = share_json(self.chain, text, root=self.chain.size - 1)
            shorter, frame = encode_text(tokenizer, text), self.reduce_frame
            if not text.strip() or len(shorter) >= len(text_ids):
                break
            text_ids = shorter
        raise DocumentError(
            f"too long, and the {len(parts)} answers about its parts got no shorter than the text; lower "
            f"generation.max_new_tokens, or set prompt.too_long = 'truncate'"
        )

    def _run_prompt(self, prompt: Prompt, document_id: str) -> _Outcome | None:
        """Prefill over the chain, decode on its last rank."""
        loaded, generation = self.loaded, self.spec.generation
        self.chain.barrier()  # so that the time to first token counts from one start
        if self.spec.parallel.strategy == "single":
            prefill = prefill_single(loaded.model, prompt.ids, loaded.device)
        elif prompt.tokens < self.chain.size:  # too short for every rank to have a token: the last rank does it
            if not self.is_last:
                return None
            prefill = self._prefill(prompt, Partition((0, prompt.tokens)), LocalTransport())
        else:
            prefill = self._prefill(prompt, self._partition(prompt.tokens), self.chain)
        if not self.is_last:
            return None
        seed = int.from_bytes(hashlib.sha256(f"{generation.seed} {document_id}".encode()).digest()[:7], "big")
        answer = generate(
            loaded.model,
            loaded.tokenizer,
            prefill,
            prompt.ids,
            self.generation,
            max_new_tokens=generation.max_new_tokens,
            stop=generation.stop,
            seed=seed,
        )
        return _Outcome(prompt, prefill, answer)

    def _prefill(self, prompt: Prompt, partition: Partition, chain: Transport) -> Prefill:
        reserve = self.spec.generation.max_new_tokens
        if self.footprint is not None:  # the same on every rank, so all of them leave a document that does not fit
            check_fits(self.footprint, partition, self.rooms_bytes[self.first_rank :][: partition.size], reserve)
        return prefill_kvr(self.loaded, prompt.ids, partition, chain, reserve_tokens=reserve)

    def _partition(self, tokens: int) -> Partition:
        parallel = self.spec.parallel
        if self.rates and parallel.partition == "equal_time":
            mine = self.rates[self.first_rank :][: self.chain.size]
            return Partition.by_ratio(tokens, equal_time(tokens, mine), QUANTUM_TOKENS)
        if parallel.ratios is not None:
            return Partition.by_ratio(tokens, parallel.ratios, QUANTUM_TOKENS)
        if self.table is not None:
            return self._look_up(self.table, tokens)
        return Partition.even(tokens, self.chain.size)

    def _look_up(self, table: Table, tokens: int) -> Partition:
        """Cut by the table; beyond its entries by its rates, which is said once."""
        choice = choose_slices(table, tokens, self.chain.size)
        if choice.how == "extrapolated" and not self._has_extrapolated and self.chain.rank == 0:
            self._say_here(
                f"warning: the table was searched for {describe_range(table)}; a prompt of {tokens} tokens on "
                f"{self.chain.size} ranks is beyond that: such prompts are cut by the table's fitted rates"
            )
        self._has_extrapolated |= choice.how == "extrapolated"
        # One rank's word: beyond the entries a last bit may differ between processors.
        return Partition(tuple(share_json(self.chain, choice.partition.bounds)))

    def _load(self, machine: Machine, world: Transport) -> LoadedModel:
        """Load the model on every rank; where it has to be converted, one rank of each host does so first."""
        import torch

        threads = self.spec.parallel.threads or machine.threads
        torch.set_num_threads(threads or max(1, machine.cores // world.local_size))
        source = self.spec.model
        arguments: dict[str, Any] = source.model_dump(exclude={"path", "offline"})
        arguments |= {"offline": machine.offline if source.offline is None else source.offline}
        arguments |= {"cache_dir": machine.cache_dir, "device_index": world.local_rank}
        self._say(f"loading {source.path}")

        def load() -> LoadedModel:
            return load_model(source.path, **arguments)

        first = together(world, lambda: load() if world.local_rank == 0 else None)
        loaded = together(world, lambda: first or load())
        self._say(
            f"{loaded.shape.architecture}, {len(loaded.shape.layers)} layers, "
            f"{str(loaded.dtype).removeprefix('torch.')} on {loaded.device.type}; "
            f"{self._chains(world)}, "
            f"{torch.get_num_threads()} thread(s) per rank; "
            f"{loaded.shape.kv_bytes_per_token / 1024:.0f} KiB of keys and values per token"
        )
        return loaded

    def _chains(self, world: Transport) -> str:
        if self.spec.parallel.planned:
            return f"{world.size} rank(s) in chains as planned"
        return f"{world.size // self.chain.size} chain(s) of {self.chain.size} rank(s)"

    def _check(self) -> None:
        """Make sure that model, strategy, prompt and generation settings go together."""
        spec = self.spec
        if spec.parallel.strategy == "kvr":
            check_chain(self.loaded)
        else:
            prepare_model(self.loaded.model, chain=False)
        tokenizer, shape, template = self.loaded.tokenizer, self.loaded.shape, spec.prompt.template
        self.frame = frame_of(spec, tokenizer, shape, template)
        self.reduce_frame = frame_of(spec, tokenizer, shape, spec.prompt.reduce_template or template)
        self.generation = make_generation_config(self.loaded.model, spec.generation.transformers_settings())

    def _footprint(self) -> Footprint | None:
        """Prepare to predict a prompt's memory; plain transformers' is not predicted."""
        if self.spec.parallel.strategy == "single":
            return None
        return footprint_of(self.loaded.model.config, self.loaded.dtype)

    def _room(self, world: Transport) -> int:
        """Bytes this rank may take for prompts: most of what it has left."""
        import torch

        if self.spec.parallel.memory_gib is not None:
            return int(self.spec.parallel.memory_gib * GIB)
        device = self.loaded.device
        devices = torch.cuda.device_count() if device.type == "cuda" else 1
        return int(MEMORY_SHARE * room_bytes(device, -(-world.local_size // devices)))

    def _costs(self, world: Transport) -> Costs | None:
        """Measure ranks and links if chains are to be planned."""
        if world.size == 1 or not self.spec.parallel.planned:
            return None
        costs = measure_costs(self.loaded, world)
        self._say(
            f"measured links: {costs.link_bytes_per_s / 1e9:.2f} GB/s, {costs.link_latency_s * 1e6:.0f} us; a token "
            f"decoded: {1e3 * (costs.layers * costs.launch_floor_s + costs.head_s):.1f} ms"
        )
        return costs

    def _table(self, world: Transport) -> Table | None:
        """Find the lookup table, and refuse one of something else before the batch begins."""
        parallel = self.spec.parallel
        if parallel.table is None or self.chain.size == 1:
            return None
        here = key_of(self.loaded, self.chain)
        path = Path(parallel.table)
        table, differences = together(world, lambda: find_table(path, here, force=parallel.table_force))
        self._say(f"slices by table: {table.key.model.name} on {table.key.hardware}, {describe_range(table)}")
        if differences:
            self._say(f"warning: used all the same (parallel.table_force): {'; '.join(differences)}")
        return table

    def _rates(self, world: Transport) -> list[Rates]:
        """Measure all ranks if the slices are to be cut by time."""
        if self.spec.parallel.partition != "equal_time" or (self.chain.size == 1 and self.costs is None):
            return []
        if self.costs is None:
            rates = measure_rates(self.loaded, world)
            mine = rates[self.first_rank :][: self.chain.size]
        else:
            token_s = self.costs.qkv_token_s + self.costs.rest_token_s
            speeds = self.costs.speeds or (1.0,) * world.size
            mine = rates = [Rates(token_s / speed, self.costs.pair_s / speed) for speed in speeds]
        example = self.frame.max_tokens if self.loaded.shape.max_tokens else EXAMPLE_TOKENS
        lengths = equal_time(example, mine)
        self._say(
            f"measured per layer: {mine[0].token_s * 1e6:.1f} us a token, "
            f"{mine[0].pair_s * 1e9:.2f} ns a query-key pair; slices of equal time for {example} tokens: "
            f"{Partition.by_ratio(example, lengths, QUANTUM_TOKENS)}"
        )
        return rates


def _present(outcomes: Sequence[_Outcome | None]) -> list[_Outcome]:
    return [outcome for outcome in outcomes if outcome is not None]
