"""Generated workloads: every byte gets to where the operation takes it, whatever the options; and they are right for all."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from traceloom.errors import UsageError
from traceloom.formats.chakra.et_pb2 import NodeType
from traceloom.formats.chakra.nodes import NodeFrame, read_table
from traceloom.workload.chakra.generate import (
    SCHEDULES,
    CollectiveOptions,
    Generated,
    PipelineOptions,
    TransformerOptions,
    build_stage_schedule,
    generate_collectives,
    generate_pipeline,
    generate_transformer,
    write_generated,
)
from traceloom.workload.chakra.graph_read import read_graph
from traceloom.workload.chakra.validate import validate
from traceloom.workload.collective_algorithms import KINDS_BY_ALGORITHM

QUICK = settings(deadline=None)
SEND, RECEIVE, COLLECTIVE = (
    int(NodeType.Value(f"COMM_{name}_NODE")) for name in ("SEND", "RECV", "COLL")
)
# Whose data must have come to whom in the end; rank 0 is the root.
FLOWS = {
    "all_reduce": lambda n: {(a, b) for a in range(n) for b in range(n)},
    "all_gather": lambda n: {(a, b) for a in range(n) for b in range(n)},
    "all_to_all": lambda n: {(a, b) for a in range(n) for b in range(n)},
    "reduce_scatter": lambda n: {(a, b) for a in range(n) for b in range(n)},
    "broadcast": lambda n: {(0, b) for b in range(n)},
    "scatter": lambda n: {(0, b) for b in range(n)},
    "reduce": lambda n: {(a, 0) for a in range(n)},
    "gather": lambda n: {(a, 0) for a in range(n)},
}
ALGORITHMS = [
    (algorithm, kind) for algorithm, kinds in KINDS_BY_ALGORITHM.items() for kind in kinds
]


def tables(generated: Generated) -> list[NodeFrame]:
    """Written, right for everybody, and read again."""
    with tempfile.TemporaryDirectory() as name:
        written = write_generated(generated, Path(name) / "set")
        assert validate(Path(name) / "set").problems == ()
        assert validate(Path(name) / "set", target="astra-sim").errors == 0
        of_ranks = {
            int(path.stem.rpartition(".")[2]): path for path in written if path.suffix == ".et"
        }
        return [read_table(of_ranks[rank]) for rank in sorted(of_ranks)]


def reached(files: list[NodeFrame]) -> set[tuple[int, int]]:
    """(a, b): something that rank a had before its first node can have come to rank b when all is over."""
    knows = [{rank} for rank in range(len(files))]
    rows = [table.nodes.rows(named=True) for table in files]
    waits = [{row["id"]: set() for row in of_rank} for of_rank in rows]
    for rank, table in enumerate(files):
        ids = table.nodes["id"].to_list()
        for row, awaited in zip(table.data.row.tolist(), table.data.id.tolist(), strict=True):
            waits[rank][ids[row]].add(awaited)
    done: list[set[int]] = [set() for _ in files]
    in_flight: dict[tuple[int, int, int], list[set[int]]] = {}
    moved = True
    while moved:
        moved = False
        for rank, of_rank in enumerate(rows):
            for row in of_rank:
                if row["id"] in done[rank] or not waits[rank][row["id"]] <= done[rank]:
                    continue
                key = (row["comm_src"], row["comm_dst"], row["comm_tag"])
                if row["type"] == RECEIVE:
                    if not in_flight.get(key):
                        continue
                    knows[rank] |= in_flight[key].pop(0)
                elif row["type"] == SEND:
                    in_flight.setdefault(key, []).append(set(knows[rank]))
                done[rank].add(row["id"])
                moved = True
    assert [len(of_rank) for of_rank in done] == [len(of_rank) for of_rank in rows], "it hangs"
    assert not any(in_flight.values()), "somebody never takes a message"
    return {(source, target) for target, sources in enumerate(knows) for source in sources}


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("algorithm", "kind"), ALGORITHMS)
@pytest.mark.parametrize(
    "ranks", [2, 3, 8, *(pytest.param(ranks, marks=pytest.mark.thorough) for ranks in (5, 16))]
)
def test_the_messages_of_an_algorithm_bring_all_data_to_where_it_belongs(
    algorithm: str, kind: str, ranks: int
) -> None:
    if algorithm == "halving-doubling" and ranks & (ranks - 1):
        pytest.skip("for powers of two")
    if algorithm == "two-level" and ranks % 8:
        pytest.skip("for whole hosts of 8")
    generated = generate_collectives(CollectiveOptions(kind, ranks, size=1000, algorithm=algorithm))
    assert reached(tables(generated)) >= FLOWS[kind](ranks)


@pytest.mark.parametrize("kind", ["broadcast", "scatter", "reduce", "gather"])
def test_operations_with_a_root_bring_nothing_to_others(kind: str) -> None:
    generated = generate_collectives(CollectiveOptions(kind, 4, size=1000, algorithm="direct"))
    assert reached(tables(generated)) == FLOWS[kind](4) | {(rank, rank) for rank in range(4)}


@QUICK
@given(
    choice=st.sampled_from(ALGORITHMS),
    ranks=st.integers(2, 7),
    size=st.integers(64, 10_000),
    compute=st.sampled_from([0, 7]),
)
def test_what_ranks_send_is_what_they_receive_and_what_is_told(
    choice: tuple[str, str], ranks: int, size: int, compute: int
) -> None:
    algorithm, kind = choice
    ranks = {"halving-doubling": 4, "two-level": 16}.get(algorithm, ranks)
    generated = generate_collectives(CollectiveOptions(kind, ranks, size, algorithm, compute))
    files = tables(generated)
    sent, taken = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    by_rank = [0] * ranks
    for rank, table in enumerate(files):
        for row in table.nodes.rows(named=True):
            message = (row["comm_src"], row["comm_dst"], row["comm_tag"], row["comm_size"])
            if row["type"] == SEND:
                assert row["comm_src"] == rank
                sent[message] += 1
                by_rank[rank] += row["comm_size"]
            elif row["type"] == RECEIVE:
                assert row["comm_dst"] == rank
                taken[message] += 1
    assert sent == taken
    assert all(size > 0 for *_, size in sent)
    assert generated.totals["messages"] == sum(sent.values())
    assert list(generated.totals["sent_bytes"]) == by_rank


@QUICK
@given(
    schedule=st.sampled_from(SCHEDULES),
    stages=st.integers(1, 6),
    micro_batches=st.integers(1, 8),
    data=st.data(),
)
def test_every_micro_batch_goes_forward_and_then_back_once(
    schedule: str, stages: int, micro_batches: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    order = list(build_stage_schedule(schedule, stage, stages, micro_batches))
    for way in ("forward", "backward"):
        assert [number for kind, number in order if kind == way] == list(range(micro_batches))
    held, most = 0, 0
    for kind, number in order:
        if kind == "backward":
            assert ("forward", number) in order[: order.index((kind, number))]
        held += 1 if kind == "forward" else -1
        most = max(most, held)
    assert most == (micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches))


@QUICK
@given(
    schedule=st.sampled_from(SCHEDULES),
    ranks=st.integers(2, 5),
    micro_batches=st.integers(1, 6),
)
def test_a_pipeline_takes_as_long_as_the_closed_form_says(
    schedule: str, ranks: int, micro_batches: int
) -> None:
    generated = generate_pipeline(PipelineOptions(ranks, micro_batches, schedule))
    files = tables(generated)
    busy = [int(table.nodes["duration_us"].sum()) for table in files]
    assert busy == [micro_batches * 300] * ranks
    assert generated.totals["step_us"] == (micro_batches + ranks - 1) * 300


@QUICK
@given(
    data=st.integers(1, 3),
    tensor=st.sampled_from([1, 2, 4]),
    stages=st.integers(1, 2),
    layers=st.sampled_from([2, 4]),
    micro_batches=st.integers(1, 3),
    schedule=st.sampled_from(SCHEDULES),
)
def test_a_transformer_has_a_rank_for_every_place_and_groups_that_cover_them(
    data: int, tensor: int, stages: int, layers: int, micro_batches: int, schedule: str
) -> None:
    options = TransformerOptions(data, tensor, stages, layers, 64, micro_batches, schedule)
    if data * tensor * stages == 1:
        return
    generated = generate_transformer(options)
    files = tables(generated)
    assert len(files) == data * tensor * stages
    for members in generated.groups.values():
        assert sorted(set(members)) == sorted(members)
        assert set(members) <= set(range(len(files)))
    # What a rank computes is the same on all ranks of a stage, and less where more ranks share a layer.
    busy = [int(table.nodes["num_ops"].fill_null(0).sum()) for table in files]
    for stage in range(stages):
        of_stage = busy[stage * data * tensor : (stage + 1) * data * tensor]
        assert len(set(of_stage)) == 1
    for table in files:
        for row in table.nodes.filter(type=COLLECTIVE).rows(named=True):
            assert row["comm_size"] > 0


@pytest.mark.parametrize("factor", [2, 3])
def test_twice_the_micro_batches_are_twice_the_work_before_the_optimizer(factor: int) -> None:
    work = []
    for micro_batches in (4, 4 * factor):
        generated = generate_transformer(TransformerOptions(1, 2, 1, 2, 64, micro_batches))
        kinds = Counter[str]()
        for row in tables(generated)[0].nodes.rows(named=True):
            kinds["optimizer" if "optimizer" in row["name"].lower() else "model"] += (
                row["num_ops"] or 0
            )
        work.append(kinds)
    assert work[1]["model"] == factor * work[0]["model"]
    assert work[1]["optimizer"] == work[0]["optimizer"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: generate_collectives(
            CollectiveOptions("all_reduce", 3, algorithm="ring", compute_us=4)
        ),
        lambda: generate_pipeline(PipelineOptions(3, 4)),
        lambda: generate_transformer(TransformerOptions(2, 2, 2, 2, 64)),
    ],
)
def test_what_is_generated_is_the_same_every_time_and_a_graph(make, tmp_path: Path) -> None:
    written = [write_generated(make(), tmp_path / name) for name in ("a", "b")]
    assert [path.read_bytes() for path in written[0]] == [path.read_bytes() for path in written[1]]
    graph = read_graph([path for path in written[0] if path.suffix == ".et"])
    graph.check()
    assert (
        graph.nodes.height == sum(make().to_dict()["nodes"]) + graph.nodes["rank"].n_unique()
    )  # an origin each


@pytest.mark.parametrize(
    "options",
    [
        CollectiveOptions("all_reduce", 8, size=7, algorithm="ring"),
        CollectiveOptions("gather", 8, algorithm="ring"),
        CollectiveOptions("all_to_all", 8, algorithm="tree"),
        CollectiveOptions("scatter", 9, size=8, algorithm="direct"),
    ],
)
def test_what_an_algorithm_cannot_do_is_refused(options: CollectiveOptions) -> None:
    with pytest.raises(UsageError) as caught:
        generate_collectives(options)
    assert caught.value.slug == "cannot-generate"
