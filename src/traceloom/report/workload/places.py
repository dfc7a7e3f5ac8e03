"""Where boxes stand: columns from left to right as things follow each other, few crossings between them."""

from __future__ import annotations

from dataclasses import dataclass

from traceloom.report.workload.picture import Picture

WIDTH, HEIGHT = 232, 50
_ACROSS, _DOWN = 96, 22
_SWEEPS = 6


@dataclass(frozen=True, slots=True)
class Layout:
    """Left upper corner of every box, and the size of the whole."""

    x: tuple[int, ...]
    y: tuple[int, ...]
    width: int
    height: int


def arrange(picture: Picture) -> Layout:
    """Give every box its position; the same picture always looks the same."""
    # A box stands one column right of the box that it depends on most, among those before it in the order
    order = sorted(range(len(picture.boxes)), key=lambda box: (picture.boxes[box].place, box))
    rank = {box: number for number, box in enumerate(order)}
    strongest: dict[int, tuple[int, int]] = {}
    for link in picture.links:
        if rank[link.source] < rank[link.target]:
            key = (link.count, rank[link.source])
            if key > strongest.get(link.target, (0, -1)):
                strongest[link.target] = key
    column: dict[int, int] = {}
    for box in order:
        before = strongest.get(box)
        column[box] = column[order[before[1]]] + 1 if before else 0
    count = max(column.values(), default=-1) + 1
    columns = [[box for box in order if column[box] == number] for number in range(count)]
    _order(columns, picture)
    tallest = max(map(len, columns), default=0)
    height = tallest * (HEIGHT + _DOWN) - _DOWN if tallest else 0
    x, y = [0] * len(picture.boxes), [0] * len(picture.boxes)
    for number, boxes in enumerate(columns):
        top = (height - len(boxes) * (HEIGHT + _DOWN) + _DOWN) // 2
        for slot, box in enumerate(boxes):
            x[box], y[box] = number * (WIDTH + _ACROSS), top + slot * (HEIGHT + _DOWN)
    width = len(columns) * (WIDTH + _ACROSS) - _ACROSS if columns else 0
    return Layout(tuple(x), tuple(y), max(width, 1), max(height, 1))


def _order(columns: list[list[int]], picture: Picture) -> None:
    """Sort every column by the mean position of the neighbours, left and right in turn."""
    beside: dict[int, list[int]] = {}
    for link in picture.links:
        if link.source != link.target:
            beside.setdefault(link.source, []).append(link.target)
            beside.setdefault(link.target, []).append(link.source)
    position = {box: number / max(len(column), 1) for column in columns for number, box in enumerate(column)}
    for sweep in range(_SWEEPS):
        for column in columns if sweep % 2 == 0 else reversed(columns):
            mean = {
                box: sum(position[other] for other in beside[box]) / len(beside[box])
                if beside.get(box)
                else position[box]
                for box in column
            }
            column.sort(key=lambda box: (mean[box], box))
            position.update({box: (number + 0.5) / len(column) for number, box in enumerate(column)})
