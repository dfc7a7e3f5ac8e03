"""Options of `traceloom replay` about the run: where, how long, at which pace, with which ranks and devices."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from traceloom.cli import options as types

if TYPE_CHECKING:
    from traceloom.replay.running import RunOptions

_MAX_TIME_S, _TIMEOUT_S = 60.0, 300.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    how = parser.add_argument_group("how it is run")
    how.add_argument(
        "--device", choices=("cpu", "cuda", "xpu"), help="where (default: as recorded where there is one, else cpu)"
    )
    how.add_argument(
        "--pace", choices=("fast", "recorded"), default="fast",
        help="fast (default): one op after the other; recorded: with the gaps that the host left between them",
    )  # fmt: skip
    how.add_argument(
        "--threads", choices=("one", "recorded"), default="one",
        help="one thread calls all ops (default), or as many as recorded, which wait for each other where they must",
    )  # fmt: skip
    how.add_argument(
        "--iterations", type=types.count, metavar="N", help="passes (default: until the median is known to 2 %%)"
    )
    how.add_argument(
        "--max-time", type=types.positive, default=_MAX_TIME_S, metavar="S", help="no pass begins later (default: 60 s)"
    )
    how.add_argument(
        "--timeout", type=types.positive, default=_TIMEOUT_S, metavar="S",
        help="how long a collective may take (default: 300 s)",
    )  # fmt: skip
    how.add_argument("--memory-limit", type=types.size, metavar="SIZE", help="what the tensors of a rank may take")
    how.add_argument("--seed", type=types.whole, default=0, metavar="N", help="of random contents (default: 0)")
    how.add_argument("--backend", metavar="NAME", help="of torch.distributed (default: gloo, on GPUs nccl)")
    how.add_argument(
        "--stand-ins", action="store_true", help="what cannot be run takes its recorded time; else it takes none"
    )
    how.add_argument(
        "--record", metavar="DIR",
        help="record some further passes: a capture that `traceloom diff` and `traceloom report` take",
    )  # fmt: skip
    how.add_argument("--strict", action="store_true", help="stop at the first op that fails")
    how.add_argument(
        "--trust", action="store_true",
        help="execute the sources of compiled kernels, which were recorded beside the trace: code of whoever made it",
    )  # fmt: skip
    how.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="a Python module that brings custom ops (may be repeated)",
    )  # fmt: skip


def is_follower() -> bool:
    """Whether this is one of torchrun's processes other than the first, which alone prints and writes."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def run_options(args: argparse.Namespace) -> RunOptions:
    """What the user wants."""
    from traceloom.replay import RunOptions

    return RunOptions(
        device=args.device, pace=args.pace, iterations=args.iterations, max_time_s=args.max_time,
        timeout_s=args.timeout, memory_limit=args.memory_limit, seed=args.seed, backend=args.backend, ranks=args.ranks,
        stand_ins=args.stand_ins, strict=args.strict, threads=args.threads, imports=tuple(args.imports),
        trust=args.trust,
        record=None if args.record is None else str(Path(args.record).resolve()), force=args.force,
    )  # fmt: skip
