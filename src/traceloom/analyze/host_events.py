"""What a host event means: phase, activity, whether it blocks, whose Python frame.

One table of name patterns each for phases and for blocking calls; docs/concepts/host-time.md shows them. Names are
PyTorch's own (torch 1.8 to 2.13), CUDA's, HIP's, Level Zero's and MTIA's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.ancestry import forest, host_segments
from traceloom.analyze.intervals import coverage, union
from traceloom.analyze.kernel_rules import gpu_work
from traceloom.analyze.names import Vocabulary, vocabulary
from traceloom.trace import vocabulary as cat
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import column, gather_rows
from traceloom.trace.batch import per_trace
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import COPY, GPU_WORK, LAUNCHES

# Waiting for the device, copying synchronously, and what the driver does under its own lock (it may stall the device).
BY_NAME = (
    r"(?i:synchronize)|QueueFinish|Events?Wait$"
    r"|Memcpy|Memset|Malloc|Free|HostAlloc|HostRegister|HostUnregister"
    r"|ModuleLoad|ModuleUnload|LibraryLoad|LibraryUnload"
)
# Longer than a thread is kept from running now and then.
_STARTS_NS = 5_000_000
_BUSY = 0.1  # of a call at most: no device had anything to do
_BEFORE_FREES = "Malloc|Event|Synchronize|LastError|MemGetInfo"  # what PyTorch's allocator calls before it frees


@per_trace
def blocking_calls(trace: Trace) -> NDArray[np.bool_]:
    """True for every event that is a blocking runtime or driver call; shape (events,).

    Blocking are, by name, synchronising calls, copies and fills that are not asynchronous, and allocations; and, by
    what happened, asynchronous copies that returned no earlier than their copy ended (copies of pageable memory), and
    calls that start the device.
    """
    events = trace.events.lazy()
    calls = events.filter(pl.col("category").is_in(LAUNCHES)).select(
        "event", "name", (pl.col("start_ns") + pl.col("duration_ns")).alias("return_ns")
    )
    name = pl.col("name")
    by_name = calls.filter(name.str.contains(BY_NAME), ~name.str.contains("Async", literal=True)).select("event")
    copied = (
        events.filter(pl.col("category").is_in(GPU_WORK), pl.col("launch").is_not_null())
        .group_by("launch")
        .agg((pl.col("start_ns") + pl.col("duration_ns")).max().alias("end_ns"), (pl.col("category") == COPY).all())
        .filter("category")
    )
    waited = (
        calls.join(copied, left_on="event", right_on="launch")
        .filter(pl.col("return_ns") >= pl.col("end_ns"))
        .select("event")
    )
    rows = pl.concat([by_name, waited]).collect()["event"].to_numpy()
    blocking = np.zeros(trace.events.height, dtype=np.bool_, like=column(trace, "start_ns"))
    blocking[rows] = True
    return blocking | starting_calls(trace)


@per_trace
def starting_calls(trace: Trace) -> NDArray[np.bool_]:
    """True for every call of CUDA or HIP in which the device is set up or code is loaded; shape (events,).

    The first call that needs it does it, whatever it is called: it takes 5 ms and more though no device has anything
    to do. Calls that wait by name are none, but for the `cudaFree` of an operator that did not ask for memory or look
    at events right before: the allocator gives back only then, and libraries call it to have the device set up.
    """
    starting = np.zeros(trace.events.height, dtype=np.bool_)
    work = gpu_work(trace)
    name, is_free = pl.col("name"), pl.col("name").str.contains("^(cuda|hip)Free$")
    before = pl.when(~is_free).then(name).shift(1).forward_fill().over("lane").fill_null("")  # several may be freed
    frees = is_free & ~before.str.contains(_BEFORE_FREES) & pl.col("op").is_not_null()
    calls = (
        trace.events.lazy()
        .filter(pl.col("category").is_in(LAUNCHES))
        .select("event", "lane", "op", "start_ns", "duration_ns", name.cast(pl.String))
        .sort("lane", "start_ns")
        .filter(~name.str.contains(BY_NAME) | name.str.contains("Async", literal=True) | frees)
        .filter(name.str.contains("^(cuda|cu|hip)[A-Z]"), pl.col("duration_ns") >= _STARTS_NS)
        .collect()
    )
    if not work.height or not calls.height:
        return starting
    start, duration = calls["start_ns"].to_numpy(), calls["duration_ns"].to_numpy()
    busy = union(work["start_ns"].to_numpy(), work["end_ns"].to_numpy())
    idle = coverage(busy, start, start + duration) <= _BUSY * duration
    starting[calls["event"].to_numpy()[idle]] = True
    return starting


PHASES = ("loading", "forward", "backward", "optimizer", "communication", "other")
ACTIVITIES = ("op", "launch", "blocking_call", "python", "unobserved")
LOADING, FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, OTHER = range(6)
OP, LAUNCH, BLOCKING_CALL, PYTHON, UNOBSERVED = range(5)
_NONE = -1
_CODE: Any = np.int8  # what is remembered of every event takes no more than it needs

SCOPE_PREFIX = "traceloom.scope:"
MODULE_PREFIX = "traceloom.module:"  # of the mark around the call of a module, where memory is followed
OURS = r"^traceloom\."
STEP_MARK = r"^(ProfilerStep|traceloom\.step)"

# Spans that PyTorch names itself: (phase, pattern), the first that matches counts.
SPAN_PHASES = (
    (LOADING, r"^enumerate\(DataLoader\)#|_BaseDataLoaderIter"),
    (BACKWARD, r"^autograd::engine::"),
    (OPTIMIZER, r"^Optimizer\.(step|zero_grad)#"),
    (COMMUNICATION, r"^(nccl|rccl|gloo|mpi|ucc|xccl|oneccl|hccl):|^_?c10d(_functional)?::|^record_param_comms$"),
    (COMMUNICATION, r"^torch(\.|::)distributed(\.ddp)?(\.|::)reducer"),
    (FORWARD, r"^nn\.Module: |^DistributedDataParallel\.forward$|^FullyShardedDataParallel\.forward$"),
)

# Regions that people name: the word decides, where exactly one phase is named.
WORD_PHASES = (
    (LOADING, r"(?i)\b(data_?load(er|ing)?|load_(data|batch)|get_batch|next_batch)\b"),
    (FORWARD, r"(?i)\bforward\b"),
    (BACKWARD, r"(?i)\bbackward\b"),
    (OPTIMIZER, r"(?i)\b(optimi[sz]er(_step)?|zero_grad)\b"),
)

PYTHON_PHASES = (
    (LOADING, r"(^|/)torch/utils/data/"),
    (BACKWARD, r"(^|/)torch/_tensor\.py\(\d+\): backward$|^<built-in method run_backward "),
    (BACKWARD, r"(^|/)torch/autograd/(__init__|graph)\.py\(\d+\): (backward|grad|_engine_run_backward)$"),
    (OPTIMIZER, r"(^|/)torch/optim/"),
    (COMMUNICATION, r"(^|/)torch/distributed/(distributed_c10d|_functional_collectives)\.py"),
    (FORWARD, r"^nn\.Module: "),
)

# Calls in which the host waits: those of `blocking.py` (CUDA, HIP), and these of MTIA and oneAPI.
BLOCKING_RUNTIME = (
    r"^synchronize(Stream)?$"
    r"|^ze(EventHost|CommandQueue|CommandList(Host)?|Fence(Host)?)Synchronize$"
    r"|^(ur|pi)(QueueFinish|Events?Wait)$"
)
BLOCKING_PYTHON = (
    r"^<built-in (method|function) "
    r"(acquire|wait|poll|select|sleep|waitpid|wait4|recv|recv_into|accept|barrier|run_backward)( |>)"
    # where the frame of the lock itself is missing, as in threads that waited before the recording began
    r"|(^|/)threading\.py\(\d+\): (wait|_wait_for_tstate_lock)$"
)


class EventClasses(Struct, frozen=True):
    """What each host event says; arrays of shape (host events,), in the forest's order.

    Attributes:
        phase: Number of the phase the event opens by itself; -1 where it opens none.
        activity: Number of what the thread does while the event is innermost; -1 where a region only frames others.
        mark: True for step marks.
        op: True for framework operators; scopes and step marks are none.
    """

    phase: Ints
    activity: Ints
    mark: Bools
    op: Bools


@per_trace
def is_communication_scope(trace: Trace) -> Bools:
    """Which host events, in the forest's order, are named communication and hold a part of the step of another kind.

    They are regions around that part, not calls: only what is left of them communicates.
    """
    phase = classify_events(trace).phase
    others = np.isin(phase, (LOADING, FORWARD, BACKWARD, OPTIMIZER))
    around: Bools = (phase == COMMUNICATION) & (forest(trace).subtree_sums(others.astype(np.int64)) > 0)
    return around


@per_trace
def classify_events(trace: Trace) -> EventClasses:
    """Read names and categories of the host events."""
    tree = forest(trace)
    words = vocabulary(trace)
    code = words.code[tree.row]
    named_phases = np.sum(words.matching_each([pattern for _, pattern in WORD_PHASES]), axis=0)
    word_of = np.where(named_phases == 1, _first_of(WORD_PHASES, words), _NONE)
    category = column(trace, "category")[tree.row]
    is_op, is_python = category == _code(cat.OP), category == _code(cat.PYTHON)
    is_ours, mark = gather_rows(words.matching(OURS), code), gather_rows(words.matching(STEP_MARK), code)
    span, word = gather_rows(_first_of(SPAN_PHASES, words), code), gather_rows(word_of, code)
    named = (category == _code(cat.ANNOTATION)) | is_ours
    python = gather_rows(_first_of(PYTHON_PHASES, words), code)
    phase = np.where(is_python, python, np.where(named & (span < 0), word, span))
    backward_op = (column(trace, "forward_thread", 0)[tree.row] > 0) & is_op
    phase = np.where(backward_op & (phase < 0), BACKWARD, phase)
    call = np.isin(category, (_code(cat.RUNTIME), _code(cat.DRIVER)))
    # events that hold a whole step are around the loop, whatever their name says
    starts = trace.steps["start_ns"].to_numpy()
    after = np.searchsorted(starts, column(trace, "start_ns"), side="right")
    before = np.searchsorted(starts, column(trace, "nested_end_ns"), side="left")
    phase[mark | (before - after > 1)[tree.row] | call] = _NONE
    op = is_op & ~is_ours
    activity = np.full(code.size, _NONE, like=code)
    activity[is_python] = PYTHON
    activity[is_python & gather_rows(words.matching(BLOCKING_PYTHON), code)] = BLOCKING_CALL
    activity[op | (category == _code(cat.COLLECTIVE)) | (~is_python & (span == COMMUNICATION))] = OP
    waits = gather_rows(words.matching(BLOCKING_RUNTIME), code) | blocking_calls(trace)[tree.row]
    activity[call] = np.where(waits[call], BLOCKING_CALL, LAUNCH)
    return EventClasses(phase.astype(_CODE), activity.astype(_CODE), mark, op)


@per_trace
def activity(trace: Trace) -> Ints:
    """What the thread does while each host event is innermost: regions take the activity of what they stand in."""
    activities = classify_events(trace).activity
    return np.append(activities, activities.dtype.type(UNOBSERVED))[forest(trace).nearest_or_self(activities >= 0)]


def _code(category: str) -> int:
    return cat.CATEGORIES.index(category)


def _first_of(table: tuple[tuple[int, str], ...], words: Vocabulary) -> Ints:
    """Number of the first pattern of the table that each name holds; -1 for none."""
    numbers, patterns = zip(*table, strict=True)
    return np.select(words.matching_each(patterns), numbers, _NONE)


STRETCHES = pl.Schema({"lane": pl.UInt32(), "start_ns": pl.Int64(), "end_ns": pl.Int64()})
HELD = pl.Schema({"frame": pl.String(), "inside": pl.String(), "ns": pl.Int64()})
RECORDER = r"(^|/)traceloom/capture/"  # what the recorder does is none of the program's
ADDRESS = r" (?:object )?at 0x[0-9a-fA-F]+"  # differs from call to call, and names no other place
_PLACE = r"^(.*)\((\d+)\): (.*)$"  # file.py(12): function
_FRAMEWORK = re.compile(r"^(<|nn\.Module: |torch/|.*/(torch|site-packages|dist-packages)/|.*/lib/python3[^/]*/)")
# Kineto cuts off the folder that packages are installed in. These are called for a piece of work and call nobody back:
# their caller tells more.
_TOOLS = frozenset(
    ("PIL", "cv2", "dill", "fsspec", "h5py", "matplotlib", "msgpack", "numba", "numpy", "pandas", "pyarrow", "requests",
     "safetensors", "scipy", "skimage", "sklearn", "tensorboard", "tokenizers", "torchaudio", "torchvision", "tqdm",
     "triton", "urllib3", "wandb", "yaml")
)  # fmt: skip


def is_users(frame: str) -> bool:
    """Whether a Python frame is neither PyTorch's, the standard library's or a tool's, nor a built-in function."""
    if _FRAMEWORK.match(frame):
        return False
    top = frame.split("(", 1)[0].split("/", 1)[0].removesuffix(".py")
    return top not in sys.stdlib_module_names and top not in _TOOLS


