"""Algorithms of collectives as MSCCL writes them: XML with the steps of every thread block of every GPU.

A thread block (`tb`) sends to one GPU and receives from one, over a channel, one step after the other; a step may wait
for a step of another thread block of its GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from xml.parsers import expat

from traceloom.errors import InputError, unreadable
from traceloom.files import note_input, read_small
from traceloom.simulate.astra_sim.custom import Actions
from traceloom.simulate.astra_sim.nodes import RECEIVE, SEND, TIMED, Message

_MOST_BYTES = 1 << 26
_MOST = 1 << 20  # steps, chunks, GPUs
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
# What each step does: whether it receives, how often its bytes are read or written after that, whether it sends.
_STEPS = {
    "s": (False, 0, True), "r": (True, 0, False), "rrc": (True, 3, False), "rrs": (True, 3, True),
    "rrcs": (True, 3, True), "rcs": (True, 0, True), "rs": (True, 0, True), "re": (False, 3, False),
    "cpy": (False, 2, False), "nop": (False, 0, False),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Step:
    """One step: its type, its chunks, and the thread block and step of its GPU that it waits for, if any."""

    kind: str
    count: int
    awaited: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class _Block:
    """A thread block: the GPU it sends to and the one it receives from, -1 for none; its channel and steps."""

    to: int
    source: int
    channel: int
    steps: list[_Step] = field(default_factory=list)


class _AlgorithmXml:
    """What is read so far."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.head: dict[str, str] = {}
        self.chunks = self.count = 0
        self.gpus: dict[int, dict[int, _Block]] = {}
        self._gpu: dict[int, _Block] | None = None
        self._block: _Block | None = None
        self._steps = 0
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler = self.start
        self._parser.StartDoctypeDeclHandler = self.doctype

    def read(self, content: bytes) -> None:
        try:
            self._parser.Parse(content, True)
        except expat.ExpatError as error:
            raise _wrong(self.where, f"it is no XML: {error}") from error
        if not self.gpus:
            raise _wrong(self.where, "it has no GPUs")

    def doctype(self, *_: object) -> None:
        raise _wrong(
            self.where, f"line {self._parser.CurrentLineNumber}: it declares a document type, which is not read"
        )

    def number(self, values: Mapping[str, str], key: str, least: int, absent: int | None = None) -> int:
        text = values.get(key, "" if absent is None else str(absent))
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= _MOST:
            line = self._parser.CurrentLineNumber
            raise _wrong(self.where, f"line {line}: expected {key} to be a number from {least}, got {text!r:.40}")
        return number

    def start(self, name: str, values: dict[str, str]) -> None:
        line = self._parser.CurrentLineNumber
        if name == "algo" and not self.head:
            self.head = values
            self.chunks = self.number(values, "nchunksperloop", 1)
            self.count = self.number(values, "ngpus", 0, 0)
        elif name == "gpu" and self.head:
            self._gpu, self._block = {}, None
            number = self.number(values, "id", 0)
            if number in self.gpus:
                raise _wrong(self.where, f"line {line}: GPU {number} is there twice")
            self.gpus[number] = self._gpu
        elif name == "tb" and self._gpu is not None:
            to, source = (self.number(values, key, -1, -1) for key in ("send", "recv"))
            self._block = _Block(to, source, self.number(values, "chan", 0, 0))
            self._gpu[self.number(values, "id", 0)] = self._block
        elif name == "step" and self._block is not None:
            self.step(values, line)
        else:
            raise _wrong(self.where, f"line {line}: `{name}` has no meaning there")

    def step(self, values: dict[str, str], line: int) -> None:
        block, kind = self._block, values.get("type", "")
        assert block is not None
        if kind not in _STEPS:
            raise _wrong(self.where, f"line {line}: {kind!r:.40} is no type of a step: {', '.join(_STEPS)}")
        receives, _, sends = _STEPS[kind]
        if (receives and block.source < 0) or (sends and block.to < 0):
            raise _wrong(self.where, f"line {line}: a step {kind} in a thread block without a GPU to do it with")
        self._steps += 1
        if self._steps > _MOST:
            raise _wrong(self.where, f"it has more than {_MOST:,} steps")
        awaited = (self.number(values, "depid", -1, -1), self.number(values, "deps", -1, -1))
        count = self.number(values, "cnt", 1 if receives or sends else 0, 1)
        block.steps.append(_Step(kind, count, awaited if min(awaited) >= 0 else None))


