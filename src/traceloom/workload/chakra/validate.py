"""Validation of a set of `.et` files by every rule, in time linear in nodes and dependencies."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from traceloom.formats.chakra.nodes import Workload, find_file_sets, read_workload
from traceloom.workload.chakra.check_files import (
    check_astra_sim,
    check_attributes,
    check_file,
    check_groups,
    check_peers,
    find_named_ranks,
    format_ranks,
)
from traceloom.workload.chakra.check_ranks import build_issue_orders, check_deadlock, match
from traceloom.workload.chakra.validation_rules import (
    RULES,
    TARGETS,
    Example,
    Findings,
    Problem,
    Severity,
    Target,
    ValidationResult,
    ValidationRule,
    sort_problems,
)

__all__ = [
    "RULES",
    "TARGETS",
    "Example",
    "Problem",
    "Target",
    "ValidationResult",
    "ValidationRule",
    "validate",
    "validate_workload",
]


def validate(
    *inputs: str | Path,
    target: Target = "chakra",
    groups: str | Path | None = None,
    step: Callable[[Path], None] | None = None,
) -> ValidationResult:
    """Returns all problems of `.et` files.

    Args:
        inputs: `.et` and `.et.gz` files and directories; files `PREFIX.RANK.et` with one prefix are
            one set.
        target: The reader of the files: any reader of Chakra files, or ASTRA-sim.
        groups: The group file; default `comm_groups.json` or `comm_group.json` next to the files.
        step: Called with every file before it is read.

    Raises:
        UsageError: `no-file`.
        InputError: A file is not a Chakra trace at all: `not-chakra`, `empty-file`, `unreadable`,
            `not-a-group-file`.
    """
    files: list[tuple[str, int | None, int]] = []
    problems: list[Problem] = []
    for file_set in find_file_sets(inputs, Path(groups) if groups is not None else None):
        workload = read_workload(file_set, step)
        files += [
            (table.path, rank, len(table))
            for rank, table in zip(workload.ranks, workload.tables, strict=True)
        ]
        problems += validate_workload(workload, target)
    return ValidationResult(target, tuple(files), sort_problems(problems, RULES))


def validate_workload(workload: Workload, target: Target = "chakra") -> Sequence[Problem]:
    findings = Findings(target, RULES)
    locations = [
        (table.path, rank) for rank, table in zip(workload.ranks, workload.tables, strict=True)
    ]
    checked = [
        check_file(table, location, findings)
        for table, location in zip(workload.tables, locations, strict=True)
    ]
    check_attributes(workload, findings)
    check_groups(workload, findings)
    check_peers(workload, findings)
    present = [rank for rank in workload.ranks if rank is not None]
    numbers, times = np.unique(present, return_counts=True)
    for rank in numbers[times > 1].tolist():
        paths = [t.path for r, t in zip(workload.ranks, workload.tables, strict=True) if r == rank]
        findings.add(
            "repeated-rank",
            (paths[0], rank),
            [(None, f"rank {rank} is in {' and in '.join(paths)}")],
        )
    location_by_rank = find_named_ranks(workload) if present else {}
    last = max(present, default=0)
    gaps = dict.fromkeys(range(last), f"the numbers of the files go up to {last}")
    expected = {**gaps, **location_by_rank}
    absent = {rank: expected[rank] for rank in expected.keys() - set(present)}
    if absent:
        first, has_several = min(absent), len(absent) > 1
        message = (
            f"rank{'s' if has_several else ''} {format_ranks(absent)} {'have' if has_several else 'has'} no file; "
            f"rank {first} is expected, as {absent[first]}"
            + (" names it" if first in location_by_rank else "")
        )
        severity: Severity | None = None if workload.place.whole else "warning"
        findings.add(
            "missing-rank", locations[0], [(None, message)], count=len(absent), severity=severity
        )
    parts = build_issue_orders(workload, [settled for _, settled in checked])
    if len(parts) > 1:
        joined = match(workload, parts, findings)
        if not any(
            settled.stuck.any() for _, settled in checked
        ):  # else every rank already hangs by itself
            check_deadlock(parts, [resolved.data for resolved, _ in checked], joined, findings)
    if target == "astra-sim":
        check_astra_sim(workload, findings)
    return findings.problems
