"""Advice after memory ran out: each only where the data supports it, the largest saving first."""

from __future__ import annotations

from typing import Any

import pytest

from traceloom.analyze.host_events import find_user_frame
from traceloom.analyze.memory_snapshot import (
    Advice,
    build_live_tree,
    compute_bytes_by_kind,
    list_advice,
    parse_report_census,
)

MB = 1 << 20
PARTS = {"parameter": 40, "gradient": 30, "optimizer_state": 80, "activation": 200, "other": 50}


def live(**sizes: int) -> dict[str, Any]:
    """A census with one storage of each owner."""
    columns: dict[str, list[Any]] = {
        "address": [],
        "bytes": [],
        "device_type": [],
        "device": [],
        "owner": [],
        "name": [],
    }
    for number, (owner, size) in enumerate(sizes.items(), start=1):
        name = {
            "optimizer_state": "Adam.exp_avg of Net.fc.weight",
            "gradient": "Net.fc.weight.grad",
        }.get(owner, "Net.w")
        row = (
            number,
            size * MB,
            "cuda",
            0,
            owner,
            "kept for backward by Relu" if owner == "activation" else name,
        )
        for values, value in zip(columns.values(), row, strict=True):
            values.append(value)
    return {"live_storages": columns}


def asked(document: dict[str, Any], request: int | None = None, **more: Any) -> dict[str, Advice]:
    census = parse_report_census(document)
    given: dict[str, Any] = {"stack": [], "devices": [], "ranks": None, "growing": [], **more}
    found = list_advice(compute_bytes_by_kind(census), census, requested_bytes=request, **given)
    savings = [item.bytes for item in found if item.bytes is not None]
    assert savings == sorted(savings, reverse=True)
    assert len({item.action for item in found}) == len(found)
    return {item.action: item for item in found}


def test_bytes_by_kind_are_all_storages_the_largest_first() -> None:
    found = compute_bytes_by_kind(parse_report_census(live(**PARTS, mystery=7)))
    assert found == {
        "kept for backward": 200 * MB,
        "optimizer state": 80 * MB,
        "other tensors": 57 * MB,
        "parameters": 40 * MB,
        "gradients": 30 * MB,
    }
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_the_tree_has_owners_at_their_modules_and_adds_up() -> None:
    rows = build_live_tree(parse_report_census(live(**PARTS)))
    sizes = dict(rows.select("path", "bytes").rows())
    assert sizes[""] == 400 * MB == rows["self_bytes"].sum()
    assert sizes["gradients.Net.fc.weight"] == 30 * MB
    assert sizes["optimizer state.Net.fc"] == 80 * MB
    assert sizes["kept for backward.Relu"] == 200 * MB
    assert [row["parent"] is None for row in rows.to_dicts()] == [True] + [False] * (
        rows.height - 1
    )


