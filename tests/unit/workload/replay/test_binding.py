from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

torch = pytest.importorskip("torch")

from traceloom.workload.replay.binding import BindError, bind_call  # noqa: E402
from traceloom.workload.replay.schema import parse_schema  # noqa: E402

pytestmark = pytest.mark.torch
ADD = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
T = [{"tensor": number} for number in range(6)]


def bound(schema: str, *arguments: Any, **about: Any) -> Any:
    return bind_call(schema, json.dumps(arguments), **about)


def schema_here(name: str) -> str:
    packet, _, overload = name.partition(".")
    return str(getattr(getattr(torch.ops.aten, packet), overload or "default")._schema)


def a(*shape: int, seed: int = 0) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def test_tensors_have_places_and_defaults_are_left_out() -> None:
    call = bound(ADD, T[0], T[1], 1)
    assert (call.arguments, call.keywords, call.places) == (
        [None, None],
        {},
        [((0,), 0), ((1,), 1)],
    )
    call = bound(ADD, T[0], T[1], 1.0)  # another type may be another result
    assert call.keywords == {"alpha": 1.0}
    call = bound(schema_here("sum.dim_IntList"), T[0], [0], False, {"dtype": "float64"})
    assert (call.arguments, call.keywords) == ([None, [0]], {"dtype": torch.float64})


def test_tensors_within_lists() -> None:
    call = bound(schema_here("index.Tensor"), T[0], [None, T[1]])
    assert call.places == [((0,), 0), ((1, 1), 1)]
    assert torch.equal(call([a(3, 4), torch.tensor([2, 0])]), a(3, 4)[:, [2, 0]])
    assert call.arguments == [None, [None, None]]


