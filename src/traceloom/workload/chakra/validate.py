"""Validates sets of Chakra traces: each file, and the ranks together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from traceloom.formats.chakra.et_pb2 import CollectiveCommType
from traceloom.formats.chakra.nodes import NodeFrame, Workload, find_file_sets, read_workload
from traceloom.system import units
from traceloom.trace.array_types import Ints
from traceloom.workload.chakra.check_files import (
    ALL,
    COLLECTIVE,
    RECEIVE,
    SEND,
    Arcs,
    TopologicalOrder,
    check_astra_sim,
    check_attributes,
    check_file,
    check_groups,
    check_peers,
    describe_node,
    find_cycles,
    find_named_ranks,
    find_rows,
    format_collective_type,
    format_ranks,
    get_ids,
    sort_topologically,
)
from traceloom.workload.chakra.validation_rules import (
    RULES,
    Findings,
    Problem,
    Severity,
    Target,
    ValidationResult,
    sort_problems,
)

_NONE = -1  # no type, no size
# Operations that may move different amounts on different ranks by design.
_UNEVEN = (
    CollectiveCommType.ALL_TO_ALL,
    CollectiveCommType.ALL_GATHER,
    CollectiveCommType.GATHER,
    CollectiveCommType.SCATTER,
    CollectiveCommType.REDUCE_SCATTER,
)


@dataclass(frozen=True)
class OrderedFile:
    """One rank's file with the order in which its nodes can be issued: position of each row, -1 for
    never.
    """

    rank: int
    table: NodeFrame
    position: Ints

    @property
    def location(self) -> tuple[str, int]:
        return self.table.path, self.rank


@dataclass(frozen=True, slots=True)
class JoinedOperations:
    """Nodes of different ranks that form one operation.

    Attributes:
        meetings: Per joined collective: (index of the file, row) of each part, as columns
            `meeting`, `file`, `row`.
        messages: Per matched message: `file`, `row` of the send, `file_right`, `row_right` of the
            receive.
    """

    meetings: pl.DataFrame
    messages: pl.DataFrame


def build_issue_orders(
    workload: Workload, settled: Sequence[TopologicalOrder]
) -> list[OrderedFile]:
    """Returns the files of a set with a rank each; empty if a file has no rank, or two have the
    same.
    """
    ranks = [rank for rank in workload.ranks if rank is not None]
    if len(set(ranks)) < len(workload.ranks):
        return []
    parts = []
    for rank, table, order in zip(ranks, workload.tables, settled, strict=True):
        position = np.full(len(table), -1, dtype=np.int64)
        position[order.order] = np.arange(len(order.order))
        parts.append(OrderedFile(rank, table, position))
    return parts


def match(workload: Workload, parts: Sequence[OrderedFile], findings: Findings) -> JoinedOperations:
    """Compares how the ranks describe their common operations, and joins the matching ones."""
    position = pl.Series("position", np.concatenate([part.position for part in parts]))
    startable = (
        workload.nodes.with_columns(position)
        .filter(pl.col("position") >= 0)
        .sort("file", "position")
    )
    sequences_by_group: dict[str, list[_Sequence]] = {}
    collectives = startable.filter(pl.col("type") == COLLECTIVE).with_columns(
        pl.col("pg_name").fill_null(""), pl.col("comm_type", "comm_size").fill_null(_NONE)
    )
    for (file, name), rows in collectives.partition_by("file", "pg_name", as_dict=True).items():
        numbers = rows["comm_seq"]
        numbered = not numbers.has_nulls() and numbers.n_unique() == len(numbers)
        sequences_by_group.setdefault(name, []).append(
            _Sequence(
                file,
                rows["row"].to_numpy(),
                rows["comm_type"].to_numpy(),
                rows["comm_size"].to_numpy(),
                numbers.to_numpy() if numbered else None,
            )
        )
    frames = [pl.DataFrame(schema={"meeting": pl.Int64, "file": pl.Int64, "row": pl.Int64})]
    for name, issued in sorted(sequences_by_group.items()):
        # Recorded sequence numbers identify operations regardless of the order of threads and
        # streams in the files.
        all_numbered = all(sequence.numbers is not None for sequence in issued)
        sequences = [sequence.by_number() for sequence in issued] if all_numbered else issued
        first = sequences[0]
        members = (workload.groups.members or {}).get(name)
        if members is None and name in ALL:
            members = tuple(part.rank for part in parts)
        issuing = {parts[s.part].rank for s in sequences}
        missing_parts = [
            p for p in parts if members is not None and p.rank in members and p.rank not in issuing
        ]
        if missing_parts:
            first_file = parts[first.part]
            message = (
                f"rank {first_file.rank} issues {len(first.rows)} in {_describe_group(name)}, "
                f"rank{'s' if len(missing_parts) > 1 else ''} {format_ranks(p.rank for p in missing_parts)} none"
            )
            findings.add(
                "collective-count",
                first_file.location,
                [(None, message)],
                get_ids(first_file.table, first.rows),
            )
        fits = [_compare(parts, name, first, other, findings) for other in sequences[1:]]
        if fits and all(fits):
            # The k-th of each rank form one operation, numbered by its first part.
            count = min(len(s.rows) for s in sequences)
            meeting = (first.part << 40) + first.rows[:count]
            frames += [
                pl.DataFrame(
                    {"meeting": meeting, "file": np.full(count, s.part), "row": s.rows[:count]}
                )
                for s in sequences
            ]
    _check_numbers(parts, startable, findings)
    return JoinedOperations(pl.concat(frames), _match_messages(parts, startable, findings))


def _check_numbers(
    parts: Sequence[OrderedFile], startable: pl.DataFrame, findings: Findings
) -> None:
    """Checks that each collective of all ranks comes after as many others on every rank."""
    carried = startable.filter(
        (pl.col("type") == COLLECTIVE)
        & pl.col("comm_type").ne_missing(CollectiveCommType.BROADCAST)
    ).with_columns(before=pl.int_range(pl.len()).over("file"))
    differ = (
        carried.filter(pl.col("pg_name").fill_null("").is_in(ALL))
        .with_columns(turn=pl.int_range(pl.len()).over("file"))
        .filter(pl.col("before").n_unique().over("turn") > 1)
        .sort("turn", "file")
    )
    if differ.height:
        first = differ.row(0, named=True)
        other = differ.filter(turn=first["turn"]).filter(pl.col("before") != first["before"])
        part, (file, before) = parts[first["file"]], other.select("file", "before").row(0)
        message = (
            f"{describe_node(part.table, first['row'])} comes after {units.format_quantity(first['before'], 'collective')} on rank {part.rank}, its "
            f"counterpart after {before} on rank {parts[file].rank}: both wait for ever"
        )
        findings.add(
            "collective-number",
            part.location,
            [(part.table.nodes["id"][first["row"]], message)],
            count=differ["turn"].n_unique(),
        )


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The collectives of one rank in one group, in issue order."""

    part: int
    rows: Ints
    kinds: Ints
    sizes: Ints
    numbers: Ints | None  # sequence numbers in the group, if each operation has one

    def by_number(self) -> _Sequence:
        if self.numbers is None:
            return self
        order = np.argsort(self.numbers)
        return _Sequence(
            self.part, self.rows[order], self.kinds[order], self.sizes[order], self.numbers[order]
        )


