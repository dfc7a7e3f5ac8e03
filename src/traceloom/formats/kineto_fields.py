"""Defines the fields of Kineto entries and converts their microseconds to nanoseconds.

A double holds whole microseconds exactly up to 2^53, and distinguishes nanoseconds up to 2^43
(8.8e12 µs, more than the quarter year that Kineto's `ts` spans since it has a base time). Unix
microseconds with a fraction are beyond that; they are read as text.
"""

import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import numpy as np

from traceloom.trace.array_types import Bools, Floats, Ints

NULL = -(2**63)  # stands for "absent" in integer columns
RAW = msgspec.Raw()

# name: (key in the file, type, default), in the usual order of the writers, which makes the
# decoder's search for keys short. Every field adds a cost per event, so rare fields are decoded
# again for the few events that have them.
_NUMBER = ("number", NULL)
_LIST = ("raw", RAW)
_TEXT = ("text", None)
_ANY = ("any", None)  # accepted whatever it is, and not counted as odd
ARGUMENTS: dict[str, tuple[str, tuple[str, Any]]] = {
    "external_id": ("External id", _NUMBER),
    "record_function_id": ("Record function id", _NUMBER),
    "concrete": ("Concrete Inputs", _LIST),
    "types": ("Input type", _LIST),
    "strides": ("Input Strides", _LIST),
    "shapes": ("Input Dims", _LIST),
    "sequence": ("Sequence number", _NUMBER),
    "forward_thread": ("Fwd thread id", _NUMBER),
    "python_parent": ("Python parent id", _NUMBER),
    "python_id": ("Python id", _NUMBER),
    "module_id": ("Python module id", _NUMBER),
    "device": ("device", _NUMBER),
    "stream": ("stream", _NUMBER),
    "correlation": ("correlation", _NUMBER),
    "blocks_per_sm": ("blocks per SM", _ANY),
    "warps_per_sm": ("warps per SM", _ANY),
    "occupancy_percent": ("est. achieved occupancy %", _ANY),
    "total_reserved": ("Total Reserved", _NUMBER),
    "total_allocated": ("Total Allocated", _NUMBER),
    "allocation_bytes": ("Bytes", _NUMBER),
    "address": ("Addr", _NUMBER),
    "device_id": ("Device Id", _NUMBER),
    "device_type": ("Device Type", _NUMBER),
    "external_id_lower": ("external id", _NUMBER),
    "shapes_lower": ("Input dims", _LIST),
    "collective": ("Collective name", _TEXT),
    "name": ("name", _TEXT),
}
RARE: dict[str, tuple[str, tuple[str, Any]]] = {
    "bytes": ("bytes", _NUMBER),
    "in_elements": ("In msg nelems", _NUMBER),
    "out_elements": ("Out msg nelems", _NUMBER),
    "group_size": ("Group size", _NUMBER),
    "element_type": ("dtype", _TEXT),
    "in_splits": ("In split size", _LIST),
    "out_splits": ("Out split size", _LIST),
    "group": ("Process Group Name", _TEXT),
    "group_description": ("Process Group Description", _TEXT),
    "group_ranks": ("Process Group Ranks", _LIST),
    "rank": ("Rank", _NUMBER),
    "source_rank": ("Src Rank", _NUMBER),
    "target_rank": ("Dst Rank", _NUMBER),
    "root_rank": ("Root", _NUMBER),
    "collective_sequence": ("Seq", _NUMBER),
    "asynchronous": ("Is asynchronized op", _LIST),
    "sync_kind": ("cuda_sync_kind", _TEXT),
    "original_stream": ("original_stream", _NUMBER),
    "awaited_stream": ("wait_on_stream", _NUMBER),
    "record_correlation": ("wait_on_cuda_event_record_corr_id", _NUMBER),
    "awaited_event": ("wait_on_cuda_event_id", _NUMBER),
    "event_id": ("event_id", _NUMBER),
    "kind": ("kind", _TEXT),
    "copy_kind": ("copy kind", _TEXT),
    "source_kind": ("src kind", _TEXT),
    "target_kind": ("dst kind", _TEXT),
    "direction": ("direction", _TEXT),
    "size": ("size", _NUMBER),
}
_ALL = ARGUMENTS | RARE
_STRICT = {
    "number": int | str | float | None,
    "raw": msgspec.Raw,
    "text": str | int | float | bool | None,
    "any": Any,
}

_EVENT: dict[str, tuple[Any, Any]] = {
    "ph": (str, ""),
    "cat": (str | None, ""),
    "id": (int | str | float | None, None),
    "name": (str, ""),
    "pid": (int | str, ""),
    "tid": (int | str, ""),
}
_NAN = float("nan")


