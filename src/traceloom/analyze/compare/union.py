"""One tree for all compared steps of both sides: every place an operator stands at, in any of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from traceloom.analyze.compare.tree import Tree, laid_on


@dataclass(slots=True)
class Union:
    """Places, parents before their children.

    The first tree that is added is the reference of its side; the reference of the second side is laid on that of the
    first, all other trees on that of their side. What has no place there gets one, which is found again by the same
    parent, name, shapes and order, so that what several steps have in common stands at one place.

    Attributes:
        parent: Parent of each place; -1 of the root.
        name: Number of its name on each side (base, new); -1 where that side does not have it.
        shape: Number of its shapes on each side.
    """

    parent: list[int] = field(default_factory=list)
    name: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    shape: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    _reference: list[tuple[Tree, list[int]] | None] = field(default_factory=lambda: [None, None])
    _known: dict[tuple[int, int], tuple[Tree, list[int]]] = field(default_factory=dict)
    _more: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def add(self, tree: Tree, side: int) -> list[int]:
        """The place of each node of a tree.

        Args:
            tree: The call tree of one step.
            side: 0 for base, 1 for new.
        """
        stored = self._known.get((side, tree.mark[0]))
        if stored is not None and len(stored[1]) == len(tree.name):
            return stored[1]
        reference = self._reference[side] or self._reference[0]
        places = [-1] * len(tree.name)
        if reference is not None:
            places = [reference[1][at] if at >= 0 else -1 for at in laid_on(reference[0], tree)]
        self._fill(tree, side, places)
        if self._reference[side] is None:
            self._reference[side] = (tree, places)
        self._known[side, tree.mark[0]] = (tree, places)
        return places

    def _fill(self, tree: Tree, side: int, places: list[int]) -> None:
        """Give a place to every node that has none."""
        count: dict[tuple[int, int, int], int] = {}
        taken = set(places)
        for node, name in enumerate(tree.name):
            if places[node] < 0:
                up = places[tree.parent[node]] if tree.parent[node] >= 0 else -1
                shape = tree.shape[node]
                while True:
                    nth = count.get((up, name, shape), 0)
                    count[up, name, shape] = nth + 1
                    index = self._more.get((up, name, shape, nth))
                    if index is None:
                        index = len(self.parent)
                        self.parent.append(up)
                        for of_side in (0, 1):
                            self.name[of_side].append(-1)
                            self.shape[of_side].append(0)
                        self._more[up, name, shape, nth] = index
                    if index not in taken:
                        break
                places[node] = index
            index = places[node]
            if self.name[side][index] < 0:
                self.name[side][index] = name
                self.shape[side][index] = tree.shape[node]
