"""`traceloom diff`: compares two runs, and checks whether the new one is worse."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from traceloom.cli import checks, outputs
from traceloom.cli.outputs import Progress
from traceloom.errors import UsageError
from traceloom.system.process import pin_to_one_core

if TYPE_CHECKING:
    from traceloom.trace.notice import Notice
    from traceloom.trace.session import Session

DESCRIPTION = (
    "Compare two traces or recorded runs: what was added and removed, what became faster and slower, "
    "and how that adds up to the difference of the step time. Conditions that differ come first. With "
    "--fail-if, say whether the new side is worse or whether that may be chance."
)
EXAMPLES = f"""\
examples:
  traceloom diff before/ after/                     two recorded runs, all ranks of both
  traceloom diff h100.json.gz mi300.json.gz         two traces, of different vendors
  traceloom diff before/ after/ -o diff.html        as a page
  traceloom diff before/ after/ --json | jq .difference_ns
  traceloom diff before/ after/ --fail-if 'step_time > 3%' --fail-if 'memory_peak > 100MB'
                                                    a check: exit code 5 where it is surely worse
  traceloom diff base-runs/ new-runs/ --fail-if 'kernel:gemm > 5%' -o check.md
                                                    several runs a side: directories of recorded runs

{checks.CONDITIONS}"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "base",
        metavar="BASE",
        help="what it was: a trace file, a directory of traces, or a recorded run",
    )
    parser.add_argument("new", metavar="NEW", help="what it is now: the same")
    check = parser.add_argument_group("check")
    checks.add_conditions(check)
    check.add_argument(
        "--base",
        dest="more_base",
        action="append",
        default=[],
        metavar="RUN",
        help="one more run of the base",
    )
    check.add_argument(
        "--new",
        dest="more_new",
        action="append",
        default=[],
        metavar="RUN",
        help="one more run of the new side",
    )
    checks.add_output(parser, "comparison")


def run(args: argparse.Namespace) -> int:
    """Reads both, compares and shows; returns the exit code."""
    if args.conditions:
        return _check(args)
    if args.more_base or args.more_new or args.strict:
        raise UsageError(
            "--base, --new and --strict belong to a check",
            slug="wrong-usage",
            hint="add --fail-if 'step_time > 3%'",
        )

    page, markdown = (
        outputs.make_lazy_writer("traceloom.report.comparison:render"),
        outputs.make_lazy_writer("traceloom.report.views.markdown:render_comparison_markdown"),
    )
    targets = outputs.resolve_output_files(
        args, {".html": page, ".htm": page, ".md": markdown, ".json": outputs.write_json}
    )
    from traceloom.analyze import compare
    from traceloom.report import comparison

    refused: list[Notice] = []
    with Progress(enabled=not args.quiet) as progress:
        sessions: list[Session] = []
        for path, side in ((args.base, "base"), (args.new, "new")):
            progress.show(f"reading the {side}")
            sessions += checks.load_sessions([path], args, refused, single=True)
        base, new = sessions
        progress.show("comparing")
        with pin_to_one_core(base.event_count + new.event_count):
            document = comparison.build(compare(base, new), base, new)
            written = outputs.write_output_files(args, targets, document, progress)
    if args.json:
        outputs.write_json(document, sys.stdout.buffer)
    elif outputs.should_print_document(args):
        from traceloom.report import comparison as terminal

        terminal.show(document, args.top, sys.stdout)
    outputs.print_outcome(
        args, written, f"traceloom diff {shlex.join([args.base, args.new])} -o diff.html"
    )
    checks.end_with_refusals(refused)
    return 0


def _check(args: argparse.Namespace) -> int:
    """Shows a verdict for each condition; below it the comparison of the most typical runs of both
    sides.
    """
    from dataclasses import replace

    from traceloom.analyze import compare, gate, gate_summary
    from traceloom.analyze.gate import find_comparison_causes
    from traceloom.report import comparison, verdict

    conditions = checks.read_conditions(args.conditions)
    targets = outputs.resolve_output_files(args, checks.FORMATS)
    refused: list[Notice] = []
    with Progress(enabled=not args.quiet) as progress:
        sides = []
        for side, paths in (
            ("base", [args.base, *args.more_base]),
            ("new", [args.new, *args.more_new]),
        ):
            progress.show(f"reading the {side}")
            sides.append(
                (checks.format_side_name(paths), checks.load_sessions(paths, args, refused))
            )
        progress.show("comparing")
        runs = [[gate_summary.summarise(run) for run in sessions] for _, sessions in sides]
        outcome = gate.judge(runs[0], runs[1], conditions)
        typical_runs = []
        for (_, sessions), summaries in zip(sides, runs, strict=True):
            # The run whose recorded steps take the median time.
            means = [sum(run.scalars["step_time"]) / len(run.steps) for run in summaries]
            typical_runs.append(
                sessions[sorted(range(len(means)), key=means.__getitem__)[(len(means) - 1) // 2]]
            )
        compared = compare(*typical_runs)
        outcome = replace(outcome, causes=find_comparison_causes(compared))
        base, new = ((name, summaries) for (name, _), summaries in zip(sides, runs, strict=True))
        comparison_document = comparison.build(compared, *typical_runs)
        document = verdict.build(
            outcome, base, new, strict=args.strict, comparison=comparison_document
        )
        written = outputs.write_output_files(args, targets, document, progress)
    checks.show(args, document)
    arguments = [
        args.base,
        args.new,
        *(part for text in args.conditions for part in ("--fail-if", text)),
    ]
    outputs.print_outcome(args, written, f"traceloom diff {shlex.join(arguments)} -o check.md")
    checks.raise_unless_passed(document)
    checks.end_with_refusals(refused)
    return 0
