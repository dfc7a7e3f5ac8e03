"""`traceloom whatif`: estimates what a change would save."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from traceloom.cli import options as types, outputs
from traceloom.cli.outputs import Progress
from traceloom.system.process import pin_to_one_core
from traceloom.system.text import encode_utf8

if TYPE_CHECKING:
    from traceloom.report.documents.predictions import WhatIfDocument

DESCRIPTION = "Say what a change would save: the linked graph of the run is evaluated with it."
EXAMPLES = """\
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


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_inputs(parser, "trace file, directory of traces, or recorded run")
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        required=True,
        metavar="CHANGE",
        help="a change; several add up",
    )
    parser.add_argument(
        "--step",
        type=types.parse_whole_number,
        metavar="N",
        help="of one step (default: of the whole window)",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    outputs.add_output_options(
        parser,
        ".json, .md, .html with the timeline before and after, or the timeline after the change as .perfetto.json.gz",
    )
    types.add_reading(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Reads, links, evaluates and shows; returns the exit code."""
    from traceloom.changes.changes import parse
    from traceloom.changes.whatif import changed_graph, scenario_of, whatif
    from traceloom.formats import load
    from traceloom.graph import Plan, law, link_session
    from traceloom.report import whatif as report

    def write_html(document: WhatIfDocument, handle: BinaryIO) -> None:
        from traceloom.report import before_after, whatif

        view = before_after.build(graph, scenario_of(graph, changes), answer)
        handle.write(encode_utf8(whatif.render_before_after_page(document, view)))

    def write_perfetto(_document: WhatIfDocument, handle: BinaryIO) -> None:
        from traceloom.report.exports.perfetto import write_graph

        write_graph(changed_graph(graph, scenario_of(graph, changes), answer.times), handle)

    def write_perfetto_gz(document: WhatIfDocument, handle: BinaryIO) -> None:
        from traceloom.system.gzip_stream import compress_output

        compress_output(partial(write_perfetto, document))(handle)

    changes = [parse(text) for text in args.changes]
    formats = {
        ".json": outputs.write_json,
        ".md": outputs.make_lazy_writer("traceloom.report.whatif:render_markdown"),
        ".html": write_html,
        ".htm": write_html,
        ".perfetto.json": write_perfetto,
        ".perfetto.json.gz": write_perfetto_gz,
    }
    targets = outputs.resolve_output_files(args, formats)
    with Progress(enabled=not args.quiet) as progress:
        progress.show("reading")
        session = load(*args.inputs, cache=not args.no_cache)
        progress.show("linking")
        with pin_to_one_core(session.event_count):
            graph = link_session(session, step=args.step)
            progress.show("evaluating")
            plan = Plan(graph)
            replay_law = law(graph, plan)
            answer = whatif(
                graph,
                changes,
                plan=plan,
                kept=replay_law,
                host_ratio=session.recording_overhead_ratio,
            )
        document = report.build(session.name, args.step, changes, answer, replay_law)
        written = outputs.write_output_files(args, targets, document, progress)
    outputs.print_document(args, document, report.render)
    outputs.print_outcome(args, written, outputs.format_repeat_command(args, "whatif.html"))
    return 0
