"""Rounding of sizes, and rewriting of the arguments of operators.

Rounding is a function of the number alone, so that equal sizes stay equal on all ranks and in all
files. If operators have to run again, each prime factor is rounded, so that products stay products
of the same sizes.

The meaning of an argument follows from its type and name in the operator's public schema.
"""

import math
import re
from collections.abc import Callable, Collection
from functools import lru_cache
from string import ascii_letters
from typing import Any

import msgspec

from traceloom.formats.resync import PARSE_ERRORS
from traceloom.workload.anonymize.policy import BUCKET, DROP, FIT, KEEP, Policy
from traceloom.workload.replay.schema import OperatorSchema, SchemaArgument

_TOP_BITS = 5  # kept of running totals: within 3 %
_MAX_CACHED = 50_000  # cached lists of shapes
_MAX_DEPTH = 8
_MAX_SIZE = 1 << 48  # a larger number is not a size but the end of an open slice
OptionalBytes = bytes | None


def round_to_power_of_two(number: int) -> int:
    """The power of two that is nearest by ratio, with the sign of the number; 0 stays 0.

    Example:
        >>> round_to_power_of_two(768), round_to_power_of_two(700), round_to_power_of_two(-50257), round_to_power_of_two(3)
        (1024, 512, -65536, 4)
    """
    size = abs(number)
    if size < 3:
        return number
    low = 1 << (size.bit_length() - 1)
    rounded = low if size * size < 2 * low * low else 2 * low
    return rounded if number > 0 else -rounded


@lru_cache(_MAX_CACHED)
def find_prime_factors(number: int) -> tuple[int, ...]:
    """The prime factors of a number from 1 on, ascending.

    Example:
        >>> find_prime_factors(768)
        (2, 2, 2, 2, 2, 2, 2, 2, 3)
    """
    factors, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1 if factor == 2 else 2
    return (*factors, number) if number > 1 else tuple(factors)


def round_prime_factors(number: int, kept_factors: Collection[int] = ()) -> int:
    """Returns the number with each prime factor rounded by `round_to_power_of_two`, except for
    `kept_factors`; numbers below 2 are unchanged.

    Example:
        >>> round_prime_factors(8 * 96), round_prime_factors(8) * round_prime_factors(96), round_prime_factors(768, {3})
        (1024, 1024, 768)
    """
    if not 2 < number < _MAX_SIZE:
        return number
    return math.prod(
        factor if factor in kept_factors else round_to_power_of_two(factor)
        for factor in find_prime_factors(number)
    )


def round_total(number: int) -> int:
    """Returns a running total with its five leading bits, which is off by at most 3 %."""
    shift = max(0, abs(number).bit_length() - _TOP_BITS)
    rounded = (abs(number) + (1 << shift >> 1)) >> shift << shift
    return rounded if number >= 0 else -rounded


