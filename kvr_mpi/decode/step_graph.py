"""Steps of decoding on a GPU as one CUDA graph, so that the host launches one thing a step, and not a thousand kernels.

A step of the same prompts differs from the one before it in their tokens and lengths only, which lie on the device,
and in how long their longest may be, for which what it has room for will do. So the kernels of a step are recorded
once, when prompts have stayed together for some steps, and replayed from then on.

What a model's code decides on the host would be replayed as it was decided. So a model is recorded only if nothing of
that is known of it, and a process's first graph is held against steps that run as before.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.decode_cache import DecodeCache
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.rope import depends_on_length
from kvr_mpi.prefill.exactness import allowed_error, error_share
from kvr_mpi.prefill.failure import is_out_of_memory
from kvr_mpi.prefill.packed import decode_packed, run_step

# Steps of the same prompts before they are recorded: recording takes about as long as one of them.
STEPS_BEFORE = 3
# Steps that the first graph of a process is held against, from the one after that which was recorded.
STEPS_CHECKED = 2


class Recorder:
    """What the graphs of a rank have in common.

    Attributes
    ----------
    why_not : str or None
        Why no step is recorded; None if steps are.
    checks_left : int
        Steps that graphs are still held against.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.why_not, self.checks_left = loaded, _why_not(loaded), STEPS_CHECKED

    def refuse(self, why: str) -> None:
        """Record nothing from now on, which the user should know: steps take longer than they could."""
        self.why_not = why
        warnings.warn(f"steps of decoding are not recorded as CUDA graphs, and slower: {why}", stacklevel=2)

    @contextlib.contextmanager
    def record(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Record the kernels launched within; they do not run."""
        device, graph = self.loaded.device, torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads copy and send meanwhile
            try:
                yield graph
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()


def _why_not(loaded: LoadedModel) -> str | None:
    if loaded.tp_group is not None:
        return "its ranks wait for each other in every layer"
    if kinds := depends_on_length(loaded.model):
        return f"its rotary embedding ({kinds}) depends on the length"
    return None if loaded.device.type == "cuda" else "on a processor there is nothing to be launched"


class StepGraph:
    """A step of some prompts, recorded.

    Parameters
    ----------
    recorder : Recorder
    cache : DecodeCache
        Of the prompts, between two steps.

    Raises
    ------
    ModelError
        If attention of a layer is told lengths by the host.
    RuntimeError
        If what the model does cannot be recorded, or there is no memory for it.
    """

    def __init__(self, recorder: Recorder, cache: DecodeCache) -> None:
        loaded, self._cache = recorder.loaded, cache
        lengths = cache.take_up()
        self._inputs = torch.tensor([[0] * len(lengths), lengths], device=loaded.device)
        cache.are_bounds = True
        try:
            with recorder.record() as self._graph:
                self._logits = run_step(loaded, cache, self._inputs)
        finally:
            cache.are_bounds = False
            cache.take_back()

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run a step that was begun; as `run_step`."""
        self._inputs.copy_(inputs)
        self._graph.replay()
        self._cache.went_on()
        return self._logits.clone()


class Steps:
    """Steps of prompts that stay together."""

    def __init__(self, recorder: Recorder, cache: DecodeCache) -> None:
        self._recorder, self._cache, self._taken = recorder, cache, 0
        self._graph: StepGraph | None = None

    def run(self, tokens: Sequence[int]) -> torch.Tensor:
        """Run one more token of each prompt; as `decode_packed`."""
        recorder, cache = self._recorder, self._cache
        if self._graph is None and self._taken == STEPS_BEFORE and recorder.why_not is None:
            self._graph = self._record()
        self._taken += 1
        if self._graph is None:
            return decode_packed(recorder.loaded, cache, tokens)
        logits = decode_packed(recorder.loaded, cache, tokens, self._graph.run)
        if recorder.checks_left:
            cache.take_back()
            truth = decode_packed(recorder.loaded, cache, tokens)
            recorder.checks_left -= 1
            if (error := error_share(logits, truth)) > allowed_error(recorder.loaded.dtype):
                self._graph = None
                recorder.refuse(f"logits of a recorded step differ by {error:.1e} of their spread")
            return truth
        return logits

    def _record(self) -> StepGraph | None:
        try:
            return StepGraph(self._recorder, self._cache)
        except ModelError as error:  # some models' layers are read document by document
            self._recorder.why_not = str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):  # of these prompts, then, and maybe not of others
                self._recorder.refuse(f"a step cannot be recorded: {(str(error).splitlines() or [''])[0]}")
        return None
