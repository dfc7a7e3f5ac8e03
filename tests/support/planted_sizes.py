"""Jobs of one process with one fault of a random size, on devices of three vendors, and the same jobs without it.

A job is a list of what its host does in a step; `simulate` gives each its times as a device with one stream (and one for
communication) would: work runs in the order of its launches, and some calls wait for it. What a fault costs is the
difference of the two simulations.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

VENDORS = {  # prefix of calls, category, device, its kernels of matrix products
    "nvidia": ("cuda", "cuda_runtime", "NVIDIA H100 80GB HBM3", "nvjet_tst_128x256_64x4"),
    "amd": (
        "hip",
        "cuda_runtime",
        "AMD Instinct MI300X",
        "Cijk_Ailk_Bljk_BBS_BH_MT256x128x64_MI16x16x16",
    ),
    "intel": ("ur", "xpu_runtime", "Intel(R) Data Center GPU Max 1550", "gemm_kernel"),
}
PEAK = {"bf16": 989.4e12, "memory": 3.35e12}  # of all of them, for a like truth
STEPS = 6
_JITTER = 0.05  # of all times, up and down
_GOOD = 0.7  # of the roofline
_GAP_US = 1.0  # between kernels of a stream
_WORKERS = 4


@dataclass(frozen=True)
class Do:
    """Something that the host does: an operator, with what it launches; or time of Python between operators."""

    name: str
    host_us: float = 6.0
    kernel_us: float = 0.0
    kernel: str = "elementwise_kernel"
    wait: str = ""  # the call that waits for the device at its end
    wait_us: float = 0.0  # how long that call takes beyond its waiting
    before: str = ""  # a call at its beginning
    around: str = ""  # an operator around it that does nothing more
    shapes: tuple[tuple[int, ...], ...] = ()
    types: str = "c10::BFloat16"
    category: str = "cpu_op"
    beside: bool = (
        False  # on the stream for communication, which the device waits for at the end of the step
    )
    copy: str = ""
    leak: int = 0


@dataclass(frozen=True)
class Job:
    """The same steps again and again."""

    step: tuple[Do, ...]
    vendor: str = "nvidia"

    @property
    def on_device(self) -> bool:
        return any(one.kernel_us for one in self.step)


@dataclass(frozen=True)
class Case:
    """A fault, the finding that is expected first, and the job with and without it."""

    fault: str
    vendor: str
    slug: str
    faulty: Job
    clean: Job
    saved_us: float | None = None  # where the fix leaves something of the fault

    def truth_ns(self) -> float:
        """What the fault costs in a step."""
        if self.saved_us is not None:
            return 1000 * self.saved_us
        return _period(self.faulty) - _period(self.clean)


def _period(job: Job) -> float:
    ends: list[int] = []
    simulate(job, ends=ends)
    return (ends[-1] - ends[1]) / (len(ends) - 2)


@dataclass
class _Writer:
    vendor: str
    events: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0

    def host(
        self, name: str, start: float, end: float, category: str = "cpu_op", **args: Any
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1000,
                "tid": 1000,
                "ts": start,
                "dur": end - start,
            }
            | {"args": args}
        )

    def call(self, name: str, start: float, end: float, correlation: int | None = None) -> None:
        prefix, category, *_ = VENDORS[self.vendor]
        names = {"launch": "EnqueueKernelLaunch", "sync": "QueueFinish", "copy": "EnqueueUSMMemcpy"}
        own = (
            names
            if prefix == "ur"
            else {"launch": "LaunchKernel", "sync": "StreamSynchronize", "copy": "MemcpyAsync"}
        )
        args = {} if correlation is None else {"correlation": correlation}
        self.host(prefix + own.get(name, name), start, end, category, **args)

    def work(
        self, name: str, start: float, end: float, stream: int, correlation: int, **more: Any
    ) -> None:
        args = {"device": 0, "stream": stream, "correlation": correlation} | more
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": start,
                "dur": end - start,
                "args": args,
            }
        )


def simulate(job: Job, *, ends: list[int] | None = None) -> dict[str, Any]:
    """The recording of a job, as Kineto would write it; `ends` gets the end of each step's work, ns."""
    out = _Writer(job.vendor)
    now, free, talk, address = 100.0, 0.0, 0.0, 1 << 20
    for step in range(STEPS):
        began = now
        now += 2
        seen: dict[str, int] = {}
        for exact in job.step:
            nth = seen[exact.name] = seen.get(exact.name, 0) + 1
            chance = random.Random(f"{step} {exact.name} {nth}")  # as in the job without the fault
            start, stretch = now, chance.uniform(1 - _JITTER, 1 + _JITTER)
            one = replace(
                exact, host_us=exact.host_us * stretch, kernel_us=exact.kernel_us * stretch
            )
            if one.category == "think":
                now += one.host_us
                continue
            now += 1 if one.around else 0
            inner = now
            if one.before:
                out.call(one.before, now + 0.5, now + 1.5)
            now += one.host_us
            if one.kernel_us:
                out.number += 1
                launched = inner + 2
                out.call("copy" if one.copy else "launch", launched, launched + 2, out.number)
                if one.beside:
                    begin = max(launched + 3, talk, free)
                    talk = begin + one.kernel_us
                else:
                    begin = max(launched + 3, free + _GAP_US)
                    free = begin + one.kernel_us
                out.work(
                    one.copy or one.kernel, begin, begin + one.kernel_us, 20 if one.beside else 7, out.number,
                    **({"bytes": 1 << 22} if one.copy else {}),
                )  # fmt: skip
            if one.wait:
                called = now
                now = max(now + 1, free) + one.wait_us
                out.call(one.wait, called, now)
            now += 1
            shapes = {
                "Input Dims": [list(shape) for shape in one.shapes],
                "Input type": [one.types] * len(one.shapes),
            }
            args = shapes if one.shapes else {}
            out.host(one.name, inner, now - 0.5, one.category, **args)
            if one.around:
                now += 1
                out.host(one.around, start, now - 0.5)
            if one.leak:
                address += one.leak
                out.events.append(
                    {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1000, "tid": 1000, "ts": inner + 1}
                    | {"args": {"Device Type": 0, "Device Id": -1, "Addr": address, "Bytes": one.leak}}
                )  # fmt: skip
        free = max(free, talk)
        out.host(f"ProfilerStep#{step}", began, now, "user_annotation")
        if ends is not None:
            ends.append(round(1000 * (max(free, talk) if job.on_device else now)))
    device = {
        "id": 0,
        "name": VENDORS[job.vendor][2],
        "numSms": 132 if job.vendor == "nvidia" else 304,
    }
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "deviceProperties": [device | {"computeMajor": 9, "computeMinor": 0}]
        if job.on_device
        else [],
        "traceEvents": out.events,
    }


