"""What a capture tells of its job; runs in a process of its own (`worker.py`), as it reads and analyses traces."""

from __future__ import annotations

from typing import Any

import msgspec

from traceloom.agent.flops import MATRIX_TYPES
from traceloom.agent.topline import TracedFacts

LEAST_MODELLED = 0.9  # share of the time of compute kernels whose FLOPs are counted, for them to be a reference


def of_capture(path: str) -> dict[str, Any]:
    """The fields of `JobFacts` from a capture or a trace: means over its processes and their whole steps.

    Raises:
        TraceloomError: It cannot be read.
    """
    import polars as pl

    from traceloom.analyze import copies, roofline
    from traceloom.analyze.classify import gpu_work
    from traceloom.read import load

    session = load(path)
    work = roofline(session)
    spread = {
        quantity: mean
        for quantity, mean in work.spread.group_by("quantity").agg(pl.col("mean").mean()).iter_rows()
        if mean is not None
    }
    whole = work.whole["roofline_fraction"].mean() if work.whole.height else None
    matrix = work.operators.filter(pl.col("matrix") & pl.col("arithmetic").cast(pl.String).is_in(MATRIX_TYPES))
    mix = matrix.group_by(pl.col("arithmetic").cast(pl.String)).agg(pl.col("flops").sum()).rows()
    copied = []
    compute_ns = 0
    for trace in session.traces:
        compute = gpu_work(trace).filter(pl.col("category").cast(pl.String) == "compute")
        compute_ns += int((compute["end_ns"] - compute["start_ns"]).sum())
        to_device = copies(trace).per_step.filter(pl.col("kind").cast(pl.String) == "HtoD")["mean_copied_bytes"]
        if to_device.len() and not to_device.null_count():
            copied.append(float(to_device.sum()))
    is_counted = (work.whole["modelled_ns"].sum() or 0) >= LEAST_MODELLED * compute_ns  # without a device: all of it
    facts = TracedFacts(
        flops_per_step=spread.get("flops") if is_counted else None,
        dtype_mix={kind: float(flops) for kind, flops in mix if flops},
        roofline_ratio=spread.get("roofline_fraction", whole),
        copied_bytes_per_step=sum(copied) / len(copied) if copied and len(copied) == len(session.traces) else None,
    )
    fields: dict[str, Any] = msgspec.to_builtins(facts)
    return fields