@pytest.mark.parametrize(
    ("ranks", "saved"),
    [
        (None, None),
        (1, None),
        (2, 40 * MB),
        (3, 80 * MB - 80 * MB // 3),
        (1000, 80 * MB - 80 * MB // 1000),
    ],
)
def test_sharding_saves_what_the_other_ranks_would_hold(
    ranks: int | None, saved: int | None
) -> None:
    found = asked(live(**PARTS), ranks=ranks).get("shard-optimizer-state")
    assert (None if found is None else found.bytes) == saved


def test_each_kind_has_its_advice_and_what_is_not_there_has_none() -> None:
    every = asked(live(**PARTS))
    assert {action: item.bytes for action, item in every.items()} == {
        "checkpoint-activations": 200 * MB,
        "smaller-batch": 100 * MB,
        "drop-kept-tensors": 50 * MB,
        "release-gradients": 30 * MB,
    }
    assert asked(live(parameter=40)) == {}
    assert asked({}) == {}
    assert "release-gradients" not in asked(
        live(**PARTS), stack=["/x/torch/_tensor.py(630): backward"]
    )


def test_storages_of_a_kind_that_this_version_does_not_know_are_other_tensors() -> None:
    found = asked(live(parameter=40, mystery=20))["drop-kept-tensors"]
    assert found.bytes == 20 * MB
    assert "Net.w" in found.why


def test_advice_that_frees_less_than_a_hundredth_is_not_given() -> None:
    assert asked(live(parameter=995, other=5)) == {}
    assert set(asked(live(parameter=980, other=20))) == {"drop-kept-tensors"}


@pytest.mark.parametrize(
    ("device", "actions"),
    [
        (
            {"reserved_bytes": 100, "allocated_bytes": 60, "total_bytes": 100, "free_bytes": 0},
            {"expandable-segments"},
        ),
        (
            {"reserved_bytes": 100, "allocated_bytes": 71, "total_bytes": 100, "free_bytes": 0},
            set(),
        ),
        (
            {"reserved_bytes": 60, "allocated_bytes": 60, "total_bytes": 100, "free_bytes": 0},
            {"other-processes"},
        ),
        (
            {"reserved_bytes": 60, "allocated_bytes": 60, "total_bytes": 100, "free_bytes": 30},
            set(),
        ),
        ({"reserved_bytes": 0, "allocated_bytes": 0, "total_bytes": 0, "free_bytes": 0}, set()),
    ],
)
def test_what_the_allocators_say_supports_two_more(
    device: dict[str, int], actions: set[str]
) -> None:
    in_bytes = {name: value * MB for name, value in device.items()}
    assert set(asked(live(parameter=100), 30 * MB, devices=[in_bytes])) == actions


@pytest.mark.parametrize(("request_mb", "first"), [(500, True), (400, False), (None, False)])
def test_a_request_above_all_that_lives_is_looked_at_first(
    request_mb: int | None, first: bool
) -> None:
    stack = ["/u/train.py(3): main", "/x/site-packages/torch/functional.py(5): einsum"]
    request = None if request_mb is None else request_mb * MB
    found = list(asked(live(**PARTS), request, stack=stack).values())
    assert (found[0].action == "shrink-request") == first
    if first:
        assert found[0].bytes is None
        assert "/u/train.py(3): main" in found[0].text


def test_what_grows_is_one_advice_with_the_sum_of_its_places() -> None:
    growing = [(f"loop.add.{number}", 1.5 * MB, 60 * MB - number) for number in range(3)]
    census = parse_report_census(live(**PARTS))
    found = list_advice(
        compute_bytes_by_kind(census),
        census,
        requested_bytes=None,
        stack=[],
        devices=[],
        ranks=None,
        growing=growing,
    )
    grows = [item for item in found if item.action == "stop-growth"]
    assert [item.bytes for item in grows] == [180 * MB - 3]
    assert grows[0].text.startswith("release what loop.add.0 and 2 other places leave behind")
    # no other advice counts what only an end of the growth frees
    (checkpoint,) = (item for item in found if item.action == "checkpoint-activations")
    activations = compute_bytes_by_kind(census)["kept for backward"]
    assert checkpoint.bytes == activations - (180 * MB - 3)


@pytest.mark.parametrize(
    ("stack", "where"),
    [
        ([], None),
        (
            ["/u/train.py(3): main", "/x/site-packages/torch/nn/functional.py(9): linear"],
            "/u/train.py(3): main",
        ),
        (
            ["/usr/lib/python3.12/runpy.py(8): run", "/x/torch/nn/functional.py(9): linear"],
            "/x/torch/nn/functional.py(9): linear",
        ),
        (
            ["C:\\u\\train.py(3): main", "C:\\py\\Lib\\site-packages\\torch\\x.py(1): f"],
            "C:\\u\\train.py(3): main",
        ),
        (
            ["<frozen runpy>(198): _run_module_as_main", "/u/a.py(1): f", "/u/b.py(2): g"],
            "/u/b.py(2): g",
        ),
    ],
)
def test_the_place_is_the_innermost_line_of_the_users_own(
    stack: list[str], where: str | None
) -> None:
    assert find_user_frame(stack) == where
