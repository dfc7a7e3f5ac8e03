"""What all views share: reasons, notices said once, names of ranks and memories, orders of tables, columns on terminals."""

from __future__ import annotations

import itertools
import re
from typing import Any

import polars as pl
import pytest
from hypothesis import given, strategies as st
from rich.text import Text

from support.reports import nulls
from support.sessions import EVIL, made, several_devices, training
from traceloom.report import SORT_KEYS, ReportOptions, build_runs
from traceloom.report.document import (
    KINDS,
    UNKNOWN_REASONS,
    Bar,
    Col,
    Table,
    UnknownValues,
    format_cell,
    select_top_rows,
)
from traceloom.report.labels import (
    ACTIVITIES,
    AT_EDGES,
    DEVICE_TIMES,
    PHASES,
    build_answer_parts,
    build_time_parts,
    clean_name,
    describe_gpu_window,
    describe_host_window,
    fit_name,
    format_memory_name,
    format_rank,
    format_rank_name,
    get_colour_group,
    get_main_thread_account,
    list_gpu_accounts,
    list_idle_causes,
    merge_notices,
)
from traceloom.report.sections import collect_reasons, load_core_sections, load_extra_sections
from traceloom.report.views.page_head import Reasons
from traceloom.report.views.terminal import (
    render,
    render_declared_table,
    render_recording,
    wrap_sentence,
)
from traceloom.report.views.terminal_table import (
    BAR_FILLS,
    TextColumn,
    render_bar_table,
    render_heading,
    render_paragraph,
    render_table,
    truncate_lines,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.columns import COLUMNS, find_column

# -- reasons ------------------------------------------------------------------------------------------------------


def test_a_reason_is_said_once_and_the_first_one_counts() -> None:
    absent = UnknownValues(0)
    absent.explain("a.b", "because")
    absent.explain("a.b", "for another reason")
    absent.explain("kernels")
    assert absent.to_list() == [
        {"path": "a.b", "reason": "because"},
        {"path": "kernels", "reason": UNKNOWN_REASONS["kernels"]},
    ]


def test_rows_have_times_after_the_epoch_and_each_null_column_a_reason() -> None:
    absent = UnknownValues(1_000)
    frame = pl.DataFrame({"start_ns": [1_500, 2_000], "rank": [0, None], "count": [1, 2]})
    assert absent.rows(frame, "kinds.kinds") == [
        {"start_ns": 500, "rank": 0, "count": 1},
        {"start_ns": 1_000, "rank": None, "count": 2},
    ]
    assert [entry["path"] for entry in absent.to_list()] == ["kinds.kinds[*].rank"]


def test_an_empty_list_is_explained_and_a_value_that_is_there_is_not() -> None:
    absent = UnknownValues(0)
    assert absent.convert_list(pl.DataFrame({"a": []}), "operators") == []
    assert absent.value(0, "answer.step_ns") == 0
    assert absent.value(None, "capture") is None
    assert [entry["path"] for entry in absent.to_list()] == ["capture", "operators"]


def test_what_nobody_declared_is_said_not_to_be_known() -> None:
    absent = UnknownValues(0)
    absent.explain("nothing.of_the_sort")
    assert absent.to_list()[0]["reason"] == "the trace does not say"


def test_reasons_of_sections_are_sentences_of_words_that_belong_to_them() -> None:
    for path, reason in {
        **UNKNOWN_REASONS,
        **collect_reasons((*load_core_sections(), *load_extra_sections())),
    }.items():
        assert reason, path
        assert reason == reason.strip(), path
        assert not reason.endswith("."), "views end the sentence"
        assert re.fullmatch(r"[a-z_]+(\[\*\])?(\.[a-z0-9_]+(\[\*\])?)*", path), path


def test_the_page_finds_reasons_of_values_and_of_columns() -> None:
    document = {
        "absent": [{"path": "a", "reason": "no `a`"}, {"path": "a.rows[*].x", "reason": "no x"}]
    }
    found = Reasons(document["absent"])
    assert found.of("a") == "no `a`"
    assert found.of("b") == "the report does not say"
    assert found.columns("a.rows") == {"x": "no x"}
    assert "no <code>a</code>." in found.line("a", "A")


def test_nulls_of_a_document_are_found_by_their_paths() -> None:
    value = {
        "a": None,
        "b": [{"c": None}, {"c": 1}],
        "capture": {"d": None},
        "e": {"outside": [{"f": None}]},
    }
    assert sorted(nulls(value)) == ["a", "b[*].c", "e.steps[*].devices[*].f"]


# -- notices ------------------------------------------------------------------------------------------------------


def notice(
    slug: str = "odd",
    rank: int | None = 0,
    where: str = "",
    message: str = "it is odd",
    **more: Any,
) -> Any:
    return {
        "slug": slug,
        "severity": "warning",
        "rank": rank,
        "where": where,
        "message": message,
        "count": 1,
        **more,
    }


def test_what_several_ranks_have_in_common_is_said_once_with_how_many() -> None:
    (said,) = merge_notices([notice(rank=rank) for rank in range(5)], ranks=5)
    assert said.sentence == "rank 0: it is odd (and 4 more like this)"
    (alone,) = merge_notices([notice()], ranks=1)
    assert alone.sentence == "it is odd"
    assert [
        each.slug for each in merge_notices([notice("b"), notice("a"), notice("b")], ranks=1)
    ] == ["b", "a"]


def test_a_notice_of_another_severity_is_another_notice() -> None:
    assert len(merge_notices([notice(), notice() | {"severity": "error"}], ranks=1)) == 2


def test_a_notice_names_the_parts_that_it_weakens() -> None:
    (said,) = merge_notices(
        [notice(affects=[{"part": "host.threads", "how": "x"}, {"part": "kernels", "how": "y"}])],
        ranks=1,
    )
    assert said.weakens == ("threads", "kernels")


# -- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"device_type": "cuda", "device": 0}, "cuda 0"),
        ({"device_type": "cuda", "device": 7}, "cuda 7"),
        ({"device_type": "cuda", "device": None}, "cuda"),
        ({"device_type": "cpu", "device": 0}, "cpu"),
        ({"device_type": "cpu-shared", "device": 3}, "cpu-shared"),
        ({"device_type": "device", "device": -1}, "device"),
    ],
)
def test_a_memory_is_called_by_its_kind_and_number(row: dict[str, Any], name: str) -> None:
    assert format_memory_name(row) == name