def _define_arguments(
    name: str, fields: dict[str, tuple[str, tuple[str, Any]]], strict: bool
) -> Any:
    spec = []
    for field, (key, (kind, default)) in fields.items():
        field_type = _STRICT[kind] if strict or kind == "raw" else Any
        spec.append((field, field_type, msgspec.field(default=default, name=key)))
    return msgspec.defstruct(name, spec, gc=False)


def _define_entry(name: str, arguments: Any, time: Any, default: Any, strict: bool) -> Any:
    spec: list[Any] = [
        (key, kind if strict else Any, value) for key, (kind, value) in _EVENT.items()
    ]
    spec += [
        ("ts", time, default),
        ("dur", time, default),
        ("args", arguments if strict else Any, None),
    ]
    return msgspec.defstruct(name, spec, gc=False)


Arguments = _define_arguments("Arguments", ARGUMENTS, strict=True)
NO_ARGUMENTS = Arguments()
_LooseArguments = _define_arguments("LooseArguments", _ALL, strict=False)
# Times as doubles: exact for whole microseconds, and for nanoseconds below 2^43 microseconds.
Entry = _define_entry("Entry", Arguments | None, float, _NAN, strict=True)
# Times as text: exact whatever they are.
ExactEntry = _define_entry("ExactEntry", Arguments | None, msgspec.Raw, RAW, strict=True)
# Any value anywhere; `_normalize_entry` makes it look like an ExactEntry.
LooseEntry = _define_entry("LooseEntry", Any, msgspec.Raw, RAW, strict=False)

FAST = msgspec.json.Decoder(list[Entry])  # type: ignore[valid-type]
EXACT = msgspec.json.Decoder(list[ExactEntry])  # type: ignore[valid-type]
_LOOSE = msgspec.json.Decoder(list[LooseEntry])  # type: ignore[valid-type]
_AllArguments = _define_arguments("WholeArguments", _ALL, strict=True)
_DEFAULT_ARGUMENTS = _AllArguments()
_ALL_ARGUMENTS_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    msgspec.defstruct("WholeEntry", [("args", _AllArguments)], gc=False)
)

_WITH_EXPONENT = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?[eE][+-]?\d+')


def decode_all_arguments(args: Any, text: bytes) -> tuple[Any, bool]:
    """Returns the arguments of one event including rare ones, and whether a rare one was odd;
    `text` is the whole event.
    """
    if isinstance(args, _LooseArguments):
        return args, False  # all of them, and reported already
    if args is NO_ARGUMENTS:
        return _DEFAULT_ARGUMENTS, False
    try:
        return _ALL_ARGUMENTS_DECODER.decode(text).args, False
    except msgspec.ValidationError:
        return decode_loosely(b"[" + text + b"]")[0][0].args, True


def decode_loosely(text: bytes) -> tuple[list[Any], int]:
    """Decodes a list of entries with values of any type; returns them and how many had odd values.

    Raises:
        msgspec.DecodeError: The text is not a JSON list of objects.
    """
    try:
        entries = _LOOSE.decode(text)
    except msgspec.ValidationError:
        # Keep strings; replace numbers beyond the range of double by null of the same length,
        # because errors refer to bytes of the text.
        finite = _WITH_EXPONENT.sub(
            lambda match: (
                match[0]
                if match[0].startswith(b'"') or math.isfinite(float(match[0]))
                else b"null".ljust(len(match[0]))
            ),
            text,
        )
        entries = _LOOSE.decode(finite)
    return entries, sum(_normalize_entry(entry) for entry in entries)


def _normalize_entry(entry: Any) -> bool:
    """Makes an entry look like an ExactEntry; returns whether a value of it was odd."""
    unexpected = False
    for key, kinds in (
        ("ph", str),
        ("cat", str),
        ("name", str),
        ("pid", (int, str)),
        ("tid", (int, str)),
    ):
        value = getattr(entry, key)
        if not isinstance(value, kinds):
            unexpected |= value is not None
            text = b"" if value is None else msgspec.json.encode(value)
            setattr(entry, key, text.decode("utf-8", "replace"))
    if not isinstance(entry.id, (int, str, float, type(None))):
        unexpected, entry.id = True, None
    args = entry.args
    if args is None:
        return unexpected
    if not isinstance(args, dict):
        entry.args = None
        return True
    values: dict[str, Any] = {}
    for field, (key, (kind, _default)) in _ALL.items():
        if key not in args:
            continue
        value = args[key]
        if kind == "raw":
            value = msgspec.Raw(msgspec.json.encode(value))
        elif kind != "any" and not isinstance(value, (int, str, float, type(None))):
            unexpected, value = True, None
        values[field] = value
    entry.args = _LooseArguments(**values)
    return unexpected


