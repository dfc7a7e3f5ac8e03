"""Changes as they are written, and the nodes that they select.

A selection is written as words: `kernels`, `kernels ~ gemm`, `rank 7 host`, `collectives ~
all_reduce`.

A change is written as `[rank N[,M]] TARGET [~ REGEX] ACTION`, for example `kernels ~ gemm * 0.5`,
`copies async`, `syncs ~ cudaDeviceSynchronize remove`, `rank 7 delay remove`, `network * 2`, `idle
remove`. What each assumes is stated in `ASSUMPTIONS`, and in docs/concepts/what-if.md.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
import polars as pl

from traceloom.analyze.kernel_rules import WORK_KINDS, KindMatcher, load_built_in_kind_rules
from traceloom.errors import UsageError
from traceloom.graph import graph as graph_schema
from traceloom.graph.graph import Graph
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.frames import contains

NODE_TARGETS: dict[str, tuple[tuple[str, ...], str]] = {
    "kernels": ((graph_schema.KERNEL,), "kernels that compute"),
    "copies": ((graph_schema.COPY, graph_schema.FILL), "copies and fills on the device"),
    "gpu": (
        (graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL),
        "all work of the device but communication",
    ),
    "collectives": (
        (graph_schema.COLLECTIVE, graph_schema.SEND, graph_schema.RECEIVE),
        "communication",
    ),
    "host": (
        (graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH, graph_schema.BLOCK),
        "what host threads do themselves",
    ),
    "ops": (
        (graph_schema.HOST,),
        "operators and other recorded regions on the host, by their own time",
    ),
    "think": ((graph_schema.THINK,), "host time outside any recorded event (Python)"),
    "launches": ((graph_schema.LAUNCH,), "calls that submit work"),
    "syncs": ((graph_schema.BLOCK,), "calls that wait for the device"),
    "loading": ((graph_schema.HOST, graph_schema.THINK), "host work inside the data loader"),
}
"""Word -> the kinds of nodes that it stands for, and its meaning."""
DEVICE_TARGETS = ("kernels", "copies", "gpu", "collectives")

DATA_LOADING_PATTERN = r"enumerate\(DataLoader\)#|_BaseDataLoaderIter|DataLoader"


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice of nodes.

    Attributes:
        target: A key of `NODE_TARGETS`.
        pattern: A regular expression that the name contains somewhere, ignoring case; empty for
            all.
        ranks: Only these ranks; empty for all.
    """

    target: str
    pattern: str = ""
    ranks: tuple[int, ...] = ()

    def nodes(self, graph: Graph) -> Bools:
        """Returns the selected nodes, shape (nodes,).

        Raises:
            UsageError: slug `bad-change`: the pattern is not a regular expression.
        """
        kinds, _ = NODE_TARGETS[self.target]
        selected = graph.node_mask(*kinds)
        if self.target == "loading":
            loaders = graph.node_mask(graph_schema.HOST) & match_node_names(
                graph, DATA_LOADING_PATTERN
            )
            position, begin, end = locate_regions(graph, loaders)
            begun, ended = (
                np.searchsorted(np.sort(bounds), position, side="right") for bounds in (begin, end)
            )
            selected &= begun > ended
        if self.pattern:
            selected &= match_node_names(graph, self.pattern)
        if self.ranks:
            selected &= np.isin(graph.node_ranks, self.ranks)
        return selected

    def nearest(self, graph: Graph, limit: int = 3) -> list[str]:
        """Returns names close to the pattern of a selection without nodes: the most similar ones,
        else those of the most work.
        """
        work = (
            graph.nodes.filter(pl.Series(Selection(self.target, "", self.ranks).nodes(graph)))
            .group_by("name")
            .agg(pl.col("work_ns").sum())
            .drop_nulls()
        )
        names: list[str] = work.sort("work_ns", "name", descending=[True, False])["name"].to_list()
        names_by_lower_case = {name.lower(): name for name in reversed(names)}
        pattern = re.sub(r"[^\w:]+", " ", self.pattern).lower()
        return [
            names_by_lower_case[name]
            for name in get_close_matches(pattern, names_by_lower_case, limit, 0.4)
        ] or names[:limit]

    def __str__(self) -> str:
        ranks = f"rank {','.join(map(str, self.ranks))} " if self.ranks else ""
        return f"{ranks}{self.target}" + (f" ~ {self.pattern}" if self.pattern else "")


