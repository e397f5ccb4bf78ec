"""One document on one chain of ranks: prompt, slices, prefill, answer.

Stands between the batch, which chooses the documents, and the strategies, which know nothing of documents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvr_mpi.decode.generate import Answer, generate, make_generation_config
from kvr_mpi.documents import Document
from kvr_mpi.errors import ConfigError, DocumentError
from kvr_mpi.job import JobSpec
from kvr_mpi.model import LoadedModel, load_model
from kvr_mpi.partition import Partition
from kvr_mpi.planner.probe import measure_rates
from kvr_mpi.planner.solve import Rates, equal_time
from kvr_mpi.prefill.seam import prepare_model
from kvr_mpi.prefill.strategies import Prefill, check_chain, prefill_kvr, prefill_single
from kvr_mpi.prompts import Frame, Prompt, encode_text, fit_prompt, make_frame, split_text
from kvr_mpi.store.outputs import Header, Record
from kvr_mpi.transport import Transport, share_json, together
from kvr_mpi.transport.local import LocalTransport

# Slices end at multiples of this many tokens, which the kernels like.
QUANTUM_TOKENS = 16
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
        All ranks of the job, and those that share this chain's prompts.
    say : callable
        For a line of text; called on rank 0 of the job only.

    Raises
    ------
    ConfigError
        If model, prompt or generation settings do not work together.
    """

    def __init__(self, spec: JobSpec, machine: Machine, world: Transport, chain: Transport, say: Say) -> None:
        self.spec, self.chain = spec, chain
        self.is_last = chain.rank == chain.size - 1
        self._say: Say = say if world.rank == 0 else (lambda text: None)
        self.loaded = self._load(machine, world)
        together(world, self._check)
        self.rates = self._rates(world)

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
        return prefill_kvr(self.loaded, prompt.ids, partition, chain, reserve_tokens=reserve)

    def _partition(self, tokens: int) -> Partition:
        parallel = self.spec.parallel
        if self.rates and parallel.partition == "equal_time":
            return Partition.by_ratio(tokens, equal_time(tokens, self.rates), QUANTUM_TOKENS)
        if parallel.ratios is not None:
            return Partition.by_ratio(tokens, parallel.ratios, QUANTUM_TOKENS)
        return Partition.even(tokens, self.chain.size)

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
            f"{world.size // self.chain.size} chain(s) of {self.chain.size} rank(s), "
            f"{torch.get_num_threads()} thread(s) per rank; "
            f"{loaded.shape.kv_bytes_per_token / 1024:.0f} KiB of keys and values per token"
        )
        return loaded

    def _check(self) -> None:
        """Make sure that model, strategy, prompt and generation settings go together."""
        spec = self.spec
        if spec.parallel.strategy == "kvr":
            check_chain(self.loaded)
        else:
            prepare_model(self.loaded.model, chain=False)
        self.frame = self._frame(spec.prompt.template)
        self.reduce_frame = self._frame(spec.prompt.reduce_template or spec.prompt.template)
        self.generation = make_generation_config(self.loaded.model, spec.generation.transformers_settings())

    def _frame(self, template: str) -> Frame:
        prompt, shape = self.spec.prompt, self.loaded.shape
        context = prompt.max_tokens or shape.max_tokens or 1 << 62
        if shape.max_tokens is not None and context > shape.max_tokens:
            raise ConfigError(f"prompt.max_tokens = {context}: this model's context has {shape.max_tokens} tokens")
        room = context - self.spec.generation.max_new_tokens
        if room < 1:
            raise ConfigError(
                f"generation.max_new_tokens = {self.spec.generation.max_new_tokens} leaves no room for a prompt in a "
                f"context of {context} tokens; ask for fewer"
            )
        return make_frame(
            self.loaded.tokenizer,
            template,
            system=prompt.system,
            chat_template=prompt.chat_template,
            max_prompt_tokens=room,
        )

    def _rates(self, world: Transport) -> list[Rates]:
        """Measure this chain's ranks if the slices are to be cut by time."""
        if self.chain.size == 1 or self.spec.parallel.partition != "equal_time":
            return []
        rates = measure_rates(self.loaded, world)
        mine = rates[world.rank - self.chain.rank :][: self.chain.size]
        example = self.frame.max_tokens if self.loaded.shape.max_tokens else EXAMPLE_TOKENS
        lengths = equal_time(example, mine)
        self._say(
            f"measured per layer: {mine[0].token_s * 1e6:.1f} us a token, "
            f"{mine[0].pair_s * 1e9:.2f} ns a query-key pair; slices of equal time for {example} tokens: "
            f"{Partition.by_ratio(example, lengths, QUANTUM_TOKENS)}"
        )
        return mine


def _present(outcomes: Sequence[_Outcome | None]) -> list[_Outcome]:
    return [outcome for outcome in outcomes if outcome is not None]
