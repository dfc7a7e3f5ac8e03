"""Reads stacks, allocations and telemetry beside the traces of a capture; damaged entries are
omitted and counted.

They are found by name: beside `rank0.kineto.json.gz` are `rank0.stacks.json.gz`,
`rank0.allocations.json.gz` and `HOST.telemetry.json.gz`.
"""

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import polars as pl
from msgspec import Meta, Struct

from traceloom.errors import InputError, other_version
from traceloom.formats.kineto_metadata import get_clock_offset_ns
from traceloom.system.files import open_regular
from traceloom.system.gzip_stream import GzipStream
from traceloom.trace.notice import Notice
from traceloom.trace.session import (
    ALLOCATIONS_SCHEMA,
    SAMPLES_SCHEMA,
    TELEMETRY_SCHEMA,
    make_empty_allocations,
    make_empty_samples,
    make_empty_telemetry,
)
from traceloom.trace.trace import Trace

VERSION = 1  # of each of these formats
_MAX_BYTES = 256 << 20  # of text
_MAX_FRAMES = 8_000_000  # of all samples of a file
_STACKS, _ALLOCATIONS, _TELEMETRY = (
    f".{kind}.json.gz" for kind in ("stacks", "allocations", "telemetry")
)
BoundedInt = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Index = Annotated[int, Meta(ge=0, lt=2**31)]


class _Thread(Struct):
    id: BoundedInt
    name: str = ""


class _StacksFile(Struct):
    format: str
    version: int
    pid: BoundedInt
    threads: list[_Thread]
    frames: list[tuple[str, str, BoundedInt]]
    samples: list[tuple[BoundedInt, Index, BoundedInt, list[Index]]]


class _Series(Struct):
    metric: str
    times_ns: list[BoundedInt]
    values: list[float | None]
    unit: str = ""
    kind: str = ""
    labels: dict[str, str] = {}


class _TelemetryFile(Struct):
    format: str
    version: int
    host: str
    series: list[_Series]


class _AllocationsHead(Struct):
    """The part of an allocations file that is read here; its stacks are for `traceloom memory`."""

    format: str
    version: int
    pid: BoundedInt
    events: list[
        tuple[
            BoundedInt,
            BoundedInt,
            int,
            BoundedInt,
            str,
            BoundedInt,
            BoundedInt | None,
            BoundedInt | None,
        ]
    ]


_File = TypeVar("_File", _StacksFile, _TelemetryFile, _AllocationsHead)


def read_stacks(traces: Iterable[Trace]) -> tuple[pl.DataFrame, list[Notice]]:
    """Returns the stack samples beside these traces (`model.beside`), and notices about
    problems.
    """

    def read(path: Path, rank: int | None) -> tuple[pl.DataFrame, int]:
        document = _decode_file(path, _StacksFile, "traceloom-stacks")
        names = [
            f"{file}({line}): {function}" if line else function
            for function, file, line in document.frames
        ]
        threads, frame_budget = document.threads, _MAX_FRAMES
        rows: list[tuple[Any, ...]] = []
        for time_ns, thread, period_ns, stack in document.samples:
            frame_budget -= len(stack)
            if (
                thread < len(threads)
                and period_ns >= 0
                and frame_budget >= 0
                and all(frame < len(names) for frame in stack)
            ):
                sampled_thread = threads[thread]
                frames = [names[frame] for frame in stack]
                rows.append(
                    (
                        rank,
                        document.pid,
                        sampled_thread.id,
                        sampled_thread.name,
                        time_ns,
                        period_ns,
                        frames,
                    )
                )
        frame = pl.DataFrame(rows, schema=SAMPLES_SCHEMA, orient="row").sort(
            "thread", "time_ns", maintain_order=True
        )
        return frame, len(document.samples) - len(rows)

    return _read_sidecars(
        traces, _STACKS, make_empty_samples(), read, "stack samples", slug="damaged-stacks"
    )


def read_allocations(traces: Iterable[Trace]) -> tuple[pl.DataFrame, list[Notice]]:
    """Returns the allocations beside these traces (`model.beside`), and notices about problems."""

    def read(path: Path, rank: int | None) -> tuple[pl.DataFrame, int]:
        document = _decode_file(path, _AllocationsHead, "traceloom-allocations")
        rows = [
            (rank, document.pid, thread, time_ns, address, size, device, allocated, reserved)
            for time_ns, thread, address, size, device, _, allocated, reserved in document.events
            if 0 <= address < 2**64
        ]
        frame = pl.DataFrame(rows, schema=ALLOCATIONS_SCHEMA, orient="row").sort(
            "time_ns", maintain_order=True
        )
        return frame, len(document.events) - len(rows)

    return _read_sidecars(
        traces,
        _ALLOCATIONS,
        make_empty_allocations(),
        read,
        "allocations",
        slug="damaged-allocations",
    )


