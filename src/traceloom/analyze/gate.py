"""Is the new run worse than the base, or is it chance? Verdicts with intervals, on one run or on
several of each side.

Exact definitions: docs/concepts/verdicts.md.

Source: Cohen, Statistical Power Analysis for the Behavioral Sciences (1988), section 2.4: two
groups of equal size.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from msgspec import Struct, structs

from traceloom.analyze.compare import CONDITIONS, DECISIVE, MINOR, Comparison
from traceloom.analyze.gate_statistics import (
    Resampled,
    compute_interval,
    compute_student_t_quantile,
    estimate_from_pairs,
    estimate_from_runs,
    estimate_within_runs,
    get_statistic,
)
from traceloom.analyze.gate_summary import RunSummary, summarise
from traceloom.errors import UsageError
from traceloom.trace.array_types import Floats
from traceloom.trace.frames import Result, build_schema

__all__ = [
    "FAIL",
    "INCONCLUSIVE",
    "PASS",
    "Condition",
    "RunSummary",
    "Verdict",
    "judge",
    "parse",
    "summarise",
]

SCALARS = {
    "step_time": "time",
    "gpu_time": "time",
    "exposed_communication": "time",
    "idle": "time",
    "launches": "count",
    "memory_peak": "bytes",
}
"""Metrics of a whole step, with their measures."""
TABLES = {"kernel": "time", "kind": "time", "op": "time", "op_gpu": "time"}
"""Metrics of a part of a step: the text after the colon selects it."""
DEFAULT_CONDITION = "step_time > 3%"
PERCENT = "%"
UNDISTURBED_STATISTIC = "p10"
"""A low percentile: other processes on the machine make steps longer, never shorter."""
_UNITS = {
    "time": {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9},
    "bytes": {
        "B": 1.0,
        "kB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "KiB": 2.0**10,
        "MiB": 2.0**20,
        "GiB": 2.0**30,
    },
    "count": {"": 1.0},
}
_CONDITION_PATTERN = re.compile(
    r"\s*(?P<metric>.+?)\s*(?P<sign>[<>])\s*(?P<number>[+-]?[0-9.]+)\s*(?P<unit>[A-Za-zµ%]*)\s*"
)
_STATISTIC_PATTERN = re.compile(r"(?P<statistic>mean|median|p[1-9]\d?)\((?P<metric>.*)\)")
_MAX_CONDITION_CHARS = 500
_HINT = "as in 'step_time > 3%', 'kernel:gemm > 5%', 'memory_peak > 100MB', 'p10(step_time) > 2%', 'launches > 0'"


class Condition(Struct, frozen=True):
    """A change that fails the check.

    Attributes:
        text: As the user wrote it.
        metric: One of `SCALARS` or `TABLES`.
        chosen: For a table the regular expression (for `kind` the name) that selects rows; else
            empty.
        statistic: The statistic over the steps of a run: `mean`, `median`, or a percentile from
            `p1` to `p99`.
        above: The check fails where the change is above the limit; else where it is below.
        limit: The change, new less base: a fraction of the base where `relative`, else ns, bytes or
            a count per step.
        relative: Whether the limit is relative to the base.
    """

    text: str
    metric: str
    chosen: str
    statistic: str
    above: bool
    limit: float
    relative: bool

    @property
    def measure(self) -> str:
        """The measure of the metric: time (ns), bytes or count."""
        return SCALARS.get(self.metric) or TABLES[self.metric]

    @property
    def name(self) -> str:
        """The metric as the user spells it."""
        metric = self.name_of_metric
        return metric if self.statistic == "mean" else f"{self.statistic}({metric})"

    @property
    def name_of_metric(self) -> str:
        return f"{self.metric}:{self.chosen}" if self.metric in TABLES else self.metric


def parse(text: str) -> Condition:
    """Parses a condition.

    Raises:
        UsageError: `bad-condition`.
    """
    match = _CONDITION_PATTERN.fullmatch(text) if len(text) <= _MAX_CONDITION_CHARS else None
    if match is None:
        raise _describe_bad_condition(f"`{text[:80]}` is no condition")
    metric, statistic = match["metric"], "mean"
    if inner := _STATISTIC_PATTERN.fullmatch(metric):
        metric, statistic = inner["metric"].strip(), inner["statistic"]
    name, colon, pattern = metric.partition(":")
    exists = name in (TABLES if colon else SCALARS) and (not colon or pattern.strip())
    if not exists:
        names = ", ".join([*SCALARS, *(f"{table}:..." for table in TABLES)])
        raise _describe_bad_condition(f"`{metric}` is not a metric; there are {names}")
    pattern = pattern.strip()
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise _describe_bad_condition(f"`{pattern}` is no regular expression: {error}") from error
    measure = SCALARS.get(name) or TABLES[name]
    try:
        limit = float(match["number"])
    except ValueError:
        raise _describe_bad_condition(f"`{match['number']}` is no number") from None
    if not math.isfinite(limit):
        raise _describe_bad_condition("the limit is too large")
    unit, units = match["unit"], _UNITS[measure]
    if unit != PERCENT and unit not in units:
        have = ", ".join([PERCENT, *filter(None, units)])
        if not unit:
            raise _describe_bad_condition(f"{name} needs a unit: {have}")
        raise _describe_bad_condition(
            f"`{unit}` is no unit of {name}; it has {have}{' or no unit' if '' in units else ''}"
        )
    limit = limit / 100 if unit == PERCENT else limit * units[unit]
    return Condition(
        text.strip(), name, pattern, statistic, match["sign"] == ">", limit, unit == PERCENT
    )


def _describe_bad_condition(message: str) -> UsageError:
    return UsageError(message, slug="bad-condition", hint=_HINT)


CAUSES = build_schema("what name base_ns new_ns difference_ns")
_MAX_CAUSES = 20
_PARTS = {"idle": "idle time of the GPUs", "exposed_communication": "exposed communication"}


def find_causes(base: Sequence[RunSummary], new: Sequence[RunSummary]) -> pl.DataFrame:
    """Returns means per recorded step, ranked by the size of the difference.

    Returns:
        `what` (part, kernel, operator), `name`, `base_ns`, `new_ns`, `difference_ns`; the 20
        largest differences.
    """
    gpu = any("kernel" in run.tables for run in (*base, *new))
    rows = []
    for table, kind in (("kernel", "kernel"),) if gpu else (("op", "operator"),):
        old, now = _compute_means(base, table), _compute_means(new, table)
        rows += [
            (kind, name, old.get(name, 0.0), now.get(name, 0.0)) for name in old.keys() | now.keys()
        ]
    for metric, label in _PARTS.items() if gpu else ():
        if all(metric in run.scalars for run in (*base, *new)):
            old_part, new_part = (
                float(np.mean([np.mean(run.scalars[metric]) for run in s])) for s in (base, new)
            )
            rows.append(("part", label, old_part, new_part))
    return _sort_by_difference(
        [(kind, name, round(old), round(now)) for kind, name, old, now in rows]
    )


def find_comparison_causes(comparison: Comparison) -> pl.DataFrame:
    """Returns the same columns for two compared runs: kernels with their operators, and idle time,
    which add up to the step.
    """
    if comparison.account == "device":
        rows = []
        kernels = comparison.kernels.select(
            "base_kernel", "new_kernel", "operator", "base_ns", "new_ns"
        )
        for base, new, operator, old, now in kernels.rows():
            name = new if base is None else base if new in (None, base) else f"{base} → {new}"
            rows.append(("kernel", f"{name} in {operator}", old, now))
        idle = comparison.breakdown.filter(pl.col("part").str.starts_with("idle"))
        rows += [("idle", *row) for row in idle.select("meaning", "base_ns", "new_ns").rows()]
    else:
        host_times = comparison.operators.select("operator", "base_host_ns", "new_host_ns")
        summed = host_times.group_by("operator", maintain_order=True).agg(pl.all().sum())
        rows = [("operator", name, old, now) for name, old, now in summed.rows()]
    return _sort_by_difference(rows)


def _sort_by_difference(rows: Sequence[tuple[str, str, int, int]]) -> pl.DataFrame:
    changed = [(kind, name, old, now, now - old) for kind, name, old, now in rows if now != old]
    changed.sort(key=lambda row: (-abs(row[4]), row[1]))
    return pl.DataFrame(changed[:_MAX_CAUSES], schema=CAUSES, orient="row")


def _compute_means(runs: Sequence[RunSummary], table: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for run in runs:
        for name, values in run.tables.get(table, {}).items():
            sums[name] = sums.get(name, 0.0) + float(np.mean(values)) / len(runs)
    return sums


PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
OVER_RUNS, OVER_PAIRS, WITHIN_RUN = "runs", "pairs of runs", "within one run only"
MIN_RUNS = 4  # of both sides together: fewer do not show how runs scatter
_MIN_PAIRS = 4
MIN_STEPS = 5
WALL_TIMES, RECORDED_STEPS = "wall times of undisturbed steps", "recorded steps"
PROGRAM = "program"
"""Weight of conditions that a change of the code may change: reported, but no reason against a
verdict.
"""
_MIN_COMMON_SHARE = 0.98  # of the calls of operators
_UNKNOWN = "not recorded"
_TABLE_LABELS = {
    "kernel": "kernel",
    "kind": "kind of kernel",
    "op": "operator",
    "op_gpu": "operator with GPU work",
}
_MISSING_REASONS = {
    "memory_peak": "the runs were not recorded with the allocator's totals, as `traceloom record --memory` does",
    "step_time": "no step was found",
}

CHECKS = build_schema(
    "condition verdict reason metric measure base new change low high limit relative",
    "effect_size scatter sample source base_runs new_runs base_steps new_steps",
    {"base": pl.Float64, "new": pl.Float64, "sample": pl.String, "source": pl.String},
)


@dataclass(frozen=True)
class Verdict(Result):
    """The comparison of a new run, or several, with a base. Definitions: docs/concepts/verdicts.md.

    Attributes:
        verdict: `fail` where a condition fails; else `inconclusive` where one is; else `pass`.
        sentence: The verdict in words, the worst first.
        comparable: Whether no decisive condition differs; if one does, every check is inconclusive.
        checks: One row per condition. `base`, `new`: value per step (ns, bytes or a count, as
            `measure` says); `change`: new less base, as a fraction of the base where `relative`,
            else in the unit of the measure; `low`, `high`: its 95 % interval; `limit`: the limit
            that it is compared with; `effect_size`: the difference in standard deviations of a
            sample (null without noise); `scatter`: standard deviation of a run as a fraction of its
            side, of pairs that of their ratio (null within one run); `sample`: `runs`, `pairs of
            runs` where runs of both sides took turns, or `within one run only`; `source`: wall
            times of undisturbed steps, or recorded steps. Unknown is null, and `reason` states why.
        conditions: `condition`, `base`, `new`, `same`, `weight` (decisive, program, minor).
        causes: `what`, `name`, `base_ns`, `new_ns`, `difference_ns` per recorded step, the largest
            differences first.
    """

    verdict: str
    sentence: str
    comparable: bool
    checks: pl.DataFrame
    conditions: pl.DataFrame
    causes: pl.DataFrame


def judge(
    base: Sequence[RunSummary], new: Sequence[RunSummary], conditions: Sequence[Condition]
) -> Verdict:
    """Compares the runs of a new version with those of a base.

    Args:
        base: At least one run.
        new: At least one run.
        conditions: Changes that fail the check; at least one.

    Raises:
        UsageError: `nothing-measured`: a condition refers to something that neither side has.

    Example:
        >>> from traceloom.analyze import gate
        >>> runs = [traceloom.load(path) for path in ("before", "after")]  # doctest: +SKIP
        >>> base, new = map(gate.summarise, runs)  # doctest: +SKIP
        >>> gate.judge([base], [new], [gate.parse("step_time > 3%")]).sentence  # doctest: +SKIP
    """
    stated = compare_run_conditions(base, new)
    differ = stated.filter(~pl.col("same") & (pl.col("weight") == DECISIVE))["condition"].to_list()
    rows = [_check(condition, base, new, differ) for condition in conditions]
    checks = pl.DataFrame(rows, schema=CHECKS)
    unmet = [verdict for verdict in (FAIL, INCONCLUSIVE) if verdict in checks["verdict"].to_list()]
    verdict = unmet[0] if unmet else PASS
    parts = []
    if verdict == PASS:
        parts.append(
            f"Passed: {len(rows)} condition{'s' * (len(rows) != 1)} hold{'s' * (len(rows) == 1)}"
        )
    failed, open_ones = (
        checks.filter(pl.col("verdict") == outcome) for outcome in (FAIL, INCONCLUSIVE)
    )
    if failed.height:
        parts.append(f"Failed: {', '.join(failed['condition'].to_list()[:3])}")
    if open_ones.height:
        reasons = list(dict.fromkeys(open_ones["reason"].to_list()))
        parts.append(
            f"Inconclusive: {', '.join(open_ones['condition'].to_list()[:3])} ({'; '.join(reasons[:2])})"
        )
    return Verdict(verdict, ". ".join(parts), not differ, checks, stated, find_causes(base, new))


def compare_run_conditions(base: Sequence[RunSummary], new: Sequence[RunSummary]) -> pl.DataFrame:
    """Returns the recorded conditions of the runs: `condition`, `base`, `new`, `same`, `weight`
    (decisive, program, minor).
    """
    weights = {stated.condition: stated.weight for run in (*base, *new) for stated in run.stated}
    rows = []
    for name, weight in weights.items():
        left, right = (
            ", ".join(
                sorted(
                    {
                        stated.value
                        for run in runs
                        for stated in run.stated
                        if stated.condition == name
                    }
                )
            )
            for runs in (base, new)
        )
        # A value that only one side states is no known difference.
        rows.append(
            (
                name,
                left or _UNKNOWN,
                right or _UNKNOWN,
                left == right,
                weight if left and right else MINOR,
            )
        )
    # Whether they are the same operators, called as often in a step, on the same shapes.
    for aspect, use_shapes in (
        ("operators called in a step", False),
        ("operators with these input shapes", True),
    ):
        sides = []
        for program in (base[0].program, new[0].program):
            counts: dict[tuple[str, str | None], float] = {}
            for name, shapes, count in zip(
                program.operator, program.shapes, program.count, strict=True
            ):
                if shapes is not None or not use_shapes:
                    key = (name, shapes if use_shapes else None)
                    counts[key] = counts.get(key, 0.0) + count
            sides.append(counts)
        if all(sides) if use_shapes else any(sides):
            both = sum(min(count, sides[1].get(key, 0.0)) for key, count in sides[0].items())
            totals = [sum(counts.values()) for counts in sides]
            left, right = (f"{both:.0f} of {total:.0f} in both" for total in totals)
            rows.append(
                (
                    aspect,
                    left,
                    right,
                    all(both >= _MIN_COMMON_SHARE * total for total in totals),
                    PROGRAM,
                )
            )
    return pl.DataFrame(rows, schema=CONDITIONS, orient="row")


def _check(
    condition: Condition, base: Sequence[RunSummary], new: Sequence[RunSummary], differ: list[str]
) -> dict[str, object]:
    row: dict[str, object] = dict.fromkeys(CHECKS)
    several = len(base) > 1 or len(new) > 1
    base, new, paired = arrange_in_pairs(base, new)
    base_values, new_values, source = collect_samples(condition, base, new)
    row |= {
        "condition": condition.text,
        "metric": condition.name,
        "measure": condition.measure,
        "limit": condition.limit,
        "relative": condition.relative,
        "sample": OVER_PAIRS if paired else OVER_RUNS if several else WITHIN_RUN,
        "source": source,
        "base_runs": len(base),
        "new_runs": len(new),
        "base_steps": sum(values.size for values in base_values or ()),
        "new_steps": sum(values.size for values in new_values or ()),
    }
    if base_values is None or new_values is None:
        side = "base" if base_values is None else "new side"
        return row | {
            "verdict": INCONCLUSIVE,
            "reason": f"not every run of the {side} has measured it",
        }
    statistic = get_statistic(condition.statistic)
    old, now = (
        float(np.array([float(statistic(run)) for run in side]).mean())
        for side in (base_values, new_values)
    )
    row |= {"base": old, "new": now}
    run_count = len(base) + len(new)
    step_count = min(base_values[0].size, new_values[0].size)
    # A value that never varies needs no more samples.
    constant = several and all(
        np.ptp(np.concatenate(side)) == 0 for side in (base_values, new_values)
    )
    reason = ""
    if differ:
        reason = f"not comparable: other {', '.join(differ[:3])}"
    elif several and not constant and run_count < MIN_RUNS:
        reason = f"{run_count} runs, and {MIN_RUNS} of both sides are needed"
    elif not several and step_count < MIN_STEPS:
        reason = f"{step_count} step{'s' * (step_count != 1)}, and {MIN_STEPS} are needed"
    if reason:
        change = float(_change(old, now, relative=condition.relative))
        finite_change = change if math.isfinite(change) else None
        return row | {"change": finite_change, "verdict": INCONCLUSIVE, "reason": reason}
    if paired:
        resampled = estimate_from_pairs(base_values, new_values, statistic)
    elif several:
        resampled = estimate_from_runs(base_values, new_values, statistic)
    else:
        resampled = estimate_within_runs(base_values[0], new_values[0], statistic)
    judged = row | _evaluate_condition(condition, resampled, old, now)
    if (
        judged["verdict"] == INCONCLUSIVE
        and condition.measure == "time"
        and condition.statistic in ("mean", "median")
    ):
        # Where steps scatter too much: whether the undisturbed steps give a verdict.
        verdict = _check(
            structs.replace(condition, statistic=UNDISTURBED_STATISTIC), base, new, []
        )["verdict"]
        if verdict != INCONCLUSIVE:
            undisturbed = f"{UNDISTURBED_STATISTIC}({condition.name_of_metric}), the steps that nothing disturbed, would {verdict}"
            judged["reason"] = f"{judged['reason']}; {undisturbed}"
    return judged


def collect_samples(
    condition: Condition, base: Sequence[RunSummary], new: Sequence[RunSummary]
) -> tuple[list[Floats] | None, list[Floats] | None, str]:
    """Collects the values of a condition from the runs.

    Returns:
        For the base and the new side: per run the value in each step, None where a run of the side
        did not measure it. And the source of the values: `WALL` or `RECORDED`.

    Raises:
        UsageError: `nothing-measured`: neither side has it, for example because a regular
            expression matches no name.
    """
    source = RECORDED_STEPS
    if condition.metric == "step_time" and all(
        len(run.wall_ns or ()) >= MIN_STEPS for run in (*base, *new)
    ):
        source = WALL_TIMES
    sides = [[_extract_values(condition, run, source) for run in side] for side in (base, new)]
    # A typing error must not pass a check
    if all(values is None for side in sides for values in side):
        if condition.metric not in TABLES:
            reason = _MISSING_REASONS.get(condition.metric, "the runs have no GPU work in steps")
            raise UsageError(
                f"`{condition.text}`: neither side has measured it",
                slug="nothing-measured",
                hint=reason,
            )
        tables = (run.tables.get(condition.metric, {}) for run in (*base, *new))
        names = {name: sum(values) for table in tables for name, values in table.items()}
        largest_names = sorted(names, key=lambda name: (-names[name], name))[:4]
        hint = (
            f"the largest are {', '.join(name[:60] for name in largest_names)}"
            if largest_names
            else "the runs have none at all"
        )
        message = f"`{condition.text}` matches no {_TABLE_LABELS[condition.metric]} on either side"
        raise UsageError(message, slug="nothing-measured", hint=hint)
    if condition.metric in TABLES:  # a side that measured such things, and has none of these, has 0
        for runs, side in zip((base, new), sides, strict=True):
            for run_index, run in enumerate(runs):
                if side[run_index] is None and condition.metric in run.tables:
                    side[run_index] = np.zeros(len(run.steps))
    measured_sides = [[values for values in side if values is not None] for side in sides]
    complete = [
        measured if len(measured) == len(side) else None
        for measured, side in zip(measured_sides, sides, strict=True)
    ]
    return complete[0], complete[1], source


def _extract_values(condition: Condition, run: RunSummary, source: str) -> Floats | None:
    if source == WALL_TIMES:
        return np.array(run.wall_ns, dtype=np.float64)
    if condition.metric not in TABLES:
        column = run.scalars.get(condition.metric)
        return None if column is None else np.array(column, dtype=np.float64)
    table = run.tables.get(condition.metric, {})
    if condition.metric == "kind":
        columns = [values for name, values in table.items() if name == condition.chosen]
    else:
        pattern = re.compile(condition.chosen)
        columns = [values for name, values in table.items() if pattern.search(name)]
    return np.array(columns, dtype=np.float64).sum(axis=0) if columns else None


def arrange_in_pairs(
    base: Sequence[RunSummary], new: Sequence[RunSummary]
) -> tuple[Sequence[RunSummary], Sequence[RunSummary], bool]:
    """Returns both sides in the order in which they ran, where their runs alternated: base and new,
    or new and base.

    Returns:
        Both sides, and whether the n-th run of one is the partner of the n-th of the other: both
        have the same number of runs, at least four, whose times of day are known, and of each two
        consecutive runs one is of each side.
    """
    has_times = all(run.began_unix_ns is not None for run in (*base, *new))
    if not has_times or len(base) != len(new) or len(base) < _MIN_PAIRS:
        return base, new, False
    order = sorted(
        [
            (run.began_unix_ns or 0, side, index)
            for side, runs in enumerate((base, new))
            for index, run in enumerate(runs)
        ]
    )
    pairs = [{order[index][1:], order[index + 1][1:]} for index in range(0, len(order), 2)]
    if any({side for side, _ in pair} != {0, 1} for pair in pairs):
        return base, new, False
    pair_runs = [dict(pair) for pair in pairs]
    return [base[pair[0]] for pair in pair_runs], [new[pair[1]] for pair in pair_runs], True


def _evaluate_condition(
    condition: Condition, resampled: Resampled, base: float, new: float
) -> dict[str, object]:
    change = float(_change(base, new, relative=condition.relative))
    if not math.isfinite(change):  # relative to 0: exceeds any limit
        outcome = {
            "verdict": FAIL if condition.above else PASS,
            "reason": "the base has none of it",
        }
        return {**outcome, "effect_size": resampled.effect, "scatter": resampled.scatter}
    draws = np.asarray(_change(resampled.base, resampled.new, relative=condition.relative))
    draws = draws[np.isfinite(draws)]
    low, high = (
        compute_interval(draws, change, resampled.freedom) if draws.size else (change, change)
    )
    low = max(low, -1.0 if condition.relative else -base)  # no value falls below 0
    beyond, within = (low > condition.limit, high <= condition.limit)
    if not condition.above:
        beyond, within = high < condition.limit, low >= condition.limit
    verdict = FAIL if beyond else PASS if within else INCONCLUSIVE
    reason = "" if verdict != INCONCLUSIVE else "the limit lies inside the interval"
    numbers = {
        "change": change,
        "low": low,
        "high": high,
        "effect_size": resampled.effect,
        "scatter": resampled.scatter,
    }
    return {"verdict": verdict, "reason": reason, **numbers}


def _change(base: Floats | float, new: Floats | float, *, relative: bool) -> Floats:
    """Returns new less base; relative to the base where requested (infinite where only the base is
    0, 0 where both are).
    """
    old, now = np.asarray(base, dtype=np.float64), np.asarray(new, dtype=np.float64)
    if not relative:
        return np.asarray(now - old)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((old == 0) & (now == 0), 0.0, now / old - 1)


TARGET_POWER = 0.8  # probability of finding the change
_POWER_QUANTILE = 0.8416  # quantile of the normal distribution at TARGET_POWER
_MAX_RUNS = 1_000

POWER_SCHEMA = build_schema("condition effect scatter runs reason")


def compute_runs_needed(scatter: float, margin: float, *, paired: bool = False) -> int | None:
    """Returns the runs per side with which a change beyond the limit by `margin` fails the check
    with a probability of 80 %.

    Args:
        scatter: Standard deviation of a run, as a fraction of the base; for pairs, that of their
            ratio.
        margin: The change less the limit, as a fraction of the base.
        paired: Whether runs of both sides alternate.

    Returns:
        At least 2; None where no number of runs up to 1,000 is enough.
    """
    if margin <= 0:
        return None
    sides = 1 if paired else 2
    return next(
        (
            runs
            for runs in range(2, _MAX_RUNS + 1)
            if (compute_student_t_quantile((runs - 1) * sides) + _POWER_QUANTILE)
            * scatter
            * math.sqrt(sides / runs)
            <= margin
        ),
        None,
    )


def compute_power(checks: pl.DataFrame, effect: float) -> pl.DataFrame:
    """Returns how many runs per side each check needs to fail for a change of this size.

    Args:
        checks: The checks of a verdict.
        effect: The change, as a fraction of the base; positive, for conditions with `<` a decrease
            of that size.

    Returns:
        Columns of `ROWS`: the `effect`, the `scatter` of runs as measured (null where one run per
        side does not show it), `runs` per side, and the `reason` where that is null.
    """
    rows = []
    for check in checks.to_dicts():
        scatter, limit, runs, reason = check["scatter"], check["limit"], None, None
        if not check["relative"]:
            reason = "the limit is no share of the base"
        elif scatter is None:
            reason = "how runs scatter is not known: several runs of a side are needed"
        else:
            runs = compute_runs_needed(
                scatter, effect - abs(limit), paired=check["sample"] == OVER_PAIRS
            )
            if runs is None:
                within = effect <= abs(limit)
                reason = (
                    "the change is within the limit"
                    if within
                    else f"more than {_MAX_RUNS:,} runs a side"
                )
        rows.append((check["condition"], effect, scatter, runs, reason))
    return pl.DataFrame(rows, schema=POWER_SCHEMA, orient="row")