class Shapes:
    """Rewriting of sizes by the policy.

    Attributes:
        exact: Exact sizes in bytes, elements and work items that are in the output, for the leak
            report.
        kept_factors: Prime factors that the policy `fit` keeps; None for all.
    """

    def __init__(self, policy: Policy) -> None:
        self._mode = policy.shapes
        self._known: dict[bytes, OptionalBytes] = {}
        self.exact: set[int] = set()
        self.kept_factors: frozenset[int] | None = frozenset()

    def keep_factors(self, factors: frozenset[int] | None) -> None:
        """Sets the prime factors to keep; None for all."""
        self.kept_factors = factors
        self._known.clear()

    def rounded(self, number: int) -> int:
        """Returns a size after rounding."""
        if self._mode == FIT:
            return (
                number
                if self.kept_factors is None
                else round_prime_factors(number, self.kept_factors)
            )
        return round_to_power_of_two(number) if self._mode == BUCKET else number

    @property
    def rounds(self) -> bool:
        return self._mode in {BUCKET, FIT}

    @property
    def kept(self) -> bool:
        return self._mode == KEEP

    def size(self, number: int) -> int:
        """Returns bytes or elements of one object, exact or rounded; the policy `drop` keeps them,
        which the report mentions.
        """
        if self.rounds:
            return self.rounded(number)
        if len(self.exact) < _MAX_CACHED:
            self.exact.add(abs(number))
        return number

    def total(self, number: int) -> int:
        return round_total(number) if self.rounds else number

    def dims(self, raw: bytes) -> OptionalBytes:
        """Returns a nested list of dimensions as JSON; None to drop it."""
        if self._mode == DROP:
            return None
        return self._listed(b"d", raw, lambda value: _apply_nested(value, self.rounded))

    def counts(self, raw: bytes) -> OptionalBytes:
        """Returns a nested list of dimensions with each shape replaced by its number of
        elements.
        """
        return self._listed(b"c", raw, self._counted)

    def _counted(self, value: Any) -> Any:
        if not isinstance(value, list) or not value:
            return value
        if all(isinstance(item, int) for item in value):
            return [self.size(math.prod(value))]
        return [self._counted(item) for item in value]

    def strides(self, raw: bytes, dims: bytes) -> OptionalBytes:
        """Returns the nested list of strides for dimensions; rounded shapes get strides in the same
        order.
        """

        def restrided(value: Any) -> Any:
            try:
                shape = msgspec.json.decode(dims)
            except PARSE_ERRORS:
                return None
            return _compute_strides(value, shape) if _is_nested_integers(shape) else None

        if self._mode == DROP:
            return None
        if self._mode == BUCKET:
            return self._listed(b"s" + dims + b"\0", raw, restrided)
        return self._listed(
            b"s", raw, lambda value: _apply_nested(value, self.rounded)
        )  # products of dimensions stay products

    def grid(self, raw: bytes) -> OptionalBytes:
        """Returns a launch grid, which reveals the shape as bytes do."""

        def made(value: Any) -> Any:
            if not isinstance(value, list):
                return None
            if self.rounds:
                return _apply_nested(value, round_to_power_of_two)
            self.size(math.prod(n for n in value if isinstance(n, int)))
            return value

        return None if self._mode == DROP else self._listed(b"g", raw, made)

    def splits(self, raw: bytes) -> OptionalBytes:
        """Returns the sizes of the parts of an uneven exchange, as a list or as its text."""
        return self._listed(b"p", raw, lambda value: _apply_nested(value, self.size), text=True)

    def _listed(
        self, kind: bytes, raw: bytes, make: Callable[[Any], Any], *, text: bool = False
    ) -> OptionalBytes:
        """Applies `make` to a nested list of integers and returns JSON; with `text` the list may be
        quoted.
        """
        key = kind + raw
        if key in self._known:
            return self._known[key]
        if len(self._known) > _MAX_CACHED:
            self._known.clear()
        encoded = None
        try:
            value = msgspec.json.decode(raw)
            text = text and isinstance(value, str)
            value = msgspec.json.decode(value) if text else value
        except PARSE_ERRORS:
            value = None
        if _is_nested_integers(value) and (new := make(value)) is not None:
            encoded = msgspec.json.encode(new)
            encoded = msgspec.json.encode(encoded.decode()) if text else encoded
        self._known[key] = encoded
        return encoded


def _is_nested_integers(value: Any, depth: int = 0) -> bool:
    if isinstance(value, list):
        return depth < _MAX_DEPTH and all(_is_nested_integers(item, depth + 1) for item in value)
    return isinstance(value, int) and not isinstance(value, bool)


def _apply_nested(value: Any, function: Any) -> Any:
    return (
        [_apply_nested(item, function) for item in value]
        if isinstance(value, list)
        else function(value)
    )


def _compute_strides(strides: Any, shape: Any) -> Any:
    """Returns strides of the rounded shape in the same order of dimensions; [] if the tensor has
    gaps.
    """
    if not isinstance(strides, list) or not isinstance(shape, list):
        return []
    if any(isinstance(item, list) for item in strides):
        pairs = zip(strides, shape + [[]] * len(strides), strict=False)
        return [
            _compute_strides(inner_strides, inner_shape) for inner_strides, inner_shape in pairs
        ]
    if len(strides) != len(shape) or any(isinstance(item, list) for item in shape):
        return []
    new_strides, expected, rounded = [0] * len(strides), 1, 1
    for dim in sorted(range(len(strides)), key=lambda at: (strides[at], -at)):
        if strides[dim] not in (expected, 0) and shape[dim] != 1:
            return []
        new_strides[dim] = rounded if strides[dim] else 0
        if strides[dim]:
            expected, rounded = expected * shape[dim], rounded * round_to_power_of_two(shape[dim])
    return new_strides


