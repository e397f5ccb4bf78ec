"""What reports are made of: any text there may be, records, and how a line begins."""

from __future__ import annotations

from hypothesis import strategies as st

from kvr_mpi.store.record import Record

STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
TEXT = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["a\nb", "a\r\nb", "50 %\r100 %", "\n\n", "", "a\x0bb\x0cc\x85d\u2028e", "[red]x[/red]", "[/b]", "😀"]
    ),
)


def done(name: str, **values: object) -> Record:
    return Record(name, "done", **values)  # type: ignore[arg-type]
