"""Bandwidth of collectives: which size counts, by which factor, and against which link."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import polars as pl

from traceloom.model import Trace

_RANKS = pl.col("group_size").cast(pl.Int64)
_SHARE = (_RANKS - 1) / _RANKS
_IN, _OUT = pl.col("in_bytes"), pl.col("out_bytes")
# Where only the side of one rank is recorded, the whole is that times the ranks.
_SIZES = {
    "all_reduce": pl.coalesce(_IN, _OUT),
    "all_gather": pl.coalesce(_OUT, _IN * _RANKS),
    "reduce_scatter": pl.coalesce(_IN, _OUT * _RANKS),
    "all_to_all": _IN,
    "gather": _IN * _RANKS,
    "scatter": _OUT * _RANKS,
    "broadcast": pl.coalesce(_IN, _OUT),
    "reduce": pl.coalesce(_IN, _OUT),
    "send": pl.coalesce(_IN, _OUT),
    "recv": pl.coalesce(_OUT, _IN),
}
_FACTORS = {
    "all_reduce": 2 * _SHARE,
    "all_gather": _SHARE,
    "reduce_scatter": _SHARE,
    "all_to_all": _SHARE,
    "gather": _SHARE,
    "scatter": _SHARE,
    "broadcast": pl.lit(1.0),
    "reduce": pl.lit(1.0),
    "send": pl.lit(1.0),
    "recv": pl.lit(1.0),
}


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the devices of one host.

    Attributes:
        name: NVLink, xGMI, PCIe ...
        peak_gb_per_s: 10^9 bytes per second of one device in one direction.
    """

    name: str
    peak_gb_per_s: float


