"""Where the host runs ahead of the GPU, a step is what the device needs: of made runs in closed form, and given ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceloom import load
from traceloom.analyze import gpu_time, step_times
from traceloom.analyze.answer import answer
from traceloom.analyze.gate import judge, parse
from traceloom.analyze.gate_summary import summarise
from traceloom.analyze.inference import inference
from traceloom.report import ReportOptions, build
from traceloom.testing.known_runs import build_run_ahead
from traceloom.trace.session import Session

SEEDS = range(24)


def session(seed: int, slower: float = 1.0) -> Session:
    return Session((build_run_ahead(seed, slower).builder.build(),), f"run {seed}")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_takes_its_period_on_the_device(seed: int) -> None:
    known = build_run_ahead(seed)
    trace = known.builder.build()
    times = step_times(trace)
    assert times.clock == "device"
    assert times.steps["device_period_ns"].to_list() == known.periods_ns
    assert times.steps["duration_ns"].to_list()[:-1] == known.host_ns[:-1]
    assert times.median_ns == known.step_ns
    steps = gpu_time(trace).steps.drop_nulls("step")
    assert steps["busy_ns"].sum() == known.busy_ns
    assert steps["duration_ns"].to_list() == known.periods_ns


@pytest.mark.parametrize("seed", SEEDS)
def test_sentence_and_rates_are_of_the_device(seed: int) -> None:
    known = build_run_ahead(seed)
    run = session(seed)
    told = answer(run)
    assert told.step_ns == known.step_ns
    assert told.whole_ns == sum(known.periods_ns)
    assert "on the GPU (the host runs ahead" in told.sentence
    (rate,) = inference(run, tokens_per_step=1000).rates.to_dicts()
    assert rate["window_ns"] == sum(known.periods_ns)
    assert rate["count"] == 1000 * len(known.periods_ns)


@pytest.mark.parametrize("seed", list(SEEDS)[:6])
def test_the_gate_passes_no_run_whose_kernels_take_twice_as_long(seed: int) -> None:
    base, new = (summarise(session(seed, slower)) for slower in (1.0, 2.0))
    assert judge([base], [new], [parse("step_time > 3%")]).verdict != "pass"


@pytest.mark.parametrize(
    ("name", "step_ns"),
    [
        ("failing/01_host_runs_ahead.json", 10_000_000),
        ("failing/01_host_runs_ahead_kernels_twice.json", 20_000_000),
        ("failing/host_ahead", 6_950_000),
        ("kineto/rtx3060_runs_ahead_06.json.gz", 170_000_000),
    ],
)
def test_given_recordings_have_the_steps_that_were_counted(
    shared_data: Path, name: str, step_ns: int
) -> None:
    assert answer(load(shared_data / name)).step_ns == pytest.approx(step_ns, rel=2e-3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", SEEDS)
def test_savings_are_shares_of_the_period_of_a_step(seed: int) -> None:
    known = build_run_ahead(seed)
    document = build(session(seed), ReportOptions())
    ground = document["findings_ground"]
    assert ground is not None
    assert ground["step"] is not None
    if ground["step"] > 1:  # the first begins with its launches
        assert ground["whole_ns"] == known.periods_ns[ground["step"] - 1]
        assert "from the end of earlier work to the end of its last work" in ground["basis"]
