"""`traceloom convert`, from the command line: what is written, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from support.small_graph import small_graph
from traceloom.cli import main
from traceloom.formats.chakra.et_pb2 import GlobalMetadata, Node, NodeType
from traceloom.formats.chakra.files import EtReader
from traceloom.graph.graph import load, save
from traceloom.workload.chakra.convert import write_messages
from traceloom.workload.chakra.graph_read import write_ranks


def convert(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


@pytest.fixture
def job(tmp_path: Path) -> Path:
    save(small_graph(2), tmp_path / "job.graph")
    return tmp_path / "job.graph"


@pytest.fixture
def one(tmp_path: Path) -> Path:
    nodes = [
        Node(id=1, name="a"),
        Node(id=2, name="b", type=NodeType.COMM_COLL_NODE, data_deps=[1]),
    ]
    nodes += [
        Node(id=3, name="c", data_deps=[2]),
        Node(id=4, name="d", type=NodeType.COMM_COLL_NODE, data_deps=[3]),
    ]
    write_messages(tmp_path / "one.0.et", GlobalMetadata(version="1"), nodes)
    return tmp_path / "one.0.et"


@pytest.mark.parametrize("ending", ["et.gz", "json", "json.gz", "jsonl", "jsonl.gz"])
def test_a_file_goes_into_every_form_and_back(
    one: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there, back = one.with_name(f"there.{ending}"), one.with_name("back.et")
    assert convert(one, there) == 0
    assert convert(there, back) == 0
    assert back.read_bytes() == one.read_bytes()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"Wrote {there} (4 nodes, ")
    assert said[1].endswith(f"next: traceloom validate {back}")


def test_a_graph_goes_into_a_directory_and_back(job: Path, tmp_path: Path) -> None:
    assert convert(job, tmp_path / "out") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "comm_groups.json",
        "workload.0.et",
        "workload.1.et",
    ]
    assert convert(tmp_path / "out", tmp_path / "back.graph") == 0
    back = load(tmp_path / "back.graph")
    assert back.nodes.equals(small_graph(2).nodes)


def test_a_directory_of_json_becomes_a_graph(job: Path, tmp_path: Path) -> None:
    convert(job, tmp_path / "out")
    (tmp_path / "json").mkdir()
    for rank in (0, 1):
        convert(tmp_path / "out" / f"workload.{rank}.et", tmp_path / "json" / f"w.{rank}.jsonl")
    assert convert(tmp_path / "json", tmp_path / "back.graph") == 0
    assert load(tmp_path / "back.graph").nodes.equals(small_graph(2).nodes)


def test_directories_keep_their_groups(job: Path, tmp_path: Path) -> None:
    convert(job, tmp_path / "a")
    assert convert(f"{tmp_path}/a", f"{tmp_path}/b/") == 0
    for name in ("comm_groups.json", "workload.1.et"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("name", ["job.perfetto.json", "job.perfetto.json.gz"])
def test_perfetto_gets_all_nodes_and_the_edges_between_lanes(
    job: Path, tmp_path: Path, name: str
) -> None:
    assert convert(job, tmp_path / name) == 0
    raw = (tmp_path / name).read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)[
        "traceEvents"
    ]
    graph = small_graph(2)
    slices = {event["args"]["node"]: event for event in events if event["ph"] == "X"}
    placed = graph.nodes.drop_nulls("lane")
    assert sorted(slices) == placed["node"].to_list()
    for row in placed.iter_rows(named=True):
        assert slices[row["node"]]["dur"] == row["duration_ns"] / 1000
        assert slices[row["node"]]["ts"] == row["start_ns"] / 1000
        assert slices[row["node"]]["pid"] == row["rank"] + 1
    names = {
        event["args"]["name"]
        for event in events
        if event.get("name") in {"process_name", "thread_name"}
    }
    assert {"rank 0 on node0", "rank 1 on node0", "GPU 1 stream 20", "autograd"} <= names
    lane = graph.nodes["lane"].to_list()
    between = [
        e
        for e in graph.edges.iter_rows(named=True)
        if None not in {lane[e["source"]], lane[e["target"]]}
    ]
    between = [e for e in between if lane[e["source"]] != lane[e["target"]]]
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert sorted(event["cat"] for event in begins.values()) == sorted(
        edge["kind"] for edge in between
    )


def test_one_side_alone(one: Path, tmp_path: Path) -> None:
    assert convert(one, tmp_path / "comm.et", "--only", "communication") == 0
    with EtReader(tmp_path / "comm.et") as reader:
        assert [(node.id, list(node.data_deps)) for node in reader] == [(2, []), (4, [2])]
    assert reader.metadata.attr[0].string_val == "communication"
    assert convert(one, tmp_path / "comp.json", "--only", "compute") == 0
    nodes = json.loads((tmp_path / "comp.json").read_text())["nodes"]
    assert [(node["id"], node.get("data_deps", [])) for node in nodes] == [(1, []), (3, [1])]


def test_one_side_of_all_ranks_of_a_graph(job: Path, tmp_path: Path) -> None:
    assert convert(job, tmp_path / "net", "--only", "communication") == 0
    for rank in (0, 1):
        with EtReader(tmp_path / "net" / f"workload.{rank}.et") as reader:
            found = list(reader)
        assert [node.name for node in found] == [
            "ncclDevKernel_AllReduce",
            "ncclDevKernel_SendRecv",
        ]
        assert list(found[1].data_deps) == [found[0].id]
        assert not {"edges", "edges_out", "carried"} & {a.name for node in found for a in node.attr}
    assert convert(tmp_path / "net", tmp_path / "net.graph") == 0
    assert set(load(tmp_path / "net.graph").edges["evidence"]) == {"assumed"}


def test_astra_sim_gets_what_it_accepts(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(job, tmp_path / "sim", "--target", "astra-sim") == 0
    assert capsys.readouterr().out.endswith(
        f"next: traceloom validate {tmp_path / 'sim'} --target astra-sim\n"
    )
    assert (tmp_path / "sim" / "comm_groups.json").exists()


def test_json_says_what_was_written(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = one.with_name("a.et.gz")
    assert convert(one, target, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "output": str(target),
        "files": [str(target)],
        "bytes": target.stat().st_size,
        "nodes": 4,
        "notices": [],
    }


def test_a_cut_file_is_converted_with_a_notice_or_refused(
    one: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one.write_bytes(one.read_bytes()[:-3])
    target = one.with_name("a.jsonl")
    assert convert(one, target, "--strict") == 3
    assert not target.exists()
    assert convert(one, target) == 0
    assert len(target.read_text().splitlines()) == 4
    assert "[chakra-cut]" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["a.graph", "a.perfetto.json", "a.jsonl", "out", "a.et.gz"])
def test_half_a_protobuf_leaves_nothing(one: Path, target: str) -> None:
    data = one.read_bytes()
    one.write_bytes(data + bytes.fromhex("ffffffff0f") + data)
    before = sorted(one.parent.iterdir())
    assert convert(one, one.with_name(target)) == 3
    assert sorted(one.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["none.et", "a.json"], 2, "there is no"),
        (["one.0.et", "a.txt"], 2, "does not tell which format"),
        (["one.0.et", "one.0.et", "--force"], 2, "is an input too"),
        (["job.graph", "a.et"], 2, "one file holds one rank"),
        (["one.0.et", "a.graph", "--only", "compute"], 2, "--only writes Chakra files"),
        (["job.graph", "a.et", "--target", "astra-sim"], 2, "writes a directory"),
        (["job.graph", "out", "--gpu-only"], 2, "--gpu-only goes with"),
        (["text.et", "a.json"], 3, "not a Chakra trace"),
        (["bad.graph", "a.et"], 3, "not a saved graph"),
        (["empty", "a.et"], 3, "no files like PREFIX.RANK.et"),
        (["one.0.et", "there.et"], 3, "exists already"),
        (["job.graph", "full"], 3, "holds other things"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    arguments: list[str],
    code: int,
    said: str,
    one: Path,
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert one.parent == job.parent == tmp_path
    (tmp_path / "text.et").write_text("this is a text\n" * 20)
    (tmp_path / "bad.graph").write_text("this is a text")
    (tmp_path / "there.et").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    force = ["--force"] if "full" in arguments else []
    assert convert(*arguments, *force) == code
    error = capsys.readouterr().err.splitlines()
    assert said in error[0]
    assert error[-1].startswith("see traceloom explain ")
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before


def test_force_replaces_files_and_directories(job: Path, tmp_path: Path) -> None:
    write_ranks(small_graph(5), tmp_path / "out")
    assert convert(job, tmp_path / "out") == 3
    assert convert(job, tmp_path / "out", "--force") == 0
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_what_is_written_for_astra_sim_is_compared_with_the_measurement(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(job, tmp_path / "sim", "--target", "astra-sim", "--json") == 0
    ends = json.loads(capsys.readouterr().out)["ends"]
    assert [end["rank"] for end in ends] == [0, 1]
    for end in ends:
        assert end["difference"] == pytest.approx(end["simulated_ns"] / end["measured_ns"] - 1)
