"""Finds steps: where each iteration begins and ends, and the evidence for that."""

import re
from typing import Any

import numpy as np
import polars as pl

from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import gather_rows
from traceloom.trace.notice import Notice
from traceloom.trace.session import parse_thread_clocks
from traceloom.trace.trace import REQUEST, SCHEMAS, build_empty_frame

NO_STEP = -(2**31)
_MIN_OCCURRENCES = 3  # occurrences that make an annotation regular
_MIN_COVER = 0.5  # of the host's window, from the first to the last of them
_MIN_OPS_RATIO = (
    10  # a step with so many times fewer operators than any before is the rest of a run
)
_MAX_VARIATION = 0.5  # standard deviation of the intervals over their mean
_PROFILER = r"^ProfilerStep#\s*(\d+)$"
_NUMBERED_PREFIXES = ("ProfilerStep#", "traceloom.step#")
_MARK = r"^traceloom\.step#\s*(\d+)$"
_OPTIMIZER = "Optimizer.step#"  # of every PyTorch optimizer, while the profiler runs
_EXCLUDED_NAMES = r"^(?:nccl|gloo|mpi|ucc|hccl):|^\[|^PyTorch Profiler"
# Requests: bursts of work between waits, in a program without steps, such as a server.
_MIN_REQUESTS = 5  # min number of requests
_MIN_GAP_NS = 200_000  # between two requests
_MIN_GAP_RATIO = 4.0  # min ratio to the pauses inside of requests
# Min share of requests that begin with common operators; min share of each such operator.
_ALIKE, _OFTEN = 0.6, 0.1
# Max share of the window that the threads of a program that waits for requests run.
_MAX_RUNNING = 0.8


def find_steps(
    events: pl.DataFrame,
    lanes: pl.DataFrame,
    texts: list[str],
    capture: dict[str, Any] | None = None,
    path: str = "",
) -> tuple[pl.DataFrame, list[Notice]]:
    """Returns the `steps` frame and notices about it.

    `ProfilerStep#N`, else our own marks `traceloom.step#N` (the step N starts at its mark, the last
    mark closes the last step), else the most regular host annotation, or the ends of the
    optimizer's steps where it encloses none of them, else the requests of a program that waits for
    them, else none.

    Args:
        events: The events in time order.
        lanes: Their lanes.
        texts: All distinct texts of the file, including names.
        capture: This rank's part of capture.json.
        path: Path of the trace.
    """
    hosts = lanes.filter(pl.col("kind") == "host")["lane"]
    on_host = pl.col("lane").is_in(hosts.implode())
    for pattern, evidence, fewest in ((_PROFILER, "profiler-step", 1), (_MARK, "mark", 2)):
        candidates = [text for text in texts if text.startswith(_NUMBERED_PREFIXES)]
        numbers = {
            text: match.group(1) for text in candidates if (match := re.match(pattern, text))
        }
        if not numbers:
            continue
        called = pl.col("name").is_in(list(numbers)) & pl.col("category").is_in(
            ["annotation", "op"]
        )
        spans = events.filter(called & on_host).select(
            # As recorded: the last call of a step often crosses its end by a little.
            "name",
            "lane",
            "start_ns",
            end_ns=pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=0),
        )
        if spans.height >= fewest:
            return _build_numbered_steps(
                spans.with_columns(number=pl.col("name").replace_strict(numbers)), evidence, events
            )
    annotations = events.filter((pl.col("category") == "annotation") & on_host)
    regular = _find_regular_steps(
        annotations.select("name", "lane", "start_ns", "nested_end_ns"), events.filter(on_host)
    )
    if regular[0].height:
        return regular
    requests = _find_requests(events, hosts, capture, path)
    if not requests.height:
        return regular
    text = (
        f"there are no steps; {requests.height} bursts of work between waits, most of which begin alike, are taken as "
        "requests, and looked at as steps"
    )
    # There is no step between two requests.
    numbered = requests.with_columns(number=pl.int_range(pl.len(), dtype=pl.Int64))
    return _build_frame(numbered, REQUEST), [
        Notice("requests-assumed", "info", text, requests.height)
    ]


def _build_numbered_steps(
    spans: pl.DataFrame, evidence: str, events: pl.DataFrame
) -> tuple[pl.DataFrame, list[Notice]]:
    lane = spans["lane"].value_counts(sort=True)["lane"][0]
    spans = (
        spans.filter(pl.col("lane") == lane)
        .with_columns(pl.col("number").cast(pl.Int64, strict=False))
        .sort("start_ns")
    )
    notices: list[Notice] = []
    steps = spans["number"]
    if (
        steps.null_count()
        or (steps.diff().drop_nulls() <= 0).any()
        or not steps.is_between(0, 2**31 - 2).all()
    ):
        notices.append(
            Notice(
                "renumbered-steps",
                "warning",
                "step numbers repeat or go back; the steps are numbered anew from 0",
            )
        )
        spans = spans.with_columns(number=pl.int_range(pl.len(), dtype=pl.Int64))
    if evidence == "mark":
        spans = spans.with_columns(end_ns=spans["start_ns"].shift(-1)).head(-1)
    else:
        spans = spans.with_columns(end_ns=pl.col("start_ns").shift(-1).fill_null(pl.col("end_ns")))
    # The profiler opens one more step after the last call of `step`, in which little is done.
    counts = _count_ops(events, lane, np.append(spans["start_ns"], spans["end_ns"][-1:]))
    is_rest = evidence != "mark" and (counts[-1] * _MIN_OPS_RATIO < counts[:-1]).all()
    is_last = pl.int_range(pl.len()) == max(spans.height - 1, 1)
    return _build_frame(spans, evidence).with_columns(complete=~(is_last & is_rest)), notices


