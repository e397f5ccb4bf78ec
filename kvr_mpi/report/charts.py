"""The charts of the report; each title states the result, or why there is no chart."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from kvr_mpi.duration import duration_text
from kvr_mpi.errors import counted
from kvr_mpi.report.style import (
    bytes_text,
    nice_ticks,
    percent_text,
    plain_number,
    tokens_text,
)
from kvr_mpi.report.svg import BOTTOM, LEFT, TOP, Drawing, Scale
from kvr_mpi.report.timeline import Timeline, TracedRun
from kvr_mpi.store.record import Record

WIDTH, HEIGHT = 860.0, 300.0
LANE = 46.0
# Limits for the points of a line, and for dots; beyond them some are omitted, which does not change the picture.
MOST_POINTS = 400
MOST_DOTS = 1200
# Prompts with a smaller computed fraction (the rest was reused) are omitted from timings by length.
LEAST_COMPUTED = 0.9


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart; the functions below return text with the reason instead if there is none.

    title : the result, as a sentence.
    note : how to read it.
    legend : color classes and their meanings.
    """

    title: str
    drawing: Drawing
    note: str
    legend: tuple[tuple[str, str], ...] = ()


# Prompts that are worth a chart.
LEAST_DOTS = 3
NO_TRACE = "no trace; set output.trace = true in the job to record one"


def draw_timeline(timeline: Timeline) -> Chart:
    """Draw a prompt's timeline over its chain, one lane per rank, in the order of slices (KV-Runahead, Fig. 3)."""
    prompt, lanes = timeline.prompt, timeline.lanes
    end = max(span.ended_s for lane in lanes for span in lane.spans) - timeline.began_s
    drawing = Drawing(WIDTH, TOP + LANE * len(lanes) + BOTTOM, f"timeline of {prompt.document}")
    x = drawing.x_axis(end, "seconds since the chain began", nice_ticks(0, end, 8), left=150.0)
    for number, lane in enumerate(lanes):
        top, own = TOP + LANE * number, lane.prompt
        drawing.text(2, top + 17, lane.header.name, quiet=False, bold=True)
        if own.stop > own.start:
            drawing.text(2, top + 32, f"tokens {own.start:,} to {own.stop:,}")
        parts = [span for span in lane.spans if span.kind == "layer"]
        shades = "ours", "soft"
        for span in parts or [lane.prefill]:
            began, ended = x(span.began_s - timeline.began_s), x(span.ended_s - timeline.began_s)
            name = f"{lane.header.name}, layer {span.layer}" if parts else lane.header.name
            label = f"{name}: {duration_text(span.ended_s - span.began_s)}"
            drawing.rect(began, top + 4, ended - began, 24, shades[max(0, span.layer) % 2], label)
        for span in sorted(lane.spans, key=lambda span: span.began_s):
            began, ended = x(span.began_s - timeline.began_s), x(span.ended_s - timeline.began_s)
            took = duration_text(span.ended_s - span.began_s)
            if span.kind in ("wait", "send wait") and ended - began > 0.3:
                color = "wait" if span.kind == "wait" else "held"
                whom = f" for rank {span.peer}" if span.peer >= 0 else " for the link"
                drawing.rect(began, top + 4, ended - began, 24, color, f"layer {span.layer}: waited {took}{whom}")
            elif span.kind in ("send", "forward") and span.layer >= 0:
                whom = f"to rank {span.peer}"
                label = f"layer {span.layer}: {span.kind} {whom}, {bytes_text(span.amount)} in {took}"
                drawing.rect(began, top + 30, max(0.6, ended - began), 5, "sent", label)
    first_token = x(timeline.seconds)
    drawing.line([(first_token, TOP), (first_token, TOP + LANE * len(lanes))], "text", dashed=True, width=1.2)
    waited = max(lanes, key=lambda lane: lane.waited_s)
    took, share = duration_text(timeline.seconds), percent_text(waited.waited_s / timeline.seconds)
    title = (
        f"{prompt.document}: {prompt.tokens:,} tokens over {counted(len(lanes), 'rank')} took {took} to the first "
        f"token; {waited.header.name} waited {share} of it"
    )
    note = (
        "One lane per rank, in the order of the slices, and one box per layer, from the time when its keys and values "
        "are computed to that of the next layer. The dashed line marks the first token."
    )
    legend = (
        ("ours", "computes (every second layer lighter)"),
        ("wait", "waits for keys and values"),
        ("held", "waits for the link"),
        ("sent", "sends or forwards"),
    )
    return Chart(title, drawing, note, legend)


