"""The tables of a comparison, from two sides aligned on one tree; every column of times adds up to
the usual step.
"""

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.compare_tree import (
    BUSY,
    ComparedSide,
    NameCodes,
    TreeUnion,
    describe_idle_cause,
)
from traceloom.trace.frames import build_schema, cast_to_schema

Ints = NDArray[np.int64]

ADDED, REMOVED, REPLACED, MORE, FEWER = "added", "removed", "replaced", "more", "fewer"
SLOWER, FASTER, SAME = "slower", "faster", "same"
STATUSES = (ADDED, REMOVED, REPLACED, MORE, FEWER, SLOWER, FASTER, SAME)
StatusType = pl.Enum(list(STATUSES))
OUTSIDE_OPERATORS, ALL_NODES = "(outside operators)", "(all)"
SEPARATOR = " > "
MIN_DIFFERENCE_NS = 1_000  # a smaller difference of the mean counts as none
MIN_DIFFERENCE_SHARE = 0.02  # of the larger side

PARTS = build_schema("part meaning base_ns new_ns difference_ns", {"part": pl.String})
KERNELS = build_schema(
    "status operator path kind base_kernel new_kernel base_count new_count base_duration_ns new_duration_ns base_ns",
    "new_ns difference_ns",
    {"status": StatusType},
)
OPERATORS = build_schema(
    "status operator path base_shapes new_shapes base_count new_count base_duration_ns",
    "new_duration_ns duration_difference_ns base_device_ns new_device_ns",
    "device_difference_ns base_host_ns new_host_ns host_difference_ns host_status",
    {"status": StatusType, "host_status": StatusType},
)
TREE = build_schema(
    "parent name base_count new_count base_duration_ns new_duration_ns base_host_ns new_host_ns"
)


def compute_rounded_mean(total: int, count: int) -> int:
    """Returns a mean as whole nanoseconds, halves up."""
    return (2 * total + count) // (2 * count) if count else 0


def round_to_sum(totals: Ints, count: int) -> Ints:
    """Returns means of totals as whole nanoseconds that add up to the mean of their sum.

    Each is rounded down, and the missing nanoseconds go to those with the largest remainders.
    """
    if not count or not totals.size:
        return np.zeros_like(totals)
    quotients, remainders = np.divmod(totals, count)
    missing = compute_rounded_mean(int(totals.sum()), count) - int(quotients.sum())
    if missing:
        quotients[np.argsort(-remainders, kind="stable")[:missing]] += 1
    return quotients


class MatchedDevice(Struct, frozen=True):
    """The device account, matched and rounded.

    Attributes:
        kernels: `place`, `base_name`, `new_name` (numbers; null on the side that does not have it),
            `kind`, `base_count`, `new_count`, `base_sum`, `new_sum` (totals of what was launched,
            and of its durations), `base_ns`, `new_ns` (per step and device).
        waiting: `cause`, `base_ns`, `new_ns`.
    """

    kernels: pl.DataFrame
    waiting: pl.DataFrame


def match_devices(base: ComparedSide, new: ComparedSide) -> MatchedDevice:
    """Matches GPU work place by place, and rounds all of it at once so that it adds up to the
    step.
    """
    # GPU work of both sides: first work of the same name and order at a place, then the remaining
    # work in its order.
    sides = {
        name: frame.sort("place", "nth", "name").rename(
            {"count": f"{name}_count", "ns": f"{name}_total", "sum_ns": f"{name}_sum"}
        )
        for name, frame in (("base", base.kernels), ("new", new.kernels))
    }
    keys = ["place", "name", "nth", "kind"]
    same = sides["base"].join(sides["new"], on=keys, how="inner")
    same = same.with_columns(pl.col("name").alias("base_name"), pl.col("name").alias("new_name"))
    unmatched = {
        name: frame.join(same.select(keys), on=keys, how="anti")
        .with_columns(pl.int_range(pl.len()).over("place", "kind").alias("order"))
        .rename({"name": f"{name}_name"})
        for name, frame in sides.items()
    }
    # At the same place other work of the same kind does the same: kernels of other vendors,
    # versions and choices. Work that no operator launched has no place, so that only its name
    # identifies it.
    placed = pl.col("place") >= 0
    order_keys = ["place", "kind", "order"]
    replaced = (
        unmatched["base"]
        .filter(placed)
        .join(unmatched["new"].filter(placed), on=order_keys, how="full", coalesce=True)
    )
    unplaced = [frame.filter(~placed) for frame in unmatched.values()]
    columns = [
        "place",
        "kind",
        *(f"{name}_{column}" for name in sides for column in ("name", "count", "total", "sum")),
    ]
    filled = [
        frame.with_columns(
            pl.lit(None, pl.Int64).alias(name) for name in columns if name not in frame.columns
        )
        for frame in (same, replaced, *unplaced)
    ]
    counted = pl.col(
        *(f"{name}_{column}" for name in sides for column in ("count", "total", "sum"))
    ).fill_null(0)
    kernels = (
        pl.concat([frame.select(columns) for frame in filled]).with_columns(counted).sort(columns)
    )
    waiting = base.waiting.rename({"ns": "base_total"}).join(
        new.waiting.rename({"ns": "new_total"}), on="cause", how="full", coalesce=True
    )
    waiting = waiting.with_columns(pl.col("base_total", "new_total").fill_null(0)).sort("cause")
    for name, side in (("base", base), ("new", new)):
        totals = np.concatenate(
            [kernels[f"{name}_total"].to_numpy(), waiting[f"{name}_total"].to_numpy()]
        )
        rounded = round_to_sum(totals, side.device_steps)
        kernels = kernels.with_columns(pl.Series(f"{name}_ns", rounded[: kernels.height]))
        waiting = waiting.with_columns(pl.Series(f"{name}_ns", rounded[kernels.height :]))
    return MatchedDevice(
        kernels.drop("base_total", "new_total"), waiting.select("cause", "base_ns", "new_ns")
    )


