"""`traceloom show`: summaries, neighbours and drawings of graphs and of Chakra files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest

from support.documents import check_document
from support.workload import collective, node, receive, send, write_set
from traceloom.cli import main
from traceloom.graph.graph import GRAPH_SCHEMAS, Graph, save
from traceloom.report.documents.graph import NodeDocument, WorkloadSummaryDocument
from traceloom.report.workload import convert_graph
from traceloom.report.workload_drawing import (
    HEIGHT,
    WIDTH,
    Box,
    Link,
    Picture,
    arrange,
    build_neighbourhood,
    collapse_nodes,
)

EVIL = "</script><script>alert(1)</script>\x1b[31m<img src=x onerror=alert(2)>"


def small(home: Path) -> Path:
    ranks = [
        [
            node(1, us=10, name="load", is_cpu_op=True),
            node(2, us=30, name="gemm", deps=[1]),
            collective(3, size=64, deps=[2], pg_name="1"),
            send(4, 1, deps=[3]) if rank == 0 else receive(4, 0, deps=[3]),
            node(5, us=5, name="gemm", deps=[4], ctrl=[1]),
        ]
        for rank in range(2)
    ]
    return write_set(home, *ranks, groups={"1": [0, 1]})


def graph() -> Graph:
    """A launch, its kernel, and a synchronisation that waits for it, 20 times."""
    nodes, edges = [], []
    for step in range(20):
        at = 100 * step
        for kind, name, start, us in (
            ("launch", "cudaLaunchKernel", 0, 10),
            ("kernel", f"k{step}", 5, 50),
            ("block", "sync", 10, 45),
        ):
            nodes.append(
                {
                    "node": len(nodes),
                    "kind": kind,
                    "name": name,
                    "rank": 0,
                    "lane": int(kind == "kernel"),
                    "start_ns": 1000 * (at + start),
                    "duration_ns": 1000 * us,
                    "work_ns": 1000 * us,
                    "residual_ns": 0,
                }
            )
        first = 3 * step
        for source, target, kind, from_end, to_end in (
            (first, first + 1, "launch", False, False),
            (first, first + 2, "thread", True, False),
            (first + 1, first + 2, "synchronize", True, True),
            *([(first - 1, first, "thread", True, False)] if step else []),
        ):
            edges.append(
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
    lanes = [{"lane": k, "rank": 0, "kind": kind} for k, kind in enumerate(("host", "device"))]
    frames = {"nodes": nodes, "edges": edges, "lanes": lanes}
    return Graph(
        **{name: pl.DataFrame(rows, schema=GRAPH_SCHEMAS[name]) for name, rows in frames.items()},
        name="made",
    )


def shown(capsys, *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


class TestSummary:
    def test_of_chakra_files(self, tmp_path: Path, capsys) -> None:
        said = json.loads(shown(capsys, small(tmp_path), "--json"))
        check_document(said, WorkloadSummaryDocument)
        assert (said["nodes"], said["edges"], said["dangling"]) == (10, 10, 0)
        kinds = {row["kind"]: (row["count"], row["time_ns"], row["bytes"]) for row in said["kinds"]}
        assert kinds["compute"] == (4, 70_000, None)
        assert kinds["host"] == (2, 20_000, None)
        assert kinds["collective"] == (2, 2_000, 128)
        assert {row["kind"]: row["count"] for row in said["dependencies"]} == {
            "data": 8,
            "control": 2,
        }
        assert said["communication"][0] == {
            "what": "all_reduce",
            "group": "1",
            "count": 2,
            "ranks": 2,
            "bytes": 128,
            "time_ns": 2000,
        }
        assert [row["sent_bytes"] for row in said["ranks"]] == [72, 64]
        assert said["window_ns"] is None

    def test_of_a_graph(self, tmp_path: Path, capsys) -> None:
        save(graph(), tmp_path / "made.graph")
        said = json.loads(shown(capsys, tmp_path / "made.graph", "--json"))
        check_document(said, WorkloadSummaryDocument)
        assert (said["nodes"], said["edges"], said["window_ns"]) == (60, 79, 1_955_000)
        assert {"kind": "thread", "evidence": "measured", "count": 39} in said["dependencies"]

    def test_on_a_terminal(self, tmp_path: Path, capsys) -> None:
        out = shown(capsys, small(tmp_path))
        assert re.search(r"4\s+70\.0 µs\s+30\.0 µs\s.*compute", out)
        assert re.search(r"1\s+all_reduce", out)
        assert out.splitlines()[-1].startswith("Next: traceloom show ")

    def test_dependencies_that_lead_nowhere_are_counted(self, tmp_path: Path, capsys) -> None:
        out = shown(capsys, write_set(tmp_path, [node(1, deps=[9])]))
        assert "1 dependency leads nowhere" in out

    def test_no_control_characters_reach_the_terminal(self, tmp_path: Path, capsys) -> None:
        home = write_set(tmp_path, [node(1, name=EVIL, text=EVIL)])
        assert "\x1b" not in shown(capsys, home) + shown(capsys, home, "--node", 1)


class TestNode:
    def test_neighbours_and_attributes(self, tmp_path: Path, capsys) -> None:
        out = shown(capsys, small(tmp_path), "--node", 3, "--rank", 0)
        assert "collective · rank 0 · all_reduce · group 1" in out
        assert "comm_size 64" in out
        assert re.search(r"2 of rank 0\s+data\s+compute\s+30\.0 µs\s+gemm", out)
        assert re.search(r"4 of rank 0\s+data\s+send", out)

    def test_as_json(self, tmp_path: Path, capsys) -> None:
        said = json.loads(shown(capsys, small(tmp_path), "--node", 5, "--rank", 1, "--json"))
        check_document(said, NodeDocument)
        assert said["node"]["name"] == "gemm"
        assert [(row["id"], row["edge"]) for row in said["before"]] == [(1, "control"), (4, "data")]
        assert said["after"] == []
        assert said["attributes"] == {}

    def test_which_one_must_be_clear(self, tmp_path: Path, capsys) -> None:
        home = small(tmp_path)
        assert main(["show", str(home), "--node", "3"]) == 2
        assert "node 3 is on 2 ranks" in capsys.readouterr().err
        assert main(["show", str(home), "--node", "77", "--rank", "0"]) == 3
        assert "there is no node 77 on rank 0" in capsys.readouterr().err
        assert main(["show", str(home), "--node", "x-1"]) == 2
        assert "`x-1` is not a whole number" in capsys.readouterr().err


class TestPicture:
    def test_nodes_of_one_name_are_one_box(self) -> None:
        picture = collapse_nodes(convert_graph(graph()), max_boxes=3)
        assert [(box.kind, box.title, box.count) for box in picture.boxes] == [
            ("kernel", "k#", 20),
            ("block", "sync", 20),
            ("launch", "cudaLaunchKernel", 20),
        ]
        assert {(link.source, link.target, link.kind, link.count) for link in picture.links} == {
            (2, 0, "launch", 20),
            (2, 1, "thread", 20),
            (0, 1, "synchronize", 20),
            (1, 2, "thread", 19),
        }

    def test_what_has_least_time_shares_a_box(self) -> None:
        picture = collapse_nodes(convert_graph(graph()), max_boxes=2)
        assert [box.title for box in picture.boxes] == ["k#", "sync", "cudaLaunchKernel"]
        assert picture.omitted == "1 names with the least time share a box per kind"
        assert sum(box.count for box in picture.boxes) == 60
        assert sum(link.count for link in picture.links) == 79

    def test_a_neighbourhood_reaches_as_far_as_asked(self) -> None:
        network = convert_graph(graph())
        near = build_neighbourhood(network, 30, 1)
        assert {box.note for box in near.boxes} == {f"node {n}, rank 0" for n in (29, 30, 31, 32)}
        assert [box.chosen for box in near.boxes].count(True) == 1
        far = build_neighbourhood(network, 30, 20, max_nodes=10)
        assert len(far.boxes) == 10
        assert "more nodes are as near" in far.omitted

    def test_boxes_do_not_lie_on_each_other_and_links_lead_right(self) -> None:
        picture = collapse_nodes(convert_graph(graph()))
        places = arrange(picture)
        corners = list(zip(places.x, places.y, strict=True))
        for k, (x, y) in enumerate(corners):
            assert all(abs(x - u) >= WIDTH or abs(y - v) >= HEIGHT for u, v in corners[k + 1 :])
        chain = Picture(
            "",
            tuple(Box(str(k), "host", "", 1, 1, None, k / 5) for k in range(5)),
            tuple(Link(k, k + 1, "data", 1) for k in range(4)),
        )
        assert list(arrange(chain).x) == [k * (WIDTH + 96) for k in range(5)]


class TestDrawing:
    def test_it_needs_nothing_but_itself_and_escapes_names(self, tmp_path: Path, capsys) -> None:
        home = write_set(tmp_path / "w", [node(1, name=EVIL), node(2, deps=[1], name="ok")])
        assert main(["show", str(home), "-o", str(tmp_path / "x.html")]) == 0
        page = (tmp_path / "x.html").read_text(encoding="utf-8")
        assert "<img" not in page
        assert page.count("<script>") == 2
        assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)
        assert "default-src 'none'" in page
        assert "\x1b" not in page

    def test_a_million_edges_make_a_small_page(self, tmp_path: Path, capsys) -> None:
        nodes = [node(i, deps=[i - 1] if i else [], name=f"op {i}") for i in range(3000)]
        home = write_set(tmp_path / "w", nodes)
        shown(capsys, home, "-o", tmp_path / "x.html")
        assert (tmp_path / "x.html").stat().st_size < 60_000

    def test_files_are_not_overwritten_unasked(self, tmp_path: Path, capsys) -> None:
        home = small(tmp_path / "w")
        page = tmp_path / "x.html"
        page.write_text("mine")
        assert main(["show", str(home), "-o", str(page)]) == 3
        assert page.read_text() == "mine"
        assert main(["show", str(home), "-o", str(page), "--force"]) == 0
        assert main(["show", str(home), "-o", str(tmp_path / "x.png")]) == 2


def test_a_wrong_input_is_a_sentence(tmp_path: Path, capsys) -> None:
    assert main(["show", str(tmp_path / "nothing")]) == 2
    (tmp_path / "x.0.et").write_text("{}")
    assert main(["show", str(tmp_path)]) == 3
    (tmp_path / "x.0.et").unlink()
    write_set(tmp_path / "a", [node(1)])
    write_set(tmp_path / "b", [node(1)])
    assert main(["show", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "there are 2 sets of files" in capsys.readouterr().err


@pytest.mark.data
def test_every_public_chakra_file_is_shown(shared_data: Path, capsys) -> None:
    out = shown(capsys, shared_data / "chakra" / "converted_2023.0.et.gz")
    assert "3 664 nodes" in out.replace("\u202f", " ")
    out = shown(capsys, *sorted((shared_data / "chakra").glob("custom_ring_8npus.*.et")))
    assert "8 ranks · 280 nodes" in out
