"""What the communications of a workload ask of a network: how long each takes alone, and how much of which link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.array_types import Bools, Floats, Ints

_LEAST = 1e-12  # of a link's bandwidth: rounding may leave less than nothing
FULL = 1 + 1e-9  # of a link; what is more does not fit


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
        classes = int(self.of_class.max(initial=-1)) + 1
        if not self.share.height:  # latencies alone
            return LinkBundles.none(classes)
        asked = self.share.sort("link", "of_class").group_by("link", maintain_order=True).agg("of_class", "share")
        alike = asked.group_by("of_class", "share", maintain_order=True).agg("link").with_row_index("bundle")
        rows = alike.select("bundle", "of_class", "share").explode("of_class", "share").sort("of_class", "bundle")
        return LinkBundles(
            np.searchsorted(rows["of_class"].to_numpy(), np.arange(classes + 1)),
            rows["bundle"].to_numpy().astype(np.int64),
            rows["share"].to_numpy(),
            alike["link"].explode().to_numpy().astype(np.int64),
            np.repeat(np.arange(alike.height), alike["link"].list.len().to_numpy()),
        )


@dataclass(frozen=True, eq=False, slots=True)
class LinkBundles:
    """Links by what is asked of them; C classes, B bundles.

    Attributes:
        first: Where the bundles of each class begin in the next two, and their number; shape (C + 1,).
        bundle: The bundles that a class needs.
        share: Of the bandwidth of each link of these that it takes alone.
        link: The links that are in a bundle.
        of_link: Bundle of each.
    """

    first: Ints
    bundle: Ints
    share: Floats
    link: Ints
    of_link: Ints

    @classmethod
    def none(cls, classes: int = 0) -> LinkBundles:
        """No links, of which none of the classes needs any."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(np.zeros(classes + 1, dtype=np.int64), nothing, np.zeros(0), nothing, nothing)

    @property
    def count(self) -> int:
        """How many bundles there are."""
        return int(self.of_link.max(initial=-1)) + 1

    def of(self, number: int) -> tuple[Ints, Floats]:
        """The bundles of a class, and what it takes of them."""
        part = slice(int(self.first[number]), int(self.first[number + 1]))
        return self.bundle[part], self.share[part]

    def uses(self, of_class: Ints) -> tuple[Ints, Ints, Floats]:
        """What communications of these classes (-1: none) use: row, bundle and share, row by row."""
        at = np.flatnonzero(of_class >= 0)
        count = np.diff(self.first)[of_class[at]]
        row = np.repeat(at, count)
        entry = self.first[of_class[row]] + np.arange(row.size) - np.repeat(np.cumsum(count) - count, count)
        return row, self.bundle[entry], self.share[entry]

    def overfull(self, of_class: Ints, start: Ints, end: Ints) -> bool:
        """Whether communications at these times ask more of a link than it has; shapes (M,)."""
        row, bundle, asked = self.uses(np.where(end > start, of_class, -1))
        # On each bundle in the order of time, ends before starts, what is asked so far.
        times = np.concatenate([start[row], end[row]])
        change = np.concatenate([asked, -asked])
        order = np.lexsort((change, times, np.concatenate([bundle, bundle])))
        return bool((np.cumsum(change[order]) > FULL).any())


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
    short = np.flatnonzero(share.sum(axis=0) > FULL)  # no other link can hold anything back
    share = share[:, short]
    open_ = share.any(axis=1)
    weight = np.divide(share, most[:, None], out=np.zeros_like(share), where=share > 0)
    while open_.any():
        rise = weight[open_].sum(axis=0)
        room = 1.0 - speed[~open_] @ share[~open_]
        level = np.divide(room, rise, out=np.full(rise.size, np.inf), where=rise > 0)
        least = max(float(level.min()), _LEAST)
        enough = open_ & (most <= least * FULL)
        if enough.any():
            open_ &= ~enough
            continue
        # Links that are full at the same level are full at once.
        tight = level <= least * FULL
        stopped = open_ & share[:, tight].any(axis=1)
        speed[stopped] = least / most[stopped]
        held_by[stopped] = short[np.argmax((share[stopped] > 0) & tight, axis=1)]
        open_ &= ~stopped
    return speed, held_by