def build_breakdown(device: MatchedDevice) -> pl.DataFrame:
    """Returns busy time by kind and idle time by cause; adds up to the step on both sides."""
    labels = {
        "compute": "kernels that compute",
        "communication": "exposed communication",
        "copies": "exposed copies and fills",
    }
    sums = device.kernels.group_by("kind").agg(pl.col("base_ns", "new_ns").sum())
    sums_by_kind = {row["kind"]: row for row in sums.to_dicts()}
    rows = [
        (kind, labels[kind], sums_by_kind[kind]["base_ns"], sums_by_kind[kind]["new_ns"])
        for kind in BUSY
        if kind in sums_by_kind
    ]
    rows += [
        (f"idle: {c}", describe_idle_cause(c), old, now) for c, old, now in device.waiting.rows()
    ]
    frame = pl.DataFrame(rows, schema=["part", "meaning", "base_ns", "new_ns"], orient="row")
    return frame.with_columns((pl.col("new_ns") - pl.col("base_ns")).alias("difference_ns")).cast(
        PARTS
    )


class PlaceGroups(Struct, frozen=True):
    """The places of a union, grouped: places with the same path, shapes and sides share one row.

    Attributes:
        group: Group of each place; the last one is for work of no operator.
        operator: Name of each group.
        path: Names from the outermost operator to it.
        base_shapes: Input shapes on the base's side; null where not recorded.
        new_shapes: Input shapes on the new side.
    """

    group: Ints
    operator: list[str]
    path: list[str]
    base_shapes: list[str | None]
    new_shapes: list[str | None]


def build_place_groups(
    union: TreeUnion, name_codes: NameCodes, base: Ints, new: Ints
) -> PlaceGroups:
    """Groups the places; `base` and `new` are how often each was reached."""
    names = list(name_codes.names)
    shapes = list(name_codes.shapes)
    keys: dict[tuple[object, ...], int] = {}
    group: list[int] = []
    operator: list[str] = []
    path: list[str] = []
    shape_texts: tuple[list[str | None], list[str | None]] = ([], [])
    for index, up in enumerate(union.parent):
        side_names = [union.name[side][index] for side in (0, 1)]
        shape = [union.shape[side][index] for side in (0, 1)]
        parent_group = group[up] if up >= 0 else -1
        key = (parent_group, *side_names, *shape, base[index] > 0, new[index] > 0)
        number = keys.setdefault(key, len(keys))
        group.append(number)
        if number == len(operator):
            label = next((names[name] for name in reversed(side_names) if name >= 0), "")
            operator.append(label or OUTSIDE_OPERATORS)
            # The root has no name; below it are the threads.
            path.append(
                label
                if parent_group < 0 or not path[parent_group]
                else f"{path[parent_group]}{SEPARATOR}{label}"
            )
            for side in (0, 1):
                shape_texts[side].append(shapes[shape[side]])
    group.append(len(operator))
    return PlaceGroups(
        np.array(group, dtype=np.int64),
        [*operator, OUTSIDE_OPERATORS],
        [*path, OUTSIDE_OPERATORS],
        [*shape_texts[0], None],
        [*shape_texts[1], None],
    )


