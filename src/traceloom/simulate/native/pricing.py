"""What the communications of a workload take on a machine: as measured where it was measured, else by its network.

A transfer that the machine holds as measured counts before schedule and topology. Where the network is another one than
that of the measurement (`--set network.0.bandwidth=100`), the measured time changes as the modelled one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from traceloom.array_types import Ints
from traceloom.errors import UsageError
from traceloom.model import units
from traceloom.model.frames import schema
from traceloom.model.notice import Notice
from traceloom.retime.plan import LONGEST_NS
from traceloom.schedules import KINDS_OF, Schedule, schedule
from traceloom.simulate.machine import Machine
from traceloom.simulate.native.operations import ROOTED
from traceloom.simulate.native.transfers import Transfers
from traceloom.simulate.network import LinkUse, MachineNetwork, finish_times

SHARES = schema("of_class link share bytes", {"of_class": pl.Int64, "link": pl.Int64, "share": pl.Float64})
_PIPELINED = ("tree", "double-tree")
_CHUNK = 1 << 19  # bytes that trees and chains hand on at once
_MOST_CHUNKS = 64
_MOST_BYTES = 2.0**62  # of a link; files name any size
_FLAGS = {
    "kind": "kind not measured, by schedule",
    "span": "not measured inside or between hosts, by schedule",
    "group": "size of the group not among those measured",
    "size": "size not among those measured",
}
_REDUCED = 3  # bytes that a device moves to reduce one: two read, one written


@dataclass(frozen=True, eq=False, slots=True)
class Modelled:
    """One communication, alone on a network.

    Attributes:
        time_ns: From the meeting to the last end.
        links: The links that it uses.
        bytes: What each of them carries.
        card_ns: What its bytes take over the network cards of ranks at least; 0 where there are none.
        algorithm: The algorithm.
    """

    time_ns: float
    links: Ints
    bytes: Ints
    card_ns: float
    algorithm: str


@dataclass(eq=False)
class _Pricing:
    """The times of communications on one machine, each worked out once."""

    machine: Machine
    network: MachineNetwork = field(init=False)
    _known: dict[tuple[str, tuple[int, ...], int, tuple[int, ...]], Modelled] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.network = MachineNetwork(self.machine)

    def modelled(
        self, kind: str, members: Sequence[int], size_bytes: int, splits: Sequence[int] = ()
    ) -> Modelled | None:
        """A communication by its schedule; None where no schedule can do its kind.

        Args:
            kind: As in `Operations.table`.
            members: The ranks; the root or the sender first.
            size_bytes: As of `analyze.collective`.
            splits: As in `Operations.table`; empty for even ones.
        """
        key = (kind, tuple(members), size_bytes, tuple(splits))
        if key not in self._known:
            if kind not in {"send", "barrier"} and all(kind not in kinds for kinds in KINDS_OF.values()):
                return None
            self._known[key] = self.model(*key)
        return self._known[key]

    def model(self, kind: str, members: tuple[int, ...], size_bytes: int, splits: tuple[int, ...]) -> Modelled:
        machine = self.machine
        places = machine.places[list(members)]
        order = np.asarray(members)
        if kind in ROOTED:
            order = np.concatenate([order[:1], order[1:][np.argsort(places[1:])]])
        by_place = np.argsort(places)
        matrix = np.array(splits).reshape(len(members), -1)[np.ix_(by_place, by_place)] if splits else None
        if kind not in {*ROOTED, "send"}:
            order = order[by_place]
        hosts = np.unique(places // machine.ranks_per_host, return_counts=True)[1]
        algorithm: str = "direct" if kind == "send" else machine.algorithm(kind, size_bytes, len(members))
        stated = any(r.collective == kind and (r.below is None or size_bytes < r.below) for r in machine.algorithms)
        # One ring over several hosts would use one network card of each.
        if not stated and algorithm == "ring" and kind in KINDS_OF["two-level"]:
            several = hosts.size > 1 and hosts.min() == hosts.max() > 1
            algorithm = "two-level" if several else algorithm
        size = size_bytes // len(members) if kind == "all_gather" else size_bytes
        chunks = min(max(size // _CHUNK, 1), _MOST_CHUNKS) if algorithm in _PIPELINED or kind in ROOTED else 1
        plan = schedule(
            "broadcast" if kind == "send" else kind,
            algorithm,
            len(members),
            size,
            chunks=chunks,
            local=int(hosts[0]),
            splits=matrix,
        )
        use = LinkUse(self.network)
        memory = machine.device.memory if machine.device else None
        reduction = _REDUCED * 1e9 / memory if memory else 0.0
        ends = finish_times(plan, self.network, order, np.zeros(len(members)), reduction_ns_per_byte=reduction, use=use)
        links = np.flatnonzero(use.bytes > 0)
        carried = np.rint(np.minimum(use.bytes[links], _MOST_BYTES)).astype(np.int64)
        return Modelled(float(ends.max(initial=0.0)), links, carried, self.card_ns(plan, order), algorithm)

    def card_ns(self, plan: Schedule, order: Ints) -> float:
        """What the bytes of the busiest network card take, whatever links there are."""
        card = self.machine.nic
        if card is None:
            return 0.0
        block = 1 if card.of == "all" else self.machine.dimensions[0].size
        home = self.machine.places[order] // block
        passed = np.zeros((2, plan.ranks))
        for part in plan.rounds:
            leaves = home[part.source] != home[part.target]
            np.add.at(passed[0], part.source[leaves], part.bytes[leaves])
            np.add.at(passed[1], part.target[leaves], part.bytes[leaves])
        speed = card.bandwidth * self.machine.network_speeds()[order]
        return float((passed / speed).max(initial=0.0))


def transfers_on(
    machine: Machine, table: pl.DataFrame, recorded_ns: Ints, measured_on: Machine | None = None
) -> Transfers:
    """The transfers of communications on a machine.

    Those whose members, size or schedule nobody knows stay as they were recorded.

    Args:
        machine: The machine.
        table: As `Operations.table`.
        recorded_ns: How long they took, shape (communications,).
        measured_on: The machine that its measured transfers are of, where its network was changed since.
    """
    pricing = _Pricing(machine)
    base = pricing if measured_on is None else _Pricing(measured_on)
    about = ["kind", "members", "size_bytes", "splits"]
    asked = table.select(about).with_columns(key=pl.struct(about).rank("dense"))
    distinct = asked.unique("key", keep="first").sort("key")
    priced = [_price(pricing, base, row) for row in distinct.iter_rows(named=True)]
    of_class = asked["key"].to_numpy().astype(np.int64) - 1
    priceable = np.array([price.time_ns is not None for price in priced], dtype=np.bool_)
    times = np.array([price.time_ns or 0 for price in priced], dtype=np.int64)
    shares = []
    for number, price in enumerate(priced):
        if price.modelled is None or not price.time_ns:
            continue
        links, carried = price.modelled.links, price.modelled.bytes
        share = np.minimum(carried / (pricing.network.bandwidth[links] * price.time_ns), 1.0)
        shares.append(pl.DataFrame({"link": links, "share": share, "bytes": carried}).with_columns(of_class=number))
    columns = list(SHARES)
    replaced = priceable[of_class]
    return Transfers(
        np.where(replaced, times[of_class], recorded_ns),
        replaced,
        of_class,
        pl.concat([SHARES.to_frame(), *(frame.select(columns).cast(SHARES) for frame in shares)]),
        pricing.network.links.select("link", "name", "source", "target"),
        [priced[k].algorithm for k in of_class.tolist()],
        [priced[k].flag for k in of_class.tolist()],
        np.array([price.card_ns for price in priced], dtype=np.int64)[of_class],
    )


def transfer_notices(flags: Iterable[str]) -> tuple[Notice, ...]:
    """What must be known of transfers: how many of them each flag is about."""
    single = [flag for text in flags for flag in text.split("; ") if flag]
    counts = pl.Series("flag", single, dtype=pl.String).value_counts().sort("count", "flag", descending=[True, False])
    return tuple(
        Notice("transfer-flag", "warning", f"{count:,} communications: {flag}", count)
        for flag, count in counts.iter_rows()
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Price:
    """The time of one communication (None where it stays as recorded), where it is from, and what must be known."""

    time_ns: int | None
    modelled: Modelled | None = None
    algorithm: str | None = None
    flag: str = ""
    card_ns: int = 0


def _price(pricing: _Pricing, base: _Pricing, asked: dict[str, Any]) -> _Price:
    """What one communication takes; `asked` is a row of the table."""
    kind, members, size_bytes, splits = (asked[name] for name in ("kind", "members", "size_bytes", "splits"))
    if kind == "barrier":
        size_bytes = 0
    if kind is None or members is None or size_bytes is None:
        return _Price(None, flag="as recorded, kind, members or size not known")
    modelled = pricing.modelled(kind, members, size_bytes, splits or ())
    machine = pricing.machine
    measured = machine.transfer_of(kind, machine.span(members), len(members), size_bytes)
    flags = [_FLAGS[flag] for flag in measured.flags]
    card_ns = modelled.card_ns if modelled else 0.0
    if measured.time_ns is None:
        if modelled is None:
            return _Price(None, flag=f"as recorded, no schedule for {kind}")
        time_ns, algorithm = modelled.time_ns, modelled.algorithm
    else:
        time_ns, algorithm = measured.time_ns, None
        if base is not pricing and modelled is not None:
            there = base.modelled(kind, members, size_bytes, splits or ())
            if there is not None and there.time_ns > 0:
                time_ns *= modelled.time_ns / there.time_ns
                flags.append("measured before the network was changed")
        if time_ns < int(card_ns):
            time_ns = int(card_ns)
            flags.append("held to what network cards allow")
    if not max(time_ns, card_ns) < LONGEST_NS:
        raise UsageError(
            f"one {kind} of {units.size(size_bytes)} over {len(members)} ranks takes more than 100 days",
            slug="times-too-long",
            hint="bandwidths are in 10^9 B/s, latencies in ns",
        )
    return _Price(round(time_ns), modelled, algorithm, "; ".join(flags), int(card_ns))
