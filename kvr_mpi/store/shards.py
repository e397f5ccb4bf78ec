"""Writing while the ranks compute: finished documents become shards in a thread of their own.

Within `FLUSH_S` of being written a document is durable: its shard is closed, synced, recorded in the ledger and named.
HDF5 lets other threads run while it writes, as do checksums and syncs, so that computing goes on.
"""

from __future__ import annotations

import contextlib
import errno
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

from kvr_mpi.disk import PART, truncate
from kvr_mpi.errors import WriteError
from kvr_mpi.store.hdf5 import create_hdf5
from kvr_mpi.store.ledger import LedgerWriter
from kvr_mpi.store.lock import session_of
from kvr_mpi.store.outputs import Header, Record, drop_record, start_file, write_record
from kvr_mpi.store.parts import parts_of
from kvr_mpi.store.stored_kv import CachedTokens, KeysValues
from kvr_mpi.store.summary import shorten
from kvr_mpi.trace import Recorder

if TYPE_CHECKING:
    import torch

# A shard is closed this long after its first document, or at this size. A young job has little, and closes its shards
# after a tenth of its age: it loses no more than that if it is killed, and a long one makes few files more.
FLUSH_S, LEAST_FLUSH_S, AGE_SHARE = 10.0, 1.0, 0.1
FLUSH_BYTES = 1 << 30
# Free space below which nothing more is written: HDF5 fails badly on a full disk, so it is not to meet one.
MARGIN_BYTES = 256 << 10
# Keys and values that may wait to be written; more make `write` wait.
IN_FLIGHT_BYTES = 512 << 20


class _Mark(Enum):
    END = "of a document"
    DROP = "the document: its layers could not all be had"
    DUE = "the shard is old enough"
    STOP = "the thread"


@dataclass(frozen=True, slots=True)
class _Document:
    record: Record
    tokens: CachedTokens | None


@dataclass(frozen=True, slots=True)
class _Layer:
    content: KeysValues | None
    size_bytes: int
    copied: Copied | None = None  # while a GPU may still copy it


class _DroppedError(Exception):
    """A document is to be forgotten."""


@dataclass(slots=True)
class _Shard:
    """The shard being written."""

    file: h5py.File
    path: Path  # which it is to have
    due_s: float  # on the monotonic clock
    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # and why
    parts: dict[str, list[str]] = field(default_factory=dict)  # of `ShardLine`

    @property
    def part(self) -> Path:
        return self.path.with_name(self.path.name + PART)


class LayersWriter:
    """A document that is being written, layer by layer.

    Parameters
    ----------
    add_layer : callable
        Given each layer's keys and values (tokens, kv_heads, head_dim), on any device, or None if it has none. They
        are copied, so they may change afterwards.
    """

    def __init__(self, add_layer: Callable[[KeysValues | None], None]) -> None:
        self.add_layer, self.is_dropped = add_layer, False

    def drop(self) -> None:
        """Forget the document."""
        self.is_dropped = True