# Overloads with plain calls that do the same. Arguments as a plan has them; inputs as they are made here.
CALLS: list[tuple[str, list[Any], list[Any], Any]] = [
    ("mm", [T[0], T[1]], [a(3, 4), a(4, 2)], lambda x, y: x @ y),
    (
        "addmm",
        [T[0], T[1], T[2], 1, 2],
        [a(2), a(3, 4), a(4, 2)],
        lambda b, x, y: torch.addmm(b, x, y, alpha=2),
    ),
    ("gelu", [T[0], "tanh"], [a(5)], lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ("cat", [[T[0], T[1]], 1], [a(2, 3), a(2, 1)], lambda x, y: torch.cat([x, y], 1)),
    ("split.Tensor", [T[0], 2, 0], [a(5, 2)], lambda x: torch.split(x, 2)),
    (
        "_to_copy",
        [
            T[0],
            {"dtype": "bfloat16"},
            {"layout": "strided"},
            {"device": "cuda:3"},
            True,
            False,
            {"memory_format": "preserve_format"},
        ],
        [a(3)],
        lambda x: x.bfloat16(),
    ),
    (
        "zeros",
        [[2, 3], {"dtype": "complex64"}, None, {"device": "cuda"}, True],
        [],
        lambda: torch.zeros(2, 3, dtype=torch.complex64),
    ),
    (
        "full",
        [[2], {"float": "-inf"}, None, None, None, None],
        [],
        lambda: torch.full((2,), -torch.inf),
    ),
    ("mul.Scalar", [T[0], {"complex": [0.0, 2.0]}], [a(2)], lambda x: x * 2j),
    ("clamp", [T[0], None, 1], [a(4)], lambda x: x.clamp(max=1)),
    (
        "native_layer_norm",
        [T[0], [4], T[1], None, 1e-5],
        [a(3, 4), a(4)],
        lambda x, w: torch.native_layer_norm(x, [4], w, None, 1e-5),
    ),
    (
        "embedding",
        [T[0], T[1], -1, False, False],
        [a(5, 2), torch.tensor([1, 4])],
        lambda w, i: w[i],
    ),
    ("var.correction", [T[0], [1], 1, True], [a(3, 4)], lambda x: x.var(1, keepdim=True)),
    (
        "convolution",
        [T[0], T[1], None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1],
        [a(1, 2, 5, 5), a(3, 2, 3, 3)],
        torch.nn.functional.conv2d,
    ),
    (
        "div.Tensor_mode",
        [T[0], T[1], "floor"],
        [a(4), a(4, seed=1)],
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
    ),
    ("topk", [T[0], 2, -1, True, True], [a(6)], lambda x: torch.topk(x, 2)),
    ("einsum", ["ij,jk->ik", [T[0], T[1]], None], [a(2, 3), a(3, 2)], lambda x, y: x @ y),
    (
        "_index_put_impl_",
        [T[0], [T[1]], T[2], True, True],
        [a(3), torch.tensor([0, 2]), a(2)],
        lambda x, i, v: x.index_put_((i,), v, accumulate=True),
    ),
    (
        "set_.source_Storage_storage_offset",
        [T[0], {"storage": 1}, 1, [2], [1]],
        [torch.empty(0), a(4)],
        lambda x, y: y[1:3],
    ),
    ("pin_memory", [T[0], {"device": "cuda"}], [a(2)], lambda x: x),
    ("_reshape_alias", [T[0], [4], [1]], [a(2, 2)], lambda x: x.view(4)),
    (
        "__and__.Tensor",
        [T[0], T[1]],
        [torch.tensor([3, 5]), torch.tensor([1, 4])],
        lambda x, y: x & y,
    ),
]


@pytest.mark.parametrize(
    ("name", "arguments", "inputs", "plain"), CALLS, ids=[call[0] for call in CALLS]
)
def test_a_bound_call_does_what_the_plain_call_does(
    name: str, arguments: list[Any], inputs: list[Any], plain: Any
) -> None:
    call = bound(schema_here(name), *arguments)
    here, there = call([*map(torch.clone, inputs)]), plain(*map(torch.clone, inputs))
    assert type(here) is type(there) or isinstance(here, list | tuple)
    torch.testing.assert_close(
        list(here) if isinstance(here, list | tuple) else here,
        list(there) if isinstance(there, list | tuple) else there,
    )


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(-2, 1),
    st.booleans(),
    st.sampled_from([None, "float64", "float16"]),
)
def test_any_sum(rows: int, columns: int, dim: int, keepdim: bool, dtype: str | None) -> None:
    call = bound(schema_here("sum.dim_IntList"), T[0], [dim], keepdim, dtype and {"dtype": dtype})
    x = a(rows, columns)
    expected = torch.sum(x, [dim], keepdim, dtype=getattr(torch, dtype) if dtype else None)
    assert torch.equal(call([x]), expected)
    assert call([x]).dtype == expected.dtype


@pytest.mark.parametrize(
    "dtype",
    [
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "uint16",
        "uint32",
        "uint64",
        "complex32",
        "complex128",
        "bool",
        "quint8",
    ],
)
def test_all_types_can_be_named(dtype: str) -> None:
    call = bound(schema_here("empty.memory_format"), [2], {"dtype": dtype})
    assert call.keywords == {"dtype": getattr(torch, dtype)}


def test_what_only_one_device_has_is_dropped() -> None:
    call = bound(
        schema_here("rand.generator"),
        [2],
        {"generator": None},
        None,
        None,
        {"device": "cuda:1"},
        True,
    )
    assert call.keywords == {"generator": None, "device": torch.device("cpu")}
    assert call([]).shape == (2,)


@pytest.mark.parametrize(
    ("older", "arguments", "expected"),
    [
        # an argument that came later is left to its default
        ("aten::gelu(Tensor self) -> Tensor", [T[0]], ([None], {})),
        # an argument that is gone, recorded at its default; another that moved behind the star
        ("aten::relu(Tensor self, bool inplace=False) -> Tensor", [T[0], False], ([None], {})),
        (
            "aten::add.Tensor(Tensor self, Tensor other, Scalar alpha=1) -> Tensor",
            [T[0], T[1], 2],
            ([None, None], {"alpha": 2}),
        ),
        # another name at the same position
        ("aten::mm(Tensor input, Tensor mat2) -> Tensor", [T[0], T[1]], ([None, None], {})),
    ],
)
def test_the_schema_of_another_version(older: str, arguments: list[Any], expected: Any) -> None:
    call = bound(older, *arguments)
    assert (call.arguments, call.keywords) == expected


