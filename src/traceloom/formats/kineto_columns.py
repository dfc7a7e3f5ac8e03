"""Collects decoded Kineto entries in columns."""

import contextlib
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from traceloom.formats.kineto_document import FULL_RANGE, Document, Slice, TextRange
from traceloom.formats.kineto_fields import (
    NO_ARGUMENTS,
    NULL,
    RAW,
    convert_double_times,
    decode_all_arguments,
    parse_text_times,
)
from traceloom.formats.resync import PARSE_ERRORS, DamageLog
from traceloom.formats.text_stream import open_input, read_text_pieces
from traceloom.trace import mapped_arrays, vocabulary as vocab
from traceloom.trace.array_types import Array
from traceloom.trace.mapped_arrays import BLOCK_POOL, ColumnSpool, iterate_slices

_OPS, _FRAMES, _CALLS, _DEVICE = 1, 2, 4, 8
_GROUP = {
    vocab.OP: _OPS,
    vocab.ANNOTATION: _OPS,
    vocab.COLLECTIVE: _OPS,
    vocab.OTHER: _OPS,
    vocab.PYTHON: _FRAMES,
    vocab.RUNTIME: _CALLS,
    vocab.DRIVER: _CALLS,
    vocab.KERNEL: _DEVICE,
    vocab.COPY: _DEVICE,
    vocab.FILL: _DEVICE,
    vocab.GPU_ANNOTATION: _DEVICE,
    vocab.SYNC: _DEVICE,
    vocab.GPU_EVENT: _DEVICE,
    vocab.COMMAND: _DEVICE,
}
_CODE = {name: code for code, name in enumerate(vocab.CATEGORIES)}
_GROUP_OF_CODE = np.array([_GROUP.get(name, 0) for name in vocab.CATEGORIES], dtype=np.uint8)
_COPY_CODES = (_CODE[vocab.COPY], _CODE[vocab.FILL])
_SYNC_CODES = (_CODE[vocab.SYNC], _CODE[vocab.GPU_EVENT])
_KERNEL_CODE = _CODE[vocab.KERNEL]
_COMMAND_CODE = _CODE[vocab.COMMAND]

_MAX_PENDING_ARRAYS = 64  # pending arrays of slices before they are merged
_MAX_LISTS = 20_000  # max remembered combinations of lists

COLLECTIVE_TEXTS = ("collective", "group", "element_type", "group_description")
COLLECTIVE_RAWS = ("group_ranks", "in_splits", "out_splits", "asynchronous")
COLLECTIVE_NUMBERS = (
    "in_elements",
    "out_elements",
    "group_size",
    "collective_sequence",
    "rank",
    "source_rank",
    "target_rank",
    "root_rank",
)
OCCUPANCY_COLUMNS = ("blocks_per_sm", "warps_per_sm", "occupancy_percent")
_COPY_TEXTS = ("kind", "copy_kind", "source_kind", "target_kind")
LISTS = ("shapes", "types", "strides", "concrete")
_TEXTS = frozenset(
    ("name", "kind", "key", *LISTS, *_COPY_TEXTS, *COLLECTIVE_TEXTS, *COLLECTIVE_RAWS)
)
ALLOCATION = (
    "address",
    "allocation_bytes",
    "total_allocated",
    "total_reserved",
    "device_type",
    "device_id",
)


