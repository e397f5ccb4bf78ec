"""Writing while the ranks compute: a thread writes records to the log, and keys and values to volumes.

A record is on the disk within `SYNC_S`. It counts once the keys and values it needs are durable: when their volume is
closed, synced and listed in the log. HDF5 writes, checksums and syncs release the GIL, so that computation continues
meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import h5py

from kvr_mpi.disk import truncate
from kvr_mpi.errors import WriteError
from kvr_mpi.store.cost import Cost
from kvr_mpi.store.kv import write_kv
from kvr_mpi.store.lock import session_of
from kvr_mpi.store.log import LINE_BYTES, Header, LogWriter, seal, sync
from kvr_mpi.store.pieces import piece_id, piece_ids
from kvr_mpi.store.record import Record, record_values
from kvr_mpi.store.stored_kv import CachedTokens, KeysValues
from kvr_mpi.store.volumes import KV, create_volume, key_of, volume_line
from kvr_mpi.trace import Recorder

if TYPE_CHECKING:
    import torch

# Records are synced this long after the first unsynced record was written.
SYNC_S = 1.0
# Interval between writes of a rank's cost; a killed job loses at most this much of it.
COST_S = 60.0
# A volume is closed this long after its first keys and values, or at this size. A young job closes its volumes after a
# tenth of its age: it loses at most that if it is killed, and a long job writes only a few more files.
VOLUME_S, LEAST_VOLUME_S, AGE_SHARE = 60.0, 1.0, 0.1
VOLUME_BYTES = 1 << 30
# Free space below which nothing more is written, since HDF5 handles a full disk badly.
MARGIN_BYTES = 256 << 10
# Limit of keys and values in the queue; beyond it `write` blocks.
IN_FLIGHT_BYTES = 512 << 20


class _Mark(Enum):
    END = "of a document"
    DROP = "the document: some of its layers could not be fetched"
    DUE = "something is old enough"
    STOP = "the thread"


@dataclass(frozen=True, slots=True)
class _Document:
    """A document to be written; its layers follow."""

    record: Record
    tokens: CachedTokens | None
    has_record: bool


@dataclass(frozen=True, slots=True)
class _Layer:
    content: KeysValues | None
    size_bytes: int
    copied: Copied | None = None  # set while a GPU may still be copying


class _DroppedError(Exception):
    """A document is discarded."""


@dataclass(slots=True)
class _Volume:
    """The volume being written."""

    file: h5py.File
    path: Path
    due_s: float  # on the monotonic clock
    pieces: dict[str, tuple[int, str]] = field(default_factory=dict)  # as in the volume's log line


class LayersWriter:
    """Writes the keys and values of a document layer by layer.

    Parameters
    ----------
    add_layer : callable
        Call it with each layer's keys and values (tokens, kv_heads, head_dim), on any device, or None if it has none.
        It copies them, so they may change afterwards.
    """

    def __init__(self, add_layer: Callable[[KeysValues | None], None]) -> None:
        self.add_layer, self.is_dropped = add_layer, False

    def drop(self) -> None:
        """Discard the document."""
        self.is_dropped = True


class ResultWriter:
    """Writes one rank's results.

    Once something could not be written, every call raises `WriteError`; data that were already durable
    stay.

    Parameters
    ----------
    folder : Path
    rank : int
    header : Header
        The first line of the log.
    session : int or None
        Number of the job; by default that of the job that holds the folder.
    recorder : Recorder, optional
        Records a span for every written document and every completed volume.
    cost : callable, optional
        Returns this rank's cost so far; called once a minute in another thread, if this rank has written a record.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        header: Header,
        session: int | None = None,
        *,
        recorder: Recorder | None = None,
        cost: Callable[[], Cost] | None = None,
    ) -> None:
        self._cost, self._cost_s = cost, math.inf if cost is None else time.monotonic() + COST_S
        self._last_cost: Cost | None = None
        self._recorder = Recorder() if recorder is None else recorder
        self._folder = folder
        session = session_of(folder) if session is None else session
        self._name = f"kv-{session:04d}-{rank:04d}"
        self._log = LogWriter(folder, session, rank, header)
        self._sync_s: float | None = None  # when the log must be synced
        self._volume: _Volume | None = None
        self._count, self._began_s = 0, time.monotonic()
        self._tasks: queue.SimpleQueue[_Document | _Layer | _Mark | threading.Event] = queue.SimpleQueue()
        self._room, self._waiting_bytes = threading.Condition(), 0
        self._spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self._error: Exception | None = None
        self._free = ""  # free space at the time of the error
        self._thread = threading.Thread(target=self._work, name=f"kvr-results-{rank}", daemon=True)
        self._thread.start()

    def write(
        self,
        record: Record,
        layers: Iterable[KeysValues | None] = (),
        tokens: CachedTokens | None = None,
        *,
        has_record: bool = True,
    ) -> None:
        """Add a record, and this rank's keys and values of the document.

        Parameters
        ----------
        record : Record
        layers : iterable of (keys, values) or None
            Each layer's (tokens, kv_heads, head_dim), on any device; copied, so they may change afterwards.
        tokens : CachedTokens or None
            Their tokens.
        has_record : bool
            False: another rank writes the record.
        """
        with self._writing(_Document(record, tokens, has_record)) as document:
            for layer in layers:
                document.add_layer(layer)

    @contextlib.contextmanager
    def writing_piece(self, record: Record, tokens: CachedTokens) -> Iterator[LayersWriter]:
        """Add keys and values of a document whose record another rank writes; nothing else may be written meanwhile.

        If the block raises, or the document is dropped, its layers are discarded.
        """
        with self._writing(_Document(record, tokens, has_record=False)) as document:
            yield document

    @contextlib.contextmanager
    def _writing(self, document: _Document) -> Iterator[LayersWriter]:
        self._check()
        self._tasks.put(document)
        layers = LayersWriter(lambda layer: self._tasks.put(self._copy(layer)))
        try:
            yield layers
        except BaseException:
            layers.drop()
            raise
        finally:
            self._tasks.put(_Mark.DROP if layers.is_dropped else _Mark.END)

    def end_with(self, cost: Cost) -> None:
        """Set this rank's total cost, which `close` writes."""
        self._last_cost = cost

    def flush(self) -> None:
        """Wait until everything written is durable."""
        reached = threading.Event()
        self._tasks.put(reached)
        while self._thread.is_alive() and not reached.wait(1):
            pass
        self._check()

    def close(self) -> None:
        """Flush everything, and end the thread."""
        if self._thread.is_alive():
            self._tasks.put(_Mark.STOP)
            self._thread.join()
        self._check()

    def _copy(self, layer: KeysValues | None) -> _Layer:
        if layer is None:
            return _Layer(None, 0)
        size = sum(tensor.numel() * tensor.element_size() for tensor in layer)
        with self._room:
            self._room.wait_for(lambda: self._waiting_bytes == 0 or self._waiting_bytes + size <= IN_FLIGHT_BYTES)
            self._waiting_bytes += size
        keys, values = (self._to_host(tensor) for tensor in layer)
        return _Layer((keys, values), size, mark_copies(layer[0].device))

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to contiguous host memory, reusing a buffer if possible.

        Allocating new memory takes several times as long as copying.
        """
        with self._room:
            spare = self._spare.get((tensor.shape, tensor.dtype))
            copy = spare.pop() if spare else None
        return copy_to_host(tensor, copy)

    def _release(self, layer: _Layer) -> None:
        """Let a blocked `write` continue, and keep the buffer for the next layer of the same shape."""
        with self._room:
            self._waiting_bytes -= layer.size_bytes
            for tensor in layer.content or ():
                key = (tensor.shape, tensor.dtype)
                if key not in self._spare and len(self._spare) > 1:  # more: buffers of another document's shapes
                    self._spare.clear()
                self._spare.setdefault(key, []).append(tensor)
            self._room.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._failure(self._error)

    def _failure(self, error: Exception) -> Exception:
        if not isinstance(error, (OSError, RuntimeError)):
            return error  # a bug
        free = self._free or self._space()
        reason = " ".join(str(error.strerror if isinstance(error, OSError) and error.strerror else error).split())
        return WriteError(
            f"output.path {str(self._folder)!r} cannot be written any more ({free} free there): {reason}. Everything "
            f"in its log is safe; free some space, or repair the disk, and continue with --resume"
        )

    def _space(self) -> str:
        try:
            return f"{shutil.disk_usage(self._folder).free / 1e6:.1f} MB"
        except OSError:
            return "nothing"

    # The methods below run in the writer thread.

    def _work(self) -> None:
        task = None
        while task is not _Mark.STOP:
            task = self._next()
            try:
                began_s, volume = time.perf_counter(), self._volume
                if isinstance(task, _Document):
                    self._add(task)
                    self._end_what_is_due()
                elif task is _Mark.DUE:
                    self._end_what_is_due()
                else:
                    self._end_volume()
                    if task is _Mark.STOP and self._last_cost is not None:
                        self._add_cost(self._last_cost)
                    self._sync()
                if isinstance(task, _Document) or volume is not self._volume:
                    self._recorder.note("write", began_s)
            except Exception as error:
                self._free = self._free or self._space()  # before the unfinished volume makes room again
                self._error = self._error or error
                self._give_up()
            if isinstance(task, threading.Event):
                task.set()
        with contextlib.suppress(OSError):
            self._log.close()

    def _next(self) -> _Document | _Layer | _Mark | threading.Event:
        due = [self._sync_s] if self._sync_s is not None else []
        due += [self._volume.due_s] if self._volume is not None else []
        due += [self._cost_s] if self._cost is not None else []
        try:
            return self._tasks.get(timeout=max(0.0, min(due) - time.monotonic()) if due else None)
        except queue.Empty:
            return _Mark.DUE

    def _layers(self) -> Iterator[_Layer]:
        """Yield a document's layers."""
        while not isinstance(task := self._tasks.get(), _Mark):
            assert isinstance(task, _Layer)
            yield task
            self._release(task)
        if task is _Mark.DROP:
            raise _DroppedError

    def _contents(self, layers: Iterable[_Layer]) -> Iterator[KeysValues | None]:
        for layer in layers:
            if layer.copied is not None:
                layer.copied.wait()
            self._check_space(layer.size_bytes)
            yield layer.content

    def _add(self, document: _Document) -> None:
        layers = self._layers()
        try:
            if self._error is None:
                stored = self._add_piece(document, self._contents(layers))
                if document.has_record:
                    self._add_record(document, has_kv=stored)
        except _DroppedError:
            pass
        finally:
            with contextlib.suppress(_DroppedError):
                for _ in layers:  # drain the layers that were not written
                    pass

    def _add_piece(self, document: _Document, contents: Iterator[KeysValues | None]) -> bool:
        """Write a document's layers; return whether there were any."""
        before = 0  # number of first layers without keys and values
        for first in contents:
            if first is not None:
                break
            before += 1
        else:
            return False
        volume = self._volume = self._volume or self._open()
        name = piece_id(document.record, document.tokens)
        key, layers = key_of(name), itertools.chain([None] * before, [first], contents)
        if volume.pieces.pop(name, None):  # left by an attempt that failed
            del volume.file[KV][key]
        try:
            volume.pieces[name] = write_kv(volume.file[KV], key, layers, document.tokens)
        except _DroppedError:
            del volume.file[KV][key]
            raise
        return True

    def _add_record(self, document: _Document, *, has_kv: bool) -> None:
        record = document.record
        line = seal(record_values(record, piece_ids(record, document.tokens) if has_kv else ()))
        if len(line) > LINE_BYTES:
            error = f"its record has {len(line)} bytes; no more than {LINE_BYTES} can be stored"
            line = seal(record_values(Record(record.id, "error", error=error), ()))
        self._check_space(len(line))
        self._log.write(line)
        self._sync_s = self._sync_s or time.monotonic() + SYNC_S

    def _open(self) -> _Volume:
        path = self._folder / f"{self._name}-{self._count:05d}.h5"
        self._count += 1
        now = time.monotonic()
        due_s = now + min(VOLUME_S, max(LEAST_VOLUME_S, AGE_SHARE * (now - self._began_s)))
        return _Volume(create_volume(path), path, due_s)

    def _check_space(self, size_bytes: int) -> None:
        if shutil.disk_usage(self._folder).free < size_bytes + MARGIN_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _end_what_is_due(self) -> None:
        """Close the volume and sync the log when they are old or large enough."""
        now, volume = time.monotonic(), self._volume
        if volume is not None and (now > volume.due_s or volume.file.id.get_filesize() > VOLUME_BYTES):
            self._end_volume()
        if now >= self._cost_s and self._cost is not None:
            self._cost_s = now + COST_S
            if self._log.is_begun:
                self._add_cost(self._cost())
        if self._sync_s is not None and now >= self._sync_s:
            self._sync()

    def _add_cost(self, cost: Cost) -> None:
        if self._error is None:
            with contextlib.suppress(OSError):  # no answers are lost
                self._log.write(seal(cost.as_line()))
                self._sync_s = self._sync_s or time.monotonic()

    def _end_volume(self) -> None:
        """Complete the volume: close, sync and list it."""
        volume = self._volume
        if volume is None or self._error is not None:
            return
        with self._room:
            self._spare.clear()
        volume.file.close()
        if volume.pieces:
            sync(volume.path)
            sync(volume.path.parent)
            self._log.write(volume_line(volume.path, volume.pieces))
            self._sync()
        else:
            volume.path.unlink()
        self._volume = None

    def _sync(self) -> None:
        self._sync_s = None
        self._log.sync()

    def _give_up(self) -> None:
        """Remove the unfinished volume to free its space."""
        self._sync_s = None
        volume, self._volume = self._volume, None
        if volume is not None:
            with contextlib.suppress(OSError):
                truncate(volume.path)  # HDF5 cannot close a file on a full disk; this makes room
            with contextlib.suppress(Exception):
                volume.file.close()
            with contextlib.suppress(OSError):
                volume.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Copied:
    """A CUDA event that is recorded after some copies."""

    device: torch.device
    event: torch.cuda.Event

    def wait(self) -> None:
        """Wait for the copies; can be called from any thread, whatever its current GPU."""
        import torch

        torch.cuda.set_device(self.device)
        self.event.synchronize()


def copy_to_host(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """Copy a tensor to contiguous host memory; from a GPU asynchronously, in the order of its stream.

    Parameters
    ----------
    into : Tensor or None
        Host buffer of the same shape and dtype to reuse; None: allocate one, pinned if the tensor is on a GPU.
    """
    if into is None:
        import torch

        with torch.inference_mode(False):  # the buffer may be reused outside inference mode
            into = tensor.new_empty(tensor.shape, device="cpu", pin_memory=tensor.is_cuda)
    into.copy_(tensor.detach(), non_blocking=True)
    return into


def mark_copies(device: torch.device) -> Copied | None:
    """Record an event in a GPU's current stream; None for host memory, which is copied synchronously."""
    if device.type != "cuda":
        return None
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return Copied(device, event)
