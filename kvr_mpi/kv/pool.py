"""The memory that keys and values lie in: of sequences, and of the layers of a prompt that is being prefilled.

Blocks of sequences are allocated, shared and freed by explicit reference counts.

On CPUs each block is a memory map of its own. On GPUs one attention call reads the rows of many sequences through a
table of pages. There, all blocks of heads of one size lie in one allocation, and each head's rows begin on a page
boundary, as in vLLM (Kwon et al., SOSP 2023, section 4). The pages of a block are contiguous; if those that are free
are not, blocks move together.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvr_mpi.model import LayerShape

# Rows of a page: flash attention requires a multiple of this.
PAGE_ROWS = 256
# Rows that are copied at a time when a block moves.
MOVED_ROWS = 1 << 14

Dims = tuple[int, int]


def pages_for(rows: int) -> int:
    """Return the number of pages that hold `rows` rows."""
    return -(-rows // PAGE_ROWS)


@dataclass(slots=True, eq=False)
class Block:
    """Rows of a layer, allocated together.

    keys, values : (rows, dim).
    row : in a paged pool: the first row's place in the whole allocation, at the beginning of a page; it changes if the
        block moves.
    holders : how many spans of sequences refer to it; it is freed with the last one.
    """

    pool: Pool
    keys: torch.Tensor
    values: torch.Tensor
    row: int = 0
    holders: int = 1

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def dims(self) -> Dims:
        """Elements of a key and of a value."""
        return self.keys.shape[1], self.values.shape[1]

    @property
    def pages(self) -> tuple[int, int]:
        """First page and number of pages in a paged pool."""
        return self.row // PAGE_ROWS, pages_for(len(self.keys))

    def hold(self) -> Block:
        self.pool.change_holders(self, 1)
        return self

    def release(self) -> None:
        """Remove a holder; without any, the rows are free."""
        self.pool.change_holders(self, -1)


class Pool:
    """The memory for the keys and values of a rank's sequences.

    layers : of the model.
    tokens : of a paged pool: rows for each head of the model; None: each block has its own memory.
    page_bytes : of a page for each head of the model.
    moves : how often blocks have moved, so that places noted before are wrong.

    Raises `MemoryError` or `torch.OutOfMemoryError` if there is no memory for it.
    """

    def __init__(
        self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, tokens: int | None = None
    ) -> None:
        self.dtype, self.device, self.is_paged = dtype, device, tokens is not None
        self.page_bytes = PAGE_ROWS * sum(shape.elements for shape in layers) * dtype.itemsize
        self.tokens, self.moves = PAGE_ROWS * pages_for(tokens or 0), 0
        self._lock = threading.Lock()  # ranks that are threads of a test may share a prefix
        self.blocks: set[Block] = set()
        # By the dimensions of keys and values: all rows, and of the blocks the first page and the number of pages.
        self.rows: dict[Dims, tuple[torch.Tensor, torch.Tensor]] = {}
        self._taken: dict[Dims, list[tuple[int, int]]] = {}
        heads = Counter[Dims]()
        for shape in layers:
            heads[shape.key_dim, shape.value_dim] += shape.num_kv_heads
        for dims, many in heads.items():
            if self.is_paged and many:
                rows = self.tokens * many + PAGE_ROWS  # the last page is a dummy for units without rows
                self.rows[dims] = keys, values = in_flat(make_flat(rows * sum(dims), dtype, device), rows, dims)
                self._taken[dims] = []
                for each in (keys, values):
                    each[-PAGE_ROWS:] = 0

    @property
    def nbytes(self) -> int:
        return self.tokens // PAGE_ROWS * self.page_bytes

    @property
    def taken_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def dummy_page(self, dims: Dims) -> int:
        """Page that no block has."""
        return len(self.rows[dims][0]) // PAGE_ROWS - 1

    def allocate(self, dims: Dims, rows: int) -> Block:
        """Allocate uninitialized rows, in whole pages if it is paged; the caller is the block's only holder.

        Raises `MemoryError` or `torch.OutOfMemoryError` if there is no memory for them.
        """
        if not self.is_paged:
            block = Block(self, *in_flat(make_flat(rows * sum(dims), self.dtype, self.device), rows, dims))
            with self._lock:
                self.blocks.add(block)
            return block
        with self._lock:  # until the block is listed: another thread might move blocks to pages that it does not see
            first = self._take(dims, pages_for(rows)) * PAGE_ROWS
            keys, values = (each[first : first + rows] for each in self.rows[dims])
            block = Block(self, keys, values, first)
            self.blocks.add(block)
        return block

    def change_holders(self, block: Block, change: int) -> None:
        with self._lock:
            assert block.holders > 0, "it is free already"
            block.holders += change
            if block.holders:
                return
            self.blocks.discard(block)
            if self.is_paged:
                self._taken[block.dims].remove(block.pages)

    def check_integrity(self, held: Iterable[Block]) -> None:
        """Check that free and taken rows add up, and that blocks have these holders, one for each time they are listed.

        Raises `AssertionError` with what is wrong.
        """
        holders = Counter(map(id, held))
        for block in self.blocks:
            expected = holders.pop(id(block), 0)
            assert block.holders == expected, (
                f"a block of {tuple(block.keys.shape)} has {block.holders} holders, {expected} of them known"
            )
        assert not holders, f"{len(holders)} blocks are in use after they were freed"
        for dims, taken in self._taken.items():
            of_blocks = sorted(block.pages for block in self.blocks if block.dims == dims)
            assert taken == of_blocks, f"taken pages {taken} are not those of the blocks: {of_blocks}"
            stop = 0
            for first, pages in taken:
                assert first >= stop, f"pages {first} to {stop} belong to two blocks"
                stop = first + pages
            assert stop <= self.dummy_page(dims), "the last page belongs to no block"

    def _take(self, dims: Dims, pages: int) -> int:
        """Take the first free run of pages; return its first page."""
        taken, total = self._taken[dims], self.dummy_page(dims)
        at, first = _first_free(taken, pages)
        if first + pages > total and pages <= total - sum(many for _, many in taken):
            self._compact(dims)
            at, first = _first_free(taken, pages)
        if first + pages > total:
            raise MemoryError(f"no {pages} pages of keys and values are free, of {total} in all")
        taken.insert(at, (first, pages))
        return first

    def _compact(self, dims: Dims) -> None:
        """Move the blocks to the beginning, so that free pages are adjacent."""
        to, self.moves = 0, self.moves + 1
        for block in sorted((block for block in self.blocks if block.dims == dims), key=lambda block: block.row):
            rows, capacity = len(block.keys), PAGE_ROWS * pages_for(len(block.keys))
            for each in self.rows[dims] if block.row != to else ():
                for at in range(0, rows, MOVED_ROWS):
                    some = slice(at, min(at + MOVED_ROWS, rows))
                    each[to:][some] = each[block.row :][some].clone()  # both may overlap
            block.row = to
            block.keys, block.values = (each[to : to + rows] for each in self.rows[dims])
            to += capacity
        self._taken[dims][:] = sorted(block.pages for block in self.blocks if block.dims == dims)


@dataclass(eq=False)
class LayerBuffers:
    """Buffers (capacity, elements of K and V of all heads) for the layers of one prompt on one rank.

    The few that are in flight are reused.

    elements : of K and V of all heads, in the largest layer.
    capacity : tokens a buffer holds.
    """

    elements: int
    capacity: int
    dtype: torch.dtype
    device: torch.device
    _free: list[tuple[torch.Tensor, Any]] = field(default_factory=list)  # with the event after which each is free

    def take(self, shape: LayerShape) -> tuple[torch.Tensor, Any]:
        """Return an uninitialized buffer for a layer; on a GPU also the event after which no earlier work uses it."""
        if not self._free:
            self._free.append((make_flat(self.capacity * self.elements, self.dtype, self.device), self._now()))
        flat, free = self._free.pop()
        return flat[: self.capacity * shape.elements].view(self.capacity, shape.elements), free

    def give_back(self, buffer: torch.Tensor) -> None:
        """Mark a buffer as free for reuse; on a GPU it is free when the work queued so far is done."""
        self._free.append((torch.as_strided(buffer, (self.capacity * self.elements,), (1,)), self._now()))

    def scratch(self, rows: int) -> torch.Tensor:
        """Allocate memory for `rows` rows of any layer, after freeing everything else."""
        self.clear()
        return torch.empty(rows * self.elements, dtype=self.dtype, device=self.device)

    def clear(self) -> None:
        """Drop all buffers; memory that no layer references goes back to the system."""
        self._free.clear()

    def _now(self) -> Any:
        """Record an event after the work queued so far; None on a CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


def make_flat(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialized tensor (count,); on a CPU a memory map, which goes back to the system when it is freed.

    Raises `MemoryError` or `torch.OutOfMemoryError` if there is no memory for it.
    """
    if device.type != "cpu" or not count:
        return torch.empty(count, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {count * dtype.itemsize} bytes for keys and values: {error}") from error
    return torch.frombuffer(memory, dtype=dtype)


def _first_free(taken: Sequence[tuple[int, int]], pages: int) -> tuple[int, int]:
    """Find the first free run of pages: its place among those taken, and its first page."""
    at = first = 0
    while at < len(taken) and taken[at][0] - first < pages:
        first, at = sum(taken[at]), at + 1
    return at, first


def in_flat(flat: torch.Tensor, rows: int, dims: Dims) -> tuple[torch.Tensor, torch.Tensor]:
    """View a flat tensor (elements,) as keys and values (rows, dim), all keys first."""
    keys, values = torch.split(flat, [rows * dim for dim in dims])
    return keys.view(rows, dims[0]), values.view(rows, dims[1])
