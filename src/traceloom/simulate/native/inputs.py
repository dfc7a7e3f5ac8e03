"""What can be simulated, as a graph: a recorded run, a saved graph, `.et` files of any writer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from traceloom.chakra.conversion import ConversionInput, is_chakra
from traceloom.chakra.group_file import GROUP_FILES, read_groups
from traceloom.errors import InputError, UsageError
from traceloom.files import note_input
from traceloom.link import link_session
from traceloom.model import graph_store
from traceloom.model.graph import Graph
from traceloom.model.session import Session
from traceloom.simulate.native.evaluation import as_evaluated
from traceloom.simulate.native.isolating import SIDES, isolated
from traceloom.simulate.native.joining import joined
from traceloom.simulate.native.operations import operations


@dataclass(frozen=True)
class SimulationInput:
    """A workload that is ready to be simulated.

    Attributes:
        graph: Its graph, with the meetings of all ranks.
        name: What the user gave.
        measured: Whether its times were measured; else they follow from the durations in its files.
        serial: Whether a lane of the device does one thing at a time in an order that the graph does not hold.
        session: The traces, where it was read from traces.
        only: The side that alone takes time; None where both do.
    """

    graph: Graph
    name: str
    measured: bool
    serial: bool = False
    session: Session | None = None
    only: str | None = None


AnyWorkload = str | Path | Sequence[str | Path] | Graph | Session | SimulationInput


def open_input(
    workload: AnyWorkload,
    *,
    groups: str | Path | None = None,
    only: str | None = None,
    step: int | None = None,
    cache: bool = True,
) -> SimulationInput:
    """Read what shall be simulated.

    Args:
        workload: Files or directories as `traceloom.load` takes them, a `.graph`, a directory of `.et` files; or what
            was read of it already; what was opened is given back as it is.
        groups: The file that says which ranks are in which group, of `.et` files; where None the one beside them.
        only: One of `SIDES`: the other side takes no time.
        step: One step of a recorded run.
        cache: Look into the cache of read traces, and fill it.

    Raises:
        UsageError: slugs `no-file`, `wrong-usage`: a step of what has none, groups of what has its own, a side that
            there is not.
        InputError: A file is refused; slug `not-a-group-file`: that of the groups.
    """
    if isinstance(workload, SimulationInput):
        return workload
    if only is not None and only not in SIDES:
        raise UsageError(
            f"`{only}` is no side of a workload", slug="wrong-usage", hint=f"one side alone is {' or '.join(SIDES)}"
        )
    chakra = False
    session = None
    members = None
    if isinstance(workload, (Graph, Session)):
        graph = workload if isinstance(workload, Graph) else link_session(workload, step=step)
        session = workload if isinstance(workload, Session) else None
        name = workload.name
    else:
        paths = [Path(workload)] if isinstance(workload, (str, Path)) else [Path(path) for path in workload]
        name = " ".join(map(str, paths))
        first = paths[0] if paths else Path()
        chakra = any(map(is_chakra, paths))
        if chakra or any(path.name.endswith(graph_store.ENDING) for path in paths):
            if len(paths) > 1:
                raise UsageError(
                    "a workload is one directory of .et files, or one graph",
                    slug="wrong-usage",
                    hint="name the directory that holds the files of all ranks",
                )
            with ConversionInput(first) as source:
                graph = source.graph()
            if chakra:
                beside = first if first.is_dir() else first.parent
                group_path = groups or next((beside / name for name in GROUP_FILES if (beside / name).is_file()), None)
                if group_path is not None:
                    note_input(Path(group_path))
                    named = read_groups(Path(group_path))
                    if named.faults:
                        raise InputError(named.faults[0], slug="not-a-group-file", where=str(group_path))
                    members = named.members or {}
        else:
            from traceloom.read import load

            session = load(*paths, cache=cache)
            name = session.name
            graph = link_session(session, step=step)
    if step is not None and session is None:
        raise UsageError("--step is of recorded runs", slug="wrong-usage", hint="leave it out, or name the run")
    if groups is not None and not chakra:
        raise UsageError("--groups is of .et files", slug="wrong-usage", hint="leave it out: what is recorded knows")
    serial = session is None and not graph.delays.height and (graph.edges["evidence"] == "assumed").all()
    measured = not serial
    graph = replace(graph, name=name)
    if serial:
        graph = joined(graph, members)
    if only is not None:
        graph, measured = isolated(graph, only), False
    if not measured:
        graph = as_evaluated(graph, operations(graph), serial=serial)
    return SimulationInput(graph, name, measured, serial, session, only)
