"""Whose memory it is, against an allocator played by hand: levels at every instant, divisions, files, page, terminal."""

from __future__ import annotations

import io
import itertools
import json
import random
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.pages import islands, tables
from support.reports import check_nulls, check_schema
from support.sessions import EVIL
from traceloom.cli import main
from traceloom.cli.memory import BY
from traceloom.errors import UsageError
from traceloom.report.memory import build, collapse_chains
from traceloom.report.memory_sources import (
    MemoryOptions,
    read_session_memory_sources,
    write_allocations_csv as write_csv,
)
from traceloom.report.views.page import render as page
from traceloom.report.views.terminal_memory import render_memory as terminal
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

Document = dict[str, Any]
STEPS, STEP_US = 5, 1000
OPS = ("aten::mm", "aten::relu", "aten::add", "aten::cat")


@dataclass
class Played:
    """An allocator that was played, and the trace of it.

    Attributes:
        trace: The trace.
        levels: (time in ns, step, bytes that are held from then on), in order.
        blocks: Bytes of every block by the time at which it was made, and the time at which it was freed.
    """

    trace: TraceBuilder
    levels: list[tuple[int, int, int]] = field(default_factory=list)
    blocks: list[tuple[int, int, int | None]] = field(default_factory=list)

    def held(self, before_ns: float) -> int:
        return sum(
            size
            for made, size, freed in self.blocks
            if made <= before_ns and not (freed and freed <= before_ns)
        )


@cache
def played(seed: int, rank: int = 0, name: str = "") -> Played:
    """Scopes and operators that make blocks of odd sizes, and free them in any order, some of them never."""
    chance = random.Random(seed)
    out = Played(TraceBuilder(rank=rank, world_size=2))
    alive: list[tuple[int, int, int]] = []  # address, bytes, number
    addresses = itertools.count(1)
    total = 0
    for step in range(STEPS):
        at = step * STEP_US
        out.trace.step(step, at, STEP_US)
        for part in range(3):
            start = at + 20 + 300 * part
            out.trace.annotation(f"traceloom.scope:net.{name}block{part}", start, 280)
            for number, op in enumerate(chance.sample(OPS, 3)):
                begin = start + 5 + 80 * number
                out.trace.op(f"{name}{op}", begin, 70)
                for moment in (begin + 10, begin + 20, begin + 30):
                    ns = int(moment * 1000)
                    if alive and chance.random() < 0.45:
                        address, size, block = alive.pop(chance.randrange(len(alive)))
                        made, _, _ = out.blocks[block]
                        out.blocks[block] = (made, size, ns)
                        total -= size
                        out.trace.allocation(
                            moment,
                            -size,
                            address=address,
                            total_allocated=total,
                            total_reserved=1 << 24,
                        )
                    else:
                        size = 512 * chance.randrange(1, 200)
                        total += size
                        alive.append((next(addresses), size, len(out.blocks)))
                        out.blocks.append((ns, size, None))
                        out.trace.allocation(
                            moment,
                            size,
                            address=alive[-1][0],
                            total_allocated=total,
                            total_reserved=1 << 24,
                        )
                    out.levels.append((ns, step, total))
    return out


@cache
def session(*seeds: int, name: str = "") -> Session:
    traces = tuple(played(seed, rank, name).trace.build() for rank, seed in enumerate(seeds))
    return Session(traces, name or "played")


def memory_of(document: Document, rank: int = 0) -> Document:
    (memory,) = document["ranks"][rank]["memories"]
    return dict(memory)


@pytest.mark.parametrize("seed", range(3))
def test_the_peak_is_that_of_the_allocator(seed: int) -> None:
    levels = played(seed).levels
    document = build(session(seed))
    memory = memory_of(document)
    most = max(level for _, _, level in levels)
    time, step = next((time, step) for time, step, level in levels if level == most)
    assert (memory["peak_bytes"], memory["peak_time_ns"], memory["peak_step"]) == (most, time, step)
    assert memory["end_bytes"] == levels[-1][2]
    blocks = played(seed).blocks
    assert memory["allocation_count"] == len(blocks)
    assert memory["free_count"] == sum(freed is not None for _, _, freed in blocks)
    assert memory["instant"] == {"time_ns": time, "bytes": most}


