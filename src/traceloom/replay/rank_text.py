"""What one rank of a plan does, as lines of a program and as Python text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import polars as pl

from traceloom.replay.expressions import CallText, UnwritableError, collective_text, dtype_text, wrapped
from traceloom.replay.plan import COLLECTIVE, ITEM_BYTES, RUN, VIEW, WAIT, RankPlan
from traceloom.replay.repeats import ProgramLine

# Shapes of their results depend on what tensors hold, which is not what they held.
_BY_CONTENT = frozenset({
    "nonzero", "masked_select", "unique_dim", "_unique", "_unique2", "unique_consecutive", "bincount",
    "repeat_interleave", "argwhere",
})  # fmt: skip
_MOST_WRITTEN = 1 << 13  # bytes of recorded integers that a script spells out
Names = Callable[[int], str]
Op = dict[str, Any]


class RankText:
    """Text of a rank's ops.

    Args:
        plan: Of the rank.
        seed: Of the contents.
        further: Namespaces of ops that are allowed besides PyTorch's own.
        alone: Whether the time of communication stands in for it.

    Attributes:
        ops: Rows of the plan.
        lines: What it does; a line's source is a row of the plan's `ops`.
        meanings: What each kind of line does: one of its ops, with the row of its collective.
    """

    def __init__(self, plan: RankPlan, seed: int, further: frozenset[str], *, alone: bool) -> None:
        self.plan = plan
        self._seed = seed
        self.ops: list[Op] = plan.ops.to_dicts()
        self._tensors = plan.tensors.to_dicts()
        self._storages = plan.storages.to_dicts()
        # Beside an accelerator the host keeps its tensors, as in the replay: counters of steps that are looked at would
        # be waited for elsewhere.
        self._keeps_host = plan.has_accelerator
        first = plan.tensors.group_by("storage", maintain_order=True).agg(pl.first("dtype"))
        self._dtypes = dict(first.iter_rows())
        self._data: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for tensor, values in plan.data.select("tensor", "values").iter_rows():
            if len(values) <= _MOST_WRITTEN:
                self._data[self._tensors[tensor]["storage"]].append((tensor, values))
        calls = plan.calls.select("schema", "arguments").iter_rows()
        self._calls: list[CallText | UnwritableError] = []
        for schema, arguments in calls:
            try:
                self._calls.append(CallText(schema, arguments, further, keeps_host=self._keeps_host))
            except UnwritableError as error:  # noqa: PERF203
                self._calls.append(error)
        self._numbers: dict[Hashable, int] = {}
        self.lines: list[ProgramLine] = []
        self.meanings: list[Op] = []
        made = {t["tensor"] for t in self._tensors if self._storages[t["storage"]]["external"]}
        collectives = plan.collectives.to_dicts()
        for op in self.ops:
            self._add_op(op, collectives, made, alone=alone)
            made.update(output for output in op["outputs"] if output is not None)
        awaited = {register for line in self.lines for register in line.reads}
        for line in [*self.lines]:
            about = self.meanings[line.what]
            if about["action"] == COLLECTIVE and line.writes and line.writes[0] not in awaited:
                self._add("wait", {**about, "action": WAIT, "op": line.source, "outputs": []}, line.writes, ())

    def _add_op(self, op: Op, collectives: Sequence[Op], made: set[int], *, alone: bool) -> None:
        """Add the lines of an op; `made` are the registers that hold something before it."""
        taken, received = op["inputs"], [output for output in op["outputs"] if output is not None]
        if op["action"] == RUN and isinstance(self._calls[op["call"]], CallText):
            present = tuple(output is not None for output in op["outputs"])
            shapes = tuple(map(self._geometry, received)) if op["name"].partition("::")[2] in _BY_CONTENT else ()
            self._add((op["call"], present, shapes), op, taken, received)
        elif op["action"] == VIEW:
            self._add(("view", self._geometry(received[0])), op, taken, received)
        elif op["action"] == COLLECTIVE and not alone:
            for register in received:
                if register not in made:  # what a functional collective receives is made by it
                    key = "empty", self._geometry(register), self._device(register)
                    self._add(key, {**op, "action": "empty", "outputs": [register]}, (), [register])
            row = collectives[op["collective"]]
            key = (row["kind"], row["group"], row["peer"], *row["splits_in"], None, *row["splits_out"], len(taken))
            handles = [len(self._tensors) + op["collective"]] if row["asynchronous"] else []
            about = {**row, **op, "outputs": handles, "sent": len(taken)}
            self._add((*key, row["asynchronous"]), about, [*taken, *received], handles)
        elif op["action"] == WAIT and not alone:
            if collectives[op["collective"]]["asynchronous"]:
                self._add("wait", op, [len(self._tensors) + op["collective"]], ())
        else:
            new = [register for register in received if register not in made]
            made_as = [(self._geometry(register), self._device(register)) for register in new]
            key = ("stand-in", op["name"], self.recorded_ns(op), *made_as)
            self._add(key, {**op, "action": "stand-in", "outputs": new}, taken, new)

    def _add(self, key: Hashable, about: Op, reads: Iterable[int], writes: Iterable[int]) -> None:
        what = self._numbers.setdefault(key, len(self._numbers))
        if what == len(self.meanings):
            self.meanings.append(about)
        self.lines.append(ProgramLine(what, tuple(reads), tuple(writes), about["op"]))

    def _geometry(self, register: int) -> tuple[Any, ...]:
        row = self._tensors[register]
        return row["dtype"], row["offset"], tuple(row["shape"]), tuple(row["strides"])

    def _device(self, register: int) -> str:
        """Where a register is, as text."""
        storage = self._storages[self._tensors[register]["storage"]]
        return "'cpu'" if self._keeps_host and storage["device"] == "cpu" else "DEVICE"

    def _like(self, register: int) -> str:
        """Shape, strides and type of a register, as arguments."""
        dtype, _, shape, strides = self._geometry(register)
        return f"{shape}, {strides}, {dtype_text(dtype)}"

    def recorded_ns(self, op: Mapping[str, Any]) -> int:
        """What an op took in the timed steps, the median; 0 where that is not known."""
        return round(median(op["durations_ns"])) if op["durations_ns"] else 0

    def gives_list(self, what: int) -> bool:
        """Whether a kind of line gives a list, whatever its length."""
        op = self.meanings[what]
        call = self._calls[op["call"]] if op["action"] == RUN else None
        return op["action"] == "stand-in" or (isinstance(call, CallText) and (call.returns_list or call.is_nested))

    def expression(self, op: Op, names: Sequence[str]) -> str:
        """What an op calls.

        Args:
            op: One of `meanings`.
            names: Of what it reads.
        """
        if op["action"] == VIEW:
            dtype, *geometry = self._geometry(op["outputs"][0])
            return f"on_storage({', '.join([names[0], dtype_text(dtype), *map(str, geometry)])})"
        if op["action"] == "empty":
            (register,) = op["outputs"]
            dtype, _, shape, strides = self._geometry(register)
            like = f"{shape}, {strides}, dtype={dtype_text(dtype)}"
            return f"torch.empty_strided({like}, device={self._device(register)})"
        if op["action"] == WAIT:
            return f"{names[0]}.wait()"
        if op["action"] == "stand-in":
            tensors = "".join(f", ({self._like(register)}, {self._device(register)})" for register in op["outputs"])
            return f"stand_in({self.recorded_ns(op)}{tensors})"
        if op["action"] == COLLECTIVE:
            return collective_text(op, names[: op["sent"]], names[op["sent"] :])
        call = self._calls[op["call"]]
        assert isinstance(call, CallText)
        text = call.write(names)
        if op["name"].partition("::")[2] in _BY_CONTENT and len(op["outputs"]) == 1 and op["outputs"][0] is not None:
            return f"as_recorded({text}, {self._like(op['outputs'][0])})"
        return f"flat({text})" if call.is_nested and any(output is not None for output in op["outputs"]) else text

    def external(self, registers: Iterable[int], name: Names) -> Iterator[str]:
        """The lines that make tensors that come from outside, each storage once.

        Args:
            registers: Rows of the plan's `tensors`.
            name: What each is called.
        """
        on: dict[int, str] = {}  # storage -> a tensor on it
        for register in registers:
            dtype, offset, shape, strides = self._geometry(register)
            number = self._tensors[register]["storage"]
            if number not in on:
                storage = self._storages[number]
                whole = self._dtypes[number]
                elements = -(-storage["bytes"] // ITEM_BYTES[whole])
                content = {None: "floats", "data": "integers"}.get(storage["content"], storage["content"])
                bounds = "".join(f", {side}={storage[side]}" for side in ("low", "high") if storage[side] is not None)
                seed = self._seed + number
                base = f"filled({elements}, {dtype_text(whole)}, {content!r}{bounds}, seed={seed})"
                if self._device(register) == "DEVICE":
                    base += ".to(DEVICE)"
                if number not in self._data and (dtype, offset) == (whole, 0) and _is_whole(shape, strides, elements):
                    on[number] = name(register)
                    yield f"{name(register)} = {base}" + (f".view({shape})" if len(shape) != 1 else "")
                    continue
                on[number] = "whole"
                yield f"whole = {base}"
                for held, values in self._data.get(number, ()):
                    of, *geometry = self._geometry(held)
                    numbers = np.frombuffer(values, dtype=np.dtype(of).newbyteorder("<")).tolist()
                    part = f"on_storage(whole, {dtype_text(of)}, {', '.join(map(str, geometry))})"
                    yield f"{part}.copy_(torch.tensor({numbers}, dtype={dtype_text(of)}).view({geometry[1]}))"
            yield f"{name(register)} = on_storage({on[number]}, {dtype_text(dtype)}, {offset}, {shape}, {strides})"
            on[number] = name(register)

    def case(self, number: int, op: Op, about: str) -> str | None:
        """An op alone as a function that makes its inputs and gives what calls it; None where no text can.

        Args:
            number: Of the function.
            op: A row of the plan's `ops`.
            about: Its docstring.
        """
        if not isinstance(self._calls[op["call"]], CallText):
            return None
        names = {register: f"t{k}" for k, register in enumerate(dict.fromkeys(op["inputs"]))}
        call = self.expression({**op, "outputs": []}, [names[register] for register in op["inputs"]])
        lines = [*self.external(names, names.__getitem__), f"return lambda: {call}"]
        return function(f"case_{number}", "", "Callable[[], Any]", about, lines)


def _is_whole(shape: Sequence[int], strides: Sequence[int], elements: int) -> bool:
    """Whether a tensor is all of its storage, in its order."""
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return expected == elements


def function(name: str, parameters: str, returns: str, about: str, lines: Iterable[str]) -> str:
    """A function as text.

    Args:
        name: Its name.
        parameters: As they stand in brackets.
        returns: The type of what it gives; empty: not said.
        about: Its docstring, any text.
        lines: What it does; each is broken where it is too long.
    """
    doc = ascii(about.replace("µ", "u"))[1:-1].replace('"', r"\"")
    body = [f'"""{doc}"""', *(part for line in lines for part in wrapped(line))]
    return "\n".join(
        [
            *wrapped(f"def {name}({parameters})" + (f" -> {returns}:" if returns else ":")),
            *(f"    {line}" for line in body),
        ]
    )