@pytest.mark.parametrize(
    ("schema", "arguments", "slug", "says"),
    [
        (
            "aten::relu(Tensor self, bool inplace=False) -> Tensor",
            [T[0], True],
            "other-schema",
            "takes no 'inplace'",
        ),
        ("aten::mm(Tensor self) -> Tensor", [T[0]], "other-schema", "'mat2' has no value"),
        (
            "aten::no_such(Tensor self) -> Tensor",
            [T[0]],
            "unknown-op",
            "PyTorch 1.9 recorded it: aten::no_such",
        ),
        ("aten::add.no_such(Tensor self) -> Tensor", [T[0]], "unknown-op", "aten::add.no_such"),
        ("aten::__class__(Tensor self) -> Tensor", [T[0]], "unknown-op", "__class__"),
        ("aten::add.__init__(Tensor self) -> Tensor", [T[0]], "unknown-op", "__init__"),
        ("aten::(", [], "unreadable-schema", "expected"),
        ("fbgemm::dense(Tensor a) -> Tensor", [T[0]], "custom-op", "--import"),
        (ADD, [T[0], T[1], {"object": "Thing"}], "unknown-argument", "'alpha' cannot be given"),
        (ADD, [T[0], T[1], {"dtype": "device"}], "unknown-argument", "'alpha'"),
        # the trace says that it takes a choice; PyTorch knows better
        ("aten::from_file(str mode) -> Tensor", ["/etc/passwd"], "refused-op", "'filename'"),
    ],
)
def test_what_cannot_be_bound_says_why(
    schema: str, arguments: list[Any], slug: str, says: str
) -> None:
    with pytest.raises(BindError) as caught:
        bound(schema, *arguments, recorded_torch="1.9")
    assert caught.value.slug == slug
    assert says in caught.value.text


def test_every_allowed_op_of_pytorch_is_found_by_its_schema() -> None:
    from traceloom.workload.replay.schema import find_refusal

    unknown = []
    for schema in map(str, torch._C._jit_get_all_schemas()):
        parsed = parse_schema(schema)
        if find_refusal(parsed) is None:
            arguments = [
                argument.default if argument.has_default else {"generator": None}
                for argument in parsed.arguments
            ]
            try:
                bound(
                    schema,
                    *(
                        value if not isinstance(value, float) else {"float": "inf"}
                        for value in arguments
                    ),
                )
            except BindError as error:
                unknown.append((schema, error.slug))
    assert unknown == []


EMPTY = "aten::empty.memory_format(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"


@pytest.mark.parametrize(
    ("recorded", "keeps_host", "device"),
    [
        ({"device": "cpu"}, True, "cpu"),
        (None, True, "cpu"),
        ({"device": "cuda:0"}, True, "meta"),
        ({"device": "cpu"}, False, "meta"),
        (None, False, "meta"),
    ],
)
def test_what_was_on_the_host_stays_there_beside_an_accelerator(
    recorded: Any, keeps_host: bool, device: str
) -> None:
    arguments = [[2, 3], {"dtype": "float32"}, None, recorded, None, None]
    made = bind_call(EMPTY, json.dumps(arguments), "meta", keeps_host=keeps_host)([])
    assert made.device.type == device


def test_memory_is_pinned_again_where_the_host_is_kept() -> None:
    schema, arguments = (
        "aten::pin_memory(Tensor(a) self, Device? device=None) -> Tensor(a)",
        '[{"tensor": 0}, null]',
    )
    assert (
        bind_call(schema, arguments, "meta").function
        is bind_call(
            "aten::clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor",
            '[{"tensor": 0}, null]',
        ).function
    )
    assert (
        bind_call(schema, arguments, "meta", keeps_host=True).function
        is torch.ops.aten.pin_memory.default._op
    )
