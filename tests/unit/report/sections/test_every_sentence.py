"""Sentences and first figures of every section, on jobs of eight ranks, against sums made from their traces alone."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

import traceloom
from support.jobs import (
    LateHost,
    ParallelRecipe,
    Recipe,
    StragglingStep,
    parallel_job,
    training_job,
)
from support.public_traces import DATA
from support.sessions import serving_ranks
from traceloom.report import ReportOptions, build
from traceloom.report.sections import EXTRA_KEYS, load_core_sections, load_extra_sections
from traceloom.report.sections.section import Section
from traceloom.system import units
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.session import Session

MULTIRANK = DATA / "multirank"
RANKS = 8
Event = dict[str, Any]
Interval = tuple[int, int]


@dataclass(frozen=True)
class Raw:
    """The events of one rank as they stand in its file; times in ns."""

    events: list[Event]

    @classmethod
    def of(cls, text: str) -> Raw:
        events = [
            event
            for event in json.loads(text)["traceEvents"]
            if event.get("ph") == "X" and event.get("cat")
        ]
        for event in events:
            event["start"], event["ns"] = round(1000 * event["ts"]), round(1000 * event["dur"])
            event["end"] = event["start"] + event["ns"]
        return cls(events)

    def select(self, *categories: str, name: str = "") -> list[Event]:
        return [
            event for event in self.events if event["cat"] in categories and name in event["name"]
        ]

    @cached_property
    def work(self) -> list[Event]:
        return self.select("kernel", "gpu_memcpy", "gpu_memset")

    @cached_property
    def calls(self) -> dict[int, Event]:
        return {event["args"]["correlation"]: event for event in self.select("cuda_runtime")}

    @cached_property
    def steps(self) -> list[Event]:
        return self.select("user_annotation", name="ProfilerStep#")

    @property
    def main(self) -> int:
        return int(self.steps[0]["tid"])

    @cached_property
    def bounds(self) -> list[Interval]:
        """A step lasts until the next one begins."""
        starts = [step["start"] for step in self.steps]
        return list(pairwise([*starts, self.steps[-1]["end"]]))

    @cached_property
    def computing(self) -> list[Interval]:
        return union(event for event in self.select("kernel") if not nccl(event))

    def step_of(self, event: Event) -> int | None:
        """Number of the step that launched some work."""
        at = (
            self.calls[event["args"]["correlation"]]["start"]
            if "correlation" in event.get("args", {})
            else None
        )
        return next(
            (n for n, step in enumerate(self.steps) if at and step["start"] <= at < step["end"]),
            None,
        )


def union(events: Iterable[Event]) -> list[Interval]:
    out: list[Interval] = []
    for start, end in sorted((event["start"], event["end"]) for event in events):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def total(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def spans(intervals: Iterable[Interval]) -> list[Event]:
    return [{"start": start, "end": end} for start, end in intervals]


def overlap(some: list[Interval], others: list[Interval]) -> int:
    return total(some) + total(others) - total(union(spans([*some, *others])))


def nccl(event: Event) -> bool:
    return "nccl" in event["name"]


def around(op: Event, call: Event) -> bool:
    return bool(
        op["tid"] == call["tid"] and op["start"] <= call["start"] and call["end"] <= op["end"]
    )


# -- jobs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ranks:
    """A job, read as text and by the product."""

    raw: list[Raw]
    session: Session

    @classmethod
    def made(cls, builders: Iterable[TraceBuilder]) -> Ranks:
        made = list(builders)
        return cls(
            [Raw.of(each.text()) for each in made],
            Session(tuple(each.build() for each in made), "made"),
        )


@cache
def training() -> Ranks:
    """Rank 3 alone has a loader, which makes it late; copies, reads of values."""
    recipe = Recipe(
        ranks=RANKS,
        steps=5,
        layers=3,
        item=True,
        sync="stream",
        pageable_input=True,
        autograd=True,
        delay_us={3: 700.0},
        seed=4,
    )
    return Ranks.made(training_job(recipe).run().traces())


@cache
def uneven() -> Ranks:
    """Tensor and data groups, a loader on each rank; one loader is late in all steps, one host pauses in one step."""
    faults = LateHost(5, 1500, by="data"), LateHost(1, 2500, by="gc", steps=(2,))
    recipe = ParallelRecipe(
        data=4, tensor=2, steps=4, layers=2, seed=5, transfer_us=120, faults=faults
    )
    return Ranks.made(parallel_job(recipe).run().traces())


@cache
def reading() -> Ranks:
    """Each rank reads values; on rank 0 the synchronisation takes longest, on all others the value."""
    traces = []
    for rank in range(RANKS):
        made, number = TraceBuilder(rank=rank, world_size=RANKS), 0
        for at in (0, 3000, 6000):
            made.step(at // 3000, at, 2999)
            for offset, name, call, took in (
                (100, "aten::item", "cudaMemcpyAsync", 100 if rank == 0 else 900 + rank),
                (1500, "aten::sync", "cudaDeviceSynchronize", 400 if rank == 0 else 50),
            ):
                number += 1
                made.op(name, at + offset, took + 20).launch(
                    call, at + offset + 5, took, correlation=number
                )
                if call == "cudaMemcpyAsync":
                    made.copy(
                        "Memcpy DtoH (Device -> Pageable)",
                        at + offset + took - 10,
                        5,
                        bytes=4 * (rank + 1),
                        correlation=number,
                    )
            number += 1
            made.launch("cudaLaunchKernel", at + 2100, 5, correlation=number)
            made.kernel("gemm", at + 2120 + 3 * rank, 100 + rank, correlation=number)
        traces.append(made)
    return Ranks.made(traces)


@cache
def stages() -> Ranks:
    """Two pipelines of four stages, with graphs; one of five steps computes three times as long."""
    recipe = ParallelRecipe(
        data=2, pipeline=4, microbatches=4, steps=5, graphs=True, faults=(StragglingStep(2, 3.0),)
    )
    return Ranks.made(parallel_job(recipe).run().traces())


@cache
def built() -> Ranks:
    """Ranks that differ in all that they hold: compiled code, counters, memory, operators with and without a model."""
    traces = []
    for rank in range(RANKS):
        made = TraceBuilder(rank=rank, world_size=RANKS)
        for step in range(2):
            at, number = 2000 * step, 10 * step
            made.step(step, at, 1900)
            made.op("TorchDynamo Cache Lookup", at + 10, 5)
            made.op("Torch-Compiled Region: 0/0", at + 20, 200 + rank).op(
                "CompiledFunction", at + 30, 100 + rank
            )
            made.op("Torch-Compiled Region: 1/0", at + 150, 40).op("CompiledFunction", at + 155, 20)
            made.op("_compile.compile_inner (dynamo_timed)", at + 300, 100 + 10 * rank)
            size = 64 * (rank + 1)
            made.op("aten::mm", at + 600, 50, shapes=[[size, 128], [128, 32]])
            made.launch("cudaLaunchKernel", at + 610, 5, correlation=number + 1)
            made.kernel("gemm", at + 630, 100, correlation=number + 1)
            if rank % 2:
                made.op("mine::attention", at + 800, 50)
                made.launch("cudaLaunchKernel", at + 810, 5, correlation=number + 2)
                made.kernel("mine_attention", at + 830, 300, correlation=number + 2)
            made.allocation(
                at + 700, 1_000_000 * (rank + 1), address=step + 1, total_reserved=20_000_000
            )
            made.counter("sm__cycles", at + 500, 1.0 + rank)
        traces.append(made)
    return Ranks.made(traces)


@cache
def serving() -> Ranks:
    return Ranks.made(serving_ranks(RANKS))


@cache
def dlrm() -> Ranks:
    if not MULTIRANK.is_dir():
        pytest.skip("needs the public traces of MULTIRANK")
    paths = sorted(MULTIRANK.glob("dlrm_rank*.kineto.json.gz"))
    return Ranks(
        [Raw.of(gzip.decompress(path.read_bytes()).decode()) for path in paths],
        traceloom.load(*paths),
    )


# -- what the sentences must say ----------------------------------------------------------------------------------

Truth = Callable[[Ranks], Iterator[str]]


def data_loading(job: Ranks) -> Iterator[str]:
    waits = {
        rank: raw.select("user_annotation", "cpu_op", name="DataLoader")
        for rank, raw in enumerate(job.raw)
    }
    waits = {rank: found for rank, found in waits.items() if found}
    waited = sum(event["ns"] for found in waits.values() for event in found)
    steps = sum(step["ns"] for rank in waits for step in job.raw[rank].steps)
    yield f"{units.format_duration(waited)} waited for data in {sum(map(len, waits.values()))} batches"
    yield f"({units.format_share(waited, steps)} of the steps)"
    yield f"the longest wait took {units.format_duration(max(event['ns'] for found in waits.values() for event in found))}"
    if len(waits) == 1:
        yield f"batches of rank {next(iter(waits))} "
    # at least a twentieth of the step, and the GPU idle in half of it
    held = whole = 0
    for rank, found in waits.items():
        work = union(job.raw[rank].work)
        for start, end in job.raw[rank].bounds:
            inside = union(event for event in found if start <= event["start"] < end)
            idle = total(inside) - overlap(inside, work)
            held += total(inside) >= (end - start) / 20 and 2 * idle >= total(inside)
            whole += 1
    yield f"it holds up {held} of {whole} step"


def steps(job: Ranks) -> Iterator[str]:
    medians = [int(median(end - start for start, end in raw.bounds)) for raw in job.raw]
    count = len(job.raw[0].steps)
    number = "1 whole step" if count == 1 else f"{count} whole steps"
    low, high = min(medians), max(medians)
    yield f"{number} of each of {RANKS} ranks; median {units.format_duration(low)} (rank {medians.index(low)}) to "
    yield f"{units.format_duration(high)} (rank {medians.index(high)})"


def per_step(job: Ranks) -> Iterator[str]:
    sums: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * len(job.raw[0].steps))
    for rank, raw in enumerate(job.raw):
        for event in raw.select("kernel"):
            step = raw.step_of(event) if event["args"].get("correlation") in raw.calls else None
            if step is not None:
                sums[event["name"], rank][step] += event["ns"]
    name, rank = max(sums, key=lambda key: sum(sums[key]))
    times = sums[name, rank]
    yield f"{name[:12]}"
    yield f" of rank {rank}: {units.format_duration(round(sum(times) / len(times)))} per step"
    if min(times) < max(times):
        yield f"({units.format_duration(min(times))} to {units.format_duration(max(times))})"


def kinds(job: Ranks) -> Iterator[str]:
    """The three largest; products below an operator of attention are attention's."""
    sums: Counter[str] = Counter()
    for raw in job.raw:
        for event in raw.work:
            inside = " ".join(op["name"] for op in ops_around(raw, event))
            names = {
                "communication": nccl(event),
                "attention": "ttention" in inside + event["name"],
                "gemm": "gemm" in event["name"],
                "copy": event["cat"] == "gpu_memcpy",
            }
            sums[next((kind for kind, is_kind in names.items() if is_kind), "")] += event["ns"]
    whole = sum(sums.values())
    for kind, ns in sums.most_common(3 if job is not dlrm() else 1):
        yield f"{kind} {units.format_share(ns, whole)}"
    yield "of the GPU work"