@dataclass(frozen=True, slots=True, eq=False)
class NodeSelection:
    """Nodes chosen by a program, with a description.

    Attributes:
        words: Their description, as part of a sentence.
        mask: The selected nodes, shape (nodes,).
        target: The key of `NODE_TARGETS` that describes them best.
        ranks: Their ranks; empty for all.
    """

    words: str
    mask: Bools
    target: str = "gpu"
    ranks: tuple[int, ...] = ()

    def nodes(self, graph: Graph) -> Bools:
        """Returns the selected nodes, shape (nodes,)."""
        assert self.mask.size == graph.nodes.height
        return self.mask

    def __str__(self) -> str:
        return self.words


def select_event_nodes(graph: Graph, rank: int | None, events: pl.Series) -> Bools:
    """Returns the nodes of some events (rows) of one rank's trace, shape (nodes,)."""
    event_rows = (events.drop_nulls() if events.null_count() else events).to_numpy()
    is_selected_event: Bools = np.zeros(
        int(event_rows.max()) + 1 if event_rows.size else 0, dtype=np.bool_
    )
    is_selected_event[event_rows] = True
    in_range = graph.events < is_selected_event.size
    mask: Bools = in_range.copy()
    mask[in_range] = is_selected_event[graph.events[in_range]]
    if rank is not None:
        mask &= graph.node_ranks == rank
    return mask


def locate_regions(graph: Graph, parts: Bools) -> tuple[Ints, Ints, Ints]:
    """Returns where each node starts, shape (nodes,), and where the recorded region of each of some
    host nodes begins and ends, on a line on which the lanes follow each other.
    """
    end = pl.col("start_ns") + pl.col("duration_ns")
    shift = pl.col("lane").cast(pl.Int64).fill_null(-1) * (end.max() - pl.col("start_ns").min() + 1)
    line = graph.nodes.select("rank", "event", begin=pl.col("start_ns") + shift, end=end + shift)
    regions = line.filter(pl.Series(parts)).select(
        pl.col("begin").min().over("rank", "event"), pl.col("end").max().over("rank", "event")
    )
    return line["begin"].to_numpy(), regions["begin"].to_numpy(), regions["end"].to_numpy()


def match_node_names(graph: Graph, pattern: str) -> Bools:
    """Returns the nodes whose name contains the pattern, or that are communication or kernels of
    that kind; shape (nodes,).
    """
    try:
        re.compile(pattern)
        distinct_names = graph.names
        matches = contains(distinct_names, f"(?i){pattern}")
    except (re.error, pl.exceptions.ComputeError) as error:
        raise UsageError(
            f"`{pattern}` is no regular expression: {error}", slug="bad-change"
        ) from error
    # Matrix products are seldom called `gemm`
    if pattern.lower() in WORK_KINDS and pattern.lower() != "other":
        matcher = KindMatcher.of(load_built_in_kind_rules())
        no_context = np.zeros(distinct_names.len(), dtype=np.uint64)
        first_rules = matcher.first(
            distinct_names, np.arange(distinct_names.len()), no_context, no_context
        )
        rule_kinds = [*(rule.kind for rule in matcher.rules), ""]
        matches = matches | pl.Series(
            [rule_kinds[rule] == pattern.lower() for rule in first_rules], dtype=pl.Boolean
        )
    selected: Bools = np.append(matches.to_numpy(), False)[graph.name_numbers]
    if graph.communication.height:
        kinds = graph.communication["kind"]
        selected[
            graph.communication["node"].filter(kinds.str.contains(f"(?i){pattern}")).to_numpy()
        ] = True
    return selected


ASSUMPTIONS = {
    "scale": "the work chosen takes so many times as long; everything else as long as it took",
    "remove": "the work chosen takes no time; what waited for it waits for nothing longer",
    "async": "the calls of these copies return at once; what uses the data is ordered on the device as before",
    "drop": "these calls no longer wait for the device; what they themselves cost stays",
    "overlap": "this runs beside what comes behind it: nothing before the optimizer needs its result, and it slows no "
    "kernel down; what other kernels covered already is not saved again",
    "network": "the transfer of every communication is so many times as fast; waiting for late ranks stays",
    "delay": "this rank begins no later and works no slower than the middle one of the others, step by step and name "
    "by name; what most others do not do takes no time",
    "idle": "work is always launched in time: host and launches cost nothing, what the device does stays in order",
    "fuse": "kernels that follow each other on a stream become one: their pauses and all launches but the first go, "
    "their work and the operators stay",
    "graph": "one launch submits all that a rank does in a step: the calls that launch and the operators around them "
    "cost nothing but the first; what else the host does, and waits for, still comes before the work behind it",
    "balance": "kernels of each name take as long on every rank as on the mean one, step by step",
    "workers": "so many processes make batches beside the step, one after the other at an even pace; the step waits only "
    "for what they cannot keep up with",
}
# Actions without a number
_ACTIONS_WITHOUT_FACTOR = (
    "remove",
    "async",
    "overlap",
    "fuse",
    "graph",
    "balance",
)
_DEVICE_ONLY_ACTIONS = ("async", "overlap", "fuse", "graph")  # of work of the device
_CHANGE_PATTERN = re.compile(
    r"^\s*(?:ranks?\s+(?P<ranks>\d+(?:\s*,\s*\d+)*)\s+)?(?P<target>[a-z]+)(?:\s*~\s*(?P<pattern>.+?))?"
    r"\s+(?:(?P<sign>[*x×])\s*(?P<factor>\d+(?:\.\d+)?)|(?P<action>[a-z]+)(?:\s+(?P<number>\d+))?)\s*$"
)
CHANGE_EXAMPLES = "`kernels ~ gemm * 0.5`, `copies async`, `rank 7 delay remove`, `network * 2`, `loading workers 4`"


