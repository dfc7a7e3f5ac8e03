"""A made training whose every allocation is planted: what the names, categories, modules and activations must say."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cache

import numpy as np
import polars as pl
import pytest

from traceloom.analyze.memory_answers import (
    ExplainedMemory,
    build_allocations,
    explain,
    explain_allocations,
    summarize_activations,
)
from traceloom.analyze.memory_owners import CATEGORIES, build_tree, iterate_block_tables
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

EVALUATE = "autograd::engine::evaluate_function: "
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@dataclass
class Planted:
    """One block: who made it, what for, and between which events it lives (by number; None: to the end)."""

    size: int
    name: str
    module: str
    category: str
    made: int
    freed: int | None = None


class Training:
    """A model of nested modules; each step runs forward, backward and the optimizer, and reads one batch."""

    def __init__(self, seed: int, *, layers: int = 3, steps: int = 3) -> None:
        self.chance = random.Random(seed)
        self.builder = TraceBuilder()
        self.blocks: list[Planted] = []
        self.now, self.events, self.address = 0, 0, 0
        self.open: dict[int, Planted] = {}  # by address
        for step in range(steps):
            begin = self.now
            self.step(layers, step)
            self.builder.step(step, begin, self.now - begin, thread=9)

    def step(self, layers: int, number: int) -> None:
        first, loading = number == 0, self.now
        self.now += 1
        batch = self.alloc(f"{LOADER}.stack", "", "input", op="stack")
        self.now += 1
        self.builder.annotation(LOADER, loading, self.now - loading)
        kept, start = [], self.now + 1
        self.now += 2
        for layer in range(layers):
            opened, path = self.now, f"Net.block{layer // 2}.l{layer}"
            self.now += 1
            sequence = 100 * number + layer + 1
            temporary = self.alloc(f"{path}.linear", path, "temporary", op="linear", sequence=None)
            kept.append(
                (
                    path,
                    sequence,
                    self.alloc(
                        f"{path}.linear", path, "activation", op="linear", sequence=sequence
                    ),
                )
            )
            self.free(temporary)
            self.now += 1
            self.builder.annotation(f"traceloom.module:{path}", opened, self.now - opened)
        self.builder.annotation("traceloom.module:Net", start, self.now - start)
        self.now += 1
        for path, sequence, activation in reversed(kept):
            node = self.now
            gradient = self.alloc(
                f"{path}.AddmmBackward0", path, "gradient" if first else "temporary", quiet=True
            )
            self.free(activation, quiet=True)
            if not first:
                self.free(gradient, quiet=True)
            for name in (EVALUATE + "AddmmBackward0", "AddmmBackward0"):
                self.builder.op(name, node, self.now - node, sequence=sequence, forward_thread=1)
            self.now += 1
        opened = self.now
        self.now += 1
        if first:
            self.alloc("Adam.step.zeros_like", "", "optimizer_state", op="zeros_like")
        self.free(self.alloc("Adam.step.sqrt", "", "temporary", op="sqrt"))
        self.builder.annotation("Optimizer.step#Adam.step", opened, self.now - opened)
        self.free(batch)
        self.now += 10

    def alloc(
        self,
        name: str,
        module: str,
        category: str,
        *,
        op: str = "",
        sequence: int | None = None,
        quiet: bool = False,
    ) -> int:
        size = 512 * self.chance.randrange(1, 900)
        self.address += 1
        begin = self.now
        self.now += 3
        self.builder.allocation(self.now, size, address=self.address)
        block = Planted(size, name, module, category, self.events)
        self.events += 1
        self.blocks.append(block)
        self.now += 3
        if not quiet:
            self.builder.op(f"aten::{op}", begin, self.now - begin, sequence=sequence)
        self.open[self.address] = block
        return self.address

    def free(self, address: int, *, quiet: bool = False) -> None:
        block = self.open.pop(address)
        self.now += 2 if quiet else 4
        self.builder.allocation(self.now, -block.size, address=address)
        block.freed = self.events
        self.events += 1
        self.now += 2

    def alive(self, event: int) -> list[Planted]:
        """The blocks that exist just after an event."""
        return [
            block
            for block in self.blocks
            if block.made <= event and (block.freed is None or block.freed > event)
        ]


@cache
def training(seed: int) -> tuple[Training, Trace, ExplainedMemory]:
    made = Training(seed, layers=2 + seed, steps=2 + seed % 2)
    trace = made.builder.build()
    return made, trace, explain(trace)


@pytest.fixture(params=range(4))
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_every_block_has_the_name_of_its_scope_and_op(seed: int) -> None:
    made, _, known = training(seed)
    names = known.named.names().to_list()
    assert len(set(names)) == len(names)
    assert [name.rpartition(".")[0] for name in names] == [block.name for block in made.blocks]


def test_every_block_is_for_what_it_was_planted_for(seed: int) -> None:
    made, _, known = training(seed)
    assert [CATEGORIES[code] for code in known.kinds.category] == [
        block.category for block in made.blocks
    ]


def test_blocks_belong_to_the_module_whose_call_made_them(seed: int) -> None:
    made, _, known = training(seed)
    names, number = known.by("module")
    wanted = [block.module or "(outside modules)" for block in made.blocks]
    assert [names[code] for code in number] == wanted
    shallow, of = known.by("module", 1)
    assert {shallow[code] for code in of} <= {"Net", "(outside modules)"}


def test_at_every_instant_the_holders_are_the_planted_ones(seed: int) -> None:
    made, trace, known = training(seed)
    rows = trace.allocations.height
    assert rows == made.events
    levels = [sum(block.size for block in made.alive(event)) for event in range(rows)]
    assert trace.allocations["allocated_bytes"].to_list() == levels
    peak = int(np.argmax(levels))
    for event in {0, peak, rows // 2, rows - 1}:
        found = build_allocations(known, {0: event})
        by_category: dict[str, int] = defaultdict(int)
        for block in made.alive(event):
            by_category[block.category] += block.size
        assert (
            dict(found.categories.group_by("category").agg(pl.col("bytes").sum()).rows())
            == by_category
        )
        tree = {row["path"]: row for row in found.peak.to_dicts()}
        assert tree[""]["bytes"] == levels[event]
        assert tree[""]["block_count"] == len(made.alive(event))
        in_net = sum(block.size for block in made.alive(event) if block.name.startswith("Net."))
        assert tree.get("Net", {"bytes": 0})["bytes"] == in_net
        largest = sorted((block.size for block in made.alive(event)), reverse=True)[:100]
        assert found.largest["bytes"].to_list() == largest
    pools = explain_allocations(trace).pools.row(0, named=True)
    assert (pools["peak_bytes"], pools["peak_row"], pools["end_bytes"]) == (
        max(levels),
        peak,
        levels[-1],
    )


def test_the_table_has_every_block_with_its_life(seed: int) -> None:
    made, trace, known = training(seed)
    times = trace.allocations["time_ns"].to_list()
    rows = pl.concat(
        iterate_block_tables(trace, known.named, known.kinds, known.whose, full_table=True)
    )
    assert rows["bytes"].to_list() == [block.size for block in made.blocks]
    assert rows["time_ns"].to_list() == [times[block.made] for block in made.blocks]
    lives = [
        None if block.freed is None else times[block.freed] - times[block.made]
        for block in made.blocks
    ]
    assert rows["lifetime_ns"].to_list() == lives
    assert rows["category"].to_list() == [block.category for block in made.blocks]
    assert set(rows["device"]) == {"cuda:0"}
    steps = trace.allocations["step"].to_list()
    assert rows["step"].to_list() == [steps[block.made] for block in made.blocks]


def test_activations_of_modules_are_those_that_live_with_all_but_the_output_saved(
    seed: int,
) -> None:
    made, trace, known = training(seed)
    events = range(0, trace.allocations.height, 7)
    for event in events:
        kept = [block for block in made.alive(event) if block.category == "activation"]
        found = {row["module"]: row for row in summarize_activations(known, 0, event).to_dicts()}
        sizes = [block.size for block in sorted(kept, key=lambda block: block.made)]
        if (
            len(sizes) < 2
        ):  # a call that holds one block alone has nothing to save: that is its output
            assert found == {}
            continue
        row = found["Net"]
        assert (row["bytes"], row["block_count"], row["call_count"]) == (sum(sizes), len(sizes), 1)
        assert row["saved_bytes"] == sum(sizes[:-1])
        assert set(found) == {"Net"}, "each layer holds one block, its output"


# -- trees --------------------------------------------------------------------------------------------------------


def test_a_tree_of_leaves_adds_up_and_puts_the_largest_first() -> None:
    chance = random.Random(3)
    leaves = [
        (tuple(chance.choice("abc") for _ in range(chance.randrange(4))), chance.randrange(100), 1)
        for _ in range(60)
    ]
    tree = build_tree(leaves)
    rows = tree.to_dicts()
    assert rows[0]["bytes"] == sum(size for _, size, _ in leaves) == tree["self_bytes"].sum()
    assert rows[0]["block_count"] == len(leaves)
    for row in rows:
        path = tuple(row["path"].split(".")) if row["path"] else ()
        assert row["bytes"] == sum(size for names, size, _ in leaves if names[: len(path)] == path)
        children = [other["bytes"] for other in rows if other["parent"] == row["node"]]
        assert children == sorted(children, reverse=True)
        assert row["self_bytes"] == row["bytes"] - sum(children)
        assert row["fraction"] == pytest.approx(row["bytes"] / rows[0]["bytes"])
    assert build_tree([])["bytes"].to_list() == [0]
