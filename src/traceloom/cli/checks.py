"""Shared code of verbs that compare runs with a baseline: reading the runs, showing the verdict,
the exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, BinaryIO

from traceloom.cli import options as types, outputs
from traceloom.errors import CheckError, PartialError, UsageError
from traceloom.system.files import restore_addresses

if TYPE_CHECKING:
    from traceloom.analyze.gate import Condition
    from traceloom.report.documents.verdict import VerdictDocument
    from traceloom.trace.notice import Notice
    from traceloom.trace.session import Session

VerdictWriter = Callable[["VerdictDocument", BinaryIO], object]
CONDITIONS = """\
conditions: METRIC > CHANGE or METRIC < CHANGE, of the new side less the base, per step
  METRIC  step_time gpu_time exposed_communication idle launches memory_peak
          kernel:REGEX  kind:gemm  op:REGEX (host)  op_gpu:REGEX
          median(METRIC)  p10(METRIC)  p95(METRIC) instead of the mean
  CHANGE  3%  2ms  100MB  10
"""


def add_conditions(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--fail-if",
        dest="conditions",
        action="append",
        default=[],
        metavar="CONDITION",
        help="fail (exit code 5) where the change is surely beyond this, as in 'step_time > 3%%'; may be repeated",
    )
    parser.add_argument("--strict", action="store_true", help="an inconclusive check fails, too")


def add_output(parser: argparse.ArgumentParser, result_name: str) -> None:
    outputs.add_output_options(parser, ".html, .md, .json")
    parser.add_argument(
        "--top",
        type=types.parse_count,
        default=10,
        metavar="N",
        help="rows of each table on the terminal (10)",
    )
    group = parser.add_argument_group("more")
    group.add_argument("--json", action="store_true", help=f"print the {result_name} as JSON")
    types.add_reading(group)


def read_conditions(texts: Sequence[str]) -> list[Condition]:
    """Parses the conditions; returns the default where there are none."""
    from traceloom.analyze.gate import DEFAULT_CONDITION, parse

    return [parse(text) for text in texts or [DEFAULT_CONDITION]]


def load_sessions(
    paths: Sequence[str], args: argparse.Namespace, refused: list[Notice], *, single: bool = False
) -> list[Session]:
    """Loads all runs that the paths hold.

    Raises:
        UsageError: slug `several-runs`: with `single`, a path holds more than one run.
    """
    from traceloom.formats import load_inputs

    sessions: list[Session] = []
    for path in paths:
        loaded = load_inputs(path, cache=not args.no_cache)
        refused += loaded.refused
        sessions += loaded.runs
        if single and len(loaded.runs) > 1:
            raise UsageError(
                f"`{path}` holds {len(loaded.runs)} runs, and a side of a comparison is one",
                slug="several-runs",
                hint="name a directory that holds the traces of one run, or one file; with --fail-if a side may have "
                "many",
            )
    return sessions


def format_side_name(paths: Sequence[str]) -> str:
    return restore_addresses(
        paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    )


def show(args: argparse.Namespace, document: VerdictDocument) -> None:
    """Prints the verdict on standard output; one line of it where files were requested."""
    from traceloom.report import verdict

    if args.json:
        outputs.write_json(document, sys.stdout.buffer)
    elif outputs.should_print_document(args):
        verdict.show(document, args.top, sys.stdout)
    elif not args.quiet:
        verdict.print_sentence(document, sys.stdout)


def raise_unless_passed(document: VerdictDocument) -> None:
    """Raises if the check failed, or, with `--strict`, if it was inconclusive.

    Raises:
        CheckError: `check-failed`; `check-inconclusive` with `--strict`.
    """
    if document["passed"]:
        return
    if document["verdict"] == "fail":
        raise CheckError(document["sentence"], slug="check-failed")
    raise CheckError(
        document["sentence"],
        slug="check-inconclusive",
        hint="record more runs of both sides, or more steps",
    )


def end_with_refusals(refused: Sequence[Notice]) -> None:
    """Raises if inputs were refused while the rest was done.

    Raises:
        PartialError: slug `refused-input`.
    """
    if refused:
        others_note = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise PartialError(f"{refused[0].message}{others_note}", slug="refused-input")


_render_page = outputs.make_lazy_writer("traceloom.report.verdict:render_verdict_page")
FORMATS: dict[str, VerdictWriter] = {
    ".html": _render_page,
    ".htm": _render_page,
    ".md": outputs.make_lazy_writer("traceloom.report.verdict:render_verdict_markdown"),
    ".json": outputs.write_json,
}
