"""A small graph of a made-up job, with every kind of node and edge and odd values in every column."""

from __future__ import annotations

from typing import Any

import polars as pl

from traceloom.graph.graph import GRAPH_SCHEMAS, Graph
from traceloom.trace.notice import Notice

_EPOCH = 1_700_000_000_123_456_789
_HARD_NAME = 'odd "name" \\ \n ∑ 名前 \x7f'


def small_graph(ranks: int = 2) -> Graph:
    """Ranks that copy, compute, reduce together, send to each other (two at a time) and wait.

    Args:
        ranks: 1 for a lone rank, whose collective awaits an assumed arrival; more meet in a rendezvous.
    """
    rows = _GraphRows()
    meetings: dict[str, list[int]] = {"reduce": [], "pair": []}
    for rank in range(ranks):
        rows.rank(rank, meetings)
    if ranks > 1:
        rows.meet(meetings["reduce"], "all_reduce 7")
        for first, second in zip(meetings["pair"][::2], meetings["pair"][1::2], strict=False):
            rows.edge(first, second, "rendezvous", "inferred", from_end=False)
    else:
        arrival = rows.node("arrival", "others", 0, None, 900, 0)
        rows.edge(arrival, meetings["reduce"][0], "rendezvous", "assumed", to_end=True)
    return rows.graph(ranks)


