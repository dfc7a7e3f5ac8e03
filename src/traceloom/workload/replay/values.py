"""Decoding recorded arguments into typed values."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from traceloom.workload.replay.plan import ITEM_BYTES
from traceloom.workload.replay.schema import (
    OperatorSchema,
    Refusal,
    ValueType,
    find_refusal,
    parse_schema,
)

MAX_LIST_LENGTH = 4096  # PyTorch truncates longer lists, and marks that with one extra element
ROUNDED = "rounded-number"
CUT = "cut-list"
UNKNOWN = "unknown-object"
GUESSED = "guessed-number"
_MAX_ELEMENTS = 1 << 50  # elements
NO_TENSOR = ""  # an undefined tensor (nullptr)
_WORD = re.compile(r"[A-Za-z]\w*(?:\((?:[^()]|\([^()]*\))*\))?|[\[\],]")

# C++ type names in host traces, on any platform -> PyTorch's names in Python.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "int": "int32",
    "long int": "int64",
    "long": "int64",
    "long long": "int64",
    "__int64": "int64",
    "short": "int16",
    "short int": "int16",
    "signed char": "int8",
    "char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "unsigned short": "uint16",
    "short unsigned int": "uint16",
    "unsigned int": "uint32",
    "unsigned long": "uint64",
    "long unsigned int": "uint64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::complex<c10::Half>": "complex32",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
    "c10::Float8_e4m3fnuz": "float8_e4m3fnuz",
    "c10::Float8_e5m2fnuz": "float8_e5m2fnuz",
    "c10::Float8_e8m0fnu": "float8_e8m0fnu",
    "c10::Float4_e2m1fn_x2": "float4_e2m1fn_x2",
    "c10::qint8": "qint8",
    "c10::quint8": "quint8",
    "c10::qint32": "qint32",
}
# c10::ScalarType, c10::Layout and c10::MemoryFormat by number, as defined in c10/core.
SCALAR_TYPES = (
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "bool",
    "qint8",
    "quint8",
    "qint32",
    "bfloat16",
    "quint4x2",
    "quint2x4",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "bits8",
    "bits16",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "uint16",
    "uint32",
    "uint64",
    "uint1",
    "uint2",
    "uint3",
    "uint4",
    "uint5",
    "uint6",
    "uint7",
    "int1",
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int7",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
LAYOUTS = (
    "strided",
    "sparse_coo",
    "_mkldnn",
    "sparse_csr",
    "sparse_csc",
    "sparse_bsr",
    "sparse_bsc",
    "jagged",
)
MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
_ENUMS = {"ScalarType": ("dtype", SCALAR_TYPES), "Layout": ("layout", LAYOUTS)} | {
    "MemoryFormat": ("memory_format", MEMORY_FORMATS)
}
_NOT_FINITE = frozenset({"inf", "-inf", "nan", "-nan", "Infinity", "-Infinity", "NaN"})

encode = msgspec.json.Encoder().encode


class RecordedGeometry(Struct, frozen=True, gc=False, cache_hash=True):
    """The geometry of a recorded tensor.

    Attributes:
        shape: Lengths; with another number of elements if they are symbolic.
        strides: In elements; None if the file has none.
        dtype: PyTorch's name of the type.
        span: Elements from its first to its last one, both included.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    span: int


class RecordedTensor(NamedTuple):
    """A tensor in a host trace.

    Attributes:
        number: Its number there; reused after it died.
        storage: The number of its storage; 0 if there is none.
        identity: `storage`, or for a tensor without one (sparse, symbolic) its own number, negated.
        offset: In elements.
        elements: Number of elements of the view.
        item_bytes: Bytes of one element.
        device: Such as `cpu` or `cuda:0`; empty in old files.
        geometry: Shape, strides and type.
        end_bytes: Min bytes of its storage.
    """

    number: int
    storage: int
    identity: int
    offset: int
    elements: int
    item_bytes: int
    device: str
    geometry: RecordedGeometry
    end_bytes: int

    @property
    def is_symbolic(self) -> bool:
        """Whether its lengths were symbols: PyTorch writes neither these nor a storage, whereas
        even a scalar has an element.
        """
        return not (self.storage or self.elements or self.geometry.shape)

    @property
    def is_sparse(self) -> bool:
        """Whether it has elements but no storage of its own: what it holds is in no file."""
        has_elements = bool(self.geometry.shape and self.geometry.span)
        return has_elements and not (self.storage or self.elements)


