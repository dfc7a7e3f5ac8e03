"""Operator schemas, and which ops may run.

Planning reads files and needs no torch; only the modules that run a plan import it, when they do.

A text such as `aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)`
declares the inputs and outputs of an operator, and what it writes to. Every syntax since PyTorch
1.13 is supported.

Only ops that compute on tensors may run. An op is refused unless its namespace is allowed, its
types are plain data, it takes or returns a tensor, each text argument is a choice
(`reduction="mean"`), and it is not among the few that follow addresses in their arguments. This
also refuses future ops that take a file name, an object, or a function. The memory that an op may
use is checked when the plan is run.

A schema in a trace is untrusted too: before an op runs, the same checks are applied to PyTorch's
own schema of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

# Quoted text, arrows and ellipses, numbers, names (with `::`, `.` and letters of overloads),
# single characters.
_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|->|\.\.\.|-inf|-?\d[\w.]*(?:(?<=e)[-+]\d+)?|[A-Za-z_][\w.:]*|[^\s]'
)
_HOLDERS = frozenset(
    {"Dict", "Future", "RRef", "Await"}
)  # types have their own brackets, an alias uses those of others
_CONSTANTS = {
    "None": None,
    "True": True,
    "False": False,
    "inf": float("inf"),
    "-inf": -float("inf"),
    "nan": float("nan"),
}


class UnreadableSchemaError(ValueError):
    """A text that is not an operator schema: the expected and the actual token."""


class MemoryAlias(NamedTuple):
    """The memory that a value may share with others.

    Attributes:
        sets: Names of the sets it belongs to; `*` may be anything.
        after: The sets after the call; the same ones unless the text has an arrow.
        write: Whether the op writes to it.
    """

    sets: frozenset[str]
    after: frozenset[str]
    write: bool


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of an argument or a returned value.

    Attributes:
        base: `Tensor`, `int`, `SymInt`, `ScalarType`, ..., a class's full name, `list`, `tuple`, or
            the name before brackets (`Dict`, `Future`).
        inner: Types of its items: one for a list, several for a tuple or a dictionary, else none.
        size: Fixed length of a list, for which a single value may be given too; None: any length.
        optional: Whether None is allowed.
        alias: Its memory; None if not declared.
    """

    base: str
    inner: tuple[ValueType, ...] = ()
    size: int | None = None
    optional: bool = False
    alias: MemoryAlias | None = None

    @property
    def leaf(self) -> str:
        """The innermost item type of a list, or of a list of lists; the base of anything else."""
        return self.inner[0].leaf if self.base == "list" else self.base

    @property
    def bases(self) -> frozenset[str]:
        """Every base within, except for lists and tuples themselves."""
        if not self.inner:
            return frozenset((self.base,))
        own_bases = () if self.base in {"list", "tuple"} else (self.base,)
        return frozenset(own_bases).union(*(part.bases for part in self.inner))

    @property
    def aliases(self) -> tuple[MemoryAlias, ...]:
        own_aliases = () if self.alias is None else (self.alias,)
        return own_aliases + tuple(alias for part in self.inner for alias in part.aliases)

    @property
    def writes(self) -> bool:
        """Whether the op writes to it, or to one of its items."""
        return any(alias.write for alias in self.aliases)


@dataclass(frozen=True, slots=True)
class SchemaArgument:
    """An argument; `default` is valid only with `has_default`."""

    name: str
    type: ValueType
    keyword_only: bool
    has_default: bool
    default: Any


class SchemaReturn(NamedTuple):
    """A returned value; the name is empty if the text has none."""

    name: str
    type: ValueType