def test_a_rank_that_is_unknown_is_called_by_its_place() -> None:
    assert [format_rank_name({"rank": rank}, 4) for rank in (None, 0, 3)] == [
        "trace 5",
        "rank 0",
        "rank 3",
    ]
    assert [format_rank(rank) for rank in (None, 3)] == ["rank ?", "rank 3"]


def test_a_module_is_called_without_what_only_says_that_it_is_one() -> None:
    assert clean_name("traceloom.module:net.layer") == "net.layer"
    assert clean_name(EVIL) == sanitize(EVIL)


@given(
    st.text(alphabet="ab<>(), :", max_size=60),
    st.text(alphabet="ab<>(), :", max_size=60),
    st.integers(20, 60),
)
def test_short_names_are_the_names_themselves_where_they_fit(
    name: str, other: str, width: int
) -> None:
    if len(name) <= width:
        assert fit_name(name, width) == name
    assert len(fit_name(name + other, width)) <= width


# -- parts of time ------------------------------------------------------------------------------------------------


def test_every_kind_of_time_has_a_pattern_and_a_colour_group() -> None:
    for part in (*DEVICE_TIMES, *PHASES, *ACTIVITIES):
        assert part.group in BAR_FILLS
        assert get_colour_group(part.key) == part.group or part in DEVICE_TIMES
    assert get_colour_group("what a later version knows") == "other"
    patterns = [BAR_FILLS[part.group][0] for part in DEVICE_TIMES]
    assert len(set(patterns)) == len(patterns), "a bar can be read without colours"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["compute", "idle", "forward: op", "other", "x: y"]),
            st.integers(0, 10**9),
        )
    )
)
def test_the_parts_of_an_answer_keep_their_time_and_idle_time_comes_last(
    parts: list[tuple[str, int]],
) -> None:
    answer = {
        "parts": [{"label": name, "kind": name.partition(":")[0], "ns": ns} for name, ns in parts]
    }
    drawn = build_answer_parts(answer)
    assert sorted(ns for _, _, ns in drawn) == sorted(ns for _, ns in parts)
    groups = [colour for _, colour, _ in drawn]
    assert groups == sorted(groups, key=lambda colour: colour == "idle")