def ops_around(raw: Raw, event: Event) -> list[Event]:
    """The operators around the launch of some work."""
    call = raw.calls.get(event["args"].get("correlation"))
    return [op for op in raw.select("cpu_op", "user_annotation") if call and around(op, call)]


def kernel_shapes(job: Ranks) -> Iterator[str]:
    sums: dict[tuple[int, str, str], int] = defaultdict(int)
    for rank, raw in enumerate(job.raw):
        ops = sorted(raw.select("cpu_op"), key=lambda event: event["ns"])
        for event in raw.work:
            call = raw.calls.get(event["args"].get("correlation"))
            op = next((op for op in ops if call and around(op, call)), None)
            if op is not None:
                sums[rank, op["name"], json.dumps(op["args"].get("Input Dims"))] += event["ns"]
    rank, name, _ = max(sums, key=lambda key: sums[key])
    yield f"the largest is {name}"
    largest = max(sums.values())
    yield f": {units.format_share(largest, sum(event['ns'] for event in job.raw[rank].work))} of the GPU work of rank {rank}"


def copies(job: Ranks) -> Iterator[str]:
    made = [event for raw in job.raw for event in raw.select("gpu_memcpy")]
    yield f"{units.format_size(sum(event['args']['bytes'] for event in made))} in {len(made)} copies"
    yield f"took {units.format_duration(sum(event['ns'] for event in made))}"
    yield f"{sum('Pageable' in event['name'] for event in made)} of them from or to pageable memory"


