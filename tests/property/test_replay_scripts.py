"""Scripts of a replay: recorded programs, whose stretches repeat, give the same numbers as text; names stay text."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, strategies as st

from support.plans import small_plan
from traceloom.workload.replay.planning import make_plan
from traceloom.workload.replay.script import write_script, write_worst

SIZE = 5
NAMES = {"mm": 2, "add": 2, "relu_": 1, "tanh": 1, "t": 1, "clone": 1, "sub": 2}


class Watched:
    """Stands for `torch.ops.aten` in a script: notes the sum of every result."""

    def __init__(self, of: Any, sums: list[str]) -> None:
        self._of, self._sums = of, sums

    def __getattr__(self, name: str) -> Any:
        return Watched(getattr(self._of, name), self._sums)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result = self._of(*arguments, **named)
        self._sums.append(repr(float(result.double().sum())))
        return result


def layered(seed: int, length: int, layers: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Layers of the same ops: operands are 0 (what the layer gets), 1 and 2 (from outside), 3, 4, ... (made before)."""
    chance = random.Random(seed)
    layer = []
    for number in range(3, 3 + length):
        name = chance.choice(list(NAMES))
        layer.append(
            (
                name,
                tuple(
                    chance.randrange(0 if name != "relu_" else 3, number) if number > 3 else 0
                    for _ in range(NAMES[name])
                ),
            )
        )
    return [layer] * layers


@pytest.mark.torch
@given(seed=st.integers(0, 10**6), length=st.integers(1, 14), layers=st.integers(1, 5))
def test_a_script_gives_the_numbers_of_the_program(
    seed: int, length: int, layers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    torch = pytest.importorskip("torch")

    def run(sums: list[str] | None) -> None:
        torch.manual_seed(seed)
        x, *outside = (torch.rand(SIZE, SIZE) for _ in range(3))
        made = [x, *outside]
        if sums is not None:
            sums += [repr(float(tensor.double().sum())) for tensor in made]
        for layer in layered(seed, length, layers):
            registers = [x, *outside]
            for name, operands in layer:
                chosen = [registers[operand] for operand in operands]
                registers.append(getattr(chosen[0], name)(*chosen[1:]))
                if sums is not None:
                    sums.append(repr(float(registers[-1].double().sum())))
            x = registers[-1]

    path: Path = tmp_path_factory.mktemp("script") / "rank0.host.json"
    expected: list[str] = []
    with torch.no_grad():
        run(expected)
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
        observer.start()
        run(None)
        observer.stop()
        observer.unregister_callback()
        script: dict[str, Any] = {"__name__": "script"}
        exec(compile(write_script(make_plan(path)), "script.py", "exec"), script)
        sums: list[str] = []
        script["aten"] = Watched(script["aten"], sums)
        w = script["outside"]()
        torch.manual_seed(seed)
        script["step"](w)
    assert sums == expected


@given(text=st.text(max_size=300), where=st.sampled_from(["scope", "phase", "name", "source"]))
def test_no_name_becomes_code(text: str, where: str) -> None:
    plan = small_plan()
    if where == "source":
        plan = replace(plan, source=text)
    else:
        ops = plan.ranks[0].ops.with_columns(
            pl.lit(text).alias(where), pl.lit([5], pl.List(pl.Int64)).alias("durations_ns")
        )
        plan = replace(plan, ranks={0: replace(plan.ranks[0], ops=ops)})
    for written, of_plain in (
        (write_script(plan), write_script(small_plan())),
        (write_worst(plan, None, 2), write_worst(small_plan(), None, 2)),
    ):
        assert written.isascii()

        def identifiers(code: str) -> set[str]:
            nodes = list(ast.walk(ast.parse(code)))
            return {n.id for n in nodes if isinstance(n, ast.Name)} | {
                n.attr for n in nodes if isinstance(n, ast.Attribute)
            }

        assert identifiers(written) == identifiers(of_plain)
