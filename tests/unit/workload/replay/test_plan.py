"""The plan of a replay: its invariants, and the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from support.plans import small_plan
from traceloom.errors import InputError, InvariantError
from traceloom.workload.replay.plan import PLAN_SCHEMAS, ReplayPlan, is_plan


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    plan = small_plan()
    plan.check()
    plan.save(tmp_path / "run.plan")
    again = ReplayPlan.load(tmp_path / "run.plan")
    assert is_plan(tmp_path / "run.plan")
    assert (again.source, again.level, list(again.ranks)) == (
        plan.source,
        plan.level,
        list(plan.ranks),
    )
    for name in PLAN_SCHEMAS:
        if name != "groups":
            assert getattr(again.ranks[0], name).equals(getattr(plan.ranks[0], name))


def test_a_cut_plan_is_refused_with_what_to_do(tmp_path: Path) -> None:
    small_plan().save(tmp_path / "run.plan")
    whole = (tmp_path / "run.plan").read_bytes()
    (tmp_path / "cut.plan").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="damaged") as error:
        ReplayPlan.load(tmp_path / "cut.plan")
    assert error.value.slug == "plan-damaged"
    assert "--plan-only" in str(error.value.hint)


@pytest.mark.parametrize(
    ("frame", "change", "law"),
    [
        ("ops", pl.lit(7, dtype=pl.UInt32).alias("op"), "numbers of `ops`"),
        ("ops", pl.lit([9], dtype=pl.List(pl.UInt32)).alias("inputs"), "no row in `tensors`"),
        ("ops", pl.lit(None, dtype=pl.UInt32).alias("call"), "calls are of ops"),
        (
            "tensors",
            pl.lit([99, 99], dtype=pl.List(pl.Int64)).alias("shape"),
            "within their storages",
        ),
        ("tensors", pl.lit("float7").alias("dtype"), "no type"),
        ("storages", pl.lit(value=False).alias("external"), "nothing has made"),
        ("storages", pl.lit(0, dtype=pl.UInt32).alias("last_op"), "outside its life"),
    ],
)
def test_a_plan_that_cannot_be_run_breaks_a_law(frame: str, change: pl.Expr, law: str) -> None:
    rank_plan = small_plan().ranks[0]
    broken = replace(rank_plan, **{frame: getattr(rank_plan, frame).with_columns(change)})
    with pytest.raises(InvariantError, match=law):
        broken.check()
