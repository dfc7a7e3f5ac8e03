"""One small, whole input of every format that Traceloom reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from support.jobs import Recipe, training_job
from support.small_graph import small_graph
from support.snapshots import SnapshotBuilder
from support.workload import collective, node, receive, send, write_set
from traceloom.graph import graph
from traceloom.testing.host_trace_builder import HostTraceBuilder
from traceloom.testing.trace_builder import TraceBuilder

_FRAMES = ((("train.py", 7, "step"),), (("model.py", 3, "forward"), ("train.py", 7, "step")))


def trace(rank: int | None = 0, steps: int = 2) -> TraceBuilder:
    """A device trace with steps, launches, copies, memory and a counter."""
    made = TraceBuilder(rank=rank, world_size=2)
    made.metadata(pg_config=[{"pg_name": "0", "ranks": [0, 1]}])
    for number in range(steps):
        at = number * 100.0
        made.step(number, at, 90).op(
            "aten::mm", at + 1, 20.5, shapes=[[number + 1, 3]], external_id=number + 1
        )
        made.launch("cudaLaunchKernel", at + 2, 1, correlation=3 * number + 1)
        made.kernel(f"gemm{number}", at + 4, 30.25, correlation=3 * number + 1)
        made.launch("cudaMemcpyAsync", at + 30, 1, correlation=3 * number + 2)
        made.copy(
            "Memcpy HtoD (Pageable -> Device)", at + 40, 3, bytes=512, correlation=3 * number + 2
        )
        made.python(f"train.py({number + 1}): step", at, 80).allocation(
            at + 3, 1024, address=99, total_allocated=1024
        )
        made.counter("util", at, 0.5).thread_name(2, "loader").instant("Record Window End", at)
    return made


def _kineto(home: Path) -> Path:
    return _written(home / "trace.json", trace().text())


def _host(home: Path) -> Path:
    made = HostTraceBuilder()
    for number in range(6):
        made.op(
            f"aten::op{number}",
            inputs=[([number, 6, 0, 64, 4, "cuda:0"], [number, 3], "Tensor(float)")],
        )
    _written(home / "pair" / "rank0.kineto.json", trace().text())
    _written(home / "pair" / "rank0.host.json", made.text())
    return home / "pair"


def _et(home: Path) -> Path:
    ranks = [
        [node(0, us=5), collective(1, deps=[0]), send(2, 1, deps=[1])],
        [node(0, us=7), collective(1, deps=[0]), receive(2, 0, deps=[1])],
    ]
    return write_set(home / "workload", *ranks, groups={"0": [0, 1]})


def _snapshot(home: Path) -> Path:
    made = SnapshotBuilder()
    blocks = [made.alloc(512 * (number + 1), *_FRAMES[number % 2]) for number in range(6)]
    made.free(blocks[1]).free(blocks[3], completed=False).out_of_memory(
        1 << 30, 1 << 20, *_FRAMES[0]
    )
    return made.write(home / "snapshot.pickle")


def _timeline(home: Path) -> Path:
    rows = [
        [-1, 1, 4096, 0],
        [1_000_000, 2, 512, 3],
        [2_000_000, 2, 1024, 4],
        [3_000_000, 4, -512, 3],
    ]
    return _written(home / "memory.raw.json", json.dumps(rows))


def _capture(home: Path) -> Path:
    run = training_job(Recipe(ranks=2, steps=2, layers=1)).run()
    return run.write(home / "run", host=True, ending=".json")


def _graph(home: Path) -> Path:
    graph.save(small_graph(), home / "job.graph")
    return home / "job.graph"


def _directory(home: Path) -> Path:
    folder = home / "folder"
    _written(folder / "notes.json", '{"mine": 1}')
    for rank in range(2):
        trace(rank).write(folder / f"rank{rank}.json.gz")
    return folder


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


FORMATS: dict[str, Callable[[Path], Path]] = {
    "kineto": _kineto,
    "host": _host,
    "et": _et,
    "snapshot": _snapshot,
    "timeline": _timeline,
    "capture": _capture,
    "graph": _graph,
    "directory": _directory,
}
