"""Comparison of two runs: what changed, under which conditions.

Exact definitions: docs/concepts/comparison.md.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze import compare_tables
from traceloom.analyze.compare_tables import SAME
from traceloom.analyze.compare_tree import STEPS, ComparedSide, NameCodes, TreeUnion, build_side
from traceloom.analyze.steps import step_times
from traceloom.errors import UsageError
from traceloom.system import units
from traceloom.trace.frames import Result, build_schema
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

Ints = NDArray[np.int64]

CONDITIONS = build_schema("condition base new same weight", {"base": pl.String, "new": pl.String})
DECISIVE, MINOR = "decisive", "minor"
_UNKNOWN = "not recorded"
_SETTINGS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")


def compare_conditions(base: Session, new: Session) -> pl.DataFrame:
    """Compares the recorded conditions of both runs.

    Returns:
        `condition`, `base`, `new` (as text), `same`, `weight`: `decisive` where times cannot be
        compared when it differs, else `minor`.
    """
    versions = sorted(
        {name for run in (base, new) for trace in run.traces for name in trace.meta.versions}
    )
    rows = [
        (name, left, right, left == right, weight)
        for (name, weight, left), (_, _, right) in zip(
            _list_conditions(base, versions), _list_conditions(new, versions), strict=True
        )
        if not left == right == _UNKNOWN
    ]
    return pl.DataFrame(rows, schema=CONDITIONS, orient="row")


def _list_conditions(run: Session, versions: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yields each condition of a run: its name, weight, and value as text."""
    names = []
    for trace in run.traces:
        used = trace.devices.filter("used")["name"].drop_nulls()
        # A process that sees one device of many may call it by a number that is not in the list.
        names += (
            used if used.len() else trace.devices["name"].drop_nulls().unique(maintain_order=True)
        ).to_list()
    no_gpu = not names and not any(trace.gpu_work().height for trace in run.traces)
    yield "device", DECISIVE, "no GPU work" if no_gpu else _format_distinct(names)
    used_counts = (str(trace.gpu_work()["device"].n_unique()) for trace in run.traces)
    yield "devices used per process", DECISIVE, _format_distinct(used_counts)
    yield "ranks of the job", DECISIVE, _UNKNOWN if run.world_size is None else str(run.world_size)
    yield "ranks recorded", DECISIVE, str(len(run.traces))
    yield (
        "whole steps",
        MINOR,
        _format_distinct(str(step_times(trace).count) for trace in run.traces),
    )
    yield (
        "steps known by",
        MINOR,
        _format_distinct(step_times(trace).evidence for trace in run.traces[:1]),
    )
    for name in versions:
        recorded = (trace.meta.versions.get(name) for trace in run.traces)
        yield name if "version" in name else f"{name} version", MINOR, _format_distinct(recorded)
    for name in _SETTINGS:
        values = [trace.meta.settings.get(name) for trace in run.traces]
        yield (
            f"recorded with {name}",
            MINOR,
            _format_distinct("yes" if v else "no" for v in values if v is not None),
        )


