"""Graphs evaluated, changed and bounded the slow way: one point, one edge, one nanosecond at a time.

Nothing here is taken from `retime` or `simulate`: what they answer is held against it. `random_job` makes small graphs
of the shape that linked jobs have, with times of a few hundred nanoseconds, so that time can be counted off.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import polars as pl

from traceloom.graph import graph as graph_schema
from traceloom.graph.graph import Graph

DEVICE = ("kernel", "copy", "fill")
HOST = ("host", "think", "launch", "block")
COMMUNICATION = ("collective", "send", "receive")
MEANING: dict[str, tuple[str, ...]] = {
    "kernels": ("kernel",),
    "copies": ("copy", "fill"),
    "gpu": DEVICE,
    "collectives": COMMUNICATION,
    "host": HOST,
    "ops": ("host",),
    "think": ("think",),
    "launches": ("launch",),
    "syncs": ("block",),
}
"""Which kinds of nodes each word of a change means, as docs/concepts/what-if.md has it."""


def longest(
    starts: list[int], works: list[int], links: Iterable[tuple[int, int, int]]
) -> list[int]:
    """Times of points 2i and 2i + 1 of nodes with these works: each when the last of what it waits for has passed.

    Args:
        starts: When a node starts that waits for nothing.
        works: From the start of each node to its end, at least.
        links: Point that is awaited, point that waits, and time between them.
    """
    follow: list[list[tuple[int, int]]] = [[] for _ in range(2 * len(works))]
    waits = [0] * len(follow)
    held: list[int | None] = [None] * len(follow)
    for source, target, gap in [
        *links,
        *((2 * node, 2 * node + 1, work) for node, work in enumerate(works)),
    ]:
        follow[source].append((target, gap))
        waits[target] += 1
    ready = deque(point for point, count in enumerate(waits) if not count)
    times = [0] * len(follow)
    while ready:
        point = ready.popleft()
        before = held[point]
        times[point] = starts[point // 2] if before is None else before
        for target, gap in follow[point]:
            already = held[target]
            reached = times[point] + gap
            held[target] = reached if already is None else max(already, reached)
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    assert not any(waits), "points wait for each other"
    return times


class PlainScenario:
    """A graph with changes, as lists; None as a delay stands for an edge that holds no longer."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes.to_dicts()
        self.edges = graph.edges.to_dicts()
        self.measured = [row["work_ns"] + row["residual_ns"] for row in self.nodes]
        self.work = list(self.measured)
        self.delay: list[int | None] = [row["delay_ns"] + row["residual_ns"] for row in self.edges]
        self.kind_of_communication = dict(graph.communication.select("node", "kind").iter_rows())

    def chosen(
        self, target: str, names: Callable[[str], bool] | None = None, ranks: tuple[int, ...] = ()
    ) -> set[int]:
        """The nodes that the words of a change mean."""
        return {
            row["node"]
            for row in self.nodes
            if row["kind"] in MEANING[target]
            and (names is None or names(row["name"] or ""))
            and (not ranks or row["rank"] in ranks)
        }

    def times(self) -> list[int]:
        """When everything happens."""
        links = []
        for edge, gap in zip(self.edges, self.delay, strict=True):
            if gap is None:
                continue
            before, now = self.measured[edge["source"]], self.work[edge["source"]]
            delay = round(gap * (now / before)) if self.part_of_work(edge) and before > 0 else gap
            links.append(
                (2 * edge["source"] + edge["from_end"], 2 * edge["target"] + edge["to_end"], delay)
            )
        return longest([row["start_ns"] for row in self.nodes], self.work, links)

    @staticmethod
    def part_of_work(edge: dict[str, Any]) -> bool:
        """Whether the target starts after a part of the source's work: work that overlaps the one before it."""
        return edge["kind"] == "stream" and not edge["from_end"] and not edge["to_end"]

    def span(self) -> int:
        times = self.times()
        return max(times) - min(times)

    # -- what the changes do -----------------------------------------------------------------------------------

    def scale(self, chosen: set[int], factor: float) -> None:
        for node in chosen:
            self.work[node] = round(self.work[node] * factor)
        for at, edge in enumerate(self.edges):
            delay = self.delay[at]
            if (
                edge["kind"] == "rendezvous"
                and edge["to_end"]
                and edge["target"] in chosen
                and delay is not None
            ):
                self.delay[at] = round(delay * factor)

    def drop(self, chosen: set[int]) -> None:
        for at, edge in enumerate(self.edges):
            if edge["kind"] == "synchronize" and edge["target"] in chosen:
                self.delay[at] = None

    def return_at_once(self, chosen: set[int]) -> None:
        for at, edge in enumerate(self.edges):
            waits = self.nodes[edge["target"]]["kind"] == "block"
            if edge["kind"] == "synchronize" and edge["source"] in chosen and waits:
                self.delay[at] = None

    def no_idle(self, chosen: set[int], ranks: tuple[int, ...] = ()) -> None:
        for node in chosen:
            self.work[node] = 0
        for at, edge in enumerate(self.edges):
            of_rank = not ranks or self.nodes[edge["target"]]["rank"] in ranks
            if edge["kind"] in ("launch", "synchronize", "stream", "queue") and of_rank:
                self._no_pause(at, 0)

    def fuse(self, chosen: set[int]) -> None:
        inner = set()
        for at, edge in enumerate(self.edges):
            if edge["kind"] == "stream" and edge["source"] in chosen and edge["target"] in chosen:
                inner.add(edge["target"])
                self._no_pause(at, 0)
        for edge in self.edges:
            if (
                edge["kind"] == "launch"
                and edge["target"] in inner
                and self._is(edge["source"], "launch")
            ):
                self.work[edge["source"]] = 0

    def submit_once(self, chosen: set[int]) -> None:
        calls: dict[Any, list[int]] = {}
        for at, edge in enumerate(self.edges):
            if edge["kind"] == "launch" and edge["target"] in chosen:
                call = self.nodes[edge["source"]]
                calls.setdefault((call["rank"], call["step"]), []).append(edge["source"])
            if edge["kind"] == "stream" and edge["source"] in chosen and edge["target"] in chosen:
                self._no_pause(at, 1_000)
        firsts = {
            min(some, key=lambda node: (self.nodes[node]["start_ns"], node))
            for some in calls.values()
        }
        others = {node for some in calls.values() for node in some} - firsts

        for node in others:
            self.work[node] = 0
        operators = {node for node, row in enumerate(self.nodes) if row["category"] == "op"}
        for parts in self._by(operators, "rank", "event").values():
            rows = [self.nodes[part] for part in parts]
            span = range(
                min(row["start_ns"] for row in rows),
                max(row["start_ns"] + row["duration_ns"] for row in rows),
            )
            inside = {
                node
                for node in firsts | others
                if self.nodes[node]["start_ns"] in span
                and self.nodes[node]["lane"] == rows[0]["lane"]
            }
            if inside and not inside & firsts:
                for part in parts:
                    self.work[part] = 0

    def balance(self, chosen: set[int]) -> None:
        for group in self._by(chosen, "step", "name").values():
            by_rank = self._by(group, "rank")
            took = {rank: sum(self.work[node] for node in some) for rank, some in by_rank.items()}
            mean = sum(took.values()) / len(took)
            for rank, some in by_rank.items():
                for node in some:
                    self.work[node] = round(self.work[node] * (mean / max(took[rank], 1)))

    def not_late(self, late: tuple[int, ...]) -> None:
        ranks = {row["rank"] for row in self.nodes} - {None}
        others = sorted(ranks - set(late))
        working = {
            row["node"] for row in self.nodes if row["kind"] in ("host", "think", "launch", *DEVICE)
        }
        before = dict(enumerate(self.work))
        for rank in ranks & set(late):
            sides: dict[bool, list[tuple[float, float, int, list[int]]]] = {True: [], False: []}
            net = {True: 0.0, False: 0.0}
            for (kind, _), alike in self._by(working, "kind", "name").items():
                side, steps = kind in DEVICE, []
                for group in self._by(alike, "step").values():
                    by_rank = self._by(group, "rank")
                    took = {(r,): 0 for r in ranks}
                    took |= {r: sum(before[node] for node in some) for r, some in by_rank.items()}
                    more = took[rank,] - median(took[other,] for other in others)
                    steps.append((more, max(more, 0), took[rank,], by_rank.get((rank,), [])))
                total, over = sum(step[0] for step in steps), sum(step[1] for step in steps)
                net[side] += total
                share = max(total, 0) / over if over else 0.0
                sides[side] += [(more, up * share, own, nodes) for more, up, own, nodes in steps]
            for side, steps in sides.items():
                less = sum(step[1] for step in steps)
                share = min(max(net[side] / less, 0.0), 1.0) if less else 0.0
                for _, up, own, nodes in steps:
                    for node in nodes:
                        self.work[node] = round(before[node] * (1 - up * share / max(own, 1)))
        begins = {
            rank: min(
                row["start_ns"]
                for row in self.nodes
                if row["rank"] == rank and row["kind"] in HOST[:3]
            )
            for rank in ranks
        }
        for at, edge in enumerate(self.edges):
            rank, delay = self.nodes[edge["source"]]["rank"], self.delay[at]
            if edge["kind"] == "origin" and rank in late and delay is not None:
                later = max(round(begins[rank] - median(begins[other] for other in others)), 0)
                first = (
                    min(row["start_ns"] for row in self.nodes)
                    - self.nodes[edge["source"]]["start_ns"]
                )
                self.delay[at] = max(
                    delay - later, min(delay, first)
                )  # never before the job begins

    def load_beside(self, chosen: set[int], workers: float) -> None:
        for of_rank in self._by(chosen, "rank").values():
            steps = sorted(
                self._by(of_rank, "step").values(),
                key=lambda some: min(self.nodes[node]["start_ns"] for node in some),
            )
            begins = [min(self.nodes[node]["start_ns"] for node in some) for some in steps]
            works = [sum(self.work[node] for node in some) for some in steps]
            pace = sum(works) / len(works) / workers
            for node in of_rank:
                self.work[node] = 0
            taken = [max(some, key=lambda node: self.nodes[node]["start_ns"]) for some in steps]
            first = self.nodes[taken[0]]
            last = max(
                row["start_ns"] + row["duration_ns"]
                for row in self.nodes
                if (row["rank"], row["step"]) == (first["rank"], first["step"])
            )
            rest = [*begins, last][1] - begins[0] - works[0]
            self.work[taken[0]] = max(round(pace - rest), 0)
            for before, node in pairwise(taken):
                self.edges.append(
                    {
                        "source": before,
                        "target": node,
                        "kind": "wait",
                        "from_end": True,
                        "to_end": True,
                        "delay_ns": round(pace),
                        "residual_ns": 0,
                    }
                )
                self.delay.append(round(pace))

    def hide(self, chosen: set[int]) -> None:
        """Take work out of the order of its streams; there is no optimizer here."""
        computing: dict[Any, set[int]] = {}
        for row in self.nodes:
            if row["kind"] == "kernel" and row["node"] not in chosen:
                span = range(row["start_ns"], row["start_ns"] + row["duration_ns"])
                computing.setdefault(row["rank"], set()).update(span)
        added: list[tuple[dict[str, Any], int]] = []
        for at, edge in enumerate(self.edges):
            source, target, delay = (
                self.nodes[edge["source"]],
                self.nodes[edge["target"]],
                self.delay[at],
            )
            in_order = (
                edge["kind"] in ("stream", "wait", "occupancy")
                and edge["from_end"]
                and not edge["to_end"]
            )
            waits = target["node"] in chosen or target["kind"] in DEVICE
            if not in_order or delay is None or source["node"] not in chosen or not waits:
                continue
            span = range(source["start_ns"], source["start_ns"] + source["duration_ns"])
            self.delay[at] = delay + len(computing.get(source["rank"], set()) & set(span))
            self.edges[at] = edge | {"from_end": False, "kind": "wait"}
            if target["node"] in chosen:  # among themselves they stay in order
                transfers = [
                    gap
                    for other, gap in zip(self.edges, self.delay, strict=True)
                    if gap is not None
                    and other["kind"] == "rendezvous"
                    and other["to_end"]
                    and other["target"] == target["node"]
                ]
                own = max([self.work[target["node"]], *transfers])
                added.append((edge | {"from_end": True, "to_end": True, "kind": "wait"}, own))
        self.edges += [edge for edge, _ in added]
        self.delay += [own for _, own in added]

    # -- what bounds them --------------------------------------------------------------------------------------

    def busiest_lane(self) -> int:
        """The work left on the lane with most, of work that the next one overlaps the part before that."""
        left: dict[int, float] = {}
        lanes = self._by((row["node"] for row in self.nodes if row["lane"] is not None), "lane")
        for (lane,), some in lanes.items():
            order = sorted(some, key=lambda node: (self.nodes[node]["start_ns"], node))
            for node, following in zip(order, [*order[1:], None], strict=True):
                start, duration = self.nodes[node]["start_ns"], self.nodes[node]["duration_ns"]
                until = start + duration
                if following is not None:
                    until = min(until, self.nodes[following]["start_ns"])
                share = (until - start) / duration if duration else 1.0
                left[lane] = left.get(lane, 0.0) + max(self.work[node], 0) * share
        return int(max(left.values(), default=0))

    def touched(self) -> int:
        """Nanoseconds in which, anywhere, something went on that takes less now or is awaited no longer."""
        marked: set[int] = set()
        for row, work in zip(self.nodes, self.work, strict=True):
            if work < row["work_ns"] + row["residual_ns"]:
                marked |= set(range(row["start_ns"], row["start_ns"] + row["duration_ns"]))
        for edge, delay in zip(self.edges, self.delay, strict=True):
            target = self.nodes[edge["target"]]
            if delay is None:
                marked |= set(range(target["start_ns"], target["start_ns"] + target["duration_ns"]))
            elif (less := edge["delay_ns"] + edge["residual_ns"] - delay) > 0:
                end = target["start_ns"] + (target["duration_ns"] if edge["to_end"] else 0)
                marked |= set(range(end - less, end))
        return len(marked)

    # -- small steps -------------------------------------------------------------------------------------------

    def _is(self, node: int, kind: str) -> bool:
        return bool(self.nodes[node]["kind"] == kind)

    def _no_pause(self, at: int, most: int) -> None:
        delay = self.delay[at]
        if delay is not None and delay > 0 and not self.part_of_work(self.edges[at]):
            self.delay[at] = min(delay, most)

    def _by(self, nodes: Iterable[int], *columns: str) -> dict[Any, list[int]]:
        groups: dict[Any, list[int]] = {}
        for node in sorted(nodes):
            groups.setdefault(tuple(self.nodes[node][column] for column in columns), []).append(
                node
            )
        return groups


