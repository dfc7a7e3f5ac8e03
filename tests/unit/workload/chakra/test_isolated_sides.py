"""One side of a workload, node by node: joints, chains, odd types, what nodes keep, and what files say of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from support.workload import METADATA, attribute, collective, node, receive, send, write_set
from traceloom.errors import InputError, OutputError
from traceloom.formats.chakra.et_pb2 import GlobalMetadata, Node, NodeType
from traceloom.workload.chakra.convert import (
    ConversionInput,
    SeparatedSide,
    build_side_metadata,
    open_messages,
    read_shape,
    select_remaining,
    separate_side,
    write_messages,
)
from traceloom.workload.chakra.graph_read import build_blocks

COMMUNICATION = {NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE, NodeType.COMM_COLL_NODE}


def copied(nodes: list[Node]) -> list[Node]:
    return [Node.FromString(each.SerializeToString()) for each in nodes]


def isolated(nodes: list[Node], side: str) -> SeparatedSide:
    return separate_side(read_shape(build_blocks(nodes), "made"), side, "made")  # type: ignore[arg-type]


def left(nodes: list[Node], side: str = "communication") -> dict[int, Node]:
    return {each.id: each for each in select_remaining(iter(copied(nodes)), isolated(nodes, side))}


def awaited(nodes: dict[int, Node], member: str = "data_deps") -> dict[int, list[int]]:
    return {number: list(getattr(each, member)) for number, each in nodes.items()}


def reaches(nodes: dict[int, Node], member: str) -> dict[int, set[int]]:
    """All that each node waits for, over others: a plain closure."""
    closure = {number: set(getattr(each, member)) & set(nodes) for number, each in nodes.items()}
    grown = True
    while grown:
        grown = False
        for number, seen in closure.items():
            closure[number] = seen.union(*(closure[other] for other in seen))
            grown |= closure[number] != seen
    return closure


@pytest.mark.parametrize(
    ("kind", "side"),
    [
        ("COMM_SEND_NODE", "communication"),
        ("COMM_RECV_NODE", "communication"),
        ("COMM_COLL_NODE", "communication"),
        ("COMP_NODE", "compute"),
        ("MEM_LOAD_NODE", "compute"),
        ("MEM_STORE_NODE", "compute"),
        ("INVALID_NODE", "compute"),
        ("METADATA_NODE", None),
    ],
)
def test_every_type_is_on_one_side_and_metadata_on_none(kind: str, side: str | None) -> None:
    nodes = [node(4, kind)]
    assert [name for name in ("communication", "compute") if left(nodes, name)] == (
        [side] if side else []
    )


def test_an_unknown_type_is_work() -> None:
    nodes = [node(4)]
    nodes[0].type = 77
    assert left(nodes, "communication") == {}
    assert left(nodes, "compute")[4] == nodes[0]


def test_a_node_keeps_all_but_its_dependencies() -> None:
    kept = collective(3, "ALL_GATHER", 64, deps=[2], ctrl=[2], pg_name="tp", us=9, name="gather")
    kept.inputs.values, kept.start_time_micros = "[1]", 40
    kept.attr.add(name="odd").int64_list.values.extend([1, 2])
    nodes = [collective(1), node(2, deps=[1], ctrl=[1]), kept]
    expected = Node.FromString(kept.SerializeToString())
    for member in ("data_deps", "ctrl_deps"):
        expected.ClearField(member)
        getattr(expected, member).append(1)
    assert left(nodes)[3] == expected


def test_a_joint_has_no_duration_and_is_no_communication() -> None:
    sources = [node(number) for number in (1, 2)]
    joint = collective(3, deps=[1, 2], us=50)
    nodes = [*sources, joint, *(node(number, deps=[3]) for number in (4, 5))]
    result = isolated(nodes, "compute")
    assert (result.joints, result.kept) == (frozenset({2}), [True, True, False, True, True])
    stays = left(nodes, "compute")
    assert awaited(stays) == {1: [], 2: [], 3: [1, 2], 4: [3], 5: [3]}
    assert (stays[3].type, stays[3].duration_micros) == (NodeType.COMP_NODE, 0)
    assert [stays[number].duration_micros for number in (1, 2, 4, 5)] == [1] * 4


@pytest.mark.parametrize(
    ("before", "behind", "stays"),
    [(2, 2, True), (1, 2, False), (1, 9, False), (2, 1, False), (64, 1, False), (65, 1, True)],
)
def test_a_removed_node_stays_where_many_wait_through_it_for_many(
    before: int, behind: int, stays: bool
) -> None:
    nodes = [*(collective(number) for number in range(before)), node(1000, deps=range(before))]
    nodes += [collective(1001 + number, deps=[1000]) for number in range(behind)]
    kept = left(nodes)
    assert (1000 in kept) == stays
    for number in range(behind):
        assert list(kept[1001 + number].data_deps) == ([1000] if stays else list(range(before)))


def test_the_last_of_a_chain_stands_for_all_of_it() -> None:
    nodes = [
        collective(1),
        collective(2, deps=[1]),
        collective(3, deps=[2]),
        node(4, deps=[1, 2, 3]),
        collective(5, deps=[4]),
    ]
    assert awaited(left(nodes)) == {1: [], 2: [1], 3: [2], 5: [3]}


def test_what_is_said_directly_stays_said_once() -> None:
    nodes = [collective(1), node(2, deps=[1]), collective(3, deps=[1, 2, 1])]
    assert awaited(left(nodes)) == {1: [], 3: [1]}


def test_what_waits_for_itself_or_for_nothing_that_exists_is_counted() -> None:
    nodes = [
        collective(1, deps=[1, 50, 51]),
        node(2, deps=[60], ctrl=[61, 2]),
        collective(3, deps=[2]),
    ]
    result = isolated(nodes, "communication")
    (notice,) = result.notices
    assert (notice.slug, notice.count, notice.severity, notice.where) == (
        "chakra-dangling",
        4,
        "warning",
        "made",
    )
    assert notice.message.startswith("4 dependencies name nodes")
    assert awaited(left(nodes)) == {1: [], 3: []}


def test_of_two_nodes_with_one_id_the_first_is_meant() -> None:
    nodes = [collective(1), node(7, deps=[1]), node(7), collective(3, deps=[7])]
    assert awaited(left(nodes)) == {1: [], 3: [1]}


def test_ids_beyond_the_signed_ones_are_kept() -> None:
    large = 2**64 - 1
    nodes = [collective(large), node(2**63, deps=[large]), collective(5, deps=[2**63])]
    assert awaited(left(nodes)) == {large: [], 5: [large]}


@pytest.mark.parametrize("side", ["communication", "compute"])
def test_a_file_of_the_other_side_alone_leaves_nothing(side: str) -> None:
    other = (
        [node(1), node(2, deps=[1])]
        if side == "communication"
        else [send(1, 1), receive(2, 1, [1])]
    )
    assert left(other, side) == {}
    assert left([], side) == {}


def test_circles_name_how_many_wait_in_them() -> None:
    nodes = [node(1, deps=[2]), node(2, deps=[1]), collective(3, deps=[2]), collective(4)]
    with pytest.raises(InputError) as caught:
        left(nodes)
    assert (caught.value.slug, caught.value.where) == ("chakra-circle", "made")
    assert caught.value.message.startswith("3 nodes wait for each other")
    assert "traceloom validate made" in str(caught.value.hint)


def test_a_circle_of_callers_leaves_the_data_dependencies() -> None:
    nodes = [
        collective(1, ctrl=[3]),
        node(2, deps=[1], ctrl=[1]),
        collective(3, deps=[2], ctrl=[2]),
    ]
    (notice,) = isolated(nodes, "communication").notices
    assert (notice.slug, notice.count) == ("chakra-control-circle", 3)
    assert awaited(left(nodes)) == {1: [], 3: [1]}
    assert awaited(left(nodes), "ctrl_deps") == {1: [], 3: []}


@pytest.mark.parametrize("seed", range(12))
def test_who_waited_for_whom_still_does_over_both_kinds_of_dependencies(seed: int) -> None:
    chance = random.Random(seed)
    numbers = chance.sample(range(1000), 24)
    nodes = []
    for place, number in enumerate(numbers):
        deps, callers = (
            chance.sample(numbers[:place], min(place, chance.randint(0, 3))) for _ in range(2)
        )
        make = chance.choice([node, collective])
        nodes.append(make(number, deps=deps, ctrl=callers))
    chance.shuffle(nodes)
    before = {each.id: each for each in nodes}
    for side in ("communication", "compute"):
        stays = left(nodes, side)
        kept = {
            number
            for number, each in before.items()
            if (each.type in COMMUNICATION) == (side == "communication")
        }
        assert kept <= set(stays)
        assert [each.id for each in nodes if each.id in stays] == list(
            stays
        )  # in the order of the file
        for member in ("data_deps", "ctrl_deps"):
            was, now = reaches(before, member), reaches(stays, member)
            assert {number: was[number] & kept for number in kept} == {
                number: now[number] & kept for number in kept
            }
            assert all(list(deps) == sorted(set(deps)) for deps in awaited(stays, member).values())


class TestMetadata:
    def test_the_side_is_added_behind_the_others(self) -> None:
        metadata = GlobalMetadata(version="9")
        metadata.attr.extend([attribute("schema", "feeder JSON"), attribute("rank", 3)])
        before = metadata.SerializeToString()
        made = build_side_metadata(metadata, "communication")
        assert made.version == "9"
        assert [(a.name, a.string_val or a.int64_val) for a in made.attr] == [
            ("schema", "feeder JSON"),
            ("rank", 3),
            ("only", "communication"),
        ]
        assert metadata.SerializeToString() == before


RANKS = [
    [node(1), collective(2, deps=[1], pg_name="tp"), node(3, deps=[2]), send(4, 1, [3])],
    [node(1), collective(2, deps=[1], pg_name="tp"), node(3, deps=[2]), receive(4, 0, [3])],
]


class TestFiles:
    @pytest.mark.parametrize("ending", [".et", ".json", ".jsonl"])
    @pytest.mark.parametrize(
        ("side", "expected"), [("communication", {2: [], 4: [2]}), ("compute", {1: [], 3: [1]})]
    )
    def test_every_form_gives_the_same_side(
        self, tmp_path: Path, ending: str, side: str, expected: dict
    ) -> None:
        source = tmp_path / "in"
        source.mkdir()
        for rank, nodes in enumerate(RANKS):
            write_messages(source / f"w.{rank}{ending}", METADATA, nodes)
        (source / "comm_groups.json").write_text('{"tp": [0, 1]}')
        with ConversionInput(source) as opened:
            files = opened.write_directory(tmp_path / "out", side, force=False)  # type: ignore[arg-type]
            assert (opened.nodes, opened.notices) == (4, [])
        assert [path.name for path in files] == [
            "comm_groups.json",
            "workload.0.et",
            "workload.1.et",
        ]
        for path in files[1:]:
            with open_messages(path) as reader:
                assert awaited({each.id: each for each in reader}) == expected
                assert [(a.name, a.string_val) for a in reader.metadata.attr] == [("only", side)]

    def test_notices_of_a_damaged_file_are_said_once_however_often_it_is_read(
        self, tmp_path: Path
    ) -> None:
        source = write_set(
            tmp_path / "in", [collective(1, deps=[9]), node(2, deps=[1]), collective(3, deps=[2])]
        )
        path = source / "w.0.et"
        path.write_bytes(path.read_bytes()[:-2])
        with ConversionInput(path) as opened:
            opened.write_file(tmp_path / "out.jsonl", "communication", force=False)
        assert sorted(notice.slug for notice in opened.notices) == ["chakra-cut", "chakra-dangling"]
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [line.get("id") for line in lines] == [None, 1]

    def test_a_circle_leaves_no_file_behind(self, tmp_path: Path) -> None:
        source = write_set(tmp_path / "in", [node(1, deps=[2]), node(2, deps=[1])])
        with ConversionInput(source) as opened, pytest.raises(InputError) as caught:
            opened.write_file(tmp_path / "out.et", "compute", force=False)
        assert caught.value.slug == "chakra-circle"
        assert [path.name for path in tmp_path.iterdir()] == ["in"]

    @pytest.mark.parametrize(
        "name", ["out.et", "out.et.gz", "out.json", "out.json.gz", "out.jsonl", "out.jsonl.gz"]
    )
    def test_a_file_of_any_form_becomes_one_of_any_other(self, tmp_path: Path, name: str) -> None:
        source = write_set(tmp_path / "in", RANKS[0])
        with ConversionInput(source / "w.0.et") as opened:
            size = opened.write_file(tmp_path / name, None, force=False)
        assert size == (tmp_path / name).stat().st_size
        assert ((tmp_path / name).read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
        with ConversionInput(tmp_path / name) as again:
            metadata, nodes = again.messages(0)
            assert [metadata, *nodes] == [METADATA, *RANKS[0]]

    def test_what_is_there_is_replaced_only_by_force(self, tmp_path: Path) -> None:
        source = write_set(tmp_path / "in", RANKS[0])
        (tmp_path / "out.et").write_bytes(b"before")
        with ConversionInput(source) as opened:
            with pytest.raises(OutputError) as caught:
                opened.write_file(tmp_path / "out.et", None, force=False)
            assert caught.value.slug == "file-exists"
            assert (tmp_path / "out.et").read_bytes() == b"before"
            opened.write_file(tmp_path / "out.et", None, force=True)
        with open_messages(tmp_path / "out.et") as reader:
            assert list(reader) == RANKS[0]

    def test_groups_are_read_from_either_name_and_the_first_one_counts(
        self, tmp_path: Path
    ) -> None:
        source = write_set(tmp_path / "in", *RANKS)
        with ConversionInput(source) as opened:
            assert opened.group_file() is None
        (source / "comm_group.json").write_text('{"2": [1]}')
        with ConversionInput(source) as opened:
            assert opened.group_file() == b'{"2": [1]}'
        (source / "comm_groups.json").write_text('{"1": [0]}')
        with ConversionInput(source) as opened:
            assert opened.group_file() == b'{"1": [0]}'
        with ConversionInput(source / "w.0.et") as opened:
            assert opened.group_file() is None  # of one file it says nothing

    def test_ranks_keep_their_numbers(self, tmp_path: Path) -> None:
        source = tmp_path / "in"
        source.mkdir()
        for rank in (2, 11):
            write_messages(source / f"w.{rank}.jsonl", METADATA, [node(rank)])
        with ConversionInput(source) as opened:
            assert opened.ranks == [2, 11]
            files = opened.write_directory(tmp_path / "out", None, force=False)
        assert [path.name for path in files] == ["workload.11.et", "workload.2.et"]
        for path, rank in zip(files, (11, 2), strict=True):
            with open_messages(path) as reader:
                assert [each.id for each in reader] == [rank]
