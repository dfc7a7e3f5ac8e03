"""Determining the contents that tensors from outside must have.

An index must be within its table, offsets must ascend, the operand of a root must not be negative.
Such constraints are collected from the last op to the first: each op adds those on its inputs, and
if it only copies its inputs, the constraints on its outputs apply to them. Constraints are on
storages, so views need no special treatment. If several ops constrain one storage, all constraints
hold, with the tightest bounds.

Unconstrained contents are guessed: floats around 0, weights such that products keep their size,
numbers 1, integers 0.

`traceloom.workload.replay.script` copies `generate_content` into the scripts it writes, so it uses
only torch, and the tensors of a script have the contents of those of the replay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import polars as pl

from traceloom.trace.array_types import Array
from traceloom.workload.replay.plan import COLLECTIVE, PLAN_SCHEMAS, RUN, STAND_IN, RankPlan
from traceloom.workload.replay.schema import OperatorSchema, UnreadableSchemaError, parse_schema

if TYPE_CHECKING:
    import torch


Shape = list[int]


class Constraint(NamedTuple):
    """A constraint on the content of a storage.

    Attributes:
        content: `integers`, `offsets`, `lengths`, `positive`, `probability` or `zeros`.
        low: The min integer; for lengths the max.
        high: The max integer; for lengths their sum.
        besides: An additional allowed integer, which marks the absence of a class.
    """

    content: str
    low: int = 0
    high: int | None = None
    besides: int | None = None

    def and_also(self, other: Constraint | None) -> Constraint:
        if other is None or other == self:
            return self
        content = min(self.content, other.content, key=_STRICTEST_FIRST.index)
        if content == "lengths":
            return self if self.content == content else other
        low = max(demand.low + (demand.content == "positive") for demand in (self, other))
        highs = [demand.high for demand in (self, other) if demand.high is not None]
        besides = self.besides if self.besides == other.besides else None
        return Constraint(content, low, max(min(highs), 0) if highs else None, besides)

    def allows(self, values: Array) -> bool:
        """Returns whether recorded integers are within its bounds."""
        high = _MAX_INTEGER if self.high is None or self.content == "lengths" else self.high
        low = 0 if self.content == "lengths" else self.low
        return bool((((values >= low) & (values <= high)) | (values == self.besides)).all())


class RecordedIntegers(NamedTuple):
    """Recorded values of an integer tensor that is an input of an op, from a host trace or a file
    next to it.

    Attributes:
        low: The min.
        high: The max.
        values: All values, flattened by row; None if only the bounds are known.
    """

    low: int
    high: int
    values: Array | None = None


_MAX_INTEGER = 2**63 - 1
_STRICTEST_FIRST = ("lengths", "offsets", "integers", "zeros", "probability", "positive")
_POSITIVE = Constraint("positive")
_PROBABILITY = Constraint("probability")
_ZEROS = Constraint("zeros")


@dataclass(slots=True)
class _NamedCall:
    """A call of the plan: the inputs by argument, and the other values.

    Attributes:
        schema: The op.
        base: Its name without the markers for lists or in-place.
        values: Values of the arguments by name, as in the plan.
        inputs: Numbers of the inputs by the name of the argument.
        demanding: Whether it has any constraints.
    """

    schema: OperatorSchema
    base: str
    values: dict[str, Any]
    inputs: dict[str, list[int]]
    demanding: bool


@dataclass(slots=True)
class _Use:
    call: _NamedCall
    shapes: list[Shape]
    dtypes: list[str]
    given: list[Shape] = field(default_factory=list)

    def shape(self, name: str) -> Shape:
        """Returns the shape of the argument; without dimensions if it has no tensor."""
        numbers = self.call.inputs.get(name)
        return self.shapes[numbers[0]] if numbers else []

    def length(self, argument_name: str, dim: int | str) -> int | None:
        """Returns the length of a dimension, or of the one that an argument names."""
        shape = self.shape(argument_name)
        dim_index = self.call.values.get(dim, 0) if isinstance(dim, str) else dim
        return (
            shape[dim_index]
            if isinstance(dim_index, int) and -len(shape) <= dim_index < len(shape)
            else None
        )


# The number of values that an index may have, by op and argument.
_Count = Callable[[_Use], int | None]


def _count_along(argument_name: str, dim: int | str) -> _Count:
    return lambda use: use.length(argument_name, dim)


def _count_elements(argument_name: str, last: int = 0) -> _Count:
    """Counts all elements of a tensor, or those of its last dimensions."""
    return lambda use: prod(use.shape(argument_name)[-last:])


_LIMITS: dict[str, tuple[str, _Count]] = {
    "embedding": ("indices", _count_along("weight", 0)),
    "embedding_renorm": ("indices", _count_along("self", 0)),
    "embedding_bag": ("indices", _count_along("weight", 0)),
    "_embedding_bag": ("indices", _count_along("weight", 0)),
    "_embedding_bag_forward_only": ("indices", _count_along("weight", 0)),
    "take": ("index", _count_elements("self")),
    "put": ("index", _count_elements("self")),
    "take_along_dim": ("indices", _count_along("self", "dim")),
    "gather_backward": ("index", _count_along("self", "dim")),
    "one_hot": ("self", lambda use: use.given[0][-1] if use.given and use.given[0] else None),
    "bincount": ("self", lambda use: use.given[0][0] if use.given and use.given[0] else None),
    "max_unpool2d": ("indices", lambda use: prod(use.call.values["output_size"])),
    "max_unpool3d": ("indices", lambda use: prod(use.call.values["output_size"])),
    "max_pool2d_with_indices_backward": ("indices", _count_elements("self", 2)),
    "max_pool3d_with_indices_backward": ("indices", _count_elements("self", 3)),
}
_LIMITS |= dict.fromkeys(
    (
        "index_select",
        "index_add",
        "index_copy",
        "index_fill",
        "index_reduce",
        "gather",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    ),
    ("index", _count_along("self", "dim")),
)
_LIMITS |= dict.fromkeys(
    (
        "embedding_backward",
        "embedding_dense_backward",
        "embedding_sparse_backward",
        "_embedding_bag_backward",
        "_embedding_bag_dense_backward",
        "_embedding_bag_sparse_backward",
    ),
    ("indices", lambda use: use.call.values.get("num_weights")),
)
_LIMITS |= dict.fromkeys(
    (
        "nll_loss",
        "nll_loss_nd",
        "nll_loss2d",
        "nll_loss_forward",
        "nll_loss2d_forward",
        "nll_loss_backward",
        "nll_loss2d_backward",
        "cross_entropy_loss",
        "multi_margin_loss",
        "multi_margin_loss_backward",
    ),
    ("target", lambda use: use.length("self", 1 if len(use.shape("self")) > 1 else 0)),
)
# Arguments of any op whose name implies positive values.
_POSITIVE_NAMES = frozenset(
    {
        "running_var",
        "save_var",
        "save_invstd",
        "invstd",
        "rstd",
        "var",
        "exp_avg_sqs",
        "max_exp_avg_sqs",
        "state_sums",
        "state_steps",
        "inv_scale",
        "current_scale",
        "scale",
    }
)
_POSITIVE_OPS = frozenset(
    {
        "sqrt",
        "rsqrt",
        "log",
        "log2",
        "log10",
        "log1p",
        "xlogy",
        "lgamma",
        "digamma",
        "polygamma",
        "acosh",
        "poisson",
    }
)
_PROBABILITY_OPS = {
    "bernoulli": ("self", "p"),
    "binary_cross_entropy": ("self", "target"),
    "multinomial": ("self",),
    "binary_cross_entropy_backward": ("self", "target"),
    "logit": ("self",),
    "binomial": ("prob",),
}
# Ascending positions in a longer tensor: of bags of indices, or of concatenated sequences.
_OFFSETS = {
    "offsets": ("indices", "values"),
    "cum_seq_q": ("query",),
    "cum_seq_k": ("key",),
    "cu_seqlens_q": ("query",),
    "cu_seqlens_k": ("key",),
}
# Their outputs consist of values of their inputs.
_COPIES = frozenset(
    {
        "clone",
        "_to_copy",
        "to",
        "copy",
        "cat",
        "concat",
        "concatenate",
        "stack",
        "hstack",
        "vstack",
        "repeat",
        "tile",
        "flip",
        "roll",
        "index",
        "index_select",
        "gather",
        "take",
        "select",
        "slice",
        "sort",
        "topk",
        "constant_pad_nd",
        "pad",
        "masked_fill",
        "masked_select",
        "where",
        "pin_memory",
        "_pin_memory",
        "lift",
        "lift_fresh",
        "index_put",
        "_index_put_impl",
        "slice_scatter",
        "select_scatter",
        "scatter",
        "_unsafe_view",
        "repeat_interleave",
        "unique",
        "_unique2",
        "contiguous",
        "reshape",
        "flatten",
        "_copy_from",
        "cuda",
        "cpu",
        "type_as",
        "expand",
        "view",
        "masked_scatter",
        "_cast_Long",
        "_cast_Int",
        "flatten_dense_tensors",
        "unflatten_dense_tensors",
        "fill",
    }
)
_IDENTITY_OPS = frozenset(
    {
        "clone",
        "_to_copy",
        "to",
        "contiguous",
        "cuda",
        "cpu",
        "pin_memory",
        "_pin_memory",
        "lift_fresh",
    }
)
_COPIED = ("self", "src", "source", "tensors", "values", "value", "input", "other", "flat")
_EXCHANGES = frozenset({"broadcast", "all_gather", "all_to_all", "gather", "scatter"})
# Their output is positive if their input is.
_KEEP_SIGN = frozenset(
    {
        "add",
        "mul",
        "div",
        "addcmul",
        "addcdiv",
        "lerp",
        "sum",
        "mean",
        "max",
        "min",
        "amax",
        "amin",
        "maximum",
        "minimum",
        "clamp",
        "clamp_min",
        "clamp_max",
        "cumsum",
        "prod",
    }
)
_SHIFTS = {"add": 1, "sub": -1}
# Products: both factors, and the dimension that is summed; for a filter, all of the rest.
_PRODUCTS = {
    "mm": ("self", "mat2", 0),
    "addmm": ("mat1", "mat2", 0),
    "bmm": ("self", "mat2", 1),
    "matmul": ("self", "other", -2),
    "baddbmm": ("batch1", "batch2", 1),
    "linear": ("input", "weight", 1),
} | dict.fromkeys(
    ("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "conv_transpose2d"),
    ("input", "weight", None),
)
# They change the metadata of a tensor, not its content.
_METADATA_OPS = frozenset(
    {
        "detach",
        "squeeze",
        "unsqueeze",
        "t",
        "transpose",
        "swapaxes",
        "as_strided",
        "requires_grad",
        "resize",
        "set",
    }
)
_NAMED = _POSITIVE_NAMES | _OFFSETS.keys()
_CONSTRAINED_OPS = (
    _LIMITS.keys()
    | _POSITIVE_OPS
    | _PROBABILITY_OPS.keys()
    | {
        "index",
        "index_put",
        "_index_put_impl",
        "floor_divide",
        "remainder",
        "fmod",
        "div",
        "normal",
        "pow",
        "repeat_interleave",
        "segment_reduce",
        "_pack_padded_sequence",
    }
)
_GEOMETRY_ONLY = re.compile(r"_like$|^new_|^size$|^stride$|^resize|^set_$")
_EMPTY = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)


def settle_contents(
    plan: RankPlan, recorded_integers: Mapping[int, Mapping[int, RecordedIntegers]] | None = None
) -> tuple[RankPlan, int]:
    """Determines the contents of external storages.

    A storage that an op allocates and that is read before any op has written to it becomes
    external: it was written by something other than an op (`torch.tensor([1, 2])`).

    Args:
        plan: The plan of a rank.
        recorded_integers: Recorded values of integer tensors, by node and number of the tensor
            among its inputs.

    Returns:
        The plan, with columns `content`, `low`, `high` and `evidence` of its storages and the frame
        `data` filled; and the number of tensors whose recorded values were rejected because their
        ops must not get them.
    """
    finder = _ConstraintFinder(plan)
    unwritten = finder.unwritten()
    if unwritten:
        plan = _mark_external(plan, unwritten)
        finder.external = plan.storages["external"].to_list()
    finder.search()
    ranges, data, refused = finder.recorded(recorded_integers or {})
    data_storages = {finder.storage[tensor] for tensor in data}
    first = plan.tensors.group_by("storage", maintain_order=True).first()
    first_tensors = {
        storage: (dtype, shape)
        for storage, dtype, shape in first.select("storage", "dtype", "shape").iter_rows()
    }
    rows = [
        finder.settled(storage, *first_tensors.get(storage, ("uint8", [0])), ranges.get(storage))
        if is_external
        else (None,) * 4
        for storage, is_external in enumerate(finder.external)
    ]
    for storage in data_storages:
        rows[storage] = ("data", *rows[storage][1:3], "data")
    columns = ("content", "low", "high", "evidence")
    within = [
        (
            content,
            *(
                None if end is None else max(-_MAX_INTEGER, min(end, _MAX_INTEGER))
                for end in (low, high)
            ),
            evidence,
        )
        for content, low, high, evidence in rows
    ]
    settled = pl.DataFrame(
        within, schema={name: plan.storages.schema[name] for name in columns}, orient="row"
    )
    dumped = pl.DataFrame(
        {
            "rank": [plan.rank] * len(data),
            "tensor": list(data),
            "values": [v.tobytes() for v in data.values()],
        },
        schema=PLAN_SCHEMAS["data"],
    )
    return replace(
        plan, storages=plan.storages.with_columns(settled.get_columns()), data=dumped
    ), refused


def _mark_external(plan: RankPlan, storages: set[int]) -> RankPlan:
    """Returns the plan with some storages marked external; the ops that allocated them still do,
    unused.
    """
    is_external = plan.storages["storage"].is_in(list(storages))
    tensors = plan.tensors.filter(pl.col("storage").is_in(list(storages)))["tensor"].implode()
    allocates = pl.col("name").str.strip_prefix("aten::").is_in(list(_EMPTY))
    elsewhere = pl.col("outputs").list.eval(
        pl.when(~pl.element().is_in(tensors)).then(pl.element())
    )
    return replace(
        plan,
        ops=plan.ops.with_columns(
            pl.when(allocates).then(elsewhere).otherwise("outputs").alias("outputs")
        ),
        storages=plan.storages.with_columns(external=plan.storages["external"] | is_external),
    )


class _ConstraintFinder:
    """Collects the constraints of a plan's ops on storages."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        self.demands: dict[int, Constraint] = {}
        self.weights: dict[int, int] = {}
        self.storage = plan.tensors["storage"].to_list()
        self.shapes: list[Shape] = plan.tensors["shape"].to_list()
        self.dtypes = plan.tensors["dtype"].to_list()
        self.calls = [_call(*row) for row in plan.calls.select("schema", "arguments").iter_rows()]
        self.external = plan.storages["external"].to_list()
        self.kinds = plan.collectives["kind"].to_list()
        self.ops = plan.ops.select("action", "call", "collective", "inputs", "outputs").rows()

    def search(self) -> None:
        """Fills `demands` and `weights`."""
        for action, call_row, collective, inputs, outputs in reversed(self.ops):
            if action in {RUN, STAND_IN} and call_row is not None:
                call = self.calls[call_row]
                if call is not None:
                    self.examine(call, inputs, outputs)
            elif action == COLLECTIVE and self.kinds[collective] in _EXCHANGES:
                self.pass_on(self.demanded_of(outputs), inputs)

    def settled(
        self, storage: int, dtype: str, shape: Shape, recorded: tuple[int, int] | None
    ) -> tuple[str, int | None, int | None, str]:
        """Returns content, low, high and evidence of an external storage, by its first tensor."""
        demand = self.demands.get(storage)
        floating = dtype.startswith(("float", "bfloat", "complex"))
        if dtype == "bool":
            return "integers", 0, 1, "guess"
        if (
            recorded is not None
            and not floating
            and (demand is None or demand.content not in {"lengths", "offsets"})
        ):
            low, high = recorded
            if (
                demand is not None and demand.content == "integers"
            ):  # of -100..9, where -100 means no class, use 0..9
                low, high = (
                    max(low, demand.low),
                    high if demand.high is None else min(high, demand.high),
                )
            return "integers", low, high, "range"
        if demand is not None and demand.content == "lengths":
            return demand.content, demand.low, demand.high, "consumer"
        if demand is not None and demand.content in {"integers", "offsets"}:
            high = demand.low if demand.high is None else demand.high
            return demand.content, min(demand.low, high), high, "consumer"
        if not shape:  # a number such as a factor or a step: 1 neither scales nor flips values
            return "integers", 1, 1, "guess"
        if not floating:
            return (
                ("zeros", None, None, "guess") if demand is None else ("integers", 1, 1, "consumer")
            )
        if demand is not None:
            return demand.content, None, None, "consumer"
        if storage in self.weights and len(shape) > 1:
            return "weights", None, self.weights[storage], "consumer"
        return "floats", None, None, "guess"

    def recorded(
        self, recorded_integers: Mapping[int, Mapping[int, RecordedIntegers]]
    ) -> tuple[dict[int, tuple[int, int]], dict[int, Array], int]:
        """Returns the recorded values of external storages before anything writes to them.

        Returns:
            Min and max integer by storage; recorded values by register; and how many of these are
            rejected.
        """
        ranges: dict[int, tuple[int, int]] = {}
        data: dict[int, Array] = {}
        refused = 0
        written: set[int] = set()
        copied: dict[int, int] = {}  # register -> another register with the same content
        for node, (_, call_row, _, inputs, outputs) in (
            zip(self.plan.ops["node"], self.ops, strict=True) if recorded_integers else ()
        ):
            node_integers = recorded_integers.get(node, {})
            call = None if call_row is None else self.calls[call_row]
            mutated = set() if call is None else _find_mutated(call)
            for number, tensor in enumerate(inputs):
                source = copied.get(tensor, tensor)
                storage = self.storage[source]
                if (
                    number not in node_integers
                    or number in mutated
                    or not self.external[storage]
                    or {storage, self.storage[tensor]} & written
                ):
                    continue
                low, high, values = node_integers[number]
                before = ranges.get(storage, (low, high))
                demand = self.demands.get(storage)
                if values is not None and demand is not None and not demand.allows(values):
                    refused += 1
                    continue
                ranges[storage] = min(low, before[0]), max(high, before[1])
                if values is not None:
                    data.setdefault(source, values)
            written |= {self.storage[inputs[number]] for number in mutated if number < len(inputs)}
            if (
                call is not None
                and call.base in _IDENTITY_OPS
                and inputs
                and outputs
                and outputs[0] is not None
            ):
                source, output = inputs[0], outputs[0]
                if (self.shapes[source], self.dtypes[source]) == (
                    self.shapes[output],
                    self.dtypes[output],
                ):
                    copied[output] = copied.get(source, source)
        return ranges, data, refused

    def unwritten(self) -> set[int]:
        """Returns the storages that are read before any op has written to them since their
        allocation.
        """
        fresh: set[int] = set()
        out: set[int] = set()
        for action, call_row, _, inputs, outputs in self.ops:
            call = None if call_row is None else self.calls[call_row]
            touched = (
                fresh.intersection([self.storage[tensor] for tensor in inputs]) if fresh else fresh
            )
            if action != RUN or call is None:
                fresh -= touched
                fresh -= {self.storage[tensor] for tensor in outputs if tensor is not None}
            elif touched and not _GEOMETRY_ONLY.search(call.schema.name):
                written = {self.storage[inputs[number]] for number in _find_mutated(call)}
                output_storages = {self.storage[tensor] for tensor in outputs if tensor is not None}
                if (
                    written or not output_storages or not output_storages <= touched
                ):  # else it is a view, or changes only metadata
                    out |= touched - written
                    fresh -= touched
            if call is not None and call.schema.name in _EMPTY:
                fresh |= {self.storage[tensor] for tensor in outputs if tensor is not None}
        return out

    def examine(self, call: _NamedCall, inputs: list[int], outputs: list[int | None]) -> None:
        # the first of several results has the values, the others are their positions
        demanded = (
            self.demanded_of(outputs if call.schema.is_view else outputs[:1])
            if self.demands
            else None
        )
        base = call.base
        if demanded is not None:
            if call.schema.is_view or base in _COPIES:
                for name in _COPIED:
                    self.pass_on(demanded, self.rows_of(call, name, inputs))
            elif base in _KEEP_SIGN and demanded.content in {"positive", "probability"}:
                self.signed(call, inputs)
            elif base in _SHIFTS and demanded.content == "integers":
                self.shifted(call, demanded, inputs)
        if base in _PRODUCTS:
            self.note_product(call, inputs)
        if call.demanding:
            use = _Use(
                call,
                [self.shapes[row] for row in inputs],
                [self.dtypes[row] for row in inputs],
                [self.shapes[row] for row in outputs if row is not None],
            )
            for number, demand in _find_constraints(use):
                self.pass_on(demand, [inputs[number]])

    def demanded_of(self, tensors: Iterable[int | None]) -> Constraint | None:
        out: Constraint | None = None
        for tensor in tensors:
            demand = None if tensor is None else self.demands.get(self.storage[tensor])
            if demand is not None:
                out = demand.and_also(out)
        return out

    def pass_on(self, demand: Constraint | None, tensors: Iterable[int]) -> None:
        if demand is not None:
            for tensor in tensors:
                storage = self.storage[tensor]
                self.demands[storage] = demand.and_also(self.demands.get(storage))

    def signed(self, call: _NamedCall, inputs: list[int]) -> None:
        """Propagates positivity through a sum or product to its operands; a square is positive
        anyway.
        """
        if call.base == "mul" and self.rows_of(call, "self", inputs) == self.rows_of(
            call, "other", inputs
        ):
            return
        value = call.values.get("value")
        if (
            call.base == "addcmul" and isinstance(value, int | float) and value < 0
        ):  # variance: squares minus a square
            self.pass_on(_ZEROS, self.rows_of(call, "tensor1", inputs))
        factors = [self.rows_of(call, name, inputs) for name in ("tensor1", "tensor2")]
        for name in call.inputs:
            if name not in {"tensor1", "tensor2"} or factors[0] != factors[1]:
                self.pass_on(_POSITIVE, self.rows_of(call, name, inputs))

    def shifted(self, call: _NamedCall, demanded: Constraint, inputs: list[int]) -> None:
        """Propagates constraints on an index through an addition or subtraction: two tensors share
        the range.
        """
        if demanded.high is None:
            return
        other = self.rows_of(call, "other", inputs)
        if other and self.shapes[other[0]]:
            self.pass_on(
                Constraint("integers", demanded.low, max(demanded.high // 2, demanded.low)), inputs
            )
            return
        number = call.values.get("other")
        offset = _SHIFTS[call.base] * (number if isinstance(number, int) else 1)
        self.pass_on(
            Constraint("integers", max(demanded.low - offset, 0), max(demanded.high - offset, 0)),
            self.rows_of(call, "self", inputs),
        )

    def rows_of(self, call: _NamedCall, name: str, inputs: list[int]) -> list[int]:
        return [inputs[number] for number in call.inputs.get(name, ())]

    def note_product(self, call: _NamedCall, inputs: list[int]) -> None:
        """Notes the other factor of a product; the first product of a tensor decides."""
        left_name, right, dim = _PRODUCTS[call.base]
        for tensor in self.rows_of(call, left_name, inputs):
            self.weights.pop(self.storage[tensor], None)
        for tensor in self.rows_of(call, right, inputs):
            shape = self.shapes[tensor]
            if len(shape) > 1:
                self.weights[self.storage[tensor]] = prod(shape[1:]) if dim is None else shape[dim]


def _find_constraints(use: _Use) -> Iterator[tuple[int, Constraint]]:
    """Yields the constraints of an op on its inputs: number of the input, and the constraint."""
    call = use.call
    inputs, base = call.inputs, call.base
    if base in _LIMITS:
        name, count = _LIMITS[base]
        limit = count(use)
        for number in inputs.get(name, ()):
            if limit and not use.dtypes[number].startswith(("float", "bfloat")):
                yield number, Constraint("integers", 0, limit - 1, call.values.get("ignore_index"))
    elif base in {"index", "index_put", "_index_put_impl"}:
        # In `x[i, :, j]`, each integer index is along one dimension, a mask along as many as it
        # has.
        shape, dim = use.shape("self"), 0
        for value in call.values.get("indices") or ():
            index = value.get("tensor") if isinstance(value, dict) else None
            if index is not None and use.dtypes[index] in {"bool", "uint8"}:
                dim += len(use.shapes[index])
                continue
            if index is not None and dim < len(shape):
                yield index, Constraint("integers", 0, max(shape[dim] - 1, 0))
            dim += 1
    elif base in _POSITIVE_OPS:
        yield from (
            (number, _POSITIVE) for name in ("self", "other") for number in inputs.get(name, ())
        )
    elif base in _PROBABILITY_OPS:
        yield from (
            (number, _PROBABILITY)
            for name in _PROBABILITY_OPS[base]
            for number in inputs.get(name, ())
        )
    elif base in {"floor_divide", "remainder", "fmod"} or (
        base == "div" and call.values.get("rounding_mode")
    ):
        yield from ((number, _POSITIVE) for number in inputs.get("other", ()))
    elif base == "normal":
        yield from ((number, _POSITIVE) for number in inputs.get("std", ()))
    elif base == "segment_reduce":
        total = use.length("data", "axis") or 0
        for number in inputs.get("lengths", ()):
            yield (
                number,
                Constraint("lengths", -(-total // max(prod(use.shapes[number]), 1)), total),
            )
    elif base == "pow":
        exponent = call.values.get("exponent")
        if isinstance(exponent, float) and not exponent.is_integer():
            yield from ((number, _POSITIVE) for number in inputs.get("self", ()))
    elif base in {"repeat_interleave", "_pack_padded_sequence"} and use.given and use.given[0]:
        for name in ("repeats", "lengths"):
            for number in inputs.get(name, ()):
                total = use.given[0][
                    0
                ]  # the steps of the longest sequence are the second result of packing
                longest = (
                    use.given[1][0]
                    if len(use.given) > 1
                    else -(-total // max(prod(use.shapes[number]), 1))
                )
                yield number, Constraint("lengths", longest, total)
    for name in _NAMED & inputs.keys():
        for number in inputs[name]:
            if name in _POSITIVE_NAMES:
                yield number, _POSITIVE
            else:
                # Ascending positions; the last one is the end itself if the op requires it, else a
                # start.
                end = prod(
                    next(
                        (
                            use.shape(argument_name)
                            for argument_name in _OFFSETS[name]
                            if argument_name in inputs
                        ),
                        [],
                    )[:1]
                )
                positions = prod(use.shapes[number])
                has_end = call.values.get("include_last_offset") or "offsets" not in inputs
                yield (
                    number,
                    Constraint(
                        "offsets",
                        0,
                        end if has_end or positions == 0 else end - -(-end // positions),
                    ),
                )


_BASE = re.compile(r"^(?:_foreach_)?(.*?)_?$")


def _call(schema: str, arguments: str) -> _NamedCall | None:
    try:
        parsed = parse_schema(schema)
        values = msgspec.json.decode(arguments)
    except (UnreadableSchemaError, msgspec.DecodeError):
        return None
    values_by_name = dict(
        zip((argument.name for argument in parsed.arguments), values, strict=False)
    )
    inputs = {
        name: numbers
        for name, value in values_by_name.items()
        if (numbers := list(_list_inputs(value)))
    }
    base = _BASE.sub(r"\1", parsed.name)
    return _NamedCall(
        parsed,
        base,
        values_by_name,
        inputs,
        base in _CONSTRAINED_OPS or bool(_NAMED & inputs.keys()),
    )


def _list_inputs(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for part in value:
            yield from _list_inputs(part)
    elif isinstance(value, dict) and isinstance(
        number := value.get("tensor", value.get("storage")), int
    ):
        yield number


def _find_mutated(call: _NamedCall) -> set[int]:
    """Returns the numbers of the inputs whose storages a call writes to."""
    arguments = call.schema.arguments
    if call.base in _METADATA_OPS:
        return set()
    return {
        number
        for index in call.schema.mutates
        for number in call.inputs.get(arguments[index].name, ())
    }


def generate_content(
    elements: int,
    dtype: torch.dtype,
    content: str,
    low: int | None = None,
    high: int | None = None,
    *,
    seed: int,
) -> torch.Tensor:
    """A flat tensor on the host.

    Args:
        elements: How many.
        dtype: Of which type.
        content: floats (around 0), weights (around 0, such that a sum of `high` products keeps its size), positive,
            probability (0 to 1), integers (low to high), offsets (ascending from low to high),
            lengths (descending from `low`, their sum is `high`), zeros.
        low: Of integers and offsets; None: 0.
        high: Of integers and offsets; None: low.
        seed: Of the random numbers.
    """
    import torch

    block = 1_000_003  # many are repeated, which is much faster; a prime, so that no rows of a matrix are equal
    if elements > block and content not in {"zeros", "offsets", "lengths"}:
        tiled = torch.empty(elements, dtype=dtype)
        part = generate_content(block, dtype, content, low, high, seed=seed)
        for start in range(0, elements, block):
            tiled[start : start + block] = part[: elements - start]
        return tiled
    random = torch.Generator().manual_seed(seed)
    low = low or 0
    high = low if high is None else max(low, high)
    if content == "zeros":
        return torch.zeros(elements, dtype=dtype)
    if content == "offsets":
        return torch.linspace(low, high, elements, dtype=torch.float64).to(dtype)
    if content == "lengths":
        lengths = torch.full((elements,), (high - low) // max(elements - 1, 1))
        lengths[: (high - low) % max(elements - 1, 1) + 1] += 1
        lengths[:1] = low if elements > 1 else high
        return lengths.to(dtype)
    if content == "integers":
        max_value = 2**63 - 1 if dtype == torch.int64 else 2**31
        return torch.randint(low, min(high, max_value - 1) + 1, (elements,), generator=random).to(
            dtype
        )
    if dtype.is_complex:
        return torch.randn(elements, generator=random, dtype=torch.complex64).to(dtype)
    if not dtype.is_floating_point:
        return torch.zeros(elements, dtype=dtype)
    uniform = torch.rand(elements, generator=random)
    if content in {
        "floats",
        "weights",
    }:  # a tenth at the least: products of smaller ones become denormal, which is slow
        uniform = (0.1 + 0.9 * uniform) * (
            torch.randint(0, 2, (elements,), generator=random) * 2 - 1
        )
        uniform *= (3 / max(high, 1)) ** 0.5 if content == "weights" else 1
    elif content == "positive":
        uniform = 0.1 + 0.9 * uniform
    return uniform.to(dtype)
