"""Which collectives ran, over which groups, how long, and how much of it was not hidden behind compute?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from traceloom.analyze.classify import Rule, gpu_work
from traceloom.analyze.collective.calls import WhereType, communication_calls
from traceloom.analyze.intervals import EMPTY, Spans, difference, union
from traceloom.analyze.per_step import durations
from traceloom.analyze.remembered import of_each
from traceloom.analyze.stacked import TRACE, stacked, unstacked
from traceloom.model import Trace
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

KEYS = ("kind", "group", "group_description", "group_size", "element_type", "where")
COLLECTIVE_SCHEMA = schema(
    "kind group group_description group_size element_type where count bytes total_ns mean_ns min_ns max_ns exposed_ns",
    {"where": WhereType},
)
DEVICE_SCHEMA = schema("device count total_ns union_ns exposed_ns")


@dataclass(frozen=True)
class Communication(Result):
    """Communication of one trace. What the numbers mean, and that none of them is bandwidth: see
    docs/concepts/communication.md.

    Attributes:
        collectives: One row per kind, group, element type and place, largest total first: kind (all_reduce, ...;
            null where neither arguments nor name tell), group, group_description, group_size, element_type (null
            where the file does not say), where (device: kernels; host: calls that run on the host), count, bytes (sum
            of message sizes; null where one of them is unknown), total_ns (sum of durations), mean_ns (rounded down),
            min_ns, max_ns, exposed_ns (device time in which such a kernel runs and no compute does, summed over
            devices; null on the host).
        devices: device, count (kernels), total_ns (sum), union_ns and exposed_ns (`communication_ns` and
            `exposed_communication_ns` of gpu_time).
    """

    collectives: pl.DataFrame
    devices: pl.DataFrame


def communication(trace: Trace, rules: Iterable[Rule] = ()) -> Communication:
    """Add up communication kernels, and collectives that run on the host, by what they did."""
    return _communication(trace, tuple(rules))


@of_each
def _communication(traces: Sequence[Trace], rules: tuple[Rule, ...]) -> Iterable[Communication]:
    calls = stacked(communication_calls(trace, rules) for trace in traces)
    if not calls.height:
        return [Communication(COLLECTIVE_SCHEMA.to_frame(), DEVICE_SCHEMA.to_frame()) for _ in traces]
    work = stacked(gpu_work(trace, rules) for trace in traces)
    computing = work.filter(pl.col("category") == "compute")[[TRACE, "device", "start_ns", "end_ns"]]
    by_device = computing.partition_by(TRACE, "device", as_dict=True)
    compute = {device: _spans(part) for device, part in by_device.items()}
    kernels = calls.filter(pl.col("where") == "device")
    keys = [TRACE, "where", "kind", "group", "group_size", "element_type"]
    exposed = []
    for part in kernels.partition_by(*keys, "device"):
        *key, device = part[[*keys, "device"]].row(0)
        exposed.append((*key, difference(_spans(part), compute.get((key[0], device), EMPTY)).total))
    types = {TRACE: pl.UInt32(), **{name: COLLECTIVE_SCHEMA[name] for name in (*keys[1:], "exposed_ns")}}
    over_devices = pl.DataFrame(exposed, schema=types, orient="row").group_by(keys).agg(pl.col("exposed_ns").sum())
    rows = []
    for part in kernels.partition_by(TRACE, "device"):
        number, device = part[[TRACE, "device"]].row(0)
        spans, total = _spans(part), int((part["end_ns"] - part["start_ns"]).sum())
        alone = difference(spans, compute.get((number, device), EMPTY))
        rows.append((number, device, part.height, total, spans.total, alone.total))
    devices = pl.DataFrame(rows, schema={TRACE: pl.UInt32(), **DEVICE_SCHEMA}, orient="row").sort(TRACE, "device")
    size = pl.col("bytes")
    described = stacked(trace.groups.select("group", group_description="description") for trace in traces)
    collectives = (
        calls.group_by(keys)
        .agg(
            *durations(pl.col("end_ns") - pl.col("start_ns")),
            pl.when(size.is_not_null().all()).then(size.sum()).alias("bytes"),
        )
        .join(described.unique([TRACE, "group"], keep="first"), on=[TRACE, "group"], how="left")
        .join(over_devices, on=keys, how="left", nulls_equal=True)
        .pipe(as_declared, {TRACE: pl.UInt32(), **COLLECTIVE_SCHEMA})
        .sort(TRACE, "total_ns", *KEYS, descending=[False, True] + [False] * len(KEYS), nulls_last=True)
    )
    return map(Communication, unstacked(collectives, traces), unstacked(devices, traces))


def _spans(part: pl.DataFrame) -> Spans:
    return union(part["start_ns"].to_numpy(), part["end_ns"].to_numpy())
