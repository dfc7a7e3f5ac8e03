"""What tensors from outside hold."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from traceloom.workload.replay.contents import generate_content  # noqa: E402


@pytest.mark.torch
def test_contents_are_what_their_consumers_need() -> None:
    floats = generate_content(1000, torch.float32, "floats", seed=1)
    assert float(floats.abs().min()) >= 0.1
    assert float(floats.abs().max()) <= 1
    assert float(floats.min()) < 0 < float(floats.max())
    assert float(generate_content(1000, torch.bfloat16, "positive", seed=1).min()) > 0
    share = generate_content(1000, torch.float64, "probability", seed=1)
    assert float(share.min()) >= 0
    assert float(share.max()) <= 1
    weights = generate_content(200 * 100, torch.float32, "weights", high=200, seed=1).view(200, 100)
    assert (
        0.8 < float((torch.ones(1, 200) @ weights).std()) < 1.25
    )  # sums keep the size of what is summed
    rows = generate_content(1000, torch.int64, "integers", 3, 9, seed=1)
    assert rows.unique().tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert generate_content(5, torch.int32, "offsets", 0, 8, seed=1).tolist() == [0, 2, 4, 6, 8]
    assert generate_content(4, torch.int64, "lengths", 12, 31, seed=1).tolist() == [12, 7, 6, 6]
    assert generate_content(1, torch.int64, "lengths", 5, 5, seed=1).tolist() == [5]
    assert not generate_content(5, torch.int64, "zeros", seed=1).any()
    assert generate_content(4, torch.bool, "integers", 0, 1, seed=1).dtype == torch.bool


@pytest.mark.torch
def test_equal_seeds_give_equal_contents() -> None:
    one, same, other = (
        generate_content(50, torch.float32, "floats", seed=seed) for seed in (7, 7, 8)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    wide = generate_content(50, torch.int64, "integers", -(2**62), 2**63 - 1, seed=1)
    assert int(wide.min()) < 0 < int(wide.max())


@pytest.mark.torch
@pytest.mark.parametrize("name", ["float8_e4m3fn", "complex64", "uint8", "int16", "float16"])
def test_every_type_can_be_filled(name: str) -> None:
    assert generate_content(8, getattr(torch, name), "floats", seed=1).dtype == getattr(torch, name)


@pytest.mark.torch
def test_many_values_repeat_a_block() -> None:
    many = generate_content(2_500_000, torch.float32, "floats", seed=3)
    assert len(many) == 2_500_000
    assert torch.equal(many[:1_000_003], many[1_000_003:2_000_006])
    assert torch.equal(many[2_000_006:], many[: 2_500_000 - 2_000_006])


@pytest.mark.torch
@pytest.mark.parametrize("elements", [1, 2, 3, 7])
def test_lengths_add_up_and_descend_from_the_longest(elements: int) -> None:
    for longest in range(1, 6):
        for total in range(longest + elements - 1, elements * longest + 1):
            lengths = generate_content(
                elements, torch.int64, "lengths", longest, total, seed=1
            ).tolist()
            assert sum(lengths) == total
            assert lengths == sorted(lengths, reverse=True)
            assert lengths[0] == (longest if elements > 1 else total)
            assert min(lengths) > 0


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_offsets_ascend_from_the_first_to_the_last(dtype: str) -> None:
    for elements in range(2, 9):
        for high in (0, 1, 5, 1000, 2**31 - 1):
            offsets = generate_content(
                elements, getattr(torch, dtype), "offsets", 0, high, seed=1
            ).tolist()
            assert (offsets[0], offsets[-1]) == (0, high)
            assert offsets == sorted(offsets)


@pytest.mark.torch
@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 1), (-3, 2), (5, None), (7, 3)])
def test_integers_are_between_their_bounds_and_reach_them(low: int, high: int | None) -> None:
    values = set(generate_content(400, torch.int64, "integers", low, high, seed=2).tolist())
    assert values == set(range(low, max(low, low if high is None else high) + 1))
