"""Slow hosts and ranks, held against medians that plain loops take."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable
from datetime import date
from statistics import median
from typing import Any

import polars as pl
import pytest

from traceloom.fleet.analyses.anomalies import find_outliers
from traceloom.fleet.store.schema import SCHEMAS

DAY = date(2026, 11, 1)
Rows = list[dict[str, Any]]


def made(seed: int) -> dict[str, Rows]:
    """Captures of jobs whose ranks run on hosts, some of them slow, and kernels that not all of them run."""
    draw = random.Random(seed)
    rows: dict[str, Rows] = {"captures": [], "devices": [], "kernels": []}
    pace = {
        f"n{at}": draw.choice([1.0, 1.0, 1.0, 1.3]) * draw.uniform(0.97, 1.03) for at in range(7)
    }
    model_of = {host: draw.choice(["H100", "H100", "MI300"]) for host in pace}
    for number in range(draw.randint(3, 9)):
        capture, job = f"c{number}", draw.choice(["j", "k", None])
        rows["captures"].append(
            {"day": DAY, "capture": capture, "job": job, "start_ns": 1000 + number}
        )
        for rank in range(draw.randint(1, 7)):
            host = draw.choice(sorted(pace))
            compute = round(draw.uniform(900, 1100) * 1000 * pace[host])
            rows["devices"].append(
                {"day": DAY, "capture": capture, "rank": rank, "host": host, "compute_ns": compute}
            )
            for kernel, shapes in (("gemm", "[1]"), ("gemm", "[2]"), ("copy", None)):
                if draw.random() < 0.8:
                    count = draw.randint(1, 5)
                    rows["kernels"].append(
                        {
                            "day": DAY,
                            "capture": capture,
                            "rank": rank,
                            "kernel": kernel,
                            "shapes": shapes,
                            "device_model": model_of[host],
                            "count": count,
                            "total_ns": count * round(draw.uniform(95, 105) * 100 * pace[host]),
                        }
                    )
    return rows


def judged(
    distances: dict[Any, float], peers_of: dict[Any, Any]
) -> dict[Any, tuple[float, float, bool]]:
    """Of each that has three peers or more: its ratio to them, its robust z, and whether that is far."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for key, distance in distances.items():
        groups[peers_of[key]].append(distance)
    result = {}
    for key, distance in distances.items():
        peers = groups[peers_of[key]]
        if len(peers) >= 4:
            off = distance - median(peers)
            scatter = max(1.4826 * median(abs(each - median(peers)) for each in peers), 0.005)
            result[key] = (
                math.exp(off),
                off / scatter,
                off / scatter >= 3.5 and math.exp(off) >= 1.05,
            )
    return result


def medians(values: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Key -> the median of its values."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for key, value in values:
        groups[key].append(value)
    return {key: median(group) for key, group in groups.items()}


def of_hosts(rows: dict[str, Rows]) -> dict[Any, tuple[float, float, bool]]:
    host_of = {(row["capture"], row["rank"]): row["host"] for row in rows["devices"]}
    job_of = {row["capture"]: row["job"] or row["capture"] for row in rows["captures"]}
    sums: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows["kernels"]:
        work = (row["kernel"], row["shapes"], row["device_model"])
        total = sums[work, host_of[row["capture"], row["rank"]], job_of[row["capture"]]]
        total[0] += row["total_ns"]
        total[1] += row["count"]
    means = medians(((work, host), ns / count) for (work, host, _), (ns, count) in sums.items())
    typical = medians((work, mean) for (work, _), mean in means.items())
    peers: dict[Any, int] = defaultdict(int)
    for work, _ in means:
        peers[work] += 1
    distances = medians(
        ((host, work[2]), math.log(mean / typical[work]))
        for (work, host), mean in means.items()
        if peers[work] >= 4
    )
    return judged(distances, {key: key[1] for key in distances})


def of_ranks(rows: dict[str, Rows]) -> dict[Any, tuple[float, float, bool]]:
    job_of = {row["capture"]: row["job"] or row["capture"] for row in rows["captures"]}
    typical = medians((row["capture"], row["compute_ns"]) for row in rows["devices"])
    distances = medians(
        (
            (job_of[row["capture"]], row["rank"]),
            math.log(row["compute_ns"] / typical[row["capture"]]),
        )
        for row in rows["devices"]
    )
    return judged(distances, {key: key[0] for key in distances})


def told(rows: dict[str, Rows]) -> tuple[pl.DataFrame, pl.DataFrame]:
    tables = {
        name: SCHEMAS[name].complete(pl.DataFrame(each, infer_schema_length=None))
        for name, each in rows.items()
    }
    result = find_outliers(*(tables[name].lazy() for name in ("kernels", "captures", "devices")))
    return result.hosts, result.ranks


@pytest.mark.parametrize("seed", range(12))
def test_hosts_and_ranks_are_as_far_off_as_plain_loops_say(seed: int) -> None:
    rows = made(seed)
    hosts, ranks = told(rows)
    for frame, keys, expected in (
        (hosts, ("host", "device_model"), of_hosts(rows)),
        (ranks, ("job", "rank"), of_ranks(rows)),
    ):
        seen = {tuple(row[key] for key in keys): row for row in frame.iter_rows(named=True)}
        assert seen.keys() == expected.keys()
        assert frame["z"].is_sorted(descending=True)
        for key, (ratio, z, far) in expected.items():
            assert (seen[key]["ratio"], seen[key]["z"]) == (
                pytest.approx(ratio),
                pytest.approx(z, abs=1e-9),
            )
            assert seen[key]["outlier"] == far


@pytest.mark.parametrize("seed", [3, 5])
def test_what_all_take_longer_for_makes_nobody_slow(seed: int) -> None:
    rows = made(seed)
    hosts, ranks = told(rows)
    longer = {
        name: [
            {
                key: value * 8 if key in {"compute_ns", "total_ns"} else value
                for key, value in row.items()
            }
            for row in each
        ]
        for name, each in rows.items()
    }
    random.Random(seed).shuffle(longer["kernels"])
    for before, after in zip((hosts, ranks), told(longer), strict=True):
        keys = [
            name
            for name in before.columns
            if name in {"host", "device_model", "job", "rank", "outlier"}
        ]
        if "job" in keys and "host" in keys:
            keys.remove("host")
        assert after.select(keys).sort(keys).equals(before.select(keys).sort(keys))
