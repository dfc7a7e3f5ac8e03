"""Chakra files: nodes per second on one core, and memory, as files grow.

    python benchmarks/chakra.py [--nodes 10000 100000 1000000]

A made graph of one rank with the attributes of a real one (an op, its launch, its kernel, a gap;
every 50th a copy, every 200th a collective; the host's ops with their tensors) goes out as `.et`,
comes back as a graph, is read and written as messages, and becomes JSON lines. Each step is a
process of its own with one thread, so that its peak memory is its own; `streamed` reads message by
message and keeps none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

from traceloom.formats.chakra.files import EtReader
from traceloom.graph import graph as graph_store
from traceloom.graph.graph import GRAPH_SCHEMAS, Graph
from traceloom.workload.chakra import convert
from traceloom.workload.chakra.graph_read import read_graph, write_rank

STEPS = ("write graph", "read graph", "streamed", "messages", "json lines")
PERIOD = 4  # nodes per op: its self time, its launch, its kernel, the gap behind it


def made(count: int) -> Graph:
    """A graph of about so many nodes."""
    ops = count // PERIOD
    op = np.repeat(np.arange(ops), PERIOD)
    part = np.tile(np.arange(PERIOD), ops)
    node = np.arange(ops * PERIOD)
    device = part == 2
    kinds = np.array(["host", "launch", "kernel", "think"], dtype=object)[part]
    kinds[device & (op % 50 == 0)] = "copy"
    kinds[device & (op % 200 == 100)] = "collective"
    names = np.array([f"kernel_{n}<float, {n % 7}>" for n in range(300)], dtype=object)[
        op * 7 % 300
    ]
    start = op * 20_000 + np.array([0, 4_000, 7_000, 9_000])[part]
    duration = np.array([4_000, 3_000, 11_000, 11_000])[part] + op % 900
    duration[part != 2] -= op[part != 2] % 900
    kernel = {"correlation": pl.when(pl.Series(np.isin(part, [1, 2]))).then(pl.Series(op))}
    nodes = pl.DataFrame(
        {"node": node, "kind": kinds, "start_ns": start, "duration_ns": duration}
    ).with_columns(
        name=pl.when(pl.Series(device))
        .then(pl.Series(names))
        .otherwise(pl.Series(np.array(["aten::mm", "cudaLaunchKernel", "", ""])[part])),
        category=pl.Series(np.array(["op", "runtime", "kernel", None], dtype=object)[part]),
        rank=pl.lit(0),
        lane=pl.Series(device.astype(np.int64)),
        work_ns="duration_ns",
        residual_ns=pl.lit(0),
        event=pl.when(pl.Series(part != 3)).then(pl.Series(node)),
        op=pl.Series(op),
        host_op=pl.Series(op + 2),
        step=pl.Series(op // 1000),
        bytes=pl.when(pl.col("kind").is_in(["copy", "collective"])).then(1 << 20),
        **kernel,
    )
    thread = pl.DataFrame(
        {"source": node[:-1][part[:-1] != 2], "part": part[:-1][part[:-1] != 2]}
    ).with_columns(
        target=pl.col("source") + pl.when(pl.col("part") == 1).then(2).otherwise(1),
        kind=pl.lit("thread"),
        from_end=pl.lit(value=True),
    )
    launch = pl.DataFrame({"source": node[part == 1], "target": node[part == 2]}).with_columns(
        kind=pl.lit("launch"), from_end=pl.lit(value=False)
    )
    stream = pl.DataFrame(
        {"source": node[part == 2][:-1], "target": node[part == 2][1:]}
    ).with_columns(kind=pl.lit("stream"), from_end=pl.lit(value=True))
    edges = pl.concat([thread.drop("part").select(launch.columns), launch, stream]).with_columns(
        evidence=pl.lit("measured"),
        to_end=pl.lit(value=False),
        delay_ns=pl.lit(0),
        residual_ns=pl.lit(0),
    )
    lanes = [
        {"lane": 0, "rank": 0, "kind": "host", "name": "thread 1"},
        {"lane": 1, "rank": 0, "kind": "device", "device": 0, "stream": 7},
    ]
    collective = nodes.filter(kind="collective").select(
        "node", kind=pl.lit("all_reduce"), group=pl.lit("0"), in_bytes="bytes"
    )
    host_ops = pl.DataFrame(
        {"id": np.arange(ops) + 2, "record_function_id": np.arange(ops) + 9}
    ).with_columns(
        rank=pl.lit(0),
        name=pl.lit("aten::mm"),
        parent=pl.lit(1),
        thread=pl.lit(1),
        scope=pl.lit(0),
        schema=pl.lit("aten::mm(Tensor self, Tensor mat2) -> Tensor"),
        inputs=pl.lit('[[12,13,0,65536,4,"cuda:0"],[14,15,0,65536,4,"cuda:0"]]'),
        input_shapes=pl.lit("[[256,256],[256,256]]"),
        input_types=pl.lit('["Tensor(float)","Tensor(float)"]'),
        outputs=pl.lit('[[16,17,0,65536,4,"cuda:0"]]'),
        output_shapes=pl.lit("[[256,256]]"),
        output_types=pl.lit('["Tensor(float)"]'),
    )
    frames = {
        "nodes": nodes,
        "edges": edges,
        "lanes": pl.DataFrame(lanes),
        "communication": collective,
        "host_ops": host_ops,
    }
    return Graph(**{name: _whole(frame, name) for name, frame in frames.items()}, name="made")


def _whole(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    schema = GRAPH_SCHEMAS[name]
    missing = [pl.lit(None).alias(column) for column in schema if column not in frame.columns]
    return frame.with_columns(missing).select(schema.names()).cast(schema)


def step(name: str, folder: Path) -> tuple[float, float, float]:
    """Do one step; CPU seconds, wall seconds, peak memory in MB."""
    et = folder / "made.et"
    graph = graph_store.load(folder / "made.graph") if name == "write graph" else None

    def messages(target: Path) -> None:
        with EtReader(et) as reader:
            convert.write_messages(target, reader.metadata, reader, force=True)

    def streamed() -> None:
        with EtReader(et) as reader:
            for _ in reader:
                pass

    steps: dict[str, Callable[[], object]] = {
        "write graph": lambda: write_rank(graph, et, force=True),
        "read graph": lambda: read_graph([et]),
        "streamed": streamed,
        "messages": lambda: messages(folder / "again.et"),
        "json lines": lambda: messages(folder / "made.jsonl"),
    }
    cpu, wall = time.process_time(), time.perf_counter()
    steps[name]()
    took = time.process_time() - cpu, time.perf_counter() - wall
    return *took, _peak_mb()


def _peak_mb() -> float:
    """Peak memory of this process.

    Not `ru_maxrss`: a process begins with that of the one that started it.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(
        int(line.split()[1]) / 1e3 for line in status.splitlines() if line.startswith("VmHWM")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(step(args.step, args.folder)))
        return
    print(
        f"{'step':12} {'nodes':>10} {'nodes/s of CPU':>15} {'wall s':>8} {'peak MB':>8} {'bytes/node':>11}"
    )
    for count in args.nodes:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            graph = made(count)
            graph_store.save(graph, folder / "made.graph")
            nodes = graph.nodes.height
            del graph
            for name in STEPS:
                command = [sys.executable, __file__, "--step", name, "--folder", place]
                environment = os.environ | {"POLARS_MAX_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                done = subprocess.run(
                    command, check=True, capture_output=True, text=True, env=environment
                )
                cpu, wall, peak = json.loads(done.stdout)
                size = (folder / "made.et").stat().st_size / nodes
                print(
                    f"{name:12} {nodes:10,} {nodes / cpu:15,.0f} {wall:8.2f} {peak:8.0f} {size:11.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
