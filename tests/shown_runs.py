"""A run of five documents to be shown and exported: ids, answers and errors that are hard to write."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from made_runs import new_writer

from kvr_mpi.store.export import write_export
from kvr_mpi.store.kv import KeysValues
from kvr_mpi.store.log import Header
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

HEADER = Header(
    {"model": "0123abcd", "prompt": {"template": "Summarise: {text}"}},
    {"name": "tiny/Llama", "architecture": "LlamaForCausalLM", "dtype": "float32"},
)
NASTY = 'First line.\nSecond, "quoted" and \'single\'; a, b, c\r\n\n\ttab 😀 é \\n ""'
COLUMNS = [*(spec.name for spec in fields(Record)), "coverage"]


def example_records() -> list[Record]:
    """Five documents, in the order of their ids, one of them failed."""
    base = Record(
        "", "done", token_ids=(1, 2, 3), slices=(0, 60, 100), document_sha256="ab" * 32, prompt_sha256="cd" * 32,
        prompt_tokens=100, dropped_tokens=2, new_tokens=3, finish_reason="stop", strategy="kvr", ttft_s=1.5,
        prefill_tokens_per_s=66.6, wait_s=0.25, decode_s=2.125, finished_at="2026-01-01T00:00:00.000+00:00",
    )  # fmt: skip
    return [
        replace(base, id="0001", answer="An id that looks like a number."),
        replace(base, id="bad.txt", status="error", error='the file "bad.txt" is not UTF-8,\nre-encode it', answer=""),
        replace(
            base,
            id="nasty",
            answer=NASTY,
            logprobs=(-0.5, -0.0, -1e-9),
            top_tokens=(1, 5, 2, 7, 3, 1),
            top_logprobs=(-0.5, -2.0, -0.0, -9.5, -1e-9, -3.0),
            token_texts='{"1": "F", "2": "\\ufffd"}',
        ),  # fmt: skip
        replace(base, id="sub/dir/plain.md", answer="Short."),
        replace(base, id="z [bold]ü[/bold] 漢.txt", answer="[red]brackets[/red] [/b]", parts=2),
    ]


def write_run(folder: Path, records: Sequence[Record], layers: Sequence[KeysValues | None] = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    writer = new_writer(folder, header=HEADER)
    for record in records:
        writer.write(record, layers if record.status == "done" else ())
    writer.close()
    return folder


def exported(path: Path, kind: str) -> bytes:
    stream = io.BytesIO()
    write_export(open_results(path), kind, stream)
    return stream.getvalue()
