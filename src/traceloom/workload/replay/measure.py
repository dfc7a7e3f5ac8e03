"""Measuring a machine: the task, the fit and the result."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from traceloom import __version__
from traceloom.analyze.placed_calls import Peak, find
from traceloom.errors import InputError, UsageError
from traceloom.system import processes
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.workload.replay.communication import BACKENDS
from traceloom.workload.replay.measure_rank import (
    FAILED_HINT,
    SMALLEST,
    Recorded,
    Series,
    Task,
    half_width,
    measure_here,
)
from traceloom.workload.replay.ranks import StatusCallback, run_processes
from traceloom.workload.simulate.calibrate import (
    SAMPLES,
    TRANSFERS,
    Calibration,
    build_measured_transfers,
    build_network,
    fit_transfers,
)
from traceloom.workload.simulate.machine import Dimension, Machine

_MODEL_ERROR = 0.05  # min relative error of a fitted line
_UNSURE = 0.1  # max uncertainty as a fraction of the median


def fit_machine(task: Task, recorded: Recorded) -> Calibration:
    """Fits the machine. Its device has its published peaks, else those that kernels reached."""
    samples = _samples(recorded.transfers)
    transfers = (
        fit_transfers(samples, _medians(recorded.transfers))
        if samples.height
        else TRANSFERS.to_frame()
    )
    notices: list[Notice] = []
    dimensions: tuple[Dimension, ...] = ()
    omitted = dict(recorded.omitted)
    if samples.height:
        dimensions, notices = build_network(
            task.ranks, task.per_host, transfers, samples, recorded.device
        )
    elif task.ranks == 1:
        omitted["the network"] = "one rank has nobody to communicate with"
    if omitted:
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in omitted.items())
        notices.append(
            Notice("transfers-not-measured", "warning", f"not measured: {reasons}", len(omitted))
        )
    all_series = [*recorded.transfers, *recorded.kernels]
    unsure = sum(half_width(np.array(series.times_ns)) > _UNSURE for series in all_series)
    if unsure:
        text = f"{unsure} of {len(all_series)} medians are not known to 10 %: other work ran at the same time"
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
        transfers=build_measured_transfers(transfers),
    )
    return Calibration(machine, transfers, samples, tuple(notices))


def _samples(all_series: Sequence[Series]) -> pl.DataFrame:
    """`SAMPLES`: one row per time of each series."""
    parts = [
        pl.DataFrame({"transfer_ns": np.rint(series.times_ns)})
        .with_columns(
            collective=pl.lit(series.what),
            span=pl.lit(series.variety),
            ranks=pl.lit(series.ranks),
            size_bytes=pl.lit(series.size),
            bus_bytes=pl.lit(series.amount),
            run=0,
            whole=True,
        )
        .pipe(cast_to_schema, SAMPLES)
        for series in all_series
    ]
    return pl.concat([SAMPLES.to_frame(), *parts])


def _medians(all_series: Sequence[Series]) -> pl.DataFrame:
    """Returns the median of each series, with the error allowed for a line there."""
    rows = [
        (
            series.what,
            series.variety,
            series.ranks,
            series.size,
            series.amount,
            float(np.median(series.times_ns)),
            _MODEL_ERROR + half_width(np.array(series.times_ns)) / 2,
        )
        for series in all_series
    ]
    return pl.DataFrame(
        rows,
        schema=["collective", "span", "ranks", "size_bytes", "bus_bytes", "transfer_ns", "error"],
        orient="row",
    )


def _measured_peak(recorded: Recorded) -> Peak:
    """Returns the best rate of matrix products of each type, in FLOP/s, and of copies and triads,
    in B/s.
    """
    best: dict[str, float] = {}
    for series in recorded.kernels:
        name = series.variety if series.what == "matrix_product" else "memory"
        rate = 1e9 * series.amount / float(np.median(series.times_ns))
        best[name] = float(f"{max(rate, best.get(name, 0.0)):.4g}")
    memory = best.pop("memory", None)
    return Peak(recorded.device, best, memory)


_MAX_BYTES = {"cpu": 1 << 26}
_MAX_BYTES_ON_DEVICES = 1 << 28
_MAX_RANKS_ON_PROCESSORS = 2  # default on the CPU
_TIMEOUT_S = 60.0


class LaunchedProcess(NamedTuple):
    """The position of this process according to a launcher such as torchrun.

    Attributes:
        rank: Rank of this process.
        ranks: Number of ranks.
        per_host: Ranks on this host.
    """

    rank: int
    ranks: int
    per_host: int


def launched() -> LaunchedProcess | None:
    """Returns the position of this process; None if it was not started by a launcher."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    ranks = int(os.environ["WORLD_SIZE"])
    return LaunchedProcess(
        int(os.environ["RANK"]), ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    )


