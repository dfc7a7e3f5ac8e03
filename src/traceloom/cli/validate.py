"""`traceloom validate`: checks a set of `.et` files."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from traceloom.cli import options as types
from traceloom.cli.outputs import Progress
from traceloom.errors import CheckError
from traceloom.system import units
from traceloom.system.files import restore_addresses
from traceloom.system.sanitize import sanitize

if TYPE_CHECKING:
    from traceloom.workload.chakra.validation_rules import Problem, ValidationResult

_TARGETS = ("chakra", "astra-sim")
_SEVERITY_SIGNS = {"error": "✖", "warning": "▲"}
DESCRIPTION = "Say everything that is wrong with a set of Chakra files (.et, .et.gz), and what to do about it."
EXAMPLES = """\
examples:
  traceloom validate workload.0.et                  one file
  traceloom validate workload/                      all ranks of a job, and what they do together
  traceloom validate workload/ --target astra-sim   whether ASTRA-sim takes them
  traceloom validate workload/ --json               every node that is wrong, for programs
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_inputs(
        parser,
        ".et or .et.gz files, or directories of them; PREFIX.0.et, PREFIX.1.et, ... are one set",
    )
    parser.add_argument(
        "--target",
        choices=_TARGETS,
        default="chakra",
        help="who must be able to read them (default: chakra)",
    )
    parser.add_argument(
        "--groups",
        type=Path,
        metavar="FILE",
        help="the group file, where it is not beside the files",
    )
    parser.add_argument("--strict", action="store_true", help="fail on warnings too")
    parser.add_argument(
        "--json", action="store_true", help="print the verdict as JSON, with the ids of all nodes"
    )
    types.add_verbosity_options(parser, "no progress; print nothing where nothing is wrong")


def run(args: argparse.Namespace) -> int:
    """Validates; returns exit code 5 where there are problems."""
    from traceloom.workload.chakra.validate import validate

    with Progress(enabled=not args.quiet) as progress:
        verdict = validate(
            *args.inputs,
            target=args.target,
            groups=args.groups,
            step=lambda path: progress.show(f"reading {path}"),
        )
    if args.json:
        import msgspec

        from traceloom.system.text import encode_json

        sys.stdout.buffer.write(
            msgspec.json.format(encode_json(verdict.to_dict()), indent=1) + b"\n"
        )
    else:
        letters: dict[int, str] = {}
        if not (sys.stdout.encoding or "utf-8").lower().replace("-", "").startswith("utf"):
            from traceloom.report.views.terminal_table import ASCII_FALLBACKS as letters  # noqa: N811  (the characters that it replaces)
        for line in _render_problems(verdict, quiet=args.quiet):
            print(restore_addresses(line).translate(letters))
    if verdict.errors + (verdict.warnings if args.strict else 0):
        raise CheckError(
            f"{_summarise_problems(verdict)}: not fit for {args.target}",
            slug="invalid-workload",
            hint="each problem above has its remedy"
            if not args.json
            else "each problem has its remedy",
        )
    return 0


def _render_problems(verdict: ValidationResult, *, quiet: bool) -> Iterator[str]:
    # A problem that breaks one rule at one severity in all files is printed once.
    alike: dict[tuple[str, str], list[Problem]] = {}
    for problem in verdict.problems:
        alike.setdefault((problem.rule, problem.severity), []).append(problem)
    for problems in alike.values():
        first, other_files = problems[0], len(problems) - 1
        rank_note = f", rank {first.rank}" if first.rank is not None else ""
        count = sum(problem.count for problem in problems)
        times = f" ({count:,} times)" if count > 1 else ""
        also = f", and in {units.format_quantity(other_files, 'more file')}" if other_files else ""
        yield sanitize(
            f"{_SEVERITY_SIGNS[first.severity]} {first.rule}{times}  {first.path}{rank_note}{also}"
        )
        for example in first.examples:
            yield sanitize(f"    {example.message}")
        if count > len(first.examples):
            yield f"    … and {count - len(first.examples):,} more"
        yield f"    → {first.remedy}"
        yield ""
    if quiet and not verdict.problems:
        return
    files, nodes = len(verdict.files), sum(count for _, _, count in verdict.files)
    yield f"{units.format_quantity(files, 'file')}, {units.format_quantity(nodes, 'node')}, for {verdict.target}: {_summarise_problems(verdict)}"
    if not verdict.errors and verdict.files:
        file = Path(verdict.files[0][0])
        yield f"Next: traceloom show {shlex.quote(str(file.parent if files > 1 else file))}"


def _summarise_problems(verdict: ValidationResult) -> str:
    if not verdict.problems:
        return "nothing is wrong"
    wrong, checked = {p.path for p in verdict.problems}, {path for path, _, _ in verdict.files}
    files = len(verdict.files)
    locations = (
        [f"{len(wrong & checked)} of {units.format_quantity(files, 'file')}"]
        if wrong & checked
        else []
    )
    locations += ["the group file"] if wrong - checked else []
    numbers = {"error": verdict.errors, "warning": verdict.warnings}
    counts = [
        units.format_quantity(number, severity) for severity, number in numbers.items() if number
    ]
    return f"{' and '.join(counts)} in {' and '.join(locations)}"
