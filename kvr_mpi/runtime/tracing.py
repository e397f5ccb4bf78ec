"""Reports a rank's state while a job runs, and its trace, whose clock is aligned to rank 0's."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvr_mpi.costs.solve import Rates
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.runtime.plan import Plan
from kvr_mpi.runtime.session import Session
from kvr_mpi.runtime.tally import Tally
from kvr_mpi.store.states import StateWriter
from kvr_mpi.store.traces import TRACE_BYTES, TracedPrompt, TraceHeader, TraceWriter, trace_files
from kvr_mpi.trace import Recorder, Span
from kvr_mpi.transport import Transport, gather_json, on_root, share_json
from kvr_mpi.transport.links import Skew, measure_skews


class Trace:
    """This rank's state and trace; nothing is recorded without writers.

    states : publishes the rank's state.
    layers : layers of the model.
    rates : measured rates of this rank.
    tally : sums of this rank's work.
    """

    def __init__(
        self,
        recorder: Recorder,
        writer: TraceWriter | None = None,
        layers: int = 0,
        rates: Rates | None = None,
        states: StateWriter | None = None,
    ) -> None:
        self.recorder, self._writer, self._layers, self._rates = recorder, writer, layers, rates
        self._states, self._prompts = states, 0
        self.tally = tally = Tally()
        if states is not None:
            states.follow(lambda: (tally.prompt_tokens, tally.new_tokens, tally.prefilled))

    def tell(self, doing: str, what: str = "") -> None:
        """Set the state that ``kvr status`` shows."""
        if self._states is not None:
            self._states.tell(doing, what)

    def begin(self, row: Sequence[Plan], chain: Transport, first_rank: int) -> None:
        """Begin a prompt, a prefix that several prompts share, or a packed row, in the state and the trace."""
        plan, prompt = row[0], row[0].prompt
        others = f" and {len(row) - 1} more" if len(row) > 1 else ""
        self.tell("prefilling", prompt.name + others)
        if self._writer is None:
            return
        is_packed, is_alone = plan.in_rows and not plan.is_beginning, plan.partition is None
        tokens = sum(each.prompt.tokens for each in row)
        start, stop = (0, tokens) if is_packed else _own_slice(plan, chain)
        self.recorder.prompt = self._prompts
        self._writer.add_prompt(
            self._prompts,
            TracedPrompt(
                document=prompt.document_id + others,
                part=0 if is_packed else prompt.part,
                what="packed" if is_packed else "shared" if plan.is_beginning else "prompt",
                tokens=tokens,
                start=start,
                stop=stop,
                first_rank=first_rank + (chain.rank if is_packed else plan.decode_rank if is_alone else 0),
                ranks=1 if is_alone else chain.size,
                decode_rank=0 if is_alone else plan.decode_rank,
                predicted_s=0.0
                if is_packed or self._rates is None
                else self._layers * self._rates.seconds(stop - start, start),
            ),
        )
        self._prompts += 1

    def end_prompt(self, prefill: Prefill) -> None:
        """Record the times of a prompt on this rank."""
        self.tally.busy_s += prefill.seconds - prefill.wait_s - prefill.send_wait_s
        self._record(prefill)

    def end_row(self, prefills: Sequence[Prefill], began_s: float) -> None:
        """Record the times of packed prompts, once per forward pass; `began_s` is a value of `time.perf_counter`."""
        # Not the sum of `Prefill.seconds`: the first prompt's includes the shared prefix, which is counted already.
        self.tally.busy_s += time.perf_counter() - began_s
        for _, same_pass in itertools.groupby(prefills, lambda prefill: prefill.began_s):
            self._record(next(same_pass))

    def _record(self, prefill: Prefill) -> None:
        """Record the spans of a prefill, layer by layer."""
        if self._writer is None:
            return
        prompt, began_s = self.recorder.prompt, prefill.began_s
        # Its time may include a shared prefix, which has its own span.
        ended_s = min(began_s + prefill.seconds, time.perf_counter())
        self.recorder.add(Span("prefill", began_s, ended_s, prompt, amount=prefill.sent_bytes))
        edges = [began_s, *prefill.layer_begins_s[1:], ended_s]
        for layer in range(len(prefill.layer_begins_s)):
            self.recorder.add(Span("layer", edges[layer], edges[layer + 1], prompt, layer))


@contextmanager
def open_trace(session: Session, folder: Path, number: int, states: StateWriter | None = None) -> Iterator[Trace]:
    """Start the trace of this rank if the job requests one; every rank calls this.

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
        yield Trace(Recorder(), states=states)
        return
    # With a rolling cache, tokens attend to only part of the prompt, so the rates do not apply.
    rates = session.rates[ranks.lane.rank] if session.rates and session.rolling is None else None
    layers = len(session.loaded.shape.layers)
    header = TraceHeader(
        rank=world.rank,
        size=world.size,
        session=number,
        host=socket.gethostname(),
        device=session.loaded.device.type,
        layers=layers,
        token_s=0.0 if rates is None else rates.token_s,
        pair_s=0.0 if rates is None else rates.pair_s,
        tensor_parallel=session.spec.parallel.tensor_parallel,
    )
    recorder = Recorder(is_on=True)
    offset_s = time.time() - time.perf_counter()  # once, so that later clock adjustments do not matter
    skew = _measure_skew(world, header.host, offset_s)
    offset_s -= skew.ahead_s
    limit = left // world.size
    writer = TraceWriter(folder, header, recorder, offset_s=offset_s, limit_bytes=limit, logger=logger)
    writer.add_clock(0.0, skew.error_s)
    logger.root.info(
        f"recording a trace, up to {left / 2**20:.1f} MiB: open the files in {writer.path.parent} at ui.perfetto.dev, "
        f"or see `kvr report {folder}`"
    )
    try:
        yield Trace(recorder, writer, layers, rates, states)
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
