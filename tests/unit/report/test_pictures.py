"""Pictures drawn from numbers: what is drawn is as long, as high and as dark as the numbers say, inside its frame."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from support.figures import figure
from support.pages import Elements, islands
from support.sessions import EVIL
from traceloom.report.figure import (
    downsample,
    draw_curve as curve_figure,
    draw_heat_map,
    draw_icicle as icicle,
    draw_roofline as roofline,
    draw_stacked_bar,
    encode_level_changes,
    pick_block_character,
    render_legend,
)
from traceloom.report.sections.kernels import draw_stacked_bars
from traceloom.report.sections.launches import draw_step_curves
from traceloom.report.views.page_head import Reasons, render_capture
from traceloom.report.views.terminal_table import draw_bar, draw_sparkline
from traceloom.system import units
from traceloom.system.sanitize import sanitize

PARTS = st.lists(
    st.tuples(
        st.text(max_size=8),
        st.sampled_from(["compute", "idle", "memory", "other"]),
        st.integers(0, 10**15),
    ),
    min_size=1,
    max_size=8,
)


def svg(drawn: str) -> ET.Element:
    """The picture in a piece of a page, which has to be well formed as XML too."""
    match = re.search(r"<svg.*?</svg>", drawn, re.DOTALL)
    assert match
    return ET.fromstring(match[0])


def box(picture: ET.Element) -> tuple[float, float]:
    left, top, width, height = map(float, picture.attrib["viewBox"].split())
    assert left == top == 0
    return width, height


def staircase(path: str) -> Iterator[tuple[float, float]]:
    """The corners of a path of moves, horizontal and vertical lines."""
    x = y = 0.0
    for letter, numbers in re.findall(r"([MHV])([^MHV]+)", path):
        values = [float(number) for number in numbers.split()]
        if letter == "M":
            x, y = values
        elif letter == "H":
            (x,) = values
        else:
            (y,) = values
        yield x, y


# -- bars ---------------------------------------------------------------------------------------------------------


@given(PARTS)
def test_the_boxes_of_a_bar_stand_side_by_side_and_are_as_wide_as_their_share(
    parts: list[tuple[str, str, int]],
) -> None:
    whole = sum(ns for _, _, ns in parts)
    boxes = svg(draw_stacked_bar(parts, whole)).findall("rect")
    drawn = [(label, ns) for label, _, ns in parts if ns]
    assert len(boxes) == len(drawn)
    left = 0.0
    for element, (label, ns) in zip(boxes, drawn, strict=True):
        assert float(element.attrib["x"]) == pytest.approx(left, abs=0.011)
        assert float(element.attrib["width"]) == pytest.approx(1000 * ns / whole, abs=0.006)
        left += 1000 * ns / whole
        title = element.findtext("title") or ""
        assert (
            title
            == f"{sanitize(label)} {units.format_duration(ns)} ({units.format_share(ns, whole)})"
        )
    assert left == pytest.approx(1000 if whole else 0)


@given(PARTS, st.integers(1, 10**15))
def test_bars_of_one_picture_are_as_long_as_they_are_of_the_longest(
    parts: list[tuple[str, str, int]], more: int
) -> None:
    whole = sum(ns for _, _, ns in parts)
    boxes = svg(draw_stacked_bar(parts, whole, whole + more)).findall("rect")
    drawn = sum(float(element.attrib["width"]) for element in boxes)
    assert drawn == pytest.approx(1000 * whole / (whole + more), abs=0.05)


def test_a_legend_names_the_parts_that_take_time_with_their_shares() -> None:
    found = Elements(
        render_legend([("busy", "compute", 750), ("none", "memory", 0), (EVIL, "idle", 250)], 1000)
    )
    assert found.tags["li"] == 2
    assert "75.0 %" in found.shown
    assert "25.0 %" in found.shown
    assert "none" not in found.shown
    assert sanitize(EVIL) in found.shown


@given(st.lists(st.lists(st.integers(0, 10**12), min_size=2, max_size=4), min_size=1, max_size=5))
def test_stacked_bars_share_one_scale(times: list[list[int]]) -> None:
    names = ["gemm", "copy", "strange", "idle"]
    bars = [
        (f"GPU {number}", list(zip(names, row, strict=False))) for number, row in enumerate(times)
    ]
    drawn = draw_stacked_bars(bars, {"gemm": "compute", "copy": "memory", "idle": "idle"})
    longest = max(map(sum, times))
    assert bool(drawn) == bool(longest)
    if not drawn:
        return
    picture = svg(drawn)
    width, height = box(picture)
    by_row: dict[str, list[ET.Element]] = {}
    for element in picture.findall("rect"):
        by_row.setdefault(element.attrib["y"], []).append(element)
    labels = [element.text for element in picture.findall("text")]
    assert labels == [label for label, _ in bars]
    room = (
        max(float(e.attrib["x"]) + float(e.attrib["width"]) for row in by_row.values() for e in row)
        - 130
    )
    assert room == pytest.approx(width - 130, abs=0.5)
    for number, row in enumerate(times):
        drawn_row = by_row.get(str(number * 27), [])
        assert len(drawn_row) == sum(ns > 0 for ns in row)
        right = max(
            (float(e.attrib["x"]) + float(e.attrib["width"]) for e in drawn_row), default=130.0
        )
        assert right - 130 == pytest.approx((width - 130) * sum(row) / longest, abs=0.5)
        assert all(float(e.attrib["y"]) + float(e.attrib["height"]) <= height for e in drawn_row)


@given(st.floats(0, 1), st.integers(1, 80))
def test_a_share_on_a_terminal_is_seen_where_it_is_not_nothing(fraction: float, width: int) -> None:
    shown = draw_bar(fraction, width, "").plain
    assert len(shown) <= width
    assert bool(shown) == (fraction > 0)
    assert abs(len(shown) - width * fraction) <= 1.0


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=200), st.integers(1, 80))
def test_a_sparkline_has_its_highest_bar_where_the_highest_value_is(
    values: list[float], width: int
) -> None:
    shown = draw_sparkline(values, width)
    assert len(shown) == min(width, len(values))
    top = max(values)
    if top > 0:
        cells = [shown[values.index(top) * len(shown) // len(values)], *shown]
        assert max(shown) == "█"
        assert "█" in cells[:1] or shown.count("█") >= 1
    else:
        assert set(shown) == {"▁"}


# -- heat maps ----------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 9), st.integers(0, 9)),
        st.floats(-5, 1e9, allow_nan=False),
        max_size=40,
    )
)
def test_cells_of_a_heat_map_are_as_dark_as_their_value(
    cells: dict[tuple[int, int], float],
) -> None:
    rows = columns = list(range(10))
    labels = {key: f"{sanitize(EVIL)} {value}" for key, value in cells.items()}
    drawn = draw_heat_map(cells, rows, columns, labels, titles=("from rank", "to rank"))
    most = max(cells.values(), default=0)
    assert bool(drawn) == (most > 0)
    if not drawn:
        return
    picture = svg(drawn)
    width, height = box(picture)
    groups = picture.findall("g")
    assert len(groups) == len(rows)
    for row, group in zip(rows, groups, strict=True):
        own = [(column, cells[row, column]) for column in columns if (row, column) in cells]
        for (column, value), element in zip(own, group.findall("use"), strict=True):
            assert float(element.attrib["fill-opacity"]) == pytest.approx(
                max(value, 0) / most, abs=0.0051
            )
            assert element.findtext("title") == labels[row, column]
            assert 0 <= float(element.attrib["x"]) <= width
    assert height > 22


def test_a_heat_map_that_nobody_could_read_is_none() -> None:
    cells = {(row, 0): 1.0 for row in range(200)}
    assert draw_heat_map(cells, list(range(200)), [0], {}, titles=("rank", "step")) == ""
    assert draw_heat_map({}, [], [], {}, titles=("rank", "step")) == ""


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "·"), (1, "·"), (25, "░"), (50, "▒"), (75, "▓"), (100, "█"), (400, "█")],
)
def test_one_character_stands_for_a_value_on_a_terminal(value: float, shown: str) -> None:
    assert pick_block_character(value, 100) == shown
    assert pick_block_character(value, 0) == "·"


# -- curves -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(10**9), 10**12), max_size=400), st.integers(8, 100))
def test_of_a_long_curve_the_ends_and_the_extremes_are_kept(values: list[int], most: int) -> None:
    kept = downsample(values, most)
    assert kept == sorted(set(kept))
    if values:
        assert {0, len(values) - 1} <= set(kept)
        assert max(values[at] for at in kept) == max(values)
        assert min(values[at] for at in kept) == min(values)
    assert len(kept) <= max(2 * most, 8)
    assert len(values) > most or kept == list(range(len(values)))


@given(
    st.lists(
        st.tuples(
            st.integers(1, 10**9), st.integers(-(10**9), 10**10), st.none() | st.integers(0, 10**11)
        ),
        min_size=1,
        max_size=60,
    )
)
def test_the_curve_of_memory_is_a_staircase_inside_its_frame(
    steps: list[tuple[int, int, int | None]],
) -> None:
    times = list(itertools.accumulate(step for step, _, _ in steps))
    curve = {
        "device_type": "cuda",
        "device": 0,
        "time_ns": times,
        "allocated_bytes": [held for _, held, _ in steps],
        "reserved_bytes": [reserved for _, _, reserved in steps],
    }
    drawn = curve_figure(curve)
    picture = svg(drawn)
    width, height = box(picture)
    lines = {element.attrib["class"]: element.attrib["d"] for element in picture.findall("path")}
    assert ("line-reserved" in lines) == any(curve["reserved_bytes"])
    highest = max([0, *curve["allocated_bytes"], *filter(None, curve["reserved_bytes"])]) or 1
    lowest = min([0, *curve["allocated_bytes"]])
    corners = list(staircase(lines["line-allocated"]))
    assert all(0 <= x <= width and 0 <= y <= height for x, y in corners)
    assert [x for x, _ in corners] == sorted(x for x, _ in corners)
    for value, (_, y) in zip(
        curve["allocated_bytes"], corners[::2], strict=True
    ):  # each value after its move
        assert y == pytest.approx(
            12 + (height - 34) * (highest - value) / (highest - lowest), abs=0.06
        )
    (data,) = islands(drawn)
    assert data["times"] == times
    assert data["series"][0] == {"name": "allocated", "values": curve["allocated_bytes"]}
    said = Elements(drawn).shown
    assert f"peak {units.format_size(max(curve['allocated_bytes']))} allocated" in said


@given(
    st.dictionaries(
        st.sampled_from("abcdefghijkl"), st.lists(st.integers(0, 500), max_size=12), max_size=12
    )
)
def test_the_eight_highest_curves_are_drawn_with_their_legend(values: dict[str, list[int]]) -> None:
    lines = {name: list(enumerate(heights)) for name, heights in values.items()}
    drawn = draw_step_curves(lines, "launches pending")
    names = [name for name, heights in values.items() if heights]
    assert bool(drawn) == bool(names)
    if not drawn:
        return
    picture = svg(drawn)
    width, height = box(picture)
    titles = [
        element.findtext("title")
        for element in picture.findall("path")
        if element.find("title") is not None
    ]
    assert len(titles) == min(8, len(names))
    omitted = set(names) - set(titles)
    assert all(
        max(values[name]) <= min(max(values[str(title)]) for title in titles) for name in omitted
    )
    for element in picture.findall("path"):
        assert all(
            -0.1 <= x <= width + 0.1 and -0.1 <= y <= height
            for x, y in staircase(element.attrib["d"])
        )
    assert Elements(drawn).tags["li"] == len(titles)


@given(st.lists(st.integers(0, 10**12), max_size=60))
def test_levels_come_back_from_their_changes(levels: list[int]) -> None:
    pairs = encode_level_changes(levels)
    again, level, left = [], 0, list(zip(pairs[::2], pairs[1::2], strict=True))
    since = 0
    for _ in levels:
        if left and left[0][0] == since:
            level += left.pop(0)[1]
            since = 0
        since += 1
        again.append(level)
    assert again == levels
    assert all(change for change in pairs[1::2]), "what rests is not written"


# -- the roofline -------------------------------------------------------------------------------------------------


def operator(
    name: str, intensity: float, rate: float, *, ns: int = 1000, rank: int = 0, **more: Any
) -> dict[str, Any]:
    peaks = {"arithmetic": "bf16", "matrix": True, "peak_flop_rate": 1e15, "peak_byte_rate": 3e12}
    row = {
        "rank": rank,
        "name": name,
        "op": name,
        "shapes": "[[4,4]]",
        "count": 1,
        "total_ns": ns,
        "intensity": intensity,
    }
    return {**row, "flop_rate": rate, **peaks, "roofline_fraction": 0.5, "bound": "compute", **more}


def points(drawn: str) -> list[ET.Element]:
    return [element for element in svg(drawn).iter() if element.tag == "circle"]


@given(
    st.lists(
        st.tuples(st.floats(1e-3, 1e5), st.floats(1e3, 1e15), st.integers(1, 10**12)),
        min_size=1,
        max_size=20,
    )
)
def test_points_of_the_roofline_lie_on_logarithmic_axes(
    rows: list[tuple[float, float, int]],
) -> None:
    operators = [operator(f"op{number}", *row[:2], ns=row[2]) for number, row in enumerate(rows)]
    drawn = roofline(operators)
    width, height = box(svg(drawn))
    circles = points(drawn)
    assert len(circles) == len(rows)
    places = []
    for element in circles:
        x, y, radius = (float(element.attrib[name]) for name in ("cx", "cy", "r"))
        assert 0 <= x <= width
        assert 0 <= y <= height
        assert 0 < radius <= 22.1
        places.append((x, y))
    by_time = sorted(rows, key=lambda row: -row[2])
    for (x, y), (intensity, rate, _), (other_x, other_y), (more, faster, _) in itertools.islice(
        (
            (a, r, b, s)
            for (a, r), (b, s) in itertools.combinations(list(zip(places, by_time, strict=True)), 2)
        ),
        30,
    ):
        if len({row[2] for row in rows}) == len(rows):  # the order of equal times is theirs
            assert (x - other_x) * (math.log(intensity) - math.log(more)) >= -0.2
            assert (y - other_y) * (math.log(rate) - math.log(faster)) <= 0.2


def test_a_roofline_without_work_in_a_known_time_is_no_picture() -> None:
    assert roofline([]) == ""
    assert roofline([operator("a", 0.0, 1e12), operator("b", 1.0, 0.0)]) == ""


def test_names_in_the_roofline_are_text_and_the_peaks_are_named() -> None:
    found = Elements(
        roofline(
            [operator(EVIL, 10, 1e14), operator("b", 100, 5e14, matrix=False, peak_flop_rate=6e13)]
        )
    )
    assert found.tags["img"] == 0
    assert "bf16" in found.shown
    assert "vector units" in found.shown
    assert "1.00 PFLOP/s" in found.shown.replace("\u202f", " ")


# -- icicles ------------------------------------------------------------------------------------------------------


def test_an_icicle_holds_its_boxes_with_harmless_names() -> None:
    nodes = [(None, "root", 1, 100, 50), (0, EVIL, 2, 60, None), (0, "b", 1, 40, 50)]
    drawn = icicle(nodes, label=EVIL, note=EVIL)
    (data,) = islands(drawn)
    assert [row[0] for row in data["nodes"]] == [-1, 0, 0]
    assert data["nodes"][1][1] == sanitize(EVIL)
    found = Elements(drawn)
    assert found.tags["img"] == 0
    assert found.tags["button"] == 2
    assert [value for _, name, value in found.attributes if name == "aria-pressed"] == [
        "true",
        "false",
    ]


def test_an_icicle_without_gpu_time_has_no_choice_of_it() -> None:
    drawn = icicle([(None, "root", 1, 100, None), (0, "a", 1, 60, None)], label="host")
    assert Elements(drawn).tags["button"] == 0
    assert 'data-measure="host"' in drawn
    assert all(row[4] is None for row in islands(drawn)[0]["nodes"])


# -- steps of the recorded run ------------------------------------------------------------------------------------


def recorded(**entry: Any) -> str:
    document = {
        "capture": {"run": {"command": ["python", EVIL]}, "ranks": [{"rank": 0, **entry}]},
        "ranks": [{"rank": 0}],
    }
    return render_capture(document, Reasons([]))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**10), st.sampled_from(["recorded", "graph", "early", "new kind"])
        ),
        max_size=40,
    )
)
def test_every_step_of_a_run_is_a_column_as_high_as_its_time(steps: list[tuple[int, str]]) -> None:
    drawn = recorded(
        steps={"duration_ns": [ns for ns, _ in steps], "state": [state for _, state in steps]}
    )
    if len(steps) < 2:
        assert "<svg" not in drawn
        return
    columns = svg(drawn).findall("rect")
    assert len(columns) == len(steps)
    longest = max(ns for ns, _ in steps) or 1
    for element, (ns, _) in zip(columns, steps, strict=True):
        y, height = float(element.attrib["y"]), float(element.attrib["height"])
        assert height == pytest.approx(100 * ns / longest, abs=0.006)
        assert y + height == pytest.approx(100, abs=0.02)
        assert figure((element.findtext("title") or "").partition(",")[0]).holds(ns)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"steps": None},
        {"steps": []},
        {"steps": {"duration_ns": 3, "state": "x"}},
        {"settings": [1]},
        {"steps": {"duration_ns": ["x", None, 5, True, 7], "state": [EVIL] * 5}},
        {"overhead": {"ratio": "fast"}},
        {"overhead": {"ratio": 1.25, "recorded_median_ns": 5, "unrecorded_median_ns": 4}},
        {"host": EVIL, "versions": 3},
        {"versions": {"torch": EVIL, "python": None}, "settings": {EVIL: True, "shapes": False}},
    ],
    ids=str,
)
def test_a_capture_that_others_have_touched_shows_what_is_whole(entry: dict[str, Any]) -> None:
    found = Elements(recorded(**entry))
    assert found.tags["img"] == 0
    assert "Recorded with" in found.shown
    assert not re.search("[\x1b\u202e]", found.shown)


@pytest.mark.parametrize(
    "odd", [None, [], "text", {"run": None, "ranks": None}, {"ranks": [None, 3, {"rank": "x"}]}]
)
def test_a_capture_of_another_kind_is_no_failure(odd: Any) -> None:
    drawn = render_capture({"capture": odd, "ranks": [{"rank": 0}, {"rank": 1}]}, Reasons([]))
    assert drawn


ODD = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.sampled_from(["", EVIL, "recorded"]),
    ),
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.dictionaries(st.sampled_from([EVIL, "a"]), inside, max_size=2),
    ),
    max_leaves=4,
)


def some_of(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object with some of the fields that are known, or something of another kind."""
    return st.one_of(st.fixed_dictionaries({}, optional=fields), ODD)


@given(
    some_of(
        run=some_of(command=st.lists(ODD, max_size=2)),
        ranks=st.one_of(
            ODD,
            st.lists(
                some_of(
                    rank=ODD,
                    host=ODD,
                    processor=ODD,
                    usable_cpus=ODD,
                    torch_threads=ODD,
                    settings=ODD,
                    versions=some_of(torch=ODD, python=ODD),
                    overhead=some_of(ratio=ODD, recorded_median_ns=ODD, unrecorded_median_ns=ODD),
                    steps=some_of(
                        duration_ns=st.lists(ODD, max_size=4), state=st.lists(ODD, max_size=4)
                    ),
                ),
                max_size=3,
            ),
        ),
    )
)
def test_whatever_stands_in_a_capture_the_page_is_whole(odd: Any) -> None:
    drawn = render_capture({"capture": odd, "ranks": [{"rank": 0}, {"rank": 1}]}, Reasons([]))
    elements = Elements(drawn)
    assert elements.open == []
    assert elements.tags["img"] == 0
    heights = [
        float(value or 0)
        for tag, name, value in elements.attributes
        if (tag, name) == ("rect", "height")
    ]
    assert all(0 <= height <= 100 for height in heights)
