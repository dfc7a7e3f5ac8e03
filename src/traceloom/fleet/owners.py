"""Whose jobs are: what people say of them, else what rules say, else what they say themselves.

Applied when somebody asks, never to what is kept: a rule that is put right puts the past right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce

import polars as pl

from traceloom.fleet.documents import EARLIEST, LATEST, OwnerRule
from traceloom.store.schemas import DIMENSIONS

_VALID = ("valid_from_ns", "valid_to_ns")
_SAID = ("scheduler", *DIMENSIONS)


def periods(jobs: pl.LazyFrame, owners: pl.LazyFrame, rules: Sequence[OwnerRule] = ()) -> pl.DataFrame:
    """Whose each job is, and since when.

    Of several statements about one time the one that begins last counts; what a job says itself holds back to its
    beginning and on until it says otherwise. For each dimension the first that says something counts: people, the rules
    in their order, the job's own field, its label of that name.

    Args:
        jobs: Rows of this table: what jobs say themselves.
        owners: Rows of this table: what people say.
        rules: Of `owners.toml`.

    Returns:
        `job`, `from_ns` (ascending within a job), scheduler and all dimensions; null where nobody says it. A job that
        nobody speaks of has no row.
    """
    own = jobs.select("job", *_SAID, "labels", "valid_from_ns", "valid_to_ns").drop_nulls("job").collect()
    people = owners.select("job", *DIMENSIONS, "valid_from_ns", "valid_to_ns").drop_nulls("job").collect()
    first = pl.col("valid_from_ns") == pl.col("valid_from_ns").min().over("job")
    own = own.with_columns(
        valid_from_ns=pl.when(first).then(EARLIEST).otherwise("valid_from_ns"), valid_to_ns=pl.lit(None, pl.Int64)
    )
    every = pl.concat([own["job"], people["job"]]).unique()
    marks = [statements.select("job", from_ns=name) for statements in (own, people) for name in _VALID]
    dated = {at for rule in rules for at in (rule.from_ns, rule.until_ns) if EARLIEST < at < LATEST}
    of_rules = pl.DataFrame({"from_ns": [EARLIEST, *dated]}, schema={"from_ns": pl.Int64})
    marks.append(pl.DataFrame({"job": every}).join(of_rules, how="cross"))
    times = pl.concat(marks).drop_nulls().unique().sort("job", "from_ns")
    facts = times.join_asof(
        own.sort("job", "valid_from_ns"), left_on="from_ns", right_on="valid_from_ns", by="job", check_sortedness=False
    )
    # One that began later and is over hides none that still holds.
    valid = times.join(people, on="job").filter(
        pl.col("valid_from_ns") <= pl.col("from_ns"), pl.col("valid_to_ns").fill_null(LATEST) > pl.col("from_ns")
    )
    latest = valid.sort("valid_from_ns", maintain_order=True).unique(["job", "from_ns"], keep="last")
    by_people = times.join(latest, on=["job", "from_ns"], how="left", maintain_order="left")
    columns = []
    for name in DIMENSIONS:
        by_rules = [pl.when(_matches(rule)).then(pl.lit(rule.set[name])) for rule in rules if name in rule.set]
        label = pl.col("labels").str.json_path_match(f"$['{name}']")
        columns.append(pl.coalesce(by_people[name], *by_rules, name, label).alias(name))
    owned = facts.with_columns(columns).select("job", "from_ns", *_SAID)
    # of the same job: the first row of each is the earliest, which stays
    changed = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift()) for name in _SAID)
    return owned.filter(changed | (pl.col("from_ns") == EARLIEST))


def with_owners(captures: pl.LazyFrame, owned: pl.DataFrame, of_jobs: Sequence[str]) -> pl.LazyFrame:
    """Captures with what is said of their job at their start.

    Args:
        captures: With `job` and `start_ns`.
        owned: Of `periods`.
        of_jobs: `job`, scheduler or dimensions.
    """
    added = [name for name in of_jobs if name != "job"]
    facts = owned.lazy().select("job", "from_ns", *added).sort("from_ns")
    return captures.sort("start_ns").join_asof(
        facts, left_on="start_ns", right_on="from_ns", by="job", check_sortedness=False
    )


def fits(text: pl.Expr, pattern: str) -> pl.Expr:
    """Whether texts are what a pattern says, in which `*` and `?` stand for any signs, one sign; a null never is."""
    # of Rust's engine, whose time is linear whatever the pattern
    signs = (".*" if sign == "*" else "." if sign == "?" else re.escape(sign) for sign in pattern)
    return text.str.contains(f"(?s)^{''.join(signs)}$").fill_null(False)


def _matches(rule: OwnerRule) -> pl.Expr:
    parts = [(pl.col("from_ns") >= rule.from_ns) & (pl.col("from_ns") < rule.until_ns)]
    for name, pattern in rule.match.items():
        text = pl.col(name)
        if name.startswith("label."):
            text = pl.col("labels").str.json_path_match(f"$['{name.removeprefix('label.')}']")
        parts.append(fits(text, pattern))
    return reduce(lambda left, right: left & right, parts)
