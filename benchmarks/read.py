"""Reading and reporting against HolisticTraceAnalysis 0.5.0: time and peak memory, in one run, without our cache.

    python benchmarks/read.py [--runs 5] [--huge] [--only NAME]

Makes a virtual environment for HolisticTraceAnalysis and big files under benchmarks/out. Prints medians of interleaved
runs. `whole process` is a process from start to end (`traceloom report X --only core -o out.json` against load and
seven analyses), `load in process` the load inside a process that has imported everything, memory the peak of the whole
process. Where other programs are running, processor time says more than time.
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
# An installed package has its bytecode; without this an editable one would be compiled again in every run.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
OURS_LOAD = """
import json, sys, time
from traceloom.read import load
started, cpu = time.perf_counter(), time.process_time()
load(sys.argv[1], cache=False)
print(json.dumps({"load_s": time.perf_counter() - started, "load_cpu_s": time.process_time() - cpu}))
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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
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


def install_peer() -> None:
    """HolisticTraceAnalysis in a virtual environment of its own."""
    if PEER.exists():
        return
    print("installing HolisticTraceAnalysis 0.5.0 ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(OUT / "hta")], check=True)
    subprocess.run([str(PEER), "-m", "pip", "install", "-q", "HolisticTraceAnalysis==0.5.0"], check=True)


def commands(path: Path) -> dict[str, list[str]]:
    """The four processes that are compared."""
    # The core of the report is what the seven analyses of the peer are about.
    report = [sys.executable, "-m", "traceloom", "report", str(path), "--no-cache", "--force", "--only", "core"]
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
    peak = {name: statistics.median(run.peak_mb for run in some) for name, some in found.items()}
    load, load_cpu = (
        {name: statistics.median(run.answer[key] for run in some) for name, some in found.items() if "load" in name}
        for key in ("load_s", "load_cpu_s")
    )
    print(
        f"{path.name.removesuffix('.json.gz'):16}"
        f" {wall['ours whole']:7.2f} {wall['peer whole']:7.2f} {wall['peer whole'] / wall['ours whole']:6.1f}x"
        f" {cpu['ours whole']:7.2f} {cpu['peer whole']:7.2f} {cpu['peer whole'] / cpu['ours whole']:6.1f}x"
        f" {load['ours load']:7.2f} {load['peer load']:7.2f} {load['peer load'] / load['ours load']:6.1f}x"
        f" {load_cpu['ours load']:7.2f} {load_cpu['peer load']:7.2f}"
        f" {load_cpu['peer load'] / load_cpu['ours load']:6.1f}x"
        f" {peak['ours whole']:6.0f} {peak['peer whole']:6.0f} {peak['ours whole'] / peak['peer whole']:6.2f}",
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--huge", action="store_true", help="also a made file of 5 GB")
    parser.add_argument("--only", help="only the files whose name holds this")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    install_peer()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, medians of {args.runs} interleaved runs")
    groups = ("whole process, s", "its processor time, s", "load in process, s", "its processor time, s")
    print(f"{'':16} {' '.join(f'{group:^23}' for group in groups)} {'peak memory, MB':^20}")
    heads = f"{'ours':>7} {'HTA':>7} {'ratio':>7}"
    print(f"{'':16} {heads} {heads} {heads} {heads} {'ours':>6} {'HTA':>6} {'ratio':>6}")
    for name in FILES:
        if not args.only or args.only in name:
            compare(DATA / f"{name}.json.gz", args.runs)
    if not args.only:
        alone("1GB", min(args.runs, 3))
    if args.huge:
        alone("5GB", 1)


if __name__ == "__main__":
    main()
