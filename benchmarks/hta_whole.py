"""What HolisticTraceAnalysis does in a whole process: load, then its temporal, idle, kernel, overlap, queue, launch and
memory-bandwidth analyses. Run by read.py in the virtual environment that it makes.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial


def failure(analysis: Callable[[], object], name: str) -> list[str]:
    """What went wrong in an analysis: a result of the comparison too."""
    try:
        analysis()
    except Exception as error:  # noqa: BLE001
        return [f"{name}: {type(error).__name__}"]
    return []


def main() -> None:
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    from hta.trace_analysis import TraceAnalysis

    imported, cpu = time.perf_counter(), time.process_time()
    failed: list[str] = []
    files = [word for word in sys.argv[1:] if word != "--whole"]
    with contextlib.redirect_stdout(io.StringIO()):
        analysis = TraceAnalysis(trace_files=dict(enumerate(files)))
        loaded, loaded_cpu = time.perf_counter(), time.process_time()
        if "--whole" in sys.argv:
            for name, options in (
                ("get_temporal_breakdown", {"visualize": False}),
                ("get_idle_time_breakdown", {"visualize": False}),
                ("get_gpu_kernel_breakdown", {"visualize": False}),
                ("get_comm_comp_overlap", {"visualize": False}),
                ("get_queue_length_summary", {}),
                ("get_cuda_kernel_launch_stats", {"visualize": False}),
                ("get_memory_bw_summary", {}),
            ):
                failed += failure(partial(getattr(analysis, name), **options), name)
    took = {"import_s": imported - started, "load_s": loaded - imported, "load_cpu_s": loaded_cpu - cpu}
    print(json.dumps({**took, "failed": failed}))


if __name__ == "__main__":
    main()