@lru_cache(maxsize=1)
def _links() -> list[dict[str, Any]]:
    text = files("traceloom.analyze.collective").joinpath("links.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    return rows


@lru_cache(maxsize=64)
def link_of(device: str | None) -> Link | None:
    """The link of a device by the name that the driver gives it; None where it is not known.

    Example:
        >>> link_of("NVIDIA H100 80GB HBM3")
        Link(name='NVLink 4', peak_gb_per_s=450.0)
    """
    if not device:
        return None
    names = pl.Series([device])
    row = next((row for row in _links() if names.str.contains(f"(?i){row['pattern']}")[0]), None)
    return None if row is None else Link(row["link"], row["both_directions_gb_per_s"] / 2)


def with_sizes(calls: pl.DataFrame) -> pl.DataFrame:
    """Add `size_bytes` and `bus_factor` (docs/concepts/collectives.md); null where kind, bytes or group are unknown."""
    return calls.with_columns(
        _by_kind(_SIZES).cast(pl.Int64).alias("size_bytes"), _by_kind(_FACTORS).cast(pl.Float64).alias("bus_factor")
    )


def _by_kind(table: dict[str, Any]) -> pl.Expr:
    return pl.coalesce(pl.when(pl.col("kind") == kind).then(value) for kind, value in table.items())


def with_bandwidth(calls: pl.DataFrame) -> pl.DataFrame:
    """Add `algorithm_gb_per_s` and `bus_gb_per_s` of the whole duration, waiting included; null where unknown."""
    duration = pl.col("end_ns") - pl.col("start_ns")
    # bytes per ns are 10^9 bytes per second
    rate = pl.when(duration > 0).then(pl.col("size_bytes") / duration)
    return calls.with_columns(
        rate.alias("algorithm_gb_per_s"), (rate * pl.col("bus_factor")).alias("bus_gb_per_s")
    )  # fmt: skip


def with_peaks(calls: pl.DataFrame, trace: Trace, peak_gb_per_s: float | None = None) -> pl.DataFrame:
    """Add `link`, `link_peak_gb_per_s` and `link_fraction`; null where the group may leave the host.

    Args:
        calls: With `members`, `group_size`, `device`, `bus_gb_per_s`.
        trace: One process's trace.
        peak_gb_per_s: The user's own: of one device in one direction, for every group.
    """
    if peak_gb_per_s is not None:
        return against_peak(calls, peak_gb_per_s)
    used = {row["device"]: link_of(row["name"]) for row in trace.devices.to_dicts()}
    links = {device: link for device, link in used.items() if link is not None}
    inside = inside_host(trace.meta.world_size, trace.devices.height)
    return _with_fraction(
        calls,
        pl.when(inside).then(_named(links, "name", pl.String)),
        pl.when(inside).then(_named(links, "peak_gb_per_s", pl.Float64)),
    )


def against_peak(calls: pl.DataFrame, peak_gb_per_s: float) -> pl.DataFrame:
    """The calls with the same peak for every group, as the user gives it."""
    kernels = pl.when(pl.col("where") == "device")
    return _with_fraction(calls, kernels.then(pl.lit("given")), kernels.then(pl.lit(float(peak_gb_per_s))))


def against_hosts(calls: pl.DataFrame, hosts: Mapping[int, str], links: Mapping[int, Link]) -> pl.DataFrame:
    """Correct what single traces could only assume, by the hosts of several ranks.

    Args:
        calls: Of `collectives(...).calls`, of any ranks.
        hosts: Rank -> host, where files name it.
        links: Rank -> link of its device, where it is known.

    Returns:
        The calls: with the link where all members are known to be on one host, without where they are known to
        be on several; else as they were.
    """
    member_list = pl.col("members").cast(pl.List(pl.String)).list.join(",")
    groups = calls.select(member_list.alias("whom"), "members").unique("whom", keep="first").drop_nulls("whom")
    table = []
    for text, members in groups.iter_rows():
        member_hosts = {hosts[rank] for rank in members if rank in hosts}
        whole = len(member_hosts) == 1 and all(rank in hosts for rank in members)
        table.append((text, True if whole else False if len(member_hosts) > 1 else None))
    inside = pl.DataFrame(table, schema={"whom": pl.String(), "inside": pl.Boolean()}, orient="row")
    names = {rank: link.name for rank, link in links.items()}
    peaks = {rank: link.peak_gb_per_s for rank, link in links.items()}
    joined = calls.with_columns(member_list.alias("whom")).join(inside, on="whom", how="left", maintain_order="left")
    yes = (pl.col("inside") & (pl.col("where") == "device")).fill_null(value=False)
    no = (~pl.col("inside")).fill_null(value=False)
    values = (
        (pl.col("rank").replace_strict(table_of, default=None, return_dtype=kind) if table_of else pl.lit(None, kind))
        for table_of, kind in ((names, pl.String()), (peaks, pl.Float64()))
    )
    link, peak = (
        pl.when(yes).then(pl.coalesce(value, column)).when(no).then(None).otherwise(column)
        for value, column in zip(values, ("link", "link_peak_gb_per_s"), strict=True)
    )
    return _with_fraction(joined, link, peak).drop("whom", "inside")


def _with_fraction(calls: pl.DataFrame, link: pl.Expr, peak: pl.Expr) -> pl.DataFrame:
    with_link = calls.with_columns(link.alias("link"), peak.alias("link_peak_gb_per_s"))
    return with_link.with_columns((pl.col("bus_gb_per_s") / pl.col("link_peak_gb_per_s")).alias("link_fraction"))


def _named(links: dict[Any, Link], field: str, kind: type[pl.DataType]) -> pl.Expr:
    values = {device: getattr(link, field) for device, link in links.items()}
    if not values:
        return pl.lit(None, kind)
    return pl.col("device").replace_strict(values, default=None, return_dtype=kind)


def inside_host(world_size: int | None, visible: int) -> pl.Expr:
    """Whether a group stays inside one host: the whole job does, or all members stand in one block of as many ranks
    as the host has visible devices (launchers number ranks host by host). False where that cannot be told.
    """
    if world_size is not None and 1 < world_size <= visible:
        return pl.lit(value=True)
    if visible < 2:
        return pl.lit(value=False)
    members = pl.col("members")
    one_block = (members.list.min() // visible) == (members.list.max() // visible)
    return one_block.fill_null(value=False)
