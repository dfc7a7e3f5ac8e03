"""Operator -> model of its work; the recorded call."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

from msgspec import Struct

SIZES = {
    "fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 1, "complex32": 4, "complex64": 8,
    "complex128": 16, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2,
    "uint8": 1, "bool": 1, "1-byte": 1, "2-byte": 2, "4-byte": 4, "8-byte": 8, "16-byte": 16,
}  # fmt: skip
"""Bytes per element; two fp4 values share a byte, and PyTorch's shapes count such bytes."""

_RECORDED = {
    "double": "fp64", "float": "fp32", "c10::half": "fp16", "half": "fp16", "c10::bfloat16": "bf16",
    "bfloat16": "bf16", "long int": "int64", "long": "int64", "int": "int32", "short int": "int16", "short": "int16",
    "signed char": "int8", "char": "int8", "unsigned char": "uint8", "bool": "bool", "unsigned int": "uint32",
    "unsigned short": "uint16", "unsigned long": "uint64", "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128", "c10::complex<c10::half>": "complex32", "c10::float4_e2m1fn_x2": "fp4",
}  # fmt: skip
_CODES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "fp16", 6: "fp32", 7: "fp64", 8: "complex32",
    9: "complex64", 10: "complex128", 11: "bool", 15: "bf16", 23: "fp8", 24: "fp8", 25: "fp8", 26: "fp8",
}  # fmt: skip
_LISTS = ("TensorList", "OptionalTensorList", "GenericList")