def _compare(
    parts: Sequence[OrderedFile], name: str, first: _Sequence, other: _Sequence, findings: Findings
) -> bool:
    """Compares two ranks' sequences in a group; returns False if they cannot be joined."""
    first_part, other_part = parts[first.part], parts[other.part]

    def add_finding(rule: str, positions: Ints) -> None:
        waits = ": each waits for the other" if rule == "collective-order" else ""

        def message(k: int) -> str:
            first_type, other_type = (
                format_collective_type(None if s.kinds[k] == _NONE else int(s.kinds[k]))
                + ("" if s.sizes[k] == _NONE else f" of {int(s.sizes[k]):,} bytes")
                for s in (first, other)
            )
            return (
                f"collective {k + 1} of {_describe_group(name)} is {first_type} on rank {first_part.rank} "
                f"({describe_node(first_part.table, int(first.rows[k]))}), {other_type} on rank {other_part.rank} "
                f"({describe_node(other_part.table, int(other.rows[k]))}){waits}"
            )

        examples = (
            (first_part.table.nodes["id"][int(first.rows[k])], message(int(k))) for k in positions
        )
        uneven = rule == "collective-size" and bool(np.isin(first.kinds[positions], _UNEVEN).all())
        severity: Severity | None = "warning" if uneven and findings.target == "chakra" else None
        findings.add(
            rule,
            first_part.location,
            examples,
            get_ids(first_part.table, first.rows[positions]),
            severity=severity,
        )

    common = min(len(first.rows), len(other.rows))
    if len(first.rows) != len(other.rows):
        longer, longer_part = (
            (first, first_part) if len(first.rows) > common else (other, other_part)
        )
        message = (
            f"rank {first_part.rank} issues {units.format_quantity(len(first.rows), 'collective')} in {_describe_group(name)}, "
            f"rank {other_part.rank} {len(other.rows)}: the first one too many is "
            f"{describe_node(longer_part.table, int(longer.rows[common]))}"
        )
        surplus = get_ids(longer_part.table, longer.rows[common:])
        findings.add("collective-count", longer_part.location, [(None, message)], surplus)
    kinds = first.kinds[:common] != other.kinds[:common]
    sizes = (first.sizes[:common] != other.sizes[:common]) & ~kinds
    if not kinds.any() and not sizes.any():
        return True
    same = Counter(zip(first.kinds.tolist(), first.sizes.tolist(), strict=True)) == Counter(
        zip(other.kinds.tolist(), other.sizes.tolist(), strict=True)
    )
    if same:
        add_finding("collective-order", np.flatnonzero(kinds | sizes))
        return False
    if kinds.any():
        add_finding("collective-kind", np.flatnonzero(kinds))
    uneven = np.isin(first.kinds[:common], _UNEVEN)
    for longer_part in (sizes & ~uneven, sizes & uneven):
        if longer_part.any():
            add_finding("collective-size", np.flatnonzero(longer_part))
    return not kinds.any()


