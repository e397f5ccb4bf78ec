"""A model larger than memory: embedding and head are held, its layers come from disk block by block, and go again.

A *pass* takes many prompts through the model at once, so that each block is read once for all of them. Every prompt has
a thread of its own, in which the model's code runs as ever; hooks of torch hold it before a layer whose weights are not
there yet. One thread computes at a time, so that one layer's activations are alive. Meanwhile the next block is read:
two are held at most. No model code is changed, and what comes out is what a model gives that is held as a whole.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.model.layer_chunks import decoder_layers
from kvr_mpi.model.rope import rotary_modules
from kvr_mpi.model.shape import meta_model
from kvr_mpi.model.weight_files import UNREADABLE, WeightFiles

# Blocks that are held at most: one that is computed with, and the next.
BLOCKS_HELD = 2
# Layers held of a block, where nothing else is said: the more, the longer a read, and the fewer of them.
BLOCK_LAYERS = 1

T = TypeVar("T")


class StreamedWeights:
    """The weights of a model's layers, which come and go.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
    weights : WeightFiles
    block_layers : int
        Layers that are read at a time.
    resident : mapping, optional
        What is in no layer, if a model of these files has read it; the configuration may then ask for fewer layers.

    Attributes
    ----------
    model : torch.nn.Module
        The model, all of whose passes go by `run_all`.
    held_bytes, most_held_bytes : int
        Of weights that are in memory: now, and at most so far.
    resident_bytes : int
        Of them, what is always there: embedding, head, and what else is in no layer.
    read_s, read_bytes : float, int
        What reading has taken so far, without what is always there.

    Raises
    ------
    ModelError
        If the files name weights otherwise than the model's code does, or hold too few or too many.
    """

    def __init__(
        self,
        config: Any,
        weights: WeightFiles,
        block_layers: int = BLOCK_LAYERS,
        *,
        resident: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._config, self._weights, self._resident = config, weights, resident
        self.model = meta_model(config, weights.dtype)
        if kept := (self.model._keep_in_fp32_modules or self.model._keep_in_fp32_modules_strict):
            if weights.dtype != torch.float32:
                raise ModelError(
                    f"{type(self.model).__name__} keeps {', '.join(sorted(kept))} in float32: set that dtype"
                )
        self._layers = decoder_layers(self.model)
        names = {id(module): name for name, module in self.model.named_modules()}
        self._prefixes = [f"{names[id(layer)]}." for layer in self._layers]
        self._names = [list(layer.state_dict()) for layer in self._layers]
        self.read_s, self.read_bytes = 0.0, 0
        self.held_bytes = self.resident_bytes = self.most_held_bytes = 0
        self._fill_rest()
        self.split(block_layers)
        for number, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(_Enter(self, number))
            layer.register_forward_hook(_Leave(self, number), always_call=True)
        self._pass: _Pass | None = None

    def split(self, block_layers: int) -> None:
        """Cut the layers into blocks of so many."""
        count = len(self._layers)
        self.blocks = [range(first, min(first + block_layers, count)) for first in range(0, count, block_layers)]

    @property
    def layer_bytes(self) -> int:
        """Of the largest layer."""
        return max(self._bytes_of(number) for number in range(len(self._layers)))

    @property
    def pass_bytes(self) -> int:
        """What is read for a pass."""
        return sum(self._bytes_of(number) for number in range(len(self._layers)))

    @property
    def reserved_bytes(self) -> int:
        """Most that blocks take at a time."""
        sizes = sorted((sum(map(self._bytes_of, block)) for block in self.blocks), reverse=True)
        return sum(sizes[:BLOCKS_HELD])

    def measure_reading(self) -> float:
        """Read a layer; bytes per second."""
        seconds, count = self.read_s, self.read_bytes
        self._fill(0)
        self._release(range(1))
        return (self.read_bytes - count) / max(self.read_s - seconds, 1e-9)

    def run_all(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run tasks each of which takes the model through all its layers once, in one pass; results in their order.

        Raises
        ------
        Exception
            The first task's that failed, or what made reading fail.
        """
        assert self._pass is None, "one pass at a time"
        self._pass = current = _Pass(len(tasks), self.blocks)
        results: list[T | None] = [None] * len(tasks)
        errors: list[BaseException | None] = [None] * len(tasks)

        def work(number: int) -> None:
            try:
                results[number] = tasks[number]()
            except BaseException as error:
                errors[number] = error
            finally:
                current.end()

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(tasks))]
        try:
            for thread in threads:
                thread.start()
            self._feed(current)
        except UNREADABLE as error:
            current.fail(error)
            raise ModelError(f"a model's layers cannot be read any more ({error}): put its files back") from error
        except BaseException as error:
            current.fail(error)
            raise
        finally:
            for thread in threads:
                thread.join()
            for block in self.blocks:
                self._release(block)
            self._pass = None
        failed = next((error for error in errors if error is not None), None)
        if failed is not None:
            raise failed
        return [cast("T", result) for result in results]

    def first_layers(self, count: int) -> Any:
        """Build a model of the first layers only, all of it in memory, to try on a few tokens what depends on none."""
        config = copy.deepcopy(self._config)
        text = config.get_text_config()
        text.num_hidden_layers = count
        if getattr(text, "layer_types", None):
            text.layer_types = list(text.layer_types)[:count]
        built = StreamedWeights(config, self._weights, count, resident=self.model.state_dict())
        for number, layer in enumerate(built._layers):
            built._fill(number)
            layer._forward_pre_hooks.clear()
            layer._forward_hooks.clear()
        return built.model

    def enter(self, number: int) -> None:
        """Wait for a layer's weights, and for the turn to compute with them."""
        if self._pass is None:
            raise ModelError("its weights are streamed: it runs in passes of many prompts only")
        self._pass.enter(number)

    def leave(self, number: int) -> None:
        """Let the next thread compute."""
        if self._pass is not None:
            self._pass.leave(number)

    def _feed(self, current: _Pass) -> None:
        """Read block after block, as those before are through."""
        for number, block in enumerate(self.blocks):
            if number >= BLOCKS_HELD:
                before = self.blocks[number - BLOCKS_HELD]
                current.wait_through(number - BLOCKS_HELD)
                self._release(before)
            if not current.is_wanted:
                return
            for layer in block:
                self._fill(layer)
            current.announce(number)

    def _fill(self, number: int) -> None:
        began, prefix = time.perf_counter(), self._prefixes[number]
        found = self._weights.read([prefix + name for name in self._names[number]])
        for name in self._names[number]:
            _put(self._layers[number], name, found[prefix + name])
        self.read_s += time.perf_counter() - began
        size = sum(tensor.nbytes for tensor in found.values())
        self.read_bytes += size
        self._count(size)

    def _release(self, block: range) -> None:
        for number in block:
            layer = self._layers[number]
            held = [(name, tensor) for name, tensor in layer.state_dict().items() if not tensor.is_meta]
            for name, tensor in held:
                _put(layer, name, torch.empty_like(tensor, device="meta"))
            self._count(-sum(tensor.nbytes for _, tensor in held))

    def _count(self, size: int) -> None:
        self.held_bytes += size
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)

    def _bytes_of(self, number: int) -> int:
        return sum(tensor.nbytes for tensor in self._layers[number].state_dict().values())

    def _fill_rest(self) -> None:
        """Read what is in no layer, and make rotary embeddings anew; refuse what would be left without values."""
        model, files, name = self.model, self._weights.files, type(self.model).__name__
        for module in rotary_modules(model):
            fresh = _made_anew(module)
            for each, values in fresh.named_buffers():
                _put(module, each, values)
        inside = {prefix + each for prefix, some in zip(self._prefixes, self._names, strict=True) for each in some}
        shared = self._prefixes[0].rpartition("0.")[0]
        more = sorted(each for each in files if each.startswith(shared) and each not in inside)
        wanted = [each for each in model.state_dict() if each not in inside and each in files]
        if missing := sorted(inside - files.keys()):
            raise ModelError(
                f"{name}: its files have no weights of the name {missing[0]}, and {len(missing) - 1} more: to be "
                f"streamed, weights have to be stored under the names that transformers' code gives them"
            )
        if more and self._resident is None:
            raise ModelError(f"{name}: its files have weights of layers that config.json does not ask for: {more[0]}")
        held = self._resident
        found = self._weights.read(wanted) if held is None else {each: held[each] for each in wanted}
        for each, tensor in found.items():
            _put(model, each, tensor)
        model.tie_weights()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        left = sorted(each for each, tensor in tensors if tensor.is_meta and each not in inside)
        if left:
            raise ModelError(f"{name}: the values of {', '.join(left[:3])} are not in its files, so it is not streamed")
        self.resident_bytes = sum(tensor.nbytes for tensor in found.values())
        self._count(self.resident_bytes)


