"""Fitting latency and bandwidth to recorded collectives.

docs/concepts/calibration.md describes what is fitted, and what a recording cannot show.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import polars as pl

from traceloom import __version__
from traceloom.analyze.bandwidth import compute_bus_factor, find_device_link
from traceloom.analyze.matched_collectives import match_collectives
from traceloom.analyze.placed_calls import Peak, find_peaks
from traceloom.analyze.rank_summary import summarize_rank
from traceloom.errors import InputError
from traceloom.trace.array_types import Floats, Ints
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.trace.session import Session
from traceloom.workload.simulate.machine import Collective, Dimension, Machine, MeasuredTransfer

LATENCY_BOUND = 1 << 16
"""Bytes: if only one size was measured, the latency is fitted below this, the bandwidth above."""

MIN_SIZE_RATIO = 2.0
"""Sizes within this factor of each other count as one: a line through them would not show a
latency.
"""

FIT_TOLERANCE = 0.05
"""A line covers sizes whose typical time deviates by at most this fraction, or by what their
scatter explains.
"""

MIN_SIZES = 3
"""Min number of distinct sizes for a range with a line of its own."""

_MAX_SIZES = 64
_FLOOR = 0.02  # of the time: smaller deviations do not increase a size's weight
_HUBER = 1.5  # deviations beyond which a size's weight decreases
_ITERATIONS = 20
_MAX_DEVIATIONS = 5.0  # max deviation that one size adds to the cost of a line
_MAX_MISSED_SHARE = 0.2  # max share of the sizes that a line may miss


class LinearFit(NamedTuple):
    """Time = alpha_ns + bytes x ns_per_byte.

    Attributes:
        form: `line`; `latency`: size has no effect, or sizes are too small; `bandwidth`: one size,
            or no visible latency.
        alpha_ns: Time for 0 bytes.
        ns_per_byte: Time per byte on the bus.
    """

    form: str
    alpha_ns: float
    ns_per_byte: float

    def times(self, size: Floats) -> Floats:
        """Returns the fitted times of sizes, ns; same shape."""
        return self.alpha_ns + size * self.ns_per_byte


class _Sizes(NamedTuple):
    """Samples grouped by size, ascending; shape (sizes,) each: size, mean of the middle half of the
    times, its relative error.
    """

    size: Floats
    time: Floats
    deviation: Floats


def fit_lines(
    size: Floats, time: Floats, error: Floats | None = None
) -> Iterator[tuple[Ints, LinearFit]]:
    """Fit as many lines as the times require, each to a range of sizes; the ranges are adjacent.

    Robust: only the middle half of the times of each size counts, and a size far off its line has
    less weight.

    Args:
        size: Bytes of each sample, shape (samples,); at least one.
        time: Its time, above 0, ns.
        error: Relative error of each time, if known better than from the scatter of times.

    Yields:
        The samples of a range, as indices into the arguments, and their line.
    """
    number = np.unique(size, return_inverse=True)[1]
    if (
        number.size and number.max() >= _MAX_SIZES
    ):  # uneven sizes within a few per cent count as one
        number = np.unique(np.rint(np.log2(np.maximum(size, 1)) * 8), return_inverse=True)[1]
    count = np.bincount(number)
    order = np.lexsort((time, number))
    time_rank = np.arange(number.size) - np.repeat(
        np.cumsum(count) - count, count
    )  # within its size, by time
    quarter = np.repeat(count // 4, count)
    inner = order[(time_rank >= quarter) & (time_rank < np.repeat(count, count) - quarter)]
    typical = np.bincount(number[inner], time[inner]) / np.bincount(number[inner])
    off = np.abs(time / typical[number] - 1)
    is_repeated = count[number] > 1
    # the median of few deviations is too small, since their center was fitted to them
    scatter = (
        1.4826 * float(np.median((off * count[number] / (count[number] - 0.8))[is_repeated]))
        if is_repeated.any()
        else 0.0
    )
    deviation = (
        1.1 * scatter / np.sqrt(count) if error is None else np.bincount(number, error) / count
    )
    sizes = _Sizes(np.bincount(number, size) / count, typical, np.maximum(deviation, _FLOOR))
    for low, high in _split_ranges(sizes, 0, count.size):
        yield np.flatnonzero((number >= low) & (number < high)), _fit_line(sizes, low, high)


def _split_ranges(sizes: _Sizes, low: int, high: int) -> Iterator[tuple[int, int]]:
    cost, covered = _compute_cost(sizes, low, high)
    breaks = range(low + MIN_SIZES, high - MIN_SIZES + 1)
    if not covered and breaks:
        costs = [
            _compute_cost(sizes, low, break_index)[0] + _compute_cost(sizes, break_index, high)[0]
            for break_index in breaks
        ]
        best = int(np.argmin(costs))
        if costs[best] < cost / 2:  # else no split is better than chance
            yield from _split_ranges(sizes, low, breaks[best])
            yield from _split_ranges(sizes, breaks[best], high)
            return
    yield low, high


def _compute_cost(sizes: _Sizes, low: int, high: int) -> tuple[float, bool]:
    """Returns the squared deviations of sizes from their line, clipped for single sizes, and
    whether the line covers them.
    """
    part = _Sizes(*(values[low:high] for values in sizes))
    missed = np.abs(part.time / _fit_line(sizes, low, high).times(part.size) - 1)
    return float((np.minimum(missed / part.deviation, _MAX_DEVIATIONS) ** 2).sum()), bool(
        (missed > np.maximum(FIT_TOLERANCE, 3 * part.deviation)).mean() <= _MAX_MISSED_SHARE
    )


def _fit_line(sizes: _Sizes, low: int, high: int) -> LinearFit:
    """Fits a line by least squares of the relative deviations; latency and time per byte are >=
    0.
    """
    size, time, deviation = (values[low:high] for values in sizes)
    if size[-1] < MIN_SIZE_RATIO * size[0] or not size[-1]:
        typical = float(np.median(time))
        if size[-1] < LATENCY_BOUND:
            return LinearFit("latency", typical, 0.0)
        return LinearFit("bandwidth", 0.0, float(np.median(time / size)))
    constant, linear = 1 / time, size / time
    base = 1 / deviation**2
    weight = base
    alpha = slope = 0.0
    for _ in range(_ITERATIONS):
        a, b, c = (
            (weight * product).sum() for product in (constant**2, constant * linear, linear**2)
        )
        u, v = ((weight * column).sum() for column in (constant, linear))
        determinant = a * c - b * b
        alpha, slope = (u * c - v * b) / determinant, (v * a - u * b) / determinant
        if alpha < 0:
            alpha, slope = 0.0, v / c
        elif slope < 0:
            alpha, slope = u / a, 0.0
        off = np.abs(constant * alpha + linear * slope - 1) / deviation
        weight = base * np.minimum(1.0, _HUBER / np.maximum(off, 1e-12))
    line_form = "line" if alpha > 0 and slope > 0 else "latency" if slope <= 0 else "bandwidth"
    return LinearFit(line_form, float(alpha), float(slope))


_TEXTS = dict.fromkeys(("collective", "span"), pl.String())
SAMPLES = build_schema(
    "run collective span ranks size_bytes bus_bytes transfer_ns whole", {"run": pl.Int64, **_TEXTS}
)
TRANSFERS = build_schema(
    "collective span ranks from_bytes to_bytes size_count count form alpha_ns bandwidth",
    "residual_p10 residual_p50 residual_p90 whole",
    {**_TEXTS, "form": pl.String},
    dict.fromkeys(
        ("alpha_ns", "bandwidth", "residual_p10", "residual_p50", "residual_p90"), pl.Float64
    ),
)
CLASS = ("collective", "span", "ranks")
"""Columns that identify a group of collectives with its own fit."""
_MIN_BANDWIDTH = 1e-6  # 10^9 B/s, for a run of barriers only
_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # ring steps per (ranks - 1)


def fit_transfers(samples: pl.DataFrame, through: pl.DataFrame | None = None) -> pl.DataFrame:
    """Returns `TRANSFERS` for `SAMPLES`, at least one; the size ranges of each class leave no gap.

    Args:
        samples: The samples that residuals refer to.
        through: The points to fit: one row per size, such as medians, with a column `error`, the
            relative error of each; None: the samples.
    """
    rows: list[tuple[object, ...]] = []
    points_of = dict((samples if through is None else through).group_by(CLASS))
    for key, part in samples.sort(*CLASS).group_by(CLASS, maintain_order=True):
        rows += _fit_rows(key, part, points_of[key])
    return pl.DataFrame(rows, schema=TRANSFERS, orient="row")


def build_measured_transfers(transfers: pl.DataFrame) -> tuple[MeasuredTransfer, ...]:
    """Returns the fits as entries of a machine, rounded to their significant digits."""
    fields = [name for name in transfers.columns if name not in ("size_count", "form", "whole")]
    rounded = transfers.select(fields).with_columns(
        pl.col("alpha_ns").round(1),
        pl.col("bandwidth").round_sig_figs(6),
        pl.col("^residual.*$").round(4),
    )
    return tuple(MeasuredTransfer(**row) for row in rounded.to_dicts())


def build_network(
    ranks: int,
    per_host: int,
    transfers: pl.DataFrame,
    samples: pl.DataFrame,
    device: str | None = None,
) -> tuple[tuple[Dimension, ...], list[Notice]]:
    """Returns the dimensions inside and between hosts, as fast as the best of their transfers, and
    notices of assumptions.

    Args:
        ranks: Ranks of the machine.
        per_host: Ranks on each host.
        transfers: From `fit_transfers`.
        samples: The samples that they were fitted to.
        device: Name of the device, which determines a link if nothing was transferred inside a
            host.
    """
    spans = (
        [("inside", per_host), ("between", ranks // per_host)]
        if per_host < ranks
        else [("inside", ranks)]
    )
    dimensions, notices = [], []
    for span, members in spans:
        if members == 1 < ranks:
            continue
        bandwidth, latency, assumed = _estimate_link(span, transfers, samples, device)
        dimensions.append(Dimension("switch", members, bandwidth, latency, name=span))
        if assumed:
            text = f"no transfer {span} hosts tells a bandwidth: {assumed}"
            notices.append(Notice("bandwidth-assumed", "warning", text))
    return tuple(dimensions), notices


def _fit_rows(
    key: tuple[object, ...], part: pl.DataFrame, points: pl.DataFrame
) -> list[tuple[object, ...]]:
    """Returns rows of `TRANSFERS` of one kind, span and group size; their size ranges leave no
    gap.
    """
    columns = ("size_bytes", "bus_bytes", "transfer_ns")
    size, bus, time = (part[name].cast(pl.Float64).to_numpy() for name in columns)
    at_size, at_bus, at_time = (points[name].cast(pl.Float64).to_numpy() for name in columns)
    ranges = list(
        fit_lines(
            at_bus, at_time, points["error"].to_numpy() if "error" in points.columns else None
        )
    )
    range_starts = [int(at_size[positions].min()) for positions, _ in ranges]
    range_ends = [*(start - 1 for start in range_starts[1:]), int(at_size.max())]
    rows = []
    for (_, line), start, until in zip(ranges, range_starts, range_ends, strict=True):
        in_range = (size >= start) & (size <= until)
        off = np.quantile(time[in_range] / line.times(bus[in_range]) - 1, (0.1, 0.5, 0.9)).tolist()
        bandwidth = (
            1 / line.ns_per_byte if line.ns_per_byte else None
        )  # bytes per ns are 10^9 bytes per second
        rows.append(
            (
                *key,
                start,
                until,
                np.unique(size[in_range]).size,
                int(in_range.sum()),
                line.form,
                line.alpha_ns,
                bandwidth,
                *off,
                bool(part["whole"].all()),
            )
        )
    return rows


def _estimate_link(
    span: str, transfers: pl.DataFrame, samples: pl.DataFrame, device: str | None
) -> tuple[float, float, str]:
    """Returns bandwidth (10^9 B/s) and latency (ns) of the links of a span, and the assumption made
    if no sample shows them.

    Takes the best bus bandwidth of any kind, and the lowest latency of a ring step.
    """
    measured = transfers.filter(pl.col("span") == span)
    steps = pl.col("collective").replace_strict(_STEPS, default=None, return_dtype=pl.Int64) * (
        pl.col("ranks") - 1
    )
    steps = steps.fill_null(1)
    latency = measured.select((pl.col("alpha_ns") / steps).min()).item() or 0.0
    best = measured["bandwidth"].max()
    if best is not None:
        return round(float(best), 3) or _MIN_BANDWIDTH, round(latency), ""  # type: ignore[arg-type]
    link = find_device_link(device) if span == "inside" else None
    if link is not None:
        return link.peak_gb_per_s, round(latency), f"that of {link.name} is taken"
    reached = samples.select((pl.col("bus_bytes") / pl.col("transfer_ns")).max()).item()
    return (
        max(round(reached, 3), _MIN_BANDWIDTH),
        round(latency),
        "the highest rate of any collective is taken",
    )


_PAIRS = ("send", "recv", "receive", "send_recv")
_JITTER = 1.5  # of the lower quartile of its class: longer ones have waited for an unrecorded rank


@dataclass(frozen=True)
class Calibration(Result):
    """Properties of a machine fitted to runs, or to measurements on the machine itself.

    Attributes:
        machine: With the fitted transfers; its dimensions are by host, each with the best bandwidth
            reached.
        transfers: One row per kind, span, group size and range of sizes: collective, span, ranks,
            from_bytes, to_bytes, size_count (distinct sizes), count (collectives), form (`line`;
            `latency`: size has no effect or sizes are too small; `bandwidth`: one size, or no
            visible latency), alpha_ns, bandwidth (10^9 B/s on the bus; null for `latency`),
            residual_p10, residual_p50, residual_p90 ((measured - fitted) / fitted over the
            collectives), whole (whether all ranks of the groups are recorded; else only collectives
            without apparent waits count).
        samples: The collectives: run, collective, span, ranks, size_bytes, bus_bytes, transfer_ns
            (from the last arrival), whole.
        notices: What was left out or assumed.
    """

    machine: Machine
    transfers: pl.DataFrame
    samples: pl.DataFrame
    notices: tuple[Notice, ...] = ()


def calibrate(runs: Sequence[Session], *, ranks_per_host: int | None = None) -> Calibration:
    """Fit the collectives of runs on one machine.

    Args:
        runs: Recorded runs; more ranks of each are better, to separate late arrivals from slow
            transfers.
        ranks_per_host: Ranks per host, numbered host by host; None to take the hosts from the
            traces.

    Raises:
        InputError: slug `nothing-to-calibrate`: no collective with known kind, size, group and
            hosts.
    """
    hosts = [_find_hosts(run, ranks_per_host) for run in runs]
    all_calls = pl.concat(
        [
            _collect_calls(run).with_columns(run=pl.lit(number, pl.Int64))
            for number, run in enumerate(runs)
        ]
    )
    members = all_calls.select("run", "members").unique(maintain_order=True)
    spans = [
        None if ranks is None else _classify_span(ranks, hosts[run])
        for run, ranks in members.rows()
    ]
    placed = all_calls.join(
        members.with_columns(pl.Series("span", spans, pl.String)),
        on=["run", "members"],
        nulls_equal=True,
        how="left",
        maintain_order="left",
    )
    usable = pl.all_horizontal(
        pl.col("collective").is_in(get_args(Collective)),
        pl.col("size_bytes", "span", "bus_factor").is_not_null(),
        pl.col("transfer_ns") > 0,
    ).fill_null(value=False)
    omitted = placed.filter(~usable)
    notices = []
    if omitted.height:
        kinds = ", ".join(omitted["collective"].fill_null("unknown").unique().sort())
        text = (
            f"{omitted.height} of {placed.height} collectives do not count ({kinds}): their kind, size, group or "
            "hosts are not known"
        )
        notices.append(Notice("collectives-not-calibrated", "warning", text, omitted.height))
    samples = placed.filter(usable).with_columns(
        bus_bytes=pl.col("size_bytes") * pl.col("bus_factor")
    )
    # Partially recorded groups count only without apparent waits, and only if no group of the class
    # is whole.
    without_wait = pl.col("transfer_ns") <= _JITTER * pl.col("transfer_ns").quantile(
        0.25, "lower"
    ).over([*CLASS, "size_bytes"])
    samples = samples.filter("whole" | (~pl.col("whole").any().over(CLASS) & without_wait)).pipe(
        cast_to_schema, SAMPLES
    )
    if not samples.height:
        message = (
            "no collective of these runs has a known kind, size and group, and hosts that are known"
        )
        hint = "PyTorch 2.2 or newer says sizes and groups; --ranks-per-host tells hosts that no trace names"
        raise InputError(
            message,
            slug="nothing-to-calibrate",
            where=" ".join(run.name for run in runs),
            hint=hint,
        )
    transfers = fit_transfers(samples)
    partial = transfers.filter(~pl.col("whole"))
    if partial.height:
        text = (
            f"not all ranks of the groups of {partial['count'].sum()} collectives are recorded: of each size the "
            "quickest count, and what all of them waited is part of their latency"
        )
        notices.append(Notice("ranks-missing", "warning", text, int(partial["count"].sum())))
    machine, machine_notices = _build_machine(runs, hosts, transfers, samples)
    return Calibration(machine, transfers, samples, (*notices, *machine_notices))


def _collect_calls(run: Session) -> pl.DataFrame:
    """Returns one row per collective: collective, members, ranks, size_bytes, bus_factor,
    transfer_ns, whole.

    The transfer is the time from the last arrival to the end, the median over the recorded ranks;
    if only one rank is recorded, it is the whole time of that rank.
    """
    parts = [summarize_rank(trace) for trace in run.traces]
    matched = match_collectives(parts).parts.select(
        "part", "event", "instance", joined_ns="transfer_ns"
    )
    calls = pl.concat(
        [
            part.calls.filter(
                pl.col("where") == ("device" if part.ledger.device is not None else "host")
            ).with_columns(part=pl.lit(number, pl.Int64))
            for number, part in enumerate(parts)
        ]
    )
    pair, barrier = pl.col("kind").is_in(_PAIRS), pl.col("kind") == "barrier"
    both = pl.concat_list(pl.min_horizontal("rank", "peer"), pl.max_horizontal("rank", "peer"))
    joined = calls.join(
        matched, on=["part", "event"], how="left", maintain_order="left"
    ).with_columns(
        pl.when(pair).then(pl.lit("send")).otherwise("kind").alias("collective"),
        pl.when(pair).then(2).otherwise("group_size").alias("ranks"),
        pl.when(pair).then(both).otherwise("members").cast(pl.List(pl.Int32)).alias("members"),
        pl.coalesce("joined_ns", "duration_ns").alias("transfer_ns"),
        pl.coalesce("instance", -1 - pl.int_range(pl.len())).alias("instance"),
        pl.when(barrier).then(0).otherwise("size_bytes").alias("size_bytes"),
    )
    instances = joined.group_by("instance", maintain_order=True).agg(
        pl.col("collective", "members", "ranks").first(),
        pl.col("size_bytes").max(),
        pl.col("transfer_ns").median().cast(pl.Int64),
        pl.len().alias("recorded"),
    )
    # a file without groups may show that all ranks of the job take part
    world = run.world_size or 0
    ranks = pl.coalesce("ranks", pl.when(pl.col("recorded") == world).then(world))
    all_ranks = pl.when(ranks == world).then(
        pl.int_ranges(0, pl.lit(world, pl.Int32), dtype=pl.Int32)
    )
    grouped = instances.with_columns(
        ranks.alias("ranks"), pl.coalesce("members", all_ranks).alias("members")
    )
    kinds = grouped.select("collective", "ranks").unique().drop_nulls()
    factors = [compute_bus_factor(kind, count) for kind, count in kinds.rows()]
    return (
        grouped.join(
            kinds.with_columns(pl.Series("bus_factor", factors, pl.Float64)),
            on=["collective", "ranks"],
            how="left",
            maintain_order="left",
        )
        .with_columns((pl.col("recorded") >= pl.col("ranks")).fill_null(value=False).alias("whole"))
        .filter(pl.col("ranks").ne_missing(1))
    )


def _find_hosts(run: Session, ranks_per_host: int | None) -> Mapping[int, str]:
    """Returns the host of each rank: as given, as in the traces, else that of its block of as many
    ranks as a host has devices.

    Launchers number ranks host by host; if the recorded ranks are not numbered so, hosts of the
    others stay unknown.
    """
    recorded = {
        trace.rank: trace.meta.host
        for trace in run.traces
        if trace.rank is not None and trace.meta.host
    }
    visible = max((trace.devices.height for trace in run.traces), default=0)
    world = run.world_size or 0
    if ranks_per_host is not None:
        return {rank: f"host {rank // ranks_per_host}" for rank in range(world)}
    blocks = {rank // visible: host for rank, host in recorded.items()} if visible else {}
    fits_blocks = (
        all(blocks[rank // visible] == host for rank, host in recorded.items())
        if visible
        else False
    )
    if world <= visible:  # the whole job is on one host
        names = set(recorded.values())
        return (
            dict.fromkeys(range(world), next(iter(names), "host")) if len(names) < 2 else recorded
        )
    if visible < 2 or not fits_blocks or len(set(blocks.values())) < len(blocks):
        return recorded
    return {
        rank: blocks.get(rank // visible, f"host of rank {rank - rank % visible}")
        for rank in range(world)
    }


def _classify_span(members: Sequence[int], hosts: Mapping[int, str]) -> str | None:
    """Returns `inside` a host, `between` hosts, or None if unknown."""
    different = {hosts[rank] for rank in members if rank in hosts}
    if len(different) > 1:
        return "between"
    return "inside" if different and all(rank in hosts for rank in members) else None


def _build_machine(
    runs: Sequence[Session],
    hosts: Sequence[Mapping[int, str]],
    transfers: pl.DataFrame,
    samples: pl.DataFrame,
) -> tuple[Machine, list[Notice]]:
    """Returns the machine of the run with most ranks, with the fits to all runs."""
    number = max(
        range(len(runs)), key=lambda number: runs[number].world_size or len(runs[number].traces)
    )
    run, host_by_rank = runs[number], hosts[number]
    world = max(run.world_size or 0, *(rank + 1 for rank in host_by_rank), len(run.traces))
    ranks_by_host: dict[str, list[int]] = {}
    for rank, host in sorted(host_by_rank.items()):
        ranks_by_host.setdefault(host, []).append(rank)
    sizes = {len(ranks) for ranks in ranks_by_host.values()}
    size = sizes.pop() if len(sizes) == 1 and len(host_by_rank) == world else world
    notices = []
    if (size == world and len(ranks_by_host) > 1) or len(host_by_rank) < world:
        text = (
            f"the hosts of the {world} ranks are not all known, or hold different numbers of them: one dimension joins "
            "all ranks"
        )
        notices.append(Notice("hosts-unknown", "warning", text))
    device = next(
        (name for trace in run.traces for name in trace.devices["name"].drop_nulls()), None
    )
    dimensions, network_notices = build_network(world, size, transfers, samples, device)
    names = ", ".join(Path(run.name).name for run in runs)
    order = [rank for ranks in ranks_by_host.values() for rank in ranks] if size < world else []
    machine = Machine(
        dimensions,
        name=f"the machine of {Path(run.name).name}",
        source=f"traceloom calibrate {__version__}: {samples.height} collectives of {names}",
        order=() if order == sorted(order) else tuple(order),
        per_host=size,
        device=next(
            (
                peak
                for trace in run.traces
                for peak in find_peaks(trace).values()
                if isinstance(peak, Peak)
            ),
            None,
        ),
        transfers=build_measured_transfers(transfers),
    )
    return machine, [*notices, *network_notices]
