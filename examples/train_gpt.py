"""Train a small GPT on text it makes itself: something real to record.

python examples/train_gpt.py
torchrun --nproc-per-node 2 examples/train_gpt.py

traceloom record -- torchrun --nproc-per-node 2 examples/train_gpt.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SUBJECTS = [
    "the loom",
    "a weaver",
    "the thread",
    "one machine",
    "my neighbor",
    "the last rank",
    "a small kernel",
]
VERBS = ["pulls", "follows", "waits for", "overtakes", "repeats", "remembers", "drops"]
OBJECTS = [
    "the red yarn",
    "a second stream",
    "the pattern",
    "every gradient",
    "its own shadow",
    "the host",
]
ENDINGS = [
    "in the morning",
    "without a sound",
    "again and again",
    "before the step ends",
    "on time",
]


def make_text(sentences: int, seed: int) -> str:
    """Sentences of a small grammar: enough structure for a loss that goes down."""
    pick = random.Random(seed)
    lines = []
    for _ in range(sentences):
        words = [pick.choice(SUBJECTS), pick.choice(VERBS), pick.choice(OBJECTS)]
        if pick.random() < 0.5:
            words.append(pick.choice(ENDINGS))
        lines.append(" ".join(words).capitalize() + ".")
    return "\n".join(lines)


class Characters(Dataset):
    """Windows of a text: each item is a sequence of characters and the same one shifted by one."""

    def __init__(self, text: str, context: int) -> None:
        self.alphabet = sorted(set(text))
        index = {letter: at for at, letter in enumerate(self.alphabet)}
        self.codes = torch.tensor([index[letter] for letter in text])
        self.context = context

    def __len__(self) -> int:
        return len(self.codes) - self.context - 1

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.codes[at : at + self.context + 1]
        return window[:-1], window[1:]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        query, key, value = (
            part.view(split).transpose(1, 2) for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer network, each with a norm before and a path around."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer over characters."""

    def __init__(self, letters: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(letters, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on text it makes itself.")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps (default: 12)")
    parser.add_argument(
        "--accumulate", type=int, default=2, help="batches per optimizer step (default: 2)"
    )
    parser.add_argument(
        "--batch", type=int, default=8, help="sequences per batch and rank (default: 8)"
    )
    parser.add_argument(
        "--context", type=int, default=128, help="characters per sequence (default: 128)"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument(
        "--workers", type=int, default=2, help="processes that load data, per rank (default: 2)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where (default: cuda with a GPU for each rank here)",
    )
    parser.add_argument("--compile", action="store_true", help="compile the model")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    distributed = "RANK" in os.environ
    torch.manual_seed(arguments.seed)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    kind = arguments.device or ("cuda" if torch.cuda.device_count() >= ranks_here else "cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank = dist.get_rank() if distributed else 0

    data = Characters(make_text(4000, arguments.seed), arguments.context)
    sampler = DistributedSampler(data, seed=arguments.seed) if distributed else None
    loader = DataLoader(
        data,
        batch_size=arguments.batch,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=arguments.workers,
        drop_last=True,
        pin_memory=kind == "cuda",
    )
    model: nn.Module = GPT(
        len(data.alphabet), arguments.context, arguments.layers, arguments.width, arguments.heads
    )
    model.to(device)
    if arguments.compile:
        model.compile()
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    batches = iter(loader)
    for step in range(arguments.steps):
        started = time.perf_counter()
        total = 0.0
        for part in range(arguments.accumulate):
            tokens, targets = (batch.to(device, non_blocking=True) for batch in next(batches))
            last = part == arguments.accumulate - 1
            # Gradients are exchanged once per step, with the last of its batches.
            exchange = contextlib.nullcontext() if last or not distributed else model.no_sync()
            with exchange:
                logits = model(tokens)
                loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
                (loss / arguments.accumulate).backward()
            total += loss.item() / arguments.accumulate
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(
                f"step {step:3d}   loss {total:.3f}   {1000 * (time.perf_counter() - started):6.0f} ms",
                flush=True,
            )
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
