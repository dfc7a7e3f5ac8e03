"""A small program for a GPU, to be recorded there: two streams that wait for each other, pinned copies, a CUDA graph.

Its traces are the fixtures in tests/data/cuda: `traceloom record -o DIR --graph --steps 2..4 -- python tests/support/gpu_program.py`.
"""

from __future__ import annotations

import torch
from torch import nn

import traceloom

WIDTH = 256
ROWS = 512


def main() -> None:
    """Five steps."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(
        device, torch.bfloat16
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    side = torch.cuda.Stream()
    copied, computed = torch.cuda.Event(), torch.cuda.Event()
    batches = [torch.randn(ROWS, WIDTH).bfloat16().pin_memory() for _ in range(2)]
    static = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        evaluated = model(static)
    for step in range(5):
        with torch.cuda.stream(side):
            batch = batches[step % 2].to(device, non_blocking=True)
            copied.record(side)
        torch.cuda.current_stream().wait_event(copied)
        batch.record_stream(torch.cuda.current_stream())
        with traceloom.scope("train"):
            loss = model(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        computed.record()
        with torch.cuda.stream(side):
            side.wait_event(computed)
            weights = model[0].weight.detach().float().norm()
        graph.replay()
        print(
            f"step {step}   loss {loss.item():.4f}   norm {weights.item():.3f}   {evaluated.float().mean().item():.4f}"
        )
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
