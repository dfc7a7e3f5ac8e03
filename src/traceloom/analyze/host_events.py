"""Classification of host events: phase, activity, blocking calls, device set-up, and user code
among Python frames.

One table of name patterns each for phases and for blocking calls; docs/concepts/host-time.md shows
them. Names are PyTorch's own (torch 1.8 to 2.13), CUDA's, HIP's, Level Zero's and MTIA's.
"""

import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.ancestry import build_forest, build_host_segments
from traceloom.analyze.intervals import Spans, compute_coverage, merge_intervals
from traceloom.analyze.kernel_rules import select_gpu_work
from traceloom.analyze.names import Vocabulary, build_vocabulary
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows, get_event_column
from traceloom.trace.batch import cache_per_trace
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.session import FRAME_SEPARATOR
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import COPY, GPU_WORK, LAUNCHES

# Waits for the device, synchronous copies, and driver calls under the driver's own lock (they may
# stall the device).
BLOCKING_CALL_PATTERN = (
    r"(?i:synchronize)|QueueFinish|Events?Wait$"
    r"|Memcpy|Memset|Malloc|Free|HostAlloc|HostRegister|HostUnregister"
    r"|ModuleLoad|ModuleUnload|LibraryLoad|LibraryUnload"
)
DEVICE_ALLOCATION_PATTERN = r"^(cuda|cu|hip)\w*(Malloc|Free|HostAlloc|HostRegister|HostUnregister|MemCreate|MemMap|MemUnmap)"
# Longer than a thread is occasionally descheduled.
_MIN_SETUP_NS = 5_000_000
_MIN_FREES = 8  # calls of cudaFree: fewer may all be of libraries that are set up
_MIN_FREED_SHARE = 0.75  # calls of cudaFree for each cudaMalloc, where there is no allocator
_MAX_GPU_BUSY_SHARE = 0.1  # of a call at most: no device had anything to do
# The calls of PyTorch's allocator before it frees
_CALLS_BEFORE_FREE_PATTERN = "Malloc|Event|Synchronize|LastError|MemGetInfo"


@cache_per_trace
def mark_blocking_calls(trace: Trace) -> NDArray[np.bool_]:
    """Returns True for every event that is a blocking runtime or driver call; shape (events,).

    Blocking are, by name, synchronising calls, copies and fills that are not asynchronous, and
    allocations; and, by their times, asynchronous copies that returned no earlier than their copy
    ended (copies of pageable memory), and calls that start the device.
    """
    events = trace.events.lazy()
    calls = events.filter(pl.col("category").is_in(LAUNCHES)).select(
        "event", "name", (pl.col("start_ns") + pl.col("duration_ns")).alias("return_ns")
    )
    name = pl.col("name")
    name_matches = calls.filter(
        name.str.contains(BLOCKING_CALL_PATTERN), ~name.str.contains("Async", literal=True)
    ).select("event")
    copy_end_times = (
        events.filter(pl.col("category").is_in(GPU_WORK), pl.col("launch").is_not_null())
        .group_by("launch")
        .agg(
            (pl.col("start_ns") + pl.col("duration_ns")).max().alias("end_ns"),
            (pl.col("category") == COPY).all(),
        )
        .filter("category")
    )
    waited_for_copy = (
        calls.join(copy_end_times, left_on="event", right_on="launch")
        .filter(pl.col("return_ns") >= pl.col("end_ns"))
        .select("event")
    )
    rows = pl.concat([name_matches, waited_for_copy]).collect()["event"].to_numpy()
    blocking = np.zeros(
        trace.events.height, dtype=np.bool_, like=get_event_column(trace, "start_ns")
    )
    blocking[rows] = True
    return blocking | mark_device_setup_calls(trace)