# Texts that select a variant of an operator.
WORDS = frozenset(
    {
        "none",
        "tanh",
        "mean",
        "sum",
        "batchmean",
        "prod",
        "amax",
        "amin",
        "max",
        "min",
        "reflect",
        "replicate",
        "constant",
        "circular",
        "zeros",
        "border",
        "zero",
        "nearest",
        "nearest-exact",
        "linear",
        "bilinear",
        "bicubic",
        "trilinear",
        "area",
        "floor",
        "trunc",
        "ij",
        "xy",
        "L",
        "U",
        "fro",
        "nuc",
        "inf",
        "-inf",
        "valid",
        "same",
        "relu",
        "gelu",
        "silu",
        "sigmoid",
        "swish",
        "hardswish",
        "leaky_relu",
        "hardtanh",
        "clamp",
        "logistic",
        "sqrt",
        "abs",
        "square",
        "elu",
        "tril",
        "triu",
        "left",
        "right",
        "lower",
        "higher",
        "midpoint",
        "add",
        "sub",
        "mul",
        "div",
        "binary",
        "reduced",
        "complete",
    }
)
_SIZES = frozenset(
    {
        "size",
        "sizes",
        "shape",
        "storage_offset",
        "split_size",
        "split_sizes",
        "start",
        "end",
        "length",
        "normalized_shape",
        "num_weights",
        "output_size",
        "input_sizes",
        "self_size",
        "self_sizes",
        "repeats",
        "numel",
        "steps",
        "vocab_size",
        "num_classes",
        "max_q",
        "max_k",
        "total_length",
        "input_split_sizes",
        "output_split_sizes",
    }
)
# Declared like sizes, but small numbers that depend on kernels and positions.
_NO_SIZES = frozenset(
    {
        "stride",
        "padding",
        "dilation",
        "groups",
        "output_padding",
        "kernel_size",
        "step",
        "ignore_index",
        "diagonal",
        "offset",
        "dim",
        "n",
    }
)
_PLACES = frozenset({"index", "padding_idx", "seed"})
_VALUES = frozenset({"Scalar", "number", "float"})
_EQUATION = re.compile(r"[A-Za-z,.\s]*(?:->[A-Za-z.\s]*)?")
_NON_FINITE = frozenset({"inf", "-inf", "nan", "-nan", "Infinity", "-Infinity", "NaN"})


def rewrite_argument(
    value: Any, argument: SchemaArgument, schema: OperatorSchema, rounded: Callable[[int], int]
) -> Any:
    """Returns the replacement of one recorded value that is neither a tensor nor a list; None to
    drop it.

    Args:
        value: As recorded.
        argument: The argument.
        schema: Schema of the operator.
        rounded: Rounds sizes.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if argument.name in _PLACES:  # the first or the last: valid for every size
            return max(min(value, 0), -1)
        is_size = (
            argument.type.leaf == "SymInt" or argument.name in _SIZES
        ) and argument.name not in _NO_SIZES
        if argument.name == "stride":  # of a memory layout, not of a window
            is_size = any(other.name == "size" for other in schema.arguments)
        if is_size:
            return rounded(value)
        is_value = argument.type.leaf in _VALUES and argument.name not in _NO_SIZES
        return int(_replace_number(value)) if is_value else value
    if isinstance(value, float):
        return _replace_number(value)
    if isinstance(value, str):
        if value in _NON_FINITE or (argument.type.leaf == "str" and value in WORDS):
            return value
        if argument.name == "equation" and _EQUATION.fullmatch(value):
            index_letters = "".join(
                dict.fromkeys(filter(str.isalpha, value))
            )  # become the first dimensions, in this order
            return value.translate(
                str.maketrans(index_letters, ascii_letters[: len(index_letters)])
            )
    return None


def _replace_number(value: float) -> float:
    """Returns a number of the same sign on the same side of 1; 0, 1 and non-finite numbers are
    unchanged.
    """
    if value in (0, 1, -1) or not math.isfinite(value):
        return value
    return math.copysign(0.5 if abs(value) < 1 else 2.0, value)
