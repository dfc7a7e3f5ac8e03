"""Every analysis of a trace by its name, for laws that hold of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traceloom import analyze
from traceloom.analyze.memory_answers import explain_allocations
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

Analysis = Callable[[Trace], Any]
PROPORTIONAL: dict[str, Analysis] = {
    name: getattr(analyze, name)
    for name in (
        "gpu_time",
        "kernels",
        "operators",
        "kernel_kinds",
        "kernel_shapes",
        "work_per_step",
        "step_times",
        "modules",
        "flame",
        "threads",
        "host",
        "graph_launches",
        "blocking_calls",
        "communication",
        "data_loading",
        "copies",
    )
}
"""Those in which every time is so many times as long where the clock goes so many times as fast."""
ALL: dict[str, Analysis] = (
    PROPORTIONAL
    | {
        name: getattr(analyze, name)
        for name in (
            "idle",
            "launches",
            "patterns",
            "quality",
            "anti_patterns",
            "compiled",
            "inference",
            "roofline",
            "collectives",
        )
    }
    | {
        "answer": lambda trace: analyze.answer(Session((trace,), "made")),
        "allocations": explain_allocations,
    }
)


def parts_of(result: Any) -> dict[str, Any]:
    """The frames and numbers of a result by name."""
    return {name: value for name, value in vars(result).items() if not name.startswith("_")}
