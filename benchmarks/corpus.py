"""A whole corpus side by side: documents an hour of our ways to share it, of transformers' ``generate``, of engines.

Every way has all cores of the machine, the same prompts and the same settings, and answers every document. Ours stores
the answers, too, durably, as a job does; the others only make them. A job with ``output.embedding`` is compared with
sentence-transformers.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import click
import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from benchmarks.cores import all_cores, plain
from benchmarks.options import (
    check_writable,
    json_option,
    open_rivals,
    patience_options,
    rival_options,
    transport_option,
)
from benchmarks.pairs import Patience, Ratio, drift_of, measure_pairs, ratio_of, ratios_of
from benchmarks.rivals import Rival
from benchmarks.tables import print_corpus
from kvr_mpi.cli.environment import read_environment
from kvr_mpi.cli.launch import run_guarded
from kvr_mpi.cli.log_lines import quiet_libraries
from kvr_mpi.cli.options import command, job_argument, parse_names, set_option
from kvr_mpi.documents import Corpus
from kvr_mpi.documents.generation import GenerationSection
from kvr_mpi.errors import ConfigError, DocumentError, counted
from kvr_mpi.events import Events, Totals
from kvr_mpi.job import EQUAL_TIME, JobSpec, load_job
from kvr_mpi.logs import SILENT, RankLogger
from kvr_mpi.model.source import find_converted
from kvr_mpi.report.progress import Progress
from kvr_mpi.runtime.batch import work_through
from kvr_mpi.runtime.checks import choose_chain_size
from kvr_mpi.runtime.decoder import Decoder
from kvr_mpi.runtime.indexing import open_documents, scan_documents
from kvr_mpi.runtime.job_ranks import JobRanks
from kvr_mpi.runtime.loading import own_device
from kvr_mpi.runtime.prepare import prepare
from kvr_mpi.runtime.result_sink import ResultSink
from kvr_mpi.runtime.rounds import make_rounds
from kvr_mpi.runtime.session import Machine, Session
from kvr_mpi.runtime.stopping import Stop
from kvr_mpi.runtime.work_queue import FIRST_LIST, Slot
from kvr_mpi.store.writer import ResultWriter
from kvr_mpi.topology import Topology
from kvr_mpi.transport import Transport, gather_json, on_root, share_json, together
from kvr_mpi.transport.choose import TransportName, open_transport
from kvr_mpi.transport.counters import open_counters
from kvr_mpi.transport.mpi import connect
from kvr_mpi.tuning.cores import pinned

# Chains as planned, of all ranks, of one rank each; transformers one by one, and in padded batches; embeddings.
WAYS: dict[str, str | int | None] = {
    "auto": "auto",
    "chains": "all",
    "data-parallel": 1,
    "generate": None,
    "padded": None,
    "sentence-transformers": None,
}
ANSWERING, EMBEDDING = {"generate", "padded"}, {"sentence-transformers"}
# The longest prompt that an engine keeps room for while it answers a corpus, and how many it may have at work at once.
ENGINE_TOKENS, ENGINE_PROMPTS = 8192, 8
# What other engines can be told of [generation]: how many tokens, and nothing else.
GREEDY = GenerationSection().model_dump(exclude={"max_new_tokens"})
OURS = tuple(way for way, chain in WAYS.items() if chain is not None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared.

    ways : of `WAYS`.
    patience : how many pairs with ours are run of each.
    batch_size : prompts of a padded batch.
    """

    ways: Sequence[str]
    patience: Patience
    batch_size: int


@dataclass(frozen=True, slots=True)
class CorpusRun:
    """One way through the corpus."""

    seconds: float
    documents: int
    prompt_tokens: int
    new_tokens: int
    prefill_s: float  # of all ranks, in the mean
    decode_s: float
    busy: tuple[float, ...]  # share of the time each rank computed
    prefill_busy: float  # share of the prefill phases that ranks computed, in the mean


