"""Which nodes are communication, and what is known of each: from kernels, the ops around their launches, names."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.array_types import Ints
from traceloom.link.calls import HOST_BACKENDS, named
from traceloom.link.device_work import DeviceWork
from traceloom.link.host_tree import HostTree
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model import graph_schema as gs
from traceloom.model.arrays import nearest, row_numbers
from traceloom.model.frames import as_declared
from traceloom.model.graph_schema import GRAPH_SCHEMAS, empty_frame

if TYPE_CHECKING:
    from traceloom.link.rank import Parts


# First match wins; kernel names in lower case. NCCL's names are of the first operation that was grouped, a hint.
_KERNEL_KINDS = (
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_reduce", r"all_?reduce|cross_device_reduce"),
    ("all_gather", r"all_?gather"),
    ("all_to_all", r"all_?to_?all|all2all|\bep::(\w+::)*(dispatch|combine)"),
    ("broadcast", r"broadcast"),
    ("reduce", r"nccl(dev)?kernel_reduce_"),
    ("send_receive", r"send_?recv"),
)
_NOT_THE_OPERATION = ("wait", "init", "unknown")  # calls about communication that move nothing
_PAIRS = {"send": "send", "recv": "receive"}
_FIELDS = (
    "kind", "group", "group_size", "ranks", "element_type", "in_bytes", "out_bytes", "sequence", "peer", "tag",
    "in_splits", "out_splits",
)  # fmt: skip


class OwnCommunication(Struct, frozen=True):
    """Communication of one rank.

    Attributes:
        work: Numbers of the work that is communication.
        work_kind: Kind of node of each: number in NODE_KINDS.
        host_event: Positions (in the tree) of host events that are communication.
        about: One row per work, then per host event, with the columns of `communication` but `node` and `instance`.
    """

    work: Ints
    work_kind: Ints
    host_event: Ints
    about: pl.DataFrame

    def nodes(self, parts: Parts) -> Ints:
        """Node of each row."""
        return np.concatenate([parts.work_node[self.work], parts.segment_node[parts.host.first[self.host_event]]])

    def rows(self, parts: Parts) -> pl.DataFrame:
        """The `communication` frame."""
        nodes = self.nodes(parts)
        order = np.argsort(nodes, kind="stable")
        instance = pl.Series("instance", [None], dtype=pl.Int64).new_from_index(0, nodes.size)
        rows = self.about[order].hstack([pl.Series("node", nodes[order]), instance])
        return as_declared(rows, GRAPH_SCHEMAS["communication"])


@lru_cache(maxsize=1)
def _kernel_pattern() -> str:
    """The table of kernels' names that say communication, as one expression."""
    table = json.loads((files("traceloom") / "analyze" / "kernel_rules.json").read_text(encoding="utf-8"))
    return "(?i)" + "|".join(f"(?:{row['pattern']})" for row in table if row["category"] == "communication")


def communication(trace: Trace, tree: HostTree, work: DeviceWork) -> OwnCommunication:
    """Find the communication of a rank.

    On devices: kernels by the table of names. On hosts: calls of back ends that work there (`gloo:all_reduce`).
    What is known of one is taken from its own arguments, else from the nearest op or annotation around its launch
    that describes a collective, else from its name.
    """
    category = trace.events["category"][work.row]
    names = trace.events["name"][work.row]
    is_communication = named(names, _kernel_pattern()) & (category == cat.KERNEL).to_numpy()
    chosen = np.flatnonzero(is_communication)
    # outermost calls of back ends that communicate from the host, without GPU work of their own
    outermost = tree.named(HOST_BACKENDS) & ~tree.call
    outermost &= nearest(tree.parent, outermost) < 0
    submitted = np.zeros(tree.row.size + 1, dtype=np.int64)
    np.add.at(submitted, work.call[work.call >= 0] + 1, 1)
    total = np.cumsum(submitted)
    host = np.flatnonzero(outermost)
    host = host[total[tree.stop[host]] == total[host]]
    if not chosen.size and not host.size:
        return OwnCommunication(chosen, chosen, host, empty_frame("communication").select(_FIELDS))
    # what the file says of each event that describes a collective; columns `event` and _FIELDS
    members = trace.groups.select("group", pl.col("ranks").alias("members"))
    described = (
        trace.collectives.filter(~pl.col("kind").is_in(_NOT_THE_OPERATION) | pl.col("kind").is_null())
        .unique("event", keep="first", maintain_order=True)
        .join(members.unique("group"), on="group", how="left", maintain_order="left")
        .with_columns(
            pl.coalesce(whole_list("ranks", pl.Int32), "members"),
            whole_list("in_splits", pl.Int64),
            whole_list("out_splits", pl.Int64),
            pl.lit(None, pl.Int64).alias("tag"),
        )
    )
    number = np.full(trace.events.height, -1)
    number[described["event"].to_numpy()] = np.arange(described.height)
    rows = work.row[chosen]
    about = _completed(tree, described, work.call[chosen], names[chosen], own=number[rows])
    if host.size:
        about = pl.concat([about, _completed(tree, described, host, tree.name[host])])
    about = about.with_columns(pl.col("kind").replace(_PAIRS))
    node_kinds = {"send": gs.SEND, "receive": gs.RECEIVE}
    codes = [gs.NODE_KINDS.index(node_kinds.get(kind, gs.COLLECTIVE)) for kind in about["kind"].head(chosen.size)]
    return OwnCommunication(chosen, np.array(codes, dtype=np.int64), host, about)


def whole_list(column: str, dtype: type[pl.DataType]) -> pl.Expr:
    """Text such as `[0, 8, 16]` as a list of numbers; null where the file cut it, and for empty ones."""
    inside = pl.col(column).str.extract(r"^\s*\[([\d,\s-]+)\]\s*$").str.replace_all(r"\s", "").str.split(",")
    numbers = inside.list.eval(pl.element().cast(dtype, strict=False))
    return pl.when(numbers.list.eval(pl.element().is_not_null()).list.all()).then(numbers).alias(column)


def _completed(
    tree: HostTree, described: pl.DataFrame, position: Ints, names: pl.Series, own: Ints | None = None
) -> pl.DataFrame:
    """The fields of communications: their own, completed by those of the described events around them, and by names.

    Args:
        tree: Host events.
        described: Events that describe a collective.
        position: Where each communication, or the call that launched it, stands in the tree; -1 for nowhere.
        names: Its name.
        own: The row of `described` that is about itself, -1 for none; None where `position` says that.
    """
    number = np.full(tree.row.size + 1, -1)
    at = tree.position[described["event"].to_numpy()]
    number[at[at >= 0]] = np.flatnonzero(at >= 0)
    is_described = number >= 0
    above = np.append(nearest(tree.parent, is_described[:-1]), -1)
    parts = [] if own is None else [described[row_numbers(own)]]
    current = position
    for _ in range(3):  # the call of the back end, the op that describes it, the op of the framework
        current = np.where(is_described[current], current, above[current])
        parts.append(described[row_numbers(number[current])])
        current = above[current]
    lower = names.str.to_lowercase().alias("lower")
    by_name = [pl.when(pl.col("lower").str.contains(pattern)).then(pl.lit(kind)) for kind, pattern in _KERNEL_KINDS]
    return pl.DataFrame([lower]).select(
        pl.coalesce(*(part[name] for part in parts), *(by_name if name == "kind" else ())).alias(name)
        for name in _FIELDS
    )
