"""Whether two runs were made under the same conditions: what differs besides the time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.compare.union import Union
from traceloom.analyze.steps import step_times
from traceloom.model import Session
from traceloom.model.frames import schema

Ints = NDArray[np.int64]

CONDITIONS = schema("condition base new same weight", {"base": pl.String, "new": pl.String})
DECISIVE, MINOR = "decisive", "minor"
_UNKNOWN = "not recorded"
_SETTINGS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")


def conditions(base: Session, new: Session) -> pl.DataFrame:
    """What both runs say of themselves.

    Returns:
        `condition`, `base`, `new` (as text), `same`, `weight`: `decisive` where times cannot be held against each
        other when it differs, else `minor`.
    """
    versions = sorted({name for run in (base, new) for trace in run.traces for name in trace.meta.versions})
    rows = [
        (name, left, right, left == right, weight)
        for (name, weight, left), (_, _, right) in zip(_stated(base, versions), _stated(new, versions), strict=True)
        if not left == right == _UNKNOWN
    ]
    return pl.DataFrame(rows, schema=CONDITIONS, orient="row")


def _stated(run: Session, versions: list[str]) -> Iterator[tuple[str, str, str]]:
    """Each condition of a run: its name, weight, and value as text."""
    names = []
    for trace in run.traces:
        used = trace.devices.filter("used")["name"].drop_nulls()
        # A process that sees one device of many may call it by a number that the list does not have.
        names += (used if used.len() else trace.devices["name"].drop_nulls().unique(maintain_order=True)).to_list()
    no_gpu = not names and not any(trace.gpu_work().height for trace in run.traces)
    yield "device", DECISIVE, "no GPU work" if no_gpu else _distinct(names)
    used_counts = (str(trace.gpu_work()["device"].n_unique()) for trace in run.traces)
    yield "devices used per process", DECISIVE, _distinct(used_counts)
    yield "ranks of the job", DECISIVE, _UNKNOWN if run.world_size is None else str(run.world_size)
    yield "ranks recorded", DECISIVE, str(len(run.traces))
    yield "whole steps", MINOR, _distinct(str(step_times(trace).count) for trace in run.traces)
    yield "steps known by", MINOR, _distinct(step_times(trace).evidence for trace in run.traces[:1])
    for name in versions:
        recorded = (trace.meta.versions.get(name) for trace in run.traces)
        yield name if "version" in name else f"{name} version", MINOR, _distinct(recorded)
    for name in _SETTINGS:
        values = [trace.meta.settings.get(name) for trace in run.traces]
        yield f"recorded with {name}", MINOR, _distinct("yes" if v else "no" for v in values if v is not None)


def _distinct(values: Iterable[str | None]) -> str:
    """Distinct values in order, as text."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or _UNKNOWN


def of_program(union: Union, base: Ints, new: Ints) -> pl.DataFrame:
    """Conditions that only the alignment tells: whether both ran the same program on inputs of the same shapes.

    Args:
        union: Both sides on one tree.
        base: How often each place was reached by the base.
        new: The same of the new run.
    """
    both, base_count, new_count = ((base > 0) & (new > 0)), int((base > 0).sum()), int((new > 0).sum())
    matched = int(both.sum())
    alike = 2 * matched / (base_count + new_count) if base_count + new_count else 1.0
    counts = f"{matched} of {base_count}", f"{matched} of {new_count}"
    rows = [("operators at the same place", *counts, alike >= _ALIKE, DECISIVE)]
    shapes = [(union.shape[0][index], union.shape[1][index]) for index in np.flatnonzero(both).tolist()]
    same = [left == right for left, right in shapes if left and right]  # where both recorded them
    if same:
        equal = f"equal at {sum(same)} of {len(same)} places"
        rows.append(("shapes of inputs", equal, equal, all(same), DECISIVE))
    return pl.DataFrame(rows, schema=CONDITIONS, orient="row")


_ALIKE = 0.9  # of the places; less, and it is another program
