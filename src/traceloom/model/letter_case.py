"""Matching names with upper and lower case alike, without asking the regular expression for it.

An expression with `(?i)` knows the other cases of every letter of the world and takes three times as long to make and
to run; nearly all of ours are plain ASCII, and can be put to lower case together with the names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import polars as pl

_ANY_CASE = "(?i)"
# What means the same when its letters are put to lower case: no escape that a capital or a code point follows, no group
# with flags or a name, no range but the usual ones (and no `[:upper:]`).
_PLAIN = re.compile(
    r"(?:\\[^A-Zaceg-rtuvx-z0-9]|\(\?:|(?<!\()\?|[^\\?-]|(?<=a)-(?=z)|(?<=A)-(?=Z)|(?<=[0-9])-(?=[0-9]))*"
)


@lru_cache(maxsize=256)
def lowered(pattern: str) -> str | None:
    """The expression that finds in names of lower case what `pattern` finds in any case; None where there is none."""
    plain = pattern.isascii() and "[:" not in pattern and _PLAIN.fullmatch(pattern)
    return pattern.lower() if plain else None


def contains(names: pl.Series, pattern: str) -> pl.Series:
    """Which names hold a regular expression; one that begins with `(?i)` in any case. Shape (names,)."""
    if not pattern.startswith(_ANY_CASE):
        return names.str.contains(pattern)
    return contain(names, [pattern.removeprefix(_ANY_CASE)])[0]


def contain(names: pl.Series, patterns: Sequence[str]) -> list[pl.Series]:
    """For each of several regular expressions, which names hold it, upper and lower case alike."""
    frame = pl.DataFrame([names.alias("name"), names.str.to_lowercase().alias("lower")])
    conditions = [
        (pl.col("name").str.contains(f"{_ANY_CASE}{text}") if low is None else pl.col("lower").str.contains(low))
        for text in patterns
        for low in (lowered(text),)
    ]
    return frame.select(expr.alias(str(at)) for at, expr in enumerate(conditions)).get_columns() if conditions else []
