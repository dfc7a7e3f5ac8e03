"""Opening workloads as graphs to simulate, joining files of other writers, and isolating one side.

Files of other writers have durations and dependencies. Their communications are joined by order
within a group: file order, as far as dependencies allow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from traceloom.errors import CheckError, InputError, UsageError
from traceloom.graph import graph as graph_schema, link_session
from traceloom.graph.communication import POINT_TO_POINT
from traceloom.graph.graph import Graph
from traceloom.graph.job import add_rendezvous
from traceloom.trace.notice import Notice
from traceloom.trace.session import Session
from traceloom.workload.chakra.check_files import Arcs, sort_topologically
from traceloom.workload.chakra.convert import ConversionInput, is_chakra
from traceloom.workload.chakra.graph_read import list_groups
from traceloom.workload.simulate.evaluation import evaluate_on_network
from traceloom.workload.simulate.transfers import find_operations

SIDES = ("communication", "compute")


def separate_side(graph: Graph, side: str) -> Graph:
    """Returns the graph in which only one side takes time.

    For `communication` these are the transfers, and the work of unmatched communication; for
    `compute` the work of all other nodes and the delays between them. Nodes that waited for the
    other side wait for its dependencies instead.

    Args:
        graph: Any graph.
        side: One of `SIDES`.
    """
    communicates = (
        pl.col("kind")
        .cast(pl.String)
        .is_in([*graph_schema.COMMUNICATION, graph_schema.RENDEZVOUS, graph_schema.ARRIVAL])
    )
    node_side = graph.nodes.select(communicates).to_series()
    # Edges out of a meeting, into an arrival, and all others between parts of a communication.
    edge_side = graph.edges["kind"].cast(pl.String) == "rendezvous"
    stays = (node_side, edge_side) if side == "communication" else (~node_side, ~edge_side)
    nodes, edges = (
        frame.with_columns(
            pl.when(pl.lit(is_kept)).then(name).otherwise(0).alias(name) for name in columns
        )
        for frame, is_kept, columns in (
            (graph.nodes, stays[0], ("work_ns", "residual_ns")),
            (graph.edges, stays[1], ("delay_ns", "residual_ns")),
        )
    )
    return replace(graph, nodes=nodes, edges=edges)


_ALL_RANKS_GROUPS = ("", "0")  # names of the group of all ranks


def join_communications(graph: Graph, groups: Mapping[str, Sequence[int]] | None) -> Graph:
    """Returns the graph with its communications joined in meetings; transfers take the durations of
    their nodes.

    Args:
        graph: From files of other writers, one rank after the other.
        groups: Members of each group by name; None if unknown.

    Raises:
        InputError: slugs `group-outside-world`: a group has a rank without a file;
            `collective-mismatch`: ranks do not agree on a common operation.
        CheckError: slug `deadlock`: a rank waits for an operation that never comes.
    """
    communication = graph.communication
    if not communication.height:
        return graph
    nodes = graph.nodes.height
    source, target = (graph.edges[end].to_numpy().astype(np.int64) for end in ("source", "target"))
    position = np.empty(nodes, dtype=np.int64)
    position[sort_topologically(nodes, Arcs(source, target), np.arange(nodes)).order] = np.arange(
        nodes
    )
    node_rows = communication["node"].to_numpy()
    world = sorted(set(graph.nodes["rank"].drop_nulls().to_list()))
    members, notices = _find_members(
        communication, graph.nodes["rank"].gather(node_rows), groups, world
    )
    is_collective = ~communication["kind"].is_in(POINT_TO_POINT).fill_null(value=False)
    sends = pl.col("kind") == "send"
    group_members = pl.col("group").replace_strict(
        members, default=None, return_dtype=pl.List(pl.Int32)
    )
    rows = communication.with_columns(
        graph.nodes["rank"].gather(node_rows),
        pl.col("group").fill_null(""),
        together=is_collective,
        position=pl.Series(position[node_rows]),
    ).with_columns(
        ranks=pl.when("together").then(group_members),
        # A message is identified by its two ends and the tag, not by the group.
        source=pl.when(~pl.col("together")).then(pl.when(sends).then("rank").otherwise("peer")),
        target=pl.when(~pl.col("together")).then(pl.when(sends).then("peer").otherwise("rank")),
        of=pl.when("together").then("group"),
    )
    # The k-th of a rank matches the k-th of the others; the k-th send matches the k-th receive.
    side, tag = (pl.when(~pl.col("together")).then(name) for name in ("kind", "tag"))
    rows = rows.with_columns(
        nth=pl.col("position")
        .rank("ordinal")
        .over("rank", side, "of", "source", "target", tag)
        .cast(pl.Int64)
        - 1
    )
    rows = rows.with_columns(
        group_size=pl.col("ranks").list.len().cast(pl.Int32),
        sequence=pl.when("together").then("nth"),
        key=pl.struct("of", "source", "target", tag, "nth").rank("dense"),
    )
    _check_attendance(rows)
    _check_kinds(rows, graph.name)
    _check_messages(rows)
    is_joined = pl.col("node").count().over("key") > 1
    described = rows.with_columns(
        instance=pl.when(is_joined).then(pl.col("key").cast(pl.Int64) - 1)
    )
    described = described.select(graph_schema.GRAPH_SCHEMAS["communication"].names()).cast(
        graph_schema.GRAPH_SCHEMAS["communication"]
    )
    graph = replace(
        graph, communication=described, world_size=len(world), notices=(*graph.notices, *notices)
    )
    meeting = add_rendezvous(graph, ["inferred"] * described.height)
    # After a meeting a part takes the duration of its node; parts without a meeting or a wait are
    # unchanged.
    out_of = meeting.edges["to_end"] & (meeting.edges["kind"] == "rendezvous")
    took = meeting.nodes["duration_ns"].gather(meeting.edges["target"])
    waits = pl.col("node").is_in(meeting.edges.filter(out_of)["target"].unique().implode())
    return replace(
        meeting,
        nodes=meeting.nodes.with_columns(work_ns=pl.when(waits).then(0).otherwise("work_ns")),
        edges=meeting.edges.with_columns(delay_ns=pl.when(out_of).then(took).otherwise("delay_ns")),
    )


def _find_members(
    communication: pl.DataFrame,
    ranks: pl.Series,
    groups: Mapping[str, Sequence[int]] | None,
    world: Sequence[int],
) -> tuple[dict[str, list[int]], list[Notice]]:
    """Returns the members of every named group, and notices of assumptions."""
    issuing = (
        communication.select(pl.col("group").fill_null(""), ranks, "kind")
        .filter(~pl.col("kind").is_in(POINT_TO_POINT).fill_null(value=False))
        .group_by("group")
        .agg(pl.col("rank").unique().sort())
    )
    members: dict[str, list[int]] = {}
    assumed = []
    for name, issuing_ranks in sorted(issuing.iter_rows()):
        if groups is not None and name in groups:
            unknown_ranks = sorted(set(groups[name]) - set(world))
            if unknown_ranks:
                raise InputError(
                    f"group `{name}` names rank {unknown_ranks[0]}, of which there is no file",
                    slug="group-outside-world",
                    hint=f"the files are of ranks {world[0]} to {world[-1]}: give those of all ranks",
                )
            members[name] = sorted(groups[name])
        elif name in _ALL_RANKS_GROUPS:
            members[name] = list(world)
        else:
            members[name] = issuing_ranks
            assumed.append(name)
    if not assumed:
        return members, []
    text = f"nobody says who is in {len(assumed)} groups (first `{assumed[0]}`): those that use them are taken"
    return members, [Notice("groups-assumed", "warning", text, len(assumed))]


def _check_attendance(rows: pl.DataFrame) -> None:
    """Checks that every member of a group takes part in each of its communications; else the others
    wait forever.
    """
    counts = (
        rows.filter("together")
        .group_by("group", "rank")
        .agg(pl.len().alias("count"), pl.col("ranks").first())
    )
    for (group,), group_counts in counts.sort("group", "rank").group_by(
        "group", maintain_order=True
    ):
        issued = dict(
            zip(group_counts["rank"].to_list(), group_counts["count"].to_list(), strict=True)
        )
        busiest_rank = max(issued, key=lambda rank: (issued[rank], -rank))
        short = next(
            (
                rank
                for rank in group_counts["ranks"][0].to_list()
                if issued.get(rank, 0) < issued[busiest_rank]
            ),
            None,
        )
        if short is not None:
            name = (
                f"group `{group}`" if group not in _ALL_RANKS_GROUPS else "the group of all ranks"
            )
            raise CheckError(
                f"deadlock: rank {busiest_rank} waits for rank {short} at communication {issued.get(short, 0) + 1} of {name}, "
                f"and rank {short} comes to {issued.get(short, 0)} only",
                slug="deadlock",
                hint="traceloom validate says more",
            )


def _check_kinds(rows: pl.DataFrame, location: str) -> None:
    """Checks that all ranks agree on the kind of each communication of a group."""
    differ = (
        rows.filter("together")
        .filter(pl.col("kind").n_unique().over("key") > 1)
        .sort("position", "rank")
    )
    if differ.height:
        first = differ.filter(pl.col("key") == differ["key"][0]).sort("rank")
        kind_texts = "; ".join(
            f"rank {row['rank']} does {row['kind']}" for row in first.head(4).to_dicts()
        )
        name = (
            f"group `{first['group'][0]}`"
            if first["group"][0] not in _ALL_RANKS_GROUPS
            else "the group of all ranks"
        )
        raise InputError(
            f"communication {first['nth'][0] + 1} of {name} is not one: {kind_texts}",
            slug="collective-mismatch",
            where=location,
            hint="traceloom validate says which",
        )


def _check_messages(rows: pl.DataFrame) -> None:
    """Checks that every receive has a send; a send that is not received waits for nobody."""
    received = rows.filter((pl.col("kind") == "receive").fill_null(value=False))
    sent = rows.filter((pl.col("kind") == "send").fill_null(value=False))
    unmatched = received.join(sent, on="key", how="anti").sort("rank", "position")
    if unmatched.height:
        first = unmatched.row(0, named=True)
        raise CheckError(
            f"deadlock: rank {first['rank']} waits for a message from rank {first['peer']} (tag {first['tag']}, "
            f"{first['out_bytes']} bytes) that is never sent",
            slug="deadlock",
            hint="traceloom validate says more",
        )


@dataclass(frozen=True)
class SimulationInput:
    """A workload that is ready to be simulated.

    Attributes:
        graph: Its graph, with the meetings of all ranks.
        name: The path that the user gave.
        measured: Whether its times were measured; else they follow from the durations in its files.
        serial: Whether lanes of the device run one node at a time in an order that is not in the
            graph.
        session: The traces, if it was read from traces.
        only: The only side that takes time; None for both.
    """

    graph: Graph
    name: str
    measured: bool
    serial: bool = False
    session: Session | None = None
    only: str | None = None


AnyWorkload = str | Path | Sequence[str | Path] | Graph | Session | SimulationInput


def open_input(
    workload: AnyWorkload,
    *,
    groups: str | Path | None = None,
    only: str | None = None,
    step: int | None = None,
    cache: bool = True,
) -> SimulationInput:
    """Reads a workload for simulation.

    Args:
        workload: Files or directories as `traceloom.load` accepts them, a `.graph`, a directory of
            `.et` files, or the object read from one; a `SimulationInput` is returned unchanged.
        groups: The file with the ranks of each group, for `.et` files; None for the one next to
            them.
        only: One of `SIDES`: the other side takes no time.
        step: One step of a recorded run.
        cache: Use the cache of parsed traces, and fill it.

    Raises:
        UsageError: slugs `no-file`, `wrong-usage`: a step of a workload without steps, groups for
            one that has its own, or an unknown side.
        InputError: A file is rejected; slug `not-a-group-file`: that of the groups.
    """
    if isinstance(workload, SimulationInput):
        return workload
    if only is not None and only not in SIDES:
        raise UsageError(
            f"`{only}` is no side of a workload",
            slug="wrong-usage",
            hint=f"one side alone is {' or '.join(SIDES)}",
        )
    chakra = False
    session = None
    if isinstance(workload, (Graph, Session)):
        graph = workload if isinstance(workload, Graph) else link_session(workload, step=step)
        session = workload if isinstance(workload, Session) else None
        name = workload.name
    else:
        paths = (
            [Path(workload)]
            if isinstance(workload, (str, Path))
            else [Path(path) for path in workload]
        )
        name = " ".join(map(str, paths))
        first = paths[0] if paths else Path()
        chakra = any(map(is_chakra, paths))
        if chakra or any(path.name.endswith(graph_schema.GRAPH_SUFFIX) for path in paths):
            if len(paths) > 1:
                raise UsageError(
                    "a workload is one directory of .et files, or one graph",
                    slug="wrong-usage",
                    hint="name the directory that holds the files of all ranks",
                )
            with ConversionInput(first, Path(groups) if groups and chakra else None) as source:
                graph = source.graph()
        else:
            from traceloom.formats import load

            session = load(*paths, cache=cache)
            name = session.name
            graph = link_session(session, step=step)
    if step is not None and session is None:
        raise UsageError(
            "--step is of recorded runs", slug="wrong-usage", hint="leave it out, or name the run"
        )
    if groups is not None and not chakra:
        raise UsageError(
            "--groups is of .et files",
            slug="wrong-usage",
            hint="leave it out: what is recorded knows",
        )
    serial = (
        session is None and not graph.delays.height and (graph.edges["evidence"] == "assumed").all()
    )
    measured = not serial
    graph = replace(graph, name=name)
    if serial:
        graph = join_communications(graph, list_groups(graph))
    if only is not None:
        graph, measured = separate_side(graph, only), False
    if not measured:
        # The times follow from the works and delays.
        evaluated = evaluate_on_network(graph, find_operations(graph), serial=serial).graph.nodes
        times = evaluated["start_ns"], evaluated["duration_ns"]
        graph = replace(graph, nodes=graph.nodes.with_columns(times))
    return SimulationInput(graph, name, measured, serial, session, only)
