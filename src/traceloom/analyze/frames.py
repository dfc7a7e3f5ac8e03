"""Python frames: whose code they are, and which of them hold stretches of host time."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest, host_segments
from traceloom.analyze.intervals import coverage, union
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column, lookup
from traceloom.model.frames import as_declared

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
    is_python = lookup(column(trace, "category") == cat.CATEGORIES.index(cat.PYTHON), tree.row)
    own = np.zeros(len(words.names), dtype=np.bool_)
    functions = np.flatnonzero(words.matching(_PLACE) & ~words.matching(RECORDER))
    own[functions] = [is_users(name) for name in words.names.gather(functions)]
    code = lookup(words.code, tree.row)
    around = tree.nearest_or_self(is_python & lookup(own, code))
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
        tables.append(named.group_by("frame", "inside").agg(pl.col("ns").sum()).pipe(as_declared, HELD))
    return tables
