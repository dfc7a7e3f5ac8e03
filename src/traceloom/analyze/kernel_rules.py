"""Category, kind and matrix units of GPU work, by rules.

The rules are in three tables beside this file; first match wins. `kernel_rules.json` gives
categories: the event's own category comes first (copies and fills are memory), then the user's
rules, then the table; what matches nothing is compute. `kind_rules.json` gives kinds.
`matrix_rules.json` gives the use of matrix units; only kernels of the kinds gemm, attention and
convolution are looked up, since only matrix products can use these units.
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
from traceloom.analyze.names import build_vocabulary, check_pattern
from traceloom.errors import InputError, UsageError
from traceloom.trace.arrays import (
    NumberedTexts,
    gather_rows,
    get_event_column,
    move_columns_to_disk,
)
from traceloom.trace.batch import cache_per_trace, concatenate_by_trace, gather_event_column
from traceloom.trace.frames import contains_any
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import CATEGORIES as _ALL, COPY, FILL, GPU_WORK, KERNEL

Category = Literal["compute", "communication", "memory"]
WORK_CATEGORIES: tuple[str, ...] = get_args(Category)
CategoryType = pl.Enum(WORK_CATEGORIES)
EventKindType = pl.Enum([KERNEL, COPY, FILL])

# Rule name of copies and fills: the event's category decided, not its name
EVENT_CATEGORY_RULE = "category"
NO_RULE = "none"  # rule name of kernels that match nothing


class Rule(Struct, frozen=True):
    """One row of the table.

    Attributes:
        name: Shown with every kernel that it decided.
        category: compute, communication or memory.
        pattern: Regular expression (linear-time dialect: no look-around, no back references), found
            anywhere in the kernel's name, upper and lower case alike.
    """

    name: str
    category: Category
    pattern: str

    def __post_init__(self) -> None:
        if self.category not in WORK_CATEGORIES:
            raise UsageError(
                f"kernel rule {self.name!r} has the category {self.category!r}",
                slug="bad-kernel-rule",
                hint=f"use one of {', '.join(WORK_CATEGORIES)}",
            )
        check_pattern(self.name, self.pattern)


@lru_cache(maxsize=1)
def load_built_in_category_rules() -> tuple[Rule, ...]:
    """Returns the table that comes with Traceloom, in order."""
    return _parse_category_rules(names.read_built_in("kernel_rules.json"), "kernel_rules.json")


def read_rules(path: str | Path) -> tuple[Rule, ...]:
    """Reads a user's table: a JSON list of objects with `rule`, `category` and `pattern`.

    Raises:
        InputError: The file is not such a list.
        UsageError: A pattern or a category in it is invalid.
    """
    return _parse_category_rules(names.read(path), str(path))


def _parse_category_rules(rows: list[Any], location: str) -> tuple[Rule, ...]:
    fields = ("rule", "category", "pattern")
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in fields):
            raise InputError(
                "expected an object with the texts `rule`, `category` and `pattern`",
                slug="kernel-rules-unreadable",
                where=f"{location}, $[{index}]",
            )
    return tuple(Rule(row["rule"], row["category"], row["pattern"]) for row in rows)


def assign_categories(work: pl.DataFrame, rules: Iterable[Rule] = ()) -> pl.DataFrame:
    """Returns category and rule of each (name, kind).

    Args:
        work: Columns `name` and `kind` (kernel, copy or fill), one row per pair: give unique names,
            not events.
        rules: The user's rules; they come before the table.

    Returns:
        `work` with the columns `category` and `rule`.
    """
    ordered = (*rules, *load_built_in_category_rules())
    match_columns = contains_any(
        work["name"].fill_null(""), [f"(?i){rule.pattern}" for rule in ordered]
    )
    matches = [column.to_numpy() for column in match_columns]
    first_rules = np.argmax([*matches, np.ones(work.height, dtype=np.bool_)], axis=0)
    rule_numbers = np.where((work["kind"] == KERNEL).to_numpy(), first_rules, len(ordered) + 1)
    categories = [*(rule.category for rule in ordered), "compute", "memory"]
    return work.with_columns(
        pl.Series("category", categories, dtype=CategoryType)[rule_numbers],
        pl.Series("rule", [*(rule.name for rule in ordered), NO_RULE, EVENT_CATEGORY_RULE])[
            rule_numbers
        ],
    )


@cache_per_trace
def select_gpu_work(trace: Trace, rules: Iterable[Rule] = ()) -> pl.DataFrame:
    """Returns all kernels, copies and fills of a trace with their categories, by start.

    Returns:
        Columns event, name, kind, category, rule, device, stream, start_ns, end_ns (>= start:
        negative durations count as 0), launch, op; one row per event, in the order of `events`.
    """
    vocabulary, category = build_vocabulary(trace), get_event_column(trace, "category")
    gpu_rows = np.flatnonzero(np.isin(category, [_ALL.index(name) for name in GPU_WORK]))
    pair = gather_rows(vocabulary.place, vocabulary.code[gpu_rows]) * len(_ALL) + category[gpu_rows]
    unique_pairs, pair_numbers = np.unique(pair, return_inverse=True)
    kind = pl.Series(
        "kind", [_ALL[code] for code in (unique_pairs % len(_ALL)).tolist()], dtype=EventKindType
    )
    classified = assign_categories(
        pl.DataFrame([vocabulary.ordered[unique_pairs // len(_ALL)].alias("name"), kind]), rules
    )
    indices = pl.Series(pair_numbers.astype(np.uint32))
    work = trace.events[["event", "device", "stream", "start_ns", "duration_ns", "launch", "op"]][
        gpu_rows
    ]
    end_ns = pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=0)
    work = move_columns_to_disk(trace, work.with_columns(end_ns.alias("end_ns")))
    return work.select(
        "event",
        NumberedTexts(classified["name"]).column(pair_numbers).alias("name"),
        classified["kind"][indices],
        "device",
        "stream",
        "start_ns",
        "end_ns",
        "launch",
        "op",
        classified["category"][indices],
        NumberedTexts(classified["rule"]).column(pair_numbers).alias("rule"),
    )


def select_gpu_work_with_steps(traces: Sequence[Trace]) -> pl.DataFrame:
    """Returns the same of several traces, with the step that launched the work and its duration:
    step, ns.
    """
    work = concatenate_by_trace(map(select_gpu_work, traces))
    ns = pl.col("end_ns") - pl.col("start_ns")
    return work.with_columns(gather_event_column(traces, work, "event", "step"), ns.alias("ns"))


WORK_KINDS: tuple[str, ...] = (
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
WorkKindType = pl.Enum(WORK_KINDS)


class KindRule(Struct, frozen=True):
    """One row of the table; all conditions that it states must hold.

    Attributes:
        name: Shown with the GPU work that it decided.
        kind: One of KINDS.
        pattern: Regular expression (linear-time dialect: no look-around, no back references), found
            anywhere in the kernel's name, upper and lower case alike; empty for any name.
        op: The same for the name of the operator that launched it, the innermost one; empty for
            any, also none.
        under: The same for the operator or any operator or annotation around it.
    """

    name: str
    kind: str
    pattern: str = ""
    op: str = ""
    under: str = ""

    def __post_init__(self) -> None:
        if self.kind not in WORK_KINDS:
            raise UsageError(
                f"kernel rule {self.name!r} has the kind {self.kind!r}",
                slug="bad-kernel-rule",
                hint=f"use one of {', '.join(WORK_KINDS)}",
            )
        for expression in filter(None, (self.pattern, self.op, self.under)):
            check_pattern(self.name, expression)


@lru_cache(maxsize=1)
def load_built_in_kind_rules() -> tuple[KindRule, ...]:
    """Returns the table that comes with Traceloom, in order."""
    return _parse_kind_rules(names.read_built_in("kind_rules.json"), "kind_rules.json")


def read_kind_rules(path: str | Path) -> tuple[KindRule, ...]:
    """Reads a user's table: a JSON list of objects with `rule`, `kind` and optionally `pattern`,
    `op`, `under`.

    Raises:
        InputError: The file is not such a list.
        UsageError: A pattern or a kind in it is invalid.
    """
    return _parse_kind_rules(names.read(path), str(path))


def _parse_kind_rules(rows: list[Any], location: str) -> tuple[KindRule, ...]:
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
                where=f"{location}, $[{index}]",
            )
        rules.append(KindRule(row["rule"], row["kind"], *(row.get(key, "") for key in conditions)))
    return tuple(rules)


class KindMatcher(Struct, frozen=True):
    """Matches rules; patterns are compared once per distinct name.

    Attributes:
        rules: In order.
        contexts: The distinct patterns of launching operators; the index of a pattern is its bit.
    """

    rules: tuple[KindRule, ...]
    op_patterns: tuple[str, ...]

    @classmethod
    def of(cls, rules: Iterable[KindRule]) -> KindMatcher:
        rules = tuple(rules)
        contexts = tuple(
            dict.fromkeys(text for rule in rules for text in (rule.op, rule.under) if text)
        )
        if len(contexts) > 64:
            raise UsageError(
                f"{len(contexts)} patterns of operators are too many: at most 64",
                slug="bad-kernel-rule",
            )
        return cls(rules, contexts)

    def compute_op_bits(self, names: pl.Series) -> NDArray[np.uint64]:
        """Returns for each name a bit per context that it matches; shape (names,)."""
        bits = np.zeros(names.len(), dtype=np.uint64)
        for bit, matches in enumerate(match_patterns(names, self.op_patterns)):
            bits |= matches.astype(np.uint64) << np.uint64(bit)
        return bits

    def first(
        self,
        names: pl.Series,
        name_indices: NDArray[np.int64],
        op_bits: NDArray[np.uint64],
        ancestor_bits: NDArray[np.uint64],
    ) -> NDArray[np.int64]:
        """Returns the index of the first rule that holds for each piece of work; `len(rules)` where
        none does.

        Args:
            names: Distinct names of kernels.
            name_indices: Index of each piece's name in `names`; shape (work,).
            op_bits: Context bits of the operator that launched it.
            ancestor_bits: Context bits of that operator and of all around it.
        """
        first_rule = np.full(name_indices.size, len(self.rules), dtype=np.int64)
        is_unmatched = np.ones(name_indices.size, dtype=np.bool_)
        matches = match_patterns(names, [rule.pattern for rule in self.rules])
        for index, rule in enumerate(self.rules):
            is_match = is_unmatched & matches[index][name_indices]
            for text, bits in ((rule.op, op_bits), (rule.under, ancestor_bits)):
                if text:
                    is_match &= (bits >> np.uint64(self.op_patterns.index(text))) & np.uint64(
                        1
                    ) == 1
            first_rule[is_match] = index
            is_unmatched &= ~is_match
        return first_rule


def match_patterns(names: pl.Series, patterns: Sequence[str]) -> list[NDArray[np.bool_]]:
    """Returns for each expression which names match it, upper and lower case alike."""
    return [
        column.to_numpy() for column in contains_any(names, [f"(?i){text}" for text in patterns])
    ]


def load_rules(paths: Iterable[str | Path]) -> tuple[KindRule, ...]:
    """Reads files of rules.

    A `.py` file is run as a program: it is expected to register models of operators (see
    `analyze.flops`), which stay registered as long as the process lives. A `.json` file is a list
    of rules for kinds of kernels.

    Args:
        paths: The files, in order of precedence.

    Returns:
        The rules for kinds of kernels, of all `.json` files.

    Raises:
        InputError: slugs `rules-failed` (a `.py` file cannot be read, or fails),
            `kernel-rules-unreadable`.
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
                # Any error of a user's program is reported as an error of that program.
                frames = traceback.extract_tb(error.__traceback__)
                lines = [frame.lineno for frame in frames if frame.filename == str(path)]
                location = f"{path}, line {lines[-1]}" if lines else str(path)
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                message = f"the rules cannot be loaded: {reason}"
                raise InputError(message, slug="rules-failed", where=location) from error
        else:
            raise UsageError(
                f"`{path}` is no file of rules: its ending is neither .py nor .json",
                slug="no-such-rules",
                hint="write models of operators in Python, rules for kinds of kernels as JSON",
            )
    return tuple(rules)