def critical_path(job: Ranks) -> Iterator[str]:
    """From the first start of the step on any rank to the end of its last work, on the host or the device."""
    count = len(job.raw[0].steps)
    lengths, loading, began = [], [], []
    for number in range(count):
        starts = [raw.steps[number]["start"] for raw in job.raw]
        ends = [raw.steps[number]["end"] for raw in job.raw]
        ends += [
            event["end"]
            for raw in job.raw
            for event in raw.work
            if event["args"].get("correlation") in raw.calls and raw.step_of(event) == number
        ]
        lengths.append(max(ends) - min(starts))
        loading.append(
            max(
                sum(
                    event["ns"]
                    for event in raw.events
                    if "DataLoader" in event["name"]
                    and raw.steps[number]["start"] <= event["start"] < raw.steps[number]["end"]
                )
                for raw in job.raw
            )
        )
        began.append(starts)
    if count > 1:  # one late loader, which all ranks wait for
        said = sentence(job, "critical_path")
        number = next(n for n in range(count) if f"of step {n}:" in said)
        yield f"what decides the {units.format_duration(lengths[number])} of step {number}: "
        yield f"waiting for data {units.format_share(loading[number], lengths[number])}"
    else:
        last = max(range(RANKS), key=lambda rank: began[0][rank])
        late = began[0][last] - min(began[0])
        yield f"what decides the {units.format_duration(lengths[0])} of step "
        yield f"before rank {last} began {units.format_share(late, lengths[0])}"


