"""Which events of a device trace are which ops of a host trace, and how that is known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import polars as pl

from traceloom.array_types import Ints
from traceloom.model.frames import schema
from traceloom.model.graph_schema import GRAPH_SCHEMAS
from traceloom.model.host_trace import GROUP_LIST, HostTrace
from traceloom.model.notice import Notice

BY_RECORD_ID = "matched: record function id"
BY_RECORD_ID_RENAMED = "matched: record function id, name spelled otherwise"
BY_EXTERNAL_ID = "matched: External id, names equal"
BY_NAMES = "matched: names in order"
NO_NAME = "unmatched: no event of this name"
NO_ID = "unmatched: no event with its id"
OUTSIDE = "unmatched: before or after the device trace"
NO_PLACE = "unmatched: not in this order on its thread"
ROOT = "no op: process or thread"
GROUPS = "no op: list of process groups"
OUTCOMES = (
    BY_RECORD_ID,
    BY_RECORD_ID_RENAMED,
    BY_EXTERNAL_ID,
    BY_NAMES,
    NO_NAME,
    NO_ID,
    OUTSIDE,
    NO_PLACE,
    ROOT,
    GROUPS,
)
Outcome = pl.Enum(list(OUTCOMES))
THREADS = schema("thread lane ops matched", {"thread": pl.Int64})


@dataclass(frozen=True)
class Matching:
    """The join of a host trace to a device trace of the same process.

    Attributes:
        host: The host trace.
        host_op: Id in the host trace of each event of the device trace, -1 where it has none; shape (events,).
        outcome: What became of each row of `host.ops`; one of OUTCOMES.
        exact: Ids join them; else the order of names does.
        iterations: How many iterations of the device trace the host trace fits; 1 where ids say which one it is.
        threads: Thread of the host trace, lane of the device trace, `ops` of the thread, how many of them `matched`.
        carried: Where a host trace of another step than those of the device trace was carried over to these by the
            order of names: how many of the device trace's ops that gave a host op, and how many stay without.
        notices: What must be known about the host trace and the join.
        rank: The rank of the device trace.
    """

    host: HostTrace
    host_op: Ints
    outcome: pl.Series
    exact: bool
    iterations: int = 1
    threads: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=THREADS))
    carried: tuple[int, int] | None = None
    notices: tuple[Notice, ...] = ()
    rank: int | None = None

    @property
    def evidence(self) -> str:
        """Of what the graph says because of the host trace: `correlated` or `inferred`."""
        return "correlated" if self.exact else "inferred"

    @property
    def ops(self) -> int:
        """Host ops that there are to match: all nodes but processes, threads and lists of groups."""
        return int((~self.outcome.is_in([ROOT, GROUPS])).sum())

    @property
    def matched(self) -> int:
        """Host ops that were matched."""
        return int(self.outcome.cast(pl.String).str.starts_with("matched").sum())

    def coverage(self) -> pl.DataFrame:
        """How many host ops were joined how, and why the others were not: columns as the graph's `coverage`."""
        counts = dict(self.outcome.value_counts().iter_rows())
        rows = [("host-ops", outcome, counts[outcome]) for outcome in OUTCOMES if counts.get(outcome)]
        if self.carried is not None:
            matched, without = self.carried
            rows.append(("timed-ops", "matched: names in the order of the graph step", matched))
            rows += [("timed-ops", "unmatched: not in the graph step", without)] if without else []
        frame = pl.DataFrame(rows, schema=["subject", "outcome", "count"], orient="row")
        return frame.with_columns(
            pl.lit(self.rank or 0, dtype=pl.Int32).alias("rank"), pl.lit(None, dtype=pl.Int64).alias("time_ns")
        ).select(pl.col(name).cast(kind) for name, kind in GRAPH_SCHEMAS["coverage"].items())

    def with_notices(self, *notices: Notice) -> Matching:
        """The same with more to be known."""
        return replace(self, notices=(*self.notices, *(notice.of_rank(self.rank) for notice in notices)))


def no_ops(host: HostTrace) -> pl.Series:
    """For each row of `host.ops` why it is no op; null for ops."""
    group_list = host.ops["name"] == GROUP_LIST
    return (
        pl.select(pl.when(host.roots()).then(pl.lit(ROOT)).when(group_list).then(pl.lit(GROUPS)).otherwise(None))
        .to_series()
        .cast(Outcome)
        .alias("outcome")
    )