def draw_timelines(run: TracedRun) -> list[Chart] | str:
    """Draw the timelines of the longest prompt, and of the prompt whose ranks waited most."""
    if not run.traces:
        return NO_TRACE
    chains = [one for one in run.timelines if one.prompt.ranks > 1] or run.timelines
    if not chains:
        why = (
            f"{counted(run.incomplete, 'prompt')} only partly recorded"
            if run.incomplete
            else "all were packed with others"
        )
        return f"no prompt was recorded on all ranks of its chain ({why})"
    longest = max(chains, key=lambda one: one.prompt.tokens)
    waiting = max(chains, key=lambda one: one.wait_share)
    return [draw_timeline(one) for one in ([longest] if waiting is longest else [longest, waiting])]


def draw_waits(run: TracedRun) -> Chart | str:
    """Draw the waiting time of each rank in each layer, summed over prompts."""
    if not run.traces:
        return NO_TRACE
    cells: dict[tuple[int, int], float] = defaultdict(float)
    busy: dict[int, float] = defaultdict(float)
    for timeline in run.timelines:
        for lane in timeline.lanes:
            busy[lane.rank] += lane.prefill.ended_s - lane.prefill.began_s
            for span in lane.spans:
                if span.kind in ("wait", "send wait") and span.layer >= 0:
                    cells[lane.rank, span.layer] += span.ended_s - span.began_s
    if not any(cells.values()):
        return "no rank waited"
    ranks = sorted(busy)
    layers = 1 + max(layer for _, layer in cells)
    totals = {rank: sum(cells.get((rank, layer), 0.0) for layer in range(layers)) for rank in ranks}
    height = min(26.0, max(3.0, 900 / len(ranks)))
    drawing = Drawing(WIDTH, TOP + height * len(ranks) + BOTTOM, "seconds waited by rank and layer")
    left = max(LEFT, 7.0 * max(len(run.names[rank]) for rank in ranks))
    x = Scale(layers, left, WIDTH - 130)
    most = max(cells.values())
    for row, rank in enumerate(ranks):
        top = TOP + row * height
        if height >= 12 or row % 10 == 0:
            drawing.text(left - 7, top + height / 2 + 4, run.names[rank], anchor="end")
            share = percent_text(totals[rank] / busy[rank]) if busy[rank] else ""
            drawing.text(WIDTH - 122, top + height / 2 + 4, f"{duration_text(totals[rank])}, {share}")
        for layer in range(layers):
            waited = cells.get((rank, layer), 0.0)
            label = f"{run.names[rank]}, layer {layer}: waited {duration_text(waited)}"
            drawing.rect(x(layer), top, x(1) - x(0) - 1, height - 1.5, "wait", label, 0.04 + 0.96 * waited / most)
    step = max(1, round(layers / 12))
    for layer in range(0, layers, step):
        drawing.x_tick(x(layer + 0.5), str(layer))
    drawing.x_name(x.middle, "layer")
    rank = max(ranks, key=lambda rank: totals[rank])
    layer = max(range(layers), key=lambda layer: cells.get((rank, layer), 0.0))
    title = (
        f"{run.names[rank].capitalize()} waited longest: {duration_text(totals[rank])}, "
        f"{percent_text(totals[rank] / busy[rank])} of its prefill time, longest in layer {layer}"
    )
    note = (
        f"Over {counted(len(run.timelines), 'prompt')}; the stronger the color, the longer the wait (at most "
        f"{duration_text(most)}). On the right, the total of each rank, and its share of the rank's prefill time."
    )
    return Chart(title, drawing, note)