def _describe_group(name: str) -> str:
    return "the group of all ranks" if name in ALL else f"group `{name}`"


def _match_messages(
    parts: Sequence[OrderedFile], startable: pl.DataFrame, findings: Findings
) -> pl.DataFrame:
    """Compares and joins the two ends of messages.

    Args:
        parts: The files.
        startable: Their nodes that can be issued, in that order.
        findings: Collects the problems.
    """
    ranks = pl.Series([part.rank for part in parts], dtype=pl.Int64)
    messages_by_kind = {}
    for kind, own_column, peer in ((SEND, "source", "comm_dst"), (RECEIVE, "target", "comm_src")):
        messages = startable.filter((pl.col("type") == kind) & pl.col(peer).is_not_null())
        messages_by_kind[kind] = messages.select(
            ranks.gather(messages["file"]).alias(own_column),
            pl.col(peer).alias("target" if own_column == "source" else "source"),
            pl.col("comm_tag").fill_null(0).alias("tag"),
            pl.col("comm_size").fill_null(_NONE).alias("size"),
            "file",
            "row",
        ).select("source", "target", "tag", "size", "file", "row")
    keys = ["source", "target", "tag"]
    sent, received = (
        messages_by_kind[kind].with_columns(pl.int_range(pl.len()).over(keys).alias("turn"))
        for kind in (SEND, RECEIVE)
    )
    present = [part.rank for part in parts]
    for messages, counterparts, peer, verb in (
        (sent, received, "target", "is never received by"),
        (received, sent, "source", "is never sent by"),
    ):
        for (number,), rows in (
            messages.join(counterparts, on=[*keys, "turn"], how="anti")
            .filter(pl.col(peer).is_in(present))
            .group_by("file", maintain_order=True)
        ):
            part = parts[int(str(number))]
            examples = (
                (
                    part.table.nodes["id"][row["row"]],
                    f"{describe_node(part.table, row['row'])} of rank {part.rank}, tag {row['tag']}, {verb} rank {row[peer]}",
                )
                for row in rows.iter_rows(named=True)
            )
            findings.add(
                "unmatched-message",
                part.location,
                examples,
                get_ids(part.table, rows["row"].to_numpy()),
            )
    both = sent.join(received, on=[*keys, "turn"], how="inner", maintain_order="left")
    for (number,), rows in both.filter(pl.col("size") != pl.col("size_right")).group_by(
        "file", maintain_order=True
    ):
        part = parts[int(str(number))]
        examples = (
            (
                part.table.nodes["id"][row["row"]],
                (
                    f"{describe_node(part.table, row['row'])} of rank {part.rank} sends {row['size']:,} bytes, "
                    f"{describe_node(parts[row['file_right']].table, row['row_right'])} of rank {row['target']} takes "
                    f"{row['size_right']:,}"
                ),
            )
            for row in rows.iter_rows(named=True)
        )
        findings.add(
            "message-size", part.location, examples, get_ids(part.table, rows["row"].to_numpy())
        )
    return both


