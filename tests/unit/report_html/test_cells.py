"""Numbers in tables: one unit per column, three digits, aligned, never zero unless zero."""

from __future__ import annotations

from traceloom.report.table import Col
from traceloom.report.views.html.cells import cells
from traceloom.report.views.html.text import text


def test_the_exact_value_stands_behind_the_rounded_one() -> None:
    column = Col("t", "T", "time")
    assert cells(column, [1_234_567], (1_000_000, "ms"), "") == ['<td class="n" data-v="1234567">1.23</td>']


def test_decimals_are_aligned_by_padding() -> None:
    column = Col("t", "T", "time")
    made = cells(column, [123_000_000, 12_340_000, 1_230_000], (1_000_000, "ms"), "")
    assert [cell.split('"')[1] for cell in made] == ["n p2 w", "n p1", "n"]


def test_unknown_is_a_dash_with_a_reason() -> None:
    made = cells(Col("b", "B", "bytes"), [None], (1, ""), 'the trace does not "say"')
    assert made == ['<td class="n none" title="the trace does not &quot;say&quot;">–</td>']


def test_a_share_is_never_zero_or_whole_unless_it_is() -> None:
    made = cells(Col("s", "S", "share"), [0.0, 0.0001, 0.5, 0.9999, 1.0], (0.01, "%"), "")
    shown = [cell.split('"sh">')[1].split("<")[0] for cell in made]
    assert shown == ["0", "&lt;0.1", "50.0", "&gt;99.9", "100"]


def test_texts_are_escaped_and_control_characters_spelled_out() -> None:
    assert text("<b>&\"'\x1b\u202e") == "&lt;b&gt;&amp;&quot;&#x27;\\x1b\\u202e"
