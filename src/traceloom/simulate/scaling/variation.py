"""How long things take, and how much that varies: between steps, and between ranks that do the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.array_types import Bools, Floats, Ints
from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import point_times, points
from traceloom.retime.classes import class_delays, classes
from traceloom.simulate.scaling.replicas import ALL, DataAxis, Replica, keyed

QUANTILES = 1024  # of a distribution that is drawn from
_ENOUGH = 24  # samples of a name; with fewer it varies as its kind does
_DEVICE = (gs.KERNEL, gs.COPY, gs.FILL)
_SIDES = 2  # host, device


@dataclass(frozen=True)
class Variation:
    """What one copy's works, delays and transfers are drawn from.

    Shapes: N nodes, E edges and M meetings of the replica; R recorded ranks of a stage, S recorded steps.

    Attributes:
        work_ns: Mean work of each node over steps and ranks that do the same, (N,).
        work_pool: Row of `pools` with the factors on it, (N,); -1 where it never varies.
        work_samples: Of how many works each is the mean, (N,): it is no surer than that.
        side: 0 of host work, 1 of the device's, (N,); -1 where ranks and steps do not differ as a whole.
        delay_ns: Delay of each edge, (E,).
        delay_pool: Row of `pools` with what is added to it in ns, (E,); -1.
        part: Which part of the source's work the delay of an edge is, (E,); NaN where it is a time of its own.
        transfer_pool: Row of `pools` with the factors on the transfer of each meeting, (M,); -1.
        transfer_samples: Of how many transfers that of each meeting is the median, (M,): it is no surer than that.
        pools: Quantiles, each row ascending, (pools, `QUANTILES`).
        effects: By stage: how much longer all host work (0) or device work (1) of a rank takes in a step, (2, R, S).
        starts_ns: By stage: when the recording of each rank began, from the first, (R,).
        steps: The recorded steps.
        seen: How many copies of each part of a meeting were recorded, by row of the replica's `parts`.
        apparent_ns: From the arrival of the last recorded part to the end, median over steps, (M,).
    """

    work_ns: Floats
    work_pool: Ints
    work_samples: Ints
    side: Ints
    delay_ns: Floats
    delay_pool: Ints
    part: Floats
    transfer_pool: Ints
    transfer_samples: Ints
    pools: Floats
    effects: Mapping[int, Floats]
    starts_ns: Mapping[int, Ints]
    steps: Ints
    seen: Ints
    apparent_ns: Floats


class _Pools:
    """Distributions to draw from, collected."""

    def __init__(self) -> None:
        self.rows: list[Floats] = []

    def add(self, samples: Floats) -> int:
        """The number of the pool with these samples; -1 where they are all alike."""
        if samples.size < 2 or np.ptp(samples) < 1e-9:
            return -1
        at = (np.arange(QUANTILES) + 0.5) / QUANTILES
        # Between the samples linearly; the middle of each is its own share.
        positions = (np.arange(samples.size) + 0.5) / samples.size
        self.rows.append(np.interp(at, positions, np.sort(samples)))
        return len(self.rows) - 1

    def table(self) -> Floats:
        """All of them."""
        return np.array(self.rows).reshape(len(self.rows), QUANTILES)


def variation_of(graph: Graph, replica: Replica, roles: Mapping[str, str]) -> Variation:
    """Measure the variation of a calibrated graph.

    The same work is that of one name and kind, the n-th of it in its step, on ranks of one stage. How a rank's step
    differs as a whole (the median factor of all its works) is told apart from how single works differ; factors of few
    samples are corrected for having been compared with a mean of which they are a part.
    """
    axis, pools = replica.axis, _Pools()
    nodes = _numbered(graph, axis)
    works, side, effects, steps = _works(nodes, pools)
    delay, delay_pool, part = _delays(graph, nodes, pools)
    of_node, of_edge = replica.node, replica.edge
    inner, own = of_node >= 0, of_edge >= 0

    apparent, transfer_pool, transfer_samples, seen = _transfers(graph, replica, roles, pools)
    first = nodes.drop_nulls("rank").group_by("stage", "rank").agg(pl.col("start_ns").min()).sort("stage", "rank")
    first = first.with_columns(pl.col("start_ns") - pl.col("start_ns").min())
    return Variation(
        work_ns=np.where(inner, works["work"].to_numpy()[of_node], 0.0),
        work_pool=np.where(inner, works["pool"].to_numpy()[of_node], -1),
        work_samples=np.where(inner, works["samples"].to_numpy()[of_node], 1),
        side=np.where(inner, side[of_node], -1),
        delay_ns=np.where(own, delay[of_edge], 0.0),
        delay_pool=np.where(own, delay_pool[of_edge], -1),
        part=np.where(own, part[of_edge], np.nan),
        transfer_pool=transfer_pool,
        transfer_samples=transfer_samples,
        pools=pools.table(),
        effects=effects,
        starts_ns={
            int(str(stage)): rows["start_ns"].to_numpy().astype(np.int64)
            for (stage,), rows in first.group_by("stage", maintain_order=True)
        },
        steps=steps,
        seen=seen,
        apparent_ns=apparent,
    )


def _numbered(graph: Graph, axis: DataAxis) -> pl.DataFrame:
    """All nodes with their stage and `same`, a number that works which do the same have in common."""
    stage = pl.col("rank").fill_null(0) // (axis.stride * axis.copies)
    nodes = graph.nodes.select(
        "node", "rank", stage.alias("stage"), pl.col("step").fill_null(-1), "kind", pl.col("name").fill_null(""),
        (pl.col("work_ns") + pl.col("residual_ns")).cast(pl.Float64).alias("measured"), "start_ns",
    ).sort("start_ns", "node")  # fmt: skip
    nodes = nodes.with_columns(nth=pl.int_range(pl.len()).over("rank", "step", "kind", "name"))
    key = ["stage", "kind", "name", "nth"]
    numbers = nodes.unique(key, maintain_order=True).select(key).with_row_index("same")
    return nodes.join(numbers, on=key, how="left", maintain_order="left").sort("node")


def _works(nodes: pl.DataFrame, pools: _Pools) -> tuple[pl.DataFrame, Ints, dict[int, Floats], Ints]:
    """Mean work and pool of every recorded node, its side, and what steps and ranks have in common."""
    device = pl.col("kind").is_in(_DEVICE)
    joint = pl.col("kind").is_in([gs.RENDEZVOUS, gs.ARRIVAL, gs.ORIGIN, *gs.COMMUNICATION])
    works = nodes.with_columns(
        work=pl.col("measured").mean().over("same"),
        samples=pl.len().over("same"),
        side=pl.when(joint).then(-1).otherwise(device.cast(pl.Int64)),
    ).with_columns(ratio=pl.col("measured") / pl.col("work"))
    usable = (pl.col("samples") > 1) & (pl.col("work") > 0) & (pl.col("side") >= 0)
    cells = works.filter(usable, pl.col("step") >= 0)
    spread = cells.select(pl.col("ratio").std().over("side")).to_series()
    cells = cells.with_columns(scatter=spread).group_by("stage", "side", "rank", "step").agg(
        pl.col("ratio").median(), noise=(1.5 * pl.col("scatter").first() ** 2 / pl.len()).fill_null(0.0)
    )  # fmt: skip
    # What medians of so many works differ by without any cause is not an effect.
    cells = cells.with_columns(effect=pl.col("ratio") / pl.col("ratio").mean().over("stage", "side"))
    variance = pl.col("effect").var().over("stage", "side").fill_null(0.0)
    real = (1 - pl.col("noise").mean().over("stage", "side") / pl.max_horizontal(variance, 1e-12)).clip(lower_bound=0)
    cells = cells.with_columns(effect=1 + (pl.col("effect") - 1) * real.sqrt())
    works = works.join(
        cells.select("stage", "side", "rank", "step", "effect"),
        on=["stage", "side", "rank", "step"],
        how="left",
        maintain_order="left",
        nulls_equal=True,
    ).with_columns(pl.col("effect").fill_null(1.0))
    count = pl.col("samples")
    left = works.filter(usable).with_columns(
        left=(1 + (pl.col("ratio") / pl.col("effect") - 1) * (count / (count - 1)).sqrt()).clip(lower_bound=0)
    )
    numbers, of_kind = [], {}
    for (kind,), rows in left.group_by("kind", maintain_order=True):
        of_kind[kind] = pools.add(rows["left"].to_numpy())
        for (name,), same in rows.group_by("name", maintain_order=True):
            number = pools.add(same["left"].to_numpy()) if same.height >= _ENOUGH else of_kind[kind]
            numbers.append((kind, name, number))
    of_name = pl.DataFrame(numbers, {"kind": gs.NodeKind, "name": pl.String, "pool": pl.Int64}, orient="row")
    works = works.join(of_name, on=["kind", "name"], how="left", maintain_order="left")
    by_kind = pl.col("kind").cast(pl.String).replace_strict(of_kind, default=-1, return_dtype=pl.Int64)
    works = works.with_columns(pool=pl.when(pl.col("side") >= 0).then(pl.coalesce("pool", by_kind)).otherwise(-1))
    steps = np.unique(cells["step"].to_numpy()).astype(np.int64)
    effects = {}
    for (stage,), rows in cells.group_by("stage", maintain_order=True):
        ranks = np.unique(rows["rank"].to_numpy())
        table = np.ones((_SIDES, ranks.size, steps.size))
        position = np.searchsorted(ranks, rows["rank"].to_numpy()), np.searchsorted(steps, rows["step"].to_numpy())
        table[rows["side"].to_numpy(), position[0], position[1]] = rows["effect"].to_numpy()
        effects[int(str(stage))] = table
    return works, works["side"].to_numpy().astype(np.int64), effects, steps


def _delays(graph: Graph, nodes: pl.DataFrame, pools: _Pools) -> tuple[Floats, Ints, Floats]:
    """Delay, pool and part of the source's work of every recorded edge.

    What an edge took is seen only where nothing else held its target back later. Where the same edge is so in most
    steps and ranks, it takes their mean; else what its class takes.
    """
    edge_classes = classes(graph)
    constant = class_delays(graph).astype(np.float64)
    source_point, target_point = points(graph)
    times = point_times(graph)
    took = (graph.edges["delay_ns"] + graph.edges["residual_ns"]).to_numpy()
    binding: Bools = times[source_point] + took == times[target_point]
    part = np.full(constant.size, np.nan)
    work = nodes["measured"].to_numpy()
    source = graph.edges["source"].to_numpy().astype(np.int64)
    running = edge_classes.running
    part[running] = constant[running] / np.maximum(work[source[running]], 1)
    fixed = edge_classes.given | edge_classes.transfer
    fixed[running] = True
    same = nodes["same"]
    edges = graph.edges.select("kind", "from_end", "to_end").with_columns(
        same[source].alias("from"),
        same[graph.edges["target"]].alias("to"),
        pl.Series("of", edge_classes.of),
        pl.Series("constant", constant),
        pl.Series("took", took).cast(pl.Float64),
        pl.Series("binding", binding & ~fixed),
    )
    alike = ["kind", "from", "to", "from_end", "to_end"]
    seen = pl.col("took").filter("binding")
    edges = edges.with_columns(
        mean=seen.mean().over(alike), often=pl.col("binding").mean().over(alike) >= 0.5
    ).with_columns(delay=pl.when("often").then("mean").otherwise("constant"))
    delay = np.where(fixed, constant, edges["delay"].to_numpy())
    pool = np.full(delay.size, -1, dtype=np.int64)
    binds = edges.with_row_index("row").filter("binding").with_columns(off=pl.col("took") - pl.col("delay"))
    for (_, of), rows in binds.group_by("kind", "of", maintain_order=True):
        number = pools.add(rows["off"].to_numpy())
        if number >= 0:
            same_class = (edges["of"] == of).to_numpy() & (edges["kind"] == rows["kind"][0]).to_numpy()
            pool[same_class & ~fixed] = number
    return delay, pool, part


def _transfers(
    graph: Graph, replica: Replica, roles: Mapping[str, str], pools: _Pools
) -> tuple[Floats, Ints, Ints, Ints]:
    """Apparent transfer of each meeting, its pool and samples, and how many copies of each part were recorded."""
    axis = replica.axis
    ranks = graph.nodes.select("rank").drop_nulls().unique("rank").sort("rank")
    positions = ranks.with_columns(position=pl.col("rank").map_elements(axis.position, pl.Int32))
    parts = keyed(graph, axis, roles, positions)
    copies = parts.group_by("key", "position").agg(seen=pl.col("rank").n_unique())
    seen = replica.parts.select("key", "position").join(
        copies, on=["key", "position"], how="left", maintain_order="left"
    )
    block = pl.when(pl.col("span") == ALL).then(0).otherwise(pl.col("copy") // pl.max_horizontal("span", 1))
    operation = parts.drop_nulls("key").with_columns(block=block).group_by("key", "block", "step", "nth").agg(
        pl.col("kind").first(), pl.col("span").first(), pl.col("in_bytes").first(), pl.col("members").first(),
        present=pl.len(), apparent=(pl.col("to_ns").median() - pl.col("from_ns").max()).clip(lower_bound=0),
    ).with_columns(whole=pl.col("present") >= pl.col("members"))  # fmt: skip
    alike = ["kind", "span", "in_bytes", "members"]
    # Parts that were all recorded show the transfer itself.
    shown = operation.filter(pl.col("whole").any().over(alike) == pl.col("whole"))
    means = shown.group_by("key", "nth").agg(own=pl.col("apparent").median(), samples=pl.len())
    fallback = shown.group_by(alike).agg(usual=pl.col("apparent").median())
    rows = (
        replica.meetings.join(means, on=["key", "nth"], how="left", maintain_order="left")
        .join(fallback, on=alike, how="left", maintain_order="left", nulls_equal=True)
        .with_columns(pl.col("samples").fill_null(1), apparent=pl.coalesce("own", "usual", pl.lit(0.0)))
    )
    shown = shown.join(means, on=["key", "nth"], how="left", maintain_order="left").with_columns(
        count=pl.len().over("key", "nth")
    )
    numbers = {}
    for kind, of_alike in shown.group_by(alike, maintain_order=True):
        several = of_alike.filter(pl.col("count") > 1, pl.col("own") > 0)
        factor = 1 + (several["apparent"] / several["own"] - 1) * (several["count"] / (several["count"] - 1)).sqrt()
        numbers[kind] = pools.add(factor.clip(lower_bound=0).to_numpy())
    pool = np.array([numbers.get(row, -1) for row in rows.select(alike).iter_rows()], dtype=np.int64)
    apparent = rows["apparent"].to_numpy().astype(np.float64)
    samples = rows["samples"].to_numpy().astype(np.int64)
    return apparent, pool, samples, seen["seen"].fill_null(0).to_numpy().astype(np.int64)
