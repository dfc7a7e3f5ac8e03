"""Blocks of a memory snapshot against an allocator that is played by hand: who is alive when, what it was called."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import polars as pl
import pytest

from support.snapshots import SnapshotBuilder
from traceloom.analyze.memory import compute_fragmentation
from traceloom.analyze.memory_answers import ExplainedMemory, build_allocations
from traceloom.analyze.memory_blocks import (
    EXISTED_BEFORE,
    MAX_INSTANTS,
    STILL_ALIVE,
    choose_instants,
    compute_levels,
    count_by_lifetime,
    select_largest_keys,
)
from traceloom.analyze.memory_owners import CATEGORIES
from traceloom.analyze.memory_snapshot import explain_snapshot
from traceloom.formats.memory_files import parse_snapshot
from traceloom.trace.session import MemorySnapshot

MAIN = ("/u/train.py", 99, "<module>")
LINES = (
    ("/u/train.py", 10, "step"),
    ("/u/model.py", 20, "forward"),
    ("/x/torch/optim/adam.py", 4, "_init_group"),
    ("/x/torch/utils/data/_utils/fetch.py", 5, "fetch"),
)
LINEAR = ("??", 0, "at::_ops::linear::call(at::Tensor const&)")
NODE = ("??", 0, "torch::autograd::generated::AddmmBackward0::apply(...)")


class Played:
    """Random allocations of which everything is known: what was asked for, what lived, what stood in the stack."""

    def __init__(self, seed: int, *, times: bool = True, forget_after: int = 0) -> None:
        chance = random.Random(seed)
        builder = SnapshotBuilder(start_us=1_000 if times else None)
        live: dict[int, int] = {}
        self.before = 0
        self.levels: list[int] = []
        self.calls: Counter[str] = Counter()
        for turn in range(200):
            if turn == forget_after:
                builder.forget()
                self.before, self.levels = sum(live.values()), []
                self.calls.clear()
            if live and chance.random() < 0.45:
                address = chance.choice(list(live))
                live.pop(address)
                builder.free(address)
            else:
                size, line = chance.randrange(1, 40_000), chance.choice(LINES)
                live[builder.alloc(size, LINEAR, line, MAIN)] = size
                self.calls[f"<module>.{line[2]}.linear"] += 1
            self.levels.append(sum(live.values()))
        self.live = live
        self.snapshot = parse_snapshot(builder.build(), "made.pickle")


@cache
def played(seed: int, *, times: bool = True, forget_after: int = 0) -> Played:
    return Played(seed, times=times, forget_after=forget_after)


WAYS: list[dict[str, Any]] = [
    {},
    {"times": False},
    {"forget_after": 80},
    {"times": False, "forget_after": 150},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [1, 2])
def test_bytes_after_every_event_are_those_of_the_allocator(seed: int, way: dict[str, Any]) -> None:
    truth = played(seed, **way)
    explained = explain_snapshot(truth.snapshot, rank=3)
    (pool,) = explained.named.blocks.pools
    rows = explained.trace.allocations
    levels = explained.named.blocks.levels(0, rows.height).tolist()
    assert levels == [truth.before, *truth.levels]
    assert (pool.device_type, pool.device, pool.start_bytes) == ("cuda", 0, truth.before)
    assert rows["allocated_bytes"].to_list() == truth.levels
    assert rows["time_ns"].is_sorted()
    assert rows["time_ns"].n_unique() == rows.height, "instants tell every event apart"
    assert explained.trace.rank == 3
    row = build_allocations(explained).pools.row(0, named=True)
    assert (row["peak_bytes"], row["end_bytes"]) == (
        max([truth.before, *truth.levels]),
        truth.levels[-1],
    )
    assert (row["unseen_bytes"], row["start_bytes"]) == (0, truth.before)


@pytest.mark.parametrize("way", WAYS)
def test_names_are_functions_then_operator_and_the_counter_counts_them(way: dict[str, Any]) -> None:
    truth = played(3, **way)
    named = explain_snapshot(truth.snapshot).named
    names = named.names().to_list()
    recorded = [name for name, made in zip(names, named.blocks.made, strict=True) if made >= 0]
    assert len(set(recorded)) == len(recorded)
    assert Counter(name.rpartition(".")[0] for name in recorded) == truth.calls
    for path, count in truth.calls.items():
        assert {f"{path}.{number}" for number in range(1, count + 1)} <= set(recorded)


@pytest.mark.parametrize("by", ["scope", "module", "category", "op", "stack", "dtype"])
@pytest.mark.parametrize("way", WAYS)
def test_every_division_of_the_blocks_is_all_of_them(way: dict[str, Any], by: str) -> None:
    explained = explain_snapshot(played(4, **way).snapshot)
    names, number = explained.by(by)
    size = explained.named.blocks.bytes
    assert len(set(names)) == len(names)
    assert number.min() >= 0
    assert number.max() < len(names)
    assert np.bincount(number, weights=size, minlength=len(names)).sum() == size.sum()


def test_what_stands_in_the_stack_says_what_a_block_is_for() -> None:
    builder = SnapshotBuilder()
    early = builder.alloc(100, ("/u/model.py", 3, "__init__"), MAIN)
    builder.forget()
    builder.alloc(200, ("/x/torch/optim/adam.py", 4, "_init_group"), MAIN)
    builder.free(builder.alloc(300, ("/x/torch/optim/adam.py", 9, "_multi_tensor_adam"), MAIN))
    builder.free(builder.alloc(400, ("/x/torch/utils/data/dataloader.py", 9, "__next__"), MAIN))
    builder.alloc(500, NODE)
    builder.free(builder.alloc(600, NODE))
    builder.alloc(700, ("C:\\py\\torch\\optim\\sgd.py", 2, "step"), MAIN)
    builder.alloc(800, ("/u/model.py", 8, "forward"), MAIN)
    builder.free(early)
    explained = explain_snapshot(parse_snapshot(builder.build(), "made.pickle"))
    category = {
        int(size): CATEGORIES[at]
        for size, at in zip(explained.named.blocks.bytes, explained.kinds.category, strict=True)
    }
    assert category == {
        100: "before_recording",
        200: "optimizer_state",
        300: "temporary",
        400: "input",
        500: "gradient",
        600: "temporary",
        700: "optimizer_state",
        800: "unknown",
    }
    names = dict(zip(explained.named.blocks.bytes.tolist(), explained.named.names(), strict=True))
    assert names[500] == "backward.AddmmBackward0.1"
    assert names[600] == "backward.AddmmBackward0.2"


def test_what_was_there_before_the_history_is_named_by_the_users_line() -> None:
    builder = SnapshotBuilder()
    builder.alloc(
        100, ("/x/torch/nn/modules/linear.py", 3, "__init__"), ("/u/model.py", 7, "__init__"), MAIN
    )
    builder.alloc(200, ("/x/torch/cuda/graphs.py", 3, "capture"))
    builder.alloc(300)
    builder.forget()
    builder.alloc(1, ("/u/train.py", 10, "step"))
    peak = build_allocations(explain_snapshot(parse_snapshot(builder.build(), "made.pickle"))).peak
    leaves = dict(peak.filter(pl.col("self_bytes") > 0).select("name", "bytes").rows())
    assert leaves == {
        "/u/model.py(7): __init__": 100,
        "/x/torch/cuda/graphs.py(3): capture": 200,
        "no stack recorded": 300,
        "none": 1,
    }


def test_entries_of_one_microsecond_keep_their_order() -> None:
    def entry(action: str, address: int, size: int) -> dict[str, Any]:
        return {
            "action": action,
            "addr": address,
            "size": size,
            "stream": 0,
            "frames": [],
            "time_us": 5,
        }

    entries = [
        entry("alloc", 1, 10),
        entry("free_requested", 1, 10),
        entry("alloc", 1, 20),
        entry("alloc", 2, 30),
    ]
    explained = explain_snapshot(
        parse_snapshot({"segments": [], "device_traces": [entries]}, "made.pickle")
    )
    blocks = explained.named.blocks
    assert blocks.levels(0, 4).tolist() == [0, 10, 0, 20, 50]
    assert explained.trace.allocations["time_ns"].to_list() == [5000, 5001, 5002, 5003]
    assert blocks.lost_frees == 0


def test_versions_that_tell_only_when_a_free_was_completed_are_paired_too() -> None:
    entries = [
        {"action": "alloc", "addr": 1, "size": 10, "stream": 0, "frames": [], "time_us": 1},
        {
            "action": "free_completed",
            "addr": 1,
            "size": 10,
            "stream": 0,
            "frames": [],
            "time_us": 2,
        },
    ]
    blocks = explain_snapshot(
        parse_snapshot({"segments": [], "device_traces": [entries]}, "made.pickle")
    ).named.blocks
    assert blocks.levels(0, 2).tolist() == [0, 10, 0]


def test_a_snapshot_of_an_empty_allocator_has_no_blocks() -> None:
    explained = explain_snapshot(
        parse_snapshot({"segments": [], "device_traces": [[], []]}, "made.pickle")
    )
    assert explained.named.blocks.made.size == 0
    found = build_allocations(explained)
    assert all(
        frame.height == 0
        for frame in (found.pools, found.peak, found.categories, found.largest, found.growth)
    )
    assert count_by_lifetime(explained.named.blocks).height == 0


def test_without_a_history_the_blocks_stand_in_the_order_of_their_addresses() -> None:
    truth = played(5)
    builder_document = {"segments": _segments(truth.snapshot), "device_traces": [[]]}
    explained = explain_snapshot(parse_snapshot(builder_document, "made.pickle"))
    blocks = explained.named.blocks
    assert sorted(blocks.bytes.tolist()) == sorted(truth.live.values())
    assert (blocks.made >= 0).all()
    assert build_allocations(explained).pools["peak_bytes"].to_list() == [sum(truth.live.values())]


def _segments(snapshot: MemorySnapshot) -> list[dict[str, Any]]:
    """The segments of a snapshot in the form that PyTorch writes."""
    segments = []
    for number, address, size in (
        snapshot.segments.with_row_index("n").select("n", "address", "bytes").rows()
    ):
        blocks = snapshot.blocks.filter(pl.col("segment") == number)
        listed = [
            {"address": a, "size": s, "requested_size": r, "state": str(state), "frames": []}
            for a, s, r, state in blocks.select(
                "address", "bytes", "requested_bytes", "state"
            ).rows()
        ]
        segments.append(
            {"device": 0, "address": address, "total_size": size, "stream": 0, "blocks": listed}
        )
    return segments


# -- the state of the allocator -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 6])
def test_reserved_memory_is_allocated_pending_or_free(seed: int) -> None:
    truth = played(seed)
    row = compute_fragmentation(truth.snapshot).row(0, named=True)
    assert row["requested_bytes"] == sum(truth.live.values())
    assert row["allocated_bytes"] == sum(-(-size // 512) * 512 for size in truth.live.values())
    assert (
        row["reserved_bytes"] == row["allocated_bytes"] + row["pending_bytes"] + row["free_bytes"]
    )
    assert row["largest_free_bytes"] <= row["free_bytes"]
    assert row["fragmentation"] == pytest.approx(1 - row["largest_free_bytes"] / row["free_bytes"])
    assert 0 <= row["split_bytes"] <= row["free_bytes"]


def test_a_segment_that_is_free_as_a_whole_is_not_split_and_pending_blocks_are_not_free() -> None:
    builder = SnapshotBuilder(segment=1 << 20)
    builder.free(builder.alloc(1 << 20))
    builder.free(builder.alloc(1 << 21), completed=False)
    row = compute_fragmentation(parse_snapshot(builder.build(), "made.pickle")).row(0, named=True)
    assert (row["reserved_bytes"], row["free_bytes"], row["pending_bytes"]) == (
        3 << 20,
        1 << 20,
        2 << 20,
    )
    assert (row["split_bytes"], row["fragmentation"], row["segment_count"]) == (0, 0.0, 2)
    full = SnapshotBuilder(segment=512)
    full.alloc(512)
    assert compute_fragmentation(parse_snapshot(full.build(), "made.pickle"))[
        "fragmentation"
    ].to_list() == [None]


# -- over time, and for how long ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long() -> ExplainedMemory:
    return explain_snapshot(played(7, forget_after=30).snapshot)


def test_levels_by_any_key_are_those_of_the_blocks_one_by_one(long: ExplainedMemory) -> None:
    blocks = long.named.blocks
    key = np.arange(blocks.made.size) % 3
    rows = np.array([-1, 0, 5, 17, 60, long.trace.allocations.height - 1])
    levels = compute_levels(blocks, key, 4, rows, 0)
    for number in range(4):
        for at, row in enumerate(rows.tolist()):
            alive = (blocks.made <= row) & (blocks.ended > row) & (key == number)
            assert levels[number, at] == blocks.bytes[alive].sum()
    kept, drawn = select_largest_keys(levels, 2)
    assert drawn.shape == (3, rows.size)
    assert (drawn.sum(axis=0) == levels.sum(axis=0)).all()
    assert (
        levels[kept].max(axis=1).tolist() == sorted(levels.max(axis=1).tolist(), reverse=True)[:2]
    )


@pytest.mark.parametrize("size", [1, 2, MAX_INSTANTS, MAX_INSTANTS + 1, 5000])
def test_a_curve_has_few_instants_with_both_ends_and_the_highest_of_all(size: int) -> None:
    levels = np.random.default_rng(size).integers(0, 1000, size)
    levels[size // 3] = 10_000
    chosen = choose_instants(levels)
    assert chosen.size <= MAX_INSTANTS + 1
    assert (np.diff(chosen) > 0).all()
    assert (chosen[0], chosen[-1]) == (-1, size - 2)
    assert size // 3 - 1 in chosen.tolist()


def test_lifetimes_are_counted_by_decade(long: ExplainedMemory) -> None:
    blocks = long.named.blocks
    whole = (blocks.start_ns != EXISTED_BEFORE) & (blocks.end_ns != STILL_ALIVE)
    lengths = (blocks.end_ns - blocks.start_ns)[whole]
    found = count_by_lifetime(blocks)
    assert found["block_count"].sum() == whole.sum()
    assert found["bytes"].sum() == blocks.bytes[whole].sum()
    for low, high, count, size in found.select("from_ns", "to_ns", "block_count", "bytes").rows():
        inside = (lengths >= low) & (lengths < high)
        assert count == inside.sum() > 0
        assert size == blocks.bytes[whole][inside].sum()
    assert found["from_ns"].is_sorted()