def _read_sidecars(
    traces: Iterable[Trace],
    ending: str,
    empty: pl.DataFrame,
    read: Callable[[Path, int | None], tuple[pl.DataFrame, int]],
    subject: str,
    *,
    slug: str,
) -> tuple[pl.DataFrame, list[Notice]]:
    """Reads the file beside the trace of each rank.

    `read` returns its rows and how many are invalid.
    """
    frames, notices = [empty], []
    for trace in traces:
        path = Path(trace.meta.path)
        stem, kineto, _ = path.name.partition(".kineto")
        sidecar = path.with_name(stem + ending)
        if not kineto or not sidecar.is_file():
            continue
        if trace.meta.clock != "unix":
            message = f"{subject} are left out: the times of the trace are of another clock"
            notices.append(Notice(slug, "warning", message, rank=trace.rank, where=str(sidecar)))
            continue
        try:
            frame, invalid = read(sidecar, trace.rank)
        except (OSError, ValueError, InputError) as error:
            message = f"{subject} cannot be read and left out: {error}"
            notices.append(Notice(slug, "warning", message, rank=trace.rank, where=str(sidecar)))
            continue
        # The clock of the capture aligns hosts whose clocks differ.
        frames.append(
            frame.with_columns(pl.col("time_ns") + get_clock_offset_ns(trace.meta.capture))
        )
        if invalid:
            message = f"{subject} that cannot be right and are left out: {invalid:,}"
            notices.append(
                Notice(slug, "warning", message, invalid, rank=trace.rank, where=str(sidecar))
            )
    return pl.concat(frames), notices


def read_telemetry(traces: Iterable[Trace]) -> tuple[pl.DataFrame, list[Notice]]:
    """Returns the telemetry in the directories of these traces (`model.beside`), and notices about
    problems.
    """
    frames, notices = [make_empty_telemetry()], []
    traces = [trace for trace in traces if ".kineto" in Path(trace.meta.path).name]
    folders = dict.fromkeys(Path(trace.meta.path).parent for trace in traces)
    offsets = {
        (Path(trace.meta.path).parent, (trace.meta.capture or {}).get("host")): get_clock_offset_ns(
            trace.meta.capture
        )
        for trace in traces
    }
    for path in (
        path for directory in folders for path in sorted(directory.glob(f"*{_TELEMETRY}"))
    ):
        try:
            document = _decode_file(path, _TelemetryFile, "traceloom-telemetry")
            frame, invalid = _build_telemetry(document)
        except (OSError, ValueError, InputError) as error:
            message = f"telemetry cannot be read and left out: {error}"
            notices.append(Notice("damaged-telemetry", "warning", message, where=str(path)))
            continue
        frames.append(
            frame.with_columns(pl.col("time_ns") + offsets.get((path.parent, document.host), 0))
        )
        if invalid:
            message = (
                f"series of telemetry whose times and values do not match, left out: {invalid:,}"
            )
            notices.append(
                Notice("damaged-telemetry", "warning", message, invalid, where=str(path))
            )
    return pl.concat(frames), notices


def _decode_file(path: Path, kind: type[_File], name: str) -> _File:
    """Raises OSError, ValueError or InputError where it is not such a file."""
    with open_regular(path) as file:
        unpacked = GzipStream(file)
        text = io.BytesIO()
        for chunk in unpacked:
            if text.write(chunk) and text.tell() > _MAX_BYTES:
                raise ValueError("it is larger than anybody reads")
    if unpacked.fault:
        raise ValueError(unpacked.fault)
    document = msgspec.json.decode(text.getvalue(), type=kind)
    if document.format != name:
        raise ValueError(f"its format is `{document.format[:40]}`, not `{name}`")
    if document.version != VERSION:
        raise other_version("file", document.version, VERSION, path)
    return document


def _build_telemetry(document: _TelemetryFile) -> tuple[pl.DataFrame, int]:
    valid_series = [
        series for series in document.series if len(series.times_ns) == len(series.values)
    ]
    frames = [make_empty_telemetry()]
    for series in valid_series:
        labels = msgspec.json.encode(series.labels, order="sorted").decode()
        texts = {"host": document.host, "metric": series.metric, "labels": labels}
        texts |= {"unit": series.unit, "kind": series.kind}
        frame = pl.DataFrame(
            {"time_ns": series.times_ns, "value": series.values},
            schema_overrides={"value": pl.Float64},
        )
        frame = frame.with_columns(
            pl.lit(text).alias(name) for name, text in texts.items()
        ).drop_nulls("value")
        frames.append(
            frame.select(pl.col(name).cast(kind) for name, kind in TELEMETRY_SCHEMA.items())
        )
    sort_keys = ("metric", "labels", "time_ns")
    return pl.concat(frames).sort(*sort_keys, maintain_order=True), len(document.series) - len(
        valid_series
    )