@dataclass(slots=True)
class CorpusRow:
    """One way to share a corpus."""

    way: str
    ours: str = ""  # what it is compared with
    runs: list[CorpusRun] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # of its time to ours, pair by pair

    @property
    def seconds(self) -> float:
        """Median time of the whole corpus."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def ratio(self) -> Ratio:
        """Its time as a multiple of ours; 1 for ours."""
        return ratio_of(self.ratios).of_any_start() if self.ratios else Ratio(1.0, 1.0, 1.0, len(self.runs))

    def as_json(self, rows: Sequence[CorpusRow]) -> dict[str, Any]:
        """Return what a table or file shows, with ratios of pairs.

        ``times_ours`` is above 1 where ours is faster, ``speedup`` where this way is faster than the one named.
        """
        ratio = self.ratio
        run = min(self.runs, key=lambda run: abs(run.seconds - self.seconds))
        return {
            "way": self.way,
            "seconds": self.seconds,
            "seconds_min": min(run.seconds for run in self.runs),
            "seconds_max": max(run.seconds for run in self.runs),
            "documents": run.documents,
            "documents_per_hour": 3600 * run.documents / self.seconds,
            "prompt_tokens": run.prompt_tokens,
            "new_tokens": run.new_tokens,
            "prefill_tokens_per_s": run.prompt_tokens / run.prefill_s if run.prefill_s else None,
            "decode_tokens_per_s": run.new_tokens / run.decode_s if run.decode_s else None,
            "busy_by_rank": list(run.busy),
            "busy_in_prefill": run.prefill_busy,
            "repeats": len(self.runs),
            "ours": self.ours,
            "pairs": len(self.ratios),
            "times_ours": ratio.median,
            "times_ours_low": ratio.low,
            "times_ours_high": ratio.high,
            "is_told_apart": ratio.is_told,
            "speedup": {row.way: row.ratio.median / ratio.median for row in rows if row.way != self.way},
        }


def bench_corpus(
    spec: JobSpec,
    machine: Machine,
    corpus: Corpus,
    control: Transport,
    ranks: Transport,
    comparison: Comparison,
    logger: RankLogger,
    rivals: Mapping[str, Rival | None] | None = None,
) -> list[CorpusRow]:
    """Answer a job's corpus in every way, in pairs with ours; every rank calls this.

    Parameters
    ----------
    control, ranks : Transport
        All ranks as they met, and what carries tensors between them.
    comparison : Comparison
    rivals : mapping of str to Rival, optional
        Other engines that take part, by name; None in place of each on all ranks but the first.

    Raises
    ------
    ConfigError
        If a way is unknown, there is no document, or it is asked for what some way cannot do.
    """
    rivals = rivals or {}
    check_ways(spec, corpus, comparison.ways, list(rivals))
    ways, batch_size = [*comparison.ways, *rivals], comparison.batch_size
    with pinned(ranks) as cores:
        ours = next(way for way in OURS if way in ways)
        logger.root.info(
            f"{counted(ranks.size, 'rank')}, {counted(cores, 'core')} each; "
            f"{counted(len(corpus), 'document')}; in pairs with {ours}"
        )
        ready: dict[str, Session] = {}
        for way in ways:
            if way in OURS:
                mine = _spec_for(spec, way)
                chain = ranks.split(Topology(ranks.size, choose_chain_size(mine, ranks.size)).chain_color(ranks.rank))
                loaded = next(iter(ready.values())).loaded if ready else None
                ready[way] = prepare(mine, machine, JobRanks(ranks, ranks), chain, logger, loaded=loaded)
        first = next(iter(ready.values()))
        rows = {way: CorpusRow(way, ours) for way in ways}
        shortest = min(range(len(corpus)), key=corpus.chars)
        _ours(first, corpus, [shortest], control)  # warms up
        embed = _load_embedder(first) if EMBEDDING & set(ways) and ranks.rank == 0 else None

        def measure(way: str) -> CorpusRun:
            if way in OURS:
                run = _ours(ready[way], corpus, range(len(corpus)), control)
            elif way in rivals:
                run = _on_root(ranks, lambda: _engine(first, corpus, rivals[way]))
            elif way in EMBEDDING:
                run = _on_root(ranks, lambda: _embed(first, corpus, embed))
            else:
                run = _on_root(ranks, lambda: _generate(first, corpus, batch_size if way == "padded" else 1))
            rows[way].runs.append(run)
            logger.root.info(f"{way}: {run.documents} documents in {run.seconds:.1f} s")
            return run

        others = [way for way in ways if way != ours]
        found = measure_pairs(ranks, ours, others, measure, _seconds, comparison.patience)
    for way in others:
        rows[way].ratios = ratios_of(found[way], _seconds)
    if drift := drift_of([run.seconds for run in rows[ours].runs]):
        logger.root.info(f"{ours} {drift}")
    return list(rows.values())


def check_ways(spec: JobSpec, corpus: Corpus, ways: Sequence[str], rivals: Sequence[str]) -> None:
    """Refuse what cannot be compared, before anything is loaded or started.

    Raises
    ------
    ConfigError
        If a way is unknown, there is no document, or the job asks for what some way or engine cannot do.
    """
    for way in ways:
        if way not in WAYS:
            raise ConfigError(f"--ways {way!r}: expected some of {', '.join(WAYS)}")
    if not set(OURS) & set(ways):
        raise ConfigError(f"--ways {','.join(ways)}: expected at least one of {', '.join(OURS)} to compare with")
    if not len(corpus):
        raise ConfigError(f"documents.shard = {spec.documents.shard!r} contains no documents; expected at least one")
    if spec.prompt.too_long == "split":
        raise ConfigError("prompt.too_long = 'split' is not supported by generate; compare with 'keep-head' or 'error'")
    if other := set(ways) & (ANSWERING if spec.output.embedding else EMBEDDING):
        raise ConfigError(
            f"--ways {','.join(other)}: expected {', '.join(EMBEDDING)} for jobs with output.embedding, and "
            f"{', '.join(sorted(ANSWERING))} for others"
        )
    if rivals and spec.generation.model_dump(exclude={"max_new_tokens"}) != GREEDY:
        asked = spec.generation.model_dump(exclude={"max_new_tokens"}, exclude_defaults=True)
        raise ConfigError(
            f"--rivals {','.join(rivals)}: [generation] {asked}: other engines only decode greedily; leave it out"
        )


def _seconds(run: CorpusRun) -> float:
    return run.seconds


def _spec_for(spec: JobSpec, way: str) -> JobSpec:
    parallel = spec.parallel.model_copy(update={"ranks_per_chain": WAYS[way], "partition": EQUAL_TIME})
    generation = spec.generation.model_copy(update={"stop_repetition": False})  # others write all tokens, too
    return spec.model_copy(update={"parallel": parallel, "generation": generation})


def _ours(session: Session, corpus: Corpus, numbers: Sequence[int], control: Transport) -> CorpusRun:
    """Do documents as a job does, with their answers stored in a folder that is removed afterwards."""
    with _folder(session.spec, control) as folder:
        control.barrier()
        began = time.perf_counter()
        session = replace(session, logger=SILENT)
        rounds, refused, _ = make_rounds(session, corpus, np.array(numbers, np.int64))
        counters = open_counters(control, FIRST_LIST + sum(len(part.lists) for part in rounds))
        events = Events()
        quiet = Progress(SILENT, len(numbers), sum(part.work for part in rounds), events)
        with closing(ResultWriter(folder, control.rank, session.header)) as writer:
            source, stop = open_documents(session, corpus), Stop()
            stop.join(counters)
            decoder = Decoder(session, ResultSink(session, writer, counters, quiet), stop, events)
            work_through(rounds, refused, source, decoder, counters)
        control.barrier()
        seconds = time.perf_counter() - began
        done = counters.read()[Slot.DONE]
        counters.close()
    found = share_json(control, gather_json(control, [asdict(events.totals), seconds]))
    totals = [Totals(**one) for one, _ in found]
    seconds = max(one for _, one in found)
    return CorpusRun(
        seconds=seconds,
        documents=done,
        prompt_tokens=sum(one.prompt_tokens for one in totals),
        new_tokens=sum(one.new_tokens for one in totals),
        prefill_s=statistics.mean(one.wave_s for one in totals),
        decode_s=statistics.mean(one.decode_s for one in totals),
        busy=tuple((one.busy_s + one.decode_s) / seconds for one in totals),
        prefill_busy=sum(one.busy_s for one in totals) / max(1e-9, sum(one.wave_s for one in totals)),
    )


@contextmanager
def _folder(spec: JobSpec, control: Transport) -> Iterator[Path]:
    """Give all ranks a new folder on the file system where the job's results would lie."""
    place = Path(spec.output.path)

    def make() -> str:
        place.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix="bench-", dir=place)

    folder = Path(share_json(control, on_root(control, make)))
    try:
        yield folder
    finally:
        control.barrier()
        if control.rank == 0:
            shutil.rmtree(folder)


