"""The main job: prefill, answer and store every document of a corpus.

Data flow in `run_job`: documents -> prompts -> plan -> chain prefill -> decode -> outputs -> report.
All ranks index the corpus together and distribute it over the chains (``rounds``). Each chain takes documents from the
front of its own list, then from the list with the most work left (``work_queue``), without a coordinator.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvr_mpi.disk import OTHER_FOLDER, remove_rank_files, replacing, writing
from kvr_mpi.documents import Corpus
from kvr_mpi.errors import (
    EXIT_BAD_DATA,
    EXIT_OK,
    EXIT_STOPPED,
    NOT_NOW,
    OutputError,
    WriteError,
    counted,
)
from kvr_mpi.events import Events, Totals
from kvr_mpi.job import JobSpec
from kvr_mpi.logs import RankLogger
from kvr_mpi.model.rope import depends_on_length
from kvr_mpi.report.progress import Progress, describe_throughput
from kvr_mpi.report.table import print_summary, rows_of
from kvr_mpi.runtime.chain_runner import ChainRunner
from kvr_mpi.runtime.checks import lay_out
from kvr_mpi.runtime.decoder import Decoder
from kvr_mpi.runtime.decoding import choose_modes, decoder_of
from kvr_mpi.runtime.indexing import index_job, open_documents
from kvr_mpi.runtime.job_ranks import join_groups
from kvr_mpi.runtime.leader import Leader
from kvr_mpi.runtime.loading import own_device
from kvr_mpi.runtime.meters import Meters
from kvr_mpi.runtime.options import RunOptions
from kvr_mpi.runtime.outcome import keep_outcome
from kvr_mpi.runtime.planner import Planner
from kvr_mpi.runtime.prediction import identity_of_job
from kvr_mpi.runtime.prepare import prepare
from kvr_mpi.runtime.requests import DocumentSource, error_record
from kvr_mpi.runtime.result_sink import ResultSink
from kvr_mpi.runtime.rounds import Round, make_rounds
from kvr_mpi.runtime.session import Machine
from kvr_mpi.runtime.stopping import Stop, stopped_by_signals
from kvr_mpi.runtime.stored_size import check_stored_size
from kvr_mpi.runtime.tracing import write_trace
from kvr_mpi.runtime.work_queue import FIRST_LIST, Slot, WorkQueue
from kvr_mpi.runtime.worker import ChainWorker
from kvr_mpi.store.batch_responses import write_responses
from kvr_mpi.store.cost import Cost
from kvr_mpi.store.folder import make_writable, survey
from kvr_mpi.store.lock import Lock
from kvr_mpi.store.log import Header, software
from kvr_mpi.store.results import Results, open_results
from kvr_mpi.store.rewrite import finish_run
from kvr_mpi.store.run import Opened, check_identity, last_header, open_run
from kvr_mpi.store.states import STATES, StateWriter
from kvr_mpi.store.writer import ResultWriter
from kvr_mpi.transport import Transport, gather_json, on_root, share_json, together
from kvr_mpi.transport.choose import open_transport, warm_up
from kvr_mpi.transport.counters import Counters, open_counters

LAST_LINES_S = 2.0
RESPONSES = "responses.jsonl"  # file with the responses to an OpenAI batch file, next to the results


def run_job(spec: JobSpec, options: RunOptions, machine: Machine, world: Transport, logger: RankLogger) -> int:
    """Run a whole job; every rank calls this.

    Returns the exit code: 0; 65 if more documents have error records than `output.max_failed` allows; 75 if the job was
    stopped before the end.
    """
    stop = Stop(machine.deadline_s)

    def end_at_once(why: str) -> None:
        def log_end() -> None:
            logger.info(why)
            logger.end(EXIT_STOPPED)

        lines = threading.Thread(target=log_end, daemon=True)
        lines.start()
        lines.join(LAST_LINES_S)  # the log may be a full pipe
        world.abort(EXIT_STOPPED)
        os._exit(EXIT_STOPPED)  # a process without MPI

    with stopped_by_signals(stop, logger.root, end_at_once), ExitStack() as held:
        return _run(spec, options, machine, world, logger, stop, held)


def _run(
    spec: JobSpec,
    options: RunOptions,
    machine: Machine,
    world: Transport,
    logger: RankLogger,
    stop: Stop,
    held: ExitStack,
) -> int:
    folder = Path(spec.output.path)
    topology = together(world, lambda: lay_out(spec, world.size))

    def claim_folder() -> Lock:
        """Take the output folder before the model is loaded: a second job that starts now ends at once."""
        make_writable(folder)
        return held.enter_context(Lock(folder, machine.owner, logger))

    lock = on_root(world, claim_folder)
    conclude = partial(_conclude, lock, spec, options, stop, logger)
    corpus = index_job(spec, world, logger, folder, is_new=options.overwrite)

    def open_folder(header: Header) -> Opened:
        """Repair the output folder, and compare its records with the documents."""
        assert lock is not None, "on rank 0"
        return open_run(
            folder,
            header,
            corpus,
            lock,
            overwrite=options.overwrite,
            retry_failed=options.retry_failed,
            logger=logger,
        )

    def open_again() -> tuple[Opened, dict[str, Any]] | None:
        """Open the folder of this job's run before weights are loaded; None if it has none, or that of another job."""
        header = None if options.overwrite else last_header(folder)
        is_same = header is not None and header.identity == identity_of_job(spec, machine)
        return (open_folder(header), header.identity) if header is not None and is_same else None

    opened = on_root(world, open_again)  # only rank 0 lists the folder: listings may differ
    left = share_json(world, None if opened is None else len(opened[0].todo))
    if left == 0:
        logger.root.info(f"nothing left to do: {counted(len(corpus), _noun(spec))} already done")
        return int(share_json(world, on_root(world, lambda: conclude(corpus, 0))))
    device = own_device(world, spec.model.device)
    meters = Meters(device, world.local_size, world.local_rank)
    wanted = spec.parallel.transport
    links, reason = open_transport(world, wanted, device, decodes_together=spec.decodes_together, logger=logger)
    is_usual = device.type == "cpu" and wanted == "auto"
    logger.root.log(logging.DEBUG if is_usual else logging.INFO, reason)
    logger.root.debug(", ".join(f"{name} {version}" for name, version in software().items()))
    ranks = join_groups(links, world, topology, device)
    chain = ranks.lane.split(topology.by_group.chain_color(ranks.lane.rank))
    warm_up(chain, device)  # before free memory is measured, of which NCCL's connections take some
    session = prepare(spec, machine, ranks, chain, logger)
    source = open_documents(session, corpus)
    if spec.questions is not None and (kinds := depends_on_length(session.loaded.model)):
        logger.root.info(
            f"all documents are prefilled again, since the rotary embedding ({kinds}) depends on the prompt's length"
        )
    if left is not None:
        # The model's files may have been replaced since.
        on_root(world, lambda: check_identity(folder, opened[1] if opened else {}, session.header.identity))
        found = None if opened is None else opened[0]
    else:
        found = on_root(world, lambda: open_folder(session.header))
    number = share_json(world, None if lock is None else lock.number)
    todo = np.frombuffer(world.broadcast(b"" if found is None else found.todo.tobytes()), np.int64)
    done = len(corpus) - len(todo)
    what = "questions about documents" if spec.questions else "documents"
    if spec.prompts:
        what = f"documents: {len(corpus) // len(spec.prompts)}, prompts about them"
    logger.root.info(f"{what}: {len(corpus)}" + (f", {done} of them already done" if done else ""))
    if spec.output.kv and spec.questions is None:
        about = share_json(world, on_root(world, lambda: check_stored_size(session, corpus, todo, folder)))
        logger.root.info(about)
    rounds, refused, predicted_s = make_rounds(session, corpus, todo)
    counters = open_counters(world, FIRST_LIST + sum(len(part.lists) for part in rounds))
    threads = torch.get_num_threads()  # read here: PyTorch keeps this number per thread
    if world.rank == 0:
        with suppress(OSError):  # files that stay are known by their session
            remove_rank_files(folder / STATES, but_of=number)
    group_size, events = spec.parallel.tensor_parallel, Events()

    def cost_so_far() -> Cost:
        return meters.cost(events.totals.rank_s, threads)

    with (
        closing(
            StateWriter(folder, world.rank, world.size, number, stop.deadline_s, logger, group_size, events)
        ) as states,
        write_trace(session, folder, number, events),
        closing(ResultWriter(folder, world.rank, session.header, number, events=events, cost=cost_so_far)) as writer,
    ):
        work, ends_s = sum(part.work for part in rounds), stop.deadline_s
        progress = Progress(logger, len(todo), work, events, deadline_s=ends_s, on_estimate=states.estimate)
        if world.rank == 0:
            meters.begin_answering()
        stop.join(counters, None if lock is None else lock.check, ranks.peers)
        decoder = Decoder(session, ResultSink(session, writer, counters, progress), stop, events)
        work_through(rounds, refused, source, decoder, counters)
        world.barrier()
        seconds, left = progress.elapsed_s, len(todo) - counters.read()[Slot.DONE]
        ended_s = time.monotonic() - options.began_s
        # Rank 0's lane counts for all: the other ranks of each tensor-parallel group did the same work.
        total = Totals.sum(Totals(**one) for one in gather_json(ranks.lane, asdict(events.totals)))
        expected = None
        if share_json(world, not done and total.answers == len(todo)):
            started_s = ended_s - seconds
            expected = keep_outcome(session, total, seconds, started_s)
        if left < len(todo):  # otherwise nothing was written
            cost = cost_so_far()
            if world.rank == 0:  # the report divides by the same time as the log
                cost = replace(cost, answering_s=seconds)
            if expected is not None:
                cost = replace(cost, expected_s=expected.range_s, took_s=ended_s)
                logger.root.info(cost.describe_outcome())
            writer.end_with(cost)
    world.barrier()
    counters.close()
    for line in describe_throughput(total, len(todo) - left, seconds, predicted_s, _noun(spec)):
        logger.root.info(line)
    return int(share_json(world, on_root(world, lambda: conclude(corpus, left))))


