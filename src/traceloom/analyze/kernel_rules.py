"""Category, kind and matrix units of GPU work, by rules.

The rules stand in one table, `kernel_rules.json` beside this file. The event's own category comes first (copies and
fills are memory), then the user's rules, then the table, first match wins; what matches nothing is compute.

They stand in one table, `kind_rules.json` beside this file; the first that matches decides.

The rules stand in one table, `matrix_rules.json` beside this file; the first that matches decides. Only matrix products
can use these units, so only kernels of the kinds gemm, attention and convolution are asked.
"""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze import names
from traceloom.analyze.names import check_pattern, vocabulary
from traceloom.errors import InputError, UsageError
from traceloom.trace.arrays import Texts, column, gather_rows, on_disk
from traceloom.trace.batch import of_events, per_trace, stacked
from traceloom.trace.frames import contains_any
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import CATEGORIES as _ALL
from traceloom.trace.vocabulary import COPY, FILL, GPU_WORK, KERNEL

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
    return _parse_category_rules(names.read_built_in("kernel_rules.json"), "kernel_rules.json")


def read_rules(path: str | Path) -> tuple[Rule, ...]:
    """A table of the user's: a JSON list of objects with `rule`, `category` and `pattern`.

    Raises:
        InputError: The file is not such a list.
        UsageError: A pattern or a category in it cannot be right.
    """
    return _parse_category_rules(names.read(path), str(path))


def _parse_category_rules(rows: list[Any], where: str) -> tuple[Rule, ...]:
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
    hits = contains_any(work["name"].fill_null(""), [f"(?i){rule.pattern}" for rule in ordered])
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
    pair = gather_rows(words.place, words.code[row]) * len(_ALL) + category[row]
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


KINDS: tuple[str, ...] = (
    "gemm",
    "attention",
    "convolution",
    "normalisation",
    "elementwise",
    "reduction",
    "embedding",
    "optimizer",
    "copy",
    "communication",
    "other",
)
KindOfWork = pl.Enum(KINDS)


class KindRule(Struct, frozen=True):
    """One row of the table; all that it states must hold.

    Attributes:
        name: Shown beside the GPU work that it decided.
        kind: One of KINDS.
        pattern: Regular expression (linear-time dialect: no look-around, no back references), found anywhere in the
            kernel's name, upper and lower case alike; empty for any name.
        op: The same for the name of the operator that launched it, the innermost one; empty for any, also none.
        under: The same for the operator or any operator or annotation around it.
    """

    name: str
    kind: str
    pattern: str = ""
    op: str = ""
    under: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(
                f"kernel rule {self.name!r} has the kind {self.kind!r}",
                slug="bad-kernel-rule",
                hint=f"use one of {', '.join(KINDS)}",
            )
        for expression in filter(None, (self.pattern, self.op, self.under)):
            check_pattern(self.name, expression)


@lru_cache(maxsize=1)
def built_in_kind_rules() -> tuple[KindRule, ...]:
    """The table that comes with Traceloom, in order."""
    return _rules(names.read_built_in("kind_rules.json"), "kind_rules.json")


def read_kind_rules(path: str | Path) -> tuple[KindRule, ...]:
    """A table of the user's: a JSON list of objects with `rule`, `kind` and `pattern`, `op`, `under` as wanted.

    Raises:
        InputError: The file is not such a list.
        UsageError: A pattern or a kind in it cannot be right.
    """
    return _rules(names.read(path), str(path))


def _rules(rows: list[Any], where: str) -> tuple[KindRule, ...]:
    conditions = ("pattern", "op", "under")
    rules = []
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not (
            all(isinstance(row.get(key), str) for key in ("rule", "kind"))
            and all(isinstance(row.get(key, ""), str) for key in conditions)
            and any(row.get(key) for key in conditions)
        ):
            raise InputError(
                "expected an object with the texts `rule` and `kind` and at least one of `pattern`, `op` and `under`",
                slug="kernel-rules-unreadable",
                where=f"{where}, $[{index}]",
            )
        rules.append(KindRule(row["rule"], row["kind"], *(row.get(key, "") for key in conditions)))
    return tuple(rules)


