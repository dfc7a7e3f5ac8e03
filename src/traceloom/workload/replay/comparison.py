"""Comparison of a replay with the recording and with a simulation.

Both sides cover the same ops on the same ranks. At the pace `fast` a replay has no host work
between its ops, so it is removed from the simulated graph too; at the pace `recorded` both have it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from traceloom.analyze.bandwidth import add_sizes
from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import changed_graph
from traceloom.errors import broken
from traceloom.formats import load
from traceloom.graph import ABSENT, graph as graph_schema
from traceloom.graph.graph import Graph
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.workload.chakra.convert import is_chakra
from traceloom.workload.replay.inputs import AnyPath
from traceloom.workload.replay.plan import (
    COLLECTIVE,
    ENDING,
    ITEM_BYTES,
    WAIT,
    RankPlan,
    RankReplayResult,
    Replayed,
    ReplayPlan,
    is_plan,
)
from traceloom.workload.simulate.evaluation import build_plan
from traceloom.workload.simulate.inputs import open_input
from traceloom.workload.simulate.machine import Machine
from traceloom.workload.simulate.machine_file import read_machine
from traceloom.workload.simulate.native import run

RANKS = build_schema("rank step_count simulated_ns")


@dataclass(frozen=True)
class SimulatedSteps:
    """The simulated times of the steps of a replay on a machine.

    Attributes:
        machine: Its name.
        ranks: rank; step_count (the timed steps that were simulated); simulated_ns, from the
            beginning of the rank's step to its end, the median over the steps. Empty if `absent` is
            set.
        absent: Why nothing was simulated, in words; "" if it was.
        notices: Assumptions, and properties outside the measurements of the machine.
    """

    machine: str
    ranks: pl.DataFrame
    absent: str = ""
    notices: tuple[Notice, ...] = ()


def simulate_steps(
    paths: Sequence[AnyPath],
    plan: ReplayPlan,
    machine: str | Path | Machine,
    *,
    with_gaps: bool,
    cache: bool = True,
    on_status: Callable[[str], None] | None = None,
) -> SimulatedSteps:
    """Simulates the timed steps of a replayed workload, each separately.

    Args:
        paths: The inputs of the plan.
        plan: The replayed plan.
        machine: A machine, a `machine.toml` or the name of a preset.
        with_gaps: Whether to keep the host work between ops; False as in a replay at the pace
            `fast`.
        cache: Use the cache of parsed traces, and fill it.
        on_status: Called with a status message.

    Raises:
        UsageError: As `read_machine` raises; slug `machine-size`: the machine has another number of
            ranks.
        InputError: As `read_machine` raises.
    """
    described = read_machine(machine) if isinstance(machine, (str, Path)) else machine
    name = described.name or str(machine)
    target = (
        described if isinstance(machine, Machine) else machine
    )  # a preset scales with the workload
    steps = set.intersection(*(set(rank_plan.steps["step"].to_list()) for rank_plan in plan))
    files = [Path(os.fspath(path)) for path in paths]
    absent = ""
    if any(
        path.is_file() and (path.suffix == ENDING or is_plan(path) or graph_schema.is_graph(path))
        for path in files
    ):
        absent = "a plan or a graph does not hold the traces of the steps; name the run"
    elif any(is_chakra(path) for path in files):
        absent = ".et files do not hold the traces of the steps; name the run"
    elif not steps:
        absent = "no timed step was recorded, or a part of one is replayed"
    if absent:
        return SimulatedSteps(name, RANKS.to_frame(), absent)
    session = load(*paths, cache=cache)
    if missing_ranks := [rank for rank in session.ranks if rank not in plan.ranks]:
        return SimulatedSteps(
            name, RANKS.to_frame(), f"not all ranks are replayed, as rank {missing_ranks[0]}"
        )
    rows, notices = [], dict[str, Notice]()
    for step in sorted(steps):
        if on_status is not None:
            on_status(f"simulating step {step}")
        source = open_input(session, step=step)
        if not with_gaps:
            source = replace(source, graph=remove_host_gaps(source.graph, plan))
        answer = run(source, target)
        notices |= {notice.slug: notice for notice in answer.notices}
        rows.append(
            answer.nodes.group_by("rank").agg(
                (pl.max("end_ns") - pl.min("start_ns")).alias("simulated_ns")
            )
        )
    medians = (
        pl.concat(rows)
        .filter(pl.col("rank").is_in(list(plan.ranks)))
        .group_by("rank")
        .agg(pl.len().alias("step_count"), pl.median("simulated_ns").round().cast(pl.Int64))
    )
    return SimulatedSteps(
        name, cast_to_schema(medians.sort("rank"), RANKS), "", tuple(notices.values())
    )


def remove_host_gaps(graph: Graph, plan: ReplayPlan) -> Graph:
    """Returns the graph without host work between ops that a replay could call, and without waits
    for it.

    What remains are ops in the namespaces of the planned ones, their calls, and the device. Removed
    are Python, the data loader, annotations, and the autograd engine around the ops of the backward
    pass.

    Args:
        graph: Of recorded steps.
        plan: What is replayed of them.
    """
    spaces = {
        name.partition("::")[0]
        for rank_plan in plan
        for name in rank_plan.ops["name"].unique()
        if "::" in name
    }
    space = pl.col("name").str.extract(r"^(\w+)::")
    is_wrapper = (pl.col("category").cast(pl.String) == "op") & ~space.is_in(
        [*spaces, "aten"]
    ).fill_null(value=False)
    is_outside_ops = pl.col("op").is_null() | is_wrapper.fill_null(value=False)
    kind = pl.col("kind").cast(pl.String)
    gaps = (
        graph.nodes.select(
            (kind == graph_schema.THINK)
            | (kind.is_in([graph_schema.HOST, graph_schema.BLOCK]) & is_outside_ops)
        )
        .to_series()
        .to_numpy()
    )
    scenario = Scenario.of(graph).copy()
    scenario.work_ns[gaps] = 0
    _, target = scenario.ends()
    scenario.delay_ns[scenario.edges("synchronize") & gaps[target]] = ABSENT
    return changed_graph(graph, scenario, scenario.times(build_plan(graph)))


RUN, FAILED, OTHER_SHAPE, STAND_IN, LEFT_OUT = OUTCOMES = (
    "run",
    "failed",
    "other-shape",
    "stand-in",
    "left-out",
)
LONG_NS = 50_000
"""Min duration of a long op; shorter ones mostly measure the call itself."""
_OP = {"op": pl.UInt32, "node": pl.Int64}
_RATIO = {"ratio": pl.Float64}
_RATIOS = {f"{name}_ratio": pl.Float64 for name in ("p10", "p50", "p90")}

# fmt: off
TOTALS = build_schema(
    "rank step_count pass_count recorded_ns replayed_ns ratio recorded_cpu_ns replayed_cpu_ns cpu_ratio",
    "recorded_ops_ns replayed_ops_ns ops_ratio recorded_gpu_ns replayed_gpu_ns gpu_ratio peak_bytes",
    {**_RATIO, **dict.fromkeys(("cpu_ratio", "ops_ratio", "gpu_ratio"), pl.Float64)},
)
COVERAGE = build_schema("rank outcome reason count recorded_ns recorded_gpu_ns count_share time_share gpu_share",
                  {"outcome": pl.Enum(OUTCOMES), "count_share": pl.Float64, "time_share": pl.Float64,
                   "gpu_share": pl.Float64})
NOT_RUN = build_schema("rank outcome reason name text count recorded_ns", {"outcome": pl.Enum(OUTCOMES), "text": pl.String})
OPS = build_schema("name shapes calls recorded_ns replayed_ns lost_ns ratio p10_ratio p50_ratio p90_ratio",
             "recorded_gpu_ns replayed_gpu_ns gpu_lost_ns gpu_ratio",
             {**_RATIO, **_RATIOS, "gpu_ratio": pl.Float64})
EACH = build_schema("rank op node name shapes scope phase thread gap_ns recorded_ns replayed_ns ratio",
              "recorded_gpu_ns replayed_gpu_ns gpu_ratio",
              {**_OP, **_RATIO, "gpu_ratio": pl.Float64, "scope": pl.String, "phase": pl.String, "thread": pl.Int32})
COLLECTIVES = build_schema("rank kind group group_size asynchronous size_bytes count on_gpu recorded_ns replayed_ns ratio",
                     "recorded_gb_per_s replayed_gb_per_s",
                     {**_RATIO, "group_size": pl.Int32, "on_gpu": pl.Boolean})
CONTENTS = build_schema("rank content evidence count bytes", {"content": pl.String})
SIMULATED = build_schema("rank step_count replayed_ns simulated_ns difference", {"difference": pl.Float64})
# fmt: on
HOLES = build_schema("rank name count recorded_ns")
TABLES = (
    "whole",
    "simulated",
    "coverage",
    "not_run",
    "holes",
    "ops",
    "each",
    "collectives",
    "contents",
)


@dataclass(frozen=True)
class ReplayComparison(Result):
    """A replay compared with the recording.

    Times are medians, ns: recorded ones over the timed steps, replayed ones over the passes. A
    ratio is replayed over recorded; null if one of them is unknown.

    Attributes:
        environment: Of the replay: versions, threads, relevant environment variables.
        source: The inputs of the plan.
        recorded_torch: Version of PyTorch that ran the workload; None if unknown.
        torch: Version that ran the replay.
        device: Device of the replay.
        pace: `fast`, or `recorded`.
        whole: Per rank: rank; step_count and pass_count (numbers behind the medians); recorded_ns,
            replayed_ns, ratio of the whole; the same for processor time, for the sums over ops that
            both sides timed, and for the GPU work of ops for which both sides measured it (null if
            there are none); peak_bytes of the replay's tensors. The recorded times of the whole are
            null if only part of a step was replayed, or its time is unknown.
        coverage: Outcomes of the ops: rank, outcome, reason (null: it ran), count, recorded_ns,
            recorded_gpu_ns (the GPU work that they launched; null: none), and their shares of all
            ops of the rank; shares add up to 1. Time shares are null if no op was timed, those of
            GPU work if none was recorded.
        not_run: Ops that did not run unchanged: rank, outcome, reason, name, text, count,
            recorded_ns.
        holes: Compiled graphs, whose CPU kernels are in no host trace: rank, name, count and
            recorded_ns.
        ops: By name and shapes of inputs, over all ranks: calls, recorded_ns and replayed_ns
            (sums), lost_ns (extra time of the replay), ratio of the sums, 10th, 50th and 90th
            percentile of the ratios of the calls. The largest differences come first. Only calls
            that were timed on both sides count. The same for the GPU work that they launched, which
            determines the order if there is any: recorded_gpu_ns, replayed_gpu_ns, gpu_lost_ns,
            gpu_ratio; null if one of the sides launched none.
        each: Every op that ran and was timed on both sides, in order; gap_ns is the recorded host
            time before it on its thread.
        collectives: By rank, kind, group and size: count, recorded_ns and replayed_ns of one
            (medians; of its GPU work if both sides know it, as on_gpu states, else of its calls),
            bandwidths on the bus (10^9 B/s), which are null for asynchronous ones without GPU work,
            since they end later than their calls.
        contents: Contents of external tensors: rank, content, evidence (how it is known), count,
            bytes.
        long_count: Ops of `each` whose recorded duration (GPU work if known) was at least
            `LONG_NS`.
        long_ratios: 10th, 50th and 90th percentile of their ratios; None if there are none.
        notices: Notices about the comparison.
        machine: Name of the machine that the steps were simulated on; None if not requested.
        simulated: Per rank: rank; step_count (the timed steps that were simulated); replayed_ns;
            simulated_ns, the median of these steps on that machine, of the same ops, with host work
            between them if the pace is `recorded`; difference, (simulated - replayed) / replayed.
        not_simulated: Why there is no simulation, in words; None if there is one, or none was
            requested.
    """

    source: str
    recorded_torch: str | None
    torch: str | None
    device: str
    pace: str
    whole: pl.DataFrame
    coverage: pl.DataFrame
    not_run: pl.DataFrame
    holes: pl.DataFrame
    ops: pl.DataFrame
    each: pl.DataFrame
    collectives: pl.DataFrame
    contents: pl.DataFrame
    long_count: int
    long_ratios: tuple[float, float, float] | None
    environment: dict[str, Any] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()
    machine: str | None = None
    simulated: pl.DataFrame = field(default_factory=SIMULATED.to_frame)
    not_simulated: str | None = None

    def check(self) -> None:
        """Raise InvariantError if the shares of a rank do not add up to 1, or a count differs from
        the sum of its parts.
        """
        sums = self.coverage.group_by("rank").agg(
            pl.sum("count_share", "time_share", "gpu_share", "count")
        )
        for share in ("count_share", "time_share", "gpu_share"):
            wrong = sums.filter((pl.col(share) - 1).abs() > 1e-9, pl.col(share) != 0)
            if wrong.height:
                raise broken(
                    "account",
                    f"the shares of coverage of rank {wrong['rank'][0]} do not add up to 1",
                )
        if int(self.ops["calls"].sum()) != self.each.height:
            raise broken("account", "ops by name and shapes are not all ops")


def compare_replay(
    plan: ReplayPlan, replayed: Replayed, simulated: SimulatedSteps | None = None
) -> ReplayComparison:
    """Compares a replay with the recorded times of its plan.

    Args:
        plan: The plan that was run.
        replayed: The results of running it.
        simulated: The same steps on a machine.
    """
    pairs = [(plan.ranks[rank], result) for rank, result in replayed.ranks.items()]
    op_frames = [_compare_ops(*pair) for pair in pairs]
    compared_ops = pl.concat(
        [
            frame.filter(
                pl.col("outcome") == RUN,
                pl.col("recorded_ns").is_not_null(),
                pl.col("replayed_ns").is_not_null(),
            )
            for frame in op_frames
        ]
    ).with_columns(
        _compute_ratio("replayed_ns", "recorded_ns"),
        _compute_ratio("replayed_gpu_ns", "recorded_gpu_ns", "gpu_ratio"),
    )
    gpu_prefix = "gpu_" if compared_ops["gpu_ratio"].is_not_null().any() else ""
    long = compared_ops.filter(pl.col(f"recorded_{gpu_prefix}ns") >= LONG_NS)[
        f"{gpu_prefix}ratio"
    ].drop_nulls()
    quantiles = [long.quantile(share, "linear") for share in (0.1, 0.5, 0.9)]
    collectives = [_compare_collectives(*pair, plan.groups) for pair in pairs]
    totals = _concatenate_frames([_compare_totals(*pair, compared_ops) for pair in pairs], TOTALS)
    not_run = [
        op_frame.filter(pl.col("outcome") != RUN)
        .group_by("rank", "outcome", "reason", "name", maintain_order=True)
        .agg(pl.first("text"), pl.len().alias("count"), pl.sum("recorded_ns"))
        .sort(-pl.col("recorded_ns"), -pl.col("count").cast(pl.Int64), "name", "reason")
        for op_frame in op_frames
    ]
    contents = [
        rank_plan.storages.filter("external")
        .with_columns(
            pl.col("content", "evidence").cast(pl.String),
            pl.lit(rank_plan.rank, pl.Int32).alias("rank"),
        )
        .group_by("rank", "content", "evidence")
        .agg(pl.len().alias("count"), pl.sum("bytes"))
        .sort(-pl.col("bytes"), "content", "evidence", nulls_last=True)
        for rank_plan, _ in pairs
    ]
    simulated_table = SIMULATED.to_frame()
    if simulated:
        rows = simulated.ranks.join(
            totals.select("rank", "replayed_ns"), on="rank", maintain_order="left"
        )
        difference = (pl.col("simulated_ns") - pl.col("replayed_ns")) / pl.col("replayed_ns")
        has_replayed = pl.when(pl.col("replayed_ns") > 0)
        simulated_table = cast_to_schema(
            rows.with_columns(has_replayed.then(difference).alias("difference")), SIMULATED
        )
    comparison = ReplayComparison(
        source=plan.source,
        recorded_torch=plan.torch,
        torch=replayed.environment.get("torch"),
        device=replayed.device,
        pace=replayed.pace,
        whole=totals,
        coverage=_concatenate_frames(
            [_compute_coverage(op_frame) for op_frame in op_frames], COVERAGE
        ),
        not_run=_concatenate_frames(not_run, NOT_RUN),
        holes=_concatenate_frames(
            [of.holes.rename({"duration_ns": "recorded_ns"}) for of, _ in pairs], HOLES
        ),
        ops=cast_to_schema(_compare_by_name(compared_ops), OPS),
        each=cast_to_schema(compared_ops, EACH),
        collectives=_concatenate_frames(collectives, COLLECTIVES),
        contents=_concatenate_frames(contents, CONTENTS),
        long_count=long.len(),
        long_ratios=(quantiles[0], quantiles[1], quantiles[2]) if long.len() else None,  # type: ignore[arg-type]
        environment=replayed.environment,
        notices=(
            *plan.notices,
            *replayed.notices,
            *(n for result in replayed.ranks.values() for n in result.notices),
            *(simulated.notices if simulated else ()),
        ),
        machine=simulated.machine if simulated else None,
        simulated=simulated_table,
        not_simulated=(simulated.absent or None) if simulated else None,
    )
    comparison.check()
    return comparison


def _concatenate_frames(frames: list[pl.DataFrame], columns: pl.Schema) -> pl.DataFrame:
    return (
        pl.concat([cast_to_schema(frame, columns) for frame in frames])
        if frames
        else columns.to_frame()
    )


def _compute_ratio(part: str, total: str, name: str = "ratio") -> pl.Expr:
    return pl.when(pl.col(total) > 0).then(pl.col(part) / pl.col(total)).alias(name)


def _compute_median_ns(column: str) -> pl.Expr:
    return pl.col(column).list.median().round().cast(pl.Int64)


def _compare_ops(plan: RankPlan, replayed: RankReplayResult) -> pl.DataFrame:
    """Returns all recorded ops of a rank, including those left out: columns of `EACH`, outcome,
    reason, text.
    """
    outcomes = [
        frame.select("op", outcome=pl.lit(outcome), reason=reason, text="text")
        for outcome, frame, reason in (
            (FAILED, replayed.failures, pl.lit("failed")),
            (OTHER_SHAPE, replayed.replaced, pl.lit("other-shape")),
            (STAND_IN, replayed.stand_ins, pl.col("reason")),
        )
    ]
    became = pl.concat(outcomes).unique("op", keep="first", maintain_order=True)
    shapes = (
        plan.ops.select("op", pl.col("inputs").alias("tensor"))
        .explode("tensor")
        .join(
            plan.tensors.select(
                "tensor", pl.col("shape").cast(pl.List(pl.String)).list.join(", ").alias("shape")
            ),
            on="tensor",
            how="inner",
            maintain_order="left",
        )
        .group_by("op", maintain_order=True)
        .agg(pl.format("[{}]", "shape").str.join(" ").alias("shapes"))
    )
    replayed_times = replayed.ops.select(
        "op",
        _compute_median_ns("durations_ns").alias("replayed_ns"),
        pl.col("gpu_ns").alias("replayed_gpu_ns"),
    )
    ran = (
        plan.ops.filter(pl.col("node").is_not_null())
        .with_columns(
            _compute_median_ns("durations_ns").alias("recorded_ns"),
            pl.col("gpu_ns").alias("recorded_gpu_ns"),
        )
        .join(shapes, on="op", how="left", maintain_order="left")
        .join(became, on="op", how="left", maintain_order="left", suffix="_here")
        .join(replayed_times, on="op", how="left", maintain_order="left")
        .with_columns(
            pl.col("outcome").fill_null(RUN),
            pl.col("reason_here").alias("reason"),
            pl.col("shapes").fill_null(""),
        )
    )
    omitted = plan.omitted.rename({"duration_ns": "recorded_ns"}).with_columns(
        pl.lit(LEFT_OUT).alias("outcome")
    )
    columns = [*(name for name in EACH if not name.endswith("ratio")), "outcome", "reason", "text"]
    return pl.concat([ran.select(columns), omitted], how="diagonal_relaxed").select(columns)


def _compute_coverage(op_frame: pl.DataFrame) -> pl.DataFrame:
    gpu = pl.col("recorded_gpu_ns")
    parts = op_frame.group_by("rank", "outcome", "reason").agg(
        pl.len().alias("count"),
        pl.sum("recorded_ns"),
        pl.when(gpu.is_not_null().any()).then(gpu.sum()),
    )
    order = pl.col("outcome").cast(pl.Enum(OUTCOMES))
    return parts.with_columns(
        (pl.col("count") / pl.sum("count")).alias("count_share"),
        pl.when(pl.sum("recorded_ns") > 0)
        .then(pl.col("recorded_ns") / pl.sum("recorded_ns"))
        .alias("time_share"),
        pl.when(gpu.sum() > 0).then(gpu / gpu.sum()).alias("gpu_share"),
    ).sort(order, -pl.col("recorded_ns"), -pl.col("count").cast(pl.Int64), "reason")


def _compare_by_name(compared_ops: pl.DataFrame) -> pl.DataFrame:
    ratio = pl.col("ratio")
    on_both = pl.col("gpu_ratio").is_not_null()
    return (
        compared_ops.group_by("name", "shapes")
        .agg(
            pl.len().alias("calls"),
            pl.sum("recorded_ns", "replayed_ns"),
            pl.when(on_both.any()).then(
                pl.col("recorded_gpu_ns", "replayed_gpu_ns").filter(on_both).sum()
            ),
            *(
                ratio.quantile(share, "linear").alias(f"p{share * 100:.0f}_ratio")
                for share in (0.1, 0.5, 0.9)
            ),
        )
        .with_columns(
            (pl.col("replayed_ns") - pl.col("recorded_ns")).alias("lost_ns"),
            _compute_ratio("replayed_ns", "recorded_ns"),
            (pl.col("replayed_gpu_ns") - pl.col("recorded_gpu_ns")).alias("gpu_lost_ns"),
            _compute_ratio("replayed_gpu_ns", "recorded_gpu_ns", "gpu_ratio"),
        )
        .sort(
            -pl.col("gpu_lost_ns").abs(),
            -pl.col("lost_ns").abs(),
            "name",
            "shapes",
            nulls_last=True,
        )
    )


def _compare_totals(
    plan: RankPlan, replayed: RankReplayResult, compared_ops: pl.DataFrame
) -> pl.DataFrame:
    """Returns one row; a plan of several steps is compared with as many recorded ones."""
    steps = max(plan.ops["step"].drop_nulls().n_unique(), 1)
    rank_ops = compared_ops.filter(rank=plan.rank)
    op_totals = rank_ops.select(pl.sum("recorded_ns", "replayed_ns"))
    on_gpu = rank_ops.drop_nulls("gpu_ratio")
    recorded = plan.steps.select(
        (pl.col("duration_ns", "cpu_ns").median() * steps).round().cast(pl.Int64)
    )
    passes = pl.DataFrame(
        {"wall": replayed.iteration_ns, "cpu": replayed.iteration_cpu_ns}, schema=_PASSES
    )
    medians = passes.select(pl.all().median().round().cast(pl.Int64))
    row = {
        "rank": plan.rank,
        "step_count": plan.steps.height,
        "pass_count": passes.height,
        "recorded_ns": recorded["duration_ns"][0],
        "replayed_ns": medians["wall"][0],
        # Recorded is the processor time of one thread, which is all of it where one called all ops.
        "recorded_cpu_ns": recorded["cpu_ns"][0] if plan.ops["thread"].n_unique() < 2 else None,
        "replayed_cpu_ns": medians["cpu"][0],
        "recorded_ops_ns": op_totals["recorded_ns"][0],
        "replayed_ops_ns": op_totals["replayed_ns"][0],
        "recorded_gpu_ns": on_gpu["recorded_gpu_ns"].sum() if on_gpu.height else None,
        "replayed_gpu_ns": on_gpu["replayed_gpu_ns"].sum() if on_gpu.height else None,
        "peak_bytes": replayed.peak_bytes,
    }
    stored_schema = {name: kind for name, kind in TOTALS.items() if not name.endswith("ratio")}
    return pl.DataFrame([row], schema=stored_schema).with_columns(
        _compute_ratio("replayed_ns", "recorded_ns"),
        _compute_ratio("replayed_cpu_ns", "recorded_cpu_ns", "cpu_ratio"),
        _compute_ratio("replayed_ops_ns", "recorded_ops_ns", "ops_ratio"),
        _compute_ratio("replayed_gpu_ns", "recorded_gpu_ns", "gpu_ratio"),
    )


_PASSES = {"wall": pl.Int64, "cpu": pl.Int64}


def _compare_collectives(
    plan: RankPlan, replayed: RankReplayResult, groups: pl.DataFrame
) -> pl.DataFrame:
    """Compares collectives, each together with the waits for it."""
    item_bytes = plan.tensors["dtype"].replace_strict(ITEM_BYTES, return_dtype=pl.Int64)
    elements = plan.tensors["shape"].list.eval(pl.element().product()).list.first().fill_null(1)
    sizes = plan.tensors.select("tensor", (elements * item_bytes).alias("size"))
    moved = (
        plan.uses()
        .join(sizes, on="tensor", how="left")
        .group_by("op")
        .agg(
            pl.col("size").filter(~pl.col("made")).sum().alias("in_bytes"),
            pl.col("size").filter("made").sum().alias("out_bytes"),
        )
    )
    replayed_times = replayed.ops.select(
        "op",
        _compute_median_ns("durations_ns").alias("replayed_ns"),
        pl.col("gpu_ns").alias("replayed_gpu"),
    )
    sides = ["recorded_ns", "replayed_ns", "recorded_gpu", "replayed_gpu"]
    on_gpu = pl.col("recorded_gpu").is_not_null() & pl.col("replayed_gpu").is_not_null()
    times = (
        plan.ops.filter(pl.col("action").is_in([COLLECTIVE, WAIT]))
        .select(
            "op",
            "collective",
            _compute_median_ns("durations_ns").alias("recorded_ns"),
            pl.col("gpu_ns").alias("recorded_gpu"),
        )
        .join(replayed_times, on="op", how="left")
        .group_by("collective")
        .agg(*(pl.when(pl.col(side).is_not_null().any()).then(pl.sum(side)) for side in sides))
        .select(
            "collective",
            on_gpu.alias("on_gpu"),
            *(
                pl.when(on_gpu).then(f"{side}_gpu").otherwise(f"{side}_ns").alias(f"{side}_ns")
                for side in ("recorded", "replayed")
            ),
        )
    )
    ranks = groups.select(
        pl.col("name").alias("group"), pl.col("ranks").list.len().cast(pl.Int32).alias("group_size")
    )
    calls = add_sizes(
        plan.collectives.join(times, on="collective", how="left", maintain_order="left")
        .join(moved, on="op", how="left", maintain_order="left")
        .join(ranks, on="group", how="left", maintain_order="left")
        .filter(~pl.col("op").is_in(replayed.stand_ins["op"].implode()))
    )
    ends_with_call = pl.col("on_gpu") | ~pl.col("asynchronous")
    bandwidths = [
        pl.when(ends_with_call & (pl.col(f"{side}_ns") > 0))
        .then(pl.col("size_bytes") * pl.col("bus_factor") / pl.col(f"{side}_ns"))
        .alias(f"{side}_gb_per_s")
        for side in ("recorded", "replayed")
    ]
    return (
        calls.group_by(
            "rank",
            "kind",
            "group",
            "group_size",
            "asynchronous",
            "size_bytes",
            "bus_factor",
            "on_gpu",
        )
        .agg(
            pl.len().alias("count"), pl.median("recorded_ns", "replayed_ns").round().cast(pl.Int64)
        )
        .with_columns(_compute_ratio("replayed_ns", "recorded_ns"), *bandwidths)
        .with_columns(pl.when(ends_with_call).then("ratio").alias("ratio"))
        .sort(
            -pl.col("replayed_ns") * pl.col("count").cast(pl.Int64),
            "kind",
            "group",
            "size_bytes",
            nulls_last=True,
        )
    )
