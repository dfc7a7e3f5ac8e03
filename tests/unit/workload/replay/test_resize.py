"""Scaled plans against recordings of the scaled program: the same calls on the same shapes."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from support.plans import PlanBuilder, groups, small_plan
from traceloom.errors import UsageError
from traceloom.workload.replay.dry_run import dry_run
from traceloom.workload.replay.plan import RankPlan, ReplayPlan
from traceloom.workload.replay.planning import make_plan
from traceloom.workload.replay.resize import repeat_scope, scale_plan

torch = pytest.importorskip("torch")
VOCABULARY, HEADS = 50, 3


def recorded(folder: Path, *, batch: int = 5, length: int = 7, width: int = 12) -> ReplayPlan:
    """The plan of one training step of a small transformer with these sizes."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(VOCABULARY, width)
    block = torch.nn.TransformerEncoderLayer(width, HEADS, 2 * width, dropout=0.0, batch_first=True)
    head = torch.nn.Linear(width, VOCABULARY)
    parameters = [*embedding.parameters(), *block.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    tokens = torch.randint(VOCABULARY, (batch, length))
    path = folder / f"{batch}-{length}-{width}" / "rank0.host.json"
    path.parent.mkdir()
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    logits = head(block(embedding(tokens)))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    observer.stop()
    observer.unregister_callback()
    return make_plan(path)


def calls(plan: RankPlan) -> Counter[Any]:
    """How often each op runs on which shapes, and gives which."""
    shapes = plan.tensors["shape"].to_list()
    return Counter(
        (name, *(tuple(shapes[tensor]) for tensor in (*inputs, *filter(None, outputs))))
        for name, inputs, outputs in plan.ops.select("name", "inputs", "outputs").iter_rows()
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ReplayPlan:
    return recorded(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ({"batch": 10}, {"batch": Fraction(2)}),
        ({"batch": 2}, {"batch": Fraction(2, 5)}),
        ({"length": 21}, {"factors": {7: Fraction(3)}}),
        ({"batch": 10, "length": 21}, {"batch": Fraction(2), "factors": {7: Fraction(3)}}),
        (
            {"width": 24},
            {"factors": {4: Fraction(2), 12: Fraction(2), 24: Fraction(2), 36: Fraction(2)}},
        ),
    ],
)
def test_a_scaled_plan_is_the_plan_of_the_scaled_program(
    sizes: dict[str, int], how: dict[str, Any], base: ReplayPlan, tmp_path: Path
) -> None:
    changed = scale_plan(base, **how)
    changed.check()
    assert calls(changed.ranks[0]) == calls(recorded(tmp_path, **sizes).ranks[0])
    answer = dry_run(changed)[0]
    assert answer.fits


def test_a_size_that_no_tensor_has_is_refused(base: ReplayPlan) -> None:
    with pytest.raises(UsageError, match="no tensor has a dimension of 777"):
        scale_plan(base, {777: Fraction(2)})
    with pytest.raises(UsageError, match="no tensor has a dimension of 777"):
        scale_plan(base, {777: Fraction(2)}, batch=Fraction(2))


def test_a_size_that_would_be_no_whole_number_is_refused(base: ReplayPlan) -> None:
    with pytest.raises(UsageError, match="no whole number"):
        scale_plan(base, {7: Fraction(1, 3)})


def test_an_op_that_does_not_fit_is_named(base: ReplayPlan) -> None:
    with pytest.raises(UsageError, match=r"aten::\w+ \(node \d+\) does not fit") as error:
        scale_plan(base, {36: Fraction(2)})
    assert error.value.slug == "cannot-resize"


def test_a_plan_without_data_has_no_batch() -> None:
    with pytest.raises(UsageError, match="looks like data"):
        scale_plan(small_plan(), batch=Fraction(2))


def test_a_bucket_grows_with_the_gradients_in_it() -> None:
    build = PlanBuilder()
    bucket = build.tensor(20, external=True)
    storage = build.rows["tensors"][bucket]["storage"]
    first, second = build.view(storage, [2, 6], [6, 1]), build.view(storage, [8], [1], offset=12)
    for part in (first, second):
        build.run("aten::relu_(Tensor(a!) self) -> Tensor(a!)", [{"tensor": 0}], [part], [part])
    build.collective("all_reduce", [bucket], [bucket], bytes=80)
    plan = scale_plan(ReplayPlan({0: build.build()}, groups(1)), {6: Fraction(2)}).ranks[0]
    assert plan.tensors["shape"].to_list() == [[32], [2, 12], [8]]
    assert plan.tensors["offset"].to_list() == [0, 0, 24]
    assert plan.collectives["bytes"].to_list() == [128]


def test_a_scope_is_repeated(base: ReplayPlan) -> None:
    rank = base.ranks[0]
    scoped = ReplayPlan({0: small_plan().ranks[0]}, groups(1))
    ops = scoped.ranks[0].ops.with_columns(scope=scoped.ranks[0].ops["name"])
    scoped.ranks[0] = RankPlan(**{**vars(scoped.ranks[0]), "ops": ops})
    thrice = repeat_scope(scoped, "aten::relu", 3).ranks[0]
    assert thrice.ops["name"].to_list() == ["aten::mm", "aten::relu", "aten::relu", "aten::relu"]
    assert thrice.storages["last_op"].to_list() == [0, 0, 3, 3]
    with pytest.raises(UsageError, match="no op is in a scope"):
        repeat_scope(scoped, "nobody", 2)
    assert rank.ops.height > 10
