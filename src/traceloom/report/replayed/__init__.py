"""A replay beside what was recorded: what `traceloom replay` knows, as one JSON object; every view is drawn from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO, cast

import polars as pl

from traceloom import __version__
from traceloom.model import units
from traceloom.replay.comparison import ReplayComparison
from traceloom.report.views.jsonfile import encode

if TYPE_CHECKING:
    from traceloom.report.documents import ReplayDocument
    from traceloom.report.documents.replay import ReplayWholeRow

FORMAT = "traceloom-replay"
VERSION = 1


def build(comparison: ReplayComparison) -> ReplayDocument:
    """The document: the answer, what it cannot tell, and its tables but that of single ops."""
    plain = comparison.to_dict()  # frames as lists of rows
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "sentence": sentence(comparison),
        "limits": [*limits(comparison)],
        "source": comparison.source,
        "recorded_torch": comparison.recorded_torch,
        "torch": comparison.torch,
        "device": comparison.device,
        "pace": comparison.pace,
        "whole": plain["whole"],
        "coverage": plain["coverage"],
        "not_run": plain["not_run"],
        "holes": plain["holes"],
        "ops": plain["ops"],
        "collectives": plain["collectives"],
        "contents": plain["contents"],
        "long_count": comparison.long_count,
        "long_ratios": plain["long_ratios"],
        "environment": plain["environment"],
        "notices": [notice.to_dict() for notice in comparison.notices],
        "machine": comparison.machine,
        "simulated": plain["simulated"],
        "not_simulated": comparison.not_simulated,
    }


def write_json(comparison: ReplayComparison, handle: BinaryIO) -> None:
    """The document as JSON."""
    handle.write(encode(build(comparison)))


def slowest(comparison: ReplayComparison) -> ReplayWholeRow:
    """The row of `whole` of the rank whose passes took longest."""
    row = comparison.whole.sort("replayed_ns", "rank", descending=[True, False]).row(0, named=True)
    return cast("ReplayWholeRow", row)


def on_gpu(whole: Iterable[ReplayWholeRow]) -> bool:
    """Whether both sides know the GPU work of some op, by the rows of `whole`."""
    return any(row["gpu_ratio"] is not None for row in whole)


def covered(comparison: ReplayComparison) -> float:
    """The share of the recorded time of all ranks' ops that ran as they are; of their number where none was timed."""
    coverage = comparison.coverage
    by = "recorded_ns" if coverage["time_share"].is_not_null().any() else "count"
    return float(coverage.filter(outcome="run")[by].sum()) / max(float(coverage[by].sum()), 1.0)


def sentence(comparison: ReplayComparison) -> str:
    """The answer in words."""
    if not comparison.whole.height:
        return "Nothing was replayed."
    row = slowest(comparison)
    what = "the step" if row["recorded_ns"] is not None else "a pass"
    subject = f"On rank {row['rank']}, {what}" if comparison.whole.height > 1 else what.capitalize()
    answer = f"{subject} took {units.duration(row['replayed_ns'])}"
    if row["recorded_ns"] is not None:
        answer += f", {row['ratio']:.2f} times the recorded {units.duration(row['recorded_ns'])}"
        if row["cpu_ratio"] is not None:
            answer += f" (processor time: {row['cpu_ratio']:.2f} times)"
    elif row["ops_ratio"] is not None:
        answer += f"; its ops took {row['ops_ratio']:.2f} times as long as recorded"
    if row["gpu_ratio"] is not None:
        answer += f"; its GPU work took {row['gpu_ratio']:.2f} times as long as recorded"
    timed = comparison.coverage["time_share"].is_not_null().any()
    ran = f"{units.share(covered(comparison), 1)} of {'the time of its ops' if timed else 'its ops'}"
    on_gpus = comparison.coverage.drop_nulls("recorded_gpu_ns")
    if comparison.device != "cpu" and (work := int(on_gpus["recorded_gpu_ns"].sum())):
        ran += f" and {units.share(int(on_gpus.filter(outcome='run')['recorded_gpu_ns'].sum()), work)} of its GPU work"
    return " ".join([f"{answer}. {ran} ran.", *beside_simulation(comparison)])


def beside_simulation(comparison: ReplayComparison) -> Iterator[str]:
    """The slowest rank's replay beside its simulation, in words; nothing where there is none."""
    for row in comparison.simulated.filter(rank=slowest(comparison)["rank"]).iter_rows(named=True):
        between = "with" if comparison.pace == "recorded" else "without"
        differs = "" if row["difference"] is None else f" ({units.change(row['difference'])} against the replay)"
        yield (
            f"Simulated on {comparison.machine}, the same ops {between} the host's gaps take "
            f"{units.duration(row['simulated_ns'])}{differs}."
        )


def limits(comparison: ReplayComparison) -> Iterator[str]:
    """What these times do not tell, in words; one sentence each."""
    if not comparison.whole.height:
        return
    if comparison.not_simulated:
        yield f"It was not simulated on {comparison.machine}: {comparison.not_simulated}."
    row = slowest(comparison)
    in_ops = int(comparison.coverage.filter(rank=row["rank"])["recorded_ns"].sum())
    if comparison.pace == "fast" and row["recorded_ns"] and row["recorded_ns"] > in_ops:
        outside = row["recorded_ns"] - in_ops
        share = units.share(outside, row["recorded_ns"])
        compiled = comparison.holes.filter(rank=row["rank"]).height
        between = "Python, loading, waiting, kernels of compiled code" if compiled else "Python, loading, waiting"
        yield (
            f"{units.duration(outside)} of the recorded step ({share}) passed between ops: {between}. The pace `fast` "
            "leaves it out; --pace recorded keeps it."
        )
    of_one_side = comparison.each.filter(pl.col("recorded_gpu_ns").is_null() != pl.col("replayed_gpu_ns").is_null())
    if comparison.whole["gpu_ratio"].is_not_null().any() and of_one_side.height:
        recorded, here = (units.duration(int(of_one_side[f"{side}_gpu_ns"].sum())) for side in ("recorded", "replayed"))
        yield (
            f"GPU work of {units.counted(of_one_side.height, 'op')} is known of one side alone ({recorded} as "
            f"recorded, {here} here): it is in no ratio."
        )
    if hidden := int(comparison.holes["recorded_ns"].sum()):
        took = units.duration(hidden)
        yield f"{took} of the recorded steps ran in compiled kernels, which no host trace shows: not replayed."
    contents = comparison.contents
    guessed = contents.filter(pl.col("evidence").is_null() | (pl.col("evidence") == "guess"))
    if guessed.height:
        tensors, size = units.counted(int(guessed["count"].sum()), "tensor"), units.size(int(guessed["bytes"].sum()))
        yield (
            f"What {tensors} of {units.count(int(contents['count'].sum()))} from outside held is a guess ({size}): ops "
            "whose time depends on contents may differ."
        )
    if comparison.collectives.filter("asynchronous", pl.col("on_gpu").not_()).height:
        yield "Asynchronous communication goes on after its calls: how long it took is not compared."
    if comparison.recorded_torch and comparison.torch and comparison.recorded_torch != comparison.torch:
        yield f"It was recorded with torch {comparison.recorded_torch} and replayed with {comparison.torch}."
