"""GPU work with its launches and owners, gaps of devices, stream waits, and an index of host
events.

Gaps of devices; stream waits; ops next to each other with the work they launch.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.ancestry import Forest, build_forest
from traceloom.analyze.kernel_rules import select_gpu_work
from traceloom.analyze.names import Vocabulary, build_vocabulary
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import get_event_column, to_nullable_series
from traceloom.trace.batch import cache_per_trace
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import BEGINNING_SHARE, CATEGORIES, COPY, GPU_WORK, KERNEL, LAUNCHES

_GPU_WORK_CODES = [CATEGORIES.index(category) for category in GPU_WORK]


class IdleGaps(Struct, frozen=True):
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
    is_same_stream: Bools


def find_idle_gaps(trace: Trace) -> IdleGaps:
    """Finds the gaps.

    Work without duration (or with a negative one, in a damaged file) bounds them like any other.
    """
    row = find_gpu_event_rows(trace)
    device = get_event_column(trace, "device", -1)[row]
    order = np.argsort(device, kind="stable")
    row, device = row[order], device[order]
    start = get_event_column(trace, "start_ns")[row]
    end = start + np.maximum(get_event_column(trace, "duration_ns")[row], 0)
    is_same_device = device[1:] == device[:-1]
    # Position of the work that ended last
    last_ended = np.zeros(start.size, dtype=np.int64, like=start)
    busy_until = np.zeros(start.size, dtype=np.int64, like=start)
    bounds = np.concatenate(([0], 1 + np.flatnonzero(~is_same_device), [start.size]))
    for low, high in pairwise(bounds):  # devices
        busy_until[low:high] = np.maximum.accumulate(end[low:high])
        ended_last_at = np.where(
            end[low:high] == busy_until[low:high], np.arange(low, high, like=start), low
        )
        last_ended[low:high] = np.maximum.accumulate(ended_last_at)
    after = 1 + np.flatnonzero(is_same_device & (start[1:] > busy_until[:-1]))
    before = last_ended[after - 1]
    launch = get_event_column(trace, "launch", -1)[row]
    first = np.zeros(row.size, dtype=np.bool_, like=row)
    launch_device_key = (launch + 1) * (int(device.max(initial=0)) + 2) + device + 1
    first[np.unique(launch_device_key, return_index=True)[1]] = True
    stream = get_event_column(trace, "stream", -1)[row]
    return IdleGaps(
        device[after],
        end[before],
        start[after],
        row[before],
        row[after],
        launch[after],
        first[after],
        stream[after] == stream[before],
    )


def find_gpu_event_rows(trace: Trace) -> Ints:
    return np.flatnonzero(np.isin(get_event_column(trace, "category"), _GPU_WORK_CODES))


def is_copy(trace: Trace, row: Ints) -> Bools:
    category: NDArray[np.uint8] = trace.events["category"].to_physical().to_numpy()[row]
    return np.equal(category, CATEGORIES.index(COPY))


def find_work_behind_unrecorded(trace: Trace) -> pl.DataFrame:
    """Returns the first work of each stream that was launched as the recording began, and was
    behind what had been launched before: event, device, waited_ns (after its launch, while nothing
    was recorded on its device).
    """
    first = (
        select_gpu_work(trace)
        .with_columns(free_ns=pl.col("end_ns").cum_max().shift(1).over("device"))
        .unique(["device", "stream"], keep="first", maintain_order=True)
        .drop_nulls("launch")
    )
    call = trace.events[["start_ns", "duration_ns"]][first["launch"].to_list()]
    waited_ns = pl.col("start_ns") - pl.max_horizontal("free_ns", call.sum_horizontal())
    return first.select("event", "device", waited_ns=waited_ns).filter(
        call["start_ns"] - trace.start_ns <= BEGINNING_SHARE * (trace.end_ns - trace.start_ns)
    )


MISSING_VALUE = -1
_KERNEL_CODE = CATEGORIES.index(KERNEL)


class LaunchedWork(Struct, frozen=True):
    """All GPU work, by device, stream, start; arrays of shape (GPU work,). Shared between analyses:
    do not change.

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
        first: True for the first work of its launch on its device, which the launch delay refers
            to.
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
        return self.launch >= 0

    def bounds(self) -> Ints:
        """Returns where each lane begins, and the end of the last; shape (lanes + 1,)."""
        return np.searchsorted(
            self.lane, np.arange((int(self.lane[-1]) if self.lane.size else -1) + 2)
        )


