"""A machine fitted to what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from traceloom import __version__
from traceloom.analyze.peaks import Peak, find
from traceloom.model.frames import as_declared
from traceloom.model.notice import Notice
from traceloom.replay.measure.repeating import half_width
from traceloom.replay.measure.task import Recorded, Series, Task
from traceloom.simulate.calibrate import Calibration
from traceloom.simulate.machine import Dimension, Machine
from traceloom.simulate.measured_transfers import SAMPLES, TRANSFERS, fit_transfers, measured_transfers, network_of

_MODEL_ERROR = 0.05  # of a time: lines are that good at best
_UNSURE = 0.1  # of the median, on either side


def fit_machine(task: Task, recorded: Recorded) -> Calibration:
    """Fit the machine. Its device has its published peaks, else those that kernels reached."""
    samples = _samples(recorded.transfers)
    transfers = fit_transfers(samples, _medians(recorded.transfers)) if samples.height else TRANSFERS.to_frame()
    notices: list[Notice] = []
    dimensions: tuple[Dimension, ...] = ()
    left_out = dict(recorded.left_out)
    if samples.height:
        dimensions, notices = network_of(task.ranks, task.per_host, transfers, samples, recorded.device)
    elif task.ranks == 1:
        left_out["the network"] = "one rank has nobody to communicate with"
    if left_out:
        reasons = "; ".join(f"{what}: {reason}" for what, reason in left_out.items())
        notices.append(Notice("transfers-not-measured", "warning", f"not measured: {reasons}", len(left_out)))
    every = [*recorded.transfers, *recorded.kernels]
    unsure = sum(half_width(np.array(series.times_ns)) > _UNSURE for series in every)
    if unsure:
        text = f"{unsure} of {len(every)} medians are not known to 10 %: other work ran at the same time"
        notices.append(Notice("medians-unsure", "warning", text, unsure))
    if samples.height and not recorded.one_clock:
        text = "ranks have no clock in common: times are the slowest rank's, after a barrier"
        notices.append(Notice("no-common-clock", "info", text))
    published = find(recorded.device)
    machine = Machine(
        dimensions,
        name=f"{task.ranks // task.per_host} x {task.per_host} {recorded.device}",
        source=f"traceloom calibrate --here {__version__}: {samples.height:,} collectives over {task.backend}",
        per_host=task.per_host,
        device=published if isinstance(published, Peak) else _measured_peak(recorded),
        transfers=measured_transfers(transfers),
    )
    return Calibration(machine, transfers, samples, tuple(notices))


def _samples(every: Sequence[Series]) -> pl.DataFrame:
    """`SAMPLES`: one row per time of each series."""
    parts = [
        pl.DataFrame({"transfer_ns": np.rint(series.times_ns)}).with_columns(
            collective=pl.lit(series.what), span=pl.lit(series.variety), ranks=pl.lit(series.ranks),
            size_bytes=pl.lit(series.size), bus_bytes=pl.lit(series.amount), run=0, whole=True,
        ).pipe(as_declared, SAMPLES)
        for series in every
    ]  # fmt: skip
    return pl.concat([SAMPLES.to_frame(), *parts])


def _medians(every: Sequence[Series]) -> pl.DataFrame:
    """The median of each series, with the error that a line may have there."""
    rows = [
        (series.what, series.variety, series.ranks, series.size, series.amount, float(np.median(series.times_ns)),
         _MODEL_ERROR + half_width(np.array(series.times_ns)) / 2)
        for series in every
    ]  # fmt: skip
    columns = ["collective", "span", "ranks", "size_bytes", "bus_bytes", "transfer_ns", "error"]
    return pl.DataFrame(rows, schema=columns, orient="row")


def _measured_peak(recorded: Recorded) -> Peak:
    """The best rate of matrix products of each type, in FLOP/s, and of copies and triads, in B/s."""
    best: dict[str, float] = {}
    for series in recorded.kernels:
        name = series.variety if series.what == "matrix_product" else "memory"
        rate = 1e9 * series.amount / float(np.median(series.times_ns))
        best[name] = float(f"{max(rate, best.get(name, 0.0)):.4g}")
    memory = best.pop("memory", None)
    return Peak(recorded.device, best, memory)
