"""FLOPs of recorded runs against `torch.utils.flop_counter`, which counts while the same code runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import traceloom
from traceloom.analyze.modelled_calls import find_modelled_calls

torch = pytest.importorskip("torch")
F = torch.nn.functional


def counted_by_torch(run: Callable[[], Any]) -> dict[str, int]:
    """By operator packet, `aten.mm`; matrix work only, as torch counts."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return {str(op): flops for op, flops in counter.get_flop_counts().get("Global", {}).items()}


def recorded(run: Callable[[], Any], folder: Path) -> pl.DataFrame:
    """Outermost modelled calls of a recorded run: name, flops, bytes, matrix."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profiler:
        run()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    trace = traceloom.load(path).traces[0]
    found = find_modelled_calls(trace)
    own = [at for at in range(found.owner.size) if found.owner[at] == at]
    group = pl.DataFrame({"group": pl.Series(found.group[own]).cast(pl.UInt32)})
    return group.join(found.groups, on="group", maintain_order="left")


def matrix_flops(calls: pl.DataFrame) -> int:
    return int(calls.filter("matrix")["flops"].sum())


def both(run: Callable[[], Any], folder: Path) -> tuple[int, int]:
    return matrix_flops(recorded(run, folder)), sum(counted_by_torch(run).values())


def leaf(*shape: int) -> Any:
    return torch.randn(*shape, requires_grad=True)


PRODUCTS = {
    "mm": lambda: torch.mm(torch.ones(7, 5), torch.ones(5, 11)),
    "addmm": lambda: torch.addmm(torch.ones(11), torch.ones(7, 5), torch.ones(5, 11)),
    "bmm": lambda: torch.bmm(torch.ones(3, 7, 5), torch.ones(3, 5, 11)),
    "baddbmm": lambda: torch.baddbmm(
        torch.ones(3, 7, 11), torch.ones(3, 7, 5), torch.ones(3, 5, 11)
    ),
    "linear": lambda: F.linear(torch.ones(2, 3, 5), torch.ones(11, 5), torch.ones(11)),
    "matmul of batches that broadcast": lambda: torch.ones(2, 1, 7, 5) @ torch.ones(3, 5, 11),
    "matmul of a matrix and a vector": lambda: torch.ones(7, 5) @ torch.ones(5),
    "linear, forward and backward": lambda: (
        F.linear(leaf(7, 5), leaf(11, 5), leaf(11)).sum().backward()
    ),
    "bmm, forward and backward": lambda: torch.bmm(leaf(3, 7, 5), leaf(3, 5, 11)).sum().backward(),
    "einsum": lambda: torch.einsum("bij,bkj->bik", torch.ones(3, 7, 5), torch.ones(3, 11, 5)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PRODUCTS)
def test_matrix_products(name: str, tmp_path: Path) -> None:
    ours, theirs = both(PRODUCTS[name], tmp_path)
    if name == "matmul of a matrix and a vector":
        theirs = 2 * 7 * 5  # torch does not count aten::mv
    assert ours == theirs > 0


CONVOLUTIONS = {
    "conv2d": lambda: F.conv2d(leaf(2, 4, 17, 15), leaf(8, 4, 3, 5)),
    "stride, padding and dilation": lambda: F.conv2d(
        leaf(2, 4, 17, 15),
        leaf(8, 4, 3, 3),
        leaf(8),
        stride=(2, 3),
        padding=(1, 2),
        dilation=(2, 1),
    ),
    "groups": lambda: F.conv2d(leaf(2, 4, 17, 15), leaf(8, 2, 3, 3), groups=2),
    "depthwise": lambda: F.conv2d(leaf(2, 4, 9, 9), leaf(4, 1, 3, 3), groups=4),
    "conv1d": lambda: F.conv1d(leaf(2, 4, 17), leaf(8, 4, 3), stride=2),
    "conv3d": lambda: F.conv3d(leaf(1, 2, 5, 6, 7), leaf(3, 2, 2, 3, 3), padding=1),
    "same padding": lambda: F.conv2d(leaf(2, 4, 9, 9), leaf(8, 4, 3, 3), padding="same"),
    "transposed": lambda: F.conv_transpose2d(
        leaf(2, 4, 9, 7), leaf(4, 6, 3, 3), stride=2, padding=1, output_padding=1
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_forward(name: str, tmp_path: Path) -> None:
    ours, theirs = both(CONVOLUTIONS[name], tmp_path)
    assert ours == theirs > 0


@pytest.mark.parametrize(
    "name", [name for name in CONVOLUTIONS if name not in ("groups", "depthwise")]
)
def test_convolutions_backward(name: str, tmp_path: Path) -> None:
    ours, theirs = both(lambda: CONVOLUTIONS[name]().sum().backward(), tmp_path)
    assert ours == theirs > 0


@pytest.mark.parametrize("name", ["groups", "depthwise"])
def test_each_gradient_of_a_grouped_convolution_costs_the_forward_pass(
    name: str, tmp_path: Path
) -> None:
    forward = matrix_flops(recorded(CONVOLUTIONS[name], tmp_path))
    assert (
        matrix_flops(recorded(lambda: CONVOLUTIONS[name]().sum().backward(), tmp_path))
        == 3 * forward
    )


def test_a_gradient_that_nobody_asks_for_costs_nothing(tmp_path: Path) -> None:
    def run() -> None:
        F.conv2d(torch.ones(2, 4, 17, 15), leaf(8, 4, 3, 3)).sum().backward()

    ours, theirs = both(run, tmp_path)
    assert ours == theirs > 0


def attention(backend: str, queries: int = 24, keys: int = 24, **options: Any) -> Callable[[], Any]:
    def run() -> Any:
        chosen = getattr(torch.nn.attention.SDPBackend, backend)
        with torch.nn.attention.sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(
                leaf(2, 4, queries, 16), leaf(2, 4, keys, 16), leaf(2, 4, keys, 16), **options
            )

    return run


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
@pytest.mark.parametrize("keys", [24, 40])
def test_attention_forward(backend: str, keys: int, tmp_path: Path) -> None:
    ours, theirs = both(attention(backend, keys=keys), tmp_path)
    assert ours == 2 * 2 * 4 * 24 * keys * (16 + 16)
    if backend == "MATH":  # torch counts no flash attention of the CPU
        assert ours == theirs


def test_attention_backward_of_the_mathematical_form(tmp_path: Path) -> None:
    ours, theirs = both(lambda: attention("MATH")().sum().backward(), tmp_path)
    assert ours == theirs > 0


def test_flash_attention_backward_does_the_scores_again(tmp_path: Path) -> None:
    calls = recorded(lambda: attention("FLASH_ATTENTION")().sum().backward(), tmp_path).filter(
        "matrix"
    )
    product = 2 * 2 * 4 * 24 * 24 * 16
    assert calls["flops"].to_list() == [2 * product, 5 * product]
    assert calls["recomputed"].to_list() == [0, product]


def test_the_registered_formula_of_torch_agrees_on_flash_attention_backward() -> None:
    from torch.utils.flop_counter import sdpa_backward_flop_count

    shape = (2, 4, 24, 16)
    assert sdpa_backward_flop_count(shape, shape, shape, shape) == 5 * 2 * 2 * 4 * 24 * 24 * 16


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
def test_causal_attention_counts_the_pairs_that_the_mask_leaves(
    backend: str, tmp_path: Path
) -> None:
    calls = recorded(attention(backend, is_causal=True), tmp_path)
    assert matrix_flops(calls) == 2 * 2 * 4 * (24 * 25 // 2) * (16 + 16)


def test_causal_attention_with_more_keys_than_queries(tmp_path: Path) -> None:
    """The recorded mask of the mathematical form begins at the first key: query i sees keys 0..i."""
    left = torch.ones(24, 40, dtype=torch.bool).tril()
    calls = recorded(attention("MATH", keys=40, is_causal=True), tmp_path)
    assert matrix_flops(calls) == 2 * 2 * 4 * int(left.sum()) * (16 + 16)


def test_a_whole_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 7 * 7, 32),
        torch.nn.LayerNorm(32),
        torch.nn.GELU(),
        torch.nn.Linear(32, 10),
    )

    def run() -> None:
        network.zero_grad()
        F.cross_entropy(
            network(torch.ones(4, 3, 15, 15)), torch.zeros(4, dtype=torch.long)
        ).backward()

    ours, theirs = both(run, tmp_path)
    assert ours == theirs > 0


def test_bytes_are_every_operand_once(tmp_path: Path) -> None:
    def run() -> None:
        torch.mm(torch.ones(7, 5), torch.ones(5, 11))
        torch.ones(6, 1, 4).expand(6, 8, 4) + torch.ones(8, 4)
        F.softmax(torch.ones(3, 9), dim=1)
        torch.ones(3, 9).sum(dim=1)
        F.embedding(torch.tensor([1, 2, 2]), torch.ones(10, 6))

    calls = recorded(run, tmp_path)
    bytes_of = dict(zip(calls["name"], calls["bytes"], strict=True))
    assert bytes_of["aten::mm"] == 4 * (35 + 55 + 77)
    assert bytes_of["aten::add"] == 4 * (
        6 * 4 + 8 * 4 + 6 * 8 * 4
    )  # an expanded input lies once in memory
    assert bytes_of["aten::softmax"] == 4 * 2 * 27
    assert bytes_of["aten::sum"] == 4 * (27 + 3)
    assert bytes_of["aten::embedding"] == 4 * 2 * 3 * 6 + 8 * 3


def test_lists_of_tensors_without_a_kernel_are_not_guessed(tmp_path: Path) -> None:
    calls = recorded(lambda: torch.cat([torch.ones(3), torch.ones(4)]), tmp_path)
    assert "aten::cat" not in calls["name"].to_list()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stacks", [True, False])
def test_recomputation_of_a_real_run_counts_for_hfu_alone(
    reentrant: bool, stacks: bool, tmp_path: Path
) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(3)])
    product = 2 * 64 * 32 * 32

    def train(*, again: bool) -> dict[str, Any]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(
            activities=activities, record_shapes=True, with_stack=stacks
        ) as profiler:
            x = torch.ones(64, 32, requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
            x.square().mean().backward()
        path = tmp_path / f"{again}.json"
        profiler.export_chrome_trace(str(path))
        return traceloom.analyze.roofline(
            traceloom.load(path).traces[0], "fp32=1e12,memory=1e12"
        ).whole.row(0, named=True)

    plain, repeated = train(again=False), train(again=True)
    assert plain["model_flops"] == plain["hardware_flops"] == 9 * product
    assert repeated["model_flops"] == 9 * product
    assert repeated["hardware_flops"] == 12 * product
    assert repeated["mfu"] == pytest.approx(0.75 * repeated["hfu"])
