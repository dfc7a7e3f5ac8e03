"""A workload of Chakra files and a graph, counted again node by node: summary, neighbours, drawing, Perfetto."""

from __future__ import annotations

import io
import json
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.documents import check_document
from support.pages import Elements
from support.sessions import EVIL, made, training
from support.small_graph import small_graph
from support.workload import collective, node, receive, send, write_set
from traceloom.cli import main
from traceloom.formats.chakra.nodes import find_file_sets, read_workload
from traceloom.graph import link_session
from traceloom.graph.graph import Graph
from traceloom.report import graph as graph_document
from traceloom.report.documents.graph import NodeDocument, WorkloadSummaryDocument
from traceloom.report.exports.perfetto import write_graph
from traceloom.report.views.files import encode
from traceloom.report.workload import (
    NodeNetwork,
    build_node_document,
    convert_graph,
    convert_workload,
    find_rows,
    summarise,
)
from traceloom.report.workload_drawing import arrange, build_neighbourhood, collapse_nodes, render
from traceloom.system.sanitize import sanitize

RANKS = 2
Plain = dict[str, Any]


def at_random(seed: int) -> list[list[Plain]]:
    """Nodes of each rank as plain rows: any kind, any dependencies on earlier ones, a few that lead nowhere."""
    chance = random.Random(seed)
    ranks = []
    for rank in range(RANKS):
        rows: list[Plain] = []
        for number in range(1, 40):
            kind = chance.choice(["host", "compute", "compute", "collective", "send", "receive"])
            deps = sorted(
                {chance.randrange(1, number) for _ in range(chance.randrange(3))}
                if number > 1
                else set()
            )
            ctrl = [] if number < 3 or chance.random() < 0.7 else [chance.randrange(1, number)]
            if chance.random() < 0.05:
                deps.append(999)
            size = None if kind in ("host", "compute") else chance.choice([None, 8, 512, 4096])
            rows.append(
                {
                    "rank": rank,
                    "id": number,
                    "kind": kind,
                    "name": f"{kind} {chance.randrange(4)}",
                    "deps": deps,
                    "ctrl": [one for one in ctrl if one not in deps],
                    "us": chance.randrange(0, 50),
                    "size": size,
                }
            )
        ranks.append(rows)
    return ranks


def written(home: Path, ranks: list[list[Plain]]) -> Path:
    files = []
    for rows in ranks:
        nodes = []
        for row in rows:
            common = {
                "us": row["us"],
                "name": row["name"],
                "ctrl": row["ctrl"],
                "deps": row["deps"],
            }
            size = {} if row["size"] is None else {"comm_size": row["size"]}
            if row["kind"] in ("host", "compute"):
                nodes.append(node(row["id"], is_cpu_op=row["kind"] == "host", **common))
            elif row["kind"] == "collective":
                nodes.append(
                    node(row["id"], "COMM_COLL_NODE", comm_type=0, pg_name="g", **size, **common)
                )
            elif row["kind"] == "send":
                nodes.append(
                    node(
                        row["id"],
                        "COMM_SEND_NODE",
                        comm_dst=1 - row["rank"],
                        comm_tag=0,
                        **size,
                        **common,
                    )
                )
            else:
                nodes.append(
                    node(
                        row["id"],
                        "COMM_RECV_NODE",
                        comm_src=1 - row["rank"],
                        comm_tag=0,
                        **size,
                        **common,
                    )
                )
        files.append(nodes)
    return write_set(home, *files, groups={"g": list(range(RANKS))})


def network_of(home: Path) -> NodeNetwork:
    return convert_workload(read_workload(find_file_sets([str(home)])[0], lambda path: None))


@pytest.fixture(scope="module", params=[0, 1, 2])
def workload(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Plain], NodeNetwork]:
    ranks = at_random(request.param)
    home = written(tmp_path_factory.mktemp("workload"), ranks)
    return [row for rows in ranks for row in rows], network_of(home)


def total(sizes: list[int | None]) -> int | None:
    """A sum of what is known; unknown where nothing is."""
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def test_kinds_and_names_are_sums_over_their_nodes(
    workload: tuple[list[Plain], NodeNetwork],
) -> None:
    rows, network = workload
    summary = summarise(network)
    for key in ("kind", "name"):
        for entry in summary["kinds" if key == "kind" else "names"]:
            own = [row for row in rows if row["kind"] == entry["kind"] and row[key] == entry[key]]
            assert entry["count"] == len(own)
            assert entry["time_ns"] == sum(1000 * row["us"] for row in own)
            assert entry["longest_ns"] == max(1000 * row["us"] for row in own)
            assert entry["bytes"] == total([row["size"] for row in own])
    assert summary["nodes"] == len(rows) == sum(entry["count"] for entry in summary["kinds"])
    times = [entry["time_ns"] for entry in summary["names"]]
    assert times == sorted(times, reverse=True)


