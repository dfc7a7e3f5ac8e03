"""Small programs to record: python small.py NAME DEVICE"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

STEPS = 12


def train(
    model: nn.Module,
    loss_of: Callable[[], torch.Tensor],
    *,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Twelve plain steps, each with a line on standard output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        print(f"step {step}   loss {loss.item():.3f}")


def train_cnn(device: str) -> None:
    """A convolutional network with automatic mixed precision; on a GPU in half precision, with a
    scaler.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
    images, labels = torch.randn(16, 3, 32, 32, device=device), torch.arange(16, device=device) % 10
    for step in range(STEPS):
        with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
            loss = functional.cross_entropy(model(images).float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"step {step}   loss {loss.item():.2f}")


def train_lstm(device: str) -> None:
    """A recurrent network over sequences."""
    model, head = (
        nn.LSTM(32, 64, num_layers=2, batch_first=True).to(device),
        nn.Linear(64, 1).to(device),
    )
    sequences = torch.randn(8, 24, 32, device=device)
    train(
        nn.ModuleList([model, head]),
        lambda: (head(model(sequences)[0]).mean(dim=1) - 1).square().mean(),
    )


def train_and_fail(device: str) -> None:
    """Training that writes to both streams and ends with exit code 3."""
    model, rows = nn.Linear(256, 256).to(device), torch.randn(256, 256, device=device)
    train(
        model,
        lambda: model(rows).square().mean(),
        after=lambda: print("a step has ended", file=sys.stderr),
    )
    print("giving up", file=sys.stderr)
    sys.exit(3)


def train_profiled(device: str) -> None:
    """Training that profiles steps 4 and 5 itself, and says how many products its own profile
    holds.
    """
    model, rows = nn.Linear(256, 256).to(device), torch.randn(256, 256, device=device)
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=3, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda one: print(
            sum(row.count for row in one.key_averages() if row.key == "aten::addmm")
        ),
    )
    with profiler:
        train(model, lambda: model(rows).square().mean(), after=profiler.step)


def infer(device: str) -> None:
    """Inference without gradients: no optimizer, no steps."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).to(device).eval()
    tokens = torch.randn(4, 32, 64, device=device)
    with torch.inference_mode():
        for number in range(20):
            tokens = layer(tokens)
            print(f"batch {number}   {tokens.abs().mean().item():.4f}")


PROGRAMS = {
    "cnn": train_cnn,
    "lstm": train_lstm,
    "fail": train_and_fail,
    "profiled": train_profiled,
    "inference": infer,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    PROGRAMS[sys.argv[1]](sys.argv[2])
