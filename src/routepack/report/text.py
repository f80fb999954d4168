"""Text that several reports share."""

from __future__ import annotations

import math

from routepack.cost import CostModel

DIGITS = 5  # significant ones of a cost: where plans differ, it is by a percent or less
LARGE = 1e6  # from here on costs are written with an exponent


def printable(text: str) -> str:
    """`text` with control characters escaped, line breaks among them: names from files hold any."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cost_text(value: float) -> str:
    """A cost with the same significant digits at any scale, as `normalise` changes the scale."""
    if value >= LARGE:
        return f"{value:.{DIGITS - 1}g}"
    magnitude = math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{max(0, DIGITS - 1 - magnitude)}f}"


def rows_text(rows: int, *, certified: bool, lower_bound: int, method: str) -> str:
    """How many rows, and how far that is proven."""
    if certified:
        return f"{rows}, certified: no layout has fewer ({method})"
    return f"{rows}, best known: at least {lower_bound} ({method})"


def cost_model_text(model: CostModel) -> str:
    """The cost model in one line."""
    stages = []
    for stage in model.attention:
        limit = "" if stage.window_tokens is None else f", window {stage.window_tokens:,} tokens"
        terms = f"linear {stage.linear:g}, quadratic {stage.quadratic:g}{limit}"
        stages.append(f"{stage.name} ({terms})")
    normalised = "" if model.normalise == "cap" else f", normalised by {model.normalise}"
    speeds = "".join(
        f", {name} ranks at speed {min(speed):g} to {max(speed):g}"
        for name, speed in (("DP", model.dp_speed), ("EP", model.ep_speed))
        if speed is not None
    )
    return f"{' + '.join(stages)}, expert {model.expert:g}{normalised}{speeds}"
