"""What the fleet's service and its hosts cost: processor time and memory, at the size of a large
fleet.

    python benchmarks/fleet.py [kernels] [usage] [month] [questions] [captures] [--rows 10000000]
    [--devices 8000] python benchmarks/fleet.py agents [--agents 1000] [--seconds 60] python
    benchmarks/fleet.py dask [--captures 12] [--steps 1500]

Each part runs in a process of its own, so that its memory is its own. The data are made; tables lie
in a temporary directory. CPU seconds are of all threads. `captures` has the service's engine check
and analyse captures of about 2,000 events; the start of its process, which it does 200 tasks with,
is printed beside it, and what the service and its writer of tables do around it until all of them
are in the tables.

`questions` asks what pages ask, of the kernels of `kernels` and the hours of `month` in one store:
the second time of each, as if the range were a new one.

`dask` has captures analysed by a Dask cluster of this host, of one worker and of two by turns.
Where the cores are not free, wall time says little: the CPU time of the workers and how much of a
core each got stand beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import psutil
from fleet_agents import agents_of_fleet

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.jobs import ParallelRecipe, parallel_job
from support.sessions import busy_step
from traceloom.fleet.analyses.attribution import compute_ownership_periods, divide_device_time
from traceloom.fleet.analyses.kernels import list_top_kernels
from traceloom.fleet.questions.catalogue import QUESTIONS
from traceloom.fleet.questions.declaration import Period, QuestionFrames
from traceloom.fleet.rules import Prices
from traceloom.fleet.service.committer import WriterProcess
from traceloom.fleet.service.executors import DaskEngine, ProcessEngine
from traceloom.fleet.service.pipeline import CapturePipeline
from traceloom.fleet.service.tasks import EngineTask, TaskFile
from traceloom.fleet.store.captures import CaptureFile, CaptureRecord, ServiceState
from traceloom.fleet.store.objects import ObjectStore
from traceloom.fleet.store.schema import compute_usage_hours, compute_usage_minutes
from traceloom.fleet.store.tables import Tables
from traceloom.formats import load
from traceloom.testing import TraceBuilder

LIMITS = {
    "top kernels": 3.0,
    "a day of usage": 60.0,
    "a day of usage, MB": 400.0,
    "a month by owner": 1.0,  # in seconds, not of CPU
    "a question": 1.0,  # the same
    "a capture": 0.25,
    "a capture, around it": 0.03,
    "agents, % of a core": 50.0,
    "agents, MB": 250.0,
    "agents, MB after a request": 250.0,
    "agents, s until all are woken": 2.0,
    "agents, CPU s of a request": 6.0,  # until all know the instant at which they begin
}
SCALING = 1.7  # how much faster two workers are than one, at least
DAY = date(2026, 11, 2)
DAY_NS = 1_793_577_600 * 10**9
HOUR_NS = 3_600 * 10**9
MODEL = "NVIDIA H100 80GB HBM3"
KERNEL = "void at::native::kernel_number_"


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def say(what: str, cpu: float, wall: float, more: str = "") -> None:
    print(f"{what:42} {cpu:8.2f} CPU s {wall:8.2f} s {more}", flush=True)


def kernel_rows(folder: Path, count: int) -> None:
    """Kernel rows of a week, 200 kernels with 5 shapes of 10,000 captures; then the 100 that take
    most.
    """
    tables = Tables(str(folder))
    tables.create()
    chance = np.random.default_rng(1)
    captures = 10_000
    began = cpu_s(), time.perf_counter()
    for number in range(7):
        day = DAY + timedelta(days=number)
        size = count // 7
        kernel = chance.zipf(1.3, size) % 200
        duration = chance.integers(1_000, 1_000_000, size)
        pieces = chance.integers(1, 100, size)
        frame = pl.DataFrame(
            {
                "day": pl.Series([day]).new_from_index(0, size),
                "capture": pl.Series([f"capture{at}" for at in range(captures)]).gather(
                    np.sort(
                        chance.integers(captures // 7 * number, captures // 7 * (number + 1), size)
                    )
                ),
                "rank": chance.integers(0, 8, size),
                "device_model": pl.Series([MODEL]).new_from_index(0, size),
                "kernel": pl.Series([f"{KERNEL}{at}<float>" for at in range(200)]).gather(kernel),
                "kind": pl.Series(["gemm", "elementwise", "embedding"]).gather(kernel % 3),
                "bound": pl.Series(["compute", "memory", "latency"]).gather(kernel % 3),
                "op": pl.Series(["aten::mm", "aten::add", "aten::embedding"]).gather(kernel % 3),
                "shapes": pl.Series([f"[[{2**at}, 4096]]" for at in range(5)]).gather(
                    chance.integers(0, 5, size)
                ),
                "types": pl.Series(['["bfloat16"]']).new_from_index(0, size),
                "count": pieces,
                "total_ns": pieces * duration,
                "min_ns": duration,
                "max_ns": duration,
                "clock_hz": np.full(size, 1.5e9),
            }
        )
        number_of = pl.col("capture").str.slice(7)
        about = (
            frame.select("day", "capture")
            .unique(maintain_order=True)
            .with_columns(
                job=pl.lit("j") + number_of.str.slice(0, 3),
                start_ns=pl.lit(DAY_NS) + number_of.cast(pl.Int64) * (7 * 24 * HOUR_NS // captures),
            )
        )
        ranks = (
            frame.select("day", "capture", "rank", "device_model")
            .unique(maintain_order=True)
            .with_columns(
                host=pl.lit("node") + (number_of.cast(pl.Int64) % 200).cast(pl.String),
                device=pl.lit("0"),
                compute_ns=1_000_000_000 + pl.col("rank") * 1_000_000,
            )
        )
        tables.commit("captures", number, {"kernels": frame, "captures": about, "devices": ranks})
    say(f"write {count:,} kernel rows", cpu_s() - began[0], time.perf_counter() - began[1])
    began = cpu_s(), time.perf_counter()
    result = list_top_kernels(tables.scan("kernels"), tables.scan("captures"))
    cpu = cpu_s() - began[0]
    assert result.rows.height == 100
    say("top kernels", cpu, time.perf_counter() - began[1], verdict("top kernels", cpu))


def seen(devices: int, first: int, count: int) -> pl.DataFrame:
    """What agents saw in so many minutes: each device busy and idle for a job, with fractions of
    milliseconds.
    """
    chance = np.random.default_rng(first)
    minute = np.repeat(np.arange(first, first + count), devices)
    device = np.tile(np.arange(devices), count)
    busy = chance.uniform(20_000, 59_000, minute.size)
    names = pl.Series([f"GPU-{at:08x}-1234-5678-9abc-def012345678" for at in range(devices)])
    hosts = pl.Series([f"node{at:04}.cluster.example" for at in range(-(-devices // 8))])
    jobs = pl.Series([f"slurm-{at}" for at in range(-(-devices // 8))])
    held = device % 20 != 0
    job = jobs.gather(device // 8).zip_with(
        pl.Series(held), pl.Series([None], dtype=pl.String).new_from_index(0, held.size)
    )
    common = {
        "time_ns": DAY_NS + minute * 60 * 10**9,
        "host": hosts.gather(device // 8),
        "device": names.gather(device),
        "device_model": pl.Series([MODEL]).new_from_index(0, minute.size),
        "job": job,
    }
    frame = pl.DataFrame(common)
    state = pl.when(pl.col("job").is_null()).then(pl.lit("unallocated")).otherwise(pl.lit("busy"))
    ms = pl.when(pl.col("job").is_null()).then(pl.lit(60_000.0)).otherwise(pl.lit(pl.Series(busy)))
    computing = frame.with_columns(state=state, device_ms=ms).with_columns(
        busy_ms=pl.when(pl.col("state") == "busy").then("device_ms"),
        energy_mj=pl.col("device_ms") * 500,
        flops_low=pl.col("device_ms") * 2e11,
        flops_high=pl.col("device_ms") * 4e11,
        input_bytes=pl.col("device_ms") * 1e3,
    )
    waiting = computing.filter(pl.col("state") == "busy").with_columns(
        state=pl.lit("idle-allocated"),
        device_ms=60_000 - pl.col("device_ms"),
        busy_ms=pl.lit(None, pl.Float64),
        energy_mj=pl.col("device_ms") * 100,
        flops_low=pl.lit(0.0),
        flops_high=pl.lit(0.0),
        input_bytes=pl.lit(None, pl.Float64),
    )
    return pl.concat([computing, waiting])


def usage_day(folder: Path, devices: int) -> None:
    """A day as the service takes it of more than 500 hosts: five minutes at a time; then what is
    done every night.
    """
    tables = Tables(str(folder))
    tables.create()
    total, made_cpu, made_s = 0, 0.0, 0.0
    began = cpu_s(), time.perf_counter()
    for number in range(24 * 12):
        before = cpu_s(), time.perf_counter()
        frame = seen(devices, number * 5, 5)
        made_cpu += cpu_s() - before[0]
        made_s += time.perf_counter() - before[1]
        rows = compute_usage_minutes(frame)
        tables.commit(
            "usage", number, {"usage_minute": rows, "usage_hour": compute_usage_hours(rows)}
        )
        total += rows.height
    cpu = cpu_s() - began[0] - made_cpu
    wall = time.perf_counter() - began[1] - made_s
    peak = peak_mb()
    say(f"a day of {devices:,} devices: {total:,} rows", cpu, wall, verdict("a day of usage", cpu))
    say(
        "  making the data, which is not counted",
        made_cpu,
        made_s,
        f"{peak:.0f} MB {verdict('a day of usage, MB', peak)}",
    )
    began = cpu_s(), time.perf_counter()
    tables.compact(DAY + timedelta(days=1))
    cpu, wall, peak = cpu_s() - began[0], time.perf_counter() - began[1], peak_mb()
    say("  compact", cpu, wall, f"{peak:.0f} MB {verdict('a day of usage, MB', peak)}")


def month(folder: Path, devices: int) -> None:
    """30 days of hours, each with jobs of its own on 8 devices; then hours, energy and cost by
    three dimensions.
    """
    tables = Tables(str(folder))
    tables.create()
    day_rows = compute_usage_hours(compute_usage_minutes(seen(devices, 0, 2)))
    jobs = []
    for number in range(30):
        of_day = [
            day_rows.with_columns(
                day=pl.lit(DAY + timedelta(days=number)),
                time_ns=pl.lit(DAY_NS + (24 * number + hour) * HOUR_NS),
                job=pl.col("job") + f".{number}",
            )
            for hour in range(24)
        ]
        names = day_rows["job"].unique().drop_nulls().sort()
        jobs.append(
            pl.DataFrame({"job": names + f".{number}"}).with_columns(
                day=pl.lit(DAY + timedelta(days=number)),
                valid_from_ns=pl.lit(DAY_NS + 24 * number * HOUR_NS),
                division=pl.lit(f"division{number % 5}"),
                product=pl.lit(f"product{number % 7}"),
                user=pl.lit(f"user{number}"),
            )
        )
        tables.commit("hours", number, {"usage_hour": pl.concat(of_day), "jobs": jobs[-1]})
    rows = day_rows.height * 24 * 30
    prices = Prices(currency="EUR", per_kwh=0.3, co2_g_per_kwh=400, device_hour={"default": 2.0})
    for _ in range(2):
        began = cpu_s(), time.perf_counter()
        owned = compute_ownership_periods(tables.scan("jobs"), tables.scan("owners"))
        result = divide_device_time(
            tables.scan("usage_hour"), owned, ["division", "product", "user"], prices
        )
        cpu, wall = cpu_s() - began[0], time.perf_counter() - began[1]
        assert result.level(0)["device_ms"].item() == day_rows["device_ms"].sum() * 24 * 30
    say(
        f"a month by owner: {rows:,} rows, {owned.height:,} jobs",
        cpu,
        wall,
        verdict("a month by owner", wall),
    )


def questions(folder: Path, rows: int, devices: int) -> None:
    """What pages ask, of a store of a week of kernels and a month of hours."""
    kernel_rows(folder, rows)
    month(folder, devices)
    tables = Tables(str(folder))
    asked = {
        "since": DAY.isoformat(),
        "until": (DAY + timedelta(days=30)).isoformat(),
        "kernel": f"{KERNEL}7<float>",
    }
    print("of these, one after the other:")
    for question in QUESTIONS:
        takes = {field.name for field in msgspec.structs.fields(question.parameters)}
        takes -= set() if question.name == "kernel-history" else {"kernel"}
        wanted = msgspec.convert(
            {name: asked[name] for name in takes & asked.keys()}, question.parameters
        )
        for _ in range(2):
            began = cpu_s(), time.perf_counter()
            period = Period.of(wanted, DAY_NS + 40 * 24 * HOUR_NS)
            question.ask(QuestionFrames(tables, wanted, period), wanted)
            cpu, wall = cpu_s() - began[0], time.perf_counter() - began[1]
        say(f"  {question.name}", cpu, wall, f"{verdict('a question', wall)}; {peak_mb():.0f} MB")


def captures(folder: Path, count: int) -> None:
    """Captures of one rank, three steps and about 2,000 events each, none like another, one after
    the other.
    """
    every = []
    for number in range(count):
        (at := folder / f"capture{number}").mkdir()
        recipe = ParallelRecipe(
            steps=3, layers=2, microbatches=2, stacks=True, hidden=1024 << number % 3, seed=number
        )
        parallel_job(recipe).run().write(at)
        every.append(at)
    events = load(every[0], cache=False).traces[0].events.height
    first, wall = analysed(every[:1])
    say("a process and its first capture", first, wall)
    all_of_them, wall_of_all = analysed(every)
    cpu, wall = (all_of_them - first) / (count - 1), (wall_of_all - wall) / (count - 1)
    say(
        f"each of {count - 1} more captures, {events:,} events",
        cpu,
        wall,
        verdict("a capture", cpu),
    )
    service, writer = around(folder, every)
    say("  what the service does around it", service, 0.0, verdict("a capture, around it", service))
    say("  and the process that writes tables", writer, 0.0)


def around(folder: Path, captures: list[Path]) -> tuple[float, float]:
    """CPU seconds of a capture, from its receipt to its commit, of the service itself and of its
    writer of tables.
    """
    state, objects, tables = (
        ServiceState(str(folder / "state.db")),
        ObjectStore(str(folder)),
        Tables(str(folder)),
    )
    writer = WriterProcess(str(folder / "state.db"), str(folder))
    writer.create()
    for at in captures:
        contents = {path.name: path.read_bytes() for path in sorted(at.iterdir())}
        files = tuple(
            CaptureFile(name, len(of), hashlib.sha256(of).hexdigest())
            for name, of in contents.items()
        )
        size = sum(map(len, contents.values()))
        record = CaptureRecord(
            id=at.name,
            day=DAY.isoformat(),
            job="job",
            uploader="ada",
            received_ns=DAY_NS,
            complete=False,
            bytes=size,
            files=files,
        )
        state.add_capture(record)
        for name, content in contents.items():
            objects.put(f"captures/{record.day}/{record.id}/{name}", content)
        state.complete_capture(record.id, "1")
    engine = ProcessEngine(1)
    pipeline = CapturePipeline(state, objects, tables, engine, writer=writer)
    pipeline.work()  # the first loads libraries
    began = cpu_s()
    while pipeline.work():
        pass
    pipeline.lead()
    engine.close()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    while pipeline.commit():
        pass
    own = cpu_s() - began
    writer.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    state.close()
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return own / (len(captures) - 1), spent / len(captures)


def analysed(captures: list[Path]) -> tuple[float, float]:
    """CPU and wall seconds of a process that checks and analyses these."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    engine = ProcessEngine(1)
    for at in captures:
        files = []
        for path in sorted(at.iterdir()):
            content = path.read_bytes()
            files.append(
                TaskFile(path.name, len(content), hashlib.sha256(content).hexdigest(), str(path))
            )
        engine.submit(EngineTask("check", tuple(files), {}, 60)).result()
        arguments: dict[str, str | int] = {"capture": at.name, "received_ns": DAY_NS, "job": "job"}
        engine.submit(EngineTask("analyse", tuple(files), arguments, 60)).result()
    wall = time.perf_counter() - began
    engine.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def clusters(folder: Path, captures: int, steps: int) -> None:
    """How much faster two workers of Dask analyse captures than one: the median of three turns."""
    from distributed import LocalCluster

    trace = TraceBuilder()
    for number in range(steps):
        busy_step(trace, number, 1000 * number)
    content = trace.text().encode()
    path = folder / "trace.json"
    path.write_bytes(content)
    file = TaskFile(path.name, len(content), hashlib.sha256(content).hexdigest(), str(path))
    tasks = [
        EngineTask("analyse", (file,), {"capture": f"c{at}", "job": "", "received_ns": DAY_NS}, 600)
        for at in range(captures)
    ]
    print(
        f"{captures} captures of {len(content) / 1e6:.1f} MB, load of this host {os.getloadavg()[0]:.1f}"
    )
    turns: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for _ in range(3):
        for workers, costs in turns.items():
            with LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address=":0",
                local_directory=str(folder),
            ) as cluster:
                engine = DaskEngine(cluster.scheduler_address.removeprefix("tcp://"), captures)
                # Each worker starts its process before anything counts.
                for future in [engine.submit(task) for task in tasks[: 2 * workers]]:
                    future.result()
                pids = [worker.pid for worker in cluster.workers.values()]
                began = tree_cpu_s(pids), time.perf_counter()
                sizes = {
                    len(future.result()) > 0 for future in [engine.submit(task) for task in tasks]
                }
                cpu, wall = tree_cpu_s(pids) - began[0], time.perf_counter() - began[1]
                engine.close()
            assert sizes == {True}
            costs.append((wall, cpu))
            say(
                f"{workers} workers",
                cpu,
                wall,
                f"{captures / wall:.2f} captures/s, {cpu / wall / workers:.2f} cores each",
            )
    pairs = list(zip(turns[1], turns[2], strict=True))
    scaling, of_cpu = (statistics.median(one[at] / two[at] for one, two in pairs) for at in (0, 1))
    held = "held" if scaling >= SCALING else "NOT held"
    print(f"two workers are {scaling:.2f} times as fast as one; limit {SCALING}: {held}")
    # The same work: where it took one worker more, the cores were slower meanwhile.
    print(
        f"one worker took {of_cpu:.2f} times the CPU time of two; without that: {scaling / of_cpu:.2f} times as fast"
    )


