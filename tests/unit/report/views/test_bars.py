"""Bars add up to their width and lose no part."""

from __future__ import annotations

from hypothesis import given, strategies as st

from traceloom.report.document import Bar
from traceloom.report.views.terminal_table import (
    allocate_cells,
    draw_bar,
    draw_sparkline,
    draw_stacked_bar,
)


def test_a_bar_shows_its_parts_in_their_patterns() -> None:
    parts = [("", "compute", 4), ("", "communication", 2), ("", "memory", 1), ("", "idle", 1)]
    assert draw_stacked_bar(Bar(parts, 8), 8).plain == "████▞▞▒·"
    assert draw_stacked_bar(Bar(parts, 8, longest=16), 16).plain == "████▞▞▒·"


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=8), st.integers(8, 120))
def test_the_cells_of_a_bar_add_up_and_no_part_is_lost(parts: list[int], width: int) -> None:
    given_cells = allocate_cells(parts, width)
    assert sum(given_cells) == (width if any(parts) else 0)
    assert [count > 0 for count in given_cells] == [part > 0 for part in parts]


def test_more_parts_than_cells_still_fit() -> None:
    assert sum(allocate_cells([1, 1, 1], 2)) == 2


def test_a_share_is_drawn_to_an_eighth_of_a_cell() -> None:
    assert draw_bar(0.5, 5, "").plain == "██▌"
    assert draw_bar(0.0001, 5, "").plain == "▏"
    assert draw_bar(0.0, 5, "").plain == ""
    assert draw_bar(1.0, 5, "").plain == "█████"


def test_a_sparkline_keeps_the_highest_value_of_what_it_merges() -> None:
    assert draw_sparkline([0, 1, 8, 0], 2) == "▂█"
    assert draw_sparkline([5, 5, 5], 10) == "███"
    assert draw_sparkline([0, 0], 10) == "▁▁"
    assert draw_sparkline([], 10) == ""