def work_through(
    rounds: Sequence[Round], refused: Mapping[int, str], source: DocumentSource, decoder: Decoder, counters: Counters
) -> None:
    """Process this rank's part of all rounds; every rank calls this.

    refused : documents that no chain takes, with the reason, or "" if they cannot be read.
    """
    session, sink, stop, events = decoder.session, decoder.sink, decoder.stop, decoder.events
    ranks, lane = session.ranks, session.ranks.lane
    for number in [*refused][lane.rank :: lane.size]:
        document = source.read(number)
        changed = f"{NOT_NOW}it has changed since the job began; the next start of the job answers it"
        sink.write_record(error_record(document, refused[number] or document.error or changed), 0)
    # Split off the chains of all rounds before any work: each split waits for all ranks.
    colors = [part.topology.chain_color(lane.rank) for part in rounds]
    chains = [lane.split(color) for color in colors]
    members = chains if ranks.tp_group is None else [ranks.world.split(color) for color in colors]  # all of its ranks
    for chain in chains:  # the link that closes a chain's ring is not part of any longer chain
        warm_up(chain, session.loaded.device)
    choices = choose_modes(session, rounds, chains)
    first_slot = FIRST_LIST
    for part, chain, everyone, choice in zip(rounds, chains, members, choices, strict=True):
        own = part.topology.chain_of(lane.rank)
        if own is not None:
            queue = WorkQueue(part.lists, part.works, own, counters, first_slot)
            runner = ChainRunner(session, chain, part.topology.ranks_of(own).start, events)
            leader = None
            if everyone.rank == 0:
                planner = Planner(runner, shares_heads=choice.mode == "head-parallel")
                leader = Leader(planner, queue, source, sink, stop, events)
            ChainWorker(runner, leader, decoder_of(decoder, chain, choice), everyone).run()
        first_slot += len(part.lists)
    events.begin("decoding", counted(decoder.running, "answer"))
    decoder.decode()
    if not stop.reason:  # otherwise answers in progress are lost
        session.check_memory()
    events.begin("waiting", "for the other ranks to end")


