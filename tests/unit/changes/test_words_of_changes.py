"""How a change is written, which nodes it means, and what is refused."""

from __future__ import annotations

from itertools import product

import numpy as np
import polars as pl
import pytest

from traceloom.changes.changes import (
    ASSUMPTIONS,
    NODE_TARGETS,
    Change,
    NodeSelection,
    Selection,
    parse,
    select_event_nodes,
)
from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import sweep
from traceloom.errors import UsageError
from traceloom.graph import graph as graph_schema
from traceloom.graph.graph import Graph

KINDS_BY_ALGORITHM = {
    "kernels": {"kernel"},
    "copies": {"copy", "fill"},
    "gpu": {"kernel", "copy", "fill"},
    "collectives": {"collective", "send", "receive"},
    "host": {"host", "think", "launch", "block"},
    "ops": {"host"},
    "think": {"think"},
    "launches": {"launch"},
    "syncs": {"block"},
    "loading": {"host"},  # nothing else lies in a region here
}
NAMES = (
    "aten::mm",
    "enumerate(DataLoader)#_Single.__next__",
    "sm80_xmma_gemm",
    "nvjet_tst_64x8",
    None,
    "漢字 kernel",
    "a.b+c",
)


def one_of_each() -> Graph:
    """One node of each kind and name on each of three ranks."""
    rows = [
        {
            "kind": kind,
            "name": name,
            "rank": rank,
            "start_ns": 10 * at,
            "duration_ns": 8,
            "event": at,
            "work_ns": 8,
            "residual_ns": 0,
        }
        for at, (rank, kind, name) in enumerate(product((0, 1, 12), graph_schema.NODE_KINDS, NAMES))
    ]
    nodes = pl.DataFrame(
        [row | {"node": at} for at, row in enumerate(rows)],
        schema=graph_schema.GRAPH_SCHEMAS["nodes"],
    )
    parts = nodes.filter(pl.col("kind").is_in(list(graph_schema.COMMUNICATION)))
    kinds = ["all_reduce", "all_gather"] * (parts.height // 2) + ["send"] * (parts.height % 2)
    rows = [{"node": node, "kind": kind} for node, kind in zip(parts["node"], kinds, strict=True)]
    communication = pl.DataFrame(rows, schema=graph_schema.GRAPH_SCHEMAS["communication"])
    return Graph(
        nodes, pl.DataFrame(schema=graph_schema.GRAPH_SCHEMAS["edges"]), communication=communication
    )


GRAPH = one_of_each()


def meant(text: str) -> pl.DataFrame:
    return GRAPH.nodes.filter(pl.Series(parse(text).selection.nodes(GRAPH)))


def test_each_word_means_its_kinds_of_work_and_no_other() -> None:
    assert set(NODE_TARGETS) == set(KINDS_BY_ALGORITHM)
    for target, kinds in KINDS_BY_ALGORITHM.items():
        nodes = meant(f"{target} * 2")
        assert set(nodes["kind"]) == kinds, target
        names = 1 if target == "loading" else len(NAMES)
        assert nodes.height == len(kinds) * names * 3, target


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("MM", {"aten::mm", "sm80_xmma_gemm"}),
        ("^aten", {"aten::mm"}),
        ("gemm", {"sm80_xmma_gemm", "nvjet_tst_64x8"}),
        ("gemm$", {"sm80_xmma_gemm"}),
        ("漢字", {"漢字 kernel"}),
        (r"a\.b\+c", {"a.b+c"}),
        ("mm|nvjet", {"aten::mm", "sm80_xmma_gemm", "nvjet_tst_64x8"}),
    ],
)
def test_a_pattern_takes_what_has_it_in_its_name_or_is_of_that_kind(
    pattern: str, names: set[str]
) -> None:
    nodes = meant(f"kernels ~ {pattern} * 0.5")
    assert set(nodes["name"]) == names
    assert set(nodes["kind"]) == {"kernel"}


