"""Registry of models of operators' work, and the recorded calls that models receive."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

from msgspec import Struct

DTYPE_BYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "fp4": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "1-byte": 1,
    "2-byte": 2,
    "4-byte": 4,
    "8-byte": 8,
    "16-byte": 16,
}
"""Bytes per element; two fp4 values share a byte, and PyTorch's shapes count such bytes."""

_DTYPES_BY_RECORDED_NAME = {
    "double": "fp64",
    "float": "fp32",
    "c10::half": "fp16",
    "half": "fp16",
    "c10::bfloat16": "bf16",
    "bfloat16": "bf16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short int": "int16",
    "short": "int16",
    "signed char": "int8",
    "char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "unsigned int": "uint32",
    "unsigned short": "uint16",
    "unsigned long": "uint64",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::complex<c10::half>": "complex32",
    "c10::float4_e2m1fn_x2": "fp4",
}
_DTYPES_BY_SCALAR_TYPE = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "fp16",
    6: "fp32",
    7: "fp64",
    8: "complex32",
    9: "complex64",
    10: "complex128",
    11: "bool",
    15: "bf16",
    23: "fp8",
    24: "fp8",
    25: "fp8",
    26: "fp8",
}
_TENSOR_LIST_TYPES = ("TensorList", "OptionalTensorList", "GenericList")


class Unknown(Exception):  # noqa: N818  (not an error: a model without an answer raises it)
    """Raised by a model that cannot compute the work; the message is the reason, for people."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A recorded tensor.

    Attributes:
        shape: Sizes.
        dtype: fp64, fp32, bf16, fp16, fp8, fp4, int64, ..., bool.
        strides: Strides in elements, where recorded.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes in memory: an expanded dimension (stride 0) counts once."""
        return self.stored * self.size

    @property
    def stored(self) -> int:
        """Elements in memory: an expanded dimension (stride 0) counts once."""
        if self.strides is None or len(self.strides) != len(self.shape):
            return self.numel
        return math.prod(
            size
            for size, stride in zip(self.shape, self.strides, strict=True)
            if stride or not size
        )


def parse_dtype(recorded: str) -> str | None:
    """Returns Traceloom's name of a recorded element type (`c10::BFloat16` is bf16); None for types
    that are not tensors.

    Example:
        >>> recorded = ["c10::BFloat16", "long int", "c10::Float8_e4m3fnuz", "Scalar"]
        >>> [parse_dtype(name) for name in recorded]
        ['bf16', 'int64', 'fp8', None]
    """
    lower_case = recorded.lower()
    return (
        "fp8" if lower_case.startswith("c10::float8") else _DTYPES_BY_RECORDED_NAME.get(lower_case)
    )


@dataclass(frozen=True, slots=True)
class LaunchedKernel:
    """A kernel that a call launched: its name, and how many blocks it has in each dimension."""

    name: str
    grid: tuple[int, ...]


