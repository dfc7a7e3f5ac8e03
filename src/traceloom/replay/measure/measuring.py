"""Measuring this machine: as many processes as ranks, or those that torchrun has started."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import msgspec

from traceloom import workers
from traceloom.errors import InputError, UsageError
from traceloom.replay.communication import BACKENDS
from traceloom.replay.measure.fitting import fit_machine
from traceloom.replay.measure.rank import FAILED_HINT, measure_here
from traceloom.replay.measure.task import SMALLEST, Recorded, Task
from traceloom.replay.processes import Say, run_processes
from traceloom.simulate.calibrate import Calibration

_MAX_BYTES = {"cpu": 1 << 26}
_MAX_BYTES_ON_DEVICES = 1 << 28
_MAX_RANKS_ON_PROCESSORS = 2  # where nothing says how many
_TIMEOUT_S = 60.0


class LaunchedProcess(NamedTuple):
    """What a launcher such as torchrun says of its processes.

    Attributes:
        rank: Of this one.
        ranks: Of all.
        per_host: On this host.
    """

    rank: int
    ranks: int
    per_host: int


def launched() -> LaunchedProcess | None:
    """Which of its processes this one is; None where no launcher has started it."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    ranks = int(os.environ["WORLD_SIZE"])
    return LaunchedProcess(int(os.environ["RANK"]), ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def measure(
    *,
    ranks: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    max_bytes: int | None = None,
    factor: int = 4,
    precision: float = 0.03,
    say: Say = lambda _: None,
) -> Calibration:
    """Measure the collectives and kernels of this machine, and fit a machine to them.

    Under torchrun its processes measure those of all hosts together, and all have the same answer.

    Args:
        ranks: Processes; None: those of the launcher, else one for each device, or two on processors.
        device: `cpu`, `cuda` or `xpu`; None: the one there is.
        backend: Of torch.distributed; None: the usual one of the device.
        max_bytes: The largest message; None: 64 MiB on processors, 256 MiB on devices.
        factor: From one size to the next.
        precision: Each is repeated until its median is known to this part of it, or for some tenths of a second.
        say: Is told what is being done.

    Raises:
        UsageError: slugs `too-few-devices`, `wrong-usage`.
        InputError: slugs `no-torch`, `no-backend`, `no-device`, `no-rendezvous`.
        PartialError: slug `rank-failed`.
    """
    if find_spec("torch") is None:
        raise InputError("measuring needs torch", slug="no-torch", hint="pip install 'traceloom[record]'")
    process = launched()
    if process and ranks not in (None, process.ranks):
        message = f"{ranks} ranks are asked for, the launcher has started {process.ranks}"
        raise UsageError(message, slug="wrong-usage", hint="leave --ranks out")
    if max_bytes is not None and max_bytes < SMALLEST:
        raise UsageError(
            f"the largest message is below {SMALLEST:,} bytes", slug="wrong-usage", hint="as --max-size 64MiB"
        )
    device, usable = _device(device)
    if process:
        count, per_host = process.ranks, process.per_host
    else:
        count = per_host = ranks or (usable if device != "cpu" else min(_MAX_RANKS_ON_PROCESSORS, workers.cores()))
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
        None if process or device != "cpu" else max(workers.cores() // count, 1),
    )
    if process:
        return fit_machine(task, measure_here(task, process.rank, say))
    with workers.shared_folder() as folder:
        job = {"task": msgspec.to_builtins(replace(task, meeting=f"file://{folder}/meeting"))}
        main = "traceloom.replay.measure.rank"
        answers = run_processes(main, job, range(count), folder, say, hint=FAILED_HINT)
    return fit_machine(task, msgspec.convert(answers[0]["recorded"], Recorded))


def _device(name: str | None) -> tuple[str, int]:
    """The device to measure, and how many of it there are."""
    import torch

    kinds = {kind: getattr(torch, kind, None) for kind in BACKENDS}
    counts = {kind: module.device_count() for kind, module in kinds.items() if module and module.is_available()}
    counts["cpu"] = workers.cores()
    if name is None:
        name = next(iter(counts))
    if not counts.get(name):
        message = f"this torch ({torch.__version__}) has no device of the kind {name} here"
        raise InputError(message, slug="no-device", hint=f"it has {', '.join(counts)}")
    return name, counts[name]


def _backend(name: str) -> str:
    import torch.distributed as dist

    usable = [each for each in ("gloo", *BACKENDS.values(), "mpi", "ucc") if dist.is_backend_available(each)]
    if name not in usable:
        message = f"this torch has no backend `{name}`"
        raise InputError(message, slug="no-backend", hint=f"it has {', '.join(usable)}")
    return name