def idle_gaps(job: Ranks) -> Iterator[str]:
    gaps = [
        (b[0] - a[1], rank)
        for rank, raw in enumerate(job.raw)
        for a, b in pairwise(union(raw.work))
    ]
    longest, rank = max(gaps)
    yield f"the longest gap is {units.format_duration(longest)} of rank {rank}, "


def launches(job: Ranks) -> Iterator[str]:
    latencies, short, kernels = [], 0, 0
    for raw in job.raw:
        calls = raw.calls
        # the stream may still be busy with earlier work when the call ends
        pairs, free = [], defaultdict(int)
        for event in sorted(raw.work, key=lambda event: event["start"]):
            call, stream = calls.get(event["args"].get("correlation")), event["args"]["stream"]
            if call:
                pairs.append((event, call, max(event["start"] - max(call["end"], free[stream]), 0)))
            free[stream] = max(free[stream], event["end"])
        latencies.append(median(latency for _, _, latency in pairs))
        short += sum(
            event["ns"] < call["ns"] for event, call, _ in pairs if event["cat"] == "kernel"
        )
        kernels += len(raw.select("kernel"))
    yield f"median launch latency of rank {latencies.index(max(latencies))}: {units.format_duration(round(max(latencies)))}"
    yield f"{units.format_count(short)} of {units.format_count(kernels)} kernels are shorter than their launch call"


def flame(job: Ranks) -> Iterator[str]:
    best: tuple[int, int, str] = (0, 0, "")
    for rank, raw in enumerate(job.raw):
        own: Counter[str] = Counter()
        above: list[Event] = []
        rows = [
            event
            for event in raw.events
            if event["tid"] == raw.main
            and event["cat"] not in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
        ]
        for event in sorted(rows, key=lambda event: (event["start"], -event["end"])):
            while above and above[-1]["end"] <= event["start"]:
                above.pop()
            own[event["name"]] += event["ns"]
            if above:
                own[above[-1]["name"]] -= event["ns"]
            above.append(event)
        functions = {name: ns for name, ns in own.items() if "ProfilerStep" not in name}
        name = max(functions, key=lambda key: functions[key])
        best = max(best, (functions[name], rank, name))
    yield f"the main thread of rank {best[1]} spends the most time of its own, {units.format_duration(best[0])}, in {best[2]}"


def blocking_calls(job: Ranks) -> Iterator[str]:
    """By the outermost operator and the call; copies to memory of the host that is not pinned wait, too."""
    waits: Counter[tuple[str, str]] = Counter()
    for raw in job.raw:
        copied = {
            event["args"]["correlation"]
            for event in raw.select("gpu_memcpy", name="DtoH (Device -> Pageable")
        }
        ops = sorted(raw.select("cpu_op"), key=lambda event: -event["ns"])
        for event in raw.select("cuda_runtime"):
            if "Synchronize" in event["name"] or event["args"]["correlation"] in copied:
                op = next((op["name"] for op in ops if around(op, event)), "")
                waits[op, event["name"]] += event["ns"]
    yield f"{units.format_duration(sum(waits.values()))} of host time in calls that wait"
    yield f"{units.format_share(max(waits.values()), sum(waits.values()))} of it for "
    (longest, _), *_ = waits.most_common(1)
    yield ", ".join(longest)


