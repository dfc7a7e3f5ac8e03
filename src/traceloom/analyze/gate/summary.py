"""What a verdict needs of a run: a few numbers per step, not the traces."""

from __future__ import annotations

import gzip
import zlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from traceloom.errors import InputError, other_version
from traceloom.plain_text import json_line

FORMAT = "traceloom-baseline"
VERSION = 1
_MOST_BYTES = 1 << 28  # a summary of a large job has a few MB; what unfolds to more is none
# Thirty years in ns, an exabyte; with more, sums and squares of them are no numbers.
_Amount = Annotated[float, Meta(ge=-1e18, le=1e18)]
_Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Second = Annotated[int, Meta(ge=0, le=253_402_300_799)]  # of Unix time, up to the year 9999


class Stated(msgspec.Struct, frozen=True):
    """A condition of a run: what it says of itself, and whether times can be compared where it differs."""

    condition: str
    value: str
    weight: str


class OperatorCalls(msgspec.Struct, frozen=True):
    """The operators of a run: name, input shapes (null where not recorded), calls per step. Columns of one length."""

    operator: list[str]
    shapes: list[str | None]
    count: list[_Amount]


class RunSummary(msgspec.Struct, frozen=True):
    """One run. Times are nanoseconds; a value of a step is the mean over ranks (of what devices do, their sum).

    Attributes:
        name: Where it came from.
        stated: What it says of its conditions.
        program: Its operators.
        wall_ns: Wall time of every undisturbed, unrecorded step after the warm-up, in order; null where none was kept.
        steps: Numbers of the recorded steps; the columns of what follows.
        scalars: By metric one value per recorded step; a metric that was not measured is absent.
        tables: By metric and name one value per recorded step.
        began_unix_ns: When the recording of its steps began; null where its traces do not tell the time of day.
    """

    name: str
    stated: list[Stated]
    program: OperatorCalls
    wall_ns: list[_Amount] | None
    steps: list[_Whole]
    scalars: dict[str, list[_Amount]]
    tables: dict[str, dict[str, list[_Amount]]]
    began_unix_ns: _Whole | None


class Baseline(msgspec.Struct, frozen=True):
    """A stored baseline: the summaries of its runs."""

    format: str
    version: int
    traceloom: str
    name: str
    saved_unix_s: _Second
    runs: list[RunSummary]

    def check(self) -> None:
        """Check that there are runs, that each has steps and their times, and that all its columns have one length.

        Raises:
            ValueError: they have not.
        """
        if not self.runs:
            raise ValueError("no runs")
        for run in self.runs:
            columns = [*run.scalars.values(), *(values for table in run.tables.values() for values in table.values())]
            program = run.program
            even = len(program.operator) == len(program.shapes) == len(program.count)
            if not run.steps or not even or any(len(values) != len(run.steps) for values in columns):
                raise ValueError("columns of several lengths")
            if "step_time" not in run.scalars:
                raise ValueError("no times of steps")


def encode(baseline: Baseline) -> bytes:
    """The baseline as compressed JSON; the same bytes for the same content."""
    return gzip.compress(json_line(baseline), mtime=0)


def decode(data: bytes, where: str) -> Baseline:
    """Read a baseline.

    Raises:
        InputError: `damaged-baseline`: it is not one, or is cut short; `other-version`.
    """
    try:
        unfolder = zlib.decompressobj(wbits=31)
        text = unfolder.decompress(data, _MOST_BYTES)
        head: dict[str, Any] = msgspec.json.decode(text, type=dict)
        if unfolder.eof and head.get("format") == FORMAT:
            if head.get("version") != VERSION:
                raise other_version("baseline", head.get("version"), VERSION, where)
            baseline = msgspec.convert(head, Baseline)
            baseline.check()
            return baseline
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        pass  # one sentence for all of them, below
    raise InputError(
        "this is no baseline, or it is damaged", slug="damaged-baseline", where=where, hint="save it again"
    )