def places(names: pl.Series) -> pl.DataFrame:
    """Columns name, file and line of the names of events; file and line are null for what is no Python function."""
    return names.cast(pl.String).to_frame("text").select(
        name=pl.coalesce(pl.col("text").str.extract(_PLACE, 3), pl.col("text")),
        file=pl.col("text").str.extract(_PLACE, 1),
        line=pl.col("text").str.extract(_PLACE, 2).cast(pl.Int32, strict=False),
    )  # fmt: skip


def held(trace: Trace, stretches: Sequence[pl.DataFrame]) -> list[pl.DataFrame]:
    """How long each Python frame holds stretches of host time: exclusive, so that the times of frames add up to them.

    Time is given to the innermost frame of the user's own code around it, else to the innermost frame of all.

    Args:
        trace: The trace.
        stretches: Sets of stretches of host threads, `STRETCHES`; those of one set and lane are counted once.

    Returns:
        A table for each set, `HELD`: the Python frame as recorded, what is innermost inside it (null where it
        is itself) and nanoseconds, > 0. Time in which no Python frame is recorded is left out.
    """
    tree, words, segments = forest(trace), vocabulary(trace), host_segments(trace)
    is_python = gather_rows(column(trace, "category") == cat.CATEGORIES.index(cat.PYTHON), tree.row)
    own = np.zeros(len(words.names), dtype=np.bool_)
    functions = np.flatnonzero(words.matching(_PLACE) & ~words.matching(RECORDER))
    own[functions] = [is_users(name) for name in words.names.gather(functions)]
    code = gather_rows(words.code, tree.row)
    around = tree.nearest_or_self(is_python & gather_rows(own, code))
    around = np.append(np.where(around >= 0, around, tree.nearest_or_self(is_python)), -1)
    rows = np.flatnonzero(around[segments.owner] >= 0)
    owner = segments.owner[rows]
    # lanes one after the other on one axis
    width = trace.end_ns - trace.start_ns + 1
    offset = segments.lane[rows].astype(np.int64) * width - trace.start_ns
    low, high = segments.start_ns[rows] + offset, segments.end_ns[rows] + offset
    tables = []
    for rows_of_set in stretches:
        if not rows_of_set.height:
            tables.append(HELD.to_frame())
            continue
        lane = rows_of_set["lane"].to_numpy().astype(np.int64)
        start, end = (
            np.clip(rows_of_set[name].to_numpy(), trace.start_ns, trace.end_ns) + lane * width - trace.start_ns
            for name in ("start_ns", "end_ns")
        )
        ns = coverage(union(start, end), low, high)
        counted = np.flatnonzero(ns)
        inner = owner[counted]
        frame = around[inner]
        codes = pl.DataFrame({"frame": code[frame], "inside": code[inner], "own": frame == inner, "ns": ns[counted]})
        summed = codes.group_by("frame", "inside", "own").agg(pl.col("ns").sum())
        # names without addresses: several are one
        named = summed.with_columns(
            words.names.gather(summed[name]).str.replace_all(ADDRESS, "").alias(name) for name in ("frame", "inside")
        ).with_columns(inside=pl.when(~pl.col("own")).then("inside"))
        tables.append(named.group_by("frame", "inside").agg(pl.col("ns").sum()).pipe(cast_to_schema, HELD))
    return tables
