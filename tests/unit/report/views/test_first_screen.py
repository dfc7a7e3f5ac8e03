"""The figures of the first screen are of one window and add up, in every view."""

from __future__ import annotations

import re
from typing import Any

import pytest

import traceloom
from support.jobs import ParallelRecipe, Recipe, parallel_job, training_job
from support.pages import tables
from support.public_traces import DATA
from traceloom.report import ReportOptions, build
from traceloom.report.labels import get_step_length
from traceloom.report.views.markdown import render as markdown
from traceloom.report.views.page import build_sections, render_key_numbers
from traceloom.report.views.page_head import Reasons, list_key_numbers, render_headline
from traceloom.report.views.terminal import render as terminal
from traceloom.system import units
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.session import Session

MULTIRANK = DATA / "multirank"


def uneven() -> Session:
    """Three ranks whose steps are not equally long, with GPU work and host time before and after all steps."""
    traces = []
    for rank, length in enumerate((3000, 4100, 5900)):
        made = TraceBuilder(rank=rank, world_size=3)
        for number, start in enumerate(
            (0, 500, 1100, 500 + length, 500 + 2 * length, 1200 + 2 * length)
        ):
            made.op("aten::mm", start, 60).launch(
                "cudaLaunchKernel", start + 20, 10, correlation=number
            )
            made.kernel("gemm", start + 45 + rank, 200 + 100 * rank, correlation=number)
        for step in range(3):
            made.mark(step, 400 + step * length)
        traces.append(made.build())
    return Session(tuple(traces), "uneven")


def one_step() -> Session:
    return Session(
        tuple(
            made.build() for made in training_job(Recipe(ranks=3, steps=1, seed=5)).run().traces()
        ),
        "one",
    )


def stages() -> Session:
    job = parallel_job(ParallelRecipe(steps=3, seed=2))
    return Session(tuple(made.build() for made in job.run().traces()), "stages")


def no_steps() -> Session:
    made = TraceBuilder()
    for number in range(5):
        made.op("aten::mm", 1000 * number, 60).launch(
            "cudaLaunchKernel", 1000 * number + 20, 10, correlation=number
        )
        made.kernel("gemm", 1000 * number + 45, 300, correlation=number)
    return Session((made.build(),), "no steps")


def dlrm() -> Session:
    if not MULTIRANK.is_dir():
        pytest.skip("needs the public traces of MULTIRANK")
    return traceloom.load(*sorted(MULTIRANK.glob("dlrm_rank*.kineto.json.gz")))


@pytest.fixture(
    scope="module",
    params=[uneven, one_step, stages, no_steps, dlrm],
    ids=lambda make: make.__name__,
)
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    return build(request.param(), ReportOptions(only=("findings", "critical_path")))


def sums(document: dict[str, Any]) -> dict[str, int]:
    """The time of all devices by kind, from the steps of each (without steps: from all of its GPU work)."""
    out = dict.fromkeys(("compute", "communication", "memory", "idle"), 0)
    for rank in document["ranks"]:
        pieces = [device for step in rank["steps"] for device in step["devices"]] or rank["devices"]
        for piece in pieces:
            out["compute"] += piece["compute_ns"]
            out["communication"] += piece["exposed_communication_ns"]
            out["memory"] += piece["exposed_memory_ns"]
            out["idle"] += piece["idle_ns"]
            if rank["steps"]:
                out["idle"] += piece["edge_idle_before_ns"] + piece["edge_idle_after_ns"]
    return out


def lengths(document: dict[str, Any]) -> list[int]:
    return sorted(
        get_step_length(rank, step)
        for rank in document["ranks"]
        for step in rank["steps"]
        if step["complete"]
    )


@pytest.mark.sampled(1)
def test_answer_account_and_steps_are_the_same_time(document: dict[str, Any]) -> None:
    expected = sums(document)
    answered = {
        kind: sum(p["ns"] for p in document["answer"]["parts"] if p["kind"] == kind)
        for kind in expected
    }
    accounts = [device for rank in document["ranks"] for device in rank["gpu_account"]["devices"]]
    keys = ("compute_ns", "exposed_communication_ns", "exposed_memory_ns", "idle_ns")
    accounted = dict(
        zip(expected, (sum(device[key] for device in accounts) for key in keys), strict=True)
    )
    assert answered == accounted == expected
    assert (
        document["answer"]["whole_ns"]
        == sum(expected.values())
        == sum(d["window_ns"] for d in accounts)
    )


