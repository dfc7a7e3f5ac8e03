"""`traceloom link`: host and device traces of all ranks as one dependency graph."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceloom.cli.progress import Progress
from traceloom.errors import PartialError, UsageError

if TYPE_CHECKING:
    from traceloom.link import Linked

_EXAMPLES = """\
examples:
  traceloom link run -o run.graph                a recorded run, all ranks
  traceloom link host0.json kineto0.json host1.json kineto1.json -o out/
                                                 workload.<rank>.et and comm_groups.json
  traceloom link kineto.json.gz -o rank0.et.gz   a device trace alone: weaker evidence
  traceloom link run --json                      only look: coverage, edges, the law
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare the options of the verb."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "link",
        help="link host and device traces into one graph",
        description="Link host and device traces of all ranks into one dependency graph, and say what was matched.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="recorded run, directory, or Kineto and execution traces of any ranks, in any order",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="OUT",
        help="NAME.graph; FILE.et or .et.gz for one rank; a directory for .et files of all ranks",
    )  # fmt: skip
    parser.add_argument(
        "--window", choices=("timed", "graph"), default="timed",
        help="of a recorded run: the timed steps (default), or the graph step that was recorded with its host trace",
    )  # fmt: skip
    parser.add_argument("--no-law", action="store_true", help="do not re-time the graph to see what it explains")
    parser.add_argument("--force", action="store_true", help="overwrite files")
    more = parser.add_argument_group("more")
    more.add_argument("--json", action="store_true", help="print the summary as JSON")
    more.add_argument("--no-cache", action="store_true", help="read the files anew, and keep nothing")
    more.add_argument("--quiet", action="store_true", help="no progress, no summary, no closing line")
    more.add_argument("--debug", action="store_true", help="show a traceback when something fails")
    return parser


def run(args: argparse.Namespace) -> int:
    """Read, link and write; returns the exit code."""
    _check_place(args)
    from traceloom.read import Cache
    from traceloom.read.ahead import decoding

    with decoding(args.inputs, None if args.no_cache else Cache()):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from traceloom.link import link

    with Progress(shown=not args.quiet) as progress, ThreadPoolExecutor(1, "traceloom-write") as beside:
        linked = link(*args.inputs, window=args.window, cache=not args.no_cache, progress=progress.say)
        # A graph is encoded without Python's lock: what is said of it is found out meanwhile.
        writing = None if args.output is None else beside.submit(_write, args, linked)
        law = None
        if not args.no_law:
            from traceloom.retime import law as find_law

            progress.say("re-timing")
            law = find_law(linked.graph)
        show = _summary(args, linked, law)
        written: list[str] = []
        if writing is not None:
            progress.say(f"writing {args.output}")
            written = writing.result()
    show()
    if not args.quiet:
        for line in [*written, *_next(args)]:
            print(line, file=sys.stderr if args.json else sys.stdout)
    if linked.refused:
        more = f" (and {len(linked.refused) - 1} more)" if len(linked.refused) > 1 else ""
        raise PartialError(f"{linked.refused[0].message}{more}", slug="refused-input")
    return 0


def _kind(path: Path) -> str:
    """What an output's name asks for."""
    name = path.name.lower()
    if name.endswith((".et", ".et.gz")):
        return "et"
    if name.endswith(".graph"):
        return "graph"
    if path.suffix and not path.is_dir():
        raise UsageError(
            f"`{path}` has an ending that cannot be linked to",
            slug="unknown-format",
            hint="use NAME.graph, FILE.et, FILE.et.gz or a directory; `traceloom convert` makes more of a graph",
        )
    return "directory"


def _check_place(args: argparse.Namespace) -> None:
    """Refuse a place that cannot be written to before any work is done."""
    if args.output is None:
        return
    from traceloom import files

    if _kind(args.output) != "directory":
        files.check_free(args.output, force=args.force)
    else:
        from traceloom.chakra.graph import FILES_OF_RANKS

        files.check_directory(args.output, FILES_OF_RANKS, force=args.force)


def _write(args: argparse.Namespace, linked: Linked) -> list[str]:
    from traceloom.model import units

    path, kind, graph = args.output, _kind(args.output), linked.graph
    if kind == "graph":
        from traceloom.model import graph_store

        size = graph_store.save(graph, path, force=args.force)
        return [f"Wrote {path} ({units.size(size)})."]
    from traceloom.chakra import graph as chakra

    if kind == "et":
        size = chakra.write_rank(graph, path, force=args.force)
        return [f"Wrote {path} ({units.size(size)})."]
    names = chakra.write_ranks(graph, path, force=args.force)
    size = sum(name.stat().st_size for name in names)
    return [f"Wrote {path}/ ({len(names)} files, {units.size(size)})."]


def _summary(args: argparse.Namespace, linked: Linked, law: Any) -> Callable[[], object]:
    """What prints the summary, made ready."""
    if args.quiet and not args.json:
        return lambda: None
    from traceloom.report import graph_document

    document = graph_document.build(linked.graph, law)
    if args.json:
        return partial(sys.stdout.write, json.dumps(document, indent=2) + "\n")
    from traceloom.report.views import terminal

    return partial(terminal.show_graph, document, sys.stdout)


def _next(args: argparse.Namespace) -> list[str]:
    if args.output is None:
        return [f"\nNext: traceloom link {shlex.join(args.inputs)} -o out.graph"]
    out = shlex.quote(str(args.output))
    if _kind(args.output) == "graph":
        return [f"Next: traceloom show {out}"]
    return [f"Next: traceloom validate {out}"]
