"""The board by metric and label, for rules: each looks at the series that match it, and at no others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from traceloom.agent.board import Board, Sheet
from traceloom.agent.metrics import METRICS

Labels = tuple[str, ...]


class MatchingSeries(NamedTuple):
    """Series that a rule looks at: of a metric, with these labels (column and value)."""

    metric: str
    labels: tuple[tuple[int, str], ...]

    def takes(self, labels: Labels) -> bool:
        """Whether a series of the metric is one of them."""
        return all(labels[column] == value for column, value in self.labels)

    @property
    def key(self) -> tuple[str, int, str]:
        """What it is filed under: its first label stands for all."""
        return (self.metric, *(self.labels[0] if self.labels else (-1, "")))


def matching(metric: str, where: Mapping[str, str]) -> MatchingSeries:
    """The series of a metric by those of the labels that it has."""
    names = METRICS[metric].labels
    return MatchingSeries(
        metric, tuple((names.index(label), value) for label, value in where.items() if label in names)
    )


class SeriesValues:
    """Values as they were delivered last; counters as rates per second since the time before.

    Args:
        board: Where they are.
        wanted: What rules look at.
    """

    def __init__(self, board: Board, wanted: Iterable[MatchingSeries]) -> None:
        self._board = board
        self._columns: dict[str, set[int]] = {}
        self._filed = {each.key for each in wanted}
        for metric, column, _ in self._filed:
            self._columns.setdefault(metric, set()).add(column)
        self._sheets: dict[str, Sheet] = {}
        self._files: dict[str, dict[tuple[str, int, str], dict[Labels, float]]] = {}  # by collector
        self.changed = 0  # how often anything was delivered, or taken away

    def refresh(self) -> None:
        """Take what is new on the board: once per tick, for all rules."""
        for collector in [name for name in self._sheets if name not in self._board.sheets]:
            del self._sheets[collector], self._files[collector]
            self.changed += 1
        for collector, sheet in self._board.sheets.items():
            before = self._sheets.get(collector)
            if before is not sheet:
                files: dict[tuple[str, int, str], dict[Labels, float]] = {}
                for series, value in sheet.values.items():
                    columns = self._columns.get(series[0])
                    if columns is None:
                        continue
                    now = value
                    if METRICS[series[0]].kind == "counter":  # its rate per second, at first sight unknown
                        last = before.values.get(series) if before is not None else None
                        if before is None or last is None or sheet.at_ns <= before.at_ns:
                            continue
                        # One that was set back began anew at 0.
                        now = (value - last if value >= last else value) / ((sheet.at_ns - before.at_ns) / 1e9)
                    for column in columns:
                        key = (series[0], column, series[1][column] if column >= 0 else "")
                        if key in self._filed:
                            files.setdefault(key, {})[series[1]] = now
                self._files[collector] = files
                self._sheets[collector] = sheet
                self.changed += 1

    def of(self, matching: MatchingSeries) -> Iterable[tuple[Labels, float]]:
        """The series that match, as they are now."""
        for files in self._files.values():
            for labels, value in files.get(matching.key, {}).items():
                if matching.takes(labels):
                    yield labels, value

    def delivered(self) -> set[str]:
        """Metrics that have a series now."""
        return {metric for sheet in self._board.sheets.values() for metric, _ in sheet.values}
