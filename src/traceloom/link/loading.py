"""Reads what the user gave and joins each rank's host trace to its device trace."""

from __future__ import annotations

from msgspec import Struct, field

from traceloom.errors import InputError
from traceloom.link.carried import carry
from traceloom.link.host_device import match
from traceloom.link.inputs import AnyPath, RankInput, Window, find_inputs
from traceloom.link.matching import Matching
from traceloom.model import Trace
from traceloom.model.host_trace import HostTrace
from traceloom.model.notice import Notice
from traceloom.read import Cache
from traceloom.read.host_trace import read_host_trace
from traceloom.read.kineto import read_kineto
from traceloom.read.ranks import Report, read_all


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
    inputs = find_inputs(*paths, window=window)
    out = LoadedRanks(inputs.name, notices=list(inputs.notices), refused=list(inputs.refused))
    # Host traces first: a device trace may be decoded beside until then (see `traceloom.read.ahead`).
    hosts = [_host_trace(rank_input) for rank_input in inputs.ranks]
    devices = read_all(
        [rank_input.device for rank_input in inputs.ranks], cache=Cache() if cache else None, report=progress
    )
    for rank_input, host, trace in zip(inputs.ranks, hosts, devices, strict=True):
        if isinstance(trace, InputError):
            out.refused.append(trace)
            continue
        matching = _matched(rank_input, host, trace, out.notices)
        out.ranks.append(LoadedRank(rank_input.rank, trace, matching))
    if not out.ranks:
        raise out.refused[0]
    return out


def _host_trace(rank_input: RankInput) -> HostTrace | InputError | None:
    """The host trace of a rank, or why it cannot be read; None where there is none."""
    if rank_input.host is None:
        return None
    try:
        return read_host_trace(rank_input.host.path, capture=rank_input.host.entry)
    except InputError as error:
        return error


def _matched(
    rank_input: RankInput, host: HostTrace | InputError | None, trace: Trace, notices: list[Notice]
) -> Matching | None:
    """Join the host trace of a rank to its device trace; over the graph step where a capture has one.

    Args:
        rank_input: The files of the rank.
        host: The host trace, read.
        trace: The device trace, read.
        notices: Told why a capture's host trace is left out.

    Raises:
        InputError: A host trace that the user gave cannot be read, or is of another process.
    """
    if rank_input.host is None or host is None:
        return None
    try:
        if isinstance(host, InputError):
            raise host
        if rank_input.graph_step is None:
            return match(trace, host)
        step = read_kineto(rank_input.graph_step.path, capture=rank_input.graph_step.entry)
        return carry(trace, step, match(step, host))
    except InputError as error:
        if rank_input.host.capture is None:
            raise
        text = f"the host trace of rank {rank_input.rank} is left out: {error}"
        notices.append(
            Notice("host-trace-unused", "warning", text, rank=rank_input.rank, where=str(rank_input.host.path))
        )
        return None
