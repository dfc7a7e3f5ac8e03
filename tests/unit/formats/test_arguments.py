"""Arguments of many events, read again in one pass."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from traceloom.errors import InputError
from traceloom.formats import read_kineto
from traceloom.formats.arguments import (
    can_reread_events,
    read_all_arguments,
    read_numeric_arguments,
)
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

KEYS = {"blocks": "blocks per SM", "warps": "warps per SM"}


def kernels(count: int) -> TraceBuilder:
    """Kernels in the opposite order of time, so that the order of the file is not that of the events."""
    made = TraceBuilder()
    for number in range(count):
        made = made.kernel(
            f"kernel {number}",
            10 * (count - number),
            5,
            **{"blocks per SM": number / 4, "grid": [number]},
        )
    return made


def read(path: Path) -> tuple[Trace, np.ndarray]:
    trace = read_kineto(path)
    return trace, np.flatnonzero((trace.events["category"] == "kernel").to_numpy())


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_arguments_stand_in_the_order_of_the_events(tmp_path: Path, name: str) -> None:
    trace, rows = read(kernels(10_000).write(tmp_path / name))
    found = read_numeric_arguments(trace, rows, KEYS)
    said = [int(text.split()[1]) / 4 for text in trace.events["name"].gather(rows).to_list()]
    assert found["event"].to_list() == rows.tolist()
    assert found["blocks"].to_list() == said
    assert found["warps"].null_count() == rows.size
    assert [args["grid"] for args in read_all_arguments(trace, rows[:3])] == [
        [9999],
        [9998],
        [9997],
    ]


def test_some_events_are_enough(tmp_path: Path) -> None:
    trace, rows = read(kernels(50).write(tmp_path / "trace.json"))
    assert read_numeric_arguments(trace, rows[[3, 40]], KEYS)["blocks"].to_list() == [46 / 4, 9 / 4]
    assert read_numeric_arguments(trace, rows[:0], KEYS).height == 0


def test_values_that_are_no_finite_numbers_are_unknown(tmp_path: Path) -> None:
    values = ["N/A", None, "2.5", True, [1], 3, 1e999]
    made = TraceBuilder()
    for at, value in enumerate(values):
        made = made.kernel(f"k{at}", 10 * at, 5, **{"blocks per SM": value})
    trace, rows = read(made.write(tmp_path / "trace.json"))
    found = read_numeric_arguments(trace, rows, KEYS)["blocks"].to_list()
    assert [found[0], found[1], found[4], found[5], found[6]] == [None, None, None, 3.0, None]


def test_a_damaged_stretch_is_mended_and_a_changed_one_unknown(tmp_path: Path) -> None:
    path = kernels(4).write(tmp_path / "trace.json")
    path.write_text(
        path.read_text().replace('"kernel 2"', '"kernel "2""')
    )  # quotes that are not escaped
    trace, rows = read(path)
    assert read_numeric_arguments(trace, rows, KEYS)["blocks"].max() == 3 / 4
    path.write_text(path.read_text().replace('"kernel 3"', '"kernel X"'))
    assert read_numeric_arguments(trace, rows, KEYS)["blocks"][0] is None


def test_a_file_that_is_gone_or_cut_is_told(tmp_path: Path) -> None:
    path = kernels(4).write(tmp_path / "trace.json.gz")
    trace, rows = read(path)
    assert can_reread_events(trace)
    text = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(text[: len(text) // 2]))
    assert read_numeric_arguments(trace, rows, KEYS)["blocks"].null_count() > 0
    path.unlink()
    assert not can_reread_events(trace)
    with pytest.raises(InputError):
        read_numeric_arguments(trace, rows, KEYS)


def test_places_of_lists_are_numbers_too(tmp_path: Path) -> None:
    grids = [[7, 16, 32], [8], "[1,2,3]", None, [1, "x", None]]
    made = TraceBuilder()
    for at, grid in enumerate(grids):
        made = made.kernel(f"k{at}", 10 * at, 5, grid=grid)
    trace, rows = read(made.write(tmp_path / "trace.json"))
    sizes = read_numeric_arguments(
        trace, rows, {"x": ("grid", 0), "y": ("grid", 1), "z": ("grid", 2)}
    )
    assert sizes.drop("event").rows() == [
        (7, 16, 32),
        (8, None, None),
        (None,) * 3,
        (None,) * 3,
        (1, None, None),
    ]
