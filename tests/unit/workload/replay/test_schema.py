from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, strategies as st

from traceloom.workload.replay.schema import (
    MemoryAlias,
    SchemaArgument,
    UnreadableSchemaError,
    ValueType,
    parse_schema,
)


def test_a_schema_has_names_arguments_and_what_it_writes() -> None:
    add = parse_schema(
        "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"
    )
    assert (add.namespace, add.name, add.overload, add.qualified) == (
        "aten",
        "add_",
        "Tensor",
        "aten::add_.Tensor",
    )
    written = MemoryAlias(frozenset("a"), frozenset("a"), write=True)
    assert add.arguments == (
        SchemaArgument(
            "self",
            ValueType("Tensor", alias=written),
            keyword_only=False,
            has_default=False,
            default=None,
        ),
        SchemaArgument(
            "other", ValueType("Tensor"), keyword_only=False, has_default=False, default=None
        ),
        SchemaArgument(
            "alpha", ValueType("Scalar"), keyword_only=True, has_default=True, default=1
        ),
    )
    assert add.mutates == (0,)
    assert not add.is_view


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Tensor?", ValueType("Tensor", optional=True)),
        ("Tensor[]", ValueType("list", (ValueType("Tensor"),))),
        ("Tensor?[]", ValueType("list", (ValueType("Tensor", optional=True),))),
        ("float[]?", ValueType("list", (ValueType("float"),), optional=True)),
        ("SymInt[2]", ValueType("list", (ValueType("SymInt"),), size=2)),
        ("Tensor[][]", ValueType("list", (ValueType("list", (ValueType("Tensor"),)),))),
        (
            "(Tensor, int)[]",
            ValueType("list", (ValueType("tuple", (ValueType("Tensor"), ValueType("int"))),)),
        ),
        ("Dict(int, Tensor)", ValueType("Dict", (ValueType("int"), ValueType("Tensor")))),
        ("Future(t)", ValueType("Future", (ValueType("t"),))),
        (
            "__torch__.torch.classes.c10d.ProcessGroup",
            ValueType("__torch__.torch.classes.c10d.ProcessGroup"),
        ),
    ],
)
def test_types(kind: str, expected: ValueType) -> None:
    assert parse_schema(f"x::f({kind} value) -> ()").arguments[0].type == expected


def test_what_a_list_is_made_of() -> None:
    lists = parse_schema("x::f(Tensor?[][] a, Dict(int, Tensor)? b) -> ()").arguments
    assert [argument.type.leaf for argument in lists] == ["Tensor", "Dict"]
    assert lists[1].type.bases == {"Dict", "int", "Tensor"}


@pytest.mark.parametrize(
    ("declared", "default"),
    [
        ("int x=-100", -100),
        ("float x=1", 1.0),
        ("float x=1e-05", 1e-05),
        ("float x=9.9999999999999995e-07", 1e-06),
        ("float x=-inf", -float("inf")),
        ("bool x=True", True),
        ("Tensor? x=None", None),
        ("int[2] x=1", [1, 1]),
        ("int[1]? x=None", None),
        ("int[] x=[-2, -1]", [-2, -1]),
        ("int[] x=[]", []),
        ('str x="none"', "none"),
        ('str x="a, \\"b\\")\\n"', 'a, "b")\n'),
        ("MemoryFormat x=contiguous_format", "contiguous_format"),
        ("Scalar x=1.", 1.0),
        ("bool[3] x=[True, False, True]", [True, False, True]),
    ],
)
def test_defaults(declared: str, default: Any) -> None:
    argument = parse_schema(f"x::f({declared}) -> Tensor").arguments[0]
    assert argument.has_default
    assert argument.default == default
    assert type(argument.default) is type(default)


@pytest.mark.parametrize(
    ("text", "returns", "is_view"),
    [
        ("aten::t(Tensor(a) self) -> Tensor(a)", [""], True),
        ("aten::split(Tensor(a -> *) self, int n) -> Tensor(a)[]", [""], True),
        ("aten::relu_(Tensor(a!) self) -> Tensor(a!)", [""], False),
        ("aten::svd(Tensor self) -> (Tensor U, Tensor S, Tensor V)", ["U", "S", "V"], False),
        ("quantized::mul(Tensor qa, Tensor qb) -> Tensor qc", ["qc"], False),
        ("aten::zero(Tensor[] self) -> ()", [], False),
        ("aten::items(Dict(int, t) self) -> ((int, t)[])", [""], False),
        ("aten::as_tensor(Tensor(a) data) -> Tensor(b|a)", [""], True),
    ],
)
def test_returned_values(text: str, returns: list[str], is_view: bool) -> None:
    schema = parse_schema(text)
    assert [value.name for value in schema.returns] == returns
    assert schema.is_view == is_view


def test_older_spellings() -> None:
    old = parse_schema(
        "c10d::allreduce_(Tensor[] tensors, __torch__.torch.classes.c10d.ProcessGroup process_group, "
        "__torch__.torch.classes.c10d.ReduceOp reduce_op, int timeout) "
        "-> (Tensor[], __torch__.torch.classes.c10d.Work)"
    )
    assert [argument.name for argument in old.arguments] == [
        "tensors",
        "process_group",
        "reduce_op",
        "timeout",
    ]
    assert len(old.returns) == 2
    bounds = parse_schema(
        "fbgemm::check(Tensor rows, Tensor(a!) i, Tensor(b!)? weights=None) -> ()"
    )
    assert bounds.mutates == (1, 2)
    assert parse_schema("aten::einsum.sublist(Tensor a, ...) -> Tensor").varargs


@pytest.mark.parametrize(
    "text",
    [
        "",
        "aten::add",
        "add(Tensor a) -> ()",
        "aten::add(Tensor a",
        "aten::add(Tensor a) -> Tensor Tensor Tensor",
        "x::f(int a=) -> ()",
        "x::f(int[ a) -> ()",
        "x::f(int a b) -> ()",
        "x::f(Tensor(a a) -> ()",
        "x::f(int a=1x) -> ()",
        "x::f(int a=[1) -> ()",
        "x::f(" + "(" * 5000,
    ],
)
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(UnreadableSchemaError, match="expected"):
        parse_schema(text)


@given(st.text(alphabet='aT:.(),*=[]?!|->" 12\\', max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(UnreadableSchemaError):
        parse_schema("x::f(" + text)


@pytest.mark.torch
def test_every_registered_schema_is_read_as_pytorch_reads_it() -> None:
    torch = pytest.importorskip("torch")
    for real in torch._C._jit_get_all_schemas():
        schema = parse_schema(str(real))
        assert schema.qualified == real.name + (
            f".{real.overload_name}" if real.overload_name else ""
        )
        assert [a.name for a in schema.arguments] == [a.name for a in real.arguments]
        assert [value.name for value in schema.returns] == [value.name for value in real.returns]
        for ours, theirs in zip(schema.arguments, real.arguments, strict=True):
            assert ours.keyword_only == theirs.kwarg_only
            assert ours.has_default == theirs.has_default_value()
            if ours.has_default:
                assert ours.default == theirs.default_value, schema.text
            alias = theirs.alias_info
            assert ours.type.writes == (alias is not None and alias.is_write)
            if alias is not None and ours.type.alias is not None:
                assert ours.type.alias.sets == alias.before_set
                assert ours.type.alias.after == alias.after_set
