"""The catalogue of validation rules, and the collection of problems."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from traceloom.errors import DOCUMENTATION

Severity = Literal["error", "warning"]
Target = Literal["chakra", "astra-sim"]
TARGETS: tuple[Target, ...] = ("chakra", "astra-sim")

MAX_EXAMPLES = 5
RULES_PAGE = f"{DOCUMENTATION}/reference/validation-rules/"


@dataclass(frozen=True, slots=True)
class ValidationRule:
    """One kind of problem.

    Attributes:
        name: Stable; a heading of docs/reference/validation-rules.md.
        what: The problem, as a predicate of one or more nodes.
        remedy: What to do.
        chakra: Severity for any reader of Chakra files; None where it is allowed.
        astra_sim: Severity for ASTRA-sim.
    """

    name: str
    what: str
    remedy: str
    chakra: Severity | None
    astra_sim: Severity | None = "error"

    def severity(self, target: Target) -> Severity | None:
        """Returns the severity for a target; None where it is allowed."""
        return self.chakra if target == "chakra" else self.astra_sim


@dataclass(frozen=True, slots=True)
class Example:
    """One node that breaks a rule: its id (None: the file as a whole), and a sentence about it."""

    node: int | None
    message: str


@dataclass(frozen=True, eq=False)
class Problem:
    """All violations of one rule in one file, or between the files of a set.

    Attributes:
        rule: Name of the rule.
        severity: For the given target.
        path: The file; for a problem between files, the first one where it shows.
        rank: Its rank.
        nodes: Ids of all affected nodes, uint64; empty if it is about the file.
        count: Number of violations.
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
        """Returns the problem as `traceloom validate --json` prints it."""
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
            examples: (node id, sentence), at least one; only the first few are taken, so an
                iterator may be endless.
            nodes: Ids of all nodes that break it.
            count: Number of violations; default the number of nodes, at least 1.
            severity: Overrides the rule's own.
        """
        definition = self._rules[rule]
        rule_severity = definition.severity(self.target)
        if rule_severity is None:
            return
        ids = np.asarray(nodes, dtype=np.uint64)
        first_examples = tuple(
            Example(node, text)
            for _, (node, text) in zip(range(MAX_EXAMPLES), examples, strict=False)
        )
        self.problems.append(
            Problem(
                rule,
                severity or rule_severity,
                *location,
                ids,
                count if count is not None else max(len(ids), 1),
                first_examples,
                definition.remedy,
            )
        )


@dataclass(frozen=True, eq=False)
class ValidationResult:
    """The result of validating a set of files.

    Attributes:
        target: The reader that the files are meant for.
        files: (path, rank, nodes) of every file.
        problems: Errors before warnings; in each, causes before their consequences.
    """

    target: Target
    files: tuple[tuple[str, int | None, int], ...]
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> int:
        """The number of violations that make the files unfit for the target."""
        return sum(p.count for p in self.problems if p.severity == "error")

    @property
    def warnings(self) -> int:
        """The number of suspicious violations."""
        return sum(p.count for p in self.problems if p.severity == "warning")

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as `traceloom validate --json` prints it."""
        return {
            "format": "traceloom-validation",
            "version": 1,
            "target": self.target,
            "valid": self.errors == 0,
            "errors": self.errors,
            "warnings": self.warnings,
            "files": [
                {"path": path, "rank": rank, "nodes": nodes} for path, rank, nodes in self.files
            ],
            "problems": [problem.to_dict() for problem in self.problems],
        }


def sort_problems(problems: Iterable[Problem], rules: Iterable[str]) -> tuple[Problem, ...]:
    """Sorts errors before warnings; in each, causes before their consequences (the order of
    `rules`), then by count.
    """
    order = {rule: index for index, rule in enumerate(rules)}
    return tuple(sorted(problems, key=lambda p: (p.severity != "error", order[p.rule], -p.count)))


ERROR: Severity = "error"
WARNING: Severity = "warning"

