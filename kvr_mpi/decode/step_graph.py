"""Decode steps on a GPU as CUDA graphs: one launch per step instead of a thousand kernels.

The kernels of a step read everything that changes from device memory: tokens, lengths, and page tables. So a step is
recorded once for a number of slots, and replayed for any prompts in these slots, a token each; empty slots read and
write a spare page. When prompts join or leave, the page tables are rewritten, and the graph stays.

Decisions that a model's code takes on the host are fixed when the graph is recorded. So models that are known to take
such decisions are not recorded, and the first replays of each graph are compared with steps that run without it.

The ranks of a tensor-parallel group record their all-reduces over NCCL, too, and each rank's graph waits for the
others' on the GPU. So they agree on the layout of a row, once, and on whether all of them have recorded it. Per layer,
two sums of (slots, hidden size) remain: for Llama 3.1 70B in bfloat16 and 8 slots, 128 KiB each, so that 160 sums take
about 3 ms on NVLink (20 us each, mostly latency), beside about 6 ms for 17.6 GB of weights on each of 8 H100. Without
a graph, the launches of 80 layers take 50 to 70 ms.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Sequence

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.row import Row
from kvr_mpi.kv.table import PageTable
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.fused import fused_in_graph
from kvr_mpi.model.rope import depends_on_length
from kvr_mpi.model.tp_group import TensorParallelGroup, recording
from kvr_mpi.prefill.exactness import allowed_error, error_share
from kvr_mpi.prefill.failure import is_out_of_memory
from kvr_mpi.prefill.packed import decode_packed, run_inputs

# Steps of a layout before it is recorded: recording takes about as long as one step.
STEPS_BEFORE = 3
# Replays of a graph that are compared with steps that run without it.
STEPS_CHECKED = 2
# Slots are rounded up to `FEW_SLOTS` or a multiple of `SLOTS`, and pages to a power of two >= `PAGES`, for few graphs.
FEW_SLOTS, SLOTS, PAGES = (1, 2, 4), 8, 8
# Graphs to keep, the most recently used: each takes some memory.
MOST_GRAPHS = 8
# Outcomes of recording a step; in a group, the largest one counts.
RECORDED, NO_MEMORY, BY_SEQUENCE, REFUSED = range(4)


# Slots, pages of a unit, and whether all units have rows.
Layout = tuple[int, int, bool]


class StepGraph:
    """The graph of a step, recorded between two steps, with prompts of this layout or a narrower one.

    It holds no sequences: their pages are free when they are released.

    checks_left : replays that are still to be compared with steps that run without it.

    Raises `ModelError` if a layer cannot use paged attention; `RuntimeError` if the step cannot be recorded, or memory
    runs out.
    """

    def __init__(self, recorder: StepRecorder, layout: Layout, row: Row) -> None:
        loaded, (slots, width, is_complete) = recorder.loaded, layout
        self._table = PageTable(row.sequences[0], slots, width, is_complete=is_complete)
        self._inputs = torch.zeros(2, slots, dtype=torch.int64, device=loaded.device)
        self.checks_left = STEPS_CHECKED
        self._table.fill(row.slots)
        self._filled_for: weakref.ref[Row] | None = None
        self._filled_with: list[int] = []  # tokens of each sequence
        recorded = Row(row.slots, table=self._table)  # not kept: it holds the sequences
        self._inputs[1, : len(recorded.lengths)] = torch.tensor(recorded.lengths, device=loaded.device)
        with fused_in_graph(loaded.model), record(loaded.device, loaded.tp_group) as self._graph:
            self._logits = run_inputs(loaded, recorded, self._inputs)

    def run(self, row: Row, inputs: torch.Tensor) -> torch.Tensor:
        """Replay a step after `Row.begin`; return the logits of `run_inputs`."""
        count = inputs.shape[1]
        is_filled = self._filled_for is not None and self._filled_for() is row and self._filled_with == row.tokens
        if not is_filled or self._table.moves != self._table.pool.moves:
            self._table.fill(row.slots)
            self._inputs.zero_()
            self._filled_for, self._filled_with = weakref.ref(row), row.tokens
        self._inputs[:, :count] = inputs
        self._graph.replay()
        return self._logits[:count].clone()


@contextlib.contextmanager
def record(device: torch.device, tp_group: TensorParallelGroup | None) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the kernels launched in the block, all-reduces of a group included, without running them."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")  # other threads copy and send meanwhile
        try:
            with recording(tp_group, graph):
                yield graph
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(side)


class StepRecorder:
    """The graphs of a rank.

    why_not : why no step is recorded; None if steps are.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.why_not = loaded, _why_not(loaded)
        self._graphs: dict[Layout, StepGraph] = {}
        self._taken: dict[Layout, int] = {}
        # In a tensor-parallel group, whose ranks keep different rows of compressed heads: the table sizes of all ranks.
        self._agreed = weakref.WeakKeyDictionary[Row, tuple[int, bool]]()
        self._failures = 0

    def run(self, row: Row, tokens: Sequence[int]) -> torch.Tensor:
        """Run the tokens that the row takes of each prompt; return the logits of `decode_packed`."""
        graph = self._graph_for(row)
        if graph is None:
            return decode_packed(self.loaded, row, tokens)
        logits = graph.run(row, torch.tensor([list(tokens), row.begin()], device=self.loaded.device))
        if not graph.checks_left:
            row.advance()
            return logits
        truth = decode_packed(self.loaded, row, tokens)
        is_finite = truth.amax(-1).isfinite()
        are_all_finite = bool(is_finite.all())  # waits for the GPU
        if self.loaded.tp_group is not None:  # aborted sums would differ
            self.loaded.tp_group.raise_failures()
        if not are_all_finite:  # such a document fails alone
            logits, truth_of_finite = logits[is_finite], truth[is_finite]
        else:
            graph.checks_left, truth_of_finite = graph.checks_left - 1, truth
        if (error := error_share(logits, truth_of_finite)) > allowed_error(self.loaded.dtype):
            self._refuse(f"logits of a recorded step differ by {error:.1e} of their spread")
        return truth

    def forget(self) -> None:
        self._graphs.clear()
        self._taken.clear()

    def _sizes_for(self, row: Row) -> tuple[int, bool]:
        """Return the table sizes of a row, the same on all ranks of a group; drop graphs that have become void."""
        if (tp_group := self.loaded.tp_group) is None:
            return row.table_sizes
        tp_group.raise_failures()
        if self._failures != tp_group.failures:
            self.forget()
            self._failures = tp_group.failures
        if row not in self._agreed:
            pages, is_complete = row.table_sizes
            pages, is_partial = tp_group.largest([pages, not is_complete], self.loaded.device)
            self._agreed[row] = pages, not is_partial
        return self._agreed[row]

    def _graph_for(self, row: Row) -> StepGraph | None:
        """Return the graph of a step; record it after a few steps of the same layout."""
        if self.why_not is not None or not row.is_paged:
            return None
        many, (pages, is_complete) = sum(row.tokens), self._sizes_for(row)
        slots = next((few for few in FEW_SLOTS if few >= many), -(-many // SLOTS) * SLOTS)
        layout = slots, max(PAGES, 1 << (pages - 1).bit_length()), is_complete
        graph = self._graphs.pop(layout, None)
        if graph is None:
            self._taken[layout] = self._taken.get(layout, 0) + 1
            if self._taken[layout] <= STEPS_BEFORE or (graph := self._record(layout, row)) is None:
                return None
        self._graphs[layout] = graph  # the most recently used last
        while len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph

    def _record(self, layout: Layout, row: Row) -> StepGraph | None:
        graph, outcome, why = None, RECORDED, "on another rank of its tensor-parallel group"
        try:
            graph = StepGraph(self, layout, row)
        except ModelError as error:  # some models' layers cannot use paged attention
            outcome, why = BY_SEQUENCE, str(error)
        except (RuntimeError, MemoryError) as error:
            outcome = NO_MEMORY if is_out_of_memory(error) else REFUSED
            why = (str(error).splitlines() or [""])[0]
        if (tp_group := self.loaded.tp_group) is not None:
            (outcome,) = tp_group.largest([outcome], self.loaded.device)
        if outcome == NO_MEMORY:
            self._taken[layout] = 0
        elif outcome == BY_SEQUENCE:
            self.why_not = why
        elif outcome == REFUSED:
            self._refuse(f"a step cannot be recorded: {why}")
        return graph if outcome == RECORDED else None

    def _refuse(self, why: str) -> None:
        """Stop recording, and warn that steps will take longer."""
        self.why_not = why
        self.forget()
        warnings.warn(f"decode steps run without CUDA graphs, which is slower: {why}", stacklevel=2)


def _why_not(loaded: LoadedModel) -> str | None:
    if loaded.tp_group is not None and not loaded.tp_group.can_record:
        return "only NCCL's all-reduces can be recorded"
    if kinds := depends_on_length(loaded.model):
        return f"its rotary embedding ({kinds}) depends on the length"
    return None if loaded.device.type == "cuda" else "CPUs have no CUDA graphs"
