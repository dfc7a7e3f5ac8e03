"""Reading and reporting against HolisticTraceAnalysis 0.5.0: time and peak memory, in one run,
without our cache.

    python benchmarks/read.py [--runs 5] [--huge] [--only NAME]

Makes a virtual environment for HolisticTraceAnalysis and big files under benchmarks/out. Prints
medians of interleaved runs. `whole process` is a process from start to end (`traceloom report X
--only core -o out.json` against load and seven analyses), `load in process` the load inside a
process that has imported everything; processor time is that of all processes and threads. Memory is
the peak over a process and its children together, sampled in runs of their own: `resident` counts
the pages of libraries that are mapped, too (what several processes share is counted once), `own` is
what only this process has (anonymous memory). Where other programs are running, processor time says
more than time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
DATA = HERE.parents[1] / "shared" / "data"
PEER = OUT / "hta" / "bin" / "python"
FILES = ("kineto/h100_owlv2", "kineto/h100_qwen_0.5b", "kineto/a100_ddp_nccl", "diff/a100_control")
# An installed package has its bytecode; without this an editable one would be compiled again in
# every run.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
}
OURS_LOAD = """
import json, os, sys, time
from traceloom.formats import load
started, cpu = time.perf_counter(), sum(os.times()[:4])
load(sys.argv[1], cache=False)
print(json.dumps({"load_s": time.perf_counter() - started, "load_cpu_s": sum(os.times()[:4]) - cpu}))
"""


@dataclass(frozen=True)
class Run:
    """One process: wall time, processor time of all its threads, peak memory, and what it printed."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    answer: dict[str, float]


def measured(command: list[str]) -> Run:
    """Run a process; its own peak memory comes from wait4."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ... ended with code {process.returncode}")
    last = printed.strip().splitlines()[-1:] or [""]
    return Run(
        wall_s,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss / 1024,
        json.loads(last[0]) if last[0].startswith("{") else {},
    )


def peaks(command: list[str]) -> tuple[float, float]:
    """Most memory of a process and its children together: resident and own, in MB."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    resident = own = 0.0
    while process.poll() is None:
        family = [_memory(pid) for pid in _family(process.pid)]
        resident = max(resident, sum(one for one, _ in family))
        own = max(own, sum(one for _, one in family))
        time.sleep(0.002)
    return resident, own


def _family(pid: int) -> list[int]:
    try:
        children = [
            Path(task, "children").read_text().split()
            for task in Path(f"/proc/{pid}/task").iterdir()
        ]
    except OSError:  # gone meanwhile
        return []
    return [pid, *(one for some in children for child in some for one in _family(int(child)))]


def _memory(pid: int) -> tuple[float, float]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0.0, 0.0
    told = {line.split(":")[0]: float(line.split()[1]) / 1024 for line in lines}
    return told.get("Pss", 0.0), told.get("Pss_Anon", 0.0)


def install_peer() -> None:
    """HolisticTraceAnalysis in a virtual environment of its own."""
    if PEER.exists():
        return
    print("installing HolisticTraceAnalysis 0.5.0 ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(OUT / "hta")], check=True)
    subprocess.run(
        [str(PEER), "-m", "pip", "install", "-q", "HolisticTraceAnalysis==0.5.0"], check=True
    )


def commands(path: Path) -> dict[str, list[str]]:
    """The four processes that are compared."""
    # The core of the report is what the seven analyses of the peer are about.
    report = [
        sys.executable,
        "-m",
        "traceloom",
        "report",
        str(path),
        "--no-cache",
        "--force",
        "--only",
        "core",
    ]
    return {
        "ours whole": [*report, "-o", str(OUT / "report.json")],
        "peer whole": [str(PEER), str(HERE / "hta_whole.py"), str(path), "--whole"],
        "ours load": [sys.executable, "-c", OURS_LOAD, str(path)],
        "peer load": [str(PEER), str(HERE / "hta_whole.py"), str(path)],
    }


def compare(path: Path, runs: int) -> None:
    """One line: medians and ratios for a file."""
    found: dict[str, list[Run]] = {name: [] for name in commands(path)}
    for turn in range(runs + 1):
        for name, command in commands(path).items():
            run = measured(command)
            if turn:  # the first one only warms up
                found[name].append(run)
    wall = {name: statistics.median(run.wall_s for run in some) for name, some in found.items()}
    cpu = {name: statistics.median(run.cpu_s for run in some) for name, some in found.items()}
    memory = {
        name: [peaks(command) for _ in range(3)]
        for name, command in commands(path).items()
        if "whole" in name
    }
    (resident, own) = (
        {name: max(one[at] for one in some) for name, some in memory.items()} for at in (0, 1)
    )
    load, load_cpu = (
        {
            name: statistics.median(run.answer[key] for run in some)
            for name, some in found.items()
            if "load" in name
        }
        for key in ("load_s", "load_cpu_s")
    )
    print(
        f"{path.name.removesuffix('.json.gz'):16}"
        f" {wall['ours whole']:7.2f} {wall['peer whole']:7.2f} {wall['peer whole'] / wall['ours whole']:6.1f}x"
        f" {cpu['ours whole']:7.2f} {cpu['peer whole']:7.2f} {cpu['peer whole'] / cpu['ours whole']:6.1f}x"
        f" {load['ours load']:7.2f} {load['peer load']:7.2f} {load['peer load'] / load['ours load']:6.1f}x"
        f" {load_cpu['ours load']:7.2f} {load_cpu['peer load']:7.2f}"
        f" {load_cpu['peer load'] / load_cpu['ours load']:6.1f}x"
        f" {resident['ours whole']:6.0f} {resident['peer whole']:6.0f}"
        f" {resident['ours whole'] / resident['peer whole']:6.2f} "
        f" {own['ours whole']:6.0f} {own['peer whole']:6.0f} {own['ours whole'] / own['peer whole']:6.2f}",
        flush=True,
    )


def alone(size: str, runs: int) -> None:
    """Our figures for a made file."""
    path = OUT / f"{size.lower()}.json"
    if not path.exists():
        subprocess.run([sys.executable, str(HERE / "make_trace.py"), size, str(path)], check=True)
    some = [measured([sys.executable, "-c", OURS_LOAD, str(path)]) for _ in range(runs)]
    load_s = statistics.median(run.answer["load_s"] for run in some)
    peak = statistics.median(run.peak_mb for run in some)
    json_mb = path.stat().st_size / 2**20
    speed = f"load {load_s:.1f} s, {json_mb / load_s:.0f} MB/s"
    print(f"made {size}: {speed}, peak {peak:.0f} MB = {peak / json_mb:.2f} x the JSON", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--huge", action="store_true", help="also a made file of 5 GB")
    parser.add_argument("--only", help="only the files whose name holds this")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    install_peer()
    print(
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, medians of {args.runs} interleaved runs"
    )
    groups = (
        "whole process, s",
        "its processor time, s",
        "load in process, s",
        "its processor time, s",
    )
    print(
        f"{'':16} {' '.join(f'{group:^23}' for group in groups)} {'peak resident, MB':^20}  {'peak own, MB':^20}"
    )
    heads = f"{'ours':>7} {'HTA':>7} {'ratio':>7}"
    small = f"{'ours':>6} {'HTA':>6} {'ratio':>6}"
    print(f"{'':16} {heads} {heads} {heads} {heads} {small}  {small}")
    for name in FILES:
        if not args.only or args.only in name:
            compare(DATA / f"{name}.json.gz", args.runs)
    if not args.only:
        alone("1GB", min(args.runs, 3))
    if args.huge:
        alone("5GB", 1)


if __name__ == "__main__":
    main()