class Unknown(Exception):  # noqa: N818  (it is no error: a model that cannot tell says so)
    """Raised by a model that cannot tell; the message is the reason, for people."""


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
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return SIZES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes that lie in memory: an expanded dimension (stride 0) counts once."""
        return self.stored * self.size

    @property
    def stored(self) -> int:
        """Elements that lie in memory: an expanded dimension (stride 0) counts once."""
        if self.strides is None or len(self.strides) != len(self.shape):
            return self.numel
        return math.prod(size for size, stride in zip(self.shape, self.strides, strict=True) if stride or not size)


def dtype_of(recorded: str) -> str | None:
    """Our name of a recorded element type (`c10::BFloat16` is bf16); None for what is no tensor.

    Example:
        >>> dtype_of("c10::BFloat16"), dtype_of("long int"), dtype_of("c10::Float8_e4m3fnuz"), dtype_of("Scalar")
        ('bf16', 'int64', 'fp8', None)
    """
    plain = recorded.lower()
    return "fp8" if plain.startswith("c10::float8") else _RECORDED.get(plain)


@dataclass(frozen=True, slots=True)
class Launched:
    """A kernel that a call launched: its name, and how many blocks it has in each dimension."""

    name: str
    grid: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call: what a model is given.

    Attributes:
        name: Name of the op.
        shapes: The recorded shapes, one entry per input; a list of tensors has a list of shapes.
        types: The recorded types as they stand in the file: `c10::BFloat16`, `Scalar`, `TensorList`, "" for nothing.
        concrete: The recorded values of inputs that are no tensors, as text; "" where not recorded.
        strides: The recorded strides, or nothing.
        list_type: Element type of the tensors in lists, which the profiler does not record; from the name of the
            kernel where that tells, else "".
        batch: Text of the innermost annotation around the call that tells the batch of a serving engine, else "".
        inside: For operators whose model looks inside: the calls below it, in their order, themselves without `inside`.
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
    kernels: tuple[Launched, ...] = ()

    def has(self, at: int) -> bool:
        """Whether input `at` is a tensor."""
        return at < len(self.types) and at < len(self.shapes) and dtype_of(self.types[at]) is not None

    def tensor(self, at: int) -> Tensor:
        """Input `at`.

        Raises:
            Unknown: It is no tensor, or not recorded.
        """
        if not self.has(at):
            raise Unknown(f"input {at} is not recorded as a tensor")
        strides = self.strides[at] if at < len(self.strides) else None
        dtype = dtype_of(self.types[at])
        assert dtype is not None
        return Tensor(_sizes(self.shapes[at]), dtype, _sizes(strides) if strides else None)

    def tensors(self) -> list[Tensor]:
        """All inputs that are tensors, in order; lists of tensors are left out."""
        return self.optional(*range(len(self.types)))

    def optional(self, *places: int) -> list[Tensor]:
        """Those of some inputs that are tensors."""
        return [self.tensor(at) for at in places if self.has(at)]

    def tensor_list(self, at: int) -> list[Tensor]:
        """Input `at`, a list of tensors.

        Raises:
            Unknown: Shapes or the element type are not recorded.
        """
        shapes = self.shapes[at] if at < len(self.shapes) else []
        if not shapes or not all(isinstance(shape, list) for shape in shapes):
            raise Unknown(f"the shapes of the list in input {at} are not recorded")
        if self.list_type not in SIZES:
            raise Unknown(
                "the element type of a list of tensors is not recorded, and the name of the kernel does not say it"
            )
        return [Tensor(_sizes(shape), self.list_type) for shape in shapes]

    def is_list(self, at: int) -> bool:
        """Whether input `at` is a list of tensors."""
        return at < len(self.types) and self.types[at] in _LISTS

    def text(self, at: int) -> str:
        """The recorded value of input `at`; "" where there is none."""
        return self.concrete[at].strip() if at < len(self.concrete) else ""

    def integer(self, at: int, default: int | None = None) -> int:
        """The recorded whole number of input `at`.

        Raises:
            Unknown: None is recorded, and there is no default.
        """
        try:
            return int(self.text(at))
        except ValueError:
            if default is None:
                raise Unknown(f"the value of input {at} is not recorded") from None
            return default

    def number(self, at: int, default: float) -> float:
        """The recorded number of input `at`."""
        try:
            return float(self.text(at))
        except ValueError:
            return default

    def flag(self, at: int) -> bool:
        """The recorded yes or no of input `at`.

        Raises:
            Unknown: None is recorded.
        """
        text = self.text(at)
        if text not in ("True", "False"):
            raise Unknown(f"the value of input {at} is not recorded")
        return text == "True"

    def integers(self, at: int) -> list[int] | None:
        """The recorded list of whole numbers of input `at`; a single number is a list of one; None where absent."""
        try:
            value = json.loads(self.text(at).replace("True", "1").replace("False", "0"))
        except ValueError:
            return None
        value = [value] if isinstance(value, int) else value
        return value if isinstance(value, list) and all(isinstance(element, int) for element in value) else None

    def sizes(self, at: int, rank: int) -> list[int]:
        """As `integers`, for `rank` dimensions: a list of one stands for all.

        Raises:
            Unknown: None is recorded, or of another length.
        """
        values = self.integers(at)
        if values is None:
            raise Unknown(f"the value of input {at} is not recorded")
        values = values * rank if len(values) == 1 else values
        if len(values) != rank:
            raise Unknown(f"input {at} has {len(values)} numbers for {rank} dimensions")
        return values

    def dtype_code(self, at: int) -> str | None:
        """The element type whose number stands in input `at`; None where there is none."""
        try:
            return _CODES.get(int(self.text(at)))
        except ValueError:
            return None


def _sizes(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
        raise Unknown("a shape is not recorded as numbers")
    return tuple(shape)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that PyTorch gives an elementwise result.

    Raises:
        Unknown: The shapes do not fit each other.
    """
    out: list[int] = []
    for at in range(1, max((len(shape) for shape in shapes), default=0) + 1):
        sizes = {shape[-at] for shape in shapes if len(shape) >= at} - {1}
        if len(sizes) > 1:
            raise Unknown("the recorded shapes do not fit each other")
        out.append(sizes.pop() if sizes else 1)
    return tuple(reversed(out))


_ORDER = ("bool", "uint8", "int8", "int16", "int32", "int64", "fp8", "fp16", "bf16", "fp32", "fp64")
_COMPLEX = ("complex32", "complex64", "complex128")
_MEET = (({"fp16", "bf16"}, "fp32"), ({"uint8", "int8"}, "int16"))  # neither holds the values of the other


def promoted(tensors: list[Tensor]) -> str:
    """The element type of an elementwise result of several tensors, by PyTorch's rule.

    A tensor without dimensions changes the type only by its category (truth value, integer, floating point, complex).

    Raises:
        Unknown: There is none.
    """
    order = [*_ORDER, *_COMPLEX]
    highest, categories = [], []  # of the tensors with dimensions, and of those without
    for with_sizes in (True, False):
        dtypes = [tensor.dtype for tensor in tensors if bool(tensor.shape) == with_sizes]
        dtypes += [wider for pair, wider in _MEET if pair <= set(dtypes)]
        if dtypes:
            dtype = max(dtypes, key=lambda dtype: order.index(dtype) if dtype in order else -1)
            highest.append(dtype)
            categories.append(3 if dtype in _COMPLEX else 2 if dtype.startswith(("fp", "bf")) else int(dtype != "bool"))
    if not highest:
        raise Unknown("no input is recorded as a tensor")
    if len(highest) == 1 or categories[1] <= categories[0]:
        return highest[0]
    return "fp32" if highest[1] == "fp64" else highest[1]  # a Python number is recorded as a double, becomes a float