def convert_to_ndarray(values: NDArray[Any]) -> NDArray[Any]:
    """Returns the same array as a plain one, so that what is computed from it is in memory even for
    a mapped array of a very large trace.
    """
    return values.view(np.ndarray)


@cache_per_trace
def collect_launched_work(trace: Trace) -> LaunchedWork:
    row = convert_to_ndarray(find_gpu_event_rows(trace))
    device, stream, launch = (
        convert_to_ndarray(get_event_column(trace, name, MISSING_VALUE)[row])
        for name in ("device", "stream", "launch")
    )
    order = np.lexsort((stream, device))  # stable: by start within a stream
    row, device, stream, launch = row[order], device[order], stream[order], launch[order]
    starts_stream = np.ones(row.size, dtype=np.bool_)
    starts_stream[1:] = (device[1:] != device[:-1]) | (stream[1:] != stream[:-1])
    starts, durations = (
        convert_to_ndarray(get_event_column(trace, "start_ns")),
        convert_to_ndarray(get_event_column(trace, "duration_ns")),
    )
    start = starts[row]
    has_launch = launch >= 0
    call_row = np.where(has_launch, launch, row)
    call_start = starts[call_row]
    call_end = call_start + np.where(has_launch, np.maximum(durations[call_row], 0), 0)
    # Which work is the first of its launch on its device, and which launch has several.
    first, has_siblings = np.zeros((2, row.size), dtype=np.bool_)
    by_launch = np.lexsort((start, device, launch))
    starts_launch = np.ones(row.size, dtype=np.bool_)
    starts_launch[1:] = (launch[by_launch][1:] != launch[by_launch][:-1]) | (
        device[by_launch][1:] != device[by_launch][:-1]
    )
    first[by_launch] = starts_launch
    group = np.cumsum(starts_launch) - 1
    has_siblings[by_launch] = np.bincount(group)[group] > 1 if group.size else False
    # Step numbers are unique and ascending.
    numbers = trace.steps["step"].to_numpy()
    step_row = np.full(row.size, MISSING_VALUE)
    if numbers.size:
        no_step = np.iinfo(np.int32).min
        step = convert_to_ndarray(get_event_column(trace, "step", no_step)[row])
        step_index = np.minimum(np.searchsorted(numbers, step), numbers.size - 1)
        step_row = np.where(
            (step != no_step) & (numbers[step_index] == step), step_index, MISSING_VALUE
        )
    return LaunchedWork(
        row=row,
        device=device,
        stream=stream,
        lane=np.cumsum(starts_stream) - 1,
        start=start,
        end=start + np.maximum(durations[row], 0),
        launch=launch,
        call_start=call_start,
        call_end=call_end,
        kernel=convert_to_ndarray(get_event_column(trace, "category")[row]) == _KERNEL_CODE,
        first=first & has_launch,
        many=has_siblings & has_launch,
        step=step_row,
    )


class AttributedWork(Struct, frozen=True):
    """The GPU work of a trace; arrays of shape (GPU work,).

    Attributes:
        origin: Position (in the forest) of the launch, else of the op it is known to belong to; -1
            for orphans.
        duration_ns: Durations; a negative one in a damaged file counts as 0.
        kernel: True for kernels, False for copies and fills.
    """

    launch_position: Ints
    duration_ns: Ints
    kernel: Bools

    def sum_by_owner(self, owner_of: Ints) -> tuple[Ints, Ints, Ints]:
        """Returns time, kernels and count of the work that each host event owns; arrays of shape
        (host events,).

        `owner_of` holds for each host event the position of the event that owns what is launched
        there; -1 for none.
        """
        owner = np.append(owner_of, -1)[self.launch_position]
        owned = owner >= 0
        sums = []
        for values in (
            self.duration_ns,
            self.kernel.astype(np.int64),
            np.ones(owner.size, dtype=np.int64),
        ):
            total = np.zeros(owner_of.size, dtype=np.int64, like=owner_of)
            np.add.at(total, owner[owned], values[owned])
            sums.append(total)
        return sums[0], sums[1], sums[2]


