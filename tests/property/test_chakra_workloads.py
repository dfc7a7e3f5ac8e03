"""Workloads of any writer: laid out as a plain search lays them out, and the same in every form and after every way."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from google.protobuf import json_format
from hypothesis import given, settings, strategies as st

from support.small_graph import small_graph
from support.workload import METADATA, attribute, collective, node, receive, send, write_set
from traceloom.errors import InputError
from traceloom.formats.chakra.et_pb2 import AttributeProto, GlobalMetadata, Node
from traceloom.formats.chakra.nodes import read_table
from traceloom.graph import graph as graph_store
from traceloom.graph.graph import Graph
from traceloom.workload.chakra.convert import ConversionInput, open_messages, write_messages
from traceloom.workload.chakra.graph_read import convert_from_messages, read_graph, write_ranks
from traceloom.workload.chakra.validate import validate

QUICK = settings(deadline=None)
KINDS = (
    "COMP_NODE",
    "COMP_NODE",
    "MEM_LOAD_NODE",
    "COMM_COLL_NODE",
    "COMM_SEND_NODE",
    "METADATA_NODE",
)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@st.composite
def workloads(draw: st.DrawFn, most: int = 9) -> list[Node]:
    """Nodes that wait only for earlier ids, in any order of the file."""
    nodes = []
    ids = draw(
        st.lists(
            st.integers(0, 2**64 - 1) | st.integers(0, 20), min_size=1, max_size=most, unique=True
        )
    )
    for at, number in enumerate(ids):
        earlier = st.sampled_from(ids[:at]) if at else st.nothing()
        deps, ctrl = (
            draw(st.lists(earlier, max_size=size, unique=True)) if at else [] for size in (3, 1)
        )
        one = node(
            number, draw(st.sampled_from(KINDS)), deps, ctrl=ctrl, us=draw(st.integers(0, 1000))
        )
        one.start_time_micros = draw(st.sampled_from([0, 0, 5, 700]))
        for name in draw(
            st.lists(
                st.sampled_from(["is_cpu_op", "stream", "tid", "tensor_size", "comm_size"]),
                unique=True,
            )
        ):
            value = draw(st.booleans()) if name == "is_cpu_op" else draw(st.integers(0, 2**40))
            one.attr.append(attribute(name, value))
        nodes.append(one)
    return draw(st.permutations(nodes))


def graph_of(nodes: list[Node]) -> Graph:
    graph = convert_from_messages([(METADATA, nodes)])
    graph.check()
    return graph


def same(one: Graph, other: Graph) -> None:
    """The same rows; their order in a frame means nothing."""
    for name, frame in one.frames().items():
        # An attribute with a name of ours is read as ours from a file of ours, and is in no column twice.
        columns = [column for column in frame.columns if column != "attributes"]
        rows, others = (of.select(columns).rows() for of in (frame, other.frames()[name]))
        assert Counter(map(str, others)) == Counter(map(str, rows)), name


# -- how a graph of another writer is laid out -----------------------------------------------------------------------


def is_host(node: Node) -> bool:
    return any(one.name == "is_cpu_op" and one.bool_val for one in node.attr)


def starts_us(nodes: list[Node]) -> dict[int, int]:
    """When each node starts, by the plain rule: not before its own time, the starts of its callers on the host, the
    ends of its causes.
    """
    by_id = {one.id: one for one in nodes}
    known: dict[int, int] = {}

    def start(number: int) -> int:
        if number not in known:
            one = by_id[number]
            known[number] = max(
                one.start_time_micros,
                *(start(dep) + by_id[dep].duration_micros for dep in one.data_deps),
                *(
                    start(dep) + (0 if is_host(by_id[dep]) else by_id[dep].duration_micros)
                    for dep in one.ctrl_deps
                ),
                0,
            )
        return known[number]

    return {one.id: start(one.id) for one in nodes}


@QUICK
@given(nodes=workloads())
def test_nodes_start_when_all_that_they_wait_for_is_over(nodes: list[Node]) -> None:
    graph = graph_of(nodes)
    expected = starts_us(nodes)
    rows = graph.nodes.slice(1)  # behind the origin, in the order of the file
    assert rows["name"].to_list() == [one.name for one in nodes]
    assert rows["start_ns"].to_list() == [1000 * expected[one.id] for one in nodes]
    assert rows["duration_ns"].to_list() == [1000 * one.duration_micros for one in nodes]
    assert graph.end_ns == max(1000 * (expected[one.id] + one.duration_micros) for one in nodes)
    assert graph.notices == ()


@QUICK
@given(nodes=workloads())
def test_every_dependency_is_an_edge_and_who_has_none_hangs_on_the_origin(
    nodes: list[Node],
) -> None:
    graph = graph_of(nodes)
    row = {one.id: at for at, one in enumerate(nodes, start=1)}
    expected = Counter((row[dep], row[one.id], "data") for one in nodes for dep in one.data_deps)
    expected += Counter((row[dep], row[one.id], "call") for one in nodes for dep in one.ctrl_deps)
    expected += Counter(
        (0, row[one.id], "origin") for one in nodes if not one.data_deps and not one.ctrl_deps
    )
    assert (
        Counter(graph.edges.select("source", "target", pl.col("kind").cast(pl.String)).rows())
        == expected
    )


@QUICK
@given(nodes=workloads(), data=st.data())
def test_the_order_of_the_file_changes_no_time(nodes: list[Node], data: st.DataObject) -> None:
    other = data.draw(st.permutations(nodes))
    times = [
        sorted(
            graph_of(order).nodes.select("name", "start_ns", "duration_ns", "bytes").rows(), key=str
        )
        for order in (nodes, other)
    ]
    assert times[0] == times[1]


@QUICK
@given(nodes=workloads(), factor=st.integers(2, 9))
def test_longer_nodes_make_a_longer_workload(nodes: list[Node], factor: int) -> None:
    before = graph_of(nodes).end_ns
    for one in nodes:
        one.duration_micros *= factor
        one.start_time_micros *= factor
    assert graph_of(nodes).end_ns == factor * before


# -- attributes of every type ----------------------------------------------------------------------------------------

WHOLE = (
    "int32_val",
    "int64_val",
    "uint32_val",
    "uint64_val",
    "sint32_val",
    "sint64_val",
    "fixed32_val",
    "fixed64_val",
    "sfixed32_val",
    "sfixed64_val",
    "bool_val",
)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("member", WHOLE)
@pytest.mark.parametrize(
    ("name", "kind", "column"),
    [
        ("tensor_size", "MEM_LOAD_NODE", "bytes"),
        ("comm_size", "COMM_COLL_NODE", "bytes"),
        ("comm_size", "COMM_SEND_NODE", "bytes"),
        ("tensor_size", "COMP_NODE", "bytes"),
    ],
)
def test_a_size_is_a_size_in_every_type_of_number(
    member: str, name: str, kind: str, column: str
) -> None:
    graph = graph_of([node(1, kind, **{name: (member, 1)})])
    assert graph.nodes[column].to_list() == [None, 1]


@pytest.mark.parametrize(
    "value", [("string_val", "8"), ("double_val", 8.0), ("bytes_val", b"8"), ("float_val", 8.0)]
)
def test_a_size_that_is_no_whole_number_is_unknown(value: tuple[str, Any]) -> None:
    assert graph_of([node(1, "COMM_COLL_NODE", comm_size=value)]).nodes["bytes"].to_list() == [
        None,
        None,
    ]


@pytest.mark.parametrize("peer", [2**31, 2**40, 2**63 - 1])
@pytest.mark.parametrize(
    ("kind", "name"), [("COMM_SEND_NODE", "comm_dst"), ("COMM_RECV_NODE", "comm_src")]
)
def test_a_peer_that_is_no_rank_is_unknown(kind: str, name: str, peer: int) -> None:
    graph = graph_of([node(1, kind, **{name: ("int64_val", peer), "comm_tag": 3})])
    assert graph.communication.select("peer", "tag").rows() == [(None, 3)]


@pytest.mark.parametrize("count", [3, 4, 5, 20])
def test_times_that_add_up_to_no_time_are_refused(count: int) -> None:
    longest = [node(at, deps=[at - 1] if at else [], us=2**60 // 1000) for at in range(count)]
    if count <= 4:
        assert graph_of(longest).end_ns == count * (2**60 // 1000) * 1000
        return
    with pytest.raises(InputError) as caught:
        graph_of(longest)
    assert caught.value.slug == "chakra-times"


@pytest.mark.parametrize("version", ["", "0.0.1", "0.0.4", "1.0", "99.9", "日本", "x" * 1000])
def test_the_version_that_a_file_says_changes_nothing(version: str) -> None:
    nodes = [node(1, us=5), node(2, deps=[1], us=7)]
    graph = convert_from_messages([(GlobalMetadata(version=version), nodes)])
    assert graph.nodes["start_ns"].to_list() == [0, 0, 5000]


# -- forms -----------------------------------------------------------------------------------------------------------

ENDINGS = (".et", ".et.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz")


@QUICK
@given(nodes=workloads(), endings=st.tuples(st.sampled_from(ENDINGS), st.sampled_from(ENDINGS)))
def test_any_way_through_the_forms_leads_back(nodes: list[Node], endings: tuple[str, str]) -> None:
    with folder() as home:
        messages: list[Any] = [METADATA, *nodes]
        for at, ending in enumerate((*endings, ".et")):
            write_messages(home / f"{at}.0{ending}", messages[0], messages[1:])
            with open_messages(home / f"{at}.0{ending}") as reader:
                messages = [reader.metadata, *reader]
        assert messages == [METADATA, *nodes]
        paths = [home / f"{at}.0{ending}" for at, ending in enumerate(endings)]
        graphs = []
        for path in paths:
            with ConversionInput(path) as given_file:
                graphs.append(given_file.graph())
        for graph in graphs:
            assert graph.nodes.equals(graph_of(nodes).nodes)
            assert graph.edges.equals(graph_of(nodes).edges)


@QUICK
@given(
    nodes=workloads(most=5),
    names=st.booleans(),
    numbers=st.booleans(),
    indent=st.sampled_from([None, 0, 2]),
    together=st.booleans(),
)
def test_json_of_the_protobuf_library_is_read(
    nodes: list[Node], names: bool, numbers: bool, indent: int | None, together: bool
) -> None:
    """Whichever of its options the writer took: camel case or not, enumerations as words or numbers, one line or many."""
    options = {
        "preserving_proto_field_name": names,
        "use_integers_for_enums": numbers,
        "indent": indent,
    }
    texts = [json_format.MessageToJson(message, **options) for message in (METADATA, *nodes)]  # type: ignore[arg-type]
    with folder() as home:
        path = home / "w.0.json"
        path.write_text(("" if together else "\n").join(texts))
        with open_messages(path) as reader:
            assert [reader.metadata, *reader] == [METADATA, *nodes]
        assert reader.notices == []


@QUICK
@given(nodes=workloads(most=6))
def test_the_table_of_a_file_holds_what_its_messages_hold(nodes: list[Node]) -> None:
    with folder() as home:
        (path,) = write_set(home, nodes).glob("*.et")
        table = read_table(path)
    rows = table.nodes.rows(named=True)
    assert [row["id"] for row in rows] == [one.id for one in nodes]
    assert [row["type"] for row in rows] == [one.type for one in nodes]
    for lists, name in ((table.data, "data_deps"), (table.control, "ctrl_deps")):
        pairs = list(zip(lists.row.tolist(), lists.id.tolist(), strict=True))
        assert pairs == [(at, dep) for at, one in enumerate(nodes) for dep in getattr(one, name)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_a_store_and_the_files_of_ranks_give_back_is_one_graph(
    tmp_path: Path, ranks: int
) -> None:
    graph = small_graph(ranks)
    written = [path for path in write_ranks(graph, tmp_path / "a") if path.suffix == ".et"]
    graph_store.save(read_graph(written), tmp_path / "a.graph")
    after = graph_store.load(tmp_path / "a.graph")
    after.check()
    same(graph, after)
    assert (after.epoch_ns, after.world_size, after.stage) == (
        graph.epoch_ns,
        graph.world_size,
        graph.stage,
    )
    assert after.notices == graph.notices


@QUICK
@given(ranks=st.lists(workloads(most=5), min_size=1, max_size=3))
def test_graphs_of_other_writers_come_back_from_files_of_ours(ranks: list[list[Node]]) -> None:
    with folder() as home:
        source = write_set(home / "in", *ranks)
        graph = read_graph(sorted(source.glob("*.et")))
        written = write_ranks(graph, home / "out")
        after = read_graph([path for path in written if path.suffix == ".et"])
    same(graph, after)


# -- verdicts --------------------------------------------------------------------------------------------------------


@QUICK
@given(
    nodes=workloads(most=7),
    extra=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=3),
)
def test_a_circle_is_told_where_a_plain_search_finds_one(
    nodes: list[Node], extra: list[tuple[int, int]]
) -> None:
    for source, target in extra:
        nodes[target % len(nodes)].data_deps.append(nodes[source % len(nodes)].id)
    waits = {one.id: {dep for dep in one.data_deps if dep != one.id} for one in nodes}
    settled: set[int] = set()
    while ready := {
        number for number, deps in waits.items() if number not in settled and deps <= settled
    }:
        settled |= ready
    with folder() as home:
        verdict = validate(write_set(home, nodes))
    told = {problem.rule for problem in verdict.problems}
    assert ("dependency-cycle" in told) == (len(settled) < len(waits))
    assert ("self-dependency" in told) == any(
        one.id in one.data_deps or one.id in one.ctrl_deps for one in nodes
    )
    repeated = any(
        len(set(deps)) < len(deps)
        for one in nodes
        for deps in (list(one.data_deps), list(one.ctrl_deps))
    )
    assert ("repeated-dependency" in told) == repeated


MESSAGE = st.tuples(
    st.integers(0, 2), st.integers(0, 2), st.integers(0, 1), st.sampled_from([8, 8, 16])
).filter(lambda message: message[0] != message[1])


@QUICK
@given(messages=st.lists(MESSAGE, min_size=1, max_size=6), lost=st.integers(0, 7))
def test_messages_that_somebody_takes_are_right_and_others_are_told(
    messages: list[Any], lost: int
) -> None:
    """Each message is sent and taken, in one order on all ranks; then one that is lost is not."""
    ranks: list[list[Node]] = [[node(0)], [node(0)], [node(0)]]
    for number, (source, target, tag, size) in enumerate(messages, start=1):
        for rank, made in ((source, send), (target, receive)):
            if rank == target and number - 1 == lost:
                continue
            peer = target if rank == source else source
            before = ranks[rank][-1].id
            ranks[rank].append(made(number, peer, [before], comm_tag=tag, comm_size=size))
    with folder() as home:
        verdict = validate(write_set(home, *ranks))
    told = {problem.rule for problem in verdict.problems} - {"isolated-node"}
    assert bool(told) == (lost < len(messages)), told
    assert json.loads(json.dumps(verdict.to_dict()))["errors"] == verdict.errors


@QUICK
@given(
    st.lists(st.sampled_from(["ALL_REDUCE", "ALL_GATHER", "BROADCAST"]), min_size=1, max_size=5),
    st.integers(0, 9),
)
def test_collectives_in_one_order_are_right_and_in_two_are_told(
    kinds: list[str], swapped: int
) -> None:
    def rank(order: list[str]) -> list[Node]:
        return [
            collective(at, kind, deps=[at - 1] if at else []) for at, kind in enumerate(order)
        ] + [node(len(order), deps=[len(order) - 1])]

    other = list(kinds)
    if swapped + 1 < len(other):
        other[swapped], other[swapped + 1] = other[swapped + 1], other[swapped]
    with folder() as home:
        told = {
            problem.rule for problem in validate(write_set(home, rank(kinds), rank(other))).problems
        }
    assert bool(told) == (other != kinds), told


def test_a_node_with_attributes_of_every_type_is_a_node() -> None:
    one = node(1)
    for name in AttributeProto.DESCRIPTOR.fields_by_name:
        if name.endswith("_val"):
            one.attr.add(name=name)
            filled = one.attr.add(name=f"{name} filled")
            text = "x" if name == "string_val" else b"x" if name == "bytes_val" else 1
            setattr(filled, name, text)
        elif name.endswith("_list"):
            getattr(one.attr.add(name=name), name).SetInParent()
    graph = graph_of([one, node(2, deps=[1])])
    assert graph.nodes["start_ns"].to_list() == [0, 0, 1000]
