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

_RECENT: dict[tuple[str, ...], list[tuple[pl.Series, list[pl.Series]]]] = {}  # for each patterns, two lists of names
_LOWER: list[pl.Series] = []  # the names put to lower case last, and these


def _lower_case(names: pl.Series) -> pl.Series:
    if not _LOWER or not _LOWER[0].equals(names):
        _LOWER[:] = names, names.str.to_lowercase().alias("lower")
    return _LOWER[1]


@lru_cache(maxsize=256)
def lowered(pattern: str) -> str | None:
    """The expression that finds in names of lower case what `pattern` finds in any case; None where there is none."""
    plain = pattern.isascii() and "[:" not in pattern and _PLAIN.fullmatch(pattern)
    return pattern.lower() if plain else None


def contains(names: pl.Series, pattern: str) -> pl.Series:
    """Which names hold a regular expression; one that begins with `(?i)` in any case. Shape (names,)."""
    return contain(names, [pattern])[0]


def contain(names: pl.Series, patterns: Sequence[str]) -> list[pl.Series]:
    """The same for each of several regular expressions. Remembered: the next rank mostly has the names of this one, or
    where this one had more than the others, those of the rank before.
    """
    recent = _RECENT.setdefault(tuple(patterns), [])
    for earlier, columns in recent:
        if earlier.equals(names):
            return columns
    frame = names.to_frame("name")
    if any(pattern.startswith(_ANY_CASE) for pattern in patterns):
        frame = frame.hstack([_lower_case(names)])
    holds = [
        pl.col("name" if low is None else "lower").str.contains(low or pattern).alias(str(at))
        for at, pattern in enumerate(patterns)
        for low in (lowered(pattern.removeprefix(_ANY_CASE)) if pattern.startswith(_ANY_CASE) else None,)
    ]
    columns = frame.select(holds).get_columns() if holds else []
    recent[:] = [(names, columns), *recent[:1]]
    return columns
