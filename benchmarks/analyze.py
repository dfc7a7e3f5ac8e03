"""What the analyses of a report cost: on one trace, and for a job of many ranks.

    python benchmarks/analyze.py [--runs 5] [--trace FILE]
    python benchmarks/analyze.py --job FOLDER [--ranks 8 16 64]

The first prints the processor time of each analysis for h100_owlv2, of the first set (the core of
the report), of all of them, and their ratio; the least of several runs, each on a trace that nobody
has looked at. An analysis that shares something with those before it in the list pays only for the
rest. The ratio is told three times: of the analyses alone (the strict one: reading is in neither),
with reading, which both need, in both, and of what a user waits for: the whole command, in turns.

The second makes a job (benchmarks/make_job.py) in FOLDER where there is none yet, reports so many
of its ranks without and with our cache, and prints time, the peak of anonymous memory (without
mapped files, of the process and its readers) and the size of the page. Only Linux tells anonymous
memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import traceloom
from traceloom.report import ReportOptions
from traceloom.report.document import UnknownValues
from traceloom.report.sections import CORE, EXTRA_KEYS, collect_reasons, load_extra_sections
from traceloom.report.sections.section import Measurements, measure
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

HERE = Path(__file__).resolve().parent
TRACE = HERE.parents[1] / "shared" / "data" / "kineto" / "h100_owlv2.json.gz"
_EVERY_S = 0.05  # how often memory is looked at


def spent(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time of all threads, in ms, and what the work gave."""
    began = time.process_time()
    result = work()
    return (time.process_time() - began) * 1000, result


def once(trace: Trace) -> dict[str, float]:
    """Every analysis on a fresh copy of the trace: ms by name, the first set as `core`."""
    fresh = dataclasses.replace(trace)
    options, session = ReportOptions(), Session((fresh,), "one")
    times = {"core": spent(partial(measure, fresh, None, by_shape=False))[0]}
    sections = load_extra_sections()
    for section in sections:
        taken, result = spent(partial(section.measure, fresh, options))
        study = Measurements(session, session, options, [result])
        built, _ = spent(
            partial(
                section.build, study, UnknownValues(session.epoch_ns, collect_reasons(sections))
            )
        )
        times[section.key] = taken + built
    return times


def one_trace(path: Path, runs: int) -> None:
    """Print the times of one trace."""
    reading = min(spent(partial(_read, path))[0] for _ in range(runs))
    trace = _read(path)
    found = [once(trace) for _ in range(runs)]
    least = {name: min(times[name] for times in found) for name in found[0]}
    print(f"{path.name}: {trace.events.height:,} events; processor time, the least of {runs} runs")
    for name, ms in least.items():
        print(f"  {name:<18}{ms:8.0f} ms")
    whole = min(sum(times.values()) for times in found)
    core = least["core"]
    print(f"first set {core:.0f} ms, all {whole:.0f} ms: {whole / core:.2f} times")
    both = (reading + whole) / (reading + core)
    print(
        f"with {reading:.0f} ms of reading: {reading + core:.0f} ms, {reading + whole:.0f} ms: {both:.2f} times"
    )
    first, everything = by_turns(path, runs)
    print(
        f"whole command: {first:.2f} s with the first set, {everything:.2f} s with all: {everything / first:.2f} times"
    )


def by_turns(path: Path, runs: int) -> tuple[float, float]:
    """Seconds that a user waits for `traceloom report` with the first set, and with all analyses
    (no findings).

    Without the cache; medians of runs that take turns.
    """
    took: dict[str, list[float]] = {CORE: [], ",".join((CORE, *EXTRA_KEYS)): []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(runs):
            for only, times in took.items():
                out = ["-o", f"{folder}/report.json", "--force", "--quiet", "--no-cache"]
                began = time.perf_counter()
                subprocess.run(
                    [sys.executable, "-m", "traceloom", "report", str(path), "--only", only, *out],
                    check=True,
                )
                times.append(time.perf_counter() - began)
    first, everything = (statistics.median(times) for times in took.values())
    return first, everything


def _read(path: Path) -> Trace:
    trace = traceloom.load(path, cache=False).traces[0]
    trace.frames()  # all made, so that no analysis pays for it
    return trace


def anonymous_kb(process: int) -> int:
    """Anonymous memory of a process and those it has started."""
    total = 0
    try:
        for line in Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1])
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text(encoding="ascii").split():
                total += anonymous_kb(int(child))
    except OSError:  # it has ended meanwhile
        return total
    return total


def reported(folder: Path, ranks: int, cache: Path, out: Path) -> None:
    """Report the first ranks of a job and print what it cost."""
    chosen = ["--rank", ",".join(map(str, range(ranks)))]
    command = [
        sys.executable,
        "-m",
        "traceloom",
        "report",
        str(folder),
        *chosen,
        "--quiet",
        "--force",
    ]
    began, before = time.perf_counter(), os.times()
    process = subprocess.Popen(
        [*command, "-o", str(out / "job.html"), "-o", str(out / "job.json")],
        env={**os.environ, "TRACELOOM_CACHE_DIR": str(cache)},
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous_kb(process.pid))
        time.sleep(_EVERY_S)
    if process.returncode:
        raise SystemExit(f"the report ended with code {process.returncode}")
    after = os.times()
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    sizes = [(out / name).stat().st_size / 1e6 for name in ("job.html", "job.json")]
    wall = time.perf_counter() - began
    print(
        f"  {ranks:3} ranks: {wall:6.1f} s, {cpu:6.1f} s of processors, peak {peak / 1024:5.0f} MB, "
        f"page {sizes[0]:.1f} MB, JSON {sizes[1]:.1f} MB",
        flush=True,
    )


def job(folder: Path, counts: list[int]) -> None:
    """Print what reports of a job cost."""
    if not (folder / "capture.json").exists():
        made = [sys.executable, str(HERE / "make_job.py"), str(folder), "--ranks", str(max(counts))]
        subprocess.run(made, check=True)
    with tempfile.TemporaryDirectory() as scratch:
        cache, out = Path(scratch) / "cache", Path(scratch) / "out"
        out.mkdir()
        for ranks in counts:
            shutil.rmtree(cache, ignore_errors=True)
            for words in ("files read", "from the cache"):
                print(words, end="")
                reported(folder, ranks, cache, out)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--job", type=Path, help="folder of a made job; made where it is empty")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64])
    asked = parser.parse_args()
    if asked.job is not None:
        job(asked.job, asked.ranks)
    elif asked.trace.exists():
        one_trace(asked.trace, asked.runs)
    else:
        print(f"{asked.trace} is not here; name another with --trace")


if __name__ == "__main__":
    main()