STEADY_NS = {"launch": 7, "stream": 3, "synchronize": 5, "wait": 2}


class RandomJob:
    """Ranks that load, launch, compute, copy, reduce and wait; every time drawn, all starts worked out from them.

    Args:
        seed: Of all that is drawn.
        ranks: How many; one to three where None.
        steady: Whether each kind of edge takes the same time everywhere, that of `STEADY_NS`, and no work overlaps
            the one before it.
    """

    def __init__(self, seed: int, ranks: int | None = None, *, steady: bool = False) -> None:
        self.random = random.Random(seed)
        self.steady = steady
        self.ranks = ranks or self.random.randint(1, 3)
        self.nodes: list[dict[str, Any]] = []
        self.edges: list[dict[str, Any]] = []
        self.gaps: list[int] = []
        self.communication: list[dict[str, Any]] = []
        self.lanes = 0
        steps = self.random.randint(1, 2)
        meetings: list[list[int]] = [[] for _ in range(steps)]
        for rank in range(self.ranks):
            self._rank(rank, steps, meetings)
        for number, parts in enumerate(meetings):
            self._meet(number, parts)

    def times(self, factors: Mapping[str, float] | None = None) -> list[int]:
        """When everything happens, where the work of some kinds of nodes takes so many times as long."""
        works = [round(row["took"] * (factors or {}).get(row["kind"], 1.0)) for row in self.nodes]
        links = [
            (2 * edge["source"] + edge["from_end"], 2 * edge["target"] + edge["to_end"], gap)
            for edge, gap in zip(self.edges, self.gaps, strict=True)
        ]
        return longest([0] * len(works), works, links)

    def graph(self) -> Graph:
        """As it would have been linked: times measured, delays and residuals for calibration to fill in."""
        times = self.times()
        frames: dict[str, list[dict[str, Any]]] = {
            "nodes": [],
            "edges": [],
            "lanes": [{"lane": lane} for lane in range(self.lanes)],
            "communication": self.communication,
        }
        for row in self.nodes:
            start, end = times[2 * row["node"]], times[2 * row["node"] + 1]
            measured = {
                "start_ns": start,
                "duration_ns": end - start,
                "work_ns": end - start,
                "residual_ns": 0,
            }
            frames["nodes"].append(
                {name: value for name, value in row.items() if name != "took"} | measured
            )
        for edge in self.edges:
            passed = (
                times[2 * edge["target"] + edge["to_end"]]
                - times[2 * edge["source"] + edge["from_end"]]
            )
            frames["edges"].append(edge | {"delay_ns": min(passed, 0), "residual_ns": 0})
        made = {
            name: pl.DataFrame(rows, schema=graph_schema.GRAPH_SCHEMAS[name])
            for name, rows in frames.items()
        }
        return Graph(made["nodes"], made["edges"], made["lanes"], made["communication"])

    def _rank(self, rank: int, steps: int, meetings: list[list[int]]) -> None:
        draw = self.random
        main, compute, side = self.lanes, self.lanes + 1, self.lanes + 2
        self.lanes += 3
        on = {"rank": rank, "step": 0}
        origin = self._node("origin", "", None, 0, **on)
        thread: list[int] = []
        queued: dict[int, list[int]] = {compute: [], side: []}
        op = 0
        for step in range(steps):
            on = {"rank": rank, "step": step}
            if draw.random() < 0.5:
                loads = draw.randint(5, 60)
                thread.append(
                    self._node(
                        "host",
                        "enumerate(DataLoader)#_Single.__next__",
                        main,
                        loads,
                        event=1_000 + step,
                        **on,
                    )
                )
            for _ in range(draw.randint(2, 5)):
                op += 1
                name = draw.choice(["aten::mm", "aten::add", "aten::copy_"])
                region = {"category": "op", "event": op, "op": op, **on}
                thread.append(self._node("host", name, main, draw.randint(0, 20), **region))
                stream = draw.choice([compute, compute, side])
                kind = "copy" if name == "aten::copy_" else "kernel"
                for _ in range(draw.randint(1, 2)):
                    call = self._node(
                        "launch", "cudaLaunchKernel", main, draw.randint(2, 8), op=op, **on
                    )
                    thread.append(call)
                    names = ["gemm", "add_kernel"] if kind == "kernel" else ["Memcpy HtoD"]
                    work = self._node(kind, draw.choice(names), stream, draw.randint(0, 50), **on)
                    self._edge("launch", call, work, draw.randint(3, 12), from_end=False)
                    self._queue(queued[stream], work)
                if op % 2:
                    thread.append(self._node("host", name, main, op, **region))
                if draw.random() < 0.4:
                    thread.append(self._node("think", "", main, draw.randint(0, 25), **on))
                if draw.random() < 0.35 and queued[stream]:
                    sync = draw.choice(["cudaStreamSynchronize", "cudaDeviceSynchronize"])
                    call = self._node("block", sync, main, draw.randint(1, 6), op=op, **on)
                    self._edge(
                        "synchronize", queued[stream][-1], call, draw.randint(1, 9), to_end=True
                    )
                    thread.append(call)
            if draw.random() < 0.5 and queued[compute] and queued[side]:
                late = self._node("kernel", "after_both", side, draw.randint(1, 20), **on)
                self._edge("wait", queued[compute][-1], late, draw.randint(0, 4))
                self._queue(queued[side], late)
            if self.ranks > 1:
                part = self._node("collective", "ncclDevKernel_AllReduce", side, 0, bytes=64, **on)
                self._queue(queued[side], part)
                self.communication.append({"node": part, "instance": step, "kind": "all_reduce"})
                meetings[step].append(part)
        self._edge("origin", origin, thread[0], draw.randint(0, 40), how="assumed")
        for before, after in pairwise(thread):
            self._edge("thread", before, after, 0)
        if draw.random() < 0.4:  # another thread, of which nobody knows what woke it
            self.lanes += 1
            idle = self._node("wait", "wait", self.lanes - 1, 0, rank=rank, step=0)
            busy = self._node(
                "host", "aten::mul", self.lanes - 1, draw.randint(5, 60), rank=rank, step=0
            )
            self._edge("origin", origin, idle, 0, how="assumed")
            waker = draw.choice(thread)
            self._edge("cross-thread", waker, idle, draw.randint(1, 40), to_end=True, how="assumed")
            self._edge("thread", idle, busy, 0)

    def _queue(self, queue: list[int], work: int) -> None:
        """Put work behind what its stream has; now and then it starts while that still runs."""
        if queue:
            before = queue[-1]
            both = self.nodes[before]["kind"] == self.nodes[work]["kind"] == "kernel"
            if both and not self.steady and self.random.random() < 0.2:
                self._edge("stream", before, work, self.nodes[before]["took"] // 2, from_end=False)
                self._edge("stream", before, work, 0, to_end=True)
            else:
                self._edge("stream", before, work, self.random.randint(0, 6))
        queue.append(work)

    def _meet(self, number: int, parts: list[int]) -> None:
        if not parts:
            return
        meeting = self._node("rendezvous", "all_reduce", None, 0, rank=0, step=number)
        transfer = self.random.randint(5, 60)
        for part in parts:
            jitter = 0 if self.steady else self.random.randint(0, 3)
            self._edge("rendezvous", part, meeting, 0, from_end=False)
            self._edge("rendezvous", meeting, part, transfer + jitter, to_end=True)

    def _node(self, kind: str, name: str, lane: int | None, took: int, **more: Any) -> int:
        row = {"node": len(self.nodes), "kind": kind, "name": name, "lane": lane, "took": took}
        self.nodes.append(row | more)
        return len(self.nodes) - 1

    def _edge(
        self,
        kind: str,
        source: int,
        target: int,
        gap: int,
        *,
        from_end: bool = True,
        to_end: bool = False,
        how: str = "measured",
    ) -> None:
        row = {
            "source": source,
            "target": target,
            "kind": kind,
            "evidence": how,
            "from_end": from_end,
        }
        self.edges.append(row | {"to_end": to_end})
        self.gaps.append(STEADY_NS.get(kind, gap) if self.steady else gap)