def tree_cpu_s(pids: list[int]) -> float:
    """CPU seconds of processes and of all that they started and that live."""
    tree = [
        member
        for pid in pids
        for member in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
    ]
    return sum(sum(member.cpu_times()[:2]) for member in tree)


def verdict(limit: str, value: float) -> str:
    return f"limit {LIMITS[limit]:g}: {'held' if value <= LIMITS[limit] else 'NOT held'}"


def agents(folder: Path, count: int, seconds: float) -> None:
    """Simulated agents that talk to a service."""
    cost = agents_of_fleet(folder, count, seconds)
    print(f"{count:,} agents for {seconds:g} s")
    for what, value, more in (
        ("agents, % of a core", 100 * cost["share"], ""),
        ("agents, MB", cost["memory"], ""),
        ("agents, MB after a request", cost["memory_then"], ""),
        ("agents, s until all are woken", cost["woken"], ""),
        (
            "agents, CPU s of a request",
            cost["request_cpu"],
            f"all know its instant after {cost['started']:.1f} s",
        ),
    ):
        print(f"  {what:40} {value:8.2f} {verdict(what, value)} {more}", flush=True)
    print(
        f"  the process that writes tables: {cost['writer']:.0f} MB at most, in {cost['writer_share']:.0%} of the time"
    )


