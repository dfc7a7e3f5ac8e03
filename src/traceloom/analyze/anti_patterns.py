"""Known anti-patterns of PyTorch programs, found in files alone.

Definitions: docs/concepts/anti-patterns.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.anti_pattern_rules import RULES, Found
from traceloom.analyze.op_siblings import Host, host_of
from traceloom.analyze.remembered import per_trace
from traceloom.model import Trace
from traceloom.model.result import Result

Name = pl.Enum(list(RULES))
PATTERNS = pl.Schema(
    {
        "pattern": Name,
        "checked": pl.Boolean(),
        "match_count": pl.Int64(),
        "host_ns": pl.Int64(),
        "gpu_ns": pl.Int64(),
        "evidence": pl.Enum(["correlated", "inferred"]),
        "reason": pl.String(),
        "advice": pl.String(),
    }
)
MATCHES = pl.Schema(
    {
        "pattern": Name,
        "event": pl.UInt32(),
        "name": pl.String(),
        "start_ns": pl.Int64(),
        "duration_ns": pl.Int64(),
        "gpu_ns": pl.Int64(),
        "step": pl.Int32(),
        "thread": pl.Int64(),
        "evidence": pl.Enum(["correlated", "inferred"]),
        "detail": pl.String(),
    }
)


@dataclass(frozen=True)
class AntiPatterns(Result):
    """Anti-patterns of one trace.

    Attributes:
        patterns: One row per known anti-pattern, always all eight: pattern, checked (False where the file does not
            tell), match_count, host_ns and gpu_ns (time of the matches on the host, and of the GPU work launched in
            them; null where it is not checked), evidence (correlated: the recording shows it; inferred: concluded from
            the order of operators; null without matches), reason (why it is not checked), advice.
        matches: One row per match: pattern, event (its row), name, start_ns, duration_ns, gpu_ns, step, thread,
            evidence, detail (what was seen). Matches of different patterns may share time.
    """

    patterns: pl.DataFrame
    matches: pl.DataFrame


@per_trace
def anti_patterns(trace: Trace) -> AntiPatterns:
    """Look for each of the known anti-patterns, or say why it cannot be looked for."""
    host = host_of(trace)
    rows, matches = [], []
    for name, (rule, advice) in RULES.items():
        finding = rule(host)
        match_rows = _matches(host, name, finding)
        checked = finding.reason is None
        rows.append(
            {
                "pattern": name,
                "checked": checked,
                "match_count": match_rows.height if checked else None,
                "host_ns": int(match_rows["duration_ns"].sum()) if checked else None,
                "gpu_ns": int(match_rows["gpu_ns"].sum()) if checked else None,
                "evidence": finding.evidence if match_rows.height else None,
                "reason": finding.reason,
                "advice": advice,
            }
        )
        matches.append(match_rows)
    return AntiPatterns(pl.DataFrame(rows, schema=PATTERNS), pl.concat(matches))


def _matches(host: Host, name: str, finding: Found) -> pl.DataFrame:
    first = finding.position.astype(np.int64)
    last = first if finding.last is None else finding.last
    row, tree = host.tree.row[first], host.tree
    events = host.trace.events
    if finding.last is None:
        gpu = host.gpu_ns[first]
    else:  # the events from the first to the last
        gpu = np.array(
            [_between(host, *pair) for pair in zip(first.tolist(), last.tolist(), strict=True)], dtype=np.int64
        )
    return pl.DataFrame(
        {
            "pattern": pl.Series([name] * first.size, dtype=Name),
            "event": row,
            "name": events["name"].gather(row),
            "start_ns": tree.start_ns[first],
            "duration_ns": tree.end_ns[last] - tree.start_ns[first],
            "gpu_ns": gpu,
            "step": events["step"].gather(row),
            "thread": events["thread"].gather(row),
            "evidence": [finding.evidence] * first.size,
            "detail": list(finding.detail),
        },
        schema_overrides={"detail": pl.String, "evidence": MATCHES["evidence"]},
    ).cast(MATCHES)


def _between(host: Host, first: int, last: int) -> int:
    """GPU work launched in the siblings from one to another."""
    total, at = 0, first
    stop = int(host.tree.stop[last])
    while at < stop:
        total += int(host.gpu_ns[at])
        at = int(host.tree.stop[at])
    return total
