"""Ops that run as another op that does the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from traceloom.workload.replay.binding import bind_call  # noqa: E402

pytestmark = pytest.mark.torch
T = [{"tensor": number} for number in range(12)]


def called(name: str, arguments: list[Any], inputs: list[Any]) -> Any:
    packet, _, overload = name.partition(".")
    schema = str(getattr(getattr(torch.ops.aten, packet), overload or "default")._schema)
    return bind_call(schema, json.dumps(arguments), "cpu")(inputs)


def a(*shape: int, seed: int = 0) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def test_a_geometry_that_nobody_checked_is_checked() -> None:
    for name in ("_reshape_alias", "_reshape_alias_copy"):
        assert called(name, [T[0], [2, 3], [3, 1]], [torch.arange(6)]).tolist() == [
            [0, 1, 2],
            [3, 4, 5],
        ]
        with pytest.raises(RuntimeError, match="out of bounds"):
            called(name, [T[0], [100], [1]], [torch.ones(1)])


def test_a_view_is_detached() -> None:
    with torch.no_grad():
        assert called("detach_", [T[0]], [torch.ones(4).as_strided([2], [1])]).tolist() == [1, 1]


def test_batch_norms_of_libraries_of_gpus() -> None:
    x, grad, weight, bias, mean, var = a(4, 3, 5), a(4, 3, 5, seed=1), a(3), a(3), a(3), a(3)
    expected = torch.native_batch_norm(x, weight, bias, mean.clone(), var.clone(), True, 0.1, 1e-5)
    for name in ("cudnn_batch_norm", "miopen_batch_norm"):
        out = called(name, [*T[:5], True, 0.1, 1e-5], [x, weight, bias, mean.clone(), var.clone()])
        torch.testing.assert_close(tuple(out)[:3], expected)
    _, save_mean, save_var = expected
    gradients = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, mean, var, save_mean, save_var, True, 1e-5, [True] * 3
    )
    inputs = [x, grad, weight, mean, var, save_mean, save_var, torch.empty(0)]
    torch.testing.assert_close(
        tuple(called("cudnn_batch_norm_backward", [*T[:7], 1e-5, T[7]], inputs)), gradients
    )
    torch.testing.assert_close(
        tuple(called("miopen_batch_norm_backward", [*T[:7], 1e-5], inputs[:7])), gradients
    )


def test_convolutions_of_libraries_of_gpus() -> None:
    x, w = a(1, 4, 6, 6), a(6, 2, 3, 3)
    out = called(
        "cudnn_convolution", [*T[:2], [1, 1], [2, 2], [1, 1], 2, False, False, True], [x, w]
    )
    torch.testing.assert_close(out, torch.nn.functional.conv2d(x, w, None, 2, 1, 1, 2))
    out = called(
        "miopen_convolution", [*T[:3], [0, 0], [1, 1], [1, 1], 2, False, False], [x, w, a(6)]
    )
    torch.testing.assert_close(out, torch.nn.functional.conv2d(x, w, a(6), groups=2))


def test_attention_of_gpus() -> None:
    q, k, v, grad = (a(2, 4, 16, 8, seed=seed) for seed in range(4))
    mask = a(2, 4, 16, 16)
    plain, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    out = called("_scaled_dot_product_flash_attention", [*T[:3], 0.1, True, False], [q, k, v])
    torch.testing.assert_close(out[0], plain)
    masked, masked_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask
    )
    out = called(
        "_scaled_dot_product_efficient_attention", [*T[:4], True, 0.0, False], [q, k, v, mask]
    )
    torch.testing.assert_close(tuple(out)[:2], (masked, masked_lse))
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, plain, lse, 0.0, True
    )
    seeds = [torch.empty(0, dtype=torch.int64)] * 2
    out = called(
        "_scaled_dot_product_flash_attention_backward",
        [*T[:6], None, None, 16, 16, 0.1, True, T[6], T[7]],
        [grad, q, k, v, plain, lse, *seeds],
    )
    torch.testing.assert_close(tuple(out), tuple(gradients))
    out = called(
        "_scaled_dot_product_efficient_attention_backward",
        [*T[:4], None, *T[4:8], 0.0, [True, True, True, False], True],
        [grad, q, k, v, plain, lse, *seeds],
    )
    torch.testing.assert_close(tuple(out)[:3], tuple(gradients))
