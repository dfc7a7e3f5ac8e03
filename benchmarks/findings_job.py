"""A small training job with one planted fault, for `findings_truth.py`: `python findings_job.py
FAULT [fixed]`.

With `fixed` the fault is mended the way its finding advises; all else is the same. Without, all
steps up to FROM have the fault, which are those that are recorded; after them steps with and
without it take turns (even steps have it), so that what the fix saves is told by neighbours and not
by two runs. Of several ranks the last one is late (`straggler`: it sleeps, `busy`: it computes),
data parallel or, with `-fsdp` behind the fault, sharded.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

FAULTS = (
    "none",
    "sleep",
    "loader",
    "workers",
    "elements",
    "python",
    "recomputation",
    "item",
    "straggler",
    "busy",
    "copies",
    "tiny",
)
STEPS, FROM, BATCH = 100, 30, 64
# where ranks share processors a narrow model: what one rank waits for, the others would compute in
WIDTH = 256 if int(os.environ.get("WORLD_SIZE", "1")) <= (os.cpu_count() or 1) else 32


def broken(number: int) -> bool:
    """Whether a step has the fault."""
    return "fixed" not in sys.argv[2:] and (
        number < FROM or number % 2 == 0 or sys.argv[1] == "workers"
    )


class Rows(Dataset):
    """Rows that take a while to make."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return BATCH * (STEPS + 8)

    def __getitem__(self, at: int) -> torch.Tensor:
        if self.seconds and broken(at // BATCH):
            time.sleep(self.seconds)
        return torch.full((WIDTH,), float(at % 7))


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


class Model(nn.Module):
    """Some blocks, whose activations are kept or computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.again = False
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def loader(fault: str) -> DataLoader:
    """Batches: slow ones made by the main thread, or by too few workers, or fast ones."""
    if fault == "workers":
        return DataLoader(Rows(0.0004), batch_size=BATCH, num_workers=1)
    return DataLoader(Rows(0.00015 if fault == "loader" else 0.0), batch_size=BATCH)


def first_of_all() -> None:
    """Take the processor before others do, where that is allowed: times on a busy machine are of
    the others.
    """
    if os.environ.get("FINDINGS_FIRST"):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def late() -> bool:
    """Whether this is the rank that is late: the last one."""
    return int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1 > 0


def sharded(model: Model) -> nn.Module:
    """The model with its blocks spread over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def extra(fault: str, batch: torch.Tensor, *, wrong: bool) -> None:
    """What the fault does before the forward pass."""
    if fault == "elements":
        values = batch[:6].flatten()
        _ = sum(float(value) for value in values) if wrong else float(values.sum())
    elif not wrong:
        return
    elif fault == "sleep":
        time.sleep(0.010)
    elif fault == "straggler" and late():
        time.sleep(0.050)  # longer than two ranks wait for each other on two busy processors
    elif fault == "busy" and late():
        some, ends = (
            batch,
            time.thread_time() + 0.050,
        )  # so much of the processor, however long that takes
        while time.thread_time() < ends:
            some = torch.tanh(some)
    elif fault == "copies":
        for _ in range(30):
            _ = batch.repeat(8, 1).t().contiguous().clone()
    elif fault == "tiny":
        value = batch[0]
        for _ in range(300):
            value = value * 1.0001 + 0.0001
    elif fault == "python":
        _ = sum(value * value for value in range(100_000))


def main() -> None:
    """Train."""
    fault = sys.argv[1].removesuffix("-fsdp")
    torch.set_num_threads(1)
    first_of_all()
    inner = Model()
    model: nn.Module = inner
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        spread = sys.argv[1].endswith("-fsdp")
        model = sharded(inner) if spread else nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for number, batch in enumerate(loader(fault)):
        if number == STEPS:
            break
        wrong = broken(number)
        inner.again = fault == "recomputation" and wrong
        extra(fault, batch, wrong=wrong)
        loss = model(batch).square().mean()
        if fault == "item" and wrong:
            _ = [weights.flatten()[0].item() for weights in inner.parameters()]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