def measure(
    *,
    ranks: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    max_bytes: int | None = None,
    factor: int = 4,
    precision: float = 0.03,
    on_status: StatusCallback = lambda _: None,
) -> Calibration:
    """Measures the collectives and kernels of this machine, and fits a machine to them.

    Under torchrun its processes measure all hosts together, and all return the same result.

    Args:
        ranks: Number of processes; None: those of the launcher, else one per device, or two on the
            CPU.
        device: `cpu`, `cuda` or `xpu`; None for the available one.
        backend: Of torch.distributed; None for the default of the device.
        max_bytes: The largest message; None: 64 MiB on the CPU, 256 MiB on devices.
        factor: Ratio of consecutive sizes.
        precision: Each is repeated until the relative uncertainty of its median is at most this, or
            for some tenths of a second.
        on_status: Called with a status message.

    Raises:
        UsageError: slugs `too-few-devices`, `wrong-usage`.
        InputError: slugs `no-torch`, `no-backend`, `no-device`, `no-rendezvous`.
        PartialError: slug `rank-failed`.
    """
    if find_spec("torch") is None:
        raise InputError(
            "measuring needs torch", slug="no-torch", hint="pip install 'traceloom[record]'"
        )
    process = launched()
    if process and ranks not in (None, process.ranks):
        message = f"{ranks} ranks are asked for, the launcher has started {process.ranks}"
        raise UsageError(message, slug="wrong-usage", hint="leave --ranks out")
    if max_bytes is not None and max_bytes < SMALLEST:
        raise UsageError(
            f"the largest message is below {SMALLEST:,} bytes",
            slug="wrong-usage",
            hint="as --max-size 64MiB",
        )
    device, usable = _device(device)
    if process:
        count, per_host = process.ranks, process.per_host
    else:
        count = per_host = ranks or (
            usable if device != "cpu" else min(_MAX_RANKS_ON_PROCESSORS, processes.count_cores())
        )
    if device != "cpu" and per_host > usable:
        message = f"{per_host} ranks need as many devices, there are {usable}"
        raise UsageError(message, slug="too-few-devices", hint=f"--ranks {usable}, or --device cpu")
    task = Task(
        count,
        per_host,
        device,
        _backend(backend or BACKENDS.get(device, "gloo")),
        max_bytes or _MAX_BYTES.get(device, _MAX_BYTES_ON_DEVICES),
        factor,
        precision,
        _TIMEOUT_S,
        "env://",
        None if process or device != "cpu" else max(processes.count_cores() // count, 1),
    )
    if process:
        return fit_machine(task, measure_here(task, process.rank, on_status))
    with processes.create_shared_directory() as directory:
        job = {"task": msgspec.to_builtins(replace(task, meeting=f"file://{directory}/meeting"))}
        answers = run_processes(
            "traceloom.workload.replay.measure_rank",
            job,
            range(count),
            directory,
            on_status,
            hint=FAILED_HINT,
        )
    return fit_machine(task, msgspec.convert(answers[0]["recorded"], Recorded))


def _device(name: str | None) -> tuple[str, int]:
    """Returns the device to measure, and the number of such devices."""
    import torch

    kinds = {kind: getattr(torch, kind, None) for kind in BACKENDS}
    counts = {
        kind: module.device_count()
        for kind, module in kinds.items()
        if module and module.is_available()
    }
    counts["cpu"] = processes.count_cores()
    if name is None:
        name = next(iter(counts))
    if not counts.get(name):
        raise InputError(
            f"this torch ({torch.__version__}) has no device of the kind {name} here",
            slug="no-device",
            hint=f"it has {', '.join(counts)}",
        )
    return name, counts[name]


def _backend(name: str) -> str:
    import torch.distributed as dist

    usable = [
        candidate
        for candidate in ("gloo", *BACKENDS.values(), "mpi", "ucc")
        if dist.is_backend_available(candidate)
    ]
    if name not in usable:
        raise InputError(
            f"this torch has no backend `{name}`",
            slug="no-backend",
            hint=f"it has {', '.join(usable)}",
        )
    return name
