"""Verb replay."""

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

from traceloom.cli import options as types
from traceloom.cli import outputs
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


_MAX_TIME_S, _TIMEOUT_S = 60.0, 300.0


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    how = parser.add_argument_group("how it is run")
    how.add_argument(
        "--device", choices=("cpu", "cuda", "xpu"), help="where (default: as recorded where there is one, else cpu)"
    )
    how.add_argument(
        "--pace", choices=("fast", "recorded"), default="fast",
        help="fast (default): one op after the other; recorded: with the gaps that the host left between them",
    )  # fmt: skip
    how.add_argument(
        "--threads", choices=("one", "recorded"), default="one",
        help="one thread calls all ops (default), or as many as recorded, which wait for each other where they must",
    )  # fmt: skip
    how.add_argument(
        "--iterations", type=types.count, metavar="N", help="passes (default: until the median is known to 2 %%)"
    )
    how.add_argument(
        "--max-time", type=types.positive, default=_MAX_TIME_S, metavar="S", help="no pass begins later (default: 60 s)"
    )
    how.add_argument(
        "--timeout", type=types.positive, default=_TIMEOUT_S, metavar="S",
        help="how long a collective may take (default: 300 s)",
    )  # fmt: skip
    how.add_argument("--memory-limit", type=types.size, metavar="SIZE", help="what the tensors of a rank may take")
    how.add_argument("--seed", type=types.whole, default=0, metavar="N", help="of random contents (default: 0)")
    how.add_argument("--backend", metavar="NAME", help="of torch.distributed (default: gloo, on GPUs nccl)")
    how.add_argument(
        "--stand-ins", action="store_true", help="what cannot be run takes its recorded time; else it takes none"
    )
    how.add_argument(
        "--record", metavar="DIR",
        help="record some further passes: a capture that `traceloom diff` and `traceloom report` take",
    )  # fmt: skip
    how.add_argument("--strict", action="store_true", help="stop at the first op that fails")
    how.add_argument(
        "--trust", action="store_true",
        help="execute the sources of compiled kernels, which were recorded beside the trace: code of whoever made it",
    )  # fmt: skip
    how.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="a Python module that brings custom ops (may be repeated)",
    )  # fmt: skip


