"""Print how well 8 shown ranks tell the step of 64: `PYTHONPATH=src:tests python
scripts/scale_truth.py [SEEDS]`.
"""

from __future__ import annotations

import sys

import numpy as np

from support.scaled import JOBS_OF_64, compared


def main(seeds: int) -> None:
    """One row per job, as soon as it is known."""
    print(
        f"{'job of 64 ranks, 8 shown':36} {'median error':>12} {'largest':>8} {'in P10-P90':>10} {'width':>7}"
    )
    for name in JOBS_OF_64:
        rows = [compared(name, seed) for seed in range(seeds)]
        errors = np.array([row.error for row in rows])
        width = np.mean(
            [(row.answer.p90_ns - row.answer.p10_ns) / row.answer.after_ns for row in rows]
        )
        held = f"{sum(row.held for row in rows)} of {seeds}"
        largest = errors[np.abs(errors).argmax()]
        print(
            f"{name:36} {np.median(errors):>+11.2%}  {largest:>+7.2%} {held:>10} {width:>7.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
