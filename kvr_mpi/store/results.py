"""Reader of results for Python and the commands: records, tables, keys and values.

The checksum of each record is verified when it is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import ConfigError, DataError
from kvr_mpi.store.cost import Cost
from kvr_mpi.store.folder import Index, Place, open_document, read_records
from kvr_mpi.store.head_rows import refuse_compressed
from kvr_mpi.store.log import Header
from kvr_mpi.store.record import STATUSES, Record
from kvr_mpi.store.run import read_run_file
from kvr_mpi.store.shares import find_runs, index_runs, read_header_of, tell_missing
from kvr_mpi.store.stored_kv import KeysValues, StoredKV

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import torch
    import transformers

NAMED = 3  # maximum number of ids in a message


@dataclass(frozen=True, slots=True)
class DocumentKV:
    """The stored keys and values of a document.

    layers : by number, keys and values, each (tokens, kv_heads, head_dim), in the model's dtype, on the CPU.
    token_ids : their tokens: the prompt, and all but the last new token; None if the file does not record them.
    text : bounds of the document's text in `token_ids`; None likewise.
    """

    layers: Mapping[int, KeysValues]
    token_ids: tuple[int, ...] | None
    text: tuple[int, int] | None

    @property
    def tokens(self) -> int:
        """Number of tokens in the largest layer; layers with windows may have fewer."""
        return max(len(keys) for keys, _ in self.layers.values())

    def to_cache(self, model: transformers.PreTrainedModel) -> transformers.DynamicCache:
        """Make a transformers cache for ``generate``; pass it `token_ids` followed by new tokens.

        The model must be the one that computed the keys and values: the first tokens are recomputed and compared.

        Raises
        ------
        ConfigError
            If the model is another one, some of its layers are missing, or a layer does not have all tokens.
        """
        from kvr_mpi.model.cache import to_cache

        return to_cache(self.layers, self.token_ids, model)

    def numpy(self) -> dict[int, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Return the layers as numpy arrays; bfloat16 is converted to float32, which is lossless."""
        return {number: (_array(keys), _array(values)) for number, (keys, values) in self.layers.items()}


