"""What is written for ASTRA-sim: accepted by its rules, in the measured order, with the measured times."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from traceloom.errors import OutputError
from traceloom.formats.chakra.et_pb2 import CollectiveCommType, NodeType
from traceloom.formats.chakra.nodes import NodeFrame, read_table
from traceloom.graph.graph import GRAPH_SCHEMAS, Graph
from traceloom.workload.chakra.astra_sim import AstraSim, to_astra_sim
from traceloom.workload.chakra.validate import validate

US = 1000


class Made:
    """A graph node by node: times in µs."""

    def __init__(self) -> None:
        self.nodes: list[dict] = []
        self.edges: list[dict] = []
        self.lanes: list[dict] = []
        self.communication: list[dict] = []

    def lane(self, rank: int, kind: str) -> int:
        self.lanes.append({"lane": len(self.lanes), "rank": rank, "kind": kind})
        return len(self.lanes) - 1

    def node(
        self, kind: str, lane: int | None, start: float, us: float, rank: int | None = None, **more
    ) -> int:
        number = len(self.nodes)
        work = more.pop("work", us)
        self.nodes.append(
            {
                "node": number,
                "kind": kind,
                "name": more.pop("name", f"{kind}{number}"),
                "rank": self.lanes[lane]["rank"] if lane is not None else rank,
                "lane": lane,
                "start_ns": round(start * US),
                "duration_ns": round(us * US),
                "work_ns": round(work * US),
                "residual_ns": 0,
                **more,
            }
        )
        return number

    def edge(
        self, source: int, target: int, kind: str = "thread", *, from_end=True, to_end=False
    ) -> None:
        self.edges.append(
            {
                "source": source,
                "target": target,
                "kind": kind,
                "evidence": "measured",
                "from_end": from_end,
                "to_end": to_end,
                "delay_ns": 0,
                "residual_ns": 0,
            }
        )

    def launch(self, call: int, work: int) -> None:
        self.edge(call, work, "launch", from_end=False)

    def awaits(self, call: int, work: int) -> None:
        self.edge(work, call, "synchronize", to_end=True)

    def says(self, node: int, kind: str, **more) -> None:
        self.communication.append({"node": node, "kind": kind, **more})

    def meet(self, parts: Sequence[int], kind: str, instance: int, **more) -> None:
        at = max(self.nodes[part]["start_ns"] for part in parts) / US
        place = self.node("rendezvous", None, at, 0, rank=0)
        for part in parts:
            self.edge(part, place, "rendezvous", from_end=False)
            self.edge(place, part, "rendezvous", to_end=True)
            self.says(
                part, kind, instance=instance, **{"in_bytes": 64, "group_size": len(parts), **more}
            )

    def graph(self) -> Graph:
        frames = {
            name: pl.DataFrame(getattr(self, name), schema=GRAPH_SCHEMAS[name])
            for name in ("nodes", "edges", "lanes", "communication")
        }
        graph = Graph(**frames)
        graph.check()
        return graph


def two_ranks(kind: str = "all_reduce", **more) -> Made:
    """On each of two ranks: a launch, a kernel, a collective behind it on the same stream."""
    made = Made()
    parts = []
    for rank in range(2):
        thread, stream = made.lane(rank, "host"), made.lane(rank, "device")
        call = made.node("launch", thread, 0, 5)
        then = made.node("launch", thread, 5, 5)
        made.edge(call, then)
        kernel = made.node("kernel", stream, 5, 20)
        part = made.node("collective", stream, 25 + 10 * rank, 40 - 10 * rank, name="nccl")
        made.launch(call, kernel)
        made.launch(then, part)
        made.edge(kernel, part, "stream")
        parts.append(part)
    made.meet(parts, kind, 0, **more)
    return made


def tables(converted: AstraSim, home: Path, *, errors: int = 0) -> list[NodeFrame]:
    """Written, validated, read again."""
    files = converted.write(home / "set")
    verdict = validate(home / "set", target="astra-sim")
    alone = {"one-rank"} if len(converted.ranks) == 1 else set()
    assert {p.rule for p in verdict.problems if p.severity == "error"} == alone
    assert verdict.errors == errors + len(alone)
    return [read_table(path) for path in files if path.suffix == ".et"]


def deps(table: NodeFrame) -> dict[str, set[str]]:
    """Names of what each node waits for."""
    name = dict(table.nodes.select("id", "name").iter_rows())
    found: dict[str, set[str]] = {each: set() for each in name.values()}
    for row, awaited in zip(table.data.row.tolist(), table.data.id.tolist(), strict=True):
        found[table.nodes["name"][row]].add(name[awaited])
    return found


def said(converted: AstraSim) -> dict[str, int]:
    return {notice.slug: notice.count for notice in converted.notices}


def replay(files: Sequence[NodeFrame], groups: dict[str, list[int]]) -> list[int]:
    """End of each rank in µs: one host operation, one computation, one communication of a rank at a time.

    Written for this test alone: a ready node of the smallest id goes first; a collective takes its recorded duration once all
    of its group have come.
    """
    ranks = []
    for table in files:
        place = {number: row for row, number in enumerate(table.nodes["id"])}
        waits, behind = [0] * len(table), [[] for _ in range(len(table))]
        for row, awaited in zip(table.data.row.tolist(), table.data.id.tolist(), strict=True):
            waits[row] += 1
            behind[place[awaited]].append(row)
        ranks.append(
            {
                "rows": table.nodes.rows(named=True),
                "waits": waits,
                "behind": behind,
                "busy": {},
                "end": 0,
                "ready": {row for row, count in enumerate(waits) if not count},
                "turn": {},
                "left": len(table),
            }
        )
    events: list[tuple[int, int, int]] = []
    came: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def resource(node: dict) -> str | None:
        if node["type"] == NodeType.COMM_RECV_NODE:
            return None
        return (
            "comm" if node["type"] > NodeType.COMP_NODE else "host" if node["is_cpu_op"] else "gpu"
        )

    def issue(number: int, now: int) -> None:
        rank = ranks[number]
        for row in sorted(rank["ready"]):
            node = rank["rows"][row]
            if resource(node) in rank["busy"]:
                continue
            rank["ready"].remove(row)
            if resource(node):
                rank["busy"][resource(node)] = row
            if node["type"] != NodeType.COMM_COLL_NODE:
                heapq.heappush(events, (now + node["duration_us"], number, row))
                continue
            group = node["pg_name"] or ""
            turn = rank["turn"][group] = rank["turn"].get(group, -1) + 1
            parts = came.setdefault((group, turn), [])
            parts.append((number, row))
            if len(parts) == len(groups.get(group, ranks)):
                lasts = min(ranks[n]["rows"][r]["duration_us"] for n, r in parts)
                for n, r in parts:
                    heapq.heappush(events, (now + lasts, n, r))

    for number in range(len(ranks)):
        issue(number, 0)
    while events:
        now, number, row = heapq.heappop(events)
        rank = ranks[number]
        rank["busy"].pop(resource(rank["rows"][row]), None)
        rank["end"], rank["left"] = now, rank["left"] - 1
        for behind in rank["behind"][row]:
            rank["waits"][behind] -= 1
            if not rank["waits"][behind]:
                rank["ready"].add(behind)
        issue(number, now)
    assert [rank["left"] for rank in ranks] == [0] * len(ranks)
    return [rank["end"] for rank in ranks]


class TestOrder:
    def test_a_kernel_waits_for_what_came_before_its_launch_not_for_the_call_to_return(
        self, tmp_path: Path
    ) -> None:
        made = Made()
        thread, stream = made.lane(0, "host"), made.lane(0, "device")
        op, call, rest = (
            made.node("host", thread, 0, 3),
            made.node("launch", thread, 3, 9),
            made.node("host", thread, 12, 2),
        )
        made.edge(op, call)
        made.edge(call, rest)
        made.launch(call, made.node("kernel", stream, 4, 10))
        (table,) = tables(to_astra_sim(made.graph()), tmp_path)
        assert deps(table) == {
            "host0": set(),
            "launch1 and 1 more": {"host0"},
            "kernel3": {"host0"},
        }

    def test_what_follows_a_synchronisation_waits_for_the_kernel(self, tmp_path: Path) -> None:
        made = Made()
        thread, stream = made.lane(0, "host"), made.lane(0, "device")
        call, sync, after = (
            made.node("launch", thread, 0, 5),
            made.node("block", thread, 5, 20, work=2),
            made.node("host", thread, 25, 4),
        )
        made.edge(call, sync)
        made.edge(sync, after)
        kernel = made.node("kernel", stream, 2, 22)
        made.launch(call, kernel)
        made.awaits(sync, kernel)
        converted = to_astra_sim(made.graph())
        (table,) = tables(converted, tmp_path)
        assert deps(table)["host2"] == {"launch0 and 1 more", "kernel3"}
        assert (
            dict(table.nodes.select("name", "duration_us").iter_rows())["launch0 and 1 more"] == 7
        )  # waiting is no work
        assert replay([table], {}) == [26]

    def test_a_copy_that_its_own_call_awaits_makes_no_circle(self, tmp_path: Path) -> None:
        made = Made()
        thread, stream = made.lane(0, "host"), made.lane(0, "device")
        op, copy_call, after = (
            made.node("host", thread, 0, 3),
            made.node("block", thread, 3, 12, work=4),
            made.node("host", thread, 15, 5),
        )
        made.edge(op, copy_call)
        made.edge(copy_call, after)
        copy = made.node("copy", stream, 6, 8, bytes=4096)
        made.launch(copy_call, copy)
        made.awaits(copy_call, copy)
        converted = to_astra_sim(made.graph())
        (table,) = tables(converted, tmp_path)
        assert deps(table)["host2"] == {"block1", "copy3"}
        assert deps(table)["copy3"] == {"host0"}
        assert table.nodes.filter(pl.col("name") == "copy3")["tensor_size"].to_list() == [4096]
        assert said(converted)["target-copies"] == 1

    def test_nodes_that_take_no_time_disappear_and_their_order_stays(self, tmp_path: Path) -> None:
        made = Made()
        thread, streams = made.lane(0, "host"), [made.lane(0, "device"), made.lane(0, "device")]
        first, empty, last = (
            made.node("host", thread, 0, 4),
            made.node("launch", thread, 4, 0),
            made.node("launch", thread, 4, 3),
        )
        made.edge(first, empty)
        made.edge(empty, last)
        made.launch(empty, made.node("kernel", streams[0], 4, 5))
        made.launch(last, made.node("kernel", streams[1], 5, 5))
        (table,) = tables(to_astra_sim(made.graph()), tmp_path)
        assert deps(table) == {
            "host0": set(),
            "kernel3": {"host0"},
            "kernel4": {"host0"},
            "launch2": {"host0"},
        }

    def test_rounding_to_microseconds_does_not_gather(self, tmp_path: Path) -> None:
        made = Made()
        stream = made.lane(0, "device")
        kernels = [made.node("kernel", stream, 7 * i / 10, 0.7) for i in range(100)]
        for one, other in pairwise(kernels):
            made.edge(one, other, "stream")
        (table,) = tables(to_astra_sim(made.graph()), tmp_path)
        assert table.nodes["duration_us"].sum() == 70
        assert replay([table], {}) == [70]

    def test_overlapping_kernels_of_one_stream_are_queued_and_said(self) -> None:
        made = Made()
        stream = made.lane(0, "device")
        one, other = made.node("kernel", stream, 0, 10), made.node("kernel", stream, 5, 10)
        made.edge(one, other, "stream", from_end=False)
        assert said(to_astra_sim(made.graph()))["target-overlap"] == 1

    def test_a_thread_that_nothing_waits_for_is_left_out(self, tmp_path: Path) -> None:
        made = two_ranks()
        made.node("host", made.lane(0, "host"), 0, 500, name="idle talk")
        converted = to_astra_sim(made.graph())
        files = tables(converted, tmp_path)
        assert "idle talk" not in files[0].nodes["name"].to_list()
        assert said(converted)["target-left-out-threads"] == 1

    def test_communication_gets_one_order_on_all_ranks_which_can_be_taken_away(
        self, tmp_path: Path
    ) -> None:
        made = Made()
        parts: dict[int, list[int]] = {0: [], 1: []}
        for rank in range(2):
            for number, start in enumerate((0, 10) if rank == 0 else (10, 0)):
                part = made.node("collective", made.lane(rank, "device"), start, 50 - start)
                parts[number].append(part)
        made.meet(parts[0], "all_reduce", 0)
        made.meet(parts[1], "all_gather", 1)
        converted = to_astra_sim(made.graph())
        files = tables(converted, tmp_path)  # no order of collectives is reported
        assert [len(f.data.row) for f in files] == [1, 1]
        assert (
            sum(len(file.added.row) for file in converted.files)
            == said(converted)["target-added-order"]
        )
        for file in converted.files:
            every = set(
                zip(file.dependencies.row.tolist(), file.dependencies.id.tolist(), strict=True)
            )
            assert set(zip(file.added.row.tolist(), file.added.id.tolist(), strict=True)) <= every

    def test_no_order_is_added_where_a_path_leads_there_already(self) -> None:
        made = Made()
        for instance in range(3):
            parts = []
            for rank in range(2):
                stream = made.lane(rank, "device") if not instance else rank
                kernel = made.node("kernel", stream, 100 * instance, 10)
                parts.append(made.node("collective", stream, 100 * instance + 10, 20))
                made.edge(kernel, parts[-1], "stream")
                if instance:
                    made.edge(kernel - 4, kernel, "stream")
            made.meet(parts, "all_reduce", instance)
        assert "target-added-order" not in said(to_astra_sim(made.graph()))

    def test_added_order_is_told_apart_when_the_files_are_read_back(self, tmp_path: Path) -> None:
        from traceloom.workload.chakra.graph_read import read_graph

        made = Made()
        parts = [
            made.node("collective", made.lane(rank, "device"), 100 * rank, 150 - 100 * rank)
            for rank in range(2)
        ]
        made.meet(parts, "all_reduce", 0)
        converted = to_astra_sim(made.graph())
        converted.write(tmp_path / "set")
        kinds = read_graph(sorted((tmp_path / "set").glob("*.et"))).edges["kind"].value_counts()
        assert dict(kinds.iter_rows())["simulation"] == said(converted)["target-added-order"] == 1


class TestCommunication:
    @pytest.mark.parametrize(
        ("kind", "written", "size", "slug"),
        [
            ("all_reduce", "ALL_REDUCE", 64, None),
            ("all_gather", "ALL_GATHER", 64, None),
            ("reduce_scatter", "REDUCE_SCATTER", 64, None),
            ("all_to_all", "ALL_TO_ALL", 64, None),
            ("broadcast", "BROADCAST", 64, "target-replayed-communication"),
            ("reduce", "BROADCAST", 64, "target-replayed-communication"),
            ("gather", "BROADCAST", 64, "target-replayed-communication"),
            ("scatter", "BROADCAST", 64, "target-replayed-communication"),
            ("barrier", "ALL_REDUCE", 16, "target-barriers"),
            ("dispatch", "BROADCAST", 64, "target-lone-communication"),
        ],
    )
    def test_every_kind_becomes_something_that_astra_sim_has(
        self, tmp_path: Path, kind: str, written: str, size: int, slug: str | None
    ) -> None:
        converted = to_astra_sim(two_ranks(kind).graph())
        for table in tables(converted, tmp_path):
            part = table.nodes.filter(pl.col("name") == "nccl").row(0, named=True)
            assert (part["type"], part["comm_size"]) == (NodeType.COMM_COLL_NODE, size)
            assert CollectiveCommType.Name(part["comm_type"]) == written
            assert part["duration_us"] == 30  # the transfer: once both had come
            assert part["is_cpu_op"] is False
        assert slug is None or slug in said(converted)

    def test_sizes_have_the_meaning_of_their_kind(self, tmp_path: Path) -> None:
        gathered = to_astra_sim(two_ranks("all_gather", in_bytes=None, out_bytes=128).graph())
        assert tables(gathered, tmp_path / "a")[0].nodes["comm_size"].drop_nulls().to_list() == [64]
        scattered = to_astra_sim(two_ranks("reduce_scatter", in_bytes=None, out_bytes=128).graph())
        assert tables(scattered, tmp_path / "b")[0].nodes["comm_size"].drop_nulls().to_list() == [
            256
        ]

    def test_uneven_sizes_become_the_largest(self, tmp_path: Path) -> None:
        made = two_ranks("all_to_all")
        made.communication[1]["in_bytes"] = 100
        converted = to_astra_sim(made.graph())
        assert {t.nodes["comm_size"].drop_nulls().item() for t in tables(converted, tmp_path)} == {
            100
        }
        assert said(converted)["target-uneven-sizes"] == 2

    def test_groups_are_numbers_and_all_ranks_need_none(self, tmp_path: Path) -> None:
        made = Made()
        for instance, (ranks, at) in enumerate((((0, 1, 2), 0), ((0, 2), 100), ((0, 2), 200))):
            lanes = [made.lane(rank, "device") for rank in ranks]
            made.meet(
                [made.node("collective", lane, at, 50) for lane in lanes],
                "all_reduce",
                instance,
                group="mesh_tp",
            )
        converted = to_astra_sim(made.graph())
        assert converted.groups == {"1": [0, 2]}
        files = tables(converted, tmp_path)
        assert [f.nodes["pg_name"].to_list() for f in files] == [
            [None, "1", "1"],
            [None],
            [None, "1", "1"],
        ]

    def test_collectives_that_nobody_joined_are_joined_by_their_order(self, tmp_path: Path) -> None:
        from traceloom.workload.chakra.generate import (
            TransformerOptions,
            generate_transformer,
            write_generated,
        )
        from traceloom.workload.chakra.graph_read import read_graph

        files = write_generated(
            generate_transformer(TransformerOptions(hidden=64)), tmp_path / "made"
        )
        converted = to_astra_sim(read_graph([path for path in files if path.suffix == ".et"]))
        before, after = (
            pl.concat([read_table(path).nodes for path in files if path.suffix == ".et"]).filter(
                pl.col("type") == 7
            )
            for files in (files, converted.write(tmp_path / "set"))
        )
        assert validate(tmp_path / "set", target="astra-sim").errors == 0
        assert after["comm_size"].sum() == before["comm_size"].sum()
        assert after["comm_type"].unique().to_list() == [CollectiveCommType.ALL_REDUCE]
        assert len(converted.groups) == 8
        assert said(converted)["target-joined-by-order"] == before.height // 2

    def test_collectives_of_different_kinds_are_not_joined_by_their_order(self) -> None:
        made = Made()
        for rank, kind in enumerate(("all_reduce", "all_gather")):
            made.says(made.node("collective", made.lane(rank, "device"), 0, 30), kind, in_bytes=64)
        assert said(to_astra_sim(made.graph()))["target-lone-communication"] == 2

    def test_members_that_were_not_recorded_are_missed(self) -> None:
        assert said(to_astra_sim(two_ranks(group_size=8).graph()))["target-missing-members"] == 2

    def test_a_rank_alone_replays_what_it_cannot_do_with_others(self, tmp_path: Path) -> None:
        made = Made()
        part = made.node("collective", made.lane(5, "device"), 0, 30)
        made.says(part, "all_reduce", in_bytes=64, group_size=8)
        converted = to_astra_sim(made.graph())
        (table,) = tables(converted, tmp_path)
        assert table.nodes["comm_type"].to_list() == [CollectiveCommType.BROADCAST]
        assert said(converted).keys() == {
            "target-lone-communication",
            "target-renumbered-ranks",
            "target-one-rank",
        }

    def test_messages_know_both_ends_by_their_new_numbers(self, tmp_path: Path) -> None:
        made = Made()
        send = made.node("send", made.lane(3, "device"), 0, 10)
        receive = made.node("receive", made.lane(7, "device"), 0, 10)
        made.says(send, "send", peer=7, tag=2, in_bytes=32, instance=0)
        made.says(receive, "receive", peer=3, tag=2, out_bytes=32, instance=0)
        one, other = tables(to_astra_sim(made.graph()), tmp_path)
        columns = ("type", "comm_src", "comm_dst", "comm_tag", "comm_size")
        assert one.nodes.select(columns).rows() == [(NodeType.COMM_SEND_NODE, 0, 1, 2, 32)]
        assert other.nodes.select(columns).rows() == [(NodeType.COMM_RECV_NODE, 0, 1, 2, 32)]

    def test_a_message_without_other_end_is_replayed(self, tmp_path: Path) -> None:
        made = Made()
        send = made.node("send", made.lane(0, "device"), 0, 10)
        made.says(send, "send", peer=9, in_bytes=32)
        (table,) = tables(to_astra_sim(made.graph()), tmp_path)
        assert table.nodes["type"].to_list() == [NodeType.COMM_COLL_NODE]


class TestHost:
    def test_gpu_only_has_no_host_work_but_its_time(self, tmp_path: Path) -> None:
        made = Made()
        thread, stream = made.lane(0, "host"), made.lane(0, "device")
        call, sync = made.node("launch", thread, 0, 5), made.node("block", thread, 5, 20, work=2)
        think, again = made.node("think", thread, 25, 30), made.node("launch", thread, 55, 5)
        one, other = made.node("kernel", stream, 4, 20), made.node("kernel", stream, 57, 10)
        for before, after in ((call, sync), (sync, think), (think, again)):
            made.edge(before, after)
        made.launch(call, one)
        made.launch(again, other)
        made.awaits(sync, one)
        converted = to_astra_sim(made.graph(), gpu_only=True)
        (table,) = tables(converted, tmp_path)
        assert table.nodes["is_cpu_op"].to_list() == [False] * 4
        assert table.nodes.select("name", "duration_us").rows() == [
            ("host", 4),
            ("kernel4", 20),
            ("host", 33),
            ("kernel5", 10),
        ]
        assert replay([table], {}) == [67]
        assert said(converted)["target-folded-host"] == 4

    @pytest.mark.parametrize("gpu_only", [False, True])
    def test_a_rank_whose_work_no_gpu_waits_for_has_no_nodes_which_is_said(
        self, tmp_path: Path, gpu_only: bool
    ) -> None:
        made = two_ranks()
        made.node("host", made.lane(2, "host"), 0, 90)
        converted = to_astra_sim(made.graph(), gpu_only=gpu_only)
        assert said(converted)["target-no-nodes"] == 1
        converted.write(tmp_path / "set")
        wrong = validate(tmp_path / "set", target="astra-sim").problems
        assert [(p.rule, p.rank) for p in wrong if p.severity == "error"] == [("no-nodes", 2)]

    def test_long_times_that_nothing_explains_are_nodes(self, tmp_path: Path) -> None:
        made = Made()
        stream = made.lane(0, "device")
        one, other = made.node("kernel", stream, 0, 10), made.node("kernel", stream, 60, 10)
        made.edge(one, other, "stream")
        made.edges[-1]["residual_ns"] = 50 * US
        converted = to_astra_sim(made.graph())
        (table,) = tables(converted, tmp_path)
        assert table.nodes.select("name", "duration_us").rows() == [
            ("kernel0", 10),
            ("unexplained", 50),
            ("kernel1", 10),
        ]
        assert replay([table], {}) == [70]
        assert said(converted)["target-unexplained"] == 1

    def test_ranks_that_begin_later_do_so_for_astra_sim_too(self, tmp_path: Path) -> None:
        made = Made()
        parts = [
            made.node("collective", made.lane(rank, "device"), 100 * rank, 150 - 100 * rank)
            for rank in range(2)
        ]
        made.meet(parts, "all_reduce", 0)
        for gpu_only in (False, True):
            converted = to_astra_sim(made.graph(), gpu_only=gpu_only)
            files = tables(converted, tmp_path / str(gpu_only))
            assert replay(files, converted.groups) == [150, 150]


def test_an_existing_directory_is_kept_unless_forced(tmp_path: Path) -> None:
    converted = to_astra_sim(two_ranks().graph())
    assert [p.name for p in converted.write(tmp_path / "w")] == [
        "comm_groups.json",
        "workload.0.et",
        "workload.1.et",
    ]
    with pytest.raises(OutputError, match="exists already"):
        converted.write(tmp_path / "w")
    assert converted.write(tmp_path / "w", force=True)


@pytest.mark.thorough
def test_random_graphs_are_accepted_and_keep_their_order(tmp_path: Path) -> None:
    chance = np.random.default_rng(3)
    for trial in range(20):
        made = Made()
        for rank in range(3):
            thread, streams = made.lane(rank, "host"), [made.lane(rank, "device") for _ in range(2)]
            at, free, last = 0.0, [0.0, 0.0], None
            waiting: list[int] = []
            for _ in range(30):
                us = float(chance.integers(0, 6))
                if waiting and chance.random() < 0.2:
                    kernel = waiting[int(chance.integers(len(waiting)))]
                    end = (made.nodes[kernel]["start_ns"] + made.nodes[kernel]["duration_ns"]) / US
                    node = made.node("block", thread, at, max(end - at, us), work=us)
                    made.awaits(node, kernel)
                else:
                    node = made.node("launch", thread, at, us)
                    stream = int(chance.integers(2))
                    start, length = max(at, free[stream]), float(chance.integers(1, 20))
                    kernel = made.node("kernel", streams[stream], start, length)
                    made.launch(node, kernel)
                    previous = [n for n in waiting if made.nodes[n]["lane"] == streams[stream]]
                    if previous:
                        made.edge(previous[-1], kernel, "stream")
                    waiting.append(kernel)
                    free[stream] = start + length
                if last is not None:
                    made.edge(last, node)
                last = node
                at = (made.nodes[node]["start_ns"] + made.nodes[node]["duration_ns"]) / US
        graph = made.graph()
        for gpu_only in (False, True):
            for rank, table in enumerate(
                tables(to_astra_sim(graph, gpu_only=gpu_only), tmp_path / f"{trial}{gpu_only}")
            ):
                kernels = graph.nodes.filter(
                    (pl.col("rank") == rank) & (pl.col("kind") == "kernel")
                ).height
                assert (
                    table.nodes.filter(pl.col("name").str.starts_with("kernel")).height == kernels
                )


@pytest.mark.sampled(1)
@pytest.mark.data
@pytest.mark.parametrize("gpu_only", [False, True])
def test_dlrm_of_eight_ranks_is_accepted_and_gives_back_the_measured_time(
    shared_data: Path, tmp_path: Path, gpu_only: bool
) -> None:
    from traceloom import load
    from traceloom.graph.job import join_ranks
    from traceloom.graph.rank import link_rank

    traces = load(
        *[shared_data / "multirank" / f"dlrm_rank{rank}.kineto.json.gz" for rank in range(8)]
    ).traces
    graph = join_ranks([link_rank(trace, None) for trace in traces])
    converted = to_astra_sim(graph, gpu_only=gpu_only)
    files = tables(converted, tmp_path)
    assert [f.nodes.filter(pl.col("type") == NodeType.COMM_COLL_NODE).height for f in files] == [
        8
    ] * 8
    devices = (
        graph.lanes.filter(pl.col("kind") == "device")["lane"] if gpu_only else graph.lanes["lane"]
    )
    for rank, end in enumerate(replay(files, converted.groups)):
        mine = graph.nodes.filter(
            (pl.col("rank") == rank) & pl.col("lane").is_in(devices.implode())
        )
        measured = (mine["start_ns"] + mine["duration_ns"]).max() - graph.nodes["start_ns"].min()
        assert abs(end * US - measured) <= 0.01 * measured
