"""The corpus: files, rows and conversations read as `Document`s.

``paths`` finds the files, ``formats`` opens and ``files`` reads them as streams, ``rows`` converts their rows to
documents; ``index`` lists where the documents are, on all ranks together; ``corpus`` reads any of them later. An error
in one document is stored with it and does not affect the others.
"""

from kvr_mpi.documents.corpus import Corpus, read_corpus, scan_corpus
from kvr_mpi.documents.document import Asked, Document
from kvr_mpi.documents.files import MAX_ID_CHARS, check_lines, first_rows
from kvr_mpi.documents.formats import SUFFIXES, is_table
from kvr_mpi.documents.index import CorpusPart
from kvr_mpi.documents.paths import describe_others, find_files, other_files
from kvr_mpi.documents.rows import RowFormat

__all__ = [
    "MAX_ID_CHARS",
    "SUFFIXES",
    "Asked",
    "Corpus",
    "Document",
    "CorpusPart",
    "RowFormat",
    "check_lines",
    "describe_others",
    "find_files",
    "first_rows",
    "is_table",
    "other_files",
    "read_corpus",
    "scan_corpus",
]