def write(job: Job, path: Path) -> Path:
    """Writes the recording of a job."""
    path.write_text(json.dumps(simulate(job)))
    return path


def product(
    chance: random.Random, vendor: str, reached: float = 0.75, size: int | None = None
) -> Do:
    """A matrix product on the device that reaches this share of the roofline."""
    size = size or 256 * chance.randint(8, 20)
    flops, moved = 2 * size**3, 3 * 2 * size**2
    us = 1e6 * max(flops / PEAK["bf16"], moved / PEAK["memory"]) / reached
    return Do(
        "aten::mm", kernel_us=us, kernel=VENDORS[vendor][3], shapes=((size, size), (size, size))
    )


def model(chance: random.Random, vendor: str) -> tuple[Do, ...]:
    """A model that keeps its device busy."""
    return tuple(product(chance, vendor) for _ in range(chance.randint(6, 14)))


def cpu_model(chance: random.Random) -> tuple[Do, ...]:
    """A model on the CPU: products, and operators that belong to it."""
    names = (
        "aten::addmm",
        "aten::gelu",
        "aten::native_layer_norm",
        "aten::addmm",
        "aten::_softmax",
    )
    return tuple(
        Do(name, chance.uniform(300, 900), shapes=((64, 64), (64, 64)), types="float")
        for name in names * chance.randint(2, 3)
    )


def _into(chance: random.Random, step: tuple[Do, ...], *planted: Do) -> tuple[Do, ...]:
    at = chance.randint(1, len(step) - 1)
    return (*step[:at], *planted, *step[at:])


def _length(step: tuple[Do, ...]) -> float:
    return max(sum(one.kernel_us for one in step), sum(one.host_us for one in step))


def no_allocator(chance: random.Random, vendor: str) -> Case:
    step = model(chance, vendor)
    names = ("USMDeviceAlloc", "USMFree") if vendor == "intel" else ("Malloc", "Free")
    cost = chance.uniform(0.3, 2) * _length(step) / len(step)
    planted = tuple(replace(one, before=names[0], wait=names[1], wait_us=cost) for one in step)
    return Case(
        "no allocator", vendor, "device-allocation", Job(planted, vendor), Job(step, vendor)
    )


def data_on_host(chance: random.Random, vendor: str) -> Case:
    step = model(chance, vendor)
    name, around = chance.choice(
        [("aten::normal_", "aten::randn"), ("aten::sort", ""), ("aten::uniform_", "aten::rand")]
    )
    made = Do(
        name,
        _length(step) * chance.uniform(1.15, 2.5),
        around=around,
        shapes=((1 << 20,),),
        types="float",
    )
    return Case(
        "data on the host", vendor, "host-operator", Job((made, *step), vendor), Job(step, vendor)
    )


def double_on_host(chance: random.Random, vendor: str) -> Case:
    step = cpu_model(chance)
    share = chance.uniform(0.2, 2) * _length(step) / 2
    planted = [
        Do(name, share, shapes=((32, 20_000),), types="double")
        for name in ("aten::sort", "aten::cumsum")
    ]
    return Case(
        "float64",
        vendor,
        "host-operator",
        Job(_into(chance, step, *planted), vendor),
        Job(step, vendor),
    )