class Matcher(Struct, frozen=True):
    """Which rules apply; patterns are compared once per distinct name.

    Attributes:
        rules: In order.
        contexts: The distinct patterns of launching operators; a pattern's place here is its bit.
    """

    rules: tuple[KindRule, ...]
    contexts: tuple[str, ...]

    @classmethod
    def of(cls, rules: Iterable[KindRule]) -> Matcher:
        """The matcher of some rules."""
        rules = tuple(rules)
        contexts = tuple(dict.fromkeys(text for rule in rules for text in (rule.op, rule.under) if text))
        if len(contexts) > 64:
            raise UsageError(f"{len(contexts)} patterns of operators are too many: at most 64", slug="bad-kernel-rule")
        return cls(rules, contexts)

    def context_bits(self, names: pl.Series) -> NDArray[np.uint64]:
        """For each name, a bit per context that it matches; shape (names,)."""
        bits = np.zeros(names.len(), dtype=np.uint64)
        for bit, matches in enumerate(holding(names, self.contexts)):
            bits |= matches.astype(np.uint64) << np.uint64(bit)
        return bits

    def first(
        self, names: pl.Series, name: NDArray[np.int64], own: NDArray[np.uint64], under: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """The index of the first rule that holds for each piece of work; `len(rules)` where none does.

        Args:
            names: Distinct names of kernels.
            name: Index of each piece's name in `names`; shape (work,).
            own: Context bits of the operator that launched it.
            under: Context bits of that operator and of all around it.
        """
        first_rule = np.full(name.size, len(self.rules), dtype=np.int64)
        open_ = np.ones(name.size, dtype=np.bool_)
        matches = holding(names, [rule.pattern for rule in self.rules])
        for index, rule in enumerate(self.rules):
            fits = open_ & matches[index][name]
            for text, bits in ((rule.op, own), (rule.under, under)):
                if text:
                    fits &= (bits >> np.uint64(self.contexts.index(text))) & np.uint64(1) == 1
            first_rule[fits] = index
            open_ &= ~fits
        return first_rule


def holding(names: pl.Series, expressions: Sequence[str]) -> list[NDArray[np.bool_]]:
    """For each expression, which names hold it, upper and lower case alike."""
    return [column.to_numpy() for column in contains_any(names, [f"(?i){text}" for text in expressions])]


def load_rules(paths: Iterable[str | Path]) -> tuple[KindRule, ...]:
    """Read files of rules.

    A `.py` file is run as a program is: it is expected to register models of operators (see `analyze.flops`), which
    stay registered as long as the process lives. A `.json` file is a list of rules for kinds of kernels.

    Args:
        paths: The files, in the order in which they count.

    Returns:
        The rules for kinds of kernels, of all `.json` files.

    Raises:
        InputError: slugs `rules-failed` (a `.py` file cannot be read, or fails), `kernel-rules-unreadable`.
        UsageError: slugs `no-such-rules` (any other ending), `bad-kernel-rule`.
    """
    rules: list[KindRule] = []
    for path in map(Path, paths):
        if path.suffix == ".json":
            rules += read_kind_rules(path)
        elif path.suffix == ".py":
            try:
                runpy.run_path(str(path))
            except (Exception, SystemExit) as error:
                # Whatever a program of the user's raises is said of that program.
                frames = traceback.extract_tb(error.__traceback__)
                lines = [frame.lineno for frame in frames if frame.filename == str(path)]
                where = f"{path}, line {lines[-1]}" if lines else str(path)
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                message = f"the rules cannot be loaded: {reason}"
                raise InputError(message, slug="rules-failed", where=where) from error
        else:
            raise UsageError(
                f"`{path}` is no file of rules: its ending is neither .py nor .json",
                slug="no-such-rules",
                hint="write models of operators in Python, rules for kinds of kernels as JSON",
            )
    return tuple(rules)


ELIGIBLE = ("gemm", "attention", "convolution")
STATES = ("used", "unused", "unknown", "none")
StateType = pl.Enum(STATES)
_STATE = {"yes": "used", "no": "unused", "none": "none"}


@lru_cache(maxsize=1)
def rules() -> tuple[dict[str, str], ...]:
    """The table: rule, uses (yes, no, none: no matrix product), pattern, example, why."""
    return tuple(names.read_built_in("matrix_rules.json"))


def matrix_units(kernels: pl.DataFrame) -> pl.Series:
    """Whether kernels use matrix units; shape (kernels,).

    Args:
        kernels: Columns `name` and `kind` (see `kernel_kinds`); give unique pairs, not events.

    Returns:
        `used`; `unused`: a matrix product on scalar or vector units; `unknown`: a matrix product whose name does not
        tell; `none`: no matrix product.
    """
    state = np.full(kernels.height, STATES.index("none"), dtype=np.uint32)
    eligible = np.flatnonzero(kernels["kind"].cast(pl.String).is_in(ELIGIBLE).to_numpy())
    if eligible.size:
        eligible = eligible[kernels["name"][eligible].arg_sort().to_numpy()]  # as the next rank will ask
        uses = [STATES.index(_STATE[rule["uses"]]) for rule in rules()]
        matches = holding(kernels["name"][eligible], [rule["pattern"] for rule in rules()])
        first = np.argmax([*matches, np.ones(eligible.size, dtype=np.bool_)], axis=0)
        state[eligible] = np.array([*uses, STATES.index("unknown")], dtype=np.uint32)[first]
    return pl.Series("matrix_units", STATES, dtype=StateType)[state]
