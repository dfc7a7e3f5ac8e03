"""The page of a sweep: a picture per parameter with numbers, escaped words, and nothing drawn of what has no answer."""

from __future__ import annotations

import re

from support.documents import check_document
from traceloom.report import sweep, sweep as sweep_page
from traceloom.report.documents.predictions import SweepDocument
from traceloom.report.views.page_table import MAX_ROWS
from traceloom.workload.simulate.sweep import SweepRow, SweepTable, list_points, parse_axis


def page(*axes: str, refused: int = -1) -> str:
    """A page whose times fall with the bandwidth."""
    parsed = [parse_axis(text) for text in axes]
    rows = []
    for number, point in enumerate(list_points(parsed)):
        bandwidth = float(point.get("network.0.bandwidth", 1))  # type: ignore[arg-type]
        answer = {
            "time_ns": round(1e9 / bandwidth),
            "p10_ns": round(9e8 / bandwidth),
            "p90_ns": round(1.2e9 / bandwidth),
        }
        rows.append(
            {**point, "ranks": 8, **({"reason": "it <hangs>"} if number == refused else answer)}
        )
    document = sweep.build(SweepTable.of(parsed, rows), "a <job>")
    answers = [
        {key: value for key, value in point.items() if key not in document["keys"]}
        for point in document["points"]
    ]
    check_document({**document, "points": answers}, SweepDocument)
    return sweep_page.render(document)


def test_a_curve_per_choice_falls_with_the_bandwidth() -> None:
    made = page("network.0.bandwidth=10,20,40", "device=H100 SXM,<b>A100</b>")
    assert made.count('<section id="over-') == 1  # words are no axis
    lines = re.findall(r'<path d="M([^"]+)" fill="none"', made)
    assert len(lines) == 2
    for line in lines:
        corners = [tuple(map(float, corner.split())) for corner in line.split("L")]
        assert [x for x, _ in corners] == sorted(x for x, _ in corners)
        assert [y for _, y in corners] == sorted(
            y for _, y in corners
        )  # down the page is less time
        assert len(corners) == 3
    assert made.count('fill-opacity=".12"') == 2
    assert "<b>A100" not in made
    assert "a <job>" not in made


def test_a_point_without_an_answer_is_in_the_table_alone() -> None:
    made = page("network.0.bandwidth=10,20,40", refused=1)
    (line,) = re.findall(r'<path d="M([^"]+)" fill="none"', made)
    assert line.count("L") == 1
    assert "2 points: 25.0 ms to 100 ms" in made
    assert "it <hangs>" not in made
    assert "hangs" in made


def test_a_word_that_is_no_number_of_ranks_is_a_point_without_an_answer() -> None:
    why = "`ranks` is a whole number above 0, not eight"
    rows: list[SweepRow] = [
        {"ranks": 4, "time_ns": 1000, "cost": 0.5},
        {"ranks": "eight", "reason": why},
    ]
    document = sweep.build(SweepTable.of([parse_axis("ranks=4,eight")], rows), "job")
    assert [point["pareto"] for point in document["points"]] == [True, False]
    lines = [line.plain for line in sweep.render_sweep(document, 100)]
    assert [line.split() for line in lines if "1.00 µs" in line] == [
        ["*", "4", "1.00", "µs", "0.5"]
    ]
    assert any(why in line for line in lines)
    assert "1 point: 1.00 µs to 1.00 µs" in sweep_page.render(document)


def test_one_value_is_no_picture() -> None:
    assert '<section id="over-' not in page("network.0.bandwidth=10")


def test_columns_that_say_nothing_are_left_out() -> None:
    assert "Why not" not in page("network.0.bandwidth=10,20,40")
    assert "Why not" in page("network.0.bandwidth=10,20,40", refused=1)


def test_a_table_that_is_cut_says_what_writes_all_of_it() -> None:
    made = page(f"network.0.bandwidth=1..{MAX_ROWS + 1}")
    assert "<code>-o sweep.csv</code> has all of them" in made
    assert "traceloom report -o" not in made