def threads(job: Ranks) -> Iterator[str]:
    """A thread is active where it runs an operator, a runtime call or Python, but for calls that wait."""
    count = window = none = several = 0
    for raw in job.raw:
        host = raw.select("cpu_op", "cuda_runtime", "user_annotation")
        copied = {
            event["args"]["correlation"]
            for event in raw.select("gpu_memcpy", name="DtoH (Device -> Pageable")
        }
        marks: list[tuple[int, int]] = []
        for thread in {event["tid"] for event in host}:
            count += 1
            own = [event for event in host if event["tid"] == thread]
            busy = union(event for event in own if event["cat"] != "user_annotation")
            waits = union(
                event
                for event in own
                if event["cat"] == "cuda_runtime"
                and ("Synchronize" in event["name"] or event["args"]["correlation"] in copied)
            )
            marks += [(at, by) for start, end in busy for at, by in ((start, 1), (end, -1))]
            marks += [(at, by) for start, end in waits for at, by in ((start, -1), (end, 1))]
        low, high = min(e["start"] for e in raw.events), max(e["end"] for e in raw.events)
        window += high - low
        at, active = low, 0
        for time, by in [*sorted(marks), (high, 0)]:
            none += (time - at) * (active == 0)
            several += (time - at) * (active > 1)
            at, active = time, active + by
    yield f"{count} threads; none is active {units.format_share(none, window)} of the time"
    yield f"several at once {units.format_share(several, window)}"


def collectives(job: Ranks) -> Iterator[str]:
    work = [[event for event in raw.work if nccl(event)] for raw in job.raw]
    whole = sum(event["ns"] for rank in work for event in rank)
    exposed = sum(
        event["ns"]
        - overlap(
            [(event["start"], event["end"])],
            union(e for e in raw.work if e["cat"] == "kernel" and not nccl(e)),
        )
        for raw, rank in zip(job.raw, work, strict=True)
        for event in rank
    )
    yield f"{sum(map(len, work))} calls, {units.format_duration(whole)} over all ranks, {units.format_share(exposed, whole)} of it exposed"
    if job is not dlrm():
        sizes: Counter[tuple[str, int]] = Counter()
        for event in (event for rank in work for event in rank):
            sizes[
                event["args"]["Collective name"].replace("allreduce", "all_reduce"),
                sent_bytes(event),
            ] += event["ns"]
        (kind, size), ns = sizes.most_common(1)[0]
        yield f"most in {kind} of {units.format_size(size)} ({units.format_duration(ns)})"


def sent_bytes(event: Event) -> int:
    return int(event["args"]["In msg nelems"]) * {"Float": 4, "BFloat16": 2}[event["args"]["dtype"]]


def groups(job: Ranks) -> Iterator[str]:
    names = {
        (event["args"]["Process Group Name"], event["args"]["Process Group Ranks"])
        for raw in job.raw
        for event in raw.select("kernel")
        if nccl(event)
    }
    yield f"{len(names)} group{'s' if len(names) > 1 else ''} in use: "
    yield {training(): "1 data", stages(): "4 data, 2 pipeline", uneven(): "4 tensor, 2 data"}[job]


def rank_matrix(job: Ranks) -> Iterator[str]:
    """An all-reduce sends each of the n - 1 others 2 ÷ n of its bytes."""
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for rank, raw in enumerate(job.raw):
        for event in filter(nccl, raw.work):
            members = json.loads(event["args"]["Process Group Ranks"])
            for other in set(members) - {rank}:
                sent[rank, other] += sent_bytes(event) * 2 / len(members)
    source, target = max(sorted(sent), key=lambda pair: sent[pair])
    size = units.format_size(round(sent[source, target]))
    yield f"most goes from rank {source} to rank {target} ({size}); 0 % of all bytes is recorded"


