"""Steps of documents in pages as CUDA graphs: what a step launches is captured once, and launched again as a whole.

A step of a few documents is thousands of short kernels, and launching each takes the host longer than the GPU takes to
run it. A graph is of one number of rows, so rows are padded (`kv.paged_row`). Tokens are chosen outside, as always:
samplers and grammars look at logits on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.decode_cache import DecodeCache
from kvr_mpi.kv.paged import PagedArena, PageRun
from kvr_mpi.kv.paged_row import PaddedCache, PartSize, append_token, by_extent, runs_of
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.model.graph_capture import Capture, Compute, GraphCapture, Replay, call_again
from kvr_mpi.model.rope import depends_on_length
from kvr_mpi.prefill.exactness import allowed_error, error_share
from kvr_mpi.prefill.one_prompt import run_next
from kvr_mpi.prefill.packed import decode_packed, prefill_packed
from kvr_mpi.prefill.self_check import FAILURES

# Rows of the documents of an extent: few numbers, since a graph is of one, and a row that is empty costs little beside
# reading the weights.
ROWS = (4, 16, 64)
# Rows of a step that is captured, over all extents, at most.
MOST_ROWS = 256
# Steps of the same documents, or of as many, before they are captured: capturing takes as long as about four.
PATIENCE = 16
# Graphs that are kept, and rows of all of them together: each holds the logits of its own.
KEPT_GRAPHS, KEPT_ROWS = 16, 512
# What a graph is taken to hold beside its tensors: of each of its kernels the driver keeps a record on the GPU. This is
# guessed, not measured.
GRAPH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Step:
    cache: PaddedCache
    replay: Replay
    logits: torch.Tensor  # (rows, vocab_size), of the last replay


class StepGraphs:
    """The captured steps of a rank.

    Parameters
    ----------
    loaded : LoadedModel
        Prepared for chains.
    say : callable
        For a line of text, should a step not be captured.
    capture : Capture, optional
        By default as the device has it.
    patience : int
        Steps of one size that are run as they are before one is captured.

    Attributes
    ----------
    why_not : str or None
        Why no more steps are captured, once that is so.
    captured, replayed : int
        How many steps were.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        say: Callable[[str], None],
        *,
        capture: Capture | None = None,
        patience: int = PATIENCE,
    ) -> None:
        self._loaded, self._say, self._patience = loaded, say, patience
        self._capture = capture or (GraphCapture(loaded.device) if loaded.device.type == "cuda" else call_again)
        self._steps: dict[tuple[PartSize, ...], _Step] = {}  # the one that was used last is last
        self._seen: tuple[PartSize, ...] = ()
        self._times_seen = 0
        self.why_not: str | None = None
        self.captured = self.replayed = 0

    def step(self, documents: Sequence[SliceCache], tokens: Sequence[int], eager: Compute) -> torch.Tensor:
        """Run one more token of each document.

        Parameters
        ----------
        eager : callable
            Does the same, kernel by kernel.

        Returns
        -------
        torch.Tensor
            Logits after them (documents, vocab_size), float32.
        """
        runs = runs_of(documents)
        if self.why_not is not None or runs is None or any(each.length >= each.capacity for each in documents):
            return eager()
        sizes = sizes_of(runs)
        if sizes is None:
            return eager()
        if sizes in self._steps:
            step = self._steps[sizes] = self._steps.pop(sizes)
            logits = _replay(step, documents, runs, tokens)
            for document in documents:
                append_token(document)
            self.replayed += 1
            return logits
        self._times_seen = self._times_seen + 1 if sizes == self._seen else 1
        self._seen = sizes
        if self._times_seen <= self._patience:
            return eager()
        return self._capture_beside(sizes, documents, runs, tokens, eager)

    @property
    def rows(self) -> int:
        """Rows of all graphs that are kept."""
        return sum(step.cache.row.rows for step in self._steps.values())

    def give_up(self, why: str) -> None:
        """Let all graphs go, with their memory, and capture no more; say why."""
        self._steps.clear()
        if self.why_not is None:
            self._say(f"from now on, decoding launches kernels one by one, not as CUDA graphs: {why}")
        self.why_not = why

    def _capture_beside(
        self,
        sizes: tuple[PartSize, ...],
        documents: Sequence[SliceCache],
        runs: Sequence[PageRun],
        tokens: Sequence[int],
        eager: Compute,
    ) -> torch.Tensor:
        """Capture a step, and hold its logits against those of the step as it is, which is what counts.

        That one runs last, and so writes the tokens' keys and values anew.
        """
        why, step, found = None, None, torch.empty(0)
        try:
            cache = PaddedCache(sizes, self._loaded.shape, self._loaded.device)
            cache.fill(runs, [each.length for each in documents], tokens)
            step = _Step(cache, *self._capture(self._computation(cache)))
            found = _replay(step, documents, runs, tokens)
        except (ModelError, MemoryError, *FAILURES) as error:
            why = _first_line(error)
        logits = eager()
        why = why or _why_other(found, logits, self._loaded.dtype)
        if why is not None or step is None:
            self.give_up(str(why))
            return logits
        self._forget_some(step.cache.row.rows)
        self._steps[sizes] = step
        self.captured += 1
        return logits

    def _computation(self, cache: PaddedCache) -> Compute:
        """Say what a step of a row computes: nothing in it may depend on anything but the row's tensors."""
        loaded = self._loaded
        every = torch.arange(cache.row.rows, device=loaded.device)

        def compute() -> torch.Tensor:
            cache.begin()
            return run_model(loaded.model, cache.tokens, cache, keep=every)

        return compute

    def _forget_some(self, rows: int) -> None:
        """Let go of graphs whose extents are gone, and to have room for one more of those not used for longest."""
        for sizes in list(self._steps):
            if any(size.extent() is None for size in sizes):
                del self._steps[sizes]
        while self._steps and (len(self._steps) >= KEPT_GRAPHS or self.rows + rows > KEPT_ROWS):
            del self._steps[next(iter(self._steps))]


