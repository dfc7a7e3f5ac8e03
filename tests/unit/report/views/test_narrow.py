"""A terminal too narrow for the report is told so, in lines that fit."""

from __future__ import annotations

import io

import pytest
from rich.text import Text

from traceloom.report.views.terminal import print_lines


def _shown(columns: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
    """What stands on the stream, and the widths asked for."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, widths = io.StringIO(), []

    def rendered(width: int) -> list[Text]:
        widths.append(width)
        return [Text("the report")]

    print_lines(rendered, stream)
    return stream.getvalue().splitlines(), widths


@pytest.mark.parametrize("columns", [20, 40, 59])
def test_a_narrow_terminal_is_told_what_is_needed(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, widths = _shown(columns, monkeypatch)
    assert widths == [60]
    assert lines[-1] == "the report"
    said = lines[:-1]
    assert all(len(line) <= columns for line in said)
    assert " ".join(said) == f"This needs 60 columns, the terminal has {columns}: lines run on."


@pytest.mark.parametrize(("columns", "width"), [(60, 60), (100, 100), (500, 140)])
def test_a_wide_one_is_told_nothing(
    columns: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _shown(columns, monkeypatch) == (["the report"], [width])
