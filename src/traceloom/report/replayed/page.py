"""A replay as a page of its own in the frame of the report's page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from traceloom.model import graph_schema as gs
from traceloom.model import units
from traceloom.model.frames import as_declared
from traceloom.model.graph import Graph
from traceloom.replay.comparison import LONG_NS, ReplayComparison
from traceloom.report.before_after.payload import BeforeAfter, pack_both
from traceloom.report.comparison.page import standing
from traceloom.report.notices import with_ranks
from traceloom.report.replayed import covered, on_gpu, slowest
from traceloom.report.replayed.scatter import scatter
from traceloom.report.replayed.tables import tables
from traceloom.report.views.html.frame import asset, framed, key_numbers, one_after_the_other
from traceloom.report.views.html.text import prose, text

if TYPE_CHECKING:
    from traceloom.report.documents import ReplayDocument

_ABOUT_TIMELINE = (
    "Every thread as recorded (before) and, below it, as replayed (after), on one axis: op after op, each as long as "
    "its median; the recorded ones with the host's gaps between them. What was not timed on both sides is not drawn."
)
_ABOUT_SCATTER = "Above the line the replay took longer, below it less."
_GPU_SCATTER = f"GPU work that a call launched. {_ABOUT_SCATTER}"
_HOST_TIMELINE = f"{_ABOUT_TIMELINE} These are times of the host; GPU work is not drawn."


def render(document: ReplayDocument, comparison: ReplayComparison) -> str:
    """The document as one HTML page that needs nothing but itself.

    Args:
        document: What `traceloom.report.replayed.build` made of the comparison.
        comparison: The comparison, whose single ops are drawn.
    """
    name, view = str(document["source"]), timeline(comparison)
    return framed(
        title=f"Replayed: {name}",
        name=f"Replayed: {name}",
        headline=f"<h1>{text(document['sentence'])}</h1>",
        numbers=key_numbers((title, value, "", more) for title, value, more in _numbers(comparison)),
        footer=(
            f"<p>Traceloom {text(document['traceloom'])}</p>"
            "<p>The same for programs: <code>traceloom replay … -o replay.json</code>; every op: "
            "<code>-o each.csv</code>; a script that needs torch alone: <code>-o replay.py</code></p>"
        ),
        data=view.payload if view else "",
        **one_after_the_other(_sections(document, view)),
    )


def timeline(comparison: ReplayComparison) -> BeforeAfter | None:
    """Both timelines; None where no op was timed."""
    each = comparison.each.with_columns(pl.col("gap_ns").fill_null(0))
    if not each.height:
        return None
    lanes = each.select("rank", "thread").unique(maintain_order=True).with_row_index("lane")
    numbered = each.drop("node", "op").join(lanes, on=["rank", "thread"], maintain_order="left").with_row_index("node")
    communicates = pl.col("name").str.starts_with("c10d::")

    def graph(side: str, *, with_gaps: bool) -> Graph:
        length = pl.col(f"{side}_ns") + (pl.col("gap_ns") if with_gaps else 0)
        nodes = numbered.with_columns(
            pl.when(communicates).then(pl.lit(gs.COLLECTIVE)).otherwise(pl.lit(gs.HOST)).alias("kind"),
            pl.lit("op").alias("category"),
            (length.cum_sum().over("rank") - pl.col(f"{side}_ns")).alias("start_ns"),
            *(pl.col(f"{side}_ns").alias(column) for column in ("duration_ns", "work_ns")),
            pl.lit(0).alias("residual_ns"),
        )  # fmt: skip
        missing = [pl.lit(None).alias(column) for column in gs.GRAPH_SCHEMAS["nodes"] if column not in nodes.columns]
        nodes = as_declared(nodes.with_columns(missing), gs.GRAPH_SCHEMAS["nodes"])
        return Graph(nodes, gs.empty_frame("edges"), _lanes(lanes))

    recorded, replayed = graph("recorded", with_gaps=True), graph("replayed", with_gaps=comparison.pace == "recorded")
    ranks = comparison.whole.select(
        "rank", before_ns=pl.coalesce("recorded_ns", "recorded_ops_ns"), after_ns="replayed_ns"
    ).with_columns(saved_ns=pl.col("before_ns") - pl.col("after_ns"))
    changed = np.zeros(each.height, dtype=np.bool_)
    return pack_both(recorded, replayed, changed, ranks, words=("recorded", "replayed"), paths=False)


def _lanes(lanes: pl.DataFrame) -> pl.DataFrame:
    named = lanes.with_columns(kind=pl.lit("host"), name=pl.format("thread {}", "thread"))
    missing = [pl.lit(None).alias(column) for column in gs.GRAPH_SCHEMAS["lanes"] if column not in named.columns]
    return as_declared(named.with_columns(missing), gs.GRAPH_SCHEMAS["lanes"])


def _numbers(comparison: ReplayComparison) -> Iterator[tuple[str, str, str]]:
    if not comparison.whole.height:
        return
    row = slowest(comparison)
    if row["recorded_ns"] is not None:
        steps = units.counted(row["step_count"], "timed step")
        yield "Recorded step", units.duration(row["recorded_ns"]), f"median of {steps}"
    yield "Replayed", units.duration(row["replayed_ns"]), f"median of {units.counted(row['pass_count'], 'pass')}"
    if row["cpu_ratio"] is not None:
        yield "Processor time", f"{row['cpu_ratio']:.2f} ×", f"{units.duration(row['replayed_cpu_ns'])} in the replay"
    if row["gpu_ratio"] is not None:
        yield "GPU work", f"{row['gpu_ratio']:.2f} ×", f"{units.duration(row['replayed_gpu_ns'])} in the replay"
    for simulated in comparison.simulated.filter(rank=row["rank"]).iter_rows(named=True):
        differs = (
            "" if simulated["difference"] is None else f"{units.change(simulated['difference'])} against the replay, "
        )
        yield "Simulated", units.duration(simulated["simulated_ns"]), f"{differs}on {comparison.machine}"
    yield "Coverage", units.share(covered(comparison), 1), "of what was recorded ran as it is"
    if comparison.long_ratios is not None:
        low, median, high = comparison.long_ratios
        least = units.duration(LONG_NS)
        more = f"P10–P90 {low:.2f}–{high:.2f}, of {units.counted(comparison.long_count, 'op')} from {least} on"
        yield "Ratio of ops", f"{median:.2f}", more


def _sections(document: ReplayDocument, view: BeforeAfter | None) -> Iterator[tuple[str, str, str, str]]:
    notes = dict.fromkeys([*document["limits"], *(sentence for _, sentence in with_ranks(document["notices"]))])
    listed = "".join(f"<li>{prose(note)}</li>" for note in notes) or "<li>Nothing is known of.</li>"
    yield "limits", "What it cannot show", "What these times do not tell.", f"<ul>{listed}</ul>"
    of_gpu = on_gpu(document["whole"])
    if picture := scatter(document["ops"], of_gpu=of_gpu):
        yield "scatter", "Recorded and replayed", _GPU_SCATTER if of_gpu else _ABOUT_SCATTER, picture
    if view is not None:
        note = f'<p class="quiet">{prose(view.said)}</p>' if view.said else ""
        yield "timeline", "Timelines", _HOST_TIMELINE if of_gpu else _ABOUT_TIMELINE, note + asset("timeline.html")
    for each in tables(document):
        yield standing(each)
