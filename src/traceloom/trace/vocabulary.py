"""Event categories and kinds of copies, with their names in Kineto traces."""

import re

OP = "op"  # framework operator (cpu_op, hpu_op, glow_runtime, the 2021 name Operator)
ANNOTATION = (
    "annotation"  # user_annotation: ProfilerStep, Optimizer.step, record_function, nccl:*, gloo:*
)
GPU_ANNOTATION = "gpu_annotation"  # the GPU twin of an annotation; never GPU work
KERNEL = "kernel"
COPY = "copy"  # gpu_memcpy, Memcpy
FILL = "fill"  # gpu_memset, Memset
RUNTIME = (
    "runtime"  # cuda_runtime (also hip*), xpu_runtime, mtia_runtime, privateuse1_runtime, Runtime
)
DRIVER = "driver"  # cuda_driver, xpu_driver, privateuse1_driver
SYNC = "sync"  # cuda_sync, xpu_sync: the awaited work and the duration of the wait
GPU_EVENT = "gpu_event"  # cuda_event: an event record on a stream, about 1 ns wide
PYTHON = "python"  # python_function: frames and nn.Module calls
OVERHEAD = "overhead"  # the profiler's own cost
COLLECTIVE = "collective"  # collective_comm
# Of an accelerator's command processor (mtia_ccp_events): events, waits, see FROM_COMMAND; and nodes
# of a CUDA graph that record an event or call the host (graph_event_node, graph_host_node)
COMMAND = "command"
COUNTER_RANGE = "counter_range"  # cuda_profiler_range: CUPTI counters of a range
PROFILER = "profiler"  # the "Trace" span of the whole recording
OTHER = "other"  # a category this version does not know; kept and counted

CATEGORIES = (
    OP,
    ANNOTATION,
    GPU_ANNOTATION,
    KERNEL,
    COPY,
    FILL,
    RUNTIME,
    DRIVER,
    SYNC,
    GPU_EVENT,
    PYTHON,
    OVERHEAD,
    COLLECTIVE,
    COMMAND,
    COUNTER_RANGE,
    PROFILER,
    OTHER,
)
GPU_WORK = (KERNEL, COPY, FILL)
LAUNCHES = (RUNTIME, DRIVER)
HOST_WORK = (OP, ANNOTATION, RUNTIME, DRIVER, PYTHON, COLLECTIVE)

# Kineto's ActivityType names, lower case, with the legacy names of 2021 and 2022.
FROM_KINETO = {
    "cpu_op": OP,
    "operator": OP,
    "hpu_op": OP,
    "glow_runtime": OP,
    "user_annotation": ANNOTATION,
    "gpu_user_annotation": GPU_ANNOTATION,
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "memcpy": COPY,
    "gpu_memset": FILL,
    "memset": FILL,
    "cuda_runtime": RUNTIME,
    "runtime": RUNTIME,
    "xpu_runtime": RUNTIME,
    "mtia_runtime": RUNTIME,
    "privateuse1_runtime": RUNTIME,
    "cuda_driver": DRIVER,
    "xpu_driver": DRIVER,
    "privateuse1_driver": DRIVER,
    "cuda_sync": SYNC,
    "xpu_sync": SYNC,
    "cuda_event": GPU_EVENT,
    "python_function": PYTHON,
    "python": PYTHON,
    "overhead": OVERHEAD,
    "collective_comm": COLLECTIVE,
    "mtia_ccp_events": COMMAND,
    "graph_event_node": COMMAND,
    "graph_host_node": COMMAND,
    "cuda_profiler_range": COUNTER_RANGE,
    "trace": PROFILER,
}
HOST_NODE = "HostNode"  # how the name of a graph's call of the host begins
# Commands of a command processor by name (MTIA); all other names are computation.
FROM_COMMAND = {
    "dma_request": COPY,
    "event_record": COMMAND,
    "event_wait": COMMAND,
}

_ARROW_PATTERN = re.compile(r"\((.+?)\s*->\s*(.+?)\)")
_SHORT_PATTERN = re.compile(r"\b([HDPM])(?:to|2)([HDPM])\b", re.IGNORECASE)
_LONG_PATTERN = re.compile(
    r"(host|device|peer|memory)_?to_?(host|device|peer|memory)", re.IGNORECASE
)
_KIND_LETTERS = {"h": "H", "d": "D", "p": "P", "m": "H"}  # XPU calls the host "memory"
_CUPTI_KINDS = {"1": "HtoD", "2": "DtoH", "8": "DtoD", "9": "HtoH", "10": "PtoP"}
_CUPTI_MEMORY = {"1": "pageable", "2": "pinned", "3": "device", "4": "array", "5": "managed"}


def copy_kind(name: str, argument: str | None = None) -> str:
    """Returns HtoD, DtoH, DtoD, PtoP, HtoH, `fill` or `unknown`, from the event's name or its `copy
    kind` argument.

    Example:
        >>> copy_kind("Memcpy DtoH (Device -> Pinned)"), copy_kind("Memcpy", "8")
        ('DtoH', 'DtoD')
    """
    for text in (argument or "", name):
        if text in _CUPTI_KINDS:
            return _CUPTI_KINDS[text]
        match = _SHORT_PATTERN.search(text) or _LONG_PATTERN.search(text)
        if match:
            return f"{_KIND_LETTERS[match.group(1)[0].lower()]}to{_KIND_LETTERS[match.group(2)[0].lower()]}"
    if re.search(r"memset|fill", name, re.IGNORECASE):
        return "fill"
    return "DtoD" if "__amd_rocclr_copyBuffer" in name else "unknown"


def parse_memory_kinds(
    name: str, source: str | None = None, target: str | None = None
) -> tuple[str | None, str | None]:
    """Returns the kinds of memory that a copy reads and writes: pageable, pinned, device ...; None
    where unknown.
    """
    arrow = _ARROW_PATTERN.search(name)
    if arrow:
        return arrow.group(1).lower(), arrow.group(2).lower()
    return _parse_memory_kind(source), _parse_memory_kind(target)


def _parse_memory_kind(argument: str | None) -> str | None:
    if argument is None:
        return None
    return _CUPTI_MEMORY.get(argument, argument.lower() if not argument.isdigit() else None)


CLOCK_JITTER_NS = 1_000
"""Times of one stream agree about their order this well: what overlaps by less follows."""

# Of the window: work launched this early can be queued behind work from before
BEGINNING_SHARE = 0.05
