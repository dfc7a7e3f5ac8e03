"""Arguments of operators that are to run again: flags, choices and whole numbers stay; sizes are rounded, values go.

What an argument means is told by the operator's public schema, by type and name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from string import ascii_letters
from typing import Any

from traceloom.replay.schema import OperatorSchema, SchemaArgument

# Texts by which operators choose among ways to compute.
WORDS = frozenset({
    "none", "tanh", "mean", "sum", "batchmean", "prod", "amax", "amin", "max", "min", "reflect", "replicate",
    "constant", "circular", "zeros", "border", "zero", "nearest", "nearest-exact", "linear", "bilinear", "bicubic",
    "trilinear", "area", "floor", "trunc", "ij", "xy", "L", "U", "fro", "nuc", "inf", "-inf", "valid", "same", "relu",
    "gelu", "silu", "sigmoid", "swish", "hardswish", "leaky_relu", "hardtanh", "clamp", "logistic", "sqrt", "abs",
    "square", "elu", "tril", "triu", "left", "right", "lower", "higher", "midpoint", "add", "sub", "mul", "div",
    "binary", "reduced", "complete",
})  # fmt: skip
_SIZES = frozenset({
    "size", "sizes", "shape", "storage_offset", "split_size", "split_sizes", "start", "end", "length",
    "normalized_shape", "num_weights", "output_size", "input_sizes", "self_size", "self_sizes", "repeats", "numel",
    "steps", "vocab_size", "num_classes", "max_q", "max_k", "total_length", "input_split_sizes",
    "output_split_sizes",
})  # fmt: skip
# Declared as sizes are, but small numbers that go with kernels and places.
_NO_SIZES = frozenset({
    "stride", "padding", "dilation", "groups", "output_padding", "kernel_size", "step", "ignore_index", "diagonal",
    "offset", "dim", "n",
})  # fmt: skip
_PLACES = frozenset({"index", "padding_idx", "seed"})
_VALUES = frozenset({"Scalar", "number", "float"})
_EQUATION = re.compile(r"[A-Za-z,.\s]*(?:->[A-Za-z.\s]*)?")
_ENDLESS = frozenset({"inf", "-inf", "nan", "-nan", "Infinity", "-Infinity", "NaN"})


def argument(value: Any, of: SchemaArgument, schema: OperatorSchema, rounded: Callable[[int], int]) -> Any:
    """What one recorded value becomes that is no tensor and no list; None where it must not stay.

    Args:
        value: As recorded.
        of: The argument.
        schema: Of the operator.
        rounded: What sizes become.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if of.name in _PLACES:  # the first or the last: every size has these
            return max(min(value, 0), -1)
        is_size = (of.type.leaf == "SymInt" or of.name in _SIZES) and of.name not in _NO_SIZES
        if of.name == "stride":  # of a geometry, not of a window
            is_size = any(other.name == "size" for other in schema.arguments)
        if is_size:
            return rounded(value)
        is_value = of.type.leaf in _VALUES and of.name not in _NO_SIZES
        return int(_harmless(value)) if is_value else value
    if isinstance(value, float):
        return _harmless(value)
    if isinstance(value, str):
        if value in _ENDLESS or (of.type.leaf == "str" and value in WORDS):
            return value
        if of.name == "equation" and _EQUATION.fullmatch(value):
            letters = "".join(dict.fromkeys(filter(str.isalpha, value)))  # become the first ones, in this order
            return value.translate(str.maketrans(letters, ascii_letters[: len(letters)]))
    return None


def _harmless(value: float) -> float:
    """A number of the same sign on the same side of 1; 0, 1 and what is not finite stay."""
    if value in (0, 1, -1) or not math.isfinite(value):
        return value
    return math.copysign(0.5 if abs(value) < 1 else 2.0, value)
