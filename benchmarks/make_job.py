"""Write the traces of a made job of many ranks: 64 of about 20 MB of JSON each, where nothing else
is asked for.

    python benchmarks/make_job.py FOLDER [--ranks 64] [--megabytes 20]

Rank 17 is slow by 30 %, and in step 2 the host of rank 42 waits 6 ms for data.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.jobs import LateHost, ParallelRecipe, SlowRank, parallel_job

_MEGABYTES_PER_LAYER = 0.054  # of JSON, of one layer in one microbatch, measured


def recipe(ranks: int, megabytes: float) -> ParallelRecipe:
    """A job of this many ranks, whose traces are about this large each."""
    tensor = pipeline = 1
    while tensor * pipeline * 2 <= ranks**0.67 and ranks % (tensor * pipeline * 2) == 0:
        tensor, pipeline = (tensor * 2, pipeline) if tensor <= pipeline else (tensor, pipeline * 2)
    steps, microbatches = 4, max(2 * pipeline, 4)
    layers = max(round(megabytes / _MEGABYTES_PER_LAYER / _passes(steps, microbatches)), 1)
    faults = (SlowRank(17 % ranks, 1.3), LateHost(42 % ranks, 6000, steps=(2,)))
    return ParallelRecipe(
        data=ranks // tensor // pipeline,
        tensor=tensor,
        pipeline=pipeline,
        steps=steps,
        layers=layers,
        microbatches=microbatches,
        stacks=True,
        faults=faults,
        clocks={1: (2_000_000, 1e-6), 5: (-700_000, 0.0)},
    )


def _passes(steps: int, microbatches: int) -> int:
    return steps * microbatches


def main() -> None:
    """Make the job and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--megabytes", type=float, default=20)
    asked = parser.parse_args()
    began = time.perf_counter()
    made = recipe(asked.ranks, asked.megabytes)
    run = parallel_job(made).run()
    print(
        f"{asked.ranks} ranks: {made.data} data x {made.tensor} tensor x {made.pipeline} pipeline, {made.layers} layers"
    )
    run.write(asked.folder)
    size = sum(path.stat().st_size for path in asked.folder.glob("*.kineto.json.gz")) / 1e6
    print(
        f"wrote {len(run.spans):,} spans, {size:.0f} MB compressed, in {time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
