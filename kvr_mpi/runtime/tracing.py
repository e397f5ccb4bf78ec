"""Records the prompts of a rank as events, and writes its trace, whose clock is aligned to rank 0's."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvr_mpi.events import Events, Span, TracedPrompt
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.runtime.plan import Plan
from kvr_mpi.runtime.session import Session
from kvr_mpi.store.traces import TRACE_BYTES, TraceHeader, TraceWriter, trace_files
from kvr_mpi.transport import Transport, gather_json, on_root, share_json
from kvr_mpi.transport.links import Skew, measure_skews


def begin_row(events: Events, row: Sequence[Plan], chain: Transport, first_rank: int) -> None:
    """Begin a prompt, a prefix that several prompts share, or a packed row."""
    plan, prompt = row[0], row[0].prompt
    others = f" and {len(row) - 1} more" if len(row) > 1 else ""
    events.begin("prefilling", prompt.name + others)
    if not events.keeps_spans:
        return
    is_packed, is_alone = plan.in_rows, plan.partition is None
    tokens = sum(each.prompt.tokens for each in row)
    start, stop = (0, tokens) if is_packed else _own_slice(plan, chain)
    events.begin_prompt(
        TracedPrompt(
            document=prompt.document_id + others,
            part=0 if is_packed else prompt.part,
            what="packed" if is_packed else "shared" if prompt.is_prefix else "prompt",
            tokens=tokens,
            start=start,
            stop=stop,
            first_rank=first_rank + (chain.rank if is_packed else plan.decode_rank if is_alone else 0),
            ranks=1 if is_alone else chain.size,
            decode_rank=0 if is_alone else plan.decode_rank,
        )
    )


def end_row(events: Events, prefills: Sequence[Prefill]) -> None:
    """Record the times of prompts on this rank, once per forward pass."""
    for _, same_pass in itertools.groupby(prefills, lambda prefill: prefill.began_s):
        prefill = next(same_pass)
        ended_s = prefill.began_s + prefill.seconds
        events.add(Span("prefill", prefill.began_s, ended_s, events.prompt, amount=prefill.sent_bytes))
        for span in prefill.spans:
            events.add(span._replace(prompt=events.prompt))


@contextmanager
def write_trace(session: Session, folder: Path, number: int, events: Events) -> Iterator[None]:
    """Write the trace of this rank if the job requests one; every rank calls this.

    number : of this job's session in the folder.

    Clocks are compared at the beginning and at the end; in between, linear drift is assumed.
    """
    ranks, logger, left = session.ranks, session.logger, 0
    world = ranks.world
    if session.spec.output.trace:
        left = share_json(
            world, on_root(world, lambda: TRACE_BYTES - sum(file.stat().st_size for file in trace_files(folder)))
        )
        if left <= 0:
            logger.root.info(f"no trace: the traces of earlier jobs fill the {TRACE_BYTES >> 20} MiB allowed")
    if left <= 0:
        yield
        return
    header = TraceHeader(
        rank=world.rank,
        size=world.size,
        session=number,
        host=socket.gethostname(),
        device=session.loaded.device.type,
        tensor_parallel=session.spec.parallel.tensor_parallel,
    )
    events.keeps_spans = True
    offset_s = time.time() - time.perf_counter()  # once, so that later clock adjustments do not matter
    skew = _measure_skew(world, header.host, offset_s)
    offset_s -= skew.ahead_s
    limit = left // world.size
    writer = TraceWriter(folder, header, events, offset_s=offset_s, limit_bytes=limit, logger=logger)
    writer.add_clock(0.0, skew.error_s)
    logger.root.info(
        f"recording a trace, up to {left / 2**20:.1f} MiB: open the files in {writer.path.parent} at ui.perfetto.dev, "
        f"or see `kvr report {folder}`"
    )
    try:
        yield
        world.barrier()
        skew = _measure_skew(world, header.host, offset_s)
        writer.add_clock(skew.ahead_s, skew.error_s)
    finally:
        writer.close()


def _measure_skew(world: Transport, host: str, offset_s: float) -> Skew:
    """Measure the offset of this rank's clock from rank 0's; messages are exchanged with one rank per host.

    offset_s : how far this rank's clock is ahead of ``time.perf_counter``, which all ranks of a host share.
    """
    hosts: list[str] = share_json(world, gather_json(world, host))
    offsets: list[float] = share_json(world, gather_json(world, offset_s))
    asked = [hosts.index(name) for name in dict.fromkeys(hosts)][1:]
    found = measure_skews(world, asked, lambda request, who: request.wait(), lambda: time.perf_counter() + offset_s)
    told: list[tuple[float, float]] = share_json(
        world, [(found[rank].ahead_s, found[rank].error_s) for rank in asked] if world.rank == 0 else None
    )
    skews = {0: Skew(0.0, 0.0)} | {rank: Skew(*each) for rank, each in zip(asked, told, strict=True)}
    first = hosts.index(host)
    return Skew(skews[first].ahead_s + offset_s - offsets[first], skews[first].error_s)


def _own_slice(plan: Plan, chain: Transport) -> tuple[int, int]:
    """Bounds of this rank's slice without known tokens."""
    if plan.partition is None:
        return plan.known_tokens, plan.prompt.tokens
    start, stop = plan.bounds_on(chain.rank)
    return max(start, plan.known_tokens), stop