# A time with an exponent, with more than three digits of fraction, or with a fraction after 13
# digits or more.
_FINE_TIMES = re.compile(
    rb'"(?:ts|dur)"\s*:\s*"?-?(?:\d+(?:(?:\.\d+)?[eE]|\.\d{4})|(\d{13,})\.\d*[1-9])'
)
_MAX_NS = 2**62  # times beyond (146 years) are invalid
_MAX_US = _MAX_NS // 1000
# 36 years; base time (see `compute_time_offset_ns`), start and duration add up to an int64.
_MAX_DURATION_NS = 2**60
_DIGITS = len(str(_MAX_US))
# Digits of the fraction that are used, so that half a nanosecond differs from slightly more.
_FRACTION_DIGITS = 12
_PARTS_OF_NS = 10 ** (_FRACTION_DIGITS - 3)


def needs_text(sample: bytes) -> bool:
    """Whether doubles lose precision: fractions of large numbers, or more than three digits after
    the point.
    """
    return any(
        match[1] is None or int(match[1]) >= 2**43
        for match in _FINE_TIMES.finditer(sample, 0, 1 << 18)
    )


def convert_double_times(start_us: Floats, duration_us: Floats) -> tuple[Ints, Ints, Bools, Bools]:
    """Returns start and duration in ns, and which of each are usable (finite, within 146 and 36
    years); others are 0.
    """
    us = np.array((start_us, duration_us), dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        usable = np.abs(us) < np.array(((_MAX_NS / 1000,), (_MAX_DURATION_NS / 1000,)))
    if not usable.all():
        us[~usable] = 0.0
    # Row 0 holds starts; row 1 first durations, then ends. Whole microseconds and fractions are
    # kept apart for exactness.
    whole_us = np.floor(us)
    us -= whole_us
    us[1] += us[0]
    us *= 1000
    ns = whole_us.astype(np.int64)
    ns[1] += ns[0]
    ns *= 1000
    ns += np.rint(us, out=us).astype(np.int64)
    ns[1] -= ns[0]
    return ns[0], ns[1], usable[0], usable[1]


def parse_text_times(starts: list[Any], durations: list[Any]) -> tuple[Ints, Ints, Bools, Bools]:
    """As `convert_double_times`, from JSON text: numbers, or numbers in quotes.

    End = round(start + duration), as in exact decimals.
    """
    start_us, start_fraction, valid_starts = _split(starts, _MAX_US)
    more_us, more_fraction, valid_durations = _split(durations, _MAX_DURATION_NS // 1000)
    start = start_us * 1000 + _compute_rounded_ns(start_fraction)
    end = (start_us + more_us) * 1000 + _compute_rounded_ns(start_fraction + more_fraction)
    return start, end - start, valid_starts, valid_durations


def _compute_rounded_ns(parts: Ints) -> Ints:
    """Rounds fractions of a microsecond to the nearest nanosecond, halves to even as
    Decimal does.
    """
    floor = parts // _PARTS_OF_NS
    remainder = parts - floor * _PARTS_OF_NS
    up = (remainder > _PARTS_OF_NS // 2) | ((remainder == _PARTS_OF_NS // 2) & (floor % 2 == 1))
    rounded: Ints = floor + up
    return rounded


def _split(texts: list[Any], max_us: int) -> tuple[Ints, Ints, Bools]:
    """Returns whole microseconds, the first digits after the point (same sign), and which are
    numbers below `max_us`.
    """
    whole_us, fractions = [], []
    for text in texts:
        digits, _, fraction = bytes(text).partition(b".")
        if digits.isdigit() and len(digits) <= _DIGITS and (fraction.isdigit() or not fraction):
            whole_us.append(int(digits))
            fractions.append(int(fraction.ljust(_FRACTION_DIGITS, b"0")[:_FRACTION_DIGITS]))
        else:
            # Exponents and other spellings, one by one.
            try:
                value = Decimal(bytes(text).strip(b'" ').decode("ascii", "replace"))
            except InvalidOperation:
                value = Decimal(max_us)
            usable = value.is_finite() and abs(value) < max_us
            whole_us.append(int(value) if usable else max_us)
            fractions.append(int((value - int(value)) * 10**_FRACTION_DIGITS) if usable else 0)
    us, parts = np.array(whole_us, dtype=np.int64), np.array(fractions, dtype=np.int64)
    valid = us < max_us
    us[~valid] = parts[~valid] = 0
    return us, parts, valid
