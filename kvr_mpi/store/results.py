"""Reader of results for Python and the commands: records, tables, keys and values.

The checksum of each record is verified when it is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvr_mpi.disk import VOLUME_NAME, is_folder, is_output_folder, names_in, read_whole, stat_of
from kvr_mpi.errors import ConfigError, DataError, MissingError, choices, counted
from kvr_mpi.store.cost import Cost, total_cost
from kvr_mpi.store.folder import Survey, has_results, survey
from kvr_mpi.store.kv import KeysValues, Piece
from kvr_mpi.store.kv_reader import KVReader
from kvr_mpi.store.log import Header, is_sealed
from kvr_mpi.store.parts import check_corpus, check_same_job, find_part, find_runs, tell_missing
from kvr_mpi.store.places import Place, Places, Records
from kvr_mpi.store.record import COMPUTED, KINDS, Record, read_record
from kvr_mpi.store.run import read_run_file
from kvr_mpi.store.summary import Summary
from kvr_mpi.store.volumes import Source, open_source

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import torch
    import transformers

NAMED = 3  # maximum number of ids in a message
OPEN_FILES = 64
READ_BYTES = 16 << 20  # of records, read at once


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
    places : location of each document, by id.
    missing : descriptions of missing shares and documents; always empty unless opened with `partial`.
    left : number of documents of a single run without a record; None if not known.
    gone : documents whose keys and values no longer exist.
    unreadable : documents whose keys and values are in a damaged file, with the damage.
    damaged : damaged files, with the damage; their contents are skipped.
    costs : cost of each rank in each session.
    """

    paths: tuple[Path, ...]
    header: Header
    places: Places = field(repr=False)
    missing: tuple[str, ...] = ()
    left: int | None = None
    gone: set[str] = field(default_factory=set)
    unreadable: dict[str, str] = field(default_factory=dict)
    damaged: dict[Path, str] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Survey) -> Self:
        """Return the documents of a run; none if nothing is stored yet."""
        places, gone, unreadable = found.locate()
        damaged = {Path(piece.path): why for piece, why in found.spoilt.items()}
        damaged |= {found.folder / name: why for name, why in found.damaged.items()}
        header = next(reversed(found.headers.values()), Header({}, {}))
        return cls(
            (found.folder,), header, places, gone=gone, unreadable=unreadable, damaged=damaged, costs=found.costs
        )

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def __contains__(self, document_id: object) -> bool:
        return document_id in self.places

    def __getitem__(self, document_id: str) -> Record:
        """Read one document; raises `ConfigError` if no document has this id, `DataError` if the record is damaged."""
        self.place(document_id)
        (record,) = self.read([document_id])
        return record

    def __str__(self) -> str:
        found = self.summary()
        where = str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths)} runs"
        left = f", {self.left} left" if self.left else ""
        gone = f"; {tell_missing(self.missing)}" if self.missing else ""
        return f"{found.done} done, {found.failed} failed{left} in {where}{gone}"

    @property
    def cost(self) -> Cost:
        """Cost of the run so far: node, GPU and core seconds, and joules if they could be read."""
        return total_cost(self.costs.values())

    @property
    def kv_bytes(self) -> int:
        """Size of the keys and values of all documents."""
        return sum(place.kv_bytes for _, place in self.places.with_kv())

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
        return list(self.places.ordered(status))

    def summary(self) -> Summary:
        """Count the documents by status."""
        return Summary.of(len(self), ((name, self.places[name].reason) for name in self.places.ordered("error")))

    def read(self, ids: Iterable[str]) -> Iterator[Record]:
        """Read the records of these documents, and verify their checksums; raises `DataError` if one is damaged."""
        joules = self.cost.joules_per_rank_s
        for name, line in self._lines(ids):
            place = self.places[name]
            if not is_sealed(line):
                raise DataError(f"{place.source}: the record of {name!r} is damaged (checksum)")
            record = read_record(line, f"{place.source}: {name!r}")
            if (record.id, record.status) != (name, "done" if place.is_done else "error"):
                raise DataError(f"{place.source}: the record of {name!r} has changed since it was indexed")
            yield replace(record, joules=joules * record.rank_s) if joules else record

    def _lines(self, ids: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Yield each document's id and line; many are read at once, file by file, since a run can have many logs."""
        rest = iter(ids)
        with ExitStack() as stack:
            sources: dict[Path, Source] = {}
            while names := _take_some(rest, lambda name: self.places[name].size):
                lines: dict[str, bytes] = {}
                for name in sorted(names, key=lambda name: self.places[name].source):
                    lines[name] = self._line(name, sources, stack)
                yield from ((name, lines[name]) for name in names)

    def _line(self, name: str, sources: dict[Path, Source], stack: ExitStack) -> bytes:
        """Read a document's line from one of up to `OPEN_FILES` open files; `retried`."""
        place = self.places[name]

        def read() -> bytes:
            if place.source not in sources:
                if len(sources) == OPEN_FILES:
                    stack.close()
                    sources.clear()
                sources[place.source] = stack.enter_context(open_source(place.source))
            try:
                return sources[place.source].read(place.at, place.size)
            except OSError:
                del sources[place.source]  # opened again
                raise

        return read_whole(read, place.source)

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
        found = self.read(self.places.ordered(status))
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
        rows = [{**record.as_dict(), **record.computed} for record in self.records(status, where)]
        return pandas.DataFrame(rows, columns=[*KINDS, *COMPUTED])

    def embeddings(self) -> tuple[list[str], np.ndarray[Any, Any]]:
        """Return the ids of the documents that have an embedding, sorted, and the embeddings, one row each.

        Returns
        -------
        tuple of list of str and numpy.ndarray
            Ids (documents,), and float32 (documents, dimension).

        Raises
        ------
        ConfigError
            If there is none: the job had no `output.embedding`, or every document failed.
        """
        import numpy as np

        rows = [(record.id, np.array(record.embedding, np.float32)) for record in self.records("done")]
        rows = [(name, row) for name, row in rows if len(row)]
        if not rows:
            raise ConfigError(f"{self.paths[0]} has no embeddings: set output.embedding in the job, and run it")
        return [name for name, _ in rows], np.stack([row for _, row in rows])

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
            kv.refuse_compressed("Results.kv()")
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
    def open(self, document_id: str) -> Iterator[tuple[Record, KVReader]]:
        """Open a document's record, with keys and values that are read on demand, for the duration of the block.

        Raises
        ------
        ConfigError
            If no document has this id.
        DataError
            If the document is damaged.
        """
        record = self[document_id]
        with KVReader(document_id, self.places[document_id].pieces) as kv:
            yield record, kv

    def place(self, document_id: str) -> Place:
        """Locate a document; raises `ConfigError` with the most similar ids if no document has this one."""
        if document_id not in self.places:
            close = difflib.get_close_matches(str(document_id), self.places, NAMED)
            where = " and ".join(map(str, self.paths[:NAMED]))
            hint = (
                f"did you mean {choices(close)}?" if close else f"expected an id, such as {choices(self.ids()[:NAMED])}"
            )
            raise ConfigError(f"no document {document_id!r} in {where}; {hint}")
        return self.places[document_id]


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
    found = read_results([Path(path) for path in paths], verify=verify)
    if verify:
        for _ in found:
            pass
    if found.missing and not partial:
        raise DataError(f"{tell_missing(found.missing)}; partial=True opens the data that exist")
    return found


def read_results(paths: Sequence[Path], *, verify: bool = False, passes_damaged: bool = False) -> Results:
    """Locate every document of runs (see `find_runs`), even if shares or documents are missing (`Results.missing`).

    With `verify`, the digests of keys and values are verified now; they are verified in any case when data are read, as
    for records. With `passes_damaged`, damaged files are skipped, and listed in `Results.damaged`.

    Raises `DataError` if there is nothing to read (`MissingError`: no such folder), a file is damaged, a document is in
    two runs, or the runs belong to different jobs, or are shares of different corpora.
    """
    runs, shares = find_runs(paths)
    missing, several = [*shares], len(runs) > 1
    joined: Results | None = None
    records, pieces = Records(), dict[str, Piece]()  # of all runs
    left = None
    first: dict[int, tuple[Path, str]] = {}  # number of shares to the first run with that number
    parts = set[int]()  # the runs are shares of corpora of so many; 0: of none
    for path in runs:
        run = read_run_file(path) if is_folder(path) else None
        if several and run is not None:
            check_corpus(path, run, first)
        if several and is_folder(path) and not has_results(path):
            if run is None or run.documents:  # if there are fewer documents than shares, some shares are empty
                missing.append(f"{path} has no results yet")
            continue
        found = _read_run(path, verify=verify, passes_damaged=passes_damaged)
        left = None if run is None else run.left(found.places)
        # The contents of a damaged log are unknown; the contents of a volume are listed in a log.
        spoilt = [(file, why) for file, why in found.damaged.items() if not VOLUME_NAME.fullmatch(file.name)]
        missing += [f"{file} is damaged ({why}): needs --resume" for file, why in spoilt]
        if found.gone:
            missing.append(f"{path} has lost keys and values of {counted(len(found.gone), 'document')}: needs --resume")
        elif several and run is not None and left:
            missing.append(f"{path} has {left} of {counted(run.documents, 'document')} left: needs --resume")
        if joined is None:
            joined = found
        else:
            check_same_job(joined.paths[0], joined.header, path, found.header)
            joined.gone.update(found.gone)
            joined.unreadable.update(found.unreadable)
            joined.damaged.update(found.damaged)
            joined.costs.update(found.costs)
        if several:
            part = find_part(path)
            parts.add(0 if part is None else part[1])
            for name, place in found.places.items():
                records.add(name, place)
                for piece in place.pieces:
                    pieces.setdefault(piece.id, piece)
    if joined is None:
        raise DataError(f"no results: {'; '.join(missing)}")
    if several:
        joined = replace(joined, places=records.choose(pieces, first=True)[0])
        missing += _describe_twice(joined.places, are_parts=len(parts) == 1 and 0 not in parts)
    return replace(joined, paths=runs, missing=tuple(missing), left=None if several else left)


def _describe_twice(places: Places, *, are_parts: bool) -> list[str]:
    """Describe the documents that are in two runs.

    are_parts : two documents of a corpus may have the same id: the first one counts, and the other one is missing.
    """
    twice: dict[tuple[Path, Path], list[str]] = {}
    for name, place in places.superseded():
        twice.setdefault((place.source.parent, places[name].source.parent), []).append(name)
    if twice and not are_parts:
        (here, there), names = next(iter(twice.items()))
        raise DataError(
            f"document {min(names)!r} is in {here} and in {there}, and so are {len(names) - 1} others; expected shares "
            f"of one corpus, each document in one share only"
        )
    return [
        f"{counted(len(names), 'document')} of {here} with the id of one in {there}, such as {min(names)!r}: make ids "
        f"unique"
        for (here, there), names in twice.items()
    ]


def _read_run(path: Path, *, verify: bool, passes_damaged: bool) -> Results:
    """Locate each document of a run or in a file of results."""
    if stat_of(path) is None:
        raise MissingError(
            f"{path}: no such file or folder; expected a result file (*.h5) or the output folder of a run"
        )
    if VOLUME_NAME.fullmatch(path.name):
        raise DataError(f"{path}: a file of keys and values only; expected its folder, {path.parent}, or a results.h5")
    if is_folder(path) and not has_results(path):
        names = names_in(path)
        if not names:
            raise DataError(f"{path} is empty; a job that has just begun loads its model first")
        if not is_output_folder(path, names):
            raise DataError(f"{path}: no result file (*.h5) found; expected one, or the output folder of a run")
    found = look(path, verify=verify)
    identities = [(source, header.identity) for source, header in found.headers.items()]
    for source, identity in identities[1:]:
        if identity != identities[0][1]:
            raise DataError(f"{identities[0][0]} and {source} are of different jobs; expected the files of one run")
    results = Results.of(found)
    if results.damaged and not passes_damaged:
        told = "; ".join(f"{file}: {why}" for file, why in sorted(results.damaged.items()))
        raise DataError(
            f"damaged: {told}. `kvr-run JOB.toml --resume` sets such files aside and processes their documents again"
        )
    if not found.records and not results.damaged:
        raise DataError(f"{path}: no document is stored yet; see `kvr status {path}`")
    return replace(results, paths=(path,))


def look(path: Path, *, verify: bool = False) -> Survey:
    """Survey a run; try again if a running job merged and removed its files meanwhile."""
    for attempt in (1, 2):
        found = read_whole(lambda: survey(path), path)
        if verify:
            found.verify()
        if attempt == 2 or not (found.damaged or found.spoilt or found.missing):
            break
    return found


def _take_some(ids: Iterator[str], size_of: Callable[[str], int]) -> list[str]:
    """Take ids until their records have `READ_BYTES`, at least one if there is one."""
    taken, total = list[str](), 0
    while total < READ_BYTES and (name := next(ids, None)) is not None:
        taken.append(name)
        total += size_of(name)
    return taken


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    import torch

    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
