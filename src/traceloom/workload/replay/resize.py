"""Resizing a plan: every op is run on meta tensors of the new sizes, with adapted arguments.

A size is a *symbol*: equal sizes change together. The sizes of external tensors are changed first;
the sizes of outputs follow from PyTorch itself. Sizes in arguments (`view`, `expand`, `empty`,
`split`) change if they equal a symbol, and if they are multiples of one only when nothing else fits
(8 x 128 tokens are 1,024 rows). An op that cannot be made to fit is refused, so the result is
proven to run.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from traceloom.errors import UsageError
from traceloom.workload.replay.binding import BindError, bind_call
from traceloom.workload.replay.plan import (
    ITEM_BYTES,
    RUN,
    VIEW,
    RankPlan,
    ReplayPlan,
    build_empty_frame,
    build_frame,
)
from traceloom.workload.replay.schema import parse_schema
from traceloom.workload.replay.script import flatten_values
from traceloom.workload.replay.values import compute_contiguous_strides

if TYPE_CHECKING:
    import torch

_MAX_TRIES = 256  # attempts to adapt the arguments of one op
_SIZE_NAMES = re.compile(
    r"^(?:size|shape|sizes?_hint|output_size|input_sizes?|repeats|n|m|length|start|end|split_sizes?|normalized_shape|"
    r"stride|storage_offset|num_weights|num_classes|self_size|sizes)$"
)

_INTEGER_TYPES = frozenset({"int", "Scalar", "number"})


def scale_plan(
    plan: ReplayPlan,
    factors: Mapping[int, Fraction] | None = None,
    *,
    batch: Fraction | None = None,
) -> ReplayPlan:
    """Returns the plan with other sizes.

    Args:
        plan: The recorded plan.
        factors: Size -> factor on all dimensions of that size.
        batch: Factor on the first dimension of the data: tensors from a data loader, else external
            integers.

    Raises:
        UsageError: `cannot-resize`: no dimension has that size, a size would not be an integer, or
            an op does not fit.
    """
    if factors and batch is not None:
        plan, factors = scale_plan(plan, factors), None
    return replace(
        plan,
        ranks={
            rank: _Scaling(rank_plan, dict(factors or {}), batch).plan()
            for rank, rank_plan in plan.ranks.items()
        },
    )


def repeat_scope(plan: ReplayPlan, scope: str, times: int) -> ReplayPlan:
    """Returns the plan with every stretch of ops in a scope run several times in sequence.

    Raises:
        UsageError: `no-such-scope`: no op is in it.
    """
    ranks = {}
    for rank, rank_plan in plan.ranks.items():
        in_scope = rank_plan.ops["scope"].str.split("/").list.contains(scope) | rank_plan.ops[
            "scope"
        ].str.starts_with(f"{scope}.")
        if (rank_plan.ops["action"].is_in(["collective", "wait"]) & in_scope).any():
            raise UsageError(
                f"`{scope}` holds collectives, which other ranks would have to repeat too",
                slug="cannot-resize",
                hint="repeat a scope that computes only",
            )
        marked_ops = rank_plan.ops.with_columns(
            in_scope.alias("inside"), in_scope.rle_id().alias("stretch")
        )
        parts = [
            part.drop("inside", "stretch")
            for _, part in marked_ops.group_by("stretch", maintain_order=True)
            for _ in range(times if part["inside"][0] else 1)
        ]
        ops = pl.concat(parts).with_columns(pl.int_range(pl.len(), dtype=pl.UInt32).alias("op"))
        moved = ops.filter(pl.col("action") == "collective").sort("collective")["op"]
        collectives = (
            rank_plan.collectives.with_columns(moved.alias("op"))
            if moved.len()
            else rank_plan.collectives
        )
        ranks[rank] = replace(rank_plan, ops=ops, collectives=collectives).with_computed_lifetimes()
        ranks[rank].check()
    if all(ranks[rank].ops.height == plan.ranks[rank].ops.height for rank in ranks) and times > 1:
        raise UsageError(f"no op is in a scope `{scope}`", slug="no-such-scope")
    return replace(plan, ranks=ranks)


class _Scaling:
    """Runs the ops of a rank on meta tensors of the new sizes."""

    def __init__(
        self, plan: RankPlan, factors: dict[int, Fraction], batch: Fraction | None
    ) -> None:
        self.plan_before = plan
        self.sizes = {size: _scale_size(size, factor) for size, factor in factors.items()}
        self.data: set[int] = set()
        if batch is not None:
            size, self.data = self.find_batch()
            self.sizes[size] = _scale_size(size, batch)
        self.everywhere = batch is None
        self.before = plan.tensors.select("storage", "offset", "shape", "strides", "dtype").rows()
        self.tensors: dict[int, torch.Tensor] = {}
        self.calls: dict[tuple[str, str], int] = {}
        self.call_rows: list[tuple[str, str, list[str]]] = []
        self._laid = self.layouts()

    def layouts(self) -> dict[int, tuple[int, int | None]]:
        """Returns where parts of a buffer move when those before them grow: by register, the
        offset, and for the whole buffer its length.

        Gradients are contiguous in the buckets that ranks exchange; a bucket is a flat tensor, too.
        """
        out: dict[int, tuple[int, int | None]] = {}
        dense = (
            pl.DataFrame(
                {
                    "tensor": range(len(self.before)),
                    "storage": [row[0] for row in self.before],
                    "offset": [row[1] for row in self.before],
                    "rank": [len(row[2]) for row in self.before],
                    "elements": [prod(row[2]) for row in self.before],
                }
            )
            .with_columns(
                self.plan_before.storages["external"].gather(
                    pl.Series([row[0] for row in self.before])
                )
            )
            .filter("external")
        )
        for _, registers in dense.group_by("storage", maintain_order=True):
            if registers["offset"].n_unique() < 2:
                continue
            total_elements = max(
                start + elements
                for start, elements in registers.select("offset", "elements").iter_rows()
            )
            offset = 0
            before = 0
            moved: dict[int, int] = {}
            for start, part in (
                registers.filter(pl.col("elements") < total_elements)
                .sort("offset")
                .group_by("offset", maintain_order=True)
            ):
                first = max(part["tensor"], key=lambda number: prod(self.before[number][2]))
                offset += int(start[0]) - before
                moved[int(start[0])] = offset
                before = int(start[0]) + prod(self.before[first][2])
                offset += prod(self.sizes_of(first))
            for tensor, start, elements in registers.select(
                "tensor", "offset", "elements"
            ).iter_rows():
                if elements < total_elements:
                    out[tensor] = (moved[start], None)
                elif len(self.before[tensor][2]) == 1:
                    out[tensor] = (start, offset + total_elements - before)
        return out

    def sizes_of(self, number: int) -> tuple[int, ...]:
        storage, _, shape, *_ = self.before[number]
        if self.everywhere:
            return tuple(self.sizes.get(length, length) for length in shape)
        changes = storage in self.data
        return tuple(
            self.sizes.get(length, length) if changes and not dim else length
            for dim, length in enumerate(shape)
        )

    def find_batch(self) -> tuple[int, set[int]]:
        """Returns the batch size, and the storages that have it: data from outside."""
        plan = self.plan_before
        first = plan.tensors.with_columns(
            pl.col("shape").list.first().alias("size"),
            plan.ops["phase"]
            .gather(plan.storages["first_op"].gather(plan.tensors["storage"]))
            .alias("phase"),
            plan.storages["external"].gather(plan.tensors["storage"]).alias("external"),
        ).filter(pl.col("external") & (pl.col("size") > 0))
        loaded = first.filter(pl.col("phase") == "loading")
        data = loaded if loaded.height else first.filter(pl.col("dtype").str.contains("int"))
        if not data.height:
            raise UsageError(
                "no tensor from outside looks like data: none comes from a loader, and none holds integers",
                slug="cannot-resize",
                hint="name the size of the batch, as in --scale 32=2",
            )
        size = int(data["size"].mode().sort()[0])
        return size, set(data.filter(pl.col("size") == size)["storage"])

    def plan(self) -> RankPlan:
        before = self.plan_before
        if self.everywhere:
            sizes = set(before.tensors["shape"].explode().drop_nulls())
            if absent := sorted(set(self.sizes) - sizes):
                raise UsageError(
                    f"no tensor has a dimension of {absent[0]}",
                    slug="cannot-resize",
                    hint="take a size that `--plan-only` or the report shows",
                )
        return self.assembled([self.scaled_op(row) for row in before.ops.iter_rows(named=True)])

    def scaled_op(self, row: Mapping[str, Any]) -> int | None:
        inputs = [self.tensor(tensor) for tensor in row["inputs"]]
        if row["action"] == VIEW:
            (output,) = row["outputs"]
            self.tensors[output] = self.view(row["inputs"][0], output, inputs[0], row)
            return None
        if row["call"] is None:
            for tensor in row["outputs"]:
                if tensor is not None and tensor not in self.tensors:
                    self.tensors[tensor] = self.like(tensor)
            return None
        schema, arguments, flags = self.plan_before.calls.select(
            "schema", "arguments", "flags"
        ).row(row["call"])
        if row["action"] != RUN:
            self.take_recorded_outputs(row)
        else:
            arguments = self.run(row, schema, arguments, inputs)
        number = self.calls.setdefault((schema, arguments), len(self.calls))
        if number == len(self.call_rows):
            self.call_rows.append((schema, arguments, flags))
        return number

    def run(
        self, row: Mapping[str, Any], schema: str, arguments: str, inputs: list[torch.Tensor]
    ) -> str:
        """Runs an op on meta tensors of the new sizes; returns its adapted arguments."""
        import torch

        recorded = [
            None if tensor is None else tuple(self.before[tensor][2]) for tensor in row["outputs"]
        ]
        changed = any(
            tuple(tensor.shape) != tuple(self.before[number][2])
            for tensor, number in zip(inputs, row["inputs"], strict=True)
        )
        reason = ""
        for tried in self.ways(schema, arguments, changed=changed):
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    values = list(
                        flatten_values(
                            bind_call(schema, tried, "meta")([tensor.detach() for tensor in inputs])
                        )
                    )
            except BindError:
                self.take_recorded_outputs(row)
                return arguments
            except Exception as error:  # noqa: BLE001  (any op may raise anything)
                reason = reason or str(error).split("\n")[0]
                continue
            if all(
                shape is None
                or (isinstance(value, torch.Tensor) and self.fits(shape, tuple(value.shape)))
                for shape, value in zip(recorded, values, strict=False)
            ):
                for tensor, value in zip(row["outputs"], values, strict=False):
                    if tensor is not None:
                        self.tensors[tensor] = value
                return tried
            reason = reason or "its result would have another number of dimensions"
        if not changed:  # no meta kernel, or a result that depends on contents
            self.take_recorded_outputs(row)
            return arguments
        shapes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
        raise UsageError(
            f"{row['name']} (node {row['node']}) does not fit tensors of {shapes}: {reason}",
            slug="cannot-resize",
            hint="scale another size, or several together, as in --scale 192=2 --scale 576=2",
        )

    def fits(self, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
        """Returns whether each length is unchanged, or changed by a requested factor."""
        ratios = {Fraction(new, old) for old, new in self.sizes.items()}
        return len(before) == len(after) and all(
            old == new or (old > 0 and Fraction(new, old) in ratios)
            for old, new in zip(before, after, strict=True)
        )

    def ways(self, schema: str, arguments: str, *, changed: bool) -> Iterator[str]:
        """Yields the arguments with sizes changed: first those equal to a symbol, then any others,
        fewest changes first.
        """
        values = msgspec.json.decode(arguments)
        numbers_by_path = [
            (path, value)
            for index, argument in enumerate(parse_schema(schema).arguments[: len(values)])
            if "SymInt" in argument.type.bases
            or (_SIZE_NAMES.match(argument.name) and argument.type.bases & _INTEGER_TYPES)
            for path, value in _find_numbers(values[index], (index,))
            if self.new_size(value) is not None
        ]
        likely = {path for path, value in numbers_by_path if value in self.sizes}
        if not changed and not self.everywhere:
            likely = set()
        # The first of several sizes is the most likely one: it is added first, and removed last.
        other_paths = [path for path, _ in numbers_by_path if path not in likely]
        other_paths += [path for path, _ in reversed(numbers_by_path) if path in likely]
        new = {path: self.new_size(value) for path, value in numbers_by_path}
        tries = 0
        for count in range(len(other_paths) + 1):
            for flipped in combinations(other_paths, count):
                tries += 1
                if tries > _MAX_TRIES:
                    return
                selected = likely ^ set(flipped)
                yield (
                    _replace_numbers(values, {path: new[path] for path in selected})
                    if selected
                    else arguments
                )

    def new_size(self, value: int) -> int | None:
        """Returns the changed value of a size; None if it is not a multiple of a changing one."""
        for old, new in self.sizes.items():
            if value and value % old == 0:
                return value // old * new
        return None

    def tensor(self, number: int) -> torch.Tensor:
        """Returns a register; creates an external tensor if no op has created it."""
        if number not in self.tensors:
            self.tensors[number] = self.like(number)
        return self.tensors[number]

    def like(self, number: int) -> torch.Tensor:
        """Returns a tensor that is external or from a stand-in: sizes equal to a symbol change."""
        import torch

        _, offset, shape, strides, dtype = self.before[number]
        new = self.sizes_of(number)
        offset, length = self._laid.get(number, (offset, None))
        if length is not None:
            new = (length,)
        if list(new) != list(shape):  # a contiguous layout stays contiguous
            order = sorted(range(len(shape)), key=lambda at: -strides[at])
            dense = compute_contiguous_strides(tuple(new[dim] for dim in order))
            strides = [dense[order.index(dim)] for dim in range(len(shape))]
        torch_dtype: torch.dtype = getattr(torch, dtype)
        return torch.empty(
            _count_elements(offset, new, strides), dtype=torch_dtype, device="meta"
        ).as_strided(new, strides, offset)

    def view(
        self, source: int, output: int, tensor: torch.Tensor, row: Mapping[str, Any]
    ) -> torch.Tensor:
        """Returns another geometry of a live tensor."""
        _, offset, shape, strides, dtype = self.before[output]
        before = self.before[source]
        same = tuple(tensor.shape) == tuple(before[2]) and tensor.storage_offset() == before[1]
        if same and tuple(tensor.stride()) == tuple(before[3]):
            import torch

            retyped = tensor if before[4] == dtype else tensor.view(getattr(torch, dtype))
            return retyped.as_strided(shape, strides, offset)
        if (
            tuple(strides) == compute_contiguous_strides(tuple(shape))
            and tensor.is_contiguous()
            and before[4] == dtype
        ):
            text = msgspec.json.encode([{"tensor": 0}, shape]).decode()
            schema = "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)"
            tried = self.run({**row, "name": "a view", "inputs": [source]}, schema, text, [tensor])
            return bind_call(schema, tried, "meta")([tensor])
        raise UsageError(
            f"the view {shape} of a tensor of {list(tensor.shape)} leaves gaps: it cannot be scaled",
            slug="cannot-resize",
            hint="scale another size, or take the leaves with --level leaf",
        )

    def take_recorded_outputs(self, row: Mapping[str, Any]) -> None:
        for tensor in row["outputs"]:
            if tensor is not None:
                self.tensors[tensor] = self.like(tensor)

    def assembled(self, calls: list[int | None]) -> RankPlan:
        before = self.plan_before
        rank = before.rank
        tensors = [self.tensor(number) for number in range(len(self.before))]
        storages = [0] * before.storages.height
        for (storage, *_, dtype), tensor in zip(self.before, tensors, strict=True):
            elements = _count_elements(tensor.storage_offset(), tensor.shape, tensor.stride())
            storages[storage] = max(storages[storage], elements * ITEM_BYTES[dtype])
        schemas, arguments, flags = (
            zip(*self.call_rows, strict=True) if self.call_rows else ((), (), ())
        )
        count = len(schemas)
        exchanged = before.collectives
        if exchanged.height:
            moved = [
                sum(
                    tensors[tensor].nbytes
                    for tensor in (row["inputs"] or row["outputs"])
                    if tensor is not None
                )
                for row in (before.ops.row(op, named=True) for op in exchanged["op"])
            ]
            exchanged = exchanged.with_columns(pl.Series("bytes", moved, dtype=pl.Int64))
        fits = [
            list(tensors[tensor].shape) == self.before[tensor][2]
            for tensor in before.data["tensor"]
        ]
        data = before.data.filter(pl.Series(fits, dtype=pl.Boolean))
        data_storages = data["tensor"].replace_strict(
            range(len(self.before)), [row[0] for row in self.before]
        )
        lost = (pl.col("content") == "data") & ~pl.col("storage").is_in(data_storages.implode())
        plan = replace(
            before,
            ops=before.ops.with_columns(pl.Series("call", calls, dtype=pl.UInt32)),
            calls=build_frame(
                "calls",
                {
                    "rank": [rank] * count,
                    "call": range(count),
                    "schema": schemas,
                    "arguments": arguments,
                    "flags": flags,
                },
            ),
            tensors=build_frame(
                "tensors",
                {
                    "rank": [rank] * len(tensors),
                    "tensor": range(len(tensors)),
                    "storage": [row[0] for row in self.before],
                    "offset": [t.storage_offset() for t in tensors],
                    "shape": [list(t.shape) for t in tensors],
                    "strides": [list(t.stride()) for t in tensors],
                    "dtype": [row[4] for row in self.before],
                },
            ),
            storages=before.storages.with_columns(
                pl.Series("bytes", storages, dtype=pl.Int64),
                content=pl.when(lost)
                .then(pl.lit("integers", before.storages.schema["content"]))
                .otherwise("content"),
                evidence=pl.when(lost)
                .then(pl.lit("range", before.storages.schema["evidence"]))
                .otherwise("evidence"),
            ),
            data=data,
            kernels=build_empty_frame(
                "kernels"
            ),  # a kernel for other sizes is a different one: use stand-ins
            collectives=exchanged,
        )
        plan.check()
        return plan


def _scale_size(size: int, factor: Fraction) -> int:
    new = size * factor
    if new.denominator != 1 or new < 1:
        raise UsageError(
            f"{size} x {float(factor):g} is no whole number above 0",
            slug="cannot-resize",
            hint="take another factor",
        )
    return int(new)


def _count_elements(offset: int, shape: Any, strides: Any) -> int:
    if 0 in shape:
        return offset
    return int(
        offset
        + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        + 1
    )


def _find_numbers(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
    if isinstance(value, list):
        for index, part in enumerate(value):
            yield from _find_numbers(part, (*path, index))
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        yield path, value


def _replace_numbers(values: list[Any], changes: Mapping[tuple[int, ...], int | None]) -> str:
    out = msgspec.json.decode(msgspec.json.encode(values))
    for path, number in changes.items():
        container = out
        for step in path[:-1]:
            container = container[step]
        container[path[-1]] = number
    return msgspec.json.encode(out).decode()
