"""Data edges: the last writer of a storage, though numbers of storages are used again."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import polars as pl

from traceloom.graph.graph import Graph
from traceloom.graph.host_match import BY_RECORD_ID, Matching, Outcome
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
