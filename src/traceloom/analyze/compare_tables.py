"""The tables of a comparison, from two sides laid on one tree; every column of times adds up to the usual step."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.compare_tree import BUSY, NameCodes, Side, Union, meaning
from traceloom.trace.frames import cast_to_schema, schema

Ints = NDArray[np.int64]

ADDED, REMOVED, REPLACED, MORE, FEWER = "added", "removed", "replaced", "more", "fewer"
SLOWER, FASTER, SAME = "slower", "faster", "same"
STATUSES = (ADDED, REMOVED, REPLACED, MORE, FEWER, SLOWER, FASTER, SAME)
StatusType = pl.Enum(list(STATUSES))
OUTSIDE, ALL = "(outside operators)", "(all)"
SEPARATOR = " > "
LEAST_NS = 1_000  # a smaller difference of the mean is none
LEAST_SHARE = 0.02  # of the larger side

PARTS = schema("part meaning base_ns new_ns difference_ns", {"part": pl.String})
KERNELS = schema(
    "status operator path kind base_kernel new_kernel base_count new_count base_duration_ns new_duration_ns base_ns",
    "new_ns difference_ns",
    {"status": StatusType},
)
OPERATORS = schema(
    "status operator path base_shapes new_shapes base_count new_count base_duration_ns",
    "new_duration_ns duration_difference_ns base_device_ns new_device_ns",
    "device_difference_ns base_host_ns new_host_ns host_difference_ns host_status",
    {"status": StatusType, "host_status": StatusType},
)
TREE = schema("parent name base_count new_count base_duration_ns new_duration_ns base_host_ns new_host_ns")


def mean(total: int, count: int) -> int:
    """A mean as whole nanoseconds, halves up."""
    return (2 * total + count) // (2 * count) if count else 0


def round_to_sum(totals: Ints, count: int) -> Ints:
    """Means of totals as whole nanoseconds that add up to the mean of their sum.

    Each is rounded down, and the nanoseconds that are missing go to those with the largest rests.
    """
    if not count or not totals.size:
        return np.zeros_like(totals)
    whole, rest = np.divmod(totals, count)
    missing = mean(int(totals.sum()), count) - int(whole.sum())
    if missing:
        whole[np.argsort(-rest, kind="stable")[:missing]] += 1
    return whole


class MatchedDevice(Struct, frozen=True):
    """The device account, matched and rounded.

    Attributes:
        kernels: `place`, `base_name`, `new_name` (numbers; null on the side that does not have it), `kind`,
            `base_count`, `new_count`, `base_sum`, `new_sum` (totals of what was launched, and of its durations),
            `base_ns`, `new_ns` (per step and device).
        waiting: `cause`, `base_ns`, `new_ns`.
    """

    kernels: pl.DataFrame
    waiting: pl.DataFrame


def device(base: Side, new: Side) -> MatchedDevice:
    """Match GPU work place by place, and round all of it at once so that it adds up to the step."""
    # Both sides' GPU work: first what has the same name and order at a place, then what is left in its order
    sides = {
        name: frame.sort("place", "nth", "name").rename(
            {"count": f"{name}_count", "ns": f"{name}_total", "sum_ns": f"{name}_sum"}
        )
        for name, frame in (("base", base.kernels), ("new", new.kernels))
    }
    keys = ["place", "name", "nth", "kind"]
    same = sides["base"].join(sides["new"], on=keys, how="inner")
    same = same.with_columns(pl.col("name").alias("base_name"), pl.col("name").alias("new_name"))
    left = {
        name: frame.join(same.select(keys), on=keys, how="anti")
        .with_columns(pl.int_range(pl.len()).over("place", "kind").alias("order"))
        .rename({"name": f"{name}_name"})
        for name, frame in sides.items()
    }
    # At the same place something else of its kind does the same: kernels of other vendors, versions and choices. What
    # no operator launched has no place, so that only its name tells what it is.
    placed = pl.col("place") >= 0
    by_order = ["place", "kind", "order"]
    replaced = left["base"].filter(placed).join(left["new"].filter(placed), on=by_order, how="full", coalesce=True)
    loose = [frame.filter(~placed) for frame in left.values()]
    columns = ["place", "kind", *(f"{name}_{column}" for name in sides for column in ("name", "count", "total", "sum"))]
    filled = [
        frame.with_columns(pl.lit(None, pl.Int64).alias(name) for name in columns if name not in frame.columns)
        for frame in (same, replaced, *loose)
    ]
    counted = pl.col(*(f"{name}_{column}" for name in sides for column in ("count", "total", "sum"))).fill_null(0)
    kernels = pl.concat([frame.select(columns) for frame in filled]).with_columns(counted).sort(columns)
    waiting = base.waiting.rename({"ns": "base_total"}).join(
        new.waiting.rename({"ns": "new_total"}), on="cause", how="full", coalesce=True
    )
    waiting = waiting.with_columns(pl.col("base_total", "new_total").fill_null(0)).sort("cause")
    for name, side in (("base", base), ("new", new)):
        totals = np.concatenate([kernels[f"{name}_total"].to_numpy(), waiting[f"{name}_total"].to_numpy()])
        rounded = round_to_sum(totals, side.device_steps)
        kernels = kernels.with_columns(pl.Series(f"{name}_ns", rounded[: kernels.height]))
        waiting = waiting.with_columns(pl.Series(f"{name}_ns", rounded[kernels.height :]))
    return MatchedDevice(kernels.drop("base_total", "new_total"), waiting.select("cause", "base_ns", "new_ns"))


def breakdown(device: MatchedDevice) -> pl.DataFrame:
    """Busy time by kind and idle time by cause; adds up to the step on both sides."""
    words = {
        "compute": "kernels that compute",
        "communication": "exposed communication",
        "copies": "exposed copies and fills",
    }
    sums = device.kernels.group_by("kind").agg(pl.col("base_ns", "new_ns").sum())
    by_kind = {row["kind"]: row for row in sums.to_dicts()}
    rows = [(kind, words[kind], by_kind[kind]["base_ns"], by_kind[kind]["new_ns"]) for kind in BUSY if kind in by_kind]
    rows += [(f"idle: {c}", meaning(c), old, now) for c, old, now in device.waiting.rows()]
    frame = pl.DataFrame(rows, schema=["part", "meaning", "base_ns", "new_ns"], orient="row")
    return frame.with_columns((pl.col("new_ns") - pl.col("base_ns")).alias("difference_ns")).cast(PARTS)


class PlaceGroups(Struct, frozen=True):
    """The places of a union, grouped: those with the same path, shapes and sides stand for one row.

    Attributes:
        group: Group of each place; the last one is that of what no operator did.
        operator: Name of each group.
        path: Names from the outermost operator to it.
        base_shapes: Input shapes on the base's side; null where not recorded.
        new_shapes: On the new side.
    """

    group: Ints
    operator: list[str]
    path: list[str]
    base_shapes: list[str | None]
    new_shapes: list[str | None]


def grouped(union: Union, words: NameCodes, base: Ints, new: Ints) -> PlaceGroups:
    """Group the places; `base` and `new` are how often each was reached."""
    names = list(words.names)
    shapes = list(words.shapes)
    keys: dict[tuple[object, ...], int] = {}
    group: list[int] = []
    operator: list[str] = []
    path: list[str] = []
    shape_texts: tuple[list[str | None], list[str | None]] = ([], [])
    for index, up in enumerate(union.parent):
        of_side = [union.name[side][index] for side in (0, 1)]
        shape = [union.shape[side][index] for side in (0, 1)]
        above = group[up] if up >= 0 else -1
        key = (above, *of_side, *shape, base[index] > 0, new[index] > 0)
        number = keys.setdefault(key, len(keys))
        group.append(number)
        if number == len(operator):
            label = next((names[name] for name in reversed(of_side) if name >= 0), "")
            operator.append(label or OUTSIDE)
            # The root has no name; below it stand the threads.
            path.append(label if above < 0 or not path[above] else f"{path[above]}{SEPARATOR}{label}")
            for side in (0, 1):
                shape_texts[side].append(shapes[shape[side]])
    group.append(len(operator))
    return PlaceGroups(
        np.array(group, dtype=np.int64),
        [*operator, OUTSIDE],
        [*path, OUTSIDE],
        [*shape_texts[0], None],
        [*shape_texts[1], None],
    )


def kernels(device: MatchedDevice, places: PlaceGroups, words: NameCodes, base: Side, new: Side) -> pl.DataFrame:
    """GPU work by path and by the names it has on both sides; the largest differences first."""
    text = pl.Series(list(words.names), dtype=pl.String)
    rows = device.kernels.with_columns(pl.Series("group", places.group[device.kernels["place"].to_numpy()]))
    summed = rows.group_by("group", "kind", "base_name", "new_name", maintain_order=True).agg(
        pl.col("base_count", "new_count", "base_ns", "new_ns", "base_sum", "new_sum").sum()
    )
    summed = summed.with_columns(
        (pl.col("base_sum") / max(base.device_steps, 1)).round().cast(pl.Int64).alias("base_duration_ns"),
        (pl.col("new_sum") / max(new.device_steps, 1)).round().cast(pl.Int64).alias("new_duration_ns"),
    )
    difference = pl.col("new_ns") - pl.col("base_ns")
    named = summed.with_columns(
        pl.Series("operator", places.operator, dtype=pl.String).gather(summed["group"]).alias("operator"),
        pl.Series("path", places.path, dtype=pl.String).gather(summed["group"]).alias("path"),
        text.gather(summed["base_name"].cast(pl.UInt32)).alias("base_kernel"),
        text.gather(summed["new_name"].cast(pl.UInt32)).alias("new_kernel"),
        (pl.col("base_count") / max(base.device_steps, 1)).alias("base_count"),
        (pl.col("new_count") / max(new.device_steps, 1)).alias("new_count"),
        difference.alias("difference_ns"),
        _status(
            pl.col("base_name").is_null(),
            pl.col("new_name").is_null(),
            pl.col("base_name") != pl.col("new_name"),
            pl.col("new_count") * base.device_steps - pl.col("base_count") * new.device_steps,
            ("base_duration_ns", "new_duration_ns"),
        ).alias("status"),
    )
    largest_first = pl.col("difference_ns").abs(), "path", "operator"
    ordered = named.sort(largest_first, descending=[True, False, False], maintain_order=True)
    return ordered.pipe(cast_to_schema, KERNELS)


def _status(
    added: pl.Expr, removed: pl.Expr, replaced: pl.Expr, oftener: pl.Expr, durations: tuple[str, str]
) -> pl.Expr:
    """What became of a row: a change of name before one of its count (more or less often per step), and of its time."""
    base, new = durations
    difference = pl.col(new) - pl.col(base)
    significant = (difference.abs() >= LEAST_NS) & (difference.abs() >= LEAST_SHARE * pl.max_horizontal(base, new))
    return (
        pl.when(added).then(pl.lit(ADDED))
        .when(removed).then(pl.lit(REMOVED))
        .when(replaced).then(pl.lit(REPLACED))
        .when(oftener > 0).then(pl.lit(MORE))
        .when(oftener < 0).then(pl.lit(FEWER))
        .when(significant & (difference > 0)).then(pl.lit(SLOWER))
        .when(significant).then(pl.lit(FASTER))
        .otherwise(pl.lit(SAME))
    )  # fmt: skip


def sum_by_place(device: MatchedDevice, size: int, base: Side, new: Side) -> pl.DataFrame:
    """How often each place of the union is reached, and what it costs itself; the last row is what no operator did.

    What a place launched is compared whenever it ran: a host that runs ahead has the device do it after its step.

    Returns:
        `base_count` (total), and means per step: `base_duration_ns` of the GPU work that it launched, `base_device_ns`
        of what of it lies in the steps, `base_host_ns`; the same of `new`.
    """
    columns: dict[str, Ints] = {}
    for name, side in (("base", base), ("new", new)):
        host = pad_with_zeros(side.host_ns, size)
        host[-1] = side.outside_ns
        launched, took = np.zeros((2, size), dtype=np.int64)
        np.add.at(launched, device.kernels["place"].to_numpy(), device.kernels[f"{name}_ns"].to_numpy())
        np.add.at(took, device.kernels["place"].to_numpy(), device.kernels[f"{name}_sum"].to_numpy())
        columns |= {
            f"{name}_count": pad_with_zeros(side.count, size),
            f"{name}_duration_ns": round_to_sum(took, side.device_steps),
            f"{name}_device_ns": launched,
            f"{name}_host_ns": round_to_sum(host, side.steps.height),
        }
    return pl.DataFrame(columns)


def operators(of_places: pl.DataFrame, places: PlaceGroups, base: Side, new: Side) -> pl.DataFrame:
    """Operators by path and shapes, with the time of what they launched themselves, and of the host in them."""
    summed = of_places.with_columns(group=places.group).group_by("group", maintain_order=True).agg(pl.all().sum())
    at = summed["group"]
    texts = {
        name: pl.Series(getattr(places, name), dtype=pl.String).gather(at)
        for name in ("operator", "path", "base_shapes", "new_shapes")
    }
    outside = pl.col("group") == int(places.group[-1])
    added, removed = (pl.col("base_count") == 0) & ~outside, (pl.col("new_count") == 0) & ~outside
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
        status=_status(added, removed, never, oftener, ("base_duration_ns", "new_duration_ns")),
        host_status=_status(added, removed, never, oftener, ("base_host_ns", "new_host_ns")),
    )
    by_device = pl.max_horizontal("base_duration_ns", "new_duration_ns") > 0
    rows = rows.with_columns(status=pl.when(by_device).then("status").otherwise("host_status"))
    # The root and the threads are no operators: they are never reached.
    rows = rows.filter(outside | (pl.col("base_count") > 0) | (pl.col("new_count") > 0))
    primary = "duration_difference_ns" if base.device_steps and new.device_steps else "host_difference_ns"
    largest_first = pl.col(primary).abs(), "path", "operator"
    ordered = rows.sort(largest_first, descending=[True, False, False], maintain_order=True)
    return ordered.pipe(cast_to_schema, OPERATORS)


def tree(of_places: pl.DataFrame, union: Union, words: NameCodes, base: Side, new: Side) -> pl.DataFrame:
    """The call tree of both sides: places with the same names above them are one node, with the time of all below it.

    Returns:
        `parent` (row; null of the first, which holds all), `name`, `base_count`, `new_count`, `base_duration_ns`,
        `new_duration_ns`, `base_host_ns`, `new_host_ns`; parents before children.
    """
    names = list(words.names)
    keys: dict[tuple[int, str], int] = {}
    node: list[int] = []
    for up, *of_side in zip(union.parent, *union.name, strict=True):
        label = next((names[name] for name in of_side if name >= 0), ALL)
        node.append(keys.setdefault((node[up] if up >= 0 else -1, label), len(keys)))
    node.append(keys.setdefault((0, OUTSIDE), len(keys)))
    parent = [up for up, _ in keys]
    sums = np.zeros((len(keys), len(TREE) - 2), dtype=np.int64)
    np.add.at(sums, node, of_places.select(list(TREE)[2:]).to_numpy())
    for child in range(len(keys) - 1, 0, -1):
        sums[parent[child], 2:] += sums[child, 2:]
    frame = pl.DataFrame(sums, schema=list(TREE)[2:]).with_columns(
        parent=pl.Series(parent).replace(-1, None),
        name=pl.Series([name for _, name in keys]),
        base_count=pl.col("base_count") / max(base.steps.height, 1),
        new_count=pl.col("new_count") / max(new.steps.height, 1),
    )
    return frame.pipe(cast_to_schema, TREE)


def relative(step_ns: int, of: str = "") -> list[pl.Expr]:
    """`change`: the new time of a row over that of the base, less 1; `of_step`: its difference over the base's step.

    Args:
        step_ns: Of the base.
        of: Which time, `host_` for `base_host_ns`; the columns are named alike.
    """
    base, new = pl.col(f"base_{of}ns"), pl.col(f"new_{of}ns")
    return [
        pl.when(base > 0).then((new - base) / base).alias(f"{of}change"),
        ((new - base) / max(step_ns, 1)).alias(f"{of}of_step"),
    ]


def pad_with_zeros(values: Ints, size: int) -> Ints:
    """The values with zeros behind them."""
    filled = np.zeros(size, dtype=np.int64)
    filled[: values.size] = values
    return filled
