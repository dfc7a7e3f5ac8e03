"""Reads the arguments of one or many events again from the file, in one pass.

Some analyses need arguments of a few events only; the reader then need not decode them for all.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from traceloom.errors import InputError, UsageError
from traceloom.formats.kineto_columns import parse_floats
from traceloom.formats.resync import DamageLog, repair_event
from traceloom.formats.text_stream import open_input, read_text_pieces
from traceloom.trace.array_types import Ints
from traceloom.trace.trace import Trace

_BATCH_EVENTS = 4096  # events decoded at once


def can_reread_events(trace: Trace) -> bool:
    """Whether the events of the trace can be read again: it came from a file that still exists."""
    return trace.meta.path != "-" and Path(trace.meta.path).is_file()


def arguments(trace: Trace, event: int) -> dict[str, Any]:
    """Returns the `args` of one event as in the file; empty where it has none.

    The file is decompressed up to the event: milliseconds for small files, seconds for gigabytes.

    Args:
        trace: The trace; its file must still be there.
        event: Row of `trace.events`.

    Raises:
        UsageError: `no-such-event`; `no-file` for a trace from standard input.
        InputError: `unreadable`: the file is gone; `changed-file`: it has changed since it was
            read.
    """
    if not 0 <= event < trace.events.height:
        raise UsageError(
            f"expected an event below {trace.events.height}, got {event}", slug="no-such-event"
        )
    name = trace.events["name"][event]
    for entry in _parse_entries(next(read_event_texts(trace, np.array([event])), b"")):
        if str(entry.get("name", "")) == name:
            args = entry.get("args")
            return args if isinstance(args, dict) else {}
    raise InputError(
        f"the file is not what it was when it was read: no `{name[:60]}` at byte {trace.sources['offset'][event]}",
        slug="changed-file",
        where=trace.meta.path,
        hint="load it again",
    )


def read_numeric_arguments(
    trace: Trace, events: Ints, keys: Mapping[str, str | tuple[str, int]]
) -> pl.DataFrame:
    """Reads selected numeric arguments of selected events.

    Args:
        trace: A trace for which `can_reread_events` holds; the file is decompressed up to the last
            of the events.
        events: Rows of `trace.events`, ascending.
        keys: Name of a column -> key of the argument in the file; for a list, key and position.

    Returns:
        The column `event` and one Float64 column per name, in the order of `events`; null where the
        argument is absent, is not a finite number, or the file no longer holds that event.

    Raises:
        InputError: `unreadable`: the file is gone.
    """
    key_and_index_by_column = {
        name: (key, None) if isinstance(key, str) else key for name, key in keys.items()
    }
    fields = {
        key: f"value_{number}" for number, (key, _) in enumerate(key_and_index_by_column.values())
    }
    record_type = msgspec.defstruct(
        "Numbers",
        [(field, Any, msgspec.field(default=None, name=key)) for key, field in fields.items()],
        gc=False,
    )
    columns = {name: np.full(events.size, np.nan) for name in keys}
    empty_record = record_type()
    for positions, decoded in _decode_arguments(trace, events, record_type):
        rows = [empty_record if args is None else args for args in decoded]
        for name, values in columns.items():
            key, list_index = key_and_index_by_column[name]
            raw_values = [getattr(row, fields[key]) for row in rows]
            if list_index is not None:
                raw_values = [
                    value[list_index]
                    if isinstance(value, list) and list_index < len(value)
                    else None
                    for value in raw_values
                ]
            values[positions] = parse_floats(raw_values)
    series = [pl.Series(name, values).fill_nan(None) for name, values in columns.items()]
    return pl.DataFrame([pl.Series("event", events).cast(pl.UInt32), *series])


def read_all_arguments(trace: Trace, events: Ints) -> Iterator[dict[str, Any]]:
    """Yields all arguments of selected events in the order of `events` (rows, ascending).

    An event that the file no longer holds yields an empty dict.

    Raises:
        InputError: `unreadable`: the file is gone.
    """
    result: list[dict[str, Any]] = [{}] * events.size
    for positions, decoded in _decode_arguments(trace, events, dict[str, Any]):
        for position, args in zip(positions.tolist(), decoded, strict=True):
            result[position] = args if args is not None else {}
    yield from result


def _decode_arguments(
    trace: Trace, events: Ints, arguments_type: Any
) -> Iterator[tuple[Ints, list[Any]]]:
    """Yields the arguments as `arguments_type`, in batches in file order, with their positions in
    `events`.

    None where an event has none. Events beyond the end of the file are left out.
    """
    entry = msgspec.defstruct(
        "Again", [("name", str, ""), ("args", arguments_type | None, None)], gc=False
    )
    decoder = msgspec.json.Decoder(list[entry])  # type: ignore[valid-type]
    order = np.argsort(trace.sources["offset"].gather(events).to_numpy(), kind="stable")
    texts = read_event_texts(trace, events[order])
    for batch_start in range(0, order.size, _BATCH_EVENTS):
        positions = order[batch_start : batch_start + _BATCH_EVENTS]
        batch = list(islice(texts, positions.size))
        names = trace.events["name"].gather(events[positions]).to_list()[: len(batch)]
        try:
            entries: list[Any] = decoder.decode(b"[" + b",".join(batch) + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError):
            entries = []
        if len(entries) == len(batch):
            decoded = [
                entry.args if entry.name == name else None
                for entry, name in zip(entries, names, strict=True)
            ]
        else:
            decoded = []
            for text, name in zip(
                batch, names, strict=True
            ):  # of a damaged stretch, which may hold other entries too
                candidates = (
                    item.get("args")
                    for item in _parse_entries(text)
                    if str(item.get("name", "")) == name
                )
                args = next((args for args in candidates if isinstance(args, dict)), None)
                try:
                    decoded.append(None if args is None else msgspec.convert(args, arguments_type))
                except msgspec.ValidationError:
                    decoded.append(None)
        yield positions[: len(batch)], decoded


def _parse_entries(text: bytes) -> list[dict[str, Any]]:
    """Returns the entries in a stretch of a file, repaired where it is damaged."""
    try:
        entries = json.loads(b"[" + text + b"]", strict=False, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        entries = repair_event(text)
    return [entry for entry in entries if isinstance(entry, dict)]


def read_event_texts(trace: Trace, events: Ints) -> Iterator[bytes]:
    """Yields the text of events, which must be in file order; ends early where the file does.

    Raises:
        InputError: `unreadable`: the file is gone.
        UsageError: `no-file`: the trace came from standard input.
    """
    if trace.meta.path == "-":
        raise UsageError(
            "the trace came from standard input, which cannot be read again", slug="no-file"
        )
    spans = trace.sources.select("offset", "length")[events]
    offset = spans["offset"].to_numpy()
    ends = np.maximum.accumulate(offset + spans["length"].cast(pl.Int64).to_numpy())
    next_event = buffer_offset = 0  # next event, byte at which the buffer begins
    buffer = b""
    with open_input(Path(trace.meta.path)) as stream:
        chunks = read_text_pieces(stream, DamageLog())
        for chunk in chunks:
            buffer += chunk
            ready_end = int(np.searchsorted(ends, buffer_offset + len(buffer), side="right"))
            for low, high in zip(
                (offset[next_event:ready_end] - buffer_offset).tolist(),
                (ends[next_event:ready_end] - buffer_offset).tolist(),
                strict=True,
            ):
                yield buffer[low:high]  # ready >= at: the buffer only grows
            next_event = ready_end
            if next_event >= ends.size:
                break
            keep_from = min(max(int(offset[next_event]) - buffer_offset, 0), len(buffer))
            buffer, buffer_offset = buffer[keep_from:], buffer_offset + keep_from
        chunks.close()  # type: ignore[attr-defined]
