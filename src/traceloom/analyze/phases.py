"""What a host event says about the host: the phase it opens, and what the thread does while it is innermost.

One table of name patterns each for phases and for blocking calls; docs/concepts/host-time.md shows them. Names are
PyTorch's own (torch 1.8 to 2.13), CUDA's, HIP's, Level Zero's and MTIA's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from traceloom.analyze.ancestry import forest
from traceloom.analyze.blocking import blocking_calls
from traceloom.analyze.remembered import per_trace
from traceloom.analyze.vocabulary import Vocabulary, vocabulary
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column, lookup

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


class Meaning(Struct, frozen=True):
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
def around_passes(trace: Trace) -> Bools:
    """Which host events, in the forest's order, are named communication and hold a part of the step of another kind.

    They are regions around that part, not calls: only what is left of them communicates.
    """
    phase = meaning(trace).phase
    others = np.isin(phase, (LOADING, FORWARD, BACKWARD, OPTIMIZER))
    around: Bools = (phase == COMMUNICATION) & (forest(trace).subtree_sums(others.astype(np.int64)) > 0)
    return around


@per_trace
def meaning(trace: Trace) -> Meaning:
    """Read names and categories of the host events."""
    tree = forest(trace)
    words = vocabulary(trace)
    code = words.code[tree.row]
    named_phases = np.sum(words.matching_each([pattern for _, pattern in WORD_PHASES]), axis=0)
    word_of = np.where(named_phases == 1, _first_of(WORD_PHASES, words), _NONE)
    category = column(trace, "category")[tree.row]
    is_op, is_python = category == _code(cat.OP), category == _code(cat.PYTHON)
    is_ours, mark = lookup(words.matching(OURS), code), lookup(words.matching(STEP_MARK), code)
    span, word = lookup(_first_of(SPAN_PHASES, words), code), lookup(word_of, code)
    named = (category == _code(cat.ANNOTATION)) | is_ours
    python = lookup(_first_of(PYTHON_PHASES, words), code)
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
    activity[is_python & lookup(words.matching(BLOCKING_PYTHON), code)] = BLOCKING_CALL
    activity[op | (category == _code(cat.COLLECTIVE)) | (~is_python & (span == COMMUNICATION))] = OP
    waits = lookup(words.matching(BLOCKING_RUNTIME), code) | blocking_calls(trace)[tree.row]
    activity[call] = np.where(waits[call], BLOCKING_CALL, LAUNCH)
    return Meaning(phase.astype(_CODE), activity.astype(_CODE), mark, op)


@per_trace
def activity(trace: Trace) -> Ints:
    """What the thread does while each host event is innermost: regions take the activity of what they stand in."""
    activities = meaning(trace).activity
    return np.append(activities, activities.dtype.type(UNOBSERVED))[forest(trace).nearest_or_self(activities >= 0)]


def _code(category: str) -> int:
    return cat.CATEGORIES.index(category)


def _first_of(table: tuple[tuple[int, str], ...], words: Vocabulary) -> Ints:
    """Number of the first pattern of the table that each name holds; -1 for none."""
    numbers, patterns = zip(*table, strict=True)
    return np.select(words.matching_each(patterns), numbers, _NONE)