def is_follower() -> bool:
    """Whether this is one of torchrun's processes other than the first, which alone prints and writes."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def run_options(args: argparse.Namespace) -> RunOptions:
    """What the user wants."""
    from traceloom.workload.replay.running import RunOptions

    return RunOptions(
        device=args.device, pace=args.pace, iterations=args.iterations, max_time_s=args.max_time,
        timeout_s=args.timeout, memory_limit=args.memory_limit, seed=args.seed, backend=args.backend, ranks=args.ranks,
        stand_ins=args.stand_ins, strict=args.strict, threads=args.threads, imports=tuple(args.imports),
        trust=args.trust,
        record=None if args.record is None else str(Path(args.record).resolve()), force=args.force,
    )  # fmt: skip


_SLOWEST = 10
_MOST = 1 << 20  # times a size
_DIRECTORY = "directory"
DESCRIPTION = (
    "Run a recorded workload again, without its code and its data: every op with the arguments, shapes and types that "
    "were recorded. What it needs is a host trace, as `traceloom record` writes."
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
    """Declare the options of the verb."""
    types.add_inputs(parser, "recorded run, host traces with or without device traces, a .graph or a .plan")
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--level", choices=("outermost", "leaf"), default="outermost",
        help="ops that the program called (default), or what those call that only call others",
    )  # fmt: skip
    what.add_argument("--steps", type=types.steps, metavar="A..B", help="these steps of a host trace of several")
    what.add_argument("--scope", metavar="NAME", help="what ran in this scope or module")
    what.add_argument("--only", choices=("compute", "communication"), help="one side alone")
    what.add_argument("--ranks", type=types.ranks, metavar="LIST", help="these ranks, as 0,1")
    what.add_argument("--plan-only", action="store_true", help="plan, and do not run")
    what.add_argument(
        "--dry-run", action="store_true",
        help="run on tensors without content: which ops run here, whether they give what was recorded, memory",
    )  # fmt: skip
    size = parser.add_argument_group("at which size")
    size.add_argument("--batch", type=factor, metavar="F", help="the first dimension of the data times F, as 2 or 1/2")
    size.add_argument(
        "--scale", type=scale, action="append", default=[], metavar="SIZE=F",
        help="all dimensions of a size times F (may be repeated)",
    )  # fmt: skip
    size.add_argument("--repeat", type=repeat, metavar="SCOPE=N", help="what ran in a scope N times, as blocks.3=8")
    add_run_options(parser)
    parser.add_argument(
        "--machine", metavar="FILE|PRESET",
        help="also simulate the steps on this machine, from `traceloom calibrate --here`, and print the difference",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    script = parser.add_argument_group("scripts (-o FILE.py)")
    script.add_argument("--op", metavar="NAME", help="the calls of one op, as aten::mm, each timed on its own")
    script.add_argument("--slowest", type=types.whole, metavar="N", help="that many calls, those that took longest")
    outputs.add_output(
        parser,
        ".plan; .py, a script that needs torch alone; .json or .html of the comparison; .csv or .parquet for its table "
        "of that name (whole, simulated, coverage, not_run, ops, each, collectives, contents); DIR/ for all of them",
    )
    types.add_reading(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Plan, run, show and write; returns the exit code."""
    from traceloom.report import replay as report
    from traceloom.report.replay import REPLAY
    from traceloom.workload.replay.comparison import compare_replay
    from traceloom.workload.replay.dry_run import dry_run
    from traceloom.workload.replay.planning import Choice, make_plan
    from traceloom.workload.replay.ranks import replay

    of_plan, of_run, directories = _targets(args)
    choice = Choice(
        level=args.level,
        steps=None if args.steps is None else tuple(range(args.steps[0], args.steps[1] + 1)),
        scope=args.scope,
        only=args.only,
        ranks=args.ranks,
    )
    is_printed = not args.plan_only and not args.dry_run and outputs.is_printed(args)
    runs = bool(of_run or directories or args.record or is_printed)
    if is_follower():
        of_plan, of_run, directories, args.quiet = [], [], [], True
    replayed = dry = comparison = simulated = None
    with Progress(shown=not args.quiet) as progress:
        plan = make_plan(*args.inputs, choice=choice, cache=not args.no_cache, progress=progress.say)
        plan = _resized(args, plan)
        if args.trust and runs:  # which sources are about to be executed is said whatever else is not
            from traceloom.workload.replay.kernels import sources_in_words

            for line in sources_in_words(plan):
                print(sanitize(f"trusted: {line}"), file=sys.stderr)
        written = outputs.write(args, of_plan, plan, progress)
        if args.dry_run:
            dry = dry_run(plan, imports=args.imports)
        elif runs:
            if args.machine and not is_follower():
                from traceloom.workload.replay.comparison import simulate_steps

                simulated = simulate_steps(
                    args.inputs, plan, args.machine, with_gaps=args.pace == "recorded", cache=not args.no_cache,
                    say=progress.say,
                )  # fmt: skip
            replayed = replay(plan, run_options(args), say=progress.say)
        if replayed is not None:
            comparison = compare_replay(plan, replayed, simulated)
            written += outputs.write(args, of_run, comparison, progress)
            written += [(path, REPLAY.write_directory(comparison, path, force=args.force)) for path in directories]
    if dry is not None and args.json:
        outputs.as_json({"ranks": [msgspec.to_builtins(of_rank) for of_rank in dry.values()]}, sys.stdout.buffer)
    elif dry is not None:
        outputs.add_reason(args, *_dry_lines(dry.values()))
    elif comparison is not None and args.json:
        report.write_json(comparison, sys.stdout.buffer)
    elif comparison is not None and outputs.is_printed(args):
        from traceloom.report.replay import render_terminal
        from traceloom.report.views import terminal

        terminal.put(partial(render_terminal, report.build(comparison)), sys.stdout)
    elif not runs:
        outputs.add_reason(args, *_lines(plan))
    outputs.print_outcome(args, written, outputs.repeat_command(args, "replay.html" if runs else "run.plan"))
    return 0


def factor(text: str) -> Fraction:
    """`2`, `1/2` or `x2` as a factor above 0."""
    try:
        number = Fraction(text.removeprefix("x"))
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if not 0 < number < _MOST:
        raise argparse.ArgumentTypeError(f"`{text}` is not a factor, as 2 or 1/2")
    return number


def scale(text: str) -> str:
    """`192=2`: a size and a factor; as it was written."""
    size, _, by = text.partition("=")
    types.count(size)
    factor(by)
    return text


def repeat(text: str) -> str:
    """`blocks.3=8`: a scope and a number; as it was written."""
    name, _, times = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"`{text}` is not a scope and a number, as blocks.3=8")
    types.count(times)
    return text


def _resized(args: argparse.Namespace, plan: ReplayPlan) -> ReplayPlan:
    """The plan at the sizes that were asked for."""
    if not (args.batch or args.scale or args.repeat):
        return plan
    from traceloom.workload.replay.resize import repeated, scaled

    if args.repeat:
        scope, _, times = args.repeat.rpartition("=")
        plan = repeated(plan, scope, int(times))
    sizes = dict(text.split("=") for text in args.scale)
    factors = {int(size): factor(by) for size, by in sizes.items()}
    return scaled(plan, factors, batch=args.batch) if args.batch or factors else plan