_FILE = (
    ValidationRule(
        "file-damage",
        "the file is cut or damaged",
        "copy or write the file again; whatever comes after the damage is lost",
        ERROR,
    ),
    ValidationRule(
        "no-metadata",
        "the file does not begin with metadata",
        "write the metadata message first",
        ERROR,
    ),
    ValidationRule(
        "no-nodes", "the file has no nodes", "leave the file away, or write its nodes", WARNING
    ),
    ValidationRule(
        "file-name",
        "the file's name does not end in a rank",
        "name the files PREFIX.RANK.et, with ranks from 0",
        None,
    ),
    ValidationRule(
        "file-compressed",
        "the file is compressed, which ASTRA-sim does not read",
        "decompress it, or convert it to .et",
        None,
    ),
    ValidationRule(
        "missing-rank",
        "ranks are named, but have no file",
        "add their files, or leave these ranks out of groups and messages",
        ERROR,
    ),
    ValidationRule("repeated-rank", "two files are of one rank", "keep one of them", ERROR),
)
_NODES = (
    ValidationRule(
        "node-type",
        "the node's type is not one that the schema has",
        "give the node one of the types 1 to 7 of the Chakra schema",
        ERROR,
    ),
    ValidationRule(
        "attribute-type",
        "the attribute's value is of another type than readers look for, who then take it for 0",
        "write is_cpu_op as bool, comm_type, comm_size and num_ops as int64, comm_src, comm_dst, comm_tag, "
        "comm_group and comm_priority as int32, tensor_size as uint64, pg_name as string, involved_dim as a list of bool",
        ERROR,
    ),
    ValidationRule(
        "repeated-attribute", "the node has an attribute twice", "keep one of them", ERROR
    ),
    ValidationRule(
        "duplicate-id", "several nodes have one id", "give every node of a file its own id", ERROR
    ),
)
_DEPENDENCIES = (
    ValidationRule(
        "dangling-dependency",
        "the node depends on a node that is not in the file",
        "remove the dependency, or add the node; a reader that honours it never starts this node",
        ERROR,
    ),
    ValidationRule(
        "dangling-control-dependency",
        "the node's caller is not in the file",
        "remove it from ctrl_deps; readers that honour control dependencies refuse the file",
        ERROR,
    ),
    ValidationRule("self-dependency", "the node depends on itself", "remove the dependency", ERROR),
    ValidationRule(
        "dependency-cycle",
        "nodes depend on each other in a circle, so that none can start",
        "remove one of the dependencies of the circle",
        ERROR,
    ),
    ValidationRule(
        "control-dependency-cycle",
        "nodes and their callers wait for each other in a circle, so that readers that honour both start none",
        "repair ctrl_deps: a caller never waits for what it calls; or leave them empty",
        ERROR,
    ),
    ValidationRule(
        "never-starts",
        "the node is behind a circle or a node that does not exist, so that it never starts",
        "repair what it waits for",
        ERROR,
    ),
    ValidationRule(
        "repeated-dependency", "a dependency is listed twice", "list it once", WARNING, WARNING
    ),
    ValidationRule(
        "isolated-node",
        "the node takes time, but waits for nothing and nothing waits for it",
        "give it a place in the order, or it runs at the very beginning",
        WARNING,
        WARNING,
    ),
)
_COMMUNICATION = (
    ValidationRule(
        "communication-attribute",
        "the communication lacks an attribute",
        "collectives need comm_type and comm_size, messages comm_size, comm_dst or comm_src, and comm_tag",
        ERROR,
    ),
    ValidationRule(
        "collective-type",
        "the collective's comm_type is not one that the schema has",
        "use one of the numbers 0 to 9 of CollectiveCommType",
        ERROR,
    ),
    ValidationRule(
        "communication-size",
        "the communication moves no bytes",
        "give comm_size the bytes it moves",
        WARNING,
    ),
    ValidationRule(
        "communication-on-host",
        "the communication is marked as work of the CPU, so that older readers skip it and ASTRA-sim stops",
        "write is_cpu_op as false on communication, or type the node COMP",
        WARNING,
    ),
    ValidationRule(
        "message-peer",
        "the message's other end cannot be",
        "name the rank of the other side",
        ERROR,
    ),
    ValidationRule(
        "group-file",
        "the group file is not as it should be",
        'write {"1": [0, 1], "2": [2, 3]}',
        ERROR,
    ),
    ValidationRule(
        "old-group",
        "the group is in comm_group, where old readers looked for it; today's take the collective for one of all ranks",
        "write pg_name, a string; convert --target astra-sim does",
        WARNING,
    ),
    ValidationRule(
        "unknown-group",
        "the group is not in the group file",
        "add the group to the group file, or leave pg_name away where all ranks take part",
        ERROR,
    ),
    ValidationRule(
        "not-a-member",
        "the rank is not in the group it communicates in",
        "add the rank to the group, or name another group",
        ERROR,
    ),
)
_ZERO_LENGTH_KINDS = (
    ValidationRule(
        "collective-count",
        "the ranks of a group issue different numbers of collectives, so that some wait for ever",
        "let every rank of the group take part",
        ERROR,
    ),
    ValidationRule(
        "collective-order",
        "ranks issue their collectives in different orders: they wait for each other for ever",
        "issue them in one order on all ranks: order them by dependencies",
        ERROR,
    ),
    ValidationRule(
        "collective-kind",
        "ranks do different things in one collective",
        "write the same comm_type on all ranks of the group",
        ERROR,
    ),
    ValidationRule(
        "collective-size",
        "ranks give one collective different sizes",
        "write the same comm_size on all ranks; its meaning depends on the collective",
        ERROR,
    ),
    ValidationRule(
        "unmatched-message",
        "a message is sent and not received, or the other way round",
        "add the other side, with the same tag",
        ERROR,
    ),
    ValidationRule(
        "message-size",
        "sender and receiver name different sizes",
        "write the same comm_size on both sides",
        ERROR,
    ),
    ValidationRule(
        "deadlock",
        "ranks wait for each other in a circle, so that none can go on",
        "remove one of the dependencies of the circle, or issue the communication in one order",
        ERROR,
    ),
)
_ASTRA_SIM = (
    ValidationRule(
        "unsupported-node",
        "ASTRA-sim stops at metadata nodes, and treats invalid ones as communication",
        "convert with --target astra-sim",
        None,
    ),
    ValidationRule(
        "unsupported-collective",
        "ASTRA-sim has no such collective",
        "convert with --target astra-sim, which says what it writes instead",
        None,
    ),
    ValidationRule(
        "replayed-broadcast",
        "ASTRA-sim replays a broadcast at its recorded duration, and this one has none",
        "write duration_micros",
        None,
        WARNING,
    ),
    ValidationRule(
        "group-name",
        "ASTRA-sim reads group names as numbers above 0",
        "number the groups, in the nodes and in the group file; convert with --target astra-sim does",
        None,
    ),
    ValidationRule(
        "no-group-file",
        "ASTRA-sim ends where a node names a group and nobody says who is in it",
        "write comm_groups.json beside the files, or give it with --groups",
        None,
    ),
    ValidationRule(
        "one-rank",
        "ASTRA-sim simulates two ranks or more",
        "add the files of the other ranks",
        None,
    ),
    ValidationRule(
        "control-dependency",
        "ASTRA-sim takes call-stack parents for an order: the node waits until its caller has ended",
        "convert with --target astra-sim, or leave ctrl_deps empty",
        None,
        WARNING,
    ),
    ValidationRule(
        "host-node",
        "ASTRA-sim gives up its own statistics where there is work of the CPU; its times are right all the same",
        "convert with --target astra-sim --gpu-only if you need them",
        None,
        WARNING,
    ),
    ValidationRule(
        "host-node-last",
        "ASTRA-sim stops at a rank that has work of the CPU and ends with a send or a receive",
        "let a node of computation wait for the last message, or convert with --target astra-sim --gpu-only",
        None,
    ),
    ValidationRule(
        "group-of-one",
        "ASTRA-sim never ends a collective in a group of one rank",
        "leave the collective out",
        None,
    ),
    ValidationRule(
        "collective-number",
        "ASTRA-sim tells collectives of all ranks apart by how many chunks each rank had before, which differ",
        "name a group of all ranks in the collective, or let all ranks have as many collectives before it",
        None,
    ),
    ValidationRule(
        "memory-node",
        "ASTRA-sim sends it to remote memory, which its configuration must describe",
        "give a --remote-memory-configuration, or convert with --target astra-sim",
        None,
    ),
)

RULES: dict[str, ValidationRule] = {
    rule.name: rule
    for rule in (*_FILE, *_NODES, *_DEPENDENCIES, *_COMMUNICATION, *_ZERO_LENGTH_KINDS, *_ASTRA_SIM)
}
