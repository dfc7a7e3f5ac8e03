"""GPU work with its launch and owner.

Gaps of devices; stream waits; ops next to each other with the work they launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.ancestry import Forest, forest
from traceloom.analyze.kernel_rules import gpu_work
from traceloom.analyze.names import Vocabulary, vocabulary
from traceloom.trace import vocabulary as cat
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import column, to_nullable_series
from traceloom.trace.batch import per_trace
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import CATEGORIES, COPY, GPU_WORK, KERNEL, LAUNCHES

_WORK = [CATEGORIES.index(category) for category in GPU_WORK]


class Gaps(Struct, frozen=True):
    """All gaps of all devices, by device and time; arrays of shape (gaps,).

    Attributes:
        device: Device index; -1 where the file gives no number.
        low: Start: the last end so far.
        high: End: the start of the next work.
        before: Row (of `events`) of the work that ended last.
        after: Row of the work that ended the gap.
        launch: Row of the call that submitted `after`; -1 where it is not recorded.
        first: True where `after` is the first work of its launch on this device.
        same_stream: True where `before` and `after` share a stream.
    """

    device: Ints
    low: Ints
    high: Ints
    before: Ints
    after: Ints
    launch: Ints
    first: Bools
    same_stream: Bools


def gaps(trace: Trace) -> Gaps:
    """Find the gaps. Work without duration (or with a negative one, in a damaged file) bounds them like any other."""
    row = gpu_rows(trace)
    device = column(trace, "device", -1)[row]
    order = np.argsort(device, kind="stable")
    row, device = row[order], device[order]
    start = column(trace, "start_ns")[row]
    end = start + np.maximum(column(trace, "duration_ns")[row], 0)
    same = device[1:] == device[:-1]
    latest = np.zeros(start.size, dtype=np.int64, like=start)  # position of the work that ended last
    reach = np.zeros(start.size, dtype=np.int64, like=start)
    bounds = np.concatenate(([0], 1 + np.flatnonzero(~same), [start.size]))
    for low, high in pairwise(bounds):  # devices
        reach[low:high] = np.maximum.accumulate(end[low:high])
        raised = np.where(end[low:high] == reach[low:high], np.arange(low, high, like=start), low)
        latest[low:high] = np.maximum.accumulate(raised)
    after = 1 + np.flatnonzero(same & (start[1:] > reach[:-1]))
    before = latest[after - 1]
    launch = column(trace, "launch", -1)[row]
    first = np.zeros(row.size, dtype=np.bool_, like=row)
    pair = (launch + 1) * (int(device.max(initial=0)) + 2) + device + 1
    first[np.unique(pair, return_index=True)[1]] = True
    stream = column(trace, "stream", -1)[row]
    return Gaps(
        device[after],
        end[before],
        start[after],
        row[before],
        row[after],
        launch[after],
        first[after],
        stream[after] == stream[before],
    )


def gpu_rows(trace: Trace) -> Ints:
    """Rows of `events` that are GPU work."""
    return np.flatnonzero(np.isin(column(trace, "category"), _WORK))


def copies(trace: Trace, row: Ints) -> Bools:
    """True where the rows of `events` are copies."""
    category: NDArray[np.uint8] = trace.events["category"].to_physical().to_numpy()[row]
    return np.equal(category, CATEGORIES.index(COPY))


UNKNOWN = -1
_KERNEL = CATEGORIES.index(KERNEL)


class SubmittedWork(Struct, frozen=True):
    """All GPU work, by device, stream, start; arrays of shape (GPU work,). Shared between analyses: do not change.

    Attributes:
        row: Row of `trace.events`.
        device: Device; -1 where the file gives no number.
        stream: Stream; -1 where the file gives no number.
        lane: Number of the (device, stream), from 0.
        start: Start of the work, ns.
        end: Its end; a negative duration in a damaged file counts as 0.
        launch: Row of the call that submitted it; -1 where that is not recorded.
        call_start: Start of that call; the start of the work where it is not recorded.
        call_end: End of that call; the start of the work where it is not recorded.
        kernel: True for kernels, False for copies and fills.
        first: True for the first work of its launch on its device: the one that a launch delay is of.
        many: True where the launch submitted other work to the device, too (graphs).
        step: Row of `trace.steps` of the launch; -1 outside.
    """

    row: Ints
    device: Ints
    stream: Ints
    lane: Ints
    start: Ints
    end: Ints
    launch: Ints
    call_start: Ints
    call_end: Ints
    kernel: Bools
    first: Bools
    many: Bools
    step: Ints

    @property
    def known(self) -> Bools:
        """Where the launch is recorded."""
        return self.launch >= 0

    def bounds(self) -> Ints:
        """Where each lane begins, and the end of the last; shape (lanes + 1,)."""
        return np.searchsorted(self.lane, np.arange((int(self.lane[-1]) if self.lane.size else -1) + 2))


def as_plain_array(values: NDArray[Any]) -> NDArray[Any]:
    """The same array; what is computed from it lies in memory, also where the array is that of a very large trace."""
    return values.view(np.ndarray)


@per_trace
def submissions(trace: Trace) -> SubmittedWork:
    """All GPU work of the trace with its launches."""
    row = as_plain_array(gpu_rows(trace))
    device, stream, launch = (
        as_plain_array(column(trace, name, UNKNOWN)[row]) for name in ("device", "stream", "launch")
    )
    order = np.lexsort((stream, device))  # stable: by start within a stream
    row, device, stream, launch = row[order], device[order], stream[order], launch[order]
    opens = np.ones(row.size, dtype=np.bool_)
    opens[1:] = (device[1:] != device[:-1]) | (stream[1:] != stream[:-1])
    starts, durations = as_plain_array(column(trace, "start_ns")), as_plain_array(column(trace, "duration_ns"))
    start = starts[row]
    has_launch = launch >= 0
    call = np.where(has_launch, launch, row)
    call_start = starts[call]
    call_end = call_start + np.where(has_launch, np.maximum(durations[call], 0), 0)
    # which work is the first of its launch on its device, and which launch has several
    first, many = np.zeros((2, row.size), dtype=np.bool_)
    turn = np.lexsort((start, device, launch))
    new = np.ones(row.size, dtype=np.bool_)
    new[1:] = (launch[turn][1:] != launch[turn][:-1]) | (device[turn][1:] != device[turn][:-1])
    first[turn] = new
    group = np.cumsum(new) - 1
    many[turn] = np.bincount(group)[group] > 1 if group.size else False
    # step numbers are unique and ascending
    numbers = trace.steps["step"].to_numpy()
    step_row = np.full(row.size, UNKNOWN)
    if numbers.size:
        none = np.iinfo(np.int32).min
        step = as_plain_array(column(trace, "step", none)[row])
        at = np.minimum(np.searchsorted(numbers, step), numbers.size - 1)
        step_row = np.where((step != none) & (numbers[at] == step), at, UNKNOWN)
    return SubmittedWork(
        row=row,
        device=device,
        stream=stream,
        lane=np.cumsum(opens) - 1,
        start=start,
        end=start + np.maximum(durations[row], 0),
        launch=launch,
        call_start=call_start,
        call_end=call_end,
        kernel=as_plain_array(column(trace, "category")[row]) == _KERNEL,
        first=first & has_launch,
        many=many & has_launch,
        step=step_row,
    )


class GpuWork(Struct, frozen=True):
    """The GPU work of a trace; arrays of shape (GPU work,).

    Attributes:
        origin: Position (in the forest) of the launch, else of the op it is known to belong to; -1 for orphans.
        duration_ns: Durations; a negative one in a damaged file counts as 0.
        kernel: True for kernels, False for copies and fills.
    """

    origin: Ints
    duration_ns: Ints
    kernel: Bools

    def by_owner(self, owner_of: Ints) -> tuple[Ints, Ints, Ints]:
        """Time, kernels and count of the work that each host event owns; arrays of shape (host events,).

        `owner_of` names for each host event the one that owns what is launched there; -1 for nobody.
        """
        owner = np.append(owner_of, -1)[self.origin]
        owned = owner >= 0
        sums = []
        for values in (self.duration_ns, self.kernel.astype(np.int64), np.ones(owner.size, dtype=np.int64)):
            total = np.zeros(owner_of.size, dtype=np.int64, like=owner_of)
            np.add.at(total, owner[owned], values[owned])
            sums.append(total)
        return sums[0], sums[1], sums[2]


@per_trace
def attribute_to_launches(trace: Trace) -> GpuWork:
    """All GPU work of the trace with its origin on the host."""
    tree = forest(trace)
    work = gpu_work(trace)
    origin = work.select(pl.coalesce("launch", "op").cast(pl.Int64).fill_null(-1)).to_series().to_numpy()
    position = np.where(origin >= 0, tree.position[origin] if tree.position.size else -1, -1)
    return GpuWork(position, (work["end_ns"] - work["start_ns"]).to_numpy(), (work["kind"] == cat.KERNEL).to_numpy())


CALL = "StreamWaitEvent"  # cudaStreamWaitEvent, hipStreamWaitEvent, cuStreamWaitEvent
RECORD = "Stream Wait Event"


def call_times(trace: Trace) -> pl.DataFrame:
    """When each launch call began: correlation, call_ns."""
    launches = trace.events.lazy().filter(pl.col("category").is_in(LAUNCHES), pl.col("correlation").is_not_null())
    calls = launches.select("correlation", pl.col("start_ns").alias("call_ns"))
    return calls.unique("correlation", keep="first", maintain_order=True).collect()


def locate_waits(trace: Trace, waits: pl.DataFrame) -> pl.DataFrame:
    """Recorded waits with their device, and `wait_ns`: when the host asked for it, without its call the record."""
    return (
        waits.join(trace.events[["event", "device", "correlation", "start_ns"]], on="event", how="left")
        .join(call_times(trace), on="correlation", how="left")
        .with_columns(pl.coalesce("call_ns", "start_ns").alias("wait_ns"))
    )


@per_trace
def stream_waits(trace: Trace) -> tuple[Bools, bool]:
    """Was a wait for an event put on the stream between the launches of its previous work and of this one?

    Returns:
        One boolean per event, shape (events,), and whether the waits themselves are recorded. Else they are known from
        calls of the launching thread, which do not say on which stream.
    """
    waits = trace.syncs.filter(pl.col("kind") == RECORD)
    if waits.height:
        keys = ["device", "stream"]
        waits = locate_waits(trace, waits).select(*keys, "wait_ns")
    else:
        keys = ["lane"]
        is_wait = pl.col("category").is_in(LAUNCHES) & pl.col("name").str.contains(CALL, literal=True)
        waits = trace.events.lazy().filter(is_wait).select("lane", pl.col("start_ns").alias("wait_ns")).collect()
    recorded = keys != ["lane"]
    waited = np.zeros(trace.events.height, dtype=np.bool_, like=column(trace, "start_ns"))
    if not waits.height:
        return waited, recorded

    # device, stream, lane and start of the launch call of each work, and that of the work before it
    work = gpu_work(trace)[["event", "device", "stream", "launch"]]
    called = trace.events[["lane", "start_ns"]][work["launch"]].get_columns()
    previous = pl.col("start_ns").shift(1).over("device", "stream").fill_null(np.iinfo(np.int64).min)
    work = work.hstack(called).with_columns(previous_ns=previous).drop_nulls("start_ns")
    wait_times = {part[keys].row(0): part["wait_ns"].sort().to_numpy() for part in waits.partition_by(keys)}
    for part in work.partition_by(keys):
        if (times := wait_times.get(part[keys].row(0))) is not None:
            before = np.searchsorted(times, part["start_ns"].to_numpy(), side="left")
            after = np.searchsorted(times, part["previous_ns"].to_numpy(), side="right")
            waited[part["event"].to_numpy()] = before > after
    return waited, recorded


@dataclass(frozen=True)
class OpNeighbourhood:
    """The host events of a trace with the questions that patterns ask; positions are those of the forest."""

    trace: Trace
    tree: Forest
    words: Vocabulary
    code: Ints
    is_op: Bools
    is_python: Bools
    is_call: Bools

    def named(self, pattern: str) -> Bools:
        """Host events whose name holds the pattern."""
        return self.words.matching(pattern)[self.code] if self.code.size else self.is_op

    def ops(self, pattern: str) -> Ints:
        """Positions of the operators whose name holds the pattern, ascending."""
        at, code = self._every_op
        return at[self.words.matching(pattern)[code]] if at.size else at

    @cached_property
    def _every_op(self) -> tuple[Ints, Ints]:
        """The positions of all operators, and their names."""
        at = np.flatnonzero(self.is_op)
        return at, self.code[at]

    def inside(self, wanted: Bools) -> Ints:
        """How many wanted events stand below each event (itself not counted)."""
        return self.tree.subtree_sums(wanted.astype(np.int64)) - wanted

    def last_child(self, wanted: Bools) -> Ints:
        """For every event the position of its last wanted child; -1 where it has none."""
        last = np.full(self.code.size, -1, dtype=np.int64)
        child = np.flatnonzero(wanted)
        above = self.op_parent[child] if wanted is self.is_op else self.tree.parent[child]
        child, above = child[above >= 0], above[above >= 0]
        np.maximum.at(last, above, child)
        return last

    def climb(self, position: Ints, wanted: Bools) -> Ints:
        """For a few events the nearest wanted event above each; -1 for none."""
        above, is_match = np.append(self.tree.parent, -1), np.append(wanted, False)
        current = above[position]
        while ((current >= 0) & ~is_match[current]).any():  # one turn per level of nesting
            current = np.where(is_match[current], current, above[current])
        return current

    @cached_property
    def op_parent(self) -> Ints:
        """Position of the nearest operator above each event; -1 for none."""
        return self.tree.nearest(self.is_op)

    @cached_property
    def last_op(self) -> Ints:
        """For every operator its last operator one level below; -1 for none."""
        return self.last_child(self.is_op)

    @cached_property
    def gpu_ns(self) -> Ints:
        """Duration of all GPU work launched inside each event."""
        work = attribute_to_launches(self.trace)
        own = np.zeros(self.code.size, dtype=np.int64)
        attributed = work.origin >= 0
        np.add.at(own, work.origin[attributed], work.duration_ns[attributed])
        return self.tree.subtree_sums(own)

    @cached_property
    def _tensors(self) -> Ints:
        """Row of each event in `tensors`; -1 for none."""
        row = np.full(self.code.size + 1, -1, dtype=np.int64)
        row[as_plain_array(self.tree.position)[self.trace.tensors["event"].to_numpy()]] = np.arange(
            self.trace.tensors.height
        )
        return row[:-1]

    def inputs(self, positions: Ints) -> pl.DataFrame:
        """Shapes and types (JSON text) of the inputs of these operators; null where they were not recorded."""
        row = to_nullable_series(self._tensors[positions], pl.UInt32, absent=-1)
        columns = [self.trace.tensors[name][row] for name in ("shapes", "types")]
        return pl.DataFrame([pl.Series("position", positions), *columns])

    @property
    def has_shapes(self) -> bool:
        """Whether shapes of inputs were recorded."""
        return self.trace.tensors.height > 0

    @cached_property
    def has_stacks(self) -> bool:
        """Whether Python frames were recorded."""
        return bool(self.is_python.any())


def build_op_neighbourhood(trace: Trace) -> OpNeighbourhood:
    """The host events of a trace."""
    tree = forest(trace)
    words = vocabulary(trace)
    row = as_plain_array(tree.row)
    category = as_plain_array(column(trace, "category"))[row]
    return OpNeighbourhood(
        trace=trace,
        tree=tree,
        words=words,
        code=as_plain_array(words.code)[row].astype(np.int64),
        is_op=category == cat.CATEGORIES.index(cat.OP),
        is_python=category == cat.CATEGORIES.index(cat.PYTHON),
        is_call=np.isin(category, [cat.CATEGORIES.index(name) for name in cat.LAUNCHES]),
    )
