"""The rules that tell the kind of a kernel: by its name and, where that is ambiguous, by who launched it.

They stand in one table, `kind_rules.json` beside this file; the first that matches decides.
"""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze import rule_table
from traceloom.analyze.rule_table import check_pattern
from traceloom.errors import InputError, UsageError
from traceloom.model.letter_case import contain

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
    return _rules(rule_table.built_in("kind_rules.json"), "kind_rules.json")


def read_kind_rules(path: str | Path) -> tuple[KindRule, ...]:
    """A table of the user's: a JSON list of objects with `rule`, `kind` and `pattern`, `op`, `under` as wanted.

    Raises:
        InputError: The file is not such a list.
        UsageError: A pattern or a kind in it cannot be right.
    """
    return _rules(rule_table.read(path), str(path))


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
    return [column.to_numpy() for column in contain(names, [f"(?i){text}" for text in expressions])]


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