def across_ranks(job: Ranks) -> Iterator[str]:
    """Calls meet in their order: all wait for the one that comes last."""
    meetings: dict[tuple[str, int], list[int]] = defaultdict(list)
    for raw in job.raw:
        many: Counter[str] = Counter()
        for event in sorted(filter(nccl, raw.work), key=lambda event: event["start"]):
            group = event["args"].get("Process Group Ranks", "all")
            meetings[group, many[group]].append(event["start"])
            many[group] += 1
    waited = sum(max(starts) - start for starts in meetings.values() for start in starts)
    whole = sum(event["ns"] for raw in job.raw for event in filter(nccl, raw.work))
    yield f"{units.format_share(waited, whole)} of {units.format_duration(whole)} in joined collectives is waiting for other ranks"
    if job in (training(), uneven()):
        yield f"goes back to rank {3 if job is training() else 5}, mostly because of: the host waited for or made the next"
    else:
        yield "goes back to rank 7, mostly because of: it was behind already"


def slow_steps(job: Ranks) -> Iterator[str]:
    """Longer than the median by 3.5 deviations and by 2 %; explained by the rank that did most more in the worst one."""
    lengths = [
        max(raw.bounds[step][1] - raw.bounds[step][0] for raw in job.raw)
        for step in range(len(job.raw[0].steps))
    ]
    middle = median(lengths)
    deviation = 1.4826 * median(abs(length - middle) for length in lengths)
    slow = [length > middle + max(3.5 * deviation, 0.02 * middle) for length in lengths]
    worst = lengths.index(max(lengths))
    yield f"{sum(slow)} of {len(lengths)} steps; step {worst} takes {units.format_duration(max(lengths) - int(middle))} longer"

    def more(of: Callable[[Raw], list[Interval]]) -> list[int]:
        """What each rank spent more than usual in that step."""
        out = []
        for raw in job.raw:
            spent = [overlap(of(raw), [bounds]) for bounds in raw.bounds]
            out.append(
                spent[worst]
                - int(median(ns for ns, is_slow in zip(spent, slow, strict=True) if not is_slow))
            )
        return out

    if job is stages():
        computed = more(lambda raw: raw.computing)
        yield f", mostly compute of rank {computed.index(max(computed))} (+{units.format_duration(max(computed))})"
    else:
        busy = more(lambda raw: union(raw.work))
        yield f", mostly host unobserved of rank {busy.index(min(busy))} (+"


def imbalance(job: Ranks) -> Iterator[str]:
    def largest_over_mean(of: Callable[[Raw], int]) -> tuple[float, int]:
        values = [of(raw) for raw in job.raw]
        return max(values) * RANKS / sum(values), values.index(max(values))

    ratio, rank = largest_over_mean(
        (lambda raw: total(raw.computing))
        if job is training()
        else (lambda raw: sum(event["ns"] for event in raw.select("kernel") if embeds(raw, event)))
    )
    yield f"max ÷ mean {ratio:.2f} (rank {rank})"


def embeds(raw: Raw, event: Event) -> bool:
    """Whether a kernel, or an operator around its launch, is of embedding tables."""
    names = [event["name"], *(op["name"] for op in ops_around(raw, event))]
    return not nccl(event) and any("embedding" in name.lower() for name in names)


def anti_patterns(job: Ranks) -> Iterator[str]:
    single = sum("SingleProcess" in event["name"] for raw in job.raw for event in raw.events)
    yield f"synchronous data loader ({single} times)"


def graph_launches(job: Ranks) -> Iterator[str]:
    """Replays of the step that computes three times as long deviate."""
    replays = work = odd = 0
    for raw in job.raw:
        calls = {e["args"]["correlation"] for e in raw.select("cuda_runtime", name="GraphLaunch")}
        replays += len(calls)
        odd += sum(
            raw.step_of(event) == 2 for event in raw.select("cuda_runtime", name="GraphLaunch")
        )
        work += sum(event["ns"] for event in raw.work if event["args"].get("correlation") in calls)
    yield f"{units.format_count(replays)} replays of "
    yield f" hold {units.format_duration(work)} of GPU work; {odd} of them deviate"


def patterns(job: Ranks) -> Iterator[str]:
    """The sequence that is named, counted again on each stream without overlap."""
    said, value = sentence(job, "patterns"), document(job)["patterns"]
    rank = int(said.split()[2]) if said.startswith("on rank") else None
    rows = value["job"] if rank is None else [row for row in value["ranks"] if row["rank"] == rank]
    names = max(
        (row for row in rows if row["kind"] == "sequence"), key=lambda row: row["kernel_ns"]
    )["names"]
    count = inside = 0
    raws = job.raw if rank is None else [job.raw[rank]]
    for raw in raws:
        streams: dict[int, list[Event]] = defaultdict(list)
        for event in sorted(raw.work, key=lambda event: event["start"]):
            streams[event["args"]["stream"]].append(event)
        for stream in streams.values():
            at = 0
            while at + len(names) <= len(stream):
                found = [event["name"] for event in stream[at : at + len(names)]] == names
                count += found
                inside += sum(event["ns"] for event in stream[at : at + len(names)]) * found
                at += len(names) if found else 1
    whole = sum(event["ns"] for raw in raws for event in raw.work)
    yield f"a sequence of {len(names)} kernels occurs {units.format_count(count)} times"
    yield f"holds {units.format_share(inside, whole)} of {'the GPU' if rank is None else 'its'}"


