"""Every view on a terminal keeps to its width, from 40 to 200 columns, and holds what it is about whatever the names."""

from __future__ import annotations

import datetime as dt
import io
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.text import Text

from support.pairs import compared, run
from support.sessions import EVIL
from support.small_graph import small_graph
from support.workload import collective, node, receive, send, write_set
from traceloom.analyze import gate_summary
from traceloom.changes.changes import parse
from traceloom.changes.whatif import whatif as evaluate
from traceloom.formats.chakra.nodes import find_file_sets, read_workload
from traceloom.graph import Plan, law, link_session
from traceloom.report import (
    ReportOptions,
    build_runs,
    graph,
    memory,
    memory_sources,
    verdict,
    whatif,
)
from traceloom.report.comparison import render_terminal as render_diff
from traceloom.report.graph import render as render_graph
from traceloom.report.verdict import render as render_verdict
from traceloom.report.views import terminal
from traceloom.report.views.terminal_memory import render_memory
from traceloom.report.workload import (
    build_node_document,
    convert_graph,
    convert_workload,
    find_rows,
    render as render_workload,
    render_node,
    summarise,
)
from traceloom.system import units

STEERS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
LONG = "one_name_without_any_blank_" * 12
WIDE = "名前テスト" * 12
PLAIN = "a run"
NAMES = [PLAIN, LONG, WIDE, EVIL]
every_name = pytest.mark.parametrize("name", NAMES, ids=["plain", "long", "wide", "hostile"])
Lines = Callable[[int], Iterable[Text]]


def diff(name: str) -> Lines:
    return partial(render_diff, compared(name)[0], 10)


def check(name: str) -> Lines:
    return partial(render_verdict, compared(name)[1], 10)


def owners(name: str) -> Lines:
    return partial(
        render_memory, memory.build(run(name, 20, "H100")), memory_sources.MemoryOptions()
    )


def change(name: str) -> Lines:
    graph = link_session(run(name, 20, "H100"))
    plan = Plan(graph)
    kept = law(graph, plan)
    changes = [parse("kernels * 0.5"), parse("rank 1 delay remove")]
    return partial(
        whatif.render,
        whatif.build(name, None, changes, evaluate(graph, changes, plan=plan, kept=kept), kept),
    )


def linked(name: str) -> Lines:
    return partial(render_graph, graph.build(link_session(run(name, 20, "H100"))))


def listed(name: str) -> Lines:
    saved = int(dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.timezone.utc).timestamp())
    summary = gate_summary.summarise(run(name, 20, "H100"))
    kept = gate_summary.Baseline(
        gate_summary.FORMAT, gate_summary.VERSION, "0.0.0", "main", saved, [summary]
    )
    rows = [verdict.build_baseline_row(f"main-{number}", kept) for number in range(3)]
    return partial(verdict.render_baselines, rows, 2)


def several(name: str) -> Lines:
    sessions = [run(name, 20, "H100"), run(name, 60, "A100")]
    document = build_runs(sessions, name, [f"traceloom report {number}" for number in range(2)])
    return partial(terminal.render, document, ReportOptions())


VIEWS = (diff, check, owners, change, linked, listed, several)
every_view = pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)


def shown(lines: Lines, columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What stands on a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    terminal.print_lines(lines, stream)
    return stream.getvalue().splitlines()


@pytest.mark.sampled(5)
@every_name
@every_view
def test_no_line_is_wider_than_the_terminal_and_none_steers_it(
    view: Callable[[str], Lines], name: str, monkeypatch: pytest.MonkeyPatch, thorough: bool
) -> None:
    lines = view(name)
    more = (61, 72, 99, 120, 139) if thorough else ()
    for columns in (60, 80, 100, 140, 200, *more):
        text = shown(lines, columns, monkeypatch)
        assert max(map(cell_len, text)) <= min(columns, 140), columns
        assert not any(STEERS.search(line) for line in text)


@every_view
def test_a_terminal_that_is_too_narrow_gets_the_lines_of_sixty_columns(
    view: Callable[[str], Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = view(PLAIN)
    narrowest = shown(lines, 60, monkeypatch)
    for columns in (20, 40, 59):
        text = shown(lines, columns, monkeypatch)
        assert text[-len(narrowest) :] == narrowest
        warning = " ".join(text[: -len(narrowest)])
        assert warning == f"This needs 60 columns, the terminal has {columns}: lines run on."
    assert shown(lines, 500, monkeypatch) == shown(lines, 140, monkeypatch)


def squeezed(lines: list[str]) -> str:
    return "".join(" ".join(lines).split())


@pytest.mark.parametrize("columns", range(60, 141, 10))
def test_both_sides_and_the_difference_stand_on_every_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, judged = compared(PLAIN)
    text = squeezed(shown(diff(PLAIN), columns, monkeypatch))
    for row in both["breakdown"]:
        for key in ("base_ns", "new_ns", "difference_ns"):
            assert squeezed([units.format_duration(row[key])]) in text, (row["part"], key)
    for row in both["conditions"]:
        if not row["same"]:
            assert all(
                squeezed([word]) in text for side in ("base", "new") for word in row[side].split()
            )
    text = squeezed(shown(check(PLAIN), columns, monkeypatch))
    assert squeezed([judged["sentence"]]) in text
    for row in judged["checks"]:
        assert squeezed([f"{100 * row['change']:+.2f} %"]) in text
        assert squeezed([units.format_duration(round(row["base"]))]) in text
        assert squeezed([units.format_duration(round(row["new"]))]) in text


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_a_what_if_says_before_and_after_of_every_rank(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(change(PLAIN), columns, monkeypatch)
    ranks = [line for line in text if re.match(r" rank \d  ", line)]
    assert [line.split()[:2] for line in ranks] == [["rank", "0"], ["rank", "1"]]
    assert all(len(re.findall(r"\d (?:ns|µs|ms)\b", line)) == 3 for line in ranks)


@every_name
def test_workloads_and_their_nodes_keep_to_the_width(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [
        [
            node(1, us=10, name=name, is_cpu_op=True, text=name),
            collective(3, deps=[1], pg_name=name, name=name),
            send(4, 1, deps=[3, 99]) if rank == 0 else receive(4, 0, deps=[3], name=name),
        ]
        for rank in range(2)
    ]
    home = write_set(tmp_path, *ranks, groups={name: [0, 1]})
    networks = [
        convert_workload(read_workload(find_file_sets([str(home)])[0], lambda path: None)),
        convert_graph(small_graph(2)),
    ]
    for network in networks:
        views: list[Lines] = [partial(render_workload, summarise(network))]
        identities = [1, 3, 4] if network is networks[0] else [0, 4]
        for identity in identities:
            document = build_node_document(network, find_rows(network, identity, 0)[0])
            views.append(
                partial(render_node, {**document, "attributes": {name[:30]: name, "size": "3"}})
            )
        for lines in views:
            for columns in (60, 100, 140):
                text = shown(lines, columns, monkeypatch)
                assert max(map(cell_len, text)) <= columns
                assert not any(STEERS.search(line) for line in text)


def test_the_command_of_each_run_stands_whole_on_every_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions = [run(PLAIN, 20, "H100"), run(PLAIN, 60, "A100")]
    command = "traceloom report " + "/a/long/directory" * 12
    document = build_runs(sessions, PLAIN, [command, command])
    text = shown(partial(terminal.render, document, ReportOptions()), 60, monkeypatch)
    assert text.count(f" {command}") == 2
