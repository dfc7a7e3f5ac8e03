"""One side of a workload alone: who waited for whom before, does so after."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from traceloom.errors import InputError
from traceloom.formats.chakra.et_pb2 import GlobalMetadata, Node, NodeType
from traceloom.workload.chakra.convert import (
    build_side_metadata,
    read_shape,
    select_remaining,
    separate_side,
)
from traceloom.workload.chakra.graph_read import build_blocks

COMM, COMP = NodeType.COMM_COLL_NODE, NodeType.COMP_NODE


def node(number: int, kind: NodeType.ValueType, *needs: int, control: tuple[int, ...] = ()) -> Node:
    return Node(
        id=number,
        name=f"n{number}",
        type=kind,
        duration_micros=5,
        data_deps=needs,
        ctrl_deps=control,
    )


def side(nodes: list[Node], wanted: str = "communication") -> dict[int, Node]:
    result = separate_side(read_shape(build_blocks(nodes), "made"), wanted, "made")  # type: ignore[arg-type]
    return {
        left.id: left
        for left in select_remaining(
            (Node.FromString(n.SerializeToString()) for n in nodes), result
        )
    }


def ancestors(nodes: dict[int, Node], number: int, name: str = "data_deps") -> set[int]:
    seen: set[int] = set()
    waiting = list(getattr(nodes[number], name))
    while waiting:
        one = waiting.pop()
        if one in nodes and one not in seen:
            seen.add(one)
            waiting += getattr(nodes[one], name)
    return seen


def test_dependencies_go_through_what_was_removed() -> None:
    left = side(
        [node(1, COMM), node(2, COMP, 1), node(3, COMP, 2), node(4, COMM, 3), node(5, COMM, 4)]
    )
    assert {number: list(n.data_deps) for number, n in left.items()} == {1: [], 4: [1], 5: [4]}
    assert left[4].duration_micros == 5


def test_the_other_side() -> None:
    left = side(
        [node(1, COMP), node(2, COMM, 1), node(3, COMP, 2), node(9, NodeType.METADATA_NODE)],
        "compute",
    )
    assert {number: list(n.data_deps) for number, n in left.items()} == {1: [], 3: [1]}


def test_control_dependencies_are_kept_apart() -> None:
    left = side([node(1, COMM), node(2, COMP, control=(1,)), node(3, COMM, control=(2,))])
    assert list(left[3].ctrl_deps) == [1]
    assert list(left[3].data_deps) == []


def test_order_in_the_file_does_not_matter() -> None:
    left = side([node(4, COMM, 3), node(3, COMP, 1), node(1, COMM)])
    assert list(left[4].data_deps) == [1]


def test_a_meeting_of_many_stays_without_duration() -> None:
    """100 before and 100 behind one removed node: 10,000 dependencies, or one node that stays."""
    before, after = range(100), range(101, 201)
    left = side(
        [
            *(node(n, COMM) for n in before),
            node(100, COMP, *before),
            *(node(n, COMM, 100) for n in after),
        ]
    )
    assert (left[100].duration_micros, left[100].type) == (0, COMP)
    assert sum(len(n.data_deps) for n in left.values()) == 200
    assert all(ancestors(left, number) == {*before, 100} for number in after)


def test_a_long_stream_needs_no_joints() -> None:
    """Collectives on one stream, awaited again and again: only the last one counts."""
    nodes = [
        node(n, COMM, n - 1)
        if n % 4 == 0 and n
        else node(n, COMP, n - 1, n // 4 * 4)
        if n
        else node(n, COMM)
        for n in range(2000)
    ]
    left = side(nodes)
    assert set(left) == set(range(0, 2000, 4))
    assert [list(n.data_deps) for n in left.values()] == [
        [],
        *([number] for number in range(0, 1996, 4)),
    ]


def test_a_list_that_grows_along_a_chain_stays_linear() -> None:
    count = 20_000
    nodes = []
    for number in range(count):
        nodes += [
            node(2 * number, COMM),
            node(2 * number + 1, COMP, 2 * number, *([2 * number - 1] if number else [])),
        ]
    left = side([*nodes, node(2 * count, COMM, 2 * count - 1)])
    assert sum(len(n.data_deps) for n in left.values()) < 3 * count
    assert len(ancestors(left, 2 * count) & set(range(0, 2 * count, 2))) == count


def test_a_circle_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        side([node(1, COMP, 2), node(2, COMP, 1), node(3, COMM)])
    assert caught.value.slug == "chakra-circle"


def test_a_circle_of_control_is_left_out_with_a_notice() -> None:
    nodes = [node(1, COMM, control=(2,)), node(2, COMM, 1, 99, control=(1,))]
    result = separate_side(read_shape(build_blocks(nodes), "made"), "communication", "made")
    assert [notice.slug for notice in result.notices] == [
        "chakra-dangling",
        "chakra-control-circle",
    ]
    assert {number: list(n.data_deps) for number, n in side(nodes).items()} == {1: [], 2: [1]}


def test_the_metadata_names_the_side_and_is_no_graph_any_more() -> None:
    metadata = GlobalMetadata(version="1")
    metadata.attr.add(name="schema", string_val="traceloom-graph")
    metadata.attr.add(name="pid", int64_val=3)
    assert [a.name for a in build_side_metadata(metadata, "compute").attr] == ["pid", "only"]


@st.composite
def workloads(draw: st.DrawFn) -> list[Node]:
    count = draw(st.integers(1, 25))
    kinds = draw(st.lists(st.sampled_from([COMM, COMP, COMP]), min_size=count, max_size=count))
    return [
        node(n, kind, *draw(st.sets(st.integers(0, n - 1), max_size=4) if n else st.just(set())))
        for n, kind in enumerate(kinds)
    ]


@given(workloads(), st.sampled_from(["communication", "compute"]))
def test_reachability_among_the_kept_is_what_it_was(nodes: list[Node], wanted: str) -> None:
    whole = {n.id: n for n in nodes}
    left = side(nodes, wanted)
    kept = {n.id for n in nodes if (n.type == COMM) == (wanted == "communication")}
    assert kept <= set(left)
    for number, other in itertools.permutations(kept, 2):
        assert (other in ancestors(left, number)) == (other in ancestors(whole, number))
    assert all(dep in left for n in left.values() for dep in n.data_deps)
    assert sum(len(n.data_deps) for n in left.values()) <= sum(
        len(n.data_deps) for n in nodes
    ) + len(nodes)