@cache_per_trace
def attribute_to_launches(trace: Trace) -> AttributedWork:
    """Returns all GPU work of the trace with its origin on the host."""
    tree = build_forest(trace)
    work = select_gpu_work(trace)
    origin = (
        work.select(pl.coalesce("launch", "op").cast(pl.Int64).fill_null(-1)).to_series().to_numpy()
    )
    position = np.where(origin >= 0, tree.position[origin] if tree.position.size else -1, -1)
    return AttributedWork(
        position,
        (work["end_ns"] - work["start_ns"]).to_numpy(),
        (work["kind"] == vocab.KERNEL).to_numpy(),
    )


STREAM_WAIT_CALL = "StreamWaitEvent"  # cudaStreamWaitEvent, hipStreamWaitEvent, cuStreamWaitEvent
STREAM_WAIT_RECORD = "Stream Wait Event"


def collect_call_times(trace: Trace) -> pl.DataFrame:
    """Returns when each launch call began: correlation, call_ns."""
    launches = trace.events.lazy().filter(
        pl.col("category").is_in(LAUNCHES), pl.col("correlation").is_not_null()
    )
    calls = launches.select("correlation", pl.col("start_ns").alias("call_ns"))
    return calls.unique("correlation", keep="first", maintain_order=True).collect()


def add_wait_times(trace: Trace, waits: pl.DataFrame) -> pl.DataFrame:
    """Returns recorded waits with their device, and `wait_ns`: the start of the call of the wait,
    else of the record.
    """
    return (
        waits.join(
            trace.events[["event", "device", "correlation", "start_ns"]], on="event", how="left"
        )
        .join(collect_call_times(trace), on="correlation", how="left")
        .with_columns(pl.coalesce("call_ns", "start_ns").alias("wait_ns"))
    )


@cache_per_trace
def find_stream_waits(trace: Trace) -> tuple[Bools, bool]:
    """Returns whether a wait for an event was put on the stream between the launches of its
    previous work and of this one.

    Returns:
        One boolean per event, shape (events,), and whether the waits themselves are recorded. Else
        they are known from calls of the launching thread, which do not show the stream.
    """
    waits = trace.syncs.filter(pl.col("kind") == STREAM_WAIT_RECORD)
    if waits.height:
        keys = ["device", "stream"]
        waits = add_wait_times(trace, waits).select(*keys, "wait_ns")
    else:
        keys = ["lane"]
        is_wait = pl.col("category").is_in(LAUNCHES) & pl.col("name").str.contains(
            STREAM_WAIT_CALL, literal=True
        )
        waits = (
            trace.events.lazy()
            .filter(is_wait)
            .select("lane", pl.col("start_ns").alias("wait_ns"))
            .collect()
        )
    has_wait_records = keys != ["lane"]
    is_after_wait = np.zeros(
        trace.events.height, dtype=np.bool_, like=get_event_column(trace, "start_ns")
    )
    if not waits.height:
        return is_after_wait, has_wait_records

    # Device, stream, lane and start of the launch call of each work, and that of the work before
    # it.
    work = select_gpu_work(trace)[["event", "device", "stream", "launch"]]
    launch_calls = trace.events[["lane", "start_ns"]][work["launch"]].get_columns()
    previous = (
        pl.col("start_ns").shift(1).over("device", "stream").fill_null(np.iinfo(np.int64).min)
    )
    work = work.hstack(launch_calls).with_columns(previous_ns=previous).drop_nulls("start_ns")
    wait_times = {
        part[keys].row(0): part["wait_ns"].sort().to_numpy() for part in waits.partition_by(keys)
    }
    for part in work.partition_by(keys):
        if (times := wait_times.get(part[keys].row(0))) is not None:
            waits_before_launch = np.searchsorted(times, part["start_ns"].to_numpy(), side="left")
            waits_before_previous = np.searchsorted(
                times, part["previous_ns"].to_numpy(), side="right"
            )
            is_after_wait[part["event"].to_numpy()] = waits_before_launch > waits_before_previous
    return is_after_wait, has_wait_records


