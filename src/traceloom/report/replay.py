"""The result of a replay (`traceloom replay`): document, page and terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np
import polars as pl
from rich.text import Text

from traceloom import __version__
from traceloom.graph import graph as graph_schema
from traceloom.graph.graph import Graph
from traceloom.report.before_after import BeforeAfterTimeline, pack_timelines
from traceloom.report.comparison import render_table_section
from traceloom.report.document import Cells, Col, ReportOptions, Table, format_yes_no
from traceloom.report.figure import draw_scatter, escape_html, render_inline_code
from traceloom.report.labels import fit_name, merge_rank_notices
from traceloom.report.sections.section import Columns, build_table
from traceloom.report.views import read_asset
from traceloom.report.views.files import ResultFiles, encode
from traceloom.report.views.page import list_sections, render_key_numbers, render_page
from traceloom.report.views.terminal import render_declared_table
from traceloom.report.views.terminal_table import render_heading, render_paragraph
from traceloom.system import units
from traceloom.system.text import encode_utf8
from traceloom.trace.frames import cast_to_schema
from traceloom.workload.replay.comparison import LONG_NS, TABLES, ReplayComparison

if TYPE_CHECKING:
    from traceloom.report.documents import ReplayDocument
    from traceloom.report.documents.replay import ReplayWholeRow


FORMAT = "traceloom-replay"
VERSION = 1


def build(comparison: ReplayComparison) -> ReplayDocument:
    """Builds the document: the answer, its limits, and its tables except that of single ops."""
    values = comparison.to_dict()  # frames as lists of rows
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "sentence": describe_replay(comparison),
        "limits": [*describe_limits(comparison)],
        "source": comparison.source,
        "recorded_torch": comparison.recorded_torch,
        "torch": comparison.torch,
        "device": comparison.device,
        "pace": comparison.pace,
        "whole": values["whole"],
        "coverage": values["coverage"],
        "not_run": values["not_run"],
        "holes": values["holes"],
        "ops": values["ops"],
        "collectives": values["collectives"],
        "contents": values["contents"],
        "long_count": comparison.long_count,
        "long_ratios": values["long_ratios"],
        "environment": values["environment"],
        "notices": [notice.to_dict() for notice in comparison.notices],
        "machine": comparison.machine,
        "simulated": values["simulated"],
        "not_simulated": comparison.not_simulated,
    }


def write_json(comparison: ReplayComparison, handle: BinaryIO) -> None:
    handle.write(encode(build(comparison)))


def find_slowest_rank(comparison: ReplayComparison) -> ReplayWholeRow:
    """Returns the row of `whole` of the rank whose passes took longest."""
    return cast(
        "ReplayWholeRow",
        comparison.whole.sort("replayed_ns", "rank", descending=[True, False]).row(0, named=True),
    )


def has_gpu_times(total_rows: Iterable[ReplayWholeRow]) -> bool:
    """Whether both sides have the GPU time of some op, by the rows of `total_rows`."""
    return any(row["gpu_ratio"] is not None for row in total_rows)


def compute_coverage(comparison: ReplayComparison) -> float:
    """Returns the share of the recorded time of all ranks' ops that ran unchanged; of their number
    where none was timed.
    """
    coverage = comparison.coverage
    measure = "recorded_ns" if coverage["time_share"].is_not_null().any() else "count"
    return float(coverage.filter(outcome="run")[measure].sum()) / max(
        float(coverage[measure].sum()), 1.0
    )


def describe_replay(comparison: ReplayComparison) -> str:
    if not comparison.whole.height:
        return "Nothing was replayed."
    row = find_slowest_rank(comparison)
    unit_label = "the step" if row["recorded_ns"] is not None else "a pass"
    subject = (
        f"On rank {row['rank']}, {unit_label}"
        if comparison.whole.height > 1
        else unit_label.capitalize()
    )
    answer = f"{subject} took {units.format_duration(row['replayed_ns'])}"
    if row["recorded_ns"] is not None:
        answer += (
            f", {row['ratio']:.2f} times the recorded {units.format_duration(row['recorded_ns'])}"
        )
        if row["cpu_ratio"] is not None:
            answer += f" (processor time: {row['cpu_ratio']:.2f} times)"
    elif row["ops_ratio"] is not None:
        answer += f"; its ops took {row['ops_ratio']:.2f} times as long as recorded"
    if row["gpu_ratio"] is not None:
        answer += f"; its GPU work took {row['gpu_ratio']:.2f} times as long as recorded"
    has_times = comparison.coverage["time_share"].is_not_null().any()
    ran = f"{units.format_share(compute_coverage(comparison), 1)} of {'the time of its ops' if has_times else 'its ops'}"
    on_gpus = comparison.coverage.drop_nulls("recorded_gpu_ns")
    if comparison.device != "cpu" and (work := int(on_gpus["recorded_gpu_ns"].sum())):
        ran += f" and {units.format_share(int(on_gpus.filter(outcome='run')['recorded_gpu_ns'].sum()), work)} of its GPU work"
    return " ".join([f"{answer}. {ran} ran.", *compare_with_simulation(comparison)])


def compare_with_simulation(comparison: ReplayComparison) -> Iterator[str]:
    """Compares the slowest rank's replay with its simulation in words; empty where
    there is none.
    """
    for row in comparison.simulated.filter(rank=find_slowest_rank(comparison)["rank"]).iter_rows(
        named=True
    ):
        between = "with" if comparison.pace == "recorded" else "without"
        differs = (
            ""
            if row["difference"] is None
            else f" ({units.format_change(row['difference'])} against the replay)"
        )
        yield (
            f"Simulated on {comparison.machine}, the same ops {between} the host's gaps take "
            f"{units.format_duration(row['simulated_ns'])}{differs}."
        )


def describe_limits(comparison: ReplayComparison) -> Iterator[str]:
    if not comparison.whole.height:
        return
    if comparison.not_simulated:
        yield f"It was not simulated on {comparison.machine}: {comparison.not_simulated}."
    row = find_slowest_rank(comparison)
    in_ops = int(comparison.coverage.filter(rank=row["rank"])["recorded_ns"].sum())
    if comparison.pace == "fast" and row["recorded_ns"] and row["recorded_ns"] > in_ops:
        outside_ns = row["recorded_ns"] - in_ops
        share = units.format_share(outside_ns, row["recorded_ns"])
        compiled = comparison.holes.filter(rank=row["rank"]).height
        between = (
            "Python, loading, waiting, kernels of compiled code"
            if compiled
            else "Python, loading, waiting"
        )
        yield (
            f"{units.format_duration(outside_ns)} of the recorded step ({share}) passed between ops: {between}. The pace `fast` "
            "leaves it out; --pace recorded keeps it."
        )
    one_sided_ops = comparison.each.filter(
        pl.col("recorded_gpu_ns").is_null() != pl.col("replayed_gpu_ns").is_null()
    )
    if comparison.whole["gpu_ratio"].is_not_null().any() and one_sided_ops.height:
        recorded, replayed = (
            units.format_duration(int(one_sided_ops[f"{side}_gpu_ns"].sum()))
            for side in ("recorded", "replayed")
        )
        yield (
            f"GPU work of {units.format_quantity(one_sided_ops.height, 'op')} is known of one side alone ({recorded} as "
            f"recorded, {replayed} here): it is in no ratio."
        )
    if hidden := int(comparison.holes["recorded_ns"].sum()):
        took = units.format_duration(hidden)
        yield f"{took} of the recorded steps ran in compiled kernels, which no host trace shows: not replayed."
    contents = comparison.contents
    guessed = contents.filter(pl.col("evidence").is_null() | (pl.col("evidence") == "guess"))
    if guessed.height:
        tensors, size = (
            units.format_quantity(int(guessed["count"].sum()), "tensor"),
            units.format_size(int(guessed["bytes"].sum())),
        )
        yield (
            f"What {tensors} of {units.format_count(int(contents['count'].sum()))} from outside held is a guess ({size}): ops "
            "whose time depends on contents may differ."
        )
    if comparison.collectives.filter("asynchronous", pl.col("on_gpu").not_()).height:
        yield "Asynchronous communication goes on after its calls: how long it took is not compared."
    if (
        comparison.recorded_torch
        and comparison.torch
        and comparison.recorded_torch != comparison.torch
    ):
        yield f"It was recorded with torch {comparison.recorded_torch} and replayed with {comparison.torch}."


def _write_html(comparison: ReplayComparison, handle: BinaryIO) -> None:

    handle.write(encode_utf8(render(build(comparison), comparison)))


_EXTRA_WHOLE_COLUMNS: Columns = [
    "+recorded_ops_ns",
    "+replayed_ops_ns",
    "+ops_ratio",
    "+peak_bytes",
]
_WHOLE_COLUMNS: Columns = [
    "?rank",
    "recorded_ns",
    "replayed_ns",
    "ratio",
    "recorded_cpu_ns",
    "replayed_cpu_ns",
    "cpu_ratio",
    *_EXTRA_WHOLE_COLUMNS,
]
_OP_COLUMN = Col("op", "Op and shapes", "name", "shapes of the tensors that it takes")
_TABLES: tuple[tuple[str, str, str, Columns], ...] = (
    (
        "whole",
        "The whole",
        "A recorded step against a pass of the replay; medians.",
        _WHOLE_COLUMNS,
    ),
    (
        "simulated",
        "Beside its simulation",
        "A pass against the recorded steps on the machine that was named: the same ops of the same ranks.",
        ["?rank", "step_count", "replayed_ns", "simulated_ns", "difference"],
    ),
    (
        "coverage",
        "Coverage",
        "What became of the recorded ops; shares of a rank add up.",
        ["?rank", "outcome", "reason", "count", "count_share", "recorded_ns", "time_share"],
    ),
    (
        "not_run",
        "Did not run as recorded",
        "Most recorded time first.",
        ["?rank", "outcome", "reason", "count", "recorded_ns", "name", "+text"],
    ),
    (
        "holes",
        "Compiled code",
        "Time that no host trace shows, and no replay.",
        ["?rank", "recorded_ns", "count", "name"],
    ),
    (
        "ops",
        "Ops",
        "By name and shapes, over all ranks: where most time was lost or won comes first.",
        [
            "lost_ns",
            "recorded_ns",
            "replayed_ns",
            "ratio",
            "+p10_ratio",
            "+p50_ratio",
            "+p90_ratio",
            "calls",
            _OP_COLUMN,
        ],
    ),
    (
        "collectives",
        "Collectives",
        "Of one each; the call and the wait for it.",
        [
            "?rank",
            "kind",
            "+group",
            "group_size",
            "size_bytes",
            "count",
            "recorded_ns",
            "replayed_ns",
            "ratio",
            "recorded_gb_per_s",
            "replayed_gb_per_s",
            "+asynchronous",
        ],
    ),
    (
        "contents",
        "Contents",
        "What tensors from outside held, and how that is known.",
        ["?rank", "content", "evidence", "count", "bytes"],
    ),
)

# Where GPU work was measured, ops are compared by it: a host clock sees only their launches.
_GPU_OVERRIDES: dict[str, tuple[str, Columns]] = {
    "whole": (
        "A recorded step against a pass of the replay; medians.",
        [
            "?rank",
            "recorded_ns",
            "replayed_ns",
            "ratio",
            "+recorded_cpu_ns",
            "+replayed_cpu_ns",
            "cpu_ratio",
            "recorded_gpu_ns",
            "replayed_gpu_ns",
            "gpu_ratio",
            *_EXTRA_WHOLE_COLUMNS,
        ],
    ),
    "coverage": (
        "What became of the recorded ops; shares of a rank add up.",
        [
            "?rank",
            "outcome",
            "reason",
            "count",
            "count_share",
            "recorded_ns",
            "time_share",
            "+recorded_gpu_ns",
            "gpu_share",
        ],
    ),
    "collectives": (
        "Of one each: its GPU work where both sides know that, else the call and the wait for it.",
        [
            "?rank",
            "kind",
            "+group",
            "group_size",
            "size_bytes",
            "count",
            "on_gpu",
            "recorded_ns",
            "replayed_ns",
            "ratio",
            "recorded_gb_per_s",
            "replayed_gb_per_s",
            "+asynchronous",
        ],
    ),
    "ops": (
        "GPU work that ops launched, by their name and shapes, over all ranks: where most was lost or won comes first.",
        [
            "gpu_lost_ns",
            "recorded_gpu_ns",
            "replayed_gpu_ns",
            "gpu_ratio",
            "+recorded_ns",
            "+replayed_ns",
            "calls",
            _OP_COLUMN,
        ],
    ),
}
_GPU_TABLES = tuple(
    (key, title, *_GPU_OVERRIDES.get(key, (note, columns))) for key, title, note, columns in _TABLES
)


def build_tables(document: ReplayDocument) -> Iterator[Table]:
    rows_of: dict[str, Sequence[Cells]] = {
        "whole": document["whole"],
        "simulated": document["simulated"],
        "coverage": document["coverage"],
        "not_run": document["not_run"],
        "holes": document["holes"],
        "ops": [{**row, "op": f"{row['name']} {row['shapes']}"} for row in document["ops"]],
        "collectives": [
            {
                **row,
                "on_gpu": format_yes_no(row["on_gpu"]),
                "asynchronous": format_yes_no(row["asynchronous"]),
            }
            for row in document["collectives"]
        ],
        "contents": document["contents"],
    }
    for key, title, note, columns in _GPU_TABLES if has_gpu_times(document["whole"]) else _TABLES:
        if rows := rows_of[key]:
            yield replace(
                build_table(f"replay_json.{key}", title, columns, rows, note, key=f"replay-{key}"),
                path="",
            )


_ABOUT_TIMELINE = (
    "Every thread as recorded (before) and, below it, as replayed (after), on one axis: op after op, each as long as "
    "its median; the recorded ones with the host's gaps between them. What was not timed on both sides is not drawn."
)
_ABOUT_SCATTER = "Above the line the replay took longer, below it less."
_GPU_SCATTER = f"GPU work that a call launched. {_ABOUT_SCATTER}"
_HOST_TIMELINE = f"{_ABOUT_TIMELINE} These are times of the host; GPU work is not drawn."


def render(document: ReplayDocument, comparison: ReplayComparison) -> str:
    """Renders the document as one self-contained HTML page.

    Args:
        document: The result of `traceloom.report.replay.build` for the comparison.
        comparison: The comparison, whose single ops are drawn.
    """
    name, view = str(document["source"]), build_timeline(comparison)
    return render_page(
        title=f"Replayed: {name}",
        name=f"Replayed: {name}",
        headline=f"<h1>{escape_html(document['sentence'])}</h1>",
        numbers=render_key_numbers(
            (title, value, "", detail) for title, value, detail in _list_key_numbers(comparison)
        ),
        footer=(
            f"<p>Traceloom {escape_html(document['traceloom'])}</p>"
            "<p>The same for programs: <code>traceloom replay … -o replay.json</code>; every op: "
            "<code>-o each.csv</code>; a script that needs torch alone: <code>-o replay.py</code></p>"
        ),
        data=view.payload if view else "",
        **list_sections(_render_sections(document, view)),
    )


def build_timeline(comparison: ReplayComparison) -> BeforeAfterTimeline | None:
    """Builds both timelines; None where no op was timed."""
    op_rows = comparison.each.with_columns(pl.col("gap_ns").fill_null(0))
    if not op_rows.height:
        return None
    lanes = op_rows.select("rank", "thread").unique(maintain_order=True).with_row_index("lane")
    numbered = (
        op_rows.drop("node", "op")
        .join(lanes, on=["rank", "thread"], maintain_order="left")
        .with_row_index("node")
    )
    communicates = pl.col("name").str.starts_with("c10d::")

    def graph(side: str, *, include_gaps: bool) -> Graph:
        length = pl.col(f"{side}_ns") + (pl.col("gap_ns") if include_gaps else 0)
        nodes = numbered.with_columns(
            pl.when(communicates)
            .then(pl.lit(graph_schema.COLLECTIVE))
            .otherwise(pl.lit(graph_schema.HOST))
            .alias("kind"),
            pl.lit("op").alias("category"),
            (length.cum_sum().over("rank") - pl.col(f"{side}_ns")).alias("start_ns"),
            *(pl.col(f"{side}_ns").alias(column) for column in ("duration_ns", "work_ns")),
            pl.lit(0).alias("residual_ns"),
        )
        missing = [
            pl.lit(None).alias(column)
            for column in graph_schema.GRAPH_SCHEMAS["nodes"]
            if column not in nodes.columns
        ]
        nodes = cast_to_schema(nodes.with_columns(missing), graph_schema.GRAPH_SCHEMAS["nodes"])
        return Graph(nodes, graph_schema.build_empty_frame("edges"), _build_lanes(lanes))

    recorded, replayed = (
        graph("recorded", include_gaps=True),
        graph("replayed", include_gaps=comparison.pace == "recorded"),
    )
    ranks = comparison.whole.select(
        "rank", before_ns=pl.coalesce("recorded_ns", "recorded_ops_ns"), after_ns="replayed_ns"
    ).with_columns(saved_ns=pl.col("before_ns") - pl.col("after_ns"))
    changed = np.zeros(op_rows.height, dtype=np.bool_)
    return pack_timelines(
        recorded, replayed, changed, ranks, labels=("recorded", "replayed"), paths=False
    )


def _build_lanes(lanes: pl.DataFrame) -> pl.DataFrame:
    named_lanes = lanes.with_columns(kind=pl.lit("host"), name=pl.format("thread {}", "thread"))
    missing = [
        pl.lit(None).alias(column)
        for column in graph_schema.GRAPH_SCHEMAS["lanes"]
        if column not in named_lanes.columns
    ]
    return cast_to_schema(named_lanes.with_columns(missing), graph_schema.GRAPH_SCHEMAS["lanes"])


def _list_key_numbers(comparison: ReplayComparison) -> Iterator[tuple[str, str, str]]:
    if not comparison.whole.height:
        return
    row = find_slowest_rank(comparison)
    if row["recorded_ns"] is not None:
        steps = units.format_quantity(row["step_count"], "timed step")
        yield "Recorded step", units.format_duration(row["recorded_ns"]), f"median of {steps}"
    yield (
        "Replayed",
        units.format_duration(row["replayed_ns"]),
        f"median of {units.format_quantity(row['pass_count'], 'pass')}",
    )
    if row["cpu_ratio"] is not None:
        yield (
            "Processor time",
            f"{row['cpu_ratio']:.2f} ×",
            f"{units.format_duration(row['replayed_cpu_ns'])} in the replay",
        )
    if row["gpu_ratio"] is not None:
        yield (
            "GPU work",
            f"{row['gpu_ratio']:.2f} ×",
            f"{units.format_duration(row['replayed_gpu_ns'])} in the replay",
        )
    for simulated in comparison.simulated.filter(rank=row["rank"]).iter_rows(named=True):
        differs = (
            ""
            if simulated["difference"] is None
            else f"{units.format_change(simulated['difference'])} against the replay, "
        )
        yield (
            "Simulated",
            units.format_duration(simulated["simulated_ns"]),
            f"{differs}on {comparison.machine}",
        )
    yield (
        "Coverage",
        units.format_share(compute_coverage(comparison), 1),
        "of what was recorded ran as it is",
    )
    if comparison.long_ratios is not None:
        low, median, high = comparison.long_ratios
        min_duration = units.format_duration(LONG_NS)
        detail = f"P10–P90 {low:.2f}–{high:.2f}, of {units.format_quantity(comparison.long_count, 'op')} from {min_duration} on"
        yield "Ratio of ops", f"{median:.2f}", detail


def _render_sections(
    document: ReplayDocument, view: BeforeAfterTimeline | None
) -> Iterator[tuple[str, str, str, str]]:
    notes = dict.fromkeys(
        [
            *document["limits"],
            *(note_text for _, note_text in merge_rank_notices(document["notices"])),
        ]
    )
    limit_items = (
        "".join(f"<li>{render_inline_code(note)}</li>" for note in notes)
        or "<li>Nothing is known of.</li>"
    )
    yield (
        "limits",
        "What it cannot show",
        "What these times do not tell.",
        f"<ul>{limit_items}</ul>",
    )
    gpu_times = has_gpu_times(document["whole"])
    if picture := draw_scatter(document["ops"], gpu_times=gpu_times):
        yield (
            "scatter",
            "Recorded and replayed",
            _GPU_SCATTER if gpu_times else _ABOUT_SCATTER,
            picture,
        )
    if view is not None:
        note = (
            f'<p class="quiet">{render_inline_code(view.description)}</p>'
            if view.description
            else ""
        )
        yield (
            "timeline",
            "Timelines",
            _HOST_TIMELINE if gpu_times else _ABOUT_TIMELINE,
            note + read_asset("timeline.html"),
        )
    for table in build_tables(document):
        yield render_table_section(table)


REPLAY = ResultFiles(
    "replay", TABLES, {".json": write_json, ".html": _write_html, ".htm": _write_html}
)

_MAX_ROWS = 8
# The page and the JSON have it; a limit states the relevant part.
_FILE_ONLY_TABLE = "replay-contents"


def render_terminal(document: ReplayDocument, width: int) -> Iterator[Text]:
    """Yields the lines, none wider than `width`."""
    yield Text(fit_name(document["source"], width), "bold")
    yield Text("")
    yield from render_paragraph(document["sentence"], width, "bold")
    for notice, message in merge_rank_notices(document["notices"]):
        if notice["severity"] != "info":
            yield from render_paragraph(
                f"{notice['severity']}: {message} [{notice['slug']}]", width
            )
    for table in build_tables(document):
        if table.key != _FILE_ONLY_TABLE:
            yield from render_declared_table(table, ReportOptions(top=_MAX_ROWS), width)
    if document["limits"]:
        yield from render_heading("What it cannot show", "", width)
        for limit in document["limits"]:
            yield from render_paragraph(limit, width)
