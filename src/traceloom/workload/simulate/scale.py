"""Estimation of a recorded job with another number of ranks.

Method: the numbering of ranks shows which of them are copies of each other, and one copy is cut out
of the graph (`scale_replicas`). The durations of its works, delays and transfers are measured, and
their variation between steps and between equal ranks. Then the requested number of copies is
evaluated together, each with its own random works, 200 times (`scale_draws`). Copies meet at their
collectives, so a step waits for the slowest rank: more ranks take longer, although each of them
works as before.

Rules:
- Every new rank runs what a recorded one of its position does: the batch per rank is constant, that
  of the job grows.
- Groups with ranks of every copy grow; all others are replicated. An all_reduce keeps its bytes per
  rank; all_gather and reduce_scatter keep the whole buffer, so the part of a rank shrinks (sharded
  weights and gradients); an all_to_all keeps the input of a rank.
- Without a network, the transfer of a growing group scales with its bytes on the bus: that of an
  all_reduce with 2 (n - 1) / n. This ignores latency, which grows with the steps of an algorithm.
- If some members of a group were not recorded, the transfers of the recorded ones include an unseen
  wait for them. The wait that draws of the recorded job show is subtracted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from traceloom.analyze.bandwidth import add_sizes
from traceloom.analyze.collectives import collect_session_calls
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
_MAX_TRUSTED_ERROR = 0.03  # error at the recorded size beyond which differences are not significant
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
# Maps the rows of meetings in the scaled job, with the `ranks` of one group each, and their times
# by bytes on the bus to their times, ns, (meetings,), and a remark on each, "" for none.
TransferModel = Callable[[pl.DataFrame, Floats], tuple[Floats, list[str]]]


@dataclass(frozen=True)
class Scaled(Result):
    """A step of a job with another number of ranks.

    Attributes:
        ranks_before: Ranks of the recorded job.
        ranks: Ranks of the scaled one.
        data_parallel_before: Copies of the model in the recorded job.
        data_parallel: Copies in the scaled one.
        recorded: Number of recorded ranks.
        before_ns: The median step as measured.
        measured: Whether it was measured; else it is the recorded step on another device.
        identity_ns: The median step of the recorded job, drawn in the same way.
        identity_error: Its difference from the measurement, as a fraction of that.
        equal_ns: The step of the scaled job without variation, when no rank waits for another one
            of its position.
        after_ns: The step of the scaled job, median over draws and steps.
        p10_ns: 10th percentile of it.
        p90_ns: 90th percentile of it.
        quantiles: percent, time_ns: this percentage of steps takes no longer.
        collectives: One row per kind of meeting: kind, copies (of the model that meet there), calls
            (per step), ranks_before, ranks_after (of the group), in_bytes_before, in_bytes_after
            (of a rank), transfer_before_ns, transfer_after_ns, waiting_before_ns, waiting_after_ns
            (mean of a rank); means over calls.
        draws: Number of draws; 1 if nothing varied.
        seed: Random seed.
        notices: Assumptions.
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
        spread = f" ({units.format_duration(self.p10_ns)} to {units.format_duration(self.p90_ns)} in 8 of 10 steps)"
        waiting_ns = self.after_ns - self.equal_ns
        text = (
            f"A step of {units.format_quantity(self.ranks, 'rank')} takes {units.format_duration(self.after_ns)}"
            f"{spread if self.draws > 1 else ''}, "
            f"{'measured ' if self.measured else ''}{units.format_duration(self.before_ns)} with {self.ranks_before}"
        )
        if self.draws > 1 and waiting_ns > 0:
            text += f"; {units.format_duration(waiting_ns)} of it because steps wait for the slowest rank"
        return text + "."


