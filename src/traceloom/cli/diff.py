"""`traceloom diff`: two runs against each other."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from traceloom.cli.progress import Progress
from traceloom.errors import PartialError, UsageError

if TYPE_CHECKING:
    from traceloom.model import Notice, Session

_EXAMPLES = """\
examples:
  traceloom diff before/ after/                     two recorded runs, all ranks of both
  traceloom diff h100.json.gz mi300.json.gz         two traces, of different vendors
  traceloom diff before/ after/ -o diff.html        as a page
  traceloom diff before/ after/ --json | jq .difference_ns
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare the options of the verb."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "diff",
        help="compare two traces or recorded runs",
        description="Compare two traces or recorded runs: what was added and removed, what became faster and slower, "
        "and how that adds up to the difference of the step time. Conditions that differ are told first.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "base", metavar="BASE", help="what it was: a trace file, a directory of traces, or a recorded run"
    )
    parser.add_argument("new", metavar="NEW", help="what it is now: the same")
    parser.add_argument(
        "-o", "--output", type=Path, action="append", default=[], metavar="FILE",
        help="write to FILE instead: .html, .md or .json; may be given several times",
    )  # fmt: skip
    parser.add_argument("--top", type=_count, default=10, metavar="N", help="rows of each table on the terminal (10)")
    parser.add_argument("--force", action="store_true", help="overwrite files")
    more = parser.add_argument_group("more")
    more.add_argument("--json", action="store_true", help="print the comparison as JSON")
    more.add_argument("--no-cache", action="store_true", help="read the files anew, and keep nothing")
    more.add_argument("--quiet", action="store_true", help="no progress, no closing line")
    more.add_argument("--debug", action="store_true", help="show a traceback when something fails")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of rows")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Read both, compare and show; returns the exit code."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as `traceloom report`: nobody here does linear algebra
    from traceloom import files

    targets = [(path, _format(path)) for path in args.output]
    if len({path.absolute() for path, _ in targets}) < len(targets):
        raise UsageError("one file is named twice by -o", slug="wrong-usage", hint="name each file once")
    for path, _ in targets:
        files.check_free(path, force=args.force)
    refused: list[Notice] = []
    with Progress(shown=not args.quiet) as progress:
        base, new = (
            _load(given, side, args, progress, refused) for given, side in ((args.base, "base"), (args.new, "new"))
        )
        progress.say("comparing")
        from traceloom.analyze import compare
        from traceloom.report import comparison

        document = comparison.build(compare(base, new), base, new)
        written = []
        for path, write in targets:
            progress.say(f"writing {path}")
            written.append((path, files.write(path, partial(write, document), force=args.force)))
    _show(args, document)
    if not args.quiet:
        _close(args, written)
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise PartialError(f"{refused[0].message}{more}", slug="refused-input")
    return 0


def _load(given: str, side: str, args: argparse.Namespace, progress: Progress, refused: list[Notice]) -> Session:
    from traceloom.read import load_inputs

    progress.say(f"reading the {side}")
    loaded = load_inputs(given, cache=not args.no_cache)
    refused += loaded.refused
    if len(loaded.runs) > 1:
        raise UsageError(
            f"`{given}` holds {len(loaded.runs)} runs, and a side of a comparison is one",
            slug="several-runs",
            hint="name a directory that holds the traces of one run, or one file",
        )
    return loaded.runs[0]


def _html(document: dict[str, Any], handle: BinaryIO) -> None:
    from traceloom.report.comparison import page

    handle.write(page.render(document).encode("utf-8"))


def _markdown(document: dict[str, Any], handle: BinaryIO) -> None:
    from traceloom.report.comparison import markdown

    handle.write(markdown.render(document).encode("utf-8"))


def _json(document: dict[str, Any], handle: BinaryIO) -> None:
    from traceloom.report.jsonfile import encode

    handle.write(encode(document))


_FORMATS: dict[str, Callable[[dict[str, Any], BinaryIO], None]] = {
    ".html": _html,
    ".htm": _html,
    ".md": _markdown,
    ".json": _json,
}


def _format(path: Path) -> Callable[[dict[str, Any], BinaryIO], None]:
    found = _FORMATS.get(path.suffix.lower())
    if found is None:
        raise UsageError(
            f"`{path}` does not tell which format to write",
            slug="unknown-format",
            hint=f"use one of the endings {', '.join(_FORMATS)}",
        )
    return found


def _show(args: argparse.Namespace, document: dict[str, Any]) -> None:
    if args.json:
        _json(document, sys.stdout.buffer)
    elif not args.output:
        from traceloom.report.comparison import terminal

        terminal.show(document, args.top, sys.stdout)


def _close(args: argparse.Namespace, written: list[tuple[Path, int]]) -> None:
    from traceloom.model import units

    stream = sys.stderr if args.json else sys.stdout
    for path, size in written:
        print(f"Wrote {path} ({units.size(size)}).", file=stream)
    if not written and not args.json:
        print(f"\nNext: traceloom diff {shlex.join([args.base, args.new])} -o diff.html", file=stream)
