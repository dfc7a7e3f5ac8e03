"""Schemas made at random from the parts that PyTorch's grammar has, read back part by part."""

from __future__ import annotations

import random
from typing import Any

import pytest

from traceloom.workload.replay.schema import NAMESPACES, ValueType, find_refusal, parse_schema

BASES = (
    "Tensor",
    "int",
    "SymInt",
    "float",
    "bool",
    "Scalar",
    "str",
    "ScalarType",
    "Device",
    "Generator",
)
DEFAULTS: dict[str, list[tuple[str, Any]]] = {
    "int": [("0", 0), ("-7", -7)],
    "SymInt": [("1", 1)],
    "float": [("1", 1.0), ("1e-05", 1e-05), ("inf", float("inf"))],
    "bool": [("True", True), ("False", False)],
    "Scalar": [("1", 1), ("0.5", 0.5)],
    "str": [('"mean"', "mean")],
    "ScalarType": [("float", "float")],
    "Device": [('"cpu"', "cpu")],
}


class Argument:
    """An argument as text, and what each part of it is."""

    def __init__(self, chance: random.Random, number: int) -> None:
        self.name = f"x{number}"
        self.base = chance.choice(BASES)
        self.writes = self.base == "Tensor" and chance.random() < 0.3
        self.reads = self.base == "Tensor" and not self.writes and chance.random() < 0.3
        self.depth = chance.choice([0, 0, 0, 1, 2])
        self.optional = chance.random() < 0.3
        self.set = chr(ord("a") + number)
        self.text = self.base + (
            f"({self.set}!)" if self.writes else f"({self.set})" if self.reads else ""
        )
        self.text += "[]" * self.depth + "?" * self.optional
        self.default: tuple[str, Any] | None = None
        if self.optional and chance.random() < 0.5:
            self.default = ("None", None)
        elif self.depth == 0 and self.base in DEFAULTS and chance.random() < 0.5:
            self.default = chance.choice(DEFAULTS[self.base])
        elif self.depth == 1 and self.base == "int" and chance.random() < 0.5:
            self.default = ("[1, -2]", [1, -2])

    def __str__(self) -> str:
        return f"{self.text} {self.name}" + (f"={self.default[0]}" if self.default else "")


def leaf_and_depth(kind: ValueType) -> tuple[ValueType, int]:
    depth = 0
    while kind.base == "list":
        (kind,), depth = kind.inner, depth + 1
    return kind, depth


@pytest.mark.parametrize("seed", range(200))
def test_every_part_of_a_schema_is_read(seed: int) -> None:
    chance = random.Random(seed)
    arguments = [Argument(chance, number) for number in range(chance.randint(0, 6))]
    keywords = chance.randint(0, len(arguments))
    parts = [str(argument) for argument in arguments]
    if keywords:
        parts.insert(len(arguments) - keywords, "*")
    shared = [argument for argument in arguments if argument.reads and not argument.depth]
    returned = chance.choice(
        ["Tensor", "()", "(Tensor, int)", "Tensor[]", *[f"Tensor({a.set})" for a in shared]]
    )
    overload = chance.choice(["", ".out", ".Tensor_Scalar"])
    text = f"aten::op_{seed}{overload}({', '.join(parts)}) -> {returned}"
    schema = parse_schema(text)
    assert schema.qualified == f"aten::op_{seed}{overload}"
    assert schema.text == text
    assert len(schema.arguments) == len(arguments)
    for number, (read, argument) in enumerate(zip(schema.arguments, arguments, strict=True)):
        leaf, depth = leaf_and_depth(read.type)
        assert (read.name, leaf.base, depth) == (argument.name, argument.base, argument.depth)
        assert read.type.leaf == argument.base
        assert read.type.bases == {argument.base}
        assert read.type.optional == argument.optional
        assert read.keyword_only == (number >= len(arguments) - keywords)
        assert (read.has_default, read.default) == (
            argument.default is not None,
            (argument.default or ("", None))[1],
        )
        assert type(read.default) is type((argument.default or ("", None))[1])
        assert read.type.writes == argument.writes
    assert schema.mutates == tuple(at for at, argument in enumerate(arguments) if argument.writes)
    assert schema.is_view == returned.startswith("Tensor(")
    assert len(schema.returns) == {"()": 0, "(Tensor, int)": 2}.get(returned, 1)
    # And what may run is said by these parts alone.
    has_tensor = "Tensor" in returned or any(argument.base == "Tensor" for argument in arguments)
    has_text = any(argument.base == "str" for argument in arguments)
    assert (find_refusal(schema) is None) == (has_tensor and not has_text)
    elsewhere = find_refusal(parse_schema(text.replace("aten::", "mine::")))
    assert elsewhere is not None
    assert elsewhere.slug == "custom-op"
    assert "mine" not in NAMESPACES
    allowed_there = find_refusal(
        parse_schema(text.replace("aten::", "mine::")), frozenset({"mine"})
    )
    assert (allowed_there is None) == (has_tensor and not has_text)