_new = tuple.__new__

# A tensor's type ("" for none), a list of kinds, or None for any other value.
Kind = str | tuple[Any, ...] | None


@lru_cache(maxsize=65536)
def parse_kinds(types: str | None) -> tuple[Kind, ...]:
    """Returns which of the values are tensors, from the text of `input_types` or `output_types`.

    Example:
        >>> parse_kinds('["GenericList[Tensor(float),Tensor(float)]","Int"]')
        (('float32', 'float32'), None)
    """
    try:
        texts = msgspec.json.decode(types or "[]", type=list)
    except msgspec.DecodeError:
        return ()
    return tuple(_parse_kind(str(text)) for text in texts)


def _parse_kind(text: str) -> Kind:
    """Returns the kind of one value, including nested lists."""
    open_lists: list[list[Kind]] = [[]]
    for word in _WORD.findall(text):
        if word == "[":
            if not open_lists[-1]:
                return None
            open_lists[-1].pop()  # the name of the list precedes it
            open_lists.append([])
        elif word == "]":
            if len(open_lists) == 1:
                return None
            closed_list = tuple(open_lists.pop())
            open_lists[-1].append(closed_list)
        elif word.startswith("Tensor("):
            dtype_name = word[7:-1]
            open_lists[-1].append(
                NO_TENSOR
                if dtype_name.startswith("nullptr")
                else DTYPES.get(dtype_name, dtype_name)
            )
        elif word != ",":
            open_lists[-1].append(None)
    return open_lists[0][0] if open_lists[0] else None


# Positions of tensors among values: the index, and the geometry or, for a list, the layout of its
# items.
Layout = tuple[tuple[int, "RecordedGeometry | Layout"], ...]


def build_layout(kinds: tuple[Kind, ...], shapes: Any, strides: Any) -> Layout:
    """Returns the layout of the tensors among values.

    Args:
        kinds: Kind of each value.
        shapes: Shapes of each value, nested like the values.
        strides: Strides, likewise; None if the file has none.

    Raises:
        TypeError, ValueError, IndexError, KeyError: The shapes do not match the types: a damaged
            file.
    """
    out: list[tuple[int, RecordedGeometry | Layout]] = []
    for index, kind in enumerate(kinds):
        has_strides = kind and isinstance(strides, list) and index < len(strides)
        steps = strides[index] if has_strides else None
        if isinstance(kind, tuple):
            if count_tensors(kind):
                out.append((index, build_layout(kind, shapes[index], steps)))
        elif kind:
            out.append(
                (
                    index,
                    _check_geometry(
                        tuple(shapes[index]),
                        tuple(steps) if isinstance(steps, list) else None,
                        kind,
                    ),
                )
            )
    return tuple(out)


@lru_cache(maxsize=65536)
def _check_geometry(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: str
) -> RecordedGeometry:
    """Returns a validated geometry.

    Raises:
        ValueError, TypeError: A length or stride is not an integer >= 0, or the total exceeds any
            memory.
    """
    shape = _check_lengths(shape)
    steps = None if strides is None else _check_lengths(strides)
    if steps is not None and len(steps) != len(shape):
        steps = None
    spans = (
        (length - 1) * step
        for length, step in zip(shape, steps or compute_contiguous_strides(shape), strict=True)
    )
    span = 0 if 0 in shape else sum(spans) + 1
    if span > _MAX_ELEMENTS:
        raise ValueError("a tensor is larger than any memory")
    return RecordedGeometry(shape, steps, dtype, span)