def _build_frame(spans: pl.DataFrame, evidence: str) -> pl.DataFrame:
    return spans.select(
        pl.col("number").cast(pl.Int32).alias("step"),
        "name",
        "start_ns",
        "end_ns",
        pl.lit(evidence).cast(SCHEMAS["steps"]["evidence"]).alias("evidence"),
        pl.lit(value=True).alias("complete"),
    )


def _find_regular_steps(
    annotations: pl.DataFrame, events: pl.DataFrame
) -> tuple[pl.DataFrame, list[Notice]]:
    """Finds steps by the annotation that is most regular and covers most of the window; names may
    hold numbers.

    Where its spans enclose no step of the optimizer, as those of `DistributedDataParallel.forward`,
    of which there are several in a step that accumulates gradients, a step ends with the
    optimizer's step.

    Args:
        annotations: Those of the host.
        events: All of the host.
    """
    first, last = (
        events.lazy()
        .filter(pl.col("category") != "profiler")
        .select(pl.col("start_ns").min(), pl.col("nested_end_ns").max())
        .collect()
        .row(0)
    )
    window = int(last - first) if first is not None else 0
    shaped = annotations.filter(~pl.col("name").str.contains(_EXCLUDED_NAMES)).with_columns(
        pattern=pl.col("name").str.replace_all(r"\d+", "#")
    )
    best: tuple[float, pl.DataFrame] | None = None
    for (_, _), group in shaped.group_by("pattern", "lane", maintain_order=True):
        if group.height < _MIN_OCCURRENCES or window <= 0:
            continue
        start, end = group["start_ns"].to_numpy(), group["nested_end_ns"].to_numpy()
        distance = np.diff(start)
        variation = float(distance.std() / distance.mean()) if distance.mean() > 0 else 1.0
        covers = end[-1] - start[0] >= _MIN_COVER * window
        if (start[1:] < end[:-1]).any() or variation > _MAX_VARIATION or not covers:
            continue
        # Share of the window inside the spans, minus their variation.
        score = float((end - start).sum()) / window * (1 - variation)
        if best is None or score > best[0]:
            best = (score, group)
    optimizer_steps = _find_optimizer_steps(annotations, events, first, window)
    encloses = False  # each end of such a step lies inside of a different one of the spans
    if (
        optimizer_steps is not None
        and best is not None
        and not best[1]["name"][0].startswith(_OPTIMIZER)
    ):
        start, end = best[1]["start_ns"].to_numpy(), best[1]["nested_end_ns"].to_numpy()
        index = np.searchsorted(start, optimizer_steps["end_ns"].to_numpy(), "right") - 1
        covered = (index >= 0) & (optimizer_steps["end_ns"].to_numpy() <= end[np.maximum(index, 0)])
        encloses = bool(covered.all() and (np.diff(index) > 0).all())
    if optimizer_steps is not None and not encloses:
        text = f"steps are taken to end with the {optimizer_steps.height} calls of `{optimizer_steps['name'][0]}`"
        return optimizer_steps, [
            Notice("steps-from-annotation", "info", text, optimizer_steps.height)
        ]
    if best is None:
        text = (
            "the trace has no steps: no ProfilerStep, no mark of Traceloom, no regular annotation"
        )
        return build_empty_frame("steps"), [
            Notice("no-steps", "info", text)
        ] if events.height else []
    spans = best[1].select(
        "name",
        "start_ns",
        number=pl.int_range(pl.len(), dtype=pl.Int64),
        end_ns=pl.col("start_ns").shift(-1).fill_null(pl.col("nested_end_ns")),
    )
    text = f"steps are taken from the {spans.height} annotations like `{spans['name'][0]}`, the most regular of the trace"
    return _build_frame(spans, "annotation"), [
        Notice("steps-from-annotation", "info", text, spans.height)
    ]


def _find_optimizer_steps(
    annotations: pl.DataFrame, events: pl.DataFrame, first: int, window: int
) -> pl.DataFrame | None:
    """Finds steps that end with a step of the optimizer; None where there are too few.

    PyTorch marks them itself, so that they need not be regular: one may have stalled. Of several
    optimizers the one with the fewest calls is used, and of those the last. The first step begins
    with the recording: it is complete if it has as many operators as others.
    """
    calls = annotations.filter(pl.col("name").str.starts_with(_OPTIMIZER))
    groups = [group for _, group in calls.group_by("name", "lane", maintain_order=True)]
    if not groups or window <= 0:
        return None
    selected = min(groups, key=lambda group: (group.height, -group["nested_end_ns"][-1]))
    end = selected["nested_end_ns"].to_numpy()
    if end.size < _MIN_OCCURRENCES:
        return None
    bounds = np.append(first, end)
    counts = _count_ops(events, selected["lane"][0], bounds)
    spans = selected.select("name", start_ns=bounds[:-1], end_ns=end, number=np.arange(end.size))
    return _build_frame(spans, "annotation").with_columns(
        complete=(pl.int_range(pl.len()) > 0) | pl.Series(counts >= counts[1:].min())
    )


