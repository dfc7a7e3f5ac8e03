"""Re-timing: how long it takes to make a graph ready, and how long one pass takes, as graphs grow.

    python benchmarks/retime.py [--nodes 10000 100000 1000000] [--runs 5] [--scenarios 8]

The graphs are those of made jobs (see `tests/support/jobs`), their steps repeated one after the
other until there are enough nodes: one job that synchronises once a step, one that does so after
every second op (`.item()`), and one of four ranks with collectives. Printed is the best of
`--runs`; for a pass also the time that its core worked, which other programs on the machine change
less.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from traceloom.graph import Plan, calibrate, law
from traceloom.graph.graph import GRAPH_SCHEMAS, Graph, sort_topologically
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.jobs import Recipe, training_job

JOBS = {
    "one wait per step": Recipe(steps=3, layers=40, item=True),
    "many waits": Recipe(steps=3, layers=2, item=True),
    "four ranks": Recipe(steps=3, layers=20, ranks=4, item=True),
}


def linked(recipe: Recipe) -> Graph:
    """The graph of a made job, not calibrated."""
    return join_ranks(
        [link_rank(builder.build()) for builder in training_job(recipe).run().traces()]
    )


def repeated(graph: Graph, nodes: int) -> Graph:
    """A graph again and again, each time after the last: lanes go on, and all origins but the first
    are left out.
    """
    copies = max(1, round(nodes / graph.nodes.height))
    count, length = graph.nodes.height, graph.end_ns
    number = np.repeat(np.arange(copies), count)
    many = pl.concat([graph.nodes] * copies).with_columns(
        pl.int_range(pl.len(), dtype=pl.UInt32).alias("node"),
        (pl.col("start_ns") + pl.Series(number) * length).alias("start_ns"),
    )
    edges = pl.concat([graph.edges] * copies)
    shift = pl.Series(np.repeat(np.arange(copies), graph.edges.height) * count)
    edges = edges.with_columns(
        (pl.col(end) + shift).cast(pl.UInt32) for end in ("source", "target")
    )
    on_lane = graph.nodes.filter(pl.col("lane").is_not_null()).sort(
        "lane", "start_ns", maintain_order=True
    )
    ends = on_lane.group_by("lane", maintain_order=True).agg(
        pl.col("node").first(), pl.col("node").last().alias("last")
    )
    later = np.arange(1, copies)[:, None] * count
    bridges = pl.DataFrame(
        {
            "source": (ends["last"].to_numpy()[None, :] + later - count).ravel(),
            "target": (ends["node"].to_numpy()[None, :] + later).ravel(),
        }
    ).with_columns(
        pl.lit("thread").alias("kind"),
        pl.lit("measured").alias("evidence"),
        pl.lit(True).alias("from_end"),
        pl.lit(False).alias("to_end"),
        pl.lit(0).alias("delay_ns"),
        pl.lit(0).alias("residual_ns"),
    )
    edges = pl.concat(
        [edges, bridges.select(list(GRAPH_SCHEMAS["edges"])).cast(dict(GRAPH_SCHEMAS["edges"]))]
    )
    none = {
        name: pl.DataFrame(schema=GRAPH_SCHEMAS[name])
        for name in ("communication", "transfers", "host_ops")
    }
    return replace(graph, nodes=many, edges=edges, **none)


def best(runs: int, call) -> tuple[float, object]:
    return timed(runs, call, time.perf_counter)


def timed(runs: int, call, clock) -> tuple[float, object]:
    times = []
    for _ in range(runs):
        begun = clock()
        result = call()
        times.append(clock() - begun)
    return min(times), result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scenarios", type=int, default=8)
    args = parser.parse_args()
    print(
        f"{'job':18} {'nodes':>9} {'edges':>9} {'slices':>7} {'order s':>8} {'calibrate s':>11} {'plan s':>7} "
        f"{'pass ms':>8} {'CPU ms':>7} {'of many ms':>10} {'law s':>6}"
    )
    for name, recipe in JOBS.items():
        one = linked(recipe)
        for nodes in args.nodes:
            graph = repeated(one, nodes)
            order, _ = best(
                1, lambda graph=graph: sort_topologically(graph.nodes.height, *graph.points())
            )
            calibrating, graph = best(1, lambda graph=graph: calibrate(graph))
            planning, plan = best(1, lambda graph=graph: Plan(graph))
            passing, times = best(args.runs, plan.evaluate)
            assert (times == graph.point_times()).all()
            working, _ = timed(args.runs, plan.evaluate, time.thread_time)
            work = np.stack([graph.nodes["work_ns"].to_numpy()] * args.scenarios)
            several, _ = best(1, lambda plan=plan, work=work: plan.evaluate(work))
            lawful, _ = best(1, lambda graph=graph: law(graph))
            print(
                f"{name:18} {graph.nodes.height:9,} {graph.edges.height:9,} {plan.slices:7,} {order:8.3f} "
                f"{calibrating:11.3f} {planning:7.3f} {1e3 * passing:8.1f} {1e3 * working:7.1f} "
                f"{1e3 * several / args.scenarios:10.1f} {lawful:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