def _replay(
    step: _Step, documents: Sequence[SliceCache], runs: Sequence[PageRun], tokens: Sequence[int]
) -> torch.Tensor:
    """Run a captured step for these documents; their logits (documents, vocab_size), in memory of their own."""
    step.cache.fill(runs, [each.length for each in documents], tokens)
    step.replay()
    return step.logits.index_select(0, step.cache.row.index)


def sizes_of(runs: Sequence[PageRun]) -> tuple[PartSize, ...] | None:
    """Say how many rows and pages a step over these documents needs; None if there are too many."""
    sizes = []
    for some in by_extent(runs):
        rows = next((rows for rows in ROWS if rows >= len(some)), None)
        if rows is None:
            return None
        longest = max(run.pages for run in some)
        sizes.append(PartSize(weakref.ref(some[0].extent), rows, 1 << (longest - 1).bit_length()))
    return tuple(sizes) if sum(size.rows for size in sizes) <= MOST_ROWS else None


def held_bytes(step_bytes: int, vocab_size: int) -> int:
    """Count what captured steps hold at most: one's memory to compute in, which all share, and the logits of each.

    Parameters
    ----------
    step_bytes : int
        Of the activations of a step of `MOST_ROWS` rows, without logits.
    """
    logits = 2 * MOST_ROWS + KEPT_ROWS  # in the model's dtype and in float32; of each graph in float32
    return step_bytes + 4 * logits * vocab_size + KEPT_GRAPHS * GRAPH_BYTES


def why_never_captured(loaded: LoadedModel) -> str | None:
    """Say why steps of models of this kind cannot be captured; None if they may be."""
    if kinds := depends_on_length(loaded.model):
        return f"its rotary embedding ({kinds}) is chosen on the host, by each document's length"
    if loaded.tp_group is not None:
        return "the ranks of a tensor-parallel group talk to each other in every layer"
    return None


@torch.inference_mode()
def why_not_captured(loaded: LoadedModel, arena: PagedArena, capture: Capture | None = None) -> str | None:
    """Capture a step of two small documents, and replay it: say why steps cannot be captured, None if they can.

    The model has to be prepared for chains, and to run packed.

    Parameters
    ----------
    arena : PagedArena
        With scrap pages: where the documents are kept meanwhile.
    capture : Capture, optional
        As of `StepGraphs`.
    """
    if why := why_never_captured(loaded):
        return why
    prompts = [loaded.shape.sample_ids(many, first=11 * (many + 1)) for many in (7, 4)]
    graphs = StepGraphs(loaded, lambda text: None, capture=capture, patience=0)
    try:
        caches = [each.cache for each in prefill_packed(loaded, prompts, reserve_tokens=2, arena=arena)]
        alone = prefill_packed(loaded, prompts, reserve_tokens=2)
        row = DecodeCache(caches)
        for token in (5, 6):  # the first is captured, the second replayed
            found = graphs.step(caches, [token, token], partial(decode_packed, loaded, row, [token, token]))
            ids = torch.tensor([[token]], device=loaded.device)
            truth = torch.stack([run_next(loaded.model, each, ids) for each in alone])
    except (ModelError, MemoryError, *FAILURES) as error:
        return _first_line(error)
    if graphs.why_not is None and graphs.replayed != 1:
        return "no step of two small documents was captured"
    return graphs.why_not or _why_other(found, truth, loaded.dtype)


def _why_other(found: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Say how far a replayed step's logits are off; None if they are those of the step as it is."""
    share, allowed = error_share(found, truth), allowed_error(dtype)
    if share <= allowed:
        return None
    return (
        f"a replayed step's logits differ from those of the step itself by {share:.1e} of their spread (allowed "
        f"{allowed:.0e})"
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no reason is given'])[0]}"