class _GraphRows:
    """Rows of all frames; nodes are numbered as they come."""

    def __init__(self) -> None:
        self.frames: dict[str, list[dict[str, Any]]] = {name: [] for name in GRAPH_SCHEMAS}

    def node(
        self,
        kind: str,
        name: str,
        rank: int,
        lane: int | None,
        start: int,
        duration: int,
        **more: Any,
    ) -> int:
        nodes = self.frames["nodes"]
        row = {
            "kind": kind,
            "name": name,
            "rank": rank,
            "lane": lane,
            "start_ns": start,
            "duration_ns": duration,
        }
        nodes.append({"node": len(nodes), "work_ns": duration, "residual_ns": 0} | row | more)
        return len(nodes) - 1

    def edge(
        self, source: int, target: int, kind: str, evidence: str = "measured", **more: Any
    ) -> None:
        row = {"source": source, "target": target, "kind": kind, "evidence": evidence}
        ends = {"from_end": True, "to_end": False, "delay_ns": 0, "residual_ns": 0}
        self.frames["edges"].append(row | ends | more)

    def lanes(self, rank: int) -> tuple[int, int, int, int]:
        first = len(self.frames["lanes"])
        host = {
            "rank": rank,
            "kind": "host",
            "process": f"{4000 + rank}",
            "device": None,
            "stream": None,
        }
        device = {"rank": rank, "kind": "device", "process": "0", "thread": None, "device": rank}
        rows = [
            host | {"thread": "4001", "name": "thread 4001 (python)"},
            host | {"thread": "autograd 1", "name": "autograd"},
            device | {"stream": 7, "name": "stream 7"},
            device | {"stream": 20, "name": "stream 20"},
        ]
        self.frames["lanes"] += [row | {"lane": first + at} for at, row in enumerate(rows)]
        return first, first + 1, first + 2, first + 3

    def rank(self, rank: int, meetings: dict[str, list[int]]) -> None:
        main, autograd, compute, network = self.lanes(rank)
        late = 10 * rank
        origin = self.node("origin", "", rank, None, 0, 0)
        op = {"category": "op", "event": 0, "op": 0, "host_op": 5, "step": 1}
        call = {"category": "runtime", "op": 0, "host_op": 5, "step": 1}
        a = self.node("host", "aten::mm", rank, main, late, 100, **op)
        b = self.node(
            "launch",
            "cudaLaunchKernel",
            rank,
            main,
            100 + late,
            20,
            event=1,
            correlation=11,
            **call,
        )
        c = self.node("think", "", rank, main, 120 + late, 13)
        d = self.node(
            "launch", "cudaMemcpyAsync", rank, main, 133 + late, 7, event=2, correlation=12, **call
        )
        gpu = {"op": 0, "host_op": 5, "step": 1}
        k = self.node(
            "kernel",
            _HARD_NAME,
            rank,
            compute,
            125 + late,
            500,
            event=3,
            correlation=11,
            category="kernel",
            **gpu,
        )
        m = self.node(
            "copy",
            "Memcpy HtoD",
            rank,
            compute,
            625 + late,
            50,
            event=4,
            correlation=12,
            category="copy",
            bytes=4096,
            **gpu,
        )
        z = self.node(
            "fill",
            "Memset",
            rank,
            compute,
            675 + late,
            1,
            event=5,
            category="fill",
            bytes=2**40 + rank,
        )
        r = self.node(
            "collective",
            "ncclDevKernel_AllReduce",
            rank,
            network,
            700 + late,
            300 - late,
            event=6,
            category="kernel",
            bytes=1 << 20,
        )
        s = self.node(
            "receive" if rank % 2 else "send",
            "ncclDevKernel_SendRecv",
            rank,
            network,
            1000,
            90,
            event=7,
            category="kernel",
            bytes=77,
        )
        w = self.node("wait", "wait", rank, autograd, late, 130)
        e = self.node(
            "block",
            "cudaStreamSynchronize",
            rank,
            main,
            140 + late,
            970 - late,
            event=8,
            category="runtime",
            work_ns=4,
            residual_ns=3,
        )
        meetings["reduce"].append(r)
        meetings["pair"].append(s)
        self.edge(origin, a, "origin", "assumed")
        self.edge(origin, w, "origin", "assumed")
        self.edge(a, b, "call")
        self.edge(b, c, "thread")
        self.edge(c, d, "thread")
        self.edge(d, e, "call")
        self.edge(b, k, "launch", "correlated", from_end=False, delay_ns=20, residual_ns=5)
        self.edge(d, m, "launch", "correlated", from_end=False, delay_ns=-9)
        self.edge(k, m, "stream")
        self.edge(m, z, "stream")
        self.edge(
            k, m, "stream", "inferred", from_end=False
        )  # a second edge between the same nodes
        self.edge(z, r, "wait", "inferred", delay_ns=2)
        self.edge(r, s, "stream")
        self.edge(s, e, "synchronize", "inferred", to_end=True, delay_ns=-3, residual_ns=1)
        self.edge(a, w, "cross-thread", "inferred", from_end=True, to_end=True)
        self._sides(rank, r, s, m, z)

    def _sides(self, rank: int, reduce: int, pair: int, copy: int, fill: int) -> None:
        group = {
            "group": "default_pg",
            "group_size": 2,
            "ranks": [0, 1],
            "sequence": 7,
            "element_type": "bfloat16",
        }
        both: dict[str, Any] = {
            "in_bytes": 1 << 20,
            "out_bytes": 1 << 20,
            "peer": None,
            "tag": None,
            "in_splits": None,
            "out_splits": [],
        }
        peer = {
            "instance": None,
            "kind": "receive" if rank % 2 else "send",
            "peer": rank ^ 1,
            "tag": 2**40,
            "in_splits": [1, 2**40],
        }
        self.frames["communication"] += [
            {"node": reduce, "instance": 0, "kind": "all_reduce"} | group | both,
            {"node": pair, "sequence": None, "ranks": None, "group": "a,b", "group_size": None}
            | peer,
        ]
        self.frames["transfers"] += [
            {"node": copy, "kind": "HtoD", "source_memory": "Pageable", "target_memory": "Device"},
            {"node": fill, "kind": "fill", "source_memory": None, "target_memory": "Device"},
        ]
        self.frames["host_ops"] += [
            {
                "rank": rank,
                "id": 5,
                "name": "aten::mm",
                "parent": 3,
                "record_function_id": 9,
                "thread": 1,
                "schema": "aten::mm(Tensor self)",
            }
            | {
                "inputs": '[[1,2,0,4,4,"cuda:0"],null]',
                "input_shapes": "[[2,2]]",
                "input_types": '["Tensor(float)"]',
            }
            | {
                "outputs": "[]",
                "output_shapes": "[]",
                "output_types": "[]",
                "attributes": '{"kernel_file":"","x":NaN}',
            },
            {"rank": rank, "id": 3, "name": "root"},
        ]
        self.frames["ranks"].append(
            {
                "rank": rank,
                "host": "node0",
                "process": 4000 + rank,
                "device_trace": f"r{rank}.json",
                "host_trace": None,
            }
            | {
                "window_start_ns": 0,
                "window_end_ns": 1110,
                "clock_offset_ns": -rank,
                "clock_drift": 1e-7 / 3,
                "clock_residual_ns": None,
            }
        )
        self.frames["coverage"] += [
            {
                "rank": rank,
                "subject": "host-ops",
                "outcome": "matched",
                "count": 1,
                "time_ns": None,
            },
            {
                "rank": rank,
                "subject": "gpu-work",
                "outcome": "attached",
                "count": 2,
                "time_ns": 550,
            },
        ]

    def meet(self, parts: list[int], name: str) -> None:
        begin = max(self.frames["nodes"][part]["start_ns"] for part in parts)
        meeting = self.node("rendezvous", name, 0, None, begin, 0)
        for part in parts:
            self.edge(part, meeting, "rendezvous", from_end=False)
            self.edge(meeting, part, "rendezvous", to_end=True, delay_ns=200)

    def graph(self, ranks: int) -> Graph:
        delays = [
            {
                "kind": "launch",
                "place": "cuda:0 cudaLaunchKernel",
                "count": 2 * ranks,
                "median_ns": 20,
            },
            {"kind": "synchronize", "place": "", "count": ranks, "median_ns": -3},
        ]
        self.frames["delays"] += delays
        frames = {
            name: pl.DataFrame(rows, schema=GRAPH_SCHEMAS[name])
            for name, rows in self.frames.items()
        }
        notices = (
            Notice("clocks-corrected", "info", "made up", 2, 1, "r1.json"),
            Notice("no-steps", "warning", "none"),
        )
        return Graph(
            **frames,
            name="small",
            epoch_ns=_EPOCH,
            world_size=8,
            stage="post-transformed",
            notices=notices,
        )