def _conclude(
    lock: Lock | None,
    spec: JobSpec,
    options: RunOptions,
    stop: Stop,
    logger: RankLogger,
    corpus: Corpus,
    left: int,
) -> int:
    """Merge the results if that is cheap, then print the table and the exit line, with counts from the logs.

    The job is done once each of its documents has a record.
    """
    assert lock is not None, "on rank 0"
    folder = Path(spec.output.path)
    with suppress(OutputError, OSError):  # another job has taken the folder, or files cannot be deleted
        lock.check(anew=True)
        remove_rank_files(folder / STATES)
    if left:
        lock.release()
        logger.end(EXIT_STOPPED, f"{counted(left, _noun(spec))} left: {stop.reason}")
        return EXIT_STOPPED
    lock.check(anew=True)  # merging replaces files: the folder must still be this job's
    with writing(f"output.path {str(folder)!r}", OTHER_FOLDER):
        result = finish_run(folder, lambda: stop.heard or stop.is_over, logger)
        results = Results.of(survey(folder))  # a share may have no documents
    lock.release()
    if lost := [name for name in corpus.ids() if name not in results]:
        why = "; ".join(f"{file}: {what}" for file, what in results.damaged.items()) or "their records are gone"
        logger.end(EXIT_STOPPED, f"{counted(len(lost), _noun(spec))} left, such as {lost[0]!r}: {why}")
        return EXIT_STOPPED
    if spec.documents.format == "openai-batch":
        write_batch(folder, logger)
    summary = results.summary()
    logger.info(f"cost: {results.cost.describe(summary.done)}")
    if options.table:
        print_summary(summary, rows_of(results), result)
    documents, allowed = summary.done + summary.failed, spec.output.failures_allowed(summary.done + summary.failed)
    unread = sum(results.places[name].is_transient for name in results.places.ordered("error"))
    code = EXIT_BAD_DATA if summary.failed > allowed or unread else EXIT_OK
    meaning = f"done; {counted(documents, _noun(spec))} answered"
    if summary.failed:
        of = counted(documents, _noun(spec))
        meaning = f"done; {summary.failed} of {of} failed (allowed: {allowed}, output.max_failed)"
        meaning += "; to process these again: --resume --retry-failed"
    if unread:  # `output.max_failed` allows bad documents, but these may be good
        meaning += f"; {unread} of them could not be read at the time: --resume is sufficient for these"
    logger.end(code, meaning=meaning)
    return code


def write_batch(folder: Path, logger: RankLogger) -> None:
    """Write the responses to all requests in OpenAI's format, next to the results; raise `WriteError` if that fails."""
    file, results = folder / RESPONSES, open_results(folder, verify=False, partial=True)
    remedy = "all answers are stored: --resume writes it again, and kvr export writes it elsewhere"
    with writing(file, remedy, WriteError), replacing(file) as stream:
        write_responses(results.records(), stream, str(results.header.model["name"]))
    logger.info(f"responses: {file}")


def _noun(spec: JobSpec) -> str:
    """Return what a job's records are about."""
    return "question" if spec.questions is not None else "prompt" if spec.prompts else "document"
