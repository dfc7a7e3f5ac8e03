"""What-ifs of jobs that wait, against the true times of made ones and those that are given (failing/README.md)."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import traceloom
from support.longest_paths import (
    EFFECTS,
    SUBJECTS,
    MadeJob,
    Recipe,
    make_effects,
    measure_error,
    random_recipe,
    without_delay,
)
from traceloom.changes.changes import parse
from traceloom.changes.whatif import whatif
from traceloom.errors import UsageError
from traceloom.findings import findings
from traceloom.graph import Plan, link_session
from traceloom.graph.graph import Graph
from traceloom.graph.law import law

SEEDS = 20
FALSE = 0.15  # of the saving: an answer that is further off is not trusted


@cache
def linked(folder: Path) -> Graph:
    return link_session(traceloom.load(folder))


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "change", "saved_us"),
    [
        ("loader_bound", "kernels * 0.5", 413),
        ("loader_bound", "syncs remove", 32),
        ("loader_bound", "host * 0.5", 11),
        ("pp_skew", "network * 2", 60),
        ("pp_skew", "kernels ~ gemm * 0.5", 360),
        ("two_comms_false_wait", "host * 0.5", 457),
        ("two_comms_missing_wait", "collectives ~ all_reduce remove", 168),
    ],
)
def test_given_jobs_save_what_was_worked_out(
    shared_data: Path, name: str, change: str, saved_us: float
) -> None:
    folder = shared_data / "failing" / name
    if not folder.exists():
        pytest.skip("the failing inputs are not on this machine")
    found = whatif(linked(folder), [parse(change)])
    assert found.saved_ns / 1000 == pytest.approx(saved_us, rel=0.03, abs=2)


@pytest.mark.data
@pytest.mark.parametrize(("name", "window_us"), [("pp_skew", 1_058), ("skew_one_host", 4_280)])
def test_clocks_that_are_apart_do_not_make_the_window_longer(
    shared_data: Path, name: str, window_us: float
) -> None:
    folder = shared_data / "failing" / name
    if not folder.exists():
        pytest.skip("the failing inputs are not on this machine")
    graph = linked(folder)
    assert whatif(graph, [parse("kernels * 1")]).before_ns / 1000 == pytest.approx(
        window_us, rel=0.003
    )
    edges = graph.edges.filter(graph.edge_mask("rendezvous") & graph.edges["to_end"].to_numpy())
    assert (edges["delay_ns"] + edges["residual_ns"]).min() >= 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("subject", ["stages", "reduced"])
@pytest.mark.parametrize("jump_us", [0.0, -500.0, 500.0, 2_000.0])
def test_no_answer_is_trusted_where_a_clock_jumps_in_between(
    tmp_path: Path, subject: str, jump_us: float
) -> None:
    job = MadeJob(replace(random_recipe(3, subject), skew_us=700.0, one_host=False, kernel_us=60.0))
    file = job.write(tmp_path) / "rank1.json.gz"
    trace = json.loads(gzip.decompress(file.read_bytes()))
    begins = sorted(event["ts"] for event in trace["traceEvents"])
    for event in trace["traceEvents"]:
        if event["ts"] > begins[len(begins) // 2]:
            event["ts"] += jump_us
    file.write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
    graph = link_session(traceloom.load(tmp_path))
    told = [notice for notice in graph.notices if notice.slug == "clocks-contradict"]
    assert len(told) == bool(jump_us)
    found = whatif(graph, [parse("kernels * 0.5")])
    assert found.saved_fraction > 0.1
    assert found.trusted == law(graph).holds == (not jump_us)
    if told:
        parts = re.search(r"(\d+) parts of communications end up to ([\d.]+) ms", told[0].message)
        assert parts is not None
        assert int(parts[1]) == told[0].count >= 1
        assert 0 < float(parts[2]) <= job.window / 1000


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("subject", SUBJECTS)
def test_no_false_answer_about_a_made_job_is_trusted(
    tmp_path: Path, subject: str, seed: int
) -> None:
    job = MadeJob(random_recipe(seed, subject))
    graph = link_session(traceloom.load(job.write(tmp_path)))
    plan, window = Plan(graph), job.window
    answers = 0
    for effect in make_effects(job):
        try:
            found = whatif(graph, [parse(effect.text)], plan=plan)
        except UsageError:  # it has nothing of the kind
            continue
        answers += 1
        error = measure_error(found.saved_ns / 1000, job.true_saving(effect), window)
        assert error <= FALSE or not found.trusted, f"{effect.text}: {error:.0%}"
    assert answers >= 6


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "first", "second", "saved"),
    [
        ("pageable", "exposed-copies", "blocking-copy", 0.184),  # 1,717 us of 10.5 ms, 5 of 6 steps
        ("two_syncs_device_mid", "blocking-item", "blocking-sync", 0.039),
    ],
)
def test_fixes_that_help_only_together_are_told_together(
    shared_data: Path, name: str, first: str, second: str, saved: float
) -> None:
    folder = shared_data / "failing" / name
    if not folder.exists():
        pytest.skip("the failing inputs are not on this machine")
    told = {finding.slug: finding for finding in findings(traceloom.load(folder)).time}
    assert list(told)[:2] == [first, second]
    assert f"only together with: {told[second].title[:20]}" in told[first].advice
    together = sum(told[slug].saving_fraction or 0.0 for slug in (first, second))
    assert together == pytest.approx(saved, abs=0.005)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_synchronisations_that_hold_each_other_up_save_what_both_cost(
    tmp_path: Path, seed: int
) -> None:
    # The device has work for long enough that nothing but its pauses can be saved
    job = MadeJob(replace(random_recipe(seed, "two synchronisations"), kernel_us=90.0, steps=8))
    found = findings(traceloom.load(job.write(tmp_path))).time
    told = sum(
        finding.saving_fraction or 0.0 for finding in found if finding.slug.startswith("blocking")
    )
    removal = next(effect for effect in EFFECTS if effect.text == "syncs remove")
    # Of the steps alone; the window has a beginning and an end
    assert told == pytest.approx(job.true_saving(removal) / job.window, rel=0.25, abs=0.015)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("slow", [1.0, 1.8])
def test_chance_is_not_sold_as_the_delay_of_a_rank(tmp_path: Path, seed: int, slow: float) -> None:
    recipe = Recipe(seed, ranks=4, layers=2, kernel_us=8.0, op_us=14.0, reduce=True, spread=0.5)
    job = MadeJob(replace(recipe, slow=slow))
    effect, window = without_delay(job), job.window
    found = whatif(link_session(traceloom.load(job.write(tmp_path))), [parse(effect.text)])
    true = job.true_saving(effect)
    assert found.saved_ns / 1000 == pytest.approx(true, abs=0.02 * window)
    assert found.trusted == (slow > 1)