class _Pass:
    """Where the threads of a pass are."""

    def __init__(self, tasks: int, blocks: Sequence[range]) -> None:
        self._tasks, self._blocks = tasks, blocks
        self._there = 0  # blocks that were read
        self._passed = [0] * len(blocks)  # threads that are through with each
        self._own = threading.local()
        self._changed, self._turn = threading.Condition(), threading.Lock()
        self._error: BaseException | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether a thread is left that goes on."""
        with self._changed:
            return self._passed[-1] < self._tasks

    def enter(self, number: int) -> None:
        """Wait for a layer's block, and then for the turn."""
        block = self._block_of(number)
        with self._changed:
            self._changed.wait_for(lambda: self._there > block or self._error is not None)
            if self._error is not None:
                raise ModelError(f"weights could not be read: {self._error}")
        self._turn.acquire()
        self._own.has_turn = True

    def leave(self, number: int) -> None:
        """Hand the turn on; after a block's last layer, say so."""
        if getattr(self._own, "has_turn", False):
            self._own.has_turn = False
            self._turn.release()
            block = self._block_of(number)
            if number == self._blocks[block][-1]:
                self._go_past(block + 1)

    def end(self) -> None:
        """Say that a thread goes no further."""
        self._go_past(len(self._blocks))

    def announce(self, block: int) -> None:
        """Say that a block was read."""
        with self._changed:
            self._there = block + 1
            self._changed.notify_all()

    def wait_through(self, block: int) -> None:
        """Wait until all threads are through with a block."""
        with self._changed:
            self._changed.wait_for(lambda: self._passed[block] == self._tasks)

    def fail(self, error: BaseException) -> None:
        """Let all threads end: nothing more is read."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _go_past(self, block: int) -> None:
        first = getattr(self._own, "past", 0)
        with self._changed:
            for each in range(first, block):
                self._passed[each] += 1
            self._changed.notify_all()
        self._own.past = max(first, block)

    def _block_of(self, number: int) -> int:
        return next(at for at, block in enumerate(self._blocks) if number in block)


@dataclass(frozen=True, slots=True)
class _Enter:
    """A layer's hook before it computes."""

    weights: StreamedWeights
    number: int

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        self.weights.enter(self.number)


@dataclass(frozen=True, slots=True)
class _Leave:
    """A layer's hook when it has computed, or failed."""

    weights: StreamedWeights
    number: int

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self.weights.leave(self.number)


def _made_anew(rotary: Any) -> torch.nn.Module:
    """Make a rotary embedding with values, as its configuration has it."""
    try:
        made: torch.nn.Module = type(rotary)(rotary.config)
    except (TypeError, AttributeError) as error:
        raise ModelError(f"{type(rotary).__name__} cannot be made of its configuration alone: {error}") from error
    return made


def _put(root: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Give a parameter or buffer of a module other values, of the same shape and dtype."""
    path, _, last = name.rpartition(".")
    module = root.get_submodule(path)
    before = module._parameters.get(last, module._buffers.get(last))
    assert before is not None
    if before.shape != tensor.shape:
        raise ModelError(f"{name} is of {tuple(tensor.shape)} in the files, and of {tuple(before.shape)} in the model")
    if before.dtype != tensor.dtype:
        raise ModelError(
            f"{name} would be {tensor.dtype}, and is {before.dtype} in the model: its kind is not streamed"
        )
    if last in module._parameters:
        module._parameters[last] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[last] = tensor
