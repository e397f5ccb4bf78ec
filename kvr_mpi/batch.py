"""The main job: every document of a corpus, prefilled, answered and stored.

The data's way, as in `run_job`: documents -> prompts -> plan -> chain prefill -> decode -> outputs -> report.
Every rank reads the same corpus in the same order and knows from it, without a coordinator, which documents
are its chain's; the last rank of a chain decodes and writes. A job is gone through in rounds: one, if all chains have
one length; else one for each length, the longest first, so that a rank joins ever shorter chains and never waits for a
rank that waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvr_mpi.documents import Document, find_files, read_corpus
from kvr_mpi.engine import Engine, Machine
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_OK, ConfigError, CorpusError
from kvr_mpi.job import JobSpec
from kvr_mpi.model import choose_device, find_model
from kvr_mpi.plan import agree, count_tokens, describe, plan_documents
from kvr_mpi.prefill.cache import layer_kv
from kvr_mpi.prompts import check_template
from kvr_mpi.report.log import Log
from kvr_mpi.report.progress import ProgressReport
from kvr_mpi.report.table import print_summary
from kvr_mpi.schedule.schedule import deal
from kvr_mpi.store.folder import check_fresh, check_writable, read_run
from kvr_mpi.store.merge import merge_run
from kvr_mpi.store.outputs import Record
from kvr_mpi.store.run import prepare_folder
from kvr_mpi.store.shards import ShardWriter
from kvr_mpi.transport import Transport, on_root, share_json, together
from kvr_mpi.transport.choose import open_transport
from kvr_mpi.transport.local import LocalTransport


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run, as opposed to what."""

    machine: Machine
    overwrite: bool = False
    resume: bool = False
    bar: bool = False
    deadline_s: float | None = None  # Unix time at which the batch system ends the job


