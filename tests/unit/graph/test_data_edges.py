"""Data edges: the last writer of a storage, though numbers of storages are used again."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import polars as pl
import pytest

from traceloom.graph.graph import Graph
from traceloom.graph.host_match import BY_RECORD_ID, Matching, Outcome
from traceloom.graph.linking import link
from traceloom.graph.rank import link_rank
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.trace import HOST_OPS, HostTrace

FRESH, VIEW, IN_PLACE = (
    "aten::f(Tensor a) -> Tensor",
    "aten::f(Tensor(a) a) -> Tensor(a)",
    "aten::f_(Tensor(a!) a)",
)


def tensor(storage: int, device: str = "cuda:0") -> list[Any]:
    return [storage + 1000, storage, 0, 4, 4, device]


class Program:
    """Ops one after the other, each 50 us long; with a kernel where wanted."""

    def __init__(self) -> None:
        self.built = TraceBuilder()
        self.rows: list[dict[str, Any]] = []

    def op(
        self,
        name: str,
        reads: list[Any],
        writes: list[Any],
        schema: str = FRESH,
        *,
        kernel: bool = True,
    ) -> Program:
        number = len(self.rows)
        self.built.op(name, 100 * number, 50)
        if kernel:
            self.built.launch("cudaLaunchKernel", 100 * number + 10, 5, correlation=number + 1)
            self.built.kernel(f"k.{name}", 100 * number + 20, 5, correlation=number + 1)
        self.rows.append(
            {
                "id": 10 + number,
                "name": name,
                "parent": 2,
                "schema": schema,
                "inputs": json.dumps(reads),
                "input_types": json.dumps(["Tensor(float)"] * len(reads)),
                "outputs": json.dumps(writes),
                "output_types": json.dumps(["Tensor(float)"] * len(writes)),
            }
        )
        return self

    def composite(self, reads: list[Any], made: list[Any]) -> None:
        """Adds an op without a kernel that makes a tensor, and in it an op that looks at it."""
        self.op("composite", reads, [made], kernel=False)
        self.built.op("inner", 100 * (len(self.rows) - 1) + 10, 20)
        inner = {"id": 10 + len(self.rows), "name": "inner", "schema": VIEW}
        values = {"inputs": json.dumps([made]), "outputs": json.dumps([made])}
        types = {"input_types": json.dumps(["Tensor(float)"])}
        self.rows.append(self.rows[-1] | inner | values | types)

    def graph(self) -> Graph:
        trace = self.built.build()
        ops = pl.DataFrame(
            [{k: row.get(k) for k in HOST_OPS} for row in self.rows], schema=HOST_OPS
        )
        ids = np.full(trace.events.height, -1, dtype=np.int64)
        ids[trace.events.filter(pl.col("category") == "op")["event"].to_numpy()] = ops[
            "id"
        ].to_numpy()
        outcome = pl.Series([BY_RECORD_ID] * ops.height, dtype=Outcome)
        graph = link_rank(trace, Matching(HostTrace("host.json", ops), ids, outcome, exact=True))
        graph.check()
        return graph


def data(graph: Graph) -> set[tuple[str, str]]:
    name = graph.nodes["name"]
    found = graph.edges.filter(pl.col("kind") == "data")
    assert found["evidence"].is_in(["correlated"]).all()
    return {(name[a], name[b]) for a, b in found.select("source", "target").rows()}


def test_what_a_kernel_reads_comes_from_the_kernel_that_wrote_it_last() -> None:
    program = (
        Program()
        .op("a", [], [tensor(1)])
        .op("b", [], [tensor(2)])
        .op("c", [tensor(1)], [tensor(3)])
    )
    assert data(program.graph()) == {("k.a", "k.c")}


def test_a_view_writes_nothing_and_a_change_in_place_does() -> None:
    program = Program().op("a", [], [tensor(1)])
    program.op("view", [tensor(1)], [tensor(1)], VIEW, kernel=False)
    program.op("mul_", [tensor(1)], [tensor(1)], IN_PLACE).op("reader", [tensor(1)], [tensor(2)])
    assert data(program.graph()) == {("k.a", "k.mul_"), ("k.mul_", "k.reader")}


def test_a_number_that_is_used_again_is_another_storage() -> None:
    program = Program().op("first", [], [tensor(1)]).op("reader", [tensor(1)], [tensor(2)])
    program.op("second", [], [tensor(1)]).op("late", [tensor(1)], [tensor(3)])
    assert data(program.graph()) == {("k.first", "k.reader"), ("k.second", "k.late")}


def test_memory_that_was_only_allocated_comes_from_nobody() -> None:
    program = Program().op("old", [], [tensor(1)]).op("aten::empty", [], [tensor(1)], kernel=False)
    program.op("reader", [tensor(1)], [tensor(2)])
    assert data(program.graph()) == set()


def test_values_on_the_host_go_from_op_to_op() -> None:
    host = tensor(5, "cpu")
    program = (
        Program()
        .op("load", [], [host], kernel=False)
        .op("use", [host], [tensor(6, "cpu")], kernel=False)
    )
    assert data(program.graph()) == {("load", "use")}


def test_a_copy_from_the_device_gives_its_reader_on_the_host_the_value() -> None:
    program = (
        Program()
        .op("copy", [tensor(1)], [tensor(5, "cpu")])
        .op("use", [tensor(5, "cpu")], [], kernel=False)
    )
    assert data(program.graph()) == {("k.copy", "use")}


def test_an_operation_that_communicates_changes_what_it_was_given() -> None:
    program = Program().op("a", [], [tensor(1)]).op("record_param_comms", [tensor(1)], [], "")
    program.op("reader", [tensor(1)], [tensor(2)])
    assert data(program.graph()) == {
        ("k.a", "k.record_param_comms"),
        ("k.record_param_comms", "k.reader"),
    }


def test_numbers_in_lists_are_no_tensors_and_nested_lists_of_tensors_are() -> None:
    program = Program().op("a", [], [tensor(1)])
    program.op("cat", [[tensor(1), tensor(4)]], [tensor(7)])
    program.rows[-1]["input_types"] = json.dumps(["GenericList[Tensor(float),Tensor(float)]"])
    program.op("shape", [[1, 2, 3, 4, 5]], [tensor(8)])
    program.rows[-1]["input_types"] = json.dumps(["GenericList[Int,Int,Int,Int,Int]"])
    assert data(program.graph()) == {("k.a", "k.cat")}


def test_the_graph_holds_the_host_ops_and_how_they_were_joined() -> None:
    graph = Program().op("a", [], [tensor(1)]).op("b", [tensor(1)], [tensor(2)]).graph()
    assert graph.host_ops["name"].to_list() == ["a", "b"]
    assert graph.nodes.filter(pl.col("kind") == "kernel")["host_op"].to_list() == [10, 11]
    rows = graph.coverage.filter(pl.col("subject") == "host-ops").select("outcome", "count").rows()
    assert rows == [(BY_RECORD_ID, 2)]
    assert graph.ranks["host_trace"].to_list() == ["host.json"]


def test_a_storage_that_an_op_made_of_other_ops_began_is_not_the_one_before() -> None:
    program = Program().op("old", [], [tensor(1)])
    program.composite([tensor(3)], tensor(1))
    program.op("reader", [tensor(1)], [tensor(2)])
    assert data(program.graph()) == set()


def test_a_tensor_of_another_size_or_type_that_no_op_returned_is_another_storage() -> None:
    program = Program().op("old", [], [tensor(1)])
    program.op("larger", [[7, 1, 0, 8, 4, "cuda:0"]], [tensor(2)])
    program.op("a", [], [tensor(3)]).op("whole numbers", [tensor(3)], [tensor(4)])
    program.rows[-1]["input_types"] = json.dumps(["Tensor(int)"])
    assert data(program.graph()) == set()


def test_five_whole_numbers_in_a_row_are_no_tensor_where_tensors_have_devices() -> None:
    program = Program().op("a", [], [tensor(6)]).op("shape", [tensor(1), [5, 6, 0, 4, 4]], [])
    program.rows[-1]["input_types"] = json.dumps(["Tensor(float)", "GenericList[Int]"])
    assert data(program.graph()) == set()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(100))
def test_data_edges_do_not_depend_on_how_storages_are_numbered(seed: int) -> None:
    program, edges = make_program(seed)
    assert data(program.graph()) == edges


def make_program(seed: int) -> tuple[Program, set[tuple[str, str]]]:
    """Returns a program whose storages are numbered by address, the last that was released first,
    and its true edges.
    """
    random, program = Random(seed), Program()
    edges: set[tuple[str, str]] = set()
    free, unused, tensors = [], iter(range(1, 1000)), iter(range(2000, 9000))
    live: dict[int, tuple[list[Any], str | None]] = {}  # the tensor and its last writer

    def allocate(elements: int) -> list[Any]:
        number = free.pop() if free and random.random() < 0.9 else next(unused)
        return [next(tensors), number, 0, elements, random.choice([4, 8]), "cuda:0"]

    def read(number: int, reader: str) -> list[Any]:
        value, writer = live[number]
        if writer is not None:
            edges.add((f"k.{writer}", f"k.{reader}"))
        return value

    for step in range(80):
        action = random.choice(["fresh", "fresh", "change_", "composite", "number", "view", "free"])
        name = f"{step}.{action}"
        chosen = random.sample(sorted(live), min(len(live), 2))
        if action == "fresh" or not chosen:
            made = allocate(random.choice([1, 4, 16]))
            program.op(name, [read(number, name) for number in chosen], [made])
            live[made[1]] = made, name
        elif action == "change_":
            value = read(chosen[0], name)
            program.op(name, [value], [value], IN_PLACE)
            live[chosen[0]] = value, name
        elif action == "composite":
            made = allocate(16)
            program.composite([live[chosen[0]][0]], made)
            live[made[1]] = made, None
        elif action == "number":  # a tensor that PyTorch makes for a number of Python
            number = free.pop() if free else next(unused)
            value = [next(tensors), number, 0, 1, 8, "cpu"]
            program.op(name, [read(chosen[0], name), value], [])
            free.append(number)
        elif action == "view":
            value, writer = live[chosen[0]]
            view = [next(tensors), *value[1:]]
            program.op(name, [read(chosen[0], name)], [view], VIEW)
            live[chosen[0]] = view, writer
        else:
            del live[chosen[0]]
            free.append(chosen[0])
    return program, edges


def test_a_program_has_the_same_data_edges_in_two_versions_of_pytorch(shared_data: Path) -> None:
    folder, found = shared_data / "failing" / "versions", []
    if not folder.is_dir():
        pytest.skip("the failing inputs are not on this machine")
    for version in ("251", "280"):  # only 2.8 gives each storage a number of its own
        files = (folder / f"reuse_{version}.{kind}.json.gz" for kind in ("et", "kineto"))
        graph = link(*files).graph
        op = graph.nodes["host_op"].rank("dense")  # both have the same ops in the same order
        edges = graph.edges.filter(pl.col("kind") == "data")
        found.append(set(zip(op.gather(edges["source"]), op.gather(edges["target"]), strict=True)))
    assert len(found[0]) == 202
    assert found[0] == found[1]
