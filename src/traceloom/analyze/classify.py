"""Which GPU work is communication, which is memory, which is compute, and by which rule.

The rules stand in one table, `kernel_rules.json` beside this file. The event's own category comes first (copies and
fills are memory), then the user's rules, then the table, first match wins; what matches nothing is compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze import rule_table
from traceloom.analyze.remembered import per_trace
from traceloom.analyze.rule_table import check_pattern
from traceloom.analyze.stacked import of_events, stacked
from traceloom.analyze.vocabulary import vocabulary
from traceloom.errors import InputError, UsageError
from traceloom.model import Trace
from traceloom.model.arrays import Texts, column, lookup, on_disk
from traceloom.model.category import CATEGORIES as _ALL
from traceloom.model.category import COPY, FILL, GPU_WORK, KERNEL
from traceloom.model.letter_case import contain

Category = Literal["compute", "communication", "memory"]
CATEGORIES: tuple[str, ...] = get_args(Category)
CategoryType = pl.Enum(CATEGORIES)
KindType = pl.Enum([KERNEL, COPY, FILL])

BY_CATEGORY = "category"  # rule name of copies and fills: the event's category decided, not its name
NO_RULE = "none"  # rule name of kernels that match nothing


class Rule(Struct, frozen=True):
    """One row of the table.

    Attributes:
        name: Shown beside every kernel that it decided.
        category: compute, communication or memory.
        pattern: Regular expression (linear-time dialect: no look-around, no back references), found anywhere in the
            kernel's name, upper and lower case alike.
    """

    name: str
    category: Category
    pattern: str

    def __post_init__(self) -> None:
        if self.category not in CATEGORIES:
            raise UsageError(
                f"kernel rule {self.name!r} has the category {self.category!r}",
                slug="bad-kernel-rule",
                hint=f"use one of {', '.join(CATEGORIES)}",
            )
        check_pattern(self.name, self.pattern)


@lru_cache(maxsize=1)
def built_in_rules() -> tuple[Rule, ...]:
    """The table that comes with Traceloom, in order."""
    return _rules(rule_table.built_in("kernel_rules.json"), "kernel_rules.json")


def read_rules(path: str | Path) -> tuple[Rule, ...]:
    """A table of the user's: a JSON list of objects with `rule`, `category` and `pattern`.

    Raises:
        InputError: The file is not such a list.
        UsageError: A pattern or a category in it cannot be right.
    """
    return _rules(rule_table.read(path), str(path))


def _rules(rows: list[Any], where: str) -> tuple[Rule, ...]:
    fields = ("rule", "category", "pattern")
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in fields):
            raise InputError(
                "expected an object with the texts `rule`, `category` and `pattern`",
                slug="kernel-rules-unreadable",
                where=f"{where}, $[{index}]",
            )
    return tuple(Rule(row["rule"], row["category"], row["pattern"]) for row in rows)


def classify(work: pl.DataFrame, rules: Iterable[Rule] = ()) -> pl.DataFrame:
    """Category and rule of each (name, kind).

    Args:
        work: Columns `name` and `kind` (kernel, copy or fill), one row per pair: give unique names, not events.
        rules: The user's rules; they come before the table.

    Returns:
        `work` with the columns `category` and `rule`.
    """
    ordered = (*rules, *built_in_rules())
    hits = contain(work["name"].fill_null(""), [f"(?i){rule.pattern}" for rule in ordered])
    matches = [column.to_numpy() for column in hits]
    first = np.argmax([*matches, np.ones(work.height, dtype=np.bool_)], axis=0)
    number = np.where((work["kind"] == KERNEL).to_numpy(), first, len(ordered) + 1)
    categories = [*(rule.category for rule in ordered), "compute", "memory"]
    return work.with_columns(
        pl.Series("category", categories, dtype=CategoryType)[number],
        pl.Series("rule", [*(rule.name for rule in ordered), NO_RULE, BY_CATEGORY])[number],
    )


def gpu_work(trace: Trace, rules: Iterable[Rule] = ()) -> pl.DataFrame:
    """All kernels, copies and fills of a trace with their categories, by start.

    Returns:
        Columns event, name, kind, category, rule, device, stream, start_ns, end_ns (>= start: negative durations
        count as 0), launch, op; one row per event, in the order of `events`.
    """
    rules = tuple(rules)
    return _gpu_work(trace, rules) if rules else _gpu_work_by_table(trace)


def stepped_work(traces: Sequence[Trace]) -> pl.DataFrame:
    """The same of several traces (`stacked`), with the step that launched it and its duration: step, ns."""
    work = stacked(map(gpu_work, traces))
    ns = pl.col("end_ns") - pl.col("start_ns")
    return work.with_columns(of_events(traces, work, "event", "step"), ns.alias("ns"))


@per_trace
def _gpu_work_by_table(trace: Trace) -> pl.DataFrame:
    return _gpu_work(trace, ())


def _gpu_work(trace: Trace, rules: tuple[Rule, ...]) -> pl.DataFrame:
    words, category = vocabulary(trace), column(trace, "category")
    row = np.flatnonzero(np.isin(category, [_ALL.index(name) for name in GPU_WORK]))
    pair = lookup(words.place, words.code[row]) * len(_ALL) + category[row]
    used, number = np.unique(pair, return_inverse=True)
    kind = pl.Series("kind", [_ALL[code] for code in (used % len(_ALL)).tolist()], dtype=KindType)
    classified = classify(pl.DataFrame([words.ordered[used // len(_ALL)].alias("name"), kind]), rules)
    indices = pl.Series(number.astype(np.uint32))
    work = trace.events[["event", "device", "stream", "start_ns", "duration_ns", "launch", "op"]][row]
    ends = pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=0)
    work = on_disk(trace, work.with_columns(ends.alias("end_ns")))
    return work.select(
        "event",
        Texts(classified["name"]).column(number).alias("name"),
        classified["kind"][indices],
        "device",
        "stream",
        "start_ns",
        "end_ns",
        "launch",
        "op",
        classified["category"][indices],
        Texts(classified["rule"]).column(number).alias("rule"),
    )
