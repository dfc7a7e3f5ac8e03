"""Whether the runs of two sides were made under the same conditions, from their summaries."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from traceloom.analyze.compare.conditions import CONDITIONS, MINOR
from traceloom.analyze.gate.summary import Program, RunSummary

PROGRAM = "program"
"""Weight of conditions that a change of the code may change: told, but no reason against a verdict."""
_ALIKE = 0.98  # of the calls of operators
_UNKNOWN = "not recorded"


def comparable(base: Sequence[RunSummary], new: Sequence[RunSummary]) -> pl.DataFrame:
    """What the runs say of themselves: `condition`, `base`, `new`, `same`, `weight` (decisive, program, minor)."""
    weights = {stated.condition: stated.weight for run in (*base, *new) for stated in run.stated}
    rows = []
    for name, weight in weights.items():
        left, right = _told(base, name), _told(new, name)
        both_stated = _UNKNOWN not in (left, right)
        # A value that only one side states is no known difference.
        rows.append((name, left, right, left == right, weight if both_stated else MINOR))
    # Whether they are the same operators, called as often, on the same shapes.
    programs = (base[0].program, new[0].program)
    names = [_calls(program, with_shapes=False) for program in programs]
    if any(names[0]) or any(names[1]):
        rows.append(("operators called in a step", *_shared(names[0], names[1]), PROGRAM))
    shaped = [_calls(program, with_shapes=True) for program in programs]
    if shaped[0] and shaped[1]:
        rows.append(("operators with these input shapes", *_shared(shaped[0], shaped[1]), PROGRAM))
    return pl.DataFrame(rows, schema=CONDITIONS, orient="row")


def _told(runs: Sequence[RunSummary], name: str) -> str:
    """The values that the runs of a side state, each once."""
    values = [stated.value for run in runs for stated in run.stated if stated.condition == name]
    return ", ".join(sorted(set(values))) if values else _UNKNOWN


def _calls(program: Program, *, with_shapes: bool) -> dict[tuple[str, str | None], float]:
    """Calls per step by operator, and by shapes where asked for."""
    counts: dict[tuple[str, str | None], float] = {}
    for name, shapes, count in zip(program.operator, program.shapes, program.count, strict=True):
        if with_shapes and shapes is None:
            continue
        key = (name, shapes if with_shapes else None)
        counts[key] = counts.get(key, 0.0) + count
    return counts


def _shared(
    base: dict[tuple[str, str | None], float], new: dict[tuple[str, str | None], float]
) -> tuple[str, str, bool]:
    """How many calls a step makes on either side, and whether nearly all are the same."""
    both = sum(min(count, new.get(key, 0.0)) for key, count in base.items())
    whole = [sum(side.values()) for side in (base, new)]
    alike = all(both >= _ALIKE * total for total in whole)
    texts = [f"{both:.0f} of {total:.0f} in both" for total in whole]
    return texts[0], texts[1], alike
