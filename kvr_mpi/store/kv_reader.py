"""Reader of stored keys and values: whatever ranks wrote a document's pieces, they are read as one.

Files may be damaged, foreign or hostile: links, types, shapes and the hash in the log are checked when a document is
opened, and the checksum of every block when it is read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import h5py
import numpy as np
import numpy.typing as npt

from kvr_mpi.disk import read_whole
from kvr_mpi.errors import ConfigError, DataError, counted
from kvr_mpi.store.hdf5 import (
    as_tensor,
    attribute_names,
    dataset_in,
    group_in,
    hdf5_errors,
    read_attribute,
    read_bits,
    size_bytes,
    type_name,
    where,
)
from kvr_mpi.store.kv import (
    BLOCK_TOKENS,
    HEADS,
    KINDS,
    ROWS,
    CachedTokens,
    Kept,
    KeysValues,
    Piece,
    block_digest,
    describe_layer,
    seal_piece,
)
from kvr_mpi.store.volumes import KV, key_of, open_volume
from kvr_mpi.topology import KVHeads

if TYPE_CHECKING:
    import torch

CHECKED_TOKENS = 1024  # read at once to check their digests
MAX_HEADS = 4096
LAYER_NAME = re.compile(r"layer_[0-9]{3,}", re.ASCII)
MEMBERS = {*KINDS, "digests", *ROWS}
# Keys and values are hardly compressible: a group that claims more than this multiple of the file's size is hostile.
MAX_INFLATION = 64
TOKENS_DIM, HEADS_DIM = 0, 1


class _Layer(NamedTuple):
    """A layer of a piece: datasets (tokens, kv_heads, head_dim), digests (blocks, 2), and what each head keeps.

    If each head keeps its own tokens, the datasets are (rows, 1, head_dim), and "tokens" below means rows.
    """

    keys: h5py.Dataset
    values: h5py.Dataset
    digests: npt.NDArray[np.int64]
    kept: Kept | None

    @property
    def tokens(self) -> int:
        return int(self.keys.shape[TOKENS_DIM])


_Layers = dict[int, _Layer]


class KVReader:
    """Reads a document's keys and values, of all tokens and heads; data are read on demand.

    Raises `DataError`, which begins with `name`, if a piece is damaged, or the pieces do not fit together.

    name : the document's id, for messages.
    pieces : of the document, in any order; none: nothing is stored.
    is_part : a single piece is read as it is, even if it is not a whole document.
    tokens : their tokens; None if the files do not record them.
    layers : indices of the layers that have keys and values, in order.

    Files are closed at the end of a ``with`` block, by `close`, or with the last reference to the reader.
    """

    def __init__(self, name: str, pieces: Sequence[Piece], *, is_part: bool = False) -> None:
        def open_all() -> tuple[list[list[_Layers]], CachedTokens | None, ExitStack]:
            files: dict[Path, h5py.Group] = {}
            found = []
            with ExitStack() as stack:
                for piece in pieces:
                    path = Path(piece.path)
                    with hdf5_errors(path):
                        if path not in files:
                            files[path] = group_in(stack.enter_context(open_volume(path)), KV)
                        found.append(_open_piece(files[path], piece))
                grid, tokens = ([[found[0][1]]], found[0][0]) if is_part else _join(name, found)
                return grid, tokens, stack.pop_all()

        self._name = name
        # Rows of pieces follow each other as the slices do; the pieces of a row have the same tokens, and the KV heads
        # of a tensor-parallel group's ranks, in order.
        self._grid, self.tokens, self._files = read_whole(open_all, Path(pieces[0].path if pieces else name))
        self.layers = tuple(self._grid[0][0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        self._files.close()

    @property
    def compression(self) -> str:
        """Method and settings of compression; empty if all tokens are kept."""
        return "" if self.tokens is None else self.tokens.compression

    def kept(self, layer: int) -> Kept | None:
        """Return the positions of the tokens that each head of a layer keeps; None unless it is compressed."""
        return None if self.tokens is None else self.tokens.kept.get(layer)

    def refuse_compressed(self, what: str) -> None:
        """Raise `ConfigError` if the keys and values are compressed, which `what` cannot use."""
        if self.compression:
            raise ConfigError(
                f"{self._name!r} has compressed keys and values ({self.compression}), whose heads keep different "
                f"tokens; {what} needs whole ones: use kvr ask, or prefill it again without [compress]"
            )

    def format(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        """Return the shapes (tokens, kv_heads, head_dim) of a layer's keys and values, and their dtype.

        If each head keeps its own tokens, the shapes are (rows, 1, head_dim).
        """
        rows = self._of_layer(layer)
        tokens, some = sum(row[0].tokens for row in rows), rows[0][0]
        heads = sum(piece.keys.shape[HEADS_DIM] for piece in rows[0]) if some.kept is None else 1
        keys, values = ((tokens, heads, *array.shape[2:]) for array in (some.keys, some.values))
        return keys, values, type_name(some.keys)

    def read(
        self, layer: int, first: int = 0, last: int | None = None, heads: tuple[int, int] | None = None
    ) -> KeysValues:
        """Read a layer's keys and values of a range of tokens, without conversion, each (tokens, kv_heads, head_dim).

        Only pieces that overlap the range are read. Raises `DataError` if a block is damaged, or the dtype is not one
        that keys and values have.

        layer : one of `layers`.
        first, last : range of tokens, or of rows if each head keeps its own tokens. `last` is exclusive; None: to the
            end.
        heads : range of KV heads, the last exclusive; None: all. Not for layers where each head keeps its own tokens.
        """
        grid = self._of_layer(layer)
        assert heads is None or grid[0][0].kept is None, "some heads of a compressed layer are read by their rows"
        tokens = sum(row[0].tokens for row in grid)
        stop, at, found = tokens if last is None else last, 0, []
        if not 0 <= first <= stop <= tokens:
            raise DataError(f"layer {layer} has {tokens} tokens; {first} to {stop} were requested")
        for row in grid:
            start, end = max(first - at, 0), min(stop - at, row[0].tokens)
            if start < end:
                found.append(_read_row(row, start, end, heads))
            at += row[0].tokens
        return _concatenated(found or [_read_row(grid[0], 0, 0, heads)], TOKENS_DIM)

    def check(self) -> None:
        """Verify all checksums, a few blocks at a time; raises `DataError`."""
        for layers in itertools.chain.from_iterable(self._grid):
            _check(layers)

    def _of_layer(self, layer: int) -> list[list[_Layer]]:
        """Return the pieces of a layer; of a compressed one in a column, since its heads follow each other."""
        rows = [[layers[layer] for layers in row] for row in self._grid]
        return rows if rows[0][0].kept is None else [[one] for one in rows[0]]


def read_prompt(pieces: Sequence[Piece]) -> CachedTokens | None:
    """Read the tokens of a document, without its keys and values; None if they are not recorded.

    `KVReader` verifies them later, which takes ten times as long. Raises `DataError`.
    """

    def read() -> CachedTokens | None:
        prompts = []
        for piece in pieces:
            with open_volume(Path(piece.path)) as file:
                prompts.append(_read_ids(group_in(group_in(file, KV), key_of(piece.id))))
        return max(filter(None, prompts), key=lambda one: len(one.ids), default=None)

    return read_whole(read, Path(pieces[0].path if pieces else "."))


def check_pieces(path: Path, pieces: Iterable[Piece]) -> dict[Piece, str]:
    """Verify all checksums of pieces in a volume; return the damaged ones, with the damage.

    Raises `DataError` if the whole file is damaged, and other errors of `read_whole`.
    """

    def check() -> dict[Piece, str]:
        damaged: dict[Piece, str] = {}
        with open_volume(path) as file:
            kv = group_in(file, KV)
            for piece in pieces:
                try:
                    with hdf5_errors(path):
                        _check(_open_piece(kv, piece)[1])
                except DataError as error:
                    damaged[piece] = str(error)
        return damaged

    return read_whole(check, path)


def _open_piece(parent: h5py.Group, piece: Piece) -> tuple[CachedTokens | None, _Layers]:
    """Open a piece in ``/kv``; raises `DataError` if it differs from what was written, according to the log."""
    kv = group_in(parent, key_of(piece.id))
    place, file_bytes = where(kv), kv.file.id.get_filesize()
    layers = _open_layers(kv)
    tokens = _read_tokens(kv, layers)
    size = sum(size_bytes(layer.keys) + size_bytes(layer.values) for layer in layers.values())
    if size != piece.bytes:
        raise DataError(f"{place} has {size} bytes; the log announces {piece.bytes}")
    if seal_piece(tokens, [describe_layer(number, *layer) for number, layer in layers.items()]) != piece.sha256:
        raise DataError(f"{place} is damaged: its description differs from what was written (checksum)")
    if size > MAX_INFLATION * file_bytes:
        raise DataError(f"{place} has {size} bytes in a file of {file_bytes}, which cannot be real data")
    return tokens, layers


def _open_layers(kv: h5py.Group) -> _Layers:
    """Open the layers, in the order of their numbers."""
    block = read_attribute(kv, "block_tokens", int)
    if block != BLOCK_TOKENS:
        raise DataError(f"{where(kv)} has blocks of {block} tokens; expected {BLOCK_TOKENS}")
    found: _Layers = {}
    for name in kv:
        if name == "token_ids":
            continue
        if not LAYER_NAME.fullmatch(name):
            raise DataError(f"{where(kv)}/{name} is not a layer; expected layer_000, ...")
        layer = group_in(kv, name)
        if strange := {*layer} - MEMBERS:
            raise DataError(f"{where(layer)} has unknown members: {', '.join(sorted(strange)[:5])}")
        keys, values = (dataset_in(layer, kind, "f", (3,)) for kind in KINDS)
        digests = dataset_in(layer, "digests", "i", (2,))
        expected = (-(-max(keys.shape[0], values.shape[0]) // BLOCK_TOKENS), len(KINDS))
        if digests.shape != expected or keys.shape[0] != values.shape[0]:
            raise DataError(
                f"{where(layer)}: keys {keys.shape}, values {values.shape}, digests {digests.shape} do not match"
            )
        number = int(name.removeprefix("layer_"))
        found[number] = _Layer(keys, values, digests[()], read_kept(layer, keys.shape))
    return dict(sorted(found.items()))


def read_kept(layer: h5py.Group, shape: tuple[int, ...]) -> Kept | None:
    """Read which tokens each head of a layer keeps; None if all heads keep the same tokens.

    Raises `DataError` if the rows do not match the `shape` of the keys, or the positions of a head do not ascend.
    """
    if not any(name in layer for name in ROWS):
        return None
    counts, positions = dataset_in(layer, ROWS[0], "i", (1,)), dataset_in(layer, ROWS[1], "i", (1,))
    if counts.shape[0] > MAX_HEADS or positions.shape != shape[:1] or shape[1] != 1 or positions.dtype != np.int32:
        raise DataError(
            f"{where(layer)}: rows of {counts.shape[0]} heads, positions {positions.shape} {positions.dtype} and keys "
            f"{shape} do not match"
        )
    each = counts[()].tolist()
    if not each or min(each) < 1 or sum(each) != shape[0]:
        raise DataError(f"{where(layer)}: heads of {each[:8]} rows and more do not add up to {shape[0]}")
    stops = list(itertools.accumulate(each))
    found = tuple(np.split(positions[()], stops[:-1]))
    for own, stop in zip(found, stops, strict=True):
        if own[0] < 0 or not bool((np.diff(own) > 0).all()):
            raise DataError(f"{where(layer)}: rows {stop - len(own)} to {stop} are not in ascending order of tokens")
    return found


def _read_tokens(kv: h5py.Group, layers: _Layers) -> CachedTokens | None:
    """Read the tokens that the keys and values belong to, and which heads keep them."""
    place, tokens = where(kv), _read_ids(kv)
    kept = {number: layer.kept for number, layer in layers.items() if layer.kept is not None}
    longest = max((layer.tokens for layer in layers.values() if layer.kept is None), default=0)
    longest = max([longest, *(1 + int(own[-1]) for heads in kept.values() for own in heads)])
    compression = "" if tokens is None else tokens.compression
    if tokens is not None:
        if not tokens.first <= len(tokens.ids) <= tokens.first + longest:
            raise DataError(f"{place} has {len(tokens.ids)} tokens, and {longest} keys from {tokens.first} on")
        tokens = replace(tokens, kept=kept, heads=_read_heads(kv, layers))
    elif attribute_names(kv) & {*HEADS, "compression"}:
        raise DataError(f"{place} has some of the KV heads or tokens, but does not record the tokens")
    if bool(compression) != bool(kept) or (kept and (tokens is None or tokens.first or longest != len(tokens.ids))):
        raise DataError(
            f"{place} says {compression or 'no compression'!r}, has {counted(len(kept), 'layer')} whose heads keep "
            f"their own tokens, up to token {longest}: these do not match"
        )
    return tokens


def _read_ids(kv: h5py.Group) -> CachedTokens | None:
    """Read the ids of the tokens of a piece, the bounds of the text, and how it is compressed; None without ids."""
    if "token_ids" not in kv:
        return None
    names = attribute_names(kv)
    ids = dataset_in(kv, "token_ids", "i", (1,))
    text = read_attribute(kv, "text_start", int), read_attribute(kv, "text_stop", int)
    first = read_attribute(kv, "first_token", int) if "first_token" in names else 0
    if not 0 <= first <= ids.shape[0] or not 0 <= text[0] <= text[1] <= ids.shape[0]:
        raise DataError(f"{where(kv)} has {ids.shape[0]} tokens from {first} on, text from {text[0]} to {text[1]}")
    compression = read_attribute(kv, "compression", str) if "compression" in names else ""
    return CachedTokens(tuple(ids[()].tolist()), text, first, compression)


def _read_heads(kv: h5py.Group, layers: _Layers) -> KVHeads | None:
    """Read which KV heads a piece has: an even share of all heads, in every layer; None for all."""
    if not attribute_names(kv) & {*HEADS}:
        return None
    heads = KVHeads(*(read_attribute(kv, name, int) for name in HEADS))
    told = f"{where(kv)} has the KV heads from {heads.first} to {heads.last}"
    if not 0 <= heads.first < heads.last <= heads.of <= MAX_HEADS or not heads.is_even_share:
        raise DataError(f"{told} of {heads.of}; expected an even share")
    counts = {layer.keys.shape[HEADS_DIM] if layer.kept is None else len(layer.kept) for layer in layers.values()}
    if counts != {heads.last - heads.first}:
        raise DataError(f"{told}, and its layers have others")
    return heads


def _join(
    name: str, found: Sequence[tuple[CachedTokens | None, _Layers]]
) -> tuple[list[list[_Layers]], CachedTokens | None]:
    """Arrange pieces in rows by tokens, each by heads; also return the tokens of the whole document.

    Raises `DataError` if tokens or heads are missing, or the pieces have different prompts, layers or dtypes.
    """
    if not found:
        return [[{}]], None
    known = [(tokens, layers) for tokens, layers in found if tokens is not None]
    if len(found) == 1 and not any(tokens.first or tokens.heads is not None for tokens, _ in known):
        return [[found[0][1]]], found[0][0]
    if len(known) != len(found):
        raise DataError(f"{name}: its keys and values are in pieces that do not record their tokens")
    known.sort(key=lambda one: (one[0].first, 0 if one[0].heads is None else one[0].heads.first))
    rows = [[*row] for _, row in itertools.groupby(known, key=lambda one: (one[0].first, len(one[0].ids)))]
    whole, like = rows[-1][-1]
    starts, stops = [row[0][0].first for row in rows], [len(row[0][0].ids) for row in rows]
    if starts != [0, *stops[:-1]]:
        raise DataError(
            f"{name}: its keys and values begin at the tokens {starts} and end at {stops}; some are missing"
        )
    for tokens, layers in known:
        about, count = f"{name}: its keys and values from token {tokens.first} on", len(tokens.ids) - tokens.first
        if list(tokens.ids) != list(whole.ids[: len(tokens.ids)]) or tokens.compression != whole.compression:
            raise DataError(f"{about} belong to another prompt")
        for here, there in itertools.zip_longest(_kinds(layers), _kinds(like)):
            if here != there:
                raise DataError(f"{about} have the layer {here}; expected {there}")
        if wrong := [each.tokens for each in layers.values() if each.kept is None and each.tokens != count]:
            raise DataError(f"{about} have {wrong[0]} tokens; expected {count}")
    for row in rows:
        heads: list[KVHeads | None] = [tokens.heads for tokens, _ in row]
        if heads != ([None] if heads[0] is None else list(heads[0].shares)):
            raise DataError(f"{name}: KV heads are missing for its tokens from {row[0][0].first} on")
    kept = {
        number: tuple(itertools.chain.from_iterable(tokens.kept[number] for tokens, _ in rows[0]))
        for number in whole.kept
    }
    return [[layers for _, layers in row] for row in rows], replace(whole, first=0, heads=None, kept=kept)


def _kinds(layers: _Layers) -> list[tuple[Any, ...]]:
    """Return what the layers of all pieces have in common: number, shapes of a token, dtypes, whether compressed."""
    return [
        (number, *(one.shape[1:] for one in layer[:2]), *map(type_name, layer[:2]), layer.kept is not None)
        for number, layer in layers.items()
    ]


def _read_row(row: Sequence[_Layer], first: int, last: int, heads: tuple[int, int] | None) -> KeysValues:
    """Read some tokens and heads of adjacent pieces; digests cover all heads of a piece."""
    found, at = [], 0
    for layer in row:
        count = layer.keys.shape[HEADS_DIM]
        start, end = (0, count) if heads is None else (max(heads[0] - at, 0), min(heads[1] - at, count))
        if start < end:
            keys, values = (read_checked(layer, column, first, last)[:, start:end] for column in range(len(KINDS)))
            found.append((keys, values))
        at += count
    return _concatenated(found, HEADS_DIM)


def _concatenated(parts: Sequence[KeysValues], dim: int) -> KeysValues:
    if len(parts) == 1:
        return parts[0]
    import torch

    keys, values = (torch.cat(each, dim) for each in zip(*parts, strict=True))
    return keys, values


def read_checked(layer: _Layer, column: int, first: int, last: int) -> torch.Tensor:
    """Read a range of tokens of keys (column 0) or values (1), and verify the blocks that contain them."""
    dataset, block = (layer.keys, layer.values)[column], BLOCK_TOKENS
    start, stop = first // block * block, min(-(-last // block) * block, layer.tokens)
    path = Path(dataset.file.filename)

    def read() -> npt.NDArray[Any]:
        with hdf5_errors(path):
            return read_bits(dataset, start, stop)

    bits = read_whole(read, path)
    for at in range(start, stop, block):
        if block_digest(bits[at - start : at - start + block]) != layer.digests[at // block, column]:
            raise DataError(
                f"{where(dataset)} is damaged: tokens {at} to {min(at + block, layer.tokens)} differ from what was "
                f"written (checksum)"
            )
    return as_tensor(dataset, bits[first - start : last - start])


def _check(layers: _Layers) -> None:
    """Verify all checksums of a piece."""
    for layer in layers.values():
        for column, start in itertools.product(range(len(KINDS)), range(0, layer.tokens, CHECKED_TOKENS)):
            read_checked(layer, column, start, min(start + CHECKED_TOKENS, layer.tokens))
