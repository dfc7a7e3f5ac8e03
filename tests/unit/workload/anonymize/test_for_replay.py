"""`--for replay`: shared traces run again, and tell no more than that needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from traceloom.cli import main
from traceloom.errors import UsageError
from traceloom.workload.anonymize.policy import Key, Policy
from traceloom.workload.anonymize.run import Anonymized, anonymize
from traceloom.workload.anonymize.sizes import rewrite_argument
from traceloom.workload.replay.planning import make_plan
from traceloom.workload.replay.schema import parse_schema

LINEAR = "aten::linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"
VIEW = "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)"
CHUNK = "aten::chunk(Tensor(a -> *) self, int chunks, int dim=0) -> Tensor(a)[]"
GELU = 'aten::gelu(Tensor self, *, str approximate="none") -> Tensor'
NORM = "aten::layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, bool cudnn_enable=True) -> Tensor"
EXCHANGE = (
    "c10d::alltoall_base_(Tensor output, Tensor input, __torch__.torch.classes.c10d.ProcessGroup process_group, "
    "int[] output_split_sizes, int[] input_split_sizes, bool async_op=True, int timeout=-1) -> "
    "__torch__.torch.classes.c10d.Work"
)


class Host:
    """A host trace of operators that follow each other."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = [
            self._node(1, "[pytorch|profiler|execution_trace|thread]", "", [], [])
        ]
        self._tensors = 100

    def tensor(self, *shape: int) -> tuple[Any, list[int], list[int], str]:
        """A new tensor in memory of its own: value, shape, strides, type."""
        self._tensors += 1
        count, strides = 1, []
        for length in reversed(shape):
            strides.insert(0, count)
            count *= length
        return (
            [self._tensors, self._tensors + 5000, 0, count, 4, "cpu"],
            list(shape),
            strides,
            "Tensor(float)",
        )

    def op(self, schema: str, inputs: list[Any], outputs: list[Any]) -> None:
        """One more operator; inputs that are no tensors are (value, type)."""
        self.nodes.append(
            self._node(len(self.nodes) + 1, schema.partition("(")[0], schema, inputs, outputs)
        )

    def write(self, path: Path) -> Path:
        document = {"schema": "1.1.1-chakra.0.0.4", "pid": 4000, "nodes": self.nodes}
        path.write_text(json.dumps(document), encoding="utf-8")
        return path

    @staticmethod
    def _node(
        number: int, name: str, schema: str, inputs: list[Any], outputs: list[Any]
    ) -> dict[str, Any]:
        def side(values: list[Any]) -> dict[str, Any]:
            full = [value if len(value) == 4 else (value[0], [], [], value[1]) for value in values]
            return (
                dict(
                    zip(
                        ("values", "shapes", "strides", "types"),
                        map(list, zip(*full, strict=True)),
                        strict=True,
                    )
                )
                if full
                else {"values": [], "shapes": [], "strides": [], "types": []}
            )

        numbers = {"rf_id": number, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1, "fw_tid": 0}
        attributes = [
            {"name": key, "type": "uint64", "value": value} for key, value in numbers.items()
        ]
        attributes.append({"name": "op_schema", "type": "string", "value": schema})
        return {
            "id": number,
            "name": name,
            "ctrl_deps": 1,
            "inputs": side(inputs),
            "outputs": side(outputs),
            "attrs": attributes,
        }


def model(path: Path, *, thirds: bool) -> Path:
    """A layer of 700 features; with `thirds` its output is divided into three."""
    host = Host()
    hidden, weight = host.tensor(11, 31, 700), host.tensor(2100, 700)
    out = host.tensor(11, 31, 2100)
    host.op(LINEAR, [hidden, weight, ("<None>", "None")], [out])
    flat = (out[0], [341, 2100], [2100, 1], out[3])
    host.op(VIEW, [out, ([341, 2100], "GenericList[Int,Int]")], [flat])
    active = host.tensor(341, 2100)
    host.op(GELU, [flat, ("tanh", "String")], [active])
    if thirds:
        parts = [
            ([*active[0][:2], at * 700, 341 * 700, 4, "cpu"], [341, 700], [2100, 1], active[3])
            for at in range(3)
        ]
        several = (
            [part[0] for part in parts],
            [part[1] for part in parts],
            [part[2] for part in parts],
        )
        kind = "GenericList[Tensor(float),Tensor(float),Tensor(float)]"
        host.op(CHUNK, [active, (3, "Int"), (1, "Int")], [(*several, kind)])
        normed = host.tensor(341, 700)
        inputs = [
            parts[0],
            ([700], "GenericList[Int]"),
            ("<None>", "None"),
            ("<None>", "None"),
            (0.012345, "Double"),
            (True, "Bool"),
        ]
        host.op(NORM, inputs, [normed])
    return host.write(path)


def shared(source: Path, output: Path, policy: Policy | None = None) -> Anonymized:
    return anonymize(
        [source], output, (policy or Policy()).for_replay(), Key(b"a key that only tests have")
    )


def shapes_of(path: Path) -> set[tuple[int, ...]]:
    plan = make_plan(path, cache=False)
    return {
        tuple(shape) for rank in plan.ranks.values() for shape in rank.tensors["shape"].to_list()
    }


