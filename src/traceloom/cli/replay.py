"""`traceloom replay`: plans, runs and compares replays of recorded workloads."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from traceloom.cli import options as types, outputs
from traceloom.cli.outputs import Progress
from traceloom.errors import UsageError
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.system.text import encode_utf8
from traceloom.workload.replay.plan import COLLECTIVE, RUN, STAND_IN

if TYPE_CHECKING:
    from traceloom.workload.replay.comparison import ReplayComparison
    from traceloom.workload.replay.dry_run import RankDryRun
    from traceloom.workload.replay.plan import ReplayPlan
    from traceloom.workload.replay.running import RunOptions


_DEFAULT_MAX_TIME_S, _DEFAULT_TIMEOUT_S = 60.0, 300.0


def add_run_options(parser: argparse.ArgumentParser) -> None:
    run_group = parser.add_argument_group("how it is run")
    run_group.add_argument(
        "--device",
        choices=("cpu", "cuda", "xpu"),
        help="where (default: as recorded where there is one, else cpu)",
    )
    run_group.add_argument(
        "--pace",
        choices=("fast", "recorded"),
        default="fast",
        help="fast (default): one op after the other; recorded: with the gaps that the host left between them",
    )
    run_group.add_argument(
        "--threads",
        choices=("one", "recorded"),
        default="one",
        help="one thread calls all ops (default), or as many as recorded, which wait for each other where they must",
    )
    run_group.add_argument(
        "--iterations",
        type=types.parse_count,
        metavar="N",
        help="passes (default: until the median is known to 2 %%)",
    )
    run_group.add_argument(
        "--max-time",
        type=types.parse_positive,
        default=_DEFAULT_MAX_TIME_S,
        metavar="S",
        help="no pass begins later (default: 60 s)",
    )
    run_group.add_argument(
        "--timeout",
        type=types.parse_positive,
        default=_DEFAULT_TIMEOUT_S,
        metavar="S",
        help="how long a collective may take (default: 300 s)",
    )
    run_group.add_argument(
        "--memory-limit",
        type=types.parse_size,
        metavar="SIZE",
        help="what the tensors of a rank may take",
    )
    run_group.add_argument(
        "--seed",
        type=types.parse_whole_number,
        default=0,
        metavar="N",
        help="of random contents (default: 0)",
    )
    run_group.add_argument(
        "--backend", metavar="NAME", help="of torch.distributed (default: gloo, on GPUs nccl)"
    )
    run_group.add_argument(
        "--stand-ins",
        action="store_true",
        help="what cannot be run takes its recorded time; else it takes none",
    )
    run_group.add_argument(
        "--record",
        metavar="DIR",
        help="record some further passes: a capture that `traceloom diff` and `traceloom report` take",
    )
    run_group.add_argument("--strict", action="store_true", help="stop at the first op that fails")
    run_group.add_argument(
        "--trust",
        action="store_true",
        help="execute the sources of compiled kernels, which were recorded beside the trace: code of whoever made it",
    )
    run_group.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a Python module that brings custom ops (may be repeated)",
    )


def is_nonzero_torchrun_rank() -> bool:
    """Whether this is one of torchrun's processes other than the first, which alone prints and
    writes.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def build_run_options(args: argparse.Namespace) -> RunOptions:
    from traceloom.workload.replay.running import RunOptions

    return RunOptions(
        device=args.device,
        pace=args.pace,
        iterations=args.iterations,
        max_time_s=args.max_time,
        timeout_s=args.timeout,
        memory_limit=args.memory_limit,
        seed=args.seed,
        backend=args.backend,
        ranks=args.ranks,
        stand_ins=args.stand_ins,
        strict=args.strict,
        threads=args.threads,
        imports=tuple(args.imports),
        trust=args.trust,
        record=None if args.record is None else str(Path(args.record).resolve()),
        force=args.force,
    )


