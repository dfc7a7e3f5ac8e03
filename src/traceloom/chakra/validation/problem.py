"""What a validation finds: rules, and the problems of a set of files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from traceloom.errors import DOCUMENTATION

Severity = Literal["error", "warning"]
Target = Literal["chakra", "astra-sim"]
TARGETS: tuple[Target, ...] = ("chakra", "astra-sim")

MOST_EXAMPLES = 5
RULES_PAGE = f"{DOCUMENTATION}/reference/validation-rules/"


@dataclass(frozen=True, slots=True)
class ValidationRule:
    """One thing that can be wrong.

    Attributes:
        name: Stable; a heading of docs/reference/validation-rules.md.
        what: What is wrong, said of one or more nodes.
        remedy: What to do.
        chakra: How bad it is for any reader of Chakra files; None where it is right.
        astra_sim: How bad it is for ASTRA-sim.
    """

    name: str
    what: str
    remedy: str
    chakra: Severity | None
    astra_sim: Severity | None = "error"

    def severity(self, target: Target) -> Severity | None:
        """How bad a break of the rule is for a target."""
        return self.chakra if target == "chakra" else self.astra_sim


@dataclass(frozen=True, slots=True)
class Example:
    """One node that breaks a rule: its id (None: the file as a whole), and a sentence about it."""

    node: int | None
    message: str


@dataclass(frozen=True, eq=False)
class Problem:
    """All that breaks one rule in one file, or between the files of a set.

    Attributes:
        rule: Name of the rule.
        severity: For the target that was asked for.
        path: The file; for a problem between files, the first one it shows in.
        rank: Its rank.
        nodes: Ids of all nodes it is about, uint64; empty where it is about the file.
        count: How often the rule is broken.
        examples: At most five of them, in words.
        remedy: What to do.
    """

    rule: str
    severity: Severity
    path: str
    rank: int | None
    nodes: NDArray[np.uint64]
    count: int
    examples: tuple[Example, ...]
    remedy: str

    def to_dict(self) -> dict[str, Any]:
        """The problem as `traceloom validate --json` prints it."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "path": self.path,
            "rank": self.rank,
            "count": self.count,
            "nodes": self.nodes.tolist(),
            "examples": [{"node": e.node, "message": e.message} for e in self.examples],
            "remedy": self.remedy,
            "learn_more": f"{RULES_PAGE}#{self.rule}",
        }


class Findings:
    """Collects the problems of a set of files for one target."""

    def __init__(self, target: Target, rules: dict[str, ValidationRule]) -> None:
        self.target = target
        self._rules = rules
        self.problems: list[Problem] = []

    def add(
        self,
        rule: str,
        location: tuple[str, int | None],
        examples: Iterable[tuple[int | None, str]],
        nodes: Sequence[int] | NDArray[np.uint64] = (),
        *,
        count: int | None = None,
        severity: Severity | None = None,
    ) -> None:
        """Record that a rule is broken, unless the target ignores it.

        Args:
            rule: Its name.
            location: File and rank.
            examples: (node id, sentence), at least one; only the first few are taken, so an iterator may be endless.
            nodes: Ids of all nodes that break it.
            count: How often it is broken; the number of nodes, at least 1, where not given.
            severity: Instead of the rule's own.
        """
        definition = self._rules[rule]
        how_bad = definition.severity(self.target)
        if how_bad is None:
            return
        ids = np.asarray(nodes, dtype=np.uint64)
        first_examples = tuple(
            Example(node, text) for _, (node, text) in zip(range(MOST_EXAMPLES), examples, strict=False)
        )
        times = count if count is not None else max(len(ids), 1)
        self.problems.append(
            Problem(rule, severity or how_bad, *location, ids, times, first_examples, definition.remedy)
        )


@dataclass(frozen=True, eq=False)
class ValidationResult:
    """What validation says of a set of files.

    Attributes:
        target: Whom the files are for.
        files: (path, rank, nodes) of every file.
        problems: Worst first: errors, then warnings; in each, causes before what follows from them.
    """

    target: Target
    files: tuple[tuple[str, int | None, int], ...]
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> int:
        """How often a rule is broken that makes the files unfit for the target."""
        return sum(p.count for p in self.problems if p.severity == "error")

    @property
    def warnings(self) -> int:
        """How often something is suspicious."""
        return sum(p.count for p in self.problems if p.severity == "warning")

    def to_dict(self) -> dict[str, Any]:
        """The verdict as `traceloom validate --json` prints it."""
        return {
            "format": "traceloom-validation",
            "version": 1,
            "target": self.target,
            "valid": self.errors == 0,
            "errors": self.errors,
            "warnings": self.warnings,
            "files": [{"path": path, "rank": rank, "nodes": nodes} for path, rank, nodes in self.files],
            "problems": [problem.to_dict() for problem in self.problems],
        }


def ranked(problems: Iterable[Problem], rules: Iterable[str]) -> tuple[Problem, ...]:
    """Errors before warnings; in each, causes before what follows from them (the order of `rules`), then by count."""
    order = {rule: index for index, rule in enumerate(rules)}
    return tuple(sorted(problems, key=lambda p: (p.severity != "error", order[p.rule], -p.count)))