class _FirstToken(StoppingCriteria):  # type: ignore[misc]
    """Takes note of when generate has its first token."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.at_s = self.at_s or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _on_root(ranks: Transport, run: Callable[[], CorpusRun]) -> CorpusRun:
    """Answer the corpus on rank 0, with all cores of its host."""
    found = None
    if ranks.rank == 0:
        with all_cores():
            found = asdict(run())
    ranks.barrier()
    return CorpusRun(**share_json(ranks, found))


def _read_prompts(session: Session, corpus: Corpus) -> list[Sequence[int]]:
    """Token ids of all prompts; documents that cannot be read are left out."""
    source = open_documents(session, corpus)
    prompts: list[Sequence[int]] = []
    for number in range(len(corpus)):
        try:
            prompts += [prompt.ids for prompt in source.request(source.read(number), 0).texts]
        except DocumentError:
            continue
    return prompts


def _ends_of(session: Session) -> list[int]:
    ends = session.generation.eos_token_id
    return [token for token in (ends if isinstance(ends, list) else [ends]) if token is not None]


def _engine(session: Session, corpus: Corpus, rival: Rival | None) -> CorpusRun:
    """Answer the corpus with another engine, which is given all prompts at once."""
    assert rival is not None, "on rank 0"
    began, ends = time.perf_counter(), _ends_of(session)
    prompts = _read_prompts(session, corpus)
    answer = rival.answer(prompts, session.spec.generation.max_new_tokens, ends)
    seconds = time.perf_counter() - began
    new_tokens = sum(sum(token not in ends for token in row) for row in answer.tokens)
    busy = answer.cpu_s / answer.seconds / (os.cpu_count() or 1)
    return CorpusRun(seconds, len(prompts), sum(map(len, prompts)), new_tokens, 0.0, 0.0, (busy,), busy)


def _generate(session: Session, corpus: Corpus, batch_size: int) -> CorpusRun:
    """Answer the corpus with transformers' generate."""
    with plain(session.loaded):
        return _generate_here(session, corpus, batch_size)


