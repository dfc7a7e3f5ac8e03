"""The sections of a report beyond its core, one module per question; see `section.py` for what one is.

A section is loaded when it is asked for: a report of the core alone loads none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from traceloom.errors import UsageError
from traceloom.report.faults import FAILED
from traceloom.report.sections.section import Section

_HOMES = {
    "memory_owners": "memory_owners",
    "per_step": "per_step",
    "kinds": "kinds",
    "kernel_shapes": "kernel_shapes",
    "copies": "copies",
    "counters": "counters",
    "critical_path": "critical_path",
    "idle_gaps": "idle_gaps",
    "launches": "launches",
    "graph_launches": "graph_launches",
    "patterns": "patterns",
    "roofline": "roofline",
    "flame": "flame",
    "blocking_calls": "blocking_calls",
    "threads": "threads",
    "compile": "compiled",
    "collectives": "collectives",
    "groups": "groups",
    "rank_matrix": "rank_matrix",
    "across_ranks": "across_ranks",
    "slow_steps": "slow_steps",
    "imbalance": "imbalance",
    "pipeline": "pipeline",
    "anti_patterns": "anti_patterns",
    "inference": "inference",
}
KEYS = tuple(_HOMES)
"""In the order of every view; the module of a key is the value."""

CORE = "core"
FINDINGS = "findings"
BESIDE = (CORE, FINDINGS)
"""Parts of a report that `--only` can name beside the sections."""


@cache
def section(key: str) -> Section[Any]:
    """The section of a key."""
    loaded: Section[Any] = importlib.import_module(f"{__name__}.{_HOMES[key]}").SECTION
    return loaded


def every() -> tuple[Section[Any], ...]:
    """All sections."""
    return tuple(section(key) for key in KEYS)


def chosen(only: Sequence[str] | None) -> tuple[Section[Any], ...]:
    """The sections that `--only` asks for; all where it is None, none for `core` alone.

    Raises:
        UsageError: slug `no-such-section`.
    """
    if only is None:
        return every()
    for key in only:
        if key not in KEYS and key not in BESIDE:
            have = ", ".join([*BESIDE, *KEYS])
            raise UsageError(f"`{key}` is no section of the report", slug="no-such-section", hint=f"use one of {have}")
    return tuple(section(key) for key in KEYS if key in only)


def shown(document: dict[str, Any]) -> tuple[Section[Any], ...]:
    """The sections that a document was asked for, and that did not fail."""
    left_out = {
        entry["path"] for entry in document.get("absent") or [] if entry["reason"].startswith((NOT_ASKED, FAILED))
    }
    return tuple(section(key) for key in KEYS if key in document and key not in left_out)


NOT_ASKED = "not asked for (--only)"


def reasons(some: Iterable[Section[Any]]) -> dict[str, str]:
    """Why values of the sections can be unknown."""
    return {path: reason for each in some for path, reason in each.reasons.items()}
