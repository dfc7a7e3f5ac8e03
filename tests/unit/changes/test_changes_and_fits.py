"""Changes as they are written and read back; ranges of measured transfers; both against plain loops."""

from __future__ import annotations

import itertools
import random

import numpy as np
import polars as pl
import pytest

from traceloom.changes.changes import (
    ASSUMPTIONS,
    DEVICE_TARGETS,
    NODE_TARGETS,
    Change,
    Selection,
    parse,
)
from traceloom.workload.simulate.calibrate import SAMPLES, build_measured_transfers, fit_transfers
from traceloom.workload.simulate.machine import Dimension, Machine

PATTERNS = (
    "",
    "gemm",
    "a * 0.5",
    "host",
    "collectives",
    "rank 3",
    "x remove y",
    "~",
    "(?:a|b)+ {1,2}",
)


def change(chance: random.Random) -> Change:
    """Any change that can be asked for."""
    action = chance.choice(sorted(ASSUMPTIONS))
    ranks = tuple(chance.sample(range(100), chance.randint(0, 3)))
    pattern = chance.choice(PATTERNS)
    factor = chance.choice([0.0, 0.5, 1.25, 1e-7, 3.0, 123456789.0])
    if action in {"async", "overlap", "fuse", "graph"}:
        return Change(action, Selection(chance.choice(DEVICE_TARGETS), pattern, ranks))
    if action == "network":
        return Change(action, Selection("collectives", pattern, ranks), factor or 2.0)
    if action == "delay":
        return Change(action, Selection("host", "", ranks or (4,)))
    if action == "idle":
        return Change(action, Selection("host", "", ranks))
    if action == "workers":
        return Change(action, Selection("loading", pattern, ranks), 4.0)
    if action == "drop":
        return Change(action, Selection("syncs", pattern, ranks))
    targets = [target for target in NODE_TARGETS if not (action == "remove" and target == "syncs")]
    return Change(
        action,
        Selection(chance.choice(targets), pattern, ranks),
        factor if action == "scale" else 1.0,
    )


@pytest.mark.parametrize("seed", range(300))
def test_a_change_is_read_as_it_is_written(seed: int) -> None:
    asked = change(random.Random(seed))
    assert parse(str(asked)) == asked
    assert str(parse(str(asked))) == str(asked)
    assert parse(f"  {asked}  ") == asked


@pytest.mark.parametrize("seed", range(12))
def test_ranges_of_what_was_measured_follow_each_other_and_hold_every_sample(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = []
    for kind, span, ranks in (("all_reduce", "inside", 8), ("all_gather", "between", 16)):
        alpha, bandwidth = rng.uniform(5e3, 5e4), rng.uniform(20, 400)
        sizes = np.unique(2 ** rng.integers(8, 30, rng.integers(1, 14)))
        for size in sizes.tolist():
            later = 2.5 if size > 1 << 22 and seed % 2 else 1.0  # another protocol
            for _ in range(int(rng.integers(1, 6))):
                time = (alpha + size / bandwidth) * later * rng.uniform(0.97, 1.03)
                rows.append((0, kind, span, ranks, size, size, time, True))
    samples = pl.DataFrame(rows, schema=SAMPLES, orient="row")
    fitted = build_measured_transfers(fit_transfers(samples))
    for kind, span, ranks in {row[1:4] for row in rows}:
        sizes = [row[4] for row in rows if row[1] == kind]
        entries = [entry for entry in fitted if entry.group == (kind, span, ranks)]
        assert (entries[0].from_bytes, entries[-1].to_bytes) == (min(sizes), max(sizes))
        assert all(
            first.to_bytes + 1 == second.from_bytes for first, second in itertools.pairwise(entries)
        )
        for entry in entries:
            inside = [
                row
                for row in rows
                if row[1] == kind and entry.from_bytes <= row[4] <= entry.to_bytes
            ]
            assert entry.count == len(inside)
            off = [
                row[6] / (entry.alpha_ns + (row[5] / entry.bandwidth if entry.bandwidth else 0)) - 1
                for row in inside
            ]
            expected = np.quantile(off, (0.1, 0.5, 0.9))
            assert (entry.residual_p10, entry.residual_p50, entry.residual_p90) == pytest.approx(
                expected, abs=2e-3
            )
    # and a machine takes them as they are
    machine = Machine(
        (Dimension("switch", 8, 100.0), Dimension("switch", 2, 10.0)), transfers=fitted
    )
    assert machine.transfer("all_reduce", range(8), rows[0][4]) in fitted
