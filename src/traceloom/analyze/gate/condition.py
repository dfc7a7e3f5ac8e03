"""What a run must not do: `step_time > 3%`."""

from __future__ import annotations

import math
import re

from msgspec import Struct

from traceloom.errors import UsageError

SCALARS = {
    "step_time": "time",
    "gpu_time": "time",
    "exposed_communication": "time",
    "idle": "time",
    "launches": "count",
    "memory_peak": "bytes",
}
"""Metrics of a whole step, with what they are measured in."""
TABLES = {"kernel": "time", "kind": "time", "op": "time", "op_gpu": "time"}
"""Metrics of a part of a step: what follows the colon chooses it."""
DEFAULT = "step_time > 3%"
PERCENT = "%"
UNDISTURBED = "p10"
"""A low percentile: what others on the machine do to a program makes steps longer, never shorter."""
_UNITS = {
    "time": {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9},
    "bytes": {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
    "count": {"": 1.0},
}
_WHOLE = re.compile(r"\s*(?P<metric>.+?)\s*(?P<sign>[<>])\s*(?P<number>[+-]?[0-9.]+)\s*(?P<unit>[A-Za-zµ%]*)\s*")
_STATISTIC = re.compile(r"(?P<statistic>mean|median|p[1-9]\d?)\((?P<metric>.*)\)")
_LONGEST = 500
_HINT = "as in 'step_time > 3%', 'kernel:gemm > 5%', 'memory_peak > 100MB', 'p10(step_time) > 2%', 'launches > 0'"


class Condition(Struct, frozen=True):
    """A change that fails the check.

    Attributes:
        text: As the user wrote it.
        metric: One of `SCALARS` or `TABLES`.
        chosen: Of a table: the regular expression (of `kind` the name) that chooses rows; else empty.
        statistic: What is taken over the steps of a run: `mean`, `median`, or a percentile from `p1` to `p99`.
        above: The check fails where the change is above the limit; else where it is below.
        limit: The change, new less base: a fraction of the base where `relative`, else ns, bytes or a count per step.
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
        """What the metric is measured in: time (ns), bytes or count."""
        return SCALARS.get(self.metric) or TABLES[self.metric]

    @property
    def name(self) -> str:
        """The metric as the user spells it."""
        metric = self.name_of_metric
        return metric if self.statistic == "mean" else f"{self.statistic}({metric})"

    @property
    def name_of_metric(self) -> str:
        """The same without the statistic."""
        return f"{self.metric}:{self.chosen}" if self.metric in TABLES else self.metric


def parse(text: str) -> Condition:
    """Read a condition.

    Raises:
        UsageError: `bad-condition`.
    """
    match = _WHOLE.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise _bad(f"`{text[:80]}` is no condition")
    metric, statistic = match["metric"], "mean"
    if inner := _STATISTIC.fullmatch(metric):
        metric, statistic = inner["metric"].strip(), inner["statistic"]
    name, colon, chosen = metric.partition(":")
    exists = name in (TABLES if colon else SCALARS) and (not colon or chosen.strip())
    if not exists:
        names = ", ".join([*SCALARS, *(f"{table}:..." for table in TABLES)])
        raise _bad(f"`{metric}` is not a metric; there are {names}")
    chosen = chosen.strip()
    try:
        re.compile(chosen)
    except (re.error, OverflowError, RecursionError) as error:
        raise _bad(f"`{chosen}` is no regular expression: {error}") from error
    measure = SCALARS.get(name) or TABLES[name]
    try:
        limit = float(match["number"])
    except ValueError:
        raise _bad(f"`{match['number']}` is no number") from None
    if not math.isfinite(limit):
        raise _bad("the limit is too large")
    unit, units = match["unit"], _UNITS[measure]
    if unit != PERCENT and unit not in units:
        have = ", ".join([PERCENT, *filter(None, units)])
        if not unit:
            raise _bad(f"{name} needs a unit: {have}")
        raise _bad(f"`{unit}` is no unit of {name}; it has {have}{' or no unit' if '' in units else ''}")
    limit = limit / 100 if unit == PERCENT else limit * units[unit]
    return Condition(text.strip(), name, chosen, statistic, match["sign"] == ">", limit, unit == PERCENT)


def _bad(what: str) -> UsageError:
    return UsageError(what, slug="bad-condition", hint=_HINT)
