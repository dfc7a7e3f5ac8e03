"""The utility report: results of analyses before and after rewriting, and sizes that can be
replayed.

Sizes are rounded by their prime factors (`round_prime_factors`), so views and matrix products stay
consistent. Sums (parts of a concatenation, windows of a convolution) stay consistent only by
chance. If an operator is inconsistent, its smallest factor that is still rounded is kept, in all
sizes of all files: small factors reveal least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl

from traceloom import analyze
from traceloom.errors import TraceloomError, UsageError
from traceloom.formats.chakra.files import EtReader
from traceloom.graph.graph import Graph
from traceloom.system import processes
from traceloom.trace.trace import Trace
from traceloom.workload.anonymize.collapse import get_number
from traceloom.workload.anonymize.host_trace import HostRewriter
from traceloom.workload.anonymize.inputs import InputFile
from traceloom.workload.anonymize.kineto import Rules
from traceloom.workload.anonymize.leak_report import InputShapes
from traceloom.workload.anonymize.policy import RewriteStats
from traceloom.workload.anonymize.sizes import find_prime_factors

if TYPE_CHECKING:
    from traceloom.workload.replay.dry_run import RankDryRun
    from traceloom.workload.replay.plan import ReplayPlan


EXACT, ROUNDED, GIVEN_UP, CHANGED = "equal", "rounded", "given up", "changed"
_NOT_COMPARED = (
    "name",
    "start_ns",
    "path",
    "lane",
    "thread",
    "process",
    "peak_time_ns",
    "node",
    "parent",
    "event",
    "group",
    "group_description",
    "shapes",
    "fraction",
    "rule",
    "evidence",
)
_FEW_EDGES = 0.01
# Parts that `collapse` removes: the host's own structure.
STRUCTURE_PARTS = frozenset(
    (
        "host time",
        "idle causes",
        "operators",
        "modules",
        "kernels",
        "data loading",
        "nodes and times",
        "dependencies",
        "graph nodes",
        "graph edges",
        "critical path",
        "re-timing",
        "re-timing without residuals",
    )
)


@dataclass(frozen=True, slots=True)
class ComparedPart:
    """One part of the comparison.

    Attributes:
        name: What is compared.
        figures: Number of figures before.
        equal: Number of figures that are the same after.
        sizes: Whether it is about bytes, which are rounded when shapes are.
        off: Largest relative difference of a figure if it is about bytes, else of a sum.
        counted: Whether figures other than sizes differ.
        differences: The first figures that differ, as texts.
    """

    name: str
    figures: int
    equal: int
    sizes: bool = False
    off: float = 0.0
    counted: bool = False
    differences: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return self.figures == self.equal and not self.differences

    def verdict(self, *, collapsed: bool, rounded: bool = True) -> str:
        """Returns the result in one word.

        Args:
            collapsed: Whether the host's structure was removed on purpose.
            rounded: Whether sizes are rounded; then parts of a storage may newly overlap, which
                adds an order of reads and writes.
        """
        if self.same:
            return EXACT
        if (self.sizes and not self.counted) or (
            rounded and self.name == "graph edges" and self.off <= _FEW_EDGES
        ):
            return ROUNDED
        return GIVEN_UP if collapsed and self.name in STRUCTURE_PARTS else CHANGED

    def to_dict(self, *, collapsed: bool = False, rounded: bool = True) -> dict[str, Any]:
        return {
            "part": self.name,
            "figures": self.figures,
            "equal": self.equal,
            "verdict": self.verdict(collapsed=collapsed, rounded=rounded),
            "largest_difference": round(self.off, 4),
            "differences": list(self.differences),
        }


SIZES_OF_NODES = "sizes of nodes"
Measure = dict[str, pl.DataFrame]


def measure(trace: Trace) -> Measure:
    """Returns the results of the analyses of one trace as sorted frames of numbers, without names,
    ids and positions.
    """
    from traceloom.graph.calibrate import calibrate
    from traceloom.graph.rank import link_rank

    analysed = {name: _select_numbers(make(trace)) for name, make in (_PARTS | _SIZES).items()}
    try:
        return analysed | measure_graph(calibrate(link_rank(trace)))
    except UsageError:  # the times of a damaged trace cannot be re-timed
        return analysed


def measure_job(paths: list[Path]) -> Measure | str:
    """Returns the measures of the linked graph of all ranks with their host traces; the error's
    slug if they cannot be linked.
    """
    from traceloom.graph import link

    try:
        return measure_graph(link(*paths, cache=False).graph)
    except TraceloomError as error:
        return error.slug


def measure_graph(graph: Graph) -> Measure:
    """Returns the measures of a calibrated graph: its critical path, and its prediction for kernels
    twice as fast.
    """
    from traceloom.graph.evaluate import Plan
    from traceloom.graph.law import law

    retiming = law(graph)
    work = graph.nodes["work_ns"].to_numpy()
    halved = np.where((graph.nodes["kind"] == "kernel").to_numpy(), work // 2, work)
    times = Plan(graph).evaluate(work_ns=halved)
    nodes = graph.nodes.group_by("kind").agg(
        pl.len(), pl.col("work_ns").sum(), pl.col("duration_ns").sum()
    )
    edges = graph.edges.group_by("kind", "evidence").agg(pl.len(), pl.col("delay_ns").sum())
    answers = {
        "window_ns": retiming.window_ns,
        "error_ns": retiming.exact_error_ns,
        "with_kernels_halved_ns": int(times.max() - times.min()) if len(times) else 0,
    }
    return {
        "graph nodes": _select_numbers(nodes),
        "graph edges": _select_numbers(edges),
        "critical path": _select_numbers(retiming.path),
        "re-timing": pl.DataFrame({name: [value] for name, value in answers.items()}),
        "re-timing without residuals": pl.DataFrame({"error_ns": [retiming.honest_error_ns]}),
    }


def compute_longest_path(durations: dict[int, int], waits: dict[int, set[int]]) -> int | None:
    """Returns the length of the longest path through nodes that wait for others; None if they form
    a cycle.
    """
    waiting = {
        node: sum(dependency in durations for dependency in before)
        for node, before in waits.items()
    }
    followers: dict[int, list[int]] = {}
    for node, before in waits.items():
        for dependency in before:
            followers.setdefault(dependency, []).append(node)
    ready = [node for node, count in waiting.items() if count == 0]
    end_by_node = dict.fromkeys(durations, 0)
    done = 0
    while ready:
        node = ready.pop()
        done += 1
        end_by_node[node] += durations[node]
        for follower in followers.get(node, ()):
            end_by_node[follower] = max(end_by_node[follower], end_by_node[node])
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    return max(end_by_node.values(), default=0) if done == len(durations) else None


def measure_chakra(path: Path) -> Measure:
    """Returns what a simulator reads from a `.et` file: times, dependencies, sizes; a row per node
    type.

    `ideal time` is the length of the longest path through the data dependencies with unlimited
    resources: any simulator starts from it, and joining chains must not change it.
    """
    rows: dict[tuple[int, int], list[int]] = {}
    sizes: dict[tuple[int, str], int] = {}
    checksum = 0
    durations: dict[int, int] = {}
    waits: dict[int, set[int]] = {}
    with EtReader(path) as reader:
        for node in reader:
            values = {attribute.name: attribute for attribute in node.attr}
            comm = values.get("comm_type")
            key = (node.type, -1 if comm is None else int(get_number(comm)))
            row = rows.setdefault(key, [0, 0, 0, 0])
            for column, amount in enumerate(
                (1, node.duration_micros, len(node.data_deps), len(node.ctrl_deps))
            ):
                row[column] += amount
            durations[node.id], waits[node.id] = (
                node.duration_micros,
                {*node.data_deps, *node.ctrl_deps},
            )
            checksum = (checksum * 31 + hash((node.id, *node.data_deps, -1, *node.ctrl_deps))) % (
                1 << 61
            )
            for name in ("comm_size", "tensor_size", "num_ops"):
                if name in values:
                    size = int(get_number(values[name]))
                    sizes[node.type, name] = sizes.get((node.type, name), 0) + size
    counted = [(*key, *row) for key, row in sorted(rows.items())]
    columns = ["type", "comm_type", "nodes", "duration_us", "data_deps", "ctrl_deps"]
    return {
        "nodes and times": pl.DataFrame(
            counted, schema=dict.fromkeys(columns, pl.Int128), orient="row"
        ),
        "dependencies": pl.DataFrame({"checksum": [checksum]}),
        "total time": pl.DataFrame({"duration_us": [sum(row[1] for row in rows.values())]}),
        "ideal time": pl.DataFrame({"path_us": [compute_longest_path(durations, waits)]}),
        SIZES_OF_NODES: pl.DataFrame(
            [(*key, size) for key, size in sorted(sizes.items())],
            schema={"type": pl.Int64, "what": pl.String, "bytes": pl.Int128},
            orient="row",
        ),
    }


def compare(before: Measure, after: Measure) -> Iterator[ComparedPart]:
    """Compares part by part; rows are compared in the order of their values."""
    for name, old in before.items():
        new = after.get(name, old.clear())
        sizes = name in _SIZES or name == SIZES_OF_NODES
        figures, common_rows = old.height * old.width, min(old.height, new.height)
        if old.equals(new):
            yield ComparedPart(name, figures, figures, sizes)
            continue
        differences: list[str] = []
        if old.height != new.height:
            differences.append(f"{old.height} rows before, {new.height} after")
        equal, off, counted = 0, 0.0, old.height != new.height
        for column in old.columns:
            same = old[column].head(common_rows).eq_missing(new[column].head(common_rows))
            equal += int(same.sum())
            if same.all() and old.height == new.height:
                continue
            counted |= "bytes" not in column
            if old[column].dtype.is_numeric():
                first, second = int(old[column].sum() or 0), int(new[column].sum() or 0)
                off = max(off, abs(second - first) / abs(first) if first else float(second != 0))
                if sizes and old.height == new.height:
                    pairs = zip(old[column].fill_null(0), new[column].fill_null(0), strict=True)
                    off = max(off, *(abs(b - a) / abs(a) if a else float(b != 0) for a, b in pairs))
                differences.append(f"sum of {column}: {first} before, {second} after")
        yield ComparedPart(name, figures, equal, sizes, off, counted, tuple(differences[:6]))


def _select_numbers(frame: pl.DataFrame) -> pl.DataFrame:
    compared = frame.drop([name for name in frame.columns if name in _NOT_COMPARED])
    compared = (
        compared.with_columns(pl.col(pl.Enum, pl.Categorical).cast(pl.String))
        if compared.width
        else compared
    )
    return compared.sort(compared.columns, nulls_last=True) if compared.width else compared


_PARTS: dict[str, Callable[[Trace], pl.DataFrame]] = {
    "GPU time by device": lambda trace: analyze.gpu_time(trace).devices,
    "GPU time by step": lambda trace: analyze.gpu_time(trace).steps,
    "steps": lambda trace: analyze.step_times(trace).steps,
    "kernels": lambda trace: analyze.kernels(trace).kernels,
    "kernel categories": lambda trace: analyze.kernels(trace).categories,
    # Dependencies and times of GPU work, without names.
    "launches": lambda trace: (
        trace.gpu_work()
        .select("duration_ns", launched=pl.col("launch").is_not_null())
        .group_by("launched")
        .agg(pl.len(), pl.col("duration_ns").sum())
    ),
    "idle causes": lambda trace: analyze.idle(trace).causes,
    "collectives": lambda trace: analyze.communication(trace).collectives.drop("bytes"),
    "communication by device": lambda trace: analyze.communication(trace).devices,
    "host time": lambda trace: (
        analyze.host(trace).account.group_by("step", "phase", "activity").agg(pl.col("ns").sum())
    ),
    "operators": lambda trace: analyze.operators(trace).operators,
    "modules": lambda trace: analyze.modules(trace).tree,
    "data loading": lambda trace: analyze.data_loading(trace).steps,
}
_SIZES: dict[str, Callable[[Trace], pl.DataFrame]] = {
    "bytes of collectives": lambda trace: analyze.communication(trace).collectives.select(
        "kind", "group_size", "where", "bytes"
    ),
    "bytes of copies": lambda trace: trace.copies.group_by("kind").agg(pl.col("bytes").sum()),
    "memory": lambda trace: analyze.memory(trace).devices,
}

_Node = tuple[int, int]  # rank and number of a node
_IGNORED_REASONS = ("data-dependent", "no-meta-kernel")  # they run nevertheless
_MAX_ROUNDS = 64


def choose_kept_factors(hosts: Sequence[InputFile], rules: Rules) -> str:
    """Keeps those prime factors that the operators of host traces need.

    Args:
        hosts: The host traces.
        rules: Their rewriting rules; the kept factors are set in `rules.shapes`.

    Returns:
        Why nothing could be tried, so that all factors are rounded; else empty.
    """
    kept_factors: frozenset[int] = frozenset()
    if not hosts:
        return "there is no host trace"
    with processes.create_shared_directory() as directory:
        try:
            rules.shapes.keep_factors(None)
            exact = _build_plan(hosts, rules, directory)
            excused = set(_find_misfits(exact))  # not because of sizes
            for _ in range(_MAX_ROUNDS):
                rules.shapes.keep_factors(kept_factors)
                misfits = _find_misfits(_build_plan(hosts, rules, directory)) - excused
                if not misfits:
                    break
                extra_factors = {
                    node: min(factors - kept_factors, default=0)
                    for node, factors in _list_odd_factors(exact, misfits)
                }
                excused |= {node for node, factor in extra_factors.items() if not factor}
                kept_factors |= {factor for factor in extra_factors.values() if factor}
        except TraceloomError as error:
            rules.shapes.keep_factors(frozenset())
            return error.message
    return ""


def build_dry_run_report(paths: Sequence[Path], reason: str) -> dict[str, Any]:
    """Returns which rewritten operators run again, as it appears in the report.

    Args:
        paths: Rewritten captures and files.
        reason: Why nothing was tried; empty if it was.
    """
    from traceloom.workload.replay.dry_run import dry_run
    from traceloom.workload.replay.planning import make_plan

    ranks: Iterable[RankDryRun] = ()
    if not reason:
        try:
            ranks = dry_run(make_plan(*paths, cache=False)).values()
        except TraceloomError as error:
            reason = error.message
    shares = []
    for rank in ranks:
        skipped = [part for part in rank.left if part.reason not in _IGNORED_REASONS]
        time = rank.duration_ns
        shares.append(
            {
                "rank": rank.rank,
                "operators": rank.ops,
                "run": rank.ops - sum(part.count for part in skipped),
                "other_shapes": sum(wrong.count for wrong in rank.wrong),
                "duration_ns": time,
                "run_ns": None
                if time is None
                else time - sum(part.duration_ns or 0 for part in skipped),
                "left": [msgspec.to_builtins(part) for part in skipped],
            }
        )
    return {"ranks": shares, "reason": reason or None}


def _build_plan(hosts: Sequence[InputFile], rules: Rules, directory: Path) -> ReplayPlan:
    from traceloom.workload.replay.planning import make_plan

    targets = []
    for host in hosts:
        target = directory / host.name
        target.parent.mkdir(parents=True, exist_ok=True)
        HostRewriter(host.path, rules, RewriteStats(), InputShapes()).write(target)
        targets.append(target)
    return make_plan(*targets, cache=False)


def _find_misfits(plan: ReplayPlan) -> set[_Node]:
    """Returns the nodes that reject their arguments, yield other shapes than recorded, or exchange
    other parts than they have.
    """
    from traceloom.workload.replay.dry_run import dry_run

    misfits = set()
    for rank, outcome in dry_run(plan).items():
        misfits |= {
            (rank, node) for node in (*outcome.refused, *(wrong.node for wrong in outcome.wrong))
        }
        ops, shapes = plan.ranks[rank].ops, plan.ranks[rank].tensors["shape"]
        for op, splits in plan.ranks[rank].collectives.select("op", "splits_in").iter_rows():
            node, inputs = ops.select("node", "inputs").row(op)
            if (
                splits
                and inputs
                and sum(splits)
                not in {shapes[tensor][0] for tensor in inputs if len(shapes[tensor])}
            ):
                misfits.add((rank, node))
    return {(rank, node) for rank, node in misfits if node is not None}


def _list_odd_factors(plan: ReplayPlan, nodes: set[_Node]) -> Iterator[tuple[_Node, set[int]]]:
    """Yields the odd prime factors of all sizes of nodes; powers of two are never rounded."""
    for rank, rank_plan in plan.ranks.items():
        shapes, calls = rank_plan.tensors["shape"], rank_plan.calls["arguments"]
        for row in rank_plan.ops.filter(
            pl.col("node").is_in([node for node_rank, node in nodes if node_rank == rank])
        ).iter_rows(named=True):
            sizes = {
                size
                for tensor in (*row["inputs"], *row["outputs"])
                if tensor is not None
                for size in shapes[tensor]
            }
            if row["collective"] is not None:
                sizes.update(
                    *rank_plan.collectives.select("splits_in", "splits_out").row(row["collective"])
                )
            if row["call"] is not None:
                sizes |= set(_list_numbers(msgspec.json.decode(calls[row["call"]])))
            factors = {
                factor
                for size in sizes
                if 2 < size < 1 << 48
                for factor in find_prime_factors(size)
            }
            yield (rank, row["node"]), factors - {2}


def _list_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for inner in value:
            yield from _list_numbers(inner)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
