"""The sections of a report, one module per question; see `section.py`.

A section beyond the core is loaded when it is requested: a report of the core alone loads none of
them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from traceloom.errors import UsageError, nearest

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.sections.section import Section

CORE_KEYS = (
    "breakdown",
    "steps",
    "idle",
    "host",
    "kernels",
    "operators",
    "modules",
    "communication",
    "memory",
    "data_loading",
)
"""The sections of the core, which every report has, in the order of a terminal."""

EXTRA_KEYS = (
    "memory_owners",
    "per_step",
    "kinds",
    "kernel_shapes",
    "copies",
    "counters",
    "critical_path",
    "idle_gaps",
    "launches",
    "graph_launches",
    "patterns",
    "roofline",
    "flame",
    "blocking_calls",
    "threads",
    "compile",
    "collectives",
    "groups",
    "rank_matrix",
    "across_ranks",
    "slow_steps",
    "imbalance",
    "pipeline",
    "anti_patterns",
    "inference",
)
"""The sections beyond the core, in the order of the document; each is the module of that name."""

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Overview", ("runs", "findings", "breakdown")),
    ("Timeline", ("timeline", "steps", "slow_steps", "critical_path", "per_step", "inference")),
    (
        "GPU",
        (
            "kernels",
            "kinds",
            "kernel_shapes",
            "roofline",
            "idle",
            "idle_gaps",
            "launches",
            "graph_launches",
            "patterns",
            "copies",
            "counters",
        ),
    ),
    (
        "Host",
        (
            "operators",
            "modules",
            "flame",
            "host",
            "threads",
            "blocking_calls",
            "data_loading",
            "compile",
            "anti_patterns",
        ),
    ),
    ("Memory", ("memory", "memory_owners")),
    (
        "Ranks",
        (
            "communication",
            "collectives",
            "across_ranks",
            "groups",
            "rank_matrix",
            "imbalance",
            "pipeline",
        ),
    ),
    ("Data", ("data",)),
)
"""The views of the page, in its order: title, keys of sections and of the page's own parts
(`findings`, `timeline`, `data`, `runs`). The first one is the answer.
"""

CORE = "core"
FINDINGS = "findings"
SECTION_NAMES = (CORE, FINDINGS, *CORE_KEYS, *EXTRA_KEYS)
"""The parts of a report and sections that `--only` accepts."""

NOT_REQUESTED_REASON = "not asked for (--only)"
FAILED_REASON = "could not be worked out"
"""Prefix of the reason of a failed section."""


@cache
def load_section(key: str) -> Section[Any, Any]:
    module, _, name = _SECTIONS[key].partition(":")
    loaded: Section[Any, Any] = getattr(importlib.import_module(module), name)
    return loaded


_SECTIONS = {
    "breakdown": "traceloom.report.sections.device_time:SECTION",
    "steps": "traceloom.report.sections.steps:SECTION",
    "idle": "traceloom.report.sections.device_time:IDLE_SECTION",
    "host": "traceloom.report.sections.host:HOST_SECTION",
    "kernels": "traceloom.report.sections.kernels:KERNELS_SECTION",
    "operators": "traceloom.report.sections.kernels:OPERATORS_SECTION",
    "modules": "traceloom.report.sections.modules:MODULES_SECTION",
    "communication": "traceloom.report.sections.collectives:COMMUNICATION_SECTION",
    "memory": "traceloom.report.sections.memory:MEMORY_SECTION",
    "data_loading": "traceloom.report.sections.host:DATA_LOADING_SECTION",
    "memory_owners": "traceloom.report.sections.memory:MEMORY_OWNERS_SECTION",
    "per_step": "traceloom.report.sections.steps:PER_STEP_SECTION",
    "kinds": "traceloom.report.sections.kernels:KERNEL_KINDS_SECTION",
    "kernel_shapes": "traceloom.report.sections.kernels:KERNEL_SHAPES_SECTION",
    "copies": "traceloom.report.sections.device_rates:COPIES_SECTION",
    "counters": "traceloom.report.sections.device_rates:COUNTERS_SECTION",
    "critical_path": "traceloom.report.sections.critical_path:SECTION",
    "idle_gaps": "traceloom.report.sections.device_time:IDLE_GAPS_SECTION",
    "launches": "traceloom.report.sections.launches:SECTION",
    "graph_launches": "traceloom.report.sections.launches:GRAPH_LAUNCHES_SECTION",
    "patterns": "traceloom.report.sections.patterns:SECTION",
    "roofline": "traceloom.report.sections.device_rates:SECTION",
    "flame": "traceloom.report.sections.modules:SECTION",
    "blocking_calls": "traceloom.report.sections.host:SECTION",
    "threads": "traceloom.report.sections.host:THREADS_SECTION",
    "compile": "traceloom.report.sections.compiled:SECTION",
    "collectives": "traceloom.report.sections.collectives:SECTION",
    "groups": "traceloom.report.sections.collectives:GROUPS_SECTION",
    "rank_matrix": "traceloom.report.sections.collectives:RANK_MATRIX_SECTION",
    "across_ranks": "traceloom.report.sections.ranks:SECTION",
    "slow_steps": "traceloom.report.sections.steps:SLOW_STEPS_SECTION",
    "imbalance": "traceloom.report.sections.ranks:IMBALANCE_SECTION",
    "pipeline": "traceloom.report.sections.ranks:PIPELINE_SECTION",
    "anti_patterns": "traceloom.report.sections.patterns:ANTI_PATTERNS_SECTION",
    "inference": "traceloom.report.sections.inference:SECTION",
}
"""Module and name of each section; none is loaded before it is requested."""


def load_core_sections() -> tuple[Section[Any, Any], ...]:
    return tuple(load_section(key) for key in CORE_KEYS)


def load_extra_sections() -> tuple[Section[Any, Any], ...]:
    return tuple(load_section(key) for key in EXTRA_KEYS)


def select_sections(only: Sequence[str] | None) -> tuple[Section[Any, Any], ...]:
    """Returns the sections beyond the core that `--only` selects; all where it is None, none for
    `core` alone.

    Raises:
        UsageError: slug `no-such-section`.
    """
    if only is None:
        return load_extra_sections()
    for key in only:
        if key not in SECTION_NAMES:
            raise UsageError(
                f"`{key}` is no section of the report",
                slug="no-such-section",
                hint=nearest(key, SECTION_NAMES) + f"use one of {', '.join(SECTION_NAMES)}",
            )
    return tuple(load_section(key) for key in EXTRA_KEYS if key in only)


def summarise_core_sections(document: ReportDocument) -> list[tuple[str, str]]:
    """Returns title and sentence of the sections of the core that have a summary."""
    sentences = (
        (section.title, section.summary(section.value(document)))
        for section in load_core_sections()
    )
    return [(title, summary) for title, summary in sentences if summary]


def select_visible_sections(document: ReportDocument) -> tuple[Section[Any, Any], ...]:
    """Returns the sections beyond the core that a document includes, and that did not fail."""
    omitted = {
        entry["path"]
        for entry in document.get("absent") or []
        if entry["reason"].startswith((NOT_REQUESTED_REASON, FAILED_REASON))
    }
    return tuple(load_section(key) for key in EXTRA_KEYS if key in document and key not in omitted)


def collect_reasons(sections: Iterable[Section[Any, Any]]) -> dict[str, str]:
    return {path: reason for section in sections for path, reason in section.reasons.items()}