class StringTable(dict[Any, int]):
    """Numbers values in the order of their first appearance."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class _Lists(dict[bytes, int]):
    """Numbers combinations of four lists, joined by zero bytes, and keeps the numbers of their four
    texts.

    Attributes:
        odd: Which combinations contain a value that is not a list, which counts as absent; None if
            there is no such combination.
    """

    def __init__(self, texts: StringTable) -> None:
        self._texts = texts
        self._parts = np.zeros((4, 1024), dtype=np.int32)
        self.odd: Array | None = None

    def __missing__(self, key: bytes) -> int:
        number = self[key] = len(self)
        if number == self._parts.shape[1]:
            self._parts = np.concatenate([self._parts, np.zeros_like(self._parts)], axis=1)
        parts = key.split(b"\0")
        lists = [_is_list(part) for part in parts]
        self._parts[:, number] = [
            self._texts[part] if lists[index] else -1 for index, part in enumerate(parts)
        ]
        if any(part and part != b"null" and not lists[index] for index, part in enumerate(parts)):
            self.odd = np.append(np.zeros(0, np.int64) if self.odd is None else self.odd, number)
        return number

    def parts(self, numbers: Array) -> Array:
        """Returns the numbers of the four texts, -1 where absent; shape (4, numbers)."""
        return self._parts[:, numbers]


class _CategoryCodes(dict[str | None, int]):
    """Maps category names in the file to known categories."""

    def __missing__(self, name: str | None) -> int:
        code = self[name] = _CODE[vocab.FROM_KINETO.get((name or "").lower(), vocab.OTHER)]
        return code


class ColumnTables(Struct, frozen=True):
    """The meaning of the numbers in the columns of a file, and counts; see `Columns`."""

    texts: list[Any]
    places: list[tuple[Any, Any]]
    thread_names: dict[tuple[Any, Any], str]
    process_texts: dict[Any, set[str]]
    unknown_categories: dict[str, int]
    entries: int
    rows: int


class Columns:
    """The arrays of a whole file, gathered slice by slice.

    Attributes:
        texts: Numbers of all texts (names, lists of shapes): `texts[text] -> code`.
        places: Numbers of (pid, tid) pairs.
        tables: Name of a table -> name of a column -> arrays in file order. `spans` has one row per
            complete event; in tables with a column `row`, it is the row in `spans` that they belong
            to.
        thread_names: (pid, tid) -> name; process_texts: pid -> its names and labels.
        entries: Entries of `traceEvents`, all phases.
    """

    def __init__(self, damage: DamageLog) -> None:
        self.texts = StringTable()
        self.places = StringTable()
        self.tables: dict[str, dict[str, list[Any]]] = {}
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.process_texts: dict[Any, set[str]] = {}
        self.unknown_categories: dict[str, int] = {}
        self.entries = 0
        self.rows = 0
        self._damage = damage
        self.spill: ColumnSpool | None = None
        self._dtypes: dict[tuple[str, str], Any] = {}
        self._lists = _Lists(self.texts)
        self._merged: dict[tuple[str, str], int] = {}
        self._categories = _CategoryCodes()

    def add(self, part: Slice) -> None:
        entries = part.entries
        self.entries += len(entries)
        spans, offsets, lengths = (
            [entry for entry in entries if entry.ph == "X"],
            part.offsets,
            part.lengths,
        )
        complete = None
        if len(spans) < len(entries):
            complete = np.fromiter(
                [entry.ph == "X" for entry in entries], dtype=np.bool_, count=len(entries)
            )
            offsets, lengths = offsets[complete], lengths[complete]
        if spans or complete is None:
            self._add_spans(spans, part, offsets, lengths)
        if complete is None:
            return
        other_rows = np.flatnonzero(~complete).tolist()
        phases = [entries[row].ph for row in other_rows]
        for phase in dict.fromkeys(phases):
            rows = [
                row for row, row_phase in zip(other_rows, phases, strict=True) if row_phase == phase
            ]
            phase_entries = [entries[row] for row in rows]
            if phase == "M":
                for row, entry in zip(rows, phase_entries, strict=True):
                    name = None if entry.args is None else entry.args.name
                    if entry.name == "process_labels":
                        name = self._decode_again(part, row).get("labels")
                    if name is None:
                        continue
                    if entry.name == "thread_name":
                        self.thread_names[entry.pid, entry.tid] = str(name)
                    elif entry.name in {"process_name", "process_labels"}:
                        self.process_texts.setdefault(entry.pid, set()).add(str(name))
            elif phase in ("s", "t", "f"):
                start, _, has_time, _ = self._times(phase_entries, exact=part.exact)
                self._put(
                    "flows",
                    phase=np.full(len(rows), phase == "s", dtype=np.bool_),
                    flow=parse_integers(
                        [NULL if entry.id is None else entry.id for entry in phase_entries]
                    ),
                    kind=self._codes([entry.cat or entry.name for entry in phase_entries]),
                    place=self._places_of(phase_entries),
                    start=np.where(has_time, start, NULL),
                )
            elif phase in ("i", "I", "R"):
                self._add_instants(phase_entries, exact=part.exact)
            elif phase == "C":
                self._add_counters(phase_entries, rows, part)
            elif phase in ("B", "E", "b", "e"):
                self._add_halves(phase_entries, np.array(rows), part)
            else:
                self._damage.note(
                    "unknown-phase", f"byte {part.offsets[rows[0]]} of the text", len(rows)
                )

    def take(self, table: str, name: str, dtype: Any) -> Array:
        """Removes and returns one column of a table in file order; empty where no slice
        had a row.
        """
        parts = self.tables.get(table, {}).pop(name, [])
        if self.spill is not None and (parts or self.spill.holds(table, name)):
            return self.spill.column(
                table, name, parts, parts[0].dtype if parts else self._dtypes[table, name]
            )
        return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)

    def legend(self) -> ColumnTables:
        """Returns everything except the columns."""
        return ColumnTables(
            list(self.texts),
            list(self.places),
            self.thread_names,
            self.process_texts,
            self.unknown_categories,
            self.entries,
            self.rows,
        )

    def pieces(self) -> Iterator[tuple[str, str, Array]]:
        """Yields table, column and values, one piece of a column at a time; yielded pieces are
        removed.
        """
        for table, columns in self.tables.items():
            for name in list(columns):
                values = self.take(table, name, None)
                for row_slice in iterate_slices(len(values)):
                    yield table, name, values[row_slice].view(np.ndarray)

    def extend(self, state: ColumnTables, chunks: Iterable[tuple[str, str, Array]]) -> None:
        """Adds what another process decoded of the following part of the text: its `legend()` and
        `pieces()`.
        """
        texts = np.array(
            [*map(self.texts.__getitem__, state.texts), -1], dtype=np.int32
        )  # -1 stays -1
        thread_numbers = np.array([self.places[pair] for pair in state.places], dtype=np.int32)
        for table, name, chunk in chunks:
            values = chunk
            if name == "row":
                values = self._row(chunk)
            elif name == "place":
                values = thread_numbers[chunk]
            elif name in _TEXTS:
                values = texts[chunk]
            self._put(table, **{name: values})
            if self.spill is not None:
                self._merge(table, name, self.tables[table][name])
        self.thread_names |= state.thread_names
        for process, names in state.process_texts.items():
            self.process_texts.setdefault(process, set()).update(names)
        for category, count in state.unknown_categories.items():
            self.unknown_categories[category] = self.unknown_categories.get(category, 0) + count
        self.entries += state.entries
        self.rows += state.rows

    def close(self) -> None:
        """Removes the temporary files on disk."""
        if self.spill is not None:
            self.spill.close()
            BLOCK_POOL.clear()

    # -- internals
    # -----------------------------------------------------------------------------------------

    def _put(self, table: str, **columns: Array) -> None:
        table_columns = self.tables.setdefault(table, {})
        for name, values in columns.items():
            parts = table_columns.setdefault(name, [])
            parts.append(values)
            if len(parts) - self._merged.get((table, name), 0) == _MAX_PENDING_ARRAYS:
                self._merge(table, name, parts)

    def _merge(self, table: str, name: str, parts: list[Array]) -> None:
        """Merges many small arrays into a large one, since memory between small ones is never
        returned.
        """
        parts[-_MAX_PENDING_ARRAYS:] = [np.concatenate(parts[-_MAX_PENDING_ARRAYS:])]
        if self.spill is not None:
            self._dtypes[table, name] = parts[0].dtype
            for values in parts:
                self.spill.add(table, name, values)
            parts.clear()
        self._merged[table, name] = len(parts)

    def _codes(self, values: Sequence[Any]) -> Array:
        texts = self.texts
        return pack_array("i", [texts[value] for value in values])

    def _text_codes(self, values: Sequence[Any]) -> Array:
        texts = self.texts
        coded = [-1 if value is None else texts[str(value)] for value in values]
        return np.fromiter(coded, dtype=np.int32, count=len(coded))

    def _times(self, entries: list[Any], *, exact: bool) -> tuple[Array, Array, Array, Array]:
        starts, durations = [entry.ts for entry in entries], [entry.dur for entry in entries]
        if exact:
            return parse_text_times(starts, durations)
        return convert_double_times(pack_array("d", starts), pack_array("d", durations))

    def _add_spans(self, spans: list[Any], part: Slice, offsets: Array, lengths: Array) -> None:
        start, duration, has_time, lasting = self._times(spans, exact=part.exact)
        # A time that a writer lost is 0, as is the duration; no event of a recording is there.
        lost_times = (start == 0) & (duration == 0)
        if lost_times.any() and not lost_times.all() and start[~lost_times].min() > 0:
            has_time &= ~lost_times
        if not has_time.all():
            lost = np.flatnonzero(~has_time)
            self._damage.note("missing-time", f"byte {offsets[lost[0]]} of the text", len(lost))
            timed_rows = np.flatnonzero(has_time)
            spans = [spans[row] for row in timed_rows.tolist()]
            start, duration, lasting, offsets, lengths = (
                column[timed_rows] for column in (start, duration, lasting, offsets, lengths)
            )
        if not lasting.all():
            unknown = np.flatnonzero(~lasting)
            self._damage.note(
                "missing-duration", f"byte {offsets[unknown[0]]} of the text", len(unknown)
            )
        categories = self._categories
        code = pack_array("B", [categories[span.cat] for span in spans])
        if (
            code == _COMMAND_CODE
        ).any():  # work of a command processor is device work, classified by its name
            code = code.copy()
            for row in np.flatnonzero(code == _COMMAND_CODE).tolist():
                if not spans[row].cat.lower().startswith("graph_"):
                    code[row] = _CODE[vocab.FROM_COMMAND.get(spans[row].name, vocab.KERNEL)]
        self._put(
            "spans",
            name=self._codes([span.name for span in spans]),
            category=code,
            start=start,
            duration=duration,
            place=self._places_of(spans),
            offset=offsets.astype(np.int64),
            length=np.minimum(lengths, 2**31 - 1).astype(np.int32),
        )
        for row in np.flatnonzero(code == _CODE[vocab.OTHER]).tolist():
            name = spans[row].cat or ""
            self.unknown_categories[name] = self.unknown_categories.get(name, 0) + 1
        args = [span.args or NO_ARGUMENTS for span in spans]

        def rare(rows: Array) -> list[Any]:
            """Returns the arguments of these rows, including rare ones, which are decoded again."""
            arguments = []
            locations = zip(
                rows.tolist(),
                (offsets[rows] - part.base).tolist(),
                lengths[rows].tolist(),
                strict=True,
            )
            for row, offset, length in locations:
                collective_arguments, unexpected = decode_all_arguments(
                    args[row], part.text[offset : offset + length]
                )
                arguments.append(collective_arguments)
                if unexpected:
                    self._damage.note("odd-values", f"byte {offset + part.base} of the text")
            return arguments

        self._add_host_arguments(args, code)
        described = (_GROUP_OF_CODE[code] == _OPS) | (code == _KERNEL_CODE)
        rows = [
            row for row in np.flatnonzero(described).tolist() if args[row].collective is not None
        ]
        if rows:
            collective_arguments = rare(np.array(rows))
            columns = {
                key: self._text_codes(list(map(attrgetter(key), collective_arguments)))
                for key in COLLECTIVE_TEXTS
            }
            for key in COLLECTIVE_RAWS:  # lists as JSON text
                raws = map(attrgetter(key), collective_arguments)
                columns[key] = pack_array(
                    "i", [-1 if raw is RAW else self.texts[bytes(raw)] for raw in raws]
                )
            columns |= {
                key: parse_integers(list(map(attrgetter(key), collective_arguments)))
                for key in COLLECTIVE_NUMBERS
            }
            self._put("collectives", row=self._row(np.array(rows)), **columns)
        renamed = b'"original_stream"' in part.text
        self._add_device_arguments(args, code, rare, renamed=renamed)
        self.rows += len(spans)

    def _row(self, rows: Array) -> Array:
        return (rows + self.rows).astype(np.uint32)

    def _add_host_arguments(self, args: list[Any], code: Array) -> None:
        """Adds the arguments of ops, Python frames and runtime or driver calls."""
        group = _GROUP_OF_CODE[code]
        rows = np.flatnonzero(group == _OPS)
        if rows.size:
            op_arguments = [args[row] for row in rows.tolist()]
            self._put(
                "ops",
                row=self._row(rows),
                external=_extract_external_ids(op_arguments),
                record_function=parse_integers([a.record_function_id for a in op_arguments]),
                sequence=parse_integers([a.sequence for a in op_arguments]),
                forward_thread=parse_integers([a.forward_thread for a in op_arguments]),
            )
            shaped = [
                index
                for index, a in enumerate(op_arguments)
                if a.shapes is not RAW or a.shapes_lower is not RAW
            ]
            if shaped:  # shapes, types, strides and values are looked up together
                lists = self._lists
                if len(lists) > _MAX_LISTS:
                    lists.clear()
                    lists.odd = None
                keys = [
                    b"\0".join(
                        (
                            a.shapes_lower if a.shapes is RAW else a.shapes,
                            a.types,
                            a.strides,
                            a.concrete,
                        )
                    )
                    for a in map(op_arguments.__getitem__, shaped)
                ]
                combinations = np.fromiter(
                    map(lists.__getitem__, keys), dtype=np.int32, count=len(keys)
                )
                if lists.odd is not None and (count := int(np.isin(combinations, lists.odd).sum())):
                    self._damage.note("odd-values", count=count)
                codes = dict(zip(LISTS, lists.parts(combinations), strict=True))
                self._put("tensors", row=self._row(rows[shaped]), **codes)
        rows = np.flatnonzero(group == _FRAMES)
        if rows.size:
            frame_arguments = [args[row] for row in rows.tolist()]
            self._put(
                "frames",
                row=self._row(rows),
                python_id=parse_integers([a.python_id for a in frame_arguments]),
                python_parent=parse_integers([a.python_parent for a in frame_arguments]),
                module_id=parse_integers([a.module_id for a in frame_arguments]),
            )
        rows = np.flatnonzero(group == _CALLS)
        if rows.size:
            call_arguments = [args[row] for row in rows.tolist()]
            correlation = parse_integers([a.correlation for a in call_arguments])
            self._put(
                "calls",
                row=self._row(rows),
                correlation=correlation,
                external=_extract_external_ids(call_arguments),
            )

    def _add_device_arguments(
        self, args: list[Any], code: Array, rare: Callable[[Array], list[Any]], *, renamed: bool
    ) -> None:
        """Adds the arguments of device work; `rare` returns all arguments of rows. With `renamed`,
        the stream of some is the name of a lane, and the one on which they ran stands beside it.
        """
        rows = np.flatnonzero(_GROUP_OF_CODE[code] == _DEVICE)
        if not rows.size:
            return
        device_arguments = [args[row] for row in rows.tolist()]
        streams = [a.stream for a in device_arguments]
        if renamed:
            ran_on = [a.original_stream for a in rare(rows)]
            streams = [
                b if b not in (NULL, None) else a for a, b in zip(streams, ran_on, strict=True)
            ]
        self._put(
            "device",
            row=self._row(rows),
            correlation=parse_integers([a.correlation for a in device_arguments]),
            external=_extract_external_ids(device_arguments),
            device=parse_integers([a.device for a in device_arguments]),
            stream=parse_integers(streams),
        )
        # Launch configuration of kernels, where the writer recorded it.
        rows = np.flatnonzero(code == _KERNEL_CODE)
        kernel_arguments = [args[row] for row in rows.tolist()]
        values = {name: list(map(attrgetter(name), kernel_arguments)) for name in OCCUPANCY_COLUMNS}
        present = [
            index
            for index, triple in enumerate(zip(*values.values(), strict=True))
            if triple != (None, None, None)
        ]
        if present:
            if len(present) < rows.size:
                rows, values = (
                    rows[present],
                    {name: [column[index] for index in present] for name, column in values.items()},
                )
            self._put(
                "kernels",
                row=self._row(rows),
                **{name: parse_floats(column) for name, column in values.items()},
            )
        rows = np.flatnonzero(np.isin(code, _COPY_CODES))
        if rows.size:
            copies = rare(rows)
            texts = {
                key: self._text_codes(list(map(attrgetter(key), copies)))
                for key in _COPY_TEXTS
                if key != "copy_kind"
            }
            texts["copy_kind"] = self._text_codes(
                [a.direction if a.copy_kind is None else a.copy_kind for a in copies]
            )
            size = parse_integers([a.size if a.bytes == NULL else a.bytes for a in copies])
            self._put("copies", row=self._row(rows), bytes=size, **texts)
        rows = np.flatnonzero(np.isin(code, _SYNC_CODES))
        if rows.size:
            syncs = rare(rows)
            self._put(
                "syncs",
                row=self._row(rows),
                kind=self._text_codes([a.sync_kind for a in syncs]),
                awaited_stream=parse_integers([a.awaited_stream for a in syncs]),
                record_correlation=parse_integers([a.record_correlation for a in syncs]),
                event_id=parse_integers(
                    [a.awaited_event if a.awaited_event != NULL else a.event_id for a in syncs]
                ),
            )

    def _add_instants(self, entries: list[Any], *, exact: bool) -> None:
        memory = [entry for entry in entries if entry.name == "[memory]" and entry.args is not None]
        if memory:
            start, _, _, _ = self._times(memory, exact=exact)
            args = [entry.args for entry in memory]
            columns = {
                key: parse_integers(list(map(attrgetter(key), args))) for key in ALLOCATION[1:]
            }
            try:
                columns["address"] = pack_array("Q", [a.address for a in args])
            except struct.error:
                addresses = [
                    a.address if isinstance(a.address, int) else parse_integer(a.address)
                    for a in args
                ]
                columns["address"] = pack_array(
                    "Q", [value % 2**64 if value != NULL else 0 for value in addresses]
                )
            self._put("allocations", start=start, place=self._places_of(memory), **columns)
        marks = [entry for entry in entries if entry.name != "[memory]"]
        if marks:
            start, _, has_time, _ = self._times(marks, exact=exact)
            sizes = parse_integers(
                [(entry.args or NO_ARGUMENTS).allocation_bytes for entry in marks]
            )
            self._put(
                "marks",
                start=np.where(has_time, start, NULL),
                name=self._codes([entry.name for entry in marks]),
                place=self._places_of(marks),
                bytes=sizes,
            )

    def _places_of(self, entries: list[Any]) -> Array:
        # zip reuses one tuple, which saves allocating one per entry.
        pairs = zip([entry.pid for entry in entries], [entry.tid for entry in entries], strict=True)
        return pack_array("i", list(map(self.places.__getitem__, pairs)))

    def _add_halves(self, entries: list[Any], rows: Array, part: Slice) -> None:
        """Adds the beginnings or the ends of events, whose durations `pair_halves` finds."""
        start, _, has_time, _ = self._times(entries, exact=part.exact)
        kept = np.flatnonzero(has_time)
        if kept.size < len(entries):
            lost = int(part.offsets[rows[np.argmin(has_time)]])
            self._damage.note("missing-time", f"byte {lost} of the text", len(entries) - kept.size)
        entries, begins = [entries[row] for row in kept.tolist()], entries[0].ph in "Bb"
        first = self.rows
        if begins:
            for entry in entries:
                entry.dur = msgspec.Raw(b"1") if part.exact else 1.0
            self._add_spans(entries, part, part.offsets[rows[kept]], part.lengths[rows[kept]])
        self._put(
            "halves",
            row=(np.arange(kept.size) + (first if begins else 0)).astype(np.uint32),
            begins=np.full(kept.size, begins, dtype=np.bool_),
            start=start[kept],
            place=self._places_of(entries),
            # Asynchronous events are told by their id; the others nest on their thread.
            key=self._codes(
                [(entry.cat, entry.id) if entry.ph in "be" else None for entry in entries]
            ),
            offset=part.offsets[rows[kept]].astype(np.int64),
        )

    def pair_halves(self, duration: Array) -> None:
        """Sets the durations of events that were written as a beginning and an end."""
        names = ("row", "begins", "start", "place", "key", "offset")
        row, begins, start, place, key, offset = (
            self.take("halves", name, np.int64) for name in names
        )
        open_rows: dict[tuple[int, int], list[int]] = {}
        ends_alone: list[int] = []
        for index in np.lexsort((offset, start)).tolist():
            stack = open_rows.setdefault((int(place[index]), int(key[index])), [])
            if begins[index]:
                stack.append(index)
            elif stack:
                begun = stack.pop()
                duration[int(row[begun])] = start[index] - start[begun]
            else:
                ends_alone.append(index)
        never_ended = [index for stack in open_rows.values() for index in stack]
        duration[row[never_ended].astype(np.int64)] = 0
        for slug, found in (("missing-duration", never_ended), ("missing-time", ends_alone)):
            if found:
                self._damage.note(slug, f"byte {offset[found].min()} of the text", len(found))

    @staticmethod
    def _decode_again(part: Slice, row: int) -> dict[str, Any]:
        offset = int(part.offsets[row]) - part.base
        try:
            entry = msgspec.json.decode(part.text[offset : offset + int(part.lengths[row])])
        except PARSE_ERRORS:
            return {}
        args = entry.get("args") if isinstance(entry, dict) else None
        return args if isinstance(args, dict) else {}

    def _add_counters(self, entries: list[Any], rows: list[int], part: Slice) -> None:
        """Counters have arbitrary keys, so their text is decoded again."""
        start, _, has_time, _ = self._times(entries, exact=part.exact)
        names, keys, values, times, thread_numbers = [], [], [], [], []
        for index, row in enumerate(rows):
            for key, value in self._decode_again(part, row).items():
                if (
                    isinstance(value, (int, float))
                    and has_time[index]
                    and abs(value) <= sys.float_info.max
                ):
                    names.append(entries[index].name)
                    keys.append(key)
                    values.append(float(value))
                    times.append(int(start[index]))
                    thread_numbers.append(self.places[entries[index].pid, entries[index].tid])
        self._put(
            "counters",
            start=np.array(times, dtype=np.int64),
            name=self._codes(names),
            key=self._codes(keys),
            value=np.array(values, dtype=np.float64),
            place=np.array(thread_numbers, dtype=np.int32),
        )


def _is_list(text: bytes) -> bool:
    """Whether it is a JSON list; some writers put lists in quotes."""
    if not text.startswith(b'"['):
        return text.startswith(b"[")
    try:
        msgspec.json.decode(msgspec.json.decode(text, type=str), type=list)
    except PARSE_ERRORS:
        return False
    return True


def _extract_external_ids(args: list[Any]) -> Array:
    values = [a.external_id if a.external_id != NULL else a.external_id_lower for a in args]
    return parse_integers(values)


def pack_array(kind: str, values: Sequence[Any]) -> Array:
    """Packs values of one kind into a read-only array, in half of the time that NumPy takes to
    inspect each of them.

    Args:
        kind: As in `struct`.
        values: Numbers.

    Raises:
        struct.error: A value is not a number of that kind.
    """
    return np.frombuffer(struct.pack(f"{len(values)}{kind}", *values), dtype=kind)


def parse_integers(values: Sequence[Any]) -> Array:
    """Converts numbers and numbers in quotes to int64; anything else becomes NULL."""
    try:
        return pack_array("q", values)
    except struct.error:
        return pack_array("q", [parse_integer(value) for value in values])


def parse_floats(values: Sequence[Any]) -> Array:
    """Converts numbers of any kind to float64; NaN for anything that is not a finite number."""
    try:
        doubles = pack_array("d", values)
    except (struct.error, OverflowError):
        reals = []
        for value in values:
            try:
                reals.append(float(value))
            except (TypeError, ValueError, OverflowError):  # noqa: PERF203  (few values are odd)
                reals.append(np.nan)
        doubles = pack_array("d", reals)
    return np.where(np.isfinite(doubles), doubles, np.nan)


def parse_integer(value: Any) -> int:
    """Converts one value to int64; NULL where it is not a number (of that size)."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return NULL
    return number if -(2**63) < number < 2**63 else NULL


