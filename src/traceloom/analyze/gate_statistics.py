"""Bootstrap intervals: over runs and their steps, or over blocks of the steps of one run.

A side of a comparison is a list of samples, one per run. The `estimate_...` functions resample both
sides and return the value of each side in each draw; `compute_interval` reads the 95 % interval of
any difference of the two from them.

Sources: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 8 and 13; Davison
and Hinkley, Bootstrap Methods and their Application (1997), section 3.8 (samples in groups);
Politis and Romano (1992), circular blocks; Politis and White (2004, corrected by Patton, Politis
and White 2009), length of the blocks; Hesterberg (2015), What Teachers Should Know About the
Bootstrap, section 5 (why small samples need wider intervals); Bayley and Hammersley (1946), The
Effective Number of Independent Observations (of which a variance has more than a mean).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from traceloom.trace.array_types import Floats

Statistic = Callable[[Floats], Floats]  # along the last axis

DRAW_COUNT = 4_000
SEED = 20_240_229
CONFIDENCE_LEVEL = 0.95
# Half-width of the interval of a normal value, in standard deviations
_NORMAL_HALF_WIDTH = 1.959963984540054
_MAX_CELLS = 1 << 22  # of steps drawn at once, to bound the memory


def get_statistic(name: str) -> Statistic:
    """Returns the statistic over the steps of a run: `mean`, `median`, or a percentile as `p95`."""
    if name == "mean":
        return lambda values: np.asarray(values.mean(axis=-1))
    percentile = 50 if name == "median" else int(name[1:])
    return lambda values: np.asarray(np.percentile(values, percentile, axis=-1))


class Resampled(Struct, frozen=True):
    """Both sides, resampled.

    Attributes:
        base: Value of the base in each draw. Shape (draws,).
        new: Of the new run.
        freedom: Degrees of freedom of the noise.
        effect: Difference of the sides in standard deviations of a sample (Cohen's d); None without
            any noise.
        scatter: Standard deviation of a run, as a fraction of its side's value; None where it is
            unknown.
    """

    base: Floats
    new: Floats
    freedom: float
    effect: float | None
    scatter: float | None = None


def estimate_from_runs(
    base: Sequence[Floats], new: Sequence[Floats], statistic: Statistic
) -> Resampled:
    """Resamples runs, then blocks of their steps.

    Runs of both sides are assumed to scatter alike, relative to their side's value, so that one run
    on a side is enough where the other has several. The draws are scaled to the scatter of the
    runs, without bias, and never below the uncertainty from the steps of a run alone.

    Args:
        base: Steps of each run, ns or bytes or a count; each shape (steps,). At least three runs
            together.
        new: The same.
        statistic: The statistic over the steps of a run.
    """
    generator = np.random.default_rng(SEED)
    runs = [*base, *new]
    values = np.array([float(statistic(run)) for run in runs])
    counts = (len(base), len(new))
    centre = np.array([values[: counts[0]].mean(), values[counts[0] :].mean()])
    run_centres = centre[np.repeat([0, 1], counts)]
    freedom = float(len(runs) - 2)
    scatter = _divide_by_centre(values, run_centres) - 1
    variance = float((scatter**2).sum()) / freedom
    # Each run again from its own steps, relative to its side.
    draws = np.stack(
        [
            _divide_by_centre(_draw_step_values(generator, run, statistic), run_centre)
            for run, run_centre in zip(runs, run_centres, strict=True)
        ]
    )
    within = draws - _divide_by_centre(values, run_centres)[:, None]
    floor = float((within**2).mean())
    spread = float(scatter.var()) + floor
    scale = math.sqrt(max(variance, floor) / spread) if spread > 0 else 0.0
    sides = []
    for side, count in enumerate(counts):
        run = generator.integers(len(runs), size=(DRAW_COUNT, count))
        draw = generator.integers(DRAW_COUNT, size=(DRAW_COUNT, count))
        sides.append(
            centre[side] * (1 + scale * (draws[run, draw] - 1 - scatter.mean()).mean(axis=1))
        )
    deviation = math.sqrt(max(variance, floor))
    effect = _compute_effect(centre, deviation * abs(float(centre[0])))
    # What the steps say of a run is known better than what few runs say.
    if 0 < variance < floor:
        known = sum(count_independent_steps(run) - 1 for run in runs)
        freedom = max(freedom, min(freedom * floor / variance, known))
    return Resampled(sides[0], sides[1], freedom, effect, math.sqrt(variance))


def estimate_from_pairs(
    base: Sequence[Floats], new: Sequence[Floats], statistic: Statistic
) -> Resampled:
    """Resamples pairs of runs, one of each side, that were made one after the other.

    What both runs of a pair have in common (the machine at that hour) cancels; the remainder
    scatters from pair to pair. It is never assumed to be less than the uncertainty from the steps
    of the two runs.

    Args:
        base: Steps of each run; each shape (steps,). At least two runs.
        new: The same; its runs are those of the base's pairs, in their order.
        statistic: The statistic over the steps of a run.
    """
    generator = np.random.default_rng(SEED)
    values = np.array([[float(statistic(run)) for run in side] for side in (base, new)])
    centre = values.mean(axis=1)
    ratio = _divide_by_centre(values[1], values[0])
    deviations = _divide_by_centre(ratio, ratio.mean()) - 1
    freedom = len(base) - 1
    variance = float((deviations**2).sum()) / freedom
    runs = zip((*base, *new), values.ravel(), strict=True)
    within = [
        _divide_by_centre(_draw_step_values(generator, run, statistic), run_centre) - 1
        for run, run_centre in runs
    ]
    floor = 2 * float(np.mean(np.square(within)))
    spread = float(deviations.var())
    scale = math.sqrt(max(variance, floor) / spread) if spread > 0 else 0.0
    pair = generator.integers(len(base), size=(DRAW_COUNT, len(base)))
    new_draws = centre[1] * (1 + scale * deviations[pair].mean(axis=1))
    effect = _compute_effect(centre, math.sqrt(max(variance, floor)) * abs(float(centre[0])))
    return Resampled(
        np.full(DRAW_COUNT, centre[0]), new_draws, freedom, effect, math.sqrt(variance)
    )


def estimate_within_runs(base: Floats, new: Floats, statistic: Statistic) -> Resampled:
    """Resamples blocks of steps of one run per side. Does not cover differences from run to run.

    Args:
        base: The steps of the run. Shape (steps,), at least two.
        new: The same.
        statistic: The statistic over them.
    """
    generator = np.random.default_rng(SEED)
    draws, variances, freedoms = [], [], []
    for steps in (base, new):
        blocks = max(steps.size / choose_block_length(steps), 2.0)
        value = float(statistic(steps))
        step_draws = _draw_step_values(generator, steps, statistic)
        # The scatter of a sample has one degree of freedom less than it has blocks, and that of a
        # mean is at least that of so many independent steps: blocks of few steps miss the rest.
        independent = count_independent_steps(steps)
        least = math.sqrt(float(steps.var(ddof=1)) / (independent - 1))
        deviation = _draw_step_values(generator, steps, get_statistic("mean")).std()
        scale = max(math.sqrt(blocks / (blocks - 1)), least / max(float(deviation), 1e-300))
        step_draws = value + (step_draws - value) * scale
        draws.append(step_draws)
        variances.append(float(step_draws.var()))
        # A variance is known better than a mean: by as many steps as squares are independent.
        freedoms.append(2 * independent / (1 + (independent / steps.size) ** 2) - 1)
    total = sum(variances)
    parts = sum(
        variance**2 / freedom for variance, freedom in zip(variances, freedoms, strict=True)
    )
    freedom = total**2 / parts if parts > 0 else sum(freedoms)  # Welch and Satterthwaite
    centre = np.array([float(statistic(base)), float(statistic(new))])
    effect = _compute_effect(centre, math.sqrt((base.var(ddof=1) + new.var(ddof=1)) / 2))
    return Resampled(draws[0], draws[1], freedom, effect)


def compute_interval(draws: Floats, value: float, freedom: float) -> tuple[float, float]:
    """Returns the 95 % interval of a value from its draws, widened for small samples.

    The distances of the percentiles from the value are stretched by the ratio of Student's to the
    normal quantile.
    """
    tail = (1 - CONFIDENCE_LEVEL) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    factor = compute_student_t_quantile(freedom) / _NORMAL_HALF_WIDTH
    return value - factor * max(value - float(low), 0.0), value + factor * max(
        float(high) - value, 0.0
    )


def choose_block_length(steps: Floats) -> int:
    """Returns a block length with which steps in different blocks are nearly independent (Politis
    and White, circular).

    At least 1 and at most a quarter of the steps (at least 1).
    """
    count = steps.size
    centred = steps - steps.mean()
    power = float((centred**2).mean())
    if count < 8 or power <= 0:
        return 1
    max_lag = min(count - 1, int(math.sqrt(count)) + max(5, int(math.log10(count))))
    covariance = np.array(
        [
            float((centred[lag:] * centred[: count - lag]).sum()) / count
            for lag in range(max_lag + 1)
        ]
    )
    small = np.abs(covariance / power) < 2 * math.sqrt(math.log10(count) / count)
    run = max(5, int(math.sqrt(math.log10(count))))
    quiet = (lag for lag in range(1, max_lag + 1) if small[lag : lag + run].all())
    reach = min(2 * max(next(quiet, max_lag) - 1, 1), max_lag)
    lags = np.arange(-reach, reach + 1)
    taper = np.clip(2 * (1 - np.abs(lags) / reach), 0, 1)  # the flat-top window
    weighted = taper * covariance[np.abs(lags)]
    slope, level = float((weighted * np.abs(lags)).sum()), float(weighted.sum())
    if level <= 0:
        return 1
    length = (2 * slope**2 / (4 / 3 * level**2)) ** (1 / 3) * count ** (1 / 3)
    return int(min(max(math.ceil(length), 1), max(count // 4, 1)))


def count_independent_steps(steps: Floats) -> float:
    """Returns how many independent steps would tell as much about the mean, by the correlation of
    neighbours, which short runs show too small (Kendall 1954); at least 2.
    """
    count = steps.size
    centred = steps - steps.mean()
    power = float((centred**2).sum())
    if count < _MIN_CORRELATED_STEPS or power <= 0:
        return max(float(count), 2.0)
    correlation = float((centred[1:] * centred[:-1]).sum()) / power
    correlation = min(max((count * correlation + 1) / (count - 4), 0.0), _MAX_CORRELATION)
    return max(count * (1 - correlation) / (1 + correlation), 2.0)


_MIN_CORRELATED_STEPS = 6  # fewer do not show whether neighbours are alike
_MAX_CORRELATION = 0.98
_STUDENT_T_QUANTILES = {
    1: 12.7062,
    2: 4.3027,
    3: 3.1824,
    4: 2.7764,
    5: 2.5706,
    6: 2.4469,
    7: 2.3646,
    8: 2.3060,
    10: 2.2281,
    12: 2.1788,
    15: 2.1314,
    20: 2.0860,
    30: 2.0423,
    60: 2.0003,
    120: 1.9799,
    math.inf: _NORMAL_HALF_WIDTH,
}


def compute_student_t_quantile(freedom: float) -> float:
    """Returns the 97.5 % quantile of Student's distribution, from 1 degree of freedom on;
    interpolated to 0.5 %.
    """
    inverses = sorted(1 / degrees for degrees in _STUDENT_T_QUANTILES)
    logs = [
        math.log(_STUDENT_T_QUANTILES[degrees])
        for degrees in sorted(_STUDENT_T_QUANTILES, reverse=True)
    ]
    return math.exp(float(np.interp(1 / max(freedom, 1.0), inverses, logs)))


def _draw_step_values(
    generator: np.random.Generator, steps: Floats, statistic: Statistic
) -> Floats:
    """Returns the value of a run whose steps are resampled in circular blocks. Shape (draws,)."""
    length = choose_block_length(steps)
    blocks = -(-steps.size // length)
    rows = max(_MAX_CELLS // (blocks * length), 1)
    parts = []
    for first in range(0, DRAW_COUNT, rows):
        start = generator.integers(steps.size, size=(min(rows, DRAW_COUNT - first), blocks, 1))
        positions = (start + np.arange(length)) % steps.size
        parts.append(statistic(steps[positions.reshape(positions.shape[0], -1)[:, : steps.size]]))
    return np.concatenate(parts)


def _divide_by_centre(values: Floats, centre: Floats | float) -> Floats:
    """Returns values relative to a centre; 1 where the centre is 0."""
    centre = np.asarray(centre, dtype=np.float64)
    return np.divide(values, centre, out=np.ones(np.shape(values)), where=centre != 0)


def _compute_effect(centre: Floats, deviation: float) -> float | None:
    return float(centre[1] - centre[0]) / deviation if deviation > 0 else None
