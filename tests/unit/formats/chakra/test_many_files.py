"""Many small files: decoded together, they are what each is alone; what is wrong with one is said of that one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from support.workload import collective, node, receive, send, write_set
from traceloom.errors import InputError
from traceloom.formats.chakra import nodes
from traceloom.formats.chakra.nodes import (
    NodeFrame,
    Workload,
    find_file_sets,
    read_table,
    read_tables,
    read_workload,
)
from traceloom.workload.chakra.graph_read import concatenate_graphs, read_graph
from traceloom.workload.chakra.validate import validate


def as_read(table: NodeFrame) -> list[object]:
    """All that a table says."""
    arrays = [
        (part.row.tolist(), part.id.tolist()) for part in (table.data, table.control, table.added)
    ]
    frames = [table.nodes.rows(), table.nodes.schema, table.odd.rows(), table.odd.schema]
    return [table.path, *arrays, *frames, table.metadata, table.notices, table.packed]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Of every sort: with dependencies of each kind, odd attributes, without nodes, alone, compressed."""
    write_set(
        tmp_path,
        [node(1), node(2, deps=[1]), node(5, deps=[2, 1], ctrl=[2])],
        [
            collective(1, pg_name="1"),
            node(2, "COMM_COLL_NODE", deps=[1], comm_type=0, comm_size=("uint64_val", 8)),
        ],
        [],
        [node(7, us=3)],
        [collective(3, is_cpu_op=True), node(4, ctrl=[3, 3])],
    )
    write_set(tmp_path / "packed", [node(1), node(2, deps=[1])], ending=".et.gz")
    return [*sorted(tmp_path.glob("*.et")), *(tmp_path / "packed").glob("*.et.gz")]


