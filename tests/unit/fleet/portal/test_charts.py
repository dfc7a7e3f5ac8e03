"""Pictures of pages: places and sizes are those of the numbers, and names of strangers are text."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("htpy", reason="the extra `fleet` is not installed")

from htpy import Node, div

from traceloom.fleet.portal.charts import (
    DAY_NS,
    HOUR_NS,
    ChartColumn,
    ChartDot,
    ChartLevel,
    IcicleBox,
    draw_columns,
    draw_dots,
    draw_icicle,
    draw_share_bar,
)
from traceloom.system import units

EVIL = "</title><script>alert(1)</script>&\"'"
START = 20_000 * DAY_NS


def drawn(node: Node) -> ET.Element:
    """The elements of a picture, which is well-formed whatever the names are."""
    return ET.fromstring(str(div[node]))


def places(elements: list[ET.Element], name: str) -> list[float]:
    return [float(str(element.get(name)).removesuffix("%")) for element in elements]


@pytest.mark.parametrize("most", [3e-9, 0.7, 1.0, 99.0, 100.0, 12_345_678.0])
def test_dots_stand_where_their_time_and_value_are(most: float) -> None:
    values = [0.0, most / 2, most]
    points = [
        ChartDot(START + at * DAY_NS, value, "compute", EVIL, f"/jobs/{at}")
        for at, value in enumerate(values)
    ]
    levels = [ChartLevel(START, START + DAY_NS, most / 2, "before")]
    whole = drawn(
        draw_dots(points, levels, [(START + DAY_NS, "+1 %")], label=EVIL, write=units.format_number)
    )
    circles = whole.findall(".//circle")
    across, down = places(circles, "cx"), places(circles, "cy")
    assert across[2] - across[1] == pytest.approx(across[1] - across[0], abs=0.02)
    assert down[0] - down[1] == pytest.approx(down[1] - down[2], abs=0.11)
    [level] = whole.findall(".//line[@class='level l-before']")
    assert float(level.get("y1") or 0) == pytest.approx(down[1], abs=0.06)
    [moment] = whole.findall(".//line[@class='moment']")
    assert float((moment.get("x1") or "").removesuffix("%")) == pytest.approx(across[1], abs=0.01)
    assert all(0 <= place <= 100 for place in across)
    assert min(down) >= 0
    assert [a.get("href") for a in whole.findall(".//a")] == ["/jobs/0", "/jobs/1", "/jobs/2"]
    assert whole.findall(".//script") == []
    assert [title.text for title in whole.findall(".//title")] == [EVIL] * 3


def test_parts_of_columns_add_up_and_gaps_are_seen() -> None:
    stretches = [
        ChartColumn(START + at * HOUR_NS, [("compute", 3.0 * at), ("idle", 1.0)], f"hour {at}")
        for at in (0, 1, 3)
    ]
    whole = drawn(draw_columns(stretches, HOUR_NS, label="hours", write=units.format_number))
    heights = [places(group.findall("rect"), "height") for group in whole.findall(".//g")]
    assert [round(compute / idle, 2) for compute, idle in heights] == [0.0, 3.0, 9.0]
    left = [places(group.findall("rect"), "x")[0] for group in whole.findall(".//g")]
    assert left[2] - left[1] == pytest.approx(2 * (left[1] - left[0]), abs=0.01)


def test_boxes_are_as_wide_as_their_parts_and_lead_to_them() -> None:
    boxes = [
        IcicleBox(0, 0.0, 1.0, "all", "all", "4 h", 0.5, "compute", "/attribution", here=True),
        IcicleBox(1, 0.0, 0.75, EVIL, EVIL, "3 h", 0.5, "compute", "/attribution?at=a"),
        IcicleBox(1, 0.75, 0.25, "b", "b", "1 h", 0.5, "idle", "/attribution?at=b"),
    ]
    whole = drawn(draw_icicle(boxes, "time"))
    shown = whole.findall(".//svg[@width]")[1:]
    assert places(shown, "width") == [100.0, 75.0, 25.0]
    assert places(shown, "x") == [0.0, 0.0, 75.0]
    assert [a.get("aria-current") for a in whole.findall(".//a")] == ["true", None, None]
    assert [b.text for b in whole.findall(".//b")] == ["all", EVIL, "b"]


def test_a_bar_has_all_of_its_parts_and_nothing_where_there_is_nothing() -> None:
    whole = drawn(
        draw_share_bar([("a", "compute", 3.0), (EVIL, "idle", 1.0)], units.format_number, "parts")
    )
    assert places(whole.findall(".//rect"), "x") == [0.0, 75.0]
    assert [b.text for b in whole.findall(".//b")] == ["3", "1"]
    assert draw_dots([], [], [], label="none", write=units.format_number) is None
    assert draw_columns([], HOUR_NS, label="none", write=units.format_number) is None
    assert draw_share_bar([("a", "compute", 0.0)], units.format_number, "none") is None
