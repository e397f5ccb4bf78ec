"""The corpus: files, rows and conversations read as `Document`s.

``paths`` finds the files, ``files`` reads the formats as a stream, ``rows`` converts their rows to documents;
``corpus`` lists all documents once, so that any rank can read any document later. An error in one document is stored
with it and does not affect the others.
"""

from kvr_mpi.documents.corpus import Corpus, CorpusFile, Entry, read_corpus, scan_corpus
from kvr_mpi.documents.document import Asked, Document
from kvr_mpi.documents.files import MAX_ID_CHARS, first_rows, is_table
from kvr_mpi.documents.paths import SUFFIXES, describe_others, find_files, other_files
from kvr_mpi.documents.rows import RowFormat

__all__ = [
    "MAX_ID_CHARS",
    "SUFFIXES",
    "Asked",
    "Corpus",
    "CorpusFile",
    "Document",
    "Entry",
    "RowFormat",
    "describe_others",
    "find_files",
    "first_rows",
    "is_table",
    "other_files",
    "read_corpus",
    "scan_corpus",
]