PARTS: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "kernels": lambda folder, options: kernel_rows(folder, options.rows),
    "usage": lambda folder, options: usage_day(folder, options.devices),
    "month": lambda folder, options: month(folder, options.devices),
    "questions": lambda folder, options: questions(folder, options.rows, options.devices),
    "captures": lambda folder, options: captures(folder, options.captures),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS, "agents", "dask"], default=[])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--devices", type=int, default=8_000)
    parser.add_argument("--agents", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--captures", type=int, help="how many (default: 40; 12 for `dask`)")
    parser.add_argument("--steps", type=int, default=1_500, help="of each capture of `dask`")
    parser.add_argument("--here", help=argparse.SUPPRESS)  # the part to run in this process
    options = parser.parse_args()
    if options.here:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[options.here](Path(folder), options)
        return
    for part in options.parts or [*PARTS, "agents", "dask"]:
        if part in PARTS:
            sizes = {
                "--rows": options.rows,
                "--devices": options.devices,
                "--captures": options.captures or 40,
            }
            arguments = [text for name, size in sizes.items() for text in (name, str(size))]
            # The process that writes tables has one thread of Polars.
            environment = {**os.environ, "POLARS_MAX_THREADS": "1"} if part == "usage" else None
            subprocess.run(
                [sys.executable, __file__, *arguments, "--here", part], check=True, env=environment
            )
            continue
        with tempfile.TemporaryDirectory() as folder:  # what costs is in processes of its own
            if part == "agents":
                agents(Path(folder), options.agents, options.seconds)
            else:
                clusters(Path(folder), options.captures or 12, options.steps)


if __name__ == "__main__":
    main()