def list_storages(values: Any, layout: Layout) -> list[int]:
    """Returns the numbers of the storages of all tensors among recorded values; non-numbers are
    skipped.
    """
    out: list[int] = []
    try:
        for index, part in layout:
            if part.__class__ is tuple:
                out += list_storages(values[index], part)
            elif (
                storage := values[index][1]
            ).__class__ is int and -_MAX_ELEMENTS < storage < _MAX_ELEMENTS:
                out.append(storage)
    except (TypeError, IndexError, KeyError):  # values do not match their types
        return []
    return out


def list_tensors(values: Any, layout: Layout) -> list[RecordedTensor]:
    """Returns all tensors among recorded values, including those in lists, in order.

    Args:
        values: As recorded.
        layout: From `build_layout`.

    Raises:
        TypeError, ValueError, IndexError, KeyError: The values do not match their types: a damaged
            file.
    """
    out: list[RecordedTensor] = []
    for index, geometry in layout:
        value = values[index]
        if isinstance(geometry, tuple):
            out += list_tensors(value, geometry)
            continue
        number, storage, offset, elements, item_bytes, device = (
            value if len(value) == 6 else (*value, "")
        )
        if not (
            number.__class__ is storage.__class__ is offset.__class__ is elements.__class__ is int
        ):
            raise TypeError("a tensor's numbers are no whole numbers")
        if not -_MAX_ELEMENTS < storage < _MAX_ELEMENTS:
            raise ValueError("a storage has a number that is none")
        is_symbolic = elements > 1 and not geometry.shape  # symbolic shapes are not written
        part = _check_geometry((elements,), None, geometry.dtype) if is_symbolic else geometry
        item_bytes = int(item_bytes)
        end = part.span and part.span + offset
        if not 0 <= offset < _MAX_ELEMENTS or end > _MAX_ELEMENTS:
            raise ValueError("a tensor is larger than any memory")
        numbers = number, storage, storage or -number, offset, elements, item_bytes
        # The class's own `__new__` is a Python function and takes three times as long.
        out.append(
            _new(
                RecordedTensor,
                (*numbers, str(device), part, end * ITEM_BYTES.get(part.dtype, item_bytes)),
            )
        )
    return out


def _check_lengths(values: tuple[int, ...]) -> tuple[int, ...]:
    integers = tuple(int(value) for value in values)
    if integers != values or any(not 0 <= value < _MAX_ELEMENTS for value in integers):
        raise ValueError("a length is no whole number")
    return integers


@lru_cache(maxsize=65536)
def compute_contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=65536)
def find_unknown_type(types: str | None) -> str | None:
    """Returns the first tensor type among values that PyTorch does not have."""
    return next(
        (kind for kind in _flatten_kinds(parse_kinds(types)) if kind and kind not in ITEM_BYTES),
        None,
    )


@lru_cache(maxsize=65536)
def find_tensor_slots(types: str | None) -> tuple[bool, ...]:
    """Returns whether each of the returned values is a tensor, with lists flattened, in order."""
    return tuple(map(bool, _flatten_kinds(parse_kinds(types))))


def _flatten_kinds(kinds: tuple[Kind, ...]) -> Iterator[str | None]:
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from _flatten_kinds(kind)
        else:
            yield kind


def count_tensors(kind: Kind) -> int:
    return sum(map(bool, _flatten_kinds((kind,))))


def list_observed_numbers(types: str | None) -> list[int]:
    """Returns the numbers that PyTorch's observer gives to the tensors of a node, which also counts
    undefined ones.
    """
    tensors = (kind for kind in _flatten_kinds(parse_kinds(types)) if kind is not None)
    return [number for number, kind in enumerate(tensors) if kind]