@pytest.mark.parametrize(
    ("at", "time_ns"),
    [("start", -1), ("end", 10**12), ("0", 0), ("1500000", 1_500_000), ("4999000", 4_999_000)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_at_any_instant_the_blocks_that_are_alive_are_told(
    at: str, time_ns: int, seed: int
) -> None:
    memory = memory_of(build(session(seed), MemoryOptions(at=at)))
    held = played(seed).held(time_ns)
    assert memory["instant"]["bytes"] == held
    assert sum(row["bytes"] for row in memory["parts"]) == held
    assert sum(row["bytes"] for row in memory["categories"]) == held


@pytest.mark.parametrize("step", range(STEPS))
def test_a_step_is_shown_at_its_highest_point(step: int) -> None:
    memory = memory_of(build(session(0), MemoryOptions(at=f"step {step}")))
    assert memory["instant"]["bytes"] == max(
        level for _, of, level in played(0).levels if of == step
    )


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("at", ["peak", "end", "step 2"])
def test_every_division_adds_up_and_counts_every_block(by: str, at: str) -> None:
    memory = memory_of(build(session(0), MemoryOptions(by=by, at=at)))
    held = memory["instant"]["bytes"]
    count = sum(row["block_count"] for row in memory["categories"])
    for rows in (memory["parts"], memory["categories"], memory["modules"]):
        assert sum(row["bytes"] for row in rows) == held
        assert sum(row["block_count"] for row in rows) == count
        assert sum(row["fraction"] for row in rows) == pytest.approx(1)
        assert [row["bytes"] for row in rows] == sorted(
            (row["bytes"] for row in rows), reverse=True
        )
    sizes = [row["bytes"] for row in memory["largest"]]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size % 512 == 0 for size in sizes)


def test_a_row_of_the_tree_holds_its_own_and_what_is_below_it() -> None:
    tree = memory_of(build(session(0)))["tree"]
    assert tree[0]["parent"] is None
    for row in tree:
        below = [other for other in tree if other["parent"] == row["node"]]
        assert row["bytes"] == row["self_bytes"] + sum(other["bytes"] for other in below)
        assert row["block_count"] >= sum(other["block_count"] for other in below)
    shown = collapse_chains(tree)
    assert sum(row["self_bytes"] for row in shown) == tree[0]["bytes"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_smaller_depth_joins_parts_and_loses_none(depth: int) -> None:
    deep = memory_of(build(session(0)))["parts"]
    flat = memory_of(build(session(0), MemoryOptions(depth=depth)))["parts"]
    assert sum(row["bytes"] for row in flat) == sum(row["bytes"] for row in deep)
    assert len(flat) <= len(deep)
    assert all(row["name"].count(".") < depth for row in flat)


def test_curves_are_levels_of_the_allocator_and_their_parts_add_up() -> None:
    memory = memory_of(build(session(1)))
    curve = memory["curve"]
    levels = {time: level for time, _, level in played(1).levels}
    totals = [
        sum(values) for values in zip(*(kind["bytes"] for kind in curve["categories"]), strict=True)
    ]
    assert max(totals) == memory["peak_bytes"]
    for time, total in zip(curve["time_ns"], totals, strict=True):
        assert total == levels.get(time, 0)
    scopes = [
        sum(values) for values in zip(*(scope["bytes"] for scope in curve["scopes"]), strict=True)
    ]
    assert scopes == totals
    assert curve["time_ns"] == sorted(curve["time_ns"])


def test_lifetimes_count_the_blocks_that_were_made_and_freed() -> None:
    rows = build(session(0))["ranks"][0]["lifetimes"]
    lives = [(freed - made, size) for made, size, freed in played(0).blocks if freed is not None]
    assert sum(row["block_count"] for row in rows) == len(lives)
    for row in rows:
        inside = [size for life, size in lives if row["from_ns"] <= life < row["to_ns"]]
        assert (row["block_count"], row["bytes"]) == (len(inside), sum(inside))


def test_what_every_step_leaves_grows_and_what_is_freed_does_not() -> None:
    made = TraceBuilder()
    for step in range(6):
        at = 1000 * step
        made.step(step, at, 1000).annotation("traceloom.scope:cache", at + 5, 900).op(
            "aten::cat", at + 10, 100
        )
        made.allocation(at + 20, 4096, address=step + 1).allocation(at + 30, 999_424, address=100)
        made.allocation(at + 500, -999_424, address=100)
    memory = memory_of(build(Session((made.build(),), "leak")))
    (row,) = memory["growth"]
    # of the six steps the last one does not count: what it made may be in use
    assert (row["bytes_per_step"], row["step_count"], row["bytes"], row["block_count"]) == (
        4096,
        5,
        5 * 4096,
        5,
    )
    assert "cat" in row["site"]
    assert "leaves 4.10 kB per step" in build(Session((made.build(),), "leak"))["sentence"]


def test_the_job_is_the_sum_and_the_spread_of_its_ranks() -> None:
    document = build(session(0, 1, 2))
    peaks = [
        max(level for _, _, level in played(seed, rank).levels)
        for rank, seed in enumerate((0, 1, 2))
    ]
    (row,) = document["job"]
    assert (row["count"], row["sum_of_peaks_bytes"]) == (3, sum(peaks))
    assert (row["largest_peak_bytes"], row["smallest_peak_bytes"]) == (max(peaks), min(peaks))
    assert row["imbalance"] == pytest.approx(max(peaks) * 3 / sum(peaks))
    assert f"rank {peaks.index(max(peaks))}" in document["sentence"]
    rows = tables(page(document), by="key")["rank-table"]
    assert [row["peak_bytes"] for row in rows] == peaks
    chosen = build(session(0, 1, 2), MemoryOptions(ranks=(2,)))
    assert [entry["rank"] for entry in chosen["ranks"]] == [2]
    assert chosen["ranks"][0]["memories"][0]["tree"] == document["ranks"][2]["memories"][0]["tree"]


@pytest.mark.parametrize(
    "options", [MemoryOptions(by=by) for by in BY] + [MemoryOptions(at="step 1", depth=1)], ids=str
)
def test_every_document_is_as_its_schema_says_and_explains_its_nulls(
    options: MemoryOptions,
) -> None:
    document = json.loads(json.dumps(build(session(0, 1), options)))
    check_schema(document, "memory.schema.json")
    for entry in document[
        "ranks"
    ]:  # memories stand below ranks, but are explained by a path of their own
        check_nulls({"memories": entry["memories"], "absent": document["absent"]})
        check_nulls({"ranks": [entry | {"memories": []}], "absent": document["absent"]})


@pytest.mark.parametrize(
    ("options", "slug"),
    [
        (MemoryOptions(at="step 77"), "no-such-step"),
        (MemoryOptions(at="noon"), "bad-instant"),
        (MemoryOptions(at="step x"), "bad-instant"),
        (MemoryOptions(ranks=(7,)), "no-such-rank"),
    ],
)
def test_what_is_not_there_is_refused(options: MemoryOptions, slug: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(session(0), options)
    assert caught.value.slug == slug


# -- files --------------------------------------------------------------------------------------------------------


def csv(session: Session, *, whole: bool, **options: Any) -> pl.DataFrame:
    handle = io.BytesIO()
    write_csv(
        read_session_memory_sources(session), MemoryOptions(**options), handle, all_columns=whole
    )
    return pl.read_csv(io.BytesIO(handle.getvalue()), infer_schema_length=None)


def test_the_file_of_allocations_has_every_block_in_the_order_it_was_made() -> None:
    blocks = played(0).blocks
    short, long = csv(session(0), whole=False), csv(session(0), whole=True)
    assert short.columns == ["name", "bytes"]
    assert short["bytes"].to_list() == long["bytes"].to_list() == [size for _, size, _ in blocks]
    assert short["name"].n_unique() == len(blocks), "a name is of one block"
    assert long["name"].to_list() == short["name"].to_list()
    assert long["time_ns"].to_list() == [made for made, _, _ in blocks]
    assert long["lifetime_ns"].to_list() == [
        None if freed is None else freed - made for made, _, freed in blocks
    ]
    assert long["step"].to_list() == [made // 1_000_000 for made, _, _ in blocks]


def test_with_several_ranks_the_file_says_whose_block_it_is() -> None:
    frame = csv(session(0, 1), whole=True)
    assert frame.columns[0] == "rank"
    for rank, seed in enumerate((0, 1)):
        own = frame.filter(pl.col("rank") == rank)
        assert own["bytes"].to_list() == [size for _, size, _ in played(seed, rank).blocks]
    assert csv(session(0, 1), whole=False, ranks=(1,)).columns == ["name", "bytes"]


def test_hostile_names_come_back_from_the_file_as_they_are() -> None:
    frame = csv(session(0, name=EVIL), whole=True)
    assert frame.height == len(played(0).blocks)
    assert all(EVIL.split("\n")[0] in name for name in frame["site"].to_list())


# -- the page and the terminal ------------------------------------------------------------------------------------


def levels_of(pairs: list[int], count: int) -> list[int]:
    """A curve from pairs of instants since the last change and changes of the level."""
    out, at, level = [0] * count, 0, 0
    for since, change in zip(pairs[::2], pairs[1::2], strict=True):
        out[at : at + since] = [level] * since
        at, level = at + since, level + change
    out[at:] = [level] * (count - at)
    return out


def test_the_curves_of_the_page_are_those_of_the_document() -> None:
    document = build(session(0))
    memory = memory_of(document)
    (drawn,) = [island for island in islands(page(document)) if "kinds" in island]
    count = len(memory["curve"]["time_ns"])
    assert drawn["times"] == memory["curve"]["time_ns"]
    kinds = {name: levels_of(pairs, count) for name, _, pairs in drawn["kinds"]}
    assert kinds == {
        kind["name"].replace("_", " "): kind["bytes"] for kind in memory["curve"]["categories"]
    }
    names = drawn["trees"]["names"]
    scopes = {
        ".".join(names[part] for part in path): levels_of(pairs, count)
        for path, pairs in drawn["trees"]["scopes"]
    }
    assert scopes == {scope["name"]: scope["bytes"] for scope in memory["curve"]["scopes"]}
    totals = [sum(values) for values in zip(*kinds.values(), strict=True)]
    assert totals[drawn["peak"]] == max(totals) == memory["peak_bytes"]
    assert [step[0] for step in drawn["steps"]] == list(range(STEPS))


def test_tables_of_the_page_are_rows_of_the_document() -> None:
    document = build(session(0))
    memory, shown = memory_of(document), tables(page(document), by="key")
    assert [row["bytes"] for row in shown["modules-0-0"]] == [
        row["bytes"] for row in memory["modules"]
    ]
    assert [row["bytes"] for row in shown["categories-0-0"]] == [
        row["bytes"] for row in memory["categories"]
    ]
    assert [row["bytes"] for row in shown["largest-0-0"]] == [
        row["bytes"] for row in memory["largest"]
    ]
    assert sum(row["self_bytes"] for row in shown["scopes-0-0"]) == memory["instant"]["bytes"]
    assert [row["block_count"] for row in shown["lifetimes-0"]] == [
        row["block_count"] for row in document["ranks"][0]["lifetimes"]
    ]


def test_the_page_of_many_ranks_shows_those_with_the_highest_peaks_one_by_one() -> None:
    document = build(session(*(number % 3 for number in range(10))))
    text = page(document)
    peaks = [entry["memories"][0]["peak_bytes"] for entry in document["ranks"]]
    assert text.count("<option") == 8
    shown = [f">rank {rank}</option>" in text for rank in range(10)]
    assert min(peak for peak, is_shown in zip(peaks, shown, strict=True) if is_shown) >= max(
        peak for peak, is_shown in zip(peaks, shown, strict=True) if not is_shown
    )
    assert len(tables(text)["rank-table"]) == 10


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("width", [60, 100, 140])
def test_the_terminal_has_the_largest_parts_and_keeps_to_its_width(by: str, width: int) -> None:
    options = MemoryOptions(by=by, top=3)
    document = build(session(0, name=EVIL), options)
    lines = [line.plain for line in terminal(document, options, width)]
    assert all(len(line) <= width for line in lines)
    assert not any("\x1b" in line or "\n" in line or "\u202e" in line for line in lines)
    assert "at its peak" in " ".join(" ".join(lines).split())
    assert "rank 0" not in " ".join(lines)


def test_the_terminal_says_the_instant_and_the_peak_beside_it() -> None:
    options = MemoryOptions(at="step 1")
    text = "\n".join(line.plain for line in terminal(build(session(0), options), options, 100))
    assert "at step 1 · peak" in text
    options = MemoryOptions(at="1500000")
    text = "\n".join(line.plain for line in terminal(build(session(0), options), options, 100))
    assert "at 1.50 ms · peak" in text
    assert "at the peak, in step" in "\n".join(
        line.plain for line in terminal(build(session(0)), MemoryOptions(), 100)
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("device", [None, -1, 0, 7, 255])
@pytest.mark.parametrize("device_type", [0, 1, 6, 99, None])
def test_a_memory_of_any_kind_and_number_has_a_name_in_every_view(
    device: Any, device_type: Any
) -> None:
    made = TraceBuilder()
    for step in range(2):
        made.step(step, 1000 * step, 1000).op("aten::mm", 1000 * step + 10, 100)
        made.allocation(
            1000 * step + 20, 4096, address=step + 1, device=device, device_type=device_type
        )
    run = Session((made.build(),), "odd")
    document = build(run)
    check_schema(json.loads(json.dumps(document)), "memory.schema.json")
    text = "\n".join(line.plain for line in terminal(document, MemoryOptions(), 80))
    shown = page(document)
    assert "None" not in text
    assert "None" not in re.sub(
        r"<script>.*?</script>|<style>.*?</style>", "", shown, flags=re.DOTALL
    )
    for memory in document["ranks"][0]["memories"]:
        assert memory["peak_bytes"] == 8192
        assert str(memory["device_type"]) in text


def test_memory_of_the_host_has_no_size_and_no_allocator() -> None:
    made = TraceBuilder().metadata(
        deviceProperties=[{"id": 0, "name": "H100", "totalGlobalMem": 80_000_000_000}]
    )
    made.op("aten::mm", 0, 100).allocation(10, 4096, address=1).allocation(
        20, 512, address=2, device_type=0, device=-1
    )
    host, device = sorted(
        build(Session((made.build(),), "both"))["ranks"][0]["memories"],
        key=lambda memory: int(memory["peak_bytes"]),
    )
    assert (host["device_type"], host["capacity_bytes"], host["allocator"]) == ("cpu", None, None)
    assert (device["device_type"], device["capacity_bytes"]) == ("cuda", 80_000_000_000)


def test_a_device_that_fills_says_at_which_step_it_is_full() -> None:
    made = TraceBuilder().metadata(
        deviceProperties=[{"id": 0, "name": "small", "totalGlobalMem": 100_000}]
    )
    for step in range(6):
        made.step(step, 1000 * step, 1000).op("aten::cat", 1000 * step + 10, 100)
        made.allocation(1000 * step + 20, 8192, address=step + 1)
    (row,) = memory_of(build(Session((made.build(),), "leak")))["growth"]
    held = 6 * 8192
    assert row["full_at_step"] == 6 + (100_000 - held) // 8192


def test_only_memories_that_are_large_beside_the_largest_are_shown() -> None:
    made = TraceBuilder().op("aten::mm", 0, 100).allocation(10, 10**9, address=1)
    made.allocation(20, 512, address=2, device_type=0, device=-1)
    document = build(Session((made.build(),), "both"))
    text = "\n".join(line.plain for line in terminal(document, MemoryOptions(), 80))
    assert len(document["ranks"][0]["memories"]) == 2
    assert "cuda:0" in text
    assert "512 B" not in text


def test_the_command_writes_what_the_library_gives(tmp_path: Path) -> None:
    path = played(0).trace.write(tmp_path / "trace.json")
    outputs = [tmp_path / name for name in ("m.json", "m.html", "short.csv")]
    arguments = ["memory", str(path), "--no-cache", "-q", "--by", "op", "--at", "step 2"]
    assert main([*arguments, *(word for output in outputs for word in ("-o", str(output)))]) == 0
    document = json.loads(outputs[0].read_bytes())
    known = json.loads(json.dumps(build(session(0), MemoryOptions(by="op", at="step 2"))))
    assert document["ranks"][0]["memories"] == known["ranks"][0]["memories"]
    assert pl.read_csv(outputs[2]).equals(csv(session(0), whole=False))
    assert main([*arguments, "-o", str(tmp_path / "long.csv"), "--all"]) == 0
    assert (
        pl.read_csv(tmp_path / "long.csv", infer_schema_length=None).columns
        == csv(session(0), whole=True).columns
    )
