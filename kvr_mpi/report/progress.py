"""Progress of a job's documents: lines in the log, with an estimate of the time left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from kvr_mpi.duration import duration_text
from kvr_mpi.errors import counted, printable
from kvr_mpi.events import Events, Totals
from kvr_mpi.logs import PROGRESS, RankLogger
from kvr_mpi.report.table import ending_lines
from kvr_mpi.store.record import Record

# Minimum time between two lines about prefilled prompts of one rank; finished documents are always logged.
LINE_S = 1.0
# Minimum share of the work, or number of documents, that must be done before an estimate of the time left is shown.
EVIDENCE_SHARE, EVIDENCE_DOCUMENTS = 0.04, 20
UNKNOWN = "left unknown"


class Progress:
    """Reports finished documents, remaining ones and the time left.

    The time left is estimated from the work (in characters or any other unit), so that long documents count for more
    than short ones. A prefilled prompt without its answer counts as half done.

    Parameters
    ----------
    documents, work : int
        Documents of the whole job, and their work.
    events : Events
        This rank's; finished documents are added to their totals.
    deadline_s : float or None
        Unix time at which the batch system ends the job.
    on_estimate : callable
        Called with each new estimate of the Unix time at which all documents will be finished; None: not known.
    """

    def __init__(
        self,
        logger: RankLogger,
        documents: int,
        work: int,
        events: Events | None = None,
        *,
        deadline_s: float | None = None,
        clock: Callable[[], float] = time.time,
        on_estimate: Callable[[float | None], None] = lambda ends_s: None,
    ) -> None:
        self.logger, self._logger = logger, logger.named(PROGRESS)
        self._documents, self._work = documents, work
        self._deadline_s, self._clock = deadline_s, clock
        self._began, self._on_estimate = clock(), on_estimate
        self._logged_s = 0.0
        self._totals = Totals() if events is None else events.totals

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first document began."""
        return self._clock() - self._began

    def document(self, record: Record, done: int, work: int, prefilled: int = 0) -> None:
        """Report a finished document.

        `done` and `work` are finished documents of the whole job, including this one, and their work; `prefilled` is
        the prefilled work of the whole job, finished or not.
        """
        _count(self._totals, record)
        left = self._left(done, work, prefilled)
        if record.status == "error":
            what = f"error: {printable(record.error)}"
        else:
            what = f"{record.prompt_tokens:,} tokens, {_times_of(record)}"
        level = logging.WARNING if record.status == "error" else logging.INFO
        self._log(f"{done}/{self._documents} {record.id}: {what}", f", {left}", level, record.id)

    def prefilled(self, name: str, tokens: int, seconds: float, known: int = 0, document: str | None = None) -> None:
        """Report a prefilled prompt; its answer may take long, since many prompts are decoded together.

        `tokens` were computed; the keys and values of `known` tokens before them existed already; `document` is the
        id of its document.
        """
        now = self._clock()
        if now - self._logged_s >= LINE_S:
            self._logged_s = now
            cached = f" ({known:,} cached)" if known else ""
            self._log(
                f"prefilled {name}: {tokens:,}{' new' * bool(known)} tokens{cached} in {seconds:.2f} s",
                document=document,
            )

    def decoding(self, answers: int, tokens: int, token_s: float, stopping: str = "") -> None:
        """Report answers in progress: at most how many tokens each of them still needs, and the seconds per token.

        stopping : why no more documents are started; empty while they are.
        """
        what = f"decoding {counted(answers, 'answer')}, up to {counted(tokens, 'more token')} each"
        self._log(f"{stopping}; " * bool(stopping) + f"{what}: at most {duration_text(tokens * token_s)}")

    def _log(self, what: str, left: str = "", level: int = logging.INFO, document: str | None = None) -> None:
        """Log a line with the times."""
        ends = "" if self._deadline_s is None else f", wall time left {duration_text(self._deadline_s - self._clock())}"
        text = f"{what} | elapsed {duration_text(self.elapsed_s)}{left}{ends}"
        self._logger.log(level, text, extra={"document": document})

    def _left(self, done: int, work: int, prefilled: int) -> str:
        """Describe the time left, if it can be estimated."""
        if done >= self._documents:
            return "done"
        half_done = work + max(work, prefilled)
        if not half_done or (work < EVIDENCE_SHARE * self._work and (done < EVIDENCE_DOCUMENTS or not work)):
            self._on_estimate(None)
            return UNKNOWN
        left_s = self.elapsed_s * (2 * self._work - half_done) / half_done
        self._on_estimate(self._clock() + left_s)
        return f"left {duration_text(round(left_s, 3))}"


def _count(totals: Totals, record: Record) -> None:
    """Add a finished document."""
    totals.rank_s += record.rank_s
    totals.prompt_tokens += record.computed_tokens
    totals.new_tokens += record.new_tokens
    if record.status == "done":
        totals.prompts += record.parts
        totals.answers += 1
        totals.unanswered += record.ended_early == "reasoning"
        totals.cut_off += record.ended_early == "length"
        totals.repeated += record.ended_early == "repetition"
        totals.texts.append(record.text_tokens + record.dropped_tokens)
        totals.partly_seen += 0 < record.coverage < 1


def _times_of(record: Record) -> str:
    """Describe how long a document took.

    Parts of a split document are decoded in parallel, so their times are not summed.
    """
    if record.parts > 1:
        parts = f"{record.parts - 1} parts and a combining prompt"
        return f"{parts}: prefill {record.ttft_s:.2f} s, {record.new_tokens:,} tokens generated"
    # Other prompts are prefilled and decoded between its tokens.
    tokens = counted(record.new_tokens, "token")
    return f"TTFT {record.ttft_s:.2f} s, decode {record.decode_s:.2f} s ({tokens})"


def describe_throughput(
    total: Totals, documents: int, seconds: float, predicted_s: float | None, noun: str
) -> Iterator[str]:
    """Describe the throughput of all ranks; `noun` says what was answered."""
    if not documents or seconds <= 0:
        return
    planned = "" if predicted_s is None else f" (planned: {duration_text(predicted_s)})"
    busy = 100 * total.busy_s / total.wave_s if total.wave_s else 0
    failed = documents - total.answers
    also = f", {failed} failed" if failed else ""
    yield (
        f"{counted(total.answers, noun)} answered{also} in {duration_text(seconds)}{planned}: "
        f"{3600 * total.answers / seconds:.0f} answers/hour, "
        f"{total.prompt_tokens / seconds:.0f} prompt tokens/s, {total.new_tokens / seconds:.1f} new tokens/s; ranks "
        f"were computing for {busy:.0f} % of their prefill time"
    )
    if total.step_tokens > total.steps:
        yield (
            f"prompt lookup: {total.step_tokens / total.steps:.2f} tokens per decode step, "
            f"{100 - 100 * total.steps / total.step_tokens:.0f}% fewer steps, which take longer"
        )
    if total.partly_seen:
        yield (
            f"{total.partly_seen} of {total.answers} answers are based on only a part of their document (coverage "
            "in every export); prompt.min_coverage makes them errors"
        )
    endings = {"reasoning": total.unanswered, "length": total.cut_off, "repetition": total.repeated}
    yield from (line for _, line in ending_lines(endings, total.answers))
