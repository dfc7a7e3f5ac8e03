"""Running a made job: events in the order of time, threads and streams as processes that wait for each other."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from support.jobs import program as do


@dataclass(frozen=True, slots=True)
class Change:
    """What is different in a run.

    Attributes:
        kernels: Factor on GPU work but communication.
        host: Factor on host work: ops, think time, what calls take themselves.
        collectives: Factor on the transfers of communication.
        without: Labels of work that is not done, of synchronisations that do not wait, and of faults that are not.
    """

    kernels: float = 1.0
    host: float = 1.0
    collectives: float = 1.0
    without: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, in ns of the job's true clock; a thread's or a stream's."""

    rank: int
    kind: str  # op, annotation, python, call, kernel, copy, fill
    name: str
    start: int
    end: int
    thread: int | None = None
    stream: int | None = None
    correlation: int | None = None
    args: dict[str, Any] = field(default_factory=dict)


class Signal:
    """Something that happens once; processes wait for it."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.waiting: list[Process] = []


CALLS = {
    "kernel": "cudaLaunchKernel",
    "copy": "cudaMemcpyAsync",
    "fill": "cudaMemsetAsync",
    "graph": "cudaGraphLaunch",
}

# A process yields nanoseconds to wait, or a signal.
Process = Generator[int | Signal, None, None]


class Engine:
    """Time, and the processes that wait for a moment of it."""

    def __init__(self) -> None:
        self.now = 0
        self._due: list[tuple[int, int, Process]] = []
        self._count = 0

    def start(self, process: Process, after: int = 0) -> None:
        """Let a process go on after a while."""
        self._count += 1
        heapq.heappush(self._due, (self.now + after, self._count, process))

    def fire(self, signal: Signal) -> None:
        """Something has happened: who waits for it goes on."""
        signal.at = self.now
        for process in signal.waiting:
            self.start(process)
        signal.waiting.clear()

    def run(self) -> None:
        """Until nothing is due."""
        while self._due:
            self.now, _, process = heapq.heappop(self._due)
            awaited = next(process, None)
            if isinstance(awaited, Signal):
                if awaited.at is None:
                    awaited.waiting.append(process)
                else:
                    self.start(process)
            elif awaited is not None:
                self.start(process, awaited)


@dataclass(slots=True)
class _Item:
    """Work in a stream; a record, or a wait, where it has a signal and no work."""

    submit: do.Submit | None = None
    ready: int = 0
    correlation: int = 0
    done: Signal = field(default_factory=Signal)
    waits: Signal | None = None
    delay: int = 0


class _Stream:
    def __init__(self, number: int) -> None:
        self.number = number
        self.items: deque[_Item] = deque()
        self.arrived = Signal()
        self.free_at = 0  # when the work before is done
        self.early_at = 0  # when the work before lets a programmatic kernel go
        self.held = 0  # until when a wait for an event holds back
        self.pending: deque[_Item] = deque()  # submitted and not done
        self.last = Signal()
        self.last.at = -(1 << 40)  # nothing was ever submitted


@dataclass(slots=True)
class _Gathering:
    come: int = 0
    all_here: Signal = field(default_factory=Signal)


class Simulation:
    """One run of a job.

    Args:
        ranks: The processes of the job.
        change: What is different.

    Attributes:
        spans: What happened, in the order in which it ended.
    """

    def __init__(self, ranks: list[do.Rank], change: Change) -> None:
        self.engine = Engine()
        self.change = change
        self.spans: list[Span] = []
        self._meetings: dict[tuple[str, int], _Gathering] = {}
        self._unfinished = 0
        for rank in ranks:
            process = _Rank(self, rank)
            for number, thread in enumerate(rank.threads):
                self._unfinished += 1
                self.engine.start(self._whole(process.thread(number, thread)))

    def _whole(self, process: Process) -> Process:
        yield from process
        self._unfinished -= 1

    def run(self) -> None:
        """Let the job run to its end.

        Raises:
            ValueError: Threads wait for what never comes.
        """
        self.engine.run()
        if self._unfinished:
            raise ValueError(
                f"{self._unfinished} threads of the made job wait for what never comes: every `Await` needs a `Post`, "
                "and every collective all its members"
            )

    def meeting(self, meeting: do.Meeting) -> _Gathering:
        """Where the parts of a communication meet."""
        return self._meetings.setdefault(meeting.key, _Gathering())


class _Rank:
    """The process of one rank: its streams, events and flags."""

    def __init__(self, simulation: Simulation, rank: do.Rank) -> None:
        self.sim = simulation
        self.engine = simulation.engine
        self.rank = rank
        self.streams: dict[int, _Stream] = {}
        self.events: dict[
            str, tuple[Signal, int, int]
        ] = {}  # what it awaits, correlation of the record, stream
        self.flags: dict[str, Signal] = {}
        self.correlation = 0
        self._does: dict[type[Any], Callable[[int, Any], Process]] = {
            do.Submit: self._submit,
            do.Record: self._record,
            do.StreamWait: self._stream_wait,
            do.Synchronize: self._synchronize,
            do.Meet: self._meet_here,
        }

    def thread(self, number: int, instructions: list[do.Instruction]) -> Process:
        """One thread from its first instruction to its last."""
        open_spans: list[tuple[do.Begin, int]] = []
        for step in instructions:
            if isinstance(step, do.Begin):
                open_spans.append((step, self.engine.now))
            elif isinstance(step, do.End):
                begun, start = open_spans.pop()
                kind = "annotation" if begun.annotation else "python" if begun.python else "op"
                args = (
                    begun.args
                    if begun.meeting is None
                    else {**begun.args, "meeting": begun.meeting}
                )
                self._log(kind, begun.name, start, thread=number, args=args)
            elif isinstance(step, do.Work):
                if step.label not in self.sim.change.without:
                    yield self._own(step.duration)
            elif isinstance(step, do.Post):
                self.engine.fire(self.flags.setdefault(step.flag, Signal()))
            elif isinstance(step, do.Await):
                yield self.flags.setdefault(step.flag, Signal())
                yield step.delay
            else:
                yield from self._does[type(step)](number, step)

    def _submit(self, thread: int, step: do.Submit) -> Process:
        stream = self._stream(step.stream)
        start, until = self.engine.now, self.engine.now + self._own(step.cost)
        item = _Item(step, correlation=self._next(), done=Signal())
        while len(stream.pending) >= self.rank.queue_limit:
            room = stream.pending[0].done
            yield room
            until = max(until, self.engine.now + step.back)
        item.ready = self.engine.now + step.latency
        stream.pending.append(item)
        stream.last = item.done
        self._put(stream, item)
        if step.blocking:
            yield from self._until([item.done], until, step.back)
        elif until > self.engine.now:
            yield until - self.engine.now
        self._log(
            "call",
            step.call or CALLS[step.kind],
            start,
            thread=thread,
            correlation=item.correlation,
        )

    def _record(self, thread: int, step: do.Record) -> Process:
        stream = self._stream(step.stream)
        item = _Item(correlation=self._next())
        self.events[step.event] = (item.done, item.correlation, step.stream)
        start = self.engine.now
        self._put(stream, item)
        yield self._own(step.cost)
        self._log("call", "cudaEventRecord", start, thread=thread, correlation=item.correlation)

    def _stream_wait(self, thread: int, step: do.StreamWait) -> Process:
        awaited, recorded, of = self.events[step.event]
        start, number = self.engine.now, self._next()
        self._put(self._stream(step.stream), _Item(waits=awaited, delay=step.delay))
        yield self._own(step.cost)
        about = {"waits": step.stream, "awaited": of, "recorded": recorded}
        self._log(
            "call", "cudaStreamWaitEvent", start, thread=thread, correlation=number, args=about
        )

    def _synchronize(self, thread: int, step: do.Synchronize) -> Process:
        start, number = self.engine.now, self._next()
        awaited: list[Signal] = []
        about: dict[str, Any] = {"sync": step.what}
        if step.what == do.EVENT:
            signal, recorded, of = self.events[step.event]
            awaited, about = [signal], about | {"awaited": of, "recorded": recorded}
        elif step.what == do.STREAM:
            awaited, about = [self._stream(step.stream).last], about | {"awaited": step.stream}
        else:
            awaited = [stream.last for stream in self.streams.values()]
        if step.label and step.label in self.sim.change.without:
            awaited = []
        yield from self._until(awaited, start + self._own(step.cost), step.back)
        names = {do.EVENT: "cudaEventSynchronize", do.STREAM: "cudaStreamSynchronize"}
        name = names.get(step.what, "cudaDeviceSynchronize")
        self._log("call", name, start, thread=thread, correlation=number, args=about)

    def _until(self, signals: list[Signal], until: int, back: int) -> Process:
        """Wait for the signals, for `back` after the last, and in any case until a time."""
        for signal in signals:
            if signal.at is None:
                yield signal
            assert signal.at is not None
            until = max(until, signal.at + back)
        if until > self.engine.now:
            yield until - self.engine.now

    def _put(self, stream: _Stream, item: _Item) -> None:
        stream.items.append(item)
        arrived, stream.arrived = stream.arrived, Signal()
        self.engine.fire(arrived)

    def _stream(self, number: int) -> _Stream:
        if number not in self.streams:
            self.streams[number] = _Stream(number)
            self.engine.start(self._device(self.streams[number]))
        return self.streams[number]

    def _device(self, stream: _Stream) -> Process:
        """A stream does one thing after the other, for ever."""
        while True:
            while not stream.items:
                yield stream.arrived
            item = stream.items.popleft()
            if item.waits is not None:
                yield item.waits
                assert item.waits.at is not None
                stream.held = max(stream.held, item.waits.at + item.delay)
            elif item.submit is None:
                if (
                    stream.free_at > self.engine.now
                ):  # the kernel before has let others go, and still runs
                    yield stream.free_at - self.engine.now
                self.engine.fire(item.done)
            else:
                yield from self._execute(stream, item, item.submit)

    def _execute(self, stream: _Stream, item: _Item, submit: do.Submit) -> Process:
        before = stream.early_at if submit.programmatic else stream.free_at
        begin = max(item.ready, before + submit.gap, stream.held)
        if begin > self.engine.now:
            yield begin - self.engine.now
        if submit.kind == "graph":
            yield from self._replay(stream, item, submit)
        elif submit.meeting is not None:
            yield from self._meet(stream, item, submit, submit.meeting)
        else:
            yield from self._alone(stream, item, submit)

    def _alone(self, stream: _Stream, item: _Item, submit: do.Submit) -> Process:
        """A kernel, copy or fill; where it lets a programmatic kernel go early, it ends in a process of its own."""
        start = self.engine.now
        # A programmatic kernel waits for the end of the one before it, however early it began.
        end = max(start + self._takes(submit.duration, submit.slowed, submit.label), stream.free_at)
        early = min(submit.early, end - start)
        stream.free_at, stream.early_at = end, end - early
        ending = self._end(stream, item, submit, start, end)
        if early:
            self.engine.start(ending)
            if end - early > start:
                yield end - early - start
        else:
            yield from ending

    def _end(
        self, stream: _Stream, item: _Item, submit: do.Submit, start: int, end: int
    ) -> Process:
        yield end - start
        args: dict[str, Any] = {"bytes": submit.size, **submit.args} if submit.size else submit.args
        self._log(
            submit.kind,
            submit.name,
            start,
            stream=stream.number,
            correlation=item.correlation,
            args=args,
        )
        self._done(stream, item)

    def _meet_here(self, _thread: int, step: do.Meet) -> Process:
        yield from self._met(step.meeting)

    def _met(self, meeting: do.Meeting) -> Process:
        """Until all members have come, and for the transfer."""
        gathering = self.sim.meeting(meeting)
        gathering.come += 1
        if gathering.come == len(meeting.members):
            self.engine.fire(gathering.all_here)
        yield gathering.all_here
        transfer = meeting.transfer - (
            meeting.slowed if meeting.label in self.sim.change.without else 0
        )
        yield round(transfer * self.sim.change.collectives)

    def _meet(
        self, stream: _Stream, item: _Item, submit: do.Submit, meeting: do.Meeting
    ) -> Process:
        start = self.engine.now
        yield from self._met(meeting)
        about = {**submit.args, "meeting": meeting, "met": self.sim.meeting(meeting).all_here.at}
        self._log(
            "kernel",
            submit.name,
            start,
            stream=stream.number,
            correlation=item.correlation,
            args=about,
        )
        stream.free_at = stream.early_at = self.engine.now
        self._done(stream, item)

    def _replay(self, stream: _Stream, item: _Item, submit: do.Submit) -> Process:
        """The kernels of a CUDA graph: one launch, one correlation."""
        for number, node in enumerate(submit.nodes):
            if number:
                yield submit.gap
            start = self.engine.now
            yield self._takes(node.duration, node.slowed, node.label)
            about = {"graph id": submit.graph, "graph node id": node.node}
            self._log(
                "kernel",
                node.name,
                start,
                stream=stream.number,
                correlation=item.correlation,
                args=about,
            )
        stream.free_at = stream.early_at = self.engine.now
        self._done(stream, item)

    def _done(self, stream: _Stream, item: _Item) -> None:
        stream.pending.popleft()
        self.engine.fire(item.done)

    def _takes(self, duration: int, slowed: int, label: str) -> int:
        change = self.sim.change
        return round((duration - (slowed if label in change.without else 0)) * change.kernels)

    def _own(self, duration: int) -> int:
        return round(duration * self.sim.change.host)

    def _next(self) -> int:
        self.correlation += 1
        return self.correlation

    def _log(
        self,
        kind: str,
        name: str,
        start: int,
        *,
        thread: int | None = None,
        stream: int | None = None,
        correlation: int | None = None,
        args: dict[str, Any] | None = None,
    ) -> None:
        now = self.engine.now
        self.sim.spans.append(
            Span(self.rank.rank, kind, name, start, now, thread, stream, correlation, args or {})
        )
