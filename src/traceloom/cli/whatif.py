"""`traceloom whatif`: what a change would save."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from traceloom.cli import closing
from traceloom.cli.options import add_reading
from traceloom.cli.progress import Progress
from traceloom.errors import UsageError
from traceloom.plain_text import encoded

if TYPE_CHECKING:
    from traceloom.model import Graph
    from traceloom.simulate import Change, Scenario, WhatIf

_EXAMPLES = """\
examples:
  traceloom whatif run --set 'kernels ~ gemm * 0.5'        faster matrix products
  traceloom whatif run --set 'syncs remove' --step 12      no waiting for the device, in one step
  traceloom whatif run --set 'rank 7 delay remove'         rank 7 as fast as the others
  traceloom whatif run --set 'network * 2' --set 'copies async'
  traceloom whatif run --set 'idle remove' -o after.html

changes: [rank N[,M]] TARGET [~ REGEX] ACTION
  TARGET  kernels copies gpu collectives host ops think launches syncs loading
  ACTION  * FACTOR   remove   async   overlap   fuse   graph   balance   workers N
  and     network * FACTOR    rank N delay remove    idle remove
"""
_ENDINGS = (".json", ".md", ".html", ".perfetto.json", ".perfetto.json.gz")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare the options of the verb."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "whatif",
        help="say what a change would save",
        description="Say what a change would save: the linked graph of the run is evaluated with it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="trace file, directory of traces, or recorded run")
    parser.add_argument(
        "--set", dest="changes", action="append", required=True, metavar="CHANGE", help="a change; several add up"
    )
    parser.add_argument("--step", type=_step, metavar="N", help="of one step (default: of the whole window)")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument(
        "-o", "--output", type=Path, action="append", default=[], metavar="FILE",
        help="write a file instead: .json, .md, .html with the timeline before and after, or the timeline after the "
        "change as .perfetto.json.gz (may be repeated)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite files")
    more = parser.add_argument_group("more")
    add_reading(more)
    return parser


def _step(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"`{text}` is not the number of a step")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Read, link, evaluate and show; returns the exit code."""
    from traceloom import files
    from traceloom.link import link_session
    from traceloom.read import load
    from traceloom.report import whatif as report
    from traceloom.retime import Plan, law
    from traceloom.simulate import parse, whatif

    changes = [parse(text) for text in args.changes]
    for path in args.output:
        if not path.name.lower().endswith(_ENDINGS):
            hint = f"use one of the endings {', '.join(_ENDINGS)}"
            raise UsageError(f"`{path}` does not tell which format to write", slug="unknown-format", hint=hint)
        files.check_free(path, force=args.force)
    with Progress(shown=not args.quiet) as progress:
        progress.say("reading")
        session = load(*args.inputs, cache=not args.no_cache)
        progress.say("linking")
        graph = link_session(session, step=args.step)
        progress.say("evaluating")
        plan = Plan(graph)
        kept = law(graph, plan)
        outcome = whatif(graph, changes, plan=plan, kept=kept, host_ratio=session.recording_ratio)
        document = report.build(session.name, args.step, changes, outcome, kept)
        written = []
        answer = _Asked(document, graph, changes, outcome)
        for path in args.output:
            progress.say(f"writing {path}")
            written.append((path, files.write(path, _writer(path, answer), force=args.force)))
    _show(args, document, written)
    return 0


@dataclass(frozen=True)
class _Asked:
    """What was asked, and the answer: what files are made of."""

    document: dict[str, Any]
    graph: Graph
    changes: list[Change]
    found: WhatIf

    def scenario(self) -> Scenario:
        from traceloom.simulate import scenario_of

        return scenario_of(self.graph, self.changes)

    def after(self) -> Graph:
        from traceloom.simulate import changed_graph

        return changed_graph(self.graph, self.scenario(), self.found.times)


def _writer(path: Path, answer: _Asked) -> Callable[[BinaryIO], None]:
    name = path.name.lower()
    if name.endswith((".perfetto.json.gz", ".perfetto.json")):
        return partial(_perfetto, answer, packed=name.endswith(".gz"))
    if name.endswith(".html"):
        return partial(_page, answer)
    return partial(_markdown if name.endswith(".md") else _json, answer.document)


def _json(document: dict[str, Any], handle: BinaryIO) -> None:
    from traceloom.report.views.jsonfile import encode

    handle.write(encode(document))


def _markdown(document: dict[str, Any], handle: BinaryIO) -> None:
    from traceloom.report import whatif_files

    handle.write(encoded(whatif_files.markdown(document)))


def _page(answer: _Asked, handle: BinaryIO) -> None:
    from traceloom.report import before_after

    view = before_after.build(answer.graph, answer.scenario(), answer.found)
    handle.write(encoded(before_after.render(answer.document, view)))


def _perfetto(answer: _Asked, handle: BinaryIO, *, packed: bool) -> None:
    from isal import igzip

    from traceloom.report.exports.perfetto.graph import write_graph

    if not packed:
        write_graph(answer.after(), handle)
        return
    with igzip.IGzipFile(fileobj=handle, mode="wb", compresslevel=2) as gz:
        write_graph(answer.after(), gz)


def _show(args: argparse.Namespace, document: dict[str, Any], written: list[tuple[Path, int]]) -> None:
    if args.json:
        from traceloom.report.views.jsonfile import encode

        sys.stdout.buffer.write(encode(document))
    elif not written:
        from traceloom.report.views import terminal
        from traceloom.report.whatif import render

        terminal.put(partial(render, document), sys.stdout)
    sets = " ".join(f"--set {shlex.quote(text)}" for text in args.changes)
    closing.tell(args, written, f"traceloom whatif {shlex.join(args.inputs)} {sets} -o whatif.html")
