"""What was measured of a machine, and what was fitted to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from traceloom import __version__
from traceloom.analyze.peaks import Peak, find
from traceloom.model.frames import as_declared, schema
from traceloom.model.notice import Notice
from traceloom.model.result import Result
from traceloom.replay.measure.repeating import half_width
from traceloom.replay.measure.task import Recorded, Series, Task
from traceloom.simulate.machine import Dimension, Machine
from traceloom.simulate.measured_transfers import (
    CLASS,
    SAMPLES,
    TRANSFERS,
    fit_transfers,
    measured_transfers,
    network_of,
)

_NUMBERS = ("median_ns", "p10_ns", "p90_ns", "half_width", "fitted_ns", "residual", "rate")
POINTS = schema(
    "collective span ranks size_bytes bus_bytes count median_ns p10_ns p90_ns half_width fitted_ns residual rate",
    dict.fromkeys(("collective", "span"), pl.String()),
    dict.fromkeys(_NUMBERS, pl.Float64()),
)
_OF_KERNELS = {"collective": "kernel", "span": "element_type", "size_bytes": "size", "bus_bytes": "amount",
               "from_bytes": "from_size", "to_bytes": "to_size", "bandwidth": "rate"}  # fmt: skip
_MODEL_ERROR = 0.05  # of a time: lines are that good at best
_UNSURE = 0.1  # of the median, on either side


@dataclass(frozen=True)
class Measurement(Result):
    """A machine as it was measured.

    Attributes:
        machine: As `simulate` takes it: the fitted transfers, dimensions by hosts as good as their best transfer, and
            the device: its known peaks, else those that its kernels reached.
        transfers: The fits of collectives, as of `traceloom.simulate.calibrate`: one row per kind, span, group size and
            range of sizes.
        collectives: One row per collective that was measured: collective, span, ranks, size_bytes, bus_bytes, count,
            median_ns, p10_ns, p90_ns, half_width (of the median's interval, as a part of it), fitted_ns, residual
            ((median - fitted) / fitted), rate (bus bandwidth, 10^9 B/s).
        kernel_fits: As `transfers`: kernel, element_type, from_size, to_size, ..., rate (10^9 operations or bytes per
            second).
        kernels: As `collectives`: kernel, element_type, size (bytes of a buffer, rows of a matrix), amount (operations,
            or bytes read and written) ...
        peaks: What the kernels reached, FLOP/s by element type and `memory` in B/s.
        environment: Device, backend, ranks, hosts, versions.
        absent: What could not be measured -> why.
        notices: What must be known.
    """

    machine: Machine
    transfers: pl.DataFrame
    collectives: pl.DataFrame
    kernel_fits: pl.DataFrame
    kernels: pl.DataFrame
    peaks: dict[str, float]
    environment: dict[str, str | int]
    absent: dict[str, str] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()

    @classmethod
    def of(cls, task: Task, recorded: Recorded) -> Measurement:
        """Fit what was recorded."""
        samples = _samples(recorded.transfers)
        transfers, collectives = _fitted(recorded.transfers)
        of_kernels, kernels = (frame.rename(_OF_KERNELS, strict=False) for frame in _fitted(recorded.kernels))
        peaks = _peaks(kernels)
        notices: list[Notice] = []
        absent = dict(recorded.left_out)
        dimensions: tuple[Dimension, ...] = ()
        if samples.height:
            dimensions, notices = network_of(task.ranks, task.per_host, transfers, samples, recorded.device)
        elif task.ranks == 1:
            absent["network"] = "one rank has nobody to communicate with; --ranks takes more"
        widths = pl.concat([collectives["half_width"], kernels["half_width"]])
        unsure = int((widths > _UNSURE).sum())
        if unsure:
            text = f"{unsure} of {widths.len()} medians are not known to 10 %: other work ran beside"
            notices.append(Notice("medians-unsure", "warning", text, unsure))
        if samples.height and not recorded.one_clock:
            text = "ranks have no clock in common: times are the slowest rank's, after a barrier"
            notices.append(Notice("no-common-clock", "info", text))
        published = find(recorded.device)
        flops = {name: rate for name, rate in peaks.items() if name != "memory"}
        hosts = task.ranks // task.per_host
        machine = Machine(
            dimensions,
            name=f"{hosts} x {task.per_host} {recorded.device}",
            source=f"traceloom measure {__version__}: {samples.height:,} collectives over {task.backend}"
            if samples.height
            else f"traceloom measure {__version__}: {kernels.height} kernels",
            per_host=task.per_host,
            device=published if isinstance(published, Peak) else Peak(recorded.device, flops, peaks.get("memory")),
            transfers=measured_transfers(transfers),
        )
        environment: dict[str, str | int] = {
            "device": recorded.device, "kind": task.device, "backend": task.backend, "ranks": task.ranks,
            "hosts": hosts, **recorded.software,
        }  # fmt: skip
        fits = of_kernels.drop("ranks", "whole")
        return cls(
            machine, transfers, collectives, fits, kernels.drop("ranks"), peaks, environment, absent, tuple(notices)
        )


def _samples(every: Iterable[Series]) -> pl.DataFrame:
    """`SAMPLES`, one row per time; kernels stand where collectives do."""
    parts = [
        pl.DataFrame({"transfer_ns": np.rint(series.times_ns)}).with_columns(
            collective=pl.lit(series.what), span=pl.lit(series.variety), ranks=pl.lit(series.ranks),
            size_bytes=pl.lit(series.size), bus_bytes=pl.lit(series.amount), run=0, whole=True,
        ).pipe(as_declared, SAMPLES)
        for series in every
    ]  # fmt: skip
    return pl.concat([SAMPLES.to_frame(), *parts])


def _fitted(every: Sequence[Series]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`TRANSFERS`, the lines through the medians; and `POINTS`, each series beside its line."""
    if not every:
        return TRANSFERS.to_frame(), POINTS.to_frame()
    rows = [
        (series.what, series.variety, series.ranks, series.size, round(series.amount), len(series.times_ns),
         *np.quantile(series.times_ns, (0.5, 0.1, 0.9)).tolist(), half_width(np.array(series.times_ns)))
        for series in every
    ]  # fmt: skip
    points = pl.DataFrame(rows, schema=dict(list(POINTS.items())[:10]), orient="row")
    through = points.rename({"median_ns": "transfer_ns"}).with_columns(error=_MODEL_ERROR + pl.col("half_width") / 2)
    fits = fit_transfers(_samples(every), through)
    line = fits.select(*CLASS, "from_bytes", "to_bytes", "alpha_ns", "bandwidth")
    fitted = pl.col("alpha_ns") + (pl.col("bus_bytes") / pl.col("bandwidth")).fill_null(0.0)
    beside = (
        points.join(line, on=CLASS, how="left", maintain_order="left")
        .filter(pl.col("size_bytes").is_between("from_bytes", "to_bytes"))
        .with_columns(fitted_ns=fitted, residual=pl.col("median_ns") / fitted - 1)
        .with_columns(rate=pl.when(pl.col("bus_bytes") > 0).then(pl.col("bus_bytes") / pl.col("median_ns")))
    )
    return fits, as_declared(beside, POINTS)


def _peaks(kernels: pl.DataFrame) -> dict[str, float]:
    """The best rate of matrix products by type, and what the largest copy or triad moved: no cache holds that."""
    products = kernels.filter(kernel="matrix_product").group_by("element_type", maintain_order=True)
    best = products.agg(pl.col("rate").max()).iter_rows()
    moved = kernels.filter(pl.col("kernel").is_in(["copy", "triad"]))
    memory = moved.filter(pl.col("size") == pl.col("size").max())["rate"].max()
    rates = {**dict(best), **({} if memory is None else {"memory": memory})}
    return {name: float(f"{1e9 * rate:.4g}") for name, rate in rates.items()}