def pipeline(job: Ranks) -> Iterator[str]:
    """Bubbles: between the first and last compute of a step on any stage, neither computing nor in other collectives."""
    bubbles, windows = [0] * RANKS, [0] * RANKS
    for step in range(5):
        work = [
            [event for event in raw.select("kernel") if raw.step_of(event) == step]
            for raw in job.raw
        ]
        computing = [union(event for event in rank if not nccl(event)) for rank in work]
        for rank in range(RANKS):
            stages_of = [computing[other] for other in range(rank % 2, RANKS, 2)]
            low, high = (
                min(busy[0][0] for busy in stages_of),
                max(busy[-1][1] for busy in stages_of),
            )
            pairs = union(e for e in work[rank] if nccl(e) and "SendRecv" in e["name"])
            both = union(spans([*computing[rank], *pairs]))
            others = union(e for e in work[rank] if nccl(e) and "SendRecv" not in e["name"])
            inner = [(computing[rank][0][0], computing[rank][-1][1])]
            hidden = union(
                spans(
                    [
                        (max(a, b), min(c, d))
                        for a, c in others
                        for b, d in both
                        if max(a, b) < min(c, d)
                    ]
                )
            )
            alone = overlap(others, inner) - overlap(hidden, inner)
            windows[rank] += high - low
            bubbles[rank] += high - low - total(computing[rank]) - alone
    yield f"2 pipelines of 4 stages; {units.format_share(sum(bubbles), sum(windows))} of their time is bubbles"
    worst = max(range(RANKS), key=lambda rank: bubbles[rank] / windows[rank])
    yield f"most on rank {worst} (stage {worst // 2}, {units.format_share(bubbles[worst], windows[worst])})"


def roofline(job: Ranks) -> Iterator[str]:
    """A product of m x k and k x n is 2mkn; what has no model is work all the same."""
    flops = sum(2 * 64 * (rank + 1) * 128 * 32 for rank in range(RANKS)) / RANKS
    work = [event for raw in job.raw for event in raw.work]
    modelled = sum(event["ns"] for event in work if event["name"] == "gemm")
    yield f"{units.format_flops(flops)} per step of a rank"
    yield f"models cover {units.format_share(modelled, sum(event['ns'] for event in work))} of the GPU work"


def compiled(job: Ranks) -> Iterator[str]:
    graphs = sum(
        event["ns"] for raw in job.raw for event in raw.select("cpu_op", name="CompiledFunction")
    )
    compiling = [event["ns"] for raw in job.raw for event in raw.select("cpu_op", name="_compile")]
    inner = sum(len(raw.select("cpu_op", name="Region: 1/0")) for raw in job.raw)
    yield f"compiled graphs take {units.format_duration(graphs)} of host time"
    yield f"{inner} graph breaks"
    yield f"{len(compiling)} compilations take {units.format_duration(sum(compiling))}"


def counters(job: Ranks) -> Iterator[str]:
    yield f"{RANKS} recorded over time"


def memory_owners(job: Ranks) -> Iterator[str]:
    yield f"of the {units.format_size(2 * 1_000_000 * RANKS)} that cuda:0 of rank {RANKS - 1} holds at its peak, "


def inference(job: Ranks) -> Iterator[str]:
    work = [event["ns"] for raw in job.raw for event in raw.work]
    yield f"{len(work)} decode steps of {RANKS} ranks of {units.format_duration(round(sum(work) / len(work)))} (at most 1.00 ms"
    rates = [
        12e9 / (max(e["end"] for e in raw.events) - min(e["start"] for e in raw.events))
        for raw in job.raw
    ]
    low, high = units.format_number(min(rates)), units.format_number(max(rates))
    yield f"{low} to {high} generated tokens per second on each rank"


