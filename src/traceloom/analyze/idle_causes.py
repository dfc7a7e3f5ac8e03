"""What a GPU waits for while it is idle, in names and words; who only needs these loads no analysis."""

from __future__ import annotations

HOST_CAUSES = {
    "host_data_loading": "the host waited for or made the next batch",
    "host_garbage_collection": "Python collected garbage",
    "host_lock": "the host waited for a lock",
    "host_blocking_call": "the host stood in a call that waits",
    "host_launch": "the host was in runtime calls",
    "host_op": "the host worked inside framework operators",
    "host_python": "the host ran Python",
    "host_unobserved": "nothing is recorded of what the host did",
}
"""What the host was doing when a launch came late."""

LAUNCH_LATENCY = "launch_latency"
DEPENDENCY = "dependency"
KERNEL_TO_KERNEL = "kernel_to_kernel"
GRAPH_INTERNAL = "graph_internal"
UNEXPLAINED = "unexplained"
NOT_RECORDED = "launch_not_recorded"
CAUSES = {
    **HOST_CAUSES,
    LAUNCH_LATENCY: "the launch call ran, and the GPU took up the work",
    DEPENDENCY: "launched in time, but ordered after another stream",
    KERNEL_TO_KERNEL: "launched in time; the GPU's own pause between two pieces of work",
    GRAPH_INTERNAL: "between two pieces of work of one graph launch",
    UNEXPLAINED: "launched in time, not ordered after another stream, and late all the same",
    NOT_RECORDED: "the launch happened before the recording began, or was lost",
}
"""Every cause with its meaning in a few words."""
