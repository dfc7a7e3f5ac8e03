"""Writing the plan of a rank as Python text.

A trace determines what the text calls, and its recipients will run the text. So anything that is
not a plain operator name, and anything that `traceloom.workload.replay.schema` refuses, is never
written as code.
"""

from __future__ import annotations

import json
import keyword
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import polars as pl

from traceloom.system import units
from traceloom.workload.replay.binding import find_replacement
from traceloom.workload.replay.folding import FoldedProgram, ProgramLine, find_repeats
from traceloom.workload.replay.plan import (
    COLLECTIVE,
    ITEM_BYTES,
    RUN,
    VIEW,
    WAIT,
    RankPlan,
    RankReplayResult,
)
from traceloom.workload.replay.schema import (
    NEVER_GIVEN,
    OperatorSchema,
    UnreadableSchemaError,
    ValueType,
    find_refusal,
    parse_schema,
)

WIDTH = 110
_PIECE = re.compile(r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,'"])+(?:, ?|$)|, ?""")
_TORCH_CONSTANTS = {
    "dtype": frozenset(ITEM_BYTES),
    "layout": frozenset(
        {
            "strided",
            "sparse_coo",
            "sparse_csr",
            "sparse_csc",
            "sparse_bsr",
            "sparse_bsc",
            "_mkldnn",
            "jagged",
        }
    ),
    "memory_format": frozenset(
        {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}
    ),
}


class UnwritableError(ValueError):
    """An op that cannot be written as text, and why."""


class CallText:
    """A call of the plan, parsed once, written with the names of its inputs.

    Args:
        schema: As recorded.
        arguments: JSON, as `traceloom.workload.replay.plan` describes it.
        extra_namespaces: Allowed namespaces in addition to PyTorch's own.
        keeps_host: Whether tensors recorded on the CPU stay there.

    Raises:
        UnwritableError: The op is refused, or one of its arguments cannot be written.
    """

    def __init__(
        self,
        schema: str,
        arguments: str,
        extra_namespaces: frozenset[str] = frozenset(),
        *,
        keeps_host: bool = False,
    ) -> None:
        try:
            self.schema = parse_schema(schema)
        except UnreadableSchemaError as error:
            raise UnwritableError(str(error)) from None
        self.function = _format_op_path(self.schema, extra_namespaces)
        self._keeps_host = keeps_host
        self._values = json.loads(arguments)
        self.write([f"t{k}" for k in range(_count_inputs(self._values))])

    @property
    def returns_list(self) -> bool:
        return [value.type.base for value in self.schema.returns] == ["list"]

    @property
    def is_nested(self) -> bool:
        """Whether it returns lists besides other values."""
        return len(self.schema.returns) > 1 and any(
            value.type.base == "list" for value in self.schema.returns
        )

    def write(self, names: Sequence[str]) -> str:
        """Returns the call; arguments equal to the schema's defaults are omitted.

        Args:
            names: Names of the inputs.
        """
        positional: list[str] = []
        keywords: list[str] = []
        retained_count = 0
        for argument, value in zip(self.schema.arguments, self._values, strict=False):
            is_default = argument.has_default and (
                argument.name in NEVER_GIVEN or _is_same(value, argument.default)
            )
            if self._keeps_host and value == {"device": "cpu"}:
                value = "cpu"  # noqa: PLW2901  (as torch accepts it)
            if argument.keyword_only:
                if not is_default:
                    keywords.append(
                        f"{_check_identifier(argument.name)}={_format_literal(value, argument.type, names)}"
                    )
            else:
                positional.append(_format_literal(value, argument.type, names))
                retained_count = retained_count if is_default else len(positional)
        return f"{self.function}({', '.join([*positional[:retained_count], *keywords])})"


def _format_op_path(schema: OperatorSchema, extra_namespaces: frozenset[str]) -> str:
    """Returns the operator in `torch.ops`."""
    if refusal := find_refusal(schema, extra_namespaces):
        raise UnwritableError(refusal)
    # A script can pass a storage, and specifies its device itself.
    replacement = None if schema.name == "set_" else find_replacement(schema.qualified, "")
    namespace, _, name = (schema.qualified if replacement is None else replacement.name).partition(
        "::"
    )
    name, _, overload = name.partition(".")
    path = "aten" if namespace == "aten" else f"torch.ops.{_check_identifier(namespace)}"
    for part in (name, overload or "default"):
        word = _check_identifier(part)
        path = f"getattr({path}, {word!r})" if keyword.iskeyword(word) else f"{path}.{word}"
    return path


def _check_identifier(word: str) -> str:
    if not (word.isascii() and word.isidentifier()):
        raise UnwritableError(f"{word!r} is no name that Python can call")
    return word


def _count_inputs(value: Any) -> int:
    if isinstance(value, list):
        return max(map(_count_inputs, value), default=0)
    if isinstance(value, dict):
        return 1 + max(
            (n for key in ("tensor", "storage") if isinstance(n := value.get(key), int)), default=-1
        )
    return 0


def _is_same(value: Any, default: Any) -> bool:
    if isinstance(value, list) and isinstance(default, list):
        return len(value) == len(default) and all(map(_is_same, value, default))
    return type(value) is type(default) and value == default


def _format_literal(value: Any, value_type: ValueType, names: Sequence[str]) -> str:
    if isinstance(value, list):
        inner = value_type.inner[0] if value_type.base == "list" else value_type
        return f"[{', '.join(_format_literal(part, inner, names) for part in value)}]"
    if not isinstance(value, dict):
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        return ascii(value)
    ((kind, content),) = value.items()
    if kind in {"tensor", "storage"}:
        return names[content] + (".untyped_storage()" if kind == "storage" else "")
    if kind in _TORCH_CONSTANTS and content in _TORCH_CONSTANTS[kind]:
        return f"torch.{content}"
    if kind == "device":
        return "DEVICE"
    if kind == "generator":
        return "None"
    if kind == "float" and content in {"inf", "-inf", "nan"}:
        return f"float({content!r})"
    if kind == "complex":
        return f"complex({str(complex(*map(float, content)))!r})"
    raise UnwritableError(f"an argument cannot be sent: {ascii(content)[:80]}")


def format_dtype(name: str) -> str:
    """Returns a type as `torch.float32`."""
    if name not in ITEM_BYTES:
        raise UnwritableError(f"{name!r} is no type of PyTorch's")
    return f"torch.{name}"


def format_collective(row: Mapping[str, Any], sent: Sequence[str], received: Sequence[str]) -> str:
    """Returns a collective over torch.distributed; for several tensors, several of them as
    `PendingWorks`.

    Args:
        row: Row of the plan's `collectives`.
        sent: Names of its input tensors.
        received: Names of its output tensors.
    """
    kind, group = row["kind"], f"group=group[{row['group']!a}]"
    extra_arguments = [group, *(["async_op=True"] if row["asynchronous"] else [])]
    peer = str(row["peer"] or 0)
    calls: list[tuple[str, Sequence[str]]]
    if kind in {"send", "recv"}:
        function = ("i" if row["asynchronous"] else "") + kind
        tag = [f"tag={row['tag']}"] if row["tag"] else []
        calls = [
            (function, [tensor, peer, group, *tag])
            for tensor in (sent if kind == "send" else received)
        ]
    elif kind in {"all_reduce", "broadcast", "reduce"}:
        root = [] if kind == "all_reduce" else [peer]
        calls = [(kind, [tensor, *root, *extra_arguments]) for tensor in received or sent]
    elif kind in {"gather", "scatter"}:
        root_tensors, parts = (sent, received) if kind == "gather" else (received, sent)
        all_parts = (
            f"list({parts[0]}.chunk(WORLD))"
            if len(parts) == 1
            else _format_list(parts)
            if parts
            else "None"
        )
        calls = [(kind, [root_tensors[0], all_parts, peer, *extra_arguments])]
    elif kind == "all_to_all" and len(sent) > 1:
        calls = [(kind, [_format_list(received), _format_list(sent), *extra_arguments])]
    elif kind == "all_to_all":
        splits = [str(list(row[side]) or None) for side in ("splits_out", "splits_in")]
        calls = [("all_to_all_single", [received[0], sent[0], *splits, *extra_arguments])]
    elif kind == "all_gather" and len(sent) == len(received):
        calls = [
            ("all_gather_into_tensor", [r, g, *extra_arguments])
            for g, r in zip(sent, received, strict=True)
        ]
    elif kind == "all_gather":
        calls = [(kind, [_format_list(received), sent[0], *extra_arguments])]
    elif kind == "reduce_scatter" and len(sent) == len(received):
        calls = [
            ("reduce_scatter_tensor", [r, g, *extra_arguments])
            for g, r in zip(sent, received, strict=True)
        ]
    elif kind == "reduce_scatter":
        calls = [(kind, [received[0], _format_list(sent), *extra_arguments])]
    else:
        calls = [("barrier", extra_arguments)]
    texts = [f"dist.{function}({', '.join(arguments)})" for function, arguments in calls]
    return texts[0] if len(texts) == 1 else f"PendingWorks({_format_list(texts)})"


def _format_list(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]"


def wrap_line(line: str) -> Iterator[str]:
    """Yields a line of code split over as many lines as needed, broken after commas in brackets.

    A comment stays one line.
    """
    if line.startswith("#"):
        yield line
        return
    current = ""
    for token in _PIECE.findall(line):
        if current.strip() and len(current) + len(token.rstrip()) > WIDTH:
            yield current.rstrip()
            current = "        " + token.lstrip()
        else:
            current += token
    yield current


# The shapes of their results depend on contents, which differ from the recorded ones.
_BY_CONTENT = frozenset(
    {
        "nonzero",
        "masked_select",
        "unique_dim",
        "_unique",
        "_unique2",
        "unique_consecutive",
        "bincount",
        "repeat_interleave",
        "argwhere",
    }
)
_MAX_INLINE_BYTES = 1 << 13  # max bytes of recorded integers written into a script
Names = Callable[[int], str]
Op = dict[str, Any]


class RankScript:
    """The ops of a rank as text.

    Args:
        plan: Plan of the rank.
        seed: Random seed of the contents.
        extra_namespaces: Allowed namespaces of ops in addition to PyTorch's own.
        alone: Whether communication is replaced by its recorded time.
        tried: A replay of it, from which it is known which ops fail.

    Attributes:
        ops: Rows of the plan.
        lines: The program; a line's source is a row of the plan's `ops`.
        meanings: Operation of each kind of line: one of its ops, with the row of its collective.
    """

    def __init__(
        self,
        plan: RankPlan,
        seed: int,
        extra_namespaces: frozenset[str],
        *,
        alone: bool,
        tried: RankReplayResult | None = None,
    ) -> None:
        self.plan = plan
        self._failed = frozenset(() if tried is None else tried.failures["op"])
        self._changed = frozenset(() if tried is None else tried.replaced["op"])
        self._seed = seed
        self.ops: list[Op] = plan.ops.to_dicts()
        self._tensors = plan.tensors.to_dicts()
        self._storages = plan.storages.to_dicts()
        # With an accelerator, CPU tensors stay on the CPU, as in the replay: reading step counters
        # elsewhere would synchronize.
        self._keeps_host = plan.has_accelerator
        first = plan.tensors.group_by("storage", maintain_order=True).agg(pl.first("dtype"))
        self._dtypes = dict(first.iter_rows())
        self._data: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for tensor, values in plan.data.select("tensor", "values").iter_rows():
            if len(values) <= _MAX_INLINE_BYTES:
                self._data[self._tensors[tensor]["storage"]].append((tensor, values))
        calls = plan.calls.select("schema", "arguments").iter_rows()
        self._calls: list[CallText | UnwritableError] = []
        for schema, arguments in calls:
            try:
                self._calls.append(
                    CallText(schema, arguments, extra_namespaces, keeps_host=self._keeps_host)
                )
            except UnwritableError as error:  # noqa: PERF203
                self._calls.append(error)
        self._numbers: dict[Hashable, int] = {}
        self.lines: list[ProgramLine] = []
        self.meanings: list[Op] = []
        created = {t["tensor"] for t in self._tensors if self._storages[t["storage"]]["external"]}
        collectives = plan.collectives.to_dicts()
        for op in self.ops:
            self._add_op(op, collectives, created, alone=alone)
            created.update(output for output in op["outputs"] if output is not None)
        awaited = {register for line in self.lines for register in line.reads}
        for line in [*self.lines]:
            meaning = self.meanings[line.what]
            if meaning["action"] == COLLECTIVE and line.writes and line.writes[0] not in awaited:
                self._add(
                    "wait",
                    {**meaning, "action": WAIT, "op": line.source, "outputs": []},
                    line.writes,
                    (),
                )

    def _add_op(self, op: Op, collectives: Sequence[Op], created: set[int], *, alone: bool) -> None:
        """Adds the lines of an op; `created` are the registers that are set before it."""
        consumed, received = (
            op["inputs"],
            [output for output in op["outputs"] if output is not None],
        )
        if (
            op["action"] == RUN
            and op["op"] not in self._failed
            and isinstance(self._calls[op["call"]], CallText)
        ):
            present = tuple(output is not None for output in op["outputs"])
            shapes = tuple(map(self._geometry, received)) if self._depends_on_content(op) else ()
            self._add((op["call"], present, shapes), op, consumed, received)
        elif op["action"] == VIEW:
            self._add(("view", self._geometry(received[0])), op, consumed, received)
        elif op["action"] == COLLECTIVE and not alone:
            for register in received:
                if register not in created:  # a functional collective creates its outputs
                    key = "empty", self._geometry(register), self._device(register)
                    self._add(key, {**op, "action": "empty", "outputs": [register]}, (), [register])
            row = collectives[op["collective"]]
            key = (
                row["kind"],
                row["group"],
                row["peer"],
                row["tag"],
                *row["splits_in"],
                None,
                *row["splits_out"],
                len(consumed),
            )
            handles = [len(self._tensors) + op["collective"]] if row["asynchronous"] else []
            self._add(
                (*key, row["asynchronous"]),
                {**row, **op, "outputs": handles, "sent": len(consumed)},
                [*consumed, *received],
                handles,
            )
        elif op["action"] == WAIT and not alone:
            if collectives[op["collective"]]["asynchronous"]:
                self._add("wait", op, [len(self._tensors) + op["collective"]], ())
        else:
            new = [register for register in received if register not in created]
            made_as = [(self._geometry(register), self._device(register)) for register in new]
            key = ("stand-in", op["name"], self.recorded_ns(op), *made_as)
            self._add(key, {**op, "action": "stand-in", "outputs": new}, consumed, new)

    def _depends_on_content(self, op: Op) -> bool:
        return op["op"] in self._changed or op["name"].partition("::")[2] in _BY_CONTENT

    def _add(self, key: Hashable, meaning: Op, reads: Iterable[int], writes: Iterable[int]) -> None:
        kind_number = self._numbers.setdefault(key, len(self._numbers))
        if kind_number == len(self.meanings):
            self.meanings.append(meaning)
        self.lines.append(ProgramLine(kind_number, tuple(reads), tuple(writes), meaning["op"]))

    def _geometry(self, register: int) -> tuple[Any, ...]:
        row = self._tensors[register]
        return row["dtype"], row["offset"], tuple(row["shape"]), tuple(row["strides"])

    def _device(self, register: int) -> str:
        storage = self._storages[self._tensors[register]["storage"]]
        return "'cpu'" if self._keeps_host and storage["device"] == "cpu" else "DEVICE"

    def _like(self, register: int) -> str:
        dtype, _, shape, strides = self._geometry(register)
        return f"{shape}, {strides}, {format_dtype(dtype)}"

    def recorded_ns(self, op: Mapping[str, Any]) -> int:
        """Returns the median recorded duration of an op; 0 if unknown."""
        return round(median(op["durations_ns"])) if op["durations_ns"] else 0

    def gives_list(self, kind_number: int) -> bool:
        """Returns whether a kind of line returns a list, whatever its length."""
        op = self.meanings[kind_number]
        call = self._calls[op["call"]] if op["action"] == RUN else None
        return op["action"] == "stand-in" or (
            isinstance(call, CallText)
            and (call.returns_list or call.is_nested or op["op"] in self._changed)
        )

    def expression(self, op: Op, names: Sequence[str]) -> str:
        """Returns the call of an op.

        Args:
            op: One of `meanings`.
            names: Names of its inputs.
        """
        if op["action"] == VIEW:
            dtype, *geometry = self._geometry(op["outputs"][0])
            return f"create_storage_view({', '.join([names[0], format_dtype(dtype), *map(str, geometry)])})"
        if op["action"] == "empty":
            (register,) = op["outputs"]
            dtype, _, shape, strides = self._geometry(register)
            geometry_text = f"{shape}, {strides}, dtype={format_dtype(dtype)}"
            return f"torch.empty_strided({geometry_text}, device={self._device(register)})"
        if op["action"] == WAIT:
            return f"{names[0]}.wait()"
        if op["action"] == "stand-in":
            tensors = "".join(
                f", ({self._like(register)}, {self._device(register)})"
                for register in op["outputs"]
            )
            return f"run_stand_in({self.recorded_ns(op)}{tensors})"
        if op["action"] == COLLECTIVE:
            return format_collective(op, names[: op["sent"]], names[op["sent"] :])
        call = self._calls[op["call"]]
        assert isinstance(call, CallText)
        text = call.write(names)
        if op["op"] in self._changed:
            likes = [
                "None" if output is None else f"({self._like(output)})" for output in op["outputs"]
            ]
            return f"ensure_recorded_shapes({', '.join([text, *likes])})"
        if (
            self._depends_on_content(op)
            and len(op["outputs"]) == 1
            and op["outputs"][0] is not None
        ):
            return f"ensure_recorded_shape({text}, {self._like(op['outputs'][0])})"
        return (
            f"flatten_values({text})"
            if call.is_nested and any(output is not None for output in op["outputs"])
            else text
        )

    def external(self, registers: Iterable[int], name: Names) -> Iterator[str]:
        """Yields the lines that create external tensors, each storage once.

        Args:
            registers: Rows of the plan's `tensors`.
            name: Returns the name of each.
        """
        on: dict[int, str] = {}  # storage -> a tensor on it
        for register in registers:
            dtype, offset, shape, strides = self._geometry(register)
            number = self._tensors[register]["storage"]
            if number not in on:
                storage = self._storages[number]
                storage_dtype = self._dtypes[number]
                elements = -(-storage["bytes"] // ITEM_BYTES[storage_dtype])
                content = {None: "floats", "data": "integers"}.get(
                    storage["content"], storage["content"]
                )
                bounds = "".join(
                    f", {side}={storage[side]}"
                    for side in ("low", "high")
                    if storage[side] is not None
                )
                seed = self._seed + number
                base = f"generate_content({elements}, {format_dtype(storage_dtype)}, {content!r}{bounds}, seed={seed})"
                if self._device(register) == "DEVICE":
                    base += ".to(DEVICE)"
                if (
                    number not in self._data
                    and (dtype, offset) == (storage_dtype, 0)
                    and _is_whole(shape, strides, elements)
                ):
                    on[number] = name(register)
                    yield f"{name(register)} = {base}" + (
                        f".view({shape})" if len(shape) != 1 else ""
                    )
                    continue
                on[number] = "whole"
                yield f"whole = {base}"
                for data_register, values in self._data.get(number, ()):
                    data_dtype, *geometry = self._geometry(data_register)
                    numbers = np.frombuffer(
                        values, dtype=np.dtype(data_dtype).newbyteorder("<")
                    ).tolist()
                    part = f"create_storage_view(whole, {format_dtype(data_dtype)}, {', '.join(map(str, geometry))})"
                    yield f"{part}.copy_(torch.tensor({numbers}, dtype={format_dtype(data_dtype)}).view({geometry[1]}))"
            yield f"{name(register)} = create_storage_view({on[number]}, {format_dtype(dtype)}, {offset}, {shape}, {strides})"
            on[number] = name(register)

    def case(self, number: int, op: Op, description: str) -> str | None:
        """Returns a function that creates the inputs of a single op and returns a call of it; None
        if it cannot be written.

        Args:
            number: Number of the function.
            op: A row of the plan's `ops`.
            description: Its docstring.
        """
        if not isinstance(self._calls[op["call"]], CallText):
            return None
        names = {register: f"t{k}" for k, register in enumerate(dict.fromkeys(op["inputs"]))}
        call = self.expression(
            {**op, "outputs": []}, [names[register] for register in op["inputs"]]
        )
        return format_function(
            f"case_{number}",
            "",
            "Callable[[], Any]",
            description,
            [*self.external(names, names.__getitem__), f"return lambda: {call}"],
        )


def _is_whole(shape: Sequence[int], strides: Sequence[int], elements: int) -> bool:
    """Returns whether a tensor covers its whole storage, in order."""
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return expected == elements


def format_function(
    name: str, parameters: str, returns: str, description: str, lines: Iterable[str]
) -> str:
    """Returns a function as text.

    Args:
        name: Its name.
        parameters: The text in its parentheses.
        returns: The return type; empty for none.
        description: Its docstring, any text.
        lines: Its body; long lines are wrapped.
    """
    doc = ascii(description.replace("µ", "u"))[1:-1].replace('"', r"\"")
    body = [f'"""{doc}"""', *(part for line in lines for part in wrap_line(line))]
    return "\n".join(
        [
            *wrap_line(f"def {name}({parameters})" + (f" -> {returns}:" if returns else ":")),
            *(f"    {line}" for line in body),
        ]
    )


class Functions:
    """The functions of one rank.

    Args:
        text: The ops of the rank.

    Attributes:
        folded: Its blocks.
    """

    def __init__(self, text: RankScript) -> None:
        self._text = text
        regions = [(op["phase"], op["scope"]) for op in text.ops]
        starts = frozenset(k for k in range(1, len(regions)) if regions[k] != regions[k - 1])
        self.folded: FoldedProgram = find_repeats(text.lines, starts)
        self._order = self.folded.outermost_first()
        bodies = self.folded.bodies
        self._last: list[dict[int, int]] = [{} for _ in bodies]  # register -> line of its last use
        for body, last in zip(bodies, self._last, strict=True):
            for position, line in enumerate(body):
                last.update(dict.fromkeys([*line.reads, *line.writes], position))
        needed: list[set[int]] = [
            set() for _ in bodies
        ]  # its own registers that are used after the body
        for number in self._order:
            for position, line in enumerate(bodies[number]):
                if line.what < 0:
                    used = (
                        self._last[number][r] > position or r in needed[number] for r in line.writes
                    )
                    first = self.folded.parameters[-1 - line.what]
                    needed[-1 - line.what].update(
                        first + k for k, is_used in enumerate(used) if is_used
                    )
        self._returned = [sorted(registers) for registers in needed]
        self._handles: list[set[int]] = [
            set() for _ in bodies
        ]  # registers with the handle of a started collective
        for number in reversed(self._order):
            for line in bodies[number]:
                if line.what < 0:
                    block, first = -1 - line.what, self.folded.parameters[-1 - line.what]
                    self._handles[number].update(
                        {r for k, r in enumerate(line.writes) if first + k in self._handles[block]}
                    )
                elif text.meanings[line.what]["action"] == COLLECTIVE:
                    self._handles[number].update(line.writes)
        external_names: dict[int, str] = {}
        created: set[int] = set()
        for line in bodies[0]:
            for register in line.reads:
                if register not in created and register not in external_names:
                    external_names[register] = f"w[{len(external_names)}]"
            created.update(line.writes)
        self._outside = external_names
        # Per block: parameters for which all calls pass the same external tensor, such as weights,
        # with its name; these are not passed.
        self._same: list[dict[int, str]] = [dict(external_names), *({} for _ in bodies[1:])]
        seen_blocks: set[int] = set()
        for number in self._order:
            same = self._same[number]
            for line in bodies[number]:
                if line.what < 0:
                    block = -1 - line.what
                    names = {k: same[r] for k, r in enumerate(line.reads) if r in same}
                    self._same[block] = (
                        names
                        if block not in seen_blocks
                        else dict(self._same[block].items() & names.items())
                    )
                    seen_blocks.add(block)
        self._takes_w = [bool(names) for names in self._same]
        for number in reversed(self._order):
            inner = [self._takes_w[-1 - line.what] for line in bodies[number] if line.what < 0]
            self._takes_w[number] |= any(inner)

    def write(self, suffix: str = "") -> str:
        """Returns all functions, callees first.

        Args:
            suffix: Suffix of their names, if a file has those of several ranks.
        """
        self._names = {
            body: f"block_{number}{suffix}"
            for number, body in enumerate((body for body in reversed(self._order) if body), start=1)
        }
        external_lines = [
            *self._text.external(self._outside, self._outside.__getitem__),
            "return w",
        ]
        description = "What comes from outside: parameters, inputs, states."
        external_function = format_function(
            f"outside{suffix}",
            "",
            "dict[int, torch.Tensor]",
            description,
            ["w = {}", *external_lines],
        )
        blocks = []
        for body, called in self._names.items():
            first_ns = sum(map(self._time_ns, self.folded.bodies[body]))
            took = f"; the first took {units.format_duration(first_ns)}" if first_ns else ""
            name = self._namer(body)
            parameter_names = [
                name(k) for k in range(self.folded.parameters[body]) if k not in self._same[body]
            ]
            parameters = ", ".join(["w"] * self._takes_w[body] + parameter_names)
            lines = [*self._lines(body)]
            if self._returned[body]:
                lines.append(
                    f"return {_format_names([name(register) for register in self._returned[body]])}"
                )
            description = f"Called {self.folded.calls()[body]} times{took}."
            blocks.append(format_function(called, parameters, "", description, lines))
        lines = [*self._lines(0)] or ["pass"]
        description = "All that was recorded, in order."
        step = format_function(
            f"step{suffix}", "w: dict[int, torch.Tensor]", "None", description, lines
        )
        return "\n\n\n".join([external_function, *blocks, step])

    def _time_ns(self, line: ProgramLine) -> int:
        if line.what < 0:
            return sum(map(self._time_ns, self.folded.bodies[-1 - line.what]))
        return self._text.recorded_ns(self._text.ops[line.source])

    def _namer(self, body: int) -> Names:
        """Returns the naming of a body's registers: `w[0]` from outside, `p0` parameters, `t0`
        results, `h0` pending handles.
        """
        counts: Counter[str] = Counter()
        names = dict(self._same[body])
        for register in range(self.folded.parameters[body]):
            if register not in names:
                names[register] = f"p{counts['p']}"
                counts["p"] += 1
        for line in self.folded.bodies[body]:
            for register in line.writes:
                if register not in names:
                    letter = "h" if register in self._handles[body] else "t"
                    names[register] = f"{letter}{counts[letter]}"
                    counts[letter] += 1
        return names.__getitem__

    def _lines(self, body: int) -> Iterator[str]:
        name = self._namer(body)
        retained = {
            *self._returned[body],
            *(self._outside if body == 0 else range(self.folded.parameters[body])),
        }
        region: tuple[str | None, str] = (None, "")
        for position, line in enumerate(self.folded.bodies[body]):
            op = self._text.ops[line.source]
            if region != (region := (op["phase"], op["scope"])) and any(region):
                yield "# " + ": ".join(ascii(part)[1:-1] for part in region if part)
            dead = {
                r
                for r in (*line.reads, *line.writes)
                if self._last[body][r] == position and r not in retained
            }
            result_registers: list[
                int | None
            ]  # registers of the line's results; None for unused ones
            if line.what < 0:
                block, first = -1 - line.what, self.folded.parameters[-1 - line.what]
                result_registers = [
                    line.writes[register - first] for register in self._returned[block]
                ]
                passed = [name(r) for k, r in enumerate(line.reads) if k not in self._same[block]]
                call = f"{self._names[block]}({', '.join(['w'] * self._takes_w[block] + passed)})"
            else:
                meaning, written_registers = self._text.meanings[line.what], iter(line.writes)
                result_registers = [
                    None if output is None else next(written_registers)
                    for output in meaning["outputs"]
                ]
                call = self._text.expression(meaning, [name(r) for r in line.reads])
            targets = [
                "_" if r is None or r in line.reads or r in dead else name(r)
                for r in result_registers
            ]
            ended = [name(r) for r in dict.fromkeys(line.reads) if r in dead]
            if any(target != "_" for target in targets):
                is_list = line.what >= 0 and self._text.gives_list(line.what)
                yield f"{_format_names(targets, single=not is_list)} = {call}"
                ended += ["_"] * ("_" in targets)
            else:
                yield call
            if ended:
                yield f"del {_format_names(ended)}"


def _format_names(names: list[str], *, single: bool = True) -> str:
    """Joins names in brackets, so that the line can be wrapped; a single one is unchanged unless it
    is an item of a list.
    """
    return (
        names[0] if single and len(names) == 1 else f"({', '.join(names)}{',' * (len(names) == 1)})"
    )
