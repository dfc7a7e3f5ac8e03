"""The example as tests run it: a model so small that its steps take next to no time."""

from __future__ import annotations

from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
ENDLESS = [
    "--layers",
    "1",
    "--width",
    "32",
    "--heads",
    "2",
    "--batch",
    "2",
    "--context",
    "32",
    "--workers",
    "0",
    "--accumulate",
    "1",
    "--steps",
    "1000000",
]
"""Its arguments; it runs until it is ended."""
PACED = f"""
import runpy, select
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: select.select([], [], [], 0.02))
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""
"""A program that runs it and rests after each step, so that it does not keep a processor busy until it is ended; libfaketime leaves `select` alone."""