def test_dependencies_are_counted_and_those_that_lead_nowhere_are_told(
    workload: tuple[list[Plain], NodeNetwork],
) -> None:
    rows, network = workload
    summary = summarise(network)
    data = sum(one != 999 for row in rows for one in row["deps"])
    control = sum(len(row["ctrl"]) for row in rows)
    assert {entry["kind"]: entry["count"] for entry in summary["dependencies"]} == {
        "data": data,
        "control": control,
    }
    assert summary["edges"] == data + control
    assert summary["dangling"] == sum(999 in row["deps"] for row in rows)
    awaited = {
        (row["rank"], one) for row in rows for one in (*row["deps"], *row["ctrl"]) if one != 999
    }
    assert summary["last_nodes"] == len(rows) - len(awaited)
    assert summary["first_nodes"] == sum(
        not row["ctrl"] and set(row["deps"]) <= {999} for row in rows
    )


def test_communication_is_a_row_for_each_kind_and_group(
    workload: tuple[list[Plain], NodeNetwork],
) -> None:
    rows, network = workload
    summary = summarise(network)
    check_document(summary, WorkloadSummaryDocument)
    for entry in summary["communication"]:
        kind = "collective" if entry["group"] == "g" else entry["what"]
        own = [row for row in rows if row["kind"] == kind]
        assert (entry["count"], entry["ranks"]) == (len(own), len({row["rank"] for row in own}))
        assert entry["bytes"] == total([row["size"] for row in own])
        assert entry["time_ns"] == sum(1000 * row["us"] for row in own)


def test_ranks_send_what_their_nodes_send(workload: tuple[list[Plain], NodeNetwork]) -> None:
    rows, network = workload
    for entry in summarise(network)["ranks"]:
        own = [row for row in rows if row["rank"] == entry["rank"]]
        assert entry["nodes"] == len(own)
        assert entry["compute_ns"] == sum(
            1000 * row["us"] for row in own if row["kind"] == "compute"
        )
        assert entry["sent_bytes"] == sum(
            row["size"] or 0 for row in own if row["kind"] in ("collective", "send")
        )
        assert entry["edges"] == sum(
            len([one for one in row["deps"] if one != 999]) + len(row["ctrl"]) for row in own
        )


def test_sizes_that_no_file_tells_are_unknown_and_not_nothing(tmp_path: Path) -> None:
    nodes = [
        node(1, "COMM_COLL_NODE", comm_type=0, pg_name="g"),
        node(2, "COMM_SEND_NODE", comm_dst=1, comm_tag=0),
    ]
    summary = summarise(network_of(write_set(tmp_path, nodes, [node(1)], groups={"g": [0, 1]})))
    assert [entry["bytes"] for entry in summary["communication"]] == [None, None]
    assert [entry["sent_bytes"] for entry in summary["ranks"]] == [None, 0], (
        "who sends nothing sends 0"
    )


def test_neighbours_are_what_a_node_waits_for_and_what_waits_for_it(
    workload: tuple[list[Plain], NodeNetwork],
) -> None:
    rows, network = workload
    for row in rows[::7]:
        document = build_node_document(network, find_rows(network, row["id"], row["rank"])[0])
        check_document(document, NodeDocument)
        assert document["node"]["name"] == row["name"]
        before = [(one, "data") for one in row["deps"] if one != 999] + [
            (one, "control") for one in row["ctrl"]
        ]
        assert sorted((entry["id"], entry["edge"]) for entry in document["before"]) == sorted(
            before
        )
        after = [
            (other["id"], kind)
            for other in rows
            if other["rank"] == row["rank"]
            for key, kind in (("deps", "data"), ("ctrl", "control"))
            if row["id"] in other[key]
        ]
        assert sorted((entry["id"], entry["edge"]) for entry in document["after"]) == sorted(after)


@pytest.mark.parametrize("most", [1, 3, 8, 48])
def test_a_drawing_has_every_node_and_every_dependency_in_its_boxes(
    workload: tuple[list[Plain], NodeNetwork], most: int
) -> None:
    rows, network = workload
    picture = collapse_nodes(network, max_boxes=most)
    assert sum(box.count for box in picture.boxes) == len(rows)
    assert sum(box.time_ns for box in picture.boxes) == sum(1000 * row["us"] for row in rows)
    assert sum(link.count for link in picture.links) == summarise(network)["edges"]
    counts = [link.count for link in picture.links]
    assert counts == sorted(counts, reverse=True), (
        "the ones that are left out are those of the fewest dependencies"
    )
    assert all(0 <= box.place <= 1 for box in picture.boxes)
    spots = arrange(picture)
    assert len(set(zip(spots.x, spots.y, strict=True))) == len(picture.boxes)
    shown = Elements(render(picture, summarise(network)))
    assert shown.tags["img"] == 0
    assert shown.open in ([], ["html"], ["html", "body"])


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_a_neighbourhood_is_what_a_node_waits_for_and_what_waits_for_it_in_so_many_links(
    workload: tuple[list[Plain], NodeNetwork], depth: int
) -> None:
    rows, network = workload
    start = 20
    own = [row for row in rows if row["rank"] == 0]
    edges = [(row["id"], one) for row in own for one in (*row["deps"], *row["ctrl"]) if one != 999]
    reached = {start}
    for ends in (
        edges,
        [(one, after) for after, one in edges],
    ):  # what it waits for, and what waits for it
        front = {start}
        for _ in range(depth):
            front = {other for one, other in ends if one in front}
            reached |= front
    picture = build_neighbourhood(network, find_rows(network, start, 0)[0], depth)
    assert {box.note for box in picture.boxes} == {f"node {number}, rank 0" for number in reached}
    assert [box.note for box in picture.boxes if box.chosen] == [f"node {start}, rank 0"]


