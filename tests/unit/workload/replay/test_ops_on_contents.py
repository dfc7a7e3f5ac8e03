"""PyTorch's own ops take what tensors from outside are made to hold: none of them raises, and numbers stay numbers."""

from __future__ import annotations

from typing import Any

import pytest

from support.plans import PlanBuilder

torch = pytest.importorskip("torch")

from traceloom.workload.replay.contents import settle_contents  # noqa: E402
from traceloom.workload.replay.running import PlanRunner, RunOptions  # noqa: E402

pytestmark = pytest.mark.torch
_T = [{"tensor": number} for number in range(5)]
_ITEM = {"int64": 8, "float32": 4, "bool": 1}
Shape = tuple[int, ...]


def f(*shape: int) -> tuple[str, Shape]:
    """Floats from outside."""
    return "float32", shape


def i(*shape: int) -> tuple[str, Shape]:
    """Integers from outside."""
    return "int64", shape


# The op, its arguments in the order of its schema, what comes from outside, and the shapes of what it gives.
CASES: dict[str, tuple[str, list[Any], list[tuple[str, Shape]], list[Shape]]] = {
    "division rounded down": ("div.Tensor_mode", [*_T[:2], "floor"], [i(3), i(3)], [(3,)]),
    "division cut off": ("div.Tensor_mode", [*_T[:2], "trunc"], [i(3), i(3)], [(3,)]),
    "division in place": ("div_.Tensor_mode", [*_T[:2], "floor"], [i(3), i(3)], [(3,)]),
    "floor division": ("floor_divide", _T[:2], [i(3), i(3)], [(3,)]),
    "remainder": ("remainder.Tensor", _T[:2], [i(3), i(3)], [(3,)]),
    "remainder of a list": ("fmod.Tensor", _T[:2], [i(3), i(3)], [(3,)]),
    "normal by deviations": ("normal.float_Tensor", [0.0, _T[0], None], [f(6)], [(6,)]),
    "normal by both": ("normal.Tensor_Tensor", [*_T[:2], None], [f(6), f(6)], [(6,)]),
    "segments": (
        "segment_reduce",
        [_T[0], "sum", _T[1], None, None, 0, False, None],
        [f(9, 2), i(4)],
        [(4, 2)],
    ),
    "square root by power": ("pow.Tensor_Scalar", [_T[0], 0.5], [f(4)], [(4,)]),
    "logarithm": ("log", _T[:1], [f(4)], [(4,)]),
    "logit": ("logit", [_T[0], None], [f(4)], [(4,)]),
    "poisson": ("poisson", [_T[0], None], [f(4)], [(4,)]),
    "binomial": ("binomial", [*_T[:2], None], [f(4), f(4)], [(4,)]),
    "coins": ("bernoulli", [_T[0], None], [f(5)], [(5,)]),
    "draws": ("multinomial", [_T[0], 3, False, None], [f(2, 5)], [(2, 3)]),
    "bags": (
        "embedding_bag",
        [*_T[:3], False, 0, False, None, False],
        [f(9, 4), i(20), i(5)],
        [(5, 4), (20,), (5,), (5,)],
    ),
    "bags with an end": (
        "embedding_bag",
        [*_T[:3], False, 0, False, None, True],
        [f(9, 4), i(20), i(5)],
        [(4, 4), (20,), (4,), (4,)],
    ),
    "gradient of a table": (
        "embedding_dense_backward",
        [*_T[:2], 9, -1, False],
        [f(20, 4), i(20)],
        [(9, 4)],
    ),
    "classes of pixels": (
        "nll_loss2d",
        [*_T[:2], None, 1, -100],
        [f(2, 5, 3, 3), i(2, 3, 3)],
        [()],
    ),
    "classes of one": ("cross_entropy_loss", [*_T[:2], None, 1, -100, 0.0], [f(9), i()], [()]),
    "equal to a number": ("eq.Tensor", _T[:2], [f(9), i()], [(9,)]),
    "largest beside a number": ("maximum", _T[:2], [i(9), i()], [(9,)]),
    "times a number": ("mul.Tensor", _T[:2], [f(9), i()], [(9,)]),
    "margins": ("multi_margin_loss", [*_T[:2], 1, 1, None, 1], [f(4, 9), i(4)], [()]),
    "taken along": ("take_along_dim", [*_T[:2], 1], [f(4, 9), i(4, 2)], [(4, 2)]),
    "taken from all": ("take", _T[:2], [f(4, 9), i(5)], [(5,)]),
    "reduced by index": (
        "index_reduce",
        [_T[0], 0, *_T[1:3], "prod", True],
        [f(4, 9), i(3), f(3, 9)],
        [(4, 9)],
    ),
    "copied by index": ("index_copy", [_T[0], -1, *_T[1:3]], [f(4, 9), i(3), f(4, 3)], [(4, 9)]),
    "scattered numbers": ("scatter.value", [_T[0], 0, _T[1], 1.0], [f(4, 9), i(2, 9)], [(4, 9)]),
    "put": ("put", [*_T[:3], True], [f(4, 9), i(5), f(5)], [(4, 9)]),
    "pairs of indices": (
        "index_put",
        [_T[0], _T[1:3], _T[3], False],
        [f(4, 9), i(3), i(3), f(3)],
        [(4, 9)],
    ),
    "counted": ("bincount", [_T[0], None, 6], [i(4)], [(6,)]),
    "classes as rows": ("one_hot", [_T[0], 6], [i(4)], [(4, 6)]),
    "unpooled": ("max_unpool2d", [*_T[:2], [6, 6]], [f(1, 2, 3, 3), i(1, 2, 3, 3)], [(1, 2, 6, 6)]),
    "packed": ("_pack_padded_sequence", [*_T[:2], True], [f(3, 7, 2), i(3)], [(15, 2), (7,)]),
    "repeated": ("repeat_interleave.self_Tensor", [*_T[:2], 0, None], [f(3, 2), i(3)], [(9, 2)]),
    "repeated by themselves": ("repeat_interleave.Tensor", [_T[0], None], [i(3)], [(3,)]),
    "normalized by what is kept": (
        "native_batch_norm",
        [*_T[:5], False, 0.1, 1e-5],
        [f(3, 2), f(2), f(2), f(2), f(2)],
        [(3, 2), (0,), (0,)],
    ),
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", CASES)
def test_an_op_runs_on_what_is_made_for_it(name: str) -> None:
    op, arguments, outside, shapes = CASES[name]
    base, _, overload = op.partition(".")
    schema = str(getattr(getattr(torch.ops.aten, base), overload or "default")._schema)
    build = PlanBuilder()
    inputs = [
        build.tensor(*shape, dtype=dtype, item=_ITEM[dtype], external=True)
        for dtype, shape in outside
    ]
    outputs = [
        build.tensor(*shape, dtype=outside[0][0], item=_ITEM[outside[0][0]]) for shape in shapes
    ]
    kept = [build.tensor(*shape, external=True, content="zeros") for shape in shapes[:1]]
    build.run(schema, arguments, inputs, list(outputs))
    copied = "aten::copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)"
    build.run(copied, [*_T[:2], False], [kept[0], outputs[0]], kept)
    plan, _ = settle_contents(build.build())
    plan.check()
    # It ends at the first op that fails, and says so.
    execution = PlanRunner(plan, torch.device("cpu"), RunOptions(strict=True))
    execution.run_pass()
    assert torch.isfinite(execution.program.registers[kept[0]]).all()