@dataclass(frozen=True, eq=False, slots=True)
class Msccl:
    """An algorithm of MSCCL.

    Attributes:
        where: The file.
        kind: The collective it is for; empty where it does not say.
        chunks: Into how many the whole buffer is divided.
        gpus: The thread blocks of each GPU, by their ids.
    """

    where: str
    kind: str
    chunks: int
    gpus: Sequence[Mapping[int, _Block]]

    def actions(self, kind: str, ranks: int, size: int, memory_rate: float) -> list[Actions]:
        """What each position of a group does.

        Chunks are parts of the whole buffer: of an all_gather `size` bytes of each rank, else `size` bytes. A reduction
        reads twice and writes once, as in ASTRA-sim's own algorithms; a copy reads and writes.

        Args:
            kind: all_reduce, ...
            ranks: How many.
            size: Bytes.
            memory_rate: Bytes per second at which a rank reads or writes.

        Raises:
            InputError: `bad-algorithm`: it is for another collective, or for another number of ranks.
        """
        if self.kind not in {"", kind}:
            raise _wrong(self.where, f"it is an algorithm for {self.kind}, not for {kind}")
        if ranks != len(self.gpus):
            raise _wrong(self.where, f"it is for {len(self.gpus)} GPUs, the group has {ranks} ranks")
        whole = size * ranks if kind == "all_gather" else size
        return [self._of_gpu(gpu, whole, memory_rate) for gpu in range(ranks)]

    def _of_gpu(self, gpu: int, whole: int, memory_rate: float) -> Actions:
        """The nodes of one GPU: of each step a beginning that takes no time, and what it does one after the other.

        Nothing waits for a message that is sent: the next step begins once it is on its way.
        """
        action: list[int] = []
        duration: list[int] = []
        waits: list[int] = []
        followers: list[list[int]] = []
        messages: dict[int, Message] = {}

        def add(what: int, after: int, ns: int = 0) -> int:
            action.append(what)
            duration.append(ns)
            waits.append(0)
            followers.append([])
            if after >= 0:
                follow(after, len(action) - 1)
            return len(action) - 1

        def follow(before: int, after: int) -> None:
            followers[before].append(after)
            waits[after] += 1

        add(TIMED, -1)  # a GPU without steps is done at once
        begins: dict[tuple[int, int], int] = {}
        ends: dict[tuple[int, int], int] = {}
        for number, block in self.gpus[gpu].items():
            last = 0
            for position, step in enumerate(block.steps):
                receives, passes, sends = _STEPS[step.kind]
                size = max(step.count * whole // self.chunks, 1)
                last = begins[number, position] = add(TIMED, last)
                if receives:
                    last = add(RECEIVE, last)
                    messages[last] = Message("", size, block.source, -1 - block.channel, None, None)
                if passes:
                    last = add(TIMED, last, passes * int(size / memory_rate * 1e9))
                if sends:
                    messages[add(SEND, last)] = Message("", size, block.to, -1 - block.channel, None, None)
                ends[number, position] = last
        for number, block in self.gpus[gpu].items():
            for position, step in enumerate(block.steps):
                if step.awaited:
                    follow(ends[step.awaited], begins[number, position])
        first = [0, *accumulate(map(len, followers))]
        return Actions(action, duration, waits, first, list(chain.from_iterable(followers)), messages)


def read_msccl(path: str | Path) -> Msccl:
    """Read an algorithm.

    Raises:
        InputError: slugs `unreadable`, `bad-algorithm`: it is no algorithm, steps wait for what is not there or for
            each other, or a message is sent that nobody receives.
    """
    where = str(path)
    try:
        content = read_small(path, _MOST_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    note_input(path)
    document = _AlgorithmXml(where)
    document.read(content)
    gpus = document.gpus
    count = document.count or len(gpus)
    if set(gpus) != set(range(count)):
        raise _wrong(where, f"it has the GPUs {', '.join(map(str, sorted(gpus)[:8]))}, and says that there are {count}")
    collective = document.head.get("coll", "").lower().replace("_", "")
    if collective not in {"", "custom", *_COLLECTIVES}:
        raise _wrong(where, f"`{collective}` is no collective that can be carried out: {', '.join(_COLLECTIVES)}")
    _check_messages(where, gpus)
    for number, blocks in gpus.items():
        _check_steps(where, number, blocks)
    blocks_of = [gpus[number] for number in range(count)]
    return Msccl(where, _COLLECTIVES.get(collective, ""), document.chunks, blocks_of)


def _check_messages(where: str, gpus: Mapping[int, Mapping[int, _Block]]) -> None:
    """What each GPU sends to another over a channel is what that one receives."""
    sent: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    taken: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number, blocks in gpus.items():
        ends: set[tuple[str, int, int]] = set()
        for block in blocks.values():
            for way, peer in (("send", block.to), ("recv", block.source)):
                if peer == number or (peer >= 0 and peer not in gpus):
                    raise _wrong(where, f"GPU {number} has a thread block with {way}={peer}")
                if peer >= 0 and (way, peer, block.channel) in ends:
                    raise _wrong(where, f"GPU {number} has two thread blocks with {way}={peer} on one channel")
                ends.add((way, peer, block.channel))
            for step in block.steps:
                receives, _, sends = _STEPS[step.kind]
                if sends:
                    sent[number, block.to, block.channel].append(step.count)
                if receives:
                    taken[block.source, number, block.channel].append(step.count)
    for key in sorted({*sent, *taken}):
        if sent[key] != taken[key]:
            source, target, channel = key
            raise _wrong(
                where,
                f"GPU {source} sends {len(sent[key])} messages of {sum(sent[key])} chunks to GPU {target} on channel "
                f"{channel}, which receives {len(taken[key])} of {sum(taken[key])}, or in another order",
            )


def _check_steps(where: str, gpu: int, blocks: Mapping[int, _Block]) -> None:
    """Every step waits for one that is there, and none for itself, however far round."""
    left: dict[tuple[int, int], int] = {}
    after: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for number, block in blocks.items():
        for position, step in enumerate(block.steps):
            before = [(number, position - 1)] if position else []
            if step.awaited:
                block_there = blocks.get(step.awaited[0])
                if block_there is None or step.awaited[1] >= len(block_there.steps):
                    message = (
                        f"step {position} of thread block {number} of GPU {gpu} waits for step {step.awaited[1]} of"
                    )
                    raise _wrong(where, f"{message} thread block {step.awaited[0]}, which is not there")
                before.append(step.awaited)
            left[number, position] = len(before)
            for each in before:
                after[each].append((number, position))
    ready = [key for key, waits in left.items() if not waits]
    while ready:
        key = ready.pop()
        del left[key]
        for each in after[key]:
            left[each] -= 1
            if not left[each]:
                ready.append(each)
    if left:
        number, position = min(left)
        raise _wrong(where, f"step {position} of thread block {number} of GPU {gpu} waits in a circle")


def _wrong(where: str, message: str) -> InputError:
    return InputError(message, slug="bad-algorithm", where=where)
