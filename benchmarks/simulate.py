"""What a simulation costs beside ASTRA-sim: processor time and peak memory of whole processes,
`.et` in, result out.

    python benchmarks/simulate.py [--astra-sim BINARY] [--aware-binary BINARY] [--runs 3] [--only
    NAME]

Both read the same files: `traceloom simulate DIR --mode astra-sim ... --json`, and the user's own
build of the analytical back end (without it, ours alone); 64 ranks of 2,000 nodes in each mode. Then
the time per node from 10,000 to 1,000,000 nodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
from read import OUT, Run, measured

from traceloom.formats.chakra.et_pb2 import CollectiveCommType, NodeType
from traceloom.formats.chakra.nodes import (
    SIMULATOR_SCHEMA,
    Pairs,
    SimulatorNodes,
    build_metadata,
    write_simulator_nodes,
)
from traceloom.workload.simulate.evaluation import build_plan, evaluate_on_network
from traceloom.workload.simulate.inputs import open_input
from traceloom.workload.simulate.machine import Dimension, Machine
from traceloom.workload.simulate.transfers import (
    compute_recorded_transfers,
    compute_transfers,
    find_operations,
)

_MIB = 1 << 20
_COMPUTE, _COLLECTIVE = int(NodeType.COMP_NODE), int(NodeType.COMM_COLL_NODE)


def chain(ranks: int, nodes: int, collectives: int, size: int = _MIB) -> list[SimulatorNodes]:
    """On every rank one node after the other, computation and all_reduces."""
    kind = np.full(nodes, _COMPUTE)
    kind[np.linspace(nodes // (collectives + 1), nodes - 1, collectives).astype(int)] = _COLLECTIVE
    meets = kind == _COLLECTIVE
    frame = pl.DataFrame(
        {
            "id": np.arange(1, nodes + 1),
            "name": pl.Series(["node"]).new_from_index(0, nodes),
            "type": kind,
            "duration_us": np.where(meets, 0, 3),
            "is_cpu_op": np.zeros(nodes, np.bool_),
            "comm_type": pl.Series(np.where(meets, int(CollectiveCommType.ALL_REDUCE), -1)).replace(
                -1, None
            ),
            "comm_size": pl.Series(np.where(meets, size, -1)).replace(-1, None),
        }
    )
    columns = [
        frame[c].cast(t) if c in frame.columns else pl.lit(None, t).alias(c)
        for c, t in SIMULATOR_SCHEMA.items()
    ]
    plain = SimulatorNodes(frame.select(columns), Pairs(np.arange(1, nodes), np.arange(1, nodes)))
    return [plain] * ranks


def independent(ranks: int, nodes: int) -> list[SimulatorNodes]:
    """Nothing waits for anything."""
    (made, *_) = chain(1, nodes, 0)
    return [SimulatorNodes(made.nodes, Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64)))] * ranks


def write(
    name: str, ranks: list[SimulatorNodes], topology: str, algorithm: str, splits: int
) -> Path:
    """The files of one workload and its configuration."""
    folder = OUT / "simulate" / name
    metadata = build_metadata("traceloom-benchmark", {})
    write_simulator_nodes(folder / "et", [(metadata, nodes) for nodes in ranks], {}, force=True)
    count = len(ranks)
    (folder / "network.yml").write_text(
        f"topology: [ {topology} ]\nnpus_count: [ {count} ]\nbandwidth: [ 50.0 ]\nlatency: [ 500.0 ]\n"
    )
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    system = {
        "scheduling-policy": "LIFO",
        "endpoint-delay": 10,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": splits,
        **{f"{kind}-implementation": [algorithm] for kind in kinds},
        "collective-optimization": "localBWAware",
        "local-mem-bw": 1600,
        "boost-mode": 0,
    }
    (folder / "system.json").write_text(json.dumps(system))
    (folder / "memory.json").write_text(json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}))
    return folder


WORKLOADS: dict[str, tuple[Callable[[], list[SimulatorNodes]], str, str, int, str]] = {
    "8 ranks x 125,000 nodes, 2,500 collectives": (
        lambda: chain(8, 125_000, 2500),
        "Ring",
        "ring",
        4,
        "unaware",
    ),
    "1,024 ranks x 100 nodes, 2 ring all_reduces": (
        lambda: chain(1024, 100, 2),
        "Ring",
        "ring",
        4,
        "unaware",
    ),
    "2 x 8,000 independent nodes": (lambda: independent(2, 8000), "Ring", "ring", 1, "unaware"),
    "64 ranks x 2,000 nodes, 200 all_reduces, unaware": (
        lambda: chain(64, 2000, 200),
        "Switch",
        "ring",
        4,
        "unaware",
    ),
    "64 ranks x 2,000 nodes, 200 all_reduces, aware": (
        lambda: chain(64, 2000, 200),
        "Switch",
        "ring",
        4,
        "aware",
    ),
    "64 ranks x 2,000 nodes, 20 direct, aware": (
        lambda: chain(64, 2000, 20),
        "Switch",
        "direct",
        4,
        "aware",
    ),
    "64 ranks x 2,000 nodes, 200 all_reduces, native": (
        lambda: chain(64, 2000, 200),
        "Switch",
        "ring",
        4,
        "native",
    ),
    "64 MiB direct all_reduce, congested Ring of 256": (
        lambda: chain(256, 1, 1, 64 * _MIB),
        "Ring",
        "direct",
        1,
        "aware",
    ),
}


def ours(folder: Path, mode: str) -> list[str]:
    """Our command: a back end of ASTRA-sim, or `native`."""
    own = ["--mode", "astra-sim", "--congestion", mode] if mode != "native" else []
    return [
        sys.executable,
        "-m",
        "traceloom",
        "simulate",
        str(folder / "et"),
        "--json",
        "-q",
        "--network",
        str(folder / "network.yml"),
        "--system",
        str(folder / "system.json"),
        *own,
    ]


def theirs(binary: str, folder: Path) -> list[str]:
    """The peer's command."""
    return [
        binary,
        f"--workload-configuration={folder / 'et' / 'workload'}",
        f"--comm-group-configuration={folder / 'et' / 'comm_groups.json'}",
        f"--system-configuration={folder / 'system.json'}",
        f"--remote-memory-configuration={folder / 'memory.json'}",
        f"--network-configuration={folder / 'network.yml'}",
        f"--logging-folder={folder / 'log'}",
    ]


