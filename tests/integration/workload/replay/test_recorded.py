"""Workloads recorded here by PyTorch's own observer: all of them plan, are as recorded without content, and run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.profiler import ExecutionTraceObserver  # noqa: E402

from traceloom.workload.replay.dry_run import dry_run  # noqa: E402
from traceloom.workload.replay.planning import Choice, make_plan  # noqa: E402
from traceloom.workload.replay.running import PlanRunner, RunOptions  # noqa: E402

pytestmark = pytest.mark.torch
Steps = Callable[[], object]


def training(model: Any, optimizer: Any, loss: Callable[[], Any]) -> Steps:
    def steps() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            loss().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return steps


def packed_sequences() -> Steps:
    """Lengths that add up and descend, indices that are made of them by arithmetic."""
    table, model, head = (
        nn.Embedding(100, 8, padding_idx=0),
        nn.LSTM(8, 16, batch_first=True),
        nn.Linear(16, 5),
    )
    tokens, lengths = torch.randint(0, 100, (4, 12)), torch.tensor([12, 7, 9, 3])
    classes = torch.randint(0, 5, (4,))
    whole = nn.ModuleList([table, model, head])

    def loss() -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(
            table(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        out, known = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        last = (known - 1).view(-1, 1, 1).expand(-1, 1, 16)
        return functional.cross_entropy(head(out.gather(1, last).squeeze(1)), classes)

    return training(whole, torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9), loss)


def images() -> Steps:
    """Batch norms, dropout, channels last, an optimizer that takes the root of a difference."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.GroupNorm(2, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8, 10),
    ).to(memory_format=torch.channels_last)
    x, classes = (
        torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last),
        torch.randint(0, 10, (4,)),
    )
    optimizer = torch.optim.RMSprop(model.parameters(), centered=True, foreach=True)
    return training(
        model, optimizer, lambda: functional.cross_entropy(model(x), classes, label_smoothing=0.1)
    )


def bags() -> Steps:
    """Offsets of both kinds, probabilities."""
    first, last = (
        nn.EmbeddingBag(50, 8, mode="sum"),
        nn.EmbeddingBag(70, 8, mode="max", include_last_offset=True),
    )
    head = nn.Linear(16, 1)
    model = nn.ModuleList([first, last, head])
    rows, starts = torch.randint(0, 50, (30,)), torch.arange(0, 30, 5)
    others, ends, target = torch.randint(0, 70, (24,)), torch.arange(0, 25, 4), torch.rand(6)

    def loss() -> Any:
        pooled = torch.cat([first(rows, starts), last(others, ends)], 1)
        return functional.binary_cross_entropy(torch.sigmoid(head(pooled).squeeze(1)), target)

    return training(model, torch.optim.Adagrad(model.parameters()), loss)


def masked_attention() -> Steps:
    """A mask, attention with dropout, whose own results the backward reads, a fused optimizer."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2)
    x, mask = torch.randn(2, 10, 16), torch.zeros(2, 10, dtype=torch.bool)
    mask[0, 7:] = True
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    return training(model, optimizer, lambda: model(x, src_key_padding_mask=mask).pow(2).mean())


def half_precision() -> Steps:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    x, classes = torch.randn(8, 16), torch.randint(0, 4, (8,))

    def loss() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.cross_entropy(model(x), classes)

    return training(model, torch.optim.AdamW(model.parameters(), amsgrad=True), loss)


def indices() -> Steps:
    """Indices of all kinds, and tensors that no op filled."""
    table, rows, columns = torch.randn(20, 6), torch.randint(0, 20, (7,)), torch.randint(0, 6, (7,))

    def steps() -> None:
        table[rows], table[rows, columns], table[:, columns]
        table.gather(1, columns.view(1, -1).expand(20, 7)), torch.take(table, rows * 6 + columns)
        zeros = torch.zeros(20, 6)
        zeros[rows] = 1.0
        zeros.index_put_((rows, columns), torch.ones(7), accumulate=True).scatter_(
            1, columns.view(-1, 1), 2.0
        )
        zeros.index_add_(0, rows, torch.ones(7, 6)).index_fill_(0, rows, 3.0)
        (
            functional.one_hot(columns, 6),
            torch.repeat_interleave(table[:3], torch.tensor([3, 1, 4]), 0),
        )
        torch.tensor([1.0, 2.0, 3.0])[torch.tensor([2, 0])], rows // (columns + 1)
        (
            torch.multinomial(table.softmax(1), 2),
            torch.linalg.cholesky(table.T @ table + torch.eye(6)),
            table.abs().sqrt(),
        )

    return steps


@pytest.mark.sampled(5)
@pytest.mark.parametrize("level", ["outermost", "leaf"])
@pytest.mark.parametrize(
    "made", [packed_sequences, images, bags, masked_attention, half_precision, indices]
)
def test_a_recorded_workload_runs_again(
    made: Callable[[], Steps], level: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    steps, path = made(), tmp_path / "rank0.host.json"
    steps()
    observer = ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    steps()
    observer.stop()
    observer.unregister_callback()
    plan = make_plan(path, choice=Choice(level=level))
    (dry,) = dry_run(plan).values()
    refused = {
        left.name for left in dry.left if left.reason not in {"data-dependent", "no-meta-kernel"}
    }
    assert refused <= {"aten::_linalg_check_errors"}  # it says what failed, in words
    assert dry.wrong == ()
    assert dry.fits
    execution = PlanRunner(plan.ranks[0], torch.device("cpu"), RunOptions())
    execution.run_pass()
    assert execution.program.failures == {}
    assert execution.program.replaced == {}
    for tensor in execution.program.registers[: plan.ranks[0].tensors.height]:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            assert not tensor.isnan().any()