@pytest.mark.parametrize("most", [1, 150, 1 << 20])  # bytes: each alone, some together, all at once
def test_files_that_are_read_together_are_as_each_alone(
    files: list[Path], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_MAX_BATCH_BYTES", most)
    assert [as_read(table) for table in read_tables(files)] == [
        as_read(read_table(path)) for path in files
    ]
    backwards = files[::-1]
    assert [as_read(table) for table in read_tables(backwards)] == [
        as_read(read_table(path)) for path in backwards
    ]


def test_a_damaged_file_keeps_its_beginning_and_harms_no_other(files: list[Path]) -> None:
    first = files[0]
    first.write_bytes(first.read_bytes()[:-4])
    cut, *others = read_tables(files)
    assert [notice.slug for notice in cut.notices] == ["chakra-cut"]
    assert cut.nodes["id"].to_list() == [1, 2]
    assert [as_read(table) for table in others] == [as_read(read_table(path)) for path in files[1:]]


def test_a_message_that_is_no_node_ends_its_file_alone(files: list[Path]) -> None:
    whole = files[3].read_bytes()
    files[3].write_bytes(whole + b"\x04\xff\xff\xff\xff")
    tables = list(read_tables(files))
    assert [notice.slug for notice in tables[3].notices] == ["chakra-damaged"]
    assert tables[3].nodes["id"].to_list() == [7]
    assert [table.notices for number, table in enumerate(tables) if number != 3] == [()] * (
        len(files) - 1
    )


def test_a_file_that_is_no_chakra_trace_is_named(files: list[Path]) -> None:
    files[2].write_text("<html>")
    with pytest.raises(InputError) as alone:
        read_table(files[2])
    with pytest.raises(InputError) as raised:
        list(read_tables(files))
    assert raised.value.to_dict() == alone.value.to_dict()
    assert raised.value.where == str(files[2])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_a_pipe_is_read_once(files: list[Path], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.et"
    os.mkfifo(pipe)
    damaged = files[0].read_bytes()[:-4]
    writer = threading.Thread(target=pipe.write_bytes, args=(damaged,))
    writer.start()
    before, piped, after = read_tables([files[1], pipe, files[3]])
    writer.join()
    assert piped.nodes["id"].to_list() == [1, 2]
    assert [table.nodes.height for table in (before, after)] == [2, 1]


def test_nothing_is_no_table() -> None:
    assert list(read_tables([])) == []


def workload(home: Path) -> Workload:
    return read_workload(find_file_sets([home])[0])


def test_the_nodes_of_a_workload_are_those_of_its_files_with_their_places(
    files: list[Path],
) -> None:
    whole = workload(files[0].parent)
    expected = [
        (file, row, number)
        for file, table in enumerate(whole.tables)
        for row, number in enumerate(table.nodes["id"].to_list())
    ]
    assert whole.nodes.select("file", "row", "id").rows() == expected
    odd = [
        (file, *row)
        for file, table in enumerate(whole.tables)
        for row in table.odd.select("row", "attribute").rows()
    ]
    assert whole.odd.select("file", "row", "attribute").rows() == odd
    assert [whole.location(file) for file in range(len(whole.tables))] == [
        (str(path), rank) for rank, path in enumerate(sorted(files[0].parent.glob("*.et")))
    ]


def test_what_is_wrong_in_several_files_is_said_of_each(tmp_path: Path) -> None:
    right = [collective(1), node(2, deps=[1])]
    lacking = [node(1, "COMM_COLL_NODE", comm_type=0), node(2, "COMM_COLL_NODE", deps=[1])]
    write_set(tmp_path, right, lacking, right, lacking)
    problems = [p for p in validate(tmp_path).problems if p.rule == "communication-attribute"]
    assert [(problem.rank, problem.nodes.tolist(), problem.count) for problem in problems] == [
        (1, [1, 2], 2),
        (3, [1, 2], 2),
    ]
    assert [example.message.split(" has ")[1] for example in problems[0].examples] == [
        "no comm_size",
        "no comm_type and no comm_size",
    ]


def test_a_group_that_some_ranks_are_not_in_is_said_of_these(tmp_path: Path) -> None:
    ranks = [[collective(1, pg_name="1"), collective(2, pg_name="9", deps=[1])] for _ in range(3)]
    write_set(tmp_path, *ranks, groups={"1": [0, 2]})
    problems = validate(tmp_path).problems
    assert [(p.rank, p.nodes.tolist()) for p in problems if p.rule == "not-a-member"] == [(1, [1])]
    assert [(p.rank, p.nodes.tolist()) for p in problems if p.rule == "unknown-group"] == [
        (0, [2]),
        (1, [2]),
        (2, [2]),
    ]


def test_small_files_give_together_what_they_give_alone(tmp_path: Path) -> None:
    home = write_set(
        tmp_path / "set",
        [
            node(7, us=3),
            node(2, deps=[7], ctrl=[7], us=4, stream=3),
            collective(9, deps=[2], pg_name="5"),
        ],
        [],
        [send(1, 3, is_cpu_op=False), node(2, is_cpu_op=True, tid=4), receive(3, 3, deps=[1, 2])],
        [receive(1, 2), send(3, 2, deps=[1]), node(2, us=9)],
    )
    paths = sorted(home.iterdir())
    together = read_graph(paths)
    alone = concatenate_graphs(
        [read_graph([path], ranks=[rank]) for rank, path in enumerate(paths)], together.name
    )
    for name, frame in alone.frames().items():
        assert together.frames()[name].equals(frame), name
    together.check_columns()


def test_what_is_wrong_with_one_of_small_files_is_said_of_that_one(tmp_path: Path) -> None:
    home = write_set(tmp_path / "set", [node(1)], [node(1, deps=[5])], [node(1), node(2, deps=[1])])
    graph = read_graph(sorted(home.iterdir()))
    assert [(notice.slug, notice.rank) for notice in graph.notices] == [("chakra-dangling", 1)]
    write_set(home, [node(1)], [node(1, deps=[2]), node(2, deps=[1])])
    with pytest.raises(InputError) as error:
        read_graph(sorted(home.iterdir()))
    assert error.value.slug == "chakra-circle"
    assert error.value.where.endswith("w.1.et")
