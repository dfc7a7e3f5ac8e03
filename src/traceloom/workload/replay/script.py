"""Writing a plan as a standalone Python script.

The script consists of the ops as text and of copies of functions of this module and of
`contents.generate_content`. Scripts have `import torch` at their top, so the imports inside the
functions are removed from the copies. Docstrings of copied functions appear in the scripts.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from traceloom import __version__
from traceloom.errors import UsageError, nearest
from traceloom.system import units
from traceloom.workload.replay import contents
from traceloom.workload.replay.plan import RUN, RankPlan, Replayed, ReplayPlan
from traceloom.workload.replay.rank_text import Functions, RankScript
from traceloom.workload.replay.schema import find_own_modules

if TYPE_CHECKING:
    import torch


def create_storage_view(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Another look at the memory of a tensor; offset and strides in elements."""
    import torch

    return torch.empty(0, dtype=dtype, device=tensor.device).set_(
        tensor.untyped_storage(), offset, shape, strides
    )


def run_stand_in(
    nanoseconds: int, *tensors: tuple[Sequence[int], Sequence[int], torch.dtype, str]
) -> list[Any]:
    """Take the time of an op that cannot be run here, and give tensors of zeros for its own, each
    on its device.
    """
    import torch

    end = time.perf_counter_ns() + nanoseconds
    outputs = [
        torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
        for shape, strides, dtype, device in tensors
    ]
    while time.perf_counter_ns() < end:
        pass
    return outputs


def flatten_values(values: Any) -> Iterator[Any]:
    """What an op returns, lists within it taken apart."""
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from flatten_values(value)
    else:
        yield values


