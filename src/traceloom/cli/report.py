"""`traceloom report`: shows where the time of a trace or a recorded run went."""

from __future__ import annotations

import argparse
import glob
import importlib
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceloom.cli import options as types, outputs
from traceloom.cli.outputs import Progress
from traceloom.errors import InputError, PartialError, UsageError
from traceloom.system.files import restore_addresses
from traceloom.system.process import pin_to_one_core

if TYPE_CHECKING:
    from traceloom.analyze.kernel_rules import KindRule
    from traceloom.formats import Loaded, ReadProgress as Reading
    from traceloom.report import ReportOptions
    from traceloom.report.documents import ReportDocument
    from traceloom.report.views.files import Report
    from traceloom.trace.cache import DocumentCache
    from traceloom.trace.notice import Notice
    from traceloom.trace.session import Session

_MAX_RANK_FILES = 1_000  # tables and figures with a row per rank are useless long before this
SORT_KEYS = ("self", "total", "device", "mean", "max", "count", "name")
_PATTERN = re.compile(
    r"[\w@%+=:,./*-]+"
)  # characters that a shell does not interpret, and wildcards
_DOCUMENT, _SHORT = (
    "document.json",
    "short.json",
)  # cached parts of a report: the whole document, and the content of the short one
DESCRIPTION = (
    "Show where the time of a trace or a recorded run went: on the terminal, or in a file."
)
EXAMPLES = """\
examples:
  traceloom report run                           the answer about a recorded run
  traceloom report run --full                    its tables, too
  traceloom report trace.json.gz                 a trace of the PyTorch profiler
  traceloom report traces/ --rank 3 --top 20     one rank, longer tables
  traceloom report run --only per_step           one section, in full
  traceloom report run --steps 20..25 -o out.html -o out.json
  traceloom report run -o kernels.csv -o tables/ --format parquet
  traceloom report run -o run.perfetto.json.gz   for ui.perfetto.dev
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_inputs(
        parser, "trace file, directory of traces, or recorded run; - for standard input"
    )
    content_group = parser.add_argument_group("what to report")
    content_group.add_argument(
        "--rank", type=types.parse_ranks, metavar="N[,N]", help="only these ranks"
    )
    content_group.add_argument(
        "--steps", type=types.parse_steps, metavar="A..B", help="only the work of steps A to B-1"
    )
    content_group.add_argument(
        "--by-shape",
        action="store_true",
        help="count operators apart by the shapes of their inputs",
    )
    content_group.add_argument(
        "--only",
        type=types.parse_sections,
        metavar="NAME[,NAME]",
        help="only these sections; `core` is the short report",
    )
    against = content_group.add_mutually_exclusive_group()
    against.add_argument(
        "--device", metavar="NAME", help="compare with the peaks of this device, as `H100 SXM`"
    )
    against.add_argument(
        "--peak",
        metavar="TYPE=N[,...]",
        help="compare with these FLOP/s and bytes/s, as bf16=989e12,memory=3.35e12",
    )
    content_group.add_argument(
        "--link-peak",
        type=types.parse_positive,
        metavar="GB/S",
        help="peak of one device's link in one direction, for all groups",
    )
    content_group.add_argument(
        "--graph-capture",
        type=Path,
        metavar="FILE",
        help="recording of the capture of the graphs, or of the same model without graphs: tells the operators "
        "of graph replays, and their FLOPs",
    )
    content_group.add_argument(
        "--rules",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="your own rules: .py is run and registers models of operators, .json tells kinds of kernels "
        "(may be repeated)",
    )
    content_group.add_argument(
        "--tokens-per-step",
        type=types.parse_count,
        metavar="N",
        help="tokens per step, for tokens per second",
    )
    content_group.add_argument(
        "--samples-per-step", type=types.parse_count, metavar="N", help="the same for samples"
    )
    display_group = parser.add_argument_group("how to show it")
    display_group.add_argument(
        "--full",
        action="store_true",
        help="the tables of the core and a line for each other section",
    )
    display_group.add_argument(
        "--top", type=types.parse_count, metavar="N", help="rows of a table (default: 10)"
    )
    display_group.add_argument(
        "--sort", choices=SORT_KEYS, metavar="KEY", help=f"sort tables by {', '.join(SORT_KEYS)}"
    )
    display_group.add_argument("--json", action="store_true", help="print the report as JSON")
    outputs.add_output_options(
        display_group,
        ".html, .json, .md, .perfetto.json.gz, .perfetto.json, .speedscope.json; .csv or .parquet for the table of "
        "that name; DIR/ for all tables",
    )
    display_group.add_argument(
        "--format",
        choices=("csv", "parquet"),
        default="csv",
        help="of the tables in DIR/ (default: csv)",
    )
    types.add_reading(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Reads, analyzes and shows; returns the exit code."""
    from traceloom.formats.inputs import list_files
    from traceloom.report.sections import CORE, FINDINGS
    from traceloom.trace.cache import DocumentCache

    options = _read_options(args)
    # The short report on a terminal uses only the core and the findings; everything else would be
    # computed in vain.
    brief = not (options.full or args.only or args.json or args.output)
    document_options = replace(options, only=(CORE, FINDINGS)) if brief else options
    document_cache = None
    if not (args.no_cache or args.rules):  # rules are code
        choices = repr(
            replace(document_options, top=0, sort=None, full=False)
        )  # without the options that do not affect the document
        document_cache = DocumentCache(
            args.inputs, [args.graph_capture] if args.graph_capture else [], choices, list_files
        )
    if brief and document_cache and (short := document_cache.get(_SHORT)):
        from traceloom.report.views import terminal

        terminal.print_lines(partial(terminal.render_short, short), sys.stdout)
        _close(args, short)
        return 0
    # A remembered report needs none of what reads traces.
    from traceloom.formats import Cache
    from traceloom.formats.ahead import decode_ahead

    document = document_cache.get(_DOCUMENT) if document_cache and not brief else None
    # Several inputs are read by one process each.
    sole_input = args.inputs if len(args.inputs) == 1 and not document else []
    with decode_ahead(sole_input, None if args.no_cache else Cache()):
        return _run(args, options, document_options, document_cache, document)