@dataclass(frozen=True, slots=True)
class Results:
    """The documents of a run, or of the shares of an array, each once. Use `open_results` to create it.

    Iteration yields records in the order of their ids. Only the locations of documents are kept in memory.

    paths : files and folders of the results.
    header : settings that all answers depend on, and the model's name, architecture and dtype.
    missing : descriptions of missing shares and documents; always empty unless opened with `partial`.
    left : number of documents of a single run without a record; None if not known.
    index : location of each document.
    """

    paths: tuple[Path, ...]
    header: Header
    missing: tuple[str, ...]
    left: int | None
    index: Index = field(repr=False)

    def __len__(self) -> int:
        return len(self.index.places)

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def __contains__(self, document_id: object) -> bool:
        return document_id in self.index.places

    def __getitem__(self, document_id: str) -> Record:
        """Read one document.

        Raises
        ------
        ConfigError
            If no document has this id.
        DataError
            If the record is damaged.
        """
        self.place(document_id)
        (record,) = read_records(self.index, [document_id])
        return record

    def __str__(self) -> str:
        found = self.index.summary()
        where = str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths)} runs"
        left = f", {self.left} left" if self.left else ""
        gone = f"; {tell_missing(self.missing)}" if self.missing else ""
        return f"{found.done} done, {found.failed} failed{left} in {where}{gone}"

    @property
    def cost(self) -> Cost:
        """Cost of the run so far: node, GPU and core seconds, and joules if they could be read."""
        return self.index.cost

    @property
    def software(self) -> dict[str, str]:
        """Versions of the software that produced the newest results."""
        return self.header.software

    @property
    def columns(self) -> list[str]:
        """Columns that jobs copied from the documents' rows to the records.

        Raises
        ------
        DataError
            If the header does not name them as a list.
        """
        columns = self.header.identity.get("columns", [])
        if not isinstance(columns, list):
            raise DataError(f"{self.paths[0]}: its header names {columns!r} as columns; expected a list")
        return list(map(str, columns))

    def ids(self, status: str | None = None) -> list[str]:
        """Sorted ids, of all documents or of those with status ``done`` or ``error``."""
        if status is not None and status not in STATUSES:
            raise ConfigError(f"status {status!r}: expected one of {', '.join(map(repr, STATUSES))}, or None for all")
        return self.index.ids(status)

    def records(self, status: str | None = None, where: Callable[[Record], bool] | None = None) -> Iterator[Record]:
        """Iterate over records, sorted by id.

        Parameters
        ----------
        status : str, optional
            ``done`` or ``error``: only these.
        where : callable, optional
            Only records for which it returns true.

        Raises
        ------
        DataError
            If a record is damaged; those before it are valid.
        """
        found = read_records(self.index, self.ids(status))
        return found if where is None else filter(where, found)

    def to_pandas(self, status: str | None = None, where: Callable[[Record], bool] | None = None) -> pandas.DataFrame:
        """Return a DataFrame of `records`, one row each.

        Raises
        ------
        ConfigError
            If pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(
                "a table needs pandas: `pip install pandas`; or iterate over the records instead"
            ) from error
        rows = [{**record.as_dict(), "coverage": record.coverage} for record in self.records(status, where)]
        return pandas.DataFrame(rows, columns=[*(spec.name for spec in fields(Record)), "coverage"])

    def kv(self, document_id: str, layers: Collection[int] | None = None) -> DocumentKV:
        """Read a document's keys and values, and verify all checksums.

        Parameters
        ----------
        layers : collection of int, optional
            Only these; default: all.

        Raises
        ------
        ConfigError
            If there is no such document or layer, or the document has no keys and values, or compressed ones.
        DataError
            If the data are damaged.
        """
        with self.open(document_id) as (_, kv):
            refuse_compressed(kv.compression, document_id, "Results.kv()")
            if not kv.layers:
                raise ConfigError(
                    f"document {document_id!r} has no keys and values: its run had output.kv = false, it failed, or "
                    f"they were pruned"
                )
            wanted = kv.layers if layers is None else layers
            if strange := set(wanted) - {*kv.layers}:
                raise ConfigError(
                    f"document {document_id!r} has no keys and values of layer {min(strange)}; it has those of "
                    f"{len(kv.layers)}, {min(kv.layers)} to {max(kv.layers)}"
                )
            read, known = {number: kv.read(number) for number in sorted(wanted)}, kv.tokens
        return DocumentKV(read, None if known is None else tuple(known.ids), None if known is None else known.text)

    @contextmanager
    def open(self, document_id: str) -> Iterator[tuple[Record, StoredKV]]:
        """Open a document's record, with keys and values that are read on demand, for the duration of the block.

        Raises
        ------
        ConfigError
            If no document has this id.
        DataError
            If the document is damaged.
        """
        self.place(document_id)
        with open_document(self.index, document_id) as found:
            yield found

    def place(self, document_id: str) -> Place:
        """Locate a document.

        Raises
        ------
        ConfigError
            If no document has this id; the message lists the most similar ids.
        """
        places = self.index.places
        if document_id not in places:
            close = difflib.get_close_matches(str(document_id), places, NAMED)
            some = [*dict.fromkeys([*close, *sorted(places)])][:NAMED]
            raise ConfigError(
                f"no document {document_id!r} in {self}; it has, for example, {', '.join(map(repr, some))}"
            )
        return places[document_id]


def open_results(*paths: str | PathLike[str], verify: bool = True, partial: bool = False) -> Results:
    """Open the results of a job.

    Parameters
    ----------
    *paths : path
        A result file, the output folder of a run (also while it runs: `Results.left`), or a folder of such folders
        (the shares of an array); several paths are combined.
    verify : bool
        Verify the checksums of all records, keys and values now; they are verified in any case when data are
        read.
    partial : bool
        Open the results even if shares or documents are missing (`Results.missing` lists them).

    Raises
    ------
    DataError
        If there is nothing to read, a file is damaged, the runs belong to different jobs, a document is in two of
        them, or, unless `partial`, shares or documents are missing.
    """
    if not paths:
        raise ConfigError("open_results() needs at least one path: a result file or the output folder of a run")
    runs = find_runs([Path(path) for path in paths])
    index, missing = index_runs(runs, verify=verify)
    if verify:
        for _ in read_records(index, index.ids()):
            pass
    if missing and not partial:
        raise DataError(f"{tell_missing(missing)}; partial=True opens the data that exist")
    run = read_run_file(runs.paths[0]) if len(runs.paths) == 1 else None
    left = None if run is None else len(set(run.wanted) - index.places.keys())
    return Results(runs.paths, read_header_of(runs.paths), missing, left, index)


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    import torch

    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
