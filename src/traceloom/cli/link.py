"""`traceloom link`: links host and device traces of all ranks to one dependency graph."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from traceloom.cli import checks, options as types, outputs
from traceloom.cli.outputs import Progress

if TYPE_CHECKING:
    from traceloom.graph import Linked

_FORMATS = {".graph": "graph", ".et": "et", ".et.gz": "et"}
DESCRIPTION = (
    "Link host and device traces of all ranks into one dependency graph, and say what was matched."
)
EXAMPLES = """\
examples:
  traceloom link run -o run.graph                a recorded run, all ranks
  traceloom link host0.json kineto0.json host1.json kineto1.json -o out/
                                                 workload.<rank>.et and comm_groups.json
  traceloom link kineto.json.gz -o rank0.et.gz   a device trace alone: weaker evidence
  traceloom link run --json                      only look: coverage, edges, the law
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_inputs(
        parser, "recorded run, directory, or Kineto and execution traces of any ranks, in any order"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        help="NAME.graph; FILE.et or .et.gz for one rank; a directory for .et files of all ranks",
    )
    parser.add_argument(
        "--window",
        choices=("timed", "graph"),
        default="timed",
        help="of a recorded run: the timed steps (default), or the graph step that was recorded with its host trace",
    )
    parser.add_argument(
        "--no-law", action="store_true", help="do not re-time the graph to see what it explains"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files")
    group = parser.add_argument_group("more")
    group.add_argument("--json", action="store_true", help="print the summary as JSON")
    group.add_argument(
        "--no-cache", action="store_true", help="read the files again, without the cache"
    )
    types.add_verbosity_options(group, "no progress, no summary, no closing line")


def run(args: argparse.Namespace) -> int:
    """Reads, links and writes; returns the exit code."""
    from traceloom.formats.chakra.files import RANK_FILES_PATTERN

    format_name = (
        ""
        if args.output is None
        else outputs.resolve_output_format(args, _FORMATS, RANK_FILES_PATTERN)
    )
    from traceloom.formats import Cache
    from traceloom.formats.ahead import decode_ahead

    with (
        decode_ahead(args.inputs, None if args.no_cache else Cache()),
        Progress(enabled=not args.quiet) as progress,
        ThreadPoolExecutor(1, "traceloom-write") as executor,
    ):
        from traceloom.graph import link

        linked = link(
            *args.inputs, window=args.window, cache=not args.no_cache, progress=progress.show
        )
        # Encoding a graph releases the GIL; the text about it is prepared meanwhile.
        writing = (
            None if args.output is None else executor.submit(_write, args, format_name, linked)
        )
        law = None
        if not args.no_law:
            from traceloom.graph import law as find_law

            progress.show("re-timing")
            law = find_law(linked.graph)
        show: Callable[[], object] = lambda: None  # noqa: E731  (prepared here, printed after writing)
        if args.json or not args.quiet:
            from traceloom.report import graph

            document = graph.build(linked.graph, law)
            if args.json:
                show = partial(sys.stdout.write, json.dumps(document, indent=2) + "\n")
            else:
                from traceloom.report.views import terminal

                show = partial(terminal.print_lines, partial(graph.render, document), sys.stdout)
        written: list[str] = []
        if writing is not None:
            progress.show(f"writing {args.output}")
            written = writing.result()
    show()
    following = (
        f"\nNext: traceloom link {shlex.join(args.inputs)} -o out.graph"
        if args.output is None
        else f"Next: traceloom {'show' if format_name == 'graph' else 'validate'} {shlex.quote(args.output)}"
    )
    outputs.print_messages(args, *written, following)
    checks.end_with_refusals(linked.refused)
    return 0


def _write(args: argparse.Namespace, format_name: str, linked: Linked) -> list[str]:
    """Writes the graph; returns the lines about the files."""
    from traceloom.system import units

    path, graph = Path(args.output), linked.graph
    if format_name == "graph":
        from traceloom.graph import graph as graph_store

        size = graph_store.save(graph, path, force=args.force)
        return [f"Wrote {path} ({units.format_size(size)})."]
    from traceloom.workload.chakra import graph_read

    if format_name == "et":
        size = graph_read.write_rank(graph, path, force=args.force)
        return [f"Wrote {path} ({units.format_size(size)})."]
    names = graph_read.write_ranks(graph, path, force=args.force)
    size = sum(name.stat().st_size for name in names)
    return [f"Wrote {path}/ ({len(names)} files, {units.format_size(size)})."]