def compare(name: str, binaries: dict[str, str | None], runs: int) -> None:
    """One line: medians of both, and their ratios."""
    make, topology, algorithm, splits, congestion = WORKLOADS[name]
    folder = write(
        "".join(c if c.isalnum() else "-" for c in name), make(), topology, algorithm, splits
    )
    commands = {"ours": ours(folder, congestion)}
    if binaries.get(congestion):
        commands["ASTRA-sim"] = theirs(str(binaries[congestion]), folder)
    turns: dict[str, list[Run]] = {who: [] for who in commands}
    for _ in range(runs):
        for who, command in commands.items():
            turns[who].append(measured(command))
    cpu = {who: statistics.median(run.cpu_s for run in some) for who, some in turns.items()}
    peak = {who: statistics.median(run.peak_mb for run in some) for who, some in turns.items()}
    line = f"{name:50} ours {cpu['ours']:6.2f} s {peak['ours']:6.0f} MB"
    if "ASTRA-sim" in cpu:
        line += f"  ASTRA-sim {cpu['ASTRA-sim']:6.2f} s {peak['ASTRA-sim']:6.0f} MB"
        line += f"  time x {cpu['ours'] / cpu['ASTRA-sim']:.3f}, memory x {peak['ours'] / peak['ASTRA-sim']:.2f}"
        same = ends_of(commands["ours"]) == ends_of_peer(commands["ASTRA-sim"])
        line += "  same ends" if same else "  DIFFERENT ENDS"
    print(line, flush=True)


def ends_of(command: list[str]) -> dict[int, int]:
    """When our ranks end."""
    document = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return {rank["rank"]: rank["end_ns"] for rank in document["ranks"]}


def ends_of_peer(command: list[str]) -> dict[int, int]:
    """When the peer's ranks end, as its log says."""
    text = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    ends = {}
    for line in text.splitlines():
        if "finished," in line:
            head, _, tail = line.partition("finished,")
            ends[int(head.split("sys[")[1].split("]")[0])] = int(tail.split()[0])
    return ends


def scaling() -> None:
    """Ours alone, from 10,000 to 1,000,000 nodes."""
    for nodes in (1250, 12_500, 125_000):
        folder = write(f"scaling-{nodes}", chain(8, nodes, nodes // 50), "Ring", "ring", 4)
        run = measured(ours(folder, "unaware"))
        print(
            f"{8 * nodes:9,} nodes {run.cpu_s:6.2f} s  {run.cpu_s / (8 * nodes) * 1e6:6.2f} us per node"
        )


def native() -> None:
    """The mode `native` without contention, in this process: reading, making ready, and one
    simulation.
    """
    for nodes in (1250, 12_500, 125_000):
        folder = write(f"scaling-{nodes}", chain(8, nodes, nodes // 50), "Switch", "ring", 4)
        started = time.perf_counter()
        graph = open_input(folder / "et").graph
        read = time.perf_counter() - started
        started = time.perf_counter()
        plan, of = build_plan(graph), find_operations(graph)
        ready = time.perf_counter() - started
        network = Machine((Dimension("switch", 8, 50.0, 500.0),))
        took = []
        for _ in range(5):
            started = time.perf_counter()
            evaluate_on_network(
                graph,
                of,
                compute_transfers(network, of.table, compute_recorded_transfers(graph, of), None),
                plan=plan,
            )
            took.append(time.perf_counter() - started)
        line = f"native, {8 * nodes:9,} nodes: read {read:5.2f} s, made ready {ready:5.2f} s"
        print(f"{line}, simulated in {statistics.median(took) * 1000:6.1f} ms (median of 5)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--astra-sim", metavar="BINARY", help="a build of the congestion-unaware back end"
    )
    parser.add_argument(
        "--aware-binary", metavar="BINARY", help="a build of the congestion-aware back end"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="only workloads whose name holds this")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    binaries = {"unaware": args.astra_sim, "aware": args.aware_binary}
    for name in WORKLOADS:
        if not args.only or args.only in name:
            compare(name, binaries, args.runs)
    scaling()
    native()


if __name__ == "__main__":
    main()
