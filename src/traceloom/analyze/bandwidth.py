"""Bandwidth of collectives: the size that counts, the bus factor, and the peak of the link."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import polars as pl
from msgspec import Struct

from traceloom.trace.batch import TRACE_COLUMN
from traceloom.trace.trace import Trace

_GROUP_SIZE = pl.when(pl.col("group_size") > 0).then(pl.col("group_size").cast(pl.Int64))
_SHARE = (_GROUP_SIZE - 1) / _GROUP_SIZE
_IN, _OUT = pl.col("in_bytes"), pl.col("out_bytes")
# Where only the part of one rank is recorded, the whole is that times the ranks.
_SIZES = {
    "all_reduce": pl.coalesce(_IN, _OUT),
    "all_gather": pl.coalesce(_OUT, _IN * _GROUP_SIZE),
    "reduce_scatter": pl.coalesce(_IN, _OUT * _GROUP_SIZE),
    "all_to_all": _IN,
    "gather": _IN * _GROUP_SIZE,
    "scatter": _OUT * _GROUP_SIZE,
    "broadcast": pl.coalesce(_IN, _OUT),
    "reduce": pl.coalesce(_IN, _OUT),
    "send": pl.coalesce(_IN, _OUT),
    "recv": pl.coalesce(_OUT, _IN),
}
# Bytes on the bus of each rank as a multiple of the size: this factor times (ranks - 1) / ranks, or
# the whole size.
_BUS_FACTORS = {
    "all_reduce": 2.0,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 1.0),
}
_FULL_SIZE_KINDS = ("broadcast", "reduce", "send", "recv")
_FACTOR_EXPRESSIONS = {
    **{kind: times * _SHARE for kind, times in _BUS_FACTORS.items()},
    **dict.fromkeys(_FULL_SIZE_KINDS, pl.lit(1.0)),
}


def compute_bus_factor(kind: str, ranks: int) -> float:
    """Returns the bytes on the bus of one rank / size of the collective; 0 for kinds that move no
    bytes (a barrier).
    """
    return 1.0 if kind in _FULL_SIZE_KINDS else _BUS_FACTORS.get(kind, 0.0) * (ranks - 1) / ranks


class DeviceLink(Struct, frozen=True):
    """The link between the devices of one host.

    Attributes:
        name: NVLink, xGMI, PCIe ...
        peak_gb_per_s: 10^9 bytes per second of one device in one direction.
    """

    name: str
    peak_gb_per_s: float


@lru_cache(maxsize=64)
def find_device_link(device: str | None) -> DeviceLink | None:
    """Returns the link of a device by the name that the driver gives it; None where it is not
    known.

    Example:
        >>> find_device_link("NVIDIA H100 80GB HBM3")
        DeviceLink(name='NVLink 4', peak_gb_per_s=450.0)
    """
    if not device:
        return None
    names = pl.Series([device])
    text = files("traceloom.analyze").joinpath("links.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    row = next((row for row in rows if names.str.contains(f"(?i){row['pattern']}")[0]), None)
    return None if row is None else DeviceLink(row["link"], row["both_directions_gb_per_s"] / 2)


def add_sizes(calls: pl.DataFrame) -> pl.DataFrame:
    """Adds `size_bytes` and `bus_factor` (docs/concepts/collectives.md); null where kind, bytes or
    group are unknown.
    """
    return calls.with_columns(
        _select_by_kind(_SIZES).cast(pl.Int64).alias("size_bytes"),
        _select_by_kind(_FACTOR_EXPRESSIONS).cast(pl.Float64).alias("bus_factor"),
    )


def _select_by_kind(table: dict[str, Any]) -> pl.Expr:
    return pl.coalesce(pl.when(pl.col("kind") == kind).then(value) for kind, value in table.items())


def add_link_peaks(
    calls: pl.DataFrame, traces: Sequence[Trace], peak_gb_per_s: float | None = None
) -> pl.DataFrame:
    """Adds `link`, `link_peak_gb_per_s` and `link_fraction`; null where the group may leave the
    host.

    Args:
        calls: With `trace` (see `traceloom.trace.batch`), `members`, `group_size`, `device`,
            `bus_gb_per_s`.
        traces: The traces of the calls.
        peak_gb_per_s: The user's value for one device in one direction, used for every group.
    """
    if peak_gb_per_s is not None:
        return set_peak(calls, peak_gb_per_s)
    rows: list[tuple[int, int, str, float]] = []
    host_rows = []
    for number, trace in enumerate(traces):
        for device, name in trace.devices[["device", "name"]].iter_rows():
            if link := find_device_link(name):
                rows.append((number, device, link.name, link.peak_gb_per_s))
        # A group stays inside one host if the whole job does, or if all members are in one block of
        # as many ranks as the host has visible devices (launchers number ranks host by host).
        world_size, visible = trace.meta.world_size, trace.devices.height
        host_rows.append((world_size is not None and 1 < world_size <= visible, visible))
    columns = {
        TRACE_COLUMN: pl.UInt32(),
        "device": pl.Int32(),
        "on_link": pl.String(),
        "on_peak": pl.Float64(),
    }
    links = pl.DataFrame(rows, schema=columns, orient="row")
    hosts = pl.DataFrame(
        host_rows, schema={"whole": pl.Boolean(), "visible": pl.Int32()}, orient="row"
    )
    members, size = pl.col("members").list, pl.col("visible")
    in_block = (size > 1) & ((members.min() // size) == (members.max() // size))
    joined = calls.join(links, on=[TRACE_COLUMN, "device"], how="left", maintain_order="left")
    within = pl.when(pl.col("whole") | in_block.fill_null(value=False))
    linked = joined.hstack(hosts[joined[TRACE_COLUMN]])
    return _add_link_fraction(linked, within.then("on_link"), within.then("on_peak"))


def set_peak(calls: pl.DataFrame, peak_gb_per_s: float) -> pl.DataFrame:
    """Returns the calls with the same peak, given by the user, for every group."""
    kernels = pl.when(pl.col("where") == "device")
    return _add_link_fraction(
        calls, kernels.then(pl.lit("given")), kernels.then(pl.lit(float(peak_gb_per_s)))
    )


def correct_links_by_host(
    calls: pl.DataFrame, hosts: Mapping[int, str], links: Mapping[int, DeviceLink]
) -> pl.DataFrame:
    """Corrects the assumptions of single traces by the hosts of several ranks.

    Args:
        calls: `collectives(...).calls` of any ranks.
        hosts: Rank -> host, where files name it.
        links: Rank -> link of its device, where it is known.

    Returns:
        The calls: with the link where all members are known to be on one host, without it where
        they are known to be on several; else unchanged.
    """
    member_list = pl.col("members").cast(pl.List(pl.String)).list.join(",")
    groups = (
        calls.select(member_list.alias("whom"), "members")
        .unique("whom", keep="first")
        .drop_nulls("whom")
    )
    table = []
    for text, members in groups.iter_rows():
        member_hosts = {hosts[rank] for rank in members if rank in hosts}
        within_host = len(member_hosts) == 1 and all(rank in hosts for rank in members)
        table.append((text, True if within_host else False if len(member_hosts) > 1 else None))
    host_table = pl.DataFrame(
        table, schema={"whom": pl.String(), "inside": pl.Boolean()}, orient="row"
    )
    names = {rank: link.name for rank, link in links.items()}
    peaks = {rank: link.peak_gb_per_s for rank, link in links.items()}
    joined = calls.with_columns(member_list.alias("whom")).join(
        host_table, on="whom", how="left", maintain_order="left"
    )
    yes = (pl.col("inside") & (pl.col("where") == "device")).fill_null(value=False)
    no = (~pl.col("inside")).fill_null(value=False)
    values = _map_column("rank", names, pl.String()), _map_column("rank", peaks, pl.Float64())
    link, peak = (
        pl.when(yes).then(pl.coalesce(value, column)).when(no).then(None).otherwise(column)
        for value, column in zip(values, ("link", "link_peak_gb_per_s"), strict=True)
    )
    return _add_link_fraction(joined, link, peak).drop("whom", "inside")


def _add_link_fraction(calls: pl.DataFrame, link: pl.Expr, peak: pl.Expr) -> pl.DataFrame:
    linked_calls = calls.with_columns(link.alias("link"), peak.alias("link_peak_gb_per_s"))
    return linked_calls.with_columns(
        (pl.col("bus_gb_per_s") / pl.col("link_peak_gb_per_s")).alias("link_fraction")
    )


def _map_column(column: str, values: Mapping[Any, object], kind: pl.DataType) -> pl.Expr:
    """Returns the value of each key in a column; null where there is none."""
    if not values:
        return pl.lit(None, kind)
    return pl.col(column).replace_strict(values, default=None, return_dtype=kind)