def test_names_of_strangers_are_text_in_a_drawing(tmp_path: Path) -> None:
    nodes = [
        node(1, name=EVIL),
        collective(2, deps=[1], name=EVIL, pg_name=EVIL),
        send(3, 1, deps=[2], name=EVIL),
    ]
    network = network_of(
        write_set(tmp_path, nodes, [receive(1, 0, name=EVIL)], groups={EVIL: [0, 1]})
    )
    for picture in (collapse_nodes(network), build_neighbourhood(network, 1, 2)):
        page = render(picture, summarise(network))
        assert "<img" not in page
        assert not re.search("[\x1b\u202e\u2028]", page)
        assert sanitize(EVIL)[:20] in Elements(page).shown + page.replace("&lt;", "<").replace(
            "&gt;", ">"
        )


# -- graphs -------------------------------------------------------------------------------------------------------


@cache
def linked() -> Graph:
    return link_session(made(training)[0])


@pytest.mark.parametrize("graph", [small_graph(1), small_graph(2)], ids=["one rank", "two ranks"])
def test_the_summary_of_a_graph_counts_its_nodes_and_edges(graph: Graph) -> None:
    document = json.loads(encode(graph_document.build(graph)))
    nodes, edges = graph.nodes.to_dicts(), graph.edges.to_dicts()
    kinds = Counter(row["kind"] for row in nodes)
    assert {row["kind"]: row["count"] for row in document["nodes"]["kinds"]} == kinds
    for row in document["nodes"]["kinds"]:
        assert row["time_ns"] == sum(
            one["duration_ns"] for one in nodes if one["kind"] == row["kind"]
        )
    told = {(row["kind"], row["evidence"]): row["count"] for row in document["edges"]["kinds"]}
    assert told == Counter((row["kind"], row["evidence"]) for row in edges)
    assert (document["nodes"]["count"], document["edges"]["count"]) == (len(nodes), len(edges))
    assert document["law"] is None
    network = convert_graph(graph)
    summary = summarise(network)
    check_document(summary, WorkloadSummaryDocument)
    assert summary["edges"] == len(edges)
    for number in range(len(nodes)):
        check_document(build_node_document(network, number), NodeDocument)


@pytest.mark.parametrize(
    "make", [lambda: small_graph(1), lambda: small_graph(2), linked], ids=["one", "two", "linked"]
)
def test_perfetto_gets_every_node_of_a_lane_once_with_arrows_in_their_slices(make: Any) -> None:
    graph = make()
    handle = io.BytesIO()
    write_graph(graph, handle)
    events = json.loads(handle.getvalue())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    placed = graph.nodes.drop_nulls("lane")
    assert sorted(event["args"]["node"] for event in slices) == sorted(placed["node"].to_list())
    first = graph.nodes["start_ns"].min()
    rows = {row["node"]: row for row in placed.to_dicts()}
    for event in slices:
        row = rows[event["args"]["node"]]
        assert int(event["ts"] * 1000) == row["start_ns"] - first
        assert round(event["dur"] * 1000) == row["duration_ns"]
        assert event["name"] == sanitize(row["name"])
    threads = {event["tid"]: event["pid"] for event in slices}
    assert not set(threads) & set(threads.values())
    ends: dict[int, list[tuple[int, int]]] = {}
    for event in slices:
        start, stack = int(event["ts"] * 1000), ends.setdefault(event["tid"], [])
        end = start + int(event["dur"] * 1000)
        while stack and stack[-1][1] <= start:
            stack.pop()
        assert not stack or end <= stack[-1][1], "slices of a track nest"
        stack.append((start, end))
    lane = dict(zip(graph.nodes["node"].to_list(), graph.nodes["lane"].to_list(), strict=True))
    between = [
        row["kind"]
        for row in graph.edges.to_dicts()
        if None not in (lane[row["source"]], lane[row["target"]])
        and lane[row["source"]] != lane[row["target"]]
    ]
    assert Counter(event["cat"] for event in events if event["ph"] == "s") == Counter(between)
    assert {event["id"] for event in events if event["ph"] == "s"} == {
        e["id"] for e in events if e["ph"] == "f"
    }


@pytest.mark.parametrize("name", ["job.html", "job.HTML", "job.htm"])
def test_the_command_writes_the_drawing(name: str, tmp_path: Path) -> None:
    home = written(tmp_path / "w", at_random(0))
    assert main(["show", str(home), "-o", str(tmp_path / name), "-q"]) == 0
    assert (tmp_path / name).read_text(encoding="utf-8").lower().startswith("<!doctype html>")
