"""What the communications of a workload ask of a network: how long each takes alone, and how much of which link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.array_types import Bools, Floats, Ints

_FULL = 1 + 1e-9  # of a link; what is more does not fit


@dataclass(frozen=True, eq=False)
class Transfers:
    """The transfers of M communications, of C classes, over L links.

    Attributes:
        time_ns: How long each takes alone, shape (M,).
        replaced: Whether it is the machine's, not the recorded one; shape (M,).
        of_class: Class of each; -1 for one that needs no link; shape (M,).
        share: How much of each link a communication of a class takes while it runs alone: rows `of_class`, `link`,
            `share` (of the link's bandwidth), `bytes`.
        links: One row per link: link, name, source, target.
        algorithm: Of each communication; None where a measured transfer was taken or the recorded one kept.
        flags: Of each, what must be known about its time, in words; "" for nothing.
        card_ns: What the bytes of each take over network cards at least; shape (M,).
    """

    time_ns: Ints
    replaced: Bools
    of_class: Ints
    share: pl.DataFrame
    links: pl.DataFrame
    algorithm: list[str | None]
    flags: list[str]
    card_ns: Ints

    def bundles(self) -> LinkBundles:
        """The links, those together that all classes ask the same of."""
        if not self.share.height:
            return LinkBundles(np.zeros((0, 0)), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        asked = self.share.sort("link", "of_class").group_by("link", maintain_order=True).agg("of_class", "share")
        alike = asked.group_by("of_class", "share", maintain_order=True).agg("link")
        classes = int(self.of_class.max(initial=-1)) + 1
        share = np.zeros((classes, alike.height))
        rows = alike.with_row_index("bundle").select("bundle", "of_class", "share").explode("of_class", "share")
        share[rows["of_class"].to_numpy(), rows["bundle"].to_numpy()] = rows["share"].to_numpy()
        return LinkBundles(
            share,
            alike["link"].explode().to_numpy().astype(np.int64),
            np.repeat(np.arange(alike.height), alike["link"].list.len().to_numpy()),
        )


@dataclass(frozen=True, eq=False, slots=True)
class LinkBundles:
    """Links by what is asked of them; B bundles.

    Attributes:
        share: Of the bandwidth of each link of a bundle that a class takes alone; shape (C, B).
        link: The links that are in a bundle.
        of_link: Bundle of each.
    """

    share: Floats
    link: Ints
    of_link: Ints

    def overfull(self, of_class: Ints, start: Ints, end: Ints) -> bool:
        """Whether communications at these times ask more of a link than it has; shapes (M,)."""
        class_row, bundle = np.nonzero(self.share)
        first = np.searchsorted(class_row, np.arange(len(self.share) + 1))
        at = np.flatnonzero((of_class >= 0) & (end > start))
        count = np.diff(first)[of_class[at]]
        row = np.repeat(at, count)
        inside = np.arange(row.size) - np.repeat(np.cumsum(count) - count, count)
        pair = first[of_class[row]] + inside
        asked = self.share[class_row[pair], bundle[pair]]
        # On each bundle in the order of time, ends before starts, what is asked so far.
        times = np.concatenate([start[row], end[row]])
        change = np.concatenate([asked, -asked])
        of = np.concatenate([bundle[pair], bundle[pair]])
        order = np.lexsort((change, times, of))
        return bool((np.cumsum(change[order]) > _FULL).any())


def fair_speeds(share: Floats) -> tuple[Floats, Ints]:
    """How fast transfers get on that share links, as fractions of their speed alone: max-min fair.

    All get more at once, until a link is full: whoever needs that link gets no more, and the others go on. What counts
    is the bandwidth on the link of which a transfer takes most.

    Args:
        share: Of each link that each transfer takes alone, at most 1; shape (transfers, links).

    Returns:
        Speeds, shape (transfers,), and the link that holds each back, -1 for none.
    """
    count = len(share)
    speed, held_by = np.ones(count), np.full(count, -1, dtype=np.int64)
    most = share.max(axis=1, initial=0.0)
    open_ = most > 0
    while open_.any():
        rise = (share[open_] / most[open_, None]).sum(axis=0)
        room = 1.0 - (share[~open_] * speed[~open_, None]).sum(axis=0)
        level = np.divide(room, rise, out=np.full(rise.size, np.inf), where=rise > 0)
        link = int(level.argmin())
        enough = open_ & (most <= level[link] * _FULL)
        if enough.any():
            open_ &= ~enough
            continue
        stopped = open_ & (share[:, link] > 0)
        speed[stopped], held_by[stopped] = max(level[link], 0.0) / most[stopped], link
        open_ &= ~stopped
    return speed, held_by
