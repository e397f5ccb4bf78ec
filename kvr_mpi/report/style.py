"""Colors and number formats of pages and plots.

The colors are those of Okabe and Ito, which color-blind readers can distinguish: one for kvr-mpi, one for waiting;
other systems and bounds are gray. Text never relies on color alone.
"""

from __future__ import annotations

import math

# Colors by name, for light and dark background.
COLORS = {
    "ours": ("#0072B2", "#56B4E9"),
    "soft": ("#7FB8D8", "#2F7FA8"),  # kvr-mpi, every second layer
    "wait": ("#D55E00", "#F0894A"),
    "held": ("#E0A800", "#F0C040"),  # waiting for the link to send
    "sent": ("#009E73", "#2FC79B"),
    "other": ("#A65B8B", "#DD9CC3"),
    "rival": ("#8A9099", "#8A929C"),
    "bound": ("#5F6670", "#AEB5BE"),
    "grid": ("#E3E6EA", "#2C323A"),
    "text": ("#1C2126", "#E6E9ED"),
    "quiet": ("#5A626C", "#9BA4AE"),
    "page": ("#FFFFFF", "#14181D"),
    "card": ("#F6F8FA", "#1C222A"),
}
KIB = 1024


def tokens_text(tokens: float) -> str:
    """Format a length: 512, 4.1k, 128k, 1M; k is 1,000."""
    for unit, name in ((1_000_000, "M"), (1_000, "k")):
        if tokens >= unit:
            value = tokens / unit
            return (f"{value:.1f}".removesuffix(".0") if value < 100 else f"{value:.0f}") + name
    return f"{tokens:.0f}"


def bytes_text(size: float) -> str:
    """Format a size: 12 KiB, 3.4 MiB, 1.5 GiB, 3.1 TiB."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= KIB**power:
            value = size / KIB**power
            return (f"{value:.1f}".removesuffix(".0") if value < 10 else f"{value:.0f}") + f" {name}"
    return f"{size:.0f} B"


def percent_text(share: float) -> str:
    """Format a share: 0.4%, 3%, 62%."""
    percent = 100 * share
    return f"{percent:.1f}%" if 0 < abs(percent) < 1 else f"{percent:.0f}%"


def plain_number(value: float) -> str:
    """Format a number without exponent: 0.5, 10, 20, 4,000."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return round numbers within a range: 0, 10, 20."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def palette() -> str:
    """Return the colors as CSS variables, for light and dark mode, and the classes of charts."""
    light, dark = (
        ":root{" + "".join(f"--{name}:{pair[number]};" for name, pair in COLORS.items()) + "}" for number in (0, 1)
    )
    classes = "".join(f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}" for name in COLORS)
    return f"{light}@media (prefers-color-scheme: dark){{{dark}}}{classes}"
