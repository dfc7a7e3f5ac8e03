"""Entries of `traceEvents` as any writer may spell them, each with what it means, worked out apart from the reader."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Decimal
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

Token = tuple[str, Any]
"""A value as JSON text, and what it means (None: nothing)."""

# As the writers have them, of several vendors and years, and the category that stands for them.
CATEGORIES = {
    "cpu_op": "op",
    "Operator": "op",
    "hpu_op": "op",
    "user_annotation": "annotation",
    "kernel": "kernel",
    "Kernel": "kernel",
    "gpu_memcpy": "copy",
    "Memcpy": "copy",
    "gpu_memset": "fill",
    "cuda_runtime": "runtime",
    "Runtime": "runtime",
    "xpu_driver": "driver",
    "cuda_driver": "driver",
    "python_function": "python",
    "gpu_user_annotation": "gpu_annotation",
    "cuda_sync": "sync",
    "cuda_event": "gpu_event",
    "overhead": "overhead",
    "Trace": "profiler",
    "never heard of": "other",
    "": "other",
}
ON_DEVICE = ("kernel", "copy", "fill", "gpu_annotation", "sync", "gpu_event")
HAVE_CORRELATION = (*ON_DEVICE, "runtime", "driver")
HAVE_EXTERNAL_ID = (*HAVE_CORRELATION, "op", "annotation", "other")
LONGEST_START_US, LONGEST_DURATION_US = Decimal(2**62) / 1000, Decimal(2**60) / 1000

NO_NUMBERS = st.sampled_from(
    ["null", '"x"', '""', "[]", "[1]", "{}", '{"a": 1}', "1e400", str(10**30), '"1.5.2"']
)


def whole_numbers(
    low: int = -(2**63) + 1, high: int = 2**63 - 1, *, doubles: bool = True
) -> SearchStrategy[Token]:
    """Whole numbers of a range: plain, in quotes, as doubles that hold them; or nothing that is a number."""
    plain: SearchStrategy[Token] = st.integers(low, high).map(lambda n: (str(n), n))
    quoted: SearchStrategy[Token] = st.integers(low, high).map(lambda n: (f'"{n}"', n))
    kinds: list[SearchStrategy[Token]] = [
        plain,
        plain,
        quoted,
        NO_NUMBERS.map(lambda text: (text, None)),
    ]
    if doubles:
        kinds.append(st.integers(max(low, -(2**50)), min(high, 2**50)).map(lambda n: (f"{n}.0", n)))
    return st.one_of(kinds)


@st.composite
def microseconds(draw: DrawFn, longest: Decimal) -> Token:
    """Times with up to seven digits after the point, in any spelling; beyond `longest` they are none."""
    whole = draw(st.integers(-5, 10_000) | st.integers(0, 2**44) | st.integers(-(2**63), 2**63))
    digits = draw(st.sampled_from([0, 0, 1, 3, 3, 6, 7]))
    text = str(whole) + (f".{draw(st.integers(0, 10**digits - 1)):0{digits}d}" if digits else "")
    if draw(st.integers(0, 9)) == 0:
        text = draw(NO_NUMBERS)
        return text, None
    value = Decimal(text)
    style = draw(st.sampled_from(["plain", "plain", "quoted", "exponent"]))
    if style == "exponent":
        text = f"{value.scaleb(-2)}e2" if "E" not in str(value.scaleb(-2)) else text
    usable = abs(value) < longest
    return (f'"{text}"' if style == "quoted" else text), (value if usable else None)


def nanoseconds(us: Decimal) -> int:
    """The nearest nanosecond, halves to the even one; digits beyond the picosecond do not count."""
    picoseconds = us.quantize(Decimal("0.000001"), ROUND_DOWN)
    return int((picoseconds * 1000).quantize(Decimal(1), ROUND_HALF_EVEN))


def names() -> SearchStrategy[Token]:
    """Names of events: texts, and what else strangers put there."""
    texts = st.text(max_size=8) | st.sampled_from(
        ["aten::mm", 'say "hi"', "back\\slash", "a\x00b", "日本", "\u202ex", "<b>"]
    )
    others = st.sampled_from(
        [("5", "5"), ("null", ""), ("[1,2]", "[1,2]"), ("1.5", "1.5"), ("true", "true")]
    )
    return texts.map(lambda text: (json.dumps(text), text)) | others


@dataclass
class SpelledEvent:
    """One entry.

    Attributes:
        text: As JSON.
        row: The columns of `events` that it means; None where it has no usable time.
        lasting: Whether its duration is one.
    """

    text: str
    row: dict[str, Any] | None
    lasting: bool


@dataclass
class SpelledFile:
    """A file and what it means.

    Attributes:
        events: Its entries.
        rows: What must stand in the trace, in its order.
    """

    events: list[SpelledEvent]
    rows: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = sorted(
            (event.row for event in self.events if event.row is not None),
            key=lambda row: (row["start_ns"], -row["duration_ns"]),
        )

    def text(self) -> str:
        """The file."""
        entries = ",\n".join(event.text for event in self.events)
        return f'{{"schemaVersion": 1, "traceEvents": [\n{entries}\n], "traceName": "t"}}'


# Keys of arguments, and the columns that they fill on events of some categories.
_ARGUMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "External id": ("external_id", HAVE_EXTERNAL_ID),
    "correlation": ("correlation", HAVE_CORRELATION),
    "Record function id": ("record_function_id", ("op", "annotation", "other")),
    "Sequence number": ("sequence", ("op", "annotation", "other")),
    "Fwd thread id": ("forward_thread", ("op", "annotation", "other")),
    "device": ("device", ON_DEVICE),
    "stream": ("stream", ON_DEVICE),
}


@st.composite
def spelled_events(draw: DrawFn) -> SpelledEvent:
    """One complete event."""
    cat = draw(st.sampled_from(sorted(CATEGORIES)))
    category = CATEGORIES[cat]
    name, shown = draw(names())
    start_text, start = draw(microseconds(LONGEST_START_US))
    duration_text, duration = draw(microseconds(LONGEST_DURATION_US))
    (pid, process), (tid, thread) = (
        draw(whole_numbers(-1, 2**31 - 1, doubles=False)),
        draw(whole_numbers(doubles=False)),
    )
    row: dict[str, Any] = {"name": shown, "category": category}
    row |= dict.fromkeys((column for column, _ in _ARGUMENTS.values()), None)
    args = []
    for key, (column, on) in _ARGUMENTS.items():
        if draw(st.booleans()):
            text, value = draw(whole_numbers(-1, 2**31 - 1) if key == "device" else whole_numbers())
            args.append(f'"{key}": {text}')
            row[column] = value if category in on else None
    if row["record_function_id"] == 0:
        row["record_function_id"] = None
    if category in ON_DEVICE:
        row |= {"process": None, "thread": None}
        row["device"] = process if row["device"] is None else row["device"]
        if row["device"] is not None and row["device"] < 0:  # how an unknown one is written
            row["device"] = None
        row["stream"] = thread if row["stream"] is None else row["stream"]
    else:
        row |= {"process": process, "thread": thread}
    entries = [
        f'"ph": "X", "cat": {json.dumps(cat)}, "name": {name}, "pid": {pid}, "tid": {tid}',
        f'"ts": {start_text}',
        f'"dur": {duration_text}',
        f'"args": {{{", ".join(args)}}}',
    ]
    text = "{" + ", ".join([entries[0], *draw(st.permutations(entries[1:]))]) + "}"
    if start is None:
        return SpelledEvent(text, None, duration is not None)
    row["start_ns"] = nanoseconds(start)
    row["duration_ns"] = (
        0 if duration is None else nanoseconds(_cut(start) + _cut(duration)) - row["start_ns"]
    )
    return SpelledEvent(text, row, duration is not None)


def _cut(us: Decimal) -> Decimal:
    return us.quantize(Decimal("0.000001"), ROUND_DOWN)


def spelled_files(most: int = 8) -> SearchStrategy[SpelledFile]:
    """Files of such events."""
    return st.lists(spelled_events(), min_size=1, max_size=most).map(SpelledFile)