class RecordedJob:
    """A partially recorded job, prepared for evaluation at any size.

    Args:
        graph: A calibrated graph of some ranks of a job, of several steps, so that their variation
            shows.
        roles: Role of each group by name, from `find_roles`; without any, all groups must agree.
        varied: Whether works are drawn at random; else every rank takes the mean, and one copy
            represents all.
        draws: Number of draws.
        seed: Random seed: the same seed gives the same result.
        measured: Whether the graph's times were measured; else they are those of another device.
        notices: Notices about the graph.

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
        """Returns a step with a given number of ranks, or of copies of the model; see `scale`."""
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
        """Returns the graph of all ranks of the scaled job for one draw, with random works per rank
        if anything varies.
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
        """Returns the times of the meetings of a scaled job, and a remark on each; `after` is from
        `grow_meetings`.
        """
        mean_ns = self._transfers.mean_ns * compute_bus_factors(self.replica.meetings, after)
        mean_ns, flags = (
            (mean_ns, [""] * after.height) if transfers is None else transfers(after, mean_ns)
        )
        return replace(self._transfers, mean_ns=mean_ns), flags

    def copies(self, *, ranks: int | None, data_parallel: int | None) -> int:
        """Returns the requested number of copies of the model.

        Raises:
            UsageError: `cannot-scale`: not a whole number, or too many.
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
    """Estimate the duration of a step with another number of data-parallel ranks.

    Args:
        graph: A calibrated graph of some ranks of a job, of several steps, so that their variation
            shows.
        ranks: Number of ranks of the scaled job; or
        data_parallel: its number of copies of the model.
        roles: Role of each group by name, from `find_roles`; without any, all groups must agree.
        transfers: Times of its meetings; None for times in proportion to bytes on the bus.
        varied: Whether works are drawn at random; else every rank takes the mean, and one copy
            represents all.
        draws: Number of draws.
        seed: Random seed: the same seed gives the same result.

    Raises:
        UsageError: `cannot-scale`, `no-data-parallel`, `unknown-roles`, `uneven-groups`,
            `unrecorded-role`.

    Example:
        >>> from traceloom.workload.simulate.scale import scale
        >>> scale(graph, ranks=1024).p90_ns  # doctest: +SKIP
    """
    return RecordedJob(graph, roles, varied=varied, draws=draws, seed=seed).at(
        ranks=ranks, data_parallel=data_parallel, transfers=transfers
    )


def find_roles(session: Session) -> dict[str, str]:
    """Returns the role of each group of a recorded run by name; see `analyze.collective.groups`."""
    declared = pl.concat([declared_groups(trace) for trace in session.traces])
    world = max((trace.meta.world_size or 0 for trace in session.traces), default=0)
    table = groups(collect_session_calls(session).drop("trace"), declared, world or None).groups
    return dict(
        table.select("group", pl.col("role").cast(pl.String)).drop_nulls().unique("group").rows()
    )


def grow_meetings(replica: Replica, copies: int) -> pl.DataFrame:
    """Returns the meetings for a number of copies, with adapted `members`, `in_bytes` and
    `out_bytes` of groups with ranks of all copies.

    `ranks` are those of one group that meets there (of the first copies), the sender of a message
    first.

    Raises:
        UsageError: `cannot-scale`: the copies are not divisible by a group of neighboring copies.
    """
    for span in replica.meetings.filter(pl.col("span") > 1)["span"].unique().to_list():
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
    """Returns the factor on the time of each meeting in a group of another size, by the bytes on
    the bus; (meetings,).
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
    """Returns a model of transfers on the network of a machine, each without contention."""

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
        key_columns = ["key", "kind", "in_bytes", "out_bytes"]
        distinct = add_sizes(table.unique(key_columns, maintain_order=True))
        transfers = compute_transfers(
            machine, distinct, distinct["recorded"].round().cast(pl.Int64).to_numpy()
        )
        distinct = distinct.select(
            *key_columns,
            priced=pl.Series(transfers.time_ns),
            own=pl.Series(transfers.replaced),
            flags=pl.Series(transfers.flags),
        )
        rows = table.join(
            distinct, on=key_columns, how="left", maintain_order="left", nulls_equal=True
        )
        times: Floats = np.where(rows["own"].to_numpy(), rows["priced"].to_numpy(), taken_ns)
        return times, rows["flags"].to_list()

    return model


def estimate_transfers(job: MonteCarlo, axis: RankNumbering, seed: int) -> TransferTimes:
    """Returns the transfers of the recorded job, without waits for unrecorded ranks."""
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
    # The variation is that of transfer and wait; remove the wait's share.
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
    """Returns when all recorded ranks had ended each step, from the beginning of the window; shape
    (1, steps).
    """
    begin_ns = pl.col("start_ns").min()
    nodes = graph.nodes.with_columns(end=pl.col("start_ns") + pl.col("duration_ns") - begin_ns)
    step_ends = (
        nodes.filter(can_end_a_step(graph), pl.col("step") >= 0)
        .group_by("step")
        .agg(pl.col("end").max())
        .sort("step")["end"]
    )
    all_ends = step_ends if step_ends.len() else nodes.select(pl.col("end").max())["end"]
    last: Floats = np.maximum.accumulate(all_ends.to_numpy()).astype(np.float64)
    return last[np.newaxis]


def _compute_step_times(ends_ns: Floats) -> Floats:
    """Returns the durations of steps from the end of the previous one; the first step counts only
    if there is no other.
    """
    return np.diff(ends_ns, axis=1) if ends_ns.shape[1] > 1 else ends_ns


def _compare_collectives(
    replica: Replica,
    after: pl.DataFrame,
    transfers: tuple[TransferTimes, TransferTimes],
    drawn_jobs: tuple[DrawnJob, DrawnJob],
) -> pl.DataFrame:
    """Returns the kinds of meetings before and after scaling."""
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
    return (
        rows.group_by(keys, maintain_order=True)
        .agg((pl.len() / steps).round().alias("calls"), pl.all().mean().round())
        .pipe(cast_to_schema, COLLECTIVES)
        .sort("waiting_after_ns", descending=True)
    )