def test_accounts_of_the_devices_and_of_the_main_thread_are_of_the_steps() -> None:
    document = made(training)[1]
    assert describe_gpu_window(document) == "in all steps"
    assert describe_host_window(document) == "in all steps"
    for rank, account in list_gpu_accounts(document):
        causes = list(list_idle_causes(account))
        idle = sum(device["idle_ns"] for device in account["devices"])
        assert sum(cause.idle_ns for cause in causes) == idle
        assert all(cause.gap_count is None for cause in causes if cause.cause == AT_EDGES)
        steps = sum(step["duration_ns"] for step in rank["steps"])
        assert sum(row["ns"] for row in get_main_thread_account(rank)) == steps


def test_parts_of_a_stretch_are_named_in_their_order() -> None:
    drawn = build_time_parts(
        DEVICE_TIMES, {"compute_ns": 5, "idle_ns": 3, "exposed_memory_ns": None}
    )
    assert [ns for _, _, ns in drawn] == [5, 0, 0, 3]
    assert [name for name, _, _ in drawn] == [part.label for part in DEVICE_TIMES]


# -- tables -------------------------------------------------------------------------------------------------------

ROWS = [
    {"name": name, "total_ns": total, "count": count, "mean_ns": total // count}
    for name, total, count in (("b", 300, 3), ("a", 300, 1), ("d", 50, 50), ("c", 900, 2))
]


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        (None, "badc"),
        ("name", "abcd"),
        ("total", "cbad"),
        ("count", "dbca"),
        ("mean", "cabd"),
        ("self", "cbad"),
        ("device", "cbad"),
        ("max", "cbad"),
    ],
)
def test_a_table_is_in_the_order_that_was_asked_for_and_its_own_among_equals(
    sort: str | None, names: str
) -> None:
    table = Table("t", "T", [Col("name", "Name", "name")], ROWS)
    assert (
        "".join(str(row["name"]) for row in select_top_rows(table, ReportOptions(sort=sort)))
        == names
    )
    assert (
        "".join(str(row["name"]) for row in select_top_rows(table, ReportOptions(sort=sort, top=2)))
        == names[:2]
    )


def test_the_heaviest_rows_are_shown_in_their_own_order() -> None:
    table = Table("t", "T", [Col("name", "Name", "name")], ROWS, weight="total_ns")
    assert [row["name"] for row in select_top_rows(table, ReportOptions(top=2))] == ["b", "c"]
    assert len(select_top_rows(table, ReportOptions(top=10))) == 4


@pytest.mark.parametrize("sort", SORT_KEYS)
def test_a_table_without_the_column_keeps_its_order(sort: str) -> None:
    table = Table("t", "T", [Col("x", "X")], [{"x": 3}, {"x": 1}, {"x": 2}])
    assert [row["x"] for row in select_top_rows(table, ReportOptions(sort=sort))] == [3, 1, 2]
    assert list(select_top_rows(Table("t", "T", [], []), ReportOptions(sort=sort))) == []