def _format_distinct(values: Iterable[str | None]) -> str:
    """Returns distinct values in order, as text."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or _UNKNOWN


def compare_programs(
    union: TreeUnion, name_codes: NameCodes, base: Ints, new: Ints
) -> tuple[pl.DataFrame, float | None]:
    """Returns the conditions that only the alignment shows, and how many times as many samples the
    new run has in a step, where the shapes show that.

    Other operators and other shapes are what a change of the code results in, so they are not
    decisive, unless hardly anything of the smaller program is in the larger one.

    Args:
        union: Both sides on one tree.
        name_codes: The texts of its shapes.
        base: How often the base reached each place.
        new: The same of the new run.
    """
    both = (base > 0) & (new > 0)
    matched, *counts = (int(places.sum()) for places in (both, base > 0, new > 0))
    alike = matched >= _MIN_COMMON_SHARE * min(counts)
    rows = [
        (
            "operators at the same place",
            *(f"{matched} of {count}" for count in counts),
            alike and matched == max(counts),
            MINOR if alike else DECISIVE,
        )
    ]
    codes = [(union.shape[0][place], union.shape[1][place]) for place in np.flatnonzero(both)]
    texts = [text or "" for text in name_codes.shapes]
    # where both recorded them
    shapes = Counter((texts[left], texts[right]) for left, right in codes if left and right)
    if not shapes:
        return pl.DataFrame(rows, schema=CONDITIONS, orient="row"), None
    equal = sum(places for (left, right), places in shapes.items() if left == right)
    text = f"equal at {equal} of {shapes.total()} places"
    rows.append(("shapes of inputs", text, text, equal == shapes.total(), MINOR))
    ratio = _find_batch_ratio(shapes)
    if ratio is not None:
        rows.append(("samples in a step", "1 ×", f"{ratio:.3g} ×", False, MINOR))
    return pl.DataFrame(rows, schema=CONDITIONS, orient="row"), ratio


_MIN_COMMON_SHARE = 0.25  # of the places of the smaller program; below, it is another program


def _find_batch_ratio(shapes: Counter[tuple[str, str]]) -> float | None:
    """Returns how many times as large the new run's batches are, or None where that is unknown.

    Nearly all places that differ then do so in one dimension, by the same factor, and most of them
    in the first one; another width of the model changes both dimensions of its weights.
    """
    ratios: Counter[float] = Counter()
    first_dimension = places_that_differ = 0
    for (left, right), places in shapes.items():
        if left == right:
            continue
        places_that_differ += places
        changed = [
            [(index, old, new) for index, (old, new) in enumerate(pairs) if old != new]
            for pairs in (
                list(zip(old, new, strict=False))
                for old, new in zip(json.loads(left), json.loads(right), strict=False)
            )
        ]
        changed = [dimensions for dimensions in changed if dimensions]
        if not changed or any(len(dimensions) > 1 for dimensions in changed):
            continue
        index, old, new = changed[0][0]
        if isinstance(old, int) and isinstance(new, int) and old > 0:
            ratios[new / old] += places
            first_dimension += places * (index == 0)
    ratio, places = ratios.most_common(1)[0] if ratios else (1.0, 0)
    if places < _MIN_SAME_RATIO * places_that_differ or first_dimension < _MIN_FIRST * places:
        return None
    return ratio if places else None


_MIN_SAME_RATIO, _MIN_FIRST = 0.9, 0.7  # of the places whose shapes differ

_HOST_OPERATORS = "operators on the step's thread"
_HOST_OUTSIDE_OPERATORS = "the step's thread outside operators"


@dataclass(frozen=True)
class Comparison(Result):
    """A new run against a base; all times are means per step (and per device, of what devices did).

    Attributes:
        sentence: Conditions first, where they differ; then the largest changes.
        comparable: Whether no decisive condition differs.
        account: `device`: the step is accounted for by the work of the devices; `host`: one side
            has no GPU work, and the step is accounted for by the work of its thread.
        base_ns: Mean length of a compared step, rounded to whole nanoseconds (halves up).
        new_ns: The same of the new run.
        difference_ns: `new_ns - base_ns`.
        conditions: `condition`, `base`, `new`, `same`, `weight`.
        change: Of the step: new over base, less 1 (0.25: a quarter longer). That of a row is null
            where the base has none of it.
        breakdown: `part`, `meaning`, `base_ns`, `new_ns`, `difference_ns`: adds up to `base_ns`,
            `new_ns` and `difference_ns`; `change` of the row, and its `of_step`: its difference
            over the base's step, which adds up to the change of the step.
        kernels: GPU work by path and names: `status`, `operator`, `path`, `kind`, `base_kernel`,
            `new_kernel` (null where that side has none); of what a step launched, whenever it ran,
            `base_count`, `new_count`, `base_duration_ns`, `new_duration_ns`; of the time of the
            steps themselves `base_ns`, `new_ns`, `difference_ns`, which add up to the step with the
            idle parts of `breakdown`, with `change` and `of_step`. The status is by durations.
        operators: Operators by path and shapes: `status`, `operator`, `path`, `base_shapes`,
            `new_shapes`, `base_count`, `new_count`; of the GPU work that they launched themselves,
            whenever it ran, `base_duration_ns`, `new_duration_ns`, `duration_difference_ns`,
            `duration_change`, `duration_of_step`; the part of it in the time of the steps
            `base_device_ns`, `new_device_ns`, `device_difference_ns` (adds up to `kernels`); of the
            step's thread in them, not in operators below, `base_host_ns`, `new_host_ns`,
            `host_difference_ns` (adds up to the mean step), `host_change`, `host_of_step`,
            `host_status`.
        tree: The call tree: `parent` (number of a row before it; null of the first, which holds
            all), `name`, `base_count`, `new_count`; of it and all below it `base_duration_ns`,
            `new_duration_ns`, `base_host_ns`, `new_host_ns`.
        steps: `side` (base, new), `rank`, `step`, `duration_ns` and, on the host, `host_ns` of every
            compared step.
    """

    sentence: str
    comparable: bool
    account: str
    base_ns: int
    new_ns: int
    difference_ns: int
    change: float
    conditions: pl.DataFrame
    breakdown: pl.DataFrame
    kernels: pl.DataFrame
    operators: pl.DataFrame
    tree: pl.DataFrame
    steps: pl.DataFrame

    def check(self) -> None:
        """Raises AssertionError where a sum does not match."""
        totals = {
            "base_ns": self.base_ns,
            "new_ns": self.new_ns,
            "difference_ns": self.difference_ns,
        }
        assert {name: int(self.breakdown[name].sum()) for name in totals} == totals
        for name in ("base", "new"):
            steps = self.steps.filter(pl.col("side") == name)["host_ns"]
            assert int(
                self.operators[f"{name}_host_ns"].sum()
            ) == compare_tables.compute_rounded_mean(int(steps.sum()), steps.len())
            for kind in ("duration", "host"):
                operator_ns = self.operators[f"{name}_{kind}_ns"].sum()
                assert operator_ns == self.tree[f"{name}_{kind}_ns"][0]
            on_device = int(self.operators[f"{name}_device_ns"].sum())
            assert on_device == int(self.kernels[f"{name}_ns"].sum())
            if self.account == "device":
                idle = self.breakdown.filter(pl.col("part").str.starts_with("idle"))
                assert on_device + int(idle[f"{name}_ns"].sum()) == totals[f"{name}_ns"]


def compare(base: Session | Trace, new: Session | Trace) -> Comparison:
    """Compares two runs, step by step of the same program: of any vendors and versions, with any
    number of ranks.

    All whole steps of both are compared (of a trace without steps its window). Operators are
    aligned by their place in the call tree, shapes and order; GPU work by the operator that
    launched it.

    Args:
        base: The run to compare with.
        new: The run that is compared.

    Raises:
        UsageError: `nothing-to-compare`: one of them holds no timed events.

    Example:
        >>> import traceloom
        >>> base, new = traceloom.load("before"), traceloom.load("after")  # doctest: +SKIP
        >>> comparison = traceloom.analyze.compare(base, new)  # doctest: +SKIP
        >>> print(comparison.sentence)  # doctest: +SKIP
    """
    runs = [
        run if isinstance(run, Session) else Session((run,), run.meta.path) for run in (base, new)
    ]
    name_codes, union = NameCodes(), TreeUnion()
    has_replay = any(
        (trace.meta.capture or {}).get("replay_of") for run in runs for trace in run.traces
    )
    sides: list[ComparedSide] = []
    for number, (run, which) in enumerate(zip(runs, ("the base", "the new run"), strict=True)):
        run_side = build_side(run, number, union, name_codes, is_sequence=has_replay)
        if not run_side.steps.height or not int(run_side.steps["duration_ns"].sum()):
            raise UsageError(
                f"{which} holds no timed events", slug="nothing-to-compare", where=run.name
            )
        sides.append(run_side)
    device_account = compare_tables.match_devices(*sides)
    counts = [
        compare_tables.pad_with_zeros(run_side.count, len(union.parent)) for run_side in sides
    ]
    place_groups = compare_tables.build_place_groups(union, name_codes, *counts)
    place_sums = compare_tables.sum_by_place(device_account, place_groups.group.size, *sides)
    operators = compare_tables.build_operator_table(place_sums, place_groups, *sides)
    tree = compare_tables.build_call_tree(place_sums, union, name_codes, *sides)
    has_device_steps = all(run_side.device_steps for run_side in sides)
    lengths = [
        compare_tables.compute_rounded_mean(run_side.device_ns, run_side.device_steps)
        if has_device_steps
        else compare_tables.compute_rounded_mean(
            int(run_side.steps["host_ns"].sum()), run_side.steps.height
        )
        for run_side in sides
    ]
    breakdown = compare_tables.build_breakdown(device_account)
    kernels = compare_tables.build_kernel_table(device_account, place_groups, name_codes, *sides)
    if not has_device_steps:  # the step's thread in operators and outside
        rows = []
        is_outside = pl.col("operator") == compare_tables.OUTSIDE_OPERATORS
        for part, selected, description in (
            ("operators", ~is_outside, _HOST_OPERATORS),
            ("outside", is_outside, _HOST_OUTSIDE_OPERATORS),
        ):
            old, now = (
                operators.filter(selected)
                .select(pl.col("base_host_ns", "new_host_ns").sum())
                .row(0)
            )
            rows.append((part, description, old, now, now - old))
        breakdown = pl.DataFrame(rows, schema=compare_tables.PARTS, orient="row")
        operators, tree = (
            frame.with_columns(
                pl.lit(0, pl.Int64).alias(n)
                for n in frame.columns
                if "device" in n or "duration" in n
            )
            for frame in (operators, tree)
        )
        kernels = kernels[:0]
    # A trace without steps is compared by its window, which is no step.
    compared = ["window" if side.steps["step"].null_count() else "step" for side in sides]
    programs, batch_ratio = compare_programs(union, name_codes, *counts)
    stated = pl.concat([compare_conditions(*runs), programs])
    steps = pl.concat(
        run_side.steps.select(pl.lit(name).alias("side"), *STEPS)
        for name, run_side in zip(("base", "new"), sides, strict=True)
    )
    differ = stated.filter(~pl.col("same") & (pl.col("weight") == DECISIVE))
    comparable = not differ.height and len(set(compared)) == 1
    return Comparison(
        sentence=_describe_difference(
            lengths[0], lengths[1], compared, differ, breakdown, operators, kernels
        )
        + _describe_noise(lengths, batch_ratio, steps, comparable=comparable),
        comparable=comparable,
        account="device" if has_device_steps else "host",
        base_ns=lengths[0],
        new_ns=lengths[1],
        difference_ns=lengths[1] - lengths[0],
        change=(lengths[1] - lengths[0]) / max(lengths[0], 1),
        conditions=stated,
        breakdown=breakdown.with_columns(compare_tables.compute_relative_changes(lengths[0])),
        kernels=kernels.with_columns(compare_tables.compute_relative_changes(lengths[0])),
        operators=operators.with_columns(
            *compare_tables.compute_relative_changes(lengths[0], "duration_"),
            *compare_tables.compute_relative_changes(lengths[0], "host_"),
        ),
        tree=tree,
        steps=steps,
    )


def _describe_difference(  # noqa: PLR0917  (the parts of the sentence)
    base: int,
    new: int,
    compared: list[str],
    differ: pl.DataFrame,
    breakdown: pl.DataFrame,
    operators: pl.DataFrame,
    kernels: pl.DataFrame,
) -> str:
    difference = new - base
    unit = compared[0]
    if compared[1] != unit:
        base_length, new_length = units.format_duration(base), units.format_duration(new)
        without = "the base" if unit == "window" else "the new run"
        return (
            f"The {unit} of the base takes {base_length}, the {compared[1]} of the new run {new_length}: {without} has no "
            "steps, so the times cannot be held against each other."
        )
    changes = any(
        frame.filter(pl.col("status").cast(pl.String) != SAME).height
        for frame in (operators, kernels)
    )
    if not difference and not changes:
        return f"No difference: the {unit} takes {units.format_duration(base)} on both sides, and so does everything in it."
    change = units.format_change(difference / max(base, 1))
    text = f"The {unit} takes {units.format_duration(new)} instead of {units.format_duration(base)} ({change})"
    largest = breakdown.sort(pl.col("difference_ns").abs(), descending=True).row(0, named=True)
    if largest["difference_ns"]:
        sign = "+" if largest["difference_ns"] > 0 else "−"
        subject = largest["part"].split(":")[0]
        subject = f"idle because {largest['meaning']}" if subject == "idle" else subject
        text += f"; the largest part: {subject}, {sign}{units.format_duration(abs(largest['difference_ns']))}"
    if not differ.height:
        return text + "."
    subject = ", ".join(
        # Some names are of both sides together
        f"{name} ({old if old == now else f'{old} → {now}'})"
        for name, old, now in differ.head(3).select("condition", "base", "new").rows()
    )
    extra = f" and {differ.height - 3} more" if differ.height > 3 else ""
    return f"The conditions differ, so the times cannot be held against each other: {subject}{extra}. {text}."


def _describe_noise(
    lengths: list[int], batch_ratio: float | None, steps: pl.DataFrame, *, comparable: bool
) -> str:
    """Returns what the change is per sample, and whether the steps of both sides overlap; ""
    where neither says anything.
    """
    base, new = lengths
    if not comparable or base == new:
        return ""
    text = ""
    if batch_ratio is not None:
        change = units.format_change(new / base / batch_ratio - 1)
        text += f" A step has {batch_ratio:.3g} times as many samples: {change} per sample."
    (low, high), (other_low, other_high) = (
        tuple(
            steps.filter(pl.col("side") == side)["duration_ns"].quantile(share) or 0.0
            for share in (0.25, 0.75)
        )
        for side in ("base", "new")
    )
    if low != high and low <= other_high and other_low <= high:
        base_range, new_range = (
            f"{units.format_duration(round(a))} to {units.format_duration(round(b))}"
            for a, b in ((low, high), (other_low, other_high))
        )
        text += f" It may be chance: half of the steps take {base_range}, and {new_range}."
    return text
