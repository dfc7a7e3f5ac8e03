"""The GPU time of each op of a replay: some passes under PyTorch's profiler, in which each op has a mark of its own.

What a host clock sees of an op on a GPU is its launch; an op that waits for the device takes as long as all before it.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from traceloom.errors import CheckError
from traceloom.model import Trace
from traceloom.model.frames import schema
from traceloom.read import load
from traceloom.replay.originals import work_below

if TYPE_CHECKING:
    from traceloom.replay.running import Execution

GPU_TIMES = schema("op gpu_ns", {"op": pl.UInt32})
MARK = "traceloom.replay.op "
_PASSES = 5


def device_times(execution: Execution, begin: Callable[[], None] | None = None) -> pl.DataFrame:
    """The GPU time of the ops of a plan, the median over some further passes; no rows where it runs on processors.

    Args:
        execution: The plan, run once.
        begin: Waits for the other ranks before a pass.

    Raises:
        CheckError: `no-gpu-times`: the profiler does not start, or gives nothing.
        InputError: What it gives cannot be read.
    """
    if execution.device.type == "cpu":
        return GPU_TIMES.to_frame()
    from torch.profiler import ProfilerActivity, profile, record_function

    def within(op: int, function: Callable[..., Any], *arguments: Any) -> Any:
        with record_function(f"{MARK}{op}"):
            return function(*arguments)

    profiler = None
    failure = ""
    with ExitStack() as stack:
        try:
            own = getattr(ProfilerActivity, execution.device.type.upper())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # that a second window would clear the first
            profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU, own]))
        except (RuntimeError, AttributeError) as error:
            failure = str(error)
        for _ in range(_PASSES):  # also without: the other ranks wait in each pass
            execution.once(within=within, begin=begin)
    if profiler is None:
        raise CheckError(f"the profiler does not start: {failure}", slug="no-gpu-times")
    with tempfile.TemporaryDirectory(prefix="traceloom-") as folder:
        path = Path(folder, "passes.json")
        profiler.export_chrome_trace(str(path))
        return times_of_marks(load(path, cache=False).traces[0])


def times_of_marks(trace: Trace) -> pl.DataFrame:
    """The GPU time below the marks of each op, the median over its marks.

    Args:
        trace: Of some passes whose ops are marked.

    Returns:
        op, gpu_ns; a row for each op that launched something.
    """
    events = trace.events
    names = events["name"].cast(pl.String)
    is_mark = names.str.starts_with(MARK) & events["device"].is_null()
    below = work_below(trace, is_mark.to_numpy()).group_by("event").agg(pl.sum("duration_ns"))
    ops = names.gather(below["event"]).str.strip_prefix(MARK).cast(pl.UInt32, strict=False)
    return (
        below.with_columns(ops.alias("op"))
        .group_by("op")
        .agg(pl.median("duration_ns").round().cast(pl.Int64).alias("gpu_ns"))
        .drop_nulls("op")
        .sort("op")
        .cast(GPU_TIMES)
    )
