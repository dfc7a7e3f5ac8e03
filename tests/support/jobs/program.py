"""What the threads of a made job do, instruction by instruction; all times are nanoseconds.

Every duration stands in its instruction, so that a job that is run again with a change meets the same chance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DEVICE = "device"
STREAM = "stream"
EVENT = "event"


@dataclass(frozen=True, slots=True)
class Begin:
    """An op, annotation or Python frame begins; what follows until its `End` is inside.

    Attributes:
        name: Its name.
        annotation: Whether it is an annotation.
        args: Arguments of the op, as `TraceBuilder.op` takes them.
        python: Whether it is a Python frame or the call of a module.
        meeting: The communication that the op describes.
    """

    name: str
    annotation: bool = False
    args: dict[str, Any] = field(default_factory=dict)
    python: bool = False
    meeting: Meeting | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The innermost op or annotation ends."""


@dataclass(frozen=True, slots=True)
class Work:
    """The thread works: self time of what it is in, think time outside everything.

    Attributes:
        duration: Of the work.
        label: A run can leave out what bears a label.
    """

    duration: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One rank's part of a communication.

    Attributes:
        kind: `allreduce`, `_allgather_base`, ..., `send`, `recv`.
        group: Name of the group.
        members: Ranks that meet.
        sequence: Number within the group; of the messages from one rank to another, for `send` and `recv`.
        elements: Elements that this rank puts in.
        transfer: From the moment when all have come to the end of this part.
        out_elements: Elements that this rank gets; as many as it puts in where None.
        element_type: As PyTorch writes it.
        in_splits: Elements to each member, of an all-to-all.
        out_splits: Elements from each member.
        ranks: Members of the group, where they are not those that meet.
        description: What the group is for.
        written_sequence: The number that the trace shows, where it is not `sequence`.
        slowed: The part of `transfer` that a fault is to blame for.
        label: Of that fault: a run can leave it out.
    """

    kind: str
    group: str
    members: tuple[int, ...]
    sequence: int
    elements: int
    transfer: int
    out_elements: int | None = None
    element_type: str = "Float"
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    description: str = ""
    written_sequence: int | None = None
    slowed: int = 0
    label: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """What its parts have in common: the group and the number in it; for a message, sender and receiver too."""
        if self.kind in ("send", "recv"):
            return f"{self.group} {self.members[0]}>{self.members[1]}", self.sequence
        return self.group, self.sequence


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A kernel of a CUDA graph.

    Attributes:
        name: Its name.
        duration: Its duration.
        node: Its id, the same in every replay.
        slowed: The part of `duration` that a fault is to blame for.
        label: Of that fault.
    """

    name: str
    duration: int
    node: int
    slowed: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    """A call that submits GPU work.

    Attributes:
        name: Of the work.
        kind: kernel, copy, fill or graph.
        stream: Where it is submitted.
        duration: Of the work; 0 for communication.
        cost: What the call takes where it needs not wait.
        latency: From the start of the call until the work can start.
        gap: From the end of the work before it on its stream until it can start.
        back: From the end of what the call waits for (room in the queue, the copy itself) to its return.
        blocking: Whether the call returns only when the work is done.
        meeting: The communication that this is a part of.
        size: Bytes of copies.
        slowed: The part of `duration` that a fault is to blame for.
        label: Of that fault: a run can leave it out.
        early: How long before its end a kernel lets a programmatic one go.
        programmatic: Whether the kernel may start before the one before it on its stream has ended.
        graph: Id of the CUDA graph that the call launches.
        nodes: The kernels of that graph, one after the other, `gap` apart.
        args: Arguments of the kernel, as the trace shows them.
        call: Name of the runtime call; the usual one of the kind where "".
    """

    name: str
    kind: str
    stream: int
    duration: int
    cost: int
    latency: int
    gap: int
    back: int
    blocking: bool = False
    meeting: Meeting | None = None
    size: int = 0
    slowed: int = 0
    label: str = ""
    early: int = 0
    programmatic: bool = False
    graph: int = 0
    nodes: tuple[GraphNode, ...] = ()
    args: dict[str, Any] = field(default_factory=dict)
    call: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """`cudaEventRecord`: the event is reached when everything submitted to the stream so far is done."""

    event: str
    stream: int
    cost: int


@dataclass(frozen=True, slots=True)
class StreamWait:
    """`cudaStreamWaitEvent`: what is submitted to the stream from now on waits for the event's last record."""

    event: str
    stream: int
    cost: int
    delay: int


@dataclass(frozen=True, slots=True)
class Synchronize:
    """A call that waits for the device, a stream or an event.

    Attributes:
        what: DEVICE, STREAM or EVENT.
        cost: What it takes where nothing is to be awaited.
        back: From the end of what it awaits to its return.
        stream: For STREAM.
        event: For EVENT.
        label: A run can let the call return without waiting.
    """

    what: str
    cost: int
    back: int
    stream: int = 7
    event: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Post:
    """Something is handed to whoever awaits the flag."""

    flag: str


@dataclass(frozen=True, slots=True)
class Await:
    """The thread sleeps until the flag is posted, and `delay` longer."""

    flag: str
    delay: int


@dataclass(frozen=True, slots=True)
class Meet:
    """The thread itself takes part in a communication, as back ends that work on the host do.

    Attributes:
        meeting: The communication; its transfer begins when all members have come.
    """

    meeting: Meeting


Instruction = Begin | End | Work | Submit | Record | StreamWait | Synchronize | Post | Await | Meet


@dataclass(frozen=True, slots=True)
class Clock:
    """How a host's clock goes: it shows `time + offset_ns + drift * time`."""

    host: str = "host0"
    offset_ns: int = 0
    drift: float = 0.0

    def shows(self, time: int) -> int:
        """What it shows at a time of the job."""
        return time + self.offset_ns + round(self.drift * time)


@dataclass(slots=True)
class Rank:
    """One process.

    Attributes:
        rank: Its rank.
        threads: The instructions of each thread; 0 is the main thread.
        clock: Its host's clock.
        queue_limit: How much work a stream holds that was submitted and is not done.
    """

    rank: int
    threads: list[list[Instruction]]
    clock: Clock = field(default_factory=Clock)
    queue_limit: int = 1022
