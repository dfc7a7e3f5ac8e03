"""`traceloom baseline`: saves a summary of runs, and compares later runs with it."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from traceloom.cli import checks, options as types, outputs
from traceloom.cli.outputs import Progress
from traceloom.errors import InputError, PartialError, UsageError

if TYPE_CHECKING:
    from traceloom.analyze.gate_summary import RunSummary
    from traceloom.report.documents.verdict import BaselineRow, BaselinesDocument
    from traceloom.trace.notice import Notice

DESCRIPTION = (
    "Keep what a comparison needs of recorded runs under a name (numbers per step, not the traces), "
    "and say later whether new runs are worse. The check is that of traceloom diff --fail-if."
)
EXAMPLES = f"""\
examples:
  traceloom baseline save main runs/                keep the runs of a directory as `main`
  traceloom baseline list
  traceloom baseline compare main new-runs/ --fail-if 'step_time > 3%' -o check.md
  traceloom baseline compare main new-runs/ --power 5%          how many runs would show 5 %
  traceloom baseline compare main run1 run2 --store s3://bucket/baselines

{checks.CONDITIONS}"""
_STORE = ".traceloom/baselines"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("save", "list", "compare"),
        metavar="save|list|compare",
        help="what to do",
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the baseline (of save and compare)"
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="recorded run, trace file, or a directory of several runs",
    )
    parser.add_argument(
        "--store",
        default=_STORE,
        metavar="DIR_OR_URL",
        help=f"where baselines are kept: a directory ({_STORE}) or a URL that fsspec knows, as s3://...",
    )
    compare = parser.add_argument_group("compare")
    checks.add_conditions(compare)
    compare.add_argument(
        "--power",
        type=types.parse_percentage,
        metavar="CHANGE",
        help="say how many runs a side would show a change of this size: 5%%",
    )
    checks.add_output(parser, "result")


def run(args: argparse.Namespace) -> int:
    """Runs the action and returns the exit code."""
    wrong = ""
    if args.action == "list":
        wrong = "`list` takes no name" if args.name is not None else ""
    elif args.name is None or not args.runs:
        wrong = f"`{args.action}` needs a name and at least one run"
    if args.action != "compare" and (
        args.conditions or args.strict or args.output or args.power is not None
    ):
        wrong = wrong or "--fail-if, --strict, --power and -o belong to `compare`"
    if wrong:
        raise UsageError(
            wrong,
            slug="wrong-usage",
            hint="traceloom baseline save NAME RUN... | list | compare NAME RUN...",
        )
    return {"save": _save, "list": _list, "compare": _compare}[args.action](args)


def _save(args: argparse.Namespace) -> int:
    from traceloom.report import baseline_store as store

    store.check_baseline_name(args.name)
    baseline_store = store.BaselineStore(args.store)
    outputs.check_name_available(
        args, f"baseline `{args.name}`", lambda: args.name in baseline_store.names()
    )
    refused: list[Notice] = []
    with Progress(enabled=not args.quiet) as progress:
        runs = _summarise_runs(args, progress, refused)
        location = baseline_store.save(args.name, runs, int(time.time()), force=args.force)
    if args.json:
        outputs.write_json(
            {"name": args.name, "where": location, "runs": len(runs)}, sys.stdout.buffer
        )
    elif not args.quiet:
        run_count = f"{len(runs)} run{'s' * (len(runs) != 1)}"
        print(f"Wrote {location} ({run_count}).")
        if len(runs) == 1:
            print("One run says nothing of how runs differ: several make a verdict that holds.")
        store_option = [] if args.store == _STORE else ["--store", args.store]
        following = [args.name, "NEW-RUN", *store_option, "--fail-if", "step_time > 3%"]
        print(f"Next: traceloom baseline compare {shlex.join(following)}")
    checks.end_with_refusals(refused)
    return 0


def _summarise_runs(
    args: argparse.Namespace, progress: Progress, refused: list[Notice]
) -> list[RunSummary]:
    from traceloom.analyze import gate_summary

    progress.show("reading")
    sessions = checks.load_sessions(args.runs, args, refused)
    progress.show("measuring")
    return [gate_summary.summarise(session) for session in sessions]


def _list(args: argparse.Namespace) -> int:
    from traceloom.report import baseline_store as store, verdict
    from traceloom.report.views import terminal

    baseline_store = store.BaselineStore(args.store)
    rows: list[BaselineRow] = []
    damaged: list[InputError] = []

    for name in baseline_store.names():
        try:
            rows.append(verdict.build_baseline_row(name, baseline_store.load(name)))
        except InputError as error:  # noqa: PERF203  (each baseline separately)
            damaged.append(error)
    if args.json:
        document: BaselinesDocument = {"store": args.store, "baselines": rows}
        outputs.write_json(document, sys.stdout.buffer)
    elif rows:
        terminal.print_lines(partial(verdict.render_baselines, rows, args.top), sys.stdout)
    elif not damaged:
        print(f"There is no baseline in {args.store}; traceloom baseline save NAME RUN makes one.")
    if damaged:
        raise PartialError(str(damaged[0]), slug="refused-input")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from traceloom.analyze import gate
    from traceloom.report import baseline_store, verdict

    conditions = checks.read_conditions(args.conditions)
    targets = outputs.resolve_output_files(args, checks.FORMATS)
    base = baseline_store.BaselineStore(args.store).load(args.name)
    refused: list[Notice] = []
    with Progress(enabled=not args.quiet) as progress:
        runs = _summarise_runs(args, progress, refused)
        progress.show("comparing")
        outcome = gate.judge(base.runs, runs, conditions)
        sides = ((f"baseline {args.name}", base.runs), (checks.format_side_name(args.runs), runs))
        document = verdict.build(outcome, *sides, strict=args.strict, effect=args.power)
        written = outputs.write_output_files(args, targets, document, progress)
    checks.show(args, document)
    flags = [] if args.store == _STORE else ["--store", args.store]
    flags += [part for text in args.conditions for part in ("--fail-if", text)]
    arguments = shlex.join([args.name, *args.runs, *flags])
    outputs.print_outcome(args, written, f"traceloom baseline compare {arguments} -o check.md")
    checks.raise_unless_passed(document)
    checks.end_with_refusals(refused)
    return 0