class ShardWriter:
    """Write finished documents of one rank.

    Every call raises `WriteError` if something could not be written, now or since the last call; what was durable
    stays.

    Parameters
    ----------
    folder : Path
    name : str
        Distinguishes this writer's files from those of other writers of the run.
    header : Header
        Goes into every file.
    session : int or None
        Of the job; by default the one that has the folder.
    recorder : Recorder, optional
        Told of every document that is written, and of every shard that is made durable.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        header: Header,
        session: int | None = None,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = Recorder() if recorder is None else recorder
        self._folder, self._name, self._header = folder, name, header
        self._session = session_of(folder) if session is None else session
        self._ledger = LedgerWriter(folder, name)
        self._shard: _Shard | None = None
        self._count, self._began_s = 0, time.monotonic()
        self._tasks: queue.SimpleQueue[_Document | _Layer | _Mark | threading.Event] = queue.SimpleQueue()
        self._room, self._waiting_bytes = threading.Condition(), 0
        self._spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self._error: Exception | None = None
        self._free = ""  # space there was when that came
        self._thread = threading.Thread(target=self._work, name=f"kvr-shards-{name}", daemon=True)
        self._thread.start()

    def write(
        self, record: Record, layers: Iterable[KeysValues | None] = (), tokens: CachedTokens | None = None
    ) -> None:
        """Add a document; it is durable within `FLUSH_S`.

        Parameters
        ----------
        record : Record
        layers : iterable of (keys, values) or None
            Each layer's (tokens, kv_heads, head_dim), on any device; copied, so they may change afterwards.
        tokens : CachedTokens or None
            Whose they are.
        """
        with self.writing(record, tokens) as document:
            for layer in layers:
                document.add_layer(layer)

    @contextlib.contextmanager
    def writing(self, record: Record, tokens: CachedTokens | None) -> Iterator[LayersWriter]:
        """Add a document whose layers come one by one, as `write`; nothing else may be written meanwhile.

        If that ends by an exception, or the document is dropped, it is forgotten.
        """
        self._check()
        self._tasks.put(_Document(record, tokens))
        document = LayersWriter(lambda layer: self._tasks.put(self._copy(layer)))
        try:
            yield document
        except BaseException:
            document.drop()
            raise
        finally:
            self._tasks.put(_Mark.DROP if document.is_dropped else _Mark.END)

    def flush(self) -> None:
        """Wait until all documents are durable."""
        reached = threading.Event()
        self._tasks.put(reached)
        while self._thread.is_alive() and not reached.wait(1):
            pass
        self._check()

    def close(self) -> None:
        """Make all documents durable, and end the thread."""
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
        """Copy a tensor to the host, in one piece, and into memory that was written out before if there is any.

        Memory that is new to the process costs several times as much as the copying.
        """
        with self._room:
            spare = self._spare.get((tensor.shape, tensor.dtype))
            copy = spare.pop() if spare else None
        return copy_to_host(tensor, copy)

    def _release(self, layer: _Layer) -> None:
        """Let the caller go on, and keep the memory if the next layer is likely to be of the same shape."""
        with self._room:
            self._waiting_bytes -= layer.size_bytes
            for tensor in layer.content or ():
                key = (tensor.shape, tensor.dtype)
                if key not in self._spare and len(self._spare) > 1:  # keys and values: another document's are of no use
                    self._spare.clear()
                self._spare.setdefault(key, []).append(tensor)
            self._room.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._failure(self._error)

    def _failure(self, error: Exception) -> Exception:
        if not isinstance(error, (OSError, RuntimeError)):
            return error  # a bug, or a document of the same name
        free = self._free or self._space()
        reason = " ".join(str(error.strerror if isinstance(error, OSError) and error.strerror else error).split())
        return WriteError(
            f"output.path {str(self._folder)!r} cannot be written any more ({free} free there): {reason}. Everything "
            f"in its ledger is safe; free some space, or repair the disk, and continue with --resume"
        )

    def _space(self) -> str:
        try:
            return f"{shutil.disk_usage(self._folder).free / 1e6:.1f} MB"
        except OSError:
            return "nothing"

    # From here on in the thread

    def _work(self) -> None:
        task = None
        while task is not _Mark.STOP:
            task = self._next()
            try:
                began_s, shard = time.perf_counter(), self._shard
                if isinstance(task, _Document):
                    self._add(task.record, task.tokens)
                if not isinstance(task, _Document) or self._is_due():
                    self._finish()
                if isinstance(task, _Document) or shard is not self._shard:
                    self._recorder.note("write", began_s, prompt=-1)
            except Exception as error:
                self._free = self._free or self._space()  # before the unfinished shard makes room again
                self._error = self._error or error
                self._give_up()
            if isinstance(task, threading.Event):
                task.set()

    def _next(self) -> _Document | _Layer | _Mark | threading.Event:
        if self._shard is None:
            return self._tasks.get()
        try:
            return self._tasks.get(timeout=max(0.0, self._shard.due_s - time.monotonic()))
        except queue.Empty:
            return _Mark.DUE

    def _layers(self) -> Iterator[_Layer]:
        """Take a document's layers, up to its end."""
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

    def _add(self, record: Record, tokens: CachedTokens | None) -> None:
        layers = self._layers()
        try:
            if self._error is None:
                self._check_space(record.bytes)
                shard = self._shard = self._shard or self._open()
                try:
                    contents = self._contents(layers)
                    write_record(shard.file, record, contents, tokens)
                except _DroppedError:
                    drop_record(shard.file, record.id)
                else:
                    if record.status == "done":
                        shard.done.append(record.id)
                        if parts := parts_of(record, tokens):
                            shard.parts[record.id] = parts
                    else:
                        shard.failed[record.id] = shorten(record.error)
        finally:
            with contextlib.suppress(_DroppedError):
                for _ in layers:  # what an error left
                    pass

    def _open(self) -> _Shard:
        while True:
            path = self._folder / f"shard-{self._session:04d}-{self._name}-{self._count:05d}.h5"
            self._count += 1
            if not path.exists():
                with contextlib.suppress(FileExistsError):
                    file = create_hdf5(path.with_name(path.name + PART))
                    shard = self._shard = _Shard(file, path, self._due_s())
                    start_file(file, self._header)
                    return shard

    def _due_s(self) -> float:
        now = time.monotonic()
        return now + min(FLUSH_S, max(LEAST_FLUSH_S, AGE_SHARE * (now - self._began_s)))

    def _check_space(self, size_bytes: int) -> None:
        if shutil.disk_usage(self._folder).free < size_bytes + MARGIN_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _is_due(self) -> bool:
        shard = self._shard
        return shard is not None and (time.monotonic() > shard.due_s or shard.file.id.get_filesize() > FLUSH_BYTES)

    def _finish(self) -> None:
        if self._shard is None or self._error is not None:
            return
        with self._room:
            self._spare.clear()
        self._shard.file.close()
        if self._shard.done or self._shard.failed:
            self._ledger.publish(self._shard.path, self._shard.done, self._shard.failed, self._shard.parts)
        else:
            self._shard.part.unlink()
        self._shard = None

    def _give_up(self) -> None:
        """Remove the unfinished shard, so that its space is free again."""
        shard, self._shard = self._shard, None
        if shard is not None:
            with contextlib.suppress(OSError):
                truncate(shard.part)  # HDF5 cannot close a file on a full disk; this makes room
            with contextlib.suppress(Exception):
                shard.file.close()
            with contextlib.suppress(OSError):
                shard.part.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Copied:
    """A mark in a GPU's stream, after the copies that it was told of."""

    device: torch.device
    event: torch.cuda.Event

    def wait(self) -> None:
        """Return when they are made; in any thread, which has GPU 0, and a context there, until it says another."""
        import torch

        torch.cuda.set_device(self.device)
        self.event.synchronize()


def copy_to_host(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """Copy a tensor, in one piece; from a GPU by and by, in the order of its stream.

    Parameters
    ----------
    into : Tensor or None
        Host memory of its shape and type that was made here before; None: it is made, page-locked for a GPU.
    """
    if into is None:
        into = tensor.new_empty(tensor.shape, device="cpu", pin_memory=tensor.is_cuda)
    into.copy_(tensor.detach(), non_blocking=True)
    return into


def mark_copies(device: torch.device) -> Copied | None:
    """Mark where a GPU's current stream has come to; None for host memory, of which a copy is made at once."""
    if device.type != "cuda":
        return None
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return Copied(device, event)
