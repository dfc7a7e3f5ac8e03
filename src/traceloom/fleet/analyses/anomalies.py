"""Finds slow hosts and ranks, and counts how common findings are.

A host is compared with hosts that ran the same kernels on the same shapes and device model, a rank
with the other ranks of its job. The score is the logarithm of a time over the median of the peers,
so no absolute expectation is needed. The distance is a robust z: the score divided by 1.4826 times
the median absolute deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from traceloom.trace.frames import Result

MIN_PEERS = 4
"""Min number of hosts, or ranks, for a comparison."""

OUTLIER_Z = 3.5
"""Robust z of an outlier (Iglewicz and Hoaglin, 1993)."""

MIN_RATIO = 1.05
"""Min ratio to the peers of an outlier: among nearly equal peers, any difference has a large z."""

_MIN_SCATTER = 0.005
# Standard deviation of a normal distribution over its median absolute deviation.
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Outliers(Result):
    """Hosts and ranks against their peers.

    Attributes:
        hosts: Slowest first: host, device_model, ratio (the median over its kernels of its mean
            duration over the median of the hosts), z, outlier, kernels (kernels and shapes that at
            least 4 hosts ran), jobs (that ran there).
        ranks: The slowest first: job, rank, host (of the last capture), ratio (the median over
            captures of the time in which its compute kernels run, over the median of the ranks), z,
            outlier, captures.
    """

    hosts: pl.DataFrame
    ranks: pl.DataFrame


def find_outliers(kernels: pl.LazyFrame, captures: pl.LazyFrame, devices: pl.LazyFrame) -> Outliers:
    """Compares hosts and ranks with their peers.

    Args:
        kernels: Rows of this table.
        captures: Rows of this table, of the same days.
        devices: Rows of this table, of the same days.
    """
    rank_hosts = (
        devices.select("capture", "rank", "host")
        .group_by("capture", "rank")
        .agg(pl.col("host").max())
        .filter(pl.col("host").is_not_null())
    )
    jobs = captures.select("capture", job=pl.coalesce("job", "capture"))
    keys = ["kernel", "shapes", "device_model"]
    # Many rows, few names: categorical codes make grouping fast.
    ranks_of = rank_hosts.join(jobs, on="capture").with_columns(
        pl.col("host", "job").cast(pl.Categorical)
    )
    # Jobs may run less work of the same shape, but not shorter work: so the median over jobs is
    # used.
    means = (
        kernels.filter(pl.col("count") > 0, pl.col("total_ns") > 0)
        .with_columns(pl.col(keys).cast(pl.Categorical))
        .join(ranks_of, on=["capture", "rank"], nulls_equal=True)
        .group_by(*keys, "host", "job")
        .agg(mean=pl.col("total_ns").sum() / pl.col("count").sum())
        .group_by(*keys, "host")
        .agg(pl.col("mean").median())
        .with_columns(
            distance=(pl.col("mean") / pl.col("mean").median().over(keys)).log(),
            peers=pl.len().over(keys),
        )
        .filter(pl.col("peers") >= MIN_PEERS)
    )
    host_distances = means.group_by(pl.col("host", "device_model").cast(pl.String)).agg(
        pl.col("distance").median(), kernels=pl.len()
    )
    ran = rank_hosts.join(jobs, on="capture").group_by("host").agg(jobs=pl.col("job").n_unique())
    hosts = _compare_with_peers(host_distances.join(ran, on="host"), ["device_model"])

    rank_distances = (
        devices.filter(pl.col("rank").is_not_null())
        .group_by("capture", "rank")
        .agg(pl.col("compute_ns").sum(), pl.col("host").max())
        .filter(pl.col("compute_ns") > 0)
        .with_columns(
            distance=(pl.col("compute_ns") / pl.col("compute_ns").median().over("capture")).log()
        )
        .join(
            captures.select("capture", "start_ns", job=pl.coalesce("job", "capture")), on="capture"
        )
        .sort("start_ns", "capture")
        .group_by("job", "rank")
        .agg(pl.col("distance").median(), pl.col("host").last(), captures=pl.len())
    )
    ranks = _compare_with_peers(rank_distances, ["job"])
    return Outliers(
        hosts.select("host", "device_model", "ratio", "z", "outlier", "kernels", "jobs"),
        ranks.select("job", "rank", "host", "ratio", "z", "outlier", "captures"),
    )


def _compare_with_peers(scores: pl.LazyFrame, peers: Sequence[str]) -> pl.DataFrame:
    """Compares each score with its peers, slowest first; groups with too few peers are dropped."""
    distance = pl.col("distance")
    off = distance - distance.median().over(peers)
    scatter = (off.abs().median().over(peers) * _MAD_TO_SIGMA).clip(lower_bound=_MIN_SCATTER)
    return (
        scores.with_columns(count=pl.len().over(peers))
        .filter(pl.col("count") >= MIN_PEERS)
        .with_columns(z=off / scatter, ratio=off.exp())
        .with_columns(outlier=(pl.col("z") >= OUTLIER_Z) & (pl.col("ratio") >= MIN_RATIO))
        .collect()
        .sort("z", *peers, descending=[True, *(False for _ in peers)])
    )


@dataclass(frozen=True)
class CommonFindings(Result):
    """Findings by rule.

    Attributes:
        rows: One row per rule, the one of most captures first: rule, findings, captures (that have it), fraction (of
            all captures), jobs, saving_fraction (of the step, mean over its findings that save
            time), confidence (mean), example (the capture where it saves most).
        captures: All captures that were looked at.
    """

    rows: pl.DataFrame
    captures: int


def count_common_findings(findings: pl.LazyFrame, captures: pl.LazyFrame) -> CommonFindings:
    """Counts findings by rule.

    Args:
        findings: Rows of this table.
        captures: Rows of this table; a capture without a job counts as a job of its own.
    """
    capture_jobs = captures.select("capture", job=pl.coalesce("job", "capture"))
    capture_count = int(capture_jobs.select(pl.col("capture").n_unique()).collect().item())
    saving = pl.col("saving_fraction")
    rows = (
        findings.join(capture_jobs, on="capture")
        .group_by(rule="slug")
        .agg(
            findings=pl.len(),
            captures=pl.col("capture").n_unique(),
            jobs=pl.col("job").n_unique(),
            saving_fraction=saving.mean(),
            confidence=pl.col("confidence").mean(),
            example=pl.col("capture").sort_by(saving, "capture", nulls_last=False).last(),
        )
        .with_columns(fraction=pl.col("captures") / max(capture_count, 1))
        .sort("captures", "rule", descending=[True, False])
    )
    return CommonFindings(rows.collect(), capture_count)
