"""The sentence of every section, on jobs of eight ranks, against figures made from the text of their traces alone."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import traceloom
from support.jobs import ParallelRecipe, Recipe, StragglingStep, parallel_job, training_job
from traceloom.model import Session, units
from traceloom.report import ReportOptions, build
from traceloom.report.sections import KEYS, core, every
from traceloom.report.sections.section import Section
from traceloom.testing.builder import TraceBuilder

DLRM = Path(__file__).parents[4] / "shared" / "data" / "multirank"
RANKS = 8
Event = dict[str, Any]
Interval = tuple[int, int]


@dataclass(frozen=True)
class Raw:
    """The events of one rank as they stand in its file; times in ns."""

    events: list[Event]

    @classmethod
    def of(cls, text: str) -> Raw:
        events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X" and event.get("cat")]
        for event in events:
            event["start"], event["ns"] = round(1000 * event["ts"]), round(1000 * event["dur"])
            event["end"] = event["start"] + event["ns"]
        return cls(events)

    def select(self, *categories: str, name: str = "") -> list[Event]:
        return [event for event in self.events if event["cat"] in categories and name in event["name"]]

    @property
    def work(self) -> list[Event]:
        return self.select("kernel", "gpu_memcpy", "gpu_memset")

    @property
    def calls(self) -> dict[int, Event]:
        return {event["args"]["correlation"]: event for event in self.select("cuda_runtime")}

    @property
    def steps(self) -> list[Event]:
        return self.select("user_annotation", name="ProfilerStep#")

    @property
    def main(self) -> int:
        return int(self.steps[0]["tid"])

    def step_of(self, event: Event) -> int | None:
        """Number of the step that launched some work."""
        at = self.calls[event["args"]["correlation"]]["start"] if "correlation" in event.get("args", {}) else None
        return next((n for n, step in enumerate(self.steps) if at and step["start"] <= at < step["end"]), None)


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
    return bool(op["tid"] == call["tid"] and op["start"] <= call["start"] and call["end"] <= op["end"])


# -- jobs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ranks:
    """A job, read as text and by the product."""

    raw: list[Raw]
    session: Session

    @classmethod
    def made(cls, builders: Iterable[TraceBuilder]) -> Ranks:
        made = list(builders)
        return cls([Raw.of(each.text()) for each in made], Session(tuple(each.build() for each in made), "made"))


@cache
def training() -> Ranks:
    """Rank 3 alone has a loader, which makes it late; copies, reads of values."""
    recipe = Recipe(ranks=RANKS, steps=5, layers=3, item=True, sync="stream", pageable_input=True, autograd=True,
                    delay_us={3: 700.0}, seed=4)  # fmt: skip
    return Ranks.made(training_job(recipe).run().traces())


@cache
def stages() -> Ranks:
    """Two pipelines of four stages, with graphs; one of five steps computes three times as long."""
    recipe = ParallelRecipe(data=2, pipeline=4, microbatches=4, steps=5, graphs=True, faults=(StragglingStep(2, 3.0),))
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
            made.op("Torch-Compiled Region: 0/0", at + 20, 200 + rank).op("CompiledFunction", at + 30, 100 + rank)
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
            made.allocation(at + 700, 1_000_000 * (rank + 1), address=step + 1, total_reserved=20_000_000)
            made.counter("sm__cycles", at + 500, 1.0 + rank)
        traces.append(made)
    return Ranks.made(traces)


@cache
def serving() -> Ranks:
    traces = []
    for rank in range(RANKS):
        made = TraceBuilder(rank=rank, world_size=RANKS)
        for number in range(3):
            at = 1000 * number
            made.annotation("execute_context_0(0)_generation_4(4)", at, 200)
            made.op("aten::mm", at + 10, 50).launch("cudaLaunchKernel", at + 20, 5, correlation=number + 1)
            made.kernel("gemm", at + 50, 100 + 10 * rank, correlation=number + 1)
        traces.append(made)
    return Ranks.made(traces)


@cache
def dlrm() -> Ranks:
    if not DLRM.is_dir():
        pytest.skip("needs the public traces of DLRM")
    paths = sorted(DLRM.glob("dlrm_rank*.kineto.json.gz"))
    return Ranks([Raw.of(gzip.decompress(path.read_bytes()).decode()) for path in paths], traceloom.load(*paths))


# -- what the sentences must say ----------------------------------------------------------------------------------

Truth = Callable[[Ranks], Iterator[str]]


def data_loading(job: Ranks) -> Iterator[str]:
    waits = {rank: raw.select("user_annotation", "cpu_op", name="DataLoader") for rank, raw in enumerate(job.raw)}
    waits = {rank: found for rank, found in waits.items() if found}
    waited = sum(event["ns"] for found in waits.values() for event in found)
    steps = sum(step["ns"] for rank in waits for step in job.raw[rank].steps)
    yield f"{units.duration(waited)} waited for data in {sum(map(len, waits.values()))} batches"
    yield f"({units.share(waited, steps)} of the steps)"
    yield f"the longest wait took {units.duration(max(event['ns'] for found in waits.values() for event in found))}"
    if len(waits) == 1:
        yield f"batches of rank {next(iter(waits))} "


def steps(job: Ranks) -> Iterator[str]:
    """A step lasts until the next one begins."""
    medians = []
    for raw in job.raw:
        starts = [step["start"] for step in raw.steps]
        lengths = [b - a for a, b in pairwise([*starts, raw.steps[-1]["end"]])]
        medians.append(int(median(lengths)))
    number = "1 whole step" if len(starts) == 1 else f"{len(starts)} whole steps"
    low, high = min(medians), max(medians)
    yield f"{number} of each of {RANKS} ranks; median {units.duration(low)} (rank {medians.index(low)}) to "
    yield f"{units.duration(high)} (rank {medians.index(high)})"


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
    yield f" of rank {rank}: {units.duration(round(sum(times) / len(times)))} per step"
    if len(times) > 1:
        yield f"({units.duration(min(times))} to {units.duration(max(times))})"


def kinds(job: Ranks) -> Iterator[str]:
    work = [event for raw in job.raw for event in raw.work]
    whole = sum(event["ns"] for event in work)
    yield f"communication {units.share(sum(event['ns'] for event in work if nccl(event)), whole)}"
    if job is training():
        yield f"gemm {units.share(sum(event['ns'] for event in work if 'gemm' in event['name']), whole)}"
    yield "of the GPU work"


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
    yield f": {units.share(largest, sum(event['ns'] for event in job.raw[rank].work))} of the GPU work of rank {rank}"


def copies(job: Ranks) -> Iterator[str]:
    made = [event for raw in job.raw for event in raw.select("gpu_memcpy")]
    yield f"{units.size(sum(event['args']['bytes'] for event in made))} in {len(made)} copies"
    yield f"took {units.duration(sum(event['ns'] for event in made))}"
    yield f"{sum('Pageable' in event['name'] for event in made)} of them from or to pageable memory"


def critical_path(job: Ranks) -> Iterator[str]:
    """From the first start of the step on any rank to the end of its last work, on the host or the device."""
    count = len(job.raw[0].steps)
    lengths, loading, began = [], [], []
    for number in range(count):
        starts = [raw.steps[number]["start"] for raw in job.raw]
        ends = [raw.steps[number]["end"] for raw in job.raw]
        ends += [event["end"] for raw in job.raw for event in raw.work
                 if event["args"].get("correlation") in raw.calls and raw.step_of(event) == number]  # fmt: skip
        lengths.append(max(ends) - min(starts))
        loading.append(
            sum(event["ns"] for raw in job.raw for event in raw.events
                if "DataLoader" in event["name"] and min(starts) <= event["start"] < max(ends)
                and raw.steps[number]["start"] <= event["start"] < raw.steps[number]["end"])
        )  # fmt: skip
        began.append(starts)
    if count > 1:  # one loader, which all ranks wait for
        said = sentence(job, "critical_path")
        number = next(n for n in range(count) if f"of step {n}:" in said)
        yield f"what decides the {units.duration(lengths[number])} of step {number}: "
        yield f"waiting for data {units.share(loading[number], lengths[number])}"
    else:
        last = max(range(RANKS), key=lambda rank: began[0][rank])
        late = began[0][last] - min(began[0])
        yield f"what decides the {units.duration(lengths[0])} of step "
        yield f"before rank {last} began {units.share(late, lengths[0])}"


def idle_gaps(job: Ranks) -> Iterator[str]:
    gaps = [b[0] - a[1] for raw in job.raw for a, b in pairwise(union(raw.work))]
    yield f"the longest gap is {units.duration(max(gaps))}, "


def launches(job: Ranks) -> Iterator[str]:
    latencies, short, kernels = [], 0, 0
    for raw in job.raw:
        calls = raw.calls
        pairs = [(event, calls[event["args"]["correlation"]]) for event in raw.work
                 if event["args"].get("correlation") in calls]  # fmt: skip
        latencies.append(median(event["start"] - call["end"] for event, call in pairs))
        short += sum(event["ns"] < call["ns"] for event, call in pairs if event["cat"] == "kernel")
        kernels += len(raw.select("kernel"))
    if len(job.raw[0].steps) == 1:
        yield units.duration(round(max(latencies)))
    yield f"{units.count(short)} of {units.count(kernels)} kernels are shorter than their launch call"


def flame(job: Ranks) -> Iterator[str]:
    best: tuple[int, int, str] = (0, 0, "")
    for rank, raw in enumerate(job.raw):
        own: Counter[str] = Counter()
        above: list[Event] = []
        rows = [event for event in raw.events if event["tid"] == raw.main and event["cat"] not in
                ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")]  # fmt: skip
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
    yield f"the main thread of rank {best[1]} spends the most time of its own, {units.duration(best[0])}, in {best[2]}"


def blocking_calls(job: Ranks) -> Iterator[str]:
    """By the outermost operator and the call; copies to memory of the host that is not pinned wait, too."""
    waits: Counter[tuple[str, str]] = Counter()
    for raw in job.raw:
        copied = {event["args"]["correlation"] for event in raw.select("gpu_memcpy", name="DtoH (Device -> Pageable")}
        ops = sorted(raw.select("cpu_op"), key=lambda event: -event["ns"])
        for event in raw.select("cuda_runtime"):
            if "Synchronize" in event["name"] or event["args"]["correlation"] in copied:
                op = next((op["name"] for op in ops if around(op, event)), "")
                waits[op, event["name"]] += event["ns"]
    yield f"{units.duration(sum(waits.values()))} of host time in calls that wait"
    yield f"{units.share(max(waits.values()), sum(waits.values()))} of it for "
    (longest, _), *_ = waits.most_common(1)
    yield ", ".join(longest)


def threads(job: Ranks) -> Iterator[str]:
    """A thread is active where it runs an operator, a runtime call or Python, but for calls that wait."""
    count = window = none = several = 0
    for raw in job.raw:
        host = raw.select("cpu_op", "cuda_runtime", "user_annotation")
        copied = {event["args"]["correlation"] for event in raw.select("gpu_memcpy", name="DtoH (Device -> Pageable")}
        marks: list[tuple[int, int]] = []
        for thread in {event["tid"] for event in host}:
            count += 1
            own = [event for event in host if event["tid"] == thread]
            busy = union(event for event in own if event["cat"] != "user_annotation")
            waits = union(event for event in own if event["cat"] == "cuda_runtime" and
                          ("Synchronize" in event["name"] or event["args"]["correlation"] in copied))  # fmt: skip
            marks += [(at, by) for start, end in busy for at, by in ((start, 1), (end, -1))]
            marks += [(at, by) for start, end in waits for at, by in ((start, -1), (end, 1))]
        low, high = min(e["start"] for e in raw.events), max(e["end"] for e in raw.events)
        window += high - low
        at, active = low, 0
        for time, by in [*sorted(marks), (high, 0)]:
            none += (time - at) * (active == 0)
            several += (time - at) * (active > 1)
            at, active = time, active + by
    yield f"{count} threads; none is active {units.share(none, window)} of the time"
    yield f"several at once {units.share(several, window)}"


def collectives(job: Ranks) -> Iterator[str]:
    work = [[event for event in raw.work if nccl(event)] for raw in job.raw]
    whole = sum(event["ns"] for rank in work for event in rank)
    exposed = sum(
        event["ns"] - overlap([(event["start"], event["end"])], union(e for e in raw.work if e["cat"] == "kernel"
                                                                      and not nccl(e)))
        for raw, rank in zip(job.raw, work, strict=True) for event in rank
    )  # fmt: skip
    yield f"{sum(map(len, work))} calls, {units.duration(whole)} over all ranks, {units.share(exposed, whole)} of it exposed"
    if job is training():
        sizes: Counter[int] = Counter()
        for event in (event for rank in work for event in rank):
            sizes[event["args"]["In msg nelems"]] += event["ns"]
        elements, ns = sizes.most_common(1)[0]
        yield f"most in all_reduce of {units.size(4 * elements)} ({units.duration(ns)})"


def groups(job: Ranks) -> Iterator[str]:
    names = {(event["args"]["Process Group Name"], event["args"]["Process Group Ranks"])
             for raw in job.raw for event in raw.select("kernel") if nccl(event)}  # fmt: skip
    yield f"{len(names)} group{'s' if len(names) > 1 else ''} in use: "


def rank_matrix(job: Ranks) -> Iterator[str]:
    """An all-reduce sends each of the n - 1 others 2 ÷ n of its bytes."""
    sent = sum(event["args"]["In msg nelems"] * 4 * 2 / RANKS for event in job.raw[0].select("kernel") if nccl(event))
    yield f"most goes from rank 0 to rank 1 ({units.size(round(sent))}); 0 % of all bytes is recorded"


def across_ranks(job: Ranks) -> Iterator[str]:
    """Calls meet in their order: all wait for the one that comes last."""
    calls = [sorted((e for e in raw.work if nccl(e)), key=lambda e: e["start"]) for raw in job.raw]
    waits = [
        sum(max(e["start"] for e in meeting) - e["start"] for e in meeting) for meeting in zip(*calls, strict=True)
    ]
    whole = sum(event["ns"] for rank in calls for event in rank)
    yield f"{units.share(sum(waits), whole)} of {units.duration(whole)} in joined collectives is waiting for other ranks"
    yield f"goes back to rank {3 if job is training() else 7}, "


def slow_steps(job: Ranks) -> Iterator[str]:
    lengths = [max(raw.steps[number]["ns"] for raw in job.raw) for number in range(5)]
    over = max(lengths) - int(median(lengths))
    slow = sum(length > 1.02 * median(lengths) and length > 1.3 * median(lengths) for length in lengths)
    yield f"{slow} of 5 steps; step {lengths.index(max(lengths))} takes {units.duration(over)} longer than the median"


def imbalance(job: Ranks) -> Iterator[str]:
    def largest_over_mean(of: Callable[[Raw], int]) -> tuple[float, int]:
        values = [of(raw) for raw in job.raw]
        return max(values) * RANKS / sum(values), values.index(max(values))

    if job is training():
        ratio, rank = largest_over_mean(
            lambda raw: total(union(e for e in raw.work if e["cat"] == "kernel" and not nccl(e)))
        )
        yield f"max ÷ mean {ratio:.2f} (rank {rank})"


def anti_patterns(job: Ranks) -> Iterator[str]:
    single = sum("SingleProcess" in event["name"] for raw in job.raw for event in raw.events)
    yield f"synchronous data loader ({single} times)"


def graph_launches(job: Ranks) -> Iterator[str]:
    replays = work = 0
    for raw in job.raw:
        calls = {e["args"]["correlation"] for e in raw.select("cuda_runtime", name="GraphLaunch")}
        replays += len(calls)
        work += sum(event["ns"] for event in raw.work if event["args"].get("correlation") in calls)
    yield f"{units.count(replays)} replays of "
    yield f" hold {units.duration(work)} of GPU work"


def patterns(job: Ranks) -> Iterator[str]:
    """The sequence that is named, counted again on each stream without overlap."""
    said, value = sentence(job, "patterns"), document(job)["patterns"]
    rank = int(said.split()[2]) if said.startswith("on rank") else None
    rows = value["job"] if rank is None else [row for row in value["ranks"] if row["rank"] == rank]
    names = max((row for row in rows if row["kind"] == "sequence"), key=lambda row: row["kernel_ns"])["names"]
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
    yield f"a sequence of {len(names)} kernels occurs {units.count(count)} times"
    yield f"holds {units.share(inside, whole)} of {'the GPU' if rank is None else 'its'}"


def pipeline(job: Ranks) -> Iterator[str]:
    yield "2 pipelines of 4 stages; "


def roofline(job: Ranks) -> Iterator[str]:
    """A product of m x k and k x n is 2mkn; what has no model is work all the same."""
    flops = sum(2 * 64 * (rank + 1) * 128 * 32 for rank in range(RANKS)) / RANKS
    work = [event for raw in job.raw for event in raw.work]
    modelled = sum(event["ns"] for event in work if event["name"] == "gemm")
    yield f"{units.flops(flops)} per step of a rank"
    yield f"models cover {units.share(modelled, sum(event['ns'] for event in work))} of the GPU work"


def compiled(job: Ranks) -> Iterator[str]:
    graphs = sum(event["ns"] for raw in job.raw for event in raw.select("cpu_op", name="CompiledFunction"))
    compiling = [event["ns"] for raw in job.raw for event in raw.select("cpu_op", name="_compile")]
    inner = sum(len(raw.select("cpu_op", name="Region: 1/0")) for raw in job.raw)
    yield f"compiled graphs take {units.duration(graphs)} of host time"
    yield f"{inner} graph breaks"
    yield f"{len(compiling)} compilations take {units.duration(sum(compiling))}"


def counters(job: Ranks) -> Iterator[str]:
    yield f"{RANKS} recorded over time"


def memory_owners(job: Ranks) -> Iterator[str]:
    yield f"of the {units.size(2 * 1_000_000 * RANKS)} that cuda:0 of rank {RANKS - 1} holds at its peak, "


def inference(job: Ranks) -> Iterator[str]:
    work = [event["ns"] for raw in job.raw for event in raw.work]
    yield f"{len(work)} decode steps of {RANKS} ranks of {units.duration(round(sum(work) / len(work)))} (at most 1.00 ms"


TRUTHS: list[tuple[Callable[[], Ranks], str, Truth]] = [
    *(
        (job, truth.__name__, truth)
        for truth in (data_loading, steps, per_step, kinds, kernel_shapes, copies, critical_path, idle_gaps, launches, flame,
                      blocking_calls, threads, collectives, across_ranks, imbalance, anti_patterns, patterns)
        for job in (training, dlrm)
    ),
    *((training, truth.__name__, truth) for truth in (groups, rank_matrix)),
    *((stages, truth.__name__, truth) for truth in (slow_steps, pipeline, graph_launches, groups, patterns, collectives)),
    *((built, key, truth) for key, truth in (("roofline", roofline), ("compile", compiled), ("counters", counters),
                                             ("memory_owners", memory_owners))),
    (serving, "inference", inference),
]  # fmt: skip


@cache
def document(job: Ranks) -> dict[str, Any]:
    return build(job.session, ReportOptions(only=KEYS))


def sentence(job: Ranks, key: str) -> str:
    section = next(each for each in (*core(), *every()) if each.key == key)
    return section.summary(section.value(document(job))) or ""


def test_every_section_with_a_sentence_is_here() -> None:
    with_sentence = {each.key for each in (*core(), *every()) if type(each).summary is not Section.summary}
    assert {key for _, key, _ in TRUTHS} == with_sentence


@pytest.mark.parametrize(
    ("make", "key", "truth"),
    [
        pytest.param(*each, id=f"{each[1]}-{each[0].__name__}", marks=[pytest.mark.thorough] * (each[0] is dlrm))
        for each in TRUTHS
    ],
)
def test_the_sentence_of_a_section_is_true_of_all_ranks(make: Callable[[], Ranks], key: str, truth: Truth) -> None:
    said = sentence(make(), key)
    for part in truth(make()):
        assert part in said