def test_rows_that_do_not_know_what_they_are_sorted_by_come_last() -> None:
    table = Table("t", "T", [Col("x", "X")], [{"total_ns": None}, {"total_ns": 5}, {"total_ns": 7}])
    assert [row["total_ns"] for row in select_top_rows(table, ReportOptions(sort="total"))] == [
        7,
        5,
        None,
    ]


def test_a_column_is_of_a_kind_that_views_can_write() -> None:
    with pytest.raises(ValueError, match="no kind of column"):
        Col("x", "X", "parsecs")
    for kind in KINDS:
        assert Col("x", "X", kind).numeric == (kind in units.NUMERIC_UNITS)
    assert all(declared.unit in KINDS for declared in COLUMNS.values())
    assert format_cell(Col("x", "X"), EVIL) == sanitize(EVIL)
    assert format_cell(Col("x", "X"), None) == format_cell(Col("x", "X", "time"), None) == "–"


@given(
    st.lists(
        st.tuples(st.text(max_size=70), st.integers(0, 10**15), st.text(max_size=90)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([60, 80, 100, 140]),
)
def test_a_table_of_any_texts_keeps_to_the_width_and_holds_what_is_kept(
    rows: list[tuple[str, int, str]], width: int
) -> None:
    columns = [
        Col("what", "What"),
        Col("kept", "Kept", "time", kept=True),
        Col("wide", "Wide", "time", narrow=False),
        Col("name", "Name", "name"),
    ]
    data = [{"what": what, "kept": ns, "wide": ns, "name": name} for what, ns, name in rows]
    drawn = list(
        truncate_lines(
            render_declared_table(Table("t", "T", columns, data), ReportOptions(top=50), width),
            width,
        )
    )
    assert all(line.cell_len <= width for line in drawn)
    assert len(drawn) == len(rows) + 3
    for line, (_, ns, _) in zip(drawn[3:], rows, strict=True):
        assert units.format_duration(ns) in line.plain


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=5), st.integers(60, 140))
def test_bars_stand_beside_their_row_or_below_it(times: list[int], width: int) -> None:
    columns = [TextColumn("name", right=False), TextColumn("time")]
    rows = [[f"row {number}", units.format_duration(ns)] for number, ns in enumerate(times)]
    drawn = render_bar_table(columns, rows, lambda i, room: Text("#" * room), width)
    beside = len(drawn) == 1 + len(times)
    assert beside or len(drawn) == 1 + 2 * len(times)
    assert all(line.cell_len <= width for line in drawn)
    names = [line.plain for line in drawn if "row" in line.plain]
    assert [name.split("#")[0].split()[1] for name in names] == [
        str(number) for number in range(len(times))
    ]


@given(st.text(max_size=200), st.text(max_size=200), st.integers(40, 140))
def test_headings_and_paragraphs_keep_to_the_width_whatever_they_say(
    title: str, note: str, width: int
) -> None:
    for line in truncate_lines(
        itertools.chain(render_heading(title[:20], note, width), render_paragraph(note, width)),
        width,
    ):
        assert line.cell_len <= width
        assert sanitize(line.plain) == line.plain


def test_columns_are_as_wide_as_their_widest_cell_and_numbers_stand_right() -> None:
    drawn = render_table(
        [TextColumn("n"), TextColumn("t", right=False)],
        [["1", "a"], ["100", "bbb"]],
        ("last", lambda i, _: f"x{i}"),
        40,
    )
    assert [line.plain for line in drawn] == ["   n  t    last", "   1  a    x0", " 100  bbb  x1"]


def test_numbers_stay_with_their_units_where_a_sentence_breaks() -> None:
    sentence = "it takes 12.3 ms of 45.6 ms and 78.9 % of the rest, which is 1.00 GB"
    for width in range(12, 60):
        for line in wrap_sentence(sentence, width):
            assert not re.search(r"\d$", line), (width, line)


# -- several runs, and how a run was recorded ---------------------------------------------------------------------