@cache_per_trace
def mark_device_setup_calls(trace: Trace) -> NDArray[np.bool_]:
    """Returns True for every call of CUDA or HIP in which the device is set up or code is loaded;
    shape (events,).

    The first call that needs it does it, whatever its name: it takes 5 ms and more though no device
    has anything to do. Calls that wait by name are excluded, except the `cudaFree` of an operator
    that neither allocated memory nor queried events right before: the allocator frees only after
    such calls, while libraries call it to set up the device. Set-up happens once: a call that most
    steps make in the same operator is none, nor is `cudaFree` where operators call it about as
    often as `cudaMalloc`, as without PyTorch's allocator.
    """
    is_setup = np.zeros(trace.events.height, dtype=np.bool_)
    gpu_work = select_gpu_work(trace)
    name, is_free = pl.col("name"), pl.col("name").str.contains("^(cuda|hip)Free$")
    # Several may be freed
    previous_call = pl.when(~is_free).then(name).shift(1).forward_fill().over("lane").fill_null("")
    malloc_count = name.str.contains("^(cuda|hip)Malloc$").sum()
    setup_frees = (
        is_free
        & (
            (is_free & pl.col("op").is_not_null()).sum()
            < _MIN_FREED_SHARE * malloc_count.clip(_MIN_FREES)
        )
        & ~previous_call.str.contains(_CALLS_BEFORE_FREE_PATTERN)
        & pl.col("op").is_not_null()
    )
    calls = (
        trace.events.lazy()
        .filter(pl.col("category").is_in(LAUNCHES))
        .select("event", "lane", "op", "step", "start_ns", "duration_ns", name.cast(pl.String))
        .sort("lane", "start_ns")
        .filter(
            ~name.str.contains(BLOCKING_CALL_PATTERN)
            | name.str.contains("Async", literal=True)
            | setup_frees
        )
        .filter(name.str.contains("^(cuda|cu|hip)[A-Z]"), pl.col("duration_ns") >= _MIN_SETUP_NS)
        .collect()
    )
    around = trace.events["name"].gather(calls["op"]).alias("around")
    calls = calls.with_columns(around).filter(
        pl.col("step").n_unique().over("name", "around") <= max(trace.steps.height // 2, 2)
    )
    if not gpu_work.height or not calls.height:
        return is_setup
    start, duration = calls["start_ns"].to_numpy(), calls["duration_ns"].to_numpy()
    busy = merge_intervals(gpu_work["start_ns"].to_numpy(), gpu_work["end_ns"].to_numpy())
    idle = compute_coverage(busy, start, start + duration) <= _MAX_GPU_BUSY_SHARE * duration
    is_setup[calls["event"].to_numpy()[idle]] = True
    return is_setup


PHASES = ("loading", "forward", "backward", "optimizer", "communication", "other")
ACTIVITIES = ("op", "launch", "blocking_call", "python", "unobserved")
LOADING, FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, OTHER = range(6)
OP, LAUNCH, BLOCKING_CALL, PYTHON, UNOBSERVED = range(5)
_NO_CODE = -1
_CODE_TYPE: Any = np.int8  # values kept for every event take no more than they need

SCOPE_PREFIX = "traceloom.scope:"
# Of the mark around the call of a module, where memory is tracked
MODULE_PREFIX = "traceloom.module:"
TRACELOOM_ANNOTATION_PATTERN = r"^traceloom\."
STEP_MARK_PATTERN = r"^(ProfilerStep|traceloom\.step)"

# Spans that PyTorch names itself: (phase, pattern), first match wins.
SPAN_PHASE_PATTERNS = (
    (LOADING, r"^enumerate\(DataLoader\)#|_BaseDataLoaderIter"),
    (BACKWARD, r"^autograd::engine::"),
    (OPTIMIZER, r"^Optimizer\.(step|zero_grad)#"),
    (
        COMMUNICATION,
        r"^(nccl|rccl|gloo|mpi|ucc|xccl|oneccl|hccl):|^_?c10d(_functional)?::|^record_param_comms$",
    ),
    (COMMUNICATION, r"^torch(\.|::)distributed(\.ddp)?(\.|::)reducer"),
    (
        FORWARD,
        r"^nn\.Module: |^DistributedDataParallel\.forward$|^FullyShardedDataParallel\.forward$",
    ),
)

# Regions that users name: the word decides, where exactly one phase is named.
WORD_PHASE_PATTERNS = (
    (LOADING, r"(?i)\b(data_?load(er|ing)?|load_(data|batch)|get_batch|next_batch)\b"),
    (FORWARD, r"(?i)\bforward\b"),
    (BACKWARD, r"(?i)\bbackward\b"),
    (OPTIMIZER, r"(?i)\b(optimi[sz]er(_step)?|zero_grad)\b"),
)

PYTHON_PHASE_PATTERNS = (
    (LOADING, r"(^|/)torch/utils/data/"),
    (BACKWARD, r"(^|/)torch/_tensor\.py\(\d+\): backward$|^<built-in method run_backward "),
    (
        BACKWARD,
        r"(^|/)torch/autograd/(__init__|graph)\.py\(\d+\): (backward|grad|_engine_run_backward)$",
    ),
    (OPTIMIZER, r"(^|/)torch/optim/"),
    # Not those that only ask who is there, as the profiler does.
    (
        COMMUNICATION,
        (
            r"(^|/)torch/distributed/distributed_c10d\.py\(\d+\): _?(all_|reduce|broadcast|i?send|i?recv"
            r"|scatter|gather|batch_isend|barrier|monitored_barrier|permute|init_|new_|destroy_|split_)"
        ),
    ),
    (COMMUNICATION, r"(^|/)torch/distributed/_functional_collectives\.py"),
    (FORWARD, r"^nn\.Module: "),
)

# Calls in which the host waits: `BLOCKING_CALL_PATTERN` (CUDA, HIP), and these of MTIA and oneAPI.
BLOCKING_RUNTIME_PATTERN = (
    r"^synchronize(Stream)?$"
    r"|^ze(EventHost|CommandQueue|CommandList(Host)?|Fence(Host)?)Synchronize$"
    r"|^(ur|pi)(QueueFinish|Events?Wait)$"
)
BLOCKING_PYTHON_PATTERN = (
    r"^<built-in (method|function) "
    r"(acquire|wait|poll|select|sleep|waitpid|wait4|recv|recv_into|accept|barrier|run_backward)( |>)"
    # Where the frame of the lock itself is missing, as in threads that waited before the recording
    # began.
    r"|(^|/)threading\.py\(\d+\): (wait|_wait_for_tstate_lock)$"
)


class EventClasses(Struct, frozen=True):
    """The class of each host event; arrays of shape (host events,), in the forest's order.

    Attributes:
        phase: Number of the phase that the event opens by itself; -1 where it opens none.
        activity: Number of the thread's activity while the event is innermost; -1 where a region
            only frames others.
        mark: True for step marks.
        op: True for framework operators, without scopes and step marks.
    """

    phase: Ints
    activity: Ints
    mark: Bools
    op: Bools


@cache_per_trace
def mark_communication_scopes(trace: Trace) -> Bools:
    """Returns which host events, in the forest's order, are named communication and hold a part of
    the step of another kind.

    They are regions around that part, not calls: only the remainder of them communicates.
    """
    phase = classify_events(trace).phase
    is_other_phase = np.isin(phase, (LOADING, FORWARD, BACKWARD, OPTIMIZER))
    is_scope: Bools = (phase == COMMUNICATION) & (
        build_forest(trace).subtree_sums(is_other_phase.astype(np.int64)) > 0
    )
    return is_scope


@cache_per_trace
def classify_events(trace: Trace) -> EventClasses:
    """Classifies the host events by names and categories."""
    tree = build_forest(trace)
    vocabulary = build_vocabulary(trace)
    name_codes = vocabulary.code[tree.row]
    named_phases = np.sum(
        vocabulary.matching_each([pattern for _, pattern in WORD_PHASE_PATTERNS]), axis=0
    )
    phase_by_word = np.where(
        named_phases == 1, _match_first_pattern(WORD_PHASE_PATTERNS, vocabulary), _NO_CODE
    )
    category = get_event_column(trace, "category")[tree.row]
    is_op, is_python = (
        category == _get_category_code(vocab.OP),
        category == _get_category_code(vocab.PYTHON),
    )
    is_ours, is_step_mark = (
        gather_rows(vocabulary.matching(TRACELOOM_ANNOTATION_PATTERN), name_codes),
        gather_rows(vocabulary.matching(STEP_MARK_PATTERN), name_codes),
    )
    span_phase, word_phase = (
        gather_rows(_match_first_pattern(SPAN_PHASE_PATTERNS, vocabulary), name_codes),
        gather_rows(phase_by_word, name_codes),
    )
    is_region = (category == _get_category_code(vocab.ANNOTATION)) | is_ours
    python_phase = gather_rows(_match_first_pattern(PYTHON_PHASE_PATTERNS, vocabulary), name_codes)
    phase = np.where(
        is_python, python_phase, np.where(is_region & (span_phase < 0), word_phase, span_phase)
    )
    is_backward_op = (get_event_column(trace, "forward_thread", 0)[tree.row] > 0) & is_op
    phase = np.where(is_backward_op & (phase < 0), BACKWARD, phase)
    is_runtime_call = np.isin(
        category, (_get_category_code(vocab.RUNTIME), _get_category_code(vocab.DRIVER))
    )
    # Events that hold a whole step are around the loop, whatever their name.
    starts = trace.steps["start_ns"].to_numpy()
    steps_begun_at_start = np.searchsorted(
        starts, get_event_column(trace, "start_ns"), side="right"
    )
    steps_begun_at_end = np.searchsorted(
        starts, get_event_column(trace, "nested_end_ns"), side="left"
    )
    phase[
        is_step_mark | (steps_begun_at_end - steps_begun_at_start > 1)[tree.row] | is_runtime_call
    ] = _NO_CODE
    is_framework_op = is_op & ~is_ours
    activity = np.full(name_codes.size, _NO_CODE, like=name_codes)
    activity[is_python] = PYTHON
    activity[is_python & gather_rows(vocabulary.matching(BLOCKING_PYTHON_PATTERN), name_codes)] = (
        BLOCKING_CALL
    )
    activity[
        is_framework_op
        | (category == _get_category_code(vocab.COLLECTIVE))
        | (~is_python & (span_phase == COMMUNICATION))
    ] = OP
    is_blocking = (
        gather_rows(vocabulary.matching(BLOCKING_RUNTIME_PATTERN), name_codes)
        | mark_blocking_calls(trace)[tree.row]
    )
    activity[is_runtime_call] = np.where(is_blocking[is_runtime_call], BLOCKING_CALL, LAUNCH)
    return EventClasses(
        phase.astype(_CODE_TYPE), activity.astype(_CODE_TYPE), is_step_mark, is_framework_op
    )


@cache_per_trace
def classify_activity(trace: Trace) -> Ints:
    """Returns the activity of the thread while each host event is innermost: regions take the
    activity of their surroundings.
    """
    activities = classify_events(trace).activity
    return np.append(activities, activities.dtype.type(UNOBSERVED))[
        build_forest(trace).nearest_or_self(activities >= 0)
    ]


def _get_category_code(category: str) -> int:
    return vocab.CATEGORIES.index(category)


def _match_first_pattern(
    phase_patterns: tuple[tuple[int, str], ...], vocabulary: Vocabulary
) -> Ints:
    """Returns the number of the first pattern of the table that matches each name; -1 for none."""
    codes, patterns = zip(*phase_patterns, strict=True)
    return np.select(vocabulary.matching_each(patterns), codes, _NO_CODE)


HOST_INTERVALS_SCHEMA = pl.Schema(
    {"lane": pl.UInt32(), "start_ns": pl.Int64(), "end_ns": pl.Int64()}
)
FRAME_TIME_SCHEMA = pl.Schema({"frame": pl.String(), "inside": pl.String(), "ns": pl.Int64()})
_LOOKS_SCHEMA = {
    "lane": pl.Int64(),
    "time_ns": pl.Int64(),
    "frame": pl.String(),
    "inside": pl.String(),
}
_LOOK_NS = 10_000_000  # between looks, where a stack stayed the same
_MIN_LOOKS = 3  # into the intervals of a lane: fewer say nothing about their time
# Work of the recorder is not the program's
RECORDER_FRAME_PATTERN = r"(^|/)traceloom/capture/"
# Varies from call to call, and identifies no other place
ADDRESS_PATTERN = r" (?:object )?at 0x[0-9a-fA-F]+"
_FRAME_PATTERN = r"^(.*)\((\d+)\): (.*)$"  # file.py(12): function
_FRAMEWORK_FRAME_PATTERN = re.compile(
    r"^(<|nn\.Module: |torch/|.*/(torch|site-packages|dist-packages)/|.*/lib/python3[^/]*/)"
)
# Kineto removes the folder that packages are installed in. These packages do a piece of work and
# never call back into user code: their caller is more informative.
_UTILITY_PACKAGES = frozenset(
    (
        "PIL",
        "cv2",
        "dill",
        "fsspec",
        "h5py",
        "matplotlib",
        "msgpack",
        "numba",
        "numpy",
        "pandas",
        "pyarrow",
        "requests",
        "safetensors",
        "scipy",
        "skimage",
        "sklearn",
        "tensorboard",
        "tokenizers",
        "torchaudio",
        "torchvision",
        "tqdm",
        "triton",
        "urllib3",
        "wandb",
        "yaml",
    )
)


def is_user_frame(frame: str) -> bool:
    """Whether a Python frame is neither PyTorch's, the standard library's or a tool's, nor a
    built-in function.
    """
    frame = frame.replace("\\", "/")
    if _FRAMEWORK_FRAME_PATTERN.match(frame):
        return False
    package = frame.split("(", 1)[0].split("/", 1)[0].removesuffix(".py")
    return package not in sys.stdlib_module_names and package not in _UTILITY_PACKAGES


def find_user_frame(stack: Sequence[str]) -> str | None:
    """Returns the innermost frame of the user's own code in a stack, the outermost frame first; the
    innermost of all where there is none.
    """
    return (_select_user_frames(stack) or stack)[-1] if stack else None


def fold_stack(stack: str) -> str:
    """Returns a stack as text without frames that are not of the user's own code, where it has any
    that are.
    """
    frames = stack.split(FRAME_SEPARATOR)
    return FRAME_SEPARATOR.join(_select_user_frames(frames) or frames)


def _select_user_frames(stack: Sequence[str]) -> list[str]:
    return [
        frame
        for frame in stack
        if is_user_frame(frame) and not re.search(RECORDER_FRAME_PATTERN, frame)
    ]


def parse_frame_places(names: pl.Series) -> pl.DataFrame:
    """Returns columns name, file and line of the names of events; file and line are null for names
    that are not Python functions.
    """
    return (
        names.cast(pl.String)
        .to_frame("text")
        .select(
            name=pl.coalesce(pl.col("text").str.extract(_FRAME_PATTERN, 3), pl.col("text")),
            file=pl.col("text").str.extract(_FRAME_PATTERN, 1),
            line=pl.col("text").str.extract(_FRAME_PATTERN, 2).cast(pl.Int32, strict=False),
        )
    )


def measure_frame_time(trace: Trace, interval_sets: Sequence[pl.DataFrame]) -> list[pl.DataFrame]:
    """Measures how long each Python frame holds intervals of host time: exclusive, so that the
    times of frames add up to them.

    Time counts to the innermost frame of the user's own code around it, else to the innermost frame
    of all.

    Args:
        trace: The trace.
        interval_sets: Sets of intervals of host threads, `HOST_INTERVALS_SCHEMA`; those of one set
            and lane are counted once.

    Returns:
        A table for each set, `HELD`: the Python frame as recorded, the innermost event inside it
        (null where it is the frame itself) and nanoseconds, > 0. Time in which no Python frame is
        recorded is left out.
    """
    tree, vocabulary, segments = (
        build_forest(trace),
        build_vocabulary(trace),
        build_host_segments(trace),
    )
    is_python = gather_rows(
        get_event_column(trace, "category") == vocab.CATEGORIES.index(vocab.PYTHON), tree.row
    )
    is_user_name = np.zeros(len(vocabulary.names), dtype=np.bool_)
    functions = np.flatnonzero(
        vocabulary.matching(_FRAME_PATTERN) & ~vocabulary.matching(RECORDER_FRAME_PATTERN)
    )
    is_user_name[functions] = [is_user_frame(name) for name in vocabulary.names.gather(functions)]
    code = gather_rows(vocabulary.code, tree.row)
    frame_of_position = tree.nearest_or_self(is_python & gather_rows(is_user_name, code))
    frame_of_position = np.append(
        np.where(frame_of_position >= 0, frame_of_position, tree.nearest_or_self(is_python)), -1
    )
    rows = np.flatnonzero(frame_of_position[segments.owner] >= 0)
    innermost = segments.owner[rows]
    offset = segments.lane[rows].astype(np.int64) * _measure_lane_span(trace) - trace.start_ns
    low, high = segments.start_ns[rows] + offset, segments.end_ns[rows] + offset
    tables = []
    for intervals in interval_sets:
        if not intervals.height:
            tables.append(FRAME_TIME_SCHEMA.to_frame())
            continue
        ns = compute_coverage(_place_on_one_axis(trace, intervals), low, high)
        covered = np.flatnonzero(ns)
        innermost_counted = innermost[covered]
        frame = frame_of_position[innermost_counted]
        codes = pl.DataFrame(
            {
                "frame": code[frame],
                "inside": code[innermost_counted],
                "own": frame == innermost_counted,
                "ns": ns[covered],
            }
        )
        summed = codes.group_by("frame", "inside", "own").agg(pl.col("ns").sum())
        # Names without addresses: several become one.
        named_times = summed.with_columns(
            vocabulary.names.gather(summed[name]).str.replace_all(ADDRESS_PATTERN, "").alias(name)
            for name in ("frame", "inside")
        ).with_columns(inside=pl.when(~pl.col("own")).then("inside"))
        tables.append(
            named_times.group_by("frame", "inside")
            .agg(pl.col("ns").sum())
            .pipe(cast_to_schema, FRAME_TIME_SCHEMA)
        )
    return tables


def measure_sampled_frame_time(
    trace: Trace, samples: pl.DataFrame, interval_sets: Sequence[pl.DataFrame]
) -> list[pl.DataFrame]:
    """Estimates what `measure_frame_time` measures from stacks that were looked at now and then.

    Each look into the intervals of a lane stands for the same part of their time. A look into
    another step with as many events counts where it was among these.

    Args:
        trace: The trace.
        samples: The samples of its process, as in `Session`.
        interval_sets: As of `measure_frame_time`.
    """
    lanes = dict(trace.lanes.filter(pl.col("kind") == "host")[["thread", "lane"]].rows())
    looks = []
    for thread, time_ns, period_ns, stack in samples[
        ["thread", "time_ns", "period_ns", "stack"]
    ].iter_rows():
        frame, lane = find_user_frame(stack), lanes.get(str(thread))
        if frame is None or lane is None:
            continue
        inside = stack[-1] if stack[-1] != frame else None
        looks += [
            (lane, time_ns + number * _LOOK_NS, frame, inside)
            for number in range(max(1, period_ns // _LOOK_NS))
        ]
    table = pl.DataFrame(looks, schema=_LOOKS_SCHEMA, orient="row").filter(
        pl.col("time_ns").is_between(trace.start_ns, trace.end_ns)
    )
    lane_span = _measure_lane_span(trace)
    look_lanes = table["lane"].to_numpy()
    at = table["time_ns"].to_numpy() - trace.start_ns + look_lanes * lane_span
    tables = []
    for intervals in interval_sets:
        spans = _place_on_one_axis(trace, intervals)
        places = _move_to_step(trace, look_lanes, at, spans.start[:1] % lane_span)
        row = np.searchsorted(spans.start, places, side="right") - 1
        hits = np.flatnonzero((row >= 0) & (places < np.append(spans.end, 0)[row]))
        lane_ns = np.bincount(spans.start // lane_span, spans.end - spans.start, len(trace.lanes))
        lane_hits = np.bincount(look_lanes[hits], minlength=len(trace.lanes))
        hits = hits[lane_hits[look_lanes[hits]] >= _MIN_LOOKS]
        ns = (lane_ns / np.maximum(lane_hits, 1))[look_lanes[hits]]
        tables.append(
            table[hits]
            .with_columns(ns=pl.Series(ns, dtype=pl.Float64))
            .group_by("frame", "inside")
            .agg(pl.col("ns").sum().round())
            .pipe(cast_to_schema, FRAME_TIME_SCHEMA)
        )
    return tables


def _move_to_step(trace: Trace, lane: Ints, at: Ints, first_ns: Ints) -> Ints:
    """Moves times on the axis of all lanes to the step that a time is in, each behind the event
    with the same number as the one that it is behind in its own step; others stay.
    """
    tree, steps, lane_span = build_forest(trace), trace.steps, _measure_lane_span(trace)
    begins = np.sort(tree.start_ns - trace.start_ns + tree.lane.astype(np.int64) * lane_span)
    bounds = np.append(steps["start_ns"], trace.end_ns + 1) - trace.start_ns
    step = np.searchsorted(bounds, at % lane_span, side="right") - 1
    target = np.searchsorted(bounds, first_ns, side="right") - 1
    if not target.size or target[0] not in range(steps.height) or not begins.size:
        return at
    step = np.clip(step, 0, steps.height - 1)
    low, high, new_low, new_high = (
        np.searchsorted(begins, lane * lane_span + bounds[edge])
        for edge in (step, step + 1, target, target + 1)
    )
    behind = np.searchsorted(begins, at, side="right") - 1
    new = np.clip(behind - low + new_low, 0, begins.size - 1)
    latest = np.append(begins, np.iinfo(np.int64).max)[new + 1] - 1
    moved = np.minimum(begins[new] + at - begins[behind], latest)
    return np.where((high - low == new_high - new_low) & (behind >= low), moved, at)


def _measure_lane_span(trace: Trace) -> int:
    return trace.end_ns - trace.start_ns + 1


def _place_on_one_axis(trace: Trace, intervals: pl.DataFrame) -> Spans:
    """Returns intervals of lanes as one set of time: the lanes one after the other, from 0."""
    offset = intervals["lane"].to_numpy().astype(np.int64) * _measure_lane_span(trace)
    start, end = (
        np.clip(intervals[name].to_numpy(), trace.start_ns, trace.end_ns) - trace.start_ns + offset
        for name in ("start_ns", "end_ns")
    )
    return merge_intervals(start, end)
