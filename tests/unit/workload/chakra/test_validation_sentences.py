"""What validation says of communication, in whole sentences; and deadlocks against a plain simulation of all ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from support.workload import collective, node, receive, send, write_set
from traceloom.errors import InputError
from traceloom.formats.chakra.et_pb2 import Node, NodeType
from traceloom.formats.chakra.files import format_groups, read_groups
from traceloom.workload.chakra.validate import validate
from traceloom.workload.chakra.validation_rules import Problem, Target


def problems(
    home: Path, *ranks: list[Node], target: Target = "chakra", groups: object = None
) -> dict[str, Problem]:
    return {
        each.rule: each
        for each in validate(write_set(home, *ranks, groups=groups), target=target).problems
    }


def sentences(problem: Problem) -> list[str]:
    return [example.message for example in problem.examples]


# -- one node -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "lacks"),
    [
        (node(1, "COMM_COLL_NODE"), "has no comm_type and no comm_size"),
        (node(1, "COMM_COLL_NODE", comm_type=0), "has no comm_size"),
        (node(1, "COMM_COLL_NODE", comm_size=8), "has no comm_type"),
        (node(1, "COMM_COLL_NODE", comm_type=9), None),  # a barrier moves nothing
        (node(1, "COMM_SEND_NODE"), "has no comm_size and no comm_dst and no comm_tag"),
        (node(1, "COMM_RECV_NODE", comm_size=8, comm_dst=0), "has no comm_src and no comm_tag"),
        (node(1, "COMP_NODE"), None),
    ],
)
def test_what_communication_lacks_is_listed(tmp_path: Path, made: Node, lacks: str | None) -> None:
    problem = problems(tmp_path, [made], []).get("communication-attribute")
    assert (problem and sentences(problem)) == (lacks and [f"node 1 `n1` {lacks}"])


@pytest.mark.parametrize(
    ("made", "moves"),
    [
        (collective(1, size=0), False),
        (collective(1, size=-8), False),
        (collective(1, size=1), True),
        (collective(1, "BARRIER", size=0), True),
        (send(1, 1, comm_size=0), False),
        (receive(1, 1, comm_size=0), False),
        (send(1, 1, comm_size=-1), False),
        (receive(1, 1), True),
        (node(1, comm_size=0), True),
    ],
)
def test_communication_of_any_kind_that_moves_no_bytes_is_told(
    tmp_path: Path, made: Node, moves: bool
) -> None:
    problem = problems(tmp_path, [made], []).get("communication-size")
    assert (problem is None) == moves
    if problem:
        assert sentences(problem) == ["node 1 `n1` has a comm_size that is not above 0"]
        assert problem.severity == "warning"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (send(1, 0), "of rank 0 has comm_dst 0, itself"),
        (receive(1, 0), "of rank 0 has comm_src 0, itself"),
        (send(1, -1), "has a comm_dst below 0"),
        (receive(1, -2), "has a comm_src below 0"),
        (send(1, 1, comm_src=1), "of rank 0 has another comm_src"),
        (receive(1, 1, comm_dst=7), "of rank 0 has another comm_dst"),
        (send(1, 1, comm_src=0), None),
        (receive(1, 1, comm_dst=0), None),
    ],
)
def test_the_other_end_of_a_message_has_to_be_possible(
    tmp_path: Path, made: Node, words: str | None
) -> None:
    problem = problems(tmp_path, [made], []).get("message-peer")
    assert (problem and sentences(problem)) == (words and [f"node 1 `n1` {words}"])


def test_a_long_name_is_cut_and_none_is_left_out(tmp_path: Path) -> None:
    names = ["", "x" * 60, "y" * 61]
    made = [node(number, name=name, deps=[99]) for number, name in enumerate(names, 1)]
    lost = "waits for node 99, which is not there"
    assert sentences(problems(tmp_path, made)["dangling-dependency"]) == [
        f"node 1 {lost}",
        f"node 2 `{'x' * 60}` {lost}",
        f"node 3 `{'y' * 59}…` {lost}",
    ]


def test_a_long_circle_is_shown_by_its_beginning(tmp_path: Path) -> None:
    count = 9
    problem = problems(tmp_path, [node(k, deps=[(k + 1) % count]) for k in range(count)])[
        "dependency-cycle"
    ]
    (sentence,) = sentences(problem)
    assert sentence == (
        "node 0 `n0` waits for node 1 `n1`, which waits for node 2 `n2`, which waits for node 3 `n3`, which waits for "
        "node 4 `n4`, which waits for node 5 `n5` … and 3 more, which waits for node 0 `n0`"
    )
    assert problem.nodes.tolist() == list(range(count))


# -- between ranks ------------------------------------------------------------------------------------------------------


def test_both_sides_of_a_size_that_differs_are_named(tmp_path: Path) -> None:
    made = problems(tmp_path, [send(1, 1, comm_size=2000)], [receive(5, 0, comm_size=1000)])
    assert sentences(made["message-size"]) == [
        "node 1 `n1` of rank 0 sends 2,000 bytes, node 5 `n5` of rank 1 takes 1,000"
    ]


def test_messages_with_one_tag_are_matched_in_their_order(tmp_path: Path) -> None:
    one = [send(1, 1, comm_size=10), send(2, 1, [1], comm_size=20)]
    other = [receive(1, 0, comm_size=10), receive(2, 0, [1], comm_size=20)]
    assert problems(tmp_path / "a", one, other) == {}
    swapped = [receive(1, 0, comm_size=20), receive(2, 0, [1], comm_size=10)]
    assert problems(tmp_path / "b", one, swapped)["message-size"].count == 2


def test_a_message_without_another_side_names_who_does_not_take_it(tmp_path: Path) -> None:
    made = problems(
        tmp_path, [send(1, 1, comm_tag=4), send(2, 1, [1], comm_tag=4)], [receive(1, 0, comm_tag=4)]
    )
    assert sentences(made["unmatched-message"]) == [
        "node 2 `n2` of rank 0, tag 4, is never received by rank 1"
    ]
    made = problems(tmp_path / "b", [node(1)], [receive(3, 0, comm_tag=9)])
    assert sentences(made["unmatched-message"]) == [
        "node 3 `n3` of rank 1, tag 9, is never sent by rank 0"
    ]


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        (
            (2, 1),
            "rank 0 issues 2 collectives in the group of all ranks, rank 1 1: the first one too many is node 2 `n2`",
        ),
        (
            (1, 3),
            "rank 0 issues 1 collective in the group of all ranks, rank 1 3: the first one too many is node 2 `n2`",
        ),
        ((2, 0), "rank 0 issues 2 in the group of all ranks, rank 1 none"),
        ((0, 1, 0), "rank 1 issues 1 in the group of all ranks, ranks 0, 2 none"),
    ],
)
def test_ranks_that_issue_too_few_are_counted(
    tmp_path: Path, counts: tuple[int, ...], sentence: str
) -> None:
    ranks = [
        [collective(k, deps=[k - 1] if k > 1 else []) for k in range(1, count + 1)]
        for count in counts
    ]
    problem = problems(tmp_path, *(nodes or [node(1)] for nodes in ranks))["collective-count"]
    assert sentences(problem) == [sentence]


def test_what_ranks_do_differently_is_said_of_both(tmp_path: Path) -> None:
    made = problems(tmp_path, [collective(1, size=1024)], [collective(8, "BROADCAST", size=2048)])
    (sentence,) = sentences(made["collective-kind"])
    assert sentence == (
        "collective 1 of the group of all ranks is ALL_REDUCE of 1,024 bytes on rank 0 (node 1 `n1`), "
        "BROADCAST of 2,048 bytes on rank 1 (node 8 `n8`)"
    )


def test_groups_are_compared_each_by_itself(tmp_path: Path) -> None:
    groups = {"1": [0, 1], "2": [2, 3]}
    ranks = [
        [collective(1, size=8 if rank < 3 else 16, pg_name=str(1 + rank // 2))] for rank in range(4)
    ]
    problem = problems(tmp_path, *ranks, groups=groups)["collective-size"]
    assert problem.rank == 2
    assert sentences(problem)[0].startswith(
        "collective 1 of group `2` is ALL_REDUCE of 8 bytes on rank 2"
    )


@pytest.mark.parametrize("kind", ["ALL_REDUCE", "BROADCAST", "REDUCE"])
def test_sizes_that_have_to_agree_are_an_error(tmp_path: Path, kind: str) -> None:
    assert (
        problems(tmp_path, [collective(1, kind, 8)], [collective(1, kind, 9)])[
            "collective-size"
        ].severity
        == "error"
    )


@pytest.mark.parametrize(
    "kind", ["ALL_GATHER", "GATHER", "SCATTER", "REDUCE_SCATTER", "ALL_TO_ALL"]
)
def test_sizes_that_a_program_may_choose_by_rank_are_a_warning(tmp_path: Path, kind: str) -> None:
    assert (
        problems(tmp_path, [collective(1, kind, 8)], [collective(1, kind, 9)])[
            "collective-size"
        ].severity
        == "warning"
    )


def programs(chance: random.Random, ranks: int) -> list[list[Node]]:
    """Ranks that do one thing after the other, in orders that may wait for each other for ever."""
    work: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    for tag in range(chance.randint(2, 6)):
        one, other = chance.sample(range(ranks), 2)
        for rank, entry in ((one, ("send", other, tag)), (other, ("receive", one, tag))):
            work[rank].insert(max(len(work[rank]) - chance.choice([0, 0, 0, 1, 2]), 0), entry)
        if chance.random() < 0.5:
            for own in work:
                own.append(("meet", 0, 0))
    made = []
    for own in work:
        nodes: list[Node] = []
        for number, (kind, peer, tag) in enumerate(own, 1):
            deps = [number - 1] if number > 1 else []
            if kind == "meet":
                nodes.append(collective(number, deps=deps))
            else:
                nodes.append(
                    (send if kind == "send" else receive)(number, peer, deps, comm_tag=tag)
                )
        made.append(nodes or [node(1)])
    return made


def everything_ends(ranks: list[list[Node]]) -> bool:
    """Whether all ranks come to their end: sends go at once, receives wait for them, collectives for all ranks."""
    place, sent = [0] * len(ranks), set()
    moved = True
    while moved:
        moved = False
        ahead = [
            nodes[at] if at < len(nodes) else None for nodes, at in zip(ranks, place, strict=True)
        ]
        if all(each is not None and each.type == NodeType.COMM_COLL_NODE for each in ahead):
            place, moved = [at + 1 for at in place], True
            continue
        for rank, each in enumerate(ahead):
            if each is None or each.type == NodeType.COMM_COLL_NODE:
                continue
            held = {a.name: a.int32_val for a in each.attr}
            if each.type == NodeType.COMM_SEND_NODE:
                sent.add((rank, held["comm_dst"], held["comm_tag"]))
            elif (
                each.type == NodeType.COMM_RECV_NODE
                and (held["comm_src"], rank, held["comm_tag"]) not in sent
            ):
                continue
            place[rank], moved = place[rank] + 1, True
    return all(at == len(nodes) for nodes, at in zip(ranks, place, strict=True))


def test_ranks_hang_where_a_plain_simulation_of_them_does(tmp_path: Path) -> None:
    chance = random.Random(11)
    ends = []
    for number in range(60):
        ranks = programs(chance, chance.choice([2, 2, 3, 4]))
        ends.append(everything_ends(ranks))
        verdict = problems(tmp_path / str(number), *ranks)
        assert set(verdict) <= {"deadlock"}, verdict
        assert ("deadlock" not in verdict) == ends[-1]
        for problem in verdict.values():
            # each clause names one wait of the circle, of ranks that there are
            clauses = problem.examples[0].message.split("; ")
            assert len(clauses) > 1
            assert all(" waits for " in clause for clause in clauses)
    assert 10 < sum(ends) < 50


# -- group files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "members", "faults"),
    [
        ({}, {}, []),
        ({"1": [0, 1], "2": []}, {"1": (0, 1), "2": ()}, []),
        ({"1": [1, 1]}, {"1": (1, 1)}, ["group `1` names a rank twice"]),
        (
            {"1": "0", "2": [True], "3": [-1], "4": [1.0], "5": {"0": 1}, "6": None, "7": [2]},
            {"7": (2,)},
            [f"group `{number}` is not a list of ranks" for number in range(1, 7)],
        ),
    ],
)
def test_a_group_file_is_read_as_far_as_it_is_right(
    tmp_path: Path, document: dict, members: dict, faults: list
) -> None:
    path = tmp_path / "groups.json"
    path.write_text(json.dumps(document))
    groups = read_groups(path)
    assert (groups.path, groups.members, list(groups.faults)) == (str(path), members, faults)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", '"x"', "{", '{"1": [0}', "\x00", '{"1": [' + "1" * 5000 + "]}"]
)
def test_what_is_no_group_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "groups.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_groups(path)
    assert (caught.value.slug, caught.value.where) == ("not-a-group-file", str(path))


def test_a_group_file_that_is_written_is_read_again(tmp_path: Path) -> None:
    groups = {"1": (0, 1), 'größe "x"': (3,), "": ()}
    (tmp_path / "groups.json").write_text(format_groups(groups))
    assert read_groups(tmp_path / "groups.json").members == groups
    with pytest.raises(InputError):
        read_groups(tmp_path)