_MAX_CYCLE_SHOWN = 8


@dataclass(frozen=True, slots=True)
class _Job:
    """The nodes of all ranks under one numbering; `meets` maps each node to the lowest number among
    the parts of its operation.
    """

    first: Ints  # number of each file's first node
    meets: Ints
    arcs: Arcs

    def where(self, number: int) -> tuple[int, int]:
        file = int(np.searchsorted(self.first, number, side="right")) - 1
        return file, number - int(self.first[file])


def check_deadlock(
    parts: Sequence[OrderedFile],
    dependencies: Sequence[Arcs],
    joined: JoinedOperations,
    findings: Findings,
) -> None:
    """Reports cycles in which ranks wait for each other.

    A cycle of dependencies is a deadlock for every reader. If there is none, but the order in which
    ranks issue their communication closes a cycle, readers that run one operation at a time (such
    as ASTRA-sim) hang.
    """
    if joined.meetings.is_empty() and joined.messages.is_empty():
        return
    first = np.concatenate([[0], np.cumsum([len(part.table) for part in parts])]).astype(np.int64)
    messages, meetings = joined.messages, joined.meetings
    arcs = Arcs(
        np.concatenate([a.source + first[k] for k, a in enumerate(dependencies)]),
        np.concatenate([a.target + first[k] for k, a in enumerate(dependencies)]),
    ) + Arcs(
        first[messages["file"].to_numpy()] + messages["row"].to_numpy(),
        first[messages["file_right"].to_numpy()] + messages["row_right"].to_numpy(),
    )
    meets = np.arange(first[-1], dtype=np.int64)
    part_of = first[meetings["file"].to_numpy()] + meetings["row"].to_numpy()
    _, index = np.unique(meetings["meeting"].to_numpy(), return_inverse=True)
    lowest = np.full(index.max() + 1 if len(index) else 0, first[-1], dtype=np.int64)
    np.minimum.at(lowest, index, part_of)
    meets[part_of] = lowest[index]
    # From each collective or send of a rank to the next one that it issues; by recorded start times
    # where the files have them.
    sources, targets = [], []
    for number, part in enumerate(parts):
        rows = find_rows(part.table, COLLECTIVE, SEND)
        rows = rows[part.position[rows] >= 0]
        started = part.table.nodes["start_us"].to_numpy()[rows]
        began = started if findings.target == "chakra" else np.zeros(len(rows), np.uint64)
        rows = rows[np.lexsort((part.position[rows], began))] + first[number]
        sources.append(rows[:-1])
        targets.append(rows[1:])
    queue = Arcs(np.concatenate(sources), np.concatenate(targets))
    for rule, job in (
        ("deadlock", _Job(first, meets, arcs)),
        ("collective-order", _Job(first, meets, arcs + queue)),
    ):
        merged = Arcs(meets[job.arcs.source], meets[job.arcs.target])
        stuck = sort_topologically(len(meets), merged, np.arange(len(meets))).stuck
        is_self_arc = merged.source == merged.target
        cycles = (
            find_cycles(Arcs(merged.source[~is_self_arc], merged.target[~is_self_arc]), stuck)
            if stuck.any()
            else []
        )
        long_cycles = [ring for ring in cycles if len(ring) > 1]
        if long_cycles:
            file, row = job.where(long_cycles[0][0])
            nodes = [parts[file].table.nodes["id"][row]]
            examples = [(nodes[0], _describe_cycle(parts, job, ring)) for ring in long_cycles[:5]]
            severity: Severity | None = (
                "warning" if rule == "collective-order" and findings.target == "chakra" else None
            )
            findings.add(
                rule,
                parts[file].location,
                examples,
                nodes,
                count=len(long_cycles),
                severity=severity,
            )
        if cycles:
            return