def test_communication_is_chosen_by_its_kind_too() -> None:
    chosen = parse("network ~ gather * 2").selection.nodes(GRAPH)
    kinds = dict(GRAPH.communication.select("node", "kind").iter_rows())
    assert chosen.any()
    assert {kinds[node] for node in np.flatnonzero(chosen).tolist()} == {"all_gather"}


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("rank 1", {1}),
        ("ranks 0,12", {0, 12}),
        ("rank 0 , 1 ,12", {0, 1, 12}),
        ("rank 12", {12}),
        ("rank 1,7", {1}),
    ],
)
def test_ranks_narrow_what_is_meant(words: str, ranks: set[int]) -> None:
    assert set(meant(f"{words} kernels remove")["rank"]) == ranks


def test_a_rank_or_a_name_that_is_not_there_is_nothing_and_the_hint_says_what_is() -> None:
    for text, shown in (
        ("kernels ~ sm80_xmma_gemn * 2", "`sm80_xmma_gemm`"),
        ("rank 5 kernels * 2", "has no kernels at all"),
        ("ops ~ aten::nn * 2", "`aten::mm`"),
    ):
        with pytest.raises(UsageError) as refused:
            Scenario.of(GRAPH).apply(parse(text))
        assert refused.value.slug == "nothing-chosen"
        assert shown in str(refused.value.hint)
        assert text in str(refused.value)


def test_a_long_name_is_shown_in_part() -> None:
    row = {
        "node": 0,
        "kind": "kernel",
        "name": "void kernel<" + "x" * 500,
        "start_ns": 0,
        "duration_ns": 1,
        "work_ns": 1,
    }
    nodes = pl.DataFrame(
        [row | {"residual_ns": 0, "rank": 0}], schema=graph_schema.GRAPH_SCHEMAS["nodes"]
    )
    with pytest.raises(UsageError) as refused:
        Scenario.of(Graph(nodes, GRAPH.edges)).apply(parse("kernels ~ nothing * 2"))
    assert len(str(refused.value.hint)) < 130


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("kernels x 2", Change("scale", Selection("kernels"), 2.0)),
        ("  kernels × 2  ", Change("scale", Selection("kernels"), 2.0)),
        ("kernels ~ a * b * 0.25", Change("scale", Selection("kernels", "a * b"), 0.25)),
        ("kernels ~ remove remove", Change("remove", Selection("kernels", "remove"))),
        ("ranks 3 host * 010", Change("scale", Selection("host", "", (3,)), 10.0)),
        ("network * 1000000", Change("network", Selection("collectives"), 1e6)),
        (
            "network ~ all_gather * 4",
            Change("network", Selection("collectives", "all_gather"), 4.0),
        ),
        ("rank 2 network * 4", Change("network", Selection("collectives", "", (2,)), 4.0)),
        ("syncs remove", Change("drop", Selection("syncs"))),
        ("syncs drop", Change("drop", Selection("syncs"))),
        ("loading workers 12", Change("workers", Selection("loading"), 12.0)),
        ("rank 1, 2 delay remove", Change("delay", Selection("host", "", (1, 2)))),
        ("rank 1 idle remove", Change("idle", Selection("host", "", (1,)))),
        ("kernels * 0", Change("scale", Selection("kernels"), 0.0)),
    ],
)
def test_spaces_signs_and_digits_are_read_as_they_are_meant(text: str, change: Change) -> None:
    assert parse(text) == change
    assert parse(str(change)) == change, "what is written is read again as the same"


