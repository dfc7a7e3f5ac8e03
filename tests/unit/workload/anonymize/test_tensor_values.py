"""Recorded values of operators, of any nesting: places, ids and lengths stay, sizes follow the policy, texts go."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from traceloom.workload.anonymize.host_trace import COMMUNICATION_VALUES, GROUP_VALUES, Tensors
from traceloom.workload.anonymize.names import Pseudonyms
from traceloom.workload.anonymize.policy import Key, Policy, RewriteStats
from traceloom.workload.anonymize.sizes import Shapes, round_to_power_of_two

DEVICES = ("cpu", "cuda:0", "cuda", "xpu:12")
SECRETS = ("acme text", "/home/acme/x.py", "acme:0", "<acme>", "cuda:acme", "1.5 acme")


def tensors(**policy: str) -> tuple[Tensors, RewriteStats]:
    chosen, account = Policy(**policy), RewriteStats()
    names = Pseudonyms(Key(b"a key of tests alone"), chosen)
    return Tensors(names, Shapes(chosen), chosen, account), account


def random_value(chance: random.Random, depth: int = 0) -> Any:
    """A tensor, a number, a text, nothing, or a list of such."""
    match chance.randrange(7 if depth < 4 else 6):
        case 0 | 1:
            tensor = [
                chance.randrange(1 << 20),
                chance.randrange(1 << 20),
                chance.choice([0, 700]),
                chance.randrange(9000),
                4,
            ]
            return (
                [*tensor, chance.choice([*DEVICES, "acme:0", "cuda:acme"])]
                if chance.random() < 0.7
                else tensor
            )
        case 2:
            return chance.choice([0, 1, 700, -50_257, 2.5, -1e-6])
        case 3:
            return chance.choice([*SECRETS, "<None>", "", "cuda:1", "-inf", "3.25"])
        case 4:
            return chance.choice([None, True, False])
        case 5:
            return {"acme": 1}
        case _:
            return [random_value(chance, depth + 1) for _ in range(chance.randrange(4))]


def is_tensor(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) in (5, 6)
        and all(type(number) is int for number in value[:5])
        and (all(isinstance(device, str) for device in value[5:]))
    )


def check(before: Any, after: Any, *, keeps: bool, depth: int = 0) -> None:
    """What a value may have become."""
    if is_tensor(before):
        identity, storage, offset, count, width = before[:5]
        assert after[:2] == [identity, storage]
        assert after[2:5] == [round_to_power_of_two(offset), round_to_power_of_two(count), width]
        assert after[5:] == [device if device in DEVICES else "" for device in before[5:]]
    elif isinstance(before, list):
        assert len(after) == len(before)
        for first, other in zip(before, after, strict=True):
            check(first, other, keeps=keeps, depth=depth + 1)
    elif isinstance(before, str):
        plain = before in {"<None>", "", "cuda:1"} or (keeps and before in {"-inf", "3.25"})
        assert after == (before if plain else "")
    elif before is None or isinstance(before, bool):
        assert after is (before if keeps else None)
    elif isinstance(before, dict) or not keeps:
        assert after is None
    elif depth == 0:
        assert after == before
    else:  # numbers in a list are sizes
        assert after == (round_to_power_of_two(before) if isinstance(before, int) else None)


@pytest.mark.parametrize("scalars", ["drop", "keep"])
@pytest.mark.parametrize("seed", range(6))
def test_any_values_keep_their_places_and_tell_no_text(seed: int, scalars: str) -> None:
    chance = random.Random(seed)
    rewriter, _ = tensors(scalars=scalars)
    for _ in range(40):
        values = [random_value(chance) for _ in range(5)]
        made = rewriter.values(values)
        assert len(made) == len(values)
        for before, after in zip(values, made, strict=True):
            check(before, after, keeps=scalars == "keep")
        assert "acme" not in json.dumps(made)


def test_what_is_no_list_of_values_becomes_an_empty_one() -> None:
    rewriter, _ = tensors()
    assert [rewriter.values(value) for value in (None, "acme", {"a": 1}, 7)] == [[], [], [], []]


def test_values_beyond_any_depth_end_in_nothing() -> None:
    rewriter, _ = tensors(scalars="keep")
    deep: Any = 7
    for _ in range(50):
        deep = [deep]
    made = rewriter.values([deep])
    depth = 0
    while isinstance(made, list):
        (made,), depth = made, depth + 1
    assert made is None
    assert depth < 20


def test_what_communication_is_told_stays_numbers_and_names_by_pseudonym() -> None:
    rewriter, _ = tensors()
    (sizes, operation, name, flag, pointer) = rewriter.values(
        [[700, 3], "allreduce", "acme group", True, 123_456], COMMUNICATION_VALUES
    )
    assert sizes == [512, 4]
    assert operation == "allreduce"
    assert "acme" not in name
    assert name == rewriter.values(["acme group"], COMMUNICATION_VALUES)[0]
    assert flag is True
    assert isinstance(pointer, int)


def test_the_list_of_process_groups_keeps_members_and_sizes_alone() -> None:
    rewriter, account = tensors()
    groups = [
        {
            "pg_name": "acme_tp",
            "pg_desc": "acme tensor parallel",
            "backend_id": 3_000_000_000,
            "ranks": [0, 5],
            "backend_config": "cuda:nccl",
            "group_size": 2,
            "group_count": 4,
            "acme": "secret",
        },
        "acme",
        {"pg_name": "acme_tp", "ranks": "acme", "backend_config": "acme"},
    ]
    (made,) = rewriter.values([json.dumps(groups)], GROUP_VALUES)
    first, second = json.loads(made)
    assert (first["ranks"], first["group_size"], first["group_count"], first["backend_config"]) == (
        [0, 5],
        2,
        4,
        "cuda:nccl",
    )
    assert first["pg_name"] == second["pg_name"]
    assert set(second) == {"pg_name"}
    assert "acme" not in made
    assert account.unknown == {
        "process groups.acme",
        "process groups.ranks",
        "process groups.backend_config",
    }
    assert rewriter.values(["acme {", '"acme"', "[" * 100_000], GROUP_VALUES) == ["[]", "[]", "[]"]
    assert account.odd["process groups"] == 2


@pytest.mark.parametrize(
    ("policy", "shapes", "strides"),
    [
        ({}, [[512, 32], []], [[32, 1], []]),
        ({"shapes": "keep"}, [[700, 33], []], [[33, 1], []]),
        ({"shapes": "drop"}, [[], []], [[], []]),
    ],
    ids=["rounded", "kept", "dropped"],
)
def test_shapes_and_strides_go_together(policy: dict[str, str], shapes: Any, strides: Any) -> None:
    rewriter, _ = tensors(**policy)
    recorded = [[700, 33], []]
    assert rewriter.shapes(recorded) == shapes
    assert rewriter.strides([[33, 1], []], recorded) == strides
    for odd in ("acme", {"acme": 1}, None):
        assert rewriter.shapes(odd) == []
        assert rewriter.strides(odd, recorded) == []
    assert rewriter.shapes([["acme"], [1.5]]) == [[], []]


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [(0, 100, 1), (10, 100, 1), (0, 100, 3), (100, 10, -2), (0.0, 1.0, 0.1), (5, 5, 1)],
)
def test_an_arange_makes_as_many_elements_as_its_rounded_output(
    start: float, end: float, step: float
) -> None:
    rewriter, _ = tensors(shapes="bucket")
    kind = "Int" if isinstance(end, int) else "Double"
    schema = "aten::arange.start_step(Scalar start, Scalar end, Scalar step=1) -> Tensor"
    made = rewriter.arguments([start, end, step], f'["{kind}", "{kind}", "{kind}"]', schema)
    count = round_to_power_of_two(max(math.ceil((end - start) / step), 0))
    assert made == [0, count, 1]
    assert [type(value) for value in made] == [type(end)] * 3
