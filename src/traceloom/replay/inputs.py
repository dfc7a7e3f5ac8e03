"""What can be planned: the host traces of some ranks, with what else is known of them."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from traceloom.array_types import Ints
from traceloom.chakra.conversion import ConversionInput, is_chakra
from traceloom.errors import InputError, UsageError
from traceloom.files import note_input
from traceloom.link.linking import load_ranks
from traceloom.model import graph_store
from traceloom.model.graph import Graph
from traceloom.model.host_trace import HostTrace
from traceloom.model.notice import Notice
from traceloom.read.host_trace import HostPeek, groups_in, peek_either, read_host_trace
from traceloom.read.inputs import find
from traceloom.replay.originals import Originals, originals_of, originals_of_graph

AnyPath = str | os.PathLike[str]
_APART = timedelta(days=1)  # ranks in other time zones


class PlanInput(Struct, frozen=True):
    """The host trace of one rank with what else is known of it.

    Attributes:
        rank: The rank.
        host: Its host trace.
        originals: Given the ids of the chosen nodes, what was measured of them.
        capture: The rank's part of capture.json.
    """

    rank: int
    host: HostTrace
    originals: Callable[[Ints], Originals]
    capture: dict[str, Any] | None = None


def open_inputs(paths: Sequence[AnyPath], *, cache: bool) -> tuple[str, list[PlanInput], list[Notice]]:
    """Read what shall be planned: what the user gave, in a word; the host trace of each rank; what must be known.

    Args:
        paths: A capture; host traces of any ranks, with or without device traces; a `.graph`, or `.et` files of ours.
        cache: Look into the cache of read traces, and fill it.

    Raises:
        InputError: `no-host-trace`, `two-host-traces`; or the refusal of a file.
    """
    texts = tuple(os.fspath(path) for path in paths)
    if len(texts) == 1 and (is_chakra(Path(texts[0])) or graph_store.is_graph(Path(texts[0]))):
        with ConversionInput(Path(texts[0])) as source:
            graph = source.graph()
        return texts[0], _of_graph(graph, texts[0]), list(graph.notices)
    sources = find(texts)
    peeks = [] if sources.captures else [peek_either(file) for file in sources.inputs]
    for file in sources.inputs:
        note_input(file.path)
    if peeks and all(isinstance(peek, HostPeek) for peek in peeks):
        hosts = [read_host_trace(peek.source.path) for peek in peeks]
        ranks = [host.rank if host.rank is not None else number for number, host in enumerate(hosts)]
        if len(set(ranks)) < len(ranks):
            text = f"two host traces are of rank {Counter(ranks).most_common(1)[0][0]}"
            raise InputError(text, slug="two-host-traces", hint="give one for each rank")
        _check_one_run(hosts)
        entries = [PlanInput(rank, host, lambda _chosen: Originals()) for rank, host in zip(ranks, hosts, strict=True)]
        text = "there is no device trace: how long the ops took is not known"
        notices = [Notice("no-device-trace", "info", text, len(hosts))]
        return " ".join(texts), sorted(entries, key=lambda entry: entry.rank), notices
    loaded = load_ranks(*paths, cache=cache)
    entries = []
    for rank in loaded.ranks:
        matching = rank.matching
        if matching is not None:
            entries.append(
                PlanInput(
                    rank.rank,
                    matching.host,
                    partial(originals_of, rank.trace, matching),
                    rank.trace.meta.capture,
                )
            )
    if not entries:
        raise InputError(
            "there is no host trace: nothing says which ops ran with which arguments",
            slug="no-host-trace",
            where=loaded.name,
            hint="record with `traceloom record`, or with torch.profiler.ExecutionTraceObserver beside the profiler",
        )
    return loaded.name, entries, loaded.notices


def _check_one_run(hosts: Sequence[HostTrace]) -> None:
    """Host traces of one run are of one version, name the same groups and began together.

    Raises:
        UsageError: `several-runs`.
    """
    first, *others = hosts
    members = dict(first.groups.select("group", "ranks").drop_nulls().iter_rows())
    for other in others:
        groups = other.groups.select("group", "ranks").drop_nulls().iter_rows()
        odd = [name for name, ranks in groups if members.setdefault(name, ranks) != ranks]
        apart = [time for host in (first, other) if (time := _time(host.recorded_at)) is not None]
        what = (
            f"one has the schema {first.schema}, one {other.schema}" if first.schema != other.schema
            else f"the group {odd[0]!r} has other members" if odd
            else f"one is of {apart[0]}, one of {apart[1]}" if len(apart) == 2 and abs(apart[0] - apart[1]) > _APART
            else ""
        )  # fmt: skip
        if what:
            text = f"{first.path} and {other.path} are of different runs: {what}"
            raise UsageError(text, slug="several-runs", hint="give the host traces of one run")


def _time(text: str | None) -> datetime | None:
    """A time of day as the observer writes it."""
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text or "")
    return None


def _of_graph(graph: Graph, path: str) -> list[PlanInput]:
    if not graph.host_ops.height:
        raise InputError(
            "the graph holds no ops of a host trace: nothing says which ops ran with which arguments",
            slug="no-host-trace",
            where=path,
            hint="link device traces together with their host traces",
        )
    return [
        PlanInput(
            rank,
            HostTrace(path, ops.drop("rank"), rank=rank, groups=groups_in(ops, path)[0]),
            partial(originals_of_graph, graph, rank),
        )
        for (rank,), ops in graph.host_ops.sort("rank", "id").group_by("rank", maintain_order=True)
        if isinstance(rank, int)
    ]
