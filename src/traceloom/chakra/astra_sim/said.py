"""What is said about a conversion for ASTRA-sim: everything that was changed or left out, counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from traceloom.array_types import Bools
from traceloom.chakra.astra_sim.communication import ALONE, REPLAYED, UNKNOWN_KIND, UNKNOWN_PEER, UNKNOWN_SIZE
from traceloom.model import units as text
from traceloom.model.graph import Graph
from traceloom.model.notice import Notice

_WHY = {
    ALONE: "met no other recorded rank",
    UNKNOWN_KIND: "are of a kind that is not known",
    UNKNOWN_SIZE: "have no known size",
    UNKNOWN_PEER: "have an other end that is not known or was not recorded",
}


@dataclass(frozen=True)
class Changes:
    """What a conversion did.

    Attributes:
        graph: What was converted.
        frame: All units.
        kept: Which of them are nodes now.
        leading: Which of them belong to threads that lead to work.
        queued: Dependencies between work that overlapped on one stream.
        loose: Dependencies for one order of communication that would have closed a circle.
        by_order: Collectives that were joined by nothing but their order.
        delays: Nodes that stand for times without GPU work.
    """

    graph: Graph
    frame: pl.DataFrame
    kept: Bools
    leading: Bools
    queued: int
    loose: int
    by_order: int
    delays: pl.DataFrame


def notices_of(changes: Changes, ranks: list[int], empty: list[int], added: int, *, gpu_only: bool) -> Iterator[Notice]:
    """The notices of a conversion.

    Args:
        changes: What was done.
        ranks: The ranks in the graph.
        empty: Those whose file has no nodes.
        added: How many dependencies were added.
        gpu_only: Whether host work was left out.
    """
    if count := changes.by_order:
        message = f"{count} collectives are joined over ranks by their order in their group: the files say no more"
        yield Notice("target-joined-by-order", "info", message, count)
    frame = changes.frame
    for why, words in _WHY.items():
        count = frame.filter(pl.col("why") == why).height
        if count:
            message = f"{count} communications {words}: their rank replays each alone, at its recorded duration"
            yield Notice("target-lone-communication", "warning", message, count)
    fine = frame.filter(pl.col("why").is_null() & pl.col("comm_type").is_not_null())
    replayed = fine.filter(pl.col("kind_of").is_in(REPLAYED))
    if replayed.height:
        kinds = ", ".join(sorted(replayed["kind_of"].unique()))
        message = (
            f"{replayed.height} collectives ({kinds}) are broadcasts, which ASTRA-sim replays at their recorded "
            "duration, whatever the network"
        )
        yield Notice("target-replayed-communication", "warning", message, replayed.height)
    barriers = fine.filter(pl.col("kind_of") == "barrier").height
    if barriers:
        yield Notice("target-barriers", "info", f"{barriers} barriers are all-reduces of 8 bytes per rank", barriers)
    uneven = fine.filter("uneven").height
    if uneven:
        message = f"{uneven} collectives have other sizes on other ranks; ASTRA-sim gets the largest"
        yield Notice("target-uneven-sizes", "warning", message, uneven)
    left_out = fine.filter("left_out").height
    if left_out:
        message = f"{left_out} collectives had members that were not recorded; they take place without them"
        yield Notice("target-missing-members", "warning", message, left_out)
    copies = frame.filter(pl.col("kind").is_in(["copy", "fill"]))
    if copies.height:
        total = text.duration(int((copies["end_ns"] - copies["start_ns"]).sum()))
        message = f"{copies.height} copies and fills ({total}) are GPU computation of their recorded duration"
        yield Notice("target-copies", "info", message, copies.height)
    yield from _about_host(changes, gpu_only=gpu_only)
    if changes.queued:
        message = f"{changes.queued} pieces of GPU work that overlapped on one stream run one after the other"
        yield Notice("target-overlap", "info", message, changes.queued)
    if added:
        message = (
            f"{added} dependencies only give an order that ASTRA-sim needs; `simulation_deps` of a node lists them"
        )
        yield Notice("target-added-order", "info", message, added)
    if changes.loose:
        message = "the communication could not be put into one order on all ranks: ASTRA-sim may hang"
        yield Notice("target-no-order", "warning", message, changes.loose)
    if ranks != list(range(len(ranks))):
        message = f"the recorded ranks {', '.join(map(str, ranks[:8]))} are numbered from 0"
        yield Notice("target-renumbered-ranks", "warning", message, len(ranks))
    if len(ranks) == 1:
        yield Notice("target-one-rank", "warning", "there is one rank alone: ASTRA-sim simulates two or more", 1)
    if empty:
        why = (
            "no GPU work was recorded, and that of the host was left out"
            if gpu_only
            else "no GPU work waits for what it does"
        )
        message = f"the file of rank {empty[0]} has no nodes, which ASTRA-sim refuses: {why}"
        yield Notice("target-no-nodes", "warning", message, len(empty))
    edges = changes.graph.edges
    delay = edges.filter(pl.col("kind").is_in(["launch", "synchronize", "stream", "wait", "cross-thread"]))
    lost_ns = int((delay["delay_ns"].clip(lower_bound=0) + delay["residual_ns"]).sum())
    if lost_ns:
        message = (
            f"delays between nodes (of launches, wake-ups, streams) have no place: {text.duration(lost_ns)} in all"
        )
        yield Notice("target-dropped-delays", "info", message, delay.height)


def _about_host(changes: Changes, *, gpu_only: bool) -> Iterator[Notice]:
    on_host = changes.frame["on_host"].to_numpy()
    members, work = changes.frame["members"].to_numpy(), changes.frame["work_ns"].to_numpy()
    hosts, nodes = int(members[on_host].sum()), int((on_host & changes.kept).sum())
    if gpu_only:
        if hosts:
            message = (
                f"{hosts} host nodes are folded into dependencies; where the GPU had nothing to do, a node `host` "
                "stands for that time, which a faster GPU or network does not change"
            )
            yield Notice("target-folded-host", "info", message, hosts)
        return
    if changes.delays.height:
        total = text.duration(int(changes.delays["duration_us"].sum()) * 1000)
        message = (
            f"{changes.delays.height} nodes `unexplained` ({total}) stand for times without GPU work that neither the "
            "host nor anything else in the trace explains"
        )
        yield Notice("target-unexplained", "warning", message, changes.delays.height)
    if hosts:
        yield Notice("target-merged-host", "info", f"{hosts} host nodes run together to {nodes}", hosts - nodes)
    idle = on_host & ~changes.leading
    if idle.any():
        lanes = changes.frame.filter(pl.Series(idle))["lane"].n_unique()
        message = f"{lanes} threads that no GPU work waits for are left out ({text.duration(int(work[idle].sum()))})"
        yield Notice("target-left-out-threads", "info", message, lanes)
    # How long threads of a rank worked at the same time, ns over all ranks.
    spans = changes.frame.filter(pl.Series(on_host & changes.kept)).select(
        "rank", "start_ns", (pl.col("start_ns") + pl.col("work_ns")).alias("to")
    )
    free = pl.col("to").cum_max().shift(1).over("rank").fill_null(-(2**62))
    both = (pl.min_horizontal("to", free) - pl.col("start_ns")).clip(lower_bound=0)
    overlap = int(spans.sort("rank", "start_ns").select(both.sum()).item())
    if overlap:
        message = (
            "ASTRA-sim runs one host operation of a rank at a time: "
            f"{text.duration(overlap)} that threads worked side by side runs one after the other"
        )
        yield Notice("target-one-thread", "warning", message)