def _run(
    args: argparse.Namespace,
    options: ReportOptions,
    document_options: ReportOptions,
    document_cache: DocumentCache | None,
    document: ReportDocument | None,
) -> int:
    """Writes and shows; `document_options` are the options of the document, which `document` holds
    if it was cached.
    """
    from traceloom import report as reports
    from traceloom.report.sections import select_sections
    from traceloom.report.views.files import (
        FORMATS,
        Directory,
        Format,
        Report,
        build_table_directory,
        encode,
    )
    from traceloom.system import files, units

    tables = build_table_directory(f".{args.format}")
    formats: dict[str, Format | Directory] = {
        ending: target_format for target_format in FORMATS for ending in target_format.endings
    }
    targets = outputs.resolve_output_files(args, formats, (tables, tables.ours))
    refused: Sequence[Notice] = ()
    with Progress(enabled=not args.quiet) as progress, ExitStack() as until_written:
        if document:
            report = Report(
                document,
                lambda: reports.selected(_load(args, progress).runs[0], document_options),
                document_options,
            )
        else:
            # Load the report's modules early: a trace may be decoded in other processes meanwhile.
            importlib.import_module("traceloom.report.run")
            select_sections(document_options.only)
            try:
                loaded = _load(args, progress)
            except InputError as error:
                from traceloom.report.memory_sources import OUT_OF_MEMORY_SUFFIX

                # Memory may have run out before anything else was written.
                reports_of_memory = (
                    Path(text).glob(f"*{OUT_OF_MEMORY_SUFFIX}") for text in args.inputs
                )
                if error.slug != "no-traces" or not any(map(any, reports_of_memory)):
                    raise
                return _report_out_of_memory(args)
            progress.show("analysing")
            until_written.enter_context(
                pin_to_one_core(sum(session.event_count for session in loaded.runs))
            )
            report = _report(
                loaded.runs,
                args,
                document_options,
                [str(path) for path, target_format in targets if not target_format.of_runs],
            )
            refused = loaded.refused
        written = []
        for path, target_format in targets:
            if isinstance(target_format, Format):
                written += outputs.write_output_files(
                    args, [(path, target_format.writer(path))], report, progress
                )
            else:
                progress.show(f"writing {path}")
                written_files = files.write_directory(
                    path, partial(target_format.fill, report), target_format.ours, force=args.force
                )
                written.append((path, sum(file.stat().st_size for file in written_files)))
    if args.json:
        sys.stdout.buffer.write(encode(report.document))
    elif outputs.should_print_document(args):
        from traceloom.report.views import terminal

        terminal.show(report.document, options, sys.stdout)
    for (path, size), (_, target_format) in zip(written, targets, strict=True):
        outputs.print_messages(
            args, f"Wrote {path} ({units.format_size(size)}); {target_format.next_step}."
        )
    if not written and not report.document["runs"]:
        _close(args, report.document)
    # The report covers the rest; the exit code and a final message state that it is incomplete.
    if refused:
        others_note = f" (and {len(refused) - 1} more, see the notices)" if len(refused) > 1 else ""
        raise PartialError(f"{refused[0].message}{others_note}", slug="refused-input")
    failed = any(notice["slug"] == "section-failed" for notice in report.document["notices"])
    if document_cache and not (document or failed or report.document["runs"]):
        if document_options is options:
            document_cache.put(_DOCUMENT, encode(report.document))
        else:
            from traceloom.report.views import terminal

            document_cache.put(_SHORT, encode(terminal.build_short_report(report.document)))
    return 0


def _close(args: argparse.Namespace, document: Mapping[str, Any]) -> None:
    """Prints the next useful command, with a pattern instead of the inputs where the shell expands
    it to exactly these.
    """
    arguments = shlex.join(args.inputs)
    if len(args.inputs) > 1 and _is_pattern(
        document["name"], [row["path"] for row in document["inputs"]]
    ):
        arguments = document["name"]
    outputs.print_outcome(args, [], f"traceloom report {arguments} -o report.html")


