"""`traceloom simulate --sweep`: the same question at every point of a grid."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from traceloom.cli import options as types
from traceloom.cli import outputs
from traceloom.cli.progress import Progress
from traceloom.errors import OutputError, UsageError
from traceloom.files import reported
from traceloom.leaving import undone_on_leaving

if TYPE_CHECKING:
    from traceloom.report.documents.sweep import SweepDocument
    from traceloom.simulate.sweep_points import SweepQuestion
    from traceloom.simulate.sweeps import SweepAxis, SweepPoint, SweepRow

_FORMAT = "traceloom-sweep-points"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of sweeps."""
    sweep = parser.add_argument_group("at many points")
    sweep.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=VALUES", help="at each of these values, as "
        "network.0.bandwidth=50,100 or ranks=8..1024*2; several: at all their combinations",
    )  # fmt: skip
    sweep.add_argument(
        "--memory-limit", type=types.size, metavar="BYTES", help="leave out points of which a rank needs more, as 80GB"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate all points and show what they say together; returns the exit code."""
    from traceloom.report import sweep as report
    from traceloom.simulate.sweep_points import SweepQuestion
    from traceloom.simulate.sweeps import SweepTable, parse_axis, points_of

    axes = [parse_axis(text) for text in args.sweep]
    points = list(points_of(axes))
    roles = dict(text.split("=", 1) for text in args.role if "=" in text)
    question = SweepQuestion(
        tuple(args.inputs), args.machine, tuple(args.overrides), args.device, args.host_factor, args.ranks,
        args.data_parallel, None if args.groups is None else str(args.groups), args.only, args.step, roles, args.draws,
        args.seed, args.memory_limit, not args.no_cache, args.recorded_device,
    )  # fmt: skip
    page = outputs.rendered("traceloom.report.sweep_page")
    forms: dict[str, Callable[[SweepDocument, BinaryIO], object]] = {
        ".json": outputs.as_json,
        ".csv": lambda _, handle: table.points.write_csv(handle),
        ".parquet": lambda _, handle: table.points.write_parquet(handle),
        ".html": page,
        ".htm": page,
    }
    chosen = outputs.targets(args, forms)
    kept = _KeptPoints(chosen[0][0], question) if chosen else None
    with Progress(shown=not args.quiet) as progress:
        rows = _answers(question, axes, points, kept, progress)
        table = SweepTable.of(axes, rows)
        document = report.build(table, " ".join(args.inputs))
        written = outputs.write(args, chosen, document, progress)
    if kept is not None:
        kept.path.unlink(missing_ok=True)
    outputs.show(args, document, report.render)
    outputs.close(args, written, outputs.repeated(args, "sweep.html"))
    return 0


def _answers(
    question: SweepQuestion,
    axes: list[SweepAxis],
    points: list[SweepPoint],
    kept: _KeptPoints | None,
    progress: Progress,
) -> list[SweepRow]:
    """The points with their answers, in their order; what was kept is not asked again."""
    from traceloom.simulate.sweep_points import evaluate_points

    answers = kept.read(points) if kept else {}
    missing = {number: point for number, point in enumerate(points) if number not in answers}
    done = len(answers)
    progress.say(f"{done:,} of {len(points):,} points" if done else "reading")
    with undone_on_leaving(kept.announce if kept else lambda: None):
        for number, row in evaluate_points(question, missing):
            answers[number] = row
            done += 1
            if kept is not None:
                kept.add(points[number], row)
            progress.say(f"{done:,} of {len(points):,} points")
    if not any(row["time_ns"] is not None for row in answers.values()):
        reasons = sorted({str(row["reason"]) for row in answers.values()})
        keys = ", ".join(axis.key for axis in axes)
        raise UsageError(f"no point of {keys} has an answer: {reasons[0]}", slug="sweep-without-answers")
    return [{**points[number], **answers[number], **points[number]} for number in range(len(points))]


class _KeptPoints:
    """Answers beside the output while a sweep goes on: whoever stops it can go on with the same command.

    Args:
        output: The file that will be written.
        question: What is asked at the points.

    Raises:
        OutputError: slug `file-exists`: there is a file of that name which is none of ours.
    """

    def __init__(self, output: Path, question: SweepQuestion) -> None:
        from traceloom import __version__

        self.path = output.with_name(f"{output.name}.points")
        stamps = []
        for path in map(Path, filter(None, (*question.inputs, question.machine))):
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            stamps.append([(of.name, of.stat().st_size, of.stat().st_mtime_ns) for of in files if of.is_file()])
        text = json.dumps([asdict(question), stamps, __version__], sort_keys=True)
        self._head = {"format": _FORMAT, "version": 1, "digest": hashlib.sha256(text.encode()).hexdigest()}
        self._begun = False
        self._count = 0
        if self.path.exists() and _first(self.path).get("format") != _FORMAT:
            raise OutputError(
                "this file is in the way: answers are kept there while the sweep goes on",
                slug="file-exists",
                where=str(self.path),
                hint="move it, or choose another name for the output",
            )

    def read(self, points: list[SweepPoint]) -> dict[int, SweepRow]:
        """Answers by the number of their point; of the same question alone."""
        if not self.path.exists() or _first(self.path) != self._head:
            return {}
        numbers = {json.dumps(point, sort_keys=True): number for number, point in enumerate(points)}
        answers = {}
        whole = self.path.read_text(encoding="utf-8").rpartition("\n")[0]  # the last line may have been cut off
        for line in whole.splitlines()[1:]:
            point, row = json.loads(line)
            number = numbers.get(json.dumps(point, sort_keys=True))
            if number is not None:
                answers[number] = row
        self._begun, self._count = True, len(answers)
        self.path.write_text(whole + "\n", encoding="utf-8")
        return answers

    def add(self, point: SweepPoint, row: SweepRow) -> None:
        """Keep one more."""
        lines = [] if self._begun else [json.dumps(self._head)]
        with reported(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a" if self._begun else "w", encoding="utf-8") as handle:
                handle.write("".join(f"{line}\n" for line in [*lines, json.dumps([point, row])]))
        self._begun = True
        self._count += 1

    def announce(self) -> None:
        """Say that a sweep which is stopped can go on."""
        text = f"\ntraceloom: the same command goes on after these {self._count:,} answers ({self.path})\n"
        os.write(2, text.encode())


def _first(path: Path) -> dict[str, Any]:
    """The first line of the file; nothing where it is none of ours."""
    try:
        with path.open(encoding="utf-8") as handle:
            head = json.loads(handle.readline(4096))
    except (OSError, ValueError):
        return {}
    return head if isinstance(head, dict) else {}