_LARGE = 4 << 20
Step = Callable[[int, int], None]


class Decoded(Struct):
    """The decoded content of a file, or of a part of it.

    Attributes:
        columns: All entries of `traceEvents`; to be closed.
        metadata: Other top-level entries.
        damage: What was repaired or lost.
        size: Bytes of text.
        began: Byte of the text at which the part begins; None where it has no beginning.
        left_at: Byte of the text at which it ends; None where it extends to the end.
    """

    columns: Columns
    metadata: dict[str, Any]
    damage: DamageLog
    size: int
    began: int | None
    left_at: int | None


def decode(
    path: str | Path,
    step: Step | None = None,
    part: TextRange = FULL_RANGE,
    taken_over: Callable[[int], bool] = lambda _: True,
) -> Decoded:
    """Decodes a file in this process: plain or gzip, whole or damaged.

    Args:
        path: The file; `-` is standard input.
        step: Called repeatedly with (bytes read from the file, bytes of text).
        part: The part to decode.
        taken_over: See `Document`.

    Raises:
        InputError: The file cannot be read or is not a Kineto trace.
    """
    damage = DamageLog()
    columns = Columns(damage)
    # Until glibc has freed a large block, it returns memory to the system at once, and every slice
    # faults its pages in again.
    bytes(_LARGE)
    try:
        with open_input(path) as stream:
            with contextlib.suppress(OSError):  # only regular files have a size
                status = os.fstat(stream.fileno())
                if stat.S_ISREG(status.st_mode) and status.st_size >= mapped_arrays.MIN_SPILL_BYTES:
                    columns.spill = mapped_arrays.ColumnSpool()
            document = Document(
                partial(read_text_pieces, stream, damage, step), damage, str(path), part, taken_over
            )
            for chunk in document.slices():
                columns.add(chunk)
                if columns.spill is None and document.size >= mapped_arrays.MIN_SPILL_BYTES:
                    columns.spill = mapped_arrays.ColumnSpool()
    except BaseException:
        columns.close()
        raise
    return Decoded(
        columns, document.metadata, damage, document.size, document.began, document.left_at
    )
