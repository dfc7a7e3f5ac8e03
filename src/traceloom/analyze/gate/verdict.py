"""Pass, fail or inconclusive: each condition against the interval of what changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.compare.conditions import DECISIVE
from traceloom.analyze.gate.causes import causes
from traceloom.analyze.gate.comparable import comparable
from traceloom.analyze.gate.condition import UNDISTURBED, Condition
from traceloom.analyze.gate.resampling import Drawn, interval, over_pairs, over_runs, statistic_of, within_runs
from traceloom.analyze.gate.summary import RunSummary
from traceloom.analyze.gate.values import LEAST_STEPS, WALL, samples
from traceloom.model.result import Result

Floats = NDArray[np.float64]
PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
SEVERAL, PAIRS, ONE = "runs", "pairs of runs", "within one run only"
LEAST_RUNS = 4  # of both sides together: fewer say next to nothing about how runs scatter
_LEAST_PAIRS = 4

CHECKS = pl.Schema(
    {
        "condition": pl.String(),
        "verdict": pl.String(),
        "reason": pl.String(),
        "metric": pl.String(),
        "measure": pl.String(),
        "base": pl.Float64(),
        "new": pl.Float64(),
        "change": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "limit": pl.Float64(),
        "relative": pl.Boolean(),
        "effect_size": pl.Float64(),
        "scatter": pl.Float64(),
        "sample": pl.String(),
        "source": pl.String(),
        "base_runs": pl.Int64(),
        "new_runs": pl.Int64(),
        "base_steps": pl.Int64(),
        "new_steps": pl.Int64(),
    }
)


@dataclass(frozen=True)
class Verdict(Result):
    """A new run, or several, held against a base. Definitions: docs/concepts/verdicts.md.

    Attributes:
        verdict: `fail` where a condition fails; else `inconclusive` where one is; else `pass`.
        sentence: What it says, the worst first.
        comparable: Whether no decisive condition differs; if one does, every check is inconclusive.
        checks: One row per condition. `base`, `new`: value per step (ns, bytes or a count, as `measure` says);
            `change`: new less base, as a fraction of the base where `relative`, else in the unit of the measure;
            `low`, `high`: its 95 % interval; `limit`: what it was held against; `effect_size`: the difference in
            standard deviations of a sample (null without noise); `scatter`: standard deviation of a run as a fraction
            of its side, of pairs that of their ratio (null within one run); `sample`: `runs`, `pairs of runs` where
            runs of both sides took turns, or `within one run only`; `source`: wall times of undisturbed
            steps, or recorded steps. Unknown is null, and `reason` says why.
        conditions: `condition`, `base`, `new`, `same`, `weight` (decisive, program, minor).
        causes: `what`, `name`, `base_ns`, `new_ns`, `difference_ns` per recorded step, the largest differences first.
    """

    verdict: str
    sentence: str
    comparable: bool
    checks: pl.DataFrame
    conditions: pl.DataFrame
    causes: pl.DataFrame


def judge(base: Sequence[RunSummary], new: Sequence[RunSummary], conditions: Sequence[Condition]) -> Verdict:
    """Hold the runs of a new version against those of a base.

    Args:
        base: At least one run.
        new: At least one run.
        conditions: What must not be; at least one.

    Raises:
        UsageError: `nothing-measured`: a condition is about something that neither side has.

    Example:
        >>> from traceloom.analyze import gate
        >>> base, new = [gate.summarise(traceloom.load(p)) for p in ("before", "after")]  # doctest: +SKIP
        >>> gate.judge([base], [new], [gate.parse("step_time > 3%")]).sentence  # doctest: +SKIP
    """
    stated = comparable(base, new)
    differ = stated.filter(~pl.col("same") & (pl.col("weight") == DECISIVE))["condition"].to_list()
    rows = [_check(condition, base, new, differ) for condition in conditions]
    checks = pl.DataFrame(rows, schema=CHECKS)
    unmet = [verdict for verdict in (FAIL, INCONCLUSIVE) if verdict in checks["verdict"].to_list()]
    verdict = unmet[0] if unmet else PASS
    return Verdict(verdict, _sentence(verdict, checks), not differ, checks, stated, causes(base, new))


def _check(
    condition: Condition, base: Sequence[RunSummary], new: Sequence[RunSummary], differ: list[str]
) -> dict[str, object]:
    row: dict[str, object] = dict.fromkeys(CHECKS)
    several = len(base) > 1 or len(new) > 1
    base, new, paired = in_pairs(base, new)
    measured = samples(condition, base, new)
    row |= {
        "condition": condition.text,
        "metric": condition.name,
        "measure": condition.measure,
        "limit": condition.limit,
        "relative": condition.relative,
        "sample": PAIRS if paired else SEVERAL if several else ONE,
        "source": measured.source,
        "base_runs": len(base),
        "new_runs": len(new),
        "base_steps": sum(values.size for values in measured.base or ()),
        "new_steps": sum(values.size for values in measured.new or ()),
    }
    if measured.base is None or measured.new is None:
        side = "base" if measured.base is None else "new side"
        return row | {"verdict": INCONCLUSIVE, "reason": f"not every run of the {side} has measured it"}
    statistic = statistic_of(condition.statistic)
    values = [np.array([float(statistic(run)) for run in side]) for side in (measured.base, measured.new)]
    row |= {"base": float(values[0].mean()), "new": float(values[1].mean())}
    if differ:
        row["change"] = _finite(_change(values[0].mean(), values[1].mean(), relative=condition.relative))
        return row | {"verdict": INCONCLUSIVE, "reason": f"not comparable: other {', '.join(differ[:3])}"}
    if too_few := _too_few(measured.base, measured.new, several=several):
        row["change"] = _finite(_change(values[0].mean(), values[1].mean(), relative=condition.relative))
        return row | {"verdict": INCONCLUSIVE, "reason": too_few}
    if paired:
        drawn = over_pairs(measured.base, measured.new, statistic)
    elif several:
        drawn = over_runs(measured.base, measured.new, statistic)
    else:
        drawn = within_runs(measured.base[0], measured.new[0], statistic)
    judged = row | _judged(condition, drawn, float(values[0].mean()), float(values[1].mean()))
    return judged | _hint(condition, base, new, judged) if judged["verdict"] == INCONCLUSIVE else judged


def in_pairs(
    base: Sequence[RunSummary], new: Sequence[RunSummary]
) -> tuple[Sequence[RunSummary], Sequence[RunSummary], bool]:
    """Both sides in the order in which they ran, where their runs took turns: a base, a new one, or the other way.

    Returns:
        Both sides, and whether the n-th of one is the partner of the n-th of the other: so many of both, at least four,
        whose times of day are known, and of each two that follow each other one of each side.
    """
    timed = all(run.began_unix_ns is not None for run in (*base, *new))
    if not timed or len(base) != len(new) or len(base) < _LEAST_PAIRS:
        return base, new, False
    order = sorted(
        [(run.began_unix_ns or 0, side, at) for side, runs in enumerate((base, new)) for at, run in enumerate(runs)]
    )
    pairs = [{order[at][1:], order[at + 1][1:]} for at in range(0, len(order), 2)]
    if any({side for side, _ in pair} != {0, 1} for pair in pairs):
        return base, new, False
    places = [dict(pair) for pair in pairs]
    return [base[pair[0]] for pair in places], [new[pair[1]] for pair in places], True


def _hint(
    condition: Condition, base: Sequence[RunSummary], new: Sequence[RunSummary], judged: dict[str, object]
) -> dict[str, object]:
    """Where steps scatter too much: whether the undisturbed steps give a verdict."""
    if condition.measure != "time" or condition.statistic not in ("mean", "median"):
        return {}
    calmer = replace(condition, statistic=UNDISTURBED)
    calm_check = _check(calmer, base, new, [])
    if calm_check["verdict"] == INCONCLUSIVE:
        return {}
    ends = f"{UNDISTURBED}({condition.name_of_metric}), the steps that nothing disturbed, would {calm_check['verdict']}"
    return {"reason": f"{judged['reason']}; {ends}"}


def _too_few(base: list[Floats], new: list[Floats], *, several: bool) -> str:
    """Why the samples cannot tell; empty where they can. What never varies needs no more samples."""
    if several:
        many = len(base) + len(new)
        constant = all(np.ptp(np.concatenate(side)) == 0 for side in (base, new))
        return "" if constant or many >= LEAST_RUNS else f"{many} runs, and {LEAST_RUNS} of both sides are needed"
    least = min(base[0].size, new[0].size)
    return "" if least >= LEAST_STEPS else f"{least} step{'s' * (least != 1)}, and {LEAST_STEPS} are needed"


def _judged(condition: Condition, drawn: Drawn, base: float, new: float) -> dict[str, object]:
    change = float(_change(base, new, relative=condition.relative))
    if not math.isfinite(change):  # of nothing: more than any share of it
        verdict = FAIL if condition.above else PASS
        return {
            "verdict": verdict,
            "reason": "the base has none of it",
            "effect_size": drawn.effect,
            "scatter": drawn.scatter,
        }
    draws = np.asarray(_change(drawn.base, drawn.new, relative=condition.relative))
    draws = draws[np.isfinite(draws)]
    low, high = interval(draws, change, drawn.freedom) if draws.size else (change, change)
    low = max(low, -1.0 if condition.relative else -base)  # nothing falls below nothing
    beyond, within = (low > condition.limit, high <= condition.limit)
    if not condition.above:
        beyond, within = high < condition.limit, low >= condition.limit
    verdict = FAIL if beyond else PASS if within else INCONCLUSIVE
    reason = "" if verdict != INCONCLUSIVE else "the limit lies inside the interval"
    numbers = {"change": change, "low": low, "high": high, "effect_size": drawn.effect, "scatter": drawn.scatter}
    return {"verdict": verdict, "reason": reason, **numbers}


def _change(base: Floats | float, new: Floats | float, *, relative: bool) -> Floats:
    """New less base; relative to the base, where that is asked for (infinite of nothing, 0 of nothing to nothing)."""
    old, now = np.asarray(base, dtype=np.float64), np.asarray(new, dtype=np.float64)
    if not relative:
        return np.asarray(now - old)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((old == 0) & (now == 0), 0.0, now / old - 1)


def _finite(value: Floats) -> float | None:
    return float(value) if math.isfinite(float(value)) else None


def _sentence(verdict: str, checks: pl.DataFrame) -> str:
    counts = {outcome: checks.filter(pl.col("verdict") == outcome).height for outcome in (FAIL, INCONCLUSIVE, PASS)}
    if verdict == PASS:
        held = counts[PASS]
        return f"Passed: {held} condition{'s' * (held != 1)} hold{'s' * (held == 1)}"
    parts = []
    if counts[FAIL]:
        names = ", ".join(checks.filter(pl.col("verdict") == FAIL)["condition"].to_list()[:3])
        parts.append(f"Failed: {names}")
    if counts[INCONCLUSIVE]:
        reasons = list(dict.fromkeys(checks.filter(pl.col("verdict") == INCONCLUSIVE)["reason"].to_list()))
        names = ", ".join(checks.filter(pl.col("verdict") == INCONCLUSIVE)["condition"].to_list()[:3])
        parts.append(f"Inconclusive: {names} ({'; '.join(reasons[:2])})")
    return ". ".join(parts)


__all__ = ["FAIL", "INCONCLUSIVE", "PASS", "WALL", "Verdict", "judge"]