_DEFAULT_SLOWEST_COUNT = 10
_MAX_SCALE_FACTOR = 1 << 20  # max ratio of a size to the recorded one
_DIRECTORY = "directory"
DESCRIPTION = (
    "Run a recorded workload again, without its code and its data: every op with the arguments, shapes and types that "
    "were recorded. What it needs is a host trace, as `traceloom record --graph` writes."
)
EXAMPLES = """\
examples:
  traceloom replay run                                 all of it, against the recorded times
  traceloom replay run --plan-only -o run.plan         what would run; needs no PyTorch
  traceloom replay run --dry-run                       what of it runs here, in seconds
  traceloom replay run.plan --pace recorded
  traceloom replay run --ranks 0 --stand-ins           one rank; communication takes its recorded time
  torchrun --nproc-per-node 8 -m traceloom replay run.plan
  traceloom replay run --scope forward
  traceloom replay run --record again                  and record it: traceloom diff run again
  traceloom replay run --batch 2 --dry-run             twice the data: does it fit into memory?
  traceloom replay run --machine machine.toml          beside its simulation on this machine
  traceloom replay run -o replay.html -o tables/       the comparison as a page, and its tables
  traceloom replay run -o replay.py                    a script that needs torch alone, to hand out
  traceloom replay run --op aten::mm --slowest 5 -o mm.py
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_inputs(
        parser, "recorded run, host traces with or without device traces, a .graph or a .plan"
    )
    selection_group = parser.add_argument_group("what is run")
    selection_group.add_argument(
        "--level",
        choices=("outermost", "leaf"),
        default="outermost",
        help="ops that the program called (default), or what those call that only call others",
    )
    selection_group.add_argument(
        "--steps",
        type=types.parse_steps,
        metavar="A..B",
        help="these steps of a host trace of several",
    )
    selection_group.add_argument("--scope", metavar="NAME", help="what ran in this scope or module")
    selection_group.add_argument(
        "--only", choices=("compute", "communication"), help="one side alone"
    )
    selection_group.add_argument(
        "--ranks", type=types.parse_ranks, metavar="LIST", help="these ranks, as 0,1"
    )
    selection_group.add_argument("--plan-only", action="store_true", help="plan, and do not run")
    selection_group.add_argument(
        "--dry-run",
        action="store_true",
        help="run on tensors without content: which ops run here, whether they give what was recorded, memory",
    )
    size_group = parser.add_argument_group("at which size")
    size_group.add_argument(
        "--batch",
        type=parse_factor,
        metavar="F",
        help="the first dimension of the data times F, as 2 or 1/2",
    )
    size_group.add_argument(
        "--scale",
        type=validate_scale,
        action="append",
        default=[],
        metavar="SIZE=F",
        help="all dimensions of a size times F (may be repeated)",
    )
    size_group.add_argument(
        "--repeat",
        type=validate_repeat,
        metavar="SCOPE=N",
        help="what ran in a scope N times, as blocks.3=8",
    )
    add_run_options(parser)
    parser.add_argument(
        "--machine",
        metavar="FILE|PRESET",
        help="also simulate the steps on this machine, from `traceloom calibrate --here`, and print the difference",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    script_group = parser.add_argument_group("scripts (-o FILE.py)")
    script_group.add_argument(
        "--op", metavar="NAME", help="the calls of one op, as aten::mm, each timed on its own"
    )
    script_group.add_argument(
        "--slowest",
        type=types.parse_whole_number,
        metavar="N",
        help="that many calls, those that took longest",
    )
    outputs.add_output_options(
        parser,
        ".plan; .py, a script that needs torch alone; .json or .html of the comparison; .csv or .parquet for its table "
        "of that name (whole, simulated, coverage, not_run, ops, each, collectives, contents); DIR/ for all of them",
    )
    types.add_reading(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Plans, runs, shows and writes; returns the exit code."""
    from traceloom.report import replay as report
    from traceloom.report.replay import REPLAY
    from traceloom.workload.replay.comparison import compare_replay
    from traceloom.workload.replay.dry_run import dry_run
    from traceloom.workload.replay.planning import Choice, make_plan
    from traceloom.workload.replay.ranks import replay

    plan_files, comparison_files, directories = _resolve_output_files(args)
    choice = Choice(
        level=args.level,
        steps=None if args.steps is None else tuple(range(args.steps[0], args.steps[1] + 1)),
        scope=args.scope,
        only=args.only,
        ranks=args.ranks,
    )
    is_printed = not args.plan_only and not args.dry_run and outputs.should_print_document(args)
    should_run = bool(comparison_files or directories or args.record or is_printed)
    if is_nonzero_torchrun_rank():
        plan_files, comparison_files, directories, args.quiet = [], [], [], True
    replay_result = dry_run_results = comparison = simulation = None
    with Progress(enabled=not args.quiet) as progress:
        plan = make_plan(
            *args.inputs, choice=choice, cache=not args.no_cache, progress=progress.show
        )
        plan = _scale_plan(args, plan)
        # The sources to be executed are announced even if all other messages are suppressed.
        if args.trust and should_run:
            from traceloom.workload.replay.kernels import describe_sources

            for line in describe_sources(plan):
                print(sanitize(f"trusted: {line}"), file=sys.stderr)
        written = outputs.write_output_files(args, plan_files, plan, progress)
        if args.dry_run:
            dry_run_results = dry_run(plan, imports=args.imports)
        elif should_run:
            if args.machine and not is_nonzero_torchrun_rank():
                from traceloom.workload.replay.comparison import simulate_steps

                simulation = simulate_steps(
                    args.inputs,
                    plan,
                    args.machine,
                    with_gaps=args.pace == "recorded",
                    cache=not args.no_cache,
                    on_status=progress.show,
                )
            replay_result = replay(plan, build_run_options(args), on_status=progress.show)
        if replay_result is not None:
            comparison = compare_replay(plan, replay_result, simulation)
            written += outputs.write_output_files(args, comparison_files, comparison, progress)
            written += [
                (path, REPLAY.write_directory(comparison, path, force=args.force))
                for path in directories
            ]
    if dry_run_results is not None and args.json:
        outputs.write_json(
            {
                "ranks": [
                    msgspec.to_builtins(rank_result) for rank_result in dry_run_results.values()
                ]
            },
            sys.stdout.buffer,
        )
    elif dry_run_results is not None:
        outputs.print_messages(args, *_describe_dry_run(dry_run_results.values()))
    elif comparison is not None and args.json:
        report.write_json(comparison, sys.stdout.buffer)
    elif comparison is not None and outputs.should_print_document(args):
        from traceloom.report.replay import render_terminal
        from traceloom.report.views import terminal

        terminal.print_lines(partial(render_terminal, report.build(comparison)), sys.stdout)
    elif not should_run:
        outputs.print_messages(args, *_describe_plan(plan))
    outputs.print_outcome(
        args,
        written,
        outputs.format_repeat_command(args, "replay.html" if should_run else "run.plan"),
    )
    return 0