TRUTHS: list[tuple[Callable[[], Ranks], str, Truth]] = [
    *(
        (job, truth.__name__, truth)
        for truth in (
            data_loading,
            steps,
            per_step,
            kinds,
            kernel_shapes,
            copies,
            critical_path,
            idle_gaps,
            launches,
            flame,
            blocking_calls,
            threads,
            collectives,
            across_ranks,
            imbalance,
            anti_patterns,
            patterns,
        )
        for job in (training, uneven, dlrm)
    ),
    *(
        (job, truth.__name__, truth)
        for job in (training, uneven)
        for truth in (groups, rank_matrix)
    ),
    *(
        (reading, truth.__name__, truth)
        for truth in (per_step, kinds, copies, idle_gaps, launches, blocking_calls)
    ),
    (uneven, "slow_steps", slow_steps),
    *(
        (stages, truth.__name__, truth)
        for truth in (slow_steps, pipeline, graph_launches, groups, patterns, collectives)
    ),
    *(
        (built, key, truth)
        for key, truth in (
            ("roofline", roofline),
            ("compile", compiled),
            ("counters", counters),
            ("memory_owners", memory_owners),
        )
    ),
    (serving, "inference", inference),
]


@cache
def document(job: Ranks) -> dict[str, Any]:
    return build(job.session, ReportOptions(only=EXTRA_KEYS))


def sentence(job: Ranks, key: str) -> str:
    section = next(
        each for each in (*load_core_sections(), *load_extra_sections()) if each.key == key
    )
    return section.summary(section.value(document(job))) or ""


def test_every_section_with_a_sentence_is_here() -> None:
    with_sentence = {
        each.key
        for each in (*load_core_sections(), *load_extra_sections())
        if type(each).summary is not Section.summary
    }
    assert {key for _, key, _ in TRUTHS} == with_sentence


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("make", "key", "truth"),
    [
        pytest.param(
            *each,
            id=f"{each[1]}-{each[0].__name__}",
            marks=[pytest.mark.thorough] * (each[0] is dlrm),
        )
        for each in TRUTHS
    ],
)
def test_the_sentence_of_a_section_is_true_of_all_ranks(
    make: Callable[[], Ranks], key: str, truth: Truth
) -> None:
    said = sentence(make(), key)
    for part in truth(make()):
        assert part in said


@pytest.mark.parametrize("make", [training, uneven, pytest.param(dlrm, marks=pytest.mark.thorough)])
def test_first_figures_of_the_core_are_sums_over_all_ranks(make: Callable[[], Ranks]) -> None:
    job, whole = make(), document(make())
    for raw, rank in zip(
        job.raw, whole["ranks"], strict=True
    ):  # GPU time and idle time, from first to last step
        in_steps = [(raw.bounds[0][0], raw.bounds[-1][1])]
        talking, busy = union(filter(nccl, raw.work)), union(raw.work)
        device = rank["gpu_account"]["devices"][0]
        assert device["window_ns"] == total(in_steps)
        assert device["compute_ns"] == overlap(raw.computing, in_steps)
        either = union(spans([*raw.computing, *talking]))
        assert device["exposed_communication_ns"] == overlap(either, in_steps) - overlap(
            raw.computing, in_steps
        )
        assert device["exposed_memory_ns"] == overlap(busy, in_steps) - overlap(either, in_steps)
        idle = sum(row["idle_ns"] for row in rank["gpu_account"]["idle"]) + device["edge_idle_ns"]
        assert idle == device["idle_ns"] == total(in_steps) - overlap(busy, in_steps)
    for key, categories in (
        ("kernels", ("kernel", "gpu_memcpy", "gpu_memset")),
        ("operators", ("cpu_op",)),
    ):
        times, counts = Counter[str](), Counter[str]()
        for event in (event for raw in job.raw for event in raw.select(*categories)):
            times[event["name"]] += event["ns"]
            counts[event["name"]] += 1
        top = whole[key][0]
        assert (top["total_ns"], top["count"]) == (times[top["name"]], counts[top["name"]])
        assert key == "operators" or top["total_ns"] == max(times.values())
    rows = [row for row in whole["communication"]["collectives"] if row["where"] == "device"]
    calls = [event for raw in job.raw for event in raw.work if nccl(event)]
    assert (sum(row["total_ns"] for row in rows), sum(row["count"] for row in rows)) == (
        sum(event["ns"] for event in calls),
        len(calls),
    )