_TUPLE_TO_LIST = str.maketrans("()", "[]")


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call, the input of a model.

    Attributes:
        name: Name of the op.
        shapes: The recorded shapes, one entry per input; a list of tensors has a list of shapes.
        types: The recorded types as in the file: `c10::BFloat16`, `Scalar`, `TensorList`, "" for
            nothing.
        concrete: The recorded values of inputs that are not tensors, as text; "" where not
            recorded.
        strides: The recorded strides, or nothing.
        list_type: Element type of the tensors in lists, which the profiler does not record; from
            the name of the kernel where that shows it, else "".
        batch: Text of the innermost annotation around the call that states the batch of a serving
            engine, else "".
        inside: For operators whose model looks inside: the calls below it, in their order,
            themselves without `inside`.
        kernels: The same: the kernels that it launched, where their grids are recorded.
    """

    name: str
    shapes: list[Any]
    types: list[str]
    concrete: list[str]
    strides: list[Any]
    list_type: str = ""
    batch: str = ""
    inside: tuple[Call, ...] = ()
    kernels: tuple[LaunchedKernel, ...] = ()

    def has(self, index: int) -> bool:
        """Whether input `index` is a tensor."""
        return (
            index < len(self.types)
            and index < len(self.shapes)
            and parse_dtype(self.types[index]) is not None
        )

    def tensor(self, index: int) -> Tensor:
        """Returns input `index`.

        Raises:
            Unknown: It is not a tensor, or not recorded.
        """
        if not self.has(index):
            raise Unknown(f"input {index} is not recorded as a tensor")
        strides = self.strides[index] if index < len(self.strides) else None
        dtype = parse_dtype(self.types[index])
        assert dtype is not None
        return Tensor(
            _parse_shape(self.shapes[index]), dtype, _parse_shape(strides) if strides else None
        )

    def tensors(self) -> list[Tensor]:
        """Returns all inputs that are tensors, in order; lists of tensors are left out."""
        return self.optional(*range(len(self.types)))

    def optional(self, *indices: int) -> list[Tensor]:
        return [self.tensor(index) for index in indices if self.has(index)]

    def tensor_list(self, index: int) -> list[Tensor]:
        """Returns input `index`, a list of tensors.

        Raises:
            Unknown: Shapes or the element type are not recorded.
        """
        shapes = self.shapes[index] if index < len(self.shapes) else []
        if not shapes or not all(isinstance(shape, list) for shape in shapes):
            raise Unknown(f"the shapes of the list in input {index} are not recorded")
        if self.list_type not in DTYPE_BYTES:
            raise Unknown(
                "the element type of a list of tensors is not recorded, and the name of the kernel does not say it"
            )
        return [Tensor(_parse_shape(shape), self.list_type) for shape in shapes]

    def is_list(self, index: int) -> bool:
        return index < len(self.types) and self.types[index] in _TENSOR_LIST_TYPES

    def text(self, index: int) -> str:
        """Returns the recorded value of input `index`; "" where there is none."""
        return self.concrete[index].strip() if index < len(self.concrete) else ""

    def integer(self, index: int, default: int | None = None) -> int:
        """Returns the recorded whole number of input `index`.

        Raises:
            Unknown: None is recorded, and there is no default.
        """
        try:
            return int(self.text(index))
        except ValueError:
            if default is None:
                raise Unknown(f"the value of input {index} is not recorded") from None
            return default

    def number(self, index: int, default: float) -> float:
        """Returns the recorded number of input `index`."""
        try:
            return float(self.text(index))
        except ValueError:
            return default

    def flag(self, index: int) -> bool:
        """Returns the recorded boolean of input `index`.

        Raises:
            Unknown: None is recorded.
        """
        text = self.text(index)
        if text not in ("True", "False"):
            raise Unknown(f"the value of input {index} is not recorded")
        return text == "True"

    def integers(self, index: int) -> list[int] | None:
        """Returns the recorded list of whole numbers of input `index`; a single number is a list of
        one; None where absent.
        """
        try:
            text = self.text(index).replace("True", "1").replace("False", "0")
            value = json.loads(text.translate(_TUPLE_TO_LIST))
        except ValueError:
            return None
        value = [value] if isinstance(value, int) else value
        return (
            value
            if isinstance(value, list) and all(isinstance(element, int) for element in value)
            else None
        )

    def sizes(self, index: int, rank: int) -> list[int]:
        """As `integers`, for `rank` dimensions: a list of one applies to all.

        Raises:
            Unknown: None is recorded, or of another length.
        """
        values = self.integers(index)
        if values is None:
            raise Unknown(f"the value of input {index} is not recorded")
        values = values * rank if len(values) == 1 else values
        if len(values) != rank:
            raise Unknown(f"input {index} has {len(values)} numbers for {rank} dimensions")
        return values

    def dtype_code(self, index: int) -> str | None:
        """Returns the element type whose number is in input `index`; None where there is none."""
        try:
            return _DTYPES_BY_SCALAR_TYPE.get(int(self.text(index)))
        except ValueError:
            return None


def _parse_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
        raise Unknown("a shape is not recorded as numbers")
    return tuple(shape)


def derive_broadcast_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that PyTorch gives an elementwise result.

    Raises:
        Unknown: The shapes do not fit each other.
    """
    out: list[int] = []
    for dim in range(1, max((len(shape) for shape in shapes), default=0) + 1):
        sizes = {shape[-dim] for shape in shapes if len(shape) >= dim} - {1}
        if len(sizes) > 1:
            raise Unknown("the recorded shapes do not fit each other")
        out.append(sizes.pop() if sizes else 1)
    return tuple(reversed(out))


_PROMOTION_ORDER = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "fp8",
    "fp16",
    "bf16",
    "fp32",
    "fp64",
)
_COMPLEX_DTYPES = ("complex32", "complex64", "complex128")
# Neither holds the values of the other
_MIXED_DTYPE_PROMOTIONS = (
    ({"fp16", "bf16"}, "fp32"),
    ({"uint8", "int8"}, "int16"),
)


def derive_promoted_dtype(tensors: list[Tensor]) -> str:
    """Returns the element type of an elementwise result of several tensors, by PyTorch's rule.

    A tensor without dimensions changes the type only by its category (truth value, integer,
    floating point, complex).

    Raises:
        Unknown: There is no such type.
    """
    order = [*_PROMOTION_ORDER, *_COMPLEX_DTYPES]
    highest, categories = [], []  # of the tensors with dimensions, and of those without
    for has_dims in (True, False):
        dtypes = [tensor.dtype for tensor in tensors if bool(tensor.shape) == has_dims]
        dtypes += [wider for pair, wider in _MIXED_DTYPE_PROMOTIONS if pair <= set(dtypes)]
        if dtypes:
            dtype = max(dtypes, key=lambda dtype: order.index(dtype) if dtype in order else -1)
            highest.append(dtype)
            categories.append(
                3
                if dtype in _COMPLEX_DTYPES
                else 2
                if dtype.startswith(("fp", "bf"))
                else int(dtype != "bool")
            )
    if not highest:
        raise Unknown("no input is recorded as a tensor")
    if len(highest) == 1 or categories[1] <= categories[0]:
        return highest[0]
    # A Python number is recorded as a double, becomes a float
    return "fp32" if highest[1] == "fp64" else highest[1]