def _count_ops(events: pl.DataFrame, lane: int, bounds_ns: Ints) -> Ints:
    """Returns how many operators of the thread begin between neighbouring bounds."""
    ops = events.filter((pl.col("category") == "op") & (pl.col("lane") == lane))["start_ns"]
    return np.diff(np.searchsorted(ops.to_numpy(), bounds_ns))


def _find_requests(
    events: pl.DataFrame, hosts: pl.Series, capture: dict[str, Any] | None, path: str
) -> pl.DataFrame:
    """Finds requests of a program that waits between them, by the processor time of its threads.

    Args:
        events: The events in time order.
        hosts: Lanes of the host.
        capture: This rank's part of capture.json; without samples of processor time, waiting cannot
            be detected.
        path: Of the trace.

    Returns:
        `name`, `start_ns`, `end_ns` of each; no row where the program does not wait, or no requests
        are found.
    """
    nothing = pl.DataFrame(schema={"name": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64})
    samples = parse_thread_clocks(capture, path)
    if not samples or (capture or {}).get("world_size") not in (None, 1):
        return nothing
    roots = events.filter(
        (pl.col("category") == "op")
        & pl.col("parent").is_null()
        & pl.col("lane").is_in(hosts.implode())
    ).select("start_ns", "nested_end_ns", "name")
    if roots.height < _MIN_REQUESTS:
        return nothing
    # All threads of a waiting program together hardly run.
    ran = sum(int(thread.ran_ns[-1] - thread.ran_ns[0]) for thread in samples.values())
    sampled_start = min(int(thread.time_ns[0]) for thread in samples.values())
    sampled_end = max(int(thread.time_ns[-1]) for thread in samples.values())
    elsewhere = sampled_start >= roots["nested_end_ns"][-1] or sampled_end <= roots["start_ns"][0]
    if elsewhere or ran > _MAX_RUNNING * max(sampled_end - sampled_start, 1):
        return nothing
    start, reached = (
        roots["start_ns"].to_numpy(),
        np.maximum.accumulate(roots["nested_end_ns"].to_numpy()),
    )
    pause = start[1:] - reached[:-1]
    # The pauses fall into two groups, one far longer than the other: between requests and inside of
    # them.
    ordered = np.sort(pause[pause > 0])
    if ordered.size < _MIN_REQUESTS:
        return nothing
    logs = np.log(ordered)
    count = np.arange(1, logs.size)
    lower_mean = np.cumsum(logs)[:-1] / count
    upper_mean = (logs.sum() - np.cumsum(logs)[:-1]) / (logs.size - count)
    # The split that minimizes the variance of both groups.
    split = int(np.argmax(count * (logs.size - count) * (upper_mean - lower_mean) ** 2))
    short_pause, long_pause = np.median(ordered[: split + 1]), np.median(ordered[split + 1 :])
    if long_pause < max(_MIN_GAP_RATIO * short_pause, _MIN_GAP_NS):
        return nothing
    first = np.flatnonzero(np.append(True, pause > int(ordered[split])))
    names = roots["name"].gather(first)
    often = names.value_counts(sort=True).filter(pl.col("count") >= _OFTEN * first.size)
    if first.size < _MIN_REQUESTS or often["count"].sum() < _ALIKE * first.size:
        return nothing
    # The system may have interrupted a request midway.
    first = first[names.is_in(often["name"].implode()).to_numpy()]
    last = np.append(first[1:], start.size) - 1
    return pl.DataFrame({"name": "request", "start_ns": start[first], "end_ns": reached[last]})


def locate_steps(steps: pl.DataFrame, time_ns: Ints) -> Ints:
    """Returns the step that contains each time; `NO_STEP` outside."""
    if not steps.height:
        return np.full(len(time_ns), NO_STEP, dtype=np.int64, like=time_ns)
    index = np.searchsorted(steps["start_ns"].to_numpy(), time_ns, side="right") - 1
    row = np.maximum(index, 0)
    in_step = (index >= 0) & (time_ns < gather_rows(steps["end_ns"].to_numpy(), row))
    return np.where(in_step, gather_rows(steps["step"].to_numpy().astype(np.int64), row), NO_STEP)


def assign_steps(steps: pl.DataFrame, start: Ints, launch: Ints, is_work: Any) -> Ints:
    """Returns the step of each event: on the host by its start; for GPU work by its launch, none
    without a launch.
    """
    step = locate_steps(steps, start)
    return np.where(is_work, np.where(launch >= 0, step[launch], NO_STEP), step)
