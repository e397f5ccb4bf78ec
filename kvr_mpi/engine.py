"""A model on a chain of ranks: what is loaded, measured and decided before the first document, and one prompt's run.

Stands between the batch, which has the documents, and the strategies, which know nothing of them.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvr_mpi.costs.costmodel import Costs
from kvr_mpi.costs.memory import GIB, Footprint, check_fits, footprint_of
from kvr_mpi.costs.solve import Rates, equal_time
from kvr_mpi.cuts import Cuts
from kvr_mpi.decode.generate import make_generation_config
from kvr_mpi.decode.pool import Pool
from kvr_mpi.forecast import MEMORY_SHARE, Forecast, forecast_measured, frame_of, with_memory
from kvr_mpi.job import JobSpec
from kvr_mpi.model import LoadedModel, load_model
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.planner.identity import key_of
from kvr_mpi.planner.lookup import describe_range, find_table
from kvr_mpi.planner.measure import measure_costs
from kvr_mpi.planner.probe import measure_rates
from kvr_mpi.planner.table import Table
from kvr_mpi.prefill.packed import prefill_packed, why_not_packed
from kvr_mpi.prefill.prefix import SharedPrefix
from kvr_mpi.prefill.seam import prepare_model
from kvr_mpi.prefill.strategies import Prefill, check_chain, compute_prefix, prefill_kvr, prefill_single
from kvr_mpi.prompts import Prompt
from kvr_mpi.reading import Asking
from kvr_mpi.report.memory import room_bytes
from kvr_mpi.store.outputs import Header
from kvr_mpi.transport import Transport, gather_json, share_json, together
from kvr_mpi.transport.courier import Courier

# A slice below this is not worth a rank of its own.
LEAST_SLICE_TOKENS = 64
# Tokens of a packed forward.
PACK_TOKENS = 2048
# Instructions shorter than this are computed with every prompt: to copy them would take as long.
LEAST_PREFIX_TOKENS = 32
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


class Engine:
    """A model on a chain of ranks, ready to answer documents.

    Every rank of the chain gives the same prompts in the same order to `prefill`.

    Parameters
    ----------
    spec : JobSpec
    machine : Machine
    world, chain : Transport
        All ranks of the job, and those that share this chain's prompts; `on` says which other ranks share others.
    say : callable
        For a line of text; called on rank 0 of the job only.
    loaded : LoadedModel, optional
        The job's model, if it is loaded already.

    Raises
    ------
    ConfigError
        If model, prompt or generation settings do not work together.
    """

    def __init__(
        self,
        spec: JobSpec,
        machine: Machine,
        world: Transport,
        chain: Transport,
        say: Say,
        *,
        loaded: LoadedModel | None = None,
    ) -> None:
        self.spec, self.chain = spec, chain
        self.first_rank = world.rank - chain.rank
        self.why_alone: str | None = None  # why prompts do not run packed
        self._say_here, self._say = say, say if world.rank == 0 else (lambda text: None)
        self.loaded = loaded or self._load(machine, world)
        together(world, self._check)
        if self.why_alone is not None:
            self._say(f"documents are decoded one by one: {self.why_alone}")
        self._prefixes = together(world, self._compute_prefixes)
        self.footprint = self._footprint()
        self.rooms_bytes: list[int] = share_json(world, gather_json(world, self._room(world)))  # of all ranks
        self.costs = self._costs(world)
        self.rates = self._rates(world)
        self.table = self._table(world)
        self._cuts = self._cuts_of(chain)

    @property
    def asking(self) -> Asking:
        """How documents are asked."""
        strategy = self.spec.parallel.strategy
        return Asking(self.loaded.tokenizer, self.spec.prompt, self.frame, self.reduce_frame, strategy)

    @property
    def new_tokens(self) -> int:
        """Most tokens of an answer."""
        return self.spec.generation.max_new_tokens

    def on(self, chain: Transport, first_rank: int) -> Engine:
        """Return the same engine on other ranks; `first_rank` is the chain's first in the job."""
        other = copy.copy(self)
        other.chain, other.first_rank = chain, first_rank
        other._cuts = other._cuts_of(chain)
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

    def open_pool(self) -> Pool:
        """Make what decodes this rank's prompts."""
        generation = self.spec.generation
        return Pool(self.loaded, self.generation, stop=generation.stop, max_new_tokens=generation.max_new_tokens)

    def seed_of(self, document_id: str) -> int:
        """Give each document its own stream of random numbers, whatever rank it comes to."""
        text = f"{self.spec.generation.seed} {document_id}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def open_courier(self) -> Courier | None:
        """Make what carries keys and values from prompt to prompt; None on a rank alone."""
        on_gpu = self.loaded.device.type == "cuda"
        return Courier(self.chain, on_gpu=on_gpu) if self.chain.size > 1 else None

    def prefill(self, prompt: Prompt, keeper: int, courier: Courier | None) -> Prefill:
        """Prefill over the chain, with one of its ranks last.

        Parameters
        ----------
        keeper : int
            The rank that ends with logits and cache.
        courier : Courier or None
            Of `open_courier`.
        """
        loaded = self.loaded
        if self.spec.parallel.strategy == "single":
            return prefill_single(loaded.model, prompt.ids, loaded.device)
        return prefill_kvr(
            loaded,
            prompt.ids,
            self._partition(prompt, keeper),
            self.chain,
            reserve_tokens=self.new_tokens,
            prefix=self._prefix_of(prompt),
            last=keeper,
            courier=courier,
            spares_chain=True,
        )

    def prefill_packed(self, prompts: Sequence[Prompt]) -> list[Prefill]:
        """Prefill short prompts in one forward, on this rank alone."""
        prefixes = [self._prefix_of(prompt) for prompt in prompts]
        prefix = prefixes[0] if all(one is prefixes[0] for one in prefixes) else None
        ids = [prompt.ids for prompt in prompts]
        rows = [ids] if self.why_alone is None else [[one] for one in ids]
        return [
            prefill
            for row in rows
            for prefill in prefill_packed(self.loaded, row, reserve_tokens=self.new_tokens, prefix=prefix)
        ]

    def goes_alone(self, prompt: Prompt) -> bool:
        """Whether a prompt is too short to be cut: one rank prefills it, packed with others."""
        if self.spec.parallel.strategy == "single":
            return False
        size, tokens = self.chain.size, prompt.tokens - self._known(prompt)
        return tokens < LEAST_SLICE_TOKENS * size or (size == 1 and 2 * tokens <= PACK_TOKENS)

    def kept_bytes(self, prompt: Prompt) -> int:
        """Bytes of a prompt's cache on the rank that keeps it, with room for the answer."""
        return (prompt.tokens + self.new_tokens) * self.loaded.shape.kv_bytes_per_token

    def check_fits(self, prompt: Prompt) -> None:
        """Refuse a prompt that fits on no empty chain; the same on every rank.

        Raises
        ------
        DocumentError
            Saying how many ranks would do.
        """
        if self.footprint is None:
            return
        rooms = [min(self._rooms_bytes())] * self.chain.size
        if self.goes_alone(prompt):
            check_fits(self.footprint, Partition((0, prompt.tokens)), rooms[:1], self.new_tokens)
        else:
            partition = self._partition(prompt, self.chain.size - 1)
            check_fits(self.footprint, partition, rooms, self.new_tokens)

    def has_room(self, prompt: Prompt, keeper: int, kept_bytes: Sequence[int]) -> bool:
        """Whether a prompt fits beside what the ranks of the chain keep already; the same on every rank."""
        if self.footprint is None:  # plain transformers' memory is not predicted: one at a time
            return False
        rooms, size = self._rooms_bytes(), self.chain.size
        if self.goes_alone(prompt):
            need = self.kept_bytes(prompt) + self.footprint.activation_bytes(PACK_TOKENS)
            return need + kept_bytes[keeper] <= rooms[keeper]
        partition = self._partition(prompt, keeper)
        for place in range(size):
            rank = (keeper + 1 + place) % size
            need = self.footprint.prefill_bytes(
                partition, place, reserve_tokens=self.new_tokens, prefix_tokens=self._known(prompt)
            )
            if need + kept_bytes[rank] > rooms[rank]:
                return False
        return True

    def _rooms_bytes(self) -> list[int]:
        return self.rooms_bytes[self.first_rank :][: self.chain.size]

    def _prefix_of(self, prompt: Prompt) -> SharedPrefix | None:
        """Find what the prompt begins with, if that is computed already."""
        return next((one for one in self._prefixes if prompt.ids[: one.tokens] == one.ids), None)

    def _known(self, prompt: Prompt) -> int:
        prefix = self._prefix_of(prompt)
        return prefix.tokens if prefix else 0

    def _partition(self, prompt: Prompt, keeper: int) -> Partition:
        """Cut a prompt for the chain with this rank of it last; nobody computes what is known."""
        known = self._known(prompt)
        return self._cuts.cut(prompt.tokens - known, keeper, known).behind(known)

    def _cuts_of(self, chain: Transport) -> Cuts:
        return Cuts(self.spec.parallel, chain, self.rates[self.first_rank :][: chain.size], self.table, self._say_here)

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
            self.loaded = check_chain(self.loaded)
            self.why_alone = why_not_packed(self.loaded)
        else:
            prepare_model(self.loaded.model, chain=False)
        tokenizer, shape, template = self.loaded.tokenizer, self.loaded.shape, spec.prompt.template
        self.frame = frame_of(spec, tokenizer, shape, template)
        self.reduce_frame = frame_of(spec, tokenizer, shape, spec.prompt.reduce_template or template)
        self.generation = make_generation_config(self.loaded.model, spec.generation.transformers_settings())

    def _compute_prefixes(self) -> list[SharedPrefix]:
        """Compute once what all prompts begin with, for each frame: its instructions before the text."""
        if self.spec.parallel.strategy == "single":
            return []
        frames = [self.frame] + [self.reduce_frame] * (self.spec.prompt.too_long == "split")
        heads = sorted(
            {frame.head for frame in frames if len(frame.head) >= LEAST_PREFIX_TOKENS}, key=len, reverse=True
        )
        return [compute_prefix(self.loaded, head) for head in heads]

    def _footprint(self) -> Footprint | None:
        """Prepare to predict a prompt's memory; plain transformers' is not predicted."""
        if self.spec.parallel.strategy == "single":
            return None
        return footprint_of(self.loaded.model.config, self.loaded.dtype, on_gpu=self.loaded.device.type == "cuda")

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
