"""How long a machine's collectives take, fitted to a run's own: latency and bandwidth per kind, span and group size.

What is fitted, and what a recording cannot tell, stands in docs/concepts/calibration.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import polars as pl

from traceloom import __version__
from traceloom.analyze.across.matched import match
from traceloom.analyze.across.rank_part import rank_part
from traceloom.analyze.collective.bandwidth import bus_factor
from traceloom.analyze.peaks import Peak, peaks
from traceloom.errors import InputError
from traceloom.model import Session
from traceloom.model.frames import as_declared
from traceloom.model.notice import Notice
from traceloom.model.result import Result
from traceloom.simulate.machine import Machine
from traceloom.simulate.machine.parts import Collective
from traceloom.simulate.measured_transfers import CLASS, SAMPLES, fit_transfers, measured_transfers, network_of

_PAIRS = ("send", "recv", "receive", "send_recv")
_JITTER = 1.5  # of the lower quartile of its like: what takes longer has waited for a rank that is not recorded


@dataclass(frozen=True)
class Calibration(Result):
    """What runs, or measurements on the machine itself, tell of a machine.

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
    like = [*CLASS, "size_bytes"]
    quick = pl.col("transfer_ns") <= _JITTER * pl.col("transfer_ns").quantile(0.25, "lower").over(like)
    samples = samples.filter("whole" | (~pl.col("whole").any().over(CLASS) & quick)).pipe(as_declared, SAMPLES)
    if not samples.height:
        message = "no collective of these runs has a known kind, size and group, and hosts that are known"
        hint = "PyTorch 2.2 or newer says sizes and groups; --ranks-per-host tells hosts that no trace names"
        raise InputError(message, slug="nothing-to-calibrate", where=" ".join(run.name for run in runs), hint=hint)
    transfers = fit_transfers(samples)
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
        names = set(recorded.values())
        return dict.fromkeys(range(world), next(iter(names), "host")) if len(names) < 2 else recorded
    if visible < 2 or not by_block or len(set(blocks.values())) < len(blocks):
        return recorded
    return {rank: blocks.get(rank // visible, f"host of rank {rank - rank % visible}") for rank in range(world)}


def _span(members: Sequence[int], hosts: Mapping[int, str]) -> str | None:
    """`inside` a host, `between` hosts, or None where that is not known."""
    different = {hosts[rank] for rank in members if rank in hosts}
    if len(different) > 1:
        return "between"
    return "inside" if different and all(rank in hosts for rank in members) else None


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
    dimensions, more = network_of(world, size, transfers, samples, device)
    names = ", ".join(Path(run.name).name for run in runs)
    order = [rank for ranks in by_host.values() for rank in ranks] if size < world else []
    machine = Machine(
        dimensions,
        name=f"the machine of {Path(run.name).name}",
        source=f"traceloom calibrate {__version__}: {samples.height} collectives of {names}",
        order=() if order == sorted(order) else tuple(order),
        per_host=size,
        device=next((peak for trace in run.traces for peak in peaks(trace).values() if isinstance(peak, Peak)), None),
        transfers=measured_transfers(transfers),
    )
    return machine, [*notices, *more]