def build_kernel_table(
    device: MatchedDevice,
    place_groups: PlaceGroups,
    name_codes: NameCodes,
    base: ComparedSide,
    new: ComparedSide,
) -> pl.DataFrame:
    """Returns GPU work by path and by its names on both sides; the largest differences first."""
    text = pl.Series(list(name_codes.names), dtype=pl.String)
    rows = device.kernels.with_columns(
        pl.Series("group", place_groups.group[device.kernels["place"].to_numpy()])
    )
    summed = rows.group_by("group", "kind", "base_name", "new_name", maintain_order=True).agg(
        pl.col("base_count", "new_count", "base_ns", "new_ns", "base_sum", "new_sum").sum()
    )
    summed = summed.with_columns(
        (pl.col("base_sum") / max(base.device_steps, 1))
        .round()
        .cast(pl.Int64)
        .alias("base_duration_ns"),
        (pl.col("new_sum") / max(new.device_steps, 1))
        .round()
        .cast(pl.Int64)
        .alias("new_duration_ns"),
    )
    difference = pl.col("new_ns") - pl.col("base_ns")
    labelled = summed.with_columns(
        pl.Series("operator", place_groups.operator, dtype=pl.String)
        .gather(summed["group"])
        .alias("operator"),
        pl.Series("path", place_groups.path, dtype=pl.String).gather(summed["group"]).alias("path"),
        text.gather(summed["base_name"].cast(pl.UInt32)).alias("base_kernel"),
        text.gather(summed["new_name"].cast(pl.UInt32)).alias("new_kernel"),
        (pl.col("base_count") / max(base.device_steps, 1)).alias("base_count"),
        (pl.col("new_count") / max(new.device_steps, 1)).alias("new_count"),
        difference.alias("difference_ns"),
        _derive_status(
            pl.col("base_name").is_null(),
            pl.col("new_name").is_null(),
            pl.col("base_name") != pl.col("new_name"),
            pl.col("new_count") * base.device_steps - pl.col("base_count") * new.device_steps,
            ("base_duration_ns", "new_duration_ns"),
        ).alias("status"),
    )
    largest_first = pl.col("difference_ns").abs(), "path", "operator"
    ordered = labelled.sort(largest_first, descending=[True, False, False], maintain_order=True)
    return ordered.pipe(cast_to_schema, KERNELS)


def _derive_status(
    added: pl.Expr,
    removed: pl.Expr,
    replaced: pl.Expr,
    oftener: pl.Expr,
    durations: tuple[str, str],
) -> pl.Expr:
    """Returns the status of a row: a change of name takes precedence over one of its count (more or
    less often per step), and that over one of its time.
    """
    base, new = durations
    difference = pl.col(new) - pl.col(base)
    significant = (difference.abs() >= MIN_DIFFERENCE_NS) & (
        difference.abs() >= MIN_DIFFERENCE_SHARE * pl.max_horizontal(base, new)
    )
    return (
        pl.when(added)
        .then(pl.lit(ADDED))
        .when(removed)
        .then(pl.lit(REMOVED))
        .when(replaced)
        .then(pl.lit(REPLACED))
        .when(oftener > 0)
        .then(pl.lit(MORE))
        .when(oftener < 0)
        .then(pl.lit(FEWER))
        .when(significant & (difference > 0))
        .then(pl.lit(SLOWER))
        .when(significant)
        .then(pl.lit(FASTER))
        .otherwise(pl.lit(SAME))
    )


def sum_by_place(
    device: MatchedDevice, size: int, base: ComparedSide, new: ComparedSide
) -> pl.DataFrame:
    """Returns how often each place of the union is reached, and its own cost; the last row is for
    work of no operator.

    The work that a place launched is compared whenever it ran: where the host runs ahead, the
    device does it after the step.

    Returns:
        `base_count` (total), and means per step: `base_duration_ns` of the GPU work that it
        launched, `base_device_ns` of the part of it in the steps, `base_host_ns`; the same of
        `new`.
    """
    columns: dict[str, Ints] = {}
    for name, side in (("base", base), ("new", new)):
        host = pad_with_zeros(side.host_ns, size)
        host[-1] = side.outside_ns
        launched, duration_sums = np.zeros((2, size), dtype=np.int64)
        np.add.at(
            launched, device.kernels["place"].to_numpy(), device.kernels[f"{name}_ns"].to_numpy()
        )
        np.add.at(
            duration_sums,
            device.kernels["place"].to_numpy(),
            device.kernels[f"{name}_sum"].to_numpy(),
        )
        columns |= {
            f"{name}_count": pad_with_zeros(side.count, size),
            f"{name}_duration_ns": round_to_sum(duration_sums, side.device_steps),
            f"{name}_device_ns": launched,
            f"{name}_host_ns": round_to_sum(host, side.steps.height),
        }
    return pl.DataFrame(columns)


