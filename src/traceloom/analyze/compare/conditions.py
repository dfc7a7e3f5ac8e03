"""Whether two runs were made under the same conditions: what differs besides the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import polars as pl

from traceloom.analyze.steps import step_times
from traceloom.model import Session

CONDITIONS = pl.Schema(
    {"condition": pl.String(), "base": pl.String(), "new": pl.String(), "same": pl.Boolean(), "weight": pl.String()}
)
DECISIVE, MINOR = "decisive", "minor"
_UNKNOWN = "not recorded"
_SETTINGS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")


def conditions(base: Session, new: Session) -> pl.DataFrame:
    """What both runs say of themselves.

    Returns:
        `condition`, `base`, `new` (as text), `same`, `weight`: `decisive` where times cannot be held against each
        other when it differs, else `minor`.
    """
    rows = [
        _row("device", base, new, _devices, DECISIVE),
        _row("devices used per process", base, new, _used, DECISIVE),
        _row("ranks of the job", base, new, lambda run: _number(run.world_size), DECISIVE),
        _row("ranks recorded", base, new, lambda run: str(len(run.traces)), DECISIVE),
        _row("whole steps", base, new, _steps, MINOR),
        _row("steps known by", base, new, lambda run: _each(step_times(t).evidence for t in run.traces[:1]), MINOR),
        *_versions(base, new),
        *(_row(f"recorded with {name}", base, new, _setting(name), MINOR) for name in _SETTINGS),
    ]
    return pl.DataFrame([row for row in rows if row is not None], schema=CONDITIONS, orient="row")


def _row(
    name: str, base: Session, new: Session, describe: Callable[[Session], str], weight: str
) -> tuple[str, str, str, bool, str] | None:
    """One condition; None where neither run recorded it."""
    left, right = describe(base), describe(new)
    if left == right == _UNKNOWN:
        return None
    return name, left, right, left == right, weight


def _each(values: Iterable[str | None]) -> str:
    """Distinct values in order, as text."""
    distinct = list(dict.fromkeys(value for value in values if value))
    return ", ".join(distinct) if distinct else _UNKNOWN


def _number(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)


def _devices(run: Session) -> str:
    names = []
    for trace in run.traces:
        used = trace.devices.filter("used")["name"].drop_nulls()
        # A process that sees one device of many may call it by a number that the list does not have.
        names += (used if used.len() else trace.devices["name"].drop_nulls().unique(maintain_order=True)).to_list()
    if not names and not any(trace.gpu_work().height for trace in run.traces):
        return "no GPU work"
    return _each(names)


def _used(run: Session) -> str:
    return _each(str(trace.gpu_work()["device"].n_unique()) for trace in run.traces)


def _steps(run: Session) -> str:
    counts = [step_times(trace).count for trace in run.traces]
    return _each(str(count) for count in counts)


def _versions(base: Session, new: Session) -> list[tuple[str, str, str, bool, str] | None]:
    names = sorted({name for run in (base, new) for trace in run.traces for name in trace.meta.versions})

    def version(name: str) -> Callable[[Session], str]:
        return lambda run: _each(trace.meta.versions.get(name) for trace in run.traces)

    return [_row(name if "version" in name else f"{name} version", base, new, version(name), MINOR) for name in names]


def _setting(name: str) -> Callable[[Session], str]:
    def describe(run: Session) -> str:
        values = [trace.meta.settings.get(name) for trace in run.traces]
        return _each("yes" if value else "no" for value in values if value is not None)

    return describe


def of_program(matched: int, base: int, new: int, shapes: int, other_shapes: int) -> pl.DataFrame:
    """Conditions that only the alignment tells: whether both ran the same program on inputs of the same shapes.

    Args:
        matched: Places that both sides have.
        base: Places of the base.
        new: Places of the new run.
        shapes: Places of both where both recorded shapes.
        other_shapes: Those of them whose shapes differ.
    """
    alike = 2 * matched / (base + new) if base + new else 1.0
    rows = [
        ("operators at the same place", f"{matched} of {base}", f"{matched} of {new}", alike >= _ALIKE, DECISIVE),
    ]
    if shapes:
        equal = f"equal at {shapes - other_shapes} of {shapes} places"
        rows.append(("shapes of inputs", equal, equal, not other_shapes, DECISIVE))
    return pl.DataFrame(rows, schema=CONDITIONS, orient="row")


_ALIKE = 0.9  # of the places; less, and it is another program
