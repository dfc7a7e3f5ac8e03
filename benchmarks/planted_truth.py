"""Made jobs drawn at random: how far the answers of their graphs are from the truth.

    python benchmarks/planted_truth.py [JOBS] [FIRST]

Every third job is a parallel one (tensor, pipeline, data; programmatic launches, graphs). Prints
the answers that are more than 2 % off, and how the others are spread.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np

from traceloom.graph import ABSENT, Plan, calibrate
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.jobs import Change, Clock, ParallelRecipe, Recipe, changed, parallel_job, training_job
from support.jobs.training import DELAY, SYNC

ALLOWED = 0.02


def recipe(seed: int) -> Recipe:
    """A job drawn at random."""
    chance = random.Random(seed)
    ranks = chance.choice([1, 1, 1, 2, 3, 4])
    sharded = ranks > 1 and chance.random() < 0.3
    far = Clock("host1", chance.randrange(-(10**7), 10**7), chance.choice([0, 0, 1e-5]))
    return Recipe(
        steps=chance.choice([2, 3, 4]),
        layers=chance.choice([4, 8, 12]),
        kernel_us=chance.choice([5, 15, 25, 40, 80, 200]),
        op_us=chance.choice([6, 10, 20, 40]),
        think_us=chance.choice([10, 60, 300]),
        item=chance.random() < 0.4,
        sync=chance.choice(["", "", "device", "stream", "event"]),
        pageable_input=chance.random() < 0.3,
        side_stream=chance.random() < 0.4,
        autograd=chance.random() < 0.5,
        ranks=ranks,
        transfer_us=chance.choice([20, 80, 200, 500]),
        sharded=sharded,
        pipeline=ranks > 1 and not sharded and chance.random() < 0.4,
        delay_us={chance.randrange(ranks): chance.choice([300.0, 1500.0, 5000.0])}
        if chance.random() < 0.5
        else {},
        clocks=dict.fromkeys(range(2, ranks), far),
        spread=chance.choice([0.05, 0.15, 0.3]),
        seed=seed,
    )


def parallel_recipe(seed: int) -> ParallelRecipe:
    """A parallel job drawn at random."""
    chance = random.Random(seed)
    tensor, pipeline, data = chance.choice(
        [(1, 1, 1), (1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 3)]
    )
    return ParallelRecipe(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        steps=chance.choice([2, 3]),
        layers=chance.choice([2, 3, 5]),
        microbatches=chance.choice([1, 2, 4]) if pipeline > 1 else 1,
        schedule=chance.choice(["1f1b", "gpipe"]),
        sharded=data > 1 and chance.random() < 0.4,
        kernel_us=chance.choice([4, 10, 25, 60, 150]),
        op_us=chance.choice([4, 8, 14]),
        think_us=chance.choice([10, 40, 200]),
        transfer_us=chance.choice([20, 60, 200]),
        item=chance.random() < 0.5,
        autograd=chance.random() < 0.5,
        programmatic=chance.random() < 0.7,
        graphs=chance.random() < 0.3,
        stacks=chance.random() < 0.2,
        spread=chance.choice([0.05, 0.15, 0.3]),
        seed=seed,
    )


def changes(made: Recipe | ParallelRecipe) -> dict[str, Change]:
    """What can be asked of it."""
    asked = {
        "kernels x 0.5": Change(kernels=0.5),
        "kernels x 2": Change(kernels=2),
        "host x 0.7": Change(host=0.7),
        "host x 1.5": Change(host=1.5),
    }
    if isinstance(made, ParallelRecipe):
        return asked | {"collectives x 0.5": Change(collectives=0.5)}
    asked |= {"collectives x 0.5": Change(collectives=0.5)} if made.ranks > 1 else {}
    asked |= {"without synchronisation": Change(without=frozenset({SYNC}))} if made.sync else {}
    return asked | ({"without delay": Change(without=frozenset({DELAY}))} if made.delay_us else {})


def main(jobs: int = 100, first: int = 0) -> None:
    """Ask every job everything."""
    errors = []
    for seed in range(first, first + jobs):
        parallel = seed % 3 == 2
        made = parallel_recipe(seed) if parallel else recipe(seed)
        job = parallel_job(made) if isinstance(made, ParallelRecipe) else training_job(made)
        traces = job.run().traces(sync_records=seed % 2 == 0)
        graph = calibrate(join_ranks([link_rank(builder.build()) for builder in traces]))
        plan = Plan(graph)
        for what, change in changes(made).items():
            times = plan.evaluate(*changed(graph, change, ABSENT))
            true = job.run(change).window_ns
            errors.append(abs((times.max() - times.min()) / true - 1))
            if errors[-1] > ALLOWED:
                print(f"{errors[-1]:6.2%}  {true / 1e6:8.2f} ms  {what:24} {made}", flush=True)
    spread = ", ".join(
        f"{share} % within {np.percentile(errors, share):.2%}" for share in (50, 90, 99, 100)
    )
    print(
        f"{jobs} jobs, {len(errors)} answers, {sum(e > ALLOWED for e in errors)} over 2 %; {spread}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
