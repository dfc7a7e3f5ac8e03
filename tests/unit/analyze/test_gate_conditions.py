"""What may stand after --fail-if."""

from __future__ import annotations

import pytest

from traceloom.analyze.gate import parse
from traceloom.errors import UsageError


@pytest.mark.parametrize(
    ("text", "metric", "chosen", "above", "limit", "relative"),
    [
        ("step_time > 3%", "step_time", "", True, 0.03, True),
        ("step_time>2.5 ms", "step_time", "", True, 2.5e6, False),
        ("kernel:gemm > 5%", "kernel", "gemm", True, 0.05, True),
        ("kernel:a<b > 1us", "kernel", "a<b", True, 1e3, False),
        ("memory_peak > 100MB", "memory_peak", "", True, 1e8, False),
        ("memory_peak > 1GiB", "memory_peak", "", True, 2.0**30, False),
        ("launches > 0", "launches", "", True, 0, False),
        ("gpu_time < -10%", "gpu_time", "", False, -0.1, True),
        ("op:^aten::mm$ > +1s", "op", "^aten::mm$", True, 1e9, False),
        ("  kind:gemm  <  .5 % ", "kind", "gemm", False, 0.005, True),
        ("op_gpu:[<>]+ > 7ns", "op_gpu", "[<>]+", True, 7, False),
        ("idle > 2µs", "idle", "", True, 2e3, False),
        ("exposed_communication > 0.25ms", "exposed_communication", "", True, 2.5e5, False),
        ("memory_peak < 3 MiB", "memory_peak", "", False, 3 * 2.0**20, False),
    ],
)
def test_conditions_are_read(
    text: str, metric: str, chosen: str, above: bool, limit: float, relative: bool
) -> None:
    found = parse(text)
    assert (found.metric, found.chosen, found.above, found.relative) == (
        metric,
        chosen,
        above,
        relative,
    )
    assert found.limit == pytest.approx(limit)
    assert found.statistic == "mean"


def test_another_statistic_is_read() -> None:
    assert parse("p10(step_time) > 2%").statistic == "p10"
    found = parse("p95(kernel:gemm) > 5%")
    assert (found.statistic, found.metric, found.chosen, found.name) == (
        "p95",
        "kernel",
        "gemm",
        "p95(kernel:gemm)",
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step_time",
        "step_time = 3%",
        "step_time > three",
        "step_time > 3",
        "step_time > 3MB",
        "memory_peak > 2ms",
        "launches > 2ms",
        "steptime > 3%",
        "step_time:x > 3%",
        "kernel > 3%",
        "kernel: > 3%",
        "kernel:( > 3%",
        "max(step_time) > 3%",
        "step_time > 1.2.3%",
        "x" * 1000 + " > 3%",
        "step_time > " + "9" * 400 + "%",
        "step_time > " + "9" * 400 + "ms",
        "p0(step_time) > 3%",
        "p100(step_time) > 3%",
        "step_time > %",
        "step_time >> 3%",
        "> 3%",
        "kind:  > 3%",
        "launches > -",
        "step_time > 3 m s",
    ],
)
def test_what_is_no_condition_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(text)
    assert error.value.slug == "bad-condition"
    assert "step_time > 3%" in error.value.hint