def parse_factor(text: str) -> Fraction:
    """Parses `2`, `1/2` or `x2` as a factor above 0."""
    try:
        number = Fraction(text.removeprefix("x"))
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if not 0 < number < _MAX_SCALE_FACTOR:
        raise argparse.ArgumentTypeError(f"`{text}` is not a factor, as 2 or 1/2")
    return number


def validate_scale(text: str) -> str:
    """Checks `192=2`, a size and a factor; returns it unchanged."""
    size, _, factor = text.partition("=")
    types.parse_count(size)
    parse_factor(factor)
    return text


def validate_repeat(text: str) -> str:
    """Checks `blocks.3=8`, a scope and a number; returns it unchanged."""
    name, _, count = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"`{text}` is not a scope and a number, as blocks.3=8")
    types.parse_count(count)
    return text


def _scale_plan(args: argparse.Namespace, plan: ReplayPlan) -> ReplayPlan:
    if not (args.batch or args.scale or args.repeat):
        return plan
    from traceloom.workload.replay.resize import repeat_scope, scale_plan

    if args.repeat:
        scope, _, count = args.repeat.rpartition("=")
        plan = repeat_scope(plan, scope, int(count))
    sizes = dict(text.split("=") for text in args.scale)
    factors = {int(size): parse_factor(factor) for size, factor in sizes.items()}
    return scale_plan(plan, factors, batch=args.batch) if args.batch or factors else plan