def parsed(text: str | None) -> list[Any]:
    """A list from its JSON text; empty where there is none."""
    if not text:
        return []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []


class Work(Struct, frozen=True):
    """What one call has to do, whatever the kernel.

    Attributes:
        flops: Floating-point operations (integer ones for integer types); a multiply-add counts 2.
        bytes: Least traffic with the device's memory: every operand is read or written once.
        dtype: Element type of the arithmetic: fp64, fp32, bf16, fp16, fp8, fp4, int8, ...
        matrix: The arithmetic can run on matrix units (tensor cores, matrix cores).
        recomputed: How many of `flops` do again what the forward pass did (attention backward without stored scores).
    """

    flops: int
    bytes: int
    dtype: str
    matrix: bool = False
    recomputed: int = 0

    def __post_init__(self) -> None:
        if self.flops < 0 or self.bytes < 0:
            raise ValueError("FLOPs and bytes cannot be negative")


Model = Callable[[Call], Work]


class _Registered(Struct, frozen=True):
    """A model, what kind of operator it is for, and whether it asks for what is inside a call."""

    model: Model
    family: str
    inside: bool


_MOST = 1 << 56  # minutes of the fastest device for one call; sums of many calls must stay in 64 bits


class Registry:
    """Models by the names of operators."""

    def __init__(self) -> None:
        self._exact: dict[str, _Registered] = {}
        self._patterns: dict[str, _Registered] = {}
        self.generation = 0  # grows with every change, so that remembered results are not used after it

    def register(
        self, *names: str, family: str = "own", inputs: int | None = None, inside: bool = False
    ) -> Callable[[Model], Model]:
        """Give operators a model; a later one replaces an earlier one.

        Args:
            names: Names as they stand in traces; `*` stands for anything (an exact name goes before a pattern).
            family: What kind of operator it is; for tables.
            inside: The model asks for the calls and kernels inside.
            inputs: The most inputs that it has. Old profilers sometimes record those of another operator before its
                own; such a call is then not modelled.
        """

        def add(original: Model) -> Model:
            @wraps(original)
            def model(call: Call) -> Work:
                if inputs is not None and len(call.shapes) > inputs:
                    raise Unknown("more inputs are recorded than the operator has")
                return original(call)

            for name in names:
                (self._patterns if "*" in name else self._exact)[name] = _Registered(model, family, inside)
            self.generation += 1
            return original

        return add

    def remove(self, *names: str) -> None:
        """Take models away; names without one are passed over."""
        for name in names:
            self._exact.pop(name, None)
            self._patterns.pop(name, None)
        self.generation += 1

    def looks_inside(self, name: str) -> bool:
        """Whether the model of an operator asks for what is inside a call."""
        registered = self._registered(name)
        return registered is not None and registered.inside

    def family(self, name: str) -> str | None:
        """What kind of operator has that name; None where it has no model."""
        registered = self._registered(name)
        return registered.family if registered else None

    def find(self, name: str) -> Model | None:
        """The model of an operator, or None."""
        registered = self._registered(name)
        return registered.model if registered else None

    def _registered(self, name: str) -> _Registered | None:
        exact = self._exact.get(name)
        if exact is not None:
            return exact
        return next((registered for pattern, registered in self._patterns.items() if fnmatchcase(name, pattern)), None)

    def names(self) -> dict[str, str]:
        """Name or pattern -> family, in the order of registration."""
        return {
            name: registered.family for table in (self._exact, self._patterns) for name, registered in table.items()
        }

    def work(self, call: Call) -> Work | str:
        """What the call has to do, or the reason why that is not known."""
        model = self.find(call.name)
        if model is None:
            return "no model for this operator"
        try:
            work = model(call)
        except Unknown as why:
            return str(why)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            return f"the model cannot read the recorded inputs ({type(error).__name__}: {error})"
        if not isinstance(work, Work) or work.dtype not in SIZES:
            return "the model gave no usable answer"
        if max(work.flops, work.bytes, work.recomputed) > _MOST:
            return "the recorded shapes are too large to be true"
        return work


MODELS = Registry()
