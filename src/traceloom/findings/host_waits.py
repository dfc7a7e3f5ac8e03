"""Rules about waits of the host: pauses, blocking calls and waits for data."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from typing import Any

import numpy as np
import polars as pl

from traceloom import analyze
from traceloom.analyze.host_events import (
    BACKWARD,
    COMMUNICATION,
    SPAN_PHASE_PATTERNS,
    WORD_PHASE_PATTERNS,
)
from traceloom.analyze.idle import GARBAGE_COLLECTION_PATTERN
from traceloom.changes.changes import (
    DATA_LOADING_PATTERN,
    Change,
    NodeSelection,
    Selection,
    match_node_names,
)
from traceloom.findings.context import (
    UNNAMED_HOST_TIME,
    Bools,
    Context,
    get_outermost_operator,
    shorten_name,
)
from traceloom.findings.rule import NO_DEVICE, SAMPLED, Candidate, Condition, FindingRule, Message
from traceloom.graph import graph as graph_schema
from traceloom.system import units
from traceloom.trace import vocabulary as vocab
from traceloom.trace.batch import concatenate_by_trace
from traceloom.trace.notice import Abstention, Evidence
from traceloom.trace.trace import Trace

_MIN_PAUSE_SHARE = 0.02  # of the window: one interval of host time this long is a pause,
_MIN_PAUSE_NS = 500_000  # if it also takes this long: shorter ones are Python between operators
_STEP_PATTERN = re.compile(r"^(ProfilerStep|traceloom\.step)#\d+$")
_MIN_BUSY_SHARE = 0.5  # of its time a thread runs at least: it works
_MAX_RANKS = 4
_OUTLIER_FACTOR = 2.0  # times the median of the others: the pause is specific to this rank
_MAX_ASLEEP_SHARE = 0.2  # at most: it waits
_BACKWARD_PATTERN = next(pattern for phase, pattern in WORD_PHASE_PATTERNS if phase == BACKWARD)
_COLLECTIVES_PATTERN = "|".join(
    pattern for phase, pattern in SPAN_PHASE_PATTERNS if phase == COMMUNICATION
)
_AUTOGRAD_ENGINE = "autograd::engine::"
_ACCUMULATE_GRAD = "AccumulateGrad"  # runs on the main thread, too
_BACKWARD_NOT_RECORDED = (
    "what the host waits for in the backward pass was not recorded: the operators of another thread"
)


def find_pauses(context: Context) -> Iterator[Message]:
    """Reports long intervals in which the host does one other thing: a pause, a write, a log."""
    python = select_time_between_operators(context)
    long = python & (context.graph.nodes["work_ns"].to_numpy() >= compute_min_pause_ns(context))
    if not long.any():
        return
    # Regions named backward, on ranks of whose backward pass no derivative was recorded: they run
    # elsewhere.
    nodes = context.graph.nodes
    name, node_rank = nodes["name"].cast(pl.String).fill_null(""), nodes["rank"].fill_null(-1)
    recorded_ranks = node_rank.filter(
        name.str.starts_with(_AUTOGRAD_ENGINE) & ~name.str.ends_with(_ACCUMULATE_GRAD)
    ).unique()
    backward = (nodes["category"].cast(pl.String) == vocab.ANNOTATION) & name.str.contains(
        _BACKWARD_PATTERN
    )
    unseen: Bools = (
        long
        & (backward.fill_null(value=False) & ~node_rank.is_in(recorded_ranks.implode())).to_numpy()
    )
    if unseen.any():
        yield Abstention("host-pause", _BACKWARD_NOT_RECORDED)
        long &= ~unseen
    # Threads of a program without steps that sleep wait for work: that is not a pause
    if context.steps is None:
        long &= ~context.select_sleeping_nodes(long, _MAX_ASLEEP_SHARE)
    if not long.any():
        return
    ranks = context.list_ranks(long)
    # One rank alone may be the cause: it is reported first, where it saves as much as all of them
    if len(ranks) > 1:
        rank_of = context.graph.node_ranks
        times = {rank: context.work_ns(long & (rank_of == rank)) for rank in ranks}
        ordered_ranks = sorted(ranks, key=lambda rank: (-times[rank], rank))
        for rank in ordered_ranks[:_MAX_RANKS]:
            yield _pause(context, long & (rank_of == rank), (rank,))
        other_times = [times[rank] for rank in ordered_ranks[1:]] + [0] * (
            context.rank_count - len(ranks)
        )
        if times[ordered_ranks[0]] >= _OUTLIER_FACTOR * float(np.median(other_times)):
            return  # the others pause occasionally
    yield _pause(context, long, tuple(ranks))


def select_time_between_operators(context: Context) -> Bools:
    """Returns host time between operators that no other rule covers."""
    nodes = context.graph.nodes
    frames = pl.Series(context.select_kinds(graph_schema.HOST)) & nodes["category"].cast(
        pl.String
    ).is_in([vocab.ANNOTATION, vocab.PYTHON])
    between = context.select_kinds(graph_schema.THINK) | frames.fill_null(value=False).to_numpy()
    claimed_masks = (
        match_node_names(context.graph, pattern)
        for pattern in (DATA_LOADING_PATTERN, GARBAGE_COLLECTION_PATTERN, _COLLECTIVES_PATTERN)
    )
    unclaimed: Bools = between & ~reduce(or_, claimed_masks)
    return unclaimed


def waits_for_requests(context: Context) -> bool:
    """Whether a program without steps mostly waits, so that the length of its window does not
    depend on its work.
    """
    return (
        context.steps is None and context.running is not None and context.running < _MIN_BUSY_SHARE
    )


def compute_min_pause_ns(context: Context) -> float:
    """Returns the length from which on an interval of host time is a pause, ns."""
    return max(_MIN_PAUSE_SHARE * context.whole_ns / context.step_count, _MIN_PAUSE_NS)


def _pause(context: Context, long: Bools, ranks: tuple[int, ...]) -> Candidate:
    time = context.work_ns(long)
    evidence = context.evidence(long)
    label = evidence[0].what
    count = int(long.sum())
    detail = "" if _STEP_PATTERN.match(label) or label == UNNAMED_HOST_TIME else f": {label}"
    single_rank = context.rank_count > 1 and len(ranks) == 1
    subject = f"the host of rank {ranks[0]}" if single_rank else "the host"
    ranks_note = "" if len(ranks) == 1 else context.rank_sum_suffix
    if time > context.whole_ns * len(ranks):
        ranks_note = ", summed over its threads"
    # Whether the host works or waits, as far as the processor time of its threads shows it.
    ran = context.ran_ns(long)
    if ran is None:
        verb = "spends"
    else:
        verb = (
            "works"
            if ran[0] >= _MIN_BUSY_SHARE * time
            else "waits"
            if ran[1] <= _MAX_ASLEEP_SHARE * time
            else "spends"
        )
    return Candidate(
        title=f"{subject} {verb} {units.format_duration(time)} outside of operators"
        + ("" if context.step_count == 1 else f" in {context.where}")
        + ("" if count == 1 else f" in {units.format_count(count)} long stretches{ranks_note}")
        + detail,
        changes=(
            Change(
                "remove",
                NodeSelection(
                    f"{f'rank {ranks[0]}: ' if single_rank else ''}long host stretches between operators",
                    long,
                    "think",
                    ranks if single_rank else (),
                ),
            ),
        ),
        confidence=0.6 if context.stacks else 0.5,
        advice="Take it out of the step: write, log and check in another thread or less often; without stacks, record "
        "with `--stacks` to see what it is.",
        evidence=evidence,
    )


PROGRAM_WAITS: Condition = (
    waits_for_requests,
    "the program waits most of the time, for requests or for something that was not recorded: that costs nothing",
)
RULES = (
    FindingRule(
        "host-pause",
        "the host does something else for long",
        find_pauses,
        (PROGRAM_WAITS, SAMPLED),
    ),
)

_KINDS = {
    "item": ("blocking-item", "reading values (`.item()`, `float(tensor)`, `if tensor:`)"),
    "data_dependent_shape": (
        "blocking-item",
        "operators whose result's shape depends on data (nonzero, unique, masks)",
    ),
    "synchronize": ("blocking-sync", "synchronising"),
    "event_synchronize": ("blocking-sync", "waiting for events"),
    "copy_to_host": ("blocking-copy", "copying to the host"),
    "copy_to_device": ("blocking-copy", "copying to the device"),
    "other_copy": ("blocking-copy", "copying"),
    "allocation": ("device-allocation", "taking memory from the device and giving it back"),
    "module_load": ("module-loading", "loading code onto the device, or setting it up,"),
}
_ADVICE = {
    "blocking-item": "Read values less often, or later: keep sums on the device, read every N steps, use "
    "`non_blocking=True` copies and look at them in the next step.",
    "blocking-sync": "Take the call out of the step; time with events instead of synchronising.",
    "blocking-copy": "Use pinned memory (`pin_memory=True`) and `non_blocking=True`, and copy the next batch while "
    "this one is computed.",
    "device-allocation": "In steady state nothing should be taken from the device: keep shapes constant, warm up, "
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; cudaFree in a step means that the allocator had to retry.",
    "module-loading": "Warm up before the part that is measured or served, or load at the start: "
    "CUDA_MODULE_LOADING=EAGER.",
}
_NO_CACHING = (
    "The caching allocator is off: unset PYTORCH_NO_CUDA_MEMORY_CACHING, or whatever turns it off; it keeps memory "
    "that is free for the next tensor."
)
_MIN_ALLOCATIONS = 8  # calls in a step: from here on there may be no caching allocator
_MIN_ALLOCATED_SHARE = 0.25  # calls that allocate for each launch
_MIN_FREED_SHARE = (
    0.75  # calls that free for each of these: in its first steps a program only takes
)
_TITLES = {
    "blocking-item": "values are read on the host",
    "blocking-sync": "synchronisation in the step",
    "blocking-copy": "copies that block the host",
    "device-allocation": "device memory is allocated in the step",
    "module-loading": "code is loaded onto the device in the step",
}
# The calls themselves go, not only their waiting
_REMOVABLE_CALLS = (
    "device-allocation",
    "module-loading",
)
# A profiler waits for the device when it begins and ends: that is not part of the program.
_PROFILER_PATTERN = re.compile(r"(?i)profil|traceloom/capture")


@dataclass(slots=True)
class _WaitingSite:
    """One place in the code that waits, over all ranks."""

    kind: str
    call: str
    where: str
    nodes: Bools
    blocked_ns: int = 0
    pageable: int = 0
    calls: int = 0
    frees: int = 0
    evidence: list[Evidence] = field(default_factory=list)


def _find_blocking_calls(slug: str, context: Context) -> Iterator[Message]:
    kinds = [kind for kind, (rule, _) in _KINDS.items() if rule == slug]
    waiting: dict[tuple[str, str], _WaitingSite] = {}
    for trace, row, site_calls in context.ask(context, _list_waiting_sites):
        if row["kind"] not in kinds:
            continue
        location = (
            shorten_name(row["frame"])
            if row["frame"]
            else get_outermost_operator(row["op"] or row["call"])
        )
        label = row["call"] if row["call"] == location else f"{row['call']} at {location}"
        place = "" if slug == "device-allocation" else location  # one cause, wherever it shows
        # An op's copy and the synchronisation behind it wait for the same work: removing only one
        # saves nothing.
        no_nodes = np.zeros(context.graph.nodes.height, dtype=np.bool_)
        site = waiting.setdefault(
            (row["kind"], place), _WaitingSite(row["kind"], row["call"], location, no_nodes)
        )
        site.calls += site_calls.height
        site.frees += site_calls.height if "Free" in row["call"] else 0
        site.nodes |= context.node_mask(trace, site_calls["event"])
        site.blocked_ns += int(site_calls["blocked_ns"].sum())
        site.pageable += row["pageable_count"]
        site.evidence += [
            Evidence(label, trace.rank, start_ns, blocked_ns, row["lane"])
            for start_ns, blocked_ns in site_calls[["start_ns", "blocked_ns"]].head(3).iter_rows()
        ]
    for site in waiting.values():
        if not site.nodes.any():
            continue
        label = f"{site.call} at {site.where}" if site.where != site.call else site.call
        note, advice = f", at {site.where}", _ADVICE[slug]
        if slug == "device-allocation":
            label = "calls that take or give back memory of the device"
            note, advice = _describe_allocations(context, site)
        elif site.where == site.call:
            note = f" ({site.call})"
        selection = NodeSelection(label, site.nodes, "syncs")
        pageable = (
            " from or to pageable memory" if site.pageable and slug == "blocking-copy" else ""
        )
        removal = (Change("remove", selection),) if slug in _REMOVABLE_CALLS else ()
        yield Candidate(
            title=f"{_KINDS[site.kind][1]}{pageable} holds the host {context.format_time_per_step(site.blocked_ns)}"
            f"{context.rank_sum_suffix}{note}",
            changes=(Change("drop", selection), *removal),
            confidence=0.4 if slug in _REMOVABLE_CALLS and context.steps is None else 0.7,
            advice=advice,
            evidence=tuple(sorted(site.evidence, key=lambda seen: -(seen.duration_ns or 0))[:4]),
        )


def _describe_allocations(context: Context, site: _WaitingSite) -> tuple[str, str]:
    """Returns the share and the number of calls that take memory or give it back, and the advice,
    with whether there is a caching allocator.
    """
    allocations = site.calls - site.frees
    launch_count = int(context.own(context.select_kinds(graph_schema.LAUNCH)).sum())
    uncached = (
        allocations >= _MIN_ALLOCATIONS * context.step_count * max(context.rank_count, 1)
        and site.frees >= _MIN_FREED_SHARE * allocations
        and allocations >= _MIN_ALLOCATED_SHARE * launch_count
    )
    share = units.format_share(site.blocked_ns, context.ranks_ns)
    note = f" ({share}), in {context.many(site.calls, 'call')}"
    if uncached:
        return f"{note}: the caching allocator is off", _NO_CACHING
    return f"{note}, first at {site.where}", _ADVICE["device-allocation"]


def _list_waiting_sites(context: Context) -> list[tuple[Trace, dict[str, Any], pl.DataFrame]]:
    """Returns places in the code that wait in the steps (trace, row of its sites, and their calls),
    the longest first.
    """
    blocking = [context.ask(trace, analyze.blocking_calls) for trace in context.traces]
    calls = context.in_step(concatenate_by_trace(trace_calls.calls for trace_calls in blocking))
    longest_first = calls.sort("blocked_ns", descending=True, maintain_order=True)
    site_calls = {
        (group["trace"][0], group["site"][0]): group
        for group in longest_first.partition_by("trace", "site")
    }
    return [
        (trace, row, site_calls[number, site])
        for number, (trace, trace_calls) in enumerate(zip(context.traces, blocking, strict=True))
        for site, row in enumerate(trace_calls.sites.to_dicts())
        if (number, site) in site_calls
        and not any(
            text is not None and _PROFILER_PATTERN.search(text)
            for text in (row["frame"], row["stack"])
        )
    ]


SYNCHRONISATION_RULES = tuple(
    FindingRule(slug, title, partial(_find_blocking_calls, slug), (NO_DEVICE,))
    for slug, title in _TITLES.items()
)

_ASSUMED_WORKERS = 4


def find_data_starvation(context: Context) -> Iterator[Message]:
    """Reports a main thread that waits for its batches, or makes them."""
    masks = Selection("loading").nodes(context.graph)
    waits = concatenate_by_trace(
        context.ask(trace, analyze.data_loading).waits for trace in context.traces
    )
    if not waits.height:
        yield Abstention("data-starved", "no data loader was recorded")
        return
    waits = context.in_step(waits)
    waited, workers = int(waits["duration_ns"].sum()), bool((waits["maker"] == "workers").any())
    if not waited or not masks.any():
        return
    waiting: list[pl.DataFrame] = []
    for trace, rows in context.split_by_trace(waits):
        rank = pl.lit(trace.rank, dtype=pl.Int32).alias("rank")
        lane, end = trace.events["lane"][rows["event"]], pl.col("start_ns") + pl.col("duration_ns")
        waiting.append(rows.select(rank, lane, "start_ns", end.alias("end_ns")))
    longest = waits.sort("duration_ns", descending=True, maintain_order=True)
    longest = longest.filter(pl.int_range(pl.len()).over("trace") < 3).head(5)
    selection = NodeSelection("loading", masks, "loading")
    change = (
        Change("remove", selection)
        if workers
        else Change("workers", selection, float(_ASSUMED_WORKERS))
    )
    remedy = "more workers (num_workers), persistent_workers=True, prefetch_factor, pin_memory=True, cheaper transforms"
    assumed = f" The saving assumes {_ASSUMED_WORKERS} workers."
    advice = (
        f"Make batches faster or further ahead: {remedy}."
        if workers
        else f"Make batches beside the step: {remedy}.{assumed}"
    )
    yield Candidate(
        title=f"{context.where} wait{'s' * (context.step_count == 1)} {units.format_duration(waited)} for data{context.rank_sum_suffix}"
        + ("" if workers else f", which {_ASSUMED_WORKERS} workers would make beside it"),
        changes=(change,),
        confidence=0.8,
        advice=advice,
        hot_advice=None
        if workers
        else f"{{frame}}: make it faster, or make batches beside the step: {remedy}.{assumed}",
        host=partial(pl.concat, waiting),
        evidence=tuple(
            Evidence(name, context.traces[number].rank, start_ns, ns)
            for name, number, start_ns, ns in longest[
                ["name", "trace", "start_ns", "duration_ns"]
            ].iter_rows()
        ),
    )


DATA_RULES = (FindingRule("data-starved", "the step waits for its data", find_data_starvation),)