def encode_arguments(
    values: list[Any], kinds: tuple[Kind, ...], schema: OperatorSchema, numbers: Mapping[str, float]
) -> tuple[bytes, list[str]]:
    """Returns the arguments of a call as JSON (see `traceloom.workload.replay.plan`), and flags of
    deviations from the actual arguments.

    Tensors are numbered in the order of `list_tensors`, without those that are numbers.

    Args:
        values: As recorded.
        kinds: Kind of each.
        schema: The op.
        numbers: By name of the argument, replacement values of tensors that the program passed as
            plain numbers.
    """
    flags: list[str] = []
    counter = [0]
    typed: list[Any] = []
    for value, kind, argument in zip(values, kinds, schema.arguments, strict=False):
        if argument.name in numbers:
            typed.append(numbers[argument.name])
            flags.append(GUESSED)
            continue
        typed.append(_convert_value(value, kind, argument.type, counter, flags))
        if value == 0 and kind is None and isinstance(value, float) and argument.default != 0:
            # PyTorch writes six decimals: this may have been 1e-8, and a 0 here would cause
            # divisions by 0.
            if argument.name in {"eps", "epsilon"}:
                typed[-1] = argument.default if argument.has_default else 1e-8
            flags.append(ROUNDED)
    return encode(typed), flags


def _convert_value(
    value: Any, kind: Kind, value_type: ValueType, counter: list[int], flags: list[str]
) -> Any:
    if kind == NO_TENSOR:
        return None
    if isinstance(kind, str):
        counter[0] += 1
        return {"tensor": counter[0] - 1}
    inner = value_type.inner[0] if value_type.base == "list" else value_type
    if isinstance(value, list):
        if len(value) > MAX_LIST_LENGTH:
            flags.append(CUT)
        parts = kind if isinstance(kind, tuple) else (None,) * len(value)
        return [
            _convert_value(part, part_kind, inner, counter, flags)
            for part, part_kind in zip(value, parts, strict=False)
        ]
    return _convert_scalar(value, inner.base, flags)


def _convert_scalar(value: Any, base: str, flags: list[str]) -> Any:
    """Converts a value that is neither a tensor nor a list by the type in the schema."""
    if value is None or value == "<None>":
        return None
    if isinstance(value, str):
        if value.startswith("<") and value.endswith(">") and base != "str":
            if base == "Generator":
                return {"generator": None}
            flags.append(UNKNOWN)
            return {"object": value[1:-1]}
        if base == "Device":
            return {"device": value}
        if value in _NOT_FINITE and base in {"float", "Scalar", "number"}:
            return {
                "float": value.replace("Infinity", "inf")
                .replace("NaN", "nan")
                .replace("-nan", "nan")
            }
        return value
    if base in _ENUMS and isinstance(value, int):
        name, names = _ENUMS[base]
        return {name: names[value]} if 0 <= value < len(names) else {"object": f"{base} {value}"}
    if base == "bool" and isinstance(value, int):
        return bool(value)
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if base in {"int", "SymInt"} and is_whole else value


NUMBERS = frozenset({"other", "exponent"})
"""Arguments for which programs write plain numbers."""


class OpKind(NamedTuple):
    """Common properties of calls of one op with the same types of values.

    Attributes:
        schema: Schema of the op.
        refusal: Why it must not be run; None if it may.
        has_numbers: Whether programs pass numbers for some of its tensors.
        strange: A tensor type that PyTorch does not have; None if there is none.
        kinds: Kinds of its inputs.
        plain: Which inputs may contain values other than a tensor.
        slots: Whether each of its outputs is a tensor.
    """

    schema: OperatorSchema
    refusal: Refusal | None
    has_numbers: bool
    strange: str | None
    kinds: tuple[Kind, ...]
    plain: tuple[bool, ...]
    slots: tuple[bool, ...]


@lru_cache(maxsize=65536)
def build_op_kind(text: str, types: str | None, output_types: str | None) -> OpKind:
    """Returns the properties that follow from an op's schema and the types of its values.

    Raises:
        UnreadableSchemaError: The text is not a schema.
    """
    schema, kinds = parse_schema(text), parse_kinds(types)
    return OpKind(
        schema,
        find_refusal(schema),
        any(argument.name in NUMBERS for argument in schema.arguments),
        find_unknown_type(types) or find_unknown_type(output_types),
        kinds,
        tuple(not isinstance(kind, str) for kind in kinds),
        find_tensor_slots(output_types),
    )