@dataclass(frozen=True)
class HostEventIndex:
    """The host events of a trace with look-ups for patterns; positions are those of the forest."""

    trace: Trace
    tree: Forest
    words: Vocabulary
    code: Ints
    is_op: Bools
    is_python: Bools
    is_launch: Bools

    def named(self, pattern: str) -> Bools:
        return self.words.matching(pattern)[self.code] if self.code.size else self.is_op

    def ops(self, pattern: str) -> Ints:
        """Returns positions of the operators whose name matches the pattern, ascending."""
        positions, code = self._all_ops
        return positions[self.words.matching(pattern)[code]] if positions.size else positions

    @cached_property
    def _all_ops(self) -> tuple[Ints, Ints]:
        """Returns the positions of all operators, and their names."""
        positions = np.flatnonzero(self.is_op)
        return positions, self.code[positions]

    def inside(self, is_wanted: Bools) -> Ints:
        """Returns how many selected events are below each event (itself not counted)."""
        return self.tree.subtree_sums(is_wanted.astype(np.int64)) - is_wanted

    def find_last_child(self, is_wanted: Bools) -> Ints:
        """Returns for every event the position of its last selected child; -1 where it has none."""
        last = np.full(self.code.size, -1, dtype=np.int64)
        child = np.flatnonzero(is_wanted)
        parent = self.parent_op[child] if is_wanted is self.is_op else self.tree.parent[child]
        child, parent = child[parent >= 0], parent[parent >= 0]
        np.maximum.at(last, parent, child)
        return last

    def find_nearest_ancestor(self, positions: Ints, is_wanted: Bools) -> Ints:
        """Returns for a few events the nearest selected event above each; -1 for none."""
        parent, is_match = np.append(self.tree.parent, -1), np.append(is_wanted, False)
        current = parent[positions]
        while ((current >= 0) & ~is_match[current]).any():  # one iteration per level of nesting
            current = np.where(is_match[current], current, parent[current])
        return current

    @cached_property
    def parent_op(self) -> Ints:
        """Position of the nearest operator above each event; -1 for none."""
        return self.tree.nearest(self.is_op)

    @cached_property
    def last_child_op(self) -> Ints:
        """For every operator its last operator one level below; -1 for none."""
        return self.find_last_child(self.is_op)

    @cached_property
    def gpu_ns(self) -> Ints:
        """Duration of all GPU work launched inside each event."""
        work = attribute_to_launches(self.trace)
        self_ns = np.zeros(self.code.size, dtype=np.int64)
        attributed = work.launch_position >= 0
        np.add.at(self_ns, work.launch_position[attributed], work.duration_ns[attributed])
        return self.tree.subtree_sums(self_ns)

    @cached_property
    def _tensor_rows(self) -> Ints:
        """Row of each event in `tensors`; -1 for none."""
        row = np.full(self.code.size + 1, -1, dtype=np.int64)
        row[convert_to_ndarray(self.tree.position)[self.trace.tensors["event"].to_numpy()]] = (
            np.arange(self.trace.tensors.height)
        )
        return row[:-1]

    def inputs(self, positions: Ints) -> pl.DataFrame:
        """Returns shapes and types (JSON text) of the inputs of these operators; null where they
        were not recorded.
        """
        row = to_nullable_series(self._tensor_rows[positions], pl.UInt32, absent=-1)
        columns = [self.trace.tensors[name][row] for name in ("shapes", "types")]
        return pl.DataFrame([pl.Series("position", positions), *columns])

    @property
    def has_shapes(self) -> bool:
        return self.trace.tensors.height > 0

    @cached_property
    def has_stacks(self) -> bool:
        """Whether Python frames were recorded."""
        return bool(self.is_python.any())


def build_host_event_index(trace: Trace) -> HostEventIndex:
    tree = build_forest(trace)
    vocabulary = build_vocabulary(trace)
    row = convert_to_ndarray(tree.row)
    category = convert_to_ndarray(get_event_column(trace, "category"))[row]
    return HostEventIndex(
        trace=trace,
        tree=tree,
        words=vocabulary,
        code=convert_to_ndarray(vocabulary.code)[row].astype(np.int64),
        is_op=category == vocab.CATEGORIES.index(vocab.OP),
        is_python=category == vocab.CATEGORIES.index(vocab.PYTHON),
        is_launch=np.isin(category, [vocab.CATEGORIES.index(name) for name in vocab.LAUNCHES]),
    )