def build_operator_table(
    place_sums: pl.DataFrame, place_groups: PlaceGroups, base: ComparedSide, new: ComparedSide
) -> pl.DataFrame:
    """Returns operators by path and shapes, with the time of the work that they launched
    themselves, and of the host in them.
    """
    summed = (
        place_sums.with_columns(group=place_groups.group)
        .group_by("group", maintain_order=True)
        .agg(pl.all().sum())
    )
    group_index = summed["group"]
    texts = {
        name: pl.Series(getattr(place_groups, name), dtype=pl.String).gather(group_index)
        for name in ("operator", "path", "base_shapes", "new_shapes")
    }
    is_outside = pl.col("group") == int(place_groups.group[-1])
    added, removed = (
        (pl.col("base_count") == 0) & ~is_outside,
        (pl.col("new_count") == 0) & ~is_outside,
    )
    never = pl.lit(value=False)
    oftener = pl.col("new_count") * base.steps.height - pl.col("base_count") * new.steps.height
    rows = summed.with_columns(
        **texts,
        base_count=pl.col("base_count") / max(base.steps.height, 1),
        new_count=pl.col("new_count") / max(new.steps.height, 1),
        **{
            f"{kind}_difference_ns": pl.col(f"new_{kind}_ns") - pl.col(f"base_{kind}_ns")
            for kind in ("duration", "device", "host")
        },
        status=_derive_status(
            added, removed, never, oftener, ("base_duration_ns", "new_duration_ns")
        ),
        host_status=_derive_status(added, removed, never, oftener, ("base_host_ns", "new_host_ns")),
    )
    has_device_time = pl.max_horizontal("base_duration_ns", "new_duration_ns") > 0
    rows = rows.with_columns(
        status=pl.when(has_device_time).then("status").otherwise("host_status")
    )
    # The root and the threads are not operators: they are never reached.
    rows = rows.filter(is_outside | (pl.col("base_count") > 0) | (pl.col("new_count") > 0))
    primary = (
        "duration_difference_ns" if base.device_steps and new.device_steps else "host_difference_ns"
    )
    largest_first = pl.col(primary).abs(), "path", "operator"
    ordered = rows.sort(largest_first, descending=[True, False, False], maintain_order=True)
    return ordered.pipe(cast_to_schema, OPERATORS)


def build_call_tree(
    place_sums: pl.DataFrame,
    union: TreeUnion,
    name_codes: NameCodes,
    base: ComparedSide,
    new: ComparedSide,
) -> pl.DataFrame:
    """Returns the call tree of both sides: places with the same names above them are one node, with
    the time of everything below it.

    Returns:
        `parent` (row; null of the first, which holds all), `name`, `base_count`, `new_count`,
        `base_duration_ns`, `new_duration_ns`, `base_host_ns`, `new_host_ns`; parents before
        children.
    """
    names = list(name_codes.names)
    keys: dict[tuple[int, str], int] = {}
    node: list[int] = []
    for up, *side_names in zip(union.parent, *union.name, strict=True):
        label = next((names[name] for name in side_names if name >= 0), ALL_NODES)
        node.append(keys.setdefault((node[up] if up >= 0 else -1, label), len(keys)))
    node.append(keys.setdefault((0, OUTSIDE_OPERATORS), len(keys)))
    parent = [up for up, _ in keys]
    sums = np.zeros((len(keys), len(TREE) - 2), dtype=np.int64)
    np.add.at(sums, node, place_sums.select(list(TREE)[2:]).to_numpy())
    for child in range(len(keys) - 1, 0, -1):
        sums[parent[child], 2:] += sums[child, 2:]
    frame = pl.DataFrame(sums, schema=list(TREE)[2:]).with_columns(
        parent=pl.Series(parent).replace(-1, None),
        name=pl.Series([name for _, name in keys]),
        base_count=pl.col("base_count") / max(base.steps.height, 1),
        new_count=pl.col("new_count") / max(new.steps.height, 1),
    )
    return frame.pipe(cast_to_schema, TREE)


def compute_relative_changes(step_ns: int, prefix: str = "") -> list[pl.Expr]:
    """Returns `change`: the new time of a row over that of the base, less 1; and `of_step`: its
    difference over the base's step.

    Args:
        step_ns: Length of the base's step.
        prefix: The time to use, as `host_` for `base_host_ns`; it is also the prefix of the new
            columns.
    """
    base, new = pl.col(f"base_{prefix}ns"), pl.col(f"new_{prefix}ns")
    return [
        pl.when(base > 0).then((new - base) / base).alias(f"{prefix}change"),
        ((new - base) / max(step_ns, 1)).alias(f"{prefix}of_step"),
    ]


def pad_with_zeros(values: Ints, size: int) -> Ints:
    filled = np.zeros(size, dtype=np.int64)
    filled[: values.size] = values
    return filled