def draw_first_token(records: Sequence[Record]) -> Chart | str:
    """Draw the time to the first token over the prompt's length."""
    timed = [one for one in records if _is_comparable(one)]
    if len(timed) < LEAST_DOTS:
        return f"fewer than {LEAST_DOTS} prompts computed all of their tokens"
    drawing = Drawing(WIDTH, HEIGHT, "time to first token over prompt length")
    tokens, seconds = max(one.prompt_tokens for one in timed) * 1.04, max(one.ttft_s for one in timed) * 1.06
    x = drawing.x_axis(tokens, "prompt tokens", text_of=tokens_text)
    y = drawing.y_axis(seconds, "seconds to the first token")
    sizes = sorted({one.ranks for one in timed}, reverse=True)
    colors = dict(zip(sizes, ("ours", "sent", "other", "held", *["rival"] * len(sizes)), strict=False))
    for one in timed[:: -(-len(timed) // MOST_DOTS)]:
        ranks = one.ranks
        label = f"{one.id}: {one.prompt_tokens:,} tokens on {counted(ranks, 'rank')}, {duration_text(one.ttft_s)}"
        drawing.dot(x(one.prompt_tokens), y(one.ttft_s), colors[ranks], label)
    rate = statistics.median(one.computed_tokens / one.ttft_s for one in timed)
    middle = statistics.median(one.ttft_s for one in timed)
    title = f"The first token came after {duration_text(middle)} (the median), at {plain_number(rate)} prompt tokens/s"
    legend = tuple((colors[size], counted(size, "rank")) for size in sizes[:5])
    reused = sum(one.ttft_s > 0 and one.parts == 1 and not _is_comparable(one) for one in records)
    note = f" {reused} more reused keys and values, and are not comparable." if reused else ""
    return Chart(title, drawing, f"One dot per prompt, {len(timed)} in total.{note}", legend if len(sizes) > 1 else ())


def _is_comparable(record: Record) -> bool:
    """Whether a record's TTFT is typical of its length: it is one prompt, and most of it was computed."""
    computed = record.computed_tokens >= LEAST_COMPUTED * record.prompt_tokens
    return record.ttft_s > 0 and record.prompt_tokens > 0 and record.parts == 1 and computed


def draw_progress(records: Sequence[Record], answering_s: float = 0.0) -> Chart | str:
    """Draw the number of finished documents over time; `answering_s` is the time for the rate, if it is known."""
    ends = sorted(_unix(one) for one in records if one.finished_at)
    if len(ends) < 2:
        return "fewer than two documents have a time"
    failed = sorted(_unix(one) for one in records if one.finished_at and one.status == "error")
    # Parts of a split document are decoded in parallel, so the sum of their times may exceed the whole run.
    began = min(
        _unix(one) - one.ttft_s - (one.decode_s if one.parts == 1 else 0.0) for one in records if one.finished_at
    )
    span = max(ends[-1] - began, 1e-3)
    unit, word = (3600.0, "hours") if span > 3 * 3600 else (60.0, "minutes") if span > 180 else (1.0, "seconds")
    drawing = Drawing(WIDTH, HEIGHT, "documents completed over time")
    x = drawing.x_axis(span / unit, f"{word} since the first prompt", nice_ticks(0, span / unit, 8))
    y = drawing.y_axis(len(ends), "documents", [tick for tick in nice_ticks(0, len(ends)) if tick == int(tick)])
    for times, color in ((ends, "ours"), (failed, "wait")):
        step = max(1, len(times) // MOST_POINTS)
        points = [(x(0), y(0))]
        for number in [*range(step - 1, len(times), step), len(times) - 1] if times else []:
            at = x((times[number] - began) / unit)
            points += [(at, points[-1][1]), (at, y(number + 1))]
        if len(points) > 1:
            drawing.line(points, color)
    done = len(ends) - len(failed)
    also = f", {len(failed):,} failed" if failed else ""
    seconds = answering_s or span
    rate = plain_number(3600 * done / seconds)
    title = f"Documents completed over time: {done:,} answered{also} in {duration_text(seconds)}, {rate} per hour"
    legend = (("ours", "done or failed"), ("wait", "failed")) if failed else ()
    return Chart(title, drawing, "Documents are counted when their answers are complete.", legend)


def draw_memory(run: TracedRun) -> Chart | str:
    """Draw the memory of each rank's process over time."""
    samples = [(trace.header.rank, sorted(trace.memory)) for trace in run.traces if trace.memory]
    if not samples:
        return NO_TRACE
    began = min(some[0][0] for _, some in samples)
    span = max(some[-1][0] for _, some in samples) - began
    most, highest = max((size, rank) for rank, some in samples for _, size in some)
    drawing = Drawing(WIDTH, HEIGHT, "memory of the ranks over time")
    gib = 1 << 30
    x = drawing.x_axis(span, "seconds since the job began", nice_ticks(0, span, 8))
    y = drawing.y_axis(1.08 * most / gib, "GiB per rank")
    for rank, some in sorted(samples, key=lambda one: one[0] == highest):
        some = some[:: max(1, len(some) // MOST_POINTS)]
        color = "ours" if rank == highest else "rival"
        drawing.line([(x(at - began), y(size / gib)) for at, size in some], color, width=2 if rank == highest else 1.2)
    title = f"{run.names[highest].capitalize()} used most memory: {bytes_text(most)}"
    others = (("rival", "the other ranks"),) if any(rank != highest for rank, _ in samples) else ()
    legend = (("ours", run.names[highest]), *others)
    return Chart(title, drawing, "Resident memory of the process, weights included.", legend)


def _unix(record: Record) -> float:
    return datetime.fromisoformat(record.finished_at).timestamp()