MATRIX_KINDS = ("gemm", "attention", "convolution")
MATRIX_UNIT_STATES = ("used", "unused", "unknown", "none")
MatrixUnitStateType = pl.Enum(MATRIX_UNIT_STATES)
_MATRIX_STATE_BY_USE = {"yes": "used", "no": "unused", "none": "none"}


@lru_cache(maxsize=1)
def load_built_in_matrix_rules() -> tuple[dict[str, str], ...]:
    """Returns the table: rule, uses (yes, no, none: no matrix product), pattern, example, why."""
    return tuple(names.read_built_in("matrix_rules.json"))


def classify_matrix_units(kernels: pl.DataFrame) -> pl.Series:
    """Classifies whether kernels use matrix units; shape (kernels,).

    Args:
        kernels: Columns `name` and `kind` (see `kernel_kinds`); give unique pairs, not events.

    Returns:
        `used`; `unused`: a matrix product on scalar or vector units; `unknown`: a matrix product
        whose name does not show it; `none`: not a matrix product.
    """
    state = np.full(kernels.height, MATRIX_UNIT_STATES.index("none"), dtype=np.uint32)
    eligible = np.flatnonzero(kernels["kind"].cast(pl.String).is_in(MATRIX_KINDS).to_numpy())
    if eligible.size:
        # Also for the next rank
        eligible = eligible[kernels["name"][eligible].arg_sort().to_numpy()]
        uses = [
            MATRIX_UNIT_STATES.index(_MATRIX_STATE_BY_USE[rule["uses"]])
            for rule in load_built_in_matrix_rules()
        ]
        matches = match_patterns(
            kernels["name"][eligible], [rule["pattern"] for rule in load_built_in_matrix_rules()]
        )
        first = np.argmax([*matches, np.ones(eligible.size, dtype=np.bool_)], axis=0)
        state[eligible] = np.array([*uses, MATRIX_UNIT_STATES.index("unknown")], dtype=np.uint32)[
            first
        ]
    return pl.Series("matrix_units", MATRIX_UNIT_STATES, dtype=MatrixUnitStateType)[state]
