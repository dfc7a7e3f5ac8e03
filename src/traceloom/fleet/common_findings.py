"""Which findings the captures of the fleet have, and how common each is."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from traceloom.model.result import Result


@dataclass(frozen=True)
class CommonFindings(Result):
    """Findings by rule.

    Attributes:
        rows: One row per rule, the one of most captures first: rule, findings, captures (that have it), fraction (of
            all captures), jobs, saving_fraction (of the step, mean over its findings that save time), confidence
            (mean), example (the capture where it saves most).
        captures: All captures that were looked at.
    """

    rows: pl.DataFrame
    captures: int


def common_findings(findings: pl.LazyFrame, captures: pl.LazyFrame) -> CommonFindings:
    """Count findings.

    Args:
        findings: Rows of this table.
        captures: The same; a capture of no job is a job of its own.
    """
    about = captures.select("capture", job=pl.coalesce("job", "capture"))
    every = int(about.select(pl.col("capture").n_unique()).collect().item())
    saving = pl.col("saving_fraction")
    rows = (
        findings.join(about, on="capture")
        .group_by(rule="slug")
        .agg(
            findings=pl.len(),
            captures=pl.col("capture").n_unique(),
            jobs=pl.col("job").n_unique(),
            saving_fraction=saving.mean(),
            confidence=pl.col("confidence").mean(),
            example=pl.col("capture").sort_by(saving, "capture", nulls_last=False).last(),
        )
        .with_columns(fraction=pl.col("captures") / max(every, 1))
        .sort("captures", "rule", descending=[True, False])
    )
    return CommonFindings(rows.collect(), every)