def test_several_runs_have_a_row_each_and_everything_else_a_reason() -> None:
    sessions = [made(several_devices)[0], made(training)[0]]
    document = build_runs(sessions, "both", ["traceloom report a", "traceloom report b"])
    assert [(row["ranks"], row["events"]) for row in document["runs"]] == [
        (len(session.traces), sum(trace.events.height for trace in session.traces))
        for session in sessions
    ]
    explained = {entry["path"] for entry in document["absent"]}
    missing = {
        path
        for path in nulls(document)
        if path not in explained and path.partition("[")[0] not in explained
    }
    assert missing <= {"capture"}
    shown = [line.plain for line in render(document, ReportOptions(), 80)]
    assert [line.strip() for line in shown if "traceloom report" in line] == [
        "traceloom report a",
        "traceloom report b",
    ]
    assert "2 runs; choose one" in " ".join(shown)


def shown_recording(capture: Any) -> list[str]:
    return [line.plain for line in render_recording({"capture": capture}, 80)]


def test_the_recording_says_the_command_the_window_and_what_it_cost() -> None:
    rank = {
        "versions": {"torch": "2.13", "python": "3.12"},
        "window": {"first_step": 4, "step_count": 5},
        "steps": {"duration_ns": [10, 20, 30, 20, 10, 40, 10, 10, 10, 10]},
        "overhead": {"ratio": 1.234},
    }
    text = "\n".join(
        shown_recording({"run": {"command": ["python", "my train.py"]}, "ranks": [rank]})
    )
    assert "python 3.12, torch 2.13" in text
    assert "python 'my train.py'" in text
    assert "recorded steps 4 to 8 of 10; a recorded step took 1.23 × an unrecorded one" in text
    assert "every step of the run" in text
    assert "up to 40 ns" in text


@pytest.mark.parametrize(
    "capture",
    [
        None,
        {},
        [],
        "x",
        {"ranks": []},
        {"ranks": [3]},
        {"ranks": [{"versions": [1], "window": "x", "steps": 3}]},
        {"ranks": [{"window": {"first_step": True, "step_count": 1}, "overhead": {"ratio": "x"}}]},
        {
            "run": {"command": EVIL},
            "ranks": [{"versions": {EVIL: EVIL}, "steps": {"duration_ns": ["x", -5, 3, None]}}],
        },
    ],
    ids=str,
)
def test_a_recording_of_other_kinds_is_left_out(capture: Any) -> None:
    drawn = shown_recording(capture)
    assert all(sanitize(line) == line for line in drawn)
    assert "every step" not in "\n".join(drawn)


def test_a_bar_of_a_table_is_as_long_as_its_share_of_the_longest() -> None:
    rows = [{"bar": Bar([("", "compute", ns)], ns, longest=400)} for ns in (400, 200, 100)]
    drawn = [
        line.plain
        for line in render_declared_table(
            Table("t", "T", [Col("bar", "", "bar")], rows), ReportOptions(), 66
        )
    ]
    lengths = [line.count("█") for line in drawn if "█" in line]
    assert lengths[0] == 2 * lengths[1] == 4 * lengths[2]


def test_kernels_of_an_operator_are_counted_without_its_copies_and_every_view_calls_them_so() -> (
    None
):
    document = made(several_devices)[1]
    rows = {row["name"]: row for row in document["operators"]}
    assert (rows["aten::mm"]["kernel_count"], rows["aten::copy_"]["kernel_count"]) == (3, 0)
    assert rows["aten::copy_"]["device_ns"] == 3 * 40_000
    section = next(section for section in load_core_sections() if section.key == "operators")
    (table,) = section.tables(document)
    (shown,) = [each for each in table.columns if each.key == "kernel_count"]
    declared = find_column("kernel_count", "operators")
    assert shown.title == declared.title == "Kernels"
    assert declared.meaning.startswith("kernels ")
    assert "cop" not in shown.hint + declared.meaning
