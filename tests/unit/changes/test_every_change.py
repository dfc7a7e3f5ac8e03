"""Every change of random jobs, against the same job changed and evaluated one edge and one nanosecond at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import polars as pl
import pytest

from support.plain_graph import MEANING, PlainScenario, RandomJob
from traceloom.changes.bounds import compute_busiest_lane_ns, compute_lower_bound_ns, max_saved_ns
from traceloom.changes.changes import parse
from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import changed_nodes, scenario_of, sweep, whatif, whatif_many
from traceloom.errors import UsageError
from traceloom.graph import Plan, calibrate, graph as graph_schema, law
from traceloom.graph.graph import Graph

Plainly = Callable[[PlainScenario], None]
SEEDS = range(13)


def scaled(target: str, factor: float, part: str = "", ranks: tuple[int, ...] = ()) -> Plainly:
    return lambda plain: plain.scale(
        plain.chosen(target, lambda name: part in name.lower(), ranks), factor
    )


def loading(plain: PlainScenario) -> set[int]:
    return plain.chosen("ops", lambda name: "DataLoader" in name)


CHANGES: dict[str, Plainly] = {
    **{f"{target} * 0.3": scaled(target, 0.3) for target in MEANING},
    **{f"{target} * 2.5": scaled(target, 2.5) for target in ("gpu", "host", "collectives")},
    **{f"{target} remove": scaled(target, 0.0) for target in MEANING if target != "syncs"},
    "kernels ~ GEM * 0.5": scaled("kernels", 0.5, "gem"),
    "ops ~ ^aten::(mm|add)$ remove": lambda plain: plain.scale(
        plain.chosen("ops", lambda name: name in {"aten::mm", "aten::add"}), 0
    ),
    "rank 0 kernels * 0.5": scaled("kernels", 0.5, ranks=(0,)),
    "ranks 0, 2 host * 0.5": scaled("host", 0.5, ranks=(0, 2)),
    "loading * 0.4": lambda plain: plain.scale(loading(plain), 0.4),
    "network * 3": scaled("collectives", 1 / 3),
    "network * 0.5": scaled("collectives", 2.0),
    "network ~ all_red * 2": scaled("collectives", 0.5),
    "syncs remove": lambda plain: plain.drop(plain.chosen("syncs")),
    "syncs ~ cudaDeviceSynchronize remove": lambda plain: plain.drop(
        plain.chosen("syncs", lambda n: "Device" in n)
    ),
    "copies async": lambda plain: plain.return_at_once(plain.chosen("copies")),
    "gpu async": lambda plain: plain.return_at_once(plain.chosen("gpu")),
    "idle remove": lambda plain: plain.no_idle(plain.chosen("host")),
    "rank 0 idle remove": lambda plain: plain.no_idle(plain.chosen("host", ranks=(0,)), (0,)),
    "kernels fuse": lambda plain: plain.fuse(plain.chosen("kernels")),
    "kernels ~ add_kernel fuse": lambda plain: plain.fuse(
        plain.chosen("kernels", lambda name: name == "add_kernel")
    ),
    "kernels graph": lambda plain: plain.submit_once(plain.chosen("kernels")),
    "gpu graph": lambda plain: plain.submit_once(plain.chosen("gpu")),
    "rank 1 gpu graph": lambda plain: plain.submit_once(plain.chosen("gpu", ranks=(1,))),
    "kernels balance": lambda plain: plain.balance(plain.chosen("kernels")),
    "rank 0 delay remove": lambda plain: plain.not_late((0,)),
    "rank 1,2 delay remove": lambda plain: plain.not_late((1, 2)),
    "loading workers 1": lambda plain: plain.load_beside(loading(plain), 1),
    "loading workers 3": lambda plain: plain.load_beside(loading(plain), 3),
}
PAIRS = (
    ("kernels * 0.3", "host * 0.3"),
    ("host * 0.3", "kernels * 0.3"),
    ("copies async", "gpu graph"),
    ("kernels balance", "rank 0 delay remove"),
    ("rank 0 delay remove", "kernels balance"),
    ("idle remove", "network * 3"),
    ("syncs remove", "collectives * 0.3"),
    ("kernels fuse", "loading workers 3"),
    ("loading * 0.4", "loading workers 1"),
    ("gpu * 2.5", "rank 0 idle remove"),
)


@cache
def job(seed: int) -> tuple[Graph, Plan]:
    graph = calibrate(RandomJob(seed).graph())
    graph.check()
    return graph, Plan(graph)


def asked(graph: Graph, *texts: str) -> Scenario | None:
    """The graph with some changes; None where it has nothing that one of them is about."""
    try:
        return scenario_of(graph, [parse(text) for text in texts])
    except UsageError as error:
        if error.slug != "nothing-chosen":
            raise
        return None


@cache
def changed(*texts: str) -> list[tuple[Graph, Plan, Scenario, PlainScenario]]:
    """The random jobs that have what all of the changes are about; with these, and plainly with these."""
    fitting = []
    for seed in SEEDS:
        graph, plan = job(seed)
        scenario = asked(graph, *texts)
        if scenario is None:
            continue
        plain = PlainScenario(graph)
        for text in texts:
            CHANGES[text](plain)
        fitting.append((graph, plan, scenario, plain))
    assert len(fitting) > len(SEEDS) // 5, texts
    return fitting


@pytest.mark.sampled(19)
@pytest.mark.parametrize("texts", [*((text,) for text in CHANGES), *PAIRS], ids=" and ".join)
def test_a_change_does_to_every_point_what_its_words_say(texts: tuple[str, ...]) -> None:
    for _, plan, scenario, plain in changed(*texts):
        assert scenario.times(plan).tolist() == plain.times()


@pytest.mark.sampled(19)
@pytest.mark.parametrize("texts", [*((text,) for text in CHANGES), *PAIRS], ids=" and ".join)
def test_a_change_is_bounded_by_what_is_left_and_by_what_it_touches(texts: tuple[str, ...]) -> None:
    for graph, plan, scenario, plain in changed(*texts):
        before, after = int(np.ptp(graph.point_times())), int(np.ptp(scenario.times(plan)))
        assert compute_busiest_lane_ns(scenario) == plain.busiest_lane()
        assert max_saved_ns(graph, scenario) == plain.touched()
        assert compute_lower_bound_ns(graph, scenario, before) == max(
            plain.busiest_lane(), before - plain.touched()
        )
        assert after >= compute_lower_bound_ns(graph, scenario, before) - graph.nodes.height, (
            "more than halves of ns is lost"
        )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("target", ["copies", "collectives", "kernels", "gpu"])
@pytest.mark.parametrize("with_it", ["", "gpu * 0.3", "network * 3"])
def test_hidden_work_leaves_the_order_of_its_stream_as_a_plain_loop_says(
    target: str, with_it: str
) -> None:
    compared = 0
    for seed in range(30):
        graph, plan = job(seed)
        texts = [text for text in (with_it, f"{target} overlap") if text]
        scenario = asked(graph, *texts)
        if scenario is None:
            continue
        plain = PlainScenario(graph)
        if with_it:
            CHANGES[with_it](plain)
        plain.hide(plain.chosen(target))
        assert scenario.times(plan).tolist() == plain.times()
        compared += 1
    assert compared > 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "text", ["gpu * 0.3", "host * 2.5", "rank 0 delay remove", "copies async", "idle remove"]
)
def test_an_answer_is_that_of_the_plain_evaluation_in_every_figure(text: str) -> None:
    for graph, plan, scenario, plain in changed(text):
        answer = whatif(graph, text, plan=plan)
        measured, times = graph.point_times(), plain.times()
        before, after = int(np.ptp(measured)), max(times) - min(times)
        least = max(plain.busiest_lane(), before - plain.touched())
        assert answer.changes == (text,)
        assert answer.times.tolist() == times
        assert (answer.before_ns, answer.after_ns) == (before, max(after, least))
        assert answer.saved_ns == before - max(after, least)
        assert answer.saved_fraction == pytest.approx(answer.saved_ns / before)
        honest = law(graph, plan)
        assert answer.error_ns == abs(honest.honest_error_ns)
        assert answer.trusted == (
            honest.holds
            and abs(answer.saved_ns)
            > max(answer.error_ns, round(0.01 * before), 7 * answer.chance_ns)
            and after >= least
        )
        assert answer.path["before_ns"].sum() == before
        assert answer.path["after_ns"].sum() == after
        rows = []
        for rank in sorted({row["rank"] for row in plain.nodes}):
            points = [
                2 * row["node"] + end
                for row in plain.nodes
                if row["rank"] == rank
                for end in (0, 1)
            ]
            spans = [
                max(of[at] for at in points) - min(of[at] for at in points)
                for of in (measured.tolist(), times)
            ]
            rows.append((rank, spans[0], spans[1], spans[0] - spans[1]))
        assert answer.ranks.rows() == rows
        assert scenario.graph is graph


def plain_lower_bound(plain: PlainScenario, other: PlainScenario, saved: int, before: int) -> bool:
    """Whether more were saved, by more than a hundredth, if threads of which nobody knows who woke them did not wait."""
    guesses = [
        at
        for at, edge in enumerate(plain.edges)
        if edge["evidence"] == "assumed"
        and (
            (edge["kind"] == "origin" and edge["to_end"])
            or (edge["kind"] == "cross-thread" and edge["delay_ns"] > 0)
        )
    ]
    spans = []
    for scenario in (plain, other):
        delays, scenario.delay = scenario.delay, list(scenario.delay)
        for at in guesses:
            scenario.delay[at] = None
        spans.append(scenario.span())
        scenario.delay = delays
    return bool(guesses) and spans[0] - spans[1] > saved + round(0.01 * before)


def test_an_answer_is_at_least_so_much_where_the_waker_of_a_thread_is_not_recorded() -> None:
    answers = []
    for text in ("host * 0.3", "gpu * 0.3", "idle remove", "ops remove"):
        for graph, plan, _, plain in changed(text):
            answer = whatif(graph, text, plan=plan)
            expected = plain_lower_bound(
                PlainScenario(graph), plain, answer.saved_ns, answer.before_ns
            )
            assert answer.lower_bound == expected
            answers.append(expected)
    assert set(answers) == {True, False}


def test_what_a_change_is_about_is_what_differs() -> None:
    for text in ("gpu * 0.3", "syncs remove", "network * 3", "kernels fuse", "loading workers 3"):
        for graph, _, scenario, plain in changed(text):
            differs = {
                row["node"]
                for row, work in zip(plain.nodes, plain.work, strict=True)
                if work != row["work_ns"] + row["residual_ns"]
            }
            for edge, delay in zip(plain.edges, plain.delay, strict=True):
                if (
                    edge["kind"] in ("rendezvous", "synchronize")
                    and delay != edge["delay_ns"] + edge["residual_ns"]
                ):
                    differs.add(edge["target"])
            assert set(np.flatnonzero(changed_nodes(graph, scenario)).tolist()) == differs


@pytest.mark.parametrize(
    "others", [("gpu * 0.3",), ("copies async", "host * 0.3", "network * 3"), ("copies overlap",)]
)
def test_many_scenarios_together_take_what_each_takes_alone(others: tuple[str, ...]) -> None:
    for seed in SEEDS:
        graph, plan = job(seed)
        texts = [(), *((text,) for text in others), (others[0], "kernels * 0.5"), ("launches * 4",)]
        scenarios = [scenario for some in texts if (scenario := asked(graph, *some))]
        alone = [
            max(
                int(np.ptp(one.times(plan))),
                compute_lower_bound_ns(graph, one, int(np.ptp(graph.point_times()))),
            )
            for one in scenarios
        ]
        assert whatif_many(graph, iter(scenarios), plan).tolist() == alone
        assert alone[0] == int(np.ptp(graph.point_times()))


def test_a_sweep_is_one_answer_after_the_other_whatever_the_digits_of_its_factors() -> None:
    factors = [1.0, 0.123456789, 1e-7, 1_234_567.0, 2.5, 0.0]
    for graph, plan, *_ in changed("kernels * 0.3")[:5]:
        table = sweep(graph, "kernels * {}", factors, plan=plan).table
        assert table["factor"].to_list() == factors
        for row, factor in zip(table.iter_rows(named=True), factors, strict=True):
            plain = PlainScenario(graph)
            plain.scale(plain.chosen("kernels"), factor)
            before = int(np.ptp(graph.point_times()))
            assert row["time_ns"] == max(
                plain.span(), plain.busiest_lane(), before - plain.touched()
            )
            assert row["saved_ns"] == before - row["time_ns"]
            assert row["saved_fraction"] == pytest.approx(row["saved_ns"] / before)


@pytest.mark.parametrize(
    "texts",
    [
        *(
            [f"{target} * {factor}" for factor in (0, 0.2, 0.7, 1, 1.6)]
            for target in ("kernels", "gpu", "host", "syncs", "ops")
        ),
        [f"network * {factor}" for factor in (9, 3, 1, 0.4)],
        [f"loading workers {count}" for count in (8, 4, 2, 1)],
        ["gpu remove", "copies remove", "copies * 0.5"],
        ["idle remove", "host remove", "launches remove"],
        ["copies remove", "copies overlap", "copies * 1"],
    ],
    ids=lambda texts: texts[1],
)
def test_what_takes_less_never_makes_anything_later(texts: list[str]) -> None:
    for seed in SEEDS:
        graph, plan = job(seed)
        times = [scenario.times(plan) for text in texts if (scenario := asked(graph, text))]
        for one, other in pairwise(times):
            assert (one <= other).all()


def test_work_that_is_hidden_saves_no_more_than_was_exposed_and_keeps_its_own_time() -> None:
    hidden = 0
    for seed in range(40):
        graph, plan = job(seed)
        if not (among := {"copy", "collective"} & set(graph.nodes["kind"])):
            continue
        for target in ("copies", "collectives"):
            if ("copy" if target == "copies" else "collective") not in among:
                continue
            scenario = scenario_of(graph, [parse(f"{target} overlap")])
            times, before = scenario.times(plan), graph.point_times()
            plain = PlainScenario(graph)
            chosen = plain.chosen(target)
            exposed: set[int] = set()
            for rank in {plain.nodes[node]["rank"] for node in chosen}:
                covered = {
                    at
                    for row in plain.nodes
                    if row["kind"] == "kernel" and row["rank"] == rank
                    for at in range(row["start_ns"], row["start_ns"] + row["duration_ns"])
                }
                runs = {
                    at
                    for node in chosen
                    if plain.nodes[node]["rank"] == rank
                    for at in range(before[2 * node], before[2 * node + 1])
                }
                exposed |= runs - covered
            assert np.ptp(before) - np.ptp(times) <= len(exposed)
            assert max_saved_ns(graph, scenario) == len(exposed)
            assert set(np.flatnonzero(scenario.beside).tolist()) == chosen
            for node in chosen:
                assert times[2 * node + 1] - times[2 * node] >= scenario.work_ns[node]
            hidden += int(np.ptp(before) > np.ptp(times))
    assert hidden > 5


def renumbered(graph: Graph, seed: int) -> tuple[Graph, list[int]]:
    """The same graph with its nodes and its edges in another order; the new number of each node."""
    order = list(range(graph.nodes.height))
    random.Random(seed).shuffle(order)
    new = [0] * len(order)
    for number, old in enumerate(order):
        new[old] = number
    number_of = pl.Series(new, dtype=graph_schema.Node)
    nodes = graph.nodes[order].with_columns(node=pl.int_range(pl.len(), dtype=graph_schema.Node))
    edges = graph.edges.with_columns(
        source=number_of[graph.edges["source"]], target=number_of[graph.edges["target"]]
    )
    edges = edges.sample(fraction=1, shuffle=True, seed=seed)
    communication = graph.communication.with_columns(node=number_of[graph.communication["node"]])
    return replace(graph, nodes=nodes, edges=edges, communication=communication), new


EVERYTHING = (
    "gpu * 0.3",
    "idle remove",
    "gpu graph",
    "kernels balance",
    "copies overlap",
    "network * 3",
    "kernels fuse",
)


@pytest.mark.parametrize("text", [*EVERYTHING, "rank 0 delay remove"])
def test_the_order_of_rows_says_nothing(text: str) -> None:
    for seed in SEEDS[::2]:
        graph, plan = job(seed)
        scenario = asked(graph, text)
        if scenario is None:
            continue
        times = scenario.times(plan)
        other, new = renumbered(graph, seed)
        again = scenario_of(other, [parse(text)]).times(Plan(other))
        assert [(again[2 * node], again[2 * node + 1]) for node in new] == list(
            zip(times[::2], times[1::2], strict=True)
        )


def moved(graph: Graph, later_ns: int) -> Graph:
    return replace(graph, nodes=graph.nodes.with_columns(pl.col("start_ns") + later_ns))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "text", [*EVERYTHING, "rank 0 delay remove", "loading workers 2", "syncs remove"]
)
def test_a_job_that_runs_later_is_the_same_job(text: str) -> None:
    later = 10**15 + 7
    for seed in SEEDS[::2]:
        graph, plan = job(seed)
        if asked(graph, text) is None:
            continue
        answer = whatif(graph, text, plan=plan)
        other = whatif(moved(graph, later), text)
        assert (other.times - later).tolist() == answer.times.tolist()
        assert (other.saved_ns, other.trusted, other.lower_bound) == (
            answer.saved_ns,
            answer.trusted,
            answer.lower_bound,
        )
        assert other.path.equals(answer.path)
        assert other.ranks.equals(answer.ranks)


def renamed(graph: Graph, names: dict[int, int]) -> Graph:
    rank = pl.col("rank").replace_strict(names, return_dtype=graph.nodes.schema["rank"])
    return replace(graph, nodes=graph.nodes.with_columns(rank))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "text", [*EVERYTHING, "rank 0 delay remove", "rank 1 kernels * 0.5", "rank 1 idle remove"]
)
def test_ranks_may_have_any_numbers(text: str) -> None:
    names = {0: 511, 1: 3, 2: 64}
    elsewhere = text
    for old, number in names.items():
        elsewhere = elsewhere.replace(f"rank {old} ", f"rank {number} ")
    compared = 0
    for seed in SEEDS:
        graph, plan = job(seed)
        if graph.nodes["rank"].n_unique() == 1:
            continue
        if asked(graph, text) is None:
            continue
        answer = whatif(graph, text, plan=plan)
        other = whatif(renamed(graph, names), elsewhere)
        assert other.times.tolist() == answer.times.tolist()
        assert dict(other.ranks.select("rank", "saved_ns").iter_rows()) == {
            names[rank]: saved
            for rank, saved in answer.ranks.select("rank", "saved_ns").iter_rows()
        }
        compared += 1
    assert compared > 2


def test_a_scenario_is_left_as_it_is_when_another_is_made_from_it() -> None:
    graph, plan = job(3)
    base = Scenario.of(graph)
    before = base.times(plan).tolist()
    for text in CHANGES:
        if parse(text).selection.nodes(graph).any() and "delay" not in text:
            base.apply(parse(text))
    assert base.times(plan).tolist() == before == graph.point_times().tolist()


@pytest.mark.parametrize(
    "text", ["kernels * 0.5", "idle remove", "kernels fuse", "gpu graph", "kernels balance"]
)
def test_only_what_lies_inside_changes_where_some_nodes_are_given(text: str) -> None:
    for seed in SEEDS:
        graph, _ = job(seed)
        change = parse(text)
        first = (graph.nodes["step"] == 0).to_numpy()
        if not change.selection.nodes(graph).any():
            continue
        base, scenario = Scenario.of(graph), Scenario.of(graph).apply(change, first)
        assert (scenario.work_ns[~first] == base.work_ns[~first]).all()
        whole = Scenario.of(graph).apply(change, np.ones(graph.nodes.height, dtype=np.bool_))
        assert (whole.work_ns == base.apply(change).work_ns).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_random_jobs_keep_the_law_of_graphs(seed: int) -> None:
    graph, plan = job(seed)
    assert plan.evaluate().tolist() == graph.point_times().tolist() == PlainScenario(graph).times()