def _targets(
    args: argparse.Namespace,
) -> tuple[
    list[tuple[Path, Callable[[ReplayPlan, BinaryIO], object]]],
    list[tuple[Path, Callable[[ReplayComparison, BinaryIO], object]]],
    list[Path],
]:
    """What is written of the plan, what of the comparison, and directories for tables of this.

    Raises:
        UsageError: slug `wrong-usage`, `unknown-format`, `no-such-table`.
        OutputError: slugs `file-exists`, `cannot-write`.
    """
    from traceloom.report.replay import REPLAY
    from traceloom.report.views.files import OURS

    def script(plan: ReplayPlan, handle: BinaryIO) -> None:
        from traceloom.workload.replay.script import write_script, write_worst

        if args.op or args.slowest:
            text = write_worst(plan, args.op, args.slowest or _SLOWEST, seed=args.seed)
        else:
            text = write_script(plan, seed=args.seed)
        handle.write(encode_utf8(text))

    of_plan: dict[str, Callable[[ReplayPlan, BinaryIO], object]] = {
        ".plan": lambda plan, handle: plan.pack(handle),
        ".py": script,
    }
    formats = {ending: ending for ending in (*of_plan, *REPLAY.endings)}
    chosen = outputs.targets(args, formats, (_DIRECTORY, OURS))
    of_run = [path for path, form in chosen if form not in of_plan]
    wrong = hint = ""
    if (args.op or args.slowest) and not any(form == ".py" for _, form in chosen):
        wrong, hint = "--op and --slowest cut ops out into a script", "add -o slowest.py"
    elif args.record and (args.plan_only or args.dry_run):
        wrong, hint = "--record is of what runs, and nothing runs", "leave --plan-only and --dry-run out"
    elif args.machine and (args.plan_only or args.dry_run or args.batch or args.scale or args.repeat):
        wrong = "--machine simulates what was recorded, beside a replay of just that"
        hint = "leave --plan-only, --dry-run, --batch, --scale and --repeat out"
    elif of_run and (args.plan_only or args.dry_run):
        wrong, hint = f"`{of_run[0]}` is about what ran, and nothing runs", "name a .plan or a .py"
    if wrong:
        raise UsageError(wrong, slug="wrong-usage", hint=hint)
    return (
        [(path, of_plan[form]) for path, form in chosen if form in of_plan],
        [(path, REPLAY.writer(path, form)) for path, form in chosen if form not in {*of_plan, _DIRECTORY}],
        [path for path, form in chosen if form == _DIRECTORY],
    )


def _lines(plan: ReplayPlan) -> Iterator[str]:
    """What the plan holds, a line for each rank."""
    from traceloom.report.labels import group_by_ranks

    for rank_plan in plan:
        counts = dict(rank_plan.ops["action"].value_counts().iter_rows())
        outside = rank_plan.storages.filter("external")
        yield (
            f"rank {rank_plan.rank}: {units.count_of(counts.get(RUN, 0), 'op')} of {rank_plan.calls.height:,} "
            f"different calls, {units.count_of(counts.get(COLLECTIVE, 0), 'collective')}, "
            f"{units.count_of(counts.get(STAND_IN, 0), 'stand-in')}, {rank_plan.left_out.height:,} left out; "
            f"{units.count_of(outside.height, 'tensor')} from outside ({units.size(int(outside['bytes'].sum()))})"
        )
    for notice, sentence in group_by_ranks([notice.to_dict() for notice in plan.notices]):
        yield f"{notice['severity']}: {sentence}"


def _dry_lines(ranks: Iterable[RankDryRun]) -> Iterator[str]:
    """What a dry run found, some lines for each rank."""
    for of_rank in ranks:
        share = units.share(of_rank.covered_ns or 0, of_rank.duration_ns) if of_rank.duration_ns else None
        peak = ", ".join(f"{units.size(size)} on {device}" for device, size in of_rank.peak_bytes.items() if size)
        yield (
            f"rank {of_rank.rank}: {units.count(of_rank.covered)} of {units.count_of(of_rank.ops, 'op')} run here"
            + (f" ({share} of their recorded time)" if share else "")
            + f"; {units.count(of_rank.looked_at)} compared, {units.count_of(len(of_rank.wrong), 'difference')}"
            + (f"; tensors of at most {peak}" if peak else "")
        )
        for wrong in of_rank.wrong:
            what = f"recorded {wrong.recorded}, here {wrong.here or 'nothing'}"
            yield f"  {units.count(wrong.count)} × {wrong.name}, output {wrong.output}: {what}"
        for left in of_rank.left:
            yield f"  {units.count(left.count)} × {left.name} ({left.reason}): {left.text}"