@dataclass(frozen=True, slots=True)
class Change:
    """One change.

    Attributes:
        action: A key of `ASSUMPTIONS`.
        selection: The nodes that it changes.
        factor: For `scale` (times as long), `network` (times as fast) and `workers` (how many); 1
            otherwise.
    """

    action: str
    selection: Selection | NodeSelection
    factor: float = 1.0

    def __str__(self) -> str:
        number = format_factor(self.factor)
        phrases = {
            "scale": f"{self.selection} * {number}",
            "network": f"{self.selection} * {number}",
            "workers": f"{self.selection} workers {number}",
            "delay": f"{self.selection} remove",
            "idle": f"{self.selection} remove",
            "drop": f"{self.selection} remove",
        }
        special = {"network": "network", "delay": "delay", "idle": "idle"}.get(self.action)
        text = phrases.get(self.action, f"{self.selection} {self.action}")
        return text.replace(self.selection.target, special, 1) if special else text


def format_factor(factor: float) -> str:
    """Returns a factor as it is written in a change: all its digits, no exponent."""
    return np.format_float_positional(factor, trim="-")


def parse(text: str) -> Change:
    """Parses a change.

    Raises:
        UsageError: slug `bad-change`, with the accepted forms.
    """
    match = _CHANGE_PATTERN.match(text)
    if match is None:
        raise _make_change_error(text, "write it as TARGET [~ REGEX] ACTION")
    ranks = tuple(int(part) for part in (match["ranks"] or "").split(",") if part.strip())
    target, pattern, action = match["target"], match["pattern"] or "", match["action"]
    factor = float(match["factor"]) if match["factor"] else 1.0
    is_scaled = match["sign"] is not None
    if match["number"] and action != "workers":
        raise _make_change_error(text, f"`{action}` takes no number")
    if target == "network" and is_scaled and factor > 0:
        return Change("network", Selection("collectives", pattern, ranks), factor)
    if target in {"delay", "idle"} and pattern:
        raise _make_change_error(text, f"`{target}` takes no `~`: it is of all that the host does")
    if target == "delay" and action == "remove":
        if not ranks:
            raise _make_change_error(text, "say whose delay, as in `rank 7 delay remove`")
        return Change("delay", Selection("host", pattern, ranks))
    if target == "idle" and action == "remove":
        return Change("idle", Selection("host", pattern, ranks))
    if target not in NODE_TARGETS:
        raise _make_change_error(
            text, f"`{target}` is none of {', '.join([*NODE_TARGETS, 'network', 'delay', 'idle'])}"
        )
    selection = Selection(target, pattern, ranks)
    if is_scaled:
        return Change("scale", selection, factor)
    if action == "workers" and target == "loading" and int(match["number"] or 0):
        return Change("workers", selection, float(match["number"]))
    if action in {"remove", "drop"} and target == "syncs":
        return Change("drop", selection)
    if action not in _ACTIONS_WITHOUT_FACTOR:
        raise _make_change_error(
            text, f"`{action}` is none of * FACTOR, {', '.join(_ACTIONS_WITHOUT_FACTOR)}, workers N"
        )
    if action in _DEVICE_ONLY_ACTIONS and target not in DEVICE_TARGETS:
        raise _make_change_error(
            text, f"`{action}` is of what the device does: {', '.join(DEVICE_TARGETS)}"
        )
    return Change(action, selection)


def _make_change_error(text: str, reason: str) -> UsageError:
    return UsageError(
        f"`{text}` is no change: {reason}", slug="bad-change", hint=f"examples: {CHANGE_EXAMPLES}"
    )
