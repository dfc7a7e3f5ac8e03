"""Tells the ranks of a file apart in which somebody merged the recordings of several.

Mergers put a label before each process id (`[TP01] 4711`), name the processes after their rank, or
only join the lists of events. Nothing in such a file may be joined before its ranks are separated:
the correlations, external ids and arrows of different ranks have the same numbers.
"""

import re
from typing import Any

import numpy as np
from msgspec import structs

from traceloom.errors import InputError
from traceloom.formats.kineto_columns import Columns, Decoded
from traceloom.formats.kineto_metadata import get_distributed_info
from traceloom.formats.resync import DamageLog
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Array, Ints
from traceloom.trace.arrays import gather_rows

_LABEL = re.compile(r"(?<![a-z])(rank|tp|dp|ep|pp)[ _-]?(\d{1,7})(?![\da-z])", re.IGNORECASE)
_AROUND = " []()_-:/|,."
_IS_WORK = np.array([name in vocab.GPU_WORK for name in vocab.CATEGORIES])

Label = tuple[tuple[str, int], ...]
"""Such as (("tp", 1), ("dp", 0)); empty where a text has none."""


def split_ranks(decoded: Decoded, path: str) -> list[tuple[Decoded, int | None]]:
    """Returns the content and the number of each rank of a file; of nearly every file that is the
    file itself.

    Raises:
        InputError: `merged-ranks`: nothing says whose work that of the GPUs is.
    """
    columns = decoded.columns
    pairs = list(columns.places)
    owner_of: dict[Any, Any] = {pid: _find_label(pid, columns) for pid, _ in pairs}
    owners = sorted({label for label in owner_of.values() if label})
    ranks = _number_ranks(owners)
    if len(owners) < 2:  # no labels: by the processes that the profiler itself called the CPU's
        owners = [pid for pid in owner_of if "CPU" in columns.process_texts.get(pid, ())]
        owner_of = dict(zip(owners, owners, strict=True))
        ranks = owners if set(owners) == set(range(len(owners))) else [None] * len(owners)
    if len(owners) < 2 or not columns.rows:
        return [(decoded, None)]
    owner_of_place = np.array(
        [owners.index(owner_of[pid]) if owner_of.get(pid) in owners else -1 for pid, _ in pairs]
    )
    tables = {
        table: {name: columns.take(table, name, None) for name in list(parts)}
        for table, parts in columns.tables.items()
        if table != "halves"
    }
    spans = tables["spans"]
    spans["duration"] = spans["duration"].copy()
    columns.pair_halves(spans["duration"])
    owner = gather_rows(owner_of_place, spans["place"])
    _assign_by_position(owner, spans["category"], len(owners), path)
    found: list[tuple[Decoded, int | None]] = []
    for number, rank in enumerate(ranks):
        damage = DamageLog() if found else decoded.damage
        part = Columns(damage)
        part.texts = columns.texts
        part.unknown_categories = {} if found else columns.unknown_categories
        own = [
            tuple(map(_remove_label, pair)) if owner_of_place[at] == number else pair
            for at, pair in enumerate(pairs)
        ]
        new_place = np.array([part.places[pair] for pair in own], dtype=np.int32)
        part.thread_names = {
            pair: columns.thread_names[pairs[at]]
            for at, pair in enumerate(own)
            if pairs[at] in columns.thread_names and owner_of_place[at] in {number, -1}
        }
        new_row = np.cumsum(owner == number, dtype=np.uint32) - 1
        for table, values in tables.items():
            if "row" in values or table == "spans":
                mine = (owner[values["row"]] if "row" in values else owner) == number
            else:  # what is of no process, such as an instant of the file, goes to the first rank
                at_place = gather_rows(owner_of_place, values["place"])
                mine = (at_place if table == "flows" else np.maximum(at_place, 0)) == number
            new = {"place": new_place, "row": new_row}
            part.tables[table] = {
                name: [new[name][column[mine]] if name in new else column[mine]]
                for name, column in values.items()
            }
            part.entries += 0 if "row" in values else int(mine.sum())
        part.rows = int((owner == number).sum())
        info = {"distributedInfo": {**get_distributed_info(decoded.metadata), "rank": rank}}
        size = decoded.size * part.rows // max(len(owner), 1)
        content = {"columns": part, "damage": damage, "metadata": {**decoded.metadata, **info}}
        found.append((structs.replace(decoded, **content, size=size), rank))
    return found


def _find_label(pid: Any, columns: Columns) -> Label:
    """Returns the label of a process: of its id, else the only one among its names."""
    if label := _read_label(str(pid)):
        return label
    labels = {_read_label(text) for text in columns.process_texts.get(pid, ())} - {()}
    return labels.pop() if len(labels) == 1 else ()


def _read_label(text: str) -> Label:
    return tuple((kind.lower(), int(number)) for kind, number in _LABEL.findall(text))


def _remove_label(part: Any) -> Any:
    """Returns a process or thread id as it was before it was labelled."""
    if not isinstance(part, str) or not _LABEL.search(part):
        return part
    return _LABEL.sub("", part).strip(_AROUND)


def _number_ranks(labels: list[Label]) -> list[int | None]:
    """Returns the rank that each label stands for: the first of its numbers that no two share; else
    its place in the usual order of groups, in which tensor-parallel ranks are neighbours.
    """
    numbers = [dict(label) for label in labels]
    for kind in ("rank", "tp", "dp", "ep", "pp"):
        values = [number.get(kind) for number in numbers]
        if None not in values and len(set(values)) == len(values):
            return values
    keys = [[number.get(kind, 0) for kind in ("pp", "dp", "ep", "tp")] for number in numbers]
    return [sorted(keys).index(key) for key in keys]


def _assign_by_position(owner: Ints, category: Array, count: int, path: str) -> None:
    """Gives the spans of no process, such as those of GPUs, to the rank whose part of the file they
    are in.

    Raises:
        InputError: `merged-ranks`: the file has no such parts.
    """
    unknown = np.flatnonzero(owner < 0)
    known = np.flatnonzero(owner >= 0)
    if not unknown.size or not known.size:
        return
    in_parts = np.count_nonzero(np.diff(owner[known])) < count
    is_work = gather_rows(_IS_WORK, category[unknown])
    if is_work.any() and not in_parts:
        raise InputError(
            f"the file holds the recordings of {count} processes, and nothing says which of them "
            "launched the work of its GPUs",
            slug="merged-ranks",
            where=path,
            hint="give the files that it was merged from",
        )
    # Work stands behind the host's events, or before them.
    before = is_work.any() and unknown[is_work][0] < known[0]
    spot = np.searchsorted(known, unknown) - (0 if before else 1)
    owner[unknown] = owner[known[np.clip(spot, 0, known.size - 1)]]