def _generate_here(session: Session, corpus: Corpus, batch_size: int) -> CorpusRun:
    model, device = session.loaded.model, session.loaded.device
    began = time.perf_counter()
    prompts = sorted(_read_prompts(session, corpus), key=len)  # alike lengths together: the least padding
    prefill_s, new_tokens = 0.0, 0
    config, ends = session.generation, _ends_of(session)
    pad = config.pad_token_id if config.pad_token_id is not None else next(iter(ends), 0)
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        longest = max(map(len, batch))
        ids = torch.tensor([[pad] * (longest - len(one)) + list(one) for one in batch], device=device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in batch], device=device)
        start, watch = time.perf_counter(), _FirstToken()
        out = model.generate(
            ids,
            attention_mask=mask,
            generation_config=config,
            max_new_tokens=session.spec.generation.max_new_tokens,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([watch]),
        )
        prefill_s += watch.at_s - start
        for row in out[:, longest:].tolist():
            stop = next((at for at, token in enumerate(row) if token in ends), len(row))
            new_tokens += stop
    seconds = time.perf_counter() - began
    tokens = sum(map(len, prompts))
    return CorpusRun(seconds, len(prompts), tokens, new_tokens, prefill_s, seconds - prefill_s, (1.0,), 1.0)


def _load_embedder(session: Session) -> Any:
    """Load the job's model with sentence-transformers, with the pooling of the job."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    loaded, readout = session.loaded, session.prompt_config.readout
    assert readout is not None and readout.pooling is not None
    folder = str(find_converted(session.spec.model.path, session.machine.cache_dir).path)
    model = Transformer(folder, model_kwargs={"dtype": loaded.dtype})
    pooling = Pooling(model.get_embedding_dimension(), {"last": "lasttoken", "mean": "mean"}[readout.pooling])
    return SentenceTransformer(modules=[model, pooling], device=str(loaded.device)).eval()


def _embed(session: Session, corpus: Corpus, embedder: Any) -> CorpusRun:
    """Embed the corpus with sentence-transformers, one prompt at a time, so that none is padded."""
    began = time.perf_counter()
    prompts = _read_prompts(session, corpus)
    with torch.inference_mode():
        for ids in prompts:
            row = torch.tensor([ids], device=session.loaded.device)
            embedder({"input_ids": row, "attention_mask": torch.ones_like(row)})["sentence_embedding"].cpu()
    seconds = time.perf_counter() - began
    return CorpusRun(seconds, len(prompts), sum(map(len, prompts)), 0, seconds, 0.0, (1.0,), 1.0)


@command("corpus")
@job_argument
@set_option
@transport_option
@click.option(
    "--ways",
    default="auto,chains,data-parallel,generate,padded",
    show_default=True,
    help="The ways to run. auto: chains as planned; chains: one chain of all ranks; data-parallel: each rank alone; "
    "generate: transformers' generate, one prompt at a time; padded: generate in padded batches; "
    "sentence-transformers: of a job with output.embedding.",
)
@click.option(
    "--batch-size",
    default=4,
    show_default=True,
    type=click.IntRange(1),
    help="Number of prompts in a padded batch.",
)
@patience_options
@rival_options
@json_option
def main(
    job: Path,
    settings: tuple[str, ...],
    transport: str,
    ways: str,
    batch_size: int,
    repeats: int,
    until: float | None,
    time_limit: float | None,
    rivals: str,
    rivals_folder: Path,
    json_file: Path | None,
) -> int:
    """Compare ways to answer all documents of JOB, in documents per hour.

    \b
    mpirun -n 2 python -m benchmarks corpus jobs/demo.toml --ways auto,generate --repeats 1
    """  # noqa: D301
    world = connect()

    def work() -> int:
        logger, machine = RankLogger(world.rank), read_environment()
        quiet_libraries(world.rank)
        on_root(world, lambda: check_writable(json_file))
        spec = JobSpec.model_validate_json(
            share_json(world, on_root(world, lambda: load_job(job, settings)[0].model_dump_json()))
        )
        corpus = Corpus.from_bytes(world.broadcast(on_root(world, lambda: scan_documents(spec).to_bytes()) or b""))
        device = own_device(world, spec.model.device)
        links, reason = open_transport(world, cast(TransportName, transport), device)
        logger.root.info(reason)
        comparison = Comparison(parse_names(ways), Patience(repeats, until, time_limit), batch_size)
        together(world, lambda: check_ways(spec, corpus, comparison.ways, parse_names(rivals)))
        with ExitStack() as stack:
            longest = ENGINE_TOKENS + spec.generation.max_new_tokens
            engines = open_rivals(
                stack, world, rivals, rivals_folder, spec.model.path, spec.model.dtype, longest, ENGINE_PROMPTS
            )
            rows = bench_corpus(spec, machine, corpus, world, links, comparison, logger, engines)
        if world.rank == 0:
            print_corpus([row.as_json(rows) for row in rows], json_file)
        return 0

    return run_guarded(world, work)