def _describe_cycle(parts: Sequence[OrderedFile], job: _Job, ring: list[int]) -> str:
    """Describes a cycle: on each rank, which node waits, and for which earlier one."""
    # For every two neighbors in the cycle, the dependency between them: waiting and awaited node as
    # (file, row).
    arc_rows = np.flatnonzero(
        np.isin(job.meets[job.arcs.target], ring) & np.isin(job.meets[job.arcs.source], ring)
    )
    source, target = job.arcs.source[arc_rows], job.arcs.target[arc_rows]
    first_arc: dict[tuple[int, int], int] = {}
    for k, pair in enumerate(
        zip(job.meets[target].tolist(), job.meets[source].tolist(), strict=True)
    ):
        first_arc.setdefault(pair, k)
    arcs = [first_arc[pair] for pair in zip(ring, [*ring[1:], ring[0]], strict=True)]
    steps = [(job.where(int(target[k])), job.where(int(source[k]))) for k in arcs]

    def breaks(
        k: int,
    ) -> bool:  # whether step k waits for another rank than the previous step
        (from_file, _), middle = steps[k - 1]
        return middle != steps[k][0] or not from_file == middle[0] == steps[k][1][0]

    first = next((k for k in range(len(steps)) if breaks(k)), 0)
    runs: list[tuple[tuple[int, int], tuple[int, int], int]] = []
    for k in [*range(first, len(steps)), *range(first)]:
        if runs and not breaks(k):
            runs[-1] = (runs[-1][0], steps[k][1], runs[-1][2] + 1)
        else:
            runs.append((*steps[k], 0))
    clauses = []
    for (file, row), (awaited_file, before), between in runs[:_MAX_CYCLE_SHOWN]:
        elsewhere = f" of rank {parts[awaited_file].rank}" if awaited_file != file else ""
        detour = f" (over {between} node{'s' if between > 1 else ''} between)" if between else ""
        clauses.append(
            f"rank {parts[file].rank}: {describe_node(parts[file].table, row)} waits for "
            f"{describe_node(parts[awaited_file].table, before)}{elsewhere}{detour}"
        )
    suffix = [f"and {len(runs) - _MAX_CYCLE_SHOWN} more"] if len(runs) > _MAX_CYCLE_SHOWN else []
    return "; ".join([*clauses, *suffix])


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
