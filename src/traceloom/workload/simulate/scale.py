"""A recorded job at another number of ranks.

What is done: the ranks' numbers tell which of them are copies of each other (`scaling.replicas`);
one copy is cut out of the graph; how long its works, delays and transfers take, and how much that
varies between steps and between ranks that do the same, is measured (`scaling.variation`); then as
many copies as asked for are evaluated together, each with works of its own, 200 times
(`scaling.draws`). Copies meet at their collectives, so the step waits for the slowest of
all: the more ranks, the longer, although every one of them works as before.

Rules:
- Every new rank does what a recorded one of its position does: the batch of a rank stays, that of the job grows.
- Groups that hold ranks of every copy grow; all others are replicated. An all_reduce keeps its bytes per rank; of
  all_gather and reduce_scatter the whole buffer stays and the part of a rank shrinks (sharded
  weights and gradients); an all_to_all keeps what a rank puts in.
- Without a network, the transfer of a group that grows takes so many times as long as its bytes on the bus: that of an
  all_reduce in proportion to 2 (n - 1) / n. Latency, which grows with the steps of an algorithm, is
  not in that.
- Where some members of a group were not recorded, the recorded ones end after a wait for them that nobody saw. The
  wait that the draws of the recorded job show is taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from traceloom.analyze.bandwidth import add_sizes
from traceloom.analyze.collectives import collectives_of
from traceloom.analyze.groups import declared_groups, groups
from traceloom.errors import UsageError
from traceloom.graph.graph import Graph
from traceloom.system import units
from traceloom.trace.array_types import Floats
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.trace.session import Session
from traceloom.workload.simulate.machine import Machine
from traceloom.workload.simulate.scale_draws import (
    DrawnJob,
    MonteCarlo,
    TransferTimes,
    can_end_a_step,
)
from traceloom.workload.simulate.scale_replicas import (
    ALL,
    PAIRS,
    RankNumbering,
    Replica,
    expand_replica,
    extract_replica,
    find_rank_numbering,
    measure_variation,
)
from traceloom.workload.simulate.transfers import compute_transfers, list_transfer_notices

DRAWS = 200
_MAX_RANKS = 1 << 20
_MAX_TRUSTED_ERROR = 0.03  # error at the recorded size beyond which a difference means little
SHOWN_PERCENT = (0, 5, 10, 25, 50, 75, 90, 95, 100)
QUANTILES = build_schema("percent time_ns", {"percent": pl.Int64})
COLLECTIVES = build_schema(
    "kind copies calls ranks_before ranks_after in_bytes_before in_bytes_after transfer_before_ns transfer_after_ns",
    "waiting_before_ns waiting_after_ns",
    {
        "copies": pl.Int64,
        "ranks_before": pl.Int64,
        "ranks_after": pl.Int64,
        "in_bytes_before": pl.Int64,
        "in_bytes_after": pl.Int64,
    },
)
# How long meetings take in the scaled job, ns, (meetings,): of their rows after, with the `ranks`
# of one group each, and of how long they would take by their bytes on the bus; and what must be
# known of each, "" for nothing.
TransferModel = Callable[[pl.DataFrame, Floats], tuple[Floats, list[str]]]


@dataclass(frozen=True)
class Scaled(Result):
    """A step of a job with another number of ranks.

    Attributes:
        ranks_before: Ranks of the recorded job.
        ranks: Ranks of the scaled one.
        data_parallel_before: Copies of the model in the recorded job.
        data_parallel: Copies in the scaled one.
        recorded: How many ranks were recorded.
        before_ns: The step as it was measured, median.
        measured: Whether it was; else it is what the recorded step takes on another device.
        identity_ns: The step of the recorded job, drawn in the same way, median.
        identity_error: Its difference from the measurement, as a fraction of that.
        equal_ns: The step of the scaled job if nothing varied; no rank waits for another one of its position.
        after_ns: The step of the scaled job, median over draws and steps.
        p10_ns: Nine of ten steps take longer.
        p90_ns: One of ten steps takes longer.
        quantiles: percent, time_ns: so many steps take no longer.
        collectives: One row per kind of meeting: kind, copies (of the model that meet there), calls (per step),
            ranks_before, ranks_after (of the group), in_bytes_before, in_bytes_after (of a rank),
            transfer_before_ns, transfer_after_ns, waiting_before_ns, waiting_after_ns (mean of a
            rank); means over calls.
        draws: How many draws; 1 where nothing varied.
        seed: Of chance.
        notices: What is assumed.
    """

    ranks_before: int
    ranks: int
    data_parallel_before: int
    data_parallel: int
    recorded: int
    before_ns: int
    measured: bool
    identity_ns: int
    identity_error: float
    equal_ns: int
    after_ns: int
    p10_ns: int
    p90_ns: int
    quantiles: pl.DataFrame
    collectives: pl.DataFrame
    draws: int
    seed: int
    notices: tuple[Notice, ...]

    @property
    def sentence(self) -> str:
        """The answer in words."""
        spread = f" ({units.format_duration(self.p10_ns)} to {units.format_duration(self.p90_ns)} in 8 of 10 steps)"
        alike = self.after_ns - self.equal_ns
        text = (
            f"A step of {units.format_quantity(self.ranks, 'rank')} takes {units.format_duration(self.after_ns)}"
            f"{spread if self.draws > 1 else ''}, "
            f"{'measured ' if self.measured else ''}{units.format_duration(self.before_ns)} with {self.ranks_before}"
        )
        if self.draws > 1 and alike > 0:
            text += (
                f"; {units.format_duration(alike)} of it because steps wait for the slowest rank"
            )
        return text + "."


class RecordedJob:
    """A job of which some ranks were recorded, made ready to be evaluated at any size.

    Args:
        graph: A calibrated graph of some ranks of a job; of several steps, so that their variation shows.
        roles: Role of each group by name, as `roles_of` gives it; without any, all groups must agree.
        varied: Whether works are drawn; else every rank takes the mean, and one copy stands for all.
        draws: How many.
        seed: Of chance: the same seed gives the same answer.
        measured: Whether the graph's times were measured; else they are those of another device.
        notices: What must be known of the graph.

    Raises:
        UsageError: `no-data-parallel`, `unknown-roles`, `uneven-groups`, `unrecorded-role`.
    """

    def __init__(
        self,
        graph: Graph,
        roles: Mapping[str, str] | None = None,
        *,
        varied: bool = True,
        draws: int = DRAWS,
        seed: int = 0,
        measured: bool = True,
        notices: Sequence[Notice] = (),
    ) -> None:
        self.axis = find_rank_numbering(graph, roles or {})
        self.replica = extract_replica(graph, self.axis, roles or {})
        self.variation = measure_variation(graph, self.replica, roles or {})
        self.recorded = graph.nodes["rank"].drop_nulls().n_unique()
        self.before_ns = int(np.median(_compute_step_times(find_step_ends(graph))))
        self.measured = measured
        self.notices = tuple(notices)
        self._varied, self._count, self._seed = varied, draws if varied else 1, seed
        self._draws = MonteCarlo(self.replica, self.variation)
        self._transfers = estimate_transfers(self._draws, self.axis, seed)
        self._before: DrawnJob | None = None

    def at(
        self,
        *,
        ranks: int | None = None,
        data_parallel: int | None = None,
        transfers: TransferModel | None = None,
    ) -> Scaled:
        """A step with so many ranks, or so many copies of the model; see `scale`."""
        copies = self.copies(ranks=ranks, data_parallel=data_parallel)
        after = grow_meetings(self.replica, copies)
        transfer, flags = self.transfers(after, transfers)
        if self._before is None:
            self._before = self._run(self.axis.copies, self._transfers)
        before, drawn_job = self._before, self._run(copies, transfer)
        equal = self._draws.run(copies, 1, self._seed, transfer, varied=False)
        after_steps = _compute_step_times(drawn_job.ends_ns)
        identity_ns = int(np.median(_compute_step_times(before.ends_ns)))
        p10, after_ns, p90 = (int(value) for value in np.percentile(after_steps, (10, 50, 90)))
        quantile_ns = np.percentile(after_steps, SHOWN_PERCENT).astype(np.int64)
        return Scaled(
            ranks_before=self.axis.world,
            ranks=copies * self.axis.positions,
            data_parallel_before=self.axis.copies,
            data_parallel=copies,
            recorded=self.recorded,
            before_ns=self.before_ns,
            measured=self.measured,
            identity_ns=identity_ns,
            identity_error=identity_ns / max(self.before_ns, 1) - 1,
            equal_ns=int(np.median(_compute_step_times(equal.ends_ns))),
            after_ns=after_ns,
            p10_ns=p10,
            p90_ns=p90,
            quantiles=pl.DataFrame(
                {"percent": SHOWN_PERCENT, "time_ns": quantile_ns}, schema=QUANTILES
            ),
            collectives=_compare_collectives(
                self.replica, after, (self._transfers, transfer), (before, drawn_job)
            ),
            draws=self._count,
            seed=self._seed,
            notices=(
                *self.notices,
                *self._notices(copies, identity_ns, network=transfers is not None),
                *list_transfer_notices(flags),
            ),
        )

    def graph_at(
        self,
        *,
        ranks: int | None = None,
        data_parallel: int | None = None,
        transfers: TransferModel | None = None,
    ) -> Graph:
        """The graph of all ranks of the scaled job, each with works of its own where anything
        varies: one draw.
        """
        copies = self.copies(ranks=ranks, data_parallel=data_parallel)
        after = grow_meetings(self.replica, copies)
        transfer = self.transfers(after, transfers)[0].mean_ns
        seed = self._seed if self._varied else None
        return expand_replica(
            self.replica, self.variation, after, copies, transfer_ns=transfer, seed=seed
        )

    def transfers(
        self, after: pl.DataFrame, transfers: TransferModel | None
    ) -> tuple[TransferTimes, list[str]]:
        """How long the meetings of a scaled job take, and what must be known of each; `after` is of
        `grown`.
        """
        mean_ns = self._transfers.mean_ns * compute_bus_factors(self.replica.meetings, after)
        mean_ns, flags = (
            (mean_ns, [""] * after.height) if transfers is None else transfers(after, mean_ns)
        )
        return replace(self._transfers, mean_ns=mean_ns), flags

    def copies(self, *, ranks: int | None, data_parallel: int | None) -> int:
        """How many copies of the model are asked for.

        Raises:
            UsageError: `cannot-scale`: not a whole number of them, or too many.
        """
        if (ranks is None) == (data_parallel is None):
            raise UsageError(
                "give either ranks or data_parallel", slug="cannot-scale", hint="as ranks=64"
            )
        positions = self.axis.positions
        copies, remainder = (
            divmod(ranks, positions) if ranks is not None else (data_parallel or 0, 0)
        )
        if remainder or copies < 1:
            raise UsageError(
                f"{ranks or 0} ranks are no whole number of copies of this job, each of which has {positions}",
                slug="cannot-scale",
                hint=f"ask for a multiple of {positions}",
            )
        if copies * positions > _MAX_RANKS:
            raise UsageError(
                f"{copies * positions:,} ranks are more than the {_MAX_RANKS:,} that can be drawn",
                slug="cannot-scale",
                hint="ask for fewer",
            )
        return copies

    def _run(self, copies: int, transfers: TransferTimes) -> DrawnJob:
        return self._draws.run(copies, self._count, self._seed, transfers, varied=self._varied)

    def _notices(self, copies: int, identity_ns: int, *, network: bool) -> tuple[Notice, ...]:
        """What the answer rests on."""
        notices = []
        error = identity_ns / max(self.before_ns, 1) - 1
        if abs(error) > _MAX_TRUSTED_ERROR:
            text = f"at the recorded size the answer is off by {error * 100:+.1f} %: trust no difference below that"
            notices.append(Notice("scale-identity", "warning", text))
        if self._varied and len(self.variation.steps) < 2:
            text = f"variation is that between {self.recorded} ranks in one step alone: record several steps"
            notices.append(Notice("scale-one-step", "warning", text))
        if self._varied and not len(self.variation.pools):
            text = "nothing varies in what was recorded, so no rank of the scaled job waits for another by chance"
            notices.append(Notice("scale-no-variation", "warning", text))
        if copied := self.replica.copied:
            text = (
                f"{len(copied)} of {self.axis.positions} positions of a copy were not recorded; they are taken to do "
                "what a recorded neighbour does"
            )
            notices.append(Notice("scale-copied-ranks", "info", text, len(copied)))
        growing = self.replica.meetings.filter(pl.col("span") == ALL).height
        if growing and copies != self.axis.copies and not network:
            text = (
                f"{growing} collectives of groups that grow are taken to need time in proportion to their bytes on "
                "the bus: no network is described"
            )
            notices.append(Notice("scale-no-network", "warning", text, growing))
        return tuple(notices)


def scale(
    graph: Graph,
    *,
    ranks: int | None = None,
    data_parallel: int | None = None,
    roles: Mapping[str, str] | None = None,
    transfers: TransferModel | None = None,
    varied: bool = True,
    draws: int = DRAWS,
    seed: int = 0,
) -> Scaled:
    """Say how long a step takes with another number of data parallel ranks.

    Args:
        graph: A calibrated graph of some ranks of a job; of several steps, so that their variation shows.
        ranks: Of the job that is asked about; or
        data_parallel: copies of the model.
        roles: Role of each group by name, as `roles_of` gives it; without any, all groups must agree.
        transfers: How long each meeting takes there; in proportion to its bytes on the bus where None.
        varied: Whether works are drawn; else every rank takes the mean, and one copy stands for all.
        draws: How many.
        seed: Of chance: the same seed gives the same answer.

    Raises:
        UsageError: `cannot-scale`, `no-data-parallel`, `unknown-roles`, `uneven-groups`, `unrecorded-role`.

    Example:
        >>> from traceloom.workload.simulate.scale import scale
        >>> scale(graph, ranks=1024).p90_ns  # doctest: +SKIP
    """
    job = RecordedJob(graph, roles, varied=varied, draws=draws, seed=seed)
    return job.at(ranks=ranks, data_parallel=data_parallel, transfers=transfers)


def find_roles(session: Session) -> dict[str, str]:
    """The role of each group of a recorded run by name; see `analyze.collective.groups`."""
    declared = pl.concat([declared_groups(trace) for trace in session.traces])
    world = max((trace.meta.world_size or 0 for trace in session.traces), default=0)
    table = groups(collectives_of(session).drop("trace"), declared, world or None).groups
    return dict(
        table.select("group", pl.col("role").cast(pl.String)).drop_nulls().unique("group").rows()
    )


def grow_meetings(replica: Replica, copies: int) -> pl.DataFrame:
    """The meetings with so many copies: `members`, `in_bytes` and `out_bytes` of groups that hold
    all of them follow.

    `ranks` are those of one group that meets there (of the first copies), the sender of a message
    first.

    Raises:
        UsageError: `cannot-scale`: groups of neighbouring copies do not divide them.
    """
    blocks = replica.meetings.filter(pl.col("span") > 1)["span"].unique().to_list()
    for span in blocks:
        if copies % span:
            raise UsageError(
                f"{copies} copies cannot be shared by groups of {span}, such as this job has",
                slug="cannot-scale",
                hint=f"ask for a multiple of {span * replica.axis.positions} ranks",
            )
    growing, before = pl.col("span") == ALL, replica.axis.copies
    axis = replace(replica.axis, copies=copies, world=copies * replica.axis.positions)
    groups = replica.meetings.unique("key", maintain_order=True).select(
        "key", "span", "kind", "positions"
    )
    ranks = [
        (
            key,
            [
                axis.rank(position, copy)
                for copy in range(copies if span == ALL else span)
                for position in positions
            ],
        )
        for key, span, _, positions in groups.iter_rows()
    ]
    members = pl.DataFrame(ranks, {"key": pl.String, "ranks": pl.List(pl.Int64)}, orient="row")
    share = pl.when(growing).then(before / copies).otherwise(1.0)
    gather, scatter = pl.col("kind") == "all_gather", pl.col("kind") == "reduce_scatter"
    return replica.meetings.join(members, on="key", how="left", maintain_order="left").with_columns(
        members=pl.when(growing).then(pl.col("members") // before * copies).otherwise("members"),
        in_bytes=pl.when(gather)
        .then((pl.col("in_bytes") * share).round().cast(pl.Int64))
        .otherwise("in_bytes"),
        out_bytes=pl.when(scatter)
        .then((pl.col("out_bytes") * share).round().cast(pl.Int64))
        .otherwise("out_bytes"),
    )


def compute_bus_factors(before: pl.DataFrame, after: pl.DataFrame) -> Floats:
    """How many times as long each meeting takes in a group of another size, by the bytes on the
    bus; (meetings,).
    """
    on_bus = []
    for frame in (before, after):
        ranks = frame["members"].to_numpy().astype(np.float64)
        once = (
            frame["kind"]
            .is_in(["broadcast", "reduce", "send", "receive", "barrier"])
            .fill_null(value=True)
            .to_numpy()
        )
        on_bus.append(np.where(once | (ranks < 2), 1.0, (ranks - 1) / ranks))
    factors: Floats = on_bus[1] / on_bus[0]
    return factors


def make_transfer_model(machine: Machine) -> TransferModel:
    """Transfers by the network of a machine, each as if nothing else was on its links."""

    def model(after: pl.DataFrame, taken_ns: Floats) -> tuple[Floats, list[str]]:
        messages = pl.col("kind").is_in(PAIRS).fill_null(value=False)
        table = after.select(
            "key",
            "in_bytes",
            "out_bytes",
            pl.col("ranks").alias("members"),
            pl.col("members").alias("group_size"),
            kind=pl.when(messages).then(pl.lit("send")).otherwise("kind"),
            recorded=pl.Series(taken_ns),
            splits=pl.lit(None, pl.List(pl.Int64)),
        )
        alike = ["key", "kind", "in_bytes", "out_bytes"]
        distinct = add_sizes(table.unique(alike, maintain_order=True))
        recorded = distinct["recorded"].round().cast(pl.Int64).to_numpy()
        priced = compute_transfers(machine, distinct, recorded)
        distinct = distinct.select(
            *alike,
            priced=pl.Series(priced.time_ns),
            own=pl.Series(priced.replaced),
            flags=pl.Series(priced.flags),
        )
        rows = table.join(distinct, on=alike, how="left", maintain_order="left", nulls_equal=True)
        times: Floats = np.where(rows["own"].to_numpy(), rows["priced"].to_numpy(), taken_ns)
        return times, rows["flags"].to_list()

    return model


def estimate_transfers(job: MonteCarlo, axis: RankNumbering, seed: int) -> TransferTimes:
    """The transfers of the recorded job, without waits for ranks that were not recorded."""
    apparent, pool = job.variation.apparent_ns, job.variation.transfer_pool
    drawn_job = job.run(
        axis.copies, DRAWS, seed + 1, TransferTimes(apparent, np.zeros_like(apparent))
    )
    later = job.replica.meetings.select(
        "key",
        "nth",
        excess=pl.Series(drawn_job.excess_ns),
        spread=pl.Series(drawn_job.excess_spread_ns),
    )
    typical = later.select(pl.col("excess", "spread").median().over("key", "nth"))
    transfer = np.maximum(apparent - typical["excess"].to_numpy(), 0.0)
    # What varies is the transfer and the wait; without the wait's share.
    varies = (
        np.where(pool >= 0, np.append(job.variation.pools.std(axis=1), 0.0)[pool], 0.0) * apparent
    )
    own_spread = np.sqrt(np.maximum(varies**2 - typical["spread"].to_numpy() ** 2, 0.0))
    relative = np.divide(own_spread, transfer, out=np.zeros_like(own_spread), where=transfer > 0)
    pool_spread = np.divide(
        varies, apparent, out=np.ones_like(own_spread), where=(varies > 0) & (apparent > 0)
    )
    return TransferTimes(transfer, relative / pool_spread)


def find_step_ends(graph: Graph) -> Floats:
    """When the recorded ranks had ended each step, from the beginning of the window; shape (1,
    steps).
    """
    begin_ns = pl.col("start_ns").min()
    nodes = graph.nodes.with_columns(end=pl.col("start_ns") + pl.col("duration_ns") - begin_ns)
    works = nodes.filter(can_end_a_step(graph), pl.col("step") >= 0)
    step_ends = works.group_by("step").agg(pl.col("end").max()).sort("step")["end"]
    all_ends = step_ends if step_ends.len() else nodes.select(pl.col("end").max())["end"]
    last: Floats = np.maximum.accumulate(all_ends.to_numpy()).astype(np.float64)
    return last[np.newaxis]


def _compute_step_times(ends_ns: Floats) -> Floats:
    """How long steps take from the end of the one before; the first only where there is no other."""
    return np.diff(ends_ns, axis=1) if ends_ns.shape[1] > 1 else ends_ns


def _compare_collectives(
    replica: Replica,
    after: pl.DataFrame,
    transfers: tuple[TransferTimes, TransferTimes],
    drawn_jobs: tuple[DrawnJob, DrawnJob],
) -> pl.DataFrame:
    """What becomes of the kinds of meetings."""
    steps = max(replica.meetings["step"].n_unique(), 1)
    rows = replica.meetings.select(
        "kind",
        copies="span",
        in_bytes_before="in_bytes",
        in_bytes_after=after["in_bytes"],
        ranks_before="members",
        ranks_after=after["members"],
        transfer_before_ns=pl.Series(transfers[0].mean_ns),
        transfer_after_ns=pl.Series(transfers[1].mean_ns),
        waiting_before_ns=pl.Series(drawn_jobs[0].waiting_ns),
        waiting_after_ns=pl.Series(drawn_jobs[1].waiting_ns),
    )
    keys = ["kind", "copies", "ranks_before", "ranks_after", "in_bytes_before", "in_bytes_after"]
    table = rows.group_by(keys, maintain_order=True).agg(
        (pl.len() / steps).round().alias("calls"), pl.all().mean().round()
    )
    return table.pipe(cast_to_schema, COLLECTIVES).sort("waiting_after_ns", descending=True)
