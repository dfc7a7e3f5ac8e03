"""Linking: nodes per second as traces grow, and whole processes against the linker of
mlcommons/chakra.

    python benchmarks/link.py [--runs 3] [--peer PYTHON]

Made traces of 10 k to 1 M events lie under benchmarks/out. The peer is `chakra_trace_link` of
mlc-chakra 1.0.0 with `et_replay` of facebookresearch/param (which is not on PyPI: install both by
hand and give that Python); its step that calls HolisticTraceAnalysis is switched off, because it
fails on these files. Without --peer ours is measured alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.bigfile import write_big

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
DATA = HERE.parents[1] / "shared" / "data"
PAIRS = ("linear", "mismatched_resnet")
SOURCE = DATA / "kineto" / "h100_qwen_0.5b.json.gz"
# An installed package has its bytecode; without this an editable one would be compiled again in
# every run.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
}
OURS = """
import json, resource, sys, time
from traceloom.graph.job import join_ranks as join
from traceloom.graph.rank import link_rank
from traceloom.formats import load
from traceloom.graph import calibrate
times = [time.perf_counter()]
trace = load(sys.argv[1], cache=False).traces[0]; times.append(time.perf_counter())
graph = join([link_rank(trace, None)]); times.append(time.perf_counter())
graph = calibrate(graph); times.append(time.perf_counter())
took = [after - before for before, after in zip(times, times[1:])]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
print(json.dumps([trace.events.height, graph.nodes.height, graph.edges.height, *took, peak]))
"""
PEER = """
import sys
from chakra.src.trace_link import trace_linker
trace_linker.TraceLinker.load_sync_dependencies = lambda self, *a, **k: {}
from chakra.src.trace_link.trace_link import main
sys.argv = ["link", "--rank", "0", "--chakra-host-trace", sys.argv[1], "--chakra-device-trace", sys.argv[2],
            "--output-file", sys.argv[3]]
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer", type=Path, metavar="PYTHON")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    growth(args.runs)
    whole(args.runs, args.peer)


def growth(runs: int) -> None:
    """How time grows with the number of events, each size in a process of its own."""
    print(
        f"{'events':>10} {'nodes':>10} {'edges':>10} {'load s':>7} {'link s':>7} {'calibr. s':>9} "
        f"{'nodes/s':>10} {'peak MB':>8}"
    )
    for events in (10_000, 100_000, 1_000_000):
        path = OUT / f"link-{events}.json"
        if not path.exists():
            write_big(path, events * 400, SOURCE if SOURCE.exists() else None)
        found = []
        for _ in range(runs):
            done = subprocess.run(
                [sys.executable, "-c", OURS, str(path)],
                capture_output=True,
                text=True,
                check=True,
                env=ENVIRONMENT,
            )
            found.append(json.loads(done.stdout))
        count, nodes, edges, load, link, calibrate, peak = (
            statistics.median(column) for column in zip(*found, strict=True)
        )
        speed = nodes / (link + calibrate)
        print(
            f"{count:>10,.0f} {nodes:>10,.0f} {edges:>10,.0f} {load:>7.2f} {link:>7.2f} {calibrate:>9.2f} "
            f"{speed:>10,.0f} {peak:>8.0f}",
            flush=True,
        )


def whole(runs: int, peer: Path | None) -> None:
    """A process from start to end on a pair of host and device trace."""
    if not (DATA / "pairs").is_dir():
        print(f"no pairs of traces under {DATA}: whole processes are not measured")
        return
    print(f"\n{'pair':<20} {'ours s':>7} {'exit':>5} {'peer s':>8} {'ratio':>7}")
    for name in PAIRS:
        files = [str(DATA / "pairs" / f"{name}.{kind}.json.gz") for kind in ("host", "kineto")]
        with tempfile.TemporaryDirectory(dir=OUT) as folder:
            command = [
                sys.executable,
                "-m",
                "traceloom",
                "link",
                *files,
                "--no-cache",
                "--no-law",
                "--quiet",
            ]
            times, code = timed([*command, "-o", f"{folder}/out.et"], runs)
            line = f"{name:<20} {times:>7.2f} {code:>5}"
            if peer is not None:
                theirs, _ = timed(
                    [str(peer), "-c", PEER, *plain(files, folder), f"{folder}/out.json"], 1
                )
                line += f" {theirs:>8.1f} {theirs / times:>6.0f}x"
            print(line, flush=True)


def timed(command: list[str], runs: int) -> tuple[float, int]:
    """Median of the wall times, and the exit code."""
    times, code = [], 0
    for number in range(runs):
        started = time.perf_counter()
        code = subprocess.run(
            [part.replace("out.", f"out{number}.") for part in command],
            capture_output=True,
            env=ENVIRONMENT,
            check=False,
        ).returncode
        times.append(time.perf_counter() - started)
    return statistics.median(times), code


def plain(files: list[str], folder: str) -> list[str]:
    """The files without compression, which the peer does not read."""
    import gzip

    out = []
    for file in files:
        target = Path(folder) / Path(file).name.removesuffix(".gz")
        target.write_bytes(gzip.decompress(Path(file).read_bytes()))
        out.append(str(target))
    return out


if __name__ == "__main__":
    main()
