"""Sweeps: the same question at many points of a grid, and what the answers say together.

An axis is written as `KEY=VALUES`: `network.0.bandwidth=50,100,200`, `ranks=8..1024*2`, `layers=4..32+4`. Values are
numbers or words, separated by commas; `a..b` counts up by 1, `a..b+step` by a step, `a..b*factor` by a factor. The
points of a sweep are all combinations of its axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import polars as pl

from traceloom.errors import UsageError
from traceloom.model.frames import schema
from traceloom.model.result import Result

MOST_POINTS = 100_000
SweptValue = int | float | str
SweepPoint = dict[str, SweptValue]
SweepRow = dict[str, SweptValue | None]
ANSWERS = pl.Schema(
    {
        "ranks": pl.Int64,
        "samples": pl.Float64,
        "time_ns": pl.Int64,
        "p10_ns": pl.Int64,
        "p90_ns": pl.Int64,
        "cost": pl.Float64,
        "memory_bytes": pl.Int64,
        "flags": pl.String,
        "reason": pl.String,
    }
)
SENSITIVITIES = schema(
    "parameter median low high pairs",
    {"parameter": pl.String, "median": pl.Float64, "low": pl.Float64, "high": pl.Float64, "pairs": pl.Int64},
)
_RANGE = re.compile(r"(?P<first>[^.]+(?:\.\d+)?)\.\.(?P<last>[^*+]+)(?:(?P<sign>[*+])(?P<by>.+))?")


@dataclass(frozen=True, slots=True)
class SweepAxis:
    """One parameter and the values that it takes.

    Attributes:
        key: A key of the machine (`network.0.bandwidth`), `ranks`, `data_parallel`, `machine`, `device`,
            `host_factor`, or an option of what was generated.
        values: In the order of the user.
    """

    key: str
    values: tuple[SweptValue, ...]


def parse_axis(text: str) -> SweepAxis:
    """Read an axis.

    Raises:
        UsageError: slugs `bad-sweep`, with what is understood; `sweep-too-large`: a range of more than `MOST_POINTS`.

    Example:
        >>> parse_axis("ranks=8..64*2,100").values
        (8, 16, 32, 64, 100)
    """
    key, equals, listed = text.partition("=")
    if not equals or not key.strip() or not listed.strip():
        raise _bad(text, "write it as KEY=VALUES")
    values: list[SweptValue] = []
    for part in listed.split(","):
        values += _values(part.strip(), text)
    key = key.strip()
    return SweepAxis(key if "." in key else key.replace("-", "_"), tuple(dict.fromkeys(values)))


def _values(part: str, text: str) -> list[SweptValue]:
    """The values of one part between commas."""
    match = _RANGE.fullmatch(part)
    if match is None:
        if not part or ".." in part:
            raise _bad(text, f"`{part}` is no range" if part else "a value between commas is missing")
        return [_value(part)]
    first, last, by = (_value((match[name] or "1").strip()) for name in ("first", "last", "by"))
    if isinstance(first, str) or isinstance(last, str) or isinstance(by, str):
        raise _bad(text, f"`{part}` is no range of numbers")
    grows = match["sign"] == "*"
    if last < first or by <= 0 or (grows and (by <= 1 or first <= 0)):
        raise _bad(text, f"`{part}` never ends, or has no values")
    steps = math.log(last / first) / math.log(by) if grows else (last - first) / by
    if steps >= MOST_POINTS:
        raise _too_large(f"`{part}` has {steps + 1:,.0f} values")
    count = math.floor(steps + 1e-9) + 1
    return [first * by**number if grows else first + by * number for number in range(count)]


def _value(text: str) -> SweptValue:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if math.isfinite(number):
            return number
    return text


def _bad(text: str, why: str) -> UsageError:
    return UsageError(
        f"`{text}` is no sweep: {why}",
        slug="bad-sweep",
        hint="examples: `network.0.bandwidth=50,100,200`, `ranks=8..1024*2`, `layers=4..32+4`",
    )


def _too_large(what: str) -> UsageError:
    return UsageError(
        f"{what}, more than the {MOST_POINTS:,} points that a sweep may have",
        slug="sweep-too-large",
        hint="sweep fewer values at a time: a step (`+4`) or a factor (`*2`) thins a range",
    )


def points_of(axes: Sequence[SweepAxis]) -> Iterator[SweepPoint]:
    """All combinations, the last axis fastest.

    Raises:
        UsageError: slugs `bad-sweep`: a key stands twice; `sweep-too-large`.
    """
    keys = [axis.key for axis in axes]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _bad(f"{twice}=...", "the key stands twice")
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_POINTS:
        raise _too_large(f"the sweep has {count:,} points")
    return (dict(zip(keys, values, strict=True)) for values in product(*(axis.values for axis in axes)))


@dataclass(frozen=True)
class SweepTable(Result):
    """The answers of a sweep.

    Attributes:
        keys: The parameters, in the order of the user.
        points: One row per point: the parameters; ranks, samples (that a step works on: of a generated transformer
            their number, else as many times as many as the recorded step), time_ns (of a step, or of what is
            simulated), p10_ns and p90_ns (where steps were drawn), cost (of that time on all ranks, where the machine
            has a price), memory_bytes (of the rank that needs most, where it is known), flags (what lies outside of
            what was measured), reason (why there is no time), pareto: whether no other point is as good in time and
            cost per sample and in ranks, and better in one of them.
        sensitivities: One row per parameter with several numbers: by how many per cent the time changes per per cent of
            it, between neighbouring values with all else equal: median, low and high, and of how many pairs.
    """

    keys: tuple[str, ...]
    points: pl.DataFrame
    sensitivities: pl.DataFrame

    @classmethod
    def of(cls, axes: Sequence[SweepAxis], rows: Sequence[Mapping[str, SweptValue | None]]) -> SweepTable:
        """The table of points with their answers (`ANSWERS`), in any order of keys."""
        keys = tuple(axis.key for axis in axes)
        parameters = []
        for key in keys:
            values = [row.get(key) for row in rows]
            strings = any(isinstance(value, str) for value in values)
            parameters.append(
                pl.Series(f"{key}", [str(value) for value in values] if strings else values, strict=False)
            )
        answers = [
            pl.Series(name, [row.get(name) for row in rows], dtype=kind, strict=False)
            for name, kind in ANSWERS.items()
            if name not in keys
        ]
        points = pl.DataFrame([*parameters, *answers])
        points = points.with_columns(pl.Series("pareto", pareto(points)))
        return cls(keys, points, sensitivities(points, keys))


def pareto(points: pl.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which points nobody beats in time and cost per sample and in ranks, (points,); none without a time."""
    answered = points["time_ns"].is_not_null().to_numpy()
    samples = pl.col("samples").fill_null(1.0)
    ranks = pl.col("ranks").cast(pl.Float64, strict=False)  # a word among those asked for makes all of them words
    costs = points.select(pl.col("time_ns") / samples, ranks, pl.col("cost") / samples)
    table = costs.fill_null(0.0).to_numpy()
    front = np.zeros(len(table), dtype=np.bool_)
    at = np.flatnonzero(answered)
    # By time, then ranks, then cost: a point can be beaten only by those before it, and then by one of the front.
    order = at[np.lexsort(table[at].T[::-1])] if at.size else at
    best = np.zeros((0, table.shape[1]))
    for row in order.tolist():
        as_good = (best <= table[row]).all(axis=1)
        if not (as_good & (best < table[row]).any(axis=1)).any():
            front[row] = True
            best = np.vstack([best, table[row]])
    return front


def sensitivities(points: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """Per cent of the time per per cent of each numeric parameter; see `SweepTable`."""
    rows = []
    for key in keys:
        if not points[key].dtype.is_numeric():
            continue
        others = [other for other in keys if other != key]
        log = points.filter(pl.col("time_ns") > 0, pl.col(key) > 0).select(
            *others, x=pl.col(key).cast(pl.Float64).log(), y=pl.col("time_ns").cast(pl.Float64).log()
        )
        log = log.sort("x")
        slope = pl.col("y").diff() / pl.col("x").diff()
        slopes = log.select(slope.over(others) if others else slope).to_series().drop_nulls().drop_nans()
        if slopes.len():
            rows.append((key, slopes.median(), slopes.min(), slopes.max(), slopes.len()))
    return pl.DataFrame(rows, schema=SENSITIVITIES, orient="row")