@pytest.mark.parametrize("factor", [1e-9, 0.1 + 0.2, 1 / 3, 2.0, 1e6, 123456789.0, 0.0])
@pytest.mark.parametrize("words", ["scale", "network", "workers"])
def test_a_factor_is_written_with_all_its_digits(words: str, factor: float) -> None:
    target = {"scale": "kernels", "network": "collectives", "workers": "loading"}[words]
    change = Change(
        words,
        Selection(target),
        round(factor) + 1.0 if words == "workers" else factor + (words == "network"),
    )
    assert parse(str(change)) == change


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write it as"),
        ("kernels", "write it as"),
        ("* 2", "write it as"),
        ("Kernels * 2", "write it as"),
        ("kernels * two", "write it as"),
        ("kernels * -0.5", "write it as"),
        ("kernels * 1e3", "write it as"),
        ("kernels * 2 * 3", "write it as"),
        ("rank kernels * 2", "write it as"),
        ("rank -1 kernels * 2", "write it as"),
        ("kernels*0.5", "write it as"),
        ("kernels remove 3", "takes no number"),
        ("idle remove 2", "takes no number"),
        ("kernel * 2", "`kernel` is none of kernels"),
        ("delay remove", "say whose delay"),
        ("delay * 2", "`delay` is none of"),
        ("network remove", "`network` is none of"),
        ("network * 0", "`network` is none of"),
        ("kernels faster", "`faster` is none of"),
        ("kernels workers 2", "`workers` is none of"),
        ("loading workers", "`workers` is none of"),
        ("loading workers 0", "`workers` is none of"),
        ("host overlap", "what the device does"),
        ("ops async", "what the device does"),
        ("loading fuse", "what the device does"),
        ("launches graph", "what the device does"),
        ("rank 1 delay ~ gemm remove", "takes no `~`"),
        ("idle ~ aten remove", "takes no `~`"),
        ("kernels drop", "`drop` is none of"),
    ],
)
def test_what_is_no_change_is_refused_with_what_is_understood(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(text)
    assert refused.value.slug == "bad-change"
    assert says in str(refused.value)
    assert "kernels ~ gemm * 0.5" in str(refused.value.hint)


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "(?P<", "a{2,1}"])
def test_a_pattern_that_is_none_is_refused_with_the_place(pattern: str) -> None:
    with pytest.raises(UsageError) as refused:
        Scenario.of(GRAPH).apply(parse(f"kernels ~ {pattern} * 0.5"))
    assert refused.value.slug == "bad-change"
    assert pattern in str(refused.value)


def test_what_every_action_assumes_is_said() -> None:
    texts = (
        "kernels * 2",
        "kernels remove",
        "copies async",
        "syncs remove",
        "copies overlap",
        "network * 2",
    )
    texts += (
        "rank 1 delay remove",
        "idle remove",
        "kernels fuse",
        "kernels graph",
        "kernels balance",
        "loading workers 2",
    )
    assert {parse(text).action for text in texts} == set(ASSUMPTIONS)
    assert all(ASSUMPTIONS.values())


def test_a_delay_needs_somebody_to_be_compared_with() -> None:
    with pytest.raises(UsageError) as refused:
        Scenario.of(GRAPH).apply(parse("rank 0,1,12 delay remove"))
    assert refused.value.slug == "nothing-chosen"
    assert "other ranks" in str(refused.value)


def test_a_sweep_refuses_what_its_template_makes_no_change_of() -> None:
    for template in ("kernels {}", "kernels * {} x", "gemm * {}"):
        with pytest.raises(UsageError) as refused:
            sweep(GRAPH, template, [1, 2])
        assert refused.value.slug == "bad-change"


def test_nodes_that_a_program_chose_are_told_in_its_words() -> None:
    mask = np.arange(GRAPH.nodes.height) % 5 == 0
    change = Change("scale", NodeSelection("slow <kernels>", mask, "kernels"), 0.5)
    assert str(change) == "slow <kernels> * 0.5"
    scenario = Scenario.of(GRAPH).apply(change)
    assert (scenario.work_ns == np.where(mask, 4, 8)).all()


def test_events_of_one_rank_are_the_nodes_of_that_rank() -> None:
    rows = [(0, 3), (0, 4), (1, 3), (None, 3), (1, None)]
    nodes = pl.DataFrame(
        [
            {
                "node": at,
                "kind": "host",
                "rank": rank,
                "event": event,
                "start_ns": 0,
                "duration_ns": 0,
            }
            for at, (rank, event) in enumerate(rows)
        ],
        schema=graph_schema.GRAPH_SCHEMAS["nodes"],
    )
    graph = Graph(nodes, GRAPH.edges)
    assert select_event_nodes(graph, 0, pl.Series([3])).tolist() == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert select_event_nodes(graph, 1, pl.Series([3, 4])).tolist() == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert select_event_nodes(graph, None, pl.Series([3])).tolist() == [
        True,
        False,
        True,
        True,
        False,
    ]
    assert not select_event_nodes(graph, 0, pl.Series([], dtype=pl.Int64)).any()


def test_public_functions_are_not_hidden_by_modules_of_their_name() -> None:
    import traceloom.changes.whatif
    import traceloom.workload.simulate.calibrate
    import traceloom.workload.simulate.sweep

    assert callable(traceloom.changes.whatif)
    assert callable(traceloom.changes.sweep)
    assert callable(traceloom.workload.simulate.calibrate)