def _report_out_of_memory(args: argparse.Namespace) -> int:
    """Shows what used the memory, where no times were recorded; returns the exit code."""
    from traceloom.cli import memory

    if not args.quiet:
        message = "memory ran out before a window was recorded; this is whose memory it was (traceloom memory)"
        print(f"traceloom: {message}", file=sys.stderr)
    arguments = [*args.inputs, *(word for name in args.output for word in ("-o", name))]
    arguments += [
        f"--{name}"
        for name in ("json", "force", "quiet", "no-cache")
        if getattr(args, name.replace("-", "_"))
    ]
    parser = argparse.ArgumentParser()
    memory.add_options(parser)
    return memory.run(parser.parse_args(arguments))


def _read_options(args: argparse.Namespace) -> ReportOptions:
    from traceloom.report import ReportOptions

    # Peaks and rules of the user are checked before anything is read.
    peak: str | None = args.device if args.peak is None else args.peak
    if args.peak is not None and "=" not in args.peak:
        raise UsageError(
            f"`{args.peak}` is no pair of a name and a number",
            slug="bad-peak",
            hint="give --peak bf16=989e12,memory=3.35e12, or --device with the name of a device",
        )
    if peak is not None:
        from traceloom.analyze.placed_calls import parse_peak

        parse_peak(peak)
    rules: tuple[KindRule, ...] = ()
    if args.rules:
        from traceloom.analyze import load_rules

        rules = load_rules(args.rules)
    capture = args.graph_capture
    if capture is not None and not capture.exists():
        raise InputError(
            "there is no such file or directory", slug="unreadable", where=str(capture)
        )
    return ReportOptions(
        ranks=args.rank,
        steps=args.steps,
        by_shape=args.by_shape,
        top=args.top or 10,
        sort=args.sort,
        only=args.only,
        full=args.full
        or args.by_shape
        or bool(args.top or args.sort),  # these options are about tables
        peak=peak,
        link_peak=args.link_peak,
        graph_capture=None if capture is None else str(capture),
        cache=not args.no_cache,
        tokens_per_step=args.tokens_per_step,
        samples_per_step=args.samples_per_step,
        kind_rules=rules,
    )


def _load(args: argparse.Namespace, progress: Progress) -> Loaded:
    from traceloom.formats import load_inputs

    if "-" in args.inputs and sys.stdin.isatty():
        raise UsageError(
            "standard input is a terminal",
            slug="wrong-usage",
            hint="pipe a trace into it, or name a file",
        )

    def tell(reading: Reading) -> None:
        part = (
            f" {reading.done_bytes * 100 // reading.total_bytes} %" if reading.total_bytes else ""
        )
        progress.show(
            f"reading{part}"
            + (f", file {reading.files_done + 1} of {reading.files}" if reading.files > 1 else "")
        )

    progress.show("reading")
    return load_inputs(
        *args.inputs, cache=not args.no_cache, progress=tell, ranks=args.rank, most=_MAX_RANK_FILES
    )


def _report(
    sessions: Sequence[Session],
    args: argparse.Namespace,
    options: ReportOptions,
    single_run_files: list[str],
) -> Report:
    """Builds the report; `single_run_files` are the files whose formats hold one run."""
    from traceloom import report
    from traceloom.report.views.files import Report

    if len(sessions) == 1:
        document = report.build(
            sessions[0], options, separate_process=not args.rules
        )  # it may have registered models
        return Report(document, lambda: report.selected(sessions[0], options), options)
    # The shell command that reports each run alone: by its directory or pattern, where these match
    # nothing else.
    directories = [
        {Path(trace.meta.path).parent for trace in session.traces} for session in sessions
    ]
    runs_by_directory = Counter(
        home for session_directories in directories for home in session_directories
    )
    commands = []
    for session, session_directories in zip(sessions, directories, strict=True):
        paths = [trace.meta.path for trace in session.traces]
        inputs = shlex.join(paths)
        if (
            len(paths) > 1
            and len(session_directories) == 1
            and runs_by_directory[min(session_directories)] == 1
        ):
            inputs = shlex.quote(str(min(session_directories)))
        elif len(paths) > 1:
            inputs = session.name if _is_pattern(session.name, paths) else inputs
        commands.append(restore_addresses(f"traceloom report {inputs}"))
    single_run_files = single_run_files + [
        option for option, value in (("--rank", args.rank), ("--steps", args.steps)) if value
    ]
    if single_run_files:
        raise UsageError(
            f"the inputs hold {len(sessions)} runs, but {single_run_files[0]} is about one",
            slug="several-runs",
            hint=f"choose one, as with: {commands[0]}",
        )
    document = report.build_runs(sessions, restore_addresses(", ".join(args.inputs)), commands)
    return Report(document, lambda: sessions[0], options)


def _is_pattern(name: str, paths: list[str]) -> bool:
    """Whether the shell expands a session's name to exactly these files."""
    return bool(_PATTERN.fullmatch(name)) and sorted(glob.glob(name)) == sorted(paths)  # noqa: PTH207
