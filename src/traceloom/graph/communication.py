"""Communication nodes of a rank, and the matching of the parts of one operation across ranks.

Parts are joined by group and sequence number where all have one; else by their order within the
group, as long as kind and size agree. Disagreement is reported, never guessed around.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.graph import graph as graph_schema
from traceloom.graph.device_work import DeviceWork
from traceloom.graph.graph import GRAPH_SCHEMAS, build_empty_frame
from traceloom.graph.host_calls import describe_host_calls, describe_message_calls
from traceloom.graph.host_match import Matching
from traceloom.graph.host_tree import (
    HOST_BACKENDS,
    MESSAGES,
    HostTree,
    match_names,
)
from traceloom.graph.threads import find_framework_calls
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import build_event_column, find_nearest_ancestor
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.graph.rank import RankParts


# First match wins; kernel names in lower case. NCCL names a kernel after the first operation of its
# group, so the name is only a hint.
_KERNEL_KINDS = (
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_reduce", r"all_?reduce|cross_device_reduce"),
    ("all_gather", r"all_?gather"),
    ("all_to_all", r"all_?to_?all|all2all|\bep::(\w+::)*(dispatch|combine)"),
    ("broadcast", r"broadcast"),
    ("reduce", r"nccl(dev)?kernel_reduce_"),
    ("send_receive", r"send_?recv"),
)
_NON_OPERATIONS = ("wait", "init", "unknown")  # calls about communication that move nothing
_MESSAGE_KINDS = {"send": "send", "recv": "receive"}
_FIELDS = (
    "kind",
    "group",
    "group_size",
    "ranks",
    "element_type",
    "in_bytes",
    "out_bytes",
    "sequence",
    "peer",
    "tag",
    "in_splits",
    "out_splits",
)


class RankCommunication(Struct, frozen=True):
    """Communication of one rank.

    Attributes:
        work: Numbers of the GPU work that is communication.
        work_kind: Kind of node of each: number in NODE_KINDS.
        host_event: Positions (in the tree) of host events that are communication.
        host_kind: Kind of node of each.
        about: One row per work, then per host event, with the columns of `communication` but `node`
            and `instance`.
    """

    work: Ints
    work_kind: Ints
    host_event: Ints
    host_kind: Ints
    about: pl.DataFrame

    def nodes(self, parts: RankParts) -> Ints:
        return np.concatenate(
            [parts.work_node[self.work], parts.segment_node[parts.host.first[self.host_event]]]
        )

    def rows(self, parts: RankParts) -> pl.DataFrame:
        nodes = self.nodes(parts)
        order = np.argsort(nodes, kind="stable")
        instance = pl.Series("instance", [None], dtype=pl.Int64).new_from_index(0, nodes.size)
        rows = self.about[order].hstack([pl.Series("node", nodes[order]), instance])
        return cast_to_schema(rows, GRAPH_SCHEMAS["communication"])


@lru_cache(maxsize=1)
def _build_kernel_pattern() -> str:
    """Returns the table of kernel names of communication as one expression."""
    table = json.loads(
        (files("traceloom") / "analyze" / "kernel_rules.json").read_text(encoding="utf-8")
    )
    return "(?i)" + "|".join(
        f"(?:{row['pattern']})" for row in table if row["category"] == "communication"
    )


def find_communication(
    trace: Trace, tree: HostTree, work: DeviceWork, matching: Matching | None = None
) -> RankCommunication:
    """Finds the communication of a rank.

    On devices: kernels by the table of names. On hosts: calls of back ends that work there
    (`gloo:all_reduce`). The details come from its own arguments, else from the nearest op or
    annotation around its launch that describes a collective, in the trace or in the host trace that
    was joined to it, else from its name.
    """
    category = trace.events["category"][work.row]
    names = trace.events["name"][work.row]
    is_communication = (
        match_names(names, _build_kernel_pattern()) & (category == vocab.KERNEL).to_numpy()
    )
    selected = np.flatnonzero(is_communication)
    # Outermost calls of back ends that communicate from the host, without GPU work of their own.
    outermost = tree.named(HOST_BACKENDS) & ~tree.call
    outermost &= find_nearest_ancestor(tree.parent, outermost) < 0
    submitted = np.zeros(tree.row.size + 1, dtype=np.int64)
    np.add.at(submitted, work.call[work.call >= 0] + 1, 1)
    total = np.cumsum(submitted)
    host = np.flatnonzero(outermost)
    host = host[total[tree.stop[host]] == total[host]]
    if not selected.size and not host.size:
        return RankCommunication(
            selected, selected, host, host, build_empty_frame("communication").select(_FIELDS)
        )
    # The description of each event that describes a collective; columns `event` and _FIELDS.
    members = trace.groups.select("group", pl.col("ranks").alias("members"))
    hosted = describe_message_calls(trace)
    if matching is not None:
        hosted = describe_host_calls(trace, matching)
        members = pl.concat([members, matching.host.groups.select("group", members="ranks")])
    members = members.filter(pl.col("members").list.len() > 0)
    described = (
        trace.collectives.filter(~pl.col("kind").is_in(_NON_OPERATIONS) | pl.col("kind").is_null())
        .unique("event", keep="first", maintain_order=True)
        .join(members.unique("group"), on="group", how="left", maintain_order="left")
        .with_columns(
            pl.coalesce(parse_number_list("ranks", pl.Int32), "members"),
            parse_number_list("in_splits", pl.Int64),
            parse_number_list("out_splits", pl.Int64),
            pl.lit(None, pl.Int64).alias("tag"),
        )
        .select("event", *_FIELDS)
    )
    if hosted.height:
        described = _complete(described, hosted, members.unique("group"))
    number = np.full(trace.events.height, -1)
    number[described["event"].to_numpy()] = np.arange(described.height)
    rows = work.row[selected]
    fields = _fill_from_context(
        tree, described, work.call[selected], names[selected], own_rows=number[rows]
    )
    if host.size:
        fields = pl.concat([fields, _fill_from_context(tree, described, host, tree.name[host])])
    fields = fields.with_columns(pl.col("kind").replace(_MESSAGE_KINDS))
    node_kinds = {"send": graph_schema.SEND, "receive": graph_schema.RECEIVE}
    codes = np.array(
        [
            graph_schema.NODE_KINDS.index(node_kinds.get(kind, graph_schema.COLLECTIVE))
            for kind in fields["kind"]
        ]
    )
    return RankCommunication(selected, codes[: selected.size], host, codes[selected.size :], fields)


def _complete(described: pl.DataFrame, hosted: pl.DataFrame, members: pl.DataFrame) -> pl.DataFrame:
    """Returns the descriptions of events, with what the host trace knows where they say nothing."""
    ranks = pl.coalesce("ranks", "members")
    hosted = (
        hosted.filter(~pl.col("kind").is_in(_NON_OPERATIONS))
        .join(members, on="group", how="left", maintain_order="left")
        .with_columns(
            ranks,
            pl.coalesce(ranks.list.get(pl.col("peer"), null_on_oob=True), "peer").alias("peer"),
        )
    )
    missing = [
        pl.lit(None, dtype).alias(name)
        for name, dtype in described.schema.items()
        if name not in hosted.columns
    ]
    return (
        pl.concat([described, hosted.with_columns(missing).select(described.columns)])
        .group_by("event", maintain_order=True)
        .agg(pl.all().drop_nulls().first())
    )


def parse_number_list(column: str, dtype: type[pl.DataType]) -> pl.Expr:
    """Parses text such as `[0, 8, 16]` as a list of numbers; null where the file truncated it, and
    for empty ones.
    """
    items = (
        pl.col(column)
        .str.extract(r"^\s*\[([\d,\s-]+)\]\s*$")
        .str.replace_all(r"\s", "")
        .str.split(",")
    )
    numbers = items.list.eval(pl.element().cast(dtype, strict=False))
    return (
        pl.when(numbers.list.eval(pl.element().is_not_null()).list.all())
        .then(numbers)
        .alias(column)
    )


def _fill_from_context(
    tree: HostTree,
    described: pl.DataFrame,
    position: Ints,
    names: pl.Series,
    own_rows: Ints | None = None,
) -> pl.DataFrame:
    """Returns the fields of communications: their own, completed by those of the described events
    around them, and by names.

    Args:
        tree: Host events.
        described: Events that describe a collective.
        position: Position in the tree of each communication, or of the call that launched it; -1
            for none.
        names: Its name.
        own_rows: The row of `described` about the communication itself, -1 for none; None where
            `position` gives it.
    """
    number = np.full(tree.row.size + 1, -1)
    positions = tree.position[described["event"].to_numpy()]
    number[positions[positions >= 0]] = np.flatnonzero(positions >= 0)
    is_described = number >= 0
    # A message is on a lane of its own, apart from its call.
    message = np.flatnonzero((tree.parent < 0) & tree.named(MESSAGES))
    parent = tree.parent.copy()
    parent[message] = find_framework_calls(tree, message)
    outer = np.append(find_nearest_ancestor(parent, is_described[:-1]), -1)
    parts = [] if own_rows is None else [described[build_event_column(own_rows)]]
    current = position
    # The call of the back end, the op that describes it, the op of the framework
    for _ in range(3):
        current = np.where(is_described[current], current, outer[current])
        parts.append(described[build_event_column(number[current])])
        current = outer[current]
    lower = names.str.to_lowercase().alias("lower")
    name_kinds = [
        pl.when(pl.col("lower").str.contains(pattern)).then(pl.lit(kind))
        for kind, pattern in _KERNEL_KINDS
    ]
    return pl.DataFrame([lower]).select(
        pl.coalesce(*(part[name] for part in parts), *(name_kinds if name == "kind" else ())).alias(
            name
        )
        for name in _FIELDS
    )


POINT_TO_POINT = ("send", "receive")
# Every rank gives and gets the same number of bytes in these, so that parts of another size do not
# belong to them; an all-to-all with splits is uneven on purpose.
_SAME_SIZE_KINDS = ("all_reduce", "reduce_scatter", "all_to_all", "barrier")
_MAX_SHIFTS = 4096
_TIGHTER = 4  # times as close must the ends of another alignment meet
_MIN_MESSAGES = 4  # that tell where the others begin


class MatchedParts(Struct, frozen=True):
    """The result of `match_parts`.

    Attributes:
        instance: One per row of the parts; -1 where it is not joined to anything.
        evidence: One per row: `measured` (sequence numbers), `inferred` (order), or null.
        notices: Disagreements that were found.
    """

    instance: Ints
    evidence: list[str | None]
    notices: tuple[Notice, ...]


def match_parts(parts: pl.DataFrame) -> MatchedParts:
    """Joins the parts of communications.

    Args:
        parts: One row per communication node of every rank: `part` (which rank's graph), `rank`,
            `kind`, `group`, `group_size`, `ranks`, `sequence`, `in_bytes`, `in_splits`, `peer`,
            `tag`, `start_ns`, `end_ns`.
    """
    if not parts.height:
        return MatchedParts(np.zeros(0, dtype=np.int64), [], ())
    table = parts.with_columns(
        pl.int_range(pl.len(), dtype=pl.Int64).alias("row"),
        pl.col("group").fill_null("").alias("group"),
        pl.col("ranks").cast(pl.List(pl.String)).list.join(",").fill_null("").alias("members"),
        pl.when(
            pl.col("kind").is_in(_SAME_SIZE_KINDS)
            & (pl.col("in_splits").list.len().fill_null(0) == 0)
        )
        .then("in_bytes")
        .alias("size"),
    ).sort("part", "start_ns", "row")
    instance = np.full(parts.height, -1, dtype=np.int64)
    evidence: list[str | None] = [None] * parts.height
    notices: list[Notice] = []
    # Rows that have partners, with a `key` that is equal within each operation, and the evidence
    # for it.
    matches: list[tuple[pl.DataFrame, str]] = []
    collectives = table.filter(~pl.col("kind").is_in(POINT_TO_POINT))
    for (group, _), rows in collectives.group_by("group", "members", maintain_order=True):
        if rows["part"].n_unique() < 2:
            continue
        name = str(group) or "unnamed"
        if rows["sequence"].null_count() == 0:
            # Parts of one sequence number, not those that are not of one kind. Calls that are
            # coalesced share a sequence number: their order distinguishes them.
            keyed = rows.with_columns(
                pl.int_range(pl.len()).over("part", "sequence").alias("nth")
            ).with_columns(pl.struct("sequence", "nth").alias("key"))
            keyed = keyed.with_columns(
                pl.col("kind").n_unique().over("key").alias("kinds"),
                pl.col("part").n_unique().over("key").alias("parts"),
            )
            differ = keyed.filter(pl.col("kinds") > 1)
            if differ.height:
                first = differ.filter(pl.col("key") == differ["key"][0])
                examples = "; ".join(
                    f"rank {row['rank']} {row['kind']}" for row in first.head(4).to_dicts()
                )
                text = (
                    f"{differ['key'].n_unique()} collectives of group {name} are not of one kind on all ranks, "
                    f"first number {first['sequence'][0]}: {examples}; they are not joined"
                )
                notices.append(Notice("collectives-mismatch", "warning", text, differ.height))
            matched = keyed.filter((pl.col("kinds") == 1) & (pl.col("parts") > 1))
            differ = matched.filter(pl.col("size").drop_nulls().n_unique().over("key") > 1)
            if differ.height:
                first = differ.filter(pl.col("key") == differ["key"][0])
                examples = "; ".join(
                    f"rank {row['rank']} {row['in_bytes']} B" for row in first.head(4).to_dicts()
                )
                count = differ["key"].n_unique()
                text = f"{count} collectives of group {name} differ in size between ranks, first: {examples}"
                notices.append(Notice("collectives-sizes", "warning", text, differ.height))
            matches.append((matched, "measured"))
        else:
            matches.append((_match_by_order(rows, name, notices), "inferred"))
    # Sends and receives between the same two ranks, group and tag, in order; one side may have been
    # recorded earlier or longer.
    sends, channel = pl.col("kind") == "send", ["group", "from", "to", "tag"]
    messages = table.filter(
        pl.col("kind").is_in(POINT_TO_POINT)
        & pl.col("rank").is_not_null()
        & pl.col("peer").is_not_null()
    ).with_columns(
        pl.when(sends).then("rank").otherwise("peer").alias("from"),
        pl.when(sends).then("peer").otherwise("rank").alias("to"),
        pl.col("tag").fill_null(-1).alias("tag"),
    )
    shifts = [
        (*key, _find_shift(sent, received))
        for key, rows in messages.filter(
            (sends.sum() * 2 != pl.len()).over(channel)
            & (pl.col("kind").n_unique().over(channel) > 1)
        ).group_by(channel, maintain_order=True)
        for sent, received in [(rows.filter(side)["end_ns"].to_numpy() for side in (sends, ~sends))]
    ]
    schema = {**{name: messages.schema[name] for name in channel}, "shift": pl.Int64()}
    pairs = (
        messages.join(
            pl.DataFrame(shifts, schema, orient="row"),
            on=channel,
            how="left",
            maintain_order="left",
        )
        .with_columns(
            nth=pl.int_range(pl.len()).over("kind", *channel)
            + pl.when(sends).then(0).otherwise(pl.col("shift").fill_null(0))
        )
        .with_columns(pl.struct(*channel, "nth").alias("key"))
        .filter(pl.col("kind").n_unique().over("key") == 2)
    )
    count = 0
    for rows, basis in [*matches, (pairs, "inferred")]:
        numbers = rows["key"].rank("dense").to_numpy().astype(np.int64) - 1
        part_rows = rows["row"].to_numpy()
        instance[part_rows] = numbers + count
        count += int(numbers.max(initial=-1)) + 1
        for row in part_rows.tolist():
            evidence[row] = basis
    return MatchedParts(instance, evidence, tuple(notices))


def _match_by_order(rows: pl.DataFrame, group: str, notices: list[Notice]) -> pl.DataFrame:
    """Aligns every rank's list with the longest one; windows may begin and end at different times,
    lists may not skip.
    """
    sized = rows["in_bytes"].null_count() == 0
    label = pl.struct("kind", "size") if sized else pl.col("kind")
    coded = rows.with_columns(label.rank("dense").cast(pl.Int64).alias("code"))
    lists = {int(part[0]): frame for part, frame in coded.group_by("part", maintain_order=True)}
    longest = max(lists, key=lambda part: (lists[part].height, -part))
    reference = lists[longest]
    aligned = [reference.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("key"))]
    for part, part_rows in lists.items():
        if part == longest:
            continue
        shift, length = _find_alignment(reference, part_rows)
        skip = max(-shift, 0)
        end = skip + length
        if end < part_rows.height and shift + end < reference.height:
            expected, actual = (
                reference.row(shift + end, named=True),
                part_rows.row(end, named=True),
            )
            actual_label, expected_label = (
                (row["kind"] or "unknown")
                + ("" if row["in_bytes"] is None else f" of {row['in_bytes']} B")
                for row in (actual, expected)
            )
            text = (
                f"the order of collectives of group {group} differs: number {end + 1} of rank {actual['rank']} is "
                f"{actual_label}, where rank {expected['rank']} has {expected_label}; from there on they are not joined"
            )
            notices.append(
                Notice(
                    "collectives-mismatch",
                    "warning",
                    text,
                    part_rows.height - end,
                    rank=actual["rank"],
                )
            )
        numbers = (pl.int_range(length, dtype=pl.Int64) + (shift + skip)).alias("key")
        aligned.append(part_rows.slice(skip, length).with_columns(numbers))
    joined = pl.concat([frame.select("row", "part", "key") for frame in aligned])
    return joined.filter(pl.col("part").n_unique().over("key") > 1)


def _measure_scatter(gaps: Ints) -> float:
    """Returns how far differences of ends scatter, and how far they are from 0."""
    return float(np.median(np.abs(gaps - np.median(gaps)))) + abs(float(np.median(gaps)))


def _find_shift(sent: Ints, received: Ints) -> int:
    """Returns the number of the send that the first receive is of, where one side has more; ends in
    order. The first ones belong together, unless the ends of others meet much better.
    """
    spare = sent.size - received.size
    sign, length = (1 if spare > 0 else -1), min(sent.size, received.size)
    scatter = [
        _measure_scatter(
            sent[max(sign * shift, 0) :][:length] - received[max(-sign * shift, 0) :][:length]
        )
        for shift in range(min(abs(spare), _MAX_SHIFTS) + 1)
    ]
    best = int(np.argmin(scatter))
    return sign * best if scatter[best] * _TIGHTER < scatter[0] and length >= _MIN_MESSAGES else 0


def _find_alignment(reference: pl.DataFrame, part_rows: pl.DataFrame) -> tuple[int, int]:
    """Returns the shift of a list against the reference (negative: it begins earlier), and how far
    both agree from there.

    The longest overlap that agrees is taken, unless another one makes the ends meet much better:
    two windows of equal length may be one operation apart.
    """
    codes, own_codes = reference["code"].to_numpy(), part_rows["code"].to_numpy()
    reference_ends, own_ends = reference["end_ns"].to_numpy(), part_rows["end_ns"].to_numpy()
    overlaps: list[tuple[int, float, int]] = []  # length, scatter of the ends, shift
    for shift in sorted(range(1 - len(own_codes), len(codes)), key=abs)[:_MAX_SHIFTS]:
        start, own_start = max(shift, 0), max(-shift, 0)
        length = min(len(codes) - start, len(own_codes) - own_start)
        if 2 * length < len(own_codes) or not np.array_equal(
            codes[start : start + length], own_codes[own_start : own_start + length]
        ):
            continue
        gaps = reference_ends[start : start + length] - own_ends[own_start : own_start + length]
        overlaps.append((length, _measure_scatter(gaps), shift))
    if overlaps:
        length, scatter, shift = max(overlaps, key=lambda way: (way[0], -way[1]))
        tighter = min(overlaps, key=lambda way: (way[1], -way[0]))
        is_better = tighter[1] * _TIGHTER < scatter
        return (tighter[2], tighter[0]) if is_better else (shift, length)
    length = min(len(codes), len(own_codes))
    differ = np.flatnonzero(codes[:length] != own_codes[:length])
    return 0, int(differ[0]) if len(differ) else length
