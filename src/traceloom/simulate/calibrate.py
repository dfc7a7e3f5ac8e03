"""How long a machine's collectives take, fitted to a run's own: latency and bandwidth per kind, span and group size.

What is fitted, and what a recording cannot tell, stands in docs/concepts/calibration.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import polars as pl

from traceloom import __version__
from traceloom.analyze.across.matched import match
from traceloom.analyze.across.rank_part import rank_part
from traceloom.analyze.collective.bandwidth import bus_factor, link_of
from traceloom.analyze.peaks import Peak, peaks
from traceloom.errors import InputError
from traceloom.model import Session
from traceloom.model.frames import as_declared, schema
from traceloom.model.notice import Notice
from traceloom.model.result import Result
from traceloom.simulate.fitting import fits
from traceloom.simulate.machine import Dimension, Machine, MeasuredTransfer
from traceloom.simulate.machine.parts import Collective

_TEXTS = dict.fromkeys(("collective", "span"), pl.String())
SAMPLES = schema("run collective span ranks size_bytes bus_bytes transfer_ns whole", {"run": pl.Int64, **_TEXTS})
TRANSFERS = schema(
    "collective span ranks from_bytes to_bytes size_count count form alpha_ns bandwidth",
    "residual_p10 residual_p50 residual_p90 whole",
    {**_TEXTS, "form": pl.String},
    dict.fromkeys(("alpha_ns", "bandwidth", "residual_p10", "residual_p50", "residual_p90"), pl.Float64),
)
_CLASS = ["collective", "span", "ranks"]
_PAIRS = ("send", "recv", "receive", "send_recv")
_JITTER = 1.5  # of the lower quartile of its like: what takes longer has waited for a rank that is not recorded
_LEAST = 1e-6  # 10^9 B/s, of a run of barriers
_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # of a ring, times (ranks - 1)


@dataclass(frozen=True)
class Calibration(Result):
    """What runs tell of their machine.

    Attributes:
        machine: With the fitted transfers; its dimensions by hosts, each with the best bandwidth that was reached.
        transfers: One row per kind, span, group size and range of sizes: collective, span, ranks, from_bytes, to_bytes,
            size_count (distinct sizes), count (collectives), form (`line`; `latency`: bytes make no difference or are
            too few; `bandwidth`: one size, or no latency to see), alpha_ns, bandwidth (10^9 B/s on the bus; null for
            `latency`), residual_p10, residual_p50, residual_p90 ((measured - fitted) / fitted over the collectives),
            whole (whether all ranks of the groups are recorded; else those that seem to have waited for nobody count).
        samples: The collectives: run, collective, span, ranks, size_bytes, bus_bytes, transfer_ns (from the last
            arrival), whole.
        notices: What was left out or assumed.
    """

    machine: Machine
    transfers: pl.DataFrame
    samples: pl.DataFrame
    notices: tuple[Notice, ...] = ()


def calibrate(runs: Sequence[Session], *, ranks_per_host: int | None = None) -> Calibration:
    """Fit the collectives of runs on one machine.

    Args:
        runs: Recorded runs; the more ranks of each the better, since then late arrivals are told from slow transfers.
        ranks_per_host: Ranks are numbered host by host, so many on each; where None the traces tell their hosts.

    Raises:
        InputError: slug `nothing-to-calibrate`: no collective whose kind, size, group and hosts are known.
    """
    hosts = [_hosts(run, ranks_per_host) for run in runs]
    all_calls = pl.concat([_calls(run).with_columns(run=pl.lit(number, pl.Int64)) for number, run in enumerate(runs)])
    members = all_calls.select("run", "members").unique(maintain_order=True)
    spans = [None if ranks is None else _span(ranks, hosts[run]) for run, ranks in members.rows()]
    placed = all_calls.join(
        members.with_columns(pl.Series("span", spans, pl.String)), on=["run", "members"], nulls_equal=True,
        how="left", maintain_order="left",
    )  # fmt: skip
    usable = pl.all_horizontal(
        pl.col("collective").is_in(get_args(Collective)),
        pl.col("size_bytes", "span", "bus_factor").is_not_null(),
        pl.col("transfer_ns") > 0,
    ).fill_null(value=False)
    left_out = placed.filter(~usable)
    notices = []
    if left_out.height:
        kinds = ", ".join(left_out["collective"].fill_null("unknown").unique().sort())
        text = (
            f"{left_out.height} of {placed.height} collectives do not count ({kinds}): their kind, size, group or "
            "hosts are not known"
        )
        notices.append(Notice("collectives-not-calibrated", "warning", text, left_out.height))
    samples = placed.filter(usable).with_columns(bus_bytes=pl.col("size_bytes") * pl.col("bus_factor"))
    # Of groups that are not wholly recorded only what seems to have waited for nobody; nothing where others are whole.
    like = [*_CLASS, "size_bytes"]
    quick = pl.col("transfer_ns") <= _JITTER * pl.col("transfer_ns").quantile(0.25, "lower").over(like)
    samples = samples.filter("whole" | (~pl.col("whole").any().over(_CLASS) & quick)).pipe(as_declared, SAMPLES)
    if not samples.height:
        message = "no collective of these runs has a known kind, size and group, and hosts that are known"
        hint = "PyTorch 2.2 or newer says sizes and groups; --ranks-per-host tells hosts that no trace names"
        raise InputError(message, slug="nothing-to-calibrate", where=" ".join(run.name for run in runs), hint=hint)
    rows = []
    for key, part in samples.sort(*_CLASS).group_by(_CLASS, maintain_order=True):
        rows += _fitted(key, part)
    transfers = pl.DataFrame(rows, schema=TRANSFERS, orient="row")
    partial = transfers.filter(~pl.col("whole"))
    if partial.height:
        text = (
            f"not all ranks of the groups of {partial['count'].sum()} collectives are recorded: of each size the "
            "quickest count, and what all of them waited is part of their latency"
        )
        notices.append(Notice("ranks-missing", "warning", text, int(partial["count"].sum())))
    machine, more = _machine(runs, hosts, transfers, samples)
    return Calibration(machine, transfers, samples, (*notices, *more))


def _calls(run: Session) -> pl.DataFrame:
    """One row per collective: collective, members, ranks, size_bytes, bus_factor, transfer_ns, whole.

    The transfer is the time from the last arrival to the end, the median over the recorded ranks; of a collective of
    which one rank is recorded it is all the time of that rank.
    """
    parts = [rank_part(trace) for trace in run.traces]
    matched = match(parts).parts.select("part", "event", "instance", joined_ns="transfer_ns")
    calls = pl.concat(
        [
            part.calls.filter(pl.col("where") == ("device" if part.ledger.device is not None else "host")).with_columns(
                part=pl.lit(number, pl.Int64)
            )
            for number, part in enumerate(parts)
        ]
    )
    pair, barrier = pl.col("kind").is_in(_PAIRS), pl.col("kind") == "barrier"
    both = pl.concat_list(pl.min_horizontal("rank", "peer"), pl.max_horizontal("rank", "peer"))
    joined = calls.join(matched, on=["part", "event"], how="left", maintain_order="left").with_columns(
        pl.when(pair).then(pl.lit("send")).otherwise("kind").alias("collective"),
        pl.when(pair).then(2).otherwise("group_size").alias("ranks"),
        pl.when(pair).then(both).otherwise("members").cast(pl.List(pl.Int32)).alias("members"),
        pl.coalesce("joined_ns", "duration_ns").alias("transfer_ns"),
        pl.coalesce("instance", -1 - pl.int_range(pl.len())).alias("instance"),
        pl.when(barrier).then(0).otherwise("size_bytes").alias("size_bytes"),
    )
    together = joined.group_by("instance", maintain_order=True).agg(
        pl.col("collective", "members", "ranks").first(),
        pl.col("size_bytes").max(),
        pl.col("transfer_ns").median().cast(pl.Int64),
        pl.len().alias("recorded"),
    )
    # a file that does not say its groups may show that all ranks of the job take part
    world = run.world_size or 0
    ranks = pl.coalesce("ranks", pl.when(pl.col("recorded") == world).then(world))
    all_ranks = pl.when(ranks == world).then(pl.int_ranges(0, pl.lit(world, pl.Int32), dtype=pl.Int32))
    grouped = together.with_columns(ranks.alias("ranks"), pl.coalesce("members", all_ranks).alias("members"))
    kinds = grouped.select("collective", "ranks").unique().drop_nulls()
    factors = [bus_factor(kind, count) for kind, count in kinds.rows()]
    return (
        grouped.join(
            kinds.with_columns(pl.Series("bus_factor", factors, pl.Float64)), on=["collective", "ranks"], how="left",
            maintain_order="left",
        )
        .with_columns((pl.col("recorded") >= pl.col("ranks")).fill_null(value=False).alias("whole"))
        .filter(pl.col("ranks").ne_missing(1))
    )  # fmt: skip


def _hosts(run: Session, ranks_per_host: int | None) -> Mapping[int, str]:
    """The host of each rank: as given, as traces say, else that of its block of as many ranks as a host has devices.

    Launchers number ranks host by host; where the recorded ranks are not numbered so, nothing is said of the others.
    """
    recorded = {trace.rank: trace.meta.host for trace in run.traces if trace.rank is not None and trace.meta.host}
    visible = max((trace.devices.height for trace in run.traces), default=0)
    world = run.world_size or 0
    if ranks_per_host is not None:
        return {rank: f"host {rank // ranks_per_host}" for rank in range(world)}
    blocks = {rank // visible: host for rank, host in recorded.items()} if visible else {}
    by_block = all(blocks[rank // visible] == host for rank, host in recorded.items()) if visible else False
    if world <= visible:  # the whole job is on one host
        return (
            {rank: recorded.get(rank, "host") for rank in range(world)} if len(set(recorded.values())) < 2 else recorded
        )
    if visible < 2 or not by_block or len(set(blocks.values())) < len(blocks):
        return recorded
    return {rank: blocks.get(rank // visible, f"host of rank {rank - rank % visible}") for rank in range(world)}


def _span(members: Sequence[int], hosts: Mapping[int, str]) -> str | None:
    """`inside` a host, `between` hosts, or None where that is not known."""
    different = {hosts[rank] for rank in members if rank in hosts}
    if len(different) > 1:
        return "between"
    return "inside" if different and all(rank in hosts for rank in members) else None


def _fitted(key: tuple[object, ...], part: pl.DataFrame) -> list[tuple[object, ...]]:
    """Rows of `TRANSFERS` of one kind, span and group size; their ranges of sizes leave no gap."""
    size, bus, time = (part[name].cast(pl.Float64).to_numpy() for name in ("size_bytes", "bus_bytes", "transfer_ns"))
    ranges = list(fits(bus, time))
    begins = [int(size[at].min()) for at, _ in ranges]
    rows = []
    for number, (at, line) in enumerate(ranges):
        until = begins[number + 1] - 1 if number + 1 < len(ranges) else int(size[at].max())
        off = np.quantile(time[at] / line.times(bus[at]) - 1, (0.1, 0.5, 0.9)).tolist()
        bandwidth = 1 / line.ns_per_byte if line.ns_per_byte else None  # bytes per ns are 10^9 bytes per second
        rows.append(
            (*key, begins[number], until, np.unique(size[at]).size, at.size, line.form, line.alpha_ns, bandwidth, *off,
             bool(part["whole"].all()))
        )  # fmt: skip
    return rows


def _machine(
    runs: Sequence[Session], hosts: Sequence[Mapping[int, str]], transfers: pl.DataFrame, samples: pl.DataFrame
) -> tuple[Machine, list[Notice]]:
    """The machine of the run with most ranks, with what was fitted to all of them."""
    number = max(range(len(runs)), key=lambda number: runs[number].world_size or len(runs[number].traces))
    run, of_rank = runs[number], hosts[number]
    world = max(run.world_size or 0, *(rank + 1 for rank in of_rank), len(run.traces))
    by_host: dict[str, list[int]] = {}
    for rank, host in sorted(of_rank.items()):
        by_host.setdefault(host, []).append(rank)
    sizes = {len(ranks) for ranks in by_host.values()}
    size = sizes.pop() if len(sizes) == 1 and len(of_rank) == world else world
    notices = []
    if (size == world and len(by_host) > 1) or len(of_rank) < world:
        text = (
            f"the hosts of the {world} ranks are not all known, or hold different numbers of them: one dimension joins "
            "all ranks"
        )
        notices.append(Notice("hosts-unknown", "warning", text))
    device = next((name for trace in run.traces for name in trace.devices["name"].drop_nulls()), None)
    spans = [("inside", size), ("between", world // size)] if size < world else [("inside", world)]
    dimensions = []
    for span, members in spans:
        if members == 1 < world:
            continue
        bandwidth, latency, assumed = _link(span, transfers, samples, device)
        dimensions.append(Dimension("switch", members, bandwidth, latency, name=span))
        if assumed:
            text = f"no transfer {span} hosts tells a bandwidth: {assumed}"
            notices.append(Notice("bandwidth-assumed", "warning", text))
    names = ", ".join(Path(run.name).name for run in runs)
    order = [rank for ranks in by_host.values() for rank in ranks] if size < world else []
    fields = [name for name in transfers.columns if name not in ("size_count", "form", "whole")]
    rounded = transfers.select(fields).with_columns(
        pl.col("alpha_ns").round(1), pl.col("bandwidth").round_sig_figs(6), pl.col("^residual.*$").round(4)
    )
    machine = Machine(
        tuple(dimensions),
        name=f"the machine of {Path(run.name).name}",
        source=f"traceloom calibrate {__version__}: {samples.height} collectives of {names}",
        order=() if order == sorted(order) else tuple(order),
        per_host=size,
        device=next((peak for trace in run.traces for peak in peaks(trace).values() if isinstance(peak, Peak)), None),
        transfers=tuple(MeasuredTransfer(**row) for row in rounded.to_dicts()),
    )
    return machine, notices


def _link(span: str, transfers: pl.DataFrame, samples: pl.DataFrame, device: str | None) -> tuple[float, float, str]:
    """Bandwidth (10^9 B/s) and latency (ns) of the links of a span, and what is assumed where nothing tells them.

    The best bandwidth on the bus of any kind, and the least latency of a step of a ring.
    """
    measured = transfers.filter(pl.col("span") == span)
    steps = pl.col("collective").replace_strict(_STEPS, default=None, return_dtype=pl.Int64) * (pl.col("ranks") - 1)
    steps = steps.fill_null(1)
    latency = measured.select((pl.col("alpha_ns") / steps).min()).item() or 0.0
    best = measured["bandwidth"].max()
    if best is not None:
        return round(float(best), 3) or _LEAST, round(latency), ""  # type: ignore[arg-type]
    link = link_of(device) if span == "inside" else None
    if link is not None:
        return link.peak_gb_per_s, round(latency), f"that of {link.name} is taken"
    reached = samples.select((pl.col("bus_bytes") / pl.col("transfer_ns")).max()).item()
    return max(round(reached, 3), _LEAST), round(latency), "the highest rate of any collective is taken"
