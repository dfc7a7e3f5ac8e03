"""Tables of rules about kernels, of ours and of users: reading them, and checking the patterns in them."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import polars as pl

from traceloom.errors import InputError, UsageError
from traceloom.files import read_small
from traceloom.model.letter_case import contains

_MOST_BYTES = 1 << 26
_OWN: set[str] = set()  # patterns of our own tables, which need no check in every run


def built_in(name: str) -> list[Any]:
    """The rows of a table that comes with Traceloom."""
    rows = listed(json.loads(files("traceloom.analyze").joinpath(name).read_text(encoding="utf-8")), name)
    _OWN.update(row[key] for row in rows for key in ("pattern", "op", "under") if key in row)
    return rows


def read(path: str | Path) -> list[Any]:
    """The rows of a table of the user's.

    Raises:
        InputError: slug `kernel-rules-unreadable`: the file is no JSON list.
    """
    try:
        rows = json.loads(read_small(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"kernel rules cannot be read: {error}", slug="kernel-rules-unreadable", where=str(path)
        ) from error
    return listed(rows, str(path))


def listed(rows: Any, where: str) -> list[Any]:
    """The rows, where they are a list."""
    if not isinstance(rows, list):
        raise InputError("expected a JSON list of kernel rules", slug="kernel-rules-unreadable", where=where)
    return rows


def check_pattern(rule: str, pattern: str) -> None:
    """Refuse a pattern that is no regular expression.

    Raises:
        UsageError: slug `bad-kernel-rule`.
    """
    if pattern in _OWN:
        return
    try:
        contains(pl.Series([""]), f"(?i){pattern}")
    except pl.exceptions.ComputeError as error:
        raise UsageError(
            f"kernel rule {rule!r} has a pattern that is no regular expression: {pattern!r}",
            slug="bad-kernel-rule",
            hint="look-around and back references are not supported",
        ) from error