@dataclass(frozen=True, slots=True)
class OperatorSchema:
    """The declaration of an operator.

    Attributes:
        text: The schema as given.
        namespace: `aten` of `aten::add.Tensor`.
        name: `add`.
        overload: `Tensor`; empty for the default one.
        arguments: In order.
        returns: In order.
        varargs: Whether it takes additional arguments of any type (`...`).
        mutates: Positions of the arguments that it writes to.
        is_view: Whether a returned value shares memory with an argument that is not written to.
    """

    text: str
    namespace: str
    name: str
    overload: str
    arguments: tuple[SchemaArgument, ...]
    returns: tuple[SchemaReturn, ...]
    varargs: bool
    mutates: tuple[int, ...]
    is_view: bool

    @property
    def qualified(self) -> str:
        """Namespace, name and overload, as PyTorch writes them: `aten::add.Tensor`."""
        return f"{self.namespace}::{self.name}" + (f".{self.overload}" if self.overload else "")


@lru_cache(maxsize=8192)
def parse_schema(text: str) -> OperatorSchema:
    """Parses a schema.

    Raises:
        UnreadableSchemaError: The text is not a schema.
    """
    try:
        return _Scanner(text).schema()
    except RecursionError:
        raise UnreadableSchemaError(
            f"expected an operator schema, got brackets within brackets: {text[:80]!r}"
        ) from None


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _TOKEN.findall(text)
        self.at = 0

    @property
    def next(self) -> str:
        """The next token; empty after the last."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def passes(self, token: str) -> bool:
        """Skips a token if it comes next; returns whether it did."""
        if self.next != token:
            return False
        self.at += 1
        return True

    def need(self, token: str) -> None:
        if not self.passes(token):
            raise UnreadableSchemaError(
                f"expected {token!r}, got {self.next!r} in the schema {self.text!r}"
            )

    def word(self) -> str:
        word = self.next
        if not (word[:1].isalpha() or word[:1] == "_"):
            raise UnreadableSchemaError(
                f"expected a name, got {word!r} in the schema {self.text!r}"
            )
        self.at += 1
        return word

    def schema(self) -> OperatorSchema:
        qualified = self.word()
        namespace, colons, unqualified = qualified.partition("::")
        if not colons or not unqualified:
            raise UnreadableSchemaError(
                f"expected NAMESPACE::NAME, got {qualified!r} in the schema {self.text!r}"
            )
        name, _, overload = unqualified.partition(".")
        arguments, varargs = self.arguments()
        self.need("->")
        returns = self.returns()
        if self.next:
            raise UnreadableSchemaError(
                f"expected the end, got {self.next!r} in the schema {self.text!r}"
            )
        mutates = tuple(index for index, argument in enumerate(arguments) if argument.type.writes)
        read = {
            name
            for argument in arguments
            for a in argument.type.aliases
            if not a.write
            for name in a.sets
        }
        shared = {name for value in returns for alias in value.type.aliases for name in alias.sets}
        is_view = bool(shared & read - {"*"})
        return OperatorSchema(
            self.text, namespace, name, overload, arguments, returns, varargs, mutates, is_view
        )

    def arguments(self) -> tuple[tuple[SchemaArgument, ...], bool]:
        """Parses the parenthesized arguments; returns them, and whether `...` is among them."""
        arguments: list[SchemaArgument] = []
        keyword_only = varargs = False
        self.need("(")
        while not self.passes(")"):
            if self.passes("*"):
                keyword_only = True
            elif self.passes("..."):
                varargs = True
            else:
                kind = self.type()
                # JIT's own operators may omit the name.
                name = self.word() if self.next not in {",", ")", "="} else f"_{len(arguments)}"
                has_default = self.passes("=")
                default = self.default(kind) if has_default else None
                if kind.base == "list" and default is not None and not isinstance(default, list):
                    default = [default] * (
                        kind.size or 1
                    )  # for a list of fixed length (`int[2]=1`)
                arguments.append(SchemaArgument(name, kind, keyword_only, has_default, default))
            if self.next != ")":
                self.need(",")
        return tuple(arguments), varargs

    def returns(self) -> tuple[SchemaReturn, ...]:
        if self.passes("..."):
            return ()
        if self.next != "(":
            kind = self.type()
            return (SchemaReturn(self.word() if self.next else "", kind),)
        values = []
        start = self.at
        self.at += 1
        while not self.passes(")"):
            if self.passes("..."):
                continue
            kind = self.type()
            values.append(SchemaReturn(self.word() if self.next not in {",", ")"} else "", kind))
            if self.next != ")":
                self.need(",")
        if self.next:  # the parenthesized text was a tuple type, such as `((Tensor, t)[])` without its outer ones
            self.at = start
            return (SchemaReturn("", self.type()),)
        return tuple(values)

    def type(self) -> ValueType:
        """Parses a type with its suffixes: alias, `?`, `[]`, `[2]`, in any number."""
        if self.passes("("):
            kind = ValueType("tuple", self.types())
        else:
            base = self.word()
            kind = ValueType(base, self.types() if base in _HOLDERS and self.passes("(") else ())
        while True:
            if self.next == "(":
                kind = ValueType(kind.base, kind.inner, kind.size, kind.optional, self.alias())
            elif self.passes("?"):
                kind = ValueType(kind.base, kind.inner, kind.size, True, kind.alias)
            elif self.passes("["):
                size = int(self.next) if self.next.isdecimal() and len(self.next) < 4 else None
                self.at += size is not None
                self.need("]")
                kind = ValueType("list", (kind,), size)
            else:
                return kind

    def types(self) -> tuple[ValueType, ...]:
        """Parses comma-separated types, up to the closing bracket."""
        inner = []
        while not self.passes(")"):
            inner.append(self.type())
            if self.next != ")":
                self.need(",")
        return tuple(inner)

    def alias(self) -> MemoryAlias:
        """Parses `(a)`, `(a!)`, `(a|b -> *)`, ..."""
        self.need("(")
        sets = [self.alias_set()]
        while self.passes("|"):
            sets.append(self.alias_set())
        write = self.passes("!")
        after = list(sets)
        if self.passes("->"):
            after = [self.alias_set()]
            while self.passes("|"):
                after.append(self.alias_set())
        self.need(")")
        return MemoryAlias(frozenset(sets), frozenset(after), write)

    def alias_set(self) -> str:
        return "*" if self.passes("*") else self.word()

    def default(self, kind: ValueType) -> Any:
        """Parses a default value: numbers by the type, names of enums as text."""
        if self.passes("["):
            items = []
            while not self.passes("]"):
                items.append(self.default(kind.inner[0] if kind.inner else kind))
                if self.next != "]":
                    self.need(",")
            return items
        token = self.next
        self.at += 1
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token[:1].isalpha() or token[:1] == "_":
            return token
        try:
            value = ast.literal_eval(token)
        except (SyntaxError, ValueError):
            raise UnreadableSchemaError(
                f"expected a default value, got {token!r} in {self.text!r}"
            ) from None
        return float(value) if kind.leaf == "float" and type(value) is int else value


OWN_MODULES = {
    "_dtensor": "torch.distributed.tensor",
    "ao": "torch._functorch._activation_offloading.offload_ops",
    "bucketing": "torch._inductor.fx_passes.bucketing",
    "fsdp": "torch.distributed.fsdp",
    "quantized_decomposed": "torch.ao.quantization.fx._decomposed",
    "torch_attn": "torch.nn.attention.varlen",
}
"""Modules of PyTorch that bring ops of their own when they are imported, by namespace."""
NAMESPACES = frozenset({"aten", "prims", *OWN_MODULES})


def find_own_modules(schemas: Iterable[str]) -> dict[str, str]:
    """Returns the modules of PyTorch that bring the ops of some schemas, by namespace."""
    namespaces = {schema.partition("::")[0] for schema in schemas}
    return {name: module for name, module in OWN_MODULES.items() if name in namespaces}


# Allowed types of values. Dictionaries, classes, futures, streams, enums and values of any type are
# not data.
_DATA = frozenset(
    {
        "Tensor",
        "int",
        "SymInt",
        "float",
        "SymFloat",
        "bool",
        "SymBool",
        "Scalar",
        "number",
        "complex",
        "str",
        "ScalarType",
        "Layout",
        "MemoryFormat",
        "Device",
        "Generator",
        "QScheme",
        "Storage",
    }
)
# Arguments whose text selects a variant of the computation.
CHOICES = frozenset(
    {
        "UPLO",
        "activation",
        "algorithm",
        "approximate",
        "attr",
        "binary_attr",
        "driver",
        "equation",
        "indexing",
        "interpolation",
        "mode",
        "norm",
        "ord",
        "p",
        "pad_mode",
        "padding",
        "padding_mode",
        "padding_side",
        "reduce",
        "rounding_mode",
        "side",
        "unary_algorithm",
        "unary_attr",
    }
)
# Their tensors hold the address of an object, or unchecked indices and offsets: with other contents
# they access foreign memory.
_UNSAFE = frozenset(
    {
        "aten::_nested_view_from_buffer",
        "aten::_nested_view_from_buffer_copy",
        "aten::_sparse_bsc_tensor_unsafe",
        "aten::_sparse_bsr_tensor_unsafe",
        "aten::_sparse_compressed_tensor_unsafe",
        "aten::_sparse_coo_tensor_unsafe",
        "aten::_sparse_csc_tensor_unsafe",
        "aten::_sparse_csr_tensor_unsafe",
        "aten::_unsafe_index",
        "aten::_unsafe_index_put",
        "aten::_unsafe_masked_index",
        "aten::_unsafe_masked_index_put_accumulate",
        "aten::_wrapped_quantized_linear_prepacked",
        "aten::fbgemm_linear_fp16_weight",
        "aten::fbgemm_linear_fp16_weight_fp32_activation",
        "aten::fbgemm_linear_int8_weight",
        "aten::fbgemm_linear_int8_weight_fp32_activation",
        "aten::quantized_gru_cell",
        "aten::quantized_lstm_cell",
        "aten::quantized_rnn_relu_cell",
        "aten::quantized_rnn_tanh_cell",
    }
)

NEVER_GIVEN = frozenset({"pin_memory", "unsafe"})
"""Arguments that are left to their defaults: pinning is of one device alone, and indices are always
checked.
"""


class Refusal(NamedTuple):
    """Why an op is not run: `custom-op` if the user may allow its namespace, `refused-op` if it is
    never allowed.
    """

    slug: str
    text: str


def find_refusal(
    schema: OperatorSchema, extra_namespaces: frozenset[str] = frozenset()
) -> Refusal | None:
    """Returns why an op must not be run; None if it may.

    Args:
        schema: The op.
        extra_namespaces: Namespaces that the user allows in addition to `NAMESPACES`: those of
            imported modules.
    """
    if schema.namespace not in NAMESPACES | extra_namespaces:
        return Refusal(
            "custom-op",
            f"ops of the namespace {schema.namespace!r} run only with --import and the module that brings them",
        )
    name = f"{schema.namespace}::{schema.name}"
    if name in _UNSAFE:
        return Refusal("refused-op", f"{name} follows addresses or indices that it does not check")
    types = [argument.type for argument in schema.arguments] + [
        value.type for value in schema.returns
    ]
    bases = {base for kind in types for base in kind.bases}
    if schema.varargs or bases - _DATA:
        return Refusal(
            "refused-op",
            f"{name} takes or gives what is no plain data: {', '.join(sorted(bases - _DATA)) or 'anything'}",
        )
    if "Tensor" not in bases:
        return Refusal("refused-op", f"{name} computes on no tensor")
    for argument in schema.arguments:
        if "str" in argument.type.bases and argument.name not in CHOICES:
            return Refusal(
                "refused-op", f"{name} takes a text that is no choice: {argument.name!r}"
            )
    return None
