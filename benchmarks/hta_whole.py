"""What HolisticTraceAnalysis does in a whole process: load, then analyses. Run by read.py and
reach.py in the virtual environment that they make.

    python hta_whole.py FILE ... [--whole | --all]

`--whole`: its temporal, idle, kernel, overlap, queue, launch and memory-bandwidth analyses;
`--all`: those, and what it has of the other questions that a report answers (annotations, delays of
operators, stragglers, frequent sequences of kernels, the critical path of one step).
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

WHOLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("get_temporal_breakdown", {"visualize": False}),
    ("get_idle_time_breakdown", {"visualize": False}),
    ("get_gpu_kernel_breakdown", {"visualize": False}),
    ("get_comm_comp_overlap", {"visualize": False}),
    ("get_queue_length_summary", {}),
    ("get_cuda_kernel_launch_stats", {"visualize": False}),
    ("get_memory_bw_summary", {}),
)
OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("get_gpu_user_annotation_breakdown", {"visualize": False}),
    ("get_gpu_kernels_with_user_annotations", {"rank": 0}),
    ("get_aten_op_kernels_and_delay", {}),
    ("get_potential_stragglers", {}),
    (
        "get_frequent_cuda_kernel_sequences",
        {"operator_name": "aten::", "output_dir": tempfile.gettempdir()},
    ),
    ("critical_path_analysis", {"rank": 0, "annotation": "ProfilerStep", "instance_id": 0}),
)


def failure(analysis: Callable[[], object], name: str) -> list[str]:
    """What went wrong in an analysis: a result of the comparison too."""
    try:
        analysis()
    except Exception as error:  # noqa: BLE001
        return [f"{name}: {type(error).__name__}"]
    return []


def main() -> None:
    warnings.simplefilter("ignore")
    files = [word for word in sys.argv[1:] if not word.startswith("--")]
    analyses = (*WHOLE, *OTHERS) if "--all" in sys.argv else WHOLE if "--whole" in sys.argv else ()
    started = time.perf_counter()
    from hta.trace_analysis import TraceAnalysis

    imported, cpu = time.perf_counter(), time.process_time()
    failed: list[str] = []
    took: dict[str, float] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        analysis = TraceAnalysis(trace_files=dict(enumerate(files)))
        loaded, loaded_cpu = time.perf_counter(), time.process_time()
        for name, options in analyses:
            began = time.process_time()
            failed += failure(partial(getattr(analysis, name), **options), name)
            took[name] = round(time.process_time() - began, 3)
    times = {
        "import_s": imported - started,
        "load_s": loaded - imported,
        "load_cpu_s": loaded_cpu - cpu,
    }
    print(json.dumps({**times, "failed": failed, "cpu_s": took}))


if __name__ == "__main__":
    main()
