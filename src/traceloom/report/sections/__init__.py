"""The sections of a report beyond its core, one module per question; see `section.py` for what one is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from traceloom.errors import UsageError
from traceloom.report.sections import (
    across_ranks,
    anti_patterns,
    blocking_calls,
    collectives,
    compiled,
    copies,
    counters,
    critical_path,
    flame,
    graph_launches,
    groups,
    idle_gaps,
    imbalance,
    inference,
    kernel_shapes,
    kinds,
    launches,
    patterns,
    per_step,
    pipeline,
    rank_matrix,
    roofline,
    slow_steps,
    threads,
)
from traceloom.report.sections.section import Section

SECTIONS: tuple[Section[Any], ...] = (
    per_step.SECTION,
    kinds.SECTION,
    kernel_shapes.SECTION,
    copies.SECTION,
    counters.SECTION,
    critical_path.SECTION,
    idle_gaps.SECTION,
    launches.SECTION,
    graph_launches.SECTION,
    patterns.SECTION,
    roofline.SECTION,
    flame.SECTION,
    blocking_calls.SECTION,
    threads.SECTION,
    compiled.SECTION,
    collectives.SECTION,
    groups.SECTION,
    rank_matrix.SECTION,
    across_ranks.SECTION,
    slow_steps.SECTION,
    imbalance.SECTION,
    pipeline.SECTION,
    anti_patterns.SECTION,
    inference.SECTION,
)
"""In the order of every view."""

CORE = "core"
FINDINGS = "findings"
BESIDE = (CORE, FINDINGS)
"""Parts of a report that `--only` can name beside the sections."""


def chosen(only: Sequence[str] | None) -> tuple[Section[Any], ...]:
    """The sections that `--only` asks for; all where it is None, none for `core` alone.

    Raises:
        UsageError: slug `no-such-section`.
    """
    if only is None:
        return SECTIONS
    known = {section.key: section for section in SECTIONS}
    for key in only:
        if key not in known and key not in BESIDE:
            have = ", ".join([*BESIDE, *known])
            raise UsageError(f"`{key}` is no section of the report", slug="no-such-section", hint=f"use one of {have}")
    return tuple(section for section in SECTIONS if section.key in only)


def reasons() -> dict[str, str]:
    """Why values of the sections can be unknown."""
    return {path: reason for section in SECTIONS for path, reason in section.reasons.items()}
