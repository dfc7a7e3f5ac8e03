"""Generated collectives, message by message: what reaches whom, in which order, and what it takes with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from traceloom.errors import UsageError
from traceloom.formats.chakra.et_pb2 import CollectiveCommType, NodeType
from traceloom.workload.chakra.generate import (
    KINDS,
    CollectiveOptions,
    Generated,
    PipelineOptions,
    RankProgram,
    TransformerOptions,
    build_stage_schedule,
    generate_collectives,
    generate_pipeline,
    generate_transformer,
)
from traceloom.workload.collective_algorithms import KINDS_BY_ALGORITHM

SEND, RECEIVE = NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE
Nodes = list[dict[str, Any]]

ABLE = {algorithm: tuple(sorted(kinds)) for algorithm, kinds in KINDS_BY_ALGORITHM.items()}
EACH = [(algorithm, kind) for algorithm, able in ABLE.items() for kind in able]


def one(kind: str, ranks: int, algorithm: str, compute_us: int = 0) -> list[Nodes]:
    """A collective by an algorithm."""
    if algorithm == "halving-doubling" and ranks & (ranks - 1):
        pytest.skip("for powers of two")
    if algorithm == "two-level" and ranks % 8:
        pytest.skip("for whole hosts of 8")
    return made(generate_collectives(CollectiveOptions(kind, ranks, 1000, algorithm, compute_us)))


def node_mask(program: RankProgram) -> Nodes:
    """The nodes of one rank, each with the ids that it waits for."""
    plain = program.plain()
    awaited = defaultdict(list)
    for row, number in zip(
        plain.dependencies.row.tolist(), plain.dependencies.id.tolist(), strict=True
    ):
        awaited[row].append(number)
    return [
        {**row, "after": awaited[place]} for place, row in enumerate(plain.nodes.rows(named=True))
    ]


def made(generated: Generated) -> list[Nodes]:
    return [node_mask(program) for program in generated.programs]


def messages(ranks: list[Nodes], kind: int = SEND) -> Counter[tuple[int, int, int, int]]:
    """(from, to, tag, bytes) of all sends or receives."""
    return Counter(
        (n["comm_src"], n["comm_dst"], n["comm_tag"], n["comm_size"])
        for rank in ranks
        for n in rank
        if n["type"] == kind
    )


def reached(ranks: list[Nodes]) -> list[dict[int, set[int]]]:
    """Of every node, the ranks from which something has come when it ends, over messages and dependencies."""
    seen: list[dict[int, set[int]]] = [{} for _ in ranks]
    sends = {
        (n["comm_src"], n["comm_dst"], n["comm_tag"]): (rank, n["id"])
        for rank, nodes in enumerate(ranks)
        for n in nodes
        if n["type"] == SEND
    }
    missing = sum(map(len, ranks))
    while missing:
        before = missing
        for rank, nodes in enumerate(ranks):
            for n in nodes:
                needs = [(rank, number) for number in n["after"]]
                if n["type"] == RECEIVE:
                    needs.append(sends[n["comm_src"], n["comm_dst"], n["comm_tag"]])
                if n["id"] in seen[rank] or any(
                    number not in seen[other] for other, number in needs
                ):
                    continue
                seen[rank][n["id"]] = {rank}.union(
                    *(seen[other][number] for other, number in needs)
                )
                missing -= 1
        assert missing < before, "nodes wait for each other"
    return seen


@pytest.mark.parametrize(("algorithm", "kind"), EACH)
@pytest.mark.parametrize("ranks", [2, 3, 6, 16])
def test_everything_that_is_sent_is_received_once_with_its_size(
    algorithm: str, kind: str, ranks: int
) -> None:
    nodes = one(kind, ranks, algorithm, 2)
    sent = messages(nodes)
    assert sent == messages(nodes, RECEIVE)
    assert all(source != to for source, to, _, _ in sent)
    # no two messages between the same ranks share a tag
    assert max(Counter((source, to, tag) for source, to, tag, _ in sent.elements()).values()) == 1


@pytest.mark.parametrize(("algorithm", "kind"), EACH)
@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
def test_data_of_those_who_have_some_reach_those_who_need_them(
    algorithm: str, kind: str, ranks: int
) -> None:
    nodes = one(kind, ranks, algorithm)
    seen = reached(nodes)
    at_the_end = [seen[rank][nodes[rank][-1]["id"]] for rank in range(ranks)]
    everybody = set(range(ranks))
    if kind in ("broadcast", "scatter"):
        assert all(0 in ends for ends in at_the_end)
    elif kind in ("reduce", "gather"):
        assert at_the_end[0] == everybody
    else:
        assert at_the_end == [everybody] * ranks


@pytest.mark.parametrize(("algorithm", "kind"), EACH)
def test_the_last_node_waits_for_all_others(algorithm: str, kind: str) -> None:
    for nodes in one(kind, 8, algorithm, 2):
        by_id = {n["id"]: n for n in nodes}
        assert [n["name"] for n in nodes if n["name"].startswith("end of")] == [f"end of {kind}"]
        assert nodes[-1]["duration_us"] == 0
        before, todo = set(), [nodes[-1]["id"]]
        while todo:
            number = todo.pop()
            if number not in before:
                before.add(number)
                todo += by_id[number]["after"]
        assert before == set(by_id)


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_of_one_node_follows_its_computation(kind: str) -> None:
    options = CollectiveOptions(kind, 3, 600, compute_us=4)
    for nodes in made(generate_collectives(options)):
        assert [n["after"] for n in nodes] == [[], [1]]
        assert [n["duration_us"] for n in nodes] == [4, 0]
        assert nodes[1]["comm_type"] == CollectiveCommType.Value(kind.upper())
        assert nodes[1]["comm_size"] == (0 if kind == "barrier" else 600)
        assert {n["pg_name"] for n in nodes} == {None}


class TestRing:
    def test_pieces_of_an_all_reduce_of_three_go_round_twice(self) -> None:
        """10 bytes in parts of 3, 3 and 4: rank r first hands on part r, then what it has just reduced."""
        nodes = made(generate_collectives(CollectiveOptions("all_reduce", 3, 10, algorithm="ring")))
        pieces = [3, 3, 4]
        expected = Counter()
        for rank in range(3):
            # rank r sends r, r-1 while it reduces, then r+1, r while it gathers
            for tag, piece in enumerate([rank, rank - 1, rank + 1, rank]):
                expected[rank, (rank + 1) % 3, tag, pieces[piece % 3]] += 1
        assert messages(nodes) == expected

    def test_a_reduce_scatter_leaves_each_rank_its_own_part(self) -> None:
        nodes = made(
            generate_collectives(CollectiveOptions("reduce_scatter", 3, 10, algorithm="ring"))
        )
        for rank, of_rank in enumerate(nodes):
            last = [n for n in of_rank if n["type"] == RECEIVE][-1]
            assert last["comm_size"] == [3, 3, 4][rank]
            first = next(n for n in of_rank if n["type"] == SEND)
            assert first["comm_size"] == [4, 3, 3][rank]  # of its predecessor, which gets it last

    def test_an_all_gather_sends_whole_parts(self) -> None:
        nodes = made(generate_collectives(CollectiveOptions("all_gather", 4, 10, algorithm="ring")))
        assert messages(nodes) == Counter(
            {(r, (r + 1) % 4, tag, 10): 1 for r in range(4) for tag in range(3)}
        )

    def test_a_broadcast_goes_round_once_and_ends_before_the_first(self) -> None:
        nodes = made(generate_collectives(CollectiveOptions("broadcast", 4, 10, algorithm="ring")))
        assert messages(nodes) == Counter({(r, r + 1, r, 10): 1 for r in range(3)})
        for of_rank in nodes[1:3]:  # who is in the middle passes on what has come
            assert [(n["type"], n["after"]) for n in of_rank[:2]] == [(RECEIVE, []), (SEND, [1])]

    def test_each_step_sends_what_the_step_before_has_brought(self) -> None:
        (nodes, *_) = made(
            generate_collectives(
                CollectiveOptions("all_reduce", 3, 9, algorithm="ring", compute_us=7)
            )
        )
        shown = [(n["name"], n["after"]) for n in nodes]
        assert shown == [
            ("compute", []),
            ("send to 1", [1]),
            ("receive from 2", [1]),
            ("reduce", [3]),
            ("send to 1", [2, 4]),
            ("receive from 2", [4]),
            ("reduce", [6]),
            ("send to 1", [5, 7]),
            ("receive from 2", [7]),
            ("send to 1", [8, 9]),
            ("receive from 2", [9]),
            ("end of all_reduce", [10, 11]),
        ]
        assert [n["duration_us"] for n in nodes if n["name"] == "reduce"] == [7, 7]


class TestTree:
    UP = ((1, 0), (3, 2), (5, 4), (2, 0), (4, 0))  # a binomial tree of six

    @pytest.mark.parametrize(
        ("kind", "up", "down"), [("reduce", 1, 0), ("broadcast", 0, 1), ("all_reduce", 1, 1)]
    )
    def test_messages_go_along_a_binomial_tree(self, kind: str, up: int, down: int) -> None:
        nodes = made(generate_collectives(CollectiveOptions(kind, 6, 100, algorithm="tree")))
        ways = Counter((source, to) for source, to, _, _ in messages(nodes).elements())
        assert ways == Counter([*self.UP] * up + [(to, source) for source, to in self.UP] * down)
        assert {size for *_, size in messages(nodes)} == {100}

    @pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 9, 16])
    def test_nobody_is_further_from_the_root_than_the_tree_is_deep(self, ranks: int) -> None:
        nodes = made(
            generate_collectives(CollectiveOptions("reduce", ranks, 100, algorithm="tree"))
        )
        parent = {source: to for source, to, _, _ in messages(nodes)}
        assert set(parent) == set(range(1, ranks))
        for rank in range(1, ranks):
            steps = 0
            while rank:
                rank, steps = parent[rank], steps + 1  # noqa: PLW2901
            assert steps <= (ranks - 1).bit_length()

    def test_a_rank_sends_up_only_what_it_has_reduced(self) -> None:
        ranks = made(
            generate_collectives(
                CollectiveOptions("reduce", 4, 100, algorithm="tree", compute_us=3)
            )
        )
        assert [(n["name"], n["after"]) for n in ranks[2]] == [
            ("compute", []),
            ("receive from 3", [1]),
            ("reduce", [2]),
            ("send to 0", [1, 3]),
            ("end of reduce", [3, 4]),
        ]
        assert [n["name"] for n in ranks[0]].count("reduce") == 2
        assert [n["name"] for n in ranks[3]].count("reduce") == 0


class TestDirect:
    def test_parts_of_an_all_to_all_are_those_of_who_gets_them(self) -> None:
        nodes = made(
            generate_collectives(CollectiveOptions("all_to_all", 3, 10, algorithm="direct"))
        )
        pieces = [3, 3, 4]
        assert messages(nodes) == Counter(
            {(r, to, 0, pieces[to]): 1 for r in range(3) for to in range(3) if r != to}
        )

    def test_an_all_reduce_scatters_then_gathers(self) -> None:
        nodes = made(
            generate_collectives(CollectiveOptions("all_reduce", 3, 10, algorithm="direct"))
        )
        pieces = [3, 3, 4]
        pairs = [(r, to) for r in range(3) for to in range(3) if r != to]
        assert messages(nodes) == Counter(
            {
                **{(r, to, 0, pieces[to]): 1 for r, to in pairs},
                **{(r, to, 1, pieces[r]): 1 for r, to in pairs},
            }
        )

    def test_sends_do_not_wait_for_each_other(self) -> None:
        for nodes in made(
            generate_collectives(
                CollectiveOptions("all_to_all", 5, 100, algorithm="direct", compute_us=3)
            )
        ):
            assert [n["after"] for n in nodes[1:9]] == [[1]] * 8
            assert nodes[-1]["after"] == list(range(2, 10))

    @pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
    def test_a_rank_reduces_as_often_as_it_has_peers(self, kind: str) -> None:
        for nodes in made(
            generate_collectives(CollectiveOptions(kind, 5, 100, algorithm="direct", compute_us=3))
        ):
            assert [n["duration_us"] for n in nodes if n["name"] == "reduce"] == [4 * 3]

    @pytest.mark.parametrize(
        ("kind", "outward", "sizes"),
        [
            ("broadcast", True, [10, 10]),
            ("reduce", False, [10, 10]),
            ("scatter", True, [3, 4]),
            ("gather", False, [3, 4]),
        ],
    )
    def test_the_root_exchanges_with_every_other_one(
        self, kind: str, outward: bool, sizes: list[int]
    ) -> None:
        nodes = made(
            generate_collectives(CollectiveOptions(kind, 3, 10, algorithm="direct", compute_us=5))
        )
        expected = {((0, r) if outward else (r, 0)) + (0, sizes[r - 1]): 1 for r in (1, 2)}
        assert messages(nodes) == Counter(expected)
        reduced = [n["duration_us"] for n in nodes[0] if n["name"] == "reduce"]
        assert reduced == ([2 * 5] if kind == "reduce" else [])
        assert not [n for of_rank in nodes[1:] for n in of_rank if n["name"] == "reduce"]


@pytest.mark.parametrize(("algorithm", "able"), ABLE.items())
def test_what_is_refused_names_what_there_is(algorithm: str, able: tuple[str, ...]) -> None:
    for kind in KINDS:
        options = CollectiveOptions(kind, 8, 100, algorithm=algorithm)
        if kind in able:
            assert generate_collectives(options).totals["messages"] > 0
        else:
            with pytest.raises(UsageError) as caught:
                generate_collectives(options)
            assert (caught.value.slug, caught.value.hint) == (
                "cannot-generate",
                f"it does {', '.join(able)}",
            )


@pytest.mark.parametrize(("size", "ranks"), [(3, 4), (0, 2), (99, 100)])
def test_a_byte_for_each_rank_is_the_least(size: int, ranks: int) -> None:
    with pytest.raises(UsageError) as caught:
        generate_collectives(CollectiveOptions("all_reduce", ranks, size))
    assert caught.value.slug == "cannot-generate"
    assert (
        generate_collectives(CollectiveOptions("all_reduce", ranks, ranks)).totals["comm_bytes"]
        == [ranks] * ranks
    )
    assert (
        generate_collectives(CollectiveOptions("barrier", ranks, size)).totals["comm_bytes"]
        == [0] * ranks
    )


def forward(*numbers: int) -> list[tuple[str, int]]:
    return [("forward", number) for number in numbers]


class TestPipeline:
    @pytest.mark.parametrize(
        ("stage", "steps"),
        [
            (0, "F0 F1 F2 B0 F3 B1 B2 B3"),
            (1, "F0 F1 B0 F2 B1 F3 B2 B3"),
            (2, "F0 B0 F1 B1 F2 B2 F3 B3"),
        ],
    )
    def test_1f1b_of_three_stages_and_four_micro_batches(self, stage: int, steps: str) -> None:
        words = [
            f"{direction[0].upper()}{number}"
            for direction, number in build_stage_schedule("1f1b", stage, 3, 4)
        ]
        assert " ".join(words) == steps

    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_gpipe_goes_all_forward_then_all_back(self, stage: int) -> None:
        assert list(build_stage_schedule("gpipe", stage, 3, 3)) == [
            *forward(0, 1, 2),
            *(("backward", k) for k in range(3)),
        ]

    @pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
    @pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (5, 2), (3, 3), (4, 9)])
    def test_every_micro_batch_goes_through_once_each_way(
        self, schedule: str, stages: int, micro_batches: int
    ) -> None:
        for stage in range(stages):
            steps = list(build_stage_schedule(schedule, stage, stages, micro_batches))
            assert Counter(steps) == Counter(
                (direction, number)
                for direction in ("forward", "backward")
                for number in range(micro_batches)
            )
            assert all(
                steps.index(("forward", number)) < steps.index(("backward", number))
                for number in range(micro_batches)
            )

    def test_activations_go_on_and_gradients_come_back(self) -> None:
        nodes = made(generate_pipeline(PipelineOptions(3, 2, "1f1b", size=50)))
        expected = {(s, s + 1, 2 * m, 50): 1 for s in range(2) for m in range(2)}
        expected |= {(s + 1, s, 2 * m + 1, 50): 1 for s in range(2) for m in range(2)}
        assert messages(nodes) == messages(nodes, RECEIVE) == Counter(expected)

    def test_a_stage_computes_what_has_come_and_sends_what_it_has_computed(self) -> None:
        nodes = made(generate_pipeline(PipelineOptions(3, 2, "1f1b")))[1]
        assert [(n["name"], n["after"]) for n in nodes] == [
            ("receive from 0", []),
            ("forward 0", [1]),
            ("send to 2", [2]),
            ("receive from 0", [1]),
            ("forward 1", [2, 4]),
            ("send to 2", [5]),
            ("receive from 2", []),
            ("backward 0", [5, 7]),
            ("send to 0", [8]),
            ("receive from 2", [7]),
            ("backward 1", [8, 10]),
            ("send to 0", [11]),
        ]

    def test_what_is_known_is_what_the_formula_gives(self) -> None:
        totals = generate_pipeline(PipelineOptions(4, 6, "gpipe", 100)).totals
        assert totals == {
            "step_us": (6 + 3) * 300,
            "bubble_us": 3 * 300,
            "compute_us": [6 * 300] * 4,
            "sent_bytes": [600, 1200, 1200, 600],
            "activations": [6] * 4,
        }

    @pytest.mark.parametrize(
        ("stages", "micro_batches", "held"), [(4, 2, [2, 2, 2, 1]), (3, 1, [1, 1, 1])]
    )
    def test_no_stage_holds_more_than_there_are(
        self, stages: int, micro_batches: int, held: list[int]
    ) -> None:
        assert (
            generate_pipeline(PipelineOptions(stages, micro_batches)).totals["activations"] == held
        )


SMALL = {"layers": 2, "hidden": 8, "micro_batches": 1}


class TestTransformer:
    # per layer, of width 8 and 1024 tokens: attention has 4 x 64 weights, the MLP 8 x 64; an activation is 16 KiB
    ATTENTION, MLP = 2 * 256 * 1024 + 4 * 8 * 1024 * 1024, 2 * 512 * 1024
    SIZES = 2 * 256 + 2 * 16384, 2 * 512 + 2 * 16384  # weights, and activations read and written

    def test_one_rank_computes_its_layers_and_their_backward(self) -> None:
        (nodes,) = made(generate_transformer(TransformerOptions(1, 1, 1, **SMALL)))
        assert [n["name"] for n in nodes] == [
            "layer 0 attention forward 0",
            "layer 0 mlp forward 0",
            "layer 1 attention forward 0",
            "layer 1 mlp forward 0",
            "layer 1 mlp backward 0",
            "layer 1 attention backward 0",
            "layer 0 mlp backward 0",
            "layer 0 attention backward 0",
            "optimizer",
        ]
        ways = [self.ATTENTION, self.MLP]
        assert [n["num_ops"] for n in nodes[:-1]] == [
            *ways,
            *ways,
            *(2 * each for each in ways[::-1] * 2),
        ]
        assert [n["tensor_size"] for n in nodes[:-1]] == [
            *self.SIZES,
            *self.SIZES,
            *self.SIZES[::-1] * 2,
        ]
        # 2 layers x 768 weights, of which each takes 12 operations and 24 bytes
        assert (nodes[-1]["num_ops"], nodes[-1]["tensor_size"]) == (12 * 1536, 24 * 1536)
        assert [n["after"] for n in nodes] == [[], *([number] for number in range(1, 9))]
        assert nodes[1]["duration_us"] == 1  # never less

    def test_tensor_parallel_ranks_share_weights_and_add_up_activations(self) -> None:
        both = made(generate_transformer(TransformerOptions(1, 2, 1, **SMALL)))
        nodes = both[0]
        assert nodes == both[1]
        assert [n["type"] == NodeType.COMM_COLL_NODE for n in nodes] == [False, True] * 8 + [False]
        assert {(n["comm_size"], n["pg_name"]) for n in nodes[1:-1:2]} == {
            (1024 * 8 * 2, None)
        }  # all ranks: no name
        assert [n["num_ops"] for n in nodes[0:4:2]] == [self.ATTENTION // 2, self.MLP // 2]
        assert [n["tensor_size"] for n in nodes[0:4:2]] == [256 + 2 * 16384, 512 + 2 * 16384]
        assert nodes[-1]["num_ops"] == 12 * 1536 // 2

    def test_gradients_are_reduced_layer_by_layer_behind_the_last_backward(self) -> None:
        nodes = made(
            generate_transformer(TransformerOptions(2, 1, 1, **{**SMALL, "micro_batches": 2}))
        )[0]
        reduced = [n for n in nodes if n["type"] == NodeType.COMM_COLL_NODE]
        assert [n["name"] for n in reduced] == ["layer 1 gradients", "layer 0 gradients"]
        names = {n["id"]: n["name"] for n in nodes}
        assert [[names[number] for number in n["after"]] for n in reduced] == [
            ["layer 1 attention backward 1"],
            ["layer 1 gradients", "layer 0 attention backward 1"],
        ]
        assert [n["comm_size"] for n in reduced] == [768 * 2] * 2
        # the next layer's backward does not wait for the gradients; the optimizer does
        below = next(n for n in nodes if n["name"] == "layer 0 mlp backward 1")
        assert [names[number] for number in below["after"]] == ["layer 1 attention backward 1"]
        assert {n["id"] for n in reduced} < set(nodes[-1]["after"])

    def test_groups_are_numbered_and_hold_who_stands_beside_whom(self) -> None:
        generated = generate_transformer(TransformerOptions(2, 2, 2, **SMALL))
        members = sorted(generated.groups.values())
        assert members == [[0, 1], [0, 2], [1, 3], [2, 3], [4, 5], [4, 6], [5, 7], [6, 7]]
        assert sorted(generated.groups, key=int) == [str(number) for number in range(1, 9)]
        for rank, nodes in enumerate(made(generated)):
            used = {n["pg_name"] for n in nodes if n["type"] == NodeType.COMM_COLL_NODE}
            assert used == {name for name, of_group in generated.groups.items() if rank in of_group}

    def test_stages_exchange_with_the_rank_of_the_same_place(self) -> None:
        nodes = made(generate_transformer(TransformerOptions(2, 2, 2, **SMALL)))
        assert messages(nodes) == messages(nodes, RECEIVE)
        assert messages(nodes) == Counter(
            {(r, r + 4, 0, 16384): 1 for r in range(4)}
            | {(r + 4, r, 1, 16384): 1 for r in range(4)}
        )

    @pytest.mark.parametrize(
        ("speed", "us"),
        [
            ({"tflops": 1e-3, "memory_gbps": 1e6}, [round(ATTENTION / 1e3), round(MLP / 1e3)]),
            ({"tflops": 1e6, "memory_gbps": 1e-1}, [round(each / 100) for each in SIZES]),
        ],
    )
    def test_time_is_that_of_operations_or_of_memory(
        self, speed: dict[str, float], us: list[int]
    ) -> None:
        (nodes,) = made(generate_transformer(TransformerOptions(1, 1, 1, **SMALL, **speed)))
        assert [n["duration_us"] for n in nodes[:2]] == us

    @pytest.mark.parametrize(("stages", "tensor"), [(3, 1), (1, 3), (4, 1)])
    def test_layers_and_widths_have_to_divide(self, stages: int, tensor: int) -> None:
        with pytest.raises(UsageError) as caught:
            generate_transformer(TransformerOptions(1, tensor, stages, **SMALL))
        assert caught.value.slug == "cannot-generate"

    def test_totals_are_sums_over_the_nodes(self) -> None:
        generated = generate_transformer(TransformerOptions(2, 2, 2, **SMALL))
        for rank, nodes in enumerate(made(generated)):
            totals = {name: numbers[rank] for name, numbers in generated.totals.items()}
            assert totals == {
                "operations": sum(n["num_ops"] or 0 for n in nodes),
                "compute_us": sum(n["duration_us"] for n in nodes),
                "collective_bytes": {
                    "all_reduce": sum(
                        n["comm_size"] for n in nodes if n["type"] == NodeType.COMM_COLL_NODE
                    )
                },
                "sent_bytes": sum(n["comm_size"] for n in nodes if n["type"] == SEND),
            }
        assert generated.to_dict()["nodes"] == [len(nodes) for nodes in made(generated)]
