"""Random replays beside random recordings: every table of a comparison against plain loops."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import polars as pl
import pytest

from support.plans import PlanBuilder, groups
from traceloom.workload.replay.comparison import LONG_NS, ReplayComparison, compare_replay
from traceloom.workload.replay.plan import (
    FAILURES,
    OPS,
    PLAN_SCHEMAS,
    REPLACED,
    STAND_INS,
    RankReplayResult,
    Replayed,
    ReplayPlan,
)

SHAPES = ([], [3], [4, 8], [1, 2, 5])
RANKS = (0, 3)


@dataclass
class MadeOp:
    """One op that is made up: what was recorded of it, and replayed."""

    name: str
    shapes: str
    recorded: list[int]
    recorded_gpu: int | None
    replayed: list[int] | None  # None: not timed
    replayed_gpu: int | None
    outcome: str = "run"
    reason: str | None = None
    collective: int | None = None

    @property
    def both(self) -> bool:
        return self.outcome == "run" and bool(self.recorded) and bool(self.replayed)


@dataclass
class Made:
    """A rank: its ops, those left out, and the sides of the comparison."""

    ops: list[MadeOp] = field(default_factory=list)
    omitted: list[tuple[str, str, int | None]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    steps: list[tuple[int, int | None]] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)


def rounded(values: list[int]) -> int:
    return int(np.round(median(values)))


def job(seed: int, *, gpu: bool) -> tuple[ReplayPlan, Replayed, dict[int, Made]]:
    chance = random.Random(seed)
    ranks, results, made = {}, {}, {}
    for rank in RANKS:
        about = made[rank] = Made()
        build = PlanBuilder(rank)
        tensors = [build.tensor(*shape, external=True) for shape in SHAPES]
        texts = ["[" + ", ".join(map(str, shape)) + "]" for shape in SHAPES]

        def times(*, most: int = 4, few: int = 0, chance: random.Random = chance) -> list[int]:
            return [
                chance.choice([0, 7, 40_000, 80_001, 500_000])
                for _ in range(chance.randint(few, most))
            ]

        def op(name: str, shapes: str, *, about: Made = about, **more: Any) -> MadeOp:
            gpus = [chance.choice([None, 0, 9_000, 120_000]) if gpu else None for _ in range(2)]
            replayed = None if chance.random() < 0.1 else times(few=1)
            about.ops.append(MadeOp(name, shapes, times(), gpus[0], replayed, gpus[1], **more))
            return about.ops[-1]

        for _ in range(chance.randint(8, 20)):
            kind = chance.choice(
                [
                    "run",
                    "run",
                    "run",
                    "failed",
                    "other-shape",
                    "stand-in",
                    "all_reduce",
                    "all_gather",
                ]
            )
            if kind == "all_reduce" or kind == "all_gather":
                later = chance.random() < 0.4
                name = f"c10d::{kind}"
                if kind == "all_reduce":
                    number = build.collective(kind, [tensors[2]], [tensors[2]], asynchronous=later)
                    size, factor = 4 * 32, 2 * (2 - 1) / 2
                    entry = op(name, texts[2], collective=number)
                else:
                    out = build.tensor(6)
                    number = build.collective(kind, [tensors[1]], [out], asynchronous=later)
                    size, factor = 4 * 6, (2 - 1) / 2
                    entry = op(name, texts[1], collective=number)
                about.calls.append(
                    {
                        "kind": kind,
                        "size": size,
                        "factor": factor,
                        "later": later,
                        "ops": [entry],
                        "number": number,
                    }
                )
                if later:
                    build.wait(number)
                    about.calls[-1]["ops"].append(op("wait", "", collective=number))
                continue
            inputs = chance.sample(range(len(tensors)), chance.randint(0, 3))
            name = chance.choice(["aten::mm", "aten::relu", "mine::op"])
            entry = op(name, " ".join(texts[k] for k in inputs))
            out = build.tensor(2)
            if kind == "stand-in":
                entry.outcome, entry.reason = kind, "custom-op"
            elif kind != "run":
                entry.outcome, entry.reason = kind, kind
            build.add(
                name, [tensors[k] for k in inputs], [out], action="stand-in", reason="custom-op"
            )
        about.omitted = [
            (
                chance.choice(["aten::save", "aten::load"]),
                chance.choice(["refused-op", "cut-list"]),
                chance.choice([None, 5]),
            )
            for _ in range(chance.randint(0, 3))
        ]
        about.steps = [
            (chance.choice([500, 700, 900]), chance.choice([None, 300, 400]))
            for _ in range(chance.randint(0, 4))
        ]
        about.passes = [chance.choice([400, 410, 420]) for _ in range(chance.randint(1, 3))]
        for row, entry in zip(build.rows["ops"], about.ops, strict=True):
            row |= {"durations_ns": entry.recorded, "gpu_ns": entry.recorded_gpu}
        plan = build.build()
        out_rows = [
            {"rank": rank, "node": k, "name": name, "reason": reason, "text": "", "duration_ns": ns}
            for k, (name, reason, ns) in enumerate(about.omitted)
        ]
        steps = [
            {"rank": rank, "step": k, "duration_ns": ns, "cpu_ns": cpu}
            for k, (ns, cpu) in enumerate(about.steps)
        ]
        ranks[rank] = replace(
            plan,
            omitted=pl.DataFrame(out_rows, schema=PLAN_SCHEMAS["omitted"]),
            steps=pl.DataFrame(steps, schema=PLAN_SCHEMAS["steps"]),
        )
        results[rank] = result_of(rank, about)
    plan = ReplayPlan(
        ranks, groups(4, pair=list(RANKS)), source="made up", torch=None, world_size=4
    )
    for rank, of_rank in ranks.items():  # all of them in the group of two
        ranks[rank] = replace(
            of_rank, collectives=of_rank.collectives.with_columns(group=pl.lit("pair"))
        )
    return plan, Replayed("made up", "cpu", "fast", 0, {}, results), made


def result_of(rank: int, about: Made) -> RankReplayResult:
    timed = [(at, entry) for at, entry in enumerate(about.ops) if entry.replayed is not None]
    frames: dict[str, list[dict[str, Any]]] = {"failed": [], "other-shape": [], "stand-in": []}
    for at, entry in enumerate(about.ops):
        if entry.outcome != "run":
            row = {"op": at, "node": 100 + at, "name": entry.name, "text": f"why {at}"}
            frames[entry.outcome].append(
                row | ({"reason": entry.reason} if entry.outcome == "stand-in" else {})
            )
    return RankReplayResult(
        rank,
        tuple(about.passes),
        tuple(time - 1 for time in about.passes),
        pl.DataFrame(
            [
                {
                    "op": at,
                    "durations_ns": entry.replayed,
                    "cpu_ns": [1],
                    "gpu_ns": entry.replayed_gpu,
                }
                for at, entry in timed
            ],
            schema=OPS,
        ),
        10,
        20,
        pl.DataFrame(frames["failed"], schema=FAILURES),
        pl.DataFrame(frames["other-shape"], schema=REPLACED),
        pl.DataFrame(frames["stand-in"], schema=STAND_INS),
    )


def over(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


CASES = [(seed, seed % 2 == 1) for seed in range(8)]


@pytest.fixture(
    params=CASES, ids=[f"{seed}-{'gpu' if gpu else 'cpu'}" for seed, gpu in CASES], scope="module"
)
def compared(request: pytest.FixtureRequest) -> tuple[ReplayComparison, dict[int, Made]]:
    seed, gpu = request.param
    plan, replayed, made = job(seed, gpu=gpu)
    return compare_replay(plan, replayed), made


def test_coverage_counts_every_op_once(compared: tuple[ReplayComparison, dict[int, Made]]) -> None:
    comparison, made = compared
    for rank, about in made.items():
        rows: dict[tuple[str, str | None], list[tuple[int | None, int | None]]] = defaultdict(list)
        for entry in about.ops:
            ns = rounded(entry.recorded) if entry.recorded else None
            rows[entry.outcome, entry.reason].append((ns, entry.recorded_gpu))
        for _, reason, time in about.omitted:
            rows["left-out", reason].append((time, None))
        every = [pair for pairs in rows.values() for pair in pairs]
        time, gpu = (sum(pair[side] or 0 for pair in every) for side in (0, 1))
        table = comparison.coverage.filter(rank=rank)
        assert table.height == len(rows)
        for row in table.iter_rows(named=True):
            pairs = rows[row["outcome"], row["reason"]]
            assert row["count"] == len(pairs)
            assert row["recorded_ns"] == sum(ns or 0 for ns, _ in pairs)
            assert row["count_share"] == pytest.approx(len(pairs) / len(every))
            assert row["time_share"] == (pytest.approx(row["recorded_ns"] / time) if time else None)
            own = [ns for _, ns in pairs if ns is not None]
            assert row["recorded_gpu_ns"] == (sum(own) if own else None)
            assert row["gpu_share"] == (pytest.approx(sum(own) / gpu) if gpu and own else None)
        order = ["run", "failed", "other-shape", "stand-in", "left-out"]
        outcomes = [order.index(outcome) for outcome in table["outcome"]]
        assert outcomes == sorted(outcomes)


def test_what_did_not_run_is_listed_by_name_with_its_first_reason(
    compared: tuple[ReplayComparison, dict[int, Made]],
) -> None:
    comparison, made = compared
    for rank, about in made.items():
        rows: dict[tuple[str, str, str], list[tuple[str, int]]] = defaultdict(list)
        for at, entry in enumerate(about.ops):
            if entry.outcome != "run":
                ns = rounded(entry.recorded) if entry.recorded else 0
                rows[entry.outcome, entry.reason or "", entry.name].append((f"why {at}", ns))
        for name, reason, time in about.omitted:
            rows["left-out", reason, name].append(("", time or 0))
        table = comparison.not_run.filter(rank=rank)
        assert {
            (row["outcome"], row["reason"], row["name"]): (
                row["text"],
                row["count"],
                row["recorded_ns"],
            )
            for row in table.iter_rows(named=True)
        } == {
            key: (group[0][0], len(group), sum(ns for _, ns in group))
            for key, group in rows.items()
        }
        times = table["recorded_ns"].to_list()
        assert times == sorted(times, reverse=True)


def test_ops_that_both_sides_timed_are_summed_by_name_and_shapes(
    compared: tuple[ReplayComparison, dict[int, Made]],
) -> None:
    comparison, made = compared
    timed = [
        (rank, at, entry) for rank in RANKS for at, entry in enumerate(made[rank].ops) if entry.both
    ]
    assert comparison.each.select("rank", "op", "name", "shapes").rows() == [
        (rank, at, entry.name, entry.shapes) for rank, at, entry in timed
    ]
    by_name: dict[tuple[str, str], list[MadeOp]] = defaultdict(list)
    for _, _, entry in timed:
        by_name[entry.name, entry.shapes].append(entry)
    assert comparison.ops.height == len(by_name)
    for row in comparison.ops.iter_rows(named=True):
        calls = by_name[row["name"], row["shapes"]]
        recorded, replayed = (
            [rounded(side) for side in sides]
            for sides in (
                [entry.recorded for entry in calls],
                [entry.replayed or [] for entry in calls],
            )
        )
        assert (row["calls"], row["recorded_ns"], row["replayed_ns"]) == (
            len(calls),
            sum(recorded),
            sum(replayed),
        )
        assert row["lost_ns"] == sum(replayed) - sum(recorded)
        assert row["ratio"] == over(sum(replayed), sum(recorded))
        ratios = [here / there for here, there in zip(replayed, recorded, strict=True) if there]
        for percent in (10, 50, 90):
            expected = pytest.approx(np.percentile(ratios, percent)) if ratios else None
            assert row[f"p{percent}_ratio"] == expected
        on_both = [
            entry for entry in calls if entry.recorded_gpu and entry.replayed_gpu is not None
        ]
        if on_both:
            sums = [
                sum(entry.recorded_gpu or 0 for entry in on_both),
                sum(entry.replayed_gpu or 0 for entry in on_both),
            ]
            assert (row["recorded_gpu_ns"], row["replayed_gpu_ns"]) == tuple(sums)
            assert row["gpu_lost_ns"] == sums[1] - sums[0]
            assert row["gpu_ratio"] == over(sums[1], sums[0])
        else:
            assert row["recorded_gpu_ns"] is row["gpu_ratio"] is row["gpu_lost_ns"] is None
    keys = [
        (-abs(row["gpu_lost_ns"]) if row["gpu_lost_ns"] is not None else 1, -abs(row["lost_ns"]))
        for row in comparison.ops.iter_rows(named=True)
    ]
    assert keys == sorted(keys)


def test_long_ops_are_judged_by_their_gpu_work_where_there_is_any(
    compared: tuple[ReplayComparison, dict[int, Made]],
) -> None:
    comparison, made = compared
    timed = [entry for rank in RANKS for entry in made[rank].ops if entry.both]
    if any(entry.recorded_gpu and entry.replayed_gpu is not None for entry in timed):
        sides = [(entry.replayed_gpu, entry.recorded_gpu) for entry in timed]
    else:
        sides = [(rounded(entry.replayed or []), rounded(entry.recorded)) for entry in timed]
    ratios = [
        here / there
        for here, there in sides
        if here is not None and there is not None and there >= LONG_NS
    ]
    assert comparison.long_count == len(ratios)
    if ratios:
        assert comparison.long_ratios == pytest.approx(np.percentile(ratios, (10, 50, 90)))
    else:
        assert comparison.long_ratios is None


def test_the_whole_of_a_rank_is_its_medians(
    compared: tuple[ReplayComparison, dict[int, Made]],
) -> None:
    comparison, made = compared
    assert comparison.whole["rank"].to_list() == list(RANKS)
    for row in comparison.whole.iter_rows(named=True):
        about = made[row["rank"]]
        recorded = [ns for ns, _ in about.steps]
        cpu = [ns for _, ns in about.steps if ns is not None]
        assert (row["step_count"], row["pass_count"]) == (len(about.steps), len(about.passes))
        assert row["recorded_ns"] == (rounded(recorded) if recorded else None)
        assert row["replayed_ns"] == rounded(about.passes)
        assert row["recorded_cpu_ns"] == (rounded(cpu) if cpu else None)
        assert row["ratio"] == over(row["replayed_ns"], row["recorded_ns"])
        assert row["cpu_ratio"] == over(
            rounded([time - 1 for time in about.passes]), row["recorded_cpu_ns"]
        )
        timed = [entry for entry in about.ops if entry.both]
        sums = (
            sum(rounded(entry.recorded) for entry in timed),
            sum(rounded(entry.replayed or []) for entry in timed),
        )
        assert (row["recorded_ops_ns"], row["replayed_ops_ns"]) == sums
        assert row["ops_ratio"] == over(sums[1], sums[0])


def test_collectives_are_together_with_their_waits(
    compared: tuple[ReplayComparison, dict[int, Made]],
) -> None:
    comparison, made = compared
    for rank, about in made.items():
        expected: dict[tuple[Any, ...], list[tuple[float | None, float | None]]] = defaultdict(list)
        for call in about.calls:
            sides: list[int | None] = []
            for values in (
                [rounded(entry.recorded) if entry.recorded else None for entry in call["ops"]],
                [rounded(entry.replayed) if entry.replayed else None for entry in call["ops"]],
                [entry.recorded_gpu for entry in call["ops"]],
                [
                    entry.replayed_gpu if entry.replayed is not None else None
                    for entry in call["ops"]
                ],
            ):
                present = [value for value in values if value is not None]
                sides.append(sum(present) if present else None)
            on_gpu = sides[2] is not None and sides[3] is not None
            pair = (sides[2], sides[3]) if on_gpu else (sides[0], sides[1])
            expected[call["kind"], call["size"], call["later"], on_gpu, call["factor"]].append(pair)
        table = comparison.collectives.filter(rank=rank)
        assert table.height == len(expected)
        for row in table.iter_rows(named=True):
            factor = {"all_reduce": 1.0, "all_gather": 0.5}[row["kind"]]
            pairs = expected[
                row["kind"], row["size_bytes"], row["asynchronous"], row["on_gpu"], factor
            ]
            assert (row["count"], row["group"], row["group_size"]) == (len(pairs), "pair", 2)
            middle = []
            for side in (0, 1):
                present = [pair[side] for pair in pairs if pair[side] is not None]
                middle.append(rounded(present) if present else None)  # type: ignore[arg-type]
            assert [row["recorded_ns"], row["replayed_ns"]] == middle
            ends_with_call = row["on_gpu"] or not row["asynchronous"]
            assert row["ratio"] == (over(middle[1], middle[0]) if ends_with_call else None)
            for name, time in zip(("recorded", "replayed"), middle, strict=True):
                rate = row["size_bytes"] * factor / time if ends_with_call and time else None
                assert row[f"{name}_gb_per_s"] == (None if rate is None else pytest.approx(rate))
