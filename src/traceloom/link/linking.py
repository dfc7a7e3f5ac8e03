"""From what the user gave to one calibrated graph of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from traceloom.link.inputs import AnyPath, Window
from traceloom.link.loading import load_ranks
from traceloom.model import Graph, Notice
from traceloom.read.freeing import give_back
from traceloom.read.ranks import Progress

Say = Callable[[str], None]


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
    say = progress or _silent

    def tell(reading: Progress) -> None:
        part = f" {reading.done_bytes * 100 // reading.total_bytes} %" if reading.total_bytes else ""
        say(f"reading{part}")

    say("reading")
    loaded = load_ranks(*paths, window=window, cache=cache, progress=tell)
    give_back()
    from traceloom.link.rank import link_rank  # not before: what is refused needs nothing of it

    parts = []
    for number, loaded_rank in enumerate(loaded.ranks, 1):
        say(f"linking rank {loaded_rank.rank} ({number} of {len(loaded.ranks)})")
        parts.append(link_rank(loaded_rank.trace, loaded_rank.matching))
        give_back()
    say("joining ranks and calibrating")
    refused = tuple(
        Notice("refused-input", "error", f"refused: {error}", where=error.where) for error in loaded.refused
    )
    return Linked(linked(parts, loaded.name, (*loaded.notices, *refused)), refused)


def linked(parts: Sequence[Graph], name: str, notices: Iterable[Notice] = ()) -> Graph:
    """The calibrated graph of a job from the graphs of its ranks.

    Args:
        parts: One uncalibrated graph per rank, at least one; see `traceloom.link.rank.link_rank`.
        name: What to call it.
        notices: What is to be said before what the graph itself says.
    """
    from traceloom.link.job import join
    from traceloom.retime import calibrate

    give_back()
    graph = calibrate(join(parts, name))
    give_back()
    return replace(graph, notices=(*notices, *graph.notices))


def _silent(_: str) -> None:
    """Nobody wants to know."""
