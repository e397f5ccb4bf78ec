"""Plans of a job: which documents run on which ranks.

`kvr plan` shows the plan, and a job with ``parallel.ranks_per_chain = "auto"`` follows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvr_mpi.documents import Document
from kvr_mpi.documents.encoding import encode_text
from kvr_mpi.documents.prompts import Frame, count_parts
from kvr_mpi.duration import duration_text
from kvr_mpi.job import JobSpec, PromptSection
from kvr_mpi.schedule.forecast import Forecast
from kvr_mpi.schedule.placement import Schedule, order_key, sampled, schedule
from kvr_mpi.topology import whole_groups
from kvr_mpi.transport import Transport, gather_json, share_json

MIN_EFFICIENCY = 0.5  # minimum parallel efficiency of a chain, unless that slows the batch down
MOST_DOCUMENTS = 2000  # size of the sample of documents if only the total time is needed


def prompt_tokens(prompt: PromptSection, frame: Frame, text_tokens: int) -> int:
    """Total tokens of a document's prompts; 0 if the document becomes an error record."""
    around = frame.max_tokens - frame.text_budget
    if text_tokens == 0 or text_tokens <= frame.text_budget:
        return text_tokens and text_tokens + around
    if prompt.too_long == "split":
        count = count_parts(frame, text_tokens)
        return text_tokens + around * count + frame.overlap * (count - 1)
    return 0 if prompt.kept is None else frame.max_tokens


def count_tokens(tokenizer: Any, share: Iterable[Document], world: Transport) -> dict[str, int]:
    """Count the tokens of all documents in parallel; every rank gets all counts."""
    mine = {
        document.id: len(encode_text(tokenizer, document.text)) if document.error is None else 0 for document in share
    }
    shares: list[dict[str, int]] = share_json(world, gather_json(world, mine))
    return {name: tokens for share in shares for name, tokens in share.items()}


def plan_documents(spec: JobSpec, texts: Sequence[tuple[str, int]], ranks: int, forecast: Forecast) -> Schedule:
    """Schedule documents (id, tokens of text) on ranks, as the job says.

    If chains of its length are impossible, their lengths are planned: `written_seconds` is None.
    """
    documents = [(name, prompt_tokens(spec.prompt, forecast.frame, tokens)) for name, tokens in texts]
    documents.sort(key=lambda document: order_key(spec.documents.order, document[1]))
    forecast = replace(forecast, load=sum(tokens > 0 for _, tokens in documents) / ranks)

    def fits(tokens: int, length: int) -> bool:
        return (length == 1 or spec.takes_chains) and forecast.fits(tokens, length)

    ttft_s = sampled(forecast.ttft_s)  # not document_s: it jumps where documents are split into parts

    def seconds(tokens: int, length: int) -> float:
        return forecast.document_s(tokens, length, ttft_s)

    length = _chain_length(spec, ranks)
    return schedule(documents, ranks, seconds, fits, min_efficiency=MIN_EFFICIENCY, length=length)


def _chain_length(spec: JobSpec, ranks: int) -> int | None:
    """Length of all chains on ranks, or on tensor-parallel groups; None if it is planned."""
    size = spec.chain_size(ranks * spec.parallel.tensor_parallel)
    return None if size is None else whole_groups(size, spec.parallel.tensor_parallel)


def written_seconds(spec: JobSpec, plan: Schedule) -> float | None:
    """Predicted time of the job as written; None if it does not fit, or if its chain length is impossible."""
    length = _chain_length(spec, plan.ranks)
    return plan.makespan_s if length is None else dict(plan.fixed_s).get(length)


def two_parts(
    spec: JobSpec, texts: Sequence[tuple[str, int]], ranks: int, forecast: Forecast
) -> tuple[float, float] | None:
    """Predict prefill and decoding time of the job as written, from a sample if there are many documents."""
    step = max(1, -(-len(texts) // MOST_DOCUMENTS))
    some = sorted(texts, key=lambda text: text[1])[step // 2 :: step]
    scale = len(texts) / max(1, len(some))
    found = [
        written_seconds(spec, plan_documents(spec, some, ranks, one))
        for one in (replace(forecast, new_tokens=min(1, forecast.new_tokens)), forecast)
    ]
    if found[0] is None or found[1] is None:
        return None
    return scale * found[0], scale * (found[1] - found[0])


def describe_schedule(plan: Schedule) -> list[str]:
    """Describe a schedule and its alternatives in a few lines."""
    counts = Counter(place.ranks for place in plan.placements if place.tokens)
    shares = [
        f"{count} on chains of {length} ranks" for length, count in sorted(counts.items(), reverse=True) if length > 1
    ]
    shares += [f"{counts[1]} on one rank each"] if 1 in counts else []
    shares += [f"{errors} unreadable"] if (errors := len(plan.placements) - counts.total()) else []
    lines = ["documents: " + (", ".join(shares) or "none")]
    if plan.does_not_fit:
        lines[0] += f"; {len(plan.does_not_fit)} do not fit into memory"
    if not plan.placements:
        return lines
    over = 100 * (plan.makespan_s / plan.lower_bound_s - 1)
    lines.append(
        f"predicted time: {duration_text(plan.makespan_s)}, {over:.1f}% above the lower bound of "
        f"{duration_text(plan.lower_bound_s)}"
    )
    alone = plan.data_parallel_s
    lines.append(
        "one rank per document: "
        + ("some do not fit" if alone is None else f"{duration_text(alone)} ({alone / plan.makespan_s:.2f} x)")
    )
    if plan.best_fixed is not None and plan.best_fixed[0] > 1:
        length, seconds = plan.best_fixed
        lines[-1] += f"; chains of {length} for all: {duration_text(seconds)} ({seconds / plan.makespan_s:.2f} x)"
    return lines
