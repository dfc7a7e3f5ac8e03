"""From what the user gave to one calibrated graph of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from msgspec import Struct, field

from traceloom.errors import InputError
from traceloom.files import with_addresses
from traceloom.link.host_device import match
from traceloom.link.inputs import AnyPath, Window, find_inputs
from traceloom.link.matching import Matching
from traceloom.model import Graph, Notice, Trace
from traceloom.model.host_trace import HostTrace
from traceloom.read import Cache
from traceloom.read.freeing import give_back
from traceloom.read.graph_step import same_ops, timed_ops
from traceloom.read.host_trace import read_host_trace
from traceloom.read.kineto import read_kineto
from traceloom.read.loading import local_copies
from traceloom.read.ranks import ReadProgress, Report, read_all

Say = Callable[[str], None]

_LEAST = 0.5  # of the ops of the timed steps; below, the graph step is no picture of them


@dataclass(frozen=True, slots=True)
class Linked:
    """What linking gave.

    Attributes:
        graph: All ranks, calibrated.
        refused: One notice (`refused-input`) per file that could not be used; the command exits with 4 then.
    """

    graph: Graph
    refused: tuple[Notice, ...] = ()


def link(*paths: AnyPath, window: Window = "timed", cache: bool = True, progress: Say | None = None) -> Linked:
    """Link host and device traces of the ranks of one run into one graph.

    Args:
        paths: A capture, directories, or files in any order; what each is, is told by its content. Device traces alone
            are enough, but say less.
        window: Of a capture: the `timed` steps, with details of the host trace carried over by the order of ops; or
            the `graph` step, in which every op is known by its id, but which was slowed down by observing it.
        cache: Look into the cache of read traces, and fill it.
        progress: Told in words what is being done.

    Returns:
        The graph, with delays calibrated, and the files that were refused.

    Raises:
        UsageError: `several-runs`, `no-inputs`.
        InputError: Nothing given is a device trace; `host-mismatch`: a host trace is of another run.

    Example:
        >>> import traceloom
        >>> graph = traceloom.link.link("run").graph  # doctest: +SKIP
    """
    say: Say = progress or (lambda _: None)

    def tell(reading: ReadProgress) -> None:
        part = f" {reading.done_bytes * 100 // reading.total_bytes} %" if reading.total_bytes else ""
        say(f"reading{part}")

    say("reading")
    loaded = load_ranks(*paths, window=window, cache=cache, progress=tell)
    give_back()
    # not before: what is refused needs nothing of it
    from traceloom.link.job import join
    from traceloom.link.rank import link_rank
    from traceloom.retime import calibrate

    parts = []
    for number, loaded_rank in enumerate(loaded.ranks, 1):
        say(f"linking rank {loaded_rank.rank} ({number} of {len(loaded.ranks)})")
        parts.append(link_rank(loaded_rank.trace, loaded_rank.matching))
        give_back()
    say("joining ranks and calibrating")
    refused = tuple(
        Notice("refused-input", "error", f"refused: {error}", where=error.where) for error in loaded.refused
    )
    give_back()
    graph = calibrate(join(parts, loaded.name))
    give_back()
    return Linked(replace(graph, notices=(*loaded.notices, *refused, *graph.notices)), refused)


class LoadedRank(Struct, frozen=True):
    """One rank, read and matched.

    Attributes:
        rank: The rank.
        trace: The device trace.
        matching: Its host trace joined to it; None without one.
    """

    rank: int
    trace: Trace
    matching: Matching | None


class LoadedRanks(Struct):
    """All ranks.

    Attributes:
        name: What the user gave.
        ranks: Ascending.
        notices: What is missing or left out.
        refused: Files that could not be used.
    """

    name: str
    ranks: list[LoadedRank] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    refused: list[InputError] = field(default_factory=list)


def load_ranks(
    *paths: AnyPath, window: Window = "timed", cache: bool = True, progress: Report | None = None
) -> LoadedRanks:
    """Read the traces of one run and join host and device traces.

    Args:
        paths: As for `traceloom.link.inputs.find_inputs`.
        window: Of a capture, what to link.
        cache: Look into the cache of read traces, and fill it.
        progress: Told how far the reading is.

    Raises:
        UsageError, InputError: As `find_inputs`; `host-mismatch` where a host trace that was given belongs to another
            process; the refusal of the only device trace.
    """
    inputs = find_inputs(*local_copies(paths, cache=cache), window=window)
    out = LoadedRanks(with_addresses(inputs.name), notices=list(inputs.notices), refused=list(inputs.refused))
    # Host traces first: a device trace may be decoded beside until then (see `traceloom.read.ahead`).
    hosts: list[HostTrace | InputError | None] = []
    for rank_input in inputs.ranks:
        try:
            host = rank_input.host
            hosts.append(None if host is None else read_host_trace(host.path, capture=host.entry))
        except InputError as error:  # noqa: PERF203  (few)
            hosts.append(error)
    devices = read_all(
        [rank_input.device for rank_input in inputs.ranks], cache=Cache() if cache else None, report=progress
    )
    for rank_input, host_trace, trace in zip(inputs.ranks, hosts, devices, strict=True):
        if isinstance(trace, InputError):
            out.refused.append(trace)
            continue
        rank, host, graph_step = rank_input.rank, rank_input.host, rank_input.graph_step
        matching = None
        try:
            if isinstance(host_trace, InputError):
                raise host_trace
            if host_trace is not None and graph_step is None:
                matching = match(trace, host_trace)
            elif host_trace is not None and graph_step is not None:  # joined over the graph step of a capture
                step = read_kineto(graph_step.path, capture=graph_step.entry)
                matching = _carried(trace, step, match(step, host_trace))
        except InputError as error:
            if host is None or host.capture is None:  # the user gave it
                raise
            text = f"the host trace of rank {rank} is left out: {error}"
            out.notices.append(Notice("host-trace-unused", "warning", text, rank=rank, where=str(host.path)))
        out.ranks.append(LoadedRank(rank, trace, matching))
    if not out.ranks:
        raise out.refused[0]
    return out


def _carried(timed: Trace, graph: Trace, matching: Matching) -> Matching:
    """Give every op of the timed steps the host op that the same op of the graph step has.

    Host ops and the graph step are joined by ids, the graph step and each timed step by the order of names.

    Args:
        timed: The trace of the timed window.
        graph: The trace of the graph step, of the same process.
        matching: The host trace joined to the graph step.

    Returns:
        The host trace joined to the timed steps; its outcomes are those of the graph step. Evidence is `inferred`.
    """
    same = same_ops(timed, graph, matching.host_op >= 0)
    host_op = np.where(same >= 0, matching.host_op[same], -1)
    matched, all_ops = int((host_op >= 0).sum()), int(timed_ops(timed).sum())
    carried = replace(
        matching,
        host_op=host_op,
        exact=False,
        carried=(matched, all_ops - matched),
        rank=timed.rank if timed.rank is not None else matching.rank,
    )
    if matched >= _LEAST * all_ops and matched:
        return carried
    text = (
        f"only {matched:,} of {all_ops:,} ops of the timed window are found in the graph step; the rest have no host op"
    )
    return carried.with_notices(Notice("unlike-graph-step", "warning", text, all_ops - matched, where=timed.meta.path))