def ensure_recorded_shape(
    tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The tensor, or zeros of the recorded shape where the contents led to another one."""
    import torch

    if tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype:
        return tensor
    return torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device).zero_()


def ensure_recorded_shapes(values: Any, *recorded: tuple[Any, ...] | None) -> list[Any]:
    """What an op returns, with zeros of the recorded shape where the contents led to another."""
    return [
        value if like is None else ensure_recorded_shape(value, *like)
        for value, like in zip(flatten_values(values), recorded, strict=False)
    ]


class PendingWorks(list[Any]):
    """What several collectives that are one started."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def measure_runs(call: Callable[[], Any], runs: int, device: str) -> list[int]:
    """Nanoseconds of each run; of as many as half a second takes, 5 to 200, where `runs` is 0."""
    import torch

    def wait() -> None:
        if not device.startswith("cpu"):
            getattr(torch, device.partition(":")[0]).synchronize()

    call()
    times: list[int] = []
    began = time.perf_counter()
    while len(times) < (runs or 5) or (
        not runs and len(times) < 200 and time.perf_counter() - began < 0.5
    ):
        wait()
        start = time.perf_counter_ns()
        call()
        wait()
        times.append(time.perf_counter_ns() - start)
    return times


def measure_by_op(call: Callable[[], Any]) -> dict[str, float]:
    """Nanoseconds of the host, in one run, in each op that no other op called; of GPU work that is
    its launch.
    """
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    times: dict[str, float] = {}
    for event in profile.events():
        if event.cpu_parent is None:
            times[event.name] = times.get(event.name, 0.0) + 1000 * event.cpu_time_total
    return times


def compare_times(
    recorded: Mapping[str, tuple[int, int]], replayed: Mapping[str, float]
) -> Iterator[str]:
    """What the calls of each op took together, recorded and here, as lines."""
    yield f"{'recorded':>13} {'here':>13} {'ratio':>7}  calls of (time of the host)"
    for name, (calls, nanoseconds) in recorded.items():
        now = replayed.get(name)
        ratio = f"{now / nanoseconds:7.2f}" if now is not None and nanoseconds else f"{'-':>7}"
        time_text = f"{now / 1e6:10.3f} ms" if now is not None else f"{'-':>13}"
        yield f"{nanoseconds / 1e6:10.3f} ms {time_text} {ratio}  {calls} {name}"


def summarize_times(times: Sequence[int], recorded: int | None = None) -> str:
    """The median in words, beside what was recorded."""
    median = statistics.median(times)
    comparison = (
        f"; recorded: {recorded / 1e6:.3f} ms, {median / recorded:.2f} times that"
        if recorded
        else ""
    )
    return f"median of {len(times)}: {median / 1e6:.3f} ms{comparison}"


_COMMENT_PREFIXES = (
    "#",
    '"""',
)  # comments and docstrings contain scopes and times, which may differ between equal ranks
_IMPORTS = """\
from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # PyTorch's profiler speaks otherwise

import torch
import torch.distributed as dist

aten = torch.ops.aten
"""
_OPTIONS = """\
    global DEVICE
    parser = argparse.ArgumentParser(description="Run what was recorded, and time it.")
    parser.add_argument("--runs", type=int, default=0, help="how many are timed (default: some)")
    parser.add_argument("--device", default=DEVICE, help="where (default: as recorded)")
    options = parser.parse_args()
    DEVICE = options.device
    if DEVICE.startswith("cuda") and not torch.cuda.is_available():
        print("There is no CUDA device here; it runs on the processor, as far as that has the same ops.")
        DEVICE = "cpu"
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
"""
_JOIN = """\
    if int(os.environ.get("WORLD_SIZE", "1")) != WORLD:
        raise SystemExit(f"run it with: torchrun --nproc-per-node {WORLD} {os.path.basename(__file__)}")
    if DEVICE.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE.startswith("cuda") else "gloo")
    rank = dist.get_rank()
    group.update({name: dist.new_group(ranks) for name, ranks in GROUPS.items()})
"""
_MEASURE = """\
    w = outside()
    with torch.no_grad():
        def run() -> None:
            torch.manual_seed(0)  # random numbers that are lengths fit together
            step(w)

        for _ in range(3):
            run()
        times = measure_runs(run, RUNS, DEVICE)
        here = measure_by_op(run)
    print(f"WHAT: {summarize_times(times, STEP_NS)}")
"""
_COMPARE = """\
    print(*compare_times(RECORDED, here), sep="\\n")
"""
_MEASURE_CASES = """\
    with torch.no_grad():
        for case in CASES:
            print(f"{case.__doc__}\\n    here: {summarize_times(measure_runs(case(), options.runs, DEVICE))}")
"""
_RUN = """


if __name__ == "__main__":
    main()
"""


def write_script(
    plan: ReplayPlan,
    *,
    seed: int = 0,
    extra_namespaces: frozenset[str] = frozenset(),
    tried: Replayed | None = None,
) -> str:
    """Returns a plan as a Python file.

    Args:
        plan: With all ranks, the script needs `torchrun`; with fewer, the first runs alone, and
            communication is replaced by its recorded times.
        seed: Random seed of the contents.
        extra_namespaces: Allowed namespaces of ops in addition to PyTorch's own.
        tried: A replay of the plan: ops that failed in it are left out, and those that returned
            another shape than recorded are given the recorded one.
    """
    world = plan.world_size if len(plan.ranks) == plan.world_size else 1
    first = next(iter(plan))
    own = find_own_modules(schema for rank_plan in plan for schema in rank_plan.calls["schema"])
    ranks_by_code: dict[str, tuple[Functions, list[int]]] = {}
    for rank_plan in plan if world > 1 else [first]:
        functions = Functions(
            RankScript(
                rank_plan,
                seed,
                extra_namespaces,
                alone=world == 1,
                tried=None if tried is None else tried.ranks.get(rank_plan.rank),
            )
        )
        code = "\n".join(
            line
            for line in functions.write().splitlines()
            if not line.lstrip().startswith(_COMMENT_PREFIXES)
        )
        ranks_by_code.setdefault(code, (functions, []))[1].append(rank_plan.rank)
    parts = [functions.write() for functions, _ in ranks_by_code.values()]
    measure = _MEASURE.replace("RUNS", "options.runs or 20" if world > 1 else "options.runs")
    measure = measure.replace("manual_seed(0)", f"manual_seed({seed})")
    measure = measure.replace("WHAT", "rank {rank}" if world > 1 else "step")
    if len(ranks_by_code) > 1:  # the programs of ranks differ: each gets its own
        parts = [functions.write(f"_of_{ranks[0]}") for functions, ranks in ranks_by_code.values()]
        rank_functions = sorted(
            (rank, ranks[0]) for _, ranks in ranks_by_code.values() for rank in ranks
        )
        rows = [
            f"    {rank}: (outside_of_{first_rank}, step_of_{first_rank}),"
            for rank, first_rank in rank_functions
        ]
        parts.append("\n".join(["# what each rank does", "FUNCTIONS = {", *rows, "}"]))
        measure = "    outside, step = FUNCTIONS[rank]\n" + measure
    main = [_format_options(plan)]
    if world > 1:
        main += [
            _JOIN,
            measure,
            f"    if rank == {first.rank}:\n    {_COMPARE}    dist.destroy_process_group()\n",
        ]
    else:
        main += [measure, _COMPARE]
    helpers = [
        contents.generate_content,
        create_storage_view,
        run_stand_in,
        flatten_values,
        ensure_recorded_shape,
        ensure_recorded_shapes,
        PendingWorks,
    ]
    always = [measure_runs, measure_by_op, compare_times, summarize_times]
    parts = [*_copy_sources(helpers, parts), *_copy_sources(always), *parts, "".join(main).rstrip()]
    return _build_file(
        _describe_plan(plan, world, first),
        [
            *(f"import {module}" for module in own.values()),
            f"DEVICE = {_find_device(first)!r}",
            *_format_constants(plan, world, first),
        ],
        parts,
    )


def write_worst(plan: ReplayPlan, op: str | None, slowest: int, *, seed: int = 0) -> str:
    """Returns the slowest ops as a Python file, each timed separately with its shapes, strides and
    types.

    Args:
        plan: The plan, of which the first rank is used.
        op: Name such as `aten::mm`; None for all.
        slowest: Number of ops.
        seed: Random seed of the contents.

    Raises:
        UsageError: slug `no-such-op`.
    """
    rank_plan = next(iter(plan))
    run_ops = rank_plan.ops.filter(pl.col("action") == RUN)
    ops = run_ops if op is None else run_ops.filter(pl.col("name") == op)
    if op is not None and not ops.height:
        raise UsageError(
            f"no op of the plan is named `{op}`",
            slug="no-such-op",
            hint=nearest(op, run_ops["name"].unique().sort().to_list())
            + "the table of operators of `traceloom report` has their names",
        )
    text = RankScript(rank_plan, seed, frozenset(), alone=True)
    cases = find_distinct_calls(rank_plan, ops).sort(
        "each_ns", "op", descending=[True, False], nulls_last=True
    )
    parts: list[str] = []
    for row, calls, median_ns in cases.select("op", "calls", "each_ns").iter_rows():
        if len(parts) == slowest:
            break
        first = text.ops[row]
        took = (
            ""
            if median_ns is None
            else f", recorded: {units.format_duration(round(median_ns))} each"
        )
        description = f"{first['name']}: {units.format_quantity(calls, 'call')}{took}"
        if (case := text.case(len(parts) + 1, first, description)) is not None:
            parts.append(case)
    case_names = ", ".join(f"case_{k + 1}" for k in range(len(parts)))
    copies = _copy_sources([contents.generate_content, create_storage_view], parts)
    copies += _copy_sources([measure_runs, summarize_times])
    main = (_format_options(plan) + _MEASURE_CASES).rstrip()
    head = [
        f"The slowest ops of {plan.source}, each timed on its own.",
        *_describe_versions(plan),
        "",
        "    python FILE [--runs N] [--device cuda]",
    ]
    return _build_file(
        head,
        [f"DEVICE = {_find_device(rank_plan)!r}"],
        [*copies, *parts, f"CASES = [{case_names}]", main],
    )


def find_distinct_calls(plan: RankPlan, ops: pl.DataFrame) -> pl.DataFrame:
    """Groups ops by call and by shapes, strides and types of their inputs.

    Args:
        plan: Plan of a rank.
        ops: Rows of its ops.

    Returns:
        One row per distinct call: op (the first), calls, each_ns (the median of their recorded
        times; null: unknown).
    """
    inputs = ops.select("op", pl.col("inputs").alias("tensor")).explode("tensor")
    geometry = pl.struct("shape", "strides", "dtype").alias("geometries")
    op_geometries = (
        inputs.join(plan.tensors.select("tensor", geometry), on="tensor", how="left")
        .group_by("op", maintain_order=True)
        .agg("geometries")
    )
    return (
        ops.select("op", "call", pl.col("durations_ns").list.median().alias("each_ns"))
        .join(op_geometries, on="op", how="left", maintain_order="left")
        .group_by("call", "geometries", maintain_order=True)
        .agg(pl.first("op"), pl.len().alias("calls"), pl.median("each_ns"))
        .drop("call", "geometries")
    )


def _format_options(plan: ReplayPlan) -> str:
    threads = f"    torch.set_num_threads({plan.threads})\n" if plan.threads else ""
    return f"def main() -> None:\n{_OPTIONS}{threads}"


def _build_file(header: Sequence[str], numbers: Sequence[str], parts: Iterable[str]) -> str:
    comment = "\n".join("# " + ascii(line)[1:-1] if line else "#" for line in header)
    return "\n\n\n".join([f"{comment}\n\n{_IMPORTS}" + "\n".join(numbers), *parts]) + _RUN


def _describe_plan(plan: ReplayPlan, world: int, first: RankPlan) -> list[str]:
    which = (
        ""
        if plan.world_size == 1
        else f", {world} ranks"
        if world > 1
        else f", rank {first.rank} alone"
    )
    return [
        f"A workload that was recorded, as a script that needs torch alone: {plan.source}{which}.",
        *_describe_versions(plan),
        "",
        f"    {f'torchrun --nproc-per-node {world}' if world > 1 else 'python'} FILE [--runs N] [--device cuda]",
        "",
        "What is done is what was recorded, op by op; what the tensors hold is made up, with seeds.",
    ]


def _describe_versions(plan: ReplayPlan) -> list[str]:
    return [f"Recorded with torch {plan.torch or '(unknown)'}; written by traceloom {__version__}."]


def _find_device(plan: RankPlan) -> str:
    """Returns the accelerator type with most storages; cpu if there is none."""
    kinds = Counter(device.partition(":")[0] for device in plan.storages["device"])
    return next(
        (kind for kind, _ in kinds.most_common() if kind in {"cuda", "xpu", "hip", "mps"}), "cpu"
    )


def _format_constants(plan: ReplayPlan, world: int, first: RankPlan) -> list[str]:
    """Returns the recorded times and the process groups."""
    step = first.steps["duration_ns"].median()
    median_ns = pl.col("durations_ns").list.median()
    recorded = (
        first.ops.filter(median_ns.is_not_null())
        .group_by("name")
        .agg(pl.len().alias("calls"), median_ns.sum().round().cast(pl.Int64).alias("ns"))
        .sort("ns", "name", descending=[True, False])
    )
    lines = [
        f"STEP_NS: int | None = {round(step) if isinstance(step, (int, float)) else None}  # recorded, the median",
        "# recorded: how often each op was called, and the nanoseconds of the host that its calls took together",
        "RECORDED = {",
        *(f"    {name!a}: ({calls}, {total})," for name, calls, total in recorded.iter_rows()),
        "}",
    ]
    if world > 1:
        group_rows = plan.groups.select("name", "ranks").iter_rows()
        lines += [
            f"WORLD = {world}  # processes",
            "GROUPS = {",
            *[f"    {name!a}: {ranks or list(range(world))}," for name, ranks in group_rows],
            "}",
            "group: dict[str, Any] = {}",
        ]
    return lines


def _copy_sources(parts: Sequence[Any], within: Sequence[str] | None = None) -> list[str]:
    """Returns the sources of functions without their import of torch; if `within` is given, only of
    those called there.
    """
    sources = {
        part.__name__: inspect.getsource(part).replace("    import torch\n\n", "").rstrip()
        for part in parts
    }
    called = [*(within or ())]
    called += [source for name, source in sources.items() if any(f"{name}(" in t for t in called)]
    return [
        source
        for name, source in sources.items()
        if within is None or any(f"{name}(" in text for text in called if text != source)
    ]