def parse_json_list(text: str | None) -> list[Any]:
    """Parses a list from its JSON text; empty where there is none."""
    if not text:
        return []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []


class Work(Struct, frozen=True):
    """The work of one call, whatever the kernel.

    Attributes:
        flops: Floating-point operations (integer ones for integer types); a multiply-add counts 2.
        bytes: Least traffic with the device's memory: every operand is read or written once.
        dtype: Element type of the arithmetic: fp64, fp32, bf16, fp16, fp8, fp4, int8, ...
        matrix: The arithmetic can run on matrix units (tensor cores, matrix cores).
        recomputed: How many of `flops` repeat the forward pass (attention backward without stored
            scores).
    """

    flops: int
    bytes: int
    dtype: str
    matrix: bool = False
    recomputed: int = 0

    def __post_init__(self) -> None:
        if self.flops < 0 or self.bytes < 0:
            raise ValueError("FLOPs and bytes cannot be negative")


WorkModel = Callable[[Call], Work]


class _RegisteredModel(Struct, frozen=True):
    """A model, the family of its operators, and whether it needs the contents of a call."""

    model: WorkModel
    family: str
    inside: bool


# Minutes of the fastest device for one call; sums of many calls must fit into 64 bits
_MAX_WORK = 1 << 56


class Registry:
    """Models by the names of operators."""

    def __init__(self) -> None:
        self._exact: dict[str, _RegisteredModel] = {}
        self._patterns: dict[str, _RegisteredModel] = {}
        # Increases with every change, so that cached results become invalid
        self.generation = 0

    def register(
        self, *names: str, family: str = "own", inputs: int | None = None, inside: bool = False
    ) -> Callable[[WorkModel], WorkModel]:
        """Registers a model for operators; a later one replaces an earlier one.

        Args:
            names: Names as in traces; `*` matches anything (an exact name takes precedence over a
                pattern).
            family: Family of the operators; for tables.
            inside: Whether the model needs the calls and kernels inside a call.
            inputs: Maximum number of inputs. Old profilers sometimes record inputs of another
                operator before its own; such a call is then not modelled.
        """

        def add(original: WorkModel) -> WorkModel:
            @wraps(original)
            def model(call: Call) -> Work:
                if inputs is not None and len(call.shapes) > inputs:
                    raise Unknown("more inputs are recorded than the operator has")
                return original(call)

            for name in names:
                (self._patterns if "*" in name else self._exact)[name] = _RegisteredModel(
                    model, family, inside
                )
            self.generation += 1
            return original

        return add

    def remove(self, *names: str) -> None:
        """Removes models; names without one are ignored."""
        for name in names:
            self._exact.pop(name, None)
            self._patterns.pop(name, None)
        self.generation += 1

    def looks_inside(self, name: str) -> bool:
        """Whether the model of an operator needs the contents of a call."""
        registered = self._find_registered(name)
        return registered is not None and registered.inside

    def family(self, name: str) -> str | None:
        """Returns the family of an operator; None where it has no model."""
        registered = self._find_registered(name)
        return registered.family if registered else None

    def find(self, name: str) -> WorkModel | None:
        registered = self._find_registered(name)
        return registered.model if registered else None

    def _find_registered(self, name: str) -> _RegisteredModel | None:
        exact = self._exact.get(name)
        if exact is not None:
            return exact
        return next(
            (
                registered
                for pattern, registered in self._patterns.items()
                if fnmatchcase(name, pattern)
            ),
            None,
        )

    def names(self) -> dict[str, str]:
        """Returns name or pattern -> family, in the order of registration."""
        return {
            name: registered.family
            for table in (self._exact, self._patterns)
            for name, registered in table.items()
        }

    def work(self, call: Call) -> Work | str:
        """Returns the work of the call, or the reason why it is not known."""
        model = self.find(call.name)
        if model is None:
            return "no model for this operator"
        try:
            work = model(call)
        except Unknown as why:
            return str(why)
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            return f"the model cannot read the recorded inputs ({type(error).__name__}: {error})"
        if not isinstance(work, Work) or work.dtype not in DTYPE_BYTES:
            return "the model gave no usable answer"
        if max(work.flops, work.bytes, work.recomputed) > _MAX_WORK:
            return "the recorded shapes are too large to be true"
        return work


MODELS = Registry()
