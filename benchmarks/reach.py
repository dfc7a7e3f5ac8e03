"""What a whole report costs beside its peers: processor time of whole processes, cold, all
sections, in one run.

    python benchmarks/reach.py [--runs 5] [--tracelens COMMAND] [--job FOLDER]

For each trace the medians of interleaved runs: `traceloom report X -o out.json` without a cache
(all sections and findings), the short report on a terminal cold and warm (the second one of an
unchanged file), HolisticTraceAnalysis
0.5.0 (load and all its analyses), and TraceLens where its command is given (`TraceLens_generate_perf_report_pytorch`,
which is not on PyPI). `json.load` is what Python's own module takes for the text alone. `--job`
adds a made job of many ranks (benchmarks/make_job.py) reported by ours alone, by the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from read import DATA, HERE, OUT, PEER, Run, install_peer, measured

RUNS = {
    "h100_owlv2": ["kineto/h100_owlv2.json.gz"],
    "mi300_qwen_0.5b": ["kineto/mi300_qwen_0.5b.json.gz"],
    "h100_qwen_0.5b": ["kineto/h100_qwen_0.5b.json.gz"],
    "v100_ns_resolution": ["kineto/v100_ns_resolution.json.gz"],
    "DLRM, 8 ranks": [f"multirank/dlrm_rank{rank}.kineto.json.gz" for rank in range(8)],
}
JSON_LOAD = "import gzip, json, sys\nfor path in sys.argv[1:]: json.load(gzip.open(path))"


def commands(paths: list[str], tracelens: str | None) -> dict[str, list[str]]:
    """The processes that are compared."""
    report = [sys.executable, "-m", "traceloom", "report", *paths, "-q"]
    cold = [*report, "--no-cache"]
    compared = {
        "all": [*cold, "--force", "-o", str(OUT / "report.json")],
        "short": cold,
        "warm": report,
        "HTA": [str(PEER), str(HERE / "hta_whole.py"), *paths, "--all"],
        "json.load": [sys.executable, "-c", JSON_LOAD, *paths],
    }
    if tracelens and len(paths) == 1:
        folder = str(OUT / "tracelens")
        compared["TraceLens"] = [
            tracelens,
            "--profile_json_path",
            paths[0],
            "--output_csvs_dir",
            folder,
        ]
    return compared


def compare(name: str, paths: list[str], runs: int, tracelens: str | None) -> None:
    """One line: medians of processor time and ratios."""
    turns: dict[str, list[Run]] = {}
    for turn in range(runs + 1):
        for who, command in commands(paths, tracelens).items():
            run = measured(command)
            if turn:  # the first one only warms up
                turns.setdefault(who, []).append(run)
    cpu = {who: statistics.median(run.cpu_s for run in some) for who, some in turns.items()}
    wall = {who: statistics.median(run.wall_s for run in some) for who, some in turns.items()}
    peers = "".join(
        f"  {who} {cpu[who]:6.2f} ({cpu[who] / cpu['all']:4.1f}x)"
        for who in ("HTA", "TraceLens")
        if who in cpu
    )
    print(
        f"{name:20} all {cpu['all']:5.2f}  short {cpu['short']:5.2f}  warm {cpu['warm']:5.2f} (wall {wall['warm']:.2f})"
        f"{peers}  wall of short / json.load {wall['short'] / wall['json.load']:4.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", help="only the runs whose name holds this")
    parser.add_argument("--tracelens", help="its command, where it is installed")
    parser.add_argument("--job", type=Path, help="folder with a made job, made where there is none")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    install_peer()
    print(
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, medians of {args.runs} runs, processor s"
    )
    for name, files in RUNS.items():
        if not args.only or args.only in name:
            compare(name, [str(DATA / file) for file in files], args.runs, args.tracelens)
    if args.job:
        if not args.job.exists():
            subprocess.run([sys.executable, str(HERE / "make_job.py"), str(args.job)], check=True)
        report = [sys.executable, "-m", "traceloom", "report", str(args.job), "-q", "--no-cache"]
        run = measured(report)
        print(
            f"{args.job.name}: {run.wall_s:.1f} s by the clock, {run.cpu_s:.1f} s of processor time"
        )


if __name__ == "__main__":
    main()
