"""`traceloom report`: where the time of a trace or a recorded run went."""

from __future__ import annotations

import argparse
import glob
import importlib
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceloom.cli.options import add_reading, ranks
from traceloom.cli.progress import Progress
from traceloom.errors import InputError, PartialError, UsageError

if TYPE_CHECKING:
    from traceloom.model import Session
    from traceloom.read import Loaded
    from traceloom.read import Progress as Reading
    from traceloom.report import ReportOptions
    from traceloom.report.formats import Report

_MOST_FILES = 1_000  # tables and pictures with a row per rank say little long before
SORT_KEYS = ("self", "total", "device", "mean", "max", "count", "name")
_PATTERN = re.compile(r"[\w@%+=:,./*-]+")  # what a shell takes as it is, and stars
_EXAMPLES = """\
examples:
  traceloom report run                           a recorded run
  traceloom report trace.json.gz                 a trace of the PyTorch profiler
  traceloom report traces/ --rank 3 --top 20     one rank, longer tables
  traceloom report run --only per_step           one section, in full
  traceloom report run --steps 20..25 -o out.html -o out.json
  traceloom report run -o run.perfetto.json.gz   for ui.perfetto.dev
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare the options of the verb."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="show where the time went",
        description="Show where the time of a trace or a recorded run went: on the terminal, or in a file.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="trace file, directory of traces, or recorded run; - for standard input",
    )
    what = parser.add_argument_group("what to report")
    what.add_argument("--rank", type=ranks, metavar="N[,N]", help="only these ranks")
    what.add_argument("--steps", type=_steps, metavar="A..B", help="only the work of steps A to B-1")
    what.add_argument("--by-shape", action="store_true", help="count operators apart by the shapes of their inputs")
    what.add_argument(
        "--only", type=_sections, metavar="NAME[,NAME]", help="only these sections; `core` is the short report"
    )
    against = what.add_mutually_exclusive_group()
    against.add_argument("--device", metavar="NAME", help="compare with the peaks of this device, as `H100 SXM`")
    against.add_argument(
        "--peak", metavar="TYPE=N[,...]", help="compare with these FLOP/s and bytes/s, as bf16=989e12,memory=3.35e12"
    )
    what.add_argument(
        "--link-peak", type=_rate, metavar="GB/S", help="peak of one device's link in one direction, for all groups"
    )
    what.add_argument(
        "--graph-capture", type=Path, metavar="FILE",
        help="recording of the capture of the graphs, or of the same model without graphs: tells the operators "
        "of graph replays, and their FLOPs",
    )  # fmt: skip
    what.add_argument(
        "--rules", type=Path, action="append", default=[], metavar="FILE",
        help="your own rules: .py is run and registers models of operators, .json tells kinds of kernels "
        "(may be repeated)",
    )  # fmt: skip
    what.add_argument("--tokens-per-step", type=_count, metavar="N", help="tokens of a step, to tell tokens per second")
    what.add_argument("--samples-per-step", type=_count, metavar="N", help="the same for samples")
    how = parser.add_argument_group("how to show it")
    how.add_argument("--top", type=_positive, default=10, metavar="N", help="rows of a table (default: 10)")
    how.add_argument("--sort", choices=SORT_KEYS, metavar="KEY", help=f"sort tables by {', '.join(SORT_KEYS)}")
    how.add_argument("--json", action="store_true", help="print the report as JSON")
    how.add_argument(
        "-o", "--output", type=Path, action="append", default=[], metavar="FILE",
        help="write a file instead: .html, .json, .md, .perfetto.json.gz, .perfetto.json, .speedscope.json, "
        ".pprof.pb.gz (may be repeated)",
    )  # fmt: skip
    how.add_argument("--force", action="store_true", help="overwrite files")
    more = parser.add_argument_group("more")
    add_reading(more)
    return parser


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of 10^9 bytes per second above 0, got `{text}`")
    return value


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of rows")
    return int(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number above 0")
    return int(text)


def _sections(text: str) -> tuple[str, ...]:
    return tuple(part.strip().replace("-", "_") for part in text.split(","))


def _steps(text: str) -> tuple[int, int]:
    """`20..25` are the steps 20 to 24, as for `traceloom record`; `20` is one step."""
    first, dots, end = text.partition("..")
    try:
        steps = int(first), int(end) - 1 if dots else int(first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a range of steps, as 20..25") from None
    if steps[0] > steps[1]:
        raise argparse.ArgumentTypeError(f"`{text}` has no steps")
    return steps


def run(args: argparse.Namespace) -> int:
    """Read, analyse and show; returns the exit code."""
    from traceloom.read import Cache
    from traceloom.read.ahead import decoding

    alone = args.inputs if len(args.inputs) == 1 else []  # several are read by a process each
    with decoding(alone, None if args.no_cache else Cache()):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from traceloom import files
    from traceloom.report import formats

    targets = [(path, formats.format_of(path)) for path in args.output]
    for path, _ in targets:
        files.check_free(path, force=args.force)
    options = _options(args)
    _load_code(options)
    with Progress(shown=not args.quiet) as progress:
        progress.say("reading")
        try:
            loaded = _load(args, progress)
        except InputError as error:
            if error.slug != "no-traces" or not _holds_memory_alone(args.inputs):
                raise
            return _memory_alone(args)
        progress.say("analysing")
        report = _report(loaded.runs, args, options)
        written = []
        for path, kind in targets:
            progress.say(f"writing {path}")
            size = files.write(path, partial(kind.write, report), force=args.force)
            written.append((path, size, kind.next_step))
    _show(args, report)
    if not args.quiet:
        for line in _closing(args, report, written):
            print(line, file=sys.stderr if args.json else sys.stdout)
    if loaded.refused:  # the report is made of the rest; the exit code and a last word say that it is not all
        more = f" (and {len(loaded.refused) - 1} more, see the notices)" if len(loaded.refused) > 1 else ""
        raise PartialError(f"{loaded.refused[0].message}{more}", slug="refused-input")
    return 0


def _holds_memory_alone(inputs: Sequence[str]) -> bool:
    """Whether memory ran out before anything else was written."""
    from traceloom.report.memory.sources import REPORT_ENDING

    return any(any(Path(text).glob(f"*{REPORT_ENDING}")) for text in inputs)


def _memory_alone(args: argparse.Namespace) -> int:
    """Show whose memory it was, where no times were recorded."""
    from traceloom.cli import memory

    if not args.quiet:
        message = "memory ran out before a window was recorded; this is whose memory it was (traceloom memory)"
        print(f"traceloom: {message}", file=sys.stderr)
    words = [*args.inputs, *(word for path in args.output for word in ("-o", str(path)))]
    words += [f"--{name}" for name in ("json", "force", "quiet", "no-cache") if getattr(args, name.replace("-", "_"))]
    parser = memory.add_parser(argparse.ArgumentParser().add_subparsers())
    return memory.run(parser.parse_args(words))


def _load_code(options: ReportOptions) -> None:
    """Load what the report is made by before its turn: a trace may be decoded elsewhere meanwhile."""
    from traceloom.report.sections import chosen

    importlib.import_module("traceloom.report.document")
    chosen(options.only)


def _options(args: argparse.Namespace) -> ReportOptions:
    from traceloom.analyze import load_rules
    from traceloom.report import ReportOptions

    capture = args.graph_capture
    if capture is not None and not capture.exists():
        raise InputError("there is no such file or directory", slug="unreadable", where=str(capture))
    return ReportOptions(
        ranks=args.rank,
        steps=args.steps,
        by_shape=args.by_shape,
        top=args.top,
        sort=args.sort,
        only=args.only,
        peak=_peak(args),
        link_peak=args.link_peak,
        graph_capture=None if capture is None else str(capture),
        cache=not args.no_cache,
        tokens_per_step=args.tokens_per_step,
        samples_per_step=args.samples_per_step,
        kind_rules=load_rules(args.rules) if args.rules else (),
    )


def _peak(args: argparse.Namespace) -> str | None:
    """The peaks that the user gives, checked before anything is read."""
    from traceloom.analyze.peaks import peak_of

    peak: str | None = args.device if args.peak is None else args.peak
    if args.peak is not None and "=" not in args.peak:
        hint = "give --peak bf16=989e12,memory=3.35e12, or --device with the name of a device"
        raise UsageError(f"`{args.peak}` is no pair of a name and a number", slug="bad-peak", hint=hint)
    if peak is not None:
        peak_of(peak)
    return peak


def _load(args: argparse.Namespace, progress: Progress) -> Loaded:
    from traceloom.read import load_inputs

    if "-" in args.inputs and sys.stdin.isatty():
        raise UsageError(
            "standard input is a terminal", slug="wrong-usage", hint="pipe a trace into it, or name a file"
        )

    def tell(reading: Reading) -> None:
        part = f" {reading.done_bytes * 100 // reading.total_bytes} %" if reading.total_bytes else ""
        progress.say(
            f"reading{part}" + (f", file {reading.files_done + 1} of {reading.files}" if reading.files > 1 else "")
        )

    return load_inputs(*args.inputs, cache=not args.no_cache, progress=tell, ranks=args.rank, most=_MOST_FILES)


def _report(sessions: Sequence[Session], args: argparse.Namespace, options: ReportOptions) -> Report:
    from traceloom import report
    from traceloom.report.formats import Report, format_of

    if len(sessions) == 1:
        return Report(report.build(sessions[0], options), report.selected(sessions[0], options), options)
    homes = Counter(home for session in sessions for home in _homes(session))
    commands = [_command(session, homes) for session in sessions]
    of_one = [str(path) for path in args.output if not format_of(path).of_runs]
    of_one += [option for option, value in (("--rank", args.rank), ("--steps", args.steps)) if value]
    if of_one:
        raise UsageError(
            f"the inputs hold {len(sessions)} runs, but {of_one[0]} is about one",
            slug="several-runs",
            hint=f"choose one, as with: {commands[0]}",
        )
    return Report(report.build_runs(sessions, ", ".join(args.inputs), commands), sessions[0], options)


def _homes(session: Session) -> set[Path]:
    return {Path(trace.meta.path).parent for trace in session.traces}


def _command(session: Session, runs_by_home: Counter[Path]) -> str:
    """The shell command that reports this run alone: by its directory or its pattern, where these name nothing else."""
    paths = [trace.meta.path for trace in session.traces]
    homes = _homes(session)
    inputs = shlex.join(paths)
    if len(paths) > 1 and len(homes) == 1 and all(runs_by_home[home] == 1 for home in homes):
        inputs = shlex.quote(str(homes.pop()))
    elif len(paths) > 1 and sorted(glob.glob(session.name)) == sorted(paths) and _PATTERN.fullmatch(session.name):  # noqa: PTH207
        inputs = session.name
    return f"traceloom report {inputs}"


def _show(args: argparse.Namespace, report: Report) -> None:
    if args.json:
        from traceloom.report.views.jsonfile import encode

        sys.stdout.buffer.write(encode(report.document))
    elif not args.output:
        from traceloom.report.views import terminal

        terminal.show(report.document, report.options, sys.stdout)


def _closing(args: argparse.Namespace, report: Report, written: list[tuple[Path, int, str]]) -> Iterator[str]:
    """What was written, and what to try next."""
    from traceloom.model import units

    for path, size, next_step in written:
        yield f"Wrote {path} ({units.size(size)}); {next_step}."
    if not written and not args.json and not report.document["runs"]:
        inputs = shlex.join(args.inputs)
        yield f"\nNext: traceloom report {inputs} -o report.html"
