"""Writing while the ranks compute: a thread writes records to the log, and keys and values to volumes.

A record is on the disk within `SYNC_S`. It counts once the keys and values it needs are durable: when their volume is
closed, synced and listed in the log. HDF5 writes, checksums and syncs release the GIL, so that computation continues
meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvr_mpi.errors import WriteError
from kvr_mpi.events import Events
from kvr_mpi.model.devices import copy_to_host
from kvr_mpi.store.cost import Cost
from kvr_mpi.store.kv import CachedTokens, KeysValues, piece_id, piece_ids
from kvr_mpi.store.kv_writer import KVWriter
from kvr_mpi.store.lock import session_of
from kvr_mpi.store.log import LINE_BYTES, Header, LogWriter, seal
from kvr_mpi.store.record import Record, record_values
from kvr_mpi.store.volumes import volume_line

if TYPE_CHECKING:
    import torch

SYNC_S = 1.0  # records are synced this long after the first unsynced record was written
COST_S = 60.0  # interval between writes of a rank's cost; a killed job loses at most this much of it
# A volume is closed this long after its first keys and values, or at this size. A job that is killed loses at most a
# minute and, when it is young, a tenth of its age; an old job 2% of it, or the number of files would grow for ever.
VOLUME_S, LEAST_VOLUME_S, AGE_SHARE, OLD_SHARE = 60.0, 1.0, 0.1, 0.02
VOLUME_BYTES = 1 << 30
MARGIN_BYTES = 256 << 10  # free space below which nothing more is written, so that what was written can be completed
IN_FLIGHT_BYTES = 512 << 20  # limit of keys and values in the queue; beyond it `write` blocks


def volume_s(age_s: float) -> float:
    """Return the time after which a job of this age closes a volume."""
    return min(max(LEAST_VOLUME_S, AGE_SHARE * age_s), max(VOLUME_S, OLD_SHARE * age_s))


class ResultWriter:
    """Writes one rank's results.

    Once something could not be written, every call raises `WriteError`; data that were already durable stay.

    header : the first line of the log.
    session : number of the job; by default the job that holds the folder.
    events : get a span for every written document and every completed volume.
    cost : returns this rank's cost so far; called once a minute in another thread, if this rank has written a record.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        header: Header,
        session: int | None = None,
        *,
        events: Events | None = None,
        cost: Callable[[], Cost] | None = None,
    ) -> None:
        self._cost, self._cost_s = cost, math.inf if cost is None else time.monotonic() + COST_S
        self._last_cost: Cost | None = None
        self._events = Events() if events is None else events
        self._folder = folder
        session = session_of(folder) if session is None else session
        self._name = f"kv-{session:04d}-{rank:04d}"
        self._log = LogWriter(folder, session, rank, header)
        self._sync_s: float | None = None  # when the log must be synced
        self._volume: KVWriter | None = None
        self._due_s = math.inf  # when the volume must be completed
        self._count, self._began_s = 0, time.monotonic()
        self._document: tuple[Record, CachedTokens | None] = Record("", ""), None  # of `writing_piece`
        self._layer, self._is_dropped = 0, False
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._room, self._waiting_bytes = threading.Condition(), 0
        self._error: Exception | None = None
        self._free = ""  # free space at the time of the error
        self._is_stopped = False
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

        `layers` has each layer's keys and values (tokens, kv_heads, head_dim), on any device, or None; they are copied,
        so they may change afterwards. `tokens` are their tokens. Without `has_record` another rank writes the record.
        """
        with self.writing_piece(record, tokens, has_record=has_record):
            for layer in layers:
                self.add_layer(layer)

    @contextlib.contextmanager
    def writing_piece(self, record: Record, tokens: CachedTokens | None, *, has_record: bool = False) -> Iterator[Self]:
        """Add keys and values layer by layer (`add_layer`), as `write` does; nothing else may be written meanwhile.

        If the block raises, or calls `drop`, the layers are discarded.
        """
        self._check()
        self._document, self._layer, self._is_dropped = (record, tokens), 0, False
        began_s = time.perf_counter()
        try:
            yield self
        except BaseException:
            self.drop()
            raise
        finally:
            self._tasks.put(partial(self._end, record, tokens, has_record, self._is_dropped, began_s))

    def add_layer(self, layer: KeysValues | None) -> None:
        """Add a layer's keys and values (tokens, kv_heads, head_dim), on any device, or None if it has none.

        They are copied, so they may change afterwards.
        """
        if layer is not None:
            size = sum(tensor.numel() * tensor.element_size() for tensor in layer)
            with self._room:
                self._room.wait_for(lambda: self._waiting_bytes == 0 or self._waiting_bytes + size <= IN_FLIGHT_BYTES)
                self._waiting_bytes += size
            self._tasks.put(partial(self._add_layer, *self._document, self._layer, copy_to_host(*layer), size))
        self._layer += 1

    def drop(self) -> None:
        """Discard the document of `writing_piece`."""
        self._is_dropped = True

    def end_with(self, cost: Cost) -> None:
        """Set this rank's total cost, which `close` writes."""
        self._last_cost = cost

    def flush(self) -> None:
        """Wait until everything written is durable."""
        reached = threading.Event()
        self._tasks.put(self._settle)
        self._tasks.put(reached.set)
        while self._thread.is_alive() and not reached.wait(1):
            pass
        self._check()

    def close(self) -> None:
        """Flush everything, and end the thread."""
        if self._thread.is_alive():
            self._tasks.put(self._stop)
            self._thread.join()
        self._check()

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
        while not self._is_stopped:
            try:
                with contextlib.suppress(queue.Empty):
                    self._tasks.get(timeout=self._wait_s())()
                self._end_what_is_due()
            except Exception as error:
                self._free = self._free or self._space()  # before the unfinished volume makes room again
                self._error = self._error or error
                self._give_up()
        with contextlib.suppress(OSError):
            self._log.close()

    def _wait_s(self) -> float | None:
        """Return the time until the volume, the cost or the log is due; None if nothing is."""
        due = [self._sync_s] if self._sync_s is not None else []
        due += [self._due_s] if self._volume is not None and not self._volume.is_writing else []
        due += [self._cost_s] if self._cost is not None else []
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _add_layer(
        self,
        record: Record,
        tokens: CachedTokens | None,
        number: int,
        layer: Callable[[], Sequence[torch.Tensor]],
        size_bytes: int,
    ) -> None:
        try:
            if self._error is None:
                keys, values = layer()
                self._check_space(size_bytes)
                volume = self._volume = self._volume or self._open()
                if not volume.is_writing:
                    volume.begin(piece_id(record, tokens), tokens)
                volume.add(number, (keys, values))
        finally:
            with self._room:  # a blocked `add_layer` continues
                self._waiting_bytes -= size_bytes
                self._room.notify_all()

    def _end(
        self, record: Record, tokens: CachedTokens | None, has_record: bool, is_dropped: bool, began_s: float
    ) -> None:
        """Complete a document, or discard its layers."""
        if self._error is not None:
            return
        volume = self._volume if self._volume is not None and self._volume.is_writing else None
        if volume is not None:
            (volume.discard if is_dropped else volume.end)()
        if has_record and not is_dropped:
            self._add_record(record, () if volume is None else piece_ids(record, tokens))
        self._events.end("write", began_s)

    def _add_record(self, record: Record, pieces: Sequence[str]) -> None:
        line = seal(record_values(record, pieces))
        if len(line) > LINE_BYTES:
            error = f"its record has {len(line)} bytes; no more than {LINE_BYTES} can be stored"
            line = seal(record_values(Record(record.id, "error", error=error), ()))
        self._check_space(len(line))
        self._log.write(line)
        self._sync_s = self._sync_s or time.monotonic() + SYNC_S

    def _open(self) -> KVWriter:
        path = self._folder / f"{self._name}-{self._count:05d}.h5"
        self._count += 1
        now = time.monotonic()
        self._due_s = now + volume_s(now - self._began_s)
        return KVWriter(path)

    def _check_space(self, size_bytes: int) -> None:
        if shutil.disk_usage(self._folder).free < size_bytes + MARGIN_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _end_what_is_due(self) -> None:
        """Close the volume and sync the log when they are old or large enough."""
        now, volume = time.monotonic(), self._volume
        if volume is not None and not volume.is_writing:
            if now > self._due_s or volume.file_bytes > VOLUME_BYTES:
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
        """Complete the volume, and list it."""
        volume, began_s = self._volume, time.perf_counter()
        if volume is None or self._error is not None:
            return
        if volume.pieces:
            volume.finish()
            self._log.write(volume_line(volume.path, volume.pieces))
            self._volume = None  # listed now: it stays even if the log cannot be synced
            self._sync()
        else:
            volume.abandon()
        self._volume = None
        self._events.end("write", began_s)

    def _settle(self) -> None:
        """Make everything durable."""
        self._end_volume()
        self._sync()

    def _stop(self) -> None:
        self._is_stopped = True
        self._end_volume()
        if self._last_cost is not None:
            self._add_cost(self._last_cost)
        self._sync()

    def _sync(self) -> None:
        self._sync_s = None
        self._log.sync()

    def _give_up(self) -> None:
        """Remove the unfinished volume to free its space."""
        self._sync_s = None
        volume, self._volume = self._volume, None
        if volume is not None:
            volume.abandon()
