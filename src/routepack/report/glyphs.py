"""Bars and heat marks out of block characters: colour only repeats what the shapes already say."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.style import Style
from rich.text import Text

# Okabe and Ito's palette, which colour-blind readers can tell apart.
HIGH = Style(color="#D55E00")
LOW = Style(color="#0072B2")

HEAT = ((0.9, "·"), (1.1, "░"), (1.3, "▒"), (1.6, "▓"), (float("inf"), "█"))
HEAT_LEGEND = "· below 0.9   ░ 0.9-1.1   ▒ 1.1-1.3   ▓ 1.3-1.6   █ above"
EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = " ▁▂▃▄▅▆▇█"

_ASCII = str.maketrans(
    {"·": ".", "░": ":", "▒": "+", "▓": "*", "█": "#", "│": "|", "▐": "#", "▌": "#"}
    | dict.fromkeys("▏▎▍", " ")
    | dict.fromkeys("▋▊▉▅▆▇", "#")
    | dict.fromkeys("▁▂", ".")
    | dict.fromkeys("▃▄", ":")
)


class Drawn:
    """One line of block characters, in ASCII where the terminal's encoding has no others."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text
        if options.ascii_only:
            text = Text(text.plain.translate(_ASCII), spans=list(text.spans))
        text.no_wrap, text.overflow, text.end = True, "crop", ""
        yield text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(len(self.text), len(self.text))


def bar(value: float, full: float, width: int, style: Style = LOW) -> Drawn:
    """A bar of `width` cells at `full`, to an eighth of a cell."""
    share = min(1.0, max(0.0, value / full)) if full > 0 else 0.0
    whole, eighths = divmod(round(share * width * 8), 8)
    blocks = ("█" * whole + EIGHTHS[eighths]).rstrip().ljust(width)
    return Drawn(Text(blocks[:width], style))


def deviation(value: float, full: float, arm: int) -> Drawn:
    """A bar to the left (below 0) or right of an axis, `arm` cells at +-`full`, to half a cell."""
    share = min(1.0, abs(value) / full) if full > 0 else 0.0
    whole, half = divmod(round(share * arm * 2), 2)
    left = right = " " * arm
    if value < 0:
        left = ("▐" * half + "█" * whole).rjust(arm)
    else:
        right = ("█" * whole + "▌" * half).ljust(arm)
    return Drawn(Text.assemble((left, LOW), "│", (right, HIGH)))


def heat(ratios: Sequence[float]) -> Drawn:
    """One mark for each ratio to the mean; see HEAT_LEGEND."""
    text = Text()
    for ratio in ratios:
        mark = next((mark for limit, mark in HEAT if ratio < limit), " ")
        text.append(mark, LOW if ratio < 1.1 else HIGH)
    return Drawn(text)


def histogram(counts: Sequence[int]) -> Drawn:
    """One column for each count, the tallest of full height; a count above 0 is always seen."""
    most = max(counts)
    marks = [LEVELS[-(-8 * count // most) if most else 0] for count in counts]
    return Drawn(Text("".join(marks), LOW))
