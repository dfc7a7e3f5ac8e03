"""`traceloom memory`: whose memory is it?"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from traceloom.cli import closing
from traceloom.cli.options import add_reading, ranks
from traceloom.cli.progress import Progress
from traceloom.errors import UsageError
from traceloom.plain_text import encoded

if TYPE_CHECKING:
    from traceloom.report.memory import MemoryOptions
    from traceloom.report.memory.sources import Sources

BY = ("scope", "module", "category", "op", "stack", "dtype")
_EXAMPLES = """\
examples:
  traceloom memory run                           who holds what at the peak
  traceloom memory run --by module --depth 3     by part of the model
  traceloom memory run --at "step 4" --by stack  by line of code, in one step
  traceloom memory run -o memory.html            one page: the curve, who holds what at any instant
  traceloom memory snapshot.pickle               a memory snapshot of PyTorch
  traceloom memory run -o allocations.csv --all  every allocation with its name
"""
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ns|us|µs|ms|s)")
_NANOSECONDS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
_ENDINGS = (".html", ".csv", ".json")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare the options of the verb."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "memory",
        help="show whose memory it is",
        description="Show who holds the memory at an instant, what grows, and every allocation by name.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="run recorded with --memory, traces, or PyTorch's memory snapshots and timelines",
    )
    what = parser.add_argument_group("what to show")
    what.add_argument("--by", choices=BY, default="scope", help="divide memory by this (default: scope)")
    what.add_argument("--depth", type=_count, metavar="N", help="parts of a scope's or module's path told apart")
    what.add_argument(
        "--at", type=_instant, default="peak", metavar="WHEN",
        help='peak (default), start, end, "step 3" (its highest point), or a time as 12.5ms',
    )  # fmt: skip
    what.add_argument("--rank", type=ranks, metavar="N[,N]", help="only these ranks")
    what.add_argument("--full-op-names", action="store_true", help="keep namespaces: aten::relu instead of relu")
    how = parser.add_argument_group("how to show it")
    how.add_argument("--top", type=_count, default=10, metavar="N", help="rows of a table (default: 10)")
    how.add_argument("--json", action="store_true", help="print the answer as JSON")
    how.add_argument(
        "-o", "--output", type=Path, action="append", default=[], metavar="FILE",
        help="write a file instead: .html, .csv (every allocation), .json (may be repeated)",
    )  # fmt: skip
    how.add_argument("--all", action="store_true", help="with .csv: time, lifetime, category, step, stack, ... too")
    how.add_argument("--force", action="store_true", help="overwrite files")
    more = parser.add_argument_group("more")
    add_reading(more)
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"`{text}` is no number from 1 on")
    return int(text)


def _instant(text: str) -> str:
    """`12.5ms` becomes nanoseconds; words stay."""
    match = _TIME.fullmatch(text.strip())
    if match:
        return str(round(float(match[1]) * _NANOSECONDS[match[2]]))
    if text in ("peak", "start", "end") or re.fullmatch(r"step \d+", text):
        return text
    raise argparse.ArgumentTypeError(f'`{text}` is no instant: give peak, start, end, "step 3" or a time as 12.5ms')


def run(args: argparse.Namespace) -> int:
    """Read, explain and show; returns the exit code."""
    from traceloom import files
    from traceloom.report.memory import MemoryOptions, document_of, find

    for path in args.output:
        if not path.name.lower().endswith(_ENDINGS):
            hint = f"use one of the endings {', '.join(_ENDINGS)}"
            raise UsageError(f"`{path}` does not tell which format to write", slug="unknown-format", hint=hint)
        files.check_free(path, force=args.force)
    options = MemoryOptions(args.rank, args.by, args.depth, args.at, args.top, args.full_op_names)
    with Progress(shown=not args.quiet) as progress:
        progress.say("reading")
        sources = find(args.inputs, cache=not args.no_cache)
        progress.say("naming allocations")
        document = document_of(sources, options)
        written = []
        write: Callable[[BinaryIO], None]
        for path in args.output:
            progress.say(f"writing {path}")
            if path.name.lower().endswith(".csv"):
                write = partial(_csv, sources, options, whole=args.all)
            elif path.name.lower().endswith(".html"):
                write = partial(_html, document)
            else:
                write = partial(_json, document)
            written.append((path, files.write(path, write, force=args.force)))
    _show(args, document, options, written)
    return 0


def _csv(sources: Sources, options: MemoryOptions, handle: BinaryIO, *, whole: bool) -> None:
    from traceloom.report.memory import csvfile

    csvfile.write(sources, options, handle, whole=whole)


def _html(document: dict[str, Any], handle: BinaryIO) -> None:
    from traceloom.report.memory.page import render

    handle.write(encoded(render(document)))


def _json(document: dict[str, Any], handle: BinaryIO) -> None:
    from traceloom.report.views.jsonfile import encode

    handle.write(encode(document))


def _show(
    args: argparse.Namespace, document: dict[str, Any], options: MemoryOptions, written: list[tuple[Path, int]]
) -> None:
    if args.json:
        from traceloom.report.views.jsonfile import encode

        sys.stdout.buffer.write(encode(document))
    elif not written:
        from traceloom.report.memory.terminal import render
        from traceloom.report.views import terminal

        terminal.put(partial(render, document, options), sys.stdout)
    following = f"traceloom memory {shlex.join(args.inputs)} -o memory.html"
    closing.tell(args, written, following if document["ranks"] else None)