@pytest.mark.sampled(3)
def test_causes_of_idle_time_add_up_to_the_idle_time_of_the_sentence(
    document: dict[str, Any],
) -> None:
    causes: dict[str, int] = {}
    for rank in document["ranks"]:
        for row in rank["gpu_account"]["idle"]:
            causes[row["cause"]] = causes.get(row["cause"], 0) + row["idle_ns"]
        causes["edges"] = causes.get("edges", 0) + sum(
            d["edge_idle_ns"] for d in rank["gpu_account"]["devices"]
        )
    idle = sums(document)["idle"]
    assert sum(causes.values()) == idle
    told = re.search(r"main cause of the idle time \((.*?) of it\)", document["answer"]["sentence"])
    if told:
        assert told[1] == units.format_share(max(causes.values()), idle)


def test_the_terminal_shows_the_figures_of_the_sentence(document: dict[str, Any]) -> None:
    text = "\n".join(line.plain for line in terminal(document, ReportOptions(full=True), 160))
    expected = sums(document)
    assert (
        f"idle {units.format_share(expected['idle'], sum(expected.values()))}"
        in document["answer"]["sentence"]
    )
    assert f"Why the GPU was idle  {units.format_duration(expected['idle'])} in" in text.replace(
        " from first", " in"
    )
    for rank in document["ranks"]:
        for device in rank["gpu_account"]["devices"]:
            assert re.search(
                rf"{units.format_duration(device['window_ns'])} +{units.format_share(device['compute_ns'], device['window_ns'])} ",
                text,
            )


def test_one_length_of_a_step(document: dict[str, Any]) -> None:
    steps = lengths(document)
    if not steps:
        assert document["answer"]["step_ns"] is None
        assert "step of" not in document["answer"]["sentence"]
        return
    middle = (steps[(len(steps) - 1) // 2] + steps[len(steps) // 2]) // 2
    assert document["answer"]["step_ns"] == middle
    assert re.search(rf"steps? of {units.format_duration(middle)}", document["answer"]["sentence"])
    assert (
        f'<dt>Step</dt><dd><b title="{middle} ns">{units.format_duration(middle)}</b>'
        in render_key_numbers(list_key_numbers(document))
    )


def test_tiles_and_tables_of_the_page_are_those_of_the_sentence(document: dict[str, Any]) -> None:
    expected = sums(document)
    whole = sum(expected.values())
    busy = whole - expected["idle"]
    assert f"{busy} of {whole} ns" in render_key_numbers(list_key_numbers(document))
    assert render_headline(document)
    page = "".join(
        section.body for section in build_sections(document, document, Reasons(document["absent"]))
    )
    windows = [
        device["window_ns"]
        for rank in document["ranks"]
        for device in rank["gpu_account"]["devices"]
    ]
    assert [row["Window"] for row in tables(page)["breakdown"]] == windows


def test_markdown_has_the_same_shares(document: dict[str, Any]) -> None:
    text = markdown(document, ReportOptions())
    for rank in document["ranks"]:
        for device in rank["gpu_account"]["devices"]:
            assert (
                f"| {units.format_duration(device['window_ns'])} | {units.format_share(device['compute_ns'], device['window_ns'])} |"
                in text
            )


def test_savings_say_of_which_time_they_are(document: dict[str, Any]) -> None:
    basis = document["findings_ground"]["basis"]
    for row in document["findings"]:
        if row["saving_ns"]:
            length = row["saving_ns"] / row["saving_fraction"]
            assert units.format_duration(round(length)) in basis
            assert row["saving_ns"] <= length
    text = "\n".join(line.plain for line in terminal(document, ReportOptions(full=True), 160))
    assert f"savings {basis}" in text
    brief = "\n".join(line.plain for line in terminal(document, ReportOptions(), 160))
    assert re.search(r"What to fix first  .*savings (per|of) .*\d (ms|µs|s)$", brief, re.MULTILINE)
    assert document["answer"]["sentence"] in brief.replace("\n ", " ")
