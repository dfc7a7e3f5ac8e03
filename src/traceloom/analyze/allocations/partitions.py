"""Ways to divide memory: by scope, module, category, op, stack or element type."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import polars as pl

from traceloom.analyze.allocations.categories import CATEGORIES, Categories
from traceloom.analyze.allocations.named import Named
from traceloom.analyze.allocations.owners import BlockOwners
from traceloom.analyze.allocations.table import Stacks
from traceloom.analyze.ancestry import forest
from traceloom.array_types import Ints
from traceloom.model import Trace

BY = ("scope", "module", "category", "op", "stack", "dtype")
BEFORE = "(before the recording)"
NO_MODULE = "(outside modules)"
NO_SCOPE = "(no scope)"
UNKNOWN_TYPE = "(unknown)"
NO_STACK = "(no stack recorded)"
_NO_TENSOR = frozenset(
    ("", "Scalar", "ScalarList", "GenericList", "TensorList", "Int", "Double", "Bool", "Device", "None")
)

Partition = tuple[list[str], Ints]
"""Names, and for each block the number of its name."""


def partition(
    by: str, trace: Trace, named: Named, kinds: Categories, whose: BlockOwners, *, depth: int | None = None
) -> Partition:
    """Divide the blocks.

    Args:
        by: One of `BY`.
        trace: The trace.
        named: Its blocks with names.
        kinds: Their categories.
        whose: Their owners: a parameter, its gradient and its states belong to the module that the name tells.
        depth: For scopes and modules: so many parts of the path, from the root; None for all.
    """
    match by:
        case "scope":
            names, number = _numbered(
                [
                    (path if depth is None else ".".join(path.split(".")[:depth])) or NO_SCOPE
                    for path in named.places.paths
                ]
            )
            return _early(named, names, number[named.path])
        case "module":
            # The module whose call made it; parameters and what belongs to them: the module that holds them
            of_path = named.places.modules[: len(named.places.paths)]
            held = []  # the path of the module in the name of a parameter, buffer, gradient or state
            for owner, name in zip(whose.table["owner"], whose.table["name"], strict=True):
                of = name.rpartition(" of ")[2]
                of = of.removesuffix(".grad") if owner == "gradient" else of
                held.append("" if owner in ("activation", "other") or "(" in name else of.rpartition(".")[0])
            texts = [
                (path if depth is None else ".".join(path.split(".")[:depth])) or NO_MODULE
                for path in (*of_path, *held)
            ]
            names, number = _numbered(texts or [NO_MODULE])
            by_path = number[named.path] if named.places.paths else np.zeros(0, dtype=np.int64)
            by_owner = np.append(number[len(of_path) :], 0)[whose.of]
            has_module = np.append(np.array([bool(path) for path in held], dtype=np.bool_), False)[whose.of]
            out = np.where(has_module, by_owner, by_path)
            nobody = (named.blocks.made < 0) & ~has_module
            return [*names, BEFORE], np.where(nobody, len(names), out)
        case "category":
            return list(CATEGORIES), kinds.category
        case "op":
            return _early(named, named.places.labels, named.label)
        case "stack":
            return _stacks(named, *Stacks(trace).divided(named.position))
        case "dtype":
            # A guess: the element type of the first tensor that the op around it, or its nearest caller, works on
            tree = forest(trace)
            types = trace.events.select("event").join(
                trace.tensors.select("event", "types"), on="event", how="left", maintain_order="left"
            )["types"]
            distinct = types.drop_nulls().unique(maintain_order=True)
            first_types = []  # of each list the first type that is a tensor's
            for text in distinct:
                try:
                    listed = json.loads(text)
                except ValueError:
                    listed = []
                first_types.append(
                    next((name for name in listed if isinstance(name, str) and name not in _NO_TENSOR), None)
                )
            first = pl.Series(first_types, dtype=pl.String)
            event_types = types.replace_strict(distinct, first, default=None, return_dtype=pl.String)
            has = event_types.is_not_null().to_numpy()[tree.row]
            near = tree.nearest_or_self(has)
            at = np.append(near, -1)[named.position]
            names = [UNKNOWN_TYPE, *event_types.drop_nulls().unique(maintain_order=True).to_list()]
            number = event_types.fill_null(UNKNOWN_TYPE).replace_strict(names, list(range(len(names)))).to_numpy()
            rows = np.append(tree.row, 0)[at]
            out = np.where(at >= 0, number[rows], 0) if number.size else np.zeros(at.size, dtype=np.int64)
            return _early(named, names, out)
    raise KeyError(by)


def _early(named: Named, names: list[str], number: Ints) -> Partition:
    """Blocks from before the recording as a part of their own."""
    return [*names, BEFORE], np.where(named.blocks.made < 0, len(names), number)


def _numbered(texts: list[str]) -> tuple[list[str], Ints]:
    """The distinct texts, and the number of each."""
    numbers: dict[str, int] = {}
    number = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
    return list(numbers), number


def stack_partition(named: Named, texts: pl.Series) -> Partition:
    """Divide the blocks by their Python stacks, given as texts."""
    names = texts.unique(maintain_order=True)
    code = pl.int_range(names.len(), eager=True, dtype=pl.Int64)
    number = texts.replace_strict(names, code) if names.len() else code
    return _stacks(named, names.to_list(), number.to_numpy())


def _stacks(named: Named, texts: Sequence[str | None], number: Ints) -> Partition:
    """Stacks in the order in which they first allocate; also of blocks from before the recording, where known."""
    _, first = np.unique(number, return_index=True)
    turn = np.argsort(first, kind="stable")
    position = np.empty_like(turn)
    position[turn] = np.arange(turn.size)
    names = [texts[k] or NO_STACK for k in turn.tolist()]
    unknown = np.array([not texts[k] for k in turn.tolist()], dtype=np.bool_)
    number = position[number]
    before = (named.blocks.made < 0) & np.append(unknown, True)[number]
    return [*names, BEFORE], np.where(before, len(names), number)