def test_products_fit_without_any_exact_size(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = shared(model(tmp_path / "rank0.host.json", thirds=False), tmp_path / "out").report
    assert report["leaks"]["shapes"]["kept_factors"] == []
    (rank,) = report["replay"]["ranks"]
    assert (rank["operators"], rank["run"], rank["other_shapes"], rank["left"]) == (3, 3, 0, [])
    (path,) = (tmp_path / "out").iterdir()
    assert shapes_of(path) == {(8, 32, 512), (1024 * 2, 512), (8, 32, 2048), (256, 2048)}


def test_a_factor_stays_where_parts_have_to_add_up(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = shared(model(tmp_path / "rank0.host.json", thirds=True), tmp_path / "out").report
    assert report["leaks"]["shapes"]["kept_factors"] == [3]
    (rank,) = report["replay"]["ranks"]
    assert (rank["operators"], rank["run"], rank["other_shapes"]) == (5, 5, 0)
    assert report["leaks"]["arguments"] == {
        "flags": 1,
        "numbers, replaced": 1,
        "whole numbers": 5,
        "words": 1,
    }
    (path,) = (tmp_path / "out").iterdir()
    assert (256, 512) in shapes_of(path)
    text = path.read_text()
    assert "0.012345" not in text
    assert "700" not in text
    assert '"tanh"' in text


def test_parts_of_an_exchange_add_up(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    host = Host()
    parts = "GenericList[Int,Int]"
    inputs = [
        host.tensor(12, 31),
        host.tensor(12, 31),
        ("<Object>", "Object"),
        ([5, 7], parts),
        ([5, 7], parts),
        (False, "Bool"),
        (-1, "Int"),
    ]
    host.op(EXCHANGE, inputs, [("<Object>", "Object")])
    report = shared(host.write(tmp_path / "rank0.host.json"), tmp_path / "out").report
    assert 31 not in report["leaks"]["shapes"]["kept_factors"]
    (path,) = (tmp_path / "out").iterdir()
    (rank,) = make_plan(path, cache=False).ranks.values()
    assert sum(rank.collectives["splits_in"][0]) == rank.tensors["shape"][0][0]
    assert rank.tensors["shape"][0][1] == 32


def test_without_a_dry_run_all_is_rounded_and_the_report_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    report = shared(model(tmp_path / "rank0.host.json", thirds=True), tmp_path / "out").report
    assert report["replay"]["ranks"] == []
    assert "torch" in report["replay"]["reason"]
    assert report["leaks"]["shapes"]["kept_factors"] == []


def test_the_verb_says_what_runs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    source = model(tmp_path / "rank0.host.json", thirds=True)
    assert main(["anonymize", str(source), "-o", str(tmp_path / "out"), "--for", "replay"]) == 0
    text = capsys.readouterr().out
    assert "rank 0: 5 of 5 operators" in text
    assert "prime factors of sizes that stay, so that all fits: 3" in text
    assert (
        main(
            [
                "anonymize",
                str(source),
                "-o",
                str(tmp_path / "b"),
                "--for",
                "replay",
                "--structure",
                "collapse",
            ]
        )
        == 2
    )


def test_what_the_policy_keeps_stays_kept() -> None:
    policy = Policy(shapes="keep", scalars="keep").for_replay()
    assert (policy.shapes, policy.scalars) == ("keep", "keep")
    with pytest.raises(UsageError, match="cannot be replayed"):
        Policy(structure="collapse").for_replay()


@pytest.mark.parametrize(
    ("schema", "name", "value", "made"),
    [
        (GELU, "approximate", "tanh", "tanh"),
        (GELU, "approximate", "my_secret", None),
        (NORM, "eps", 0.012345, 0.5),
        (NORM, "cudnn_enable", True, True),
        (NORM, "normalized_shape", 700, 1024),
        (CHUNK, "chunks", 3, 3),
        ("aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor", "alpha", 1, 1),
        (
            "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
            "alpha",
            -31337,
            -2,
        ),
        (
            "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
            "alpha",
            3.7,
            2.0,
        ),
        ("aten::arange.start(Scalar start, Scalar end) -> Tensor", "end", 700, 1024),
        ("aten::select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)", "index", 41, 0),
        ("aten::select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)", "index", -3, -1),
        (
            "aten::einsum(str equation, Tensor[] tensors) -> Tensor",
            "equation",
            "bhqd,bhkd->bhqk",
            "abcd,abed->abce",
        ),
        ("aten::einsum(str equation, Tensor[] tensors) -> Tensor", "equation", "secret_name", None),
        (
            "aten::masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor",
            "value",
            "-inf",
            "-inf",
        ),
        ("aten::conv2d(Tensor input, Tensor weight, SymInt[2] stride=1) -> Tensor", "stride", 3, 3),
        (
            "aten::as_strided(Tensor(a) self, SymInt[] size, SymInt[] stride) -> Tensor(a)",
            "stride",
            700,
            1024,
        ),
    ],
)
def test_arguments_become_harmless_ones_of_the_same_role(
    schema: str, name: str, value: Any, made: Any
) -> None:
    operator = parse_schema(schema)
    of = next(each for each in operator.arguments if each.name == name)
    result = rewrite_argument(value, of, operator, lambda size: 1024 if size == 700 else size)
    assert (result, type(result)) == (made, type(made))
