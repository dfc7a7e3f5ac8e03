"""One model recorded on two devices: the kernel time that one recording predicts for the other, and
the measured one.

    python benchmarks/device_pairs.py [DIRECTORY]

Prints, for each public pair and kind of kernels, the time here, predicted there, its interval and
the time measured there; `outside` marks what lies outside. The directory holds the recordings
(default: ../shared/data/kineto).
"""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl

from traceloom.analyze.kernel_kinds import classify_kinds
from traceloom.formats import load
from traceloom.graph import link_session
from traceloom.workload.simulate.device import rescale

PAIRS = (("h100", "mi300", "MI300X"), ("mi300", "h100", "H100 SXM"))
MODELS = ("bert_small", "qwen_0.5b")
COLUMNS = ("here_ns", "there_ns", "low_ns", "high_ns", "measured_ns")


def table(directory: Path, model: str, pair: tuple[str, str, str]) -> pl.DataFrame:
    """Times of a pair by kind, and of all kinds together; ns."""
    here, there = (load(directory / f"{device}_{model}.json.gz") for device in pair[:2])
    answer = rescale(link_session(here), here, pair[2])
    work = answer.account.account.filter(~pl.col("rule").is_in(["host", "communication"]))
    predicted = work.group_by("kind").agg(pl.col(COLUMNS[:4]).sum())
    trace = there.traces[0]
    measured = classify_kinds(trace).select(
        pl.col("kind").cast(pl.String), measured_ns=trace.gpu_work()["duration_ns"]
    )
    both = predicted.join(
        measured.group_by("kind").agg(pl.col("measured_ns").sum()),
        on="kind",
        how="full",
        coalesce=True,
    )
    by_kind = (
        both.fill_null(0).sort("here_ns", "kind", descending=[True, False]).select("kind", *COLUMNS)
    )
    return pl.concat([by_kind, by_kind.select(pl.lit("all").alias("kind"), pl.col(COLUMNS).sum())])


def main() -> None:
    """Print the tables."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data" / "kineto"
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    for model in MODELS:
        for pair in PAIRS:
            print(f"\n{model}: {pair[0]} -> {pair[1]} (us)")
            print(
                f"{'kind':<16}{'here':>10}{'predicted':>10}{'low':>10}{'high':>10}{'measured':>10}"
            )
            for kind, *times in table(directory, model, pair).rows():
                _, _, low, high, measured = times
                word = "" if low <= measured <= high else "  outside"
                print(f"{kind:<16}" + "".join(f"{time / 1000:>10.0f}" for time in times) + word)


if __name__ == "__main__":
    main()
