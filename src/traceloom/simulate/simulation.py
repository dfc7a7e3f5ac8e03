"""What a simulation gives: when everything happens on another machine, beside when it happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from traceloom.errors import broken
from traceloom.model.frames import schema
from traceloom.model.graph import Graph
from traceloom.model.notice import Notice
from traceloom.model.result import Result

if TYPE_CHECKING:
    from traceloom.simulate.device import DeviceChange

Mode = Literal["native", "astra-sim"]

_PARTS = ("compute_ns", "exposed_communication_ns", "memory_ns", "host_ns", "other_ns")
RANKS = schema("rank before_ns end_ns compute_ns communication_ns exposed_communication_ns memory_ns host_ns other_ns")
NODES = schema("node rank name kind start_ns end_ns before_start_ns before_end_ns")
COLLECTIVES = schema(
    "instance kind group ranks bytes start_ns end_ns transfer_ns waiting_ns bandwidth algorithm flags before_ns",
    "card_ns",
    {"bandwidth": pl.Float64, "flags": pl.String},
)
LINKS = schema(
    "link name source target bytes busy_ns waiting_ns",
    {"link": pl.Int64, "source": pl.String, "target": pl.String},
)
LOAD = schema("link time_ns share", {"link": pl.Int64, "share": pl.Float64})
PATH = schema("what kind before_ns after_ns")
BECAME = schema("what kind rank name count time_ns")


@dataclass(frozen=True)
class Simulation(Result):
    """When everything of a workload happens on a machine.

    Times are ns; those named `start_ns` and `end_ns` count from the beginning of the workload. "Before" is the recorded
    machine: as measured, or as the durations in the files say where nothing was measured.

    Attributes:
        mode: `native`, or `astra-sim`, which gives what that simulator gives.
        name: The workload, as the user named it.
        machine: Name of the machine; "" for the recorded one.
        step: The step that was simulated; None for all that was recorded.
        measured_ns: How long it took; None where the workload holds no measured times.
        identity_ns: How long it takes when simulated on the recorded machine with the usual delays of its kinds of
            edges alone; None where nothing was measured.
        identity_error: Its difference from the measurement, as a fraction of that: the error of the graph.
        before_ns: From the first start to the last end, before; None in the mode `astra-sim`.
        after_ns: The same on the machine.
        low_ns: With all work of the device as short as the rules for it allow; None on the recorded device.
        high_ns: As long as they allow.
        ranks: rank; before_ns, end_ns (of its last node); communication_ns (whatever else runs meanwhile); compute_ns,
            exposed_communication_ns (while nothing computes), memory_ns (copies and fills beside neither), host_ns
            (host work beside none of them) and other_ns, which add up to end_ns.
        nodes: node (row of the graph), rank, name, kind, start_ns, end_ns, before_start_ns, before_end_ns.
        collectives: instance, kind, group, ranks (how many), bytes (of the whole buffer of a rank), start_ns (first
            arrival), end_ns, transfer_ns (from the last arrival), waiting_ns (from the first to the last arrival),
            bandwidth (10^9 B/s on the bus), algorithm (None where a measured transfer was taken), flags, before_ns
            (transfer before), card_ns (what its bytes take over the network cards at least).
        links: link, name, source, target (ranks and switches), bytes, busy_ns, waiting_ns (by which transfers that
            needed it took longer because it was full).
        load: How much of its bandwidth a link gives from a time on: link, time_ns, share. Of the busiest links.
        path: What the critical path consists of: what, kind, before_ns, after_ns.
        became_critical: What is on the critical path now and was not before: what (work or delay), kind, rank, name (of
            the node that works, or that waited), count, time_ns.
        notices: What is assumed, and what lies outside of what was measured.
        identity: The check in words.
        trusted: Whether the graph explains the measurement well enough; None where nothing was measured.
        device: What another device makes of the work; None on the recorded one.
        graph: The workload as if it had been recorded on the machine; None in other modes than `native`.
        recorded: The workload as it was recorded; None in other modes than `native`.
    """

    mode: Mode
    name: str
    machine: str
    step: int | None
    measured_ns: int | None
    identity_ns: int | None
    identity_error: float | None
    before_ns: int | None
    after_ns: int
    ranks: pl.DataFrame
    low_ns: int | None = None
    high_ns: int | None = None
    nodes: pl.DataFrame = field(default_factory=NODES.to_frame)
    collectives: pl.DataFrame = field(default_factory=COLLECTIVES.to_frame)
    links: pl.DataFrame = field(default_factory=LINKS.to_frame)
    load: pl.DataFrame = field(default_factory=LOAD.to_frame)
    path: pl.DataFrame = field(default_factory=PATH.to_frame)
    became_critical: pl.DataFrame = field(default_factory=BECAME.to_frame)
    notices: tuple[Notice, ...] = ()
    identity: str = ""
    trusted: bool | None = None
    device: DeviceChange | None = None
    graph: Graph | None = None
    recorded: Graph | None = None

    def to_dict(self) -> dict[str, Any]:
        """As every result, without the graphs."""
        return {key: value for key, value in super().to_dict().items() if key not in {"graph", "recorded", "load"}}

    def check(self) -> None:
        """Raise InvariantError where the answer breaks its own laws.

        Parts of a rank's time are not negative and add up to it exactly; nothing ends before it starts; what the
        critical path consists of adds up to the whole; no transfer takes less than its bytes take over the network
        cards.
        """
        parts = self.ranks.select(_PARTS)
        if self.ranks.height:
            if (parts.min_horizontal() < 0).any():
                raise broken("account", "a part of a rank's time is negative")
            if (parts.sum_horizontal() != self.ranks["end_ns"]).any():
                raise broken("account", "the parts of a rank's time do not add up to it")
        for name in ("nodes", "collectives"):
            frame = getattr(self, name)
            if (frame["end_ns"] < frame["start_ns"]).any():
                raise broken("times", f"something among the {name} ends before it starts")
        if (self.collectives["transfer_ns"] < self.collectives["card_ns"]).any():
            raise broken("network", "a transfer is faster than the network cards of its ranks")
        if self.path.height and int(self.path["after_ns"].sum()) != self.after_ns:
            raise broken("path", "what the critical path consists of does not add up to the whole time")