def _resolve_output_files(
    args: argparse.Namespace,
) -> tuple[
    list[tuple[Path, Callable[[ReplayPlan, BinaryIO], object]]],
    list[tuple[Path, Callable[[ReplayComparison, BinaryIO], object]]],
    list[Path],
]:
    """Returns the files for the plan, the files for the comparison, and directories for tables of
    the comparison.

    Raises:
        UsageError: slug `wrong-usage`, `unknown-format`, `no-such-table`.
        OutputError: slugs `file-exists`, `cannot-write`.
    """
    from traceloom.report.replay import REPLAY
    from traceloom.report.views.files import TABLE_FILE_PATTERN

    def script(plan: ReplayPlan, handle: BinaryIO) -> None:
        from traceloom.workload.replay.script import write_script, write_worst
        from traceloom.workload.replay.trial import write_tried_script

        if args.op or args.slowest:
            text = write_worst(
                plan, args.op, args.slowest or _DEFAULT_SLOWEST_COUNT, seed=args.seed
            )
        elif args.plan_only or args.dry_run:
            text = write_script(plan, seed=args.seed)
            outputs.print_messages(args, "the script was not tried: nothing is to run")
        else:
            text, said = write_tried_script(plan, build_run_options(args))
            outputs.print_messages(args, *said)
        handle.write(encode_utf8(text))

    plan_writers: dict[str, Callable[[ReplayPlan, BinaryIO], object]] = {
        ".plan": lambda plan, handle: plan.pack(handle),
        ".py": script,
    }
    formats = {ending: ending for ending in (*plan_writers, *REPLAY.endings)}
    targets = outputs.resolve_output_files(args, formats, (_DIRECTORY, TABLE_FILE_PATTERN))
    comparison_paths = [path for path, file_format in targets if file_format not in plan_writers]
    problem = hint = ""
    if (args.op or args.slowest) and not any(file_format == ".py" for _, file_format in targets):
        problem, hint = "--op and --slowest cut ops out into a script", "add -o slowest.py"
    elif args.record and (args.plan_only or args.dry_run):
        problem, hint = (
            "--record is of what runs, and nothing runs",
            "leave --plan-only and --dry-run out",
        )
    elif args.machine and (
        args.plan_only or args.dry_run or args.batch or args.scale or args.repeat
    ):
        problem = "--machine simulates what was recorded, beside a replay of just that"
        hint = "leave --plan-only, --dry-run, --batch, --scale and --repeat out"
    elif comparison_paths and (args.plan_only or args.dry_run):
        problem, hint = (
            f"`{comparison_paths[0]}` is about what ran, and nothing runs",
            "name a .plan or a .py",
        )
    if problem:
        raise UsageError(problem, slug="wrong-usage", hint=hint)
    return (
        [
            (path, plan_writers[file_format])
            for path, file_format in targets
            if file_format in plan_writers
        ],
        [
            (path, REPLAY.writer(path, file_format))
            for path, file_format in targets
            if file_format not in {*plan_writers, _DIRECTORY}
        ],
        [path for path, file_format in targets if file_format == _DIRECTORY],
    )


def _describe_plan(plan: ReplayPlan) -> Iterator[str]:
    from traceloom.report.labels import merge_rank_notices

    for rank_plan in plan:
        counts = dict(rank_plan.ops["action"].value_counts().iter_rows())
        external_storages = rank_plan.storages.filter("external")
        yield (
            f"rank {rank_plan.rank}: {units.format_quantity(counts.get(RUN, 0), 'op')} of {rank_plan.calls.height:,} "
            f"different calls, {units.format_quantity(counts.get(COLLECTIVE, 0), 'collective')}, "
            f"{units.format_quantity(counts.get(STAND_IN, 0), 'stand-in')}, {rank_plan.omitted.height:,} left out; "
            f"{units.format_quantity(external_storages.height, 'tensor')} from outside ({units.format_size(int(external_storages['bytes'].sum()))})"
        )
    for notice, text in merge_rank_notices([notice.to_dict() for notice in plan.notices]):
        yield f"{notice['severity']}: {text}"


def _describe_dry_run(ranks: Iterable[RankDryRun]) -> Iterator[str]:
    """Yields the results of a dry run, some lines for each rank."""
    for rank_result in ranks:
        share = (
            units.format_share(rank_result.covered_ns or 0, rank_result.duration_ns)
            if rank_result.duration_ns
            else None
        )
        peak = ", ".join(
            f"{units.format_size(size)} on {device}"
            for device, size in rank_result.peak_bytes.items()
            if size
        )
        yield (
            f"rank {rank_result.rank}: {units.format_count(rank_result.covered)} of {units.format_quantity(rank_result.ops, 'op')} run here"
            + (f" ({share} of their recorded time)" if share else "")
            + f"; {units.format_count(rank_result.looked_at)} compared, {units.format_quantity(len(rank_result.wrong), 'difference')}"
            + (f"; tensors of at most {peak}" if peak else "")
        )
        for difference in rank_result.wrong:
            outcome = f"recorded {difference.recorded}, here {difference.here or 'nothing'}"
            yield f"  {units.format_count(difference.count)} × {difference.name}, output {difference.output}: {outcome}"
        for omitted in rank_result.left:
            yield f"  {units.format_count(omitted.count)} × {omitted.name} ({omitted.reason}): {omitted.text}"
