"""Attributes device time to owners, as a tree, and compares owner rules.

Rules are applied on read, never to stored rows: a corrected rule also corrects the past.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import polars as pl

from traceloom.errors import UsageError, nearest
from traceloom.fleet.rules import EARLIEST, LATEST, OwnerRule, Prices
from traceloom.fleet.store.schema import ALLOCATED, BUSY, DIMENSIONS, UNALLOCATED, UNREACHABLE
from traceloom.trace.frames import Result

UNATTRIBUTED = "unattributed"
"""Value of a dimension that is unknown."""

JOB_DIMENSIONS = ("job", "scheduler", *DIMENSIONS)
DEVICE_DIMENSIONS = ("host", "device_model", "device")
ATTRIBUTION_DIMENSIONS = (*JOB_DIMENSIONS, *DEVICE_DIMENSIONS)
"""Dimensions by which time can be divided."""

_STATES = {
    "busy_ms": BUSY,
    "idle_ms": ALLOCATED,
    "unallocated_ms": UNALLOCATED,
    "unreachable_ms": UNREACHABLE,
}
_TIME_COLUMNS = ("device_ms", *_STATES)
_MEASURED_AMOUNTS = {
    "energy_mj": "energy_known_ms",
    "flops_low": "flops_known_ms",
    "flops_high": "flops_known_ms",
    "input_bytes": "input_known_ms",
}
_PRICED_AMOUNTS = {"cost": "cost_known_ms", "co2_g": "co2_known_ms"}
_AMOUNTS = _MEASURED_AMOUNTS | _PRICED_AMOUNTS
"""Amount -> column of the device time for which it is known."""


@dataclass(frozen=True)
class Attribution(Result):
    """Device time and its cost, divided by dimensions.

    Attributes:
        by: The dimensions, outermost first.
        currency: Of the cost; None without prices.
        leaves: One row per combination of values of `by` (and per time interval, `time_ns`, if
            requested), largest time first. `device_ms` is busy_ms + idle_ms (held by a job, but
            idle) + unallocated_ms + unreachable_ms. energy_mj, flops_low, flops_high, input_bytes,
            cost and co2_g are null if unknown for all device time; energy_known_ms, flops_known_ms,
            input_known_ms, cost_known_ms, co2_known_ms give the device time for which they are
            known. Energy that is not measured adds nothing to the cost of the device hour. Time
            that no job held has the name of its state as the value of all job dimensions; unknown
            facts of a job are `unattributed`.
    """

    by: tuple[str, ...]
    currency: str | None
    leaves: pl.DataFrame

    def level(self, depth: int) -> pl.DataFrame:
        """Returns the sums by the first `depth` dimensions; 0 gives a single row.

        All levels have the same total.
        """
        times = [name for name in ("time_ns",) if name in self.leaves.columns]
        return _add_up_amounts(self.leaves.lazy(), [*times, *self.by[:depth]]).collect()


def divide_device_time(
    usage: pl.LazyFrame,
    owned: pl.DataFrame,
    by: Sequence[str],
    prices: Prices | None = None,
    every_ns: int | None = None,
) -> Attribution:
    """Divides the device time of the rows.

    Args:
        usage: Rows of `usage_minute` or `usage_hour`.
        owned: Owners of jobs, of `compute_ownership_periods`. A row counts for the owner at its
            start.
        by: Dimensions, outermost first, of `ATTRIBUTION_DIMENSIONS`.
        prices: Prices of hours and energy.
        every_ns: Length of time intervals; None: a single one.

    Raises:
        UsageError: `no-such-dimension`.
    """
    for name in by:
        if name not in ATTRIBUTION_DIMENSIONS:
            raise UsageError(
                f"device time is not divided by `{name}`",
                slug="no-such-dimension",
                hint=nearest(name, ATTRIBUTION_DIMENSIONS)
                + f"there are {', '.join(ATTRIBUTION_DIMENSIONS)}",
            )
    by = tuple(dict.fromkeys(by))
    times, interval_columns = ([], []) if every_ns is None else (["time_ns"], ["stretch_ns"])
    devices = [name for name in by if name in DEVICE_DIMENSIONS]
    if prices is not None and prices.of_models and "device_model" not in devices:
        devices.append("device_model")
    measured = [
        pl.when(pl.col(amount).is_not_null()).then("device_ms").otherwise(0).alias(time_column)
        for time_column, amount in {
            time_column: amount for amount, time_column in _MEASURED_AMOUNTS.items()
        }.items()
    ]
    rows = usage.with_columns(measured)
    if every_ns is not None:
        rows = rows.with_columns(stretch_ns=pl.col("time_ns") // every_ns * every_ns)
    usage_sums = _add_up_by_owner(
        rows,
        owned,
        ["state", *devices, *interval_columns],
        [name for name in by if name in JOB_DIMENSIONS],
    )
    nobody = pl.when(pl.col("state").is_in((UNALLOCATED, UNREACHABLE))).then("state")
    values = [
        (nobody.otherwise(name) if name in JOB_DIMENSIONS else pl.col(name))
        .fill_null(UNATTRIBUTED)
        .alias(name)
        for name in by
    ]
    states = [
        pl.when(pl.col("state") == state).then("device_ms").otherwise(0).alias(name)
        for name, state in _STATES.items()
    ]
    priced = usage_sums.with_columns(*states, *_compute_costs(prices)).with_columns(values)
    if every_ns is not None:
        priced = priced.with_columns(time_ns="stretch_ns")
    leaves = _add_up_amounts(priced, [*times, *by]).collect()
    return Attribution(by, None if prices is None else prices.currency, leaves)


def _add_up_by_owner(
    rows: pl.LazyFrame, owned: pl.DataFrame, keys: Sequence[str], job_dimensions: Sequence[str]
) -> pl.LazyFrame:
    """Adds up usage by job and keys, with the job's owners at the time.

    Nearly all jobs never change owners: their usage is added up over all time at once, without an
    as-of join.
    """
    sums = tuple(dict.fromkeys(("device_ms", *_MEASURED_AMOUNTS, *_MEASURED_AMOUNTS.values())))
    facts_of = [name for name in job_dimensions if name != "job"]
    facts = owned.lazy().select("job", "from_ns", *facts_of)
    columns = ("job", *keys, *facts_of, *sums)
    changing = owned.group_by("job").len().filter(pl.col("len") > 1)["job"]
    if not changing.len():
        return (
            rows.group_by("job", *keys)
            .agg(pl.col(sums).sum())
            .join(facts, on="job", how="left")
            .select(columns)
        )
    moves = pl.col("job").is_in(changing.implode())
    fixed = rows.filter(~moves.fill_null(False)).group_by("job", *keys).agg(pl.col(sums).sum())
    once = fixed.join(facts.filter(~moves), on="job", how="left")
    moved = (
        rows.filter(moves).group_by("job", *keys, "time_ns").agg(pl.col(sums).sum()).sort("time_ns")
    )
    dated = moved.join_asof(
        facts.sort("from_ns"),
        left_on="time_ns",
        right_on="from_ns",
        by="job",
        check_sortedness=False,
    )
    return pl.concat([frame.select(columns) for frame in (once, dated)])


def _compute_costs(prices: Prices | None) -> list[pl.Expr]:
    """Returns expressions for cost and CO2 of each row, and the device time for which they are
    known.
    """
    if prices is None:
        nothing = [pl.lit(None, pl.Float64).alias(name) for name in _PRICED_AMOUNTS]
        return [*nothing, *(pl.lit(0, pl.Int64).alias(name) for name in _PRICED_AMOUNTS.values())]
    default = prices.device_hour.get("default")
    hour = (
        pl.col("device_model").replace_strict(
            prices.of_models, default=default, return_dtype=pl.Float64
        )
        if prices.of_models
        else pl.lit(default, pl.Float64)
    )
    kwh = pl.col("energy_mj") / 3.6e9
    priced = {
        "cost": hour * pl.col("device_ms") / 3.6e6 + kwh.fill_null(0.0) * (prices.per_kwh or 0.0),
        "co2_g": kwh * pl.lit(prices.co2_g_per_kwh, pl.Float64),
    }
    has_price = {"cost": hour.is_not_null(), "co2_g": pl.lit(prices.co2_g_per_kwh is not None)}
    time_columns = {"cost": "device_ms", "co2_g": "energy_known_ms"}
    return [
        *(amount.alias(name) for name, amount in priced.items()),
        *(
            pl.when(has_price[name])
            .then(time_columns[name])
            .otherwise(0)
            .alias(_PRICED_AMOUNTS[name])
            for name in _PRICED_AMOUNTS
        ),
    ]


def _add_up_amounts(frame: pl.LazyFrame, keys: Sequence[str]) -> pl.LazyFrame:
    sums = [
        pl.col(name).sum()
        for name in dict.fromkeys((*_TIME_COLUMNS, *_AMOUNTS, *_AMOUNTS.values()))
    ]
    grouped = frame.group_by(keys).agg(sums) if keys else frame.select(sums)
    return grouped.with_columns(
        pl.when(pl.col(time_column) > 0).then(amount).alias(amount)
        for amount, time_column in _AMOUNTS.items()
    ).sort("device_ms", *keys, descending=[True, *(False for _ in keys)])


OTHERS_LABEL = "(others)"
"""Label of the merged small parts."""

MAX_ROWS = 5_000
"""Max rows of a tree; smaller parts are merged to stay below it."""


@dataclass(frozen=True)
class AttributionTree(Result):
    """Device time and its cost, as a tree.

    Attributes:
        by: The dimensions, outermost first.
        currency: Of the cost; None without prices.
        rows: Depth first, the largest part first: time_ns (start of the interval, null if there is
            only one), values (of the dimensions, outermost first; empty for the total), and the
            columns of `Attribution.leaves`.
    """

    by: tuple[str, ...]
    currency: str | None
    rows: pl.DataFrame


def build_attribution_tree(divided: Attribution, top: int) -> AttributionTree:
    """Arranges device time as a tree.

    Args:
        divided: Its leaves.
        top: Max separate children of each node, the largest over all time; fewer if there would be
            too many rows.

    Raises:
        UsageError: `too-many-rows`: there are too many time intervals.
    """
    while True:
        rows = _build_tree_rows(divided, top)
        if rows.height <= MAX_ROWS:
            return AttributionTree(divided.by, divided.currency, rows)
        if top == 1:
            raise UsageError(
                f"the answer has {rows.height:,} rows, more than {MAX_ROWS:,}",
                slug="too-many-rows",
                hint="ask for less time, longer stretches or fewer dimensions",
            )
        top //= 2


def _build_tree_rows(divided: Attribution, top: int) -> pl.DataFrame:
    by, leaves = divided.by, divided.leaves
    orders = [f"order {name}" for name in by]
    for depth, (name, order) in enumerate(zip(by, orders, strict=True)):
        number = pl.int_range(1, pl.len() + 1)
        ranked = (
            leaves.group_by(by[: depth + 1])
            .agg(pl.col("device_ms").sum())
            .sort(pl.col(name) == OTHERS_LABEL, "device_ms", name, descending=[False, True, False])
            .with_columns(
                (number.over(by[:depth]) if depth else number)
                .clip(upper_bound=top + 1)
                .alias(order)
            )
        )
        leaves = leaves.join(
            ranked.drop("device_ms"), on=by[: depth + 1], nulls_equal=True
        ).with_columns(
            pl.when(pl.col(order) > top).then(pl.lit(OTHERS_LABEL)).otherwise(inner).alias(inner)
            for inner in by[depth:]
        )
    times = [key for key in ("time_ns",) if key in leaves.columns]
    levels = []
    for depth in range(len(by) + 1):
        keys = (*orders[:depth], *by[:depth])
        level = Attribution(keys, divided.currency, leaves).level(len(keys))
        values = pl.concat_list(by[:depth]) if depth else pl.lit([], pl.List(pl.String))
        levels.append(level.with_columns(values.alias("values")).drop(by[:depth]))
    tree_rows = pl.concat(levels, how="diagonal").with_columns(pl.col(orders).fill_null(0))
    if not times:
        tree_rows = tree_rows.with_columns(time_ns=pl.lit(None, pl.Int64))
    return (
        tree_rows.sort("time_ns", *orders)
        .drop(orders)
        .select("time_ns", "values", pl.exclude("time_ns", "values"))
    )


_VALIDITY_COLUMNS = ("valid_from_ns", "valid_to_ns")
_CLAIMED_COLUMNS = ("scheduler", *DIMENSIONS)


def compute_ownership_periods(
    jobs: pl.LazyFrame, owners: pl.LazyFrame, rules: Sequence[OwnerRule] = ()
) -> pl.DataFrame:
    """Computes the owners of each job over time.

    Of several statements about a time, the one with the latest start counts; a job's own statement
    also applies back to its beginning, and until its next one. For each dimension the first known
    value counts, in this order: people, the rules in their order, the job's own field, its label of
    that name.

    Args:
        jobs: Rows of this table: statements of jobs.
        owners: Rows of this table: statements of people.
        rules: Of `owners.toml`.

    Returns:
        `job`, `from_ns` (ascending within a job), scheduler and all dimensions; null if unknown. A
            job
        without statements has no row.
    """
    job_claims = (
        jobs.select("job", *_CLAIMED_COLUMNS, "labels", "valid_from_ns", "valid_to_ns")
        .drop_nulls("job")
        .collect()
    )
    people = (
        owners.select("job", *DIMENSIONS, "valid_from_ns", "valid_to_ns")
        .drop_nulls("job")
        .collect()
    )
    first = pl.col("valid_from_ns") == pl.col("valid_from_ns").min().over("job")
    job_claims = job_claims.with_columns(
        valid_from_ns=pl.when(first).then(EARLIEST).otherwise("valid_from_ns"),
        valid_to_ns=pl.lit(None, pl.Int64),
    )
    all_jobs = pl.concat([job_claims["job"], people["job"]]).unique()
    marks = [
        statements.select("job", from_ns=name)
        for statements in (job_claims, people)
        for name in _VALIDITY_COLUMNS
    ]
    dated = {
        boundary_ns
        for rule in rules
        for boundary_ns in (rule.from_ns, rule.until_ns)
        if EARLIEST < boundary_ns < LATEST
    }
    rule_times = pl.DataFrame({"from_ns": [EARLIEST, *dated]}, schema={"from_ns": pl.Int64})
    marks.append(pl.DataFrame({"job": all_jobs}).join(rule_times, how="cross"))
    times = pl.concat(marks).drop_nulls().unique().sort("job", "from_ns")
    facts = times.join_asof(
        job_claims.sort("job", "valid_from_ns"),
        left_on="from_ns",
        right_on="valid_from_ns",
        by="job",
        check_sortedness=False,
    )
    # A statement that began later but has ended does not override one that still holds.
    valid = times.join(people, on="job").filter(
        pl.col("valid_from_ns") <= pl.col("from_ns"),
        pl.col("valid_to_ns").fill_null(LATEST) > pl.col("from_ns"),
    )
    latest = valid.sort("valid_from_ns", maintain_order=True).unique(
        ["job", "from_ns"], keep="last"
    )
    stated_owners = times.join(latest, on=["job", "from_ns"], how="left", maintain_order="left")
    columns = []
    for name in DIMENSIONS:
        rule_values = [
            pl.when(_match_rule(rule)).then(pl.lit(rule.set[name]))
            for rule in rules
            if name in rule.set
        ]
        label = pl.col("labels").str.json_path_match(f"$['{name}']")
        columns.append(pl.coalesce(stated_owners[name], *rule_values, name, label).alias(name))
    owned = facts.with_columns(columns).select("job", "from_ns", *_CLAIMED_COLUMNS)
    # The first row of each job is its earliest, and is kept.
    changed = pl.any_horizontal(
        pl.col(name).ne_missing(pl.col(name).shift()) for name in _CLAIMED_COLUMNS
    )
    return owned.filter(changed | (pl.col("from_ns") == EARLIEST))


def add_owners(
    captures: pl.LazyFrame, owned: pl.DataFrame, job_dimensions: Sequence[str]
) -> pl.LazyFrame:
    """Adds the owners of each capture's job at the capture's start.

    Args:
        captures: With `job` and `start_ns`.
        owned: Of `compute_ownership_periods`.
        job_dimensions: `job`, scheduler or dimensions.
    """
    added = [name for name in job_dimensions if name != "job"]
    facts = owned.lazy().select("job", "from_ns", *added).sort("from_ns")
    return captures.sort("start_ns").join_asof(
        facts, left_on="start_ns", right_on="from_ns", by="job", check_sortedness=False
    )


def match_pattern(text: pl.Expr, pattern: str) -> pl.Expr:
    """Returns whether texts match a pattern with `*` (any characters) and `?` (one); null never
    does.
    """
    # Rust's regex engine is linear in time for any pattern.
    characters = (
        ".*" if sign == "*" else "." if sign == "?" else re.escape(sign) for sign in pattern
    )
    return text.str.contains(f"(?s)^{''.join(characters)}$").fill_null(False)


def _match_rule(rule: OwnerRule) -> pl.Expr:
    parts = [(pl.col("from_ns") >= rule.from_ns) & (pl.col("from_ns") < rule.until_ns)]
    for name, pattern in rule.match.items():
        text = (
            pl.col("labels").str.json_path_match(f"$['{name.removeprefix('label.')}']")
            if name.startswith("label.")
            else pl.col(name)
        )
        parts.append(match_pattern(text, pattern))
    return reduce(lambda left, right: left & right, parts)


@dataclass(frozen=True)
class OwnershipMoves(Result):
    """Device time that changes owners.

    Attributes:
        rows: Most time first: dimension, before and after (its values), jobs, device_ms.
    """

    rows: pl.DataFrame


def compare_ownership(
    usage: pl.LazyFrame, before: pl.DataFrame, after: pl.DataFrame
) -> OwnershipMoves:
    """Compares two assignments of owners to jobs.

    Args:
        usage: Rows of `usage_minute` or `usage_hour`.
        before: Of `compute_ownership_periods`, by the current rules.
        after: The same, by other rules.
    """
    times = (
        pl.concat([before.select("job", "from_ns"), after.select("job", "from_ns")])
        .unique()
        .sort("job", "from_ns")
    )
    owners_over_time = times
    for name, owned in (("before", before), ("after", after)):
        facts = owned.select(
            "job", "from_ns", *(pl.col(key).alias(f"{key} {name}") for key in DIMENSIONS)
        )
        owners_over_time = owners_over_time.join_asof(
            facts.sort("job", "from_ns"), on="from_ns", by="job", check_sortedness=False
        )
    until = pl.col("from_ns").shift(-1).over("job").fill_null(LATEST)
    moved = pl.any_horizontal(
        pl.col(f"{key} before").ne_missing(pl.col(f"{key} after")) for key in DIMENSIONS
    )
    times_of = (
        usage.select("job", "time_ns", "device_ms")
        .join(owners_over_time.with_columns(until_ns=until).filter(moved).lazy(), on="job")
        .filter(pl.col("time_ns").is_between("from_ns", "until_ns", closed="left"))
        .group_by("job", *(f"{key} {name}" for key in DIMENSIONS for name in ("before", "after")))
        .agg(pl.col("device_ms").sum())
        .collect()
    )
    parts = [
        times_of.select(
            "job",
            "device_ms",
            dimension=pl.lit(key),
            before=pl.col(f"{key} before").fill_null(UNATTRIBUTED),
            after=pl.col(f"{key} after").fill_null(UNATTRIBUTED),
        )
        for key in DIMENSIONS
    ]
    keys = ("dimension", "before", "after")
    return OwnershipMoves(
        pl.concat(parts)
        .filter(pl.col("before") != pl.col("after"))
        .group_by(keys)
        .agg(jobs=pl.col("job").n_unique(), device_ms=pl.col("device_ms").sum())
        .sort("device_ms", *keys, descending=[True, False, False, False])
    )
