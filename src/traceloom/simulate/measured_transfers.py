"""Collectives as they were measured: latency and bandwidth per kind, span and group size, and the network of them.

What is fitted stands in docs/concepts/calibration.md.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.collective.bandwidth import link_of
from traceloom.model.frames import schema
from traceloom.model.notice import Notice
from traceloom.simulate.fitting import fits
from traceloom.simulate.machine import Dimension, MeasuredTransfer

_TEXTS = dict.fromkeys(("collective", "span"), pl.String())
SAMPLES = schema("run collective span ranks size_bytes bus_bytes transfer_ns whole", {"run": pl.Int64, **_TEXTS})
TRANSFERS = schema(
    "collective span ranks from_bytes to_bytes size_count count form alpha_ns bandwidth",
    "residual_p10 residual_p50 residual_p90 whole",
    {**_TEXTS, "form": pl.String},
    dict.fromkeys(("alpha_ns", "bandwidth", "residual_p10", "residual_p50", "residual_p90"), pl.Float64),
)
CLASS = ("collective", "span", "ranks")
"""What has a fit of its own."""
_LEAST = 1e-6  # 10^9 B/s, of a run of barriers
_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # of a ring, times (ranks - 1)


def fit_transfers(samples: pl.DataFrame, through: pl.DataFrame | None = None) -> pl.DataFrame:
    """`TRANSFERS` of `SAMPLES`, of which there is at least one: the ranges of sizes of each class leave no gap.

    Args:
        samples: What residuals are of.
        through: What the lines go through: one row for each size, as medians are, with a column `error`, by which part
            of it each may be wrong; None: the samples.
    """
    rows: list[tuple[object, ...]] = []
    points = samples if through is None else through
    points_of = dict(points.group_by(CLASS))
    for key, part in samples.sort(*CLASS).group_by(CLASS, maintain_order=True):
        rows += _fitted(key, part, points_of[key])
    return pl.DataFrame(rows, schema=TRANSFERS, orient="row")


def measured_transfers(transfers: pl.DataFrame) -> tuple[MeasuredTransfer, ...]:
    """The fits as a machine has them, rounded to what they are worth."""
    fields = [name for name in transfers.columns if name not in ("size_count", "form", "whole")]
    rounded = transfers.select(fields).with_columns(
        pl.col("alpha_ns").round(1), pl.col("bandwidth").round_sig_figs(6), pl.col("^residual.*$").round(4)
    )
    return tuple(MeasuredTransfer(**row) for row in rounded.to_dicts())


def network_of(
    ranks: int, per_host: int, transfers: pl.DataFrame, samples: pl.DataFrame, device: str | None = None
) -> tuple[tuple[Dimension, ...], list[Notice]]:
    """The dimensions inside and between hosts, as good as the best of their transfers, and what had to be assumed.

    Args:
        ranks: Of the machine.
        per_host: Of them on each host.
        transfers: As `fit_transfers` returns them.
        samples: What they were fitted to.
        device: Its name, which tells a link where nothing was transferred inside a host.
    """
    spans = [("inside", per_host), ("between", ranks // per_host)] if per_host < ranks else [("inside", ranks)]
    dimensions, notices = [], []
    for span, members in spans:
        if members == 1 < ranks:
            continue
        bandwidth, latency, assumed = _link(span, transfers, samples, device)
        dimensions.append(Dimension("switch", members, bandwidth, latency, name=span))
        if assumed:
            text = f"no transfer {span} hosts tells a bandwidth: {assumed}"
            notices.append(Notice("bandwidth-assumed", "warning", text))
    return tuple(dimensions), notices


def _fitted(key: tuple[object, ...], part: pl.DataFrame, points: pl.DataFrame) -> list[tuple[object, ...]]:
    """Rows of `TRANSFERS` of one kind, span and group size; their ranges of sizes leave no gap."""
    columns = ("size_bytes", "bus_bytes", "transfer_ns")
    size, bus, time = (part[name].cast(pl.Float64).to_numpy() for name in columns)
    at_size, at_bus, at_time = (points[name].cast(pl.Float64).to_numpy() for name in columns)
    ranges = list(fits(at_bus, at_time, points["error"].to_numpy() if "error" in points.columns else None))
    begins = [int(at_size[at].min()) for at, _ in ranges]
    ends = [*(begin - 1 for begin in begins[1:]), int(at_size.max())]
    rows = []
    for (_, line), begin, until in zip(ranges, begins, ends, strict=True):
        inside = (size >= begin) & (size <= until)
        off = np.quantile(time[inside] / line.times(bus[inside]) - 1, (0.1, 0.5, 0.9)).tolist()
        bandwidth = 1 / line.ns_per_byte if line.ns_per_byte else None  # bytes per ns are 10^9 bytes per second
        rows.append(
            (*key, begin, until, np.unique(size[inside]).size, int(inside.sum()), line.form, line.alpha_ns, bandwidth,
             *off, bool(part["whole"].all()))
        )  # fmt: skip
    return rows


def _link(span: str, transfers: pl.DataFrame, samples: pl.DataFrame, device: str | None) -> tuple[float, float, str]:
    """Bandwidth (10^9 B/s) and latency (ns) of the links of a span, and what is assumed where nothing tells them.

    The best bandwidth on the bus of any kind, and the least latency of a step of a ring.
    """
    measured = transfers.filter(pl.col("span") == span)
    steps = pl.col("collective").replace_strict(_STEPS, default=None, return_dtype=pl.Int64) * (pl.col("ranks") - 1)
    steps = steps.fill_null(1)
    latency = measured.select((pl.col("alpha_ns") / steps).min()).item() or 0.0
    best = measured["bandwidth"].max()
    if best is not None:
        return round(float(best), 3) or _LEAST, round(latency), ""  # type: ignore[arg-type]
    link = link_of(device) if span == "inside" else None
    if link is not None:
        return link.peak_gb_per_s, round(latency), f"that of {link.name} is taken"
    reached = samples.select((pl.col("bus_bytes") / pl.col("transfer_ns")).max()).item()
    return max(round(reached, 3), _LEAST), round(latency), "the highest rate of any collective is taken"