def order_on_host(chance: random.Random, vendor: str) -> Case:
    step = cpu_model(chance)
    name = chance.choice(
        ["aten::sort", "aten::cumsum", "aten::_unique2", "aten::topk", "aten::normal_"]
    )
    planted = Do(
        name, chance.uniform(0.4, 3) * _length(step), shapes=((32, 20_000),), types="float"
    )
    return Case(
        "one large operator",
        vendor,
        "host-operator",
        Job(_into(chance, step, planted), vendor),
        Job(step, vendor),
    )


def copies_on_host(chance: random.Random, vendor: str) -> Case:
    step = cpu_model(chance)
    copy = Do(
        "aten::copy_",
        chance.uniform(0.05, 0.3) * _length(step),
        around="aten::contiguous",
        shapes=((1024, 1024),),
        types="float",
    )
    planted = _into(chance, step, *[copy] * chance.randint(1, 4))
    return Case(
        "copies on the host", vendor, "host-copies", Job(planted, vendor), Job(step, vendor)
    )


def tail(chance: random.Random, vendor: str) -> Case:
    step = model(chance, vendor)
    sent = Do(
        "nccl:all_reduce",
        6,
        chance.uniform(0.1, 0.6) * _length(step),
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)",
        beside=True,
    )
    return Case(
        "tail of communication",
        vendor,
        "exposed-communication",
        Job((*step, sent), vendor),
        Job(step, vendor),
    )


def low_roofline(chance: random.Random, vendor: str) -> Case:
    step, size = model(chance, vendor), 256 * chance.randint(8, 16) + 128
    reached = chance.uniform(0.04, 0.3)
    planted = [product(chance, vendor, reached, size)] * chance.randint(1, 3)
    saved = sum(one.kernel_us for one in planted) * (1 - reached / _GOOD)
    faulty = Job(_into(chance, step, *planted), vendor)
    return Case("low roofline", vendor, "low-roofline", faulty, Job(step, vendor), saved)


def slow_loader(chance: random.Random, vendor: str) -> Case:
    step = model(chance, vendor)
    rest = _length(step) + _GAP_US * len(step)
    load = chance.uniform(1.3, 3.5) * rest
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    wait = Do(name, load, category="user_annotation")
    host = sum(one.host_us + 1 for one in step)
    now = max(load + 1 + host, rest)
    after = max(load / _WORKERS, rest, host)
    return Case(
        "slow loader",
        vendor,
        "data-starved",
        Job((wait, *step), vendor),
        Job(step, vendor),
        now - after,
    )


def pause(chance: random.Random, vendor: str) -> Case:
    step = model(chance, vendor)
    planted = Do("", _length(step) * chance.uniform(1.2, 2.5) + 600, category="think")
    return Case(
        "pause", vendor, "host-pause", Job(_into(chance, step, planted), vendor), Job(step, vendor)
    )


def value_read(chance: random.Random, vendor: str) -> Case:
    step = model(chance, vendor)
    slow = tuple(replace(one, host_us=one.kernel_us * 0.8) for one in step)
    planted = Do("aten::item", wait="sync")
    reads = chance.randint(2, len(slow) - 1)
    faulty = tuple(
        one for at, op in enumerate(slow) for one in ((op, planted) if at < reads else (op,))
    )
    return Case("value read", vendor, "blocking-item", Job(faulty, vendor), Job(slow, vendor))


def garbage(chance: random.Random, vendor: str) -> Case:
    step = model(chance, vendor)
    planted = Do(
        "<built-in function collect>",
        _length(step) * chance.uniform(1.1, 2),
        category="python_function",
    )
    return Case(
        "garbage collection",
        vendor,
        "garbage-collection",
        Job(_into(chance, step, planted), vendor),
        Job(step, vendor),
    )


def late_launches(chance: random.Random, vendor: str) -> Case:
    count = chance.randint(60, 120)
    kernel = chance.uniform(5, 9)
    one = Do("aten::mul", kernel * chance.uniform(1.6, 3), kernel, "elementwise_kernel")
    busy = Do("aten::mul", 1, kernel, "elementwise_kernel")
    return Case(
        "late launches",
        vendor,
        "launch-bound",
        Job((one,) * count, vendor),
        Job((busy,) * count, vendor),
    )


FAULTS: tuple[Callable[[random.Random, str], Case], ...] = (
    no_allocator,
    data_on_host,
    double_on_host,
    order_on_host,
    copies_on_host,
    tail,
    low_roofline,
    slow_loader,
    pause,
    value_read,
    garbage,
    late_launches,
)


def cases(seeds: range) -> Iterator[Case]:
    """Every fault on every vendor's devices, of as many sizes as there are seeds."""
    for fault in FAULTS:
        for vendor in VENDORS:
            for seed in seeds:
                yield fault(random.Random(f"{fault.__name__} {vendor} {seed}"), vendor)


def clean(seeds: range) -> Iterator[Job]:
    """Jobs without a fault: of each vendor, and on the CPU."""
    for seed in seeds:
        chance = random.Random(f"clean {seed}")
        vendor = tuple(VENDORS)[seed % len(VENDORS)]
        yield Job(cpu_model(chance) if seed % 4 == 3 else model(chance, vendor), vendor)