def run_job(spec: JobSpec, options: RunOptions, world: Transport, log: Log) -> int:
    """Run a whole job; every rank calls this.

    Returns
    -------
    int
        Exit code: 0, or 65 if some documents have error records.
    """
    folder = Path(spec.output.path)
    chain_size = together(world, lambda: choose_chain_size(spec, world.size))
    corpus = share_json(world, on_root(world, lambda: _scan(spec, folder, options)))
    device = together(world, lambda: choose_device(spec.model.device, world.local_rank))
    world, reason = open_transport(world, spec.parallel.transport, device, cache_dir=options.machine.cache_dir)
    log.root(reason)
    chain = world.split(world.rank // chain_size)
    engine = Engine(spec, options.machine, world, chain, log.line)
    done = set(share_json(world, on_root(world, lambda: _prepare(folder, engine, options))))
    todo = [(name, chars) for name, chars in corpus if name not in done]
    log.root(f"documents: {len(corpus)}" + (f", {len(corpus) - len(todo)} of them done already" if done else ""))
    if engine.costs is not None:
        rounds = _planned_rounds(engine, [name for name, _ in todo], world, log)
    else:
        share = deal(todo, world.size // chain_size)[world.rank // chain_size]
        rounds = [Round(engine, {name: chars for name, chars in todo if name in share})]
    _run_rounds(rounds, ShardWriter(folder, f"{world.rank:04d}", engine.header()), options, log)
    world.barrier()
    return int(share_json(world, on_root(world, lambda: _conclude(folder))))


@dataclass(frozen=True, slots=True)
class Round:
    """What this rank does on one chain.

    share : the chain's documents, and how much work each is: characters, or predicted milliseconds.
    refused : of them, those that only get an error record, and why.
    """

    engine: Engine
    share: dict[str, int]
    refused: dict[str, str] = field(default_factory=dict)


def _planned_rounds(engine: Engine, names: Sequence[str], world: Transport, log: Log) -> list[Round]:
    """Plan chains of all lengths, and split the ranks into those this rank takes part in."""
    spec, wanted = engine.spec, set(names)
    tokens = count_tokens(engine.loaded.tokenizer, _documents(spec, wanted), wanted, world)
    plan = plan_documents(spec, [(name, tokens[name]) for name in names], world.size, engine.forecast())
    plan = agree(world, plan)
    for line in describe(plan):
        log.root(f"plan: {line}")
    rounds = []
    for length in plan.chain_lengths:
        mine = [place for place in plan.placements if place.ranks == length and place.has(world.rank)]
        chain = world.split(world.rank // length)
        share = {place.id: max(1, round(1e3 * (place.end_s - place.start_s))) for place in mine}
        rounds.append(Round(engine.on(chain, world.rank // length * length), share))
    refused = {name: why for number, (name, _, why) in enumerate(plan.misfits) if number % world.size == world.rank}
    alone = engine.on(LocalTransport(), world.rank)
    return [*rounds, Round(alone, dict.fromkeys(refused, 1), refused)]


def _run_rounds(rounds: Sequence[Round], writer: ShardWriter, options: RunOptions, log: Log) -> None:
    """Answer and store this rank's documents, one after the other."""
    told = sum(len(part.share) for part in rounds if part.engine.is_last)
    work = sum(sum(part.share.values()) for part in rounds)
    bar = options.bar and any(part.engine.is_last for part in rounds)
    with ProgressReport(log, told, work, deadline_s=options.deadline_s, bar=bar) as progress:
        for part in rounds:
            if part.share:
                _run_round(part, writer, progress)
        writer.flush()


def _run_round(part: Round, writer: ShardWriter, progress: ProgressReport) -> None:
    engine, spec = part.engine, part.engine.spec
    for document in _documents(spec, set(part.share)):
        reason = document.error or part.refused.get(document.id)
        record, prefill = engine.answer(replace(document, error=reason))
        if not engine.is_last:
            progress.passed(part.share[document.id])
            continue
        if spec.output.kv and prefill is not None:
            layers = range(len(engine.loaded.shape.layers))
            writer.write(record, (layer_kv(prefill.cache, layer) for layer in layers))
        else:
            writer.write(record)
        del prefill  # its cache is not to lie beside the next document's
        progress.document(record, part.share[document.id])


def choose_chain_size(spec: JobSpec, ranks: int) -> int:
    """Say how many ranks share one prompt; 1 to begin with, if that is to be planned.

    Raises
    ------
    ConfigError
        If the ranks cannot be divided so; the message lists what they can be divided into.
    """
    wanted = spec.parallel.ranks_per_chain
    alone = spec.parallel.strategy == "single" or wanted == "auto"
    size = 1 if alone else ranks if wanted == "all" else int(wanted)
    if ranks % size:
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise ConfigError(
            f"parallel.ranks_per_chain = {size}: {ranks} ranks cannot be divided into chains of {size}; "
            f"choose one of {divisors}, 'auto' (planned for each document), or start a multiple of {size} ranks"
        )
    ratios = spec.parallel.ratios
    if ratios is not None and len(ratios) != size:
        raise ConfigError(
            f"parallel.ratios = {ratios}: {len(ratios)} weights for a chain of {size} ranks; give one for each rank"
        )
    return size


def _documents(spec: JobSpec, share: set[str] | None = None) -> Iterator[Document]:
    """Stream the corpus, or a share of it, without reading on behind its last document."""
    wanted, left = spec.documents, -1 if share is None else len(share)
    for document in read_corpus(
        wanted.path, id_field=wanted.id_field, text_field=wanted.text_field, limit=wanted.limit
    ):
        if left == 0:
            return
        if share is None or document.id in share:
            left -= 1
            yield document


def _scan(spec: JobSpec, folder: Path, options: RunOptions) -> list[tuple[str, int]]:
    """List all documents (id, characters), having checked what can be checked before a model is loaded."""
    check_template(spec.prompt.template)
    if spec.prompt.reduce_template is not None:
        check_template(spec.prompt.reduce_template)
    if not (options.overwrite or options.resume):
        check_fresh(folder)
    check_writable(folder)
    find_model(spec.model.path)
    find_files(spec.documents.path)
    corpus = [(document.id, document.chars) for document in _documents(spec)]
    if not corpus:
        raise CorpusError(f"documents.path {spec.documents.path}: the files hold no document; expected at least one")
    return corpus


def _prepare(folder: Path, engine: Engine, options: RunOptions) -> list[str]:
    """Make the output folder ready, and list what is done already."""
    identity = engine.header().identity
    return sorted(prepare_folder(folder, identity, overwrite=options.overwrite, resume=options.resume))


def _conclude(folder: Path) -> int:
    """Merge the results, print the table, and say how it went."""
    result = merge_run(folder)
    failed = False

    def watched() -> Iterator[Record]:
        nonlocal failed
        for record in read_run(result):
            failed = failed or record.status == "error"
            yield record

    print_summary(watched(), result)
    return EXIT_BAD_DATA if failed else EXIT_OK
