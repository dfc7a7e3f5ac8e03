"""Graphs become Chakra files that other tools can read, and come back as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from support.small_graph import small_graph
from traceloom.errors import InputError, OutputError, UsageError
from traceloom.formats.chakra.et_pb2 import GlobalMetadata, Node, NodeType
from traceloom.formats.chakra.files import EtReader, write
from traceloom.graph.graph import GRAPH_SCHEMAS, Graph, build_empty_frame
from traceloom.workload.chakra.graph_read import (
    convert_from_messages,
    convert_to_messages,
    list_groups,
    read_graph,
    write_rank,
    write_ranks,
)


def same(one: Graph, other: Graph) -> None:
    """Equal but for the order of the edges."""
    for name, frame in one.frames().items():
        order = (
            frame.columns
            if name == "edges"
            else ["node"]
            if name in {"communication", "transfers"}
            else []
        )
        there = other.frames()[name]
        assert_frame_equal(
            frame.sort(order) if order else frame, there.sort(order) if order else there
        )
    for name in ("name", "epoch_ns", "world_size", "stage", "notices"):
        assert getattr(one, name) == getattr(other, name), name


def values(node: Node) -> dict[str, object]:
    out: dict[str, object] = {}
    for attribute in node.attr:
        kind = attribute.WhichOneof("value")
        value = getattr(attribute, kind) if kind else None
        out[attribute.name] = (
            kind,
            list(value.values) if kind and kind.endswith("_list") else value,
        )
    return out


def named(graph: Graph, name: str, rank: int = 0) -> Node:
    return next(node for node in convert_to_messages(graph, rank)[1] if node.name == name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_graph_comes_back_as_it_was(tmp_path: Path, ranks: int) -> None:
    graph = small_graph(ranks)
    files = [path for path in write_ranks(graph, tmp_path / "out") if path.suffix == ".et"]
    assert [path.name for path in files] == [f"workload.{rank}.et" for rank in range(ranks)]
    back = read_graph(files)
    same(graph, back)
    back.check()
    same(graph, convert_from_messages([convert_to_messages(graph, rank) for rank in range(ranks)]))


@pytest.mark.parametrize("name", ["a.et", "a.et.gz"])
def test_one_rank_goes_into_a_file(tmp_path: Path, name: str) -> None:
    graph = small_graph(1)
    assert write_rank(graph, tmp_path / name) == (tmp_path / name).stat().st_size
    same(graph, read_graph([tmp_path / name]))


def test_an_empty_graph_comes_back() -> None:
    ranks = pl.DataFrame([{"rank": 0, "host": "h"}], schema=GRAPH_SCHEMAS["ranks"])
    graph = Graph(build_empty_frame("nodes"), build_empty_frame("edges"), ranks=ranks)
    same(graph, convert_from_messages([convert_to_messages(graph, 0)]))


def test_missing_values_and_odd_rows_come_back() -> None:
    graph = small_graph(2)
    communication = graph.communication.with_columns(
        kind=pl.lit(None, pl.String), peer=pl.lit(-1, pl.Int32), tag=pl.lit(-(2**63), pl.Int64)
    )
    transfers = graph.transfers.with_columns(kind=pl.lit(None, pl.String))
    nodes = graph.nodes.with_columns(
        step=pl.lit(-1, pl.Int32), correlation=pl.lit(2**63 - 1, pl.Int64)
    )
    ops = graph.host_ops.with_columns(
        id=pl.lit(5, pl.Int64)
    )  # ids are used twice in real host traces
    graph = replace(
        graph, communication=communication, transfers=transfers, nodes=nodes, host_ops=ops
    )
    same(graph, convert_from_messages([convert_to_messages(graph, rank) for rank in (0, 1)]))


def test_what_nobody_carries_comes_back() -> None:
    graph = small_graph(1)
    more = pl.DataFrame(
        [
            {"node": graph.nodes.height + n, "kind": kind, "name": "alone", "rank": 0}
            | dict.fromkeys(("start_ns", "duration_ns", "work_ns", "residual_ns"), 0)
            for n, kind in enumerate(["rendezvous", "arrival"])
        ],
        schema=GRAPH_SCHEMAS["nodes"],
    )
    edge = graph.edges.head(1).with_columns(
        source=pl.lit(graph.nodes.height + 1, pl.UInt32),
        target=pl.lit(graph.nodes.height, pl.UInt32),
    )
    graph = replace(
        graph, nodes=pl.concat([graph.nodes, more]), edges=pl.concat([graph.edges, edge])
    )
    same(graph, convert_from_messages([convert_to_messages(graph, 0)]))


def test_some_ranks_alone_are_a_graph_with_a_notice(tmp_path: Path) -> None:
    graph = small_graph(4)
    files = [path for path in write_ranks(graph, tmp_path / "out") if path.suffix == ".et"]
    part = read_graph(files[1:3])
    part.check()
    assert part.ranks["rank"].to_list() == [1, 2]
    assert part.notices[-1].slug == "chakra-missing-ranks"
    here = graph.nodes.filter(pl.col("rank").is_in([1, 2]))
    kinds = pl.concat(
        [here, graph.nodes.filter(kind="rendezvous").filter(~pl.col("rank").is_in([1, 2]))]
    )["kind"]
    assert sorted(part.nodes["kind"].to_list()) == sorted(kinds.to_list())


def test_attributes_are_those_that_other_tools_read() -> None:
    graph = small_graph(2)
    reduce = values(named(graph, "ncclDevKernel_AllReduce"))
    assert reduce["is_cpu_op"] == ("bool_val", False)
    assert reduce["comm_type"] == ("int64_val", 0)
    assert reduce["comm_size"] == ("int64_val", 1 << 20)
    assert reduce["pg_name"] == ("string_val", "default_pg")
    assert reduce["stream"] == ("int64_val", 20)
    assert named(graph, "ncclDevKernel_AllReduce").type == NodeType.COMM_COLL_NODE
    send, receive = (
        named(graph, "ncclDevKernel_SendRecv"),
        named(graph, "ncclDevKernel_SendRecv", 1),
    )
    assert (send.type, receive.type) == (NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE)
    for node in (send, receive):
        assert (values(node)["comm_src"], values(node)["comm_dst"]) == (
            ("int32_val", 0),
            ("int32_val", 1),
        )
        assert values(node)["comm_size"] == ("int64_val", 77)
    op = named(graph, "aten::mm")
    assert values(op)["is_cpu_op"] == ("bool_val", True)
    assert values(op)["rf_id"] == ("int64_val", 9)
    assert values(op)["tid"] == ("int64_val", 1)
    assert op.inputs.types == '["Tensor(float)"]'
    copy, fill = named(graph, "Memcpy HtoD"), named(graph, "Memset")
    assert (copy.type, fill.type) == (NodeType.MEM_LOAD_NODE, NodeType.MEM_STORE_NODE)
    assert values(copy)["tensor_size"] == ("uint64_val", 4096)


@pytest.mark.parametrize(
    ("kind", "into", "out", "size"),
    [
        ("all_reduce", 100, 100, 100),
        ("all_gather", 100, 800, 100),
        ("reduce_scatter", 800, 100, 800),
        ("all_to_all", 400, 400, 400),
        ("broadcast", None, 64, 64),
        ("broadcast", 0, 64, 64),
    ],
)
def test_comm_size_has_the_meaning_that_simulators_expect(
    kind: str, into: int | None, out: int, size: int
) -> None:
    graph = small_graph(2)
    rows = graph.communication.with_columns(
        kind=pl.lit(kind), in_bytes=pl.lit(into, pl.Int64), out_bytes=pl.lit(out, pl.Int64)
    )
    node = named(replace(graph, communication=rows), "ncclDevKernel_AllReduce")
    assert values(node)["comm_size"] == ("int64_val", size)


def test_a_receive_has_the_size_of_what_comes_out() -> None:
    graph = small_graph(2)
    rows = graph.communication.with_columns(
        in_bytes=pl.lit(5, pl.Int64), out_bytes=pl.lit(64, pl.Int64)
    )
    node = named(replace(graph, communication=rows), "ncclDevKernel_SendRecv", 1)
    assert values(node)["comm_size"] == ("int64_val", 64)


def test_call_edges_are_control_dependencies_and_the_rest_data() -> None:
    graph = small_graph(1)
    nodes = {node.id: node for node in convert_to_messages(graph, 0)[1]}
    by_name = {node.name: node for node in nodes.values()}
    launch, copy_call = by_name["cudaLaunchKernel"], by_name["cudaMemcpyAsync"]
    assert list(launch.ctrl_deps) == [by_name["aten::mm"].id]
    assert list(launch.data_deps) == []
    kernel = next(node for node in nodes.values() if node.name.startswith("odd"))
    assert list(kernel.data_deps) == [launch.id]
    copy = by_name["Memcpy HtoD"]
    assert list(copy.data_deps) == sorted([copy_call.id, kernel.id])


def test_what_follows_a_synchronisation_waits_for_the_work_it_awaited() -> None:
    graph = small_graph(1)
    last = graph.nodes.filter(name="cudaStreamSynchronize")
    after = last.with_columns(
        node=pl.lit(graph.nodes.height, pl.UInt32),
        kind=pl.lit("host", GRAPH_SCHEMAS["nodes"]["kind"]),
        name=pl.lit("after"),
        start_ns=pl.col("start_ns") + pl.col("duration_ns"),
        work_ns=pl.col("duration_ns"),
        residual_ns=pl.lit(0, pl.Int64),
    )
    edge = graph.edges.head(1).with_columns(
        source=last["node"],
        target=after["node"],
        kind=pl.lit("thread", GRAPH_SCHEMAS["edges"]["kind"]),
    )
    graph = replace(
        graph, nodes=pl.concat([graph.nodes, after]), edges=pl.concat([graph.edges, edge])
    )
    by_name = {node.name: node for node in convert_to_messages(graph, 0)[1]}
    assert by_name["ncclDevKernel_SendRecv"].id in by_name["after"].data_deps
    assert by_name["cudaStreamSynchronize"].id in by_name["after"].data_deps
    assert by_name["ncclDevKernel_SendRecv"].id not in by_name["cudaStreamSynchronize"].data_deps


def test_times_in_microseconds_add_up_along_a_chain() -> None:
    nodes = list(convert_to_messages(small_graph(1), 0)[1])
    exact = {node.id: values(node) for node in nodes if node.type != NodeType.METADATA_NODE}
    for node in nodes:
        if node.id in exact:
            end = exact[node.id]["start_ns"][1] + exact[node.id]["duration_ns"][1]  # type: ignore[index]
            assert node.start_time_micros + node.duration_micros == end // 1000


def test_zero_length_points_are_no_nodes() -> None:
    graph = small_graph(2)
    ids = {node.id for rank in (0, 1) for node in convert_to_messages(graph, rank)[1]}
    points = graph.nodes.filter(pl.col("kind").is_in(["origin", "rendezvous", "arrival"]))["node"]
    assert not ids & set(points.to_list())


def test_groups_stand_beside_the_files(tmp_path: Path) -> None:
    graph = small_graph(2)
    write_ranks(graph, tmp_path / "out")
    assert (
        tmp_path / "out" / "comm_groups.json"
    ).read_text() == '{\n "default_pg": [\n  0,\n  1\n ]\n}'
    assert list_groups(graph) == {"default_pg": [0, 1]}


def test_several_ranks_do_not_go_into_one_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        write_rank(small_graph(2), tmp_path / "a.et")
    assert caught.value.slug == "several-ranks"
    assert write_rank(small_graph(2), tmp_path / "a.et", rank=1)


def test_a_directory_of_strangers_is_not_replaced(tmp_path: Path) -> None:
    write_ranks(small_graph(2), tmp_path / "out")
    with pytest.raises(OutputError) as caught:
        write_ranks(small_graph(1), tmp_path / "out")
    assert caught.value.slug == "file-exists"
    write_ranks(small_graph(1), tmp_path / "out", force=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "comm_groups.json",
        "workload.0.et",
    ]
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError) as caught:
        write_ranks(small_graph(1), tmp_path / "out", force=True)
    assert caught.value.slug == "cannot-write"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_files_of_different_graphs_do_not_mix(tmp_path: Path) -> None:
    first, _ = write_ranks(small_graph(2), tmp_path / "a")[1:]
    _, second = write_ranks(replace(small_graph(2), name="other"), tmp_path / "b")[1:]
    for files in ([first, second], [first, first]):
        with pytest.raises(InputError) as caught:
            read_graph(files)
        assert caught.value.slug == "chakra-mixed"
    write(tmp_path / "c.et", GlobalMetadata(version="1"), [Node(id=1)])
    with pytest.raises(InputError) as caught:
        read_graph([first, tmp_path / "c.et"])
    assert caught.value.slug == "chakra-mixed"


@pytest.mark.parametrize("attribute", ["edges", "kind", "duration_ns", "carried"])
def test_a_graph_whose_attributes_were_changed_is_refused(tmp_path: Path, attribute: str) -> None:
    metadata, nodes = convert_to_messages(small_graph(1), 0)
    changed = list(nodes)
    for node in changed:
        for held in node.attr:
            if held.name == attribute and attribute == "edges":
                held.sint64_list.values.append(10**12)
            elif held.name == attribute:
                held.string_val = "nonsense"
    write(tmp_path / "a.et", metadata, changed)
    with pytest.raises(InputError) as caught:
        read_graph([tmp_path / "a.et"])
    assert caught.value.slug == "chakra-damaged"
    assert "\n" not in caught.value.message


def test_a_lane_that_cannot_be_is_refused() -> None:
    metadata, nodes = convert_to_messages(small_graph(1), 0)
    changed = list(nodes)
    next(a for a in changed[0].attr if a.name == "lane").int64_val = -7
    with pytest.raises(InputError) as caught:
        convert_from_messages([(metadata, changed)])
    assert caught.value.slug == "chakra-damaged"


def test_another_version_is_refused() -> None:
    metadata, nodes = convert_to_messages(small_graph(1), 0)
    next(a for a in metadata.attr if a.name == "schema_version").int64_val = 2
    with pytest.raises(InputError) as caught:
        convert_from_messages([(metadata, nodes)])
    assert caught.value.slug == "other-version"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("notices", '{"a": 1}'),
        ("notices", "[5]"),
        ("notices", '[{"slug": "a", "severity": "bad", "message": "m"}]'),
        ("notices", "[" * 5000),
        ("notices", "null"),
        ("stage", "x"),
        ("stage", 5),
        ("name", 5),
        ("world_size", "8"),
        ("rank", "x"),
        ("rank", 2**40),
        ("epoch_ns", "x"),
        ("node_count", "x"),
        ("edge_kinds", "x"),
        ("evidence_kinds", 5),
        ("lanes", "[[99999999999999999999]]"),
        ("lanes", '[{"lane": 99999999999999999999}]'),
        ("ranks", "5"),
        ("delays", '[["x"]]'),
        ("loose_edges", "[" * 5000),
    ],
)
def test_metadata_of_a_graph_that_somebody_changed_is_damage(name: str, value: str | int) -> None:
    metadata, nodes = convert_to_messages(small_graph(1), 0)
    changed = next(a for a in metadata.attr if a.name == name)
    setattr(changed, "string_val" if isinstance(value, str) else "int64_val", value)
    with pytest.raises(InputError) as caught:
        convert_from_messages([(metadata, nodes)])
    assert caught.value.slug == "chakra-damaged"
    assert "\n" not in str(caught.value)


def foreign(*nodes: Node) -> Graph:
    graph = convert_from_messages([(GlobalMetadata(version="0.0.4"), nodes)])
    graph.check()
    return graph


def made(number: int, micros: int, *needs: int, **more: object) -> Node:
    return Node(
        id=number,
        name=f"n{number}",
        type=NodeType.COMP_NODE,
        duration_micros=micros,
        data_deps=needs,
        **more,
    )  # type: ignore[arg-type]


def test_a_foreign_file_is_laid_out_by_its_dependencies() -> None:
    graph = foreign(made(30, 5, 10, 20), made(10, 7), made(20, 2, 10))
    times = dict(graph.nodes.select("name", pl.struct("start_ns", "duration_ns")).iter_rows())
    assert times["n10"] == {"start_ns": 0, "duration_ns": 7000}
    assert times["n20"] == {"start_ns": 7000, "duration_ns": 2000}
    assert times["n30"] == {"start_ns": 9000, "duration_ns": 5000}
    assert set(graph.edges["evidence"]) == {"assumed"}
    assert graph.edges.filter(kind="origin").height == 1
    assert graph.end_ns == 14_000


def test_start_times_of_a_foreign_file_are_kept_where_dependencies_allow() -> None:
    graph = foreign(
        made(1, 5, start_time_micros=100),
        made(2, 5, 1, start_time_micros=50),
        made(3, 1, start_time_micros=40),
    )
    starts = dict(graph.nodes.select("name", "start_ns").iter_rows())
    assert (starts["n1"], starts["n2"], starts["n3"]) == (100_000, 105_000, 40_000)


@pytest.mark.parametrize("on_host", [True, False])
def test_a_caller_on_the_host_holds_back_the_start_and_anything_else_the_end(
    on_host: bool,
) -> None:
    child = Node(id=2, name="child", type=NodeType.COMP_NODE, duration_micros=1, ctrl_deps=[1])
    caller = made(1, 5)
    caller.attr.add(name="is_cpu_op", bool_val=on_host)
    graph = foreign(caller, child)
    assert graph.nodes.filter(name="child")["start_ns"].item() == (0 if on_host else 5000)
    assert graph.edges.filter(kind="call").select("from_end", "to_end").row(0) == (
        not on_host,
        False,
    )


def test_kinds_lanes_and_communication_of_a_foreign_file() -> None:
    cpu, gpu, load = made(1, 1), made(2, 1, 1), made(3, 1, 2)
    cpu.attr.add(name="is_cpu_op", bool_val=True)
    cpu.attr.add(name="tid", int64_val=4)
    gpu.attr.add(name="stream", int64_val=7)
    load.type = NodeType.MEM_LOAD_NODE
    load.attr.add(name="tensor_size", uint64_val=64)
    reduce = Node(id=4, name="r", type=NodeType.COMM_COLL_NODE)
    reduce.attr.add(name="comm_type", int64_val=7)
    reduce.attr.add(name="comm_size", uint64_val=512)
    reduce.attr.add(name="pg_name", string_val="3")
    send = Node(id=5, name="s", type=NodeType.COMM_SEND_NODE)
    for name, value in (("comm_src", 0), ("comm_dst", 6), ("comm_tag", 9)):
        send.attr.add(name=name, int32_val=value)
    graph = foreign(cpu, gpu, load, reduce, send)
    joined = graph.nodes.join(graph.lanes.select("lane", where="name"), on="lane", how="left")
    kinds = {
        name: (kind, lane)
        for name, kind, lane in joined.select("name", "kind", "where").iter_rows()
    }
    assert kinds["n1"] == ("host", "thread 4")
    assert kinds["n2"] == ("kernel", "stream 7")
    assert kinds["n3"] == ("copy", "memory")
    assert kinds["r"] == ("collective", "communication")
    rows = graph.communication.to_dicts()
    assert (rows[0]["kind"], rows[0]["group"], rows[0]["in_bytes"]) == ("reduce_scatter", "3", 512)
    assert (rows[1]["kind"], rows[1]["peer"], rows[1]["tag"]) == ("send", 6, 9)
    assert graph.nodes.filter(name="n3")["bytes"].item() == 64


def slugs(graph: Graph) -> list[str]:
    return [notice.slug for notice in graph.notices]


def test_dangling_and_duplicate_ids_are_counted() -> None:
    graph = foreign(made(1, 1, 99, 98), made(1, 2), made(3, 1, 1))
    assert slugs(graph) == ["chakra-duplicate-ids", "chakra-dangling"]
    assert graph.notices[1].count == 2
    assert graph.nodes.filter(name="n3")["start_ns"].item() == 1000


def test_a_circle_of_data_dependencies_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        foreign(made(1, 1, 2), made(2, 1, 1))
    assert caught.value.slug == "chakra-circle"


def test_control_dependencies_against_the_data_are_left_out() -> None:
    graph = foreign(made(1, 1, 2), Node(id=2, name="n2", duration_micros=3, ctrl_deps=[1]))
    assert slugs(graph) == ["chakra-control-circle"]
    assert graph.nodes.filter(name="n1")["start_ns"].item() == 3000


@pytest.mark.parametrize("micros", [2**63, 2**64 - 1, 2**60])
def test_times_that_no_clock_has_are_refused(micros: int) -> None:
    with pytest.raises(InputError) as caught:
        foreign(made(1, micros))
    assert caught.value.slug == "chakra-times"


def test_ids_beyond_63_bits_are_ids() -> None:
    graph = foreign(made(2**64 - 1, 4), made(5, 1, 2**64 - 1))
    assert graph.nodes.filter(name="n5")["start_ns"].item() == 4000


@pytest.mark.data
def test_public_files_become_graphs_and_come_back(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "chakra"
    for number, files in enumerate(
        (sorted(folder.glob("custom_ring*.et")), [folder / "converted_2023.0.et.gz"])
    ):
        graph = read_graph(files)
        graph.check()
        assert set(graph.edges["evidence"]) == {"assumed"}
        with EtReader(files[0]) as reader:
            assert graph.nodes.filter(rank=0).height == 1 + sum(1 for _ in reader)
        written = write_ranks(graph, tmp_path / str(number))
        same(graph, read_graph([path for path in written if path.suffix == ".et"]))


def test_a_graph_holds_what_it_does_not_know_of_a_foreign_node(tmp_path: Path) -> None:
    node = made(2**63 + 5, 5)
    node.type = NodeType.MEM_STORE_NODE
    node.attr.add(name="is_cpu_op", int32_val=0)
    node.attr.add(name="tensor_size", uint64_val=77)
    node.attr.add(name="num_ops", int64_val=12)
    node.attr.add(name="of_nobody's", double_val=1.5)
    node.attr.add(name="shape").int64_list.values.extend([3, 4])
    node.inputs.values = "[[1]]"
    graph = foreign(node, made(3, 1, 2**63 + 5))
    for number in range(2):  # from files, and from what was written of the graph
        write_ranks(graph, tmp_path / f"round{number}")
        path = tmp_path / f"round{number}" / "workload.0.et"
        with EtReader(path) as reader:
            first = next(iter(reader))
        written = {other.name: other for other in first.attr}
        assert (first.inputs.values, first.type) == ("[[1]]", NodeType.MEM_STORE_NODE)
        assert written["num_ops"].int64_val == 12
        assert written["of_nobody's"].double_val == 1.5
        assert list(written["shape"].int64_list.values) == [3, 4]
        again = read_graph([path])
        assert again.foreign.equals(graph.foreign)
        assert again.foreign["id"].to_list() == [2**63 + 5, 3]
        graph = again
