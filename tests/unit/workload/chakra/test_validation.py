"""Every rule of validation: a set that breaks it, and the nearest set that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from support.workload import attribute, collective, node, receive, send, write_set
from traceloom.cli import main
from traceloom.errors import InputError, UsageError
from traceloom.formats.chakra import files
from traceloom.formats.chakra.et_pb2 import GlobalMetadata
from traceloom.formats.chakra.nodes import EXPECTED
from traceloom.workload.chakra.validate import validate
from traceloom.workload.chakra.validation_rules import RULES, Problem, Target

Make = Callable[[Path], object]
ROOT = Path(__file__).resolve().parents[4]


def a_set(*ranks: list, **more) -> Make:
    return lambda home: write_set(home, *ranks, **more)


def cut(home: Path) -> None:
    write_set(home, [node(1), node(2, deps=[1])])
    path = home / "w.0.et"
    path.write_bytes(path.read_bytes()[:-3])


def without_metadata(home: Path) -> None:
    write_set(home, [node(1)])
    path = home / "w.0.et"
    data = path.read_bytes()
    path.write_bytes(data[1 + data[0] :])


def with_a_gap(home: Path) -> None:
    write_set(home, [node(1)], [node(1)], [node(1)])
    (home / "w.1.et").unlink()


def twice(home: Path) -> None:
    write_set(home, [node(1)])
    files.write(home / "w.0.et.gz", GlobalMetadata(version="1"), [node(1)])


def renamed(home: Path) -> None:
    write_set(home, [node(1)])
    (home / "w.0.et").rename(home / "w.et")


def with_attribute(*attributes):
    made = collective(1)
    made.attr.extend(attributes)
    return made


def with_type(number: int):
    made = node(2, deps=[1])
    made.type = number
    return made


ONE, AFTER = node(1), node(2, deps=[1])
BOTH = {"1": [0, 1]}
FINE = a_set([ONE, AFTER])
PAIR = a_set([collective(1), node(2, deps=[1])], [collective(1), node(2, deps=[1])])

# rule -> (what breaks it, the nearest that does not, for whom)
# Rank 0 has one collective less before that of all ranks.
_UNEVEN = [
    [collective(1)],
    *[[collective(1, pg_name="1"), collective(2, deps=[1])]] * 2,
]
CASES: dict[str, tuple[Make, Make, Target]] = {
    "file-damage": (cut, FINE, "chakra"),
    "no-metadata": (without_metadata, FINE, "chakra"),
    "no-nodes": (a_set([]), FINE, "chakra"),
    "file-name": (renamed, FINE, "astra-sim"),
    "file-compressed": (a_set([ONE], ending=".et.gz"), FINE, "astra-sim"),
    "missing-rank": (with_a_gap, a_set([ONE], [ONE], [ONE]), "chakra"),
    "repeated-rank": (twice, FINE, "chakra"),
    "node-type": (a_set([ONE, with_type(9)]), a_set([ONE, with_type(3)]), "chakra"),
    "attribute-type": (
        a_set([node(1, "COMM_COLL_NODE", comm_type=0, comm_size=("uint64_val", 8))]),
        a_set([collective(1)]),
        "chakra",
    ),
    "repeated-attribute": (
        a_set([with_attribute(attribute("comm_size", 7))]),
        a_set([with_attribute()]),
        "chakra",
    ),
    "duplicate-id": (a_set([ONE, node(1)]), FINE, "chakra"),
    "dangling-dependency": (a_set([ONE, node(2, deps=[7])]), FINE, "chakra"),
    "dangling-control-dependency": (
        a_set([ONE, node(2, ctrl=[7])]),
        a_set([ONE, node(2, ctrl=[1])]),
        "chakra",
    ),
    "self-dependency": (a_set([ONE, node(2, deps=[2])]), FINE, "chakra"),
    "dependency-cycle": (
        a_set([node(1, deps=[3]), node(2, deps=[1]), node(3, deps=[2])]),
        a_set([node(1), node(2, deps=[1]), node(3, deps=[2, 1])]),
        "chakra",
    ),
    "control-dependency-cycle": (
        a_set([node(1, ctrl=[2]), node(2, deps=[1])]),
        a_set([node(1, ctrl=[]), node(2, deps=[1], ctrl=[1])]),
        "chakra",
    ),
    "never-starts": (
        a_set([node(1, deps=[2]), node(2, deps=[1]), node(3, deps=[2])]),
        a_set([node(1), node(2, deps=[1]), node(3, deps=[2])]),
        "chakra",
    ),
    "repeated-dependency": (a_set([ONE, node(2, deps=[1, 1])]), FINE, "chakra"),
    "isolated-node": (
        a_set([ONE, AFTER, node(3)]),
        a_set([ONE, AFTER, node(3, deps=[2])]),
        "chakra",
    ),
    "communication-attribute": (
        a_set([node(1, "COMM_SEND_NODE", comm_size=8, comm_tag=0)]),
        a_set([send(1, 1)], [receive(1, 0)]),
        "chakra",
    ),
    "collective-type": (
        a_set([node(1, "COMM_COLL_NODE", comm_type=12, comm_size=8)]),
        a_set([node(1, "COMM_COLL_NODE", comm_type=7, comm_size=8)]),
        "chakra",
    ),
    "communication-size": (
        a_set([collective(1, size=0)]),
        a_set([collective(1, "BARRIER", size=0)]),
        "chakra",
    ),
    "communication-on-host": (
        a_set([collective(1, is_cpu_op=True)]),
        a_set([collective(1, is_cpu_op=False)]),
        "chakra",
    ),
    "message-peer": (a_set([send(1, 0)]), a_set([send(1, 1)], [receive(1, 0)]), "chakra"),
    "group-file": (a_set([ONE], groups={"1": "all"}), a_set([ONE], groups={"1": [0]}), "chakra"),
    "old-group": (
        a_set(*[[collective(1, comm_group=("int32_val", 2))]] * 2),
        a_set(*[[collective(1, comm_group=("int32_val", 2), pg_name="0")]] * 2),
        "chakra",
    ),
    "unknown-group": (
        a_set([collective(1, pg_name="2")], [collective(1, pg_name="2")], groups=BOTH),
        a_set([collective(1, pg_name="1")], [collective(1, pg_name="1")], groups=BOTH),
        "chakra",
    ),
    "not-a-member": (
        a_set([collective(1, pg_name="1")], [ONE], groups={"1": [1]}),
        a_set([collective(1, pg_name="1")], [ONE], groups={"1": [0]}),
        "chakra",
    ),
    "collective-count": (
        a_set([collective(1), collective(2, deps=[1])], [collective(1)]),
        PAIR,
        "chakra",
    ),
    "collective-order": (
        a_set(
            [collective(1), collective(2, "ALL_GATHER", deps=[1])],
            [collective(1, "ALL_GATHER"), collective(2, deps=[1])],
        ),
        a_set(*[[collective(1), collective(2, "ALL_GATHER", deps=[1])]] * 2),
        "chakra",
    ),
    "collective-kind": (a_set([collective(1)], [collective(1, "BROADCAST")]), PAIR, "chakra"),
    "collective-size": (a_set([collective(1)], [collective(1, size=2048)]), PAIR, "chakra"),
    "unmatched-message": (
        a_set([send(1, 1)], [receive(1, 0, comm_tag=3)]),
        a_set([send(1, 1)], [receive(1, 0)]),
        "chakra",
    ),
    "message-size": (
        a_set([send(1, 1)], [receive(1, 0, comm_size=9)]),
        a_set([send(1, 1)], [receive(1, 0)]),
        "chakra",
    ),
    "deadlock": (
        a_set([receive(1, 1), send(2, 1, [1])], [receive(1, 0), send(2, 0, [1])]),
        a_set([receive(1, 1), send(2, 1, [1])], [send(1, 0), receive(2, 0, [1])]),
        "chakra",
    ),
    "unsupported-node": (a_set([node(1, "METADATA_NODE")]), FINE, "astra-sim"),
    "unsupported-collective": (
        a_set([collective(1, "GATHER")]),
        a_set([collective(1, "BROADCAST")]),
        "astra-sim",
    ),
    "replayed-broadcast": (
        a_set([collective(1, "BROADCAST", us=0)]),
        a_set([collective(1, "BROADCAST")]),
        "astra-sim",
    ),
    "group-name": (
        a_set([collective(1, pg_name="tp")], groups={"tp": [0]}),
        a_set([collective(1, pg_name="1")], groups={"1": [0]}),
        "astra-sim",
    ),
    "no-group-file": (
        a_set(*[[collective(1, pg_name="1")]] * 2),
        a_set(*[[collective(1, pg_name="0"), collective(2, pg_name="", deps=[1])]] * 2),
        "astra-sim",
    ),
    "one-rank": (FINE, PAIR, "astra-sim"),
    "control-dependency": (a_set([ONE, node(2, ctrl=[1])]), FINE, "astra-sim"),
    "host-node": (a_set([node(1, is_cpu_op=True)]), a_set([node(1, is_cpu_op=False)]), "astra-sim"),
    "memory-node": (a_set([node(1, "MEM_LOAD_NODE")]), FINE, "astra-sim"),
    "host-node-last": (
        a_set([node(1, is_cpu_op=True), send(2, 1, deps=[1])], [receive(1, 0)]),
        a_set([node(1), send(2, 1, deps=[1])], [receive(1, 0)]),
        "astra-sim",
    ),
    "group-of-one": (
        a_set([collective(1, pg_name="1")], [ONE], groups={"1": [0]}),
        a_set([collective(1, "BROADCAST", pg_name="1")], [ONE], groups={"1": [0]}),
        "astra-sim",
    ),
    "collective-number": (
        a_set(*_UNEVEN, groups={"1": [1, 2]}),
        a_set(*_UNEVEN[1:], groups={"1": [0, 1]}),
        "astra-sim",
    ),
}


def broken(home: Path, target: Target = "chakra") -> dict[str, Problem]:
    return {problem.rule: problem for problem in validate(home, target=target).problems}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("rule", CASES)
def test_what_breaks_a_rule_is_found_and_what_does_not_is_left_alone(
    rule: str, tmp_path: Path
) -> None:
    wrong, right, target = CASES[rule]
    wrong(tmp_path / "wrong")
    right(tmp_path / "right")
    found = broken(tmp_path / "wrong", target)
    assert rule in found
    assert found[rule].examples
    assert found[rule].remedy == RULES[rule].remedy
    assert rule not in broken(tmp_path / "right", target)


def test_every_rule_has_a_case_and_a_section_in_the_reference() -> None:
    assert set(CASES) == set(RULES)
    page = (ROOT / "docs" / "reference" / "validation-rules.md").read_text(encoding="utf-8")
    assert {line[4:] for line in page.splitlines() if line.startswith("### ")} == set(RULES)


def zipped_under_a_plain_name(home: Path) -> Path:
    write_set(home, *[[ONE]] * 2, ending=".et.gz")
    for path in home.glob("*.et.gz"):
        path.rename(path.with_suffix(""))
    return home


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        ("file-compressed", zipped_under_a_plain_name),
        ("no-nodes", a_set([ONE], [])),
        ("memory-node", a_set(*[[node(1, "MEM_STORE_NODE")]] * 2)),
        ("no-group-file", CASES["no-group-file"][0]),
        ("one-rank", FINE),
    ],
)
def test_what_astra_sim_refuses_is_an_error_for_it_and_none_for_others(
    rule: str, make: Make, tmp_path: Path
) -> None:
    make(tmp_path)
    problems = broken(tmp_path, "astra-sim")
    assert {name for name, problem in problems.items() if problem.severity == "error"} == {rule}
    assert all(problem.severity == "warning" for problem in broken(tmp_path).values())


def test_one_file_of_a_set_may_have_others_elsewhere(tmp_path: Path) -> None:
    write_set(tmp_path, [ONE, AFTER], [ONE, AFTER])
    [problem] = validate(tmp_path / "w.0.et", target="astra-sim").problems
    assert (problem.rule, problem.severity) == ("one-rank", "warning")


@pytest.mark.parametrize("target", ["chakra", "astra-sim"])
def test_a_right_set_has_no_problems_for_anybody(tmp_path: Path, target: Target) -> None:
    ranks = [
        [
            node(1),
            collective(2, deps=[1], pg_name="1"),
            send(3, 1, [2]),
            receive(4, 1, [2]),
            node(5, deps=[3, 4]),
        ],
        [
            node(1),
            collective(2, deps=[1], pg_name="1"),
            send(3, 0, [2]),
            receive(4, 0, [2]),
            node(5, deps=[3, 4]),
        ],
    ]
    verdict = validate(write_set(tmp_path, *ranks, groups=BOTH), target=target)
    assert verdict.problems == ()
    assert [(rank, count) for _, rank, count in verdict.files] == [(0, 5), (1, 5)]


def test_a_circle_is_named_node_by_node(tmp_path: Path) -> None:
    home = write_set(
        tmp_path,
        [node(1, deps=[3], name="a"), node(2, deps=[1], name="b"), node(3, deps=[2], name="c")],
    )
    (example,) = broken(home)["dependency-cycle"].examples
    assert sorted(example.message.replace(", which", "").split(" waits for ")) == sorted(
        [
            "node 1 `a`",
            "node 2 `b`",
            "node 3 `c`",
            f"node {example.node} `{'abc'[example.node - 1]}`",
        ]
    )


def test_a_circle_of_a_hundred_thousand_nodes_is_no_recursion(tmp_path: Path) -> None:
    count = 100_000
    found = broken(write_set(tmp_path, [node(i, deps=[(i + 1) % count]) for i in range(count)]))
    assert found["dependency-cycle"].count == 1
    assert len(found["dependency-cycle"].nodes) == count
    assert "never-starts" not in found


def test_who_waits_for_whom_is_said_where_orders_differ(tmp_path: Path) -> None:
    one = [collective(1, size=8, name="grads"), collective(2, size=16, deps=[1], name="norm")]
    other = [collective(1, size=16, name="norm"), collective(2, size=8, deps=[1], name="grads")]
    problem = broken(write_set(tmp_path, one, other))["collective-order"]
    assert problem.severity == "error"
    assert "rank 0 (node 1 `grads`)" in problem.examples[0].message
    assert "rank 1 (node 1 `norm`): each waits for the other" in problem.examples[0].message


def test_recorded_operations_are_joined_by_their_numbers_however_threads_stand_in_the_files(
    tmp_path: Path,
) -> None:
    def begun(made, us: int):
        made.start_time_micros = us
        return made

    def rank(*order: int) -> list:
        return [
            begun(collective(10 + k, size=8 * q, comm_seq=q), 100 * q) for k, q in enumerate(order)
        ]

    home = write_set(tmp_path, rank(1, 2), rank(2, 1))
    assert broken(home) == {}
    assert "collective-order" in broken(home, "astra-sim")  # which takes what is ready by its id


def test_a_size_differs_at_a_number_not_at_a_place(tmp_path: Path) -> None:
    one = [collective(1, size=8, comm_seq=1), collective(2, size=16, comm_seq=2)]
    other = [collective(1, size=32, comm_seq=2), collective(2, size=8, comm_seq=1)]
    problem = broken(write_set(tmp_path, one, other))["collective-size"]
    assert problem.nodes == (2,)


def test_numbers_that_not_all_have_join_nothing(tmp_path: Path) -> None:
    one = [collective(1, size=8, comm_seq=1), collective(2, size=16, comm_seq=2)]
    other = [collective(1, size=16, comm_seq=2), collective(2, size=8)]
    assert "collective-order" in broken(write_set(tmp_path, one, other))


def test_groups_in_different_orders_are_a_deadlock_where_dependencies_force_them(
    tmp_path: Path,
) -> None:
    groups = {"1": [0, 1], "2": [0, 1]}
    one = [collective(1, pg_name="1"), collective(2, pg_name="2", deps=[1])]
    other = [collective(1, pg_name="2"), collective(2, pg_name="1", deps=[1])]
    problem = broken(write_set(tmp_path, one, other, groups=groups))["deadlock"]
    assert sorted(problem.examples[0].message.split("; ")) == [
        "rank 0: node 2 `n2` waits for node 1 `n1`",
        "rank 1: node 2 `n2` waits for node 1 `n1`",
    ]


def test_a_long_wait_on_one_rank_is_said_in_one_breath(tmp_path: Path) -> None:
    one = [receive(1, 1), *(node(i, deps=[i - 1]) for i in range(2, 9)), send(9, 1, [8])]
    other = [receive(1, 0), send(2, 0, [1])]
    problem = broken(write_set(tmp_path, one, other))["deadlock"]
    assert sorted(problem.examples[0].message.split("; ")) == [
        "rank 0: node 1 `n1` waits for node 2 `n2` of rank 1",
        "rank 0: node 9 `n9` waits for node 1 `n1` (over 7 nodes between)",
        "rank 1: node 1 `n1` waits for node 9 `n9` of rank 0",
        "rank 1: node 2 `n2` waits for node 1 `n1`",
    ]


def test_groups_in_different_orders_without_dependencies_hang_only_who_does_one_thing_at_a_time(
    tmp_path: Path,
) -> None:
    groups = {"1": [0, 1], "2": [0, 1]}
    one = [collective(1, pg_name="1"), collective(2, pg_name="2")]
    other = [collective(1, pg_name="2"), collective(2, pg_name="1")]
    home = write_set(tmp_path, one, other, groups=groups)
    assert broken(home)["collective-order"].severity == "warning"
    assert broken(home, "astra-sim")["collective-order"].severity == "error"


def test_uneven_all_to_all_is_right_but_not_for_astra_sim(tmp_path: Path) -> None:
    home = write_set(tmp_path, [collective(1, "ALL_TO_ALL", 8)], [collective(1, "ALL_TO_ALL", 16)])
    assert broken(home)["collective-size"].severity == "warning"
    assert broken(home, "astra-sim")["collective-size"].severity == "error"


def test_one_file_of_a_set_is_not_blamed_for_the_others(tmp_path: Path) -> None:
    write_set(tmp_path, [send(1, 1)], [receive(1, 0)])
    problems = validate(tmp_path / "w.0.et").problems
    assert [(p.rule, p.severity) for p in problems] == [("missing-rank", "warning")]


def test_all_ids_are_in_the_verdict_and_few_in_words(tmp_path: Path) -> None:
    problem = broken(write_set(tmp_path, [node(i, deps=[1000]) for i in range(50)]))[
        "dangling-dependency"
    ]
    assert problem.nodes.tolist() == list(range(50))
    assert (problem.count, len(problem.examples)) == (50, 5)


def test_two_sets_in_one_directory_are_two_sets(tmp_path: Path) -> None:
    write_set(tmp_path, [collective(1)])
    files.write(tmp_path / "other.0.et", GlobalMetadata(version="1"), [collective(1, size=8)])
    assert validate(tmp_path).problems == ()


def test_random_orders_are_settled_as_a_plain_search_settles_them() -> None:
    import random

    import numpy as np

    from traceloom.workload.chakra.check_files import Arcs, find_cycles, sort_topologically

    chance = random.Random(7)
    for _ in range(300):
        count = chance.randint(1, 12)
        pairs = {
            (chance.randrange(count), chance.randrange(count)) for _ in range(chance.randint(0, 16))
        }
        pairs = {(a, b) for a, b in pairs if a != b}
        arcs = Arcs(
            np.array([a for a, _ in pairs], dtype=np.int64),
            np.array([b for _, b in pairs], dtype=np.int64),
        )
        settled = sort_topologically(count, arcs, np.arange(count))
        done: set[int] = set()
        while new := {
            n for n in range(count) if n not in done and all(a in done for a, b in pairs if b == n)
        }:
            done |= new
        assert set(settled.order.tolist()) == done
        place = {row: at for at, row in enumerate(settled.order.tolist())}
        assert all(place[a] < place[b] for a, b in pairs if b in place)
        rings = find_cycles(arcs, settled.stuck)
        assert bool(rings) == (len(done) < count)
        for ring in rings:
            assert all(
                (after, before) in pairs
                for before, after in zip(ring, [*ring[1:], ring[0]], strict=True)
            )


class TestCommand:
    def test_fine_is_exit_code_0_and_one_line(self, tmp_path: Path, capsys) -> None:
        FINE(tmp_path)
        assert main(["validate", str(tmp_path)]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0] == "1 file, 2 nodes, for chakra: nothing is wrong"
        assert said[1].startswith("Next: traceloom show ")

    def test_wrong_is_exit_code_5_with_node_and_remedy(self, tmp_path: Path, capsys) -> None:
        write_set(tmp_path, [ONE, node(2, deps=[7])])
        assert main(["validate", str(tmp_path)]) == 5
        said = capsys.readouterr()
        assert "node 2 `n2` waits for node 7, which is not there" in said.out
        assert RULES["dangling-dependency"].remedy in said.out
        assert "1 error in 1 of 1 file: not fit for chakra" in said.err

    def test_what_all_files_have_is_said_once(self, tmp_path: Path, capsys) -> None:
        write_set(tmp_path, *[[node(1), node(2, deps=[7])]] * 3)
        assert main(["validate", str(tmp_path)]) == 5
        out = capsys.readouterr().out
        assert out.count("dangling-dependency") == 1
        assert "dangling-dependency (3 times)" in out
        assert "and in 2 more files" in out

    def test_warnings_pass_unless_strict(self, tmp_path: Path, capsys) -> None:
        write_set(tmp_path, [ONE, node(2, deps=[1, 1])])
        assert main(["validate", str(tmp_path)]) == 0
        assert main(["validate", str(tmp_path), "--strict"]) == 5

    def test_json_holds_the_verdict(self, tmp_path: Path, capsys) -> None:
        write_set(tmp_path, [ONE, node(2, deps=[7])])
        assert main(["validate", str(tmp_path), "--json"]) == 5
        verdict = json.loads(capsys.readouterr().out)
        assert (verdict["format"], verdict["valid"], verdict["errors"]) == (
            "traceloom-validation",
            False,
            1,
        )
        assert verdict["problems"][0]["nodes"] == [2]
        assert verdict["problems"][0]["learn_more"].endswith(
            "validation-rules/#dangling-dependency"
        )

    def test_names_reach_the_terminal_without_control_characters(
        self, tmp_path: Path, capsys
    ) -> None:
        write_set(tmp_path, [node(1, deps=[7], name="\x1b[31mred")])
        main(["validate", str(tmp_path)])
        assert "\x1b" not in capsys.readouterr().out

    def test_large_sizes_are_said_readably(self, tmp_path: Path, capsys) -> None:
        write_set(tmp_path, [collective(1, size=6_054_912)], [collective(1, size=1_207_296)])
        assert main(["validate", str(tmp_path)]) == 5
        assert "6,054,912 bytes" in capsys.readouterr().out

    def test_the_group_file_is_not_one_of_the_files(self, tmp_path: Path, capsys) -> None:
        write_set(tmp_path, [collective(1), node(2, deps=[7])], [collective(1), node(2, deps=[7])])
        (tmp_path / "comm_groups.json").write_text('{"1": "x"}')
        assert main(["validate", str(tmp_path)]) == 5
        out = capsys.readouterr().out
        assert "group-file" in out
        assert "in 2 of 2 files and the group file" in out

    def test_another_kind_of_file_is_refused_in_a_sentence(self, tmp_path: Path, capsys) -> None:
        (tmp_path / "w.0.et").write_text('{"traceEvents": []}')
        assert main(["validate", str(tmp_path)]) == 3
        said = capsys.readouterr().err
        assert "this is JSON, not a Chakra trace in binary form" in said
        assert "traceloom convert makes .et of Chakra nodes in JSON" in said

    def test_a_graph_is_named_with_what_to_do_with_it(self, tmp_path: Path, capsys) -> None:
        path = tmp_path / "job.graph"
        path.write_bytes(b"PK\x03\x04 and more")
        assert main(["validate", str(path)]) == 3
        assert "traceloom convert makes .et of a graph" in capsys.readouterr().err

    def test_an_output_without_unicode_gets_other_signs(self, tmp_path: Path) -> None:
        write_set(tmp_path, [node(1, deps=[7], name="größe")])
        done = subprocess.run(
            [sys.executable, "-m", "traceloom", "validate", str(tmp_path)],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 5, done.stderr
        assert done.stdout.startswith("x dangling-dependency")
        assert "gr\\xf6\\xdfe" in done.stdout


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no"):
        validate(tmp_path / "nothing.et")
    with pytest.raises(InputError, match=r"holds no \.et files"):
        validate(tmp_path)
    write_set(tmp_path, [ONE])
    (tmp_path / "comm_groups.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="group file"):
        validate(tmp_path)


MEMBERS = st.one_of(
    st.tuples(st.just("int64_val"), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just("uint64_val"), st.integers(0, 2**64 - 1)),
    st.tuples(st.just("sint32_val"), st.integers(-(2**31), 2**31 - 1)),
    st.tuples(st.just("double_val"), st.floats()),
    st.tuples(st.just("string_val"), st.text(max_size=5)),
    st.tuples(st.just("bool_val"), st.booleans()),
)


def _raw(number, kind, deps, ctrl, us, name, attributes):
    made = node(number, deps=deps, ctrl=ctrl, us=us, name=name)
    made.type = kind
    made.attr.extend(attribute(key, value) for key, value in attributes)
    return made


IDS = st.one_of(st.integers(0, 6), st.sampled_from([2**63, 2**64 - 1]))
NODES = st.builds(
    _raw,
    IDS,
    st.one_of(st.integers(0, 8), st.sampled_from([-1, 2**31 - 1])),
    st.lists(IDS, max_size=4),
    st.lists(IDS, max_size=2),
    st.sampled_from([0, 1, 2**64 - 1]),
    st.text(max_size=4),
    st.lists(st.tuples(st.sampled_from([*EXPECTED, "other"]), MEMBERS), max_size=6),
)


@given(
    st.lists(st.lists(NODES, max_size=6), min_size=1, max_size=3),
    st.sampled_from(["chakra", "astra-sim"]),
)
def test_whatever_the_files_hold_there_is_a_verdict(ranks: list, target: Target) -> None:
    with tempfile.TemporaryDirectory() as home:
        verdict = validate(write_set(Path(home), *ranks, groups={"1": [0, 1]}), target=target)
        assert json.loads(json.dumps(verdict.to_dict()))["errors"] == verdict.errors
        assert all(problem.rule in RULES for problem in verdict.problems)


@pytest.mark.thorough
def test_a_file_cut_anywhere_is_damaged_or_refused(tmp_path: Path) -> None:
    write_set(tmp_path, [node(1), collective(2, deps=[1])])
    path = tmp_path / "w.0.et"
    whole = path.read_bytes()
    ends = [0]
    while ends[-1] < len(whole):
        ends.append(ends[-1] + 1 + whole[ends[-1]])  # every message here is shorter than 128 bytes
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        try:
            found = broken(tmp_path)
        except InputError:
            assert length < ends[1]
        else:
            assert ("file-damage" in found) == (length not in ends)


@pytest.mark.data
class TestPublicFiles:
    def test_custom_ring_collectives_are_right(self, shared_data: Path) -> None:
        files = sorted((shared_data / "chakra").glob("custom_ring_8npus.*.et"))
        assert len(files) == 8
        assert validate(*files).problems == ()
        assert validate(*files, target="astra-sim").problems == ()

    def test_a_file_of_the_converter_of_2023_has_the_known_defects(self, shared_data: Path) -> None:
        path = shared_data / "chakra" / "converted_2023.0.et.gz"
        found = broken(path)
        assert (
            found["dangling-control-dependency"].count == 1277
        )  # the removed process root and tensors' ids
        assert found["self-dependency"].count == 383
        assert found["communication-attribute"].count == 14  # c10d:: calls typed as collectives
        assert found["communication-on-host"].count == 14
        assert "dependency-cycle" not in found  # data dependencies alone are in order
        assert "control-dependency-cycle" in found
        assert found.keys() < broken(path, "astra-sim").keys()


@pytest.mark.parametrize(("value", "severity"), [(0, "warning"), (1, "error")])
def test_an_attribute_of_another_type_is_a_warning_where_all_read_the_same(
    tmp_path: Path, value: int, severity: str
) -> None:
    write_set(tmp_path, [node(1, is_cpu_op=("int32_val", value))], [ONE])
    assert broken(tmp_path)["attribute-type"].severity == severity
    assert broken(tmp_path, "astra-sim")["attribute-type"].severity == "warning"


def test_a_group_file_of_another_name_is_found(tmp_path: Path) -> None:
    home = write_set(tmp_path, *[[collective(1, pg_name="1")]] * 2, [ONE])
    (home / "workload.json").write_text('{"1": [0, 1]}', encoding="utf-8")
    (home / "network.json").write_text('{"topology": ["Ring"]}', encoding="utf-8")
    assert set(broken(home, "astra-sim")) == set()
    (home / "others.json").write_text('{"1": [0, 1]}', encoding="utf-8")
    assert set(broken(home, "astra-sim")) == {"no-group-file"}  # which of the two?
    assert validate(home, target="astra-sim", groups=home / "others.json").errors == 0
