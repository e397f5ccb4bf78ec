"""Charts as SVG: scales, axes and marks.

All text in a drawing is escaped here. Colors are CSS classes (``f-NAME`` for fills, ``s-NAME`` for strokes), so that a
page can have a dark mode; there are no style attributes, which a strict content policy would block.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvr_mpi.errors import printable
from kvr_mpi.report.style import nice_ticks, plain_number

# Margins around the axes.
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 40
Format = Callable[[float], str]  # formats a number


def escaped(text: str) -> str:
    """Escape text for HTML, including control characters and bidirectional marks."""
    return html.escape(printable(text), quote=True)


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear scale from values, 0 to `end`, to coordinates."""

    end: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        share = value / self.end if self.end else 0.5
        return self.start + share * (self.stop - self.start)

    @property
    def middle(self) -> float:
        return (self.start + self.stop) / 2


@dataclass(slots=True)
class Drawing:
    """An SVG drawing; `label` describes it for screen readers."""

    width: float
    height: float
    label: str
    parts: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, title: str = "", opacity: float = 1
    ) -> None:
        """Add a rectangle; `opacity` from 0 to 1."""
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(0.0, width))}" height="{_n(max(0.0, height))}"'
        self._add(f'<rect class="f-{fill}" fill-opacity="{opacity:.3g}" {place}', title)

    def dot(self, x: float, y: float, fill: str, title: str = "") -> None:
        self._add(f'<circle class="f-{fill} dot" cx="{_n(x)}" cy="{_n(y)}" r="3.5"', title)

    def line(
        self, points: Iterable[tuple[float, float]], stroke: str, *, dashed: bool = False, width: float = 2
    ) -> None:
        text = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<polyline class="s-{stroke}" stroke-width="{width}"{dashes} points="{text}"/>')

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", quiet: bool = True, bold: bool = False
    ) -> None:
        classes = ("quiet" if quiet else "loud") + (" bold" if bold else "")
        self.parts.append(
            f'<text class="{classes}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{escaped(text)}</text>'
        )

    def x_axis(
        self,
        end: float,
        name: str,
        ticks: Sequence[float] | None = None,
        text_of: Format = plain_number,
        left: float = LEFT,
    ) -> Scale:
        """Add the horizontal axis, from 0 to `end`; return its scale."""
        scale = Scale(end, left, self.width - RIGHT)
        for tick in nice_ticks(0, end) if ticks is None else ticks:
            self.line([(scale(tick), TOP), (scale(tick), self.height - BOTTOM)], "grid", width=1)
            self.x_tick(scale(tick), text_of(tick))
        self.x_name(scale.middle, name)
        return scale

    def x_tick(self, at: float, text: str) -> None:
        """Add a text below the drawing."""
        self.text(at, self.height - BOTTOM + 16, text, anchor="middle")

    def x_name(self, at: float, name: str) -> None:
        self.text(at, self.height - 6, name, anchor="middle")

    def y_axis(self, end: float, name: str, ticks: Sequence[float] | None = None) -> Scale:
        """Add the vertical axis, from 0 to `end`; return its scale."""
        scale = Scale(end, self.height - BOTTOM, TOP)
        for tick in nice_ticks(0, end) if ticks is None else ticks:
            at = scale(tick)
            self.line([(LEFT, at), (self.width - RIGHT, at)], "grid", width=1)
            self.text(LEFT - 7, at + 4, plain_number(tick), anchor="end")
        self.parts.append(
            f'<text class="quiet" text-anchor="middle" transform="translate(13 {_n(scale.middle)}) rotate(-90)">'
            f"{escaped(name)}</text>"
        )
        return scale

    def _add(self, tag: str, title: str) -> None:
        self.parts.append(f"{tag}><title>{escaped(title)}</title></{tag[1:].split()[0]}>" if title else f"{tag}/>")

    def __str__(self) -> str:
        """Return the drawing as text."""
        head = f'<svg viewBox="0 0 {_n(self.width)} {_n(self.height)}" role="img" aria-label="{escaped(self.label)}">'
        return head + "".join(self.parts) + "</svg>"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
