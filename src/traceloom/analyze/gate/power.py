"""How many runs a check needs to see a change of a wanted size.

Source: Cohen, Statistical Power Analysis for the Behavioral Sciences (1988), section 2.4: two groups of equal size.
"""

from __future__ import annotations

import math

import polars as pl

from traceloom.analyze.gate.resampling import student
from traceloom.analyze.gate.verdict import PAIRS
from traceloom.model.frames import schema

POWER = 0.8  # how often the change is to be found
_ONE_SIDED = 0.8416  # quantile of the normal distribution at POWER
_MOST = 1_000

ROWS = schema("condition effect scatter runs reason")


def runs_needed(scatter: float, room: float, *, paired: bool = False) -> int | None:
    """Runs a side with which a change beyond the limit by `room` fails the check eight times of ten.

    Args:
        scatter: Standard deviation of a run, as a fraction of the base; of pairs, that of their ratio.
        room: The change less the limit, as a fraction of the base.
        paired: Whether runs of both sides take turns.

    Returns:
        At least 2; None where no number of runs up to 1,000 is enough.
    """
    if room <= 0:
        return None
    sides = 1 if paired else 2
    return next(
        (
            runs
            for runs in range(2, _MOST + 1)
            if (student((runs - 1) * sides) + _ONE_SIDED) * scatter * math.sqrt(sides / runs) <= room
        ),
        None,
    )


def power(checks: pl.DataFrame, effect: float) -> pl.DataFrame:
    """How many runs a side each check needs to fail for a change of this size.

    Args:
        checks: Of a verdict.
        effect: The change, as a fraction of the base; positive, for conditions with `<` a decrease of that size.

    Returns:
        Columns of `ROWS`: the `effect`, the `scatter` of runs as measured (null where one run a side says nothing of
        it), `runs` a side, and the `reason` where that is null.
    """
    rows = []
    for check in checks.to_dicts():
        scatter, limit, runs, reason = check["scatter"], check["limit"], None, None
        if not check["relative"]:
            reason = "the limit is no share of the base"
        elif scatter is None:
            reason = "how runs scatter is not known: several runs of a side are needed"
        else:
            runs = runs_needed(scatter, effect - abs(limit), paired=check["sample"] == PAIRS)
            if runs is None:
                within = effect <= abs(limit)
                reason = "the change is within the limit" if within else f"more than {_MOST:,} runs a side"
        rows.append((check["condition"], effect, scatter, runs, reason))
    return pl.DataFrame(rows, schema=ROWS, orient="row")
